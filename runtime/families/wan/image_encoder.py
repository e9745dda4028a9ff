"""Images to the embeddings that Wan2.1's image-to-video transformers attend to: CLIP's vision model."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from runtime.execution.components import ImageModel


class ImageEncoder:
    """A processor and a model that embeds its pixels.

    Args:
        processor: a `transformers.CLIPImageProcessor`, which scales, crops and normalizes.
    """

    def __init__(self, processor: Any, model: ImageModel) -> None:
        self._processor = processor
        self._model = model

    def encode(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Return the embeddings of images one after the other, (1, tokens of all images, width)."""
        pixels: torch.Tensor = self._processor(images=list(images), return_tensors="pt").pixel_values
        return self._model(pixels).flatten(0, 1).unsqueeze(0)


class PyTorchImageModel:
    """A `transformers.CLIPVisionModel`, called for the hidden states before its last layer.

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
        embeds: torch.Tensor = self._module(
            pixels.to(self._device, self._module.dtype), output_hidden_states=True
        ).hidden_states[-2]
        return embeds
