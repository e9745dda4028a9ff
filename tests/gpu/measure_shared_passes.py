"""Measure forward passes of HunyuanVideo and FramePack on one GPU and shared by several (Ulysses). Not run by pytest.

    python tests/gpu/measure_shared_passes.py [--gpus 2] [--variants flash4,fp8-all] [--models hunyuan-video,framepack]
    python tests/gpu/measure_shared_passes.py --device cpu --tiny --variants ours,fused     tries the script itself

HunyuanVideo's size is 129 frames of 1280x720, FramePack's a section of 480x832. Variants are those of
measure_speed.py. Each process makes the same random weights on its GPU, so nothing is written to the disk. As in a job,
processes exchange tokens through torch.distributed; a job also sends latents from and to the coordinator, which is not
measured here. For each model and variant, the first process measures a pass alone, then all measure it together: the
slowest decides. Prints a JSON object per measurement and appends it to $OUT/shared.jsonl. The error is
‖out - one‖ / ‖one‖ relative to one GPU's result of the same variant. Nothing starts after `--seconds`.
"""

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from runtime.core.plan import EAGER
from runtime.execution.attention import problem
from runtime.execution.parallel.ulysses import Tokens
from runtime.families.hunyuan_video.transformer import install, share_tokens
from tests.gpu import hunyuan_cases as cases
from tests.gpu import results
from tests.gpu.check_common import relative_error
from tests.gpu.measure_speed import HUNYUAN_VARIANTS, hunyuan_quantize, quantized, raise_if_degraded, random_module

SIZES = {"hunyuan-video": "720p", "framepack": "480x832"}


class Process:
    """One process and its GPU."""

    def __init__(self, number: int, arguments: argparse.Namespace, rendezvous: str) -> None:
        self.number, self.arguments = number, arguments
        self.cuda = arguments.device == "cuda"
        self.device = f"cuda:{number}" if self.cuda else "cpu"
        if self.cuda:
            torch.cuda.set_device(self.device)
        backend = "nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=number, world_size=arguments.gpus)
        self.group: Any = dist.new_group(list(range(arguments.gpus)))
        self.tokens = Tokens(self.group)
        self.began = time.monotonic()

    def say(self, **found: Any) -> None:
        """Report a measurement, in the first process."""
        if not self.number:
            results.say("shared.jsonl", at=round(time.monotonic() - self.began, 1), **found)

    def agree(self, value: float) -> float:
        """Return the largest value of all processes."""
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return float(largest)

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
        tiny = self.arguments.tiny
        size = "tiny" if tiny else SIZES[name]
        dtype = torch.bfloat16 if self.cuda else torch.float32
        module = random_module(self.device, partial(cases.make, name, tiny=tiny), dtype, cases.spread)
        case = cases.case(name, size, module.config, self.device, tiny=tiny)
        for variant in self.arguments.variants.split(","):
            late = self.agree(time.monotonic() - self.began) > self.arguments.seconds
            if late:
                self.say(left_out=f"{name} {variant} and what follows")
                return
            self.variant(name, module, case, variant)

    def variant(self, name: str, module: Any, case: cases.Case, variant: str) -> None:
        """Measure a variant alone and shared; a failure in one process is one of all."""
        speed, linears = HUNYUAN_VARIANTS[variant]
        what = {"model": name, "size": case.size, "variant": variant}
        assert speed is not None, "diffusers' passes are not shared"
        one: torch.Tensor | None = None
        found: dict[str, Any] = {}
        why, denoiser = None, cases.denoiser_of(name, module)
        try:
            if linears and not quantized(module):
                hunyuan_quantize(module)
            why = problem(speed.attention, self.device, denoiser.dtype, module.config.attention_head_dim)
            if why is not None:
                raise RuntimeError(str(why))
            denoiser.compute(speed, raise_if_degraded)
            if not self.number:
                module.shared_tokens = None
                with torch.no_grad():
                    one, found = self.timed(case.by_tandem(denoiser))
                self.say(**what, gpus=1, tera=round(case.operations / found["seconds"] / 1e12, 1), **found)
            failed = 0.0
        except Exception as error:
            traceback.print_exc()
            failed = 1.0
            results.say("shared.jsonl", **what, process=self.number, failed=f"{type(error).__name__}: {error}"[:300])
        if self.agree(failed):
            return
        # Attention that shares tokens is compiled again.
        install(module, speed.attention, *denoiser._compiled)
        share_tokens(module, self.tokens)
        with torch.no_grad():
            out, shared = self.timed(case.by_tandem(denoiser))
        slowest = self.agree(shared["seconds"])
        if one is not None:
            self.say(
                **what,
                gpus=self.arguments.gpus,
                tokens=self.tokens.count,
                times_as_fast=round(found["seconds"] / slowest, 3),
                error=float(f"{relative_error(out.float(), one.float()):.3g}"),
                peak_bytes=torch.cuda.max_memory_allocated() if self.cuda else 0,
                **(shared | {"seconds": slowest}),
            )
        denoiser.compute(EAGER)


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
    parser.add_argument("--variants", default="flash4,fp8-all", help="of measure_speed.py; those with FP8 weights last")
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
