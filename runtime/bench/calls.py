"""What is measured of a part: a call of it as a job has it, or of diffusers' own module, on made-up inputs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.bench.component_timing import Lent
from runtime.bench.exact import unnormalised
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec, is_transformer

# In the middle of the schedule.
_TIMESTEP = 500.0


def made_up(spec: ModelSpec, plan: ExecutionPlan, part: str) -> dict[str, torch.Tensor]:
    """Return what a part is given: noise, and for a transformer a timestep and text of full length."""
    device = plan.components[part].device
    generator = torch.Generator("cpu").manual_seed(plan.seed)
    latents = torch.randn(plan.latent_shape, generator=generator).to(device)
    if not is_transformer(part):
        return {"latents": latents}
    text = torch.randn((1, spec.max_sequence_length, spec.transformer.text_dim), generator=generator)
    return {"latents": latents, "timestep": torch.tensor(_TIMESTEP, device=device), "text_embeds": text.to(device)}


def timestep_of(spec: ModelSpec, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the timestep as diffusers' module takes it."""
    frames, height, width = given["latents"].shape[2:]
    _, down, across = spec.transformer.patch_size
    tokens = frames * (height // down) * (width // across)
    return given["timestep"].expand((1, tokens) if spec.expand_timesteps else (1,))


def own_call(module: Any, part: str, spec: ModelSpec, given: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a call of diffusers' own module."""
    dtype = (module.patch_embedding if is_transformer(part) else module.post_quant_conv).weight.dtype
    latents = given["latents"].to(dtype)
    if not is_transformer(part):
        z = unnormalised(module, latents)
        return lambda: module.decode(z, return_dict=False)[0]
    timestep, text = timestep_of(spec, given), given["text_embeds"].to(dtype)
    return lambda: module(hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]


@contextmanager
def lent(
    residency: Residency, spec: ModelSpec, job: Lent, part: str
) -> Iterator[Callable[[dict[str, torch.Tensor]], Iterator[torch.Tensor]]]:
    """Lend a part as what takes `made_up` and yields its output, in pieces if it comes so."""
    plan = job.plan
    if is_transformer(part):
        with residency.denoiser(spec, job, part) as denoiser:

            def predict(given: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
                # Else a step cache would answer from the pass before.
                denoiser.reset_cache()
                yield denoiser(given["latents"], given["timestep"], given["text_embeds"])

            yield predict
    else:
        with residency.video_decoder(spec, job) as decoder:
            yield lambda given: decoder.frames(given["latents"], plan.strategy.decode_chunk, plan.strategy.decode_tile)


def drained(pieces: Iterator[torch.Tensor]) -> None:
    """Take all pieces, and keep none."""
    for _ in pieces:
        pass


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return what a call takes: by the GPU's own events where there is one."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    with torch.cuda.device(device):  # an event is recorded on the GPU that is current
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000
