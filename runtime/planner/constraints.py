"""Constraints: which settings exclude each other, and what they require of the machine; each with a remedy.

- `NEEDS`: requirements of backends, quantizations and offloading. The first one that is not met counts.
- `RULES`: exclusions between settings, for one component on one backend.

Attention kernels, compilation, and memory and disk space of builds have functions of their own. Pure, no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH
from runtime.core.request import AUTO
from runtime.core.sparse_attention import SOL, kernel_of
from runtime.core.step_cache import NONE
from runtime.machine.compatibility import compiler_problem, cuda_problem, tensorrt_rtx_problem, torch_tensorrt_problem
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec, is_transformer

# Lowest compute capabilities with support.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
TENSORRT_CAPABILITY = (7, 5)
HOPPER = (9, 0)
# Output channels of the VAE's convolutions for which Tandem's own kernel is faster than cuDNN on Hopper.
OUTPUTS_BY_KERNEL = 96
# Quantizations, the fastest first.
QUANTIZATIONS = ("fp8", "bnb-8bit", "bnb-4bit")
_OFFLOADED = frozenset({"model", "group", "sequential"})
# A quantization, and the precision of block engines that compute with it.
_FP8 = "fp8"


@dataclass(frozen=True)
class Conflict:
    """Why something is not possible.

    Attributes:
        fact: the reason, with its remedy.
        setting: the request's field that excludes it; empty if the machine does.
    """

    fact: Fact
    setting: str = ""

    @property
    def refusal(self) -> InvalidRequestError | MachineError:
        """The error for a request that requires it."""
        if self.setting:
            return InvalidRequestError(self.setting, self.fact.code, **self.fact.data)
        return MachineError(self.fact.code, **self.fact.data)


@dataclass(frozen=True, kw_only=True)
class ComponentSettings:
    """One component on one backend, with the settings that concern it.

    Attributes:
        device: a torch device.
        precision: of the arithmetic; empty if unknown.
        offload, step_cache: as in `GenerationRequest`.
        quantization: of this component's weights.
        gpus: how many GPUs share it.
        attention: as in `GenerationRequest`.
        nag: whether attention to the text is guided, as in `GenerationRequest`.
        ranges: the components whose LoRAs change between steps.
        in_blocks: whether the backend's engines compute parts of each block, see `plan.ComponentPlan`.
    """

    component: str
    backend: str
    device: str = "cpu"
    precision: str = ""
    offload: str = "auto"
    quantization: str = "auto"
    gpus: int = 1
    step_cache: str = NONE
    attention: str = AUTO
    nag: bool = False
    ranges: frozenset[str] = frozenset()
    in_blocks: bool = False

    @property
    def on_engine(self) -> bool:
        """Whether engines replace it."""
        return self.backend != PYTORCH and not self.in_blocks

    @property
    def transformer_on_engine(self) -> bool:
        """Whether engines replace a transformer."""
        return self.on_engine and is_transformer(self.component)

    def data(self, gpu: str) -> dict[str, str | int | list[str]]:
        """Return the data of a rule's fact; `gpu` is the GPU's name."""
        return {
            "backend": self.backend,
            "component": self.component,
            "in_pytorch": ["backend", f"{self.component}=pytorch"],
            "offload": self.offload,
            "quantization": self.quantization,
            "gpus": self.gpus,
            "attention": self.attention,
            "precision": self.precision,
            "gpu": gpu,
        }


@dataclass(frozen=True)
class Rule:
    """An exclusion; its fact has this code and the data of `ComponentSettings.data`. See `Conflict` for `setting`."""

    code: str
    excludes: Callable[[ComponentSettings, Machine | None], bool]
    setting: str = ""

    def conflict(self, settings: ComponentSettings, gpu: str = "") -> Conflict:
        """Return the conflict of settings that it excludes; `gpu` is the GPU's name."""
        return Conflict(Fact(self.code, settings.data(gpu)), self.setting)


Need = Callable[[Machine], Fact | None]


def _package(code: str, title: str, *names: str) -> Need:
    missing = Fact(code, {"package": title})
    return lambda machine: None if all(machine.version_of(name) for name in names) else missing


def _capability(least: tuple[int, int], code: str) -> Need:
    return lambda machine: Fact(code, {"gpu": machine.gpus[0].name}) if machine.gpus[0].capability < least else None


_TENSORRT = (
    cuda_problem,
    _package("machine.gpu_package_missing", "TensorRT", "tensorrt"),
    _capability(TENSORRT_CAPABILITY, "machine.tensorrt_without_gpu"),
)

_TENSORRT_RTX = (
    cuda_problem,
    tensorrt_rtx_problem,
    _package("machine.gpu_package_missing", "TensorRT for RTX", "tensorrt-rtx"),
)
_BITSANDBYTES = (cuda_problem, _package("machine.gpu_package_missing", "bitsandbytes", "bitsandbytes"))
NEEDS: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    {
        "tensorrt": _TENSORRT,
        "torch_tensorrt": (
            *_TENSORRT,
            _package("machine.gpu_package_missing", "torch-tensorrt", "torch-tensorrt"),
            torch_tensorrt_problem,
        ),
        "tensorrt_rtx": _TENSORRT_RTX,
        "tensorrt_rtx_components": (*_TENSORRT_RTX, _capability(BF16_CAPABILITY, "machine.tensorrt_rtx_blocks_only")),
        "tensorrt_rtx_fp8": (*_TENSORRT_RTX, _capability(FP8_CAPABILITY, "machine.gpu_without_fp8")),
        "inductor": (
            lambda machine: None if machine.torch_version else Fact("machine.package_missing", {"package": "PyTorch"}),
            compiler_problem,
        ),
        "onnxruntime": (_package("machine.package_missing", "ONNX Runtime", "onnx", "onnxscript", "onnxruntime"),),
        "bnb-8bit": _BITSANDBYTES,
        "bnb-4bit": _BITSANDBYTES,
        "fp8": (
            cuda_problem,
            _capability(FP8_CAPABILITY, "machine.gpu_without_fp8"),
            _package("machine.gpu_package_missing", "torchao", "torchao"),
        ),
        "model": (cuda_problem,),
        "group": (cuda_problem,),
        "sequential": (cuda_problem,),
    }
)


def lacking(feature: str, machine: Machine) -> Conflict | None:
    """Return the unmet requirement for a key of `NEEDS`, `None` if all are met."""
    problem = next(filter(None, (need(machine) for need in NEEDS.get(feature, ()))), None)
    return None if problem is None else Conflict(problem)


def _without_bfloat16(settings: ComponentSettings, machine: Machine | None) -> bool:
    if machine is None or not machine.gpus or not settings.device.startswith("cuda"):
        return False
    return settings.precision == "bfloat16" and machine.gpus[0].capability < BF16_CAPABILITY


def _decodes_in_pytorch(settings: ComponentSettings) -> bool:
    return settings.backend == PYTORCH and settings.component == "vae"


def _is_offloaded_8bit(settings: ComponentSettings) -> bool:
    return settings.backend == PYTORCH and settings.quantization == "bnb-8bit" and settings.offload in _OFFLOADED


_BNB_8BIT_OFFLOADED = Rule("planner.8bit_offloaded", lambda settings, _: _is_offloaded_8bit(settings), "offload")
RULES = (
    _BNB_8BIT_OFFLOADED,
    Rule(
        "planner.quantized_on_engine",
        lambda settings, _: settings.on_engine and settings.quantization in QUANTIZATIONS,
        "quantization",
    ),
    Rule(
        "planner.offload_on_engine",
        lambda settings, _: settings.transformer_on_engine and settings.offload in _OFFLOADED,
        "offload",
    ),
    Rule(
        "planner.gpus_on_engine",
        lambda settings, _: settings.transformer_on_engine and settings.gpus > 1,
        "gpus",
    ),
    Rule(
        "planner.step_cache_on_engine",
        lambda settings, _: settings.transformer_on_engine and settings.step_cache != NONE,
        "step_cache",
    ),
    Rule("planner.nag_on_engine", lambda settings, _: settings.transformer_on_engine and settings.nag, "nag"),
    Rule(
        "planner.lora_ranges_on_engine",
        lambda settings, _: settings.on_engine and settings.component in settings.ranges,
        "loras",
    ),
    Rule(
        "planner.attention_on_engine",
        lambda settings, _: settings.transformer_on_engine and settings.attention not in {AUTO, "native"},
        "attention",
    ),
    Rule(
        "planner.sequential_in_blocks",
        lambda settings, _: settings.in_blocks and settings.offload == "sequential",
        "offload",
    ),
    Rule(
        "planner.quantized_in_blocks",
        lambda settings, _: settings.in_blocks and settings.quantization.startswith("bnb-"),
        "quantization",
    ),
    Rule(
        "planner.fp8_in_blocks",
        lambda settings, _: settings.in_blocks and settings.quantization == _FP8 != settings.precision,
        "quantization",
    ),
    Rule(
        "planner.fp8_not_asked",
        lambda settings, _: settings.in_blocks and settings.precision == _FP8 != settings.quantization,
        "quantization",
    ),
    Rule(
        "planner.step_cache_offloaded",
        lambda settings, _: (
            is_transformer(settings.component)
            and settings.step_cache != NONE
            and settings.offload in {"group", "sequential"}
        ),
        "step_cache",
    ),
    Rule(
        "planner.onnxruntime_without_cuda",
        lambda settings, machine: (
            settings.backend == "onnxruntime"
            and machine is not None
            and settings.device.startswith("cuda")
            and machine.version_of("onnxruntime-gpu") is None
        ),
    ),
    Rule(
        "planner.vae_bfloat16",
        lambda settings, machine: _decodes_in_pytorch(settings) and _without_bfloat16(settings, machine),
        "vae_precision",
    ),
    Rule(
        "planner.vae_16bit_on_cpu",
        lambda settings, _: (
            _decodes_in_pytorch(settings) and settings.device == "cpu" and settings.precision in {"bfloat16", "float16"}
        ),
        "vae_precision",
    ),
    Rule(
        "planner.bfloat16",
        lambda settings, machine: not _decodes_in_pytorch(settings) and _without_bfloat16(settings, machine),
    ),
)


def conflict(settings: ComponentSettings, machine: Machine | None) -> Conflict | None:
    """Return why settings are not possible: the first rule that excludes them, else a requirement of the backend.

    Args:
        machine: `None` for what is not possible on any machine.
    """
    for rule in RULES:
        if rule.excludes(settings, machine):
            return rule.conflict(settings, machine.gpus[0].name if machine is not None and machine.gpus else "")
    return None if machine is None else lacking(settings.backend, machine)


def step_cache_conflict(step_cache: str, offload: str, machine: Machine) -> Conflict | None:
    """Return why a step cache of a transformer in PyTorch excludes an offload, `None` if it does not."""
    if step_cache == NONE:
        return None
    return conflict(
        ComponentSettings(component="transformer", backend=PYTORCH, offload=offload, step_cache=step_cache), machine
    )


def offload_conflict(settings: ComponentSettings) -> Conflict | None:
    """Return why weights in PyTorch cannot be offloaded in this way on any machine, `None` if they can."""
    return _BNB_8BIT_OFFLOADED.conflict(settings) if _is_offloaded_8bit(settings) else None


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel: lowest compute capability, required package, and whether it is exact."""

    capability: tuple[int, int]
    package: str = ""
    exact: bool = True


_KITCHEN = "comfy-kitchen"
# By the names of `request.ATTENTIONS`. Inexact ones are used only on request.
ATTENTION_KERNELS: Mapping[str, AttentionKernel] = {
    "native": AttentionKernel((0, 0)),
    "cudnn": AttentionKernel(BF16_CAPABILITY),
    "flash": AttentionKernel(BF16_CAPABILITY),
    "flash3": AttentionKernel(HOPPER, "flash-attn-3"),
    "flash4": AttentionKernel(HOPPER, "flash-attn-4"),
    "sage": AttentionKernel(BF16_CAPABILITY, "sageattention", exact=False),
    "fp8": AttentionKernel(HOPPER, "nvidia-cudnn-frontend", exact=False),
    SOL: AttentionKernel(BF16_CAPABILITY, _KITCHEN, exact=False),
}
# Turing and newer have matrix units for INT8.
_INT8_CAPABILITY = (7, 5)


def attention_conflict(name: str, machine: Machine) -> Conflict | None:
    """Return why a request's attention does not run on this machine, `None` if it does."""
    kernel = ATTENTION_KERNELS[kernel_of(name)]
    if name == "native":
        return None
    problem = cuda_problem(machine)
    if problem is None and machine.gpus[0].capability < kernel.capability:
        problem = Fact("planner.attention_gpu_too_old", {"gpu": machine.gpus[0].name})
    if problem is None and kernel.package and machine.version_of(kernel.package) is None:
        problem = Fact("planner.attention_not_installed", {"package": kernel.package})
    return None if problem is None else Conflict(problem)


def int8_problem(machine: Machine | None) -> Fact | None:
    """Return why no kernels multiply layers in INT8, `None` if they do.

    Args:
        machine: `None` if no GPU is used.
    """
    if machine is None:
        return Fact("planner.int8_on_cpu")
    if machine.gpus[0].capability < _INT8_CAPABILITY:
        return Fact("planner.int8_old_gpu", {"gpu": machine.gpus[0].name})
    return None if machine.version_of(_KITCHEN) else Fact("planner.int8_not_installed", {"package": _KITCHEN})


def compile_conflict(settings: ComponentSettings, machine: Machine) -> Conflict | None:
    """Return why the blocks of a transformer in PyTorch cannot be compiled, `None` if they can."""
    if settings.offload in {"group", "sequential"}:
        return Conflict(Fact("planner.compile_offloaded", {"offload": settings.offload}), "compile")
    if settings.quantization.startswith("bnb-"):
        return Conflict(Fact("planner.compile_quantized", {"quantization": settings.quantization}), "compile")
    if cuda_problem(machine) is None:
        problem = None if machine.version_of("triton") else Fact("machine.no_triton")
    else:
        problem = compiler_problem(machine)
    return None if problem is None else Conflict(problem)


def choice_conflict(field: str, value: str, machine: Machine) -> Conflict | None:
    """Return why this machine does not support a value of a request field, whatever the others are; `None` if it does.

    Args:
        field: "offload", "quantization", "attention", "compile" or "vae_precision"; the values of others are possible.
    """
    device = "cpu" if cuda_problem(machine) else "cuda:0"
    match field:
        case "offload" | "quantization":
            return lacking(value, machine)
        case "attention" if value != AUTO:
            return attention_conflict(value, machine)
        case "compile" if value == "always":
            return compile_conflict(ComponentSettings(component="transformer", backend=PYTORCH, device=device), machine)
        case "vae_precision":
            decoder = ComponentSettings(component="vae", backend=PYTORCH, device=device, precision=value)
            return conflict(decoder, machine)
    return None


def build_conflict(ram_bytes: int, vram_bytes: int, disk_bytes: int, machine: Machine) -> Conflict | None:
    """Return why this machine's total memory or free disk space is too small for a build, `None` if it suffices.

    Args:
        ram_bytes, vram_bytes, disk_bytes: peaks of the build.
    """
    if machine.disk_free_bytes is not None and disk_bytes > machine.disk_free_bytes:
        return Conflict(Fact("planner.build_disk", {"needs": disk_bytes, "free": machine.disk_free_bytes}))
    memory = machine.ram_bytes + machine.swap_bytes
    if ram_bytes > memory:
        return Conflict(Fact("planner.build_ram", {"needs": ram_bytes, "total": memory}))
    vram = machine.gpus[0].total_bytes if machine.gpus else 0
    if vram_bytes > vram:
        return Conflict(Fact("planner.build_vram", {"needs": vram_bytes, "total": vram}))
    return None


def load_conflict(spec: ModelSpec, weights: Mapping[str, int], machine: Machine) -> Conflict | None:
    """Return why a model cannot be loaded, `None` if it can: each component must fit into RAM on its way to the GPU.

    Args:
        weights: bytes of each component, without quantized ones and engines.
    """
    if not weights:
        return None
    largest = max(weights, key=lambda name: weights[name])
    memory = machine.ram_bytes + machine.swap_bytes
    if weights[largest] <= memory:
        return None
    data = {"component": largest, "model": spec.title, "needs": weights[largest], "total": memory}
    return Conflict(Fact("planner.load_ram", data))
