"""Exportable forms of Wan's VAE: one module for each program of `engines.programs`.

The decoder and the encoder are two functions of tensors each: of the first latent frame, and of the frames after it.
diffusers keeps the causal convolutions' caches in a list that it modifies (`AutoencoderKLWan._decode` and `_encode`): a
cache is `None` before the first frame, the sentinel "Rep" after it if time is doubled, and a tensor afterwards. Here
every cache is a tensor, of two frames, initially zeros, which is equal because the convolutions pad with zeros. Where
the encoder halves time, it is the last frame. The first steps return the first caches, the next ones take and return
them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.families.wan.vae import CACHED_FRAMES, upsampler_of
from runtime.upstream.diffusers import causal_padding


class _Caches:
    """The input and output caches of one call, in the decoder's order."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = list(inputs)
        self.outputs: list[torch.Tensor] = []

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """Put the next cache before `x` in time, and keep the end of both for the next call."""
        cache = self._inputs.pop(0) if self._inputs else torch.zeros_like(x[:, :, :1]).repeat(1, 1, CACHED_FRAMES, 1, 1)
        x = torch.cat([cache, x], dim=2)
        # Contiguous, so that it does not keep the whole of `x` in memory.
        self.outputs.append(x[:, :, -CACHED_FRAMES:].contiguous())
        return x

    def replace_last(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the next cache, the frame before `x`, and keep its last frame instead; `None` if there is none."""
        self.outputs.append(x[:, :, -1:].contiguous())
        return self._inputs.pop(0) if self._inputs else None

    def begin(self, x: torch.Tensor) -> None:
        """Keep the first frame, after a frame of zeros."""
        self.outputs.append(torch.cat([torch.zeros_like(x), x], dim=2))

    def begin_empty(self, x: torch.Tensor) -> None:
        """Keep two frames of zeros: doubling time starts with the second frame."""
        # Not `zeros_like`: exporters would turn it into a constant, which OpenVINO does not accept as an output.
        self.outputs.append(x.clamp(0.0, 0.0).repeat(1, 1, CACHED_FRAMES, 1, 1))


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


class _VaeForm(nn.Module):
    """What the forms of both parts of the VAE share.

    Args:
        vae: a `diffusers.AutoencoderKLWan`.
        part: its encoder or decoder, which is modified and used.
        first: whether this is the step of the first latent frame.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, vae: Any, part: Any, *, first: bool) -> None:
        super().__init__()
        self._first = first
        self._patch = vae.config.patch_size or 1
        self.part = part
        device, shape = part.conv_in.weight.device, (1, vae.config.z_dim, 1, 1, 1)
        # Always in float32: rounding would shift every colour.
        for name, values in (("mean", vae.config.latents_mean), ("std", vae.config.latents_std)):
            self.register_buffer(name, torch.tensor(values, device=device, dtype=torch.float32).view(shape))
        causal = type(part.conv_in)
        self.cache_count = 0
        for parent in list(part.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, causal):
                    self.cache_count += child.weight.shape[2] > 1
                    halves_time = child.stride[0] > 1
                    if first or not halves_time:
                        setattr(parent, name, _FirstConv(child) if first else _NextConv(child))

    def _residual(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        h = x if isinstance(block.conv_shortcut, nn.Identity) else block.conv_shortcut(x, caches)
        x = block.conv1(F.silu(_normalise(block.norm1, x)), caches)
        x = block.conv2(F.silu(_normalise(block.norm2, x)), caches)
        return x + h

    def _middle(self, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        block: Any = self.part.mid_block
        x = self._residual(block.resnets[0], x, caches)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._residual(resnet, _attend_frame(attention, x), caches)
        return x


class VaeForm(_VaeForm):
    """The decoder with normalisation, `post_quant_conv`, unpatchify and clamp inside.

    Args:
        vae: a `diffusers.AutoencoderKLWan`, whose decoder is modified and used.
        first: whether this is the step that decodes the first latent frame.
    """

    def __init__(self, vae: Any, *, first: bool) -> None:
        super().__init__(vae, vae.decoder, first=first)
        self.post_quant_conv = vae.post_quant_conv

    def forward(self, z: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return frames (n, height, width, 3), float32 in -1 to 1, and the caches for the next step.

        Args:
            z: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            given: the caches that the previous step returned; none at the clip's start.
        """
        caches = _Caches(given)
        d: Any = self.part
        x = (z.float() * self.std + self.mean).to(self.post_quant_conv.weight.dtype)
        x = F.conv3d(x, self.post_quant_conv.weight, self.post_quant_conv.bias)
        x = self._middle(d.conv_in(x, caches), caches)
        for block in d.up_blocks:
            x = self._up(block, x, caches)
        x = d.conv_out(F.silu(_normalise(d.norm_out, x)), caches)
        return (self._to_frames(x), *caches.outputs)

    def _up(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        block_input = x
        for resnet in block.resnets:
            x = self._residual(resnet, x, caches)
        upsampler, shortcut = upsampler_of(block), getattr(block, "avg_shortcut", None)
        if upsampler is not None:
            x = self._upsample(upsampler, x, caches)
        return x if shortcut is None else x + self._shortcut(shortcut, block_input)

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


class VaeEncoderForm(_VaeForm):
    """The encoder with patchify, `quant_conv` and normalisation inside; it returns the mean of the distribution.

    Args:
        vae: a `diffusers.AutoencoderKLWan`, whose encoder is modified and used.
        first: whether this is the step that encodes the first frame.
        alone: whether no frame follows it, so that it returns no caches.
    """

    def __init__(self, vae: Any, *, first: bool, alone: bool = False) -> None:
        super().__init__(vae, vae.encoder, first=first)
        self.quant_conv = vae.quant_conv
        if alone:
            self.cache_count = 0

    def forward(self, frames: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return latents (1, channels, 1, height, width), float32, normalised, and the caches for the next step.

        Args:
            frames: those of one latent frame, (n, height, width, 3), float32 in -1 to 1.
            given: the caches that the previous step returned; none at the clip's start.
        """
        caches = _Caches(given)
        e: Any = self.part
        x = e.conv_in(self._from_frames(frames).to(self.quant_conv.weight.dtype), caches)
        for block in e.down_blocks:
            x = self._down(block, x, caches)
        x = e.conv_out(F.silu(_normalise(e.norm_out, self._middle(x, caches))), caches)
        # Without the channels of the variance.
        count = self.mean.shape[1]
        x = F.conv3d(x, self.quant_conv.weight[:count], self.quant_conv.bias[:count])
        return ((x.float() - self.mean) / self.std, *caches.outputs[: self.cache_count])

    def _down(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if hasattr(block, "to_qkv"):
            return _attend_frame(block, x)
        if hasattr(block, "resample"):
            return self._downsample(block, x, caches)
        if not hasattr(block, "avg_shortcut"):
            return self._residual(block, x, caches)
        block_input = x
        for resnet in block.resnets:
            x = self._residual(resnet, x, caches)
        if block.downsampler is not None:
            x = self._downsample(block.downsampler, x, caches)
        return x + _averaged(block.avg_shortcut, block_input)

    def _downsample(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        conv = block.resample[1]
        x = F.conv3d(F.pad(x, (0, 1, 0, 1)), conv.weight.unsqueeze(2), conv.bias, stride=(1, 2, 2))
        if block.mode != "downsample3d":
            return x
        before = caches.replace_last(x)
        if before is None:
            return x
        conv = block.time_conv
        return F.conv3d(torch.cat([before, x], dim=2), conv.weight, conv.bias, stride=conv.stride)

    def _from_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Return (1, channels, frames, rows, columns), with the pixels of a patch as channels."""
        p = self._patch
        t, h, w, c = frames.shape
        x = frames.view(t, h // p, p, w // p, p, c).permute(5, 4, 2, 0, 1, 3)
        return x.reshape(1, c * p * p, t, h // p, w // p)


def _averaged(shortcut: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the means of neighbours in time, space and channels: `AvgDown3D`."""
    ft, fs = shortcut.factor_t, shortcut.factor_s
    if x.shape[2] < ft:
        # The first frame has none before it.
        x = torch.cat([torch.zeros_like(x[:, :, :1]).repeat(1, 1, ft - 1, 1, 1), x], dim=2)
    _, c, t, h, w = x.shape
    x = x.view(c, t // ft, ft, h // fs, fs, w // fs, fs).permute(0, 2, 4, 6, 1, 3, 5)
    x = x.reshape(shortcut.out_channels, shortcut.group_size, t // ft, h // fs, w // fs)
    return x.mean(1).unsqueeze(0)


class VaeClipForm(nn.Module):
    """The decoder for whole clips: both steps of `VaeForm`.

    Args:
        vae, second: the same `diffusers.AutoencoderKLWan` loaded twice, because each step modifies its own.
    """

    def __init__(self, vae: Any, second: Any) -> None:
        super().__init__()
        self.first = VaeForm(vae, first=True)
        self.next = VaeForm(second, first=False)

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
