"""Measure LoRAs and step caches on a GPU at Wan2.2-A14B's width: error, time, memory.

    python bench/gpu/extras.py [--blocks 8] [--steps 16] [--seconds 480] [--small] [PART …] of lora, cache

Random weights, two experts of a few blocks. Prints a JSON object per measurement and appends it to $OUT/extras.jsonl.

- lora: loading with and without a LoRA of rank 64 in bfloat16, with each offload; `error` is the error of a fused
  weight relative to float64, `rounding` that of the exact weight rounded to bfloat16, its lower bound.
- cache: strengths and memory strategies; computed blocks, seconds, peak memory (also without a cache), the estimated
  memory of the cache, and whether two runs gave bit-identical latents.
"""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file

from bench.gpu import results
from bench.gpu.residency import measured, model, with_weights
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.loras import with_loras
from runtime.models.registry import published_models
from runtime.models.spec import ModelSpec
from runtime.planner import memory_model
from tests import lora_files
from tests.pipeline.computed_blocks import blocks_computed
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan, with_strategy

RANK, WEIGHT = 64, 0.8
STARTED = time.monotonic()
CACHES = ("none", "first-block:0.05", "first-block:0.2", "first-block:1", "magcache:0.12", "taylorseer:3")
# Offload and quantization. The planner refuses a cache with `group`: it is measured nevertheless.
HELD = (("none", "none"), ("model", "none"), ("none", "fp8"), ("none", "bnb-4bit"), ("group", "none"))


say = partial(results.say, "extras.jsonl")


def reporting_failure(what: dict[str, Any], work: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Run one part and report its failure; running out of time is a failure."""
    try:
        if time.monotonic() - STARTED > arguments.seconds:
            raise TimeoutError("no time is left")
        gc.collect()
        work()
    except Exception as error:
        traceback.print_exc()
        say(**what, failed=f"{type(error).__name__}: {error}"[:500])


def planned(spec: ModelSpec, arguments: argparse.Namespace, **values: Any) -> ExecutionPlan:
    """Plan a clip of 832×480 on the device, in bfloat16."""
    size = {"width": 64, "height": 32} if arguments.small else {"width": 832, "height": 480}
    plan = tiny_plan(spec, Path("x.mp4"), steps=arguments.steps, **size, **values)
    parts = {
        name: part.replace(device=arguments.device, dtype="bfloat16" if name != "vae" else "float32")
        for name, part in plan.components.items()
    }
    return plan.replace(components=parts)


@torch.no_grad()
def lora(arguments: argparse.Namespace, spec: ModelSpec, folder: Path) -> None:
    """Load the high-noise expert, with and without a LoRA, for each offload of its weights."""
    found = lora_files.factors(spec.transformer, RANK)
    tensors = {name: tensor.bfloat16() for name, tensor in lora_files.wan(found).items()}
    path = lora_files.save(folder / "x.safetensors", tensors)
    started = time.perf_counter()
    with_lora = with_loras(spec, [Lora(str(path), WEIGHT)], folder)
    say(part="lora", read_seconds=round(time.perf_counter() - started, 3), bytes=path.stat().st_size)
    shard = next((spec.directory / "transformer").glob("*.safetensors"))
    name = "blocks.0.attn1.to_q.weight"
    down, up = (tensors[f"diffusion_model.blocks.0.self_attn.q.lora_{end}.weight"].double() for end in ("down", "up"))
    wanted = load_file(shard)[name].double() + WEIGHT * up @ down
    length = wanted.norm()
    for offload in ("none", "model", "group"):
        for given in (spec, with_lora):
            what = {"part": "lora", "offload": offload, "lora": bool(given.loras)}

            def load(given: ModelSpec = given, offload: str = offload, what: dict[str, Any] = what) -> None:
                plan = with_strategy(planned(spec, arguments), offload=offload).replace(loras=given.loras)
                with Residency() as residency, measured(arguments.device) as figures:
                    with residency.denoiser(given, Alone(plan), "transformer") as denoiser:
                        weights = denoiser._module.state_dict()[name].double().cpu()  # type: ignore[attr-defined]
                    figures["load_seconds"] = round(residency.load_seconds, 3)
                error = ((weights - wanted).norm() / length).item() if given.loras else None
                rounding = ((wanted.bfloat16().double() - wanted).norm() / length).item()
                say(**what, error=error, rounding=rounding, **figures)

            reporting_failure(what, load, arguments)


def cache(arguments: argparse.Namespace, spec: ModelSpec, _: Path) -> None:
    """Sample with each cache and memory strategy."""
    for offload, quantization in HELD:
        alone: dict[str, Any] = {}
        for step_cache in CACHES:
            what = {"part": "cache", "offload": offload, "quantization": quantization, "step_cache": step_cache}

            def run(
                step_cache: str = step_cache,
                offload: str = offload,
                quantization: str = quantization,
                what: dict[str, Any] = what,
                alone: dict[str, Any] = alone,
            ) -> None:
                plan = with_weights(planned(spec, arguments, step_cache=step_cache), offload, quantization, keep=True)
                got: list[torch.Tensor] = []
                with Residency() as residency:
                    sample(spec, plan, residency)
                    with measured(arguments.device) as figures:
                        blocks = blocks_computed(lambda: got.append(sample(spec, plan, residency).cpu()))
                    again = sample(spec, plan, residency).cpu()
                alone.setdefault("latents", got[0])
                alone.setdefault("figures", dict(figures))
                wanted = alone["latents"]
                passes, tensors = memory_model.cached_tensors(
                    spec, step_cache, plan.guidance_scale, plan.guidance_scale_2
                )
                say(
                    **what,
                    blocks=blocks,
                    repeats=torch.equal(got[0], again),
                    error=((got[0] - wanted).norm() / wanted.norm()).item(),
                    more_vram=figures.get("vram", 0) - alone["figures"].get("vram", 0),
                    forecast_more=passes * tensors * plan.tokens * spec.transformer.width * 2,
                    **figures,
                )

            reporting_failure(what, run, arguments)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing after so many")
    parser.add_argument("--small", action="store_true", help="narrow experts: for a rehearsal on a CPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("parts", nargs="*", default=["lora", "cache"])
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    say(part="machine", device=name, torch=torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        # Of the published model of this width: random weights have none.
        published = next(known for known in published_models("wan") if known.name == "wan2.2-t2v-a14b")
        spec = replace(model(Path(folder) / "model", arguments), mag_ratios=published.mag_ratios)
        parts = {"lora": partial(lora, arguments, spec), "cache": partial(cache, arguments, spec)}
        for part in arguments.parts:
            parts[part](Path(folder))


if __name__ == "__main__":
    main()
