"""Measure decoders of single frames, eight frames a call: PyTorch, compiled, and engines. Not run by pytest.

    python tests/gpu/measure_dcae.py [--models f64c128,owl] [--sizes 256x256,360x640] [--calls 2000]
    python tests/gpu/measure_dcae.py --device cpu --models diorama-dcae --backends onnxruntime,inductor --calls 200
    python tests/gpu/measure_dcae.py --device cpu --models tiny,tiny-owl --backends onnxruntime --calls 50 --repeats 3

`f64c128` is the decoder of mit-han-lab's dc-ae-f64c128-mix-1.0 and `owl` one of OWL's for 360×640 frames, both with
random weights: speed does not depend on their values. A size that is no multiple of the decoder's stride is rounded up,
and stated; `owl` decodes 8×8 latents to 360×640 frames, whatever the size.

All variants of a size run in one process, in turn. Errors are ‖out - ref‖ / ‖ref‖ against float32 with TF32 off, of the
same weights. `calls` counts calls after which the memory of this process and of the GPU is compared with that after 50.
Prints a JSON object per result and appends it to $OUT/dcae.jsonl. A failure is reported, and the next variant runs.
With TensorRT 8.6, run it by `trt310`; the engine is built in a child process, verified there, and opened here.
"""

import argparse
import copy
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from diffusers.models.autoencoders.autoencoder_dc import Decoder
from torch import nn

from runtime.core import settings
from runtime.engines import frame_decoders
from runtime.engines.build import build_engine
from runtime.engines.frame_decoders import BATCH
from runtime.engines.reference import full_float32
from runtime.families.dcae import load_decoder, make_batched_decode_fn
from runtime.families.dcae.owl_programs import OwlDecoder
from runtime.families.dcae.sources import spec_of
from runtime.families.dcae.spec import read_architecture
from tests.gpu import build_child_opset17, tensorrt_8_6
from tests.gpu.check_common import relative_error
from tests.gpu.results import say

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
WARM_UP = 50


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
    """The variants of one decoder at one size."""

    def __init__(self, arguments: argparse.Namespace, name: str, decoder: nn.Module, size: tuple[int, int]) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.decoder = decoder
        spec = spec_of(decoder, HOME / "dcae")
        assert spec is not None
        self.spec = spec
        vae: Any = spec.vae
        latent = (8, 8) if vae.resized else tuple(-(-side // vae.scale_factor_spatial) for side in size)
        # Values that bfloat16 has: errors are those of the arithmetic.
        self.latents = torch.randn(1, BATCH, spec.vae.z_dim, *latent).bfloat16().float().to(self.device)
        height, width = vae.frame_size(*latent)
        self.facts = {"model": name, "wanted": f"{size[0]}x{size[1]}", "frames": f"{BATCH}x{height}x{width}"}
        self.reference = self.placed(torch.float32)
        with torch.no_grad(), full_float32(self.device):
            self.expected = self.reference(self.latents[0]).cpu()

    def placed(self, dtype: torch.dtype) -> Any:
        """Return a copy of the decoder."""
        copied: Any = copy.deepcopy(self.decoder).to(self.device, dtype)
        copied.tandem_spec = self.spec
        return copied

    @contextmanager
    def going_on(self, variant: str) -> Iterator[None]:
        """Report a failure and continue; free memory."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            say("dcae.jsonl", **self.facts, variant=variant, failed=f"{type(error).__name__}: {error}"[:500])
        gc.collect()
        if self.device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()

    def seconds(self, call: Callable[[], torch.Tensor]) -> float:
        """Return the median time of a call, with the wait for its end."""
        times = []
        for number in range(self.arguments.repeats + 5):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            if number >= 5:
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def pipelined_seconds(self, call: Callable[[], torch.Tensor]) -> float:
        """Return the time of a call among many that follow one another without a wait."""
        self.synchronize()
        started = time.perf_counter()
        for _ in range(self.arguments.repeats):
            call()
        self.synchronize()
        return (time.perf_counter() - started) / self.arguments.repeats

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def used(self) -> tuple[int, int]:
        """Return the bytes in use on the GPU, by all processes, and of this process."""
        free, total = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else (0, 0)
        return total - free, psutil.Process().memory_info().rss

    def report(self, variant: str, call: Callable[[], torch.Tensor], *, endurance: bool, **more: Any) -> None:
        """Time a variant, compare its frames, and call it often."""
        out = call().float().cpu()
        found: dict[str, Any] = {"error": relative_error(out.view_as(self.expected), self.expected)}
        seconds, pipelined = self.seconds(call), self.pipelined_seconds(call)
        found |= {"ms": round(1000 * seconds, 3), "frames_per_second": round(BATCH / seconds, 1)}
        found |= {"ms_pipelined": round(1000 * pipelined, 3)}
        if endurance:
            for _ in range(min(WARM_UP, self.arguments.calls)):
                call()
            self.synchronize()
            before = self.used()
            for _ in range(self.arguments.calls - WARM_UP):
                call()
            self.synchronize()
            grown = [after - earlier for after, earlier in zip(self.used(), before, strict=True)]
            found |= {"calls": self.arguments.calls, "gpu_growth_bytes": grown[0], "rss_growth_bytes": grown[1]}
        say("dcae.jsonl", **self.facts, variant=variant, **found, **more)

    def pytorch(self) -> None:
        """Measure PyTorch: as it is, compiled, and as Tandem runs it."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        latents = self.latents[0].to(dtype)
        plain = str(dtype).removeprefix("torch.")

        def run(module: Any) -> torch.Tensor:
            found: torch.Tensor = module(latents)
            return found

        with torch.no_grad():
            with self.going_on("eager"):
                self.report(f"eager {plain}", partial(run, self.placed(dtype)), endurance=False)
            on_gpu = self.device.type == "cuda"
            for layout in ("", "channels last") if on_gpu else ("",):
                with self.going_on(f"compiled {layout}"):
                    module = self.placed(dtype)
                    if layout:
                        module = module.to(memory_format=torch.channels_last)
                    mode = "reduce-overhead" if on_gpu else "default"
                    compiled = torch.compile(module, mode=mode, dynamic=False)
                    started = time.perf_counter()
                    run(compiled)
                    first = round(time.perf_counter() - started, 1)
                    name = f"compiled {plain}, CUDA graphs" if on_gpu else f"compiled {plain}"
                    self.report(f"{name} {layout}".strip(), partial(run, compiled), endurance=False, first_s=first)
        with self.going_on("make_batched_decode_fn in PyTorch"):
            decode = make_batched_decode_fn(self.placed(dtype), use_tensorrt=False, backend="pytorch")
            given = self.latents.to(dtype)
            with decode:
                self.report(
                    f"make_batched_decode_fn, PyTorch {plain}",
                    lambda: decode(given),
                    endurance=True,
                    fallbacks=list(map(str, decode.fallbacks)),
                )

    def engine(self, backend: str, precision: str) -> None:
        """Measure an engine, through `make_batched_decode_fn` and by itself."""
        variant = f"{backend} {precision}".strip()
        found = settings.load().replace(engine_cache_dir=HOME / "engines", decoder_precision=precision or None)
        given = self.latents
        build = partial(build_engine, entry=build_child_opset17.run_job)
        with self.going_on(variant), mock.patch.object(frame_decoders, "build_engine", build):
            started = time.perf_counter()
            events: list[str] = []
            decode = make_batched_decode_fn(
                self.placed(torch.float32),
                backend=backend,
                settings=found,
                emit=lambda event: events.append(str(event)),
            )
            with decode:
                decode.prepare(*self.latents.shape[3:])
                if decode.backend != backend:
                    raise RuntimeError(f"no engine: {'; '.join(map(str, decode.fallbacks))}")
                first = round(time.perf_counter() - started, 1)
                record = next(one for one in decode.service.store.index() if one.id == decode.engine)
                more = {
                    "prepare_s": first,
                    "build_s": record.build_seconds,
                    "file_mib": round(record.file_bytes / (1 << 20), 1),
                    "verified_error": record.error,
                    "tolerance": record.tolerance,
                    "engine_ms": round(1000 * record.seconds_per_call, 3),
                    "pytorch_same_precision_ms": round(1000 * record.pytorch_seconds_per_call, 3),
                    "precision": record.key.precision,
                }
                self.report(f"make_batched_decode_fn, {variant}", lambda: decode(given), endurance=True, **more)
                one_frame = given[:, :1]
                say(
                    "dcae.jsonl",
                    **self.facts,
                    variant=f"{variant}, one frame",
                    ms=round(1000 * self.seconds(lambda: decode(one_frame)), 3),
                    backend=decode.backend,
                    fallbacks=list(map(str, decode.fallbacks)),
                )


def main() -> None:
    """Measure the requested models and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="f64c128,owl", help="f64c128, owl, tiny, tiny-owl, or names of decoders")
    parser.add_argument("--sizes", default="256x256,360x640", help="height x width")
    parser.add_argument("--backends", default="tensorrt", help="of engines; NAME:PRECISION for fp16, bf16 or fp32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=540, help="no model or size starts after this")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
        if tensorrt_8_6.is_installed():
            tensorrt_8_6.load()
    began = time.monotonic()
    for name in arguments.models.split(","):
        decoder = decoder_of(name)
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        gpu = torch.cuda.get_device_name() if arguments.device != "cpu" else "cpu"
        say("dcae.jsonl", model=name, parameters=parameters, device=gpu, torch=torch.__version__)
        seen: set[str] = set()
        for size in arguments.sizes.split(","):
            if time.monotonic() - began > arguments.seconds:
                say("dcae.jsonl", model=name, size=size, skipped=True)
                continue
            height, width = (int(side) for side in size.split("x"))
            measurement = Measurement(arguments, name, decoder, (height, width))
            if measurement.facts["frames"] in seen:
                continue
            seen.add(measurement.facts["frames"])
            measurement.pytorch()
            for backend in filter(None, arguments.backends.split(",")):
                measurement.engine(*(backend.split(":") if ":" in backend else (backend, "")))


if __name__ == "__main__":
    main()
