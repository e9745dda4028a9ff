"""In which precision the VAE decodes in PyTorch, why, and what to do where that goes wrong. Pure."""

from collections.abc import Mapping

from runtime.core.plan import PYTORCH, ComponentPlan
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.planner import constraints

# PSNR of the shipped model's frames beside those decoded in float32, in dB, both rounded to 8 bits.
PSNR: Mapping[str, int] = {"bfloat16": 56, "float16": 67}
_FULL = "float32"


def check(asked: str, device: str, machine: Machine) -> None:
    """Refuse a precision that the device has not, or is far too slow in. It counts for a VAE on an engine too.

    Args:
        asked: of `request.VAE_PRECISIONS`.
        device: a torch device.
        machine: as the job sees it.

    Raises:
        InvalidRequestError: with what to do about it.
    """
    case = constraints.Case(component="vae", backend=PYTORCH, device=device, precision="" if asked == AUTO else asked)
    against = constraints.conflict(case, machine)
    if against is not None:
        raise against.refusal


def choose(asked: str, usual: str) -> tuple[str, str]:
    """Return the VAE's dtype, and a clause about it that ends a reason.

    Args:
        asked: of `request.VAE_PRECISIONS`.
        usual: what it is where nobody asks.
    """
    dtype = usual if asked == AUTO else asked
    measured = f": {PSNR[dtype]} dB from {_FULL} in 8 bits with the shipped model's" if dtype in PSNR else ""
    return dtype, f"the VAE in {dtype}{'' if asked == AUTO else ', as asked'}{measured}"


def doubtful(part: ComponentPlan) -> bool:
    """Return whether a VAE that is planned so decodes in PyTorch in less than float32."""
    return part.backend == PYTORCH and part.dtype != _FULL
