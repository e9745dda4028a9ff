"""Exportable forms of Wan's encoders and transformer: one module for each program of `engines.programs`.

Those of the VAE are in `vae_programs`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.engines.clip_layers import run_layers
from runtime.upstream.transformers import relative_position_buckets


class TextEncoderForm(nn.Module):
    """A `transformers.UMT5EncoderModel` with zero embeddings for padding, as in `WanPipeline`.

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
        self.register_buffer("buckets", relative_position_buckets(first, position[None, :] - position[:, None]))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, length, width), float32, zero in the padding; both inputs are (1, length) int64."""
        x = F.embedding(input_ids, self.embed_tokens.weight)
        token_mask = attention_mask.bool()[:, None, None, :]
        for block in self.block:
            attention, feed_forward = block.layer
            x = x + _attend_text(attention.SelfAttention, _t5_norm(attention.layer_norm, x), token_mask, self.buckets)
            dense = feed_forward.DenseReluDense
            y = _t5_norm(feed_forward.layer_norm, x)
            y = dense.act(dense.wi_0(y)) * dense.wi_1(y) if hasattr(dense, "wi_0") else dense.act(dense.wi(y))
            x = x + dense.wo(y.to(dense.wo.weight.dtype))
        return _t5_norm(self.final_layer_norm, x).float() * attention_mask.unsqueeze(-1).float()


def _t5_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    scaled: torch.Tensor = norm.weight * y.to(norm.weight.dtype)
    return scaled


def _attend_text(attention: Any, x: torch.Tensor, token_mask: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
    """Attend with a bias per relative position; UMT5 does not scale the products."""
    q, k, v = (
        project(x).view(1, x.shape[1], attention.n_heads, -1).transpose(1, 2)
        for project in (attention.q, attention.k, attention.v)
    )
    bias = F.embedding(buckets, attention.relative_attention_bias.weight).permute(2, 0, 1).unsqueeze(0)
    bias = bias.to(q.dtype).masked_fill(~token_mask, torch.finfo(q.dtype).min)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    out: torch.Tensor = attention.o(y.transpose(1, 2).flatten(2))
    return out


class ImageEncoderForm(nn.Module):
    """A `transformers.CLIPVisionModel` up to the hidden states before its last layer.

    Args:
        module: the encoder; its parameters become this form's.
    """

    layers: Any

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.side: int = module.config.image_size
        self._heads: int = module.config.num_attention_heads
        tables = module.embeddings
        self.class_embedding, self.positions = tables.class_embedding, tables.position_embedding.weight
        self.patch_embedding = tables.patch_embedding
        self.norm = module.pre_layrnorm
        self.layers = module.encoder.layers[:-1]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, tokens, width), float32; `pixels` are (1, 3, side, side), normalised."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.view(1, 1, -1), patches], dim=1)
        x = self.norm(x + self.positions.unsqueeze(0))
        return run_layers(self.layers, x, self._heads).float()


class TransformerForm(nn.Module):
    """A `diffusers.WanTransformer3DModel` with float32 inputs and outputs, whatever its dtype.

    Values between the blocks are float32: diffusers rounds them to the model's dtype, which costs accuracy and saves no
    time. Where diffusers has a timestep per token (TI2V-5B), there are two: the first latent frame's and the others'.

    Args:
        module: the transformer; its parameters become this form's.
        image_tokens: of images' CLIP embeddings, before those of the text.
    """

    cuts_text = True
    patch_embedding: nn.Conv3d
    scale_shift_table: torch.Tensor
    condition_embedder: Any
    blocks: Any

    def __init__(self, module: Any, image_tokens: int = 0) -> None:
        super().__init__()
        config = module.config
        self._image_tokens = image_tokens
        self._image_width = config.image_dim
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
        # One column per pair of channels: diffusers stores each twice.
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
        """Return the velocity, float32, (1, output channels, frames, height, width).

        Args:
            latents: (1, channels, frames, height, width).
            timestep: (1,), 0 to 1000, or (2,): of the first latent frame and of the others.
            text_embeds: (1, tokens of images and text, text width).
            text_padding: (1,), number of zero tokens that were cut off the text.
        """
        dtype = self.patch_embedding.weight.dtype
        _, c, frames, height, width = latents.shape
        pt, ph, pw = self._patch
        grid = (frames // pt, height // ph, width // pw)
        x = latents.to(dtype).view(c, grid[0], pt, grid[1], ph, grid[2], pw)
        x = x.permute(1, 3, 5, 0, 2, 4, 6).reshape(1, grid[0] * grid[1] * grid[2], c * pt * ph * pw)
        x = F.linear(x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias).float()
        rotation = self._rotation(grid)
        first_mask = None
        if timestep.shape[0] > 1:
            first_mask = (torch.arange(grid[0], device=x.device) == 0).view(-1, 1, 1).expand(grid).reshape(1, -1, 1)
        embedder = self.condition_embedder
        time = embedder.time_embedder(self._sinusoid(timestep).to(embedder.time_embedder.linear_1.weight.dtype))
        time = time.to(dtype)
        modulation = embedder.time_proj(F.silu(time)).view(timestep.shape[0], 6, -1)
        image = None
        if self._image_tokens:
            image = self._embed_images(text_embeds[:, : self._image_tokens, : self._image_width].to(dtype))
            text_embeds = text_embeds[:, self._image_tokens :]
        weights = None
        if text_padding is not None:
            # One more token of zeros stands for all that were cut off: a key that counts n times has log n added.
            text_embeds = F.pad(text_embeds, (0, 0, 0, 1))
            once = torch.zeros_like(text_embeds[:, 1:, 0])
            weights = torch.cat([once, text_padding.log().view(1, 1)], dim=1).view(1, 1, 1, -1).to(dtype)
        text = embedder.text_embedder(text_embeds.to(dtype))
        for block in self.blocks:
            x = self._block(block, x, (text, weights, image), (modulation, first_mask), rotation)
        shift, scale = _by_token(self.scale_shift_table + time.unsqueeze(1), first_mask)
        out: torch.Tensor = self.proj_out((self._layer_norm(x) * (1 + scale) + shift).to(dtype)).float()
        out = out.view(*grid, pt, ph, pw, self._channels_out)
        return out.permute(6, 0, 3, 1, 4, 2, 5).reshape(1, self._channels_out, frames, height, width)

    def _embed_images(self, embeds: torch.Tensor) -> torch.Tensor:
        """Return images' embeddings in the transformer's width; see `WanImageEmbedding`."""
        embedder = self.condition_embedder.image_embedder
        if embedder.pos_embed is not None:
            embeds = embeds + embedder.pos_embed
        out: torch.Tensor = embedder.norm2(embedder.ff(embedder.norm1(embeds)))
        return out

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
        text: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        modulation: tuple[torch.Tensor, torch.Tensor | None],
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return `x`, (1, tokens, width), float32, after one block."""
        dtype, (vectors, first_mask) = text[0].dtype, modulation
        table = block.scale_shift_table + vectors.float()
        shift, scale, gate, ff_shift, ff_scale, ff_gate = _by_token(table, first_mask)
        normed = (self._layer_norm(x) * (1 + scale) + shift).to(dtype)
        x = x + self._attend(block.attn1, normed, (normed, None, None), rotation).float() * gate
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
        attended: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Attend to a sequence, whose tokens may have something added to their logits, and to the tokens of images."""
        source, weights, image = attended
        q = self._split(_rms_norm(attention.norm_q, attention.to_q(x)))
        k = self._split(_rms_norm(attention.norm_k, attention.to_k(source)))
        v = self._split(attention.to_v(source))
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=weights)
        if image is not None:
            k = self._split(_rms_norm(attention.norm_added_k, attention.add_k_proj(image)))
            v = self._split(attention.add_v_proj(image))
            y = y + F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: torch.Tensor = attention.to_out[0](y.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Give each head its own axis: (1, tokens, heads, head width)."""
        return x.view(1, x.shape[1], self._heads, -1)

    def _layer_norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), eps=self._eps)


def _by_token(table: torch.Tensor, first_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the rows of `table`, (timesteps, rows, width), each (1, 1 or tokens, width).

    Args:
        first_mask: (1, tokens, 1), whether a token has the first of two timesteps; `None` for one timestep.
    """
    rows = list(table.chunk(table.shape[1], dim=1))
    return rows if first_mask is None else [torch.where(first_mask, row[:1], row[1:]) for row in rows]


def _rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise over all heads at once, in float32: `torch.nn.RMSNorm`, spelt out."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    scaled: torch.Tensor = (wide * norm.weight.float()).to(x.dtype)
    return scaled


def _pair_halves(attention: Any, heads: int) -> None:
    """Reorder the channels of queries and keys, each head's even ones before its odd ones.

    Wan rotates neighbouring channels in pairs, which needs a strided copy; halves of a head are contiguous. Attention
    depends only on products of queries and keys, so the order of their channels does not matter.
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
