"""The device and the precision of each component in PyTorch, with the reason. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner import constraints
from runtime.planner.parallelism import SMALL_MODEL_BYTES

# PSNR of the shipped model's frames against those decoded in float32, in dB, both rounded to 8 bits.
VAE_PSNR: Mapping[str, int] = {"bfloat16": 56, "float16": 67}
_FULL = "float32"


class Placement(NamedTuple):
    """A torch device, each component's dtype, the reason, and the device's free bytes."""

    device: str
    dtypes: dict[str, str]
    reason: Fact
    free_bytes: int


def place(spec: ModelSpec, machine: Machine, index: int, vae: str = AUTO) -> Placement:
    """Return where a model runs in PyTorch, and in which precision.

    Args:
        index: of the GPU.
        vae: the VAE's precision as asked for, of `request.VAE_PRECISIONS`.

    Raises:
        InvalidRequestError: if the device cannot decode in that precision.
    """
    names = spec.component_names
    problem = constraints.cuda_problem(machine)
    device = f"cuda:{index}" if problem is None else "cpu"
    check_vae_precision(vae, device, machine)
    if problem is not None:
        reason = Fact("planner.on_cpu", {"cause": problem})
        return Placement(device, dict.fromkeys(names, _FULL), reason, machine.ram_free_bytes)
    gpu = machine.gpus[index]
    if 4 * spec.total_parameters <= SMALL_MODEL_BYTES:
        # It costs them nothing.
        dtypes, code = dict.fromkeys(names, _FULL), "planner.small_on_gpu"
    elif gpu.capability >= constraints.BF16_CAPABILITY:
        dtypes, code = dict.fromkeys(names, "bfloat16"), "planner.bfloat16_on_gpu"
    else:
        # UMT5 overflows in float16, and VAEs were not tried.
        dtypes = dict.fromkeys(names, "float16") | {"text_encoder": _FULL, "vae": _FULL}
        code = "planner.float16_on_gpu"
    uniform = vae == AUTO and set(dtypes.values()) == {_FULL}
    if vae != AUTO:
        dtypes["vae"] = vae
    details = [] if uniform else [_about_vae(dtypes["vae"], asked=vae != AUTO)]
    return Placement(device, dtypes, Fact(code, {"gpu": gpu.name, "details": details}), gpu.free_bytes)


def _about_vae(dtype: str, *, asked: bool) -> Fact:
    data = {"dtype": dtype, "psnr": VAE_PSNR.get(dtype)}
    if dtype in VAE_PSNR:
        return Fact("planner.vae_rounded_asked" if asked else "planner.vae_rounded", data)
    return Fact("planner.vae_exact_asked" if asked else "planner.vae_exact", data)


def check_vae_precision(asked: str, device: str, machine: Machine) -> None:
    """Refuse a precision that the device lacks, or is far too slow in; also for a VAE on an engine.

    Args:
        asked: of `request.VAE_PRECISIONS`.
        device: a torch device.
        machine: as the job sees it.

    Raises:
        InvalidRequestError: with what to do about it.
    """
    case = constraints.Case(component="vae", backend=PYTORCH, device=device, precision="" if asked == AUTO else asked)
    conflict = constraints.conflict(case, machine)
    if conflict is not None:
        raise conflict.refusal


def may_overflow(part: ComponentPlan) -> bool:
    """Return whether a VAE decodes in PyTorch in less than float32."""
    return part.backend == PYTORCH and part.dtype != _FULL
