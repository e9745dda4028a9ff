"""Measure upscalers on a GPU: plain PyTorch, compiled, and as Tandem runs them, from 8-bit frames to 8-bit frames.

    python bench/gpu/upscale.py [--upscaler realesr-animevideov3] [--size 832x480] [--frames 81] [--ways eager,tandem,…]
    python bench/gpu/upscale.py --device cpu --size 64x48 --frames 3 --ways eager,tandem:pytorch

Ways, each in a process of its own, which is killed after `--way-seconds`:

    eager                   the network in float16 (float32 on a CPU), channels last
    MODE                    the same with `torch.compile` in the mode default, max-autotune-no-cudagraphs, …
    tandem:BACKEND          `pipeline.upscale.FrameUpscaler` on a backend; an engine is built if it is missing
    tandem:BACKEND:TILE     the same in tiles of so many pixels
    tandem:BACKEND:TILE:N   the same with N frames, or tiles, a call

`network` is the time of a frame within the network alone, `frame` with the conversion from and to 8 bits. Both are
medians of batches, by CUDA events. Errors are ‖out - ref‖ / ‖ref‖ of the network in float32 with TF32 off. With
TensorRT 8.6, run it by `trt310`; see `bench/gpu/dcae.py`. Each way prints a JSON object, and appends it to
$OUT/upscale.jsonl.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu import build_child_opset17, results
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.engines import frame_decoders
from runtime.engines.build import build_engine
from runtime.engines.reference import ExactConvolutions, full_float32
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.machine.probe import probe
from runtime.pipeline.upscale import FrameUpscaler
from runtime.planner.upscaling import UpscalerCalls
from tests.families.esrgan.networks import picture
from tests.gpu import tensorrt_8_6
from tests.gpu.errors import relative_error

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
WARM_UP = 3

say = partial(results.say, "upscale.jsonl")


class Measurement:
    """One way to upscale, in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device, self.name = arguments.device, arguments.upscaler
        self.spec = find_upscaler(self.name, arguments.scale, Path("none"))
        width, height = map(int, arguments.size.split("x"))
        still = torch.from_numpy((picture(height, width) * 255).round().astype("uint8"))
        moved = [still.roll(3 * index, 2) for index in range(arguments.frames)]
        self.frames = torch.stack(moved).permute(0, 2, 3, 1).contiguous()
        self.machine = probe()
        self.calls = UpscalerCalls.of(self.spec, height, width, self.device, self.machine)
        self.dtype = getattr(torch, self.calls.dtype)
        colors = self.colors(self.frames[:1], torch.float32)
        module = load_upscaler(self.spec, device=self.device)
        with torch.no_grad(), full_float32(torch.device(self.device)), ExactConvolutions():
            self.expected = module(colors).cpu()

    def colors(self, frames: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return frames as a network takes them."""
        given = frames.to(self.device).permute(0, 3, 1, 2).to(dtype) / 255
        return given.contiguous(memory_format=torch.channels_last)

    def milliseconds(self, call: Callable[[int], object], batch: int) -> float:
        """Return the median time of a frame; `call` takes the index of the first frame of a batch."""
        starts = range(0, max(len(self.frames) - batch + 1, 1), batch)
        for index in range(WARM_UP):
            call(starts[index % len(starts)])
        times = []
        for start in starts:
            if self.device == "cpu":
                began = time.perf_counter()
                call(start)
                times.append(1000 * (time.perf_counter() - began))
                continue
            began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began_at.record()
            call(start)
            ended_at.record()
            ended_at.synchronize()
            times.append(began_at.elapsed_time(ended_at))
        return round(statistics.median(times) / batch, 3)

    def run(self, way: str) -> None:
        """Measure a way, and print the result."""
        facts: dict[str, Any] = {"upscaler": self.spec.name, "size": self.arguments.size, "way": way}
        name, *rest = way.split(":")
        began = time.perf_counter()
        with torch.no_grad():
            found = self.tandem(*rest) if name == "tandem" else self.network(name)
        memory = torch.cuda.max_memory_reserved() if self.device != "cpu" else 0
        say(**facts, **found, took_s=round(time.perf_counter() - began, 1), reserved_mib=memory >> 20)

    def network(self, mode: str) -> dict[str, Any]:
        """Measure the network itself."""
        module: Any = load_upscaler(self.spec, device=self.device, dtype=self.calls.dtype)
        module = module.to(memory_format=torch.channels_last)
        call = module if mode == "eager" else torch.compile(module, mode=mode, dynamic=False)
        batch = min(self.calls.batch, len(self.frames))
        given = self.colors(self.frames[:batch], self.dtype)
        error = relative_error(call(given)[:1].float().cpu(), self.expected)
        return {"batch": batch, "network": self.milliseconds(lambda _: call(given), batch), "error": error}

    def tandem(self, backend: str, tile: str = "", batch: str = "") -> dict[str, Any]:
        """Measure what Tandem runs."""
        calls = replace(self.calls, tile=int(tile)) if tile else self.calls
        calls = replace(calls, batch=int(batch)) if batch else calls
        store = EngineStore(HOME / "engines", 1 << 40)
        service = EngineService(store, self.machine, HOME)
        build = partial(build_engine, entry=build_child_opset17.run_job)
        began = time.perf_counter()
        with (
            mock.patch.object(frame_decoders, "build_engine", build),
            FrameUpscaler(calls, backend, settings.load(), service, lambda event: None, Cancel()) as upscaler,
        ):
            prepared = time.perf_counter() - began
            count = min(upscaler.frames_per_call, len(self.frames))
            larger = upscaler(self.frames[:1])[0].cpu().permute(2, 0, 1)[None].float() / 255
            error = relative_error(larger, self.expected.clamp(0, 1)[..., : larger.shape[2], : larger.shape[3]])
            frame = self.milliseconds(lambda start: upscaler(self.frames[start : start + count]), count)
            outcome = upscaler.outcome
        found: dict[str, Any] = {"batch": calls.batch, "tile": calls.tile, "frame": frame, "error_8_bit": error}
        record = next((one for one in store.index() if one.id == outcome["engine"]), None)
        if record is not None:
            found |= {
                "network": round(1000 * record.seconds_per_call / calls.batch, 3),
                "error": record.error,
                "precision": record.key.precision,
                "build_s": record.build_seconds,
            }
        return {
            **found,
            "backend": outcome["backend"],
            "fallbacks": list(map(str, outcome["fallbacks"])),
            "prepare_s": round(prepared, 1),
        }


def main() -> int:
    """Measure each way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upscaler", default="realesr-animevideov3")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--size", default="832x480", help="width x height of the frames that are enlarged")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--ways", default="eager,default,max-autotune-no-cudagraphs,tandem:pytorch,tandem:inductor")
    parser.add_argument("--way-seconds", type=float, default=120)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        try:
            if arguments.device != "cpu" and tensorrt_8_6.is_installed():
                tensorrt_8_6.load()
            Measurement(arguments).run(arguments.ways)
        except Exception as error:
            traceback.print_exc()
            say(way=arguments.ways, failed=f"{type(error).__name__}: {error}"[:500])
            return 1
        return 0
    for way in arguments.ways.split(","):
        given = {name: value for name, value in vars(arguments).items() if name not in {"ways", "here"}}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        with subprocess.Popen(
            [sys.executable, __file__, "--here", f"--ways={way}", *options], start_new_session=True
        ) as process:
            try:
                process.wait(arguments.way_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                say(way=way, failed=f"killed after {arguments.way_seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
