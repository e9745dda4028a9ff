"""The VAE's decoder in PyTorch: diffusers' modules and tiles, yielded as they are complete.

The pipeline decodes more than four latent frames in overlapping groups of five, each as if it were the start of a clip,
and blends their overlaps. Here each group is yielded when the next one is blended with it, so that memory does not
depend on the length of the clip.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.core.plan import Speed

# diffusers' defaults (`tile_sample_min_num_frames`, `tile_sample_stride_num_frames`), in frames.
GROUP_FRAMES, STRIDE_FRAMES = 16, 12
# Of a tile's side, what the next tile does not overlap; diffusers' default.
_STRIDE_SHARE = 0.75


class MiddleBlock(nn.Module):
    """A `HunyuanVideoMidBlock3D` whose attention needs no mask: each frame attends to itself and those before it.

    diffusers' mask has a value for each two positions of the frames: 36 GB for five latent frames at 1280×720.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `HunyuanVideoMidBlock3D.forward`; (1, channels, frames, height, width)."""
        first, *others = self.block.resnets
        x = first(x)
        for attention, resnet in zip(self.block.attentions, others, strict=True):
            x = resnet(x if attention is None else _attended(attention, x))
        return x


def _attended(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a `diffusers.models.attention_processor.Attention` with a causal mask makes of frames."""
    tokens = x.permute(0, 2, 3, 4, 1).flatten(1, 3)
    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    q, k, v = (
        project(normed).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for project in (attention.to_q, attention.to_k, attention.to_v)
    )
    size = x.shape[3] * x.shape[4]
    frames = [
        F.scaled_dot_product_attention(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end])
        for end in range(size, tokens.shape[1] + 1, size)
    ]
    out = attention.to_out[0](torch.cat(frames, dim=2).transpose(1, 2).flatten(2)) + tokens
    result: torch.Tensor = out.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)
    return result


class PyTorchVideoDecoder:
    """A `diffusers.AutoencoderKLHunyuanVideo` without its encoder; see `execution.components.PyTorchVideoDecoder`.

    The frames equal those of `AutoencoderKLHunyuanVideo.decode` in any number of calls.
    """

    compile_seconds = 0.0

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        module.encoder = None
        module.decoder.mid_block = MiddleBlock(module.decoder.mid_block)
        self._vae, self._device = module, torch.device(device)

    def compute(self, speed: Speed, on_degraded: Any = None) -> None:
        """Do nothing: there is one way to compute it."""

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `execution.components.VideoDecoder`; a group of latent frames is decoded in a call, not `chunk`."""
        del chunk
        for part in self.unclamped_frames(latents, tile):
            yield part.clamp(-1.0, 1.0)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def unclamped_frames(self, latents: torch.Tensor, tile: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the frames with values as the decoder returns them, some beyond -1 and 1; see `frames`."""
        vae = self._vae
        z = latents.to(self._device, next(vae.decoder.parameters()).dtype) / vae.config.scaling_factor
        ratio = vae.config.temporal_compression_ratio
        group, stride = GROUP_FRAMES // ratio, STRIDE_FRAMES // ratio
        if z.shape[2] <= group:
            yield _pixels(self._decoded(z, tile))
            return
        before: torch.Tensor | None = None
        for start in range(0, z.shape[2], stride):
            decoded = self._decoded(z[:, :, start : start + group + 1], tile)
            if before is None:
                yield _pixels(decoded[:, :, : STRIDE_FRAMES + 1])
            else:
                # Its first frame is the last of another group, alone.
                decoded = vae.blend_t(before, decoded[:, :, 1:], GROUP_FRAMES - STRIDE_FRAMES)
                yield _pixels(decoded[:, :, :STRIDE_FRAMES])
            before = decoded

    def decode_from(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode a clip whose engine failed: no engine of the family decodes a part of one."""
        assert start == 0
        assert not caches
        return self.frames(latents, chunk)

    def _decoded(self, z: torch.Tensor, tile: int | None) -> torch.Tensor:
        """Return the frames of a few latent frames, (1, 3, frames, height, width)."""
        vae = self._vae
        if tile is None or max(z.shape[3:]) <= tile:
            decoded: torch.Tensor = vae.decoder(vae.post_quant_conv(z))
            return decoded
        enable_tiles(vae, tile)
        tiled: torch.Tensor = vae.tiled_decode(z).sample
        return tiled


def enable_tiles(vae: Any, tile: int) -> None:
    """Set the tiles of an `AutoencoderKLHunyuanVideo`, which overlap by a quarter.

    Args:
        tile: their side, in latents.
    """
    ratio = vae.config.spatial_compression_ratio
    side, stride = tile * ratio, int(tile * _STRIDE_SHARE) * ratio
    vae.enable_tiling(side, side, tile_sample_stride_height=stride, tile_sample_stride_width=stride)


def _pixels(decoded: torch.Tensor) -> torch.Tensor:
    """Return frames, (frames, height, width, 3), float32."""
    return decoded[0].permute(1, 2, 3, 0).float()
