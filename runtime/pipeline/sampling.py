"""Sampling: noise, the denoising loop with one or two transformers and guidance per transformer, and decoding.

Equal to the family's diffusers pipeline for the same seed with a CPU generator (tests/pipeline/test_parity.py).
"""

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError, ModelError, first_line
from runtime.core.loras import active_ranges
from runtime.core.plan import ComponentPlan, ExecutionPlan
from runtime.core.request import NO_NAG, OFF
from runtime.core.sparse_attention import exact_steps
from runtime.core.step_cache import uses
from runtime.execution.components import PROMPTED, UNPROMPTED, Denoiser, VideoDecoder
from runtime.execution.decoded_frames import fetched
from runtime.execution.streams import Streams, video_of
from runtime.models.spec import ModelSpec
from runtime.models.timesteps import ShiftBySize
from runtime.pipeline.stream_guidance import StreamSampling


@dataclass(frozen=True)
class GivenFrames:
    """The frames of a clip that are given as images, as the transformers take them.

    Attributes:
        kind: see `ImageInput`, or with keyframes "keyframe" or "first_frame_and_keyframe"; those of "sections" are
            for `section_sampling` only.
        latents: float32: "channels": a mask, 1 in given frames, and the latents of the clip whose other frames are
            gray, (1, frames per latent frame + channels, frames, height, width); others: those of each image,
            (1, channels, images, height, width).
    """

    kind: str
    latents: torch.Tensor

    @classmethod
    def of(cls, spec: ModelSpec, latents: torch.Tensor, images: Collection[str]) -> "GivenFrames":
        """Return the given frames of a clip from the latents that the VAE encoded.

        Args:
            images: the keys of the images, see `ResolvedRequest.images`.
        """
        assert spec.image_input is not None
        kind = spec.image_input.kind
        if kind == "first_frame":
            if {*images} - {"image"}:
                return cls("first_frame_and_keyframe" if "image" in images else "keyframe", latents)
            return cls(kind, latents)
        mask = torch.zeros_like(latents[:, :1]).repeat(1, spec.vae.scale_factor_temporal, 1, 1, 1)
        mask[:, :, 0] = 1
        if len(images) > 1:
            mask[:, -1, -1] = 1
        return cls(kind, torch.cat([mask, latents], dim=1))

    def placed_in(self, latents: torch.Tensor, streams: Streams | None = None) -> torch.Tensor:
        """Return latents with a given first latent frame in its place; those of a clip with sound have `streams`."""
        if streams is not None:
            video, sound = streams.split(latents)
            return streams.join(self.placed_in(video), sound)
        if self.kind not in {"first_frame", "first_frame_and_keyframe"}:
            return latents
        return torch.cat([self.latents[:, :, :1], latents[:, :, 1:]], dim=2)

    def inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, streams: Streams | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a `Denoiser` takes for latents at a timestep; those of a clip with sound have `streams`."""
        if self.kind == "channels":
            return torch.cat([latents, self.latents], dim=1), timestep
        if streams is not None and streams.keyframes:
            latents = streams.with_keyframes(latents, self.latents[:, :, -len(streams.keyframes) :])
        return latents, torch.stack([torch.zeros_like(timestep), timestep])


@dataclass(frozen=True)
class Conditioning:
    """What a clip is made from.

    Attributes:
        positive: embeddings of the prompt, (1, text tokens, text width); see `Denoiser` for those of images.
        negative: of the negative prompt; `None` if no pass attends to it.
        given: `None` without an image.
        others: embeddings of the further prompts of a video's sections, in the order in which sections first use them.
        image_embeds: embeddings of the image, (1, tokens, width), for sections.
        video: latents of the video that this one is made from, (1, channels, frames, height, width), float32.
        given_half: the given frames of the first of two stages.
        suppressing: the embeddings of the prompt and of the negative prompt, (2, text tokens, text width), which a pass
            without guidance attends to, see `execution.attention_guidance`; `None` for those of the prompt alone.
    """

    positive: torch.Tensor
    negative: torch.Tensor | None
    given: GivenFrames | None = None
    others: tuple[torch.Tensor, ...] = ()
    image_embeds: torch.Tensor | None = None
    video: torch.Tensor | None = None
    given_half: GivenFrames | None = None
    suppressing: torch.Tensor | None = None

    def with_tokens(self, embeds: torch.Tensor) -> "Conditioning":
        """Return it with embeddings of images, (1, tokens, width), before those of the texts."""

        def joined(text: torch.Tensor) -> torch.Tensor:
            return torch.cat([F.pad(embeds.to(text), (0, text.shape[2] - embeds.shape[2])), text], dim=1)

        negative = None if self.negative is None else joined(self.negative)
        return replace(self, positive=joined(self.positive), negative=negative)

    def suppressing_as(self, plan: ExecutionPlan) -> "Conditioning":
        """Return it with `suppressing`, if the plan's passes without guidance attend to the negative prompt."""
        if plan.nag == NO_NAG:
            return self
        assert self.negative is not None
        return replace(self, suppressing=torch.cat([self.positive, self.negative]))


@dataclass(frozen=True)
class Step:
    """One denoising step.

    Attributes:
        timestep: scalar tensor on the transformer's device.
        sigma: the noise level before the step.
        expert: the transformer that runs it: "transformer" or "transformer_2".
        guidance_scale: the guidance scale of that transformer.
        fresh: whether the step starts with an empty step cache, so that sampling can be resumed before it.
        exact: whether sparse attention is not used.
        embedded_guidance: scalar tensor like `timestep`, 1000 times the guidance scale that the transformer takes as an
            input; `None` if it takes none.
        noise_seed: see `advanced`.
        ranges: the numbers of the LoRAs with a range of steps that are active, see `core.loras.active_ranges`.
    """

    timestep: torch.Tensor
    sigma: float
    expert: str
    guidance_scale: float
    noise_seed: int
    fresh: bool = True
    exact: bool = False
    embedded_guidance: torch.Tensor | None = None
    ranges: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[str, tuple[int, ...]]:
        """What determines the weights that run it."""
        return self.expert, self.ranges

    @property
    def times(self) -> torch.Tensor:
        """What a `Denoiser` of a clip without given frames takes as its timestep."""
        return self.timestep if self.embedded_guidance is None else torch.stack([self.timestep, self.embedded_guidance])


@dataclass(frozen=True)
class Guidance:
    """Which guidance passes run, by a plan's `guidance_cache`.

    If the predictions with and without the prompt agree in a step, the latter is left out in the next step of the same
    transformer: the difference of both is taken over. The step after that computes both again. Adaptive Guidance
    (https://arxiv.org/abs/2312.12487) leaves the pass out in all following steps, and sets the difference to zero.

    The same applies to each of the further passes of a model that makes sound. Predictions agree if those of the video
    do, and those of the sound.

    Attributes:
        strength: the largest share of the norm of the prediction with the prompt by which another one may differ;
            `None` if no pass is left out.
        differences: of the prediction with the prompt and that of each pass that the next step leaves out, shaped like
            the prediction.
        left_out: the passes left out so far.
    """

    strength: float | None = None
    differences: Mapping[str, torch.Tensor] = field(default_factory=dict)
    left_out: int = 0

    @classmethod
    def of(cls, plan: ExecutionPlan, left_out: int = 0) -> "Guidance":
        """Return the state before the first step of a plan, or of a stage after one that left out passes."""
        return cls(None if plan.guidance_cache == OFF else float(plan.guidance_cache), left_out=left_out)

    def after(
        self,
        predicted: Mapping[str, torch.Tensor],
        split: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda prediction: (prediction,),
    ) -> "Guidance":
        """Return the state after a step.

        Args:
            predicted: the predictions of the passes that it computed.
            split: returns the parts of a prediction, each of which must agree.
        """
        if self.strength is None:
            return self
        prompted = predicted[PROMPTED]
        differences = {which: prompted - other for which, other in predicted.items() if which != PROMPTED}
        differences = {
            which: difference
            for which, difference in differences.items()
            if _agree(split(difference), split(prompted), self.strength)
        }
        return replace(self, differences=differences, left_out=self.left_out + len(self.differences))


def _agree(differences: Sequence[torch.Tensor], prompted: Sequence[torch.Tensor], strength: float) -> bool:
    """Return whether the norm of each part of a difference is at most a share of that of the prediction's."""
    return all(bool(d.norm() <= strength * p.norm()) for d, p in zip(differences, prompted, strict=True))


@dataclass(frozen=True)
class SamplingState:
    """Progress of sampling: everything that the remaining steps need, except the prompt.

    Attributes:
        steps: the number of steps done, of all stages.
        latents: after these steps, (1, channels, frames, height, width), float32; with sound, see `Streams`.
        scheduler: the scheduler's state, see `checkpoint.scheduler_state`; `None` if it cannot be saved.
        guidance: after these steps.
        stage: the stage that denoises, from 0; all state but `steps` is its own.
    """

    steps: int
    latents: torch.Tensor
    scheduler: Mapping[str, Any] | None
    guidance: Guidance = Guidance()
    stage: int = 0


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        index: the number of the step, from 0.
        latents: (1, channels, frames, height, width), float32; with sound, see `Streams`.
        estimate: the clean latents as predicted at this step, of the same shape.
        seconds: the duration of the step.
        guidance: after the step.
    """

    index: int
    step: Step
    latents: torch.Tensor
    estimate: torch.Tensor
    seconds: float
    guidance: Guidance


# Raised by diffusers' schedulers for an unsuitable configuration.
_SCHEDULER_ERRORS = (ArithmeticError, AttributeError, IndexError, TypeError, ValueError)
OpenExpert = Callable[[Step], AbstractContextManager[Denoiser]]


def get_noise(plan: ExecutionPlan, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the seed's noise, (1, channels, frames, height, width), float32; with sound, see `Streams`.

    It is drawn on the CPU, so it does not depend on the device.

    Args:
        generator: draws it; by default a new one with the seed.
    """
    generator, streams = generator or torch.Generator("cpu").manual_seed(plan.seed), Streams.of(plan)
    if streams is not None and streams.keyframes:
        noise = _noise_by_tokens(streams, generator)
    else:
        noise = torch.randn(plan.latent_shape, generator=generator, dtype=torch.float32)
        if streams is not None:
            noise = streams.join(noise, torch.randn(streams.sound, generator=generator, dtype=torch.float32))
    return noise.to(plan.components["transformer"].device)


def _noise_by_tokens(streams: Streams, generator: torch.Generator) -> torch.Tensor:
    """Return noise that is drawn by tokens, as diffusers' `LTX2ConditionPipeline` does; see `Streams`.

    It draws for keyframes too, after the clip, and does not use that.
    """
    (_, channels, *grid), (_, sound_channels, latents, bins) = streams.video, streams.sound
    count = math.prod(grid)
    drawn = count + len(streams.keyframes) * math.prod(grid[1:])
    tokens = torch.randn((1, drawn, channels), generator=generator, dtype=torch.float32)[:, :count]
    sound = torch.randn((1, latents, sound_channels * bins), generator=generator, dtype=torch.float32)
    return streams.join(tokens.transpose(1, 2), sound.unflatten(2, (sound_channels, bins)).transpose(1, 2))


def refinable_latents(plan: ExecutionPlan, video: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
    """Return the latents before the second stage of a plan: those of the first one with noise, see `Streams`.

    The noise follows that of the first stage and is drawn by tokens, as diffusers' `LTX2Pipeline` does with
    `noise_scale` and one generator.

    Args:
        video: (1, channels, frames, height, width), enlarged, float32.
        sound: (1, channels, latents, bins), float32.
    """
    refinement, streams = plan.refinement, Streams.of(plan)
    assert refinement is not None
    assert streams is not None
    generator = torch.Generator("cpu").manual_seed(plan.seed)
    get_noise(plan.by_stage[0], generator)
    noise = _noise_by_tokens(streams, generator)
    level, clean = refinement.levels[0], streams.join(video, sound)
    return level * noise.to(clean.device) + (1 - level) * clean


def first_latents(noise: torch.Tensor, video: torch.Tensor | None, scheduler: Any, first: Step) -> torch.Tensor:
    """Return the latents before the first step: noise, or a video's latents with the noise of that step.

    Args:
        scheduler: its timesteps are set.

    Raises:
        ModelError: if the scheduler cannot add noise.
    """
    if video is None:
        return noise
    timesteps = first.timestep[None]
    try:
        if hasattr(scheduler, "add_noise"):
            noisy: torch.Tensor = scheduler.add_noise(video, noise, timesteps)
        else:  # those of flow matching only
            noisy = scheduler.scale_noise(video, timesteps, noise)
    except _SCHEDULER_ERRORS as error:
        raise _scheduler_error(scheduler, error) from error
    return noisy


def get_schedule(
    plan: ExecutionPlan,
    scheduler: Any,
    boundary_ratio: float | None,
    sigmas: Sequence[float] | None = None,
    by_size: ShiftBySize | None = None,
) -> list[Step]:
    """Set up the scheduler for the plan's steps and return those that run with the transformer that runs each.

    Args:
        scheduler: a diffusers flow-matching scheduler; its timesteps are set here.
        boundary_ratio: steps with timestep / training timesteps below this run the low-noise transformer.
        sigmas: given to the scheduler instead of the number of steps, see `NoiseLevels.sigmas`.
        by_size: how its shift follows from the number of tokens, see `NoiseLevels`.

    Raises:
        ModelError: if it is another kind of scheduler, or its configuration is unsuitable.
    """
    try:
        device = plan.components["transformer"].device
        if sigmas is None:
            scheduler.set_timesteps(plan.steps, device=device)
        else:
            shift = {} if by_size is None else {"mu": by_size.logarithm(plan.tokens)}
            scheduler.set_timesteps(sigmas=list(sigmas), device=device, **shift)
        # Some schedulers take several timesteps for each step.
        first = plan.skipped_steps * scheduler.order
        scheduler.set_begin_index(first)
        timesteps = scheduler.timesteps[first:]
        # Copied at once, because each copy to the CPU waits for the device. There is one more sigma (0) than timesteps.
        values, sigmas = timesteps.tolist(), scheduler.sigmas.tolist()[first:]
    except _SCHEDULER_ERRORS as error:
        raise _scheduler_error(scheduler, error) from error
    boundary = None if boundary_ratio is None else boundary_ratio * scheduler.config.num_train_timesteps
    embedded = None
    if plan.embedded_guidance is not None:
        embedded = scheduler.timesteps.new_tensor(1000 * plan.embedded_guidance)
    experts = ["transformer_2" if boundary is not None and value < boundary else "transformer" for value in values]
    low = plan.guidance_scale if plan.guidance_scale_2 is None else plan.guidance_scale_2
    scales = {"transformer": plan.guidance_scale, "transformer_2": low}
    cached = uses(plan.step_cache, experts, plan.mag_ratios)
    exact = exact_steps(plan.steps) - plan.skipped_steps
    return [
        Step(
            timestep,
            sigma,
            expert,
            scales[expert],
            noise_seed(plan.seed, index),
            use.fresh,
            index < exact,
            embedded,
            active_ranges(plan.loras, expert, index, len(experts)),
        )
        for index, (timestep, sigma, expert, use) in enumerate(zip(timesteps, sigmas, experts, cached, strict=False))
    ]


def noise_seed(seed: int, *number: int) -> int:
    """Return the seed of a step's noise, by the video's seed and the numbers of the step and, if any, its section."""
    digest = hashlib.sha256(repr((seed, *number)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def advanced(
    scheduler: Any, velocity: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, noise_seed: int
) -> torch.Tensor:
    """Return the latents after one step of a scheduler.

    Noise that it adds is drawn on the CPU and depends on `noise_seed` only, so that a step can be repeated: after a
    resume, by another backend, and on each of several GPUs.

    Raises:
        ModelError: if the scheduler's configuration is unsuitable, or its noise cannot be repeated.
    """
    seeded = {}
    if "generator" in inspect.signature(scheduler.step).parameters:
        seeded["generator"] = torch.Generator("cpu").manual_seed(noise_seed)
    elif hasattr(scheduler, "noise_sampler"):  # diffusers' schedulers for stochastic differential equations
        raise ModelError("pipeline.scheduler_noise", scheduler=type(scheduler).__name__)
    try:
        after: torch.Tensor = scheduler.step(velocity, timestep, latents, return_dict=False, **seeded)[0]
    except _SCHEDULER_ERRORS as error:
        raise _scheduler_error(scheduler, error) from error
    return after


def _scheduler_error(scheduler: Any, error: Exception) -> ModelError:
    return ModelError("pipeline.scheduler_failed", scheduler=type(scheduler).__name__, error=first_line(error))


def resumable_after(steps: list[Step], done: int) -> bool:
    """Return whether sampling can be resumed after `done` steps: the next step needs no step cache."""
    return done >= len(steps) or steps[done].fresh


def denoise(
    latents: torch.Tensor,
    steps: list[Step],
    scheduler: Any,
    conditioning: Conditioning,
    open_expert: OpenExpert,
    cancel: Cancel,
    start: int = 0,
    guidance: Guidance = Guidance(),
    sampling: StreamSampling | None = None,
) -> Iterator[StepResult]:
    """Run the loop and yield each step's result; a transformer stays loaded until a step needs other weights.

    Args:
        latents: noise, or the latents after `start` steps; the scheduler then has the state after these steps.
        guidance: after `start` steps.
        sampling: of a clip with sound.

    Raises:
        BadResultError: if the latents become NaN or Inf; not if those of the sound alone do in the last step.
        ModelError: if the scheduler's configuration is unsuitable.
        CancelledError: within one step of the request.
        PausedError: before the next step.
    """
    index, given_frames = start, conditioning.given
    streams = None if sampling is None else sampling.streams
    if given_frames is not None:
        latents = given_frames.placed_in(latents, streams)
    while index < len(steps):
        first = steps[index]
        with open_expert(first) as denoiser:
            while index < len(steps) and steps[index].weights == first.weights:
                cancel.check_pause()
                step = steps[index]
                started = time.perf_counter()
                denoiser.begin_step(fresh=step.fresh, exact=step.exact)
                if index and steps[index - 1].weights != first.weights:
                    guidance = replace(guidance, differences={})
                velocity, guidance = _guided(denoiser, latents, step, conditioning, cancel, guidance, sampling)
                estimate = latents - step.sigma * velocity
                latents = advanced(scheduler, velocity, step.timestep, latents, step.noise_seed)
                if given_frames is not None:
                    latents, estimate = (given_frames.placed_in(state, streams) for state in (latents, estimate))
                # Reading one value waits for the device, so the measured time is the step's own.
                # Each step reads both streams. After the last one, the frames are good without the sound.
                needed = video_of(latents, streams) if index + 1 == len(steps) else latents
                if not torch.isfinite(needed).all().item():
                    raise BadResultError("pipeline.not_finite", step=index + 1, of=len(steps))
                yield StepResult(index, step, latents, estimate, time.perf_counter() - started, guidance)
                index += 1


def decode(
    decoder: VideoDecoder,
    latents: torch.Tensor,
    chunk: int,
    cancel: Cancel,
    tile: int | None = None,
    *,
    part: Callable[[], ComponentPlan] | None = None,
) -> Generator[torch.Tensor, None, None]:
    """Yield frames, (n, height, width, 3) uint8 on the CPU, as they are decoded.

    Args:
        chunk, tile: see `VideoDecoder.frames`.
        part: see `decoded_frames.fetched`.

    Raises:
        BadResultError: if the frames contain NaN or Inf.
        CancelledError, PausedError: within one chunk of the request.
    """
    yield from fetched(decoder.frames(latents, chunk, tile), cancel.check_pause, part)


def _guided(
    denoiser: Denoiser,
    latents: torch.Tensor,
    step: Step,
    conditioning: Conditioning,
    cancel: Cancel,
    guidance: Guidance,
    sampling: StreamSampling | None,
) -> tuple[torch.Tensor, Guidance]:
    """Return the predicted velocity, with guidance if the step has it, and the state after the step."""
    positive, negative, given_frames = conditioning.positive, conditioning.negative, conditioning.given
    streams = None if sampling is None else sampling.streams
    inputs = (latents, step.times) if given_frames is None else given_frames.inputs(latents, step.timestep, streams)
    if negative is None or step.guidance_scale <= 1:
        velocity = denoiser(*inputs, positive if conditioning.suppressing is None else conditioning.suppressing)
        return velocity if streams is None else streams.without_keyframes(velocity), guidance
    passes = (PROMPTED, UNPROMPTED) if sampling is None else sampling.passes
    texts = {which: negative if which == UNPROMPTED else positive for which in passes}
    computed = {which: text for which, text in texts.items() if which not in guidance.differences}
    calls = _predicted(denoiser, inputs, computed, cancel)
    if sampling is not None:
        # Copies, because a later call may write over a prediction.
        predicted = {which: prediction.to(torch.float32, copy=True) for which, prediction in calls}
        taken_over = {which: predicted[PROMPTED] - difference for which, difference in guidance.differences.items()}
        velocity = sampling.velocity({**predicted, **taken_over}, inputs[0], step.sigma, step.guidance_scale)
        return sampling.streams.without_keyframes(velocity), guidance.after(predicted, sampling.streams.split)
    predicted = dict(calls)
    if UNPROMPTED in predicted:
        difference = predicted[PROMPTED] - predicted[UNPROMPTED]
        velocity = predicted[UNPROMPTED] + step.guidance_scale * difference
    else:
        velocity = predicted[PROMPTED] + (step.guidance_scale - 1) * guidance.differences[UNPROMPTED]
    return velocity, guidance.after(predicted)


def _predicted(
    denoiser: Denoiser,
    inputs: tuple[torch.Tensor, torch.Tensor],
    texts: Mapping[str, torch.Tensor],
    cancel: Cancel,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the prediction of each of a step's passes as it is computed; see `Denoiser` for how long it is valid."""
    if denoiser.pairs:
        yield from zip(texts, denoiser.together(*inputs, texts), strict=True)
        return
    for which, text in texts.items():
        cancel.check()
        yield which, denoiser(*inputs, text, which=which)
