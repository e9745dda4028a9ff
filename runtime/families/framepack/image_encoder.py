"""Images to what FramePack's transformer is conditioned on: SigLIP's pixels and the VAE's latents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image


def siglip_pixels(processor: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    """Return the pixels of images that SigLIP takes, (images, 3, side, side), float32.

    diffusers computes embeddings of the last image too, but uses only those of the first.

    Args:
        processor: a `transformers.SiglipImageProcessor`, which scales and normalizes.
    """
    # Back from -1 to 1, as in diffusers: the processor cuts values to 8 bits, so rounding matters.
    pixels = torch.cat([(pixels_of(image) + 1) / 2 for image in images])
    values: torch.Tensor = processor(images=pixels, return_tensors="pt", do_rescale=False).pixel_values
    return values


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
