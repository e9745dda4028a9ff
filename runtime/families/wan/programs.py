"""Exportable forms of Wan's components: one module for each program of `engines.programs`.

The VAE decoder is two functions of tensors: the first latent frame, and any number of frames after it. diffusers keeps
the causal convolutions' caches in a list that it modifies (`AutoencoderKLWan._decode`): a cache is `None` before the
first frame, the sentinel "Rep" after it if time is doubled, and a tensor afterwards. Here every cache is a tensor of
two frames, initially zeros, which is equal because the convolutions pad with zeros. `vae_first` returns the first
caches, `vae_next` takes and returns them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.families.wan.vae import CACHED_FRAMES, upsampler_of
from runtime.upstream.diffusers import causal_padding
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
        seen = attention_mask.bool()[:, None, None, :]
        for block in self.block:
            attention, feed_forward = block.layer
            x = x + _attend_text(attention.SelfAttention, _t5_norm(attention.layer_norm, x), seen, self.buckets)
            dense = feed_forward.DenseReluDense
            y = _t5_norm(feed_forward.layer_norm, x)
            y = dense.act(dense.wi_0(y)) * dense.wi_1(y) if hasattr(dense, "wi_0") else dense.act(dense.wi(y))
            x = x + dense.wo(y.to(dense.wo.weight.dtype))
        return _t5_norm(self.final_layer_norm, x).float() * attention_mask.unsqueeze(-1).float()


def _t5_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    scaled: torch.Tensor = norm.weight * y.to(norm.weight.dtype)
    return scaled


def _attend_text(attention: Any, x: torch.Tensor, seen: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
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


class TransformerForm(nn.Module):
    """A `diffusers.WanTransformer3DModel` with float32 inputs and outputs, whatever its dtype.

    Values between the blocks are float32: diffusers rounds them to the model's dtype, which costs accuracy and saves no
    time. A text-to-video clip has one timestep for all tokens, so TI2V-5B's timestep per token is one row too.

    Args:
        module: the transformer; its parameters become this form's.
    """

    cuts_text = True
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
        """Return the velocity, float32, shaped like `latents` (1, channels, frames, height, width).

        Args:
            timestep: (1,), 0 to 1000.
            text_embeds: (1, text tokens, text width).
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


class _Caches:
    """The input and output caches of one call, in the decoder's order."""

    def __init__(self, given: tuple[torch.Tensor, ...]) -> None:
        self._given = list(given)
        self.kept: list[torch.Tensor] = []

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """Put the next cache before `x` in time, and keep the end of both for the next call."""
        given = self._given.pop(0) if self._given else torch.zeros_like(x[:, :, :1]).repeat(1, 1, CACHED_FRAMES, 1, 1)
        x = torch.cat([given, x], dim=2)
        # Contiguous, so that it does not keep the whole of `x` in memory.
        self.kept.append(x[:, :, -CACHED_FRAMES:].contiguous())
        return x

    def begin(self, x: torch.Tensor) -> None:
        """Keep the first frame, after a frame of zeros."""
        self.kept.append(torch.cat([torch.zeros_like(x), x], dim=2))

    def begin_empty(self, x: torch.Tensor) -> None:
        """Keep two frames of zeros: doubling time starts with the second frame."""
        # Not `zeros_like`: exporters would turn it into a constant, which OpenVINO does not accept as an output.
        self.kept.append(x.clamp(0.0, 0.0).repeat(1, 1, CACHED_FRAMES, 1, 1))


class _NextConv(nn.Module):
    """A causal 3D convolution that continues from its cache."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._padding = (0, *causal_padding(conv)[1:])

    def forward(self, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if self.weight.shape[2] > 1:
            x = caches.extend(x)
        return F.conv3d(x, self.weight, self.bias, padding=self._padding)


class _FirstConv(nn.Module):
    """The same convolution on the first frame: its cache is zero, so only the kernel's last temporal slice applies."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight[:, :, -1].detach().clone(), requires_grad=False)
        self.bias = conv.bias
        self._cached = conv.weight.shape[2] > 1
        self._padding = causal_padding(conv)[1:]

    def forward(self, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if self._cached:
            caches.begin(x)
        return F.conv2d(x.squeeze(2), self.weight, self.bias, padding=self._padding).unsqueeze(2)


class VaeForm(nn.Module):
    """The decoder with normalisation, `post_quant_conv`, unpatchify and clamp inside.

    Args:
        vae: a `diffusers.AutoencoderKLWan`, whose decoder is modified and used.
        first: whether this is the step that decodes the first latent frame.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, vae: Any, *, first: bool) -> None:
        super().__init__()
        self._first = first
        self._patch = vae.config.patch_size or 1
        self.post_quant_conv = vae.post_quant_conv
        self.decoder = vae.decoder
        parameter = vae.post_quant_conv.weight
        shape = (1, vae.config.z_dim, 1, 1, 1)
        # Always in float32: rounding would shift every colour.
        for name, values in (("mean", vae.config.latents_mean), ("std", vae.config.latents_std)):
            self.register_buffer(name, torch.tensor(values, device=parameter.device, dtype=torch.float32).view(shape))
        causal = type(vae.decoder.conv_in)
        self.cache_count = 0
        for parent in list(self.decoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, causal):
                    self.cache_count += child.weight.shape[2] > 1
                    setattr(parent, name, _FirstConv(child) if first else _NextConv(child))

    def forward(self, z: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return frames (n, height, width, 3), float32 in -1 to 1, and the caches for the next step.

        Args:
            z: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            given: the caches that the previous step returned; none at the clip's start.
        """
        caches = _Caches(given)
        d: Any = self.decoder
        x = (z.float() * self.std + self.mean).to(self.post_quant_conv.weight.dtype)
        x = F.conv3d(x, self.post_quant_conv.weight, self.post_quant_conv.bias)
        x = d.conv_in(x, caches)
        x = self._residual(d.mid_block.resnets[0], x, caches)
        for attention, resnet in zip(d.mid_block.attentions, d.mid_block.resnets[1:], strict=True):
            x = self._residual(resnet, _attend_frame(attention, x), caches)
        for block in d.up_blocks:
            x = self._up(block, x, caches)
        x = d.conv_out(F.silu(_normalise(d.norm_out, x)), caches)
        return (self._to_frames(x), *caches.kept)

    def _up(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        block_input = x
        for resnet in block.resnets:
            x = self._residual(resnet, x, caches)
        upsampler, shortcut = upsampler_of(block), getattr(block, "avg_shortcut", None)
        if upsampler is not None:
            x = self._upsample(upsampler, x, caches)
        return x if shortcut is None else x + self._shortcut(shortcut, block_input)

    def _residual(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        h = x if isinstance(block.conv_shortcut, nn.Identity) else block.conv_shortcut(x, caches)
        x = block.conv1(F.silu(_normalise(block.norm1, x)), caches)
        x = block.conv2(F.silu(_normalise(block.norm2, x)), caches)
        return x + h

    def _upsample(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if block.mode == "upsample3d":
            if self._first:
                caches.begin_empty(x)
            else:
                b, c, t, h, w = x.shape
                x = block.time_conv(x, caches).view(b, 2, c, t, h, w)
                x = x.permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * t, h, w)
        conv = block.resample[1]
        x = F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest")
        return F.conv3d(x, conv.weight.unsqueeze(2), conv.bias, padding=(0, 1, 1))

    def _shortcut(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        """Repeat values in time and space: `DupUp3D`."""
        b, _, t, h, w = x.shape
        ft, fs = block.factor_t, block.factor_s
        x = x.repeat_interleave(block.repeats, dim=1).view(b, block.out_channels, ft, fs, fs, t, h, w)
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, block.out_channels, t * ft, h * fs, w * fs)
        return x[:, :, ft - 1 :] if self._first else x

    def _to_frames(self, x: torch.Tensor) -> torch.Tensor:
        """Return (frames, height, width, 3), float32 in -1 to 1."""
        p = self._patch
        _, c, t, h, w = x.shape
        x = x.view(c // (p * p), p, p, t, h, w).permute(3, 4, 2, 5, 1, 0).reshape(t, h * p, w * p, c // (p * p))
        return x.float().clamp(-1.0, 1.0)


class VaeClipForm(nn.Module):
    """The decoder for whole clips: both steps of `VaeForm`.

    Args:
        vae, other: the same `diffusers.AutoencoderKLWan` loaded twice, because each step modifies its own.
    """

    def __init__(self, vae: Any, other: Any) -> None:
        super().__init__()
        self.first = VaeForm(vae, first=True)
        self.next = VaeForm(other, first=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return frames (n, height, width, 3), float32 in -1 to 1; `z` is normalised as the transformer sees it."""
        frames, *caches = self.first(z[:, :, :1])
        parts = [frames]
        for index in range(1, z.shape[2]):
            frames, *caches = self.next(z[:, :, index : index + 1], *caches)
            parts.append(frames)
        return torch.cat(parts)


def _normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Divide by the root mean square over channels, in float32: `WanRMS_norm`, which divides by the length."""
    wide = x.float()
    length = wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    normalised: torch.Tensor = (wide / length).to(x.dtype) * (norm.gamma * norm.scale)
    return normalised


def _attend_frame(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend within each frame, one head: `WanAttentionBlock`."""
    _, c, t, h, w = x.shape
    y = x[0].permute(1, 0, 2, 3)
    y = block.to_qkv(_normalise(block.norm, y)).view(t, 3 * c, h * w).transpose(1, 2)
    q, k, v = y.chunk(3, dim=-1)
    y = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
    y = block.proj(y.transpose(1, 2).reshape(t, c, h, w))
    attended: torch.Tensor = y.permute(1, 0, 2, 3).unsqueeze(0)
    return x + attended
