"""Plans and refusals for a table of settings and machines. The engine library is empty unless a row states otherwise.

`ROWS` hold whatever the memory forecast says; `MEMORY_ROWS` are those that hang on it.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError, TandemError
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Gpu, Machine
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import ShapeProfile
from runtime.planner.engine_offers import Offers
from runtime.planner.resolve import resolve
from tests.engines.engine_files import add
from tests.plans import GIB, GPU_PACKAGES, PACKAGES, why

ALL_PACKAGES = (*GPU_PACKAGES, ("bitsandbytes", "0.48.1"), ("torchao", "0.14.1"), ("triton", "3.5.0"))
A14B, TI2V, SMALL, SHIPPED = "wan2.2-t2v-a14b", "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b", "diorama"
LETTERS = {"pytorch": "P", "tensorrt": "T", "inductor": "I", "onnxruntime": "O"}


def here(
    name: str = "",
    capability: tuple[int, int] = (8, 9),
    vram: float = 0,
    *,
    ram: int = 64,
    gpus: int = 1,
    **changes: Any,
) -> Machine:
    """Return a machine: GPU memory and RAM in GiB, a twentieth of each in use; no name, no GPU."""
    one = Gpu(name, capability, int(vram * GIB), int(0.95 * vram * GIB), "580.95")
    made = Machine(
        system="Linux x86_64",
        cpu="Test CPU",
        cores=8,
        ram_bytes=ram * GIB,
        ram_free_bytes=int(0.95 * ram * GIB),
        gpus=(one,) * gpus if name else (),
        gpu_problem=None,
        torch_version="2.13.0",
        torch_cuda="13.0" if name else None,
        disk_free_bytes=500 * GIB,
        driver_cuda=(13, 0) if name else None,
        packages=ALL_PACKAGES if name else PACKAGES,
        compiler="/usr/bin/g++",
    )
    return replace(made, **changes)


LAPTOP = here("RTX 4060 Laptop", (8, 9), 8, ram=16)
LAPTOP_32 = here("RTX 4070 Laptop", (8, 9), 8, ram=32)
TWELVE = here("RTX 3060", (8, 6), 12, ram=32)
TURING = here("RTX 2080 Ti", (7, 5), 12, ram=32)
AMPERE = here("RTX A4000", (8, 6), 16)
ADA = here("RTX 4090", (8, 9), 24)
BLACKWELL = here("RTX 5090", (12, 0), 32)
TWELVE_96 = here("RTX 3060", (8, 6), 12, ram=96)
L40 = here("L40S", (8, 9), 48, ram=128)
H100 = here("H100", (9, 0), 80, ram=256)
H200 = here("H200", (9, 0), 141, ram=256)
LITTLE_RAM = here("H200", (9, 0), 141, ram=16)
FOUR = here("H200", (9, 0), 141, ram=1024, gpus=4)
CPU_8, CPU_16, CPU_64 = here(ram=8), here(ram=16), here(ram=64)
APPLE = here(ram=32, system="Darwin arm64", cpu="Apple M3", unified_memory=True)
BROKEN = here(gpu_problem=Fact("machine.driver_failed", {"error": "Driver/library version mismatch"}))
OLD_DRIVER = replace(H100, driver_cuda=(12, 4), gpus=(replace(H100.gpus[0], driver="550.54"),))
OLD_TORCH = replace(BLACKWELL, torch_cuda="12.6")
TORCH_CPU = replace(H100, torch_cuda=None)
NO_COMPILER = replace(CPU_16, compiler=None)
NO_TENSORRT = replace(H100, packages=PACKAGES)
EXPERTS = ("transformer", "transformer_2")
NO_BNB = replace(H100, packages=GPU_PACKAGES)
SMALL_DISK = replace(H200, disk_free_bytes=20 * GIB)
BARE = here(ram=16, packages=(), compiler=None)

TENSORRT = {"backends": {"all": "tensorrt"}}
INDUCTOR = {"backends": {"all": "inductor"}}
ONNX = {"backends": {"all": "onnxruntime"}}
PYTORCH = {"backends": {"all": "pytorch"}}
CACHE = {"step_cache": "first-block"}
IN_8_BITS = {"quantization": "bnb-8bit"}
IN_FULL = {"vae_precision": "float32"}
IN_BFLOAT16, IN_FLOAT16 = {"vae_precision": "bfloat16"}, {"vae_precision": "float16"}
AT_480P = {"width": 832, "height": 480}
IN_PYTORCH = {"transformer": "pytorch", "transformer_2": "pytorch"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        on: the machine.
        model, settings: the request.
        plan: a letter per component (P, T, I, O), or the error that refuses it.
        says: what a chip, a reason or a warning holds, or the error's two lines.
        also: fields of the plan, with their values.
    """

    on: Machine
    model: str
    settings: dict[str, Any]
    plan: str | type[TandemError]
    says: str
    also: dict[str, Any] = field(default_factory=dict)


ROWS = [
    # Nothing asked: PyTorch, until an engine is built and measured.
    Row(LAPTOP, SHIPPED, {}, "PPPP", "PyTorch: no engine yet"),
    Row(TURING, SHIPPED, {}, "PPPP", "PyTorch in float32 on RTX 2080 Ti: the model is small."),
    Row(H200, A14B, {}, "PPPP", "PyTorch on H200: bfloat16; the VAE in bfloat16: 56 dB from float32 in 8 bits"),
    Row(FOUR, A14B, {}, "PPPP", "PyTorch on H200: bfloat16; the VAE in bfloat16: 56 dB from float32 in 8 bits"),
    Row(H100, TI2V, {}, "PPP", "The weights of Wan2.2 TI2V-5B are not downloaded"),
    Row(L40, SMALL, {}, "PPP", "PyTorch: no engine yet"),
    Row(CPU_8, SHIPPED, {}, "PPPP", "PyTorch in float32 on the CPU: no NVIDIA GPU was found."),
    Row(CPU_64, SHIPPED, {}, "PPPP", "PyTorch: no engine yet"),
    Row(APPLE, SHIPPED, {}, "PPPP", "PyTorch in float32 on the CPU"),
    Row(BROKEN, SHIPPED, {}, "PPPP", "on the CPU: the NVIDIA driver is not responding"),
    Row(
        OLD_DRIVER,
        SHIPPED,
        {},
        "PPPP",
        "driver 550.54 is too old: it supports CUDA 12.4, but PyTorch needs 13.0",
    ),
    Row(OLD_TORCH, SHIPPED, {}, "PPPP", "this PyTorch (CUDA 12.6) has no kernels for RTX 5090"),
    Row(TORCH_CPU, SHIPPED, {}, "PPPP", "this PyTorch (2.13.0) is built without CUDA"),
    Row(BARE, SHIPPED, {}, "PPPP", "PyTorch: ONNX Runtime is not installed"),
    Row(H200, A14B, PYTORCH, "PPPP", "PyTorch: as requested"),
    # Missing engines may be built: the backend that is fastest as a rule.
    Row(LAPTOP, SHIPPED, {"build": "missing"}, "TTTP", "TensorRT: builds first, about 40 s"),
    Row(TURING, SHIPPED, {"build": "missing"}, "TTTP", "most likely the fastest here"),
    Row(BLACKWELL, SHIPPED, {"build": "missing"}, "TTTP", "TensorRT: builds first, about 40 s"),
    Row(H200, A14B, {"build": "missing"}, "TTTP", "TensorRT: builds first, about 15 min"),
    Row(CPU_16, SHIPPED, {"build": "missing"}, "OOOO", "ONNX Runtime: builds first, about 10 s"),
    Row(APPLE, SHIPPED, {"build": "missing"}, "OOOO", "ONNX Runtime, most likely the fastest here"),
    Row(NO_COMPILER, SHIPPED, {"build": "missing"}, "OOOO", "built first, about 10 s (there is none yet)"),
    Row(BARE, SHIPPED, {"build": "missing"}, "PPPP", "PyTorch: ONNX Runtime is not installed"),
    Row(NO_TENSORRT, SHIPPED, {"build": "missing"}, "IIIP", "Inductor: builds first, about 40 s"),
    Row(H200, A14B, {"build": "never"}, "PPPP", "PyTorch: no engine yet"),
    # TensorRT asked for.
    Row(LAPTOP, SHIPPED, TENSORRT, "TTTT", "TensorRT, as requested: built first, about 40 s (there is none yet)."),
    Row(TURING, SHIPPED, TENSORRT, "TTTT", "TensorRT: builds first"),
    Row(H100, SMALL, TENSORRT, "TTT", "TensorRT: builds first, about 5 min"),
    Row(H200, TI2V, TENSORRT, "TTT", "TensorRT: builds first, about 15 min"),
    Row(FOUR, A14B, TENSORRT, "TTTT", "TensorRT: builds first, about 15 min"),
    Row(H200, A14B, {"backends": {"transformer": "tensorrt"}}, "PTPP", "TensorRT: builds first"),
    Row(H200, A14B, TENSORRT | {"build": "never"}, "PPPP", "PyTorch: no TensorRT engine, and none is to be built"),
    Row(CPU_16, SHIPPED, TENSORRT, "PPPP", "TensorRT was requested, but no NVIDIA GPU was found."),
    Row(APPLE, SHIPPED, TENSORRT, "PPPP", "PyTorch: no NVIDIA GPU was found"),
    Row(BROKEN, SHIPPED, TENSORRT, "PPPP", "Install or update the NVIDIA driver, then restart."),
    Row(OLD_DRIVER, SHIPPED, TENSORRT, "PPPP", "PyTorch: the NVIDIA driver 550.54 is too old"),
    Row(OLD_DRIVER, SHIPPED, TENSORRT, "PPPP", "Update the NVIDIA driver to 580 or later"),
    Row(OLD_TORCH, SHIPPED, TENSORRT, "PPPP", "Install PyTorch built for CUDA 12.8 or later."),
    Row(TORCH_CPU, SHIPPED, TENSORRT, "PPPP", "If there is a GPU, it installs requirements-gpu.txt"),
    Row(NO_TENSORRT, SMALL, TENSORRT, "PPP", "PyTorch: TensorRT is not installed"),
    # The text encoder's engine holds gigabytes of weights; engines of transformer blocks hold none.
    Row(SMALL_DISK, A14B, TENSORRT, "PTTT", "PyTorch: too little disk to build"),
    Row(SMALL_DISK, A14B, TENSORRT, "PTTT", "set TENSORRT_CACHE_DIR to a folder on a larger disk"),
    Row(SMALL_DISK, A14B, INDUCTOR, "PPPI", "PyTorch: too little disk to build"),
    Row(SMALL_DISK, SHIPPED, TENSORRT, "TTTT", "TensorRT: builds first"),
    Row(H100, A14B, TENSORRT, "TTTT", "TensorRT: builds first, about 2 min"),
    # The other backends.
    Row(CPU_16, SHIPPED, INDUCTOR, "IIII", "Inductor: builds first, about 40 s"),
    Row(NO_COMPILER, SHIPPED, INDUCTOR, "PPPP", "PyTorch: no C++ compiler was found"),
    Row(replace(APPLE, compiler=None), SHIPPED, INDUCTOR, "PPPP", "xcode-select"),
    Row(here("RTX 2080 Ti", (7, 5), 48), SMALL, INDUCTOR, "PPI", "PyTorch: no bfloat16 on this GPU"),
    Row(H100, SMALL, INDUCTOR, "III", "Inductor, as requested"),
    Row(CPU_8, SHIPPED, ONNX, "OOOO", "ONNX Runtime, as requested"),
    Row(BARE, SHIPPED, ONNX, "PPPP", "PyTorch: ONNX Runtime is not installed"),
    Row(H100, SMALL, ONNX, "PPP", "PyTorch: this ONNX Runtime has no CUDA"),
    Row(CPU_16, SHIPPED, {"backends": {"all": "inductor", "vae": "onnxruntime"}}, "IIIO", "Inductor, as requested"),
    # Quantized weights.
    Row(H200, A14B, {"quantization": "bnb-4bit"}, "PPPP", "PyTorch: 4-bit weights exclude TensorRT"),
    Row(H200, A14B, {"quantization": "bnb-8bit", "build": "missing"}, "TPPP", "the format of bitsandbytes"),
    Row(replace(H100, packages=PACKAGES), SMALL, {"offload": "group"}, "PPP", "offload group excludes Inductor"),
    Row(H200, A14B, {"quantization": "fp8", "build": "missing"}, "TPPP", "PyTorch: FP8 weights exclude TensorRT"),
    Row(H200, A14B, TENSORRT | {"quantization": "bnb-4bit"}, InvalidRequestError, "4-bit weights exclude TensorRT"),
    Row(H200, A14B, TENSORRT | {"quantization": "fp8"}, InvalidRequestError, "Use --quantization none, or --backend"),
    Row(LAPTOP, A14B, TENSORRT | {"quantization": "bnb-8bit"}, InvalidRequestError, "8-bit weights exclude TensorRT"),
    Row(ADA, A14B, INDUCTOR | {"quantization": "bnb-4bit"}, InvalidRequestError, "4-bit weights exclude Inductor"),
    Row(
        H200,
        A14B,
        {"backends": {"all": "tensorrt"} | IN_PYTORCH, "quantization": "bnb-4bit"},
        "TPPT",
        "PyTorch: as requested",
        {"quantization": "bnb-4bit"},
    ),
    Row(H200, A14B, {"quantization": "none"} | TENSORRT, "TTTT", "as requested", {"quantization": "none"}),
    Row(NO_BNB, A14B, {"quantization": "bnb-4bit"}, MachineError, "bitsandbytes is not installed"),
    Row(NO_BNB, A14B, {"quantization": "fp8"}, MachineError, "torchao is not installed"),
    Row(AMPERE, SHIPPED, {"quantization": "fp8"}, MachineError, "RTX A4000 does not support FP8"),
    Row(TURING, SHIPPED, {"quantization": "fp8"}, MachineError, "Use --quantization bnb-8bit."),
    Row(CPU_64, SMALL, {"quantization": "bnb-8bit"}, MachineError, "weights are not available here: no NVIDIA GPU"),
    Row(APPLE, SHIPPED, {"quantization": "fp8"}, MachineError, "Use --quantization none."),
    Row(TORCH_CPU, SHIPPED, {"quantization": "bnb-4bit"}, MachineError, "built without CUDA"),
    # Those in 8 bits do not wait in RAM; no others are brought in parts.
    Row(H200, A14B, IN_8_BITS | {"offload": "model"}, InvalidRequestError, "8-bit weights exclude offload model"),
    Row(H200, A14B, IN_8_BITS | {"offload": "group"}, InvalidRequestError, "cannot be moved to memory (RAM)"),
    Row(LAPTOP, A14B, IN_8_BITS | {"offload": "sequential"}, InvalidRequestError, "works with --offload model."),
    Row(H200, A14B, IN_8_BITS | {"offload": "none"}, "PPPP", "bfloat16", {"quantization": "bnb-8bit"}),
    Row(H200, A14B, {"quantization": "bnb-4bit", "offload": "model"}, "PPPP", "bfloat16", {"offload": "model"}),
    Row(H200, A14B, {"quantization": "fp8", "offload": "model"}, "PPPP", "bfloat16", {"quantization": "fp8"}),
    Row(
        H200,
        A14B,
        {"quantization": "fp8", "offload": "group"},
        InvalidRequestError,
        "be offloaded by block or layer",
    ),
    # A step cache runs in PyTorch, and streams no blocks.
    Row(CPU_8, SHIPPED, CACHE, "PPPP", "first-block:0.08), as requested", {"step_cache": "first-block:0.08"}),
    Row(CPU_16, SHIPPED, CACHE | {"build": "missing"}, "OPPO", "PyTorch: a step cache excludes ONNX Runtime"),
    Row(H200, A14B, CACHE | TENSORRT, "TTTT", "reused across steps", {"step_cache": "first-block:0.08"}),
    Row(H200, A14B, CACHE | INDUCTOR, InvalidRequestError, "A step cache excludes Inductor for the transformer"),
    Row(H200, A14B, CACHE | {"offload": "group"}, InvalidRequestError, "A step cache excludes offload group"),
    Row(H200, A14B, CACHE | {"offload": "model"}, "PPPP", "reused across steps", {"offload": "model"}),
    Row(H200, A14B, CACHE | {"quantization": "fp8"}, "PPPP", "reused across steps", {"quantization": "fp8"}),
    Row(TWELVE_96, A14B, CACHE, MachineError, "memory"),
    # The VAE's precision in PyTorch: with the transformers where they run in bfloat16, else float32.
    Row(H200, A14B, IN_FULL, "PPPP", "PyTorch on H200: bfloat16; the VAE in float32, as requested.", IN_FULL),
    Row(H200, A14B, IN_BFLOAT16, "PPPP", "the VAE in bfloat16, as requested: 56 dB from float32 in 8 bits for"),
    Row(H200, A14B, IN_FLOAT16, "PPPP", "the VAE in float16, as requested: 67 dB from float32 in 8 bits for"),
    Row(H200, SHIPPED, {}, "PPPP", "PyTorch in float32 on H200: the model is small."),
    Row(H200, SHIPPED, IN_BFLOAT16, "PPPP", "float32 on H200: the model is small; the VAE in bfloat16, as requested"),
    Row(H200, A14B, TENSORRT | IN_FLOAT16, "TTTT", "TensorRT: builds first", IN_FLOAT16),
    Row(TURING, SMALL, {}, "PPP", "no bfloat16: float16, the text encoder in float32; the VAE in float32."),
    Row(TURING, SMALL, IN_FLOAT16, "PPP", "the VAE in float16, as requested: 67 dB from float32", IN_FLOAT16),
    Row(TURING, SMALL, IN_BFLOAT16, InvalidRequestError, "RTX 2080 Ti does not support bfloat16. Use --vae-"),
    Row(TURING, SHIPPED, TENSORRT | IN_BFLOAT16, InvalidRequestError, "Use --vae-precision float32, or float16."),
    Row(CPU_8, SHIPPED, IN_FULL, "PPPP", "PyTorch in float32 on the CPU: no NVIDIA GPU was found.", IN_FULL),
    Row(CPU_8, SHIPPED, IN_BFLOAT16, InvalidRequestError, "ten times as long on a CPU. Use --vae-precision float32."),
    Row(APPLE, SHIPPED, IN_FLOAT16, InvalidRequestError, "The VAE in float16 takes more than ten times as long"),
    Row(OLD_DRIVER, SMALL, IN_BFLOAT16, InvalidRequestError, "Use --vae-precision float32."),
    # Offload.
    Row(H200, A14B, INDUCTOR | {"offload": "model"}, InvalidRequestError, "Offload model excludes Inductor"),
    Row(H200, A14B, INDUCTOR | {"offload": "group"}, InvalidRequestError, "keeps its weights on the GPU"),
    # Engines of transformer blocks read the weights that PyTorch moves.
    Row(H200, A14B, TENSORRT | {"offload": "model"}, "TTTT", "as requested", {"offload": "model"}),
    Row(H200, A14B, TENSORRT | {"offload": "group"}, "TTTT", "as requested", {"offload": "group"}),
    Row(H200, SHIPPED, TENSORRT | {"offload": "group"}, "TTTT", "as requested", {"offload": "group"}),
    Row(H200, A14B, TENSORRT | {"attention": "cudnn"}, "TTTT", "as requested"),
    Row(H200, SHIPPED, TENSORRT | {"attention": "cudnn"}, InvalidRequestError, "runs in float32 here"),
    Row(H200, SHIPPED, INDUCTOR | {"attention": "cudnn"}, InvalidRequestError, "an engine contains its own attention"),
    Row(H200, A14B, TENSORRT | {"offload": "sequential"}, InvalidRequestError, "Use --offload group"),
    Row(FOUR, A14B, TENSORRT | {"gpus": 4}, "TTTT", "4 GPUs", {"gpus": 4}),
    Row(FOUR, A14B, INDUCTOR | {"gpus": 4}, InvalidRequestError, "an engine runs on one GPU"),
    Row(LAPTOP, A14B, INDUCTOR | {"offload": "sequential"}, InvalidRequestError, "Use --offload none"),
    Row(
        H200,
        A14B,
        {"backends": {"all": "tensorrt"} | IN_PYTORCH, "offload": "group"},
        "TPPT",
        "PyTorch: as requested",
        {"offload": "group"},
    ),
    Row(H200, A14B, {"offload": "model", "build": "missing"}, "TTTP", "builds first", {"offload": "model"}),
    Row(H200, A14B, {"offload": "none"} | TENSORRT, "TTTT", "as requested", {"offload": "none"}),
    Row(CPU_16, SHIPPED, {"offload": "model"}, "PPPP", "--offload model has no effect on the CPU", {"offload": "none"}),
    Row(CPU_16, SHIPPED, {"offload": "group"} | ONNX, "OOOO", "has no effect on the CPU", {"offload": "none"}),
    Row(OLD_DRIVER, SHIPPED, {"offload": "sequential"}, "PPPP", "is too old", {"offload": "none"}),
    # Memory that no setting makes up for, and requests that no machine can serve.
    Row(LITTLE_RAM, A14B, {"quantization": "none"}, MachineError, "Loading the transformer of Wan2.2 T2V-A14B needs"),
    Row(replace(LITTLE_RAM, packages=GPU_PACKAGES), A14B, {}, MachineError, "or add memory or swap."),
    Row(LITTLE_RAM, A14B, {"offload": "group"}, MachineError, "Use --quantization fp8: "),
    Row(here("H200", (9, 0), 141, ram=8), A14B, {}, MachineError, "Loading the transformer of Wan2.2 T2V-A14B needs"),
    Row(H200, SMALL, {"backends": {"transformer_2": "tensorrt"}}, InvalidRequestError, "has no transformer_2"),
    Row(H200, TI2V, {"width": 720}, InvalidRequestError, "Use 704 or 736."),
]

# What is planned where memory is short.
MEMORY_ROWS = [
    # 8 GiB: the text encoder goes by layer, frames in tiles; with 16 GiB of RAM there is no place for it to wait in.
    Row(LAPTOP, SMALL, {}, MachineError, "(RAM) for offloaded weights; 7.6 GiB and 15.2 GiB are free."),
    Row(LAPTOP, TI2V, {}, MachineError, "Close other programs, add memory (RAM), or use a smaller model."),
    Row(LAPTOP_32, SMALL, {}, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 64, "decode_chunk": 1}),
    Row(LAPTOP_32, SMALL, AT_480P, "PPP", "at the tiles' edges", {"offload": "group", "decode_tile": 64}),
    Row(LAPTOP_32, SMALL, AT_480P | IN_FULL, "PPP", "tiles of 256x256", {"offload": "group", "decode_tile": 32}),
    Row(LAPTOP_32, TI2V, {}, "PPP", "Memory is tight", {"offload": "sequential", "decode_tile": 32}),
    Row(LAPTOP_32, TI2V, IN_FULL, "PPP", "Memory is tight", {"offload": "sequential", "decode_tile": 16}),
    Row(LAPTOP_32, TI2V, AT_480P, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 32}),
    Row(LAPTOP_32, SMALL, {"offload": "model"}, MachineError, "Use --offload group"),
    Row(LAPTOP_32, A14B, {}, MachineError, "system memory (RAM)"),
    Row(TURING, SMALL, {}, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 64}),
    Row(TURING, TI2V, {}, MachineError, "system memory (RAM)"),
    Row(TWELVE, SMALL, {}, "PPP", "bfloat16", {"offload": "group", "decode_tile": None}),
    Row(TWELVE, SMALL, IN_FULL, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 64}),
    Row(TWELVE, TI2V, {}, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 32}),
    Row(AMPERE, SMALL, {}, "PPP", "bfloat16", {"offload": "none", "keep_loaded": False, "decode_tile": None}),
    Row(AMPERE, SMALL, IN_FULL, "PPP", "tiles of 512x512", {"offload": "none", "decode_tile": 64}),
    Row(AMPERE, TI2V, {}, "PPP", "tiles of 512x512", {"offload": "group", "decode_tile": 32}),
    Row(ADA, SMALL, {}, "PPP", "bfloat16", {"keep_loaded": True, "decode_tile": None}),
    Row(ADA, TI2V, {}, "PPP", "bfloat16", {"offload": "none", "decode_tile": None}),
    Row(ADA, TI2V, IN_FULL, "PPP", "tiles of 512x512", {"offload": "none", "decode_tile": 32}),
    Row(ADA, A14B, {}, "PPPP", "with 8-bit weights", {"quantization": "bnb-8bit", "keep_loaded": False}),
    Row(BLACKWELL, A14B, {}, "PPPP", "with FP8 weights", {"quantization": "fp8", "keep_loaded": False}),
    # What is not quantized does not pass through so little RAM.
    Row(LITTLE_RAM, A14B, {}, "PPPP", "with FP8 weights", {"quantization": "fp8", "keep_loaded": True}),
    # Only parts that wait would fit, and those in 8 bits do not.
    Row(TWELVE_96, A14B, IN_8_BITS, MachineError, "Use --offload group"),
    Row(TWELVE_96, A14B, {}, "PPPP", "bfloat16", {"offload": "group", "quantization": "none", "decode_tile": None}),
    Row(TWELVE_96, A14B, IN_FULL, "PPPP", "tiles of", {"offload": "group", "quantization": "none"}),
    Row(L40, A14B, {}, "PPPP", "bfloat16", {"keep_loaded": False}),
    Row(H100, A14B, {}, "PPPP", "bfloat16", {"keep_loaded": True}),
    Row(H100, A14B, IN_FULL, "PPPP", "bfloat16", {"keep_loaded": False}),
    Row(H200, A14B, {}, "PPPP", "bfloat16", {"keep_loaded": True}),
    Row(H200, SMALL, {}, "PPP", "bfloat16", {"keep_loaded": True}),
    Row(CPU_16, SMALL, {}, MachineError, "GiB of memory"),
    Row(CPU_64, A14B, {}, "PPPP", "on the CPU", {"keep_loaded": False}),
    Row(APPLE, A14B, {}, MachineError, "GiB of memory"),
]


@cache
def model_of(name: str) -> ModelSpec:
    """Return a model, read once."""
    return look_up(name, Path("none"))


@cache
def offers_of(model: str, on: Machine, folder: Path) -> Offers:
    """Return the real builders' offers for a model on a machine, each made once."""
    made = EngineService(EngineStore(folder / "engines", 10**12), on, folder).offers(model_of(model))
    return cache(made)


def planned(row: Row, folder: Path) -> ExecutionPlan:
    """Resolve a row with the real builders' offers.

    Args:
        folder: of the cache. Its engine library must not change between calls.
    """
    request = GenerationRequest.from_mapping({"prompt": "a red boat", "model": row.model} | row.settings)
    offers = offers_of(row.model, row.on, folder)
    return resolve(request, model_of(row.model), row.on, folder / "x.mp4", offers)


def badge_of(part: ComponentPlan) -> str:
    """Return a component's badge as JSON has it."""
    return str(part.to_json()["chip"])


def named(row: Row) -> str:
    """Return a row's name in the report."""
    gpu = row.on.gpus[0].name if row.on.gpus else row.on.system
    return f"{gpu} {row.on.ram_bytes // GIB} GiB, {row.model}, {row.settings}"


def test_plans_and_their_reasons(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for row in (*ROWS, *MEMORY_ROWS):
        with subtests.test(msg=named(row)):
            check(row, tmp_path)


def check(row: Row, folder: Path) -> None:
    """Check the plan of a row, or its refusal."""
    if not isinstance(row.plan, str):
        with pytest.raises(row.plan) as caught:
            planned(row, folder)
        assert row.says in f"{caught.value.what} {caught.value.remedy}"
        return
    plan = planned(row, folder)
    parts = plan.components.values()
    assert "".join(LETTERS[part.backend] for part in parts) == row.plan
    texts = [*map(str, plan.warnings), *(text for part in parts for text in (badge_of(part), why(part)))]
    assert any(row.says in text for text in texts), texts
    assert row.also.items() <= (plan.request_json() | plan.strategy.model_dump()).items()
    for part in parts:
        assert bool(part.engines) == (part.backend != "pytorch")
        assert not why(part).endswith("..")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "badge", "reason"),
    [
        ({}, "planner.badge_ready", "planner.faster_measured"),
        ({"profiles": (ShapeProfile.fixed((9, 16, 16)),)}, "engine.misfit_sizes", "engine.differs_sizes"),
        ({"device": "NVIDIA L4 sm89 CUDA 12.8"}, "engine.misfit_device", "engine.differs_device"),
        (
            {"versions": (("tensorrt", "10.16"), ("torch", "2.13.0"))},
            "engine.misfit_versions",
            "engine.differs_missing_package",
        ),
        ({"precision": "float32"}, "engine.misfit_precision", "engine.differs_precision"),
        ({"weights": "f" * 64}, "engine.misfit_weights", "engine.differs_weights"),
        ({"architecture": "f" * 64}, "planner.badge_no_engine", "planner.small_on_gpu"),
    ],
)
def test_an_existing_engine(differs: dict[str, Any], badge: str, reason: str, tmp_path: Path) -> None:
    spec = look_up(SHIPPED, tmp_path)
    store = EngineStore(tmp_path / "engines", 10**12)
    wanted = BUILDERS["onnx_tensorrt"].key(
        spec,
        "transformer",
        "transformer",
        (ShapeProfile.fixed((9, 14, 24)),),
        precision="float16",
        machine=H200,
        device="cuda:0",
    )
    add(store, replace(wanted, **differs))
    high, low = (planned(Row(H200, SHIPPED, {}, "", ""), tmp_path).components[name] for name in EXPERTS)
    assert high.badge is not None and low.badge is not None
    assert high.badge.code == badge
    last = high.reasons[-1]
    if last.code == "planner.no_engine_fits":
        assert last.data["cause"].code == "engine.nearest_differs"
        assert reason in {fact.code for fact in last.data["cause"].data["differences"]}
    else:
        assert last.code == reason
    # The other expert's weights are not in it.
    assert low.badge.code == "planner.badge_no_engine"


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len({named(row) + row.says for row in ROWS}) >= 60
    assert len({row.on for row in [*ROWS, *MEMORY_ROWS]}) >= 17
