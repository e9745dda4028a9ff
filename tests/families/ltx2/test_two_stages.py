"""LTX-2 in two stages: against diffusers' pipelines, checkpoints, faults, refusals and plans."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
)
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.errors import ModelError
from runtime.core.events import Failed, OutOfMemory, Paused, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.loras import Expert, Lora
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Progress
from runtime.execution.residency import Residency
from runtime.execution.streams import Streams
from runtime.families.ltx2.spec import REFINING_LEVELS
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.families.ltx2.vae import PyTorchLatentUpsampler
from runtime.models.given_frames import images_of
from runtime.models.loras import with_loras
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import LATENT_UPSAMPLER, ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.families.conftest import Command
from tests.families.ltx2.test_faults import Clip, save_each_step
from tests.families.ltx2.test_loras import factors, named
from tests.families.ltx2.test_parity import conditions, timed
from tests.image_files import with_saved
from tests.lora_files import save
from tests.models.hub import Repository, of_folder, served
from tests.pipeline.failing import Failing, full
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan
from tests.tiny_models import LTX2_DISTILLED

Tiny = Callable[[str], ModelSpec]
FIRST, SECOND = 3, len(REFINING_LEVELS)
ALL = FIRST + SECOND
IMAGES: list[tuple[str, ...]] = [
    (),
    ("image",),
    ("last_image",),
    ("keyframes[0]",),
    ("image", "keyframes[0]", "last_image"),
]


@pytest.fixture
def make(tiny: Tiny, tmp_path: Path) -> Callable[..., Clip]:
    """Return a function that plans a clip with lossless sound, from the images of these fields."""

    def made(
        name: str = "clip", architecture: str = LTX2_DISTILLED[1], *, images: Sequence[str] = (), **values: Any
    ) -> Clip:
        spec, out = tiny(architecture).in_stages(2), tmp_path / name / "out" / "x.mp4"
        out.parent.mkdir(parents=True, exist_ok=True)
        assert spec.image_input is not None
        # diffusers compresses with a package that is not installed.
        spec = replace(spec, image_input=replace(spec.image_input, crf=None))
        spec, files = with_saved(spec, images, tmp_path, 192, 128)
        clip: dict[str, Any] = {**files, **timed(images)}
        clip |= {"steps": FIRST, "sound": "lossless", "stages": "2", "width": 192, "height": 128, "frames": 17}
        return Clip(spec, tiny_plan(spec, out, **clip | values), tmp_path / name / "job")

    return made


Make = Callable[..., Clip]


def by_pipelines(clip: Clip, sigmas: Sequence[float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents of video and sound, normalised, that diffusers makes of a plan in two stages.

    Args:
        sigmas: of the first stage.
    """
    spec, plan = clip.spec, clip.plan
    first, second = plan.by_stage
    kind: Any = LTX2ImageToVideoPipeline if [*plan.images] == ["image"] else LTX2Pipeline
    pipeline = kind.from_pretrained(spec.directory, dtype=torch.float32)
    # As Gemma's tokenizer has it; one of the pipelines reads it before another one sets it.
    pipeline.tokenizer.padding_side = "left"
    # The publishers place images in both stages.
    refiner = LTX2ConditionPipeline(**pipeline.components) if plan.images else pipeline
    guided_towards = bool({*plan.images} - {"image"})
    if guided_towards:
        pipeline = refiner
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(spec.directory, subfolder=LATENT_UPSAMPLER)
    enlarger = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=upsampler)
    for one in (pipeline, refiner, enlarger):
        one.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(plan.seed)

    assert spec.sound_latents is not None
    guidance = spec.sound_latents.guidance

    def options(stage: ExecutionPlan) -> dict[str, Any]:
        guided = stage.guidance_scale > 1
        scales = {"guidance_rescale": guidance.rescaled, "stg_scale": guidance.skipped}
        scales |= {"modality_scale": guidance.isolated, "guidance_scale": (stage.guidance_scale, guidance.sound_scale)}
        off = {"guidance_rescale": 0.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_scale": 1.0}
        pairs = scales if guided else {name: (value, value) for name, value in off.items()}
        return {
            "prompt": plan.prompt,
            "negative_prompt": plan.negative_prompt,
            "width": stage.width,
            "height": stage.height,
            "num_frames": plan.frames,
            "frame_rate": float(plan.fps),
            "num_inference_steps": stage.steps,
            "spatio_temporal_guidance_blocks": list(guidance.skipping_blocks),
            **{name: video for name, (video, _) in pairs.items()},
            **{f"audio_{name}": sound for name, (_, sound) in pairs.items()},
            "use_cross_timestep": spec.transformer.modulated_text,  # type: ignore[attr-defined]
            "generator": generator,
            "output_type": "latent",
            "return_dict": False,
        }

    given: dict[str, Any] = {}
    if guided_towards:
        given = {"conditions": conditions(first)}
    elif plan.image is not None:
        given = {"image": images_of(first)[0], "image_crf": 0}
    video, sound = pipeline(**options(first), sigmas=sigmas, **given)
    enlarged = enlarger(latents=video, output_type="latent", return_dict=False)[0]
    if plan.images:
        given = {"conditions": conditions(second)}
    for name, (down, up) in factors(spec).items() if plan.loras else ():
        refiner.transformer.get_submodule(name).weight.data += up @ down
    levels = STAGE_2_DISTILLED_SIGMA_VALUES
    refiner.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        pipeline.scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )
    video, sound = refiner(
        **options(second), latents=enlarged, audio_latents=sound, sigmas=levels, noise_scale=levels[0], **given
    )
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    shape = (1, -1, 1, 1, 1)
    video = (video - vae.latents_mean.view(shape)) / vae.latents_std.view(shape)
    flat = (sound.transpose(1, 2).flatten(2) - audio_vae.latents_mean) / audio_vae.latents_std
    return video, flat.unflatten(2, (sound.shape[1], -1)).transpose(1, 2)


def assert_equal(clip: Clip, sigmas: Sequence[float] | None) -> None:
    """Compare the latents of both streams after the last step."""
    last = clip.plan.total_steps
    assert clip.run(lambda event: isinstance(event, StepDone) and event.step == last)[-1] == Paused(step=last, of=last)
    checkpoint, streams = CheckpointFolder(clip.job).load(clip.spec, clip.plan), Streams.of(clip.plan)
    assert checkpoint is not None
    assert checkpoint.sampling is not None
    assert streams is not None
    ours = streams.split(checkpoint.sampling.latents)
    for made, wanted in zip(ours, by_pipelines(clip, sigmas), strict=True):
        assert made.shape == wanted.shape
        assert wanted.std() > 1e-3
        assert abs(made - wanted).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "images"), [(LTX2_DISTILLED[(number + 1) % 2], images) for number, images in enumerate(IMAGES)]
)
def test_latents_of_both_streams_equal_the_pipelines(architecture: str, images: Sequence[str], make: Make) -> None:
    assert (*STAGE_2_DISTILLED_SIGMA_VALUES,) == REFINING_LEVELS
    assert_equal(make("clip", architecture, images=images, steps=len(DISTILLED_SIGMA_VALUES)), DISTILLED_SIGMA_VALUES)


@pytest.fixture
def undistilled(tiny: Tiny, tmp_path: Path) -> ModelSpec:
    """Return a model with an upsampler that was not distilled."""
    folder = tmp_path / "undistilled"
    shutil.copytree(tiny("ltx-2.3").directory, folder)
    shutil.copytree(tiny(LTX2_DISTILLED[1]).directory / LATENT_UPSAMPLER, folder / LATENT_UPSAMPLER)
    return read_spec(folder, "undistilled")


def with_lora(spec: ModelSpec, tmp_path: Path, expert: Expert = "low", weight: float = 1.0) -> tuple[ModelSpec, Lora]:
    """Return a model in two stages with a LoRA."""
    file = tmp_path / "distilling.safetensors"
    save(file, named(spec, "transformer."))
    lora = Lora(str(file), weight, expert)
    return with_loras(spec.in_stages(2), [lora], tmp_path), lora


@pytest.mark.slow
def test_a_lora_of_the_second_stage_equals_the_pipelines(undistilled: ModelSpec, tmp_path: Path) -> None:
    spec, lora = with_lora(undistilled, tmp_path)
    values: dict[str, Any] = {
        "steps": FIRST,
        "stages": "2",
        "width": 192,
        "height": 128,
        "frames": 17,
        "guidance_scale": 3.0,
    }
    plan = tiny_plan(spec, tmp_path / "x.mp4", negative_prompt="blue ball", loras=[vars(lora)], **values)
    clip = Clip(spec, plan, tmp_path / "job")
    assert_equal(clip, None)
    # Killed before the second stage, it resumes; with the LoRA at another weight it does not.
    other, weaker = with_lora(undistilled, tmp_path, weight=0.5)
    changed = Clip(
        other, tiny_plan(other, plan.output, negative_prompt="blue ball", loras=[vars(weaker)], **values), clip.job
    )
    assert Resumed(step=ALL, of=ALL) in clip.run()
    assert not any(isinstance(event, Resumed) for event in changed.run())


def test_a_model_that_is_not_distilled_needs_a_lora_in_the_second_stage(
    undistilled: ModelSpec, tmp_path: Path, command: Command
) -> None:
    assert undistilled.refinement is not None
    assert not undistilled.refinement.distilled
    _, lora = with_lora(undistilled, tmp_path)
    asked = ("plan", "a", "--model", str(undistilled.directory), "--width", "192", "--height", "128", "--stages", "2")
    for loras, code in (
        ((), "planner.refinement_without_lora"),
        (("--lora", f"high={lora.file}"), "planner.refinement_without_lora"),
        (("--lora", f"low={lora.file}"), None),
        (("--lora", lora.file), None),
    ):
        exit_code, made = command(*asked, *loras)
        assert (exit_code, made.get("error", {}).get("code")) == (0 if code is None else 2, code)
    exit_code, made = command(*asked[:-2], "--lora", f"low={lora.file}")
    assert (exit_code, made["error"]["code"]) == (2, "lora.no_such_expert")


# What a job that nothing interrupts shows and plays; equal plans run once.
_WHOLE: dict[str, tuple[bytes, bytes]] = {}


def whole(clip: Clip) -> tuple[bytes, bytes]:
    """Return the frames and the sound of a clip that nothing interrupts; its files are deleted."""
    key = clip.plan.model_dump_json(exclude={"output"})
    if key not in _WHOLE:
        with Residency() as residency:
            assert isinstance(events_of(clip.plan, clip.spec, residency)[-1], VideoSaved)
        _WHOLE[key] = clip.seen_and_heard
        clip.plan.output.unlink()
    return _WHOLE[key]


def test_stages_run_one_after_the_other(make: Make) -> None:
    clip = make(images=["image"])
    events = clip.run()
    saved_event = events[-1]
    assert isinstance(saved_event, VideoSaved), saved_event
    ran = [(event.stage, event.part) for event in events if isinstance(event, StageStarted) and event.stage != "load"]
    assert ran == [
        ("encode", "text_encoder"),
        ("encode", "connectors"),
        ("encode", "vae_encoder"),
        ("denoise", "transformer"),
        ("denoise", LATENT_UPSAMPLER),
        ("denoise", "transformer"),
        ("decode", "vae"),
        ("decode", "audio_vae"),
        ("decode", "vocoder"),
        ("save", None),
    ]
    steps = [(event.step, event.of) for event in events if isinstance(event, StepDone)]
    assert steps == [(step, ALL) for step in range(1, ALL + 1)]
    assert saved_event.plan["refinement"]["levels"] == list(REFINING_LEVELS)
    assert len(clip.seen_and_heard[0]) == 17 * 128 * 192 * 3
    progress = Progress()
    shares = []
    for second, event in enumerate(events):
        progress = progress.after(event, float(second))
        shares.append(progress.fraction)
    assert shares == sorted(shares)
    assert (progress.step, progress.steps) == (ALL, ALL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks")
@pytest.mark.parametrize(
    ("images", "steps"),
    # After the last step of the first stage, and in both; each stage encodes its images when it begins or is resumed.
    [(IMAGES[0], (FIRST, FIRST + 2)), (IMAGES[3], (2, FIRST + 2))],
)
def test_a_job_killed_in_either_stage_resumes_to_the_same_frames_and_sound(
    images: Sequence[str], steps: Sequence[int], make: Make, subtests: pytest.Subtests
) -> None:
    wanted = whole(make(images=images))
    for step in steps:
        with subtests.test(step=step):
            clip = make(f"step {step}", images=images)
            # The checkpoint of a step is written after its event.
            assert killed(clip.spec, clip.plan, clip.job, prepare=save_each_step, event="StepDone", count=step) == -9
            assert not clip.plan.output.exists()
            events = clip.run()
            assert isinstance(events[-1], VideoSaved)
            assert [event.step for event in events if isinstance(event, Resumed)] == [step - 1]
            assert [event.step for event in events if isinstance(event, StepDone)] == list(range(step, ALL + 1))
            assert clip.seen_and_heard == wanted


def test_the_end_of_the_first_stage_is_always_a_checkpoint(make: Make) -> None:
    clip = make()
    wanted = whole(clip)
    first = clip.run(lambda event: isinstance(event, StageStarted) and event.part == LATENT_UPSAMPLER)
    assert first[-1] == Paused(step=FIRST, of=ALL)
    assert Resumed(step=FIRST, of=ALL) in clip.run()
    assert clip.seen_and_heard == wanted


@pytest.mark.parametrize(
    ("kind", "at", "component"),
    [
        (PyTorchStreamDenoiser, 2, "transformer"),
        (PyTorchLatentUpsampler, 1, LATENT_UPSAMPLER),
        (PyTorchStreamDenoiser, FIRST + 2, "transformer"),
    ],
)
def test_out_of_memory_in_either_stage_is_retried_with_the_same_frames_and_sound(
    kind: Any, at: int, component: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make()
    wanted = whole(clip)
    with monkeypatch.context() as patched:
        Failing(patched, kind, "__call__", at, full)
        events = clip.run()
    (out,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert (out.stage, out.component, out.retried, out.lossless) == ("denoise", component, True, True)
    assert [event.step for event in events if isinstance(event, StepDone)] == list(range(1, ALL + 1))
    assert isinstance(events[-1], VideoSaved)
    assert clip.seen_and_heard == wanted


def test_nan_between_the_stages_ends_the_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make()
    Failing(monkeypatch, PyTorchLatentUpsampler, "__call__", 1, lambda latents: latents * torch.nan)
    failed = clip.run()[-1]
    assert isinstance(failed, Failed)
    assert (failed.fact.code, failed.internal) == ("pipeline.not_finite", False)
    assert not clip.plan.output.exists()


def test_a_plan_has_both_stages(make: Make, tiny: Tiny) -> None:
    clip = make(images=["image"])
    plan, (first, second) = clip.plan, clip.plan.by_stage
    assert [*plan.components][2:5] == ["vae_encoder", "transformer", LATENT_UPSAMPLER]
    assert (first.width, first.height, first.latent_shape) == (96, 64, (1, 16, 3, 4, 6))
    assert (second.width, second.height, second.latent_shape) == (192, 128, (1, 16, 3, 8, 12))
    assert (first.steps, second.steps, plan.total_steps) == (FIRST, SECOND, ALL)
    assert second.tokens == 4 * first.tokens
    # A last image is a further latent frame of each stage.
    ends = make(images=("image", "last_image")).plan
    assert [stage.latent_shape for stage in ends.by_stage] == [first.latent_shape, second.latent_shape]
    assert [stage.tokens for stage in ends.by_stage] == [4 * 4 * 6, 4 * 8 * 12]
    assert ends.seconds["denoise"].likely > plan.seconds["denoise"].likely
    # A pass in the first stage takes less time, and none has another forecast.
    assert plan.step_costs == (plan.step_costs[0],) * FIRST + (1.0,) * SECOND
    assert 0.1 < plan.step_costs[0] < 1
    alone = tiny_plan(tiny(LTX2_DISTILLED[1]), plan.output, steps=ALL, width=192, height=128, frames=17)
    assert alone.step_costs == (1.0,) * ALL
    assert plan.step_flops < alone.step_flops
    assert plan.seconds["denoise"].likely < alone.seconds["denoise"].likely
    (upsampler,) = [stage for stage in plan.memory if stage.component == LATENT_UPSAMPLER]
    module = load_module(clip.spec, LATENT_UPSAMPLER, plan.components[LATENT_UPSAMPLER])
    weights = sum(weight.numel() for weight in module.state_dict().values())
    assert plan.components[LATENT_UPSAMPLER].weights_bytes == 4 * weights
    assert upsampler.working_bytes == 4 * 4 * 32 * 3 * 8 * 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.randn(first.latent_shape))
    assert clip.spec.refinement is not None
    assert counter.get_total_flops() == pytest.approx(3 * 8 * 12 * clip.spec.refinement.flops)


def test_what_two_stages_do_not_allow_is_refused(
    command: Command, tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    size = ("--width", "192", "--height", "128", "--frames", "9", "--steps", "2", "--fps", "8", "--seed", "3")
    refusals: list[tuple[str, tuple[str, ...], str]] = [
        ("ltx-2.3", (), "planner.one_stage_only"),
        ("wan2.1", (), "planner.one_stage_only"),
        # Multiples of the stride for one stage only.
        (LTX2_DISTILLED[1], ("--width", "208"), "planner.not_a_multiple"),
        (LTX2_DISTILLED[0], ("--height", "64"), "planner.side_too_short"),
        (LTX2_DISTILLED[0], ("--stages", "3"), "request.not_a_choice"),
    ]
    for model, options, code in refusals:
        with subtests.test(model=model, options=options):
            exit_code, made = command(
                "plan", "a", "--model", str(tiny(model).directory), *size, "--stages", "2", *options
            )
            assert (exit_code, made["error"]["code"]) == (2, code)
    exit_code, made = command(
        "generate", "a", "--model", str(tiny(LTX2_DISTILLED[0]).directory), *size, "--stages", "2",
        "--out", str(tmp_path / "x.mp4"),
    )  # fmt: skip
    assert exit_code == 0, made
    assert made["request"]["stages"] == "2"


def test_an_upsampler_that_does_not_fit_is_refused(tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny(LTX2_DISTILLED[1]).directory, folder)
    path = folder / LATENT_UPSAMPLER / "config.json"
    config = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [
        {"in_channels": 32},
        {"mid_channels": 0},
        {"spatial_upsample": False, "temporal_upsample": True},
        {"use_rational_resampler": True, "rational_spatial_scale": 1.5},
    ]
    for change in changes:
        with subtests.test(change=change):
            path.write_text(json.dumps(config | change))
            with pytest.raises(ModelError) as caught:
                read_spec(folder, "model")
            assert caught.value.code == "model.config_invalid"
    path.unlink()
    assert read_spec(folder, "model").refinement is None


def test_a_checkpoint_is_of_one_number_of_stages(make: Make, tiny: Tiny) -> None:
    clip = make()
    clip.run(lambda event: isinstance(event, StepDone) and event.step == 2)
    spec = tiny(LTX2_DISTILLED[1])
    plan = tiny_plan(spec, clip.plan.output, steps=FIRST, sound="lossless", width=192, height=128, frames=17)
    events = Clip(spec, plan, clip.job).run(lambda event: isinstance(event, StepDone))
    assert not any(isinstance(event, Resumed) for event in events)


def test_the_published_model_is_downloaded_with_its_upsampler(
    command: Command, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (model,) = [model for model in published_models("ltx2") if model.name == "ltx-2.3-distilled"]
    files = of_folder(tiny(LTX2_DISTILLED[1]).directory).files
    with served() as hub:
        monkeypatch.setenv("TANDEM_HUB", hub.address)
        for part in model.parts:
            of_part = {path: data for path, data in files.items() if path.partition("/")[0] in part.folders}
            hub.repositories[part.repository] = Repository(of_part)
        code, made = command("models", "download", model.name, "--yes")
    assert code == 0, made
    spec = read_spec(Path(made["folder"]), "model")
    assert spec.refinement is not None
    assert spec.parameters.keys() == tiny(LTX2_DISTILLED[1]).parameters.keys()
