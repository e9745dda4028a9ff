"""Loading of upscalers, and their exportable form."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from runtime.core.plan import PYTORCH, ComponentPlan
from runtime.core.request import UPSCALER
from runtime.families.esrgan.programs import CompactNetwork, RrdbNetwork, UpscalerForm
from runtime.families.esrgan.spec import COMPACT, read_architecture
from runtime.models.spec import ModelSpec
from runtime.models.weights import channels_last_on_cpu, load_module


class Upscaler:
    """Makes the network of a configuration, with the interface of diffusers' models."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        """Return the network, whose weights are random.

        Raises:
            ValueError: if the configuration is invalid.
        """
        spec = read_architecture(config)
        return CompactNetwork(spec) if spec.kind == COMPACT else RrdbNetwork(spec)


MODULES: Mapping[str, Any] = {UPSCALER: Upscaler}


def make_form(spec: ModelSpec, program: str, load: Callable[[], nn.Module]) -> nn.Module:
    """See `engines.programs.MakeForm`."""
    del program
    architecture: Any = spec.vae
    return channels_last_on_cpu(UpscalerForm(load(), architecture))


def load_upscaler(spec: ModelSpec, *, device: str = "cpu", dtype: str = "float32") -> nn.Module:
    """Load an upscaler, for inference.

    Args:
        spec: from `upscalers.find_upscaler`.
        device: a torch device.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        A module from frames (n, 3, height, width) in 0 to 1 to larger ones, float32, which has the spec as
        `tandem_spec`.

    Raises:
        ModelError: if it cannot be loaded.
    """
    part = ComponentPlan(backend=PYTORCH, device=device, dtype=dtype, weights_bytes=0, reasons=())
    form: Any = make_form(spec, UPSCALER, lambda: load_module(spec, UPSCALER, part)).eval()
    form.tandem_spec = spec
    return form
