"""Images to the embeddings that transformers attend to: processing, and the image model in PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL.Image import Image

# Embeds pixels, (images, 3, side, side) float32, as (images, tokens, width).
ImageModel = Callable[[torch.Tensor], torch.Tensor]


class ImageEncoder:
    """A model that embeds images, such as CLIP's.

    Args:
        pixels_of: returns the pixels of images that the model takes.
    """

    def __init__(self, pixels_of: Callable[[Sequence[Image]], torch.Tensor], model: ImageModel) -> None:
        self._pixels_of = pixels_of
        self._model = model

    def encode(self, images: Sequence[Image]) -> torch.Tensor:
        """Return the embeddings of images one after the other, (1, tokens of all images, width)."""
        return self._model(self._pixels_of(images)).flatten(0, 1).unsqueeze(0)


class PyTorchImageModel:
    """A vision model of transformers.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        device: where it computes.
        embed: calls the module with pixels and returns the embeddings.
    """

    def __init__(
        self, module: torch.nn.Module, device: str | torch.device, embed: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> None:
        self._module: Any = module
        self._device = torch.device(device)
        self._embed = embed

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ImageModel`; the result has the module's dtype."""
        return self._embed(self._module, pixels.to(self._device, self._module.dtype))
