"""Measure the kernels of sparse attention, their time and error by threshold, beside other attention kernels.

    python bench/gpu/sparse_attention.py [--sizes 480p,720p] [--taus 0.5,1,1.5] [--seconds N]

40 heads of 128 channels; 480p is 32,760 tokens, 720p 75,600. Queries, keys and values are random fields with local
structure, see `inputs`: those of a published model were not available. Errors are relative to attention in float32 of
two heads. FP8 is compiled, as a block has it. `rows` are tokens of a text at the end, which attend exactly.

Prints a JSON object per measurement and appends it to $OUT/sparse_attention.jsonl. A failure is reported and the next
measurement runs; none starts after `--seconds`. `--device cpu --sizes tiny` tries the script itself.

A pass of Wan2.2-A14B is measured by bench/gpu/speed.py, with random weights:

    python bench/gpu/speed.py transformer --size 720p --variants fp8-all,fp8-sol --reference-blocks 0 --no-profile
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from runtime.core.sparse_attention import BLOCK
from runtime.execution.attention import attention, problem, sparse_kernel
from tests.gpu.errors import relative_error

# Tokens: frames, rows, columns.
GRIDS = {"480p": (21, 30, 52), "720p": (21, 45, 80), "tiny": (3, 12, 16)}
WIDTH, HEADS, COMPARED_HEADS = 128, 40, 2
TEXT = 256
CALLS = 3
QUERIES = 4096


def inputs(grid: tuple[int, int, int], heads: int, device: str) -> list[torch.Tensor]:
    """Return queries, keys and values, (1, tokens, heads, 128), bfloat16, with local structure.

    Queries and keys of a head share a field that changes over 3 frames and 5 rows and columns, and values have another
    one. Noise of the same size is added to each.
    """
    generator = torch.Generator(device).manual_seed(2)
    coarse = [max(side // reach, 1) for side, reach in zip(grid, (3, 5, 5), strict=True)]
    tokens = grid[0] * grid[1] * grid[2]
    made = [torch.empty((1, tokens, heads, WIDTH), device=device, dtype=torch.bfloat16) for _ in range(3)]
    for head in range(heads):
        fields = torch.randn((2, WIDTH, *coarse), device=device, generator=generator)
        smooth = F.interpolate(fields, size=grid, mode="trilinear").flatten(2).transpose(1, 2)
        smooth = smooth / smooth.std()
        noise = torch.randn((3, tokens, WIDTH), device=device, generator=generator)
        for tensor, of_all, own in zip(made, (smooth[0], smooth[0], smooth[1]), noise, strict=True):
            tensor[0, :, head] = of_all + own
    return made


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention in float32, some queries at a time."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    parts = [(part @ k.transpose(2, 3) / WIDTH**0.5).softmax(3) @ v for part in q.split(QUERIES, dim=2)]
    return torch.cat(parts, dim=2).transpose(1, 2)


class Bench:
    """Device, time limit and report of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.cuda = self.device.startswith("cuda")
        self.out = Path(os.environ.get("OUT", "."))
        self.ends = time.monotonic() + arguments.seconds

    def say(self, **found: Any) -> None:
        """Print a measurement and append it to sparse_attention.jsonl."""
        line = json.dumps(found)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with (self.out / "sparse_attention.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object]) -> dict[str, Any]:
        """Return the median milliseconds of a call after a warm-up, their spread, and the bytes that it allocates."""
        run()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(CALLS):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append(1000 * (time.perf_counter() - started))
        working = torch.cuda.max_memory_allocated() - before if self.cuda else 0
        return {
            "milliseconds": round(statistics.median(times), 2),
            "spread": [round(min(times), 2), round(max(times), 2)],
            "working": working,
        }

    def measure(self, what: dict[str, Any], kind: str, qkv: list[torch.Tensor], wanted: torch.Tensor) -> None:
        """Measure one kernel and print it, or why it failed."""
        if time.monotonic() > self.ends:
            self.say(**what, failed="no time left")
            return
        try:
            why = problem(kind, self.device, torch.bfloat16, WIDTH)
            if why is not None:
                raise RuntimeError(str(why))
            attend = attention(kind)
            if kind == "fp8":
                attend = torch.compile(attend, fullgraph=True)
            found = self.milliseconds(partial(attend, *qkv))
            out = attend(*qkv)[:, :, :COMPARED_HEADS].float()
            last = int(kind.split(":")[2]) if kind.startswith("sol") else 0
            rows = {"rows_error": rounded(out[:, -last:], wanted[:, -last:])} if last else {}
            self.say(**what, **found, error=rounded(out, wanted), **rows)
        except Exception as error:  # one kernel that fails must not end the others
            traceback.print_exc()
            self.say(**what, failed=f"{type(error).__name__}: {str(error)[:300]}")
        if self.cuda:
            torch.cuda.empty_cache()


def rounded(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return a relative error with three digits."""
    return float(f"{relative_error(out, wanted):.3g}")


def main() -> None:
    """Measure all kernels at all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="480p,720p")
    parser.add_argument("--taus", default="0.5,1,1.5")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    for size in arguments.sizes.split(","):
        heads = 2 if size == "tiny" else HEADS
        with torch.no_grad():
            qkv = inputs(GRIDS[size], heads, bench.device)
            wanted = exact(*(x[:, :, :COMPARED_HEADS] for x in qkv))
            bench.wait()
            what: dict[str, Any] = {"size": size, "tokens": qkv[0].shape[1], "heads": heads, "block": BLOCK}
            for tau in map(float, arguments.taus.split(",")):
                bench.measure({**what, "kernel": "sol", "tau": tau}, sparse_kernel(tau), qkv, wanted)
            bench.measure({**what, "kernel": "sol", "tau": 1.0, "rows": TEXT}, sparse_kernel(1.0, TEXT), qkv, wanted)
            for kind in ("flash4", "cudnn", "fp8"):
                bench.measure({**what, "kernel": kind}, kind, qkv, wanted)
        del qkv, wanted


if __name__ == "__main__":
    main()
