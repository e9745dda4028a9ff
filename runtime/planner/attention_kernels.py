"""Which ways of computing PyTorch has here: kinds of attention, and compiling. Each lack with its reason and remedy.

Pure, as `compat`, whose conflicts these are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.machine.probe import Machine
from runtime.planner import constraints
from runtime.planner.constraints import Case, Conflict

_AUTO = "Take --attention auto."
_NEEDS_CUDA = "model"  # of `compat.NEEDS`: offloading needs a GPU, and nothing else


@dataclass(frozen=True)
class Kind:
    """One kind of attention: the oldest GPU that has it, and the package that it comes in beside PyTorch."""

    title: str
    capability: tuple[int, int]
    package: str = ""
    exact: bool = True


# By the names of `request.ATTENTIONS`. Those that are not exact are never taken unasked.
ATTENTIONS: Mapping[str, Kind] = {
    "native": Kind("PyTorch's own attention", (0, 0)),
    "cudnn": Kind("cuDNN's attention", constraints.BF16_CAPABILITY),
    "flash": Kind("FlashAttention 2", constraints.BF16_CAPABILITY),
    "flash3": Kind("FlashAttention 3", constraints.HOPPER, "flash-attn-3"),
    "flash4": Kind("FlashAttention 4", constraints.HOPPER, "flash-attn-4"),
    "sage": Kind("SageAttention", constraints.BF16_CAPABILITY, "sageattention", exact=False),
    "fp8": Kind("cuDNN's attention in FP8", constraints.HOPPER, "nvidia-cudnn-frontend", exact=False),
}


def no_attention(name: str, machine: Machine) -> Conflict | None:
    """Return why a kind of attention cannot be had on this machine's GPU, `None` if it can."""
    kind = ATTENTIONS[name]
    if name == "native":
        return None
    cuda = constraints.lacking(_NEEDS_CUDA, machine)
    if cuda is not None:
        remedy = _AUTO if cuda.remedy == constraints.OTHER_BACKEND else cuda.remedy
        return Conflict(cuda.badge, cuda.reason, remedy)
    gpu = machine.gpus[0]
    if gpu.capability < kind.capability:
        return Conflict("not on this GPU", f"{gpu.name} is older than it wants", _AUTO)
    if kind.package and machine.version_of(kind.package) is None:
        return Conflict(
            f"no {kind.package}",
            f"{kind.package} is not installed",
            f"Install {kind.package}, or take --attention auto.",
        )
    return None


def no_compiling(case: Case, machine: Machine) -> Conflict | None:
    """Return why PyTorch cannot compile the blocks of a transformer that it runs itself, `None` if it can."""
    weights = constraints.WEIGHTS_TITLES.get(case.quantization, "")
    if case.offload in {"group", "sequential"}:
        return Conflict(
            f"{case.offload} offload excludes compiling",
            f"{case.offload} offload brings weights while a block runs, which compiled code cannot have",
            "Take --offload none or model with --compile always, or leave --compile out.",
            "compile",
        )
    if case.quantization.startswith("bnb-"):
        return Conflict(
            f"{weights} exclude compiling",
            f"{weights} are computed by bitsandbytes in calls that cannot be compiled",
            "Take --quantization fp8 or none with --compile always, or leave --compile out.",
            "compile",
        )
    missing = None
    if constraints.lacking(_NEEDS_CUDA, machine) is None:
        missing = "Triton is not installed" if machine.version_of("triton") is None else None
    elif machine.compiler is None:
        missing = "there is no C++ compiler"
    return None if missing is None else Conflict(missing, missing, "Install it, or take --compile never.")
