"""Measure forward passes of Wan, HunyuanVideo, FramePack and LTX-2 on one GPU and shared by several (Ulysses).

    python bench/gpu/shared_passes.py [--gpus 2] [--variants flash4,fp8-all] [--models hunyuan-video,framepack]
    python bench/gpu/shared_passes.py --models wan2.2-a14b --parts 1,5 --profile
    python bench/gpu/shared_passes.py --models ltx-2 --variants flash4,fp8-all --ltx-size 1216x704x121
    python bench/gpu/shared_passes.py --device cpu --tiny --variants ours,compiled --parts 1,2    tries it

Sizes are 81 frames of 1280x720 with Wan2.2-A14B (`--wan-size`), 129 with HunyuanVideo, a section of 480x832 with
FramePack, and 121 frames of 768x512 with LTX-2 (`--ltx-size`). Variants are those of speed.py. `--parts`: the most
parts of a process's heads, of which each is exchanged while another is attended to; 1 without overlap. Each process
makes the same random weights on its GPU, so nothing is written to the disk. As in a job, processes exchange tokens
through torch.distributed; a job also sends latents from and to the coordinator, which is not measured here. For each
model and variant, the first process measures a pass alone, then all measure it together: the slowest decides. Prints a
JSON object per measurement and appends it to $OUT/shared.jsonl. The error is ‖out - one‖ / ‖one‖ relative to one GPU's
result of the same variant. Nothing starts after `--seconds`.

`--profile` adds a profile of one pass by the first process, in milliseconds: of each kind of kernel, and how long
exchanges ran while others did (`covered`) and while none did (`exposed`, which includes waiting for other processes).
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from diffusers import LTX2VideoTransformer3DModel, WanTransformer3DModel
from torch.multiprocessing.spawn import spawn

from bench.gpu import hunyuan_cases as cases
from bench.gpu import ltx2, results
from bench.gpu.speed import (
    A14B,
    HUNYUAN_VARIANTS,
    TEXT_TOKENS,
    TINY,
    VARIANTS,
    hunyuan_quantize,
    operations_of,
    part,
    quantize,
    quantized,
    raise_if_degraded,
    random_module,
)
from bench.gpu.speed import SIZES as WAN_SIZES
from runtime.core.plan import EAGER, Speed
from runtime.execution.attention import problem
from runtime.execution.parallel.rank_process import PRIORITY_VARIABLE
from runtime.execution.parallel.ulysses import PARTS, Tokens
from runtime.families.hunyuan_video import transformer as hunyuan_transformer
from runtime.families.ltx2 import transformer as ltx2_transformer
from runtime.families.wan import transformer as wan_transformer
from runtime.models.quantization import is_quantized
from tests.gpu.errors import relative_error

SIZES = {"hunyuan-video": "720p", "framepack": "480x832"}
# Kinds of kernels by their names, the first that matches; the rest are "other".
KINDS = {
    "exchange": r"^nccl",
    "attention": r"flash|sdpa|attn|fmha",
    "products": r"gemm|nvjet|cutlass|xmma|scaled_mm",
    "fused": r"^triton",
}


class Hunyuan:
    """A transformer of HunyuanVideo or FramePack with random weights."""

    def __init__(self, name: str, device: str, dtype: torch.dtype, *, tiny: bool) -> None:
        self.module = random_module(device, partial(cases.make, name, tiny=tiny), dtype, cases.spread)
        self.case = cases.case(name, "tiny" if tiny else SIZES[name], self.module.config, device, tiny=tiny)
        self.denoiser = cases.denoiser_of(name, self.module)
        self.variants = HUNYUAN_VARIANTS
        self.operations = self.case.operations

    def passed(self) -> Callable[[], torch.Tensor]:
        """Return the forward pass of the denoiser."""
        return self.case.by_tandem(self.denoiser)

    def quantize(self) -> None:
        """Quantize the blocks, unless they are."""
        if not quantized(self.module):
            hunyuan_quantize(self.module)

    def share(self, tokens: Tokens | None, speed: Speed) -> None:
        """Let processes share passes from now on, or not."""
        self.module.shared_tokens = None
        hunyuan_transformer.install(self.module, speed, *self.denoiser._compiled)
        if tokens is not None:
            hunyuan_transformer.share_tokens(self.module, tokens)


class Wan:
    """An expert of Wan2.2-A14B with random weights; see `Hunyuan`."""

    def __init__(self, size: str, device: str, dtype: torch.dtype, *, tiny: bool) -> None:
        # As many heads as parts can be tried with.
        config = TINY | {"num_attention_heads": 4} if tiny else A14B
        self.module = random_module(device, lambda: WanTransformer3DModel(**config), dtype)
        width = config.get("attention_head_dim", 128)
        self.module.rope = type(self.module.rope)(width, (1, 2, 2), 1024).to(device)
        generator = torch.Generator(device).manual_seed(1)
        frames, height, width = WAN_SIZES["tiny" if tiny else size]
        latents = torch.randn(1, 16, frames, height, width, device=device, generator=generator)
        text = torch.randn(1, TEXT_TOKENS, config.get("text_dim", 4096), device=device, generator=generator).to(dtype)
        self.given = latents, torch.tensor(500.0, device=device), text
        tokens = frames * (height // 2) * (width // 2)
        self.denoiser = wan_transformer.PyTorchDenoiser(self.module)
        self.variants = VARIANTS
        self.operations = operations_of(config, tokens)[0]

    def passed(self) -> Callable[[], torch.Tensor]:
        """See `Hunyuan`."""
        return lambda: self.denoiser(*self.given)

    def quantize(self) -> None:
        """See `Hunyuan`."""
        if type(self.module.blocks[0].attn1.to_q.weight) is torch.nn.Parameter:
            part(self.module)
            quantize(self.module)

    def share(self, tokens: Tokens | None, speed: Speed) -> None:
        """See `Hunyuan`."""
        for hooks in (
            self.module._forward_pre_hooks,
            self.module.rope._forward_hooks,
            self.module.blocks[0]._forward_pre_hooks,
            self.module.proj_out._forward_hooks,
        ):
            hooks.clear()
        self.denoiser.forget()
        wan_transformer.install(self.module, speed, self.denoiser._step or wan_transformer.block_step)
        if tokens is not None:
            wan_transformer.share_tokens(self.module, tokens)


class Ltx:
    """A transformer of LTX-2 with random weights; see `Hunyuan`."""

    def __init__(self, size: str, device: str, dtype: torch.dtype, *, tiny: bool) -> None:
        config = ltx2.TINY if tiny else {}
        self.module = random_module(device, partial(LTX2VideoTransformer3DModel, **config), dtype, ltx2.spread)
        self.streams, inputs = ltx2.case(device, dtype, self.module.config, "96x96x17" if tiny else size)
        self.given = inputs.latents, torch.tensor(500.0, device=device), inputs.text
        self.denoiser = ltx2_transformer.PyTorchStreamDenoiser(self.module)
        self.variants = VARIANTS
        self.operations = ltx2.operations_of(math.prod(self.streams.video[2:]))

    def passed(self) -> Callable[[], torch.Tensor]:
        """See `Hunyuan`."""
        return lambda: self.denoiser(*self.given)

    def quantize(self) -> None:
        """See `Hunyuan`."""
        if not is_quantized(self.module.transformer_blocks[0].ff.net[2].weight):
            ltx2.quantize(self.module)

    def share(self, tokens: Tokens | None, speed: Speed) -> None:
        """See `Hunyuan`."""
        self.module.shared_tokens = None
        self.denoiser.forget()
        self.denoiser.see(self.streams, ())
        ltx2_transformer.install(self.module, speed, self.denoiser._step or ltx2_transformer.block_step)
        if tokens is not None:
            ltx2_transformer.share_tokens(self.module, tokens)


class Process:
    """One process and its GPU."""

    def __init__(self, number: int, arguments: argparse.Namespace, rendezvous: str) -> None:
        self.number, self.arguments = number, arguments
        self.cuda = arguments.device == "cuda"
        self.device = f"cuda:{number}" if self.cuda else "cpu"
        if self.cuda:
            torch.cuda.set_device(self.device)
        os.environ.setdefault(PRIORITY_VARIABLE, "1")
        backend = "nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=number, world_size=arguments.gpus)
        self.group: Any = dist.new_group(list(range(arguments.gpus)))
        # To start at the same time without a kernel.
        self.meeting: Any = dist.new_group(list(range(arguments.gpus)), backend="gloo")
        self.parts = [Tokens(self.group, int(parts)) for parts in arguments.parts.split(",")]
        self.began = time.monotonic()
        if self.profiles:
            with self.profiler():  # the first one takes seconds to start
                self.wait()

    @property
    def profiles(self) -> bool:
        """Whether passes are profiled."""
        return self.cuda and bool(self.arguments.profile)

    def profiler(self) -> torch.profiler.profile:
        """Return a profiler of kernels."""
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def say(self, **found: Any) -> None:
        """Report a measurement, in the first process."""
        if not self.number:
            results.say("shared.jsonl", at=round(time.monotonic() - self.began, 1), **found)

    def agree(self, value: float) -> float:
        """Return the largest value of all processes."""
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return float(largest)

    def late(self) -> bool:
        """Return whether no time is left."""
        return self.agree(time.monotonic() - self.began) > float(self.arguments.seconds)

    def timed(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the result of a pass, and the seconds of the first call and of the next ones."""
        seconds, out = [], torch.empty(0)
        for _ in range(1 + self.arguments.repeats):
            self.wait()
            started = time.perf_counter()
            out = run()
            self.wait()
            seconds.append(time.perf_counter() - started)
        return out, {"first": round(seconds[0], 2), "seconds": statistics.median(seconds[1:]), "all": seconds[1:]}

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def model(self, name: str) -> None:
        """Measure all variants of a model."""
        dtype = torch.bfloat16 if self.cuda else torch.float32
        kinds: dict[str, Callable[..., Wan | Hunyuan | Ltx]] = {
            "wan2.2-a14b": partial(Wan, self.arguments.wan_size),
            "ltx-2": partial(Ltx, self.arguments.ltx_size),
        }
        kind = kinds.get(name, partial(Hunyuan, name))
        began = time.perf_counter()
        model = kind(self.device, dtype, tiny=self.arguments.tiny)
        self.wait()
        self.say(model=name, made_in=round(time.perf_counter() - began, 1))
        for variant in self.arguments.variants.split(","):
            if self.late():
                self.say(left_out=f"{name} {variant} and what follows")
                return
            self.variant(name, model, variant)

    def variant(self, name: str, model: Wan | Hunyuan | Ltx, variant: str) -> None:
        """Measure a variant alone and shared; a failure in one process is one of all."""
        speed, linears = model.variants[variant]
        sizes = SIZES | {"wan2.2-a14b": self.arguments.wan_size, "ltx-2": self.arguments.ltx_size}
        size = "tiny" if self.arguments.tiny else sizes[name]
        what = {"model": name, "size": size, "variant": variant}
        assert speed is not None, "diffusers' passes are not shared"
        one: torch.Tensor | None = None
        found: dict[str, Any] = {}
        why, denoiser = None, model.denoiser
        try:
            if linears:
                model.quantize()
            why = problem(speed.attention, self.device, denoiser.dtype, model.module.config.attention_head_dim)
            if why is not None:
                raise RuntimeError(str(why))
            denoiser.compute(speed, raise_if_degraded)
            model.share(None, speed)
            if not self.number:
                with torch.no_grad():
                    one, found = self.timed(model.passed())
                    tera = round(model.operations / found["seconds"] / 1e12, 1)
                    self.say(**what, gpus=1, tera=tera, **found, **self.profiled(model.passed(), shared=False))
            failed = 0.0
        except Exception as error:
            traceback.print_exc()
            failed = 1.0
            results.say("shared.jsonl", **what, process=self.number, failed=f"{type(error).__name__}: {error}"[:300])
        if self.agree(failed):
            return
        for tokens in self.parts:
            if self.late():
                self.say(**what, left_out=f"parts {tokens.parts} and what follows")
                return
            # Attention that shares tokens is compiled again.
            model.share(tokens, speed)
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                out, shared = self.timed(model.passed())
                slowest = self.agree(shared["seconds"])
                profile = self.profiled(model.passed())
            if one is not None:
                self.say(
                    **what,
                    gpus=self.arguments.gpus,
                    parts=tokens.parts,
                    tokens=tokens.count,
                    times_as_fast=round(found["seconds"] / slowest, 3),
                    error=float(f"{relative_error(out.float(), one.float()):.3g}"),
                    peak_bytes=torch.cuda.max_memory_allocated() if self.cuda else 0,
                    **(shared | {"seconds": slowest}),
                    **profile,
                )
        denoiser.compute(EAGER)

    def profiled(self, run: Callable[[], torch.Tensor], *, shared: bool = True) -> dict[str, Any]:
        """Return the profile of a pass, if it was asked for."""
        if not self.profiles:
            return {}
        self.wait()
        with self.profiler() as profiler:
            if shared:
                dist.barrier(group=self.meeting)
            run()
            self.wait()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        kernels = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
        return {"profile": timeline((one["name"], one["ts"] / 1000, one["dur"] / 1000) for one in kernels)}


def timeline(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the milliseconds of each kind of kernel, and of exchanges that others cover.

    Args:
        kernels: name, start and length in milliseconds.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, start, length in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        spans.setdefault(kind, []).append((start, start + length))
    exchange = spans.get("exchange", [])
    computing = [span for kind, found in spans.items() if kind != "exchange" for span in found]
    busy, all_of_them = covered_by(exchange), covered_by(exchange + computing)
    exposed = all_of_them - covered_by(computing)
    first, last = min(start for start, _ in exchange + computing), max(end for _, end in exchange + computing)
    found = {kind: covered_by(one) for kind, one in spans.items()}
    found |= {"covered": busy - exposed, "exposed": exposed, "idle": last - first - all_of_them, "whole": last - first}
    return {name: round(value, 2) for name, value in found.items()}


def covered_by(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans, (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def work(number: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Measure in one process."""
    process = Process(number, arguments, rendezvous)
    if process.cuda:
        process.say(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    for name in arguments.models.split(","):
        process.model(name)
        if process.cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="hunyuan-video,framepack")
    parser.add_argument("--variants", default="flash4,fp8-all", help="of speed.py; those with FP8 weights last")
    parser.add_argument("--wan-size", default="720p", choices=["480p", "720p"])
    parser.add_argument("--ltx-size", default="768x512x121", help="width x height x frames")
    parser.add_argument("--parts", default=str(PARTS), help="most parts of heads, one or more numbers")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--repeats", type=int, default=2, help="timed passes after the first")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        spawn(work, args=(arguments, rendezvous), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
