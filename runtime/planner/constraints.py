"""What excludes what, and what needs what: two tables of facts, each with a remedy.

- `NEEDS`: what a backend, a quantization or offloading needs of the machine. The first need that is not met counts.
- `RULES`: which settings exclude each other, for one component on one backend.

Attention kernels, compilation, and the memory and disk space of builds have functions of their own below. Pure: no
torch, no disk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH
from runtime.core.step_cache import NONE
from runtime.machine.compatibility import cuda_problem, no_compiler, unfit_torch_tensorrt
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec, is_transformer

# GPUs below these compute capabilities lack what is named.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
TENSORRT_CAPABILITY = (7, 5)
# The first of a kind that multiplies otherwise than those before.
HOPPER = (9, 0)
# Of the VAE's convolutions, those with as many outputs are faster by Tandem's own kernel there.
OUTPUTS_BY_KERNEL = 96
# Quantizations, the fastest first.
QUANTIZATIONS = ("fp8", "bnb-8bit", "bnb-4bit")
_OFFLOADED = frozenset({"model", "group", "sequential"})


@dataclass(frozen=True)
class Conflict:
    """Why something is not possible.

    Attributes:
        fact: the reason, with its remedy.
        setting: the request's field that is against it; empty if it is the machine.
    """

    fact: Fact
    setting: str = ""

    @property
    def refusal(self) -> InvalidRequestError | MachineError:
        """The error for a request that asks for it."""
        if self.setting:
            return InvalidRequestError(self.setting, self.fact.code, **self.fact.data)
        return MachineError(self.fact.code, **self.fact.data)


@dataclass(frozen=True, kw_only=True)
class ComponentSettings:
    """One component on one backend, with the settings around it.

    Attributes:
        component: its name.
        backend: what is to run it.
        device: a torch device.
        precision: of the arithmetic, if it is known.
        offload, quantization: as in `GenerationRequest`; quantization of this component's weights.
        gpus: how many GPUs share it.
        step_cache: as in `GenerationRequest`.
    """

    component: str
    backend: str
    device: str = "cpu"
    precision: str = ""
    offload: str = "auto"
    quantization: str = "auto"
    gpus: int = 1
    step_cache: str = NONE

    @property
    def on_engine(self) -> bool:
        """Whether an engine is to run it."""
        return self.backend != PYTORCH

    def facts(self, gpu: str) -> dict[str, str | int | list[str]]:
        """Return the data of a rule's fact; `gpu` is the GPU's name."""
        return {
            "backend": self.backend,
            "component": self.component,
            "in_pytorch": ["backend", f"{self.component}=pytorch"],
            "offload": self.offload,
            "quantization": self.quantization,
            "gpus": self.gpus,
            "precision": self.precision,
            "gpu": gpu,
        }


@dataclass(frozen=True)
class Rule:
    """An exclusion; `code` is its fact's, with the data of `ComponentSettings.facts`. See `Conflict` for `setting`."""

    code: str
    excludes: Callable[[ComponentSettings, Machine], bool]
    setting: str = ""

    def conflict(self, case: ComponentSettings, gpu: str = "") -> Conflict:
        """Return the conflict of a case that it excludes; `gpu` is the GPU's name."""
        return Conflict(Fact(self.code, case.facts(gpu)), self.setting)


Need = Callable[[Machine], Fact | None]


def _package(code: str, *names: str) -> Need:
    return lambda machine: None if all(machine.version_of(name) for name in names) else Fact(code)


def _capability(least: tuple[int, int], code: str) -> Need:
    return lambda machine: Fact(code, {"gpu": machine.gpus[0].name}) if machine.gpus[0].capability < least else None


_TENSORRT = (
    cuda_problem,
    _package("machine.no_tensorrt", "tensorrt"),
    _capability(TENSORRT_CAPABILITY, "machine.tensorrt_without_gpu"),
)
_BITSANDBYTES = (cuda_problem, _package("machine.no_bitsandbytes", "bitsandbytes"))
NEEDS: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    {
        "tensorrt": _TENSORRT,
        "torch_tensorrt": (
            *_TENSORRT,
            _package("machine.no_torch_tensorrt", "torch-tensorrt"),
            unfit_torch_tensorrt,
        ),
        "inductor": (
            lambda machine: None if machine.torch_version else Fact("machine.no_torch"),
            no_compiler,
        ),
        "onnxruntime": (_package("machine.no_onnxruntime", "onnx", "onnxscript", "onnxruntime"),),
        "bnb-8bit": _BITSANDBYTES,
        "bnb-4bit": _BITSANDBYTES,
        "fp8": (
            cuda_problem,
            _capability(FP8_CAPABILITY, "machine.gpu_without_fp8"),
            _package("machine.no_torchao", "torchao"),
        ),
        "model": (cuda_problem,),
        "group": (cuda_problem,),
        "sequential": (cuda_problem,),
    }
)


def lacking(feature: str, machine: Machine) -> Conflict | None:
    """Return what the machine lacks for a key of `NEEDS`, `None` if nothing."""
    problem = next(filter(None, (need(machine) for need in NEEDS.get(feature, ()))), None)
    return None if problem is None else Conflict(problem)


def _without_bfloat16(case: ComponentSettings, machine: Machine) -> bool:
    on_gpu = case.device.startswith("cuda") and bool(machine.gpus)
    return on_gpu and case.precision == "bfloat16" and machine.gpus[0].capability < BF16_CAPABILITY


def _decodes_in_pytorch(case: ComponentSettings) -> bool:
    return not case.on_engine and case.component == "vae"


def _is_held_twice(case: ComponentSettings) -> bool:
    return not case.on_engine and case.quantization == "bnb-8bit" and case.offload in _OFFLOADED


_HELD_TWICE = Rule("planner.8bit_offloaded", lambda case, _: _is_held_twice(case), "offload")
RULES = (
    _HELD_TWICE,
    Rule(
        "planner.quantized_on_engine",
        lambda case, _: case.on_engine and case.quantization in QUANTIZATIONS,
        "quantization",
    ),
    Rule(
        "planner.offload_on_engine",
        lambda case, _: case.on_engine and is_transformer(case.component) and case.offload in _OFFLOADED,
        "offload",
    ),
    Rule(
        "planner.gpus_on_engine",
        lambda case, _: case.on_engine and is_transformer(case.component) and case.gpus > 1,
        "gpus",
    ),
    Rule(
        "planner.step_cache_on_engine",
        lambda case, _: case.on_engine and is_transformer(case.component) and case.step_cache != NONE,
        "step_cache",
    ),
    Rule(
        "planner.step_cache_offloaded",
        lambda case, _: (
            is_transformer(case.component) and case.step_cache != NONE and case.offload in {"group", "sequential"}
        ),
        "step_cache",
    ),
    Rule(
        "planner.onnxruntime_without_cuda",
        lambda case, machine: (
            case.backend == "onnxruntime"
            and case.device.startswith("cuda")
            and machine.version_of("onnxruntime-gpu") is None
        ),
    ),
    Rule(
        "planner.vae_bfloat16",
        lambda case, machine: _decodes_in_pytorch(case) and _without_bfloat16(case, machine),
        "vae_precision",
    ),
    Rule(
        "planner.vae_16bit_on_cpu",
        lambda case, _: (
            _decodes_in_pytorch(case) and case.device == "cpu" and case.precision in {"bfloat16", "float16"}
        ),
        "vae_precision",
    ),
    Rule(
        "planner.bfloat16",
        lambda case, machine: not _decodes_in_pytorch(case) and _without_bfloat16(case, machine),
    ),
)


def conflict(case: ComponentSettings, machine: Machine) -> Conflict | None:
    """Return what stands against a case: the first rule that excludes it, else what its backend lacks here."""
    for rule in RULES:
        if rule.excludes(case, machine):
            return rule.conflict(case, machine.gpus[0].name if machine.gpus else "")
    return lacking(case.backend, machine)


def excluded_by_step_cache(step_cache: str, offload: str, machine: Machine) -> Conflict | None:
    """Return why a transformer in PyTorch with a step cache excludes an offload, `None` if it does not."""
    if step_cache == NONE:
        return None
    return conflict(
        ComponentSettings(component="transformer", backend=PYTORCH, offload=offload, step_cache=step_cache), machine
    )


def cannot_wait(case: ComponentSettings) -> Conflict | None:
    """Return why weights in PyTorch cannot be offloaded as `case.offload` asks; the same on every machine."""
    return _HELD_TWICE.conflict(case) if _is_held_twice(case) else None


@dataclass(frozen=True)
class AttentionKernel:
    """One attention kernel: the oldest GPU that has it, the package that it is in, and whether it is exact."""

    capability: tuple[int, int]
    package: str = ""
    exact: bool = True


# By the names of `request.ATTENTIONS`. Those that are not exact are never chosen unasked.
ATTENTION_KERNELS: Mapping[str, AttentionKernel] = {
    "native": AttentionKernel((0, 0)),
    "cudnn": AttentionKernel(BF16_CAPABILITY),
    "flash": AttentionKernel(BF16_CAPABILITY),
    "flash3": AttentionKernel(HOPPER, "flash-attn-3"),
    "flash4": AttentionKernel(HOPPER, "flash-attn-4"),
    "sage": AttentionKernel(BF16_CAPABILITY, "sageattention", exact=False),
    "fp8": AttentionKernel(HOPPER, "nvidia-cudnn-frontend", exact=False),
}


def attention_conflict(name: str, machine: Machine) -> Conflict | None:
    """Return why this machine's GPU does not run an attention kernel, `None` if it does."""
    kernel = ATTENTION_KERNELS[name]
    if name == "native":
        return None
    problem = cuda_problem(machine)
    if problem is None and machine.gpus[0].capability < kernel.capability:
        problem = Fact("planner.attention_gpu_too_old", {"gpu": machine.gpus[0].name})
    if problem is None and kernel.package and machine.version_of(kernel.package) is None:
        problem = Fact("planner.attention_not_installed", {"package": kernel.package})
    return None if problem is None else Conflict(problem)


def compile_conflict(case: ComponentSettings, machine: Machine) -> Conflict | None:
    """Return why PyTorch cannot compile the blocks of a transformer that it runs, `None` if it can."""
    if case.offload in {"group", "sequential"}:
        return Conflict(Fact("planner.compile_offloaded", {"offload": case.offload}), "compile")
    if case.quantization.startswith("bnb-"):
        return Conflict(Fact("planner.compile_quantized", {"quantization": case.quantization}), "compile")
    if cuda_problem(machine) is None:
        problem = None if machine.version_of("triton") else Fact("machine.no_triton")
    else:
        problem = no_compiler(machine)
    return None if problem is None else Conflict(problem)


def build_conflict(ram_bytes: int, vram_bytes: int, disk_bytes: int, machine: Machine) -> Conflict | None:
    """Return why this machine is too small for a build, whatever else is closed; `None` if it is not.

    Args:
        ram_bytes, vram_bytes, disk_bytes: what building takes at its peak.
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
    """Return why a model cannot be loaded: each component passes through RAM whole on its way to the GPU.

    Args:
        weights: bytes of each component that is loaded so; quantized ones and engines are not.
    """
    if not weights:
        return None
    largest = max(weights, key=lambda name: weights[name])
    memory = machine.ram_bytes + machine.swap_bytes
    if weights[largest] <= memory:
        return None
    data = {"component": largest, "model": spec.title, "needs": weights[largest], "total": memory}
    return Conflict(Fact("planner.load_ram", data))
