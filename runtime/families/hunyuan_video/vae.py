"""The VAE's decoder in PyTorch: diffusers' modules and tiles, yielded as they are complete.

The pipeline decodes more than four latent frames in overlapping groups and blends their overlaps. Here each group is
yielded when it is blended with the one before, so that memory does not depend on the length of the clip.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.core.plan import Speed
from runtime.execution.vae_groups import blended_groups
from runtime.families.hunyuan_video.vae_programs import MiddleBlock

# Of a tile's side, what the next tile does not overlap; diffusers' default.
_STRIDE_SHARE = 0.75


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

    def unclamped_frames(self, latents: torch.Tensor, tile: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the frames with values as the decoder returns them, some beyond -1 and 1; see `frames`."""
        return blended_groups(latents, lambda z: self.group(z, tile))

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def group(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """See `execution.vae_groups.GroupDecoder`."""
        vae = self._vae
        z = latents.to(self._device, next(vae.decoder.parameters()).dtype) / vae.config.scaling_factor
        return _pixels(self._decoded(z, tile))

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
