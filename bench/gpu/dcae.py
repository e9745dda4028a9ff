"""Measure decoders of single frames, eight frames a call: PyTorch, compiled, and engines.

    python bench/gpu/dcae.py [--models f64c128,owl] [--sizes 256x256,360x640] [--ways eager,tensorrt=150,…]
    python bench/gpu/dcae.py --ways eager,pytorch,reduce-overhead,tensorrt --endurance 2000 --repeats 10
    python bench/gpu/dcae.py --device cpu --models tiny,tiny-owl --ways eager,pytorch,onnxruntime --repeats 3

`f64c128` is the decoder of mit-han-lab's dc-ae-f64c128-mix-1.0 and `owl` one of OWL's for 360×640 frames, both with
random weights: speed does not depend on their values. A size that is no multiple of the decoder's stride is rounded up,
and stated; `owl` decodes 8×8 latents to 360×640 frames, whatever the size.

Ways, each with a limit in seconds (`NAME=SECONDS`, else `--way-seconds`):

    eager                       the module in bfloat16 (float32 on a CPU)
    eager-channels-last         the same with the memory layout that convolutions prefer
    MODE                        `torch.compile` in the mode reduce-overhead (CUDA graphs), max-autotune (the same), or
                                max-autotune-no-cudagraphs
    MODE-channels-last          the same with that layout
    pytorch                     `make_batched_decode_fn` without an engine
    BACKEND or BACKEND:PRECISION  `make_batched_decode_fn` on an engine, such as tensorrt:fp16

Every way runs in a process of its own, which is killed at its limit; no way starts after `--seconds`. Each prints a
JSON object as soon as it has a result, and appends it to $OUT/dcae.jsonl: first times and error, then, with
`--endurance CALLS`, the memory at call 100, at every 500th, and at the last that fits the limit. Errors are
‖out - ref‖ / ‖ref‖ against float32 with TF32 off, of the same weights.

With TensorRT 8.6, run it by `trt310`, with these packages on PYTHONPATH, which are pure Python: accelerate, gguf,
imageio-ffmpeg, nvidia-ml-py, onnx_ir, onnxscript (and pytest for `check_tensorrt.py`). That Python lacks
Triton, without which PyTorch compiles nothing for a GPU: ways that compile run by `--compiler` (python3), where
Tandem's requirements must be on PYTHONPATH.
"""

import argparse
import copy
import gc
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from diffusers.models.autoencoders.autoencoder_dc import Decoder
from torch import nn

from bench.gpu import build_child_opset17, results
from runtime.core import settings
from runtime.engines import frame_decoders, offers
from runtime.engines.build import build_engine
from runtime.engines.builders import tensorrt
from runtime.engines.reference import ExactConvolutions, full_float32
from runtime.families.dcae import load_decoder, make_batched_decode_fn
from runtime.families.dcae.owl_programs import OwlDecoder
from runtime.families.dcae.sources import spec_of
from runtime.families.dcae.spec import read_architecture
from runtime.models.spec import FRAME_BATCH
from tests.gpu import tensorrt_8_6
from tests.gpu.errors import relative_error

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
F64C128: dict[str, Any] = {
    "in_channels": 3,
    "latent_channels": 128,
    "block_type": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 4,
    "block_out_channels": (128, 256, 512, 512, 1024, 1024, 2048),
    "layers_per_block": (0, 5, 10, 2, 2, 2, 2),
    "qkv_multiscales": ((),) * 7,
    "norm_type": ("batch_norm",) * 3 + ("rms_norm",) * 4,
    "act_fn": ("relu",) * 3 + ("silu",) * 4,
}
TINY: dict[str, Any] = F64C128 | {
    "latent_channels": 16,
    "attention_head_dim": 16,
    "block_out_channels": (16, 16, 32, 32, 64, 64, 128),
    "layers_per_block": (0, 1, 1, 1, 1, 1, 1),
}
OWL: dict[str, Any] = {
    "model_id": "dcae",
    "sample_size": [360, 640],
    "channels": 3,
    "latent_channels": 128,
    "ch_0": 128,
    "ch_max": 1024,
    "decoder_blocks_per_stage": [3, 3, 3, 3, 3, 3],
}
TINY_OWL = OWL | {"latent_channels": 8, "ch_0": 8, "ch_max": 16, "decoder_blocks_per_stage": [1] * 6}
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CHANNELS_LAST = "-channels-last"
USUAL_WAYS = "eager,tensorrt=150,reduce-overhead,pytorch,reduce-overhead-channels-last,max-autotune-channels-last=100"
WARM_UP, FEWEST, TIMING_SECONDS = 5, 5, 4.0
FIRST_CALL, EVERY = 100, 500
# After a way's limit, for its end; no way starts with less time than this.
GRACE_SECONDS = 6.0

say = partial(results.say, "dcae.jsonl")


def decoder_of(name: str) -> nn.Module:
    """Return a decoder in float32 on the CPU."""
    torch.manual_seed(0)
    if name in {"f64c128", "tiny"}:
        return Decoder(**(F64C128 if name == "f64c128" else TINY)).eval().requires_grad_(False)
    if name in {"owl", "tiny-owl"}:
        spec = read_architecture(OWL if name == "owl" else TINY_OWL)
        module: Any = OwlDecoder(spec, ("conv_out.proj.bias",)).eval().requires_grad_(False)
        module.config = argparse.Namespace(**(OWL if name == "owl" else TINY_OWL))
        return module
    return load_decoder(name)


class Measurement:
    """One way to decode with one model at one size, in this process."""

    def __init__(self, arguments: argparse.Namespace, way: str, ends: float) -> None:
        self.arguments, self.way, self.ends = arguments, way, ends
        self.device = torch.device(arguments.device)
        self.decoder = decoder_of(arguments.models)
        spec = spec_of(self.decoder, HOME / "dcae")
        assert spec is not None
        self.spec = spec
        vae: Any = spec.vae
        size = tuple(int(side) for side in arguments.sizes.split("x"))
        latent = (8, 8) if vae.resized else tuple(-(-side // vae.scale_factor_spatial) for side in size)
        # Values that bfloat16 has: errors are those of the arithmetic.
        torch.manual_seed(1)
        self.latents = torch.randn(1, FRAME_BATCH, spec.vae.z_dim, *latent).bfloat16().float().to(self.device)
        height, width = vae.frame_size(*latent)
        self.facts = {"model": arguments.models, "wanted": arguments.sizes, "frames": f"{FRAME_BATCH}x{height}x{width}"}
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        reference = self.placed(torch.float32)
        with torch.no_grad(), full_float32(self.device), ExactConvolutions():
            self.expected = reference(self.latents[0]).cpu()
        del reference
        self.free()

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def placed(self, dtype: torch.dtype) -> Any:
        """Return a copy of the decoder."""
        copied: Any = copy.deepcopy(self.decoder).to(self.device, dtype)
        copied.tandem_spec = self.spec
        return copied

    def free(self) -> None:
        """Return unused memory to the GPU."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, waits: bool) -> float:
        """Return the median time of a call that is waited for, or that of one of many without a wait between them."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < self.arguments.repeats:
            started = time.perf_counter()
            call()
            if waits:
                self.synchronize()
            times.append(time.perf_counter() - started)
            if len(times) >= FEWEST and time.perf_counter() - began > TIMING_SECONDS:
                break
        self.synchronize()
        return statistics.median(times) if waits else (time.perf_counter() - began) / len(times)

    def memory(self, call: int) -> dict[str, int]:
        """Return the bytes in use after a call: PyTorch's on the GPU, all on the GPU as nvidia-smi shows, and RAM."""
        found = {"call": call, "rss": psutil.Process().memory_info().rss}
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {
                "allocated": torch.cuda.memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
                "gpu_used": total - free,
            }
        return found

    def report(self, variant: str, call: Callable[[], torch.Tensor], **more: Any) -> None:
        """Compare frames and time a variant, then call it often."""
        out = call().float().cpu()
        error = relative_error(out.view_as(self.expected), self.expected)
        waited = self.seconds(call, waits=True)
        say(
            **self.facts,
            variant=variant,
            ms=round(1000 * waited, 3),
            frames_per_second=round(FRAME_BATCH / waited, 1),
            ms_pipelined=round(1000 * self.seconds(call, waits=False), 3),
            error=error,
            **more,
        )
        if self.arguments.endurance:
            self.endure(variant, call)

    def endure(self, variant: str, call: Callable[[], object]) -> None:
        """Compare the memory after many calls with that after 100."""
        wanted, done = self.arguments.endurance, 0
        seen: list[dict[str, int]] = []
        while done < wanted and time.monotonic() < self.ends:
            call()
            done += 1
            if done % FIRST_CALL == 0:
                self.synchronize()
            if done == FIRST_CALL or done % EVERY == 0:
                seen.append(self.memory(done))
        self.synchronize()
        if not seen or seen[-1]["call"] != done:
            seen.append(self.memory(done))
        growth = {name: seen[-1][name] - seen[0][name] for name in seen[0]}
        say(**self.facts, variant=variant, endurance=seen, growth=growth, complete=done == wanted)

    def run(self) -> None:
        """Measure the way."""
        name = self.way.removesuffix(CHANNELS_LAST)
        if name == "eager" or name in MODES:
            with torch.no_grad():
                self.module(name, channels_last=name != self.way)
        elif name == "pytorch":
            with make_batched_decode_fn(self.placed(self.dtype), use_tensorrt=False, backend="pytorch") as decode:
                given = self.latents.to(self.dtype)
                # Read first: a fallback is reported even if nothing else is.
                decode(given)
                self.report(self.way, lambda: decode(given), fallbacks=list(map(str, decode.fallbacks)))
        else:
            self.engine(*name.partition(":")[::2])

    def module(self, name: str, *, channels_last: bool) -> None:
        """Measure the module itself."""
        module, latents = self.placed(self.dtype), self.latents[0].to(self.dtype)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
            latents = latents.to(memory_format=torch.channels_last)
        started = time.perf_counter()
        if name in MODES:
            module = torch.compile(module, mode=name, dynamic=False)
        # A graph is recorded at the second or third call.
        for _ in range(3):
            module(latents)
        self.synchronize()
        self.report(self.way, lambda: module(latents), first_calls_s=round(time.perf_counter() - started, 1))

    def engine(self, backend: str, precision: str) -> None:
        """Measure an engine, which is built if it is missing."""
        # An engine's key does not tell whether it was built so.
        folder = HOME / ("engines-typed" if self.arguments.typed else "engines")
        found = settings.load().replace(engine_cache_dir=folder, decoder_precision=precision or None)
        entry = build_child_opset17.run_typed_job if self.arguments.typed else build_child_opset17.run_job
        build = partial(build_engine, entry=entry)
        profiled = frozenset[str]() if self.arguments.static else offers._PROFILED
        started = time.perf_counter()
        with (
            mock.patch.object(frame_decoders, "build_engine", build),
            # The level is part of the key.
            mock.patch.object(tensorrt, "_OPTIMIZATION_LEVEL", self.arguments.level),
            mock.patch.object(offers, "_PROFILED", profiled),
            make_batched_decode_fn(self.placed(torch.float32), backend=backend, settings=found) as decode,
        ):
            decode.prepare(*self.latents.shape[3:])
            if decode.backend != backend:
                raise RuntimeError(f"no engine: {'; '.join(map(str, decode.fallbacks))}")
            record = next(one for one in decode.service.store.index() if one.id == decode.engine)
            more = {
                "prepare_s": round(time.perf_counter() - started, 1),
                "build_s": record.build_seconds,
                "file_mib": round(record.file_bytes / (1 << 20), 1),
                "verified_error": record.error,
                "tolerance": record.tolerance,
                "engine_ms": round(1000 * record.seconds_per_call, 3),
                "pytorch_same_precision_ms": round(1000 * record.pytorch_seconds_per_call, 3),
                "precision": record.key.precision,
            }
            say(**self.facts, variant=self.way, built=more)
            self.report(self.way, lambda: decode(self.latents), precision=record.key.precision)
            one_frame = self.latents[:, :1]
            say(
                **self.facts,
                variant=f"{self.way}, one frame",
                ms=round(1000 * self.seconds(lambda: decode(one_frame), waits=True), 3),
                backend=decode.backend,
                fallbacks=list(map(str, decode.fallbacks)),
            )


def measure_here(arguments: argparse.Namespace) -> int:
    """Measure one way in this process; return an exit code."""
    way, _, ends = arguments.ways.partition("=")
    try:
        if arguments.device != "cpu" and tensorrt_8_6.is_installed():
            tensorrt_8_6.load()
        Measurement(arguments, way, float(ends)).run()
    except Exception as error:
        traceback.print_exc()
        facts = {"model": arguments.models, "wanted": arguments.sizes, "variant": way}
        say(**facts, failed=f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


def command_of(arguments: argparse.Namespace, model: str, size: str, way: str, limit: float) -> list[str]:
    """Return the command that measures one way; ways that compile for a GPU need a Python with Triton.

    The way's end is passed as a time of `time.monotonic`, which is the same in all processes.
    """
    compiles = way.removesuffix(CHANNELS_LAST) in MODES and arguments.device != "cpu"
    python = arguments.compiler if compiles and not importlib.util.find_spec("triton") else sys.executable
    options = {
        "models": model,
        "sizes": size,
        "ways": f"{way}={time.monotonic() + limit:.1f}",
        "device": arguments.device,
    }
    options |= {"repeats": arguments.repeats, "endurance": arguments.endurance, "level": arguments.level}
    flags = ["--here", *(["--static"] if arguments.static else []), *(["--typed"] if arguments.typed else [])]
    return [python, __file__, *flags, *(f"--{name}={value}" for name, value in options.items())]


def environment_of(python: str, compiled: Path) -> dict[str, str]:
    """Return the environment of a command: another Python must not read the packages of this one.

    Args:
        compiled: the folder of PyTorch's compiled kernels.
    """
    found = dict(os.environ) | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    if python != sys.executable:
        own = str(Path(torch.__file__).parents[1])
        paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path and path != own]
        found["PYTHONPATH"] = os.pathsep.join(paths)
        found.pop("LD_LIBRARY_PATH", None)
    return found


def run_limited(command: list[str], limit: float, folder: str) -> str:
    """Run a command at most so many seconds and a few more; return what went wrong, or an empty text."""
    # A killed compiler leaves files that are cut short, and PyTorch would load them: the folder is then removed.
    compiled = HOME / "compiled" / folder
    # With its own process group, which ends with it: a build has processes of its own.
    with subprocess.Popen(command, start_new_session=True, env=environment_of(command[0], compiled)) as process:
        try:
            code = process.wait(limit + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(compiled, ignore_errors=True)
            return f"killed after {limit:.0f} s"
    # 1: it has said itself what failed.
    return "" if code in {0, 1} else f"ended with code {code}"


def main() -> int:
    """Measure the requested models, sizes and ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="f64c128,owl", help="f64c128, owl, tiny, tiny-owl, or names of decoders")
    parser.add_argument("--sizes", default="256x256,360x640", help="height x width")
    parser.add_argument("--ways", default=USUAL_WAYS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls; fewer if they take over 4 s")
    parser.add_argument("--endurance", type=int, default=0, metavar="CALLS")
    parser.add_argument("--seconds", type=float, default=240, help="of all ways together")
    parser.add_argument("--way-seconds", type=float, default=70, help="of a way")
    parser.add_argument("--level", type=int, default=3, help="TensorRT's optimization level, 0 to 5")
    parser.add_argument("--static", action="store_true", help="engines for full batches alone, which build faster")
    parser.add_argument("--typed", action="store_true", help="with TensorRT 8.6: layers in the file's own precisions")
    parser.add_argument(
        "--compiler", default="python3", help="the Python of ways that compile, if this one has no Triton"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        return measure_here(arguments)
    ends = time.monotonic() + arguments.seconds
    done: set[tuple[str, str]] = set()
    for model in arguments.models.split(","):
        for size in arguments.sizes.split(","):
            # OWL's frames have one size.
            if "owl" in model and any(one == model for one, _ in done):
                continue
            done.add((model, size))
            for way in arguments.ways.split(","):
                name, _, own = way.partition("=")
                limit = min(float(own or arguments.way_seconds), ends - time.monotonic())
                facts = {"model": model, "wanted": size, "variant": name}
                if limit < GRACE_SECONDS:
                    say(**facts, skipped="no time left")
                    continue
                started = time.monotonic()
                problem = run_limited(command_of(arguments, model, size, name, limit), limit, f"{model}-{size}-{name}")
                if problem:
                    say(**facts, failed=problem)
                say(**facts, took_s=round(time.monotonic() - started, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
