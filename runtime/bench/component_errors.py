"""One forward pass of each component on the same inputs: relative errors against the reference configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from runtime.core.cancel import Cancel
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import TextEncoding, joined
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import Conditioning, GivenFrames, Step, get_noise, get_schedule
from runtime.pipeline.stages import image_latents, images_of


class StandaloneJob:
    """A user of components outside the queue, which records what does not run as planned.

    Attributes:
        cancel: stops the measurement.
        fallbacks: by component, the reason why it does not run as planned.
    """

    def __init__(self, plan: ExecutionPlan, cancel: Cancel) -> None:
        self._plan = plan
        self.cancel = cancel
        self.fallbacks: dict[str, str] = {}

    @property
    def plan(self) -> ExecutionPlan:
        """See `residency.Watch`."""
        return self._plan

    def loading(self, name: str) -> None:
        """See `residency.Watch`: shows nothing."""

    def fell_back(self, name: str, reason: Fact) -> None:
        """See `residency.Watch`: record the reason and continue in PyTorch."""
        self.fallbacks[name] = f"PyTorch took over. {reason}"
        self._plan = self._plan.with_component(name, self._plan.components[name].in_pytorch(reason))

    def warn(self, fact: Fact) -> None:
        """See `residency.Watch`: shows nothing."""

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """See `residency.Watch`: record the reason and continue without the feature."""
        self.fallbacks[name] = f"Without {field}: {reason}"


@dataclass(frozen=True)
class Passes:
    """Inputs and outputs of each component of the reference, float32, in RAM.

    Attributes:
        steps: by expert, the sampling step that was run.
        latents: by component: noise for the first expert; its estimate with noise of the second expert's level for
            the second; the last estimate for the VAE.
        outputs: by component: embeddings, latents of images, velocities, frames in -1 to 1.
        conditioning: from the prompt and the images.
    """

    steps: Mapping[str, Step]
    latents: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    conditioning: Conditioning


def reference_passes(spec: ModelSpec, plan: ExecutionPlan, residency: Residency, cancel: Cancel) -> Passes:
    """Run each component once in the reference configuration, starting with the prompt and the seed."""
    job = StandaloneJob(plan, cancel)
    noise = get_noise(plan).cpu()
    encoded = {name: _encoded(spec, job, residency, name) for name in spec.text_encoders}
    outputs = {name: one.embeds for name, one in encoded.items()}
    conditioning = Conditioning(joined(list(encoded.values())).embeds, None)
    for name in (IMAGE_ENCODER, VAE_ENCODER):
        if name in plan.components:
            outputs[name] = _of_images(spec, job, residency, name)
    if IMAGE_ENCODER in outputs:
        conditioning = conditioning.with_tokens(outputs[IMAGE_ENCODER])
    if VAE_ENCODER in outputs:
        given = GivenFrames.of(spec, outputs[VAE_ENCODER], len(plan.images))
        conditioning, noise = replace(conditioning, given=given), given.placed_in(noise)
    latents: dict[str, torch.Tensor] = {}
    estimate = noise
    steps = _first_steps(spec, plan)
    for name, step in steps.items():
        cancel.check()
        latents[name] = noise if not latents else (1 - step.sigma) * estimate + step.sigma * noise
        outputs[name] = _velocity(spec, job, residency, step, latents[name], conditioning)
        estimate = latents[name] - step.sigma * outputs[name]
        if conditioning.given is not None:
            estimate = conditioning.given.placed_in(estimate)
    cancel.check()
    latents["vae"] = estimate
    outputs["vae"] = _frames(spec, job, residency, estimate)
    return Passes(steps, latents, outputs, conditioning)


@dataclass(frozen=True)
class PartError:
    """The relative error of a component's output.

    Attributes:
        error: ‖out − ref‖/‖ref‖; `None` if it cannot be computed.
        why: the reason then, as a sentence.
    """

    error: float | None
    why: str = ""


def errors(
    passes: Passes, spec: ModelSpec, plan: ExecutionPlan, residency: Residency, cancel: Cancel
) -> dict[str, PartError]:
    """Run each component once on the reference's inputs."""
    job = StandaloneJob(plan, cancel)
    found = {}
    for name in plan.components:
        cancel.check()
        if name not in passes.outputs:
            found[name] = PartError(None, "No step of the reference runs it.")
            continue
        if name in spec.text_encoders:
            output = _encoded(spec, job, residency, name).embeds
        elif name in {IMAGE_ENCODER, VAE_ENCODER}:
            output = _of_images(spec, job, residency, name)
        elif name == "vae":
            output = _frames(spec, job, residency, passes.latents[name])
        else:
            output = _velocity(spec, job, residency, passes.steps[name], passes.latents[name], passes.conditioning)
        if name in job.fallbacks:
            found[name] = PartError(None, job.fallbacks[name])
        else:
            found[name] = _compared(output, passes.outputs[name])
    return found


def _compared(output: torch.Tensor, reference: torch.Tensor) -> PartError:
    if output.shape != reference.shape:
        return PartError(None, "Its output has another shape.")
    error = relative_error(output, reference)
    return PartError(error) if error is not None else PartError(None, "Its output holds NaN or Inf.")


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return ‖output − reference‖/‖reference‖, both float32; `None` if it is not finite."""
    length = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
    error = float(torch.linalg.vector_norm(output - reference, dtype=torch.float64)) / (length or 1.0)
    return error if error < float("inf") else None


def in_floats(frames: torch.Tensor) -> torch.Tensor:
    """Return a copy of frames as float32 in -1 to 1, in RAM; engines reuse their output buffers.

    Args:
        frames: float in -1 to 1, or uint8 as GPU groups return them.
    """
    kept = frames.to("cpu", copy=True).float()
    return kept / 127.5 - 1.0 if frames.dtype == torch.uint8 else kept


def _first_steps(spec: ModelSpec, plan: ExecutionPlan) -> dict[str, Step]:
    """Return the first step of each expert, in their order."""
    first: dict[str, Step] = {}
    for step in get_schedule(
        plan, load_scheduler(spec, plan.shift), spec.boundary_ratio, spec.noise.sigmas(plan.steps)
    ):
        first.setdefault(step.expert, step)
    return first


def _encoded(spec: ModelSpec, job: StandaloneJob, residency: Residency, name: str) -> TextEncoding:
    with residency.text_encoder(spec, job, name) as encoder:
        found = encoder.encode(job.plan.prompt)
    return replace(found, embeds=found.embeds.float().cpu())


def _of_images(spec: ModelSpec, job: StandaloneJob, residency: Residency, name: str) -> torch.Tensor:
    """Return the output of one of the encoders of images."""
    images = images_of(job.plan)
    if name == IMAGE_ENCODER:
        with residency.image_encoder(spec, job) as model:
            return model.encode(images).float().cpu()
    with residency.video_encoder(spec, job) as vae:
        return image_latents(vae, spec, job.plan, images).float().cpu()


def _velocity(
    spec: ModelSpec,
    job: StandaloneJob,
    residency: Residency,
    step: Step,
    latents: torch.Tensor,
    conditioning: Conditioning,
) -> torch.Tensor:
    device, given = job.plan.components[step.expert].device, conditioning.given
    timestep, embeds = step.times.to(latents.device), conditioning.positive
    if given is not None:
        latents, timestep = given.inputs(latents, timestep)
    with residency.denoiser(spec, job, step.expert) as denoiser:
        denoiser.reset_cache()
        return denoiser(latents.to(device), timestep.to(device), embeds.to(device)).float().cpu()


def _frames(spec: ModelSpec, job: StandaloneJob, residency: Residency, latents: torch.Tensor) -> torch.Tensor:
    plan = job.plan
    with residency.video_decoder(spec, job) as decoder:
        chunks = decoder.frames(
            latents.to(plan.components["vae"].device), plan.strategy.decode_chunk, plan.strategy.decode_tile
        )
        return torch.cat([in_floats(chunk) for chunk in chunks])
