"""The VAE in PyTorch: HunyuanVideo's decoder without the cut at -1 and 1, and its encoder for images."""

from typing import Any

import torch

from runtime.families.framepack.image_encoder import image_latents
from runtime.families.hunyuan_video.vae import PyTorchVideoDecoder, enable_tiles
from runtime.families.hunyuan_video.vae_programs import MiddleBlock


class PyTorchSectionDecoder(PyTorchVideoDecoder):
    """A `diffusers.AutoencoderKLHunyuanVideo` without its encoder, which decodes the frames of a section's window."""

    def window(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """See `execution.components.SectionDecoder`."""
        return torch.cat([part.cpu() for part in self.unclamped_frames(latents, tile)])


class PyTorchImageLatents:
    """A `diffusers.AutoencoderKLHunyuanVideo` without its decoder, which encodes one image at a time.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        device: where it computes.
    """

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        module.decoder = None
        module.encoder.mid_block = MiddleBlock(module.encoder.mid_block)
        self._vae, self._device = module, torch.device(device)

    def sample(self, pixels: torch.Tensor, generator: torch.Generator, tile: int | None = None) -> torch.Tensor:
        """See `execution.components.ImageSampler`."""
        return image_latents(self._moments(pixels, tile), self._vae.config.scaling_factor, generator)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def _moments(self, pixels: torch.Tensor, tile: int | None) -> torch.Tensor:
        """Return the parameters of the image's distribution, (1, 2 * channels, 1, height, width)."""
        vae = self._vae
        x = pixels.to(self._device, next(vae.encoder.parameters()).dtype)[:, :, None]
        if tile is None or max(pixels.shape[2:]) <= tile * vae.config.spatial_compression_ratio:
            whole: torch.Tensor = vae.quant_conv(vae.encoder(x))
            return whole
        enable_tiles(vae, tile)
        tiled: torch.Tensor = vae.tiled_encode(x)
        return tiled
