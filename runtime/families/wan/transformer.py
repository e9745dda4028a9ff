"""Wan's transformer computed so that little is done twice: diffusers' modules and weights, another order of work.

Equal to `diffusers.WanTransformer3DModel` up to rounding (tests/families/wan/test_transformer.py). What differs:

- The rotary embedding's tables are made once for a size, signed, so that a rotation is two products and a sum.
- What the text becomes does not depend on the step: it is projected once a clip, and where `TextState` holds them, so
  are every block's keys and values of it.
- A text-to-video clip has one timestep for all its tokens: TI2V-5B's row per token is one row.
- What lies between two matrix products stands together, so that a compiler makes one kernel of it.

`install` changes the classes of a loaded module and its blocks. They are called as diffusers calls them, hooks
included, so that offloading, caching, LoRA and quantized layers work as they do there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch import nn

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import strength_of
from runtime.execution.attention import Attention, attention
from runtime.execution.compilation import CompiledStep, OnDegraded
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.denoiser import PROMPTED
from runtime.execution.first_block_cache import Sharing, first_block_cached
from runtime.execution.memory import release_cached_memory
from runtime.execution.parallel.ulysses import Tokens
from runtime.models.weights import MAKING

# Keys and values of the text, each (batch, text tokens, heads, head width); or what they are made of, (batch, text
# tokens, width).
BlockText = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]
Step = Callable[..., torch.Tensor]
# Texts whose keys and values are held: a prompt, a negative prompt, and both together.
_TEXTS = 2


def block_step(
    block: Any, x: torch.Tensor, text: BlockText, modulation: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """Return `x`, (batch, tokens, width), after one block: what is compiled as one.

    Args:
        modulation: (batch, 6, width), in the model's dtype.
        rotation: from `rotation_tables`.
    """
    table = block.scale_shift_table + modulation.float()
    shift, scale, gate, ff_shift, ff_scale, ff_gate = table.chunk(6, dim=1)
    normed = (block.norm1(x.float()) * (1 + scale) + shift).to(x.dtype)
    x = _added(x, _self_attention(block.attn1, normed, rotation, block.attend) * gate)
    normed = block.norm2(x.float()).to(x.dtype)
    x = x + _cross_attention(block.attn2, normed, text, block.attend_text)
    normed = (block.norm3(x.float()) * (1 + ff_scale) + ff_shift).to(x.dtype)
    return _added(x, _feed_forward(block.ffn, normed).float() * ff_gate)


def rotation_tables(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """Return diffusers' cosines and sines, (1, tokens, 1, head width), the sines with the sign of each channel."""
    signed = sin.clone()
    signed[..., 0::2].neg_()
    return cos, signed


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each pair of neighbouring channels of (batch, tokens, heads, head width) by its token's angles."""
    cos, sin = rotation
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


def keys_and_values(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's keys and values of the projected text."""
    keys = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    return keys, attn.to_v(text).unflatten(2, (attn.heads, -1))


def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum, added in float32.

    A function of its own so that `y` is computed before `x` is brought to float32, and neither is held longer than
    that: together a sixth of what a block takes.
    """
    return (x.float() + y).to(x.dtype)


def _self_attention(attn: Any, x: torch.Tensor, rotation: Rotation, attend: Attention) -> torch.Tensor:
    if getattr(attn, "fused_projections", False):
        q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    q = rotate(attn.norm_q(q).unflatten(2, (attn.heads, -1)), rotation)
    k = rotate(attn.norm_k(k).unflatten(2, (attn.heads, -1)), rotation)
    y = attend(q, k, v.unflatten(2, (attn.heads, -1))).flatten(2)
    out: torch.Tensor = attn.to_out[0](y)
    return out


def _cross_attention(attn: Any, x: torch.Tensor, text: BlockText, attend: Attention) -> torch.Tensor:
    q = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1))
    k, v = keys_and_values(attn, text) if isinstance(text, torch.Tensor) else text
    out: torch.Tensor = attn.to_out[0](attend(q, k, v).flatten(2))
    return out


def _feed_forward(ffn: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ffn.net[2](ffn.net[0](x))
    return out


class FastBlock(WanTransformerBlock):
    """A block of diffusers', called alike; `encoder_hidden_states` may be its text's keys and values."""

    step: Step
    attend: Attention
    attend_text: Attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: BlockText,
        temb: torch.Tensor,
        rotary_emb: Rotation,
    ) -> torch.Tensor:
        """Return the hidden states after this block."""
        return self.step(self, hidden_states, encoder_hidden_states, temb, rotary_emb)


class TextState:
    """What a text is to one transformer: projected, and with every block's keys and values where they are kept."""

    def __init__(self, projected: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        self._projected = projected
        self._kept = kept

    def of(self, block: int) -> BlockText:
        """Return what a block takes."""
        return self._projected if self._kept is None else self._kept[block]


class FastTransformer(WanTransformer3DModel):
    """A transformer of diffusers' whose blocks are `FastBlock`s."""

    def read(self, embeds: torch.Tensor, *, keep: bool) -> TextState:
        """Return what text embeddings, (batch, text tokens, text width), are to this transformer.

        Args:
            keep: hold every block's keys and values too; the weights must all be at hand.
        """
        embedder: Any = self.condition_embedder
        projected = embedder.text_embedder(embeds)
        blocks: Any = self.blocks
        kept = [keys_and_values(block.attn2, projected) for block in blocks] if keep else None
        return TextState(projected, kept)

    def modulate(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a timestep, (batch,), is: its embedding, (batch, width), and (batch, 6, width) of it."""
        embedder: Any = self.condition_embedder
        sinusoids = embedder.timesteps_proj(timestep)
        wanted = next(iter(embedder.time_embedder.parameters())).dtype
        time = embedder.time_embedder(sinusoids.to(wanted)).to(dtype)
        return time, embedder.time_proj(embedder.act_fn(time)).unflatten(1, (6, -1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor | TextState | Callable[[], TextState],
        encoder_hidden_states_image: torch.Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the prediction, shaped like `hidden_states`, in a tuple.

        Args:
            hidden_states: (batch, channels, frames, height, width).
            timestep: (batch,): one for all tokens.
            encoder_hidden_states: text embeddings, or what `read` made of them. A function is called here, where
                weights that wait elsewhere are at hand.
        """
        assert encoder_hidden_states_image is None, "text to video"
        batch, _, frames, height, width = hidden_states.shape
        pt, ph, pw = self.config.patch_size
        grid = (frames // pt, height // ph, width // pw)
        rotation = self._rotation(hidden_states)
        patches: Any = self.patch_embedding
        x = patches(hidden_states).flatten(2).transpose(1, 2).contiguous()
        time, modulation = self.modulate(timestep, x.dtype)
        text = encoder_hidden_states
        if isinstance(text, torch.Tensor):
            text = self.read(text, keep=False)
        elif not isinstance(text, TextState):
            text = text()
        blocks: Any = self.blocks
        for index, block in enumerate(blocks):
            x = block(x, text.of(index), modulation, rotation)
        table: Any = self.scale_shift_table
        shift, scale = (table + time.unsqueeze(1)).chunk(2, dim=1)
        norm_out: Any = self.norm_out
        project: Any = self.proj_out
        x = project((norm_out(x.float()) * (1 + scale) + shift).to(x.dtype))
        x = x.reshape(batch, *grid, pt, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return (x.flatten(6, 7).flatten(4, 5).flatten(2, 3),)

    def _rotation(self, latents: torch.Tensor) -> Rotation:
        """Return the tables for a size; those of the last one are kept."""
        key = (tuple(latents.shape[2:]), latents.device)
        made: tuple[Any, Rotation] | None = self.__dict__.get("_tables")
        if made is None or made[0] != key:
            rope: Any = self.rope
            made = (key, rotation_tables(*rope(latents)))
            self.__dict__["_tables"] = made
        return made[1]

    def forget(self) -> None:
        """Let go of what is kept for a size."""
        self.__dict__.pop("_tables", None)


# diffusers looks classes up by their names: for adapters, and for the blocks that are not to be split.
FastBlock.__name__ = WanTransformerBlock.__name__
FastTransformer.__name__ = WanTransformer3DModel.__name__


def install(module: Any, kind: str = "native", step: Step = block_step) -> FastTransformer:
    """Let a loaded transformer and its blocks compute as this file says, from the next call on.

    Args:
        module: a `diffusers.WanTransformer3DModel` for text to video, without hooks yet.
        kind: of the attention among the clip's tokens, see `attention`; that to the text is PyTorch's own choice.
        step: what computes a block: `block_step`, or that compiled.
    """
    attend, attend_text = attention(kind), attention("native")
    for block in module.blocks:
        _part_if_stale(block.attn1)
        block.__class__ = FastBlock
        block.step, block.attend, block.attend_text = step, attend, attend_text
    module.__class__ = FastTransformer
    _let_hooks_know()
    made: FastTransformer = module
    return made


def fuse(module: Any) -> bool:
    """Make one matrix of each block's projections to queries, keys and values; its parts stay, as views of it.

    Left out where a layer is not a plain one: quantized, or with an adapter.

    Returns:
        Whether any was made: PyTorch's allocator then keeps what the parts took, as large once more.
    """
    made = False
    for block in module.blocks:
        attn = block.attn1
        layers = (attn.to_q, attn.to_k, attn.to_v)
        plain = all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers)
        if not plain or getattr(attn, "fused_projections", False):
            continue
        with MAKING:
            whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), device="meta")
            for name in ("weight", "bias"):
                parts = [getattr(layer, name) for layer in layers]
                joined = torch.cat([part.data for part in parts])
                setattr(whole, name, nn.Parameter(joined, requires_grad=False))
                for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                    part.data = view
        attn.to_qkv = whole
        attn.fused_projections = made = True
    return made


def _part_if_stale(attn: Any) -> None:
    """Let go of a fused matrix whose parts have been given other weights or an adapter since."""
    if not getattr(attn, "fused_projections", False):
        return
    whole, layers = attn.to_qkv, (attn.to_q, attn.to_k, attn.to_v)
    views = whole.weight.data.split([whole.out_features // len(layers)] * len(layers))
    for layer, view in zip(layers, views, strict=True):
        if type(layer) is not nn.Linear or layer.weight.data_ptr() != view.data_ptr():
            attn.fused_projections = False
            del attn.to_qkv
            return


def _let_hooks_know() -> None:
    """Register the block with diffusers' caching hooks, which look up a class."""
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    if FastBlock not in TransformerBlockRegistry._registry:
        known = TransformerBlockRegistry.get(WanTransformerBlock)
        TransformerBlockRegistry.register(
            FastBlock,
            TransformerBlockMetadata(
                return_hidden_states_index=known.return_hidden_states_index,
                return_encoder_hidden_states_index=known.return_encoder_hidden_states_index,
            ),
        )


def share_tokens(module: Any, tokens: Tokens) -> None:
    """Have a transformer be computed together.

    Tokens and their rotations are shared before the first block, and brought together behind the last projection.
    """

    def share_first(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (tokens.own(given[0]), *given[1:])

    def share_rotations(_: Any, __: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tokens.own(part) for part in out)

    blocks: Any = module.blocks
    parts: Any = module
    parts.rope.register_forward_hook(share_rotations)
    blocks[0].register_forward_pre_hook(share_first)
    parts.proj_out.register_forward_hook(lambda _, __, out: tokens.all(out))
    for block in blocks:
        block.attend = tokens.around(block.attend)


class PyTorchDenoiser:
    """A `diffusers.WanTransformer3DModel`, computed by `FastTransformer`.

    What follows from a text alone is computed when it first comes, and kept for as long as the same tensor comes
    again, or until `forget`.

    Attributes:
        dtype: of its arithmetic.
        pairs: see `Denoiser`.

    Args:
        module: its weights may lie elsewhere until it is called.
        speed: how it is computed, until `compute` says otherwise.
    """

    def __init__(self, module: torch.nn.Module, speed: Speed = EAGER) -> None:
        # Norms stay in float32 whatever the model's dtype; the patch embedding does not.
        self.dtype: torch.dtype = cast("Any", module).patch_embedding.weight.dtype
        self._module: FastTransformer = install(module)
        self._texts: list[tuple[tuple[torch.Tensor, ...], TextState]] = []
        self._graphed: CudaGraphRunner | None = None
        self._caches = False
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: Callable[[str, Fact], None] | None = None) -> None:
        """Compute so from now on.

        Args:
            on_degraded: called with each field of `Speed` that cannot be applied, and the reason.
        """

        def told(field: str) -> OnDegraded:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        self.forget()
        self._step = CompiledStep(block_step, told("compiled")) if speed.compiled else None
        install(self._module, speed.attention, self._step or block_step)
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._keep = speed.text_kept
        self.pairs = speed.paired
        self._graphed = CudaGraphRunner(self._predict, told("graphed")) if speed.graphed else None

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """Reuse across steps, while entered, what `step_cache` says; nothing of it stays.

        Args:
            sharing: those who share the tokens of a pass, where there are others.
        """
        strength = strength_of(step_cache)
        if strength is None:
            yield
            return
        assert not self.pairs, "each pass has a cache of its own"
        assert self._graphed is None, "what is computed is decided anew at each call"
        with first_block_cached(self._module, strength, sharing):
            self._caches = True
            try:
                yield
            finally:
                self._caches = False

    def reset_cache(self) -> None:
        """See `Denoiser`."""
        if self._caches:
            cast("Any", self._module)._reset_stateful_cache()

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        if not self._caches:
            return self._run(latents, timestep, text_embeds)
        with cast("Any", self._module).cache_context(which):
            return self._run(latents, timestep, text_embeds)

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Denoiser`."""
        one, other = self._run(torch.cat([latents, latents]), timestep, first, second).split(1)
        return one, other

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0 if self._step is None else self._step.seconds

    def forget(self) -> None:
        """Let go of all that is kept for a text or a size."""
        self._texts.clear()
        self._module.forget()
        if self._graphed is not None:
            self._graphed.forget()

    # Not in inference mode: what brings weights to the device changes them while the module runs.
    @torch.no_grad()
    def _run(self, latents: torch.Tensor, timestep: torch.Tensor, *texts: torch.Tensor) -> torch.Tensor:
        text = self._read(texts)
        if self._graphed is None:
            return self._predict(latents, timestep, text)
        return self._graphed(latents, timestep, text)

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], TextState]) -> torch.Tensor:
        output: torch.Tensor = self._module(latents.to(self.dtype), timestep.reshape(1), text)[0]
        return output

    def _read(self, texts: tuple[torch.Tensor, ...]) -> Callable[[], TextState]:
        """Return what gives the texts' state; it is called where the weights are at hand."""

        def state() -> TextState:
            for known, kept in self._texts:
                if len(known) == len(texts) and all(a is b for a, b in zip(known, texts, strict=True)):
                    return kept
            made = self._module.read(torch.cat(texts).to(self.dtype), keep=self._keep)
            self._texts = [*self._texts[1 - _TEXTS :], (texts, made)]
            return made

        return state
