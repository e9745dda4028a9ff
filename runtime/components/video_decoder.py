"""Latents to frames, a few latent frames at a time. Knows nothing about files."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify

from runtime.components.guarded import Guarded
from runtime.engines.identity import CLIP_PROGRAM
from runtime.engines.service import OpenEngines


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

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        yield from self.go_on(latents, chunk, 0, ())

    @torch.inference_mode()
    def go_on(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode from latent frame `start` on, with an engine's caches of the frames before it.

        They hold two frames each, zeros where diffusers has fewer or the sentinel "Rep": the convolutions pad with
        zeros, so that is the same.
        """
        vae = self._vae
        z = vae.post_quant_conv(latents.to(self._mean.device, self._mean.dtype) * self._std + self._mean)
        held: list[Any] = [cache.to(z.device, z.dtype) for cache in caches]
        held += [None] * (vae._cached_conv_counts["decoder"] - len(held))
        while start < z.shape[2]:
            end = min(start + chunk, z.shape[2]) if start else 1
            out = vae.decoder(z[:, :, start:end], feat_cache=held, feat_idx=[0], first_chunk=start == 0)
            if self._patch_size is not None:
                out = unpatchify(out, patch_size=self._patch_size)
            yield out[0].clamp(-1.0, 1.0).permute(1, 2, 3, 0).float()
            start = end


class EngineVideoDecoder:
    """Two engines, the first step and the recurrent one, and PyTorch from the step on in which one fails.

    One that was made elsewhere may take whole clips; where it fails, PyTorch decodes all.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[str], PyTorchVideoDecoder]) -> None:
        self._guarded = Guarded(engines, fall_back)

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if self._guarded.runs(CLIP_PROGRAM):
            yield from self._clip(latents, chunk)
            return
        caches: dict[str, torch.Tensor] = {}
        start = 0
        while start < latents.shape[2]:
            end = min(start + chunk, latents.shape[2]) if start else 1
            program, given = ("vae_next", caches) if start else ("vae_first", {})
            z = latents[:, :, start:end]
            outputs = self._guarded.call(
                lambda engines: engines.infer(program, z=z, **given),  # noqa: B023 - called at once
                lambda _: None,
            )
            if outputs is None:
                yield from self._guarded.instead().go_on(latents, chunk, start, list(caches.values()))
                return
            yield outputs.pop("frames")
            caches = outputs
            start = end

    def _clip(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        outputs = self._guarded.call(lambda engines: engines.infer(CLIP_PROGRAM, z=latents), lambda _: None)
        if outputs is None:
            yield from self._guarded.instead().frames(latents, chunk)
        else:
            yield outputs["frames"]
