"""Transformers and VAEs of a model's architecture with random weights, created on the device; no files are read.

Time and memory do not depend on the values. Rounding errors do: the weights keep the variance of activations, as
trained weights do, but the errors are those of the random network.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from runtime.core.plan import ComponentPlan
from runtime.models import quantization
from runtime.models.catalogue import known_models
from runtime.models.spec import ModelSpec, is_transformer
from runtime.models.stored_modules import module_class
from runtime.upstream.diffusers import kept_in_float32

_BIAS = 0.02


def random_spec(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return a model of the same architecture whose folder has configurations only.

    Args:
        folder: where they are written; empty.

    Raises:
        ValueError: if the architecture has no configuration, neither in the model's folder nor in Tandem.
    """
    spec = spec.for_text()
    for name in spec.component_names:
        (folder / name).mkdir(parents=True)
        config = {} if name == "text_encoder" else dict(_config(spec, name))
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return replace(spec, directory=folder, is_downloaded=True)


def random_module(spec: ModelSpec, name: str, part: ComponentPlan, device: str | None = None) -> torch.nn.Module:
    """Create one component as `models.weights.load_module` loads it; equal each time on the same device.

    Args:
        spec: from `random_spec`.
        device: the weights' device; the component's own by default.

    Raises:
        ValueError: for a quantization that needs files.
    """
    config = json.loads((spec.directory / name / "config.json").read_text(encoding="utf-8"))
    kind: Any = module_class(spec, name)
    with torch.device("meta"):
        made = kind.from_config(config)
    target, dtype = device or part.device, getattr(torch, part.dtype)
    if part.quantization != quantization.NONE and is_transformer(name):
        _check_quantization(part)
        dtype = getattr(torch, quantization.compute_dtype(part, bfloat16=True))
    _fill(made, torch.device(target), dtype, zlib.crc32(name.encode()))
    if is_transformer(name):
        # Position tables are computed, not loaded.
        made.rope = type(made.rope)(made.rope.attention_head_dim, made.rope.patch_size, made.rope.max_seq_len).to(
            target
        )
        if part.quantization != quantization.NONE:
            _quantize(made, part)
    return cast("torch.nn.Module", made.eval().requires_grad_(requires_grad=False))


def _config(spec: ModelSpec, name: str) -> Mapping[str, Any]:
    file = spec.directory / name / "config.json"
    if file.is_file():
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    known = next((model for model in known_models() if model.name == spec.name), None)
    if known is None:
        known_names = ", ".join(model.name for model in known_models())
        raise ValueError(
            f"The {name} of {spec.title} has no configuration; select {known_names}, or an installed model."
        )
    if is_transformer(name):
        return {**known.configs["transformer"], "rope_max_seq_len": spec.transformer.rope_max_seq_len}
    # The published values, one per channel, affect neither time nor memory.
    return {**known.configs["vae"], "latents_mean": [0.0] * spec.vae.z_dim, "latents_std": [1.0] * spec.vae.z_dim}


def _fill(module: torch.nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Set every weight, on its device and in the dtype that `from_pretrained` would give it."""
    generator = torch.Generator(device).manual_seed(seed)
    exact = kept_in_float32(module, dtype)
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            full = dtype == torch.float32 or exact & {*path.split("."), name}
            # Drawn in float32 for every dtype, so that a lower precision is the rounded higher one.
            values = torch.empty(parameter.shape, device=device, dtype=torch.float32)
            if name == "bias":
                values.normal_(0, _BIAS, generator=generator)
            elif name == "gamma" or "norm" in path.rpartition(".")[2]:
                values.fill_(1)
            else:
                inputs = values[0].numel() if name == "weight" else values.shape[-1]
                values.normal_(0, 1 / math.sqrt(inputs), generator=generator)
            if not full:
                values = values.to(dtype)
            owner._parameters[name] = torch.nn.Parameter(values, requires_grad=False)


def _check_quantization(part: ComponentPlan) -> None:
    if part.quantization != quantization.FP8:
        raise ValueError(
            f"{part.quantization} is quantized while files are read, and random weights have none; use fp8 or none."
        )


def _quantize(module: torch.nn.Module, part: ComponentPlan) -> None:
    """Quantize the linear layers that `from_pretrained` would quantize."""
    config = quantization.diffusers_config(part.quantization, torch.bfloat16)
    from torchao.quantization import quantize_

    kept = {*(config.modules_to_not_convert or ()), *kept_in_float32(module, torch.bfloat16)}

    def chosen(layer: torch.nn.Module, path: str) -> bool:
        return isinstance(layer, torch.nn.Linear) and not kept & set(path.split("."))

    quantize_(module, config.get_apply_tensor_subclass(), filter_fn=chosen)
    quantization.check_quantized(module, part.quantization, "transformer", "random weights")
