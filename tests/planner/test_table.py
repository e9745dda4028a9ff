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
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Gpu, Machine
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile
from runtime.planner.choice.engine_offers import Offers
from runtime.planner.resolve import PlanningContext, resolve
from tests.engines.engine_files import add
from tests.facts import fact, facts_in, states
from tests.plans import GIB, GPU_PACKAGES, PACKAGES

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
LAPTOP_14 = here("RTX 4060 Laptop", (8, 9), 8, ram=14)
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
CACHE, NAG = {"step_cache": "first-block"}, {"nag": 11, "guidance_scale": 1.0}
IN_8_BITS = {"quantization": "bnb-8bit"}
IN_FULL = {"vae_precision": "float32"}
IN_BFLOAT16, IN_FLOAT16 = {"vae_precision": "bfloat16"}, {"vae_precision": "float16"}
AT_480P = {"width": 832, "height": 480}
ALL_BUT_TRANSFORMERS = {"all": "tensorrt", "transformer": "pytorch", "transformer_2": "pytorch"}
INDUCTOR_AND_ONNX = {"backends": {"all": "inductor", "vae": "onnxruntime"}}


INVALID = InvalidRequestError
# Facts of several rows. Rules of settings have their data in test_constraints.py.
IN_16_BITS = fact("planner.vae_rounded", dtype="bfloat16")
TILES_512 = fact("planner.decoded_in_tiles", side=512)
NO_GPU = fact("machine.no_gpu")
ON_H200 = fact("planner.bfloat16_on_gpu", gpu="H200", details=[fact("planner.vae_rounded", dtype="bfloat16", psnr=56)])
TILES_256 = fact("planner.decoded_in_tiles", side=256)
USE_FP8 = fact("planner.use_strategy", changes={"quantization": "fp8"})
LOAD_RAM = fact("planner.load_ram", component="transformer", model="Wan2.2 T2V-A14B")
MEMORY_SHORT = fact("planner.memory_short", where="memory")
USE_GROUP = fact("planner.use_strategy", changes={"offload": "group"})


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        on: the machine.
        model, settings: the request.
        plan: a letter per component (P, T, I, O), or the error that refuses it.
        says: a badge, a reason, a warning or the cause of one, or the error: its code, or a fact with some of its data.
        also: fields of the plan, with their values.
    """

    on: Machine
    model: str
    settings: dict[str, Any]
    plan: str | type[TandemError]
    says: str | Fact
    also: dict[str, Any] = field(default_factory=dict)


ROWS = [
    # Nothing asked: PyTorch, until an engine is built and measured.
    Row(LAPTOP, SHIPPED, {}, "PPPP", "planner.badge_no_engine"),
    Row(TURING, SHIPPED, {}, "PPPP", fact("planner.small_on_gpu", gpu="RTX 2080 Ti", details=[])),
    Row(H200, A14B, {}, "PPPP", ON_H200),
    Row(FOUR, A14B, {}, "PPPP", ON_H200),
    Row(H100, TI2V, {}, "PPP", fact("planner.weights_not_downloaded", model="Wan2.2 TI2V-5B")),
    Row(L40, SMALL, {}, "PPP", "planner.badge_no_engine"),
    Row(CPU_8, SHIPPED, {}, "PPPP", fact("planner.on_cpu", cause=NO_GPU)),
    Row(CPU_64, SHIPPED, {}, "PPPP", "planner.badge_no_engine"),
    Row(APPLE, SHIPPED, {}, "PPPP", "planner.on_cpu"),
    Row(BROKEN, SHIPPED, {}, "PPPP", fact("planner.on_cpu", cause=fact("machine.driver_failed"))),
    Row(OLD_DRIVER, SHIPPED, {}, "PPPP", fact("machine.driver_too_old", driver="550.54", runs="12.4", needs="13.0")),
    Row(OLD_TORCH, SHIPPED, {}, "PPPP", fact("machine.gpu_too_new", cuda="12.6", gpu="RTX 5090")),
    Row(TORCH_CPU, SHIPPED, {}, "PPPP", fact("machine.torch_without_cuda", torch="2.13.0")),
    Row(BARE, SHIPPED, {}, "PPPP", "machine.package_missing"),
    Row(H200, A14B, PYTORCH, "PPPP", "planner.as_asked"),
    # Missing engines may be built: the backend that is fastest as a rule.
    Row(LAPTOP, SHIPPED, {"build": "missing"}, "TTTP", fact("planner.badge_builds", seconds=45.0)),
    Row(TURING, SHIPPED, {"build": "missing"}, "TTTP", "planner.likely_fastest"),
    Row(BLACKWELL, SHIPPED, {"build": "missing"}, "TTTP", fact("planner.badge_builds", seconds=45.0)),
    Row(H200, A14B, {"build": "missing"}, "TTTP", fact("planner.badge_builds", seconds=905.0)),
    Row(CPU_16, SHIPPED, {"build": "missing"}, "OOOO", fact("planner.badge_builds", seconds=11.0)),
    Row(APPLE, SHIPPED, {"build": "missing"}, "OOOO", fact("planner.likely_fastest", backend="onnxruntime")),
    Row(NO_COMPILER, SHIPPED, {"build": "missing"}, "OOOO", fact("planner.built_first", seconds=11.0)),
    Row(BARE, SHIPPED, {"build": "missing"}, "PPPP", "machine.package_missing"),
    Row(NO_TENSORRT, SHIPPED, {"build": "missing"}, "IIIP", fact("planner.badge_builds", seconds=45.0)),
    Row(H200, A14B, {"build": "never"}, "PPPP", "planner.badge_no_engine"),
    # TensorRT asked for.
    Row(LAPTOP, SHIPPED, TENSORRT, "TTTT", fact("planner.asked_engine", how=fact("planner.built_first"))),
    Row(TURING, SHIPPED, TENSORRT, "TTTT", "planner.badge_builds"),
    Row(H100, SMALL, TENSORRT, "TTT", fact("planner.badge_builds", seconds=300.0)),
    Row(H200, TI2V, TENSORRT, "TTT", fact("planner.badge_builds", seconds=905.0)),
    Row(FOUR, A14B, TENSORRT, "TTTT", fact("planner.badge_builds", seconds=905.0)),
    Row(H200, A14B, {"backends": {"transformer": "tensorrt"}}, "PTPP", "planner.badge_builds"),
    Row(H200, A14B, TENSORRT | {"build": "never"}, "PPPP", fact("planner.asked_not_built", backend="tensorrt")),
    Row(CPU_16, SHIPPED, TENSORRT, "PPPP", fact("planner.asked_unavailable", cause=NO_GPU)),
    Row(APPLE, SHIPPED, TENSORRT, "PPPP", "machine.no_gpu"),
    Row(BROKEN, SHIPPED, TENSORRT, "PPPP", "machine.driver_failed"),
    Row(OLD_DRIVER, SHIPPED, TENSORRT, "PPPP", fact("machine.driver_too_old", driver="550.54", least="580")),
    Row(OLD_TORCH, SHIPPED, TENSORRT, "PPPP", "machine.gpu_too_new"),
    Row(TORCH_CPU, SHIPPED, TENSORRT, "PPPP", "machine.torch_without_cuda"),
    Row(NO_TENSORRT, SMALL, TENSORRT, "PPP", "machine.gpu_package_missing"),
    # The text encoder's engine holds gigabytes of weights; engines of transformer blocks hold none.
    Row(SMALL_DISK, A14B, TENSORRT, "PTTT", "planner.build_disk"),
    Row(SMALL_DISK, A14B, INDUCTOR, "PPPI", "planner.build_disk"),
    Row(SMALL_DISK, SHIPPED, TENSORRT, "TTTT", "planner.badge_builds"),
    Row(H100, A14B, TENSORRT, "TTTT", fact("planner.badge_builds", seconds=135.0)),
    # The other backends.
    Row(CPU_16, SHIPPED, INDUCTOR, "IIII", fact("planner.badge_builds", seconds=45.0)),
    Row(NO_COMPILER, SHIPPED, INDUCTOR, "PPPP", "machine.no_compiler"),
    Row(replace(APPLE, compiler=None), SHIPPED, INDUCTOR, "PPPP", "machine.no_compiler_macos"),
    Row(here("RTX 2080 Ti", (7, 5), 48), SMALL, INDUCTOR, "PPI", "planner.bfloat16"),
    Row(H100, SMALL, INDUCTOR, "III", fact("planner.asked_engine", backend="inductor")),
    Row(CPU_8, SHIPPED, ONNX, "OOOO", fact("planner.asked_engine", backend="onnxruntime")),
    Row(BARE, SHIPPED, ONNX, "PPPP", "machine.package_missing"),
    Row(H100, SMALL, ONNX, "PPP", "planner.onnxruntime_without_cuda"),
    Row(CPU_16, SHIPPED, INDUCTOR_AND_ONNX, "IIIO", fact("planner.asked_engine", backend="inductor")),
    # Quantized weights.
    Row(H200, A14B, {"quantization": "bnb-4bit"}, "PPPP", "planner.quantized_in_blocks"),
    Row(H200, A14B, {"quantization": "bnb-8bit", "build": "missing"}, "TPPP", "planner.quantized_in_blocks"),
    Row(replace(H100, packages=PACKAGES), SMALL, {"offload": "group"}, "PPP", "planner.offload_on_engine"),
    Row(H200, A14B, {"quantization": "fp8", "build": "missing"}, "TPPP", "planner.fp8_in_blocks"),
    Row(H200, A14B, TENSORRT | {"quantization": "bnb-4bit"}, INVALID, "planner.quantized_in_blocks"),
    Row(H200, A14B, TENSORRT | {"quantization": "fp8"}, INVALID, "planner.fp8_in_blocks"),
    Row(LAPTOP, A14B, TENSORRT | {"quantization": "bnb-8bit"}, INVALID, "planner.quantized_in_blocks"),
    Row(ADA, A14B, INDUCTOR | {"quantization": "bnb-4bit"}, INVALID, "planner.quantized_on_engine"),
    Row(
        H200,
        A14B,
        {"backends": ALL_BUT_TRANSFORMERS, "quantization": "bnb-4bit"},
        "TPPT",
        "planner.as_asked",
        {"quantization": "bnb-4bit"},
    ),
    Row(H200, A14B, {"quantization": "none"} | TENSORRT, "TTTT", "planner.asked_engine", {"quantization": "none"}),
    Row(NO_BNB, A14B, {"quantization": "bnb-4bit"}, MachineError, "machine.gpu_package_missing"),
    Row(NO_BNB, A14B, {"quantization": "fp8"}, MachineError, "machine.gpu_package_missing"),
    Row(AMPERE, SHIPPED, {"quantization": "fp8"}, MachineError, fact("machine.gpu_without_fp8", gpu="RTX A4000")),
    Row(TURING, SHIPPED, {"quantization": "fp8"}, MachineError, "machine.gpu_without_fp8"),
    Row(
        CPU_64, SMALL, {"quantization": "bnb-8bit"}, MachineError, fact("planner.quantization_needs_gpu", cause=NO_GPU)
    ),
    Row(APPLE, SHIPPED, {"quantization": "fp8"}, MachineError, "planner.quantization_needs_gpu"),
    Row(TORCH_CPU, SHIPPED, {"quantization": "bnb-4bit"}, MachineError, "machine.torch_without_cuda"),
    # Those in 8 bits do not wait in RAM; no others are brought in parts.
    Row(H200, A14B, IN_8_BITS | {"offload": "model"}, INVALID, "planner.8bit_offloaded"),
    Row(H200, A14B, IN_8_BITS | {"offload": "group"}, INVALID, "planner.8bit_offloaded"),
    Row(LAPTOP, A14B, IN_8_BITS | {"offload": "sequential"}, INVALID, "planner.8bit_offloaded"),
    Row(H200, A14B, IN_8_BITS | {"offload": "none"}, "PPPP", IN_16_BITS, {"quantization": "bnb-8bit"}),
    Row(H200, A14B, {"quantization": "bnb-4bit", "offload": "model"}, "PPPP", IN_16_BITS, {"offload": "model"}),
    Row(H200, A14B, {"quantization": "fp8", "offload": "model"}, "PPPP", IN_16_BITS, {"quantization": "fp8"}),
    Row(H200, A14B, {"quantization": "fp8", "offload": "group"}, INVALID, "planner.quantized_offload"),
    # A step cache runs in PyTorch, and streams no blocks.
    Row(CPU_8, SHIPPED, CACHE, "PPPP", "planner.step_cached", {"step_cache": "first-block:0.08"}),
    Row(CPU_16, SHIPPED, CACHE | {"build": "missing"}, "OPPO", "planner.step_cache_on_engine"),
    Row(H200, A14B, CACHE | TENSORRT, "TTTT", "planner.step_cached", {"step_cache": "first-block:0.08"}),
    Row(H200, A14B, CACHE | INDUCTOR, INVALID, "planner.step_cache_on_engine"),
    Row(H200, A14B, CACHE | {"offload": "group"}, INVALID, "planner.step_cache_offloaded"),
    Row(H200, A14B, CACHE | {"offload": "model"}, "PPPP", "planner.step_cached", {"offload": "model"}),
    Row(H200, A14B, CACHE | {"quantization": "fp8"}, "PPPP", "planner.step_cached", {"quantization": "fp8"}),
    Row(TWELVE_96, A14B, CACHE, MachineError, fact("planner.memory_short", where="video memory")),
    # So does a negative prompt without guidance, also between engines of parts of blocks.
    Row(CPU_16, SHIPPED, NAG | {"build": "missing"}, "OPPO", "planner.nag_on_engine"),
    Row(H200, A14B, NAG | TENSORRT, "TTTT", "planner.nag"),
    Row(H200, A14B, NAG | INDUCTOR, INVALID, "planner.nag_on_engine"),
    Row(H200, A14B, NAG | {"quantization": "fp8", "offload": "model"}, "PPPP", "planner.nag"),
    # The VAE's precision in PyTorch: with the transformers where they run in bfloat16, else float32.
    Row(
        H200,
        A14B,
        IN_FULL,
        "PPPP",
        fact(
            "planner.bfloat16_on_gpu", gpu="H200", details=[fact("planner.vae_exact_asked", dtype="float32", psnr=None)]
        ),
        IN_FULL,
    ),
    Row(H200, A14B, IN_BFLOAT16, "PPPP", fact("planner.vae_rounded_asked", dtype="bfloat16", psnr=56)),
    Row(H200, A14B, IN_FLOAT16, "PPPP", fact("planner.vae_rounded_asked", dtype="float16", psnr=67)),
    Row(H200, SHIPPED, {}, "PPPP", fact("planner.small_on_gpu", gpu="H200", details=[])),
    Row(
        H200,
        SHIPPED,
        IN_BFLOAT16,
        "PPPP",
        fact(
            "planner.small_on_gpu", gpu="H200", details=[fact("planner.vae_rounded_asked", dtype="bfloat16", psnr=56)]
        ),
    ),
    Row(H200, A14B, TENSORRT | IN_FLOAT16, "TTTT", "planner.badge_builds", IN_FLOAT16),
    Row(TURING, SMALL, {}, "PPP", fact("planner.float16_on_gpu", details=[fact("planner.vae_exact")])),
    Row(TURING, SMALL, IN_FLOAT16, "PPP", fact("planner.vae_rounded_asked", dtype="float16", psnr=67), IN_FLOAT16),
    Row(TURING, SMALL, IN_BFLOAT16, INVALID, fact("planner.vae_bfloat16", gpu="RTX 2080 Ti")),
    Row(TURING, SHIPPED, TENSORRT | IN_BFLOAT16, INVALID, "planner.vae_bfloat16"),
    Row(CPU_8, SHIPPED, IN_FULL, "PPPP", fact("planner.on_cpu", cause=NO_GPU), IN_FULL),
    Row(CPU_8, SHIPPED, IN_BFLOAT16, INVALID, "planner.vae_16bit_on_cpu"),
    Row(APPLE, SHIPPED, IN_FLOAT16, INVALID, fact("planner.vae_16bit_on_cpu", precision="float16")),
    Row(OLD_DRIVER, SMALL, IN_BFLOAT16, INVALID, "planner.vae_16bit_on_cpu"),
    # Offload.
    Row(H200, A14B, INDUCTOR | {"offload": "model"}, INVALID, "planner.offload_on_engine"),
    Row(H200, A14B, INDUCTOR | {"offload": "group"}, INVALID, "planner.offload_on_engine"),
    # Engines of transformer blocks read the weights that PyTorch moves.
    Row(H200, A14B, TENSORRT | {"offload": "model"}, "TTTT", "planner.asked_engine", {"offload": "model"}),
    Row(H200, A14B, TENSORRT | {"offload": "group"}, "TTTT", "planner.asked_engine", {"offload": "group"}),
    Row(H200, SHIPPED, TENSORRT | {"offload": "group"}, "TTTT", "planner.asked_engine", {"offload": "group"}),
    Row(H200, A14B, TENSORRT | {"attention": "cudnn"}, "TTTT", "planner.asked_engine"),
    Row(H200, SHIPPED, TENSORRT | {"attention": "cudnn"}, INVALID, "planner.attention_needs_16bit"),
    Row(H200, SHIPPED, INDUCTOR | {"attention": "cudnn"}, INVALID, "planner.attention_on_engine"),
    Row(H200, A14B, TENSORRT | {"offload": "sequential"}, INVALID, "planner.sequential_in_blocks"),
    Row(FOUR, A14B, TENSORRT | {"gpus": 4}, "TTTT", fact("planner.on_gpus", gpus=4), {"gpus": 4}),
    Row(FOUR, A14B, INDUCTOR | {"gpus": 4}, INVALID, "planner.gpus_on_engine"),
    Row(LAPTOP, A14B, INDUCTOR | {"offload": "sequential"}, INVALID, "planner.offload_on_engine"),
    Row(
        H200,
        A14B,
        {"backends": ALL_BUT_TRANSFORMERS, "offload": "group"},
        "TPPT",
        "planner.as_asked",
        {"offload": "group"},
    ),
    Row(H200, A14B, {"offload": "model", "build": "missing"}, "TTTP", "planner.badge_builds", {"offload": "model"}),
    Row(H200, A14B, {"offload": "none"} | TENSORRT, "TTTT", "planner.asked_engine", {"offload": "none"}),
    Row(CPU_16, SHIPPED, {"offload": "model"}, "PPPP", "planner.offload_on_cpu", {"offload": "none"}),
    Row(CPU_16, SHIPPED, {"offload": "group"} | ONNX, "OOOO", "planner.offload_on_cpu", {"offload": "none"}),
    Row(OLD_DRIVER, SHIPPED, {"offload": "sequential"}, "PPPP", "machine.driver_too_old", {"offload": "none"}),
    # Memory that no setting makes up for, and requests that no machine can serve.
    Row(LITTLE_RAM, A14B, {"quantization": "none"}, MachineError, LOAD_RAM),
    Row(replace(LITTLE_RAM, packages=GPU_PACKAGES), A14B, {}, MachineError, "planner.strategy_unavailable"),
    Row(LITTLE_RAM, A14B, {"offload": "group"}, MachineError, USE_FP8),
    Row(here("H200", (9, 0), 141, ram=8), A14B, {}, MachineError, LOAD_RAM),
    Row(H200, SMALL, {"backends": {"transformer_2": "tensorrt"}}, INVALID, "planner.no_such_component"),
    Row(H200, TI2V, {"width": 720}, INVALID, fact("planner.not_a_multiple", able=[704, 736])),
    Row(
        H200,
        TI2V,
        {"width": 720, "height": 500},
        INVALID,
        fact("planner.no_multiples", widths=[704, 736], heights=[480, 512]),
    ),
]

# What is planned where memory is short.
MEMORY_ROWS = [
    # 8 GiB: the text encoder goes by layer, frames in tiles; with 16 GiB of RAM it waits there alone; 14 GiB have no
    # place for it.
    Row(
        LAPTOP_14,
        SMALL,
        {},
        MachineError,
        fact("planner.memory_and_ram_short", free=int(0.95 * 8 * GIB), ram_free=int(0.95 * 14 * GIB)),
    ),
    Row(LAPTOP_14, TI2V, {}, MachineError, "planner.more_ram"),
    Row(LAPTOP, SMALL, {}, "PPP", TILES_512, {"offload": "group", "freed": ("text_encoder",)}),
    Row(LAPTOP, TI2V, {}, "PPP", "planner.memory_tight", {"offload": "group", "freed": ("text_encoder",)}),
    Row(LAPTOP_32, SMALL, {}, "PPP", TILES_512, {"offload": "group", "decode_tile": 64, "decode_chunk": 1}),
    Row(LAPTOP_32, SMALL, AT_480P, "PPP", "planner.decoded_in_tiles", {"offload": "group", "decode_tile": 64}),
    Row(LAPTOP_32, SMALL, AT_480P | IN_FULL, "PPP", TILES_256, {"offload": "group", "decode_tile": 32}),
    Row(LAPTOP_32, TI2V, {}, "PPP", "planner.memory_tight", {"offload": "sequential", "decode_tile": 32}),
    Row(LAPTOP_32, TI2V, IN_FULL, "PPP", "planner.memory_tight", {"offload": "sequential", "decode_tile": 16}),
    Row(LAPTOP_32, TI2V, AT_480P, "PPP", TILES_512, {"offload": "group", "decode_tile": 32}),
    Row(LAPTOP_32, SMALL, {"offload": "model"}, MachineError, USE_GROUP),
    Row(LAPTOP_32, A14B, {}, MachineError, "planner.memory_and_ram_short"),
    Row(TURING, SMALL, {}, "PPP", TILES_512, {"offload": "group", "decode_tile": 64}),
    Row(TURING, TI2V, {}, "PPP", "planner.decoded_in_tiles", {"offload": "group", "freed": ("text_encoder",)}),
    Row(TWELVE, SMALL, {}, "PPP", IN_16_BITS, {"offload": "group", "decode_tile": None}),
    Row(TWELVE, SMALL, IN_FULL, "PPP", TILES_512, {"offload": "group", "decode_tile": 64}),
    Row(TWELVE, TI2V, {}, "PPP", TILES_512, {"offload": "group", "decode_tile": 32}),
    Row(AMPERE, SMALL, {}, "PPP", IN_16_BITS, {"offload": "none", "keep_loaded": False, "decode_tile": None}),
    Row(AMPERE, SMALL, IN_FULL, "PPP", TILES_512, {"offload": "none", "decode_tile": 64}),
    Row(AMPERE, TI2V, {}, "PPP", TILES_512, {"offload": "group", "decode_tile": 32}),
    Row(ADA, SMALL, {}, "PPP", IN_16_BITS, {"keep_loaded": True, "decode_tile": None}),
    Row(ADA, TI2V, {}, "PPP", IN_16_BITS, {"offload": "none", "decode_tile": None}),
    Row(ADA, TI2V, IN_FULL, "PPP", TILES_512, {"offload": "none", "decode_tile": 32}),
    Row(ADA, A14B, {}, "PPPP", "planner.quantized", {"quantization": "bnb-8bit", "keep_loaded": False}),
    Row(BLACKWELL, A14B, {}, "PPPP", "planner.quantized", {"quantization": "fp8", "keep_loaded": False}),
    # What is not quantized does not pass through so little RAM.
    Row(LITTLE_RAM, A14B, {}, "PPPP", "planner.quantized", {"quantization": "fp8", "keep_loaded": True}),
    # Only parts that wait would fit, and those in 8 bits do not.
    Row(TWELVE_96, A14B, IN_8_BITS, MachineError, USE_GROUP),
    Row(TWELVE_96, A14B, {}, "PPPP", IN_16_BITS, {"offload": "group", "quantization": "none", "decode_tile": None}),
    Row(TWELVE_96, A14B, IN_FULL, "PPPP", "planner.decoded_in_tiles", {"offload": "group", "quantization": "none"}),
    Row(L40, A14B, {}, "PPPP", IN_16_BITS, {"keep_loaded": False}),
    Row(H100, A14B, {}, "PPPP", IN_16_BITS, {"keep_loaded": True}),
    Row(H100, A14B, IN_FULL, "PPPP", "planner.bfloat16_on_gpu", {"keep_loaded": False}),
    Row(H200, A14B, {}, "PPPP", IN_16_BITS, {"keep_loaded": True}),
    Row(H200, SMALL, {}, "PPP", IN_16_BITS, {"keep_loaded": True}),
    Row(CPU_16, SMALL, {}, MachineError, MEMORY_SHORT),
    Row(CPU_64, A14B, {}, "PPPP", "planner.on_cpu", {"keep_loaded": False}),
    Row(APPLE, A14B, {}, MachineError, MEMORY_SHORT),
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
    return resolve(request, model_of(row.model), PlanningContext(row.on, folder / "x.mp4", offers))


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
        assert states(caught.value, row.says), caught.value.fact
        return
    plan = planned(row, folder)
    parts = plan.components.values()
    assert "".join(LETTERS[part.backend] for part in parts) == row.plan
    assert states(plan, row.says), list(facts_in(plan))
    assert row.also.items() <= (plan.request_json() | plan.strategy.model_dump()).items()
    for part in parts:
        assert bool(part.engines) == (part.backend != "pytorch")


def _lack(badge: Fact) -> str:
    """Return the code of what a badge says is lacking, without the advice to build."""
    return (badge.data["lack"] if badge.code == "planner.badge_build" else badge).code


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
    assert _lack(high.badge) == badge
    assert reason in {each.code for each in facts_in(high.reasons)}
    # The other expert's weights are not in it.
    assert _lack(low.badge) == "planner.badge_no_engine"


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len({named(row) + repr(row.says) for row in ROWS}) >= 60
    assert len({row.on for row in [*ROWS, *MEMORY_ROWS]}) >= 17
