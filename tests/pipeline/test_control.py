"""Videos steered by control videos: latents equal `WanVACEPipeline`'s, and jobs resume after kills and failures."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline
from PIL import Image

from runtime.core.events import Failed, Paused, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.images import BoxMask, ImageUse, VideoUse
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.control import with_control
from runtime.models.control_frames import control_frames
from runtime.models.requested import with_inputs
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.stages import control_clip
from runtime.planner.resolve import PlanningContext, resolve
from runtime.server.before_clips import make_before
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info, read_video
from tests.image_files import saved
from tests.pipeline.killing import killed
from tests.pipeline.test_from_video import Clip, final_latents, starve_encoding
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_resume import run, steps_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan, with_strategy
from tests.video.test_reader import H264, make


def decoded(path: Path) -> np.ndarray:
    """Return all frames of a video."""
    return np.concatenate([*read_video(read_info(path), 8)]).astype(int)


Tiny = Callable[[str], ModelSpec]
# A box that grows: black outside, white inside, and gray between.
_LUMA = "255*lt(X,8+4*N)*gt(Y,8)+90*between(X,8+4*N,20+4*N)"
_MASK = f"color=black:size=64x32:rate=8:duration=2,geq=lum='{_LUMA}':cb=128:cr=128"


def planned(spec: ModelSpec, folder: Path, *inputs: str, **values: Any) -> Clip:
    """Plan a tiny clip that is steered by files of these fields, of which copies are in the folder."""
    files: dict[str, Any] = {}
    if "control" in inputs:
        files["control"] = str(folder / "control.mp4")
        make(folder / "control.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=2"))
    if "mask" in inputs:
        files["mask"] = str(folder / "mask.mp4")
        make(folder / "mask.mp4", *H264, inputs=("-f", "lavfi", "-i", _MASK))
    if "still" in inputs:
        files["mask"] = str(folder / "mask.png")
        Image.linear_gradient("L").resize((64, 32)).save(folder / "mask.png")
    for field, luma in (("extend", "X*4"), ("join", "255-Y*8")):
        if field in inputs:
            files[field] = str(folder / f"{field}.mp4")
            source = f"color=gray:size=64x32:rate=8:duration=1,geq=lum='{luma}*(8-N)/8':cb=128+N*8:cr=128"
            make(folder / f"{field}.mp4", *H264, inputs=("-f", "lavfi", "-i", source))
    for field in ("image", "last_image"):
        if field in inputs:
            files[field] = str(saved(folder / f"{field}.png", 64, 40, turned=field == "last_image"))
    if "references" in inputs:
        files["references"] = [str(folder / "wide.png"), str(folder / "high.png")]
        Image.linear_gradient("L").convert("RGB").resize((93, 40)).save(folder / "wide.png")
        Image.radial_gradient("L").convert("RGB").resize((24, 72)).save(folder / "high.png")
    fields: dict[str, Any] = {"prompt": "a red boat", "negative_prompt": "blue ball", "width": 64, "height": 32}
    fields |= {"frames": 9, "steps": 3, "seed": 3, "fps": 8, "guidance_scale": 4.0}
    request = GenerationRequest.from_mapping(fields | files | values)
    spec = with_inputs(spec, request, folder, folder)
    return Clip(resolve(request, spec, PlanningContext(machine(), folder / "x.mp4")), spec)


def by_diffusers(clip: Clip) -> torch.Tensor:
    """Return the latents that `WanVACEPipeline` makes of a plan."""
    pipeline = WanVACEPipeline.from_pretrained(clip.spec.directory).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    plan, given = clip.plan, control_clip(clip.plan)
    scales = plan.control_scale
    latents: torch.Tensor = pipeline(
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        video=None if given.video is None else [Image.fromarray(frame.numpy()) for frame in given.video],
        mask=None if given.mask is None else [Image.fromarray(frame.numpy()) for frame in given.mask],
        reference_images=given.references or None,
        conditioning_scale=scales[0] if len(scales) == 1 else list(scales),
        height=plan.height,
        width=plan.width,
        num_frames=plan.frames,
        num_inference_steps=plan.steps,
        guidance_scale=plan.guidance_scale,
        guidance_scale_2=plan.guidance_scale_2,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type="latent",
    ).frames
    return latents


PATTERN = "testsrc=size"
# A continuation has the size and the rate of its video.
OF_CLIP: dict[str, Any] = dict.fromkeys(("width", "height", "fps"), "auto")


def assert_survives_pauses_and_a_kill(plan: ExecutionPlan, spec: ModelSpec, folder: Path, wanted: bytes) -> None:
    """Check that a made clip of 3 steps has the same frames after pauses in encoding and denoising, and after a kill.

    Args:
        wanted: the frames of the clip that the plan's output has.
    """
    plan.output.unlink()
    for stop in (
        lambda event: isinstance(event, StageStarted) and event.part == "vae_encoder",
        lambda event: isinstance(event, StepDone) and event.step == 1,
    ):
        assert isinstance(run(plan, spec, folder / "paused", stop=stop)[-1], Paused)
    events = run(plan, spec, folder / "paused")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted
    assert Resumed(step=1, of=3) in events and steps_of(events) == [2, 3]
    assert "vae_encoder" not in {event.part for event in events if isinstance(event, StageStarted)}
    plan.output.unlink()
    assert killed(spec, plan, folder / "killed", event="StepDone", count=2) == -9
    events = run(plan, spec, folder / "killed")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "control and mask": ("wan2.1-vace", ("control", "mask"), {}),
    "control and a mask that holds": ("wan2.1-vace", ("control", "still"), {}),
    "control and boxes": ("wan2.1-vace", ("control",), {"mask": "box:10,20,30,50+60,0,40,100", "guidance_scale": 1.0}),
    "outpaint": ("wan2.1-vace", ("control",), {"outpaint": [50, 0, 25, 100], "guidance_scale": 1.0}),
    "outpaint and mask": ("wan2.1-vace", ("control", "mask"), {"outpaint": 50, "guidance_scale": 1.0}),
    "first and last image, references": ("wan2.1-vace", ("image", "last_image", "references"), {"guidance_scale": 1.0}),
    "first image and control": ("wan2.1-vace", ("image", "control", "mask"), {"guidance_scale": 1.0}),
    "first clip": ("wan2.1-vace", ("extend",), {"extend_frames": 5, "guidance_scale": 1.0, **OF_CLIP}),
    "first and last clip": ("wan2.1-vace", ("extend", "join"), {"extend_frames": 3, "guidance_scale": 1.0, **OF_CLIP}),
    "experts, first and last clip": ("wan2.2-vace", ("extend", "join", "control"), {"extend_frames": 2, **OF_CLIP}),
    "scale": ("wan2.1-vace", ("control",), {"control_scale": 0.4, "guidance_scale": 1.0}),
    "scales": ("wan2.1-vace", ("control", "references"), {"control_scale": [1.5, 0.25]}),
    "experts": ("wan2.2-vace", ("control", "mask", "references"), {"guidance_scale_2": 2.5, "control_scale": [0.5, 2]}),
    "experts, text only": ("wan2.2-vace", (), {"guidance_scale_2": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_latents_equal_wan_vace_pipelines(case: str, tiny: Tiny, tmp_path: Path) -> None:
    architecture, inputs, values = CASES[case]
    clip = planned(tiny(architecture), tmp_path, *inputs, **values)
    wanted = by_diffusers(clip)
    made = final_latents(clip, tmp_path / "job")
    assert wanted.std() > 0.1 and made.shape == wanted.shape
    assert made.shape[2] == 3 + len(clip.plan.references)
    assert abs(made - wanted).max() < 1e-4


def test_control_frames_are_made_where_a_mask_is_white(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    plain = control_clip(planned(spec, tmp_path, "control", "mask").plan)
    whole = control_clip(planned(spec, tmp_path, "control", preprocess="edges").plan)
    masked = control_clip(planned(spec, tmp_path, "control", "mask", preprocess="edges").plan)
    changes = masked.changes
    assert plain.video is not None and whole.video is not None and masked.video is not None and changes is not None
    assert {*whole.video.unique().tolist()} == {0, 255}
    assert 0.2 < changes.float().mean() < 0.8
    assert (masked.video[changes] == whole.video[changes]).all()
    assert (masked.video[~changes] == plain.video[~changes]).all()


def test_an_image_as_a_mask_holds_for_all_frames_and_is_fitted_as_the_video(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "wide.png", 128, 32)
    plans = {
        fit: planned(tiny("wan2.1-vace"), tmp_path, "control", mask=str(tmp_path / "wide.png"), image_fit=fit).plan
        for fit in ("crop", "fit")
    }
    brightness = {}
    for fit, plan in plans.items():
        mask = control_clip(plan).mask
        assert isinstance(plan.mask, ImageUse) and plan.mask.path.name == plan.mask.digest
        assert mask is not None and mask.shape == (9, 32, 64) and (mask == mask[:1]).all()
        # The stored plan of a job is the same.
        assert ExecutionPlan.model_validate_json(plan.model_dump_json()).mask == plan.mask
        brightness[fit] = float(mask[0, 0].float().mean())
    assert brightness["crop"] > 30 and brightness["fit"] == 0
    assert identity({}, plans["crop"]) != identity({}, planned(tiny("wan2.1-vace"), tmp_path, "control", "still").plan)


def test_an_animated_picture_as_a_mask_is_a_video(tiny: Tiny, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 32), (shade,) * 3) for shade in (255, 0, 255, 0, 255, 0, 255, 0, 255)]
    path = tmp_path / "mask.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125, lossless=True)
    plan = planned(tiny("wan2.1-vace"), tmp_path, "control", mask=str(path)).plan
    assert isinstance(plan.mask, VideoUse)
    mask = control_clip(plan).mask
    assert mask is not None and len(mask.flatten(1).max(dim=1).values.unique()) == 2


def test_frames_one_by_one_are_those_of_the_job(tiny: Tiny, tmp_path: Path) -> None:
    """The page shows them, and compares videos with them."""
    spec, still = tiny("wan2.1-vace"), tmp_path / "still.png"
    Image.linear_gradient("L").resize((80, 40)).save(still)
    for inputs, values in (
        (("control",), {"control_start": 0.5, "preprocess": "gray"}),
        (("control", "mask"), {"preprocess": "edges", "image_position": 30, "width": 32}),
        (("control",), {"mask": str(still), "preprocess": "edges"}),
        (("control",), {"mask": "box:10,20,30,40+60,50,40,50", "preprocess": "scribble"}),
        (("control",), {"outpaint": [50, 0, 25, 100]}),
        (("control", "mask"), {"outpaint": 30, "preprocess": "gray"}),
    ):
        plan = planned(spec, tmp_path, *inputs, **values).plan
        clip = control_clip(plan)
        for every in (1, 4):
            frames, masks = zip(*control_frames(plan, every=every), strict=True)
            assert clip.video is not None and len(frames) == len(clip.video[::every])
            assert (torch.stack([torch.from_numpy(np.array(frame)) for frame in frames]) == clip.video[::every]).all()
            for mask, wanted in zip(masks, [None] * 9 if clip.changes is None else clip.changes[::every], strict=False):
                assert (mask is None) == (wanted is None)
                assert mask is None or ((torch.from_numpy(np.array(mask)) == 255) == wanted).all()


def test_what_a_video_was_made_from_is_kept_as_a_clip(tiny: Tiny, tmp_path: Path) -> None:
    plan = planned(tiny("wan2.1-vace"), tmp_path, "control", control_start=0.5).plan
    assert make_before(plan.replace(control=None), tmp_path) is None
    made = make_before(plan, tmp_path)
    assert made is not None
    (saved,) = read_video(read_info(made), 99)
    frames = np.stack([np.asarray(frame) for frame, _ in control_frames(plan)])
    assert saved.shape == frames.shape and abs(frames.astype(int) - saved).mean() < 6
    before = made.stat().st_mtime_ns
    assert make_before(plan, tmp_path) == made and made.stat().st_mtime_ns == before


def test_checkpoints_belong_to_the_preprocessing(tiny: Tiny, tmp_path: Path) -> None:
    kinds = [planned(tiny("wan2.1-vace"), tmp_path, "control", preprocess=kind) for kind in ("off", "gray", "blur")]
    kinds.append(planned(tiny("wan2.1-vace"), tmp_path, "control", control_start=0.1))
    assert len({identity({}, clip.plan) for clip in kinds}) == len(kinds)


def test_masks_of_one_color_are_reported(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    for color, values, code in (
        (0, {}, "control.mask_black"),
        (100, {}, "control.mask_black"),
        (255, {}, "control.mask_white"),
        (0, {"outpaint": 50}, None),
        (255, {"outpaint": 50}, "control.mask_white"),
    ):
        Image.new("L", (64, 32), color).save(tmp_path / "plain.png")
        plan = planned(spec, tmp_path, "control", mask=str(tmp_path / "plain.png"), **values).plan
        warnings: list[Fact] = []
        clip = control_clip(plan, warn=warnings.append)
        assert [warning.code for warning in warnings] == ([] if code is None else [code])
        assert clip.changes is not None and clip.changes[0, 0, 0] == (color == 255 or bool(values))


def test_odd_videos_and_masks_become_the_frames_of_a_clip(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    plain = make(tmp_path / "plain.mp4", *H264, inputs=("-f", "lavfi", "-i", f"{PATTERN}=64x32:rate=8:duration=2"))
    white = "-vf", "drawbox=w=iw/2:h=ih:t=fill:color=white,drawbox=x=iw/2:w=iw/2:h=ih:t=fill:color=black"

    def odd(name: str, *options: str, size: str = "64x32:rate=8:duration=2") -> str:
        return str(make(tmp_path / name, *options, inputs=("-f", "lavfi", "-i", f"{PATTERN}={size}")))

    turned = make(tmp_path / "t.mp4", "-c", "copy", inputs=("-display_rotation", "90", "-i", str(plain)))
    cut = tmp_path / "cut.webm"
    cut.write_bytes(Path(odd("whole.webm", "-c:v", "libvpx", "-g", "4")).read_bytes()[:-2_000])
    controls = {
        "odd size": odd("odd.mkv", "-c:v", "ffv1", size="63x31:rate=8:duration=2"),
        "other size and rate": odd("large.mp4", *H264, size="320x180:rate=30:duration=2"),
        "variable rate": odd("vfr.mkv", "-vf", "setpts='if(lt(N,8),N,2*N-8)/8/TB'", "-fps_mode", "vfr", *H264),
        "turned by metadata": str(turned),
        "truncated": str(cut),
        "HEVC with 10 bits": odd("hevc.mp4", "-c:v", "libx265", "-pix_fmt", "yuv420p10", "-x265-params", "log-level=0"),
        "alpha": odd("alpha.mkv", "-c:v", "ffv1", "-pix_fmt", "yuva420p"),
        "longer than the clip": odd("long.mp4", *H264, size="64x32:rate=8:duration=9"),
    }
    masks = {
        "other size and rate": odd("m.mkv", *white, "-c:v", "ffv1", size="128x64:rate=24:duration=2"),
        "one frame": odd("one.mp4", *white, *H264, "-frames:v", "1"),
        "longer": odd("longer.mp4", *white, *H264, size="64x32:rate=8:duration=5"),
    }
    for control, mask in (
        *((file, None) for file in controls.values()),
        *((str(plain), file) for file in masks.values()),
    ):
        plan = planned(spec, tmp_path, control=control, mask=mask, frames=5).plan
        clip = control_clip(plan)
        assert clip.video is not None and clip.video.shape == (5, 32, 64, 3) and clip.video.float().std() > 20
        if mask is not None:
            assert clip.changes is not None and clip.changes[:, :, :30].all() and not clip.changes[:, :, 34:].any()
    # Without a length, the shortest video decides; a mask that holds does not.
    short = odd("short.mp4", *white, *H264, size="64x32:rate=8:duration=1")
    for mask, frames in ((short, 5), (masks["one frame"], 13)):
        assert planned(spec, tmp_path, control=str(plain), mask=mask, frames="auto").plan.frames == frames


def test_borders_and_boxes_are_where_they_should_be(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    plan = planned(spec, tmp_path, "control", outpaint=[50, 0, 50, 300], height="auto").plan
    # The video has 2:1; with its borders it is a square.
    assert plan.width == plan.height == 64
    clip = control_clip(plan)
    assert clip.video is not None and clip.mask is not None and clip.changes is not None
    kept = torch.zeros(plan.height, plan.width, dtype=torch.bool)
    kept[:16, 16:48] = True
    assert (clip.changes == ~kept).all() and (clip.video[~kept.expand(9, -1, -1)] == 128).all()
    assert clip.video[0][kept].float().std() > 30

    masked = control_clip(
        planned(spec, tmp_path, "control", mask="box:0,0,50,50", outpaint=100, width=96, height="auto").plan
    )
    assert masked.changes is not None
    height, width = masked.changes.shape[1:]
    inner = masked.changes[0, height // 3 : height * 2 // 3, width // 3 : width * 2 // 3]
    assert inner.float().mean() == pytest.approx(1 / 4, abs=0.1) and inner[0, 0] and not inner[-1, -1]
    assert masked.changes[0, 0].all()

    boxes = planned(spec, tmp_path, "control", mask="box:0,50,25,50 + 50,0,50,50.0").plan
    mask = control_clip(boxes).mask
    assert mask is not None and mask.shape == (9, 32, 64)
    wanted = torch.zeros(32, 64, dtype=torch.uint8)
    wanted[16:, :16], wanted[:16, 32:] = 255, 255
    assert (mask == wanted).all()
    # Stored plans and requests have them.
    stored = ExecutionPlan.model_validate_json(boxes.model_dump_json())
    assert isinstance(stored.mask, BoxMask) and stored.mask == boxes.mask
    assert boxes.request_json()["mask"] == "box:0,50,25,50+50,0,50,50"
    assert boxes.inputs.keys() == {"control"}
    digests = {
        identity({}, planned(spec, tmp_path, "control", **values).plan)
        for values in ({}, {"mask": "box:0,0,9,9"}, {"mask": "box:0,0,9,8"}, {"outpaint": 10})
    }
    assert len(digests) == 4


@pytest.mark.slow
def test_a_video_is_extended_from_several_frames_and_joined_to_another(tiny: Tiny, tmp_path: Path) -> None:
    values = {"extend_frames": 3, "guidance_scale": 1.0, "steps": 2, "frames": 13, **OF_CLIP}
    clip = planned(tiny("wan2.1-vace"), tmp_path, "extend", "join", **values)
    plan = clip.plan
    assert (plan.width, plan.height, plan.fps, plan.extend_frames) == (64, 32, 8, 3)
    assert [part.frames for part in plan.parts] == [8, 13 - 6, 8] and plan.video_frames == 23
    earlier, later = (decoded(tmp_path / f"{name}.mp4") for name in ("extend", "join"))
    for name in ("extend", "join"):
        (tmp_path / f"{name}.mp4").unlink()
    assert isinstance(run(plan, clip.spec, tmp_path / "whole")[-1], VideoSaved)
    whole = frames_of(plan.output)
    frames = np.frombuffer(whole, np.uint8).reshape(-1, 32, 64, 3).astype(int)
    assert len(frames) == plan.video_frames
    # The video as it was, and after the frames that fade into it, the other one; both are encoded once more.
    assert abs(frames[:8] - earlier).mean() < 6 and abs(frames[-5:] - later[-5:]).mean() < 6
    assert abs(frames[8:15] - earlier[-1]).mean() > 6
    metadata = read_metadata(plan.output)
    assert [part["frames"] for part in metadata["plan"]["parts"]] == [8, 7, 8]
    again = GenerationRequest.from_mapping(metadata["request"])
    assert (again.extend_frames, again.join, again.image) == (3, plan.join and plan.join.reference, None)
    plan.output.unlink()
    assert killed(clip.spec, plan, tmp_path / "killed", event="StepDone", count=1) == -9
    events = run(plan, clip.spec, tmp_path / "killed")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == whole

    one = planned(tiny("wan2.1-vace"), tmp_path, "extend", **values | {"extend_frames": "auto"})
    assert one.plan.extend_frames == 8 and one.plan.video_frames == 8 + 13 - 8
    digests = [
        identity({}, planned(tiny("wan2.1-vace"), tmp_path, "extend", **values | {"extend_frames": extend_frames}).plan)
        for extend_frames in (1, 2, 3)
    ]
    assert len({*digests, identity({}, plan)}) == 4


@pytest.mark.slow
def test_each_input_has_an_effect(tiny: Tiny, tmp_path: Path) -> None:
    spec, made = tiny("wan2.1-vace"), dict[str, torch.Tensor]()
    for name, inputs, values in (
        ("none", (), {}),
        ("control", ("control",), {}),
        ("edges", ("control",), {"preprocess": "edges"}),
        ("mask", ("control", "mask"), {}),
        ("scale", ("control",), {"control_scale": 0.5}),
        ("unscaled", ("control",), {"control_scale": 0}),
        ("references", ("references",), {}),
    ):
        clip = planned(spec, tmp_path, *inputs, guidance_scale=1.0, **values)
        made[name] = final_latents(clip, tmp_path / name)[:, :, len(clip.plan.references) :]
    for first, second in itertools.combinations(made, 2):
        assert abs(made[first] - made[second]).max() > 1e-3, (first, second)


@pytest.mark.slow
def test_a_job_resumes_and_survives_kills_after_its_files_are_gone(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-vace"), tmp_path, "control", "mask", "references", control_scale=[0.5, 2])
    for name in ("control.mp4", "mask.mp4", "wide.png", "high.png"):
        (tmp_path / name).unlink()
    plan, spec = with_strategy(clip.plan, keep_loaded=False), clip.spec
    assert plan.latent_shape[2] == 5 and plan.engine_size("vae")[0] == 3
    assert isinstance(run(plan, spec, tmp_path / "whole")[-1], VideoSaved)
    wanted = frames_of(plan.output)
    assert len(wanted) == 3 * plan.frames * plan.height * plan.width
    metadata = read_metadata(plan.output)
    assert [*metadata["images"]] == ["control", "mask", "references[0]", "references[1]"]
    assert all(image["thumbnail"].startswith("data:image/webp;base64,") for image in metadata["images"].values())
    request = GenerationRequest.from_mapping(metadata["request"])
    assert request.control_scale == (0.5, 2.0)
    assert [file.rpartition("/")[2] for file in request.references] == ["wide.png", "high.png"]
    # The request of the result finds the copies.
    again = with_control(tiny("wan2.2-vace"), request, tmp_path, tmp_path)
    assert (again.control, again.mask, again.references) == (spec.control, spec.mask, spec.references)
    assert_survives_pauses_and_a_kill(plan, spec, tmp_path, wanted)


@pytest.mark.slow
def test_a_job_with_a_still_mask_survives_a_kill_and_a_lost_image(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", "still", guidance_scale=1.0)
    (tmp_path / "mask.png").unlink()
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    wanted = frames_of(clip.plan.output)
    clip.plan.output.unlink()
    assert killed(clip.spec, clip.plan, tmp_path / "killed", event="StepDone", count=2) == -9
    events = run(clip.plan, clip.spec, tmp_path / "killed")
    assert isinstance(events[-1], VideoSaved) and frames_of(clip.plan.output) == wanted
    assert any(isinstance(event, Resumed) for event in events)
    assert isinstance(clip.plan.mask, ImageUse)
    clip.plan.mask.path.unlink()
    failed = run(clip.plan, clip.spec, None)[-1]
    assert isinstance(failed, Failed) and (failed.fact.code, failed.internal) == ("image.gone", False)


@pytest.mark.slow
def test_memory_and_files_that_are_gone(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", "mask")
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    wanted = frames_of(clip.plan.output)
    starve_encoding(monkeypatch)
    events = run(clip.plan, clip.spec, None)
    assert [(out.stage, out.component, out.retried) for out in outs(events)] == [("encode", "vae_encoder", True)]
    assert isinstance(events[-1], VideoSaved) and frames_of(clip.plan.output) == wanted

    assert isinstance(clip.plan.mask, VideoUse)
    longer = clip.plan.replace(frames=25, latent_shape=(1, 16, 7, 4, 8))
    for plan, name, code in ((longer, "control.mp4", "source.shorter"), (clip.plan, "mask.mp4", "source.gone")):
        if code == "source.gone":
            clip.plan.mask.path.unlink()
        failed = run(plan, clip.spec, None)[-1]
        assert isinstance(failed, Failed) and not failed.internal
        assert failed.fact.code == code and failed.fact.data["file"] == name


def test_checkpoints_are_of_the_same_inputs(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    clips = [
        planned(spec, tmp_path, *inputs, **values)
        for inputs, values in (
            ((), {}),
            (("control",), {}),
            (("control", "mask"), {}),
            (("control",), {"control_scale": 0.5}),
            (("control",), {"image_fit": "fit"}),
            (("control",), {"fps": 5}),
            (("references",), {}),
        )
    ]
    identities = [identity({}, clip.plan) for clip in clips]
    assert len(set(identities)) == len(clips)
    turned = planned(spec, tmp_path, "references")
    turned = Clip(turned.plan.replace(references=turned.plan.references[::-1]), turned.spec)
    assert identity({}, turned.plan) != identities[-1]
    # What has no effect without a control video.
    assert identity({}, planned(spec, tmp_path, fps=5, image_fit="fit").plan) == identities[0]


def test_forecasts_count_the_control_branch(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1-vace")
    plans = [
        planned(spec, tmp_path, *inputs, frames=13).plan
        for inputs in ((), ("references",), ("control",), ("control", "mask"))
    ]
    assert [plan.tokens for plan in plans] == [4 * 8, 6 * 8, 4 * 8, 4 * 8]
    seconds = [plan.components["vae_encoder"].seconds for plan in plans]
    likely = [duration.likely for duration in seconds if duration is not None]
    assert likely == sorted(likely) and likely[0] < likely[1] < likely[2] < likely[3]
    assert plans[1].step_flops > plans[0].step_flops
    assert (
        plans[0].step_flops
        > 1.4 * tiny_plan(tiny("wan2.1"), tmp_path / "x.mp4", guidance_scale=4.0, frames=13).step_flops
    )
