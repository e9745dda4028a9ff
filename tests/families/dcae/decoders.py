"""Tiny decoders of single frames with random weights, in their folders."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderDC
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

LATENT = (8, 3, 4)
DC: dict[str, Any] = {
    "latent_channels": 8,
    "encoder_block_out_channels": (8, 16, 32),
    "encoder_layers_per_block": (1, 1, 1),
    "encoder_qkv_multiscales": ((), (), ()),
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 2, 1),
    "decoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
    "decoder_qkv_multiscales": ((), (), (5,)),
    "attention_head_dim": 8,
    "scaling_factor": 0.5,
}
# As in the published f64c128: batch norms and ReLU in the large levels, none in the first, and no interpolation.
DC_BATCH_NORM: dict[str, Any] = DC | {
    "encoder_layers_per_block": (0, 1, 1),
    "decoder_layers_per_block": (0, 1, 1),
    "decoder_norm_types": ("batch_norm", "batch_norm", "rms_norm"),
    "decoder_act_fns": ("relu", "relu", "silu"),
    "decoder_qkv_multiscales": ((), (), ()),
    "upsample_block_type": "pixel_shuffle",
}
DC_INTERPOLATED: dict[str, Any] = DC | {"upsample_block_type": "interpolate", "decoder_block_types": "ResBlock"}
OWL: dict[str, Any] = {
    "model_id": "dcae",
    "sample_size": [64, 64],
    "channels": 4,
    "latent_channels": 8,
    "ch_0": 8,
    "ch_max": 16,
    "decoder_blocks_per_stage": [1, 2, 1],
}
OWL_LANDSCAPE = OWL | {"sample_size": [36, 64], "channels": 3}


def autoencoder(config: dict[str, Any], seed: int = 0) -> AutoencoderDC:
    """Return an autoencoder whose norms have weights and biases of their own."""
    torch.manual_seed(seed)
    model = AutoencoderDC(**config).eval().requires_grad_(False)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.rand_like(tensor))
    return model


def save_autoencoder(folder: Path, config: dict[str, Any] = DC, seed: int = 0) -> AutoencoderDC:
    """Save an autoencoder as diffusers does, and return it."""
    model = autoencoder(config, seed)
    model.save_pretrained(folder)
    return model


def conv(*sizes: Any, **options: Any) -> Any:
    """Return a convolution with normalized weights whose lengths are not those of its directions."""
    layer = weight_norm(nn.Conv2d(*sizes, **options))
    layer.parametrizations.weight.original0.data *= 0.5 + torch.rand_like(layer.parametrizations.weight.original0)
    return layer


class Reference(nn.Module):
    """OWL's decoder, written again from its description, with its names of modules and normalized weights."""

    def __init__(self, config: dict[str, Any], *, middle: bool = False) -> None:
        super().__init__()
        stages, smallest, largest = config["decoder_blocks_per_stage"], config["ch_0"], config["ch_max"]
        self.copies = largest // config["latent_channels"]
        self.conv_in = nn.ModuleDict({"proj": conv(config["latent_channels"], largest, 3, 1, 1)})
        self.blocks, self.residuals = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(stages))):
            own, below = (min(smallest * 2**power, largest) for power in (level, level + 1))
            up: Any = {} if own == below else {"proj": conv(below, own, 1, bias=False)}
            # Stages are listed from the latents to the frames.
            blocks = nn.ModuleList(residual_block(own) for _ in range(stages[len(stages) - 1 - level]))
            self.blocks.append(nn.ModuleDict({"up": nn.ModuleDict(up), "blocks": blocks}))
            self.residuals.append(nn.ModuleDict({"proj": conv(below, 4 * own, 3, 1, 1)}))
        self.middle_block: Any = None
        if middle:
            blocks = nn.ModuleList(residual_block(largest) for _ in range(stages[-1]))
            self.middle_block = nn.ModuleDict({"blocks": blocks})
        height, width = config["sample_size"]
        self.size = (height, width) if width != height else None
        last = conv(smallest, config["channels"], 3, 1, 1)
        self.conv_out = last if self.size is None else nn.ModuleDict({"proj": last})

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        modules: Any = self
        x = modules.conv_in["proj"](z)
        for channel in range(x.shape[1]):
            x[:, channel] = x[:, channel] + z[:, channel // self.copies] / self.copies**0.5
        if self.middle_block is not None:
            y = x
            for block in self.middle_block["blocks"]:
                y = y + residual(block, y)
            x = y + x
        for stage, shortcut in zip(modules.blocks, modules.residuals, strict=True):
            y = stage["up"]["proj"](x) if "proj" in stage["up"] else x
            y = nn.functional.interpolate(y, scale_factor=2, mode="bicubic")
            for block in stage["blocks"]:
                y = y + residual(block, y)
            x = y + nn.functional.pixel_shuffle(shortcut["proj"](x), 2)
        x = x * torch.sigmoid(x)
        if self.size is None:
            found: torch.Tensor = modules.conv_out(x)
            return found
        return nn.functional.interpolate(modules.conv_out["proj"](x), self.size, mode="bicubic")


def residual_block(channels: int) -> nn.ModuleDict:
    """Return the convolutions of a residual block: 16 channels a group."""
    inner = 2 * channels
    groups = max(inner // 16, 1)
    return nn.ModuleDict(
        {
            "conv1": conv(channels, inner, 1),
            "conv2": conv(inner, inner, 3, 1, 1, 1, groups),
            "conv3": conv(inner, channels, 1, bias=False),
        }
    )


def residual(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a residual block adds to its input."""
    for name in ("conv1", "conv2"):
        x = block[name](x)
        x = torch.where(x > 0, x, 0.01 * x)
    found: torch.Tensor = block["conv3"](x)
    return found


def save_owl(folder: Path, config: dict[str, Any] = OWL, *, middle: bool = False, prefix: str = "") -> Reference:
    """Save the reference's weights and a configuration, and return it."""
    torch.manual_seed(1)
    reference = Reference(config, middle=middle).eval().requires_grad_(False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {f"{prefix}{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    if prefix:  # of a whole autoencoder
        state["encoder.conv_in.weight"] = torch.zeros(1)
    save_file(state, folder / "model.safetensors")
    return reference


def latents(batch: int, frames: int, seed: int = 2) -> torch.Tensor:
    """Return latents [batch, frames, channels, height, width]."""
    return torch.randn(batch, frames, *LATENT, generator=torch.Generator().manual_seed(seed))
