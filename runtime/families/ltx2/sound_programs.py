"""Exportable forms of LTX-2's decoders of sound, see `engines.programs`: latents to a spectrogram, and to samples."""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR
from torch import nn

from runtime.models.spec import SoundLatents


class SpectrumForm(nn.Module):
    """The decoder of an `AutoencoderKLLTX2Audio`, as `vae.PyTorchSpectrumDecoder` computes it.

    Args:
        vae: its parameters become this form's.
        sound: the latents of the model's sound.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, vae: Any, sound: SoundLatents) -> None:
        super().__init__()
        self.decoder = vae.decoder
        self._sound = sound
        for name, values in (("mean", vae.latents_mean), ("deviation", vae.latents_std)):
            self.register_buffer(name, values.detach().float().reshape(1, sound.channels, 1, sound.bins))

    def input_shape(self, latents: int) -> tuple[int, ...]:
        """Return the shape of the input for a number of latents."""
        return 1, self._sound.channels, latents, self._sound.bins

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the spectrogram (1, channels, 4 × latents - 3, 4 × bins), float32.

        Args:
            sound: (1, channels, latents, bins), normalised as the transformer sees them.
        """
        # In float32 also where the form was converted to fewer bits.
        z = sound.float() * self.deviation.float() + self.mean.float()
        spectrum: torch.Tensor = self.decoder(z.to(next(self.decoder.parameters()).dtype))
        return spectrum.float()


class VocoderForm(nn.Module):
    """An `LTX2Vocoder`, with bandwidth extension or without, as `vae.PyTorchVocoder` computes it.

    Args:
        vocoder: its parameters become this form's.
        sound: the latents of the model's sound.
    """

    def __init__(self, vocoder: Any, sound: SoundLatents) -> None:
        super().__init__()
        self.vocoder = vocoder
        self._bins = LATENT_DOWNSAMPLE_FACTOR * sound.bins
        if hasattr(vocoder, "resampler"):
            # It is in no file. As a part of the state, it is supplied to engines with the weights.
            vocoder.resampler.register_buffer("filter", vocoder.resampler.filter)

    def input_shape(self, latents: int) -> tuple[int, ...]:
        """Return the shape of the input for a number of latents of the sound."""
        frames = LATENT_DOWNSAMPLE_FACTOR * (latents - 1) + 1
        return 1, self.vocoder.config.in_channels // self._bins, frames, self._bins

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return the samples (1, channels, samples), float32 in -1 to 1.

        Args:
            spectrum: as `SpectrumForm` returns it.
        """
        samples: torch.Tensor = self.vocoder(spectrum.to(self.vocoder.dtype))
        return samples.float().clamp(-1.0, 1.0)
