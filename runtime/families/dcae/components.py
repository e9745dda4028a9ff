"""Loading of decoders of single frames, and their exportable form."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from safetensors import safe_open
from torch import nn

from runtime.core import settings
from runtime.core.plan import ComponentPlan
from runtime.families.dcae.owl_programs import decoder_of
from runtime.families.dcae.programs import FrameDecoderForm
from runtime.families.dcae.spec import AUTOENCODER_DC, PREFIX, read_architecture
from runtime.models.catalogue import find_decoder
from runtime.models.folder import read_config, weight_files
from runtime.models.spec import FRAME_DECODER, ModelSpec
from runtime.models.weights import load_module


class FrameDecoder:
    """Loads a decoder from its folder, with the interface of diffusers' models."""

    @classmethod
    def from_pretrained(
        cls, folder: str, *, torch_dtype: torch.dtype, device_map: Mapping[str, str] | None = None, **_: Any
    ) -> tuple[nn.Module, dict[str, list[str]]]:
        """Load the decoder's weights, without those of the encoder.

        Args:
            folder: with `config.json` and safetensors files.
            torch_dtype: of the weights.
            device_map: {"": device}; by default the CPU.

        Returns:
            The decoder, and the names of missing and mismatched weights.

        Raises:
            ModelError: if a file is missing or damaged.
            ValueError: if the configuration is invalid.
        """
        directory = Path(folder)
        config = read_config(directory / "config.json")
        device = (device_map or {}).get("", "cpu")
        state = _decoder_state(directory, device)
        spec = read_architecture(config)
        if spec.kind == AUTOENCODER_DC:
            with torch.device("meta"):
                module: nn.Module = AutoencoderDC.from_config(config).decoder
        else:
            module, state = decoder_of(spec, state)
        module_state = module.state_dict()
        # The counts of batch norms are whole numbers.
        fits = {
            name: tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
            if name in module_state
        }
        missing = [name for name in module_state if name not in fits]
        mismatched = [name for name, tensor in fits.items() if tensor.shape != module_state[name].shape]
        if not missing and not mismatched:
            module.load_state_dict(fits, assign=True)
        return module, {"missing_keys": missing, "mismatched_keys": mismatched}


def _decoder_state(directory: Path, device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a decoder: those of the folder with its prefix, or all, if none has it."""
    state: dict[str, torch.Tensor] = {}
    names: list[str] = []
    for path in weight_files(directory):
        with safe_open(path, framework="pt", device=device) as file:
            names += file.keys()
    decoder_names = [name for name in names if name.startswith(PREFIX)] or names
    for path in weight_files(directory):
        with safe_open(path, framework="pt", device=device) as file:
            for name in set(decoder_names).intersection(file.keys()):
                state[name.removeprefix(PREFIX)] = file.get_tensor(name)
    return state


MODULES: Mapping[str, Any] = {FRAME_DECODER: FrameDecoder}


def make_form(spec: ModelSpec, program: str, load: Callable[[], nn.Module]) -> nn.Module:
    """See `engines.programs.MakeForm`."""
    del spec, program
    return FrameDecoderForm(load())


def load_decoder(model: str, *, device: str = "cpu", dtype: str = "float32") -> nn.Module:
    """Load a decoder of single frames, for inference.

    Args:
        model: a name from `models list`, or a folder.
        device: a torch device.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        A module from latents (frames, channels, height, width) to frames (frames, channels, height, width), which has
        the model's spec as `tandem_spec`.

    Raises:
        ModelError: if it does not exist, is no decoder of single frames, or cannot be loaded.
    """
    spec = find_decoder(model, settings.load().weights_dir)
    part = ComponentPlan(backend="pytorch", device=device, dtype=dtype, weights_bytes=0, reasons=())
    module: Any = load_module(spec, FRAME_DECODER, part)
    module.tandem_spec = spec
    return module
