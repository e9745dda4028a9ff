"""Calls of one component: as a job uses it, as diffusers' own module, and in float32; on generated inputs."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.core.cancel import Cancel
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.engines.reference import full_float32
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec, is_transformer

# The middle of the schedule.
_TIMESTEP = 500.0


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
        """See `residency.JobHooks`."""
        return self._plan

    def loading(self, name: str) -> None:
        """See `residency.JobHooks`: shows nothing."""

    def fell_back(self, name: str, reason: Fact) -> None:
        """See `residency.JobHooks`: record the reason and continue in PyTorch."""
        self.fallbacks[name] = f"PyTorch took over. {reason}"
        self._plan = self._plan.with_component(name, self._plan.components[name].in_pytorch(reason))

    def warn(self, fact: Fact) -> None:
        """See `residency.JobHooks`: shows nothing."""

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """See `residency.JobHooks`: record the reason and continue without the feature."""
        self.fallbacks[name] = f"Without {field}: {reason}"


def sample_inputs(spec: ModelSpec, plan: ExecutionPlan, name: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a component: noise, and for a transformer a timestep and text of full length."""
    device = plan.components[name].device
    generator = torch.Generator("cpu").manual_seed(plan.seed)
    latents = torch.randn(plan.latent_shape, generator=generator).to(device)
    if not is_transformer(name):
        return {"latents": latents}
    text = torch.randn((1, spec.max_sequence_length, spec.transformer.text_dim), generator=generator)
    return {"latents": latents, "timestep": torch.tensor(_TIMESTEP, device=device), "text_embeds": text.to(device)}


def module_timestep(spec: ModelSpec, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the timestep in the shape that diffusers' module expects: (1,), or (1, tokens)."""
    frames, height, width = inputs["latents"].shape[2:]
    _, patch_height, patch_width = spec.transformer.patch_size
    tokens = frames * (height // patch_height) * (width // patch_width)
    return inputs["timestep"].expand((1, tokens) if spec.expand_timesteps else (1,))


def diffusers_call(
    module: Any, name: str, spec: ModelSpec, inputs: dict[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Return a function that calls diffusers' own module."""
    dtype = (module.patch_embedding if is_transformer(name) else module.post_quant_conv).weight.dtype
    latents = inputs["latents"].to(dtype)
    if not is_transformer(name):
        z = denormalized(module, latents)
        return lambda: module.decode(z, return_dict=False)[0]
    timestep, text = module_timestep(spec, inputs), inputs["text_embeds"].to(dtype)
    return lambda: module(hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]


@contextmanager
def component_call(
    residency: Residency, spec: ModelSpec, job: StandaloneJob, name: str
) -> Iterator[Callable[[dict[str, torch.Tensor]], Iterator[torch.Tensor]]]:
    """Yield a function from `sample_inputs` to the component's output, in chunks if the component yields chunks."""
    plan = job.plan
    if is_transformer(name):
        with residency.denoiser(spec, job, name) as denoiser:

            def predict(inputs: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
                # Otherwise a step cache reuses the previous pass.
                denoiser.begin_step(fresh=True, exact=False)
                yield denoiser(inputs["latents"], inputs["timestep"], inputs["text_embeds"])

            yield predict
    else:
        with residency.video_decoder(spec, job) as decoder:
            yield lambda inputs: decoder.frames(
                inputs["latents"], plan.strategy.decode_chunk, plan.strategy.decode_tile
            )


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return the duration of a call, measured by CUDA events on a GPU."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    with torch.cuda.device(device):  # events are recorded on the current GPU
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


class _Float32Block(torch.nn.Module):
    """A block that is converted to float32 only while it runs."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self._block = block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return copy.deepcopy(self._block).float()(*arguments, **named)


@torch.no_grad()
def exact_velocity(
    module: Any, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor
) -> torch.Tensor:
    """Return the output of a diffusers transformer in float32; one block at a time is converted.

    Args:
        module: in any precision, not quantized; it is not changed.
        latents: (1, channels, frames, height, width), float32.
        timestep: (1,), or (1, tokens).
        text_embeds: (1, text tokens, text width).
    """
    blocks = module.blocks
    module.blocks = torch.nn.ModuleList()
    try:
        exact = copy.deepcopy(module).float()
    finally:
        module.blocks = blocks
    exact.blocks = torch.nn.ModuleList([_Float32Block(block) for block in blocks])
    with full_float32(latents.device):
        output: torch.Tensor = exact(
            hidden_states=latents.float(),
            timestep=timestep,
            encoder_hidden_states=text_embeds.float(),
            return_dict=False,
        )[0]
    return output


@torch.no_grad()
def exact_frames(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return the output of diffusers' VAE in float32: (frames, height, width, 3), in RAM.

    Args:
        module: in float32.
        latents: (1, channels, latent frames, height, width), normalized.
    """
    with full_float32(latents.device):
        return as_frames(module.decode(denormalized(module, latents.float()), return_dict=False)[0])


def denormalized(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return normalized latents in the scale of the VAE's decoder, in their dtype."""
    shape = (1, module.config.z_dim, 1, 1, 1)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(shape)
        for values in (module.config.latents_mean, module.config.latents_std)
    )
    return latents * std + mean


def as_frames(video: torch.Tensor) -> torch.Tensor:
    """Return (1, 3, frames, height, width) as (frames, height, width, 3), float32, in RAM."""
    return video[0].permute(1, 2, 3, 0).float().cpu()


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
