"""Models of decoders that exist as modules only: stored as folders, from which child processes build engines.

A caller may have loaded its decoder with diffusers or with OWL's own code. Its architecture is read from the module.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from safetensors.torch import save_file
from torch import nn

from runtime.core.locks import scratch_folder
from runtime.families.dcae.owl_programs import decoder_of
from runtime.families.dcae.spec import AUTOENCODER_DC, OWL, PREFIX, read_architecture
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec

# Of the name of a stored decoder's folder, before the digest.
_PREFIX = "decoder-"
_ACTIVATIONS = {"ReLU": "relu", "SiLU": "silu", "ReLU6": "relu6", "GELU": "gelu"}
# Of `ResNetConfig` in owl_vaes.
_OWL_FIELDS = (
    "sample_size",
    "channels",
    "latent_channels",
    "ch_0",
    "ch_max",
    "decoder_blocks_per_stage",
)


def decoder_in(module: nn.Module) -> nn.Module:
    """Return the decoder of an autoencoder; a decoder itself is returned as it is."""
    return module.decoder if isinstance(module, AutoencoderDC) else module


def latent_channels(module: nn.Module) -> int | None:
    """Return the channels of a decoder's latents; `None` for a module that `spec_of` does not know."""
    spec: ModelSpec | None = getattr(module, "tandem_spec", None)
    if spec is not None:
        return spec.vae.z_dim
    config = _config_of(module)
    return None if config is None else read_architecture(config).z_dim


def spec_of(module: nn.Module, weights_dir: Path) -> ModelSpec | None:
    """Return the model of a decoder; one that was not loaded by `load_decoder` is stored in `weights_dir` first.

    Args:
        module: a decoder from `components.load_decoder`, a diffusers `AutoencoderDC` or its decoder, or OWL's decoder.

    Returns:
        `None` for another module.

    Raises:
        OSError: if it cannot be stored.
        ModelError: if what was stored cannot be read.
    """
    spec: ModelSpec | None = getattr(module, "tandem_spec", None)
    if spec is not None:
        return spec
    config = _config_of(module)
    if config is None:
        return None
    state = {name: tensor.detach().contiguous() for name, tensor in decoder_in(module).state_dict().items()}
    name = f"{_PREFIX}{_digest(config, state)}"
    folder = weights_dir / name
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder.parent, ".decoder-") as scratch:
            draft = scratch / name
            draft.mkdir()
            tensors = {f"{PREFIX}{name}": tensor.cpu() for name, tensor in state.items()}
            save_file(tensors, draft / "diffusion_pytorch_model.safetensors", {"format": "pt"})
            (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
            if not folder.exists():
                draft.rename(folder)
    return read_spec(folder, name)


def _digest(config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> str:
    """Return the first digits of a SHA-256 of an architecture and weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _config_of(module: nn.Module) -> dict[str, Any] | None:
    """Return a configuration from which the same decoder is made; `None` if the module is of another kind."""
    try:
        if isinstance(module, AutoencoderDC):
            config = {"_class_name": AUTOENCODER_DC, **_plain(module.config)}
        elif hasattr(module, "up_blocks"):
            config = {"_class_name": AUTOENCODER_DC, **_inferred(module)}
        else:
            config = _owl_config(module)
        spec = read_architecture(config)
        state = decoder_in(module).state_dict()
        if spec.kind == AUTOENCODER_DC:
            with torch.device("meta"):
                decoder: nn.Module = AutoencoderDC.from_config(config).decoder
        else:
            decoder, state = decoder_of(spec, state)
    except Exception:  # of a module of another kind, anything may be missing
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    return config if shapes == {name: tuple(tensor.shape) for name, tensor in state.items()} else None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in config.items() if not k.startswith("_")}))
    return plain


def _inferred(decoder: Any) -> dict[str, Any]:
    """Return the configuration of the decoder of an `AutoencoderDC`, whose module does not keep it."""
    widths: list[int] = []
    layers: list[int] = []
    kinds, norms, activations, scales = [], [], [], []
    interpolates, head_dim = False, 32
    for number, level in enumerate(decoder.up_blocks):
        blocks = [block for block in level if not hasattr(block, "repeats")]
        ups = [block for block in level if hasattr(block, "repeats")]
        interpolates |= any(up.interpolate for up in ups)
        residual = [block for block in blocks if hasattr(block, "conv1")]
        attention = [block for block in blocks if hasattr(block, "attn")]
        if ups:
            widths.append(ups[0].conv.out_channels // (1 if ups[0].interpolate else 4))
        elif number == len(decoder.up_blocks) - 1:
            widths.append(decoder.conv_in.out_channels)
        else:  # a level without blocks has no channels of its own: its width is not used
            widths.append(1)
        layers.append(len(blocks))
        kinds.append("EfficientViTBlock" if attention else "ResBlock")
        norms.append(residual[0].norm_type if residual else attention[0].attn.norm_type if attention else "rms_norm")
        activations.append(_ACTIVATIONS[type(residual[0].nonlinearity).__name__] if residual else "silu")
        kernels = [scale.proj_in.kernel_size[0] for scale in attention[0].attn.to_qkv_multiscale] if attention else []
        scales.append(kernels)
        head_dim = attention[0].attn.attention_head_dim if attention else head_dim
    last = decoder.conv_out
    if hasattr(last, "repeats"):
        interpolates |= last.interpolate
        channels = last.conv.out_channels // (1 if last.interpolate else 4)
    else:
        channels = last.out_channels
    return {
        "in_channels": channels,
        "latent_channels": decoder.conv_in.in_channels,
        "attention_head_dim": head_dim,
        "decoder_block_types": kinds,
        "decoder_block_out_channels": widths,
        "decoder_layers_per_block": layers,
        "decoder_qkv_multiscales": scales,
        "decoder_norm_types": norms,
        "decoder_act_fns": activations,
        "decoder_in_shortcut": decoder.in_shortcut,
        "decoder_conv_act_fn": _ACTIVATIONS[type(decoder.conv_act).__name__],
        "upsample_block_type": "interpolate" if interpolates else "pixel_shuffle",
    }


def _owl_config(module: Any) -> dict[str, Any]:
    """Return the configuration of OWL's decoder, which keeps it."""
    config: dict[str, Any] = {"model_id": OWL}
    for name in _OWL_FIELDS:
        value = getattr(module.config, name)
        config[name] = list(value) if isinstance(value, list | tuple) else value
    return config
