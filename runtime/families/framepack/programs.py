"""Exportable form of FramePack's image encoder, see `engines.programs`. Its text encoders are HunyuanVideo's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


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
        for layer in self.layers:
            x = x + self._attend(layer.self_attn, layer.layer_norm1(x))
            x = x + layer.mlp(layer.layer_norm2(x))
        out: torch.Tensor = self.norm(x).float()
        return out

    def _attend(self, attention: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).view(1, x.shape[1], self._heads, -1).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out: torch.Tensor = attention.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out
