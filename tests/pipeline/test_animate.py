"""Characters in videos: latents equal `WanAnimatePipeline`'s, and jobs resume after kills and failures."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanAnimatePipeline
from PIL import Image

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, InvalidRequestError
from runtime.core.events import (
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    Paused,
    SectionDone,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import Split
from runtime.core.request import GenerationRequest
from runtime.engines.service import OpenEngines
from runtime.execution.residency import Residency
from runtime.models.catalogue import look_up
from runtime.models.requested import with_inputs
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder, identity
from runtime.pipeline.run import run_job
from runtime.pipeline.stages import control_clip, video_frames
from runtime.planner.clip import check_size
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from tests.block_engine_files import in_blocks, stock
from tests.families.test_second_family import mean_difference
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_control import assert_survives_pauses_and_a_kill
from tests.pipeline.test_from_video import Clip, final_latents, starve_encoding
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_resume import run, steps_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine, with_strategy
from tests.tiny_models import ANIMATE
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]
SIDE = 16
# A box that grows: black outside, white inside, and gray between.
_LUMA = "255*lt(X,8+4*N)*gt(Y,8)+90*between(X,8+4*N,20+4*N)"
SOURCES = {
    "control": "testsrc=size=64x32:rate=8:duration=4",
    "face": "testsrc2=size=24x20:rate=8:duration=4",
    "background": "mandelbrot=size=64x32:rate=8",
    "mask": f"color=black:size=64x32:rate=8:duration=4,geq=lum='{_LUMA}':cb=128:cr=128",
}
# Of two processes: each has a pass of guidance, and half of the tokens.
SHARED = tuple(
    Split(devices=("cpu",) * 2, guidance=guidance, sequence=2 // guidance, decode=False) for guidance in (2, 1)
)
MOVE, REPLACE = ("control", "face"), ("control", "face", "background", "mask")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each of the videos and an image."""
    folder = tmp_path_factory.mktemp("sources")
    for name, source in SOURCES.items():
        make(folder / f"{name}.mp4", "-frames:v", "32", *H264, inputs=("-f", "lavfi", "-i", source))
    Image.linear_gradient("L").convert("RGB").resize((40, 93)).save(folder / "image.png")
    Image.radial_gradient("L").convert("RGB").resize((90, 40)).save(folder / "other.png")
    return folder


def planned(spec: ModelSpec, sources: Path, folder: Path, *inputs: str, **values: Any) -> Clip:
    """Plan a tiny clip of a character with videos of these fields, of which copies are in the folder."""
    files = {name: str(sources / f"{name}.mp4") for name in inputs} | {"image": str(sources / "image.png")}
    fields: dict[str, Any] = {"prompt": "a red boat", "negative_prompt": "blue ball", "width": 64, "height": 32}
    fields |= {"frames": 9, "steps": 3, "seed": 3, "fps": 8, "guidance_scale": 1.0}
    request = GenerationRequest.from_mapping(fields | files | values)
    spec = with_inputs(spec, request, folder, folder)
    return Clip(resolve(request, spec, PlanningContext(machine(), folder / "x.mp4")), spec)


def _images(frames: torch.Tensor | None) -> list[Image.Image] | None:
    return None if frames is None else [Image.fromarray(frame.numpy()) for frame in frames]


def by_diffusers(clip: Clip) -> torch.Tensor:
    """Return the latents of the last segment that `WanAnimatePipeline` makes of a plan."""
    assert clip.spec.control_input is not None
    pipeline = WanAnimatePipeline.from_pretrained(clip.spec.directory).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    plan, given = clip.plan, control_clip(clip.plan)
    latents: torch.Tensor = pipeline(
        image=given.references[0],
        pose_video=_images(given.video),
        face_video=_images(video_frames(plan, "face", side=SIDE)),
        background_video=_images(given.background),
        mask_video=_images(given.mask),
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        height=plan.height,
        width=plan.width,
        segment_frame_length=min(plan.frames, clip.spec.control_input.segment_frames or 0),
        prev_segment_conditioning_frames=clip.spec.control_input.overlap,
        mode="animate" if given.background is None else "replace",
        num_inference_steps=plan.steps,
        guidance_scale=plan.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type="latent",
    ).frames
    # It returns them as the VAE decodes them.
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
    )
    return (latents - mean) / std


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "scale"), [(MOVE, 1.0), (REPLACE, 4.0)], ids=["move", "replace, guided"])
def test_latents_equal_wan_animate_pipelines(
    inputs: tuple[str, ...], scale: float, tiny: Tiny, sources: Path, tmp_path: Path
) -> None:
    clip = planned(tiny(ANIMATE), sources, tmp_path, *inputs, guidance_scale=scale)
    wanted = by_diffusers(clip)
    made = final_latents(clip, tmp_path / "job")
    assert wanted.std() > 0.1 and made.shape == wanted.shape
    assert made.shape[2] == 1 + 3
    assert abs(made - wanted).max() < 1e-4


def in_segments(spec: ModelSpec, length: int) -> ModelSpec:
    """Return a model with shorter segments."""
    assert spec.control_input is not None
    return replace(spec, control_input=replace(spec.control_input, segment_frames=length))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "frames", "length", "overlap", "scale"),
    [
        (MOVE, 17, 9, 1, 1.0),
        (REPLACE, 17, 9, 1, 3.0),
        (MOVE, 21, 13, 5, 3.0),
        # The last segment is longer than the clip.
        (REPLACE, 25, 13, 5, 1.0),
    ],
    ids=["move", "replace, guided", "move, guided, five", "replace, five, padded"],
)
def test_latents_of_segments_equal_wan_animate_pipelines(
    inputs: tuple[str, ...],
    frames: int,
    length: int,
    overlap: int,
    scale: float,
    tiny: Tiny,
    sources: Path,
    tmp_path: Path,
) -> None:
    values = {"frames": frames, "guidance_scale": scale, "steps": 2, "overlap": str(overlap)}
    clip = planned(in_segments(tiny(ANIMATE), length), sources, tmp_path, *inputs, **values)
    assert clip.plan.latent_shape[2] == 1 + (length + 3) // 4
    wanted = by_diffusers(clip)
    made = final_latents(clip, tmp_path / "job")
    assert wanted.std() > 0.1 and made.shape == wanted.shape
    assert abs(made - wanted).max() < 1e-4
    assert len(frames_of(clip.plan.output)) == 3 * frames * 64 * 32


@pytest.mark.slow
def test_each_input_has_an_effect(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    made: dict[str, torch.Tensor] = {}
    for name, inputs, values in (
        ("move", MOVE, {}),
        ("replace", REPLACE, {}),
        ("other poses", MOVE, {"control": str(sources / "background.mp4")}),
        ("other face", MOVE, {"face": str(sources / "background.mp4")}),
        ("other character", MOVE, {"image": str(sources / "other.png")}),
        ("other mask", REPLACE, {"mask": str(sources / "control.mp4")}),
    ):
        clip = planned(tiny(ANIMATE), sources, tmp_path, *inputs, **values)
        made[name] = final_latents(clip, tmp_path / name)
    for first, second in itertools.combinations(made, 2):
        assert abs(made[first] - made[second]).max() > 1e-3, (first, second)


@pytest.mark.slow
def test_a_job_resumes_and_survives_kills_after_its_files_are_gone(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(sources, own)
    clip = planned(tiny(ANIMATE), own, tmp_path, *REPLACE, guidance_scale=2.0)
    shutil.rmtree(own)
    plan, spec = with_strategy(clip.plan, keep_loaded=False), clip.spec
    assert plan.latent_shape[2] == 4 and plan.engine_size("vae")[0] == 3
    assert isinstance(run(plan, spec, tmp_path / "whole")[-1], VideoSaved)
    wanted = frames_of(plan.output)
    assert len(wanted) == 3 * plan.frames * plan.height * plan.width
    metadata = read_metadata(plan.output)
    assert [*metadata["images"]] == ["image", *REPLACE]
    # The request of the result finds the copies.
    request = GenerationRequest.from_mapping(metadata["request"])
    again = with_inputs(tiny(ANIMATE), request, tmp_path, tmp_path)
    assert all(getattr(again, name) == getattr(spec, name) for name in ("image", *REPLACE))
    assert_survives_pauses_and_a_kill(plan, spec, tmp_path, wanted)


@pytest.mark.slow
def test_segments_are_resumed_after_each_event_kills_and_out_of_memory(
    tiny: Tiny, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = planned(in_segments(tiny(ANIMATE), 9), sources, tmp_path, *REPLACE, frames=21, steps=2)
    plan, spec = with_strategy(clip.plan, keep_loaded=False), clip.spec
    assert (plan.sections, plan.total_steps, plan.engine_size("vae")[0]) == (3, 6, 3)
    whole = run(plan, spec, tmp_path / "whole")
    assert isinstance(whole[-1], VideoSaved) and whole[-1].sections == (3, 3, 21) and not whole[-1].continues
    made = [(event.start, event.frames) for event in whole if isinstance(event, SectionDone)]
    assert made == [(0, 9), (9, 8), (17, 4)]
    assert [event.frames for event in whole if isinstance(event, FramesDecoded)][-1] == 21
    assert steps_of(whole) == [1, 2, 3, 4, 5, 6]
    wanted, first = frames_of(plan.output), read_metadata(plan.output)["request"]
    plan.output.unlink()
    stops: list[Callable[[Event], bool]] = [
        lambda event: isinstance(event, StepDone) and event.step == 1,
        lambda event: isinstance(event, SectionDone),
        lambda event: isinstance(event, StageStarted) and event.part == "vae_encoder",
        lambda event: isinstance(event, StepDone) and event.step == 3,
        lambda event: isinstance(event, StageStarted) and event.part == "vae",
    ]
    for stop in stops:
        assert isinstance(run(plan, spec, tmp_path / "paused", stop=stop)[-1], Paused)
    events = run(plan, spec, tmp_path / "paused")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted
    assert steps_of(events)[0] > 2 and read_metadata(plan.output)["request"] == first
    plan.output.unlink()
    # Its frames are on disk, and what the next one is made from is not.
    assert killed(spec, plan, tmp_path / "killed", event="SectionDone", count=1) == -9
    events = run(plan, spec, tmp_path / "killed")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted
    assert steps_of(events) == [3, 4, 5, 6]
    # The encoding of the second segment's background.
    starve_encoding(monkeypatch, {3})
    events = run(clip.plan, spec, None)
    assert [(out.stage, out.component, out.retried) for out in outs(events)] == [("encode", "vae_encoder", True)]
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted


@pytest.mark.slow
def test_a_clip_in_segments_can_end_early_and_be_continued(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    clip = planned(in_segments(tiny(ANIMATE), 13), sources, tmp_path, *MOVE, frames=25, steps=2, overlap="5")
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    wanted = frames_of(clip.plan.output)
    cancel, events = Cancel(), []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone) and event.step == 3:
            cancel.finish_early()

    with Residency() as residency:
        run_job(clip.plan, clip.spec, emit, cancel, residency, checkpoints=CheckpointFolder(tmp_path / "early"))
    saved = events[-1]
    assert isinstance(saved, VideoSaved) and saved.sections == (2, 3, 21) and saved.continues
    assert frames_of(clip.plan.output) != wanted
    saved = run(clip.plan, clip.spec, tmp_path / "early")[-1]
    assert isinstance(saved, VideoSaved) and saved.sections == (3, 3, 25) and frames_of(clip.plan.output) == wanted


@pytest.mark.slow
def test_memory_files_that_are_gone_and_weights_that_wait(
    tiny: Tiny, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = planned(tiny(ANIMATE), sources, tmp_path, *MOVE)
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    wanted = frames_of(clip.plan.output)
    for offload in ("model", "group", "sequential"):
        assert isinstance(run(with_strategy(clip.plan, offload=offload), clip.spec, None)[-1], VideoSaved)
        assert frames_of(clip.plan.output) == wanted
    starve_encoding(monkeypatch, {1})
    events = run(clip.plan, clip.spec, None)
    assert [(out.stage, out.component, out.retried) for out in outs(events)] == [("encode", "vae_encoder", True)]
    assert isinstance(events[-1], VideoSaved) and frames_of(clip.plan.output) == wanted
    assert clip.plan.face is not None
    clip.plan.face.path.unlink()
    failed = run(clip.plan, clip.spec, None)[-1]
    assert isinstance(failed, Failed) and (failed.fact.code, failed.fact.data["file"]) == ("source.gone", "face.mp4")


@pytest.mark.slow
def test_segments_on_engines_have_the_same_frames(
    tiny: Tiny,
    sources: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, failing = list[str](), set[int]()
    write = OpenEngines.write

    def watch(self: OpenEngines, program: str, inputs: Any, outputs: Any) -> None:
        calls.append(program)
        write(self, program, inputs, outputs)
        if len(calls) in failing:
            raise EngineError("engine.failed", error="on purpose")

    monkeypatch.setattr(OpenEngines, "write", watch)
    clip = planned(in_segments(tiny(ANIMATE), 9), sources, tmp_path, *REPLACE, frames=17, steps=1)
    spec, service = clip.spec, stock(clip.spec, tmp_path, tmp_path_factory)
    on_engines = in_blocks(with_strategy(clip.plan, keep_loaded=True), spec)

    def made(plan: Any) -> tuple[bytes, int]:
        """Return the frames and the number of fallbacks."""
        calls.clear()
        with Residency(service, keep_prompts=False) as residency:
            events = events_of(plan, spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return frames_of(plan.output), sum(isinstance(event, FellBack) for event in events)

    pixels, _ = made(clip.plan)
    assert not calls
    found, fallen = made(on_engines)
    # Each part of four blocks, in two segments.
    assert (len(calls), fallen) == (3 * 4 * 2, 0) and mean_difference(found, pixels) < 0.1
    failing.add(14)
    found, fallen = made(on_engines)
    assert fallen == 1 and mean_difference(found, pixels) < 0.1
    failing.clear()
    # Two processes that share the tokens of a pass.
    found, fallen = made(on_engines.replace(split=SHARED[1]))
    assert fallen == 0 and mean_difference(found, pixels) < 0.1


@pytest.mark.slow
def test_segments_of_several_processes_equal_those_of_one(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    values = {"frames": 17, "steps": 2, "guidance_scale": 3.0}
    clip = planned(in_segments(tiny(ANIMATE), 9), sources, tmp_path, *REPLACE, **values)
    wanted = final_latents(clip, tmp_path / "alone")
    got = final_latents(Clip(clip.plan.replace(split=SHARED[0]), clip.spec), tmp_path / "shared")
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_checkpoints_are_of_the_same_inputs(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    clips = [
        planned(tiny(ANIMATE), sources, tmp_path, *inputs, **values)
        for inputs, values in (
            (MOVE, {}),
            (REPLACE, {}),
            (MOVE, {"face": str(sources / "control.mp4")}),
            (MOVE, {"image": str(sources / "other.png")}),
            (REPLACE, {"mask": str(sources / "control.mp4")}),
        )
    ]
    clips += [
        planned(in_segments(tiny(ANIMATE), 13), sources, tmp_path, *MOVE, frames=21, overlap=overlap)
        for overlap in ("1", "5")
    ]
    assert len({identity({}, clip.plan) for clip in clips}) == len(clips)


def test_longer_clips_take_as_much_memory_and_more_time(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    spec = in_segments(tiny(ANIMATE), 13)
    plans = [planned(spec, sources, tmp_path, *REPLACE, frames=frames).plan for frames in (13, 25, 29)]
    assert [plan.sections for plan in plans] == [1, 2, 3]
    assert [plan.total_steps for plan in plans] == [3, 6, 9]
    assert len({(plan.tokens, plan.latent_shape, plan.memory, plan.step_flops) for plan in plans}) == 1
    for stage in ("encode", "denoise", "decode"):
        likely = [plan.seconds[stage].likely for plan in plans]
        assert likely == sorted(likely) and likely[0] < likely[1] < likely[2], stage
    # Tokens of a segment have positions, however many segments there are.
    check_size(spec, 64, 32, 401)


def test_forecasts_count_what_is_encoded_and_the_face(tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    spec = tiny(ANIMATE)
    plans = [planned(spec, sources, tmp_path, *inputs, frames=13).plan for inputs in (MOVE, REPLACE)]
    assert [plan.tokens for plan in plans] == [5 * 8, 5 * 8]
    assert [(part.backend, part.engines) for part in plans[0].components.values()] == [("pytorch", ())] * 5
    seconds = [plan.components["vae_encoder"].seconds for plan in plans]
    likely = [duration.likely for duration in seconds if duration is not None]
    assert len(likely) == 2 and likely[0] < likely[1]
    plain = replace(spec, transformer=tiny("wan2.1").transformer, control_input=None)
    assert spec.transformer.forward_flops(40, 512) / 4 > plain.transformer.forward_flops(40, 512) / 2
    # The published model's motion encoder needs more than its blocks for a small clip, and less for its own.
    published = look_up("wan2.2-animate-14b", tmp_path)
    bytes_of = {tokens: published.transformer.forward_bytes(tokens, 2, time_per_token=False) for tokens in (1, 75_600)}
    assert bytes_of[1] > 5 * 8 * 32 * 512**2 * 2 and bytes_of[75_600] > 6 << 30


REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, str]] = {
    "no poses": (("face",), {}, "control", "control.required"),
    "no face": (("control",), {}, "face", "control.required"),
    "no image": (MOVE, {"image": None}, "image", "image.required"),
    "no mask": (MOVE, {"background": "background.mp4"}, "mask", "control.background_alone"),
    "no background": ((*MOVE, "mask"), {}, "mask", "control.mask_without_background"),
    "references": (MOVE, {"references": ["image.png"]}, "references", "control.other_model"),
    "scale": (MOVE, {"control_scale": 0.5}, "control_scale", "control.other_model"),
    "preprocess": (MOVE, {"preprocess": "edges"}, "preprocess", "control.other_model"),
    "last image": (MOVE, {"last_image": "image.png"}, "last_image", "image.model_without_last"),
    "extend": (MOVE, {"image": None, "extend": "control.mp4"}, "extend", "source.not_continued"),
    "video": (MOVE, {"image": None, "video": "control.mp4"}, "video", "source.model_without"),
    "too long": (MOVE, {"frames": 37}, "frames", "planner.video_too_short"),
    "no video": (MOVE, {"face": "image.png"}, "face", "source.no_video"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tiny: Tiny, sources: Path, tmp_path: Path) -> None:
    inputs, values, field, code = REFUSALS[case]
    files = {
        name: [str(sources / value[0])] if isinstance(value, list) else str(sources / value)
        for name, value in values.items()
        if isinstance(value, list) or (isinstance(value, str) and value.endswith((".mp4", ".png")))
    }
    with pytest.raises(InvalidRequestError) as refused:
        planned(tiny(ANIMATE), sources, tmp_path, *inputs, **(values | files))
    assert (refused.value.field, refused.value.code) == (field, code)
