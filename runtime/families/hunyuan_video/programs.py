"""Exportable forms of HunyuanVideo's text encoders, see `engines.programs`; FramePack's are the same.

Prompts are padded at the end. In both models a token attends to earlier ones only, so padding changes no other token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.engines.clip_layers import run_layers


class LlamaForm(nn.Module):
    """A `conditioning.ShortLlama` for texts of one length.

    Args:
        module: the encoder; its parameters become this form's.
        length: tokens of every text, padding included.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layers: Any

    def __init__(self, module: Any, length: int) -> None:
        super().__init__()
        self.vocabulary: int = module.config.vocab_size
        self._length = length
        self.embed_tokens = module.embed_tokens
        self.layers = module.layers
        weight = module.embed_tokens.weight
        positions = torch.arange(length, device=weight.device)[None]
        cos, sin = module.rotary_emb(weight[:1].float(), positions)
        self.register_buffer("cos", cos.detach())
        self.register_buffer("sin", sin.detach())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, length, width), float32, zero in the padding; both inputs are (1, length) int64."""
        x = F.embedding(input_ids, self.embed_tokens.weight)
        bias = _bias(attention_mask, self._length, x.dtype)
        for layer in self.layers:
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), bias)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x.float() * attention_mask.unsqueeze(-1).float()

    def _attend(self, attention: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).view(1, self._length, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = self._rotated(q), self._rotated(k)
        # Several heads of queries share one of keys and values.
        k, v = (part.repeat_interleave(attention.num_key_value_groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        out: torch.Tensor = attention.o_proj(y)
        return out

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate (1, heads, length, head width) by the tokens' positions, in float32."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        return (torch.cat([a, b], dim=-1) * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class ClipTextForm(nn.Module):
    """A `transformers.CLIPTextModel` for texts of one length, with the embeddings of all tokens.

    Args:
        module: the encoder; its parameters become this form's.
        length: tokens of every text, padding included.
    """

    layers: Any

    def __init__(self, module: Any, length: int) -> None:
        super().__init__()
        self.vocabulary: int = module.config.vocab_size
        self._length = length
        self._heads: int = module.config.num_attention_heads
        self.token_embedding = module.embeddings.token_embedding
        self.position_embedding = module.embeddings.position_embedding
        self.layers = module.encoder.layers
        self.final_layer_norm = module.final_layer_norm

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, length, width), float32, zero in the padding; both inputs are (1, length) int64."""
        x = F.embedding(input_ids, self.token_embedding.weight)
        x = x + self.position_embedding.weight[: self._length].unsqueeze(0)
        x = run_layers(self.layers, x, self._heads, _bias(attention_mask, self._length, x.dtype))
        return self.final_layer_norm(x).float() * attention_mask.unsqueeze(-1).float()


def _bias(attention_mask: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what hides later tokens and padding from a token, (1, 1, length, length)."""
    position = torch.arange(length, device=attention_mask.device)
    later = position[None, :] > position[:, None]
    unseen = later[None, None] | (attention_mask == 0)[:, None, None, :]
    return torch.zeros_like(unseen, dtype=dtype).masked_fill(unseen, torch.finfo(dtype).min)
