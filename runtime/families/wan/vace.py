"""VACE's control branch: further blocks of Wan's transformer that read a control video, and the latents they read.

Equal to diffusers' `WanVACETransformer3DModel` and `WanVACEPipeline` up to rounding. Differences:

- A control block runs when the block that its result is added to has run, so one result is in memory at a time. Blocks
  that a step cache skips need no results, and their control blocks are skipped too.
- The result is added within the block that it belongs to, so that step caches see the block's whole output.
- The control latents are further channels of the latents that a `Denoiser` takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from runtime.execution.components import ControlClip, VideoEncoder
from runtime.execution.rotation import Rotation
from runtime.execution.text_states import TextState
from runtime.models.spec import ModelSpec


@dataclass(frozen=True)
class Hint:
    """The result of a control block, which is added to the output of a block.

    Attributes:
        compute: returns it, (batch, tokens, width).
        scale: it is multiplied by this.
    """

    compute: Callable[[], torch.Tensor]
    scale: float

    def added_to(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum with a block's output, which is written over; it is float32 between block engines."""
        return x.add_(self.compute(), alpha=self.scale)


def control_blocks(module: Any) -> Sequence[Any]:
    """Return a transformer's control blocks; none if it has no control branch."""
    blocks: Sequence[Any] = getattr(module, "vace_blocks", ())
    return blocks


def in_order(module: Any) -> list[Any]:
    """Return all blocks of a transformer; each control block follows the block that its result is added to.

    There may be the first ones of both kinds only, as when engines are verified.
    """
    controls = dict(zip(getattr(module.config, "vace_layers", ()), control_blocks(module), strict=False))
    ordered = []
    for index, block in enumerate(module.blocks):
        ordered += [block, controls[index]] if index in controls else [block]
    return ordered


def latent_channels(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return the latents among what a `Denoiser` takes, without the channels of what steers it."""
    return inputs[:, : module.config.in_channels]


def control_block_forward(
    self: Any,
    hidden_states: torch.Tensor | None,
    encoder_hidden_states: Any,
    control_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one control block; the signature is that of diffusers' `WanVACETransformerBlock`.

    Its step is that of the other blocks, so block engines serve both kinds. The projections are computed in PyTorch.

    Args:
        hidden_states: before the first block of the other branch; `None` after the first control block.

    Returns:
        The result that is added to the other branch, and the control branch's hidden states.
    """
    if self.proj_in is not None:
        control_hidden_states = self.proj_in(control_hidden_states) + hidden_states
    out = self.step(self, control_hidden_states, encoder_hidden_states, temb, rotary_emb)
    return self.proj_out(out.to(self.compute_dtype)), out


class ControlBranch:
    """The control branch in one forward pass.

    Args:
        module: a transformer with one.
        x: hidden states before the first block, (batch, tokens, width).
        inputs: what the `Denoiser` was given, see `latent_channels`.
        text: its blocks are those of the transformer, then the control blocks.
    """

    def __init__(
        self,
        module: Any,
        x: torch.Tensor,
        inputs: torch.Tensor,
        text: TextState,
        modulation: torch.Tensor,
        rotation: Rotation,
    ) -> None:
        self._module = module
        self._text = text
        self._others = (modulation, rotation)
        self._before: torch.Tensor | None = x
        control = inputs[:, module.config.in_channels :]
        self._state = module.vace_patch_embedding(control).flatten(2).transpose(1, 2).contiguous()
        self._numbers = {layer: number for number, layer in enumerate(module.config.vace_layers)}

    def hint(self, index: int) -> Hint | None:
        """Return what is added to the output of block `index`; `None` if that is nothing."""
        number = self._numbers.get(index)
        if number is None:
            return None
        return Hint(partial(self._compute, number), self._module.control_scales[number])

    def _compute(self, number: int) -> torch.Tensor:
        text = self._text.for_block(len(self._module.blocks) + number)
        block = self._module.vace_blocks[number]
        result: torch.Tensor
        result, self._state = block(self._before, text, self._state, *self._others)
        self._before = None
        return result


def control_latents(
    encoder: VideoEncoder,
    spec: ModelSpec,
    clip: ControlClip,
    tile: int | None,
    check: Callable[[], None],
    chunk: int = 1,
) -> torch.Tensor:
    """Return what the control branch reads, as `WanVACEPipeline` prepares it.

    These are, for each latent frame: the latents of the unchanged part of the control video and of the part that
    changes, each gray in the other's place, and the mask of all pixels. Reference images come first, the last one at
    the start, with zeros for the latter two. Without a control video it is gray, and without a mask all of it changes.

    Args:
        tile, check, chunk: see `VideoEncoder`.

    Returns:
        (1, 2 × latent channels + pixels of a latent, latent frames, height, width), float32.
    """
    gray = torch.zeros(3, clip.height, clip.width)
    mask = clip.changes
    if clip.video is None or mask is None:
        inactive = encoder.latents([gray], clip.frames, tile)
    else:
        inactive = encoder.video_latents(clip.video, tile, check, ~mask, chunk)
    reactive = inactive if clip.video is None else encoder.video_latents(clip.video, tile, check, mask, chunk)
    parts = [torch.cat([inactive, reactive, _packed_mask(spec, clip).to(inactive.device)], dim=1)]
    for image in clip.references:
        check()
        latents = encoder.latents([_on_white(spec, image, clip.width, clip.height)], 1, tile)
        channels = parts[0].shape[1] - latents.shape[1]
        parts.insert(0, F.pad(latents, (0, 0, 0, 0, 0, 0, 0, channels)))
    return torch.cat(parts, dim=2)


def _packed_mask(spec: ModelSpec, clip: ControlClip) -> torch.Tensor:
    """Return the mask with the pixels of each latent as channels, (1, pixels, latent frames, height, width), 0 to 1."""
    scale, stride = spec.vae.scale_factor_spatial, spec.vae.scale_factor_temporal
    latent_frames = (clip.frames - 1) // stride + 1
    size = clip.height // scale, clip.width // scale
    if clip.mask is None:
        return torch.ones(1, scale**2, latent_frames, *size)
    numbers = torch.arange(clip.frames, dtype=torch.float32)[None, None]
    chosen = F.interpolate(numbers, latent_frames, mode="nearest-exact")[0, 0].long()
    frames = clip.mask[chosen].float() / 255
    pixels = frames.view(latent_frames, size[0], scale, size[1], scale).permute(2, 4, 0, 1, 3)
    return pixels.flatten(0, 1)[None]


def _on_white(spec: ModelSpec, image: Image.Image, width: int, height: int) -> torch.Tensor:
    """Return a reference image as a frame, (3, height, width), float32 in -1 to 1: all of it, on white.

    It is resized twice, as in `WanVACEPipeline.preprocess_conditions`.
    """
    scale = spec.vae.scale_factor_spatial
    whole = [max(side - side % scale, scale) for side in image.size]
    if [*image.size] != whole:
        image = image.resize((whole[0], whole[1]), Image.Resampling.LANCZOS)
    data = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    pixels = data.view(1, image.height, image.width, 3).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    factor = min(height / image.height, width / image.width)
    inner = max(int(image.height * factor), 1), max(int(image.width * factor), 1)
    frame = torch.ones(3, height, width)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    resized = F.interpolate(pixels, inner, mode="bilinear", align_corners=False)[0]
    frame[:, top : top + inner[0], left : left + inner[1]] = resized
    return frame
