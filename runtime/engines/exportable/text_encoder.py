"""UMT5's encoder in operations that every exporter has: the buckets of relative positions are a constant."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class TextEncoderForm(nn.Module):
    """A `transformers.UMT5EncoderModel` with the padding's embeddings zeroed, as Wan's pipeline wants them.

    Args:
        module: the encoder; its parameters become this form's.
        length: tokens of every prompt, padding included.
    """

    buckets: torch.Tensor
    block: Any

    def __init__(self, module: Any, length: int) -> None:
        super().__init__()
        stack = module.encoder
        self.vocabulary: int = module.config.vocab_size
        self.embed_tokens = stack.embed_tokens
        self.block = stack.block
        self.final_layer_norm = stack.final_layer_norm
        position = torch.arange(length, device=stack.embed_tokens.weight.device)
        first = stack.block[0].layer[0].SelfAttention
        self.register_buffer("buckets", first._relative_position_bucket(position[None, :] - position[:, None]))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, length, width), float32, zero in the padding; both inputs are (1, length) int64."""
        x = F.embedding(input_ids, self.embed_tokens.weight)
        seen = attention_mask.bool()[:, None, None, :]
        for block in self.block:
            attention, feed_forward = block.layer
            x = x + _attend(attention.SelfAttention, _norm(attention.layer_norm, x), seen, self.buckets)
            dense = feed_forward.DenseReluDense
            y = _norm(feed_forward.layer_norm, x)
            y = dense.act(dense.wi_0(y)) * dense.wi_1(y) if hasattr(dense, "wi_0") else dense.act(dense.wi(y))
            x = x + dense.wo(y.to(dense.wo.weight.dtype))
        return _norm(self.final_layer_norm, x).float() * attention_mask.unsqueeze(-1).float()


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    scaled: torch.Tensor = norm.weight * y.to(norm.weight.dtype)
    return scaled


def _attend(attention: Any, x: torch.Tensor, seen: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
    """Attend with a bias per relative position; UMT5 does not scale the products."""
    q, k, v = (
        project(x).view(1, x.shape[1], attention.n_heads, -1).transpose(1, 2)
        for project in (attention.q, attention.k, attention.v)
    )
    bias = F.embedding(buckets, attention.relative_attention_bias.weight).permute(2, 0, 1).unsqueeze(0)
    bias = bias.to(q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    out: torch.Tensor = attention.o(y.transpose(1, 2).flatten(2))
    return out
