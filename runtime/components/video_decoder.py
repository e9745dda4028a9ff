"""Latents to frames, a few latent frames at a time. Knows nothing about files."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify


class VideoDecoder(Protocol):
    """A causal video decoder."""

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield decoded frames in order.

        Args:
            latents: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            chunk: latent frames to decode in one call, after the first, which is always alone.

        Yields:
            (frames, height, width, 3), float32 in -1 to 1, on the decoder's device.
        """
        ...


class PyTorchVideoDecoder:
    """The decoder of a `diffusers.AutoencoderKLWan`, called as `AutoencoderKLWan._decode` calls it.

    The causal convolutions' caches take the first latent frame alone and then any number at once; the result equals
    one at a time up to rounding.
    """

    def __init__(self, module: AutoencoderKLWan) -> None:
        self._vae: Any = module
        config: Any = module.config
        parameter = next(module.decoder.parameters())
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=parameter.device, dtype=parameter.dtype).view(shape)
        self._std = torch.tensor(config.latents_std, device=parameter.device, dtype=parameter.dtype).view(shape)
        self._patch_size = config.patch_size

    @torch.inference_mode()
    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        vae = self._vae
        z = vae.post_quant_conv(latents.to(self._mean.device, self._mean.dtype) * self._std + self._mean)
        caches: list[Any] = [None] * vae._cached_conv_counts["decoder"]
        start = 0
        while start < z.shape[2]:
            end = min(start + chunk, z.shape[2]) if start else 1
            out = vae.decoder(z[:, :, start:end], feat_cache=caches, feat_idx=[0], first_chunk=start == 0)
            if self._patch_size is not None:
                out = unpatchify(out, patch_size=self._patch_size)
            yield out[0].clamp(-1.0, 1.0).permute(1, 2, 3, 0).float()
            start = end
