"""Images to what FramePack's transformer is conditioned on: SigLIP's embeddings and the VAE's latents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from runtime.execution.components import ImageModel


class ImageEncoder:
    """A processor and a model that embeds its pixels.

    Args:
        processor: a `transformers.SiglipImageProcessor`, which scales and normalizes.
    """

    def __init__(self, processor: Any, model: ImageModel) -> None:
        self._processor = processor
        self._model = model

    def encode(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Return the embeddings of images one after the other, (1, tokens of all images, width).

        diffusers computes embeddings of the last image too, but uses only those of the first.
        """
        # Back from -1 to 1, as in diffusers: the processor cuts values to 8 bits, so rounding matters.
        pixels = torch.cat([(pixels_of(image) + 1) / 2 for image in images])
        values: torch.Tensor = self._processor(images=pixels, return_tensors="pt", do_rescale=False).pixel_values
        return self._model(values).flatten(0, 1).unsqueeze(0)


class PyTorchImageModel:
    """A `transformers.SiglipVisionModel`, called for its last hidden states.

    Args:
        module: its weights may lie elsewhere until it is called.
        device: where it computes.
    """

    def __init__(self, module: torch.nn.Module, device: str | torch.device) -> None:
        self._module: Any = module
        self._device = torch.device(device)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ImageModel`; the result has the module's dtype."""
        embeds: torch.Tensor = self._module(pixels.to(self._device, self._module.dtype)).last_hidden_state
        return embeds


def pixels_of(image: Image.Image) -> torch.Tensor:
    """Return an RGB image as the VAE takes it, (1, 3, height, width), float32 in -1 to 1.

    Source: diffusers' `VaeImageProcessor.preprocess`, with its rounding.
    """
    values = np.asarray(image).astype(np.float32) / 255.0
    return 2.0 * torch.from_numpy(values).permute(2, 0, 1)[None] - 1.0


def image_latents(moments: torch.Tensor, scaling_factor: float, generator: torch.Generator) -> torch.Tensor:
    """Return latents of an image, drawn from the VAE's distribution, (1, channels, 1, height, width), float32.

    The generator is the video's: it draws for the image, then for the last image, then the noise of each section.

    Args:
        moments: means and logarithms of variances, (1, 2 * channels, 1, height, width), in the VAE's dtype.
        scaling_factor: of the VAE's configuration.
    """
    return (DiagonalGaussianDistribution(moments).sample(generator) * scaling_factor).float()
