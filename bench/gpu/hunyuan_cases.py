"""Forward passes of HunyuanVideo's and FramePack's transformers with random weights, by diffusers and by Tandem.

Weights are such that values stay near those of a trained model: each layer keeps the size of its input, and what a
block adds is a fraction of what it is added to. Then rounding errors stay small, and errors of variants can be told
apart. Timesteps and guidance scales are numbers that bfloat16 has: diffusers rounds them to the transformer's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel, HunyuanVideoTransformer3DModel
from torch import nn

from runtime.execution.components import SectionInputs
from runtime.families.framepack.transformer import PyTorchSectionDenoiser
from runtime.families.hunyuan_video.transformer import PyTorchDenoiser
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models
from runtime.models.sections import LATENT_WINDOW, Section

FRAMEPACK = published_models("framepack")
HUNYUAN_VIDEO = published_models("hunyuan_video")

# Latent frames, height and width of each size.
SIZES: dict[str, dict[str, tuple[int, int, int]]] = {
    "hunyuan-video": {"480p": (33, 68, 120), "720p": (33, 90, 160), "tiny": (3, 6, 8)},
    "framepack": {
        "480x832": (LATENT_WINDOW, 60, 104),
        "640x640": (LATENT_WINDOW, 80, 80),
        "tiny": (LATENT_WINDOW, 4, 6),
    },
}
_KINDS: dict[str, tuple[Any, Any]] = {
    "hunyuan-video": (HunyuanVideoTransformer3DModel, HUNYUAN_VIDEO),
    "framepack": (HunyuanVideoFramepackTransformer3DModel, FRAMEPACK),
}
_TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}
# Tokens of the text, and as many as diffusers pads it to.
_TEXT, _PADDED = 40, 256
_TIME, _GUIDANCE = 500.0, 8.0
# The last layers of what a block adds to its input.
_ADDED = ("to_out.0.weight", "to_add_out.weight", "ff.net.2.weight", "ff_context.net.2.weight")
_ADDED_SHARE = 0.3


def make(model: str, *, tiny: bool) -> Any:
    """Return a transformer; its weights are to be set."""
    kind, known = _KINDS[model]
    config = dict(known[0].configs["transformer"]) | (_TINY if tiny else {})
    if tiny and "image_proj_dim" in config:
        config["image_proj_dim"] = 32
    return kind(**config)


def spread(name: str, parameter: torch.Tensor) -> float:
    """Return the standard deviation of a random weight."""
    if parameter.dim() < 2:
        return 0.02
    added = name.endswith(_ADDED) or ("single_transformer_blocks" in name and name.endswith("proj_out.weight"))
    return float((_ADDED_SHARE if added else 1.0) * parameter[0].numel() ** -0.5)


@dataclass(frozen=True)
class Case:
    """A forward pass of one size.

    Attributes:
        operations: of a pass, two per multiply-add; 0 for a tiny model.
        by_diffusers: runs diffusers' `forward` of a module, which may have been changed by `install`.
        by_tandem: returns the forward pass of a denoiser of the module.
    """

    size: str
    grid: tuple[int, int, int]
    operations: float
    by_diffusers: Callable[[Any], torch.Tensor]
    by_tandem: Callable[[Any], Callable[[], torch.Tensor]]


def denoiser_of(model: str, module: Any) -> Any:
    """Return Tandem's denoiser of a module."""
    return (PyTorchDenoiser if model == "hunyuan-video" else PyTorchSectionDenoiser)(module)


def case(model: str, size: str, config: Any, device: str, *, tiny: bool) -> Case:
    """Return a case with seeded inputs."""
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, device=device, generator=generator)

    grid = SIZES[model][size]
    latents = noise(config.in_channels, *grid)
    text = noise(1 + _TEXT, config.text_embed_dim).to(torch.bfloat16)
    spec = look_up(_KINDS[model][1][0].name, Path("none"))
    tokens, context = grid[0] * (grid[1] // 2) * (grid[2] // 2), _TEXT
    if model == "hunyuan-video":
        times = torch.tensor([_TIME, 1000 * _GUIDANCE], device=device)
        by_diffusers = partial(_video, latents=latents, times=times, text=text)

        def by_tandem(denoiser: Any) -> Callable[[], torch.Tensor]:
            return lambda: denoiser(latents, times, text)
    else:
        assert spec.image_input is not None
        # Not the first section, so that it sees frames made before.
        section = spec.sections_of(4 * 4 * LATENT_WINDOW + 1)[2]
        context += spec.image_input.tokens
        inputs = SectionInputs(
            section=section,
            clean=noise(config.in_channels, len(section.clean), *grid[1:]),
            history_2x=noise(config.in_channels, len(section.history_2x), *grid[1:]),
            history_4x=noise(config.in_channels, len(section.history_4x), *grid[1:]),
            image_embeds=noise(spec.image_input.tokens, config.image_proj_dim),
            guidance_scale=_GUIDANCE,
        )
        by_diffusers = partial(_section, latents=latents, text=text, inputs=inputs)

        def by_tandem(denoiser: Any) -> Callable[[], torch.Tensor]:
            denoiser.see(inputs)
            time = torch.tensor(_TIME, device=device)
            return lambda: denoiser(latents, time, text)

    operations = 0.0 if tiny else spec.transformer.forward_flops(tokens, context)
    return Case(size, grid, operations, by_diffusers, by_tandem)


def _as_loaded(module: Any) -> None:
    """Undo `install`."""
    for one in (module, *module.transformer_blocks, *module.single_transformer_blocks):
        for name in ("forward", "step", "is_wide"):
            one.__dict__.pop(name, None)


def _padded(module: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the text padded as diffusers' pipelines pad it, the mask, and CLIP's embedding."""
    dtype, tokens = module.x_embedder.proj.weight.dtype, text[:, 1:]
    padded = nn.functional.pad(tokens, (0, 0, 0, _PADDED - tokens.shape[1])).to(dtype)
    mask = (torch.arange(_PADDED, device=text.device) < tokens.shape[1])[None].to(dtype)
    return padded, mask, text[:, 0, : module.config.pooled_projection_dim].to(dtype)


def _video(module: Any, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    _as_loaded(module)
    words, mask, pooled = _padded(module, text)
    out: torch.Tensor = module(
        latents.to(words.dtype), times[:1], words, mask, pooled, guidance=times[1:].to(words.dtype), return_dict=False
    )[0]
    return out


def _section(module: Any, latents: torch.Tensor, text: torch.Tensor, inputs: SectionInputs) -> torch.Tensor:
    _as_loaded(module)
    words, mask, pooled = _padded(module, text)
    dtype, section = words.dtype, inputs.section
    out: torch.Tensor = module(
        latents.to(dtype),
        torch.tensor([_TIME], device=latents.device),
        words,
        mask,
        pooled,
        inputs.image_embeds.to(dtype),
        torch.tensor(section.latents),
        guidance=torch.tensor([inputs.guidance_scale], dtype=dtype, device=latents.device) * 1000.0,
        **_history(section, inputs, dtype),
        return_dict=False,
    )[0]
    return out


def _history(section: Section, inputs: SectionInputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return diffusers' arguments for the frames that a section sees."""
    return {
        "latents_clean": inputs.clean.to(dtype),
        "indices_latents_clean": torch.tensor(section.clean),
        "latents_history_2x": inputs.history_2x.to(dtype),
        "indices_latents_history_2x": torch.tensor(section.history_2x),
        "latents_history_4x": inputs.history_4x.to(dtype),
        "indices_latents_history_4x": torch.tensor(section.history_4x),
    }
