"""Quantized parameters as plain tensors and text, to store them without pickle, and back, bit for bit."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.models.quantization import BNB_4BIT, BNB_8BIT, FP8, diffusers_config
from runtime.upstream.diffusers import use_bitsandbytes_layers

# The names under which torchao and Tandem flatten one parameter.
_LAYER, _PARAMETER = "layer", "weight"
_FP8_PREFIX = f"{_LAYER}._{_PARAMETER}_"
_VALUES, _SCALES = "values", "scales"


def flatten(parameter: Any, kind: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of which a quantized parameter consists, by name, and a text with what else it consists of.

    Args:
        parameter: quantized, before its layer is first called: bitsandbytes moves parts of it then.
        kind: of its quantization.
    """
    if kind == FP8:
        from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder

        # Not `flatten_tensor_state_dict`, which copies every tensor on the device.
        names = (*parameter.tensor_data_names, *getattr(parameter, "optional_tensor_data_names", ()))
        tensors = {name: getattr(parameter, name) for name in names if getattr(parameter, name) is not None}
        return tensors, json.dumps(parameter, cls=TensorSubclassAttributeJSONEncoder)
    if kind == BNB_4BIT:
        return {_VALUES: parameter.data, **parameter.quant_state.as_dict(packed=True)}, ""
    return {_VALUES: parameter.data, _SCALES: parameter.SCB}, ""


def unflatten(tensors: Mapping[str, torch.Tensor], text: str, kind: str, layer: Any) -> Any:
    """Return the parameter that `flatten` returned tensors and text of; they may be on another device now.

    Args:
        layer: the module that it is for, see `prepare`.

    Raises:
        Exception: of any type, if tensors and text do not match.
    """
    if kind == FP8:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        name = f"{_LAYER}.{_PARAMETER}"
        named = {f"{_FP8_PREFIX}{key}": tensor for key, tensor in tensors.items()}
        parameters, _ = unflatten_tensor_state_dict(named, {name: text, "tensor_names": json.dumps([name])})
        return torch.nn.Parameter(parameters[name], requires_grad=False)
    import bitsandbytes

    values = tensors[_VALUES]
    if kind == BNB_4BIT:
        rest = {name: tensor for name, tensor in tensors.items() if name != _VALUES}
        return bitsandbytes.nn.Params4bit.from_prequantized(values, rest, device=values.device, module=layer)
    return bitsandbytes.nn.Int8Params(values, requires_grad=False, CB=values, SCB=tensors[_SCALES])


def prepare(module: Any, kind: str, dtype: torch.dtype, quantized: Sequence[str]) -> None:
    """Replace layers of a module without weights by those that hold quantized parameters.

    Args:
        dtype: in which they compute.
        quantized: names of the layers' parameters.
    """
    if kind not in {BNB_4BIT, BNB_8BIT}:
        return
    layers = {name.rpartition(".")[0] for name in quantized}
    unquantized = [
        name for name, child in module.named_modules() if isinstance(child, torch.nn.Linear) and name not in layers
    ]
    use_bitsandbytes_layers(module, unquantized, diffusers_config(kind, dtype, unquantized))
