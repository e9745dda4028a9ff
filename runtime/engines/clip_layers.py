"""The layers of CLIP and SigLIP in transformers, as families export them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F


def run_layers(layers: Iterable[Any], x: torch.Tensor, heads: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the hidden states after the layers, like `x`, (1, tokens, width).

    Args:
        bias: added to the logits of attention.
    """
    for layer in layers:
        attention, y = layer.self_attn, layer.layer_norm1(x)
        q, k, v = (
            project(y).view(1, y.shape[1], heads, -1).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        x = x + attention.out_proj(y)
        x = x + layer.mlp(layer.layer_norm2(x))
    return x
