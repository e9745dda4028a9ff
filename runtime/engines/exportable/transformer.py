"""Wan's transformer in operations that every exporter has: no scatter, no fused RMSNorm, one timestep for all."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class TransformerForm(nn.Module):
    """A `diffusers.WanTransformer3DModel` whose edges are float32, whatever it computes in.

    Between the blocks values stay in float32: diffusers rounds them to the model's type after every step, which
    costs accuracy and gains nothing. A text-to-video clip has one timestep for all its tokens, so TI2V-5B's timestep
    per token is one row here too.

    Args:
        module: the transformer; its parameters become this form's.
    """

    patch_embedding: nn.Conv3d
    scale_shift_table: torch.Tensor
    condition_embedder: Any
    blocks: Any

    def __init__(self, module: Any) -> None:
        super().__init__()
        config = module.config
        self._patch = tuple(config.patch_size)
        self._heads = config.num_attention_heads
        self._channels_out = config.out_channels or config.in_channels
        self._sinusoids = config.freq_dim
        self.patch_embedding = module.patch_embedding
        self.condition_embedder = module.condition_embedder
        self.blocks = module.blocks
        self.proj_out = module.proj_out
        self.scale_shift_table = module.scale_shift_table
        self._eps = config.eps
        rope = module.rope
        sizes = [rope.t_dim, rope.h_dim, rope.w_dim]
        # One column per pair of channels: diffusers holds each twice.
        for axis, cos, sin in zip(
            "thw", rope.freqs_cos.split(sizes, dim=1), rope.freqs_sin.split(sizes, dim=1), strict=True
        ):
            self.register_buffer(f"cos_{axis}", cos[:, 0::2].contiguous())
            self.register_buffer(f"sin_{axis}", sin[:, 1::2].contiguous())
        for block in self.blocks:
            _pair_halves(block.attn1, self._heads)

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text_embeds: torch.Tensor,
        text_padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the velocity, float32, shaped like `latents` (1, channels, frames, height, width).

        Args:
            timestep: (1,), 0 to 1000.
            text_embeds: (1, text tokens, text width).
            text_padding: (1,), how many further tokens of zeros the text has, which were cut off.
        """
        dtype = self.patch_embedding.weight.dtype
        _, c, frames, height, width = latents.shape
        pt, ph, pw = self._patch
        grid = (frames // pt, height // ph, width // pw)
        x = latents.to(dtype).view(c, grid[0], pt, grid[1], ph, grid[2], pw)
        x = x.permute(1, 3, 5, 0, 2, 4, 6).reshape(1, grid[0] * grid[1] * grid[2], c * pt * ph * pw)
        x = F.linear(x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias).float()
        rotation = self._rotation(grid)
        embedder = self.condition_embedder
        time = embedder.time_embedder(self._sinusoid(timestep).to(embedder.time_embedder.linear_1.weight.dtype))
        time = time.to(dtype)
        modulation = embedder.time_proj(F.silu(time)).view(1, 6, -1)
        weights = None
        if text_padding is not None:
            # One more token of zeros stands for all that were cut off: a key that counts n times has log n added.
            text_embeds = F.pad(text_embeds, (0, 0, 0, 1))
            once = torch.zeros_like(text_embeds[:, 1:, 0])
            weights = torch.cat([once, text_padding.log().view(1, 1)], dim=1).view(1, 1, 1, -1).to(dtype)
        text = embedder.text_embedder(text_embeds.to(dtype))
        for block in self.blocks:
            x = self._block(block, x, (text, weights), modulation, rotation)
        shift, scale = (self.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
        out: torch.Tensor = self.proj_out((self._layer_norm(x) * (1 + scale) + shift).to(dtype)).float()
        out = out.view(*grid, pt, ph, pw, self._channels_out)
        return out.permute(6, 0, 3, 1, 4, 2, 5).reshape(1, self._channels_out, frames, height, width)

    def _sinusoid(self, timestep: torch.Tensor) -> torch.Tensor:
        half = self._sinusoids // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timestep.device) / half
        angles = timestep[:, None].float() * torch.exp(exponent)[None, :]
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    def _rotation(self, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each (1, tokens, 1, head width / 2)."""
        both = []
        for name in ("cos", "sin"):
            parts = []
            for axis, (letter, size) in enumerate(zip("thw", grid, strict=True)):
                table = getattr(self, f"{name}_{letter}")[:size]
                shape = [1, 1, 1, table.shape[1]]
                shape[axis] = size
                parts.append(table.view(shape).expand(*grid, table.shape[1]))
            joined = torch.cat(parts, dim=-1)
            both.append(joined.reshape(1, grid[0] * grid[1] * grid[2], 1, joined.shape[-1]))
        return both[0], both[1]

    def _block(
        self,
        block: Any,
        x: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor | None],
        modulation: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return `x`, (1, tokens, width), float32, after one block."""
        dtype = text[0].dtype
        table = block.scale_shift_table + modulation.float()
        shift, scale, gate, ff_shift, ff_scale, ff_gate = table.chunk(6, dim=1)
        normed = (self._layer_norm(x) * (1 + scale) + shift).to(dtype)
        x = x + self._attend(block.attn1, normed, (normed, None), rotation).float() * gate
        norm = block.norm2
        if isinstance(norm, nn.Identity):
            normed = x.to(dtype)
        else:
            normed = F.layer_norm(x, (x.shape[-1],), norm.weight.float(), norm.bias.float(), norm.eps).to(dtype)
        x = x + self._attend(block.attn2, normed, text, None).float()
        normed = (self._layer_norm(x) * (1 + ff_scale) + ff_shift).to(dtype)
        expand, _, contract = block.ffn.net
        out: torch.Tensor = contract(F.gelu(expand.proj(normed), approximate="tanh")).float()
        added: torch.Tensor = out * ff_gate
        return x + added

    def _attend(
        self,
        attention: Any,
        x: torch.Tensor,
        attended: tuple[torch.Tensor, torch.Tensor | None],
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Attend to a sequence, whose tokens may have something added to their logits."""
        source, weights = attended
        q = self._split(_rms_norm(attention.norm_q, attention.to_q(x)))
        k = self._split(_rms_norm(attention.norm_k, attention.to_k(source)))
        v = self._split(attention.to_v(source))
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=weights)
        out: torch.Tensor = attention.to_out[0](y.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Give each head its own axis: (1, tokens, heads, head width)."""
        return x.view(1, x.shape[1], self._heads, -1)

    def _layer_norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), eps=self._eps)


def _rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise over all heads at once, in float32: `torch.nn.RMSNorm`, spelt out."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    scaled: torch.Tensor = (wide * norm.weight.float()).to(x.dtype)
    return scaled


def _pair_halves(attention: Any, heads: int) -> None:
    """Reorder the channels of queries and keys, each head's even ones before its odd ones.

    Wan rotates neighbouring channels in pairs, which takes a copy of every other value; halves of a head are read as
    they lie. What is attended to depends on products of queries and keys alone, so on no common order.
    """
    channels = attention.to_q.weight.shape[0]
    order = torch.arange(channels, device=attention.to_q.weight.device).view(heads, -1, 2).transpose(1, 2).flatten()
    for module in (attention.to_q, attention.to_k, attention.norm_q, attention.norm_k):
        for parameter in module.parameters():
            parameter.data = parameter.data[order]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of channels by its token's angles; `x` is (1, tokens, heads, head width)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
