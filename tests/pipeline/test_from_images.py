"""Videos that start from images: latents equal `WanImageToVideoPipeline`'s, and jobs resume, share GPUs and retry."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from safetensors.torch import save_file

from runtime.core.events import Failed, Paused, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan, Split
from runtime.core.request import GenerationRequest
from runtime.execution.image_encoder import PyTorchImageModel
from runtime.execution.residency import Residency
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.models.images import with_images
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.planner.resolve import PlanningContext, resolve
from tests.image_files import picture
from tests.lora_files import factors, peft
from tests.pipeline.runs import events_of
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_parallel import apart
from tests.pipeline.test_resume import run, steps_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan, with_strategy
from tests.wan_pipeline import run_pipeline

Tiny = Callable[[str], ModelSpec]
# Architectures with the number of images.
CASES = [
    ("wan2.2-i2v-a14b", 1),
    ("wan2.2-i2v-a14b", 2),
    ("wan2.1-i2v", 1),
    ("wan2.1-flf2v", 2),
    ("wan2.2-ti2v-5b", 1),
]
ONCE = [CASES[1], CASES[2], CASES[4]]


class Clip(NamedTuple):
    """A plan with its model and images."""

    plan: ExecutionPlan
    spec: ModelSpec
    images: list[Image.Image]


def planned(spec: ModelSpec, images: int, folder: Path, **values: Any) -> Clip:
    """Plan a tiny clip that starts from an image of its size and, with two images, ends with another."""
    pictures = [picture(64, 32), picture(64, 32).transpose(Image.Transpose.ROTATE_180)][:images]
    for number, image in enumerate(pictures):
        image.save(folder / f"{number}.png")
    fields: dict[str, Any] = {"prompt": "a red boat", "negative_prompt": "blue ball", "width": 64, "height": 32}
    fields |= {"frames": 9, "steps": 4, "seed": 3, "fps": 8, "guidance_scale": 4.0}
    files = {name: str(folder / f"{n}.png") for n, name in enumerate(["image", "last_image"][:images])}
    request = GenerationRequest.from_mapping(fields | files | values)
    spec = with_images(with_loras(spec, request.loras, folder), request, folder, folder)
    return Clip(resolve(request, spec, PlanningContext(machine(), folder / "x.mp4")), spec, pictures)


def final_latents(clip: Clip, folder: Path) -> torch.Tensor:
    """Run a job; return the latents of its last checkpoint."""
    events = run(clip.plan, clip.spec, folder)
    assert isinstance(events[-1], VideoSaved), events[-1]
    found = CheckpointFolder(folder).load(clip.spec, clip.plan)
    assert found is not None and found.sampling is not None and found.step == clip.plan.steps
    return found.sampling.latents


class Finished(NamedTuple):
    """The video of a job that nothing interrupted, and its last latents."""

    frames: bytes
    latents: torch.Tensor


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Finished]:
    """Return a function that returns the plain clip of an architecture, made once."""

    @cache
    def made(architecture: str, images: int) -> Finished:
        folder = tmp_path_factory.mktemp("finished")
        clip = planned(tiny(architecture), images, folder)
        latents = final_latents(clip, folder / "job")
        return Finished(frames_of(clip.plan.output), latents)

    return made


Make = Callable[[str, int], Finished]


def by_diffusers(clip: Clip) -> torch.Tensor:
    """Return the latents of `WanImageToVideoPipeline` for a clip."""
    directory = clip.spec.directory
    if clip.spec.image_input is not None and clip.spec.image_input.required:
        pipeline = WanImageToVideoPipeline.from_pretrained(directory)
    else:
        parts = WanPipeline.from_pretrained(directory).components
        pipeline = WanImageToVideoPipeline(**parts, boundary_ratio=clip.spec.boundary_ratio, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    last = {"last_image": clip.images[1]} if len(clip.images) > 1 else {}
    latents: torch.Tensor = run_pipeline(pipeline.to(torch.float32), clip.plan, "latent", image=clip.images[0], **last)
    return latents


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "images", "guidance"), [*((*case, 4.0) for case in CASES), (*CASES[2], 1.0)])
def test_latents_equal_wan_image_to_video_pipelines(
    architecture: str, images: int, guidance: float, tiny: Tiny, finished: Make, tmp_path: Path
) -> None:
    clip = planned(tiny(architecture), images, tmp_path, guidance_scale=guidance)
    plain = guidance == 4.0
    made = finished(architecture, images).latents if plain else final_latents(clip, tmp_path / "job")
    wanted = by_diffusers(clip)
    assert wanted.std() > 0.1
    assert abs(made - wanted).max() < 1e-4


def test_an_image_of_the_frames_size_is_not_changed(tiny: Tiny, finished: Make, tmp_path: Path) -> None:
    fitted = planned(tiny("wan2.2-ti2v-5b"), 1, tmp_path, image_fit="fit", image_position=10)
    assert torch.equal(final_latents(fitted, tmp_path / "job"), finished("wan2.2-ti2v-5b", 1).latents)


def test_one_frame_from_an_image(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-i2v-a14b"), 1, tmp_path, frames=1)
    assert abs(final_latents(clip, tmp_path / "job") - by_diffusers(clip)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "images", "keep"), [(*case, keep) for case, keep in zip(ONCE, (True, False, False), strict=True)]
)
def test_a_job_resumes_after_the_images_are_gone(
    architecture: str, images: int, keep: bool, tiny: Tiny, finished: Make, tmp_path: Path
) -> None:
    clip = planned(tiny(architecture), images, tmp_path)
    clip = clip._replace(plan=with_strategy(clip.plan, keep_loaded=keep))
    for file in tmp_path.glob("*.png"):
        file.unlink()
    stops: list[Callable[[Any], bool]] = [
        lambda event: isinstance(event, StageStarted) and event.part == "vae_encoder" and event.stage == "encode",
        lambda event: isinstance(event, StepDone) and event.step == 2,
    ]
    for stop in stops:
        assert isinstance(run(clip.plan, clip.spec, tmp_path / "job", stop=stop)[-1], Paused)
    events = run(clip.plan, clip.spec, tmp_path / "job")
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert frames_of(clip.plan.output) == finished(architecture, images).frames
    assert Resumed(step=2, of=4) in events and steps_of(events) == [3, 4]
    encoders = {event.part for event in events if isinstance(event, StageStarted)}
    assert not {"text_encoder", "image_encoder", "vae_encoder"} & encoders


def test_a_checkpoint_of_another_image_is_not_used(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-ti2v-5b"), 1, tmp_path)
    run(clip.plan, clip.spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == 2)
    picture(64, 32).rotate(180).save(tmp_path / "other.png")
    other = planned(tiny("wan2.2-ti2v-5b"), 1, tmp_path, image=str(tmp_path / "other.png"))
    events = run(other.plan, other.spec, tmp_path / "job")
    assert steps_of(events) == [1, 2, 3, 4]
    assert "checkpoint.other_clip" in str([getattr(event, "fact", "") for event in events])


def test_a_job_without_its_copy_fails_with_the_reason(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-ti2v-5b"), 1, tmp_path)
    assert clip.plan.image is not None
    clip.plan.image.path.unlink()
    failed = run(clip.plan, clip.spec, None)[-1]
    assert isinstance(failed, Failed) and not failed.internal
    assert failed.fact.code == "image.gone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PyTorchVideoEncoder, PyTorchImageModel])
def test_out_of_memory_is_retried_with_the_same_video(
    kind: type, tiny: Tiny, finished: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = planned(tiny("wan2.1-i2v"), 1, tmp_path)
    assert clip.plan.strategy.keep_loaded
    wanted = finished("wan2.1-i2v", 1).frames
    name, calls = ("latents" if kind is PyTorchVideoEncoder else "__call__"), 0
    computed = getattr(kind, name)

    def starving(*inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("on purpose")
        result: torch.Tensor = computed(*inputs)
        return result

    monkeypatch.setattr(kind, name, starving)
    events = run(clip.plan, clip.spec, None)
    assert isinstance(events[-1], VideoSaved), events[-1]
    component = "vae_encoder" if kind is PyTorchVideoEncoder else "image_encoder"
    assert [(out.stage, out.component, out.retried) for out in outs(events)] == [("encode", component, True)]
    assert frames_of(clip.plan.output) == wanted


def test_out_of_memory_without_an_image_on_a_model_that_takes_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, starved = tiny_plan(tiny("wan2.2-ti2v-5b"), tmp_path / "x.mp4"), False
    computed = PyTorchVideoDecoder.frames

    def starving(self: PyTorchVideoDecoder, *inputs: Any) -> Iterator[torch.Tensor]:
        nonlocal starved
        if not starved:
            starved = True
            raise torch.OutOfMemoryError("on purpose")
        yield from computed(self, *inputs)

    monkeypatch.setattr(PyTorchVideoDecoder, "frames", starving)
    events = run(plan, tiny("wan2.2-ti2v-5b"), None)
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert [out.component for out in outs(events)] == ["vae"]


@pytest.fixture(scope="module")
def residency() -> Iterator[Residency]:
    """Processes that these tests share."""
    with Residency() as residency:
        yield residency


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "images", "split"), [(*ONCE[0], (2, 1)), (*ONCE[1], (1, 2)), (*ONCE[2], (1, 2))]
)
def test_several_processes_make_the_same_video(
    architecture: str,
    images: int,
    split: tuple[int, int],
    tiny: Tiny,
    finished: Make,
    residency: Residency,
    tmp_path: Path,
) -> None:
    clip = planned(tiny(architecture), images, tmp_path)
    shared = Split(devices=("cpu", "cpu"), guidance=split[0], sequence=split[1], decode=True)
    together = with_strategy(clip.plan, keep_loaded=True).replace(split=shared)

    events = events_of(together, clip.spec, residency)
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert apart(together.output, finished(architecture, images).frames) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "images"), [ONCE[0], ONCE[2]])
def test_a_step_cache_starts_from_images(architecture: str, images: int, tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny(architecture), images, tmp_path, steps=8, step_cache="first-block:0.9")
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    cached = frames_of(clip.plan.output)
    run(clip.plan.replace(step_cache="none"), clip.spec, None)
    exact = frames_of(clip.plan.output)
    assert cached != exact
    first = clip.plan.width * clip.plan.height * 3
    if architecture == "wan2.2-ti2v-5b":  # the first frame is given
        difference = np.frombuffer(cached[:first], np.uint8).astype(int) - np.frombuffer(exact[:first], np.uint8)
        assert np.abs(difference).max() <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "images"), [ONCE[0], ONCE[1]])
def test_a_lora_changes_a_video_from_images(
    architecture: str, images: int, tiny: Tiny, finished: Make, tmp_path: Path
) -> None:
    spec = tiny(architecture)
    save_file(peft(factors(spec.transformer)), tmp_path / "style.safetensors")
    changed = planned(spec, images, tmp_path, loras=[f"{tmp_path}/style.safetensors:0.5"])
    assert abs(final_latents(changed, tmp_path / "job") - finished(architecture, images).latents).max() > 1e-3
