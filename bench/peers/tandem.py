"""Tandem's passes; see `bench.peers`."""

from typing import Any

import torch

from bench.gpu.speed import part, quantize
from bench.peers.case import Case, few_blocks, name_of, random_transformer, say, timed
from runtime.core.facts import Fact
from runtime.core.plan import Speed
from runtime.execution.attention import problem
from runtime.families.wan.transformer import PyTorchDenoiser


def main() -> None:
    """Measure a pass of each variant and size."""
    case = Case.given()
    module = random_transformer(case)
    attention = fastest_attention(case)
    exact, fp8 = Speed(compiled=True, text_kept=True, fused=True), Speed(compiled=True, text_kept=True)
    _measure(case, module, f"Tandem, bfloat16, {attention}", exact.replace(attention=attention))
    if case.device == "cpu":
        return
    # FP8 has a scale for each row of each layer, so none is fused.
    part(module)
    with case.trying("Tandem, FP8"):
        quantize(module)
        _measure(case, module, f"Tandem, FP8, {attention}", fp8.replace(attention=attention))
        _measure(case, module, "Tandem, FP8, attention in FP8", fp8.replace(attention="fp8"))


def fastest_attention(case: Case) -> str:
    """Return the fastest exact attention on Hopper and newer GPUs of those that are installed."""
    width = case.config["attention_head_dim"]
    usable = (kind for kind in ("flash4", "cudnn") if problem(kind, case.device, torch.bfloat16, width) is None)
    return next(usable, "native")


def raise_if_degraded(field: str, reason: Fact) -> None:
    """Raise an error: an option cannot be used."""
    raise RuntimeError(f"{field}: {reason}")


def _measure(case: Case, module: Any, variant: str, speed: Speed) -> None:
    for size in case.sizes:
        what = {"variant": variant, "size": name_of(size)}
        with case.trying(**what), torch.no_grad():
            inputs = case.inputs(size)
            denoiser = PyTorchDenoiser(module)
            denoiser.compute(speed, raise_if_degraded)
            with few_blocks(module):
                # Of another text, whose keys and values are kept for these blocks alone.
                denoiser(*case.inputs(size))
            # The first full pass projects the text, which later ones reuse.
            denoiser(*inputs)
            say(**what, **timed(lambda: denoiser(*inputs), case.device))  # noqa: B023


if __name__ == "__main__":
    main()
