"""Sampling by sections equals diffusers' `HunyuanVideoFramepackPipeline`, and resumes with the same bits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoFramepackPipeline
from PIL import Image
from safetensors.torch import load, save

from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.errors import BadResultError
from runtime.execution.components import UNPROMPTED
from runtime.families.framepack import components
from runtime.families.framepack.image_encoder import image_latents, pixels_of
from runtime.families.framepack.transformer import PyTorchSectionDenoiser
from runtime.models.sections import SamplingType, Sections
from runtime.models.spec import ModelSpec, SectionSpec
from runtime.pipeline.sampling import Conditioning, GivenFrames
from runtime.pipeline.section_sampling import (
    FinishedSection,
    Prompts,
    SectionConditioning,
    SectionedVideo,
    SectionProgress,
    StepResult,
    conditioning_of,
    finished_sections,
    sections_of,
)
from tests.families.framepack_models import LATENT_CHANNELS, pipeline
from tests.plans import tiny_plan

INVERTED, VANILLA = SamplingType.INVERTED_ANTI_DRIFTING, SamplingType.VANILLA
WINDOW, STEPS, SEED = 3, 2, 7
WIDTH, HEIGHT = 48, 32
PROMPT, NEGATIVE = "a red boat sails left", "calm sea at night"
# The text of a tiny model has few tokens.
TEXT_TOKENS = 16


@pytest.fixture(scope="module")
def reference() -> HunyuanVideoFramepackPipeline:
    """Return diffusers' pipeline of a tiny model."""
    return pipeline()


def picture(seed: int) -> Image.Image:
    """Return a random image of the video's size."""
    values = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return Image.fromarray(values)


class Job:
    """A video of the tiny model, made by the pipeline or by sections."""

    def __init__(
        self,
        reference: HunyuanVideoFramepackPipeline,
        sections: Sections,
        *,
        last_image: bool = False,
        true_cfg: bool = False,
    ) -> None:
        self.reference = reference
        self.sections = sections
        self.images = [picture(1), picture(2)][: 1 + last_image]
        self.scale = 2.5 if true_cfg else 1.0
        self.denoiser = PyTorchSectionDenoiser(copy.deepcopy(reference.transformer))

    def of_pipeline(self, output_type: str) -> Any:
        """Return what the pipeline makes: histories of latents, or (frames, height, width, 3) in 0 to 1."""
        return self.reference(
            image=self.images[0],
            last_image=self.images[1] if len(self.images) > 1 else None,
            prompt=PROMPT,
            negative_prompt=NEGATIVE if self.scale > 1 else None,
            true_cfg_scale=self.scale,
            width=WIDTH,
            height=HEIGHT,
            num_frames=self.sections.count * self.sections.overlap,
            latent_window_size=WINDOW,
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            max_sequence_length=TEXT_TOKENS,
            sampling_type=self.sections.sampling_type.value,
            generator=torch.Generator("cpu").manual_seed(SEED),
            output_type=output_type,
        ).frames

    def text(self, text: str) -> torch.Tensor:
        """Return a text's embeddings, without padding."""
        with torch.no_grad():
            tokens, pooled, mask = self.reference.encode_prompt(text, max_sequence_length=TEXT_TOKENS)
        pooled = torch.nn.functional.pad(pooled, (0, tokens.shape[2] - pooled.shape[1]))
        return torch.cat([pooled[:, None], tokens[:, : int(mask.sum())]], dim=1)

    def begin(self) -> tuple[SectionConditioning, SectionProgress]:
        """Return what the video is made from, and the progress before its first section."""
        generator = torch.Generator("cpu").manual_seed(SEED)
        model, vae = components.image_model(self.reference.image_encoder, "cpu"), self.reference.vae
        with torch.no_grad():
            moments = [vae.encode(pixels_of(one)[:, :, None]).latent_dist.parameters for one in self.images]
        latents = [image_latents(one, vae.config.scaling_factor, generator) for one in moments]
        prompts = Prompts(self.text(PROMPT), self.text(NEGATIVE) if self.scale > 1 else None)
        conditioning = SectionConditioning(
            prompts=lambda _: prompts,
            image=latents[0],
            image_embeds=components.image_encoder(self.reference.feature_extractor, model).encode(self.images[:1]),
            last_image=latents[1] if len(latents) > 1 else None,
            guidance_scale=4.0,
            true_guidance_scale=self.scale,
        )
        return conditioning, SectionProgress.start(self.sections, latents[0], generator)

    def run(
        self,
        conditioning: SectionConditioning,
        progress: SectionProgress,
        cancel: Cancel | None = None,
        on_step: Callable[[StepResult], None] = lambda _: None,
    ) -> Iterator[FinishedSection]:
        """Yield the remaining sections."""
        return finished_sections(
            SectionedVideo(self.sections, conditioning, self.reference.scheduler, STEPS, 0),
            progress,
            lambda: nullcontext(self.denoiser),
            lambda: nullcontext(self.decode),
            cancel or Cancel(),
            on_step,
        )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the frames of latents, (frames, height, width, 3)."""
        vae = self.reference.vae
        frames: torch.Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return frames[0].permute(1, 2, 3, 0)


def video_of(sections: Sections, made: list[FinishedSection]) -> torch.Tensor:
    """Return the frames of sections where they belong, (frames, height, width, 3) in 0 to 1."""
    frames = torch.full((sections.frames, HEIGHT, WIDTH, 3), torch.nan)
    for one in made:
        frames[list(one.section.frames)] = one.frames
    return (frames * 0.5 + 0.5).clamp(0, 1)


def check_equal(job: Job) -> None:
    """Compare the latents after each section and the frames with the pipeline's."""
    sections, made = job.sections, list(job.run(*job.begin()))
    assert [one.section.index for one in made] == list(range(sections.count))
    histories = job.of_pipeline("latent")
    assert len(histories) == sections.count
    for one, expected in zip(made, histories, strict=True):
        kept = min(expected.shape[2], sections.history)
        own = one.progress.history
        if sections.inverted:
            torch.testing.assert_close(own[:, :, :kept], expected[:, :, :kept], atol=1e-4, rtol=0)
        else:
            torch.testing.assert_close(own[:, :, -kept:], expected[:, :, -kept:], atol=1e-4, rtol=0)
    expected = torch.from_numpy(job.of_pipeline("np")[0])
    assert expected.shape[0] == sections.frames
    torch.testing.assert_close(video_of(sections, made), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "true_cfg"), [(1, False), (3, True)])
@pytest.mark.parametrize(("sampling_type", "last_image"), [(INVERTED, False), (INVERTED, True), (VANILLA, False)])
def test_equals_pipeline(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType, last_image: bool, count: int, true_cfg: bool
) -> None:
    sections = Sections(count, sampling_type, WINDOW)
    check_equal(Job(reference, sections, last_image=last_image, true_cfg=true_cfg))


@pytest.mark.slow
@pytest.mark.parametrize("sampling_type", SamplingType)
def test_equals_pipeline_with_more_sections_than_were_trained(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType
) -> None:
    check_equal(Job(reference, Sections(6, sampling_type, WINDOW)))


def test_equals_pipeline_with_a_shift_that_depends_on_the_size() -> None:
    check_equal(Job(pipeline(dynamic_shift=True), Sections(1, INVERTED, WINDOW)))


def from_file(progress: SectionProgress) -> SectionProgress:
    """Return a progress after a way through a file."""
    tensors = {"history": progress.history, "generator": progress.generator}
    if progress.latents is not None:
        tensors["latents"] = progress.latents
    return SectionProgress(progress.sections, steps=progress.steps, **load(save(tensors)))


@pytest.mark.slow
@pytest.mark.parametrize("sampling_type", SamplingType)
@pytest.mark.parametrize("after", [1, 2])
def test_resumes_between_sections_with_the_same_bits(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType, after: int
) -> None:
    job = Job(reference, Sections(3, sampling_type, WINDOW), last_image=sampling_type is INVERTED)
    whole = list(job.run(*job.begin()))
    conditioning, _ = job.begin()
    resumed = list(job.run(conditioning, from_file(whole[after - 1].progress)))
    assert [one.section for one in resumed] == [one.section for one in whole[after:]]
    for own, expected in zip(resumed, whole[after:], strict=True):
        assert torch.equal(own.progress.history, expected.progress.history)
        assert torch.equal(own.progress.generator, expected.progress.generator)
        assert torch.equal(own.frames, expected.frames)
        assert torch.equal(own.pending, expected.pending)


@pytest.mark.slow
@pytest.mark.parametrize("sampling_type", SamplingType)
def test_resumes_within_a_section_with_the_same_bits(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType
) -> None:
    job = Job(reference, Sections(3, sampling_type, WINDOW))
    steps: list[StepResult] = []
    whole = list(job.run(*job.begin(), on_step=steps.append))
    assert [(one.section.index, one.index) for one in steps] == [(n, i) for n in range(3) for i in range(STEPS)]
    for number in (0, STEPS, STEPS + 1):
        within = steps[number].progress
        assert (within.sections, within.steps) == (number // STEPS, number % STEPS + 1)
        resumed = list(job.run(job.begin()[0], from_file(within)))
        for own, expected in zip(resumed, whole[within.sections :], strict=True):
            assert torch.equal(own.frames, expected.frames)
            assert torch.equal(own.progress.history, expected.progress.history)


@pytest.mark.slow
@pytest.mark.parametrize("sampling_type", SamplingType)
def test_a_video_that_ends_early_is_the_pipelines_of_that_section(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final frames and the pending ones are the pipeline's `history_video` after a section."""
    job = Job(reference, Sections(3, sampling_type, WINDOW))
    made = list(job.run(*job.begin()))[:2]
    expected: list[torch.Tensor] = []
    append = reference._soft_append

    def recorded(*given: Any) -> torch.Tensor:
        expected.append(append(*given))
        return expected[-1]

    monkeypatch.setattr(reference, "_soft_append", recorded)
    job.of_pipeline("np")
    final = [one.frames for one in made]
    parts = [made[-1].pending, *reversed(final)] if sampling_type is INVERTED else [*final, made[-1].pending]
    torch.testing.assert_close(torch.cat(parts), expected[0][0].permute(1, 2, 3, 0), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_each_section_has_its_prompt(reference: HunyuanVideoFramepackPipeline) -> None:
    job = Job(reference, Sections(3, VANILLA, WINDOW))
    conditioning, progress = job.begin()
    same = list(job.run(conditioning, progress))
    other = Prompts(job.text("blue ball rolls right"))
    changing = replace(
        conditioning, prompts=lambda section: other if section.index == 1 else conditioning.prompts(section)
    )
    changed = list(job.run(changing, progress))
    assert torch.equal(changed[0].progress.history, same[0].progress.history)
    assert not torch.equal(changed[1].progress.history, same[1].progress.history)


class Computed:
    """A transformer that computes its prediction from the latents alone, by one function for each kind of prompt."""

    pairs = False
    together: Any = None

    def __init__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        unprompted: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._compute, self._unprompted = compute, unprompted or compute

        self.exact: list[bool] = []

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """Record which steps are exact."""
        self.exact.append(exact)

    def see(self, inputs: Any) -> None:
        """Ignore what a section is sampled from."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = ""
    ) -> torch.Tensor:
        """Return the prediction, for the negative prompt that of another function if there is one."""
        return (self._unprompted if which == UNPROMPTED else self._compute)(latents)


halved = Computed(lambda latents: latents / 2)


def made_of_zeros(sections: Sections) -> tuple[SectionConditioning, SectionProgress]:
    """Return the conditioning and the start of a video of a gray image, without text."""
    nothing, image = torch.zeros(1, 1, 1), torch.zeros(1, LATENT_CHANNELS, 1, 2, 2)
    prompts = Prompts(nothing)
    conditioning = SectionConditioning(lambda _: prompts, image, nothing)
    return conditioning, SectionProgress.start(sections, image, torch.Generator("cpu").manual_seed(SEED))


@pytest.mark.parametrize("sampling_type", SamplingType)
def test_memory_does_not_grow_with_sections(
    reference: HunyuanVideoFramepackPipeline, sampling_type: SamplingType
) -> None:
    sections, opened, sizes = Sections(50, sampling_type), 0, set()
    last_frames: list[ref[torch.Tensor]] = []

    @contextmanager
    def alone(value: Any) -> Iterator[Any]:
        nonlocal opened
        opened += 1
        assert opened == 1
        if value is halved:
            assert not any(one() is not None for one in last_frames)
        yield value
        opened -= 1

    def decode(latents: torch.Tensor) -> torch.Tensor:
        sizes.add(("decoded", latents.shape[2]))
        return latents.new_zeros((latents.shape[2] - 1) * 4 + 1, 2, 2, 3)

    conditioning, progress = made_of_zeros(sections)
    made = finished_sections(
        SectionedVideo(sections, conditioning, reference.scheduler, 1, 0),
        progress,
        lambda: alone(halved),
        lambda: alone(decode),
        Cancel(),
    )
    frames = 0
    for one in made:
        last_frames.append(ref(one.frames))
        frames += len(one.frames)
        for tensor in (one.progress.history, one.pending):
            # What a tensor holds, not only what it shows.
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        sizes |= {("history", one.progress.history.shape[2]), ("pending", len(one.pending))}
        del one
    assert frames == 1801
    assert {kind: max(size for name, size in sizes if name == kind) for kind, _ in sizes} == {
        "decoded": 19 if sampling_type is INVERTED else 18,
        "history": 19,
        "pending": 33,
    }


@pytest.mark.slow
def test_stops_before_the_next_step_and_can_go_on(reference: HunyuanVideoFramepackPipeline) -> None:
    job, cancel = Job(reference, Sections(2, VANILLA, WINDOW)), Cancel()
    conditioning, progress = job.begin()
    steps: list[StepResult] = []

    def pause(step: StepResult) -> None:
        steps.append(step)
        if len(steps) == STEPS + 1:
            cancel.pause()

    made: list[FinishedSection] = []
    with pytest.raises(PausedError):
        made.extend(job.run(conditioning, progress, cancel, pause))
    assert (steps[-1].progress.sections, steps[-1].progress.steps) == (1, 1)
    whole = list(job.run(conditioning, progress))
    (rest,) = job.run(conditioning, steps[-1].progress)
    assert torch.equal(rest.frames, whole[1].frames)


def test_cancelling_takes_effect_between_the_passes_of_a_step(reference: HunyuanVideoFramepackPipeline) -> None:
    sections, cancel = Sections(1, INVERTED, WINDOW), Cancel()
    conditioning, progress = made_of_zeros(sections)
    prompts = conditioning.prompts(sections[0])
    guided = replace(
        conditioning, prompts=lambda _: Prompts(prompts.positive, prompts.positive), true_guidance_scale=2.0
    )
    calls = 0

    def cancelling(latents: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        cancel.request()
        return latents

    made = finished_sections(
        SectionedVideo(sections, guided, reference.scheduler, STEPS, 0),
        progress,
        lambda: nullcontext(Computed(cancelling)),
        lambda: nullcontext(lambda latents: latents),
        cancel,
    )
    with pytest.raises(CancelledError):
        next(made)
    assert calls == 1


def test_guidance_leads_away_from_the_negative_prompt(reference: HunyuanVideoFramepackPipeline) -> None:
    sections = Sections(1, VANILLA, WINDOW)

    def decode(latents: torch.Tensor) -> torch.Tensor:
        return latents.new_zeros((latents.shape[2] - 1) * 4 + 1, 2, 2, 3)

    def history(transformer: Computed, negative: torch.Tensor | None, scale: float) -> torch.Tensor:
        conditioning, progress = made_of_zeros(sections)
        prompts = Prompts(conditioning.prompts(sections[0]).positive, negative)
        guided = replace(conditioning, prompts=lambda _: prompts, true_guidance_scale=scale)
        video = SectionedVideo(sections, guided, reference.scheduler, STEPS, 0)
        (section,) = finished_sections(
            video, progress, lambda: nullcontext(transformer), lambda: nullcontext(decode), Cancel()
        )
        return section.progress.history

    both = Computed(lambda latents: latents / 2, lambda latents: latents / 4)
    negative = torch.zeros(1, 1, 1)
    guided = Computed(lambda latents: latents / 4 + 3 * (latents / 2 - latents / 4))
    torch.testing.assert_close(history(both, negative, 3.0), history(guided, None, 1.0))
    for negative_prompt, scale in ((negative, 1.0), (None, 3.0)):
        assert torch.equal(history(both, negative_prompt, scale), history(halved, None, 1.0))


def test_the_first_fifth_of_each_sections_steps_is_exact(reference: HunyuanVideoFramepackPipeline) -> None:
    sections, transformer = Sections(2, VANILLA, WINDOW), Computed(lambda latents: latents / 2)
    conditioning, progress = made_of_zeros(sections)
    video = SectionedVideo(sections, conditioning, reference.scheduler, 6, 0)

    def decode(latents: torch.Tensor) -> torch.Tensor:
        return latents.new_zeros((latents.shape[2] - 1) * 4 + 1, 2, 2, 3)

    made = finished_sections(video, progress, lambda: nullcontext(transformer), lambda: nullcontext(decode), Cancel())
    assert len(list(made)) == 2
    assert transformer.exact == [True, True, False, False, False, False] * 2


def test_a_video_is_made_from_what_was_encoded(tiny: Callable[[str], ModelSpec]) -> None:
    spec = replace(tiny("wan2.1"), section=SectionSpec(latent_frames=9, sampling_type="vanilla"))
    plan = tiny_plan(spec, Path("x.mp4"), frames=73)
    latents, embeds, text = torch.randn(1, 16, 2, 4, 8), torch.randn(1, 5, 4), torch.randn(1, 3, 4)
    encoded = Conditioning(text, -text, GivenFrames("sections", latents), (), embeds)
    for embedded, scale in ((6.0, 6.0), (None, 1.0)):
        conditioning = conditioning_of(plan.replace(embedded_guidance=embedded), spec, encoded)
        assert (conditioning.guidance_scale, conditioning.true_guidance_scale) == (scale, plan.guidance_scale)
    assert conditioning.last_image is not None and conditioning.image_embeds is embeds
    assert torch.equal(torch.cat([conditioning.image, conditioning.last_image], dim=2), latents)
    prompts = conditioning.prompts(sections_of(plan, spec)[1])
    assert prompts.positive is text and prompts.negative is encoded.negative


def test_nan_is_refused(reference: HunyuanVideoFramepackPipeline) -> None:
    sections = Sections(1, VANILLA, WINDOW)
    conditioning, progress = made_of_zeros(sections)
    made = finished_sections(
        SectionedVideo(sections, conditioning, reference.scheduler, STEPS, 0),
        progress,
        lambda: nullcontext(Computed(lambda latents: latents * torch.nan)),
        lambda: nullcontext(lambda latents: latents),
        Cancel(),
    )
    with pytest.raises(BadResultError) as raised:
        next(made)
    assert raised.value.fact.code == "pipeline.not_finite"
