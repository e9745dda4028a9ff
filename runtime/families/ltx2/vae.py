"""The VAEs of video and sound in PyTorch: diffusers' modules. A clip is decoded in one call, or in tiles."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.core.plan import Speed
from runtime.core.tiles import spans
from runtime.execution.decoded_frames import blend_weights


class _VideoVae:
    """What both parts of an `AutoencoderKLLTX2Video` share.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        device: where it computes.
    """

    def __init__(self, module: Any, device: str | torch.device) -> None:
        self._vae, self._device = module, torch.device(device)

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the latents, (1, channels, 1, 1, 1), float32."""
        mean, deviation = (
            values.view(1, -1, 1, 1, 1).to(self._device, torch.float32)
            for values in (self._vae.latents_mean, self._vae.latents_std)
        )
        return mean, deviation


class PyTorchVideoDecoder(_VideoVae):
    """The decoder of an `AutoencoderKLLTX2Video`; see `execution.components.PyTorchVideoDecoder`."""

    compile_seconds = 0.0

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        module.encoder = None
        super().__init__(module, device)

    def compute(self, speed: Speed, on_degraded: Any = None) -> None:
        """Do nothing: there is one way to compute it."""

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `execution.components.VideoDecoder`; the frames of a latent are yielded together."""
        del chunk
        if tile is None or max(latents.shape[3:]) <= tile:
            yield from self._decoded(latents).split(self._vae.temporal_compression_ratio)
        else:
            yield from self._tiled(latents, tile)

    def decode_from(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode a clip whose engine failed: the family has no engines that decode a part of one."""
        assert start == 0
        assert not caches
        return self.frames(latents, chunk)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def _decoded(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the frames of latents, (frames, height, width, 3), float32 in -1 to 1."""
        mean, deviation = self._statistics()
        z = latents.to(self._device, torch.float32) * deviation / self._vae.config.scaling_factor + mean
        pixels = self._vae.decoder(z.to(next(self._vae.decoder.parameters()).dtype))
        frames: torch.Tensor = pixels[0].permute(1, 2, 3, 0).float().clamp(-1.0, 1.0)
        return frames

    def _tiled(self, latents: torch.Tensor, tile: int) -> Iterator[torch.Tensor]:
        """Decode tile by tile, each through the whole clip.

        Tiles have equal sizes, overlap by a quarter, and are blended. The clip is collected in RAM in float16, whose
        rounding error is a sixteenth of an 8-bit step.
        """
        scale = self._vae.spatial_compression_ratio
        rows, columns = spans(latents.shape[3], tile), spans(latents.shape[4], tile)
        count = (latents.shape[2] - 1) * self._vae.temporal_compression_ratio + 1
        clip = torch.zeros(count, latents.shape[3] * scale, latents.shape[4] * scale, 3, dtype=torch.float16)
        for row, down in zip(rows, blend_weights(rows, scale), strict=True):
            for column, across in zip(columns, blend_weights(columns, scale), strict=True):
                frames = self._decoded(latents[..., row.start : row.end, column.start : column.end])
                share = (down[:, None] * across)[None, :, :, None].to(frames.device)
                place = clip[:, row.start * scale : row.end * scale, column.start * scale : column.end * scale]
                place += (frames * share).half().cpu()
                yield clip[:0].float()
        for part in clip.split(self._vae.temporal_compression_ratio):
            yield part.float()


class PyTorchImageEncoder(_VideoVae):
    """The encoder of an `AutoencoderKLLTX2Video`, for the first frame; see `execution.components.VideoEncoder`."""

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        module.decoder = None
        super().__init__(module, device)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def latents(self, images: Sequence[torch.Tensor], frames: int, tile: int | None = None) -> torch.Tensor:
        """Return the latents of the first frame, (1, channels, 1, height, width), float32, normalised.

        It is encoded whole: a frame takes little memory.
        """
        del tile
        assert frames == 1
        (image,) = images
        pixels = image.to(self._device, next(self._vae.encoder.parameters()).dtype)[None, :, None]
        mean, deviation = self._statistics()
        # The mode of the distribution: its mean.
        moments = self._vae.encoder(pixels).float()[:, : self._vae.config.latent_channels]
        return (moments - mean) / deviation


class PyTorchLatentUpsampler:
    """An `LTX2LatentUpsamplerModel`, see `execution.components.LatentUpsampler`; equal to `LTX2LatentUpsamplePipeline`.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        mean, deviation: of the VAE's latents before they are normalised, (channels).
        device: where it computes.
    """

    def __init__(
        self, module: Any, mean: torch.Tensor, deviation: torch.Tensor, device: str | torch.device = "cpu"
    ) -> None:
        self._module, self._device = module, torch.device(device)
        self._mean, self._deviation = (
            values.view(1, -1, 1, 1, 1).to(self._device, torch.float32) for values in (mean, deviation)
        )

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the enlarged latents."""
        plain = latents.to(self._device, torch.float32) * self._deviation + self._mean
        enlarged: torch.Tensor = self._module(plain.to(self._module.dtype)).float()
        return (enlarged - self._mean) / self._deviation


class PyTorchSpectrumDecoder:
    """The decoder of an `AutoencoderKLLTX2Audio`; see `execution.components.SoundDecoder`."""

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        module.encoder = None
        self._vae, self._device = module, torch.device(device)

    @torch.no_grad()
    def __call__(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the spectrogram of latents, (1, channels, 4 × latents - 3, 4 × bins)."""
        _, channels, _, bins = sound.shape
        mean, deviation = (
            values.to(self._device, torch.float32).view(1, channels, 1, bins)
            for values in (self._vae.latents_mean, self._vae.latents_std)
        )
        z = sound.to(self._device, torch.float32) * deviation + mean
        spectrum: torch.Tensor = self._vae.decoder(z.to(next(self._vae.decoder.parameters()).dtype))
        return spectrum


class PyTorchVocoder:
    """An `LTX2Vocoder`, with bandwidth extension or without; see `execution.components.SoundDecoder`."""

    def __init__(self, module: Any, device: str | torch.device = "cpu") -> None:
        self._vocoder, self._device = module, torch.device(device)

    @torch.no_grad()
    def __call__(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return the samples, (1, channels, samples), float32."""
        samples: torch.Tensor = self._vocoder(spectrum.to(self._device, self._vocoder.dtype))
        return samples.float().clamp(-1.0, 1.0)
