"""The transformer in PyTorch: diffusers' modules, without the padding of the text and its mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import NONE
from runtime.execution.attention import Attention, attention
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import PROMPTED, OnDegraded
from runtime.execution.first_block_cache import Sharing


class JointAttention:
    """The attention of both kinds of blocks with a kernel of `execution.attention`, which takes no mask.

    Source: `HunyuanVideoAttnProcessor2_0`.
    """

    def __init__(self, attend: Attention) -> None:
        self._attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a block adds to the clip's tokens and to the text's."""
        count, joint = hidden_states.shape[1], attn.add_q_proj is None
        x = torch.cat([hidden_states, encoder_hidden_states], dim=1) if joint else hidden_states
        q, k, v = (project(x).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        q, k = (
            torch.cat([apply_rotary_emb(y[:, :count], image_rotary_emb, sequence_dim=1), y[:, count:]], dim=1)
            for y in (q, k)
        )
        if not joint:
            projects = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            of_text = [project(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for project in projects]
            of_text = [attn.norm_added_q(of_text[0]), attn.norm_added_k(of_text[1]), of_text[2]]
            q, k, v = (torch.cat(pair, dim=1) for pair in zip((q, k, v), of_text, strict=True))
        out = self._attend(q, k, v).flatten(2, 3)
        clip, text = out[:, :count], out[:, count:]
        return (clip, text) if joint else (attn.to_out[0](clip), attn.to_add_out(text))


def predict(module: Any, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the velocity, as `HunyuanVideoTransformer3DModel.forward` does with a mask of the text's padding.

    Padding tokens have no influence on others: the refiner and all blocks mask their keys. So a text without them gives
    the same, and attention without a mask.

    Args:
        module: a `HunyuanVideoTransformer3DModel`.
        latents: (1, channels, frames, height, width).
        times: scalar timestep, or (timestep, 1000 × guidance scale) if the module embeds it.
        text: (1, 1 + tokens, text width): CLIP's embedding, padded with zeros, and LLaMA's.
    """
    config = module.config
    dtype = module.x_embedder.proj.weight.dtype
    _, _, frames, height, width = latents.shape
    frames, height, width = frames // config.patch_size_t, height // config.patch_size, width // config.patch_size
    timestep, *guidance = times.reshape(-1, 1)
    text = text.to(dtype)
    pooled, tokens = text[:, 0, : config.pooled_projection_dim], text[:, 1:]
    x = latents.to(dtype)
    rotations = module.rope(x)
    # As in the pipeline, the guidance scale has the transformer's dtype.
    embedded, _ = module.time_text_embed(timestep, pooled, guidance[0].to(dtype) if guidance else None)
    x = module.x_embedder(x)
    tokens = module.context_embedder(tokens, timestep, None)
    for block in (*module.transformer_blocks, *module.single_transformer_blocks):
        x, tokens = block(x, tokens, embedded, None, rotations)
    x = module.proj_out(module.norm_out(x, embedded))
    x = x.reshape(1, frames, height, width, -1, config.patch_size_t, config.patch_size, config.patch_size)
    x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)
    velocity: torch.Tensor = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return velocity


class PyTorchDenoiser:
    """A `diffusers.HunyuanVideoTransformer3DModel`; see `execution.components.PyTorchDenoiser`.

    It runs uncompiled and without CUDA graphs: a plan's `Speed` that has them is reported as degraded.
    """

    pairs = False
    compile_seconds = 0.0

    def __init__(self, module: Any, speed: Speed = EAGER) -> None:
        self._module = module
        self.dtype: torch.dtype = module.x_embedder.proj.weight.dtype
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """See `execution.components.PyTorchDenoiser`."""
        assert engines is None, "the family has no block programs"
        for block in (*self._module.transformer_blocks, *self._module.single_transformer_blocks):
            block.attn.processor = JointAttention(attention(speed.attention))
        for field in ("compiled", "graphed"):
            if getattr(speed, field) != getattr(EAGER, field) and on_degraded is not None:
                on_degraded(field, Fact("execution.option_unsupported"))

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """Do nothing: the spec excludes step caches."""
        assert step_cache == NONE
        assert sharing is None
        yield

    def reset_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def forget(self) -> None:
        """Do nothing: nothing is kept."""

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `execution.components.Denoiser`."""
        del which
        return predict(self._module, latents, timestep, text_embeds)

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `execution.components.Denoiser`."""
        return self(latents, timestep, first), self(latents, timestep, second)
