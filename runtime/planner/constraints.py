"""What excludes what, and what needs what: two tables, each entry with a reason and a remedy.

- `NEEDS`: what a backend, a quantization or offloading needs of the machine. The first need that is not met counts.
- `RULES`: which settings exclude each other, for one component on one backend.

Pure: no torch, no disk. Reasons are clauses without a full stop ("TensorRT is not installed"), remedies are sentences,
and a chip is what the web page shows after "PyTorch: ".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import BACKEND_TITLES, PYTORCH
from runtime.core.step_cache import NONE
from runtime.machine.probe import Machine
from runtime.models.spec import is_transformer

INSTALL = "Run install.sh (install.bat on Windows) again: it installs requirements-gpu.txt where there is a GPU."
OTHER_BACKEND = "Choose another backend; the part runs in PyTorch meanwhile."
_INSTALL_CPU = "Run install.sh (install.bat on Windows)."

# GPUs below these compute capabilities lack what is named.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
TENSORRT_CAPABILITY = (7, 5)
# The first of a kind that multiplies otherwise than those before.
HOPPER = (9, 0)
# Of the VAE's convolutions, those with as many outputs are faster by a kernel of ours there (`VaeSpec.kernel_outputs`).
OUTPUTS_BY_KERNEL = 96
# CUDA 13 has no kernels for older GPUs, and the first with kernels for Blackwell (10 and above) is 12.8.
_CUDA_13_CAPABILITY = (7, 5)
_BLACKWELL, _FIRST_FOR_BLACKWELL = (10, 0), (12, 8)
# https://docs.nvidia.com/deploy/cuda-compatibility: a driver runs all of a major version of CUDA, and older ones.
_LEAST_DRIVER = {11: "450", 12: "525", 13: "580"}

# What quantized weights are called, the fastest first.
WEIGHTS_TITLES: Mapping[str, str] = {"fp8": "FP8 weights", "bnb-8bit": "8-bit weights", "bnb-4bit": "4-bit weights"}
_WAITING = frozenset({"model", "group", "sequential"})
COMPONENT_TITLES: Mapping[str, str] = {
    "text_encoder": "text encoder",
    "transformer": "transformer",
    "transformer_2": "low-noise transformer",
    "vae": "VAE",
}


@dataclass(frozen=True)
class Conflict:
    """Why something cannot be, and what to do about it.

    Attributes:
        chip: a few words.
        reason: a clause that can follow "TensorRT was asked for, but".
        remedy: a sentence.
        setting: the request's field that is against it; empty where it is the machine.
    """

    badge: str
    reason: str
    remedy: str
    setting: str = ""

    @property
    def what(self) -> str:
        """The reason as a sentence."""
        return f"{self.reason[0].upper()}{self.reason[1:]}."

    @property
    def refusal(self) -> InvalidRequestError:
        """The error for a request that asks for it all the same, naming the field that is against it."""
        return InvalidRequestError(self.setting, self.what, self.remedy)


@dataclass(frozen=True)
class Need:
    """One thing that a machine must have: `problem` says what is missing, as a clause, `None` if nothing is.

    Where `remedy` is empty it depends on the machine.
    """

    problem: Callable[[Machine], str | None]
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One component on one backend, with the settings around it.

    Attributes:
        component: its name.
        backend: what is to run it.
        device: a torch device.
        precision: of the arithmetic, where it is known.
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

    def words(self, gpu: str) -> dict[str, str]:
        """Return what the sentences of `RULES` name; `gpu` is the machine's."""
        return {
            "backend": BACKEND_TITLES[self.backend],
            "component": self.component,
            "part": COMPONENT_TITLES[self.component],
            "offload": self.offload,
            "weights": WEIGHTS_TITLES.get(self.quantization, ""),
            "gpus": str(self.gpus),
            "precision": self.precision,
            "gpu": gpu,
        }


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An exclusion: `chip`, `reason` and `remedy` are as in `Conflict`, with names from `Case.words` in braces."""

    name: str
    excludes: Callable[[Case, Machine], bool]
    badge: str
    reason: str
    remedy: str
    setting: str = field(default="")

    def against(self, case: Case, gpu: str = "") -> Conflict:
        """Return what it says of a case that it excludes; `gpu` is the machine's name for its own."""
        words = case.words(gpu)
        badge, reason, remedy = (text.format_map(words) for text in (self.badge, self.reason, self.remedy))
        return Conflict(badge, reason, remedy, self.setting)


def cuda_problem(machine: Machine) -> str | None:
    """Return why PyTorch cannot use an NVIDIA GPU here, a clause, or `None` if it can."""
    if not machine.gpus:
        return machine.gpu_problem or "no NVIDIA GPU was found"
    gpu = machine.gpus[0]
    if machine.torch_cuda is None:
        return f"this PyTorch ({machine.torch_version}) is built without CUDA"
    built_with = version_numbers(machine.torch_cuda)
    if machine.driver_cuda is not None and machine.driver_cuda[0] < built_with[0]:
        runs = ".".join(map(str, machine.driver_cuda))
        return f"the NVIDIA driver {gpu.driver} is too old: it runs CUDA {runs}, PyTorch needs {machine.torch_cuda}"
    too_old = built_with >= (13,) and gpu.capability < _CUDA_13_CAPABILITY
    too_new = built_with < _FIRST_FOR_BLACKWELL and gpu.capability >= _BLACKWELL
    if too_old or too_new:
        return f"this PyTorch (CUDA {machine.torch_cuda}) has no kernels for {gpu.name}"
    return None


def cuda_remedy(machine: Machine) -> str:
    """Return what to do about `cuda_problem`, a sentence."""
    if not machine.gpus:
        return "Install or update the NVIDIA driver, then restart." if machine.gpu_problem else OTHER_BACKEND
    if machine.torch_cuda is None:
        return INSTALL
    built_with = version_numbers(machine.torch_cuda)
    if machine.driver_cuda is not None and machine.driver_cuda[0] < built_with[0]:
        return f"Update the NVIDIA driver to {_LEAST_DRIVER.get(built_with[0], 'the newest')} or later, then restart."
    if machine.gpus[0].capability >= _BLACKWELL:
        return "Install PyTorch built for CUDA 12.8 or later."
    return "Install PyTorch built for CUDA 12."


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (13, 0) for "13.0"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _package(name: str, title: str) -> Callable[[Machine], str | None]:
    return lambda machine: None if machine.version_of(name) else f"{title} is not installed"


def _capability(least: tuple[int, int], what: str) -> Callable[[Machine], str | None]:
    def problem(machine: Machine) -> str | None:
        return what.format(gpu=machine.gpus[0].name) if machine.gpus[0].capability < least else None

    return problem


def unfit_torch_tensorrt(machine: Machine) -> str | None:
    """Return why torch-tensorrt does not go with this PyTorch: each release fits one. `None` if it does."""
    installed, torch_version = machine.version_of("torch-tensorrt") or "", machine.torch_version or ""
    if installed.split(".")[:2] != torch_version.split(".")[:2]:
        return f"torch-tensorrt {installed} does not fit PyTorch {torch_version}"
    return None


def _compiler_remedy(system: str) -> str:
    return {
        "Windows": "Install the Visual Studio Build Tools with C++, and start Tandem from their prompt.",
        "Darwin": "Run `xcode-select --install`.",
    }.get(system, "Install g++ with the system's package manager.")


_CUDA = Need(cuda_problem, "")
_COMPILER = Need(lambda machine: None if machine.compiler else "there is no C++ compiler", "")
_ONNX = Need(
    lambda machine: (
        None
        if all(machine.version_of(name) for name in ("onnx", "onnxscript", "onnxruntime"))
        else "ONNX Runtime is not installed"
    ),
    _INSTALL_CPU,
)
_TENSORRT = Need(_package("tensorrt", "TensorRT"), INSTALL)
_TENSORRT_KERNELS = Need(_capability(TENSORRT_CAPABILITY, "TensorRT has no kernels for {gpu}"), OTHER_BACKEND)
NEEDS: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    {
        "tensorrt": (_CUDA, _TENSORRT, _TENSORRT_KERNELS),
        "torch_tensorrt": (
            _CUDA,
            _TENSORRT,
            _TENSORRT_KERNELS,
            Need(_package("torch-tensorrt", "torch-tensorrt"), INSTALL),
            Need(unfit_torch_tensorrt, INSTALL),
        ),
        "inductor": (
            Need(lambda machine: None if machine.torch_version else "PyTorch is not installed", _INSTALL_CPU),
            _COMPILER,
        ),
        "onnxruntime": (_ONNX,),
        "bnb-8bit": (_CUDA, Need(_package("bitsandbytes", "bitsandbytes"), INSTALL)),
        "bnb-4bit": (_CUDA, Need(_package("bitsandbytes", "bitsandbytes"), INSTALL)),
        "fp8": (
            _CUDA,
            Need(_capability(FP8_CAPABILITY, "{gpu} does not compute in FP8"), "Take --quantization bnb-8bit."),
            Need(_package("torchao", "torchao"), INSTALL),
        ),
        "model": (_CUDA,),
        "group": (_CUDA,),
        "sequential": (_CUDA,),
    }
)


def lacking(feature: str, machine: Machine) -> Conflict | None:
    """Return what the machine lacks for a key of `NEEDS`, `None` if nothing."""
    for need in NEEDS.get(feature, ()):
        problem = need.problem(machine)
        if problem is not None:
            remedy = need.remedy
            if need is _CUDA:
                remedy = cuda_remedy(machine)
            elif need is _COMPILER:
                remedy = _compiler_remedy(machine.system.partition(" ")[0])
            return Conflict(problem.partition(":")[0], problem, remedy)
    return None


def _without_bfloat16(case: Case, machine: Machine) -> bool:
    on_gpu = case.device.startswith("cuda") and bool(machine.gpus)
    return on_gpu and case.precision == "bfloat16" and machine.gpus[0].capability < BF16_CAPABILITY


def _decodes_in_pytorch(case: Case) -> bool:
    return not case.on_engine and case.component == "vae"


def _is_held_twice(case: Case) -> bool:
    return not case.on_engine and case.quantization == "bnb-8bit" and case.offload in _WAITING


_HELD_TWICE = Rule(
    name="8-bit weights that wait",
    excludes=lambda case, _: _is_held_twice(case),
    badge="{weights} exclude {offload} offload",
    reason="{weights} exclude {offload} offload: they cannot wait in memory (RAM), "
    "because bitsandbytes keeps copies of them outside of what can be moved",
    remedy="Take --offload none with them; --quantization bnb-4bit goes with --offload model.",
    setting="offload",
)
RULES = (
    _HELD_TWICE,
    Rule(
        name="quantized weights",
        excludes=lambda case, _: case.on_engine and case.quantization in WEIGHTS_TITLES,
        badge="{weights} exclude {backend}",
        reason="{weights} exclude {backend}: an engine keeps its own weights, in its own precision",
        remedy="Take --quantization none, or --backend {component}=pytorch.",
        setting="quantization",
    ),
    Rule(
        name="offloaded transformer",
        excludes=lambda case, _: case.on_engine and is_transformer(case.component) and case.offload in _WAITING,
        badge="{offload} offload excludes {backend}",
        reason="{offload} offload excludes {backend} for the {part}: an engine keeps its weights on the GPU",
        remedy="Take --offload none, or --backend {component}=pytorch; other parts may run on engines all the same.",
        setting="offload",
    ),
    Rule(
        name="several GPUs",
        excludes=lambda case, _: case.on_engine and is_transformer(case.component) and case.gpus > 1,
        badge="{gpus} GPUs exclude {backend}",
        reason="a {part} shared by {gpus} GPUs excludes {backend}: an engine runs whole on one",
        remedy="Take one GPU, or --backend {component}=pytorch.",
        setting="gpus",
    ),
    Rule(
        name="step cache on engines",
        excludes=lambda case, _: case.on_engine and is_transformer(case.component) and case.step_cache != NONE,
        badge="a step cache excludes {backend}",
        reason="a step cache excludes {backend} for the {part}: an engine computes all of its blocks",
        remedy="Take --step-cache none, or --backend {component}=pytorch.",
        setting="step_cache",
    ),
    Rule(
        name="step cache and streamed blocks",
        excludes=lambda case, _: (
            is_transformer(case.component) and case.step_cache != NONE and case.offload in {"group", "sequential"}
        ),
        badge="a step cache excludes {offload} offload",
        reason="a step cache excludes {offload} offload: each block brings the next one, and it leaves blocks out",
        remedy="Take --step-cache none, or --offload model or none.",
        setting="step_cache",
    ),
    Rule(
        name="ONNX Runtime on a GPU",
        excludes=lambda case, machine: (
            case.backend == "onnxruntime"
            and case.device.startswith("cuda")
            and machine.version_of("onnxruntime-gpu") is None
        ),
        badge="this ONNX Runtime has no CUDA",
        reason="this ONNX Runtime has no CUDA",
        remedy=OTHER_BACKEND,
    ),
    Rule(
        name="VAE in bfloat16",
        excludes=lambda case, machine: _decodes_in_pytorch(case) and _without_bfloat16(case, machine),
        badge="no bfloat16 on this GPU",
        reason="{gpu} does not decode in bfloat16",
        remedy="Take --vae-precision float32, or float16.",
        setting="vae_precision",
    ),
    Rule(
        name="VAE in 16 bits on a CPU",
        excludes=lambda case, _: (
            _decodes_in_pytorch(case) and case.device == "cpu" and case.precision in {"bfloat16", "float16"}
        ),
        badge="no 16 bits for the VAE on a CPU",
        reason="the VAE in {precision} takes more than ten times as long on a CPU",
        remedy="Take --vae-precision float32.",
        setting="vae_precision",
    ),
    Rule(
        name="bfloat16",
        excludes=lambda case, machine: not _decodes_in_pytorch(case) and _without_bfloat16(case, machine),
        badge="no bfloat16 on this GPU",
        reason="{gpu} does not compute in bfloat16",
        remedy=OTHER_BACKEND,
    ),
)


def conflict(case: Case, machine: Machine) -> Conflict | None:
    """Return what stands against a case: the first rule that excludes it, else what its backend lacks here."""
    for rule in RULES:
        if rule.excludes(case, machine):
            return rule.against(case, machine.gpus[0].name if machine.gpus else "")
    return lacking(case.backend, machine)


def excluded_by_step_cache(step_cache: str, offload: str, machine: Machine) -> Conflict | None:
    """Return why a transformer in PyTorch with a step cache cannot be held so, `None` if it can."""
    if step_cache == NONE:
        return None
    return conflict(Case(component="transformer", backend=PYTORCH, offload=offload, step_cache=step_cache), machine)


def cannot_wait(case: Case) -> Conflict | None:
    """Return why weights in PyTorch cannot wait in memory (RAM) as `case.offload` wants; alike on every machine."""
    return _HELD_TWICE.against(case) if _is_held_twice(case) else None
