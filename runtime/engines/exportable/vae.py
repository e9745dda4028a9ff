"""Wan's VAE decoder as two plain functions of tensors: the first latent frame, and any number of frames after it.

diffusers keeps the causal convolutions' caches in a list that it changes (`AutoencoderKLWan._decode`): each is `None`
before the first frame, the sentinel "Rep" after it where time is doubled, a tensor afterwards. Here every cache is a
tensor of two frames from the start, zeros where diffusers has nothing: the convolutions pad with zeros, so it is the
same. `vae_first` makes the caches, `vae_next` takes and returns them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CACHED_FRAMES = 2


class _Caches:
    """The caches of one call: those that came in, in the decoder's order, and those that go out."""

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
        # Not `zeros_like`: exporters would make a constant of it, and OpenVINO reads no constant as an output.
        self.kept.append(x.clamp(0.0, 0.0).repeat(1, 1, CACHED_FRAMES, 1, 1))


class _NextConv(nn.Module):
    """A causal 3D convolution that continues from its cache."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._padding = (0, conv._padding[2], conv._padding[0])

    def forward(self, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if self.weight.shape[2] > 1:
            x = caches.extend(x)
        return F.conv3d(x, self.weight, self.bias, padding=self._padding)


class _FirstConv(nn.Module):
    """The same on the first frame: before it there are zeros, so only the kernel's last slice in time counts."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight[:, :, -1].detach().clone(), requires_grad=False)
        self.bias = conv.bias
        self._cached = conv.weight.shape[2] > 1
        self._padding = (conv._padding[2], conv._padding[0])

    def forward(self, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        if self._cached:
            caches.begin(x)
        return F.conv2d(x.squeeze(2), self.weight, self.bias, padding=self._padding).unsqueeze(2)


class VaeForm(nn.Module):
    """The decoder with normalisation, `post_quant_conv`, unpatchify and clamp inside.

    Args:
        vae: a `diffusers.AutoencoderKLWan`, whose decoder becomes this form's: it is changed.
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
        # In float32 always: rounded, they would shift every colour.
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
            given: the last step's caches; none means that there was only black before.
        """
        caches = _Caches(given)
        d: Any = self.decoder
        x = (z.float() * self.std + self.mean).to(self.post_quant_conv.weight.dtype)
        x = F.conv3d(x, self.post_quant_conv.weight, self.post_quant_conv.bias)
        x = d.conv_in(x, caches)
        x = self._residual(d.mid_block.resnets[0], x, caches)
        for attention, resnet in zip(d.mid_block.attentions, d.mid_block.resnets[1:], strict=True):
            x = self._residual(resnet, _attend(attention, x), caches)
        for block in d.up_blocks:
            x = self._up(block, x, caches)
        x = d.conv_out(F.silu(_normalise(d.norm_out, x)), caches)
        return (self._to_frames(x), *caches.kept)

    def _up(self, block: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        entered = x
        for resnet in block.resnets:
            x = self._residual(resnet, x, caches)
        residual = hasattr(block, "avg_shortcut")
        upsampler = block.upsampler if residual else block.upsamplers and block.upsamplers[0]
        if upsampler is not None:
            x = self._upsample(upsampler, x, caches)
        if residual and block.avg_shortcut is not None:
            x = x + self._shortcut(block.avg_shortcut, entered)
        return x

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
    """Both steps, for a whole clip.

    Args:
        vae, other: the same `diffusers.AutoencoderKLWan` twice: each step changes the one that it gets.
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


def _attend(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend within each frame, one head: `WanAttentionBlock`."""
    _, c, t, h, w = x.shape
    y = x[0].permute(1, 0, 2, 3)
    y = block.to_qkv(_normalise(block.norm, y)).view(t, 3 * c, h * w).transpose(1, 2)
    q, k, v = y.chunk(3, dim=-1)
    y = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
    y = block.proj(y.transpose(1, 2).reshape(t, c, h, w))
    attended: torch.Tensor = y.permute(1, 0, 2, 3).unsqueeze(0)
    return x + attended
