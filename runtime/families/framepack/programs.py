"""Exportable form of FramePack's image encoder, see `engines.programs`. Its text encoders are HunyuanVideo's."""

from typing import Any

import torch
from torch import nn

from runtime.engines.clip_layers import run_layers


class ImageEncoderForm(nn.Module):
    """A `transformers.SiglipVisionModel` up to its last hidden states.

    Args:
        module: the encoder; its parameters become this form's.
    """

    layers: Any

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.side: int = module.config.image_size
        self._heads: int = module.config.num_attention_heads
        self.patch_embedding = module.embeddings.patch_embedding
        self.position_embedding = module.embeddings.position_embedding
        self.layers = module.encoder.layers
        self.norm = module.post_layernorm

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, tokens, width), float32; `pixels` are (1, 3, side, side), normalized."""
        x = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        x = x + self.position_embedding.weight.unsqueeze(0)
        out: torch.Tensor = self.norm(run_layers(self.layers, x, self._heads)).float()
        return out
