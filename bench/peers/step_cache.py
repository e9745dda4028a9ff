"""Tandem's step caches in a denoising loop; see `bench.peers`.

Their schedules are known beforehand, so that what random weights predict decides nothing. Both experts are the same
transformer here.
"""

from typing import Any

import torch

from bench.peers.case import Case, loop_seconds, name_of, random_transformer, say
from bench.peers.tandem import fastest_attention, raise_if_degraded
from runtime.core.plan import Speed
from runtime.core.step_cache import uses
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.registry import published_models

MODEL = "wan2.2-t2v-a14b"
# Its default shift of timesteps, and the noise level at which the second expert takes over.
SHIFT, BOUNDARY = 12.0, 0.875
STEP_CACHES = ("taylorseer:2", "magcache:0.12")


def main() -> None:
    """Measure a loop of the first size with each step cache."""
    case = Case.given()
    module = random_transformer(case)
    size, attention = case.sizes[0], fastest_attention(case)
    for step_cache in STEP_CACHES:
        what = {"variant": f"Tandem, bfloat16, {attention}, {step_cache}", "size": name_of(size)}
        with case.trying(**what), torch.no_grad():
            denoiser = PyTorchDenoiser(module)
            speed = Speed(attention=attention, compiled=case.device != "cpu", text_kept=True, fused=True)
            denoiser.compute(speed, raise_if_degraded)
            _measure(case, size, denoiser, step_cache, what)


def _measure(case: Case, size: tuple[int, int], denoiser: PyTorchDenoiser, step_cache: str, what: Any) -> None:
    latents, timestep, text = case.inputs(size)
    model = next(model for model in published_models("wan") if model.name == MODEL)
    steps = uses(step_cache, experts(case.steps), model.mag_ratios)

    def step(latents: torch.Tensor, number: int) -> torch.Tensor:
        if steps[number].fresh:
            denoiser.reset_cache()
        return denoiser(latents, timestep, text)

    note = f"a step of {case.steps}, {sum(use.computed for use in steps)} of them computed"
    with denoiser.caching(step_cache):
        say(**what, note=note, **loop_seconds(step, latents, case))


def experts(steps: int) -> list[str]:
    """Return the expert of each step of the published model."""
    shares = [1 - step / steps for step in range(steps)]
    sigmas = [SHIFT * share / (1 + (SHIFT - 1) * share) for share in shares]
    return ["transformer" if sigma >= BOUNDARY else "transformer_2" for sigma in sigmas]


if __name__ == "__main__":
    main()
