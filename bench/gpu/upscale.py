"""Measure upscalers and the network that interpolates: PyTorch, compiled, and Tandem, from 8-bit frames to 8-bit ones.

    python bench/gpu/upscale.py [--network realesr-animevideov3] [--size 832x480] [--frames 81] [--ways eager,tandem,…]
    python bench/gpu/upscale.py --network interpolator --ways eager,default,tandem:pytorch,tandem:inductor
    python bench/gpu/upscale.py --ways clip:pytorch,clip:inductor
    python bench/gpu/upscale.py --device cpu --size 64x48 --frames 3 --ways eager,tandem:pytorch

Ways, each in a process of its own, which is killed after `--way-seconds`:

    eager                   the network in float16 (on a CPU in bfloat16 or float32), channels last
    eager:DTYPE             the same in another dtype
    MODE                    the same with `torch.compile` in the mode default, max-autotune-no-cudagraphs, …
    tandem:BACKEND          `pipeline.upscale.FrameUpscaler`, or `families.interpolator.frames.NetworkInterpolator`, on
                            a backend; an engine is built if it is missing
    tandem:BACKEND:TILE     the same in tiles of so many pixels
    tandem:BACKEND:TILE:N   the same with N frames, or tiles, a call
    clip:BACKEND            all frames enlarged: `computed_s` seconds until they are in memory, `written_s` until they
                            are in an MP4 (H.264), as a job writes them, `encoded_s` for writing alone

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu import build_child_opset17, results
from bench.gpu.timing import call_seconds
from bench.interpolation import rendered
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.plan import default_crf
from runtime.core.request import INTERPOLATOR
from runtime.engines import frame_decoders
from runtime.engines.build import build_engine
from runtime.engines.reference import ExactConvolutions, full_float32
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.decoded_frames import fetched
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.families.interpolator.components import load_interpolator
from runtime.families.interpolator.frames import NetworkInterpolator
from runtime.machine.probe import probe
from runtime.models.registry import find_interpolator
from runtime.pipeline.upscale import FrameUpscaler
from runtime.planner.frame_networks import FrameCalls
from runtime.video.mp4 import VideoWriter
from tests.families.esrgan.networks import picture
from tests.gpu import tensorrt_8_6
from tests.gpu.errors import relative_error

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
WARM_UP = 3
# More of them take long.
_RENDERED = 17

say = partial(results.say, "upscale.jsonl")


class Measurement:
    """One way to upscale, in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device, self.interpolates = arguments.device, arguments.network == INTERPOLATOR
        name, scale = arguments.network, arguments.scale
        self.spec = find_interpolator() if self.interpolates else find_upscaler(name, scale, Path("none"))
        width, height = map(int, arguments.size.split("x"))
        if self.interpolates:
            # Frames whose motion can be found, and no cuts: of the world that the network knows.
            self.frames = torch.from_numpy(next(rendered(1, (width, height), min(arguments.frames, _RENDERED))))
        else:
            still = torch.from_numpy((picture(height, width) * 255).round().astype("uint8"))
            moved = [still.roll(3 * index, 2) for index in range(arguments.frames)]
            self.frames = torch.stack(moved).permute(0, 2, 3, 1).contiguous()
        self.machine = probe()
        batch = {"batch": 1} if self.interpolates else {}
        self.calls = FrameCalls.of(self.spec, height, width, self.device, self.machine, **batch)
        colors, module = self.colors(1, "float32"), self.load("float32")
        with torch.no_grad(), full_float32(torch.device(self.device)), ExactConvolutions():
            self.expected = module(colors).cpu()

    def load(self, dtype: str) -> torch.nn.Module:
        """Load the network."""
        if self.interpolates:
            return load_interpolator(self.device, dtype)
        return load_upscaler(self.spec, device=self.device, dtype=dtype)

    def colors(self, count: int, dtype: str) -> torch.Tensor:
        """Return the first frames as the network takes them; the interpolator takes each with the next."""
        given = self.frames.to(self.device).permute(0, 3, 1, 2) / 255
        if self.interpolates:
            return torch.cat([given[:count], given[1 : count + 1]], 1)
        # Of fewer than 8 bits, only what convolutions take: see `pipeline.upscale`.
        given = given[:count].to(torch.float32 if dtype == "bfloat16" else getattr(torch, dtype))
        return given.contiguous(memory_format=torch.channels_last)

    def milliseconds(self, call: Callable[[int], object], batch: int) -> float:
        """Return the median time of a frame; `call` takes the index of the first frame of a batch."""
        starts = range(0, max(len(self.frames) - batch + 1, 1), batch)
        for index in range(WARM_UP):
            call(starts[index % len(starts)])
        times = [1000 * call_seconds(partial(call, start), cuda=self.device != "cpu") for start in starts]
        return round(statistics.median(times) / batch, 3)

    def run(self, way: str) -> None:
        """Measure a way, and print the result."""
        facts: dict[str, Any] = {"model": self.spec.name, "size": self.arguments.size, "way": way}
        name, *rest = way.split(":")
        began = time.perf_counter()
        with torch.no_grad():
            by_name = {"tandem": self.interpolator if self.interpolates else self.tandem, "clip": self.clip}
            found = by_name[name](*rest) if name in by_name else self.network(*way.split(":"))
        memory = torch.cuda.max_memory_reserved() if self.device != "cpu" else 0
        say(**facts, **found, took_s=round(time.perf_counter() - began, 1), reserved_mib=memory >> 20)

    def network(self, mode: str, dtype: str = "") -> dict[str, Any]:
        """Measure the network itself."""
        dtype = dtype or self.calls.dtype
        module: Any = self.load(dtype)
        module = module.to(memory_format=torch.channels_last)
        call = module if mode == "eager" else torch.compile(module, mode=mode, dynamic=False)
        batch = min(self.calls.batch, len(self.frames))
        given = self.colors(batch, dtype)
        error = relative_error(call(given)[:1].float().cpu(), self.expected)
        found = self.milliseconds(lambda _: call(given), batch)
        return {"batch": batch, "dtype": dtype, "network": found, "error": error}

    @contextmanager
    def service(self) -> Iterator[EngineService]:
        """Return an engine library, whose engines are built with what TensorRT 8.6 needs."""
        build = partial(build_engine, entry=build_child_opset17.run_job)
        with mock.patch.object(frame_decoders, "build_engine", build):
            yield EngineService(EngineStore(HOME / "engines", 1 << 40), self.machine, HOME)

    def interpolator(self, backend: str) -> dict[str, Any]:
        """Measure what Tandem runs to double the frames."""
        began, frames = time.perf_counter(), self.frames.numpy()
        with (
            self.service() as service,
            NetworkInterpolator(
                self.calls.width,
                self.calls.height,
                2,
                device=self.device,
                dtype=self.calls.dtype,
                backend=backend,
                engines=service,
            ) as interpolator,
        ):
            prepared = time.perf_counter() - began
            made = next(interpolator.add(frames[:2]))[1]
            colors = torch.from_numpy(made).permute(2, 0, 1)[None].float() / 255
            frame = self.milliseconds(lambda start: [*interpolator.add(frames[start : start + 1])], 1)
            outcome = interpolator.outcome
            error = relative_error(colors, self.expected.clamp(0, 1))
            found = {"frame": frame, "error_8_bit": error, "psnr": psnr(colors, self.expected)}
            return {**found, **self.described(service, outcome, 1), "prepare_s": round(prepared, 1)}

    def described(self, service: EngineService, outcome: dict[str, Any], batch: int) -> dict[str, Any]:
        """Return what ran, and what the engine's record has."""
        ran = {"backend": outcome["backend"], "fallbacks": list(map(str, outcome["fallbacks"]))}
        record = next((one for one in service.store.index() if one.id == outcome["engine"]), None)
        if record is None:
            return ran
        return {
            **ran,
            "network": round(1000 * record.seconds_per_call / batch, 3),
            "in_pytorch": round(1000 * record.pytorch_seconds / batch, 3),
            "error": record.error,
            "precision": record.key.precision,
            "build_s": record.build_seconds,
        }

    def upscaler(self, calls: FrameCalls, backend: str, service: EngineService) -> FrameUpscaler:
        """Return what enlarges frames in Tandem."""
        return FrameUpscaler(calls, backend, settings.load(), service, lambda event: None, Cancel())

    def clip(self, backend: str) -> dict[str, Any]:
        """Measure enlarging all frames, with and without an MP4."""
        with self.service() as service, self.upscaler(self.calls, backend, service) as upscaler:
            count = upscaler.frames_per_call

            def larger() -> Iterator[Any]:
                for start in range(0, len(self.frames), count):
                    for part in fetched(upscaler(self.frames[start : start + count]).split(1), lambda: None):
                        yield part.numpy()

            def write(frames: Iterable[Any], name: str) -> float:
                began = time.perf_counter()
                sides = self.calls.width, self.calls.height
                with VideoWriter(HOME / name, *sides, 16, default_crf(*sides)) as writer:
                    for part in frames:
                        writer.write(part)
                    writer.close_stream()
                    writer.finish("", {}, None)
                return time.perf_counter() - began

            for _ in zip(range(WARM_UP), larger(), strict=False):
                pass
            began = time.perf_counter()
            made = list(larger())
            computed = time.perf_counter() - began
            found = {"computed_s": computed, "written_s": write(larger(), "a.mp4"), "encoded_s": write(made, "b.mp4")}
            ran = self.described(service, upscaler.outcome, self.calls.batch)
        return {"frames": len(self.frames), **{name: round(value, 2) for name, value in found.items()}, **ran}

    def tandem(self, backend: str, tile: str = "", batch: str = "") -> dict[str, Any]:
        """Measure what Tandem runs."""
        calls = replace(self.calls, tile=int(tile)) if tile else self.calls
        calls = replace(calls, batch=int(batch)) if batch else calls
        began = time.perf_counter()
        with self.service() as service, self.upscaler(calls, backend, service) as upscaler:
            prepared = time.perf_counter() - began
            count = min(upscaler.frames_per_call, len(self.frames))
            larger = upscaler(self.frames[:1])[0].cpu().permute(2, 0, 1)[None].float() / 255
            error = relative_error(larger, self.expected.clamp(0, 1)[..., : larger.shape[2], : larger.shape[3]])
            frame = self.milliseconds(lambda start: upscaler(self.frames[start : start + count]), count)
            ran = self.described(service, upscaler.outcome, calls.batch)
        found: dict[str, Any] = {"batch": calls.batch, "tile": calls.tile, "frame": frame, "error_8_bit": error}
        return {**found, **ran, "prepare_s": round(prepared, 1)}


def psnr(made: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the PSNR in dB of colors in 0 to 1."""
    return round(float(-10 * torch.log10((made - expected).square().mean())), 1)


def main() -> int:
    """Measure each way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="realesr-animevideov3", help="an upscaler, or `interpolator`")
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
