"""Loading of the network that interpolates, and its exportable form."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from runtime.core.plan import PYTORCH, ComponentPlan
from runtime.core.request import INTERPOLATOR
from runtime.families.interpolator.programs import InterpolationNetwork, InterpolatorForm
from runtime.families.interpolator.spec import interpolator_model
from runtime.models.spec import ModelSpec
from runtime.models.weights import channels_last_on_cpu, load_module


class Interpolator:
    """Makes the network, with the interface of diffusers' models."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        """Return the network, whose weights are random."""
        del config
        return InterpolationNetwork()


MODULES: Mapping[str, Any] = {INTERPOLATOR: Interpolator}


def make_form(spec: ModelSpec, program: str, load: Callable[[], nn.Module]) -> nn.Module:
    """See `engines.programs.MakeForm`."""
    del spec, program
    network: Any = load()
    return channels_last_on_cpu(InterpolatorForm(network))


@lru_cache(maxsize=1)
def load_interpolator(device: str = "cpu", dtype: str = "float32") -> nn.Module:
    """Load the network, for inference; it is small, and kept for the next video.

    Args:
        device: a torch device.
        dtype: of the convolutions: "float32", "bfloat16" or "float16".

    Returns:
        A module from two frames (n, 6, height, width) in 0 to 1 to the one between them, float32, which has the spec as
        `tandem_spec`.

    Raises:
        ModelError: if it cannot be loaded.
    """
    spec = interpolator_model()
    part = ComponentPlan(backend=PYTORCH, device=device, dtype=dtype, weights_bytes=0, reasons=())
    form: Any = make_form(spec, INTERPOLATOR, lambda: load_module(spec, INTERPOLATOR, part)).eval()
    form.tandem_spec = spec
    made: nn.Module = form
    return made
