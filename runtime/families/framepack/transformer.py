"""FramePack's transformer on diffusers' modules and weights, with HunyuanVideo's blocks.

Equal to `diffusers.HunyuanVideoFramepackTransformer3DModel` up to rounding. What a section sees does not change during
its steps, so its tokens and the tables of the rotary embedding are computed once per section. All sections of a video
have the same shapes, so a CUDA graph recorded in one section serves the next ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.execution.components import SectionInputs
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.rotation import Rotation, rotation_tables
from runtime.families.hunyuan_video import transformer as hunyuan_video

# Frames, rows and columns of tokens that become one in the compressed history.
_COMPRESSED_2X, _COMPRESSED_4X = (2, 2, 2), (4, 4, 4)


class _Seen(NamedTuple):
    """The tensors that all steps of a section share.

    Attributes:
        tokens: of the frames that it sees, the farthest first, (1, tokens, width).
        image: the projected embeddings of the image, (1, tokens, width).
        cos, sin: the rotation of `tokens` and then of the section's own.
        guidance: 1000 times the guidance scale, (1,).
    """

    tokens: torch.Tensor
    image: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    guidance: torch.Tensor

    @property
    def rotation(self) -> Rotation:
        """See `rotation_tables`."""
        return self.cos, self.sin


def predict(
    module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, see: Callable[[], _Seen]
) -> torch.Tensor:
    """Return the velocity; the text's padding is left out instead of masked.

    Args:
        module: a `HunyuanVideoFramepackTransformer3DModel` after `hunyuan_video.transformer.install`.
        latents, text: see `hunyuan_video.transformer.predict`.
        timestep: scalar.
        see: returns what the section sees. It is called here, because offloaded weights are on the device by now.
    """
    config, context = module.config, see()
    _, _, frames, height, width = latents.shape
    frames, height, width = frames // config.patch_size_t, height // config.patch_size, width // config.patch_size
    times, text = timestep.reshape(1), text.to(context.tokens.dtype)
    pooled, words = text[:, 0, : config.pooled_projection_dim], text[:, 1:]
    tokens = module.x_embedder(latents.to(context.tokens.dtype))
    embedded, _ = module.time_text_embed(times, pooled, context.guidance)
    words = module.context_embedder(words, times, None)
    x = hunyuan_video.run_blocks(
        module,
        torch.cat([context.tokens, tokens], dim=1),
        torch.cat([context.image, words], dim=1),
        embedded,
        context.rotation,
    )
    return hunyuan_video.unpatched(x[:, context.tokens.shape[1] :], frames, height, width, config)


class PyTorchSectionDenoiser(hunyuan_video.PyTorchDenoiser):
    """A `diffusers.HunyuanVideoFramepackTransformer3DModel`; see `execution.components.SectionDenoiser`.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
    """

    _forward = staticmethod(predict)
    _inputs: SectionInputs | None = None
    _context: _Seen | None = None

    def see(self, inputs: SectionInputs) -> None:
        """See `SectionDenoiser`; without CUDA graphs it is embedded in the next pass, when its weights are here."""
        self._inputs = inputs
        if self._graphed is None:
            self._context = None
        else:
            self._context = self._in_place(_embed(self._module, inputs, self.dtype), self._graphed)

    def _in_place(self, context: _Seen, graphed: CudaGraphRunner) -> _Seen:
        """Return what a section sees in the tensors that recorded passes read, if the shapes are the same."""
        stored = self._context
        if stored is None or any(old.shape != new.shape for old, new in zip(stored, context, strict=True)):
            graphed.forget()
            return context
        for old, new in zip(stored, context, strict=True):
            old.copy_(new)
        return stored

    def forget(self) -> None:
        """Free what the last section sees."""
        super().forget()
        self._inputs = self._context = None

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], torch.Tensor]) -> torch.Tensor:
        velocity: torch.Tensor = self._module(latents, timestep, text(), self._embedded)
        return velocity

    def _embedded(self) -> _Seen:
        """Return what the section sees, embedded in its first pass."""
        if self._context is None:
            assert self._inputs is not None, "call `see` first"
            self._context, self._inputs = _embed(self._module, self._inputs, self.dtype), None
        return self._context


# Not in inference mode: offloading hooks change weights while the module runs.
@torch.no_grad()
def _embed(module: Any, inputs: SectionInputs, dtype: torch.dtype) -> _Seen:
    """Return what a section sees as tokens."""
    section = inputs.section
    parts = (inputs.clean, inputs.history_2x, inputs.history_4x)
    near, middle, far = module.clean_x_embedder(*(part.to(dtype) for part in parts))
    height, width = inputs.clean.shape[3:]

    def tables(positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = module.rope(torch.tensor(positions), height, width, inputs.clean.device)
        return cos, sin

    size = height // module.config.patch_size, width // module.config.patch_size
    every = [
        [_compressed(table, size, _COMPRESSED_4X) for table in tables(section.history_4x)],
        [_compressed(table, size, _COMPRESSED_2X) for table in tables(section.history_2x)],
        tables(section.clean),
        tables(section.latents),
    ]
    cos, sin = rotation_tables(*(torch.cat(angles)[None, :, None] for angles in zip(*every, strict=True)))
    # In this order, as in diffusers: the scale is rounded to the dtype first.
    guidance = torch.tensor([inputs.guidance_scale], dtype=dtype, device=near.device) * 1000.0
    return _Seen(
        tokens=torch.cat([far, middle, near], dim=1),
        image=module.image_projection(inputs.image_embeds.to(dtype)),
        cos=cos,
        sin=sin,
        guidance=guidance,
    )


def _compressed(table: torch.Tensor, size: tuple[int, int], ratio: tuple[int, int, int]) -> torch.Tensor:
    """Return the means of a table of the rotary embedding over the tokens that become one.

    Source: `HunyuanVideoFramepackTransformer3DModel._pad_rotary_emb`.

    Args:
        table: (frames * rows * columns, head width).
        size: rows and columns of tokens in a frame.
    """
    grid = table.T[None].unflatten(2, (-1, *size))
    missing = [-side % step for side, step in zip(grid.shape[2:], ratio, strict=True)]
    padded = F.pad(grid, [n for count in reversed(missing) for n in (0, count)], mode="replicate")
    return F.avg_pool3d(padded, ratio, stride=ratio).flatten(2)[0].T
