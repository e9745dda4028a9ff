"""FramePack's transformer on diffusers' modules and weights, with HunyuanVideo's blocks.

Equal to `diffusers.HunyuanVideoFramepackTransformer3DModel` up to rounding. What a section sees does not change during
its steps, so its tokens and the tables of the rotary embedding are computed once per section. All sections of a video
have the same shapes, so a CUDA graph recorded in one section serves the next ones.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.execution.components import SectionInputs
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.rotation import Rotation, rotation_tables
from runtime.families.hunyuan_video import transformer as hunyuan_video

# Frames, rows and columns of tokens that become one in the compressed history.
_COMPRESSED_2X, _COMPRESSED_4X = (2, 2, 2), (4, 4, 4)


class _Seen(NamedTuple):
    """What all steps of a section share.

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


class PyTorchSectionDenoiser(hunyuan_video.PyTorchDenoiser):
    """A `diffusers.HunyuanVideoFramepackTransformer3DModel`; see `execution.components.SectionDenoiser`.

    Args:
        module: its weights may lie elsewhere until it is called.
    """

    _seen: _Seen | None = None

    @torch.no_grad()
    def see(self, inputs: SectionInputs) -> None:
        """See `SectionDenoiser`."""
        module, dtype, section = self._module, self.dtype, inputs.section
        parts = (inputs.clean, inputs.history_2x, inputs.history_4x)
        near, middle, far = module.clean_x_embedder(*(part.to(dtype) for part in parts))
        height, width = inputs.clean.shape[3:]

        def tables(positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = module.rope(torch.tensor(positions), height, width, inputs.clean.device)
            return cos, sin

        size = height // module.config.patch_size, width // module.config.patch_size
        every = [
            [_compressed(one, size, _COMPRESSED_4X) for one in tables(section.history_4x)],
            [_compressed(one, size, _COMPRESSED_2X) for one in tables(section.history_2x)],
            tables(section.clean),
            tables(section.latents),
        ]
        cos, sin = rotation_tables(*(torch.cat(one)[None, :, None] for one in zip(*every, strict=True)))
        # In this order, as in diffusers: the scale is rounded to the dtype first.
        guidance = torch.tensor([inputs.guidance_scale], dtype=dtype, device=near.device) * 1000.0
        seen = _Seen(
            tokens=torch.cat([far, middle, near], dim=1),
            image=module.image_projection(inputs.image_embeds.to(dtype)),
            cos=cos,
            sin=sin,
            guidance=guidance,
        )
        self._seen = seen if self._graphed is None else self._in_place(seen, self._graphed)

    def _in_place(self, seen: _Seen, graphed: CudaGraphRunner) -> _Seen:
        """Return what a section sees in the tensors that recorded passes read, if the shapes are the same."""
        known = self._seen
        if known is None or any(old.shape != new.shape for old, new in zip(known, seen, strict=True)):
            graphed.forget()
            return seen
        for old, new in zip(known, seen, strict=True):
            old.copy_(new)
        return known

    def forget(self) -> None:
        """Free what the last section sees."""
        super().forget()
        self._seen = None

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the velocity; the text's padding is left out instead of masked."""
        module, seen = self._module, self._seen
        assert seen is not None, "call `see` first"
        config = module.config
        _, _, frames, height, width = latents.shape
        frames, height, width = frames // config.patch_size_t, height // config.patch_size, width // config.patch_size
        embeds, times = text().to(self.dtype), timestep.reshape(1)
        pooled, words = embeds[:, 0, : config.pooled_projection_dim], embeds[:, 1:]
        own = module.x_embedder(latents.to(self.dtype))
        embedded, _ = module.time_text_embed(times, pooled, seen.guidance)
        words = module.context_embedder(words, times, None)
        x = hunyuan_video.run_blocks(
            module,
            torch.cat([seen.tokens, own], dim=1),
            torch.cat([seen.image, words], dim=1),
            embedded,
            seen.rotation,
        )
        return hunyuan_video.unpatched(x[:, seen.tokens.shape[1] :], frames, height, width, config)


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
