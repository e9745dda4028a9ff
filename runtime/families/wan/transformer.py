"""Wan's transformer in a faster order of operations, on diffusers' modules and weights.

Equal to `diffusers.WanTransformer3DModel` up to rounding (tests/families/wan/test_transformer.py). Differences:

- The tables of the rotary embedding are computed once per size. The sines carry the sign of each channel, so that a
  rotation is two products and a sum.
- The text is the same in all steps. It is projected once per clip; `TextState` can also hold every block's keys and
  values of it.
- All tokens of a clip have the same timestep, except those of a first frame that is given. Where diffusers passes one
  timestep per token (TI2V-5B), one or two are passed.
- Operations between two matrix products are adjacent, so that a compiler can fuse them into one kernel.

`install` replaces `forward` of a loaded module and of its blocks. Both keep diffusers' calling convention, so that its
hooks, and with them offloading, caching, LoRAs and quantized layers, still work. Attention processors would not be
enough, because the order of operations changes in the whole block.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import NONE
from runtime.execution.attention import BlockKernels, attention
from runtime.execution.attention_guidance import attend_text
from runtime.execution.block_engines import BlockEngines, BoundWeights, parts_of, run_pass
from runtime.execution.compilation import CompiledStep, OnDegraded
from runtime.execution.components import PROMPTED
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.fused_layers import fuse as fuse_layers
from runtime.execution.fused_layers import unfuse_if_stale
from runtime.execution.memory import release_cached_memory
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.rotation import Rotation, rotate, rotation_tables
from runtime.execution.step_caches import Sharing, StepCaching
from runtime.execution.text_states import TextState, TextStates
from runtime.families.wan import animate, vace
from runtime.families.wan.spec import MAX_SEQUENCE_LENGTH
from runtime.models.packed_layers import use_int8_kernels
from runtime.models.row_operations import add_gated, by_token, computed, layer_norm
from runtime.upstream.diffusers import cache_single_stream

# The text as a block takes it: projected, (batch, text tokens, width), or its keys and values in this block, each
# (batch, text tokens, heads, head width); see `Denoiser` for a negative prompt. With CLIP's embeddings of images: their
# tokens come first, or their keys and values after those of the text.
BlockText: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
# `block_step`, a compiled version of it, or an `EngineStep`.
BlockStep = Callable[..., torch.Tensor]


def block_step(
    block: Any, x: torch.Tensor, text: BlockText, modulation: torch.Tensor, rotation: Rotation, first_count: int = 0
) -> torch.Tensor:
    """Run one block. The function is compiled as a whole.

    Args:
        x: hidden states, (batch, tokens, width).
        text: see `BlockText`.
        modulation: (timesteps, 6, width), in the model's dtype.
        rotation: from `rotation_tables`.
        first_count: the number of first tokens that have the first of two timesteps.

    Returns:
        The hidden states after the block, shaped like `x`.
    """
    table = block.scale_shift_table + modulation.float()
    # Nested calls, so that intermediate values are freed as soon as possible.
    x = _add_attended(
        block, x, block.attend(*block_qkv(block, x, table, rotation, first_count)).flatten(2), table, first_count
    )
    x = x + block.attn2.to_out[0](_attend_text(block, _text_query(block, x), text))
    return _add_feed_forward(block, x, table, first_count)


def block_qkv(
    block: Any, x: torch.Tensor, table: torch.Tensor, rotation: Rotation, first_count: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of self-attention, each (batch, tokens, heads, head width).

    This and the next two functions are the parts of a block between its attentions; each computes any of its tokens.

    Args:
        x: hidden states, (batch, tokens, width), in the dtype of the block's arithmetic or float32.
        table: modulation with the block's table added, (timesteps, 6, width), float32.
        rotation: of these tokens.
        first_count: see `block_step`.
    """
    attn, (shift, scale) = block.attn1, by_token(table[:, :2], x.shape[1], first_count)
    normed = computed(layer_norm, x, 1 + scale, shift, block.norm1.eps, block.compute_dtype)
    if hasattr(attn, "to_qkv"):
        q, k, v = attn.to_qkv(normed).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(normed), attn.to_k(normed), attn.to_v(normed)
    q = rotate(attn.norm_q(q).unflatten(2, (attn.heads, -1)), rotation)
    k = rotate(attn.norm_k(k).unflatten(2, (attn.heads, -1)), rotation)
    return q, k, v.unflatten(2, (attn.heads, -1))


def block_query(
    block: Any, x: torch.Tensor, attended: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states after self-attention and the queries of the text, each (batch, tokens, width).

    Args:
        attended: result of self-attention, (batch, tokens, width).
    """
    x = _add_attended(block, x, attended, table)
    return x, _text_query(block, x)


def block_feed_forward(block: Any, x: torch.Tensor, attended: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the hidden states after the block; `attended` is the result of attention to the text, shaped like `x`."""
    return _add_feed_forward(block, x + block.attn2.to_out[0](attended), table)


def keys_and_values(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a block's keys and values of the projected text, and of the images' tokens before it."""
    image = None
    if attn.add_k_proj is not None:
        image, text = text[:, :-MAX_SEQUENCE_LENGTH], text[:, -MAX_SEQUENCE_LENGTH:]
    projections = [attn.norm_k(attn.to_k(text)), attn.to_v(text)]
    if image is not None:
        projections += [attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)]
    return tuple(tensor.unflatten(2, (attn.heads, -1)) for tensor in projections)


def _add_attended(
    block: Any, x: torch.Tensor, attended: torch.Tensor, table: torch.Tensor, first_count: int = 0
) -> torch.Tensor:
    """Return the hidden states after self-attention, whose result is `attended`, both (batch, tokens, width)."""
    (gate,) = by_token(table[:, 2:3], attended.shape[1], first_count)
    out: torch.Tensor = computed(add_gated, x, block.attn1.to_out[0](attended), gate)
    return out


def _text_query(block: Any, x: torch.Tensor) -> torch.Tensor:
    query: torch.Tensor = block.attn2.norm_q(block.attn2.to_q(block.norm2(x.float()).to(block.compute_dtype)))
    return query


def _attend_text(block: Any, query: torch.Tensor, text: BlockText) -> torch.Tensor:
    keys, values, *of_image = keys_and_values(block.attn2, text) if isinstance(text, torch.Tensor) else text
    query = query.unflatten(2, (block.attn2.heads, -1))
    attended = attend_text(block.attend_text, query, keys, values, block.nag)
    if of_image:
        # A negative prompt has the same images.
        images = (tensor[: len(query)] for tensor in of_image)
        attended = attended + block.attend_text(query, *images).flatten(2)
    return attended


def _add_feed_forward(block: Any, x: torch.Tensor, table: torch.Tensor, first_count: int = 0) -> torch.Tensor:
    shift, scale, gate = by_token(table[:, 3:], x.shape[1], first_count)
    normed = computed(layer_norm, x, 1 + scale, shift, block.norm3.eps, block.compute_dtype)
    out: torch.Tensor = computed(add_gated, x, _feed_forward(block.ffn, normed), gate)
    return out


def _feed_forward(ffn: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ffn.net[2](ffn.net[0](x))
    return out


class EngineStep:
    """`block_step` on block engines, for one clip at a time: `x` is (1, tokens, width), float32.

    Only self-attention sees all tokens at once. The rest of a block runs over them in chunks, on the engines or, for
    what they do not compute, in PyTorch.
    """

    def __init__(self, engines: BlockEngines) -> None:
        self._engines = engines

    def __call__(
        self,
        block: Any,
        x: torch.Tensor,
        text: BlockText,
        modulation: torch.Tensor,
        rotation: Rotation,
        first_count: int = 0,
    ) -> torch.Tensor:
        """See `block_step`; `x` is not modified."""
        engines, x = self._engines, x.contiguous()
        parts = parts_of(engines, x.shape[1], block.scale_shift_table + modulation.float(), first_count)
        weights = engines.weights(block, x.device)
        attended = self._attend(block, x, parts, rotation, weights)
        if isinstance(text, torch.Tensor):
            text = keys_and_values(block.attn2, text)
        (out,) = engines.outputs("block_feed_forward", x)
        for part, table in parts:
            here, attended_here = x[:, part], attended[:, part]
            stream, query = engines.outputs("block_query", here)
            engines.run(
                "block_query",
                {"x": here, "attended": attended_here, "modulation": table},
                weights,
                (stream, query),
                partial(block_query, block, here, attended_here, table),
            )
            text_attended = _attend_text(block, query, text).contiguous()
            engines.run(
                "block_feed_forward",
                {"x": stream, "attended": text_attended, "modulation": table},
                weights,
                (out[:, part],),
                partial(block_feed_forward, block, stream, text_attended, table),
            )
        return out

    def _attend(
        self,
        block: Any,
        x: torch.Tensor,
        parts: list[tuple[slice, torch.Tensor]],
        rotation: Rotation,
        weights: BoundWeights,
    ) -> torch.Tensor:
        """Return the result of self-attention, (1, tokens, width)."""
        engines = self._engines
        projections = engines.outputs("block_qkv", x)
        for part, table in parts:
            cos, sin = (angles[:, part] for angles in rotation)
            engines.run(
                "block_qkv",
                {"x": x[:, part], "modulation": table, "cos": cos.squeeze(2), "sin": sin.squeeze(2)},
                weights,
                tuple(tensor[:, part] for tensor in projections),
                partial(block_qkv, block, x[:, part], table, (cos, sin)),
            )
        attended: torch.Tensor = block.attend(*(tensor.unflatten(2, (block.attn1.heads, -1)) for tensor in projections))
        return attended.flatten(2).contiguous()


def project_text(
    module: Any, embeds: torch.Tensor, *, keys_values: bool, face: torch.Tensor | None = None
) -> TextState:
    """Return the state of text embeddings, (batch, text tokens, text width), in a transformer.

    Args:
        embeds: for a transformer that attends to images, with their tokens before those of the text, see `Denoiser`.
        keys_values, face: whether each block's keys and values are kept, and the state of a face; see `TextState`.
    """
    embedder = module.condition_embedder
    text = embeds[:, -MAX_SEQUENCE_LENGTH:]
    projected = embedder.text_embedder(text)
    if embedder.image_embedder is not None:
        image = embeds[:, :-MAX_SEQUENCE_LENGTH, : module.config.image_dim]
        if embedder.image_embedder.pos_embed is not None:
            image = image.unflatten(1, (2, -1)).flatten(0, 1)  # as diffusers takes two images
        projected = torch.cat([embedder.image_embedder(image), projected], dim=1)
    blocks = [*module.blocks, *vace.control_blocks(module)] if keys_values else None
    return TextState(projected, lambda block, text: keys_and_values(block.attn2, text), blocks, face)


def install(
    module: Any,
    speed: Speed = EAGER,
    step: BlockStep = block_step,
    *,
    face_step: BlockStep = animate.face_step,
    wide: bool = False,
) -> None:
    """Replace `forward` of a loaded transformer and its blocks; later calls change the options.

    Hooks that diffusers adds later wrap the new `forward` as they would wrap the original.

    Args:
        module: a `diffusers.WanTransformer3DModel`, `WanVACETransformer3DModel` or `WanAnimateTransformer3DModel`,
            without hooks at the first call.
        speed: has the kernels of self-attention; cross-attention to the text is always "native". It also has the scale
            by which that is guided, see `attention_guidance`.
        step: `block_step`, a compiled version of it, or an `EngineStep`.
        face_step: `animate.face_step` or a compiled version of it.
        wide: whether hidden states are float32 between blocks, whatever the dtype of the weights.
    """
    native = attention("native")
    # Not the dtype of a block's parameters, which may be quantized.
    dtype: torch.dtype = module.patch_embedding.weight.dtype
    for blocks, forward in ((module.blocks, _block_forward), (vace.control_blocks(module), vace.control_block_forward)):
        for block in blocks:
            unfuse_if_stale(*_projections(block.attn1))
            if not hasattr(block, "step"):
                block.forward = MethodType(forward, block)
            block.attend_text, block.compute_dtype, block.nag = native, dtype, speed.nag
    for block in animate.face_blocks(module):
        if not hasattr(block, "step"):
            block.forward = MethodType(animate.face_forward, block)
        block.attend_text, block.step = native, face_step
    module.kernels = BlockKernels(speed)
    module.kernels.choose(vace.in_order(module))
    _use_step(module, step, wide=wide)
    if getattr(module, "own_first", None) is None:
        module.forward = MethodType(_forward, module)
        module.own_first = lambda count: count
        module.own_tokens = lambda count: (0, count)
        module.control_scales = (1.0,) * len(vace.control_blocks(module))


def _use_step(module: Any, step: BlockStep, *, wide: bool = False) -> None:
    for block in vace.in_order(module):
        block.step = step
    module.is_wide = wide


def _block_forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: BlockText,
    temb: torch.Tensor,
    rotary_emb: Rotation,
    first_count: int = 0,
    hint: vace.Hint | animate.FaceHint | None = None,
) -> torch.Tensor:
    """Run one block. The signature begins as that of diffusers' block, but the text may be keys and values.

    Args:
        hint: is added to the output.
    """
    out: torch.Tensor = self.step(self, hidden_states, encoder_hidden_states, temb, rotary_emb, first_count)
    return out if hint is None else hint.added_to(out)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor | TextState | Callable[[], TextState],
    return_dict: bool = False,
) -> tuple[torch.Tensor]:
    """Return the prediction, (batch, output channels, frames, height, width), in a tuple.

    Args:
        hidden_states: (batch, channels, frames, height, width); those of what steers follow those of the latents.
        timestep: (1,): of all tokens, or (2,): of the first latent frame's and of the others'.
        encoder_hidden_states: text embeddings, or their state from `project_text`. A function that returns the state
            is called here, because offloaded weights are on the device by now.
    """
    assert not return_dict
    batch, _, frames, height, width = hidden_states.shape
    pt, ph, pw = self.config.patch_size
    grid = (frames // pt, height // ph, width // pw)
    rotation = _rotation(self, hidden_states)
    x = self.patch_embedding(vace.latent_channels(self, hidden_states))
    if animate.face_blocks(self):
        x = animate.add_poses(self, x, hidden_states)
    x = x.flatten(2).transpose(1, 2).contiguous()
    dtype = x.dtype
    time, modulation = _modulate(self.condition_embedder, timestep, dtype)
    if self.is_wide:
        x = x.float()
    text = encoder_hidden_states
    if isinstance(text, torch.Tensor):
        text = project_text(self, text, keys_values=False)
    elif not isinstance(text, TextState):
        text = text()
    first_count = self.own_first(grid[1] * grid[2]) if len(timestep) > 1 else 0
    self.kernels.choose(vace.in_order(self))
    branch: vace.ControlBranch | animate.FaceBranch | None = None
    if text.face is not None:
        count = math.prod(grid)
        branch = animate.FaceBranch(self, text.face, count, self.own_tokens(count))
    if vace.control_blocks(self):
        branch = vace.ControlBranch(self, x, hidden_states, text, modulation, rotation)
    for index, block in enumerate(self.blocks):
        hint = None if branch is None else branch.hint(index)
        x = block(x, text.for_block(index), modulation, rotation, first_count, hint)
    shift, scale = by_token(self.scale_shift_table + time.unsqueeze(1), x.shape[1], first_count)
    # In place: these tensors are the largest of a pass on block engines.
    x = self.proj_out(self.norm_out(x.float()).mul_(1 + scale).add_(shift).to(dtype))
    x = x.reshape(batch, *grid, pt, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return (x.flatten(6, 7).flatten(4, 5).flatten(2, 3),)


def _modulate(embedder: Any, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings of timesteps, (timesteps, width), and the blocks' modulation, (timesteps, 6, width)."""
    sinusoids = embedder.timesteps_proj(timestep)
    linear_dtype = next(iter(embedder.time_embedder.parameters())).dtype
    time = embedder.time_embedder(sinusoids.to(linear_dtype)).to(dtype)
    return time, embedder.time_proj(embedder.act_fn(time)).unflatten(1, (6, -1))


def _rotation(module: Any, latents: torch.Tensor) -> Rotation:
    """Return the rotation tables for a size; the last ones are cached."""
    key = (tuple(latents.shape[2:]), latents.device)
    cached: tuple[Any, Rotation] | None = module.__dict__.get("_tables")
    if cached is None or cached[0] != key:
        cached = (key, rotation_tables(*module.rope(latents)))
        module.__dict__["_tables"] = cached
    return cached[1]


def fuse(module: Any) -> bool:
    """Fuse each block's query, key and value projections, see `fused_layers.fuse`; return whether any was fused."""
    fused = [fuse_layers(*_projections(block.attn1)) for block in vace.in_order(module)]
    return any(fused)


def _projections(attn: Any) -> tuple[Any, str, tuple[Any, Any, Any]]:
    """Return the arguments of `fused_layers` for an attention's projections."""
    return attn, "to_qkv", (attn.to_q, attn.to_k, attn.to_v)


def share_tokens(module: Any, tokens: Tokens) -> None:
    """Divide a transformer's tokens among several processes.

    Each process takes its part of the tokens and rotations before the first block, and before the first control block.
    The parts are gathered after the last projection.
    """

    def count_tokens(transformer: Any, args: tuple[Any, ...]) -> None:
        grid = zip(args[0].shape[2:], transformer.config.patch_size, strict=True)
        tokens.count = math.prod(size // patch for size, patch in grid)

    def divide_input(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (tokens.own(args[0]), *args[1:])

    def divide_control(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        before, text, state, *others = args
        return (tokens.own(before), text, tokens.own(state), *others)

    def divide_rotations(_: Any, __: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tokens.own(part) for part in out)

    blocks: Any = module.blocks
    parts: Any = module
    parts.own_first = tokens.own_first
    parts.own_tokens = lambda _: (tokens.start, tokens.share)
    parts.register_forward_pre_hook(count_tokens)
    parts.rope.register_forward_hook(divide_rotations)
    blocks[0].register_forward_pre_hook(divide_input)
    for block in vace.control_blocks(module)[:1]:
        block.register_forward_pre_hook(divide_control)
    parts.proj_out.register_forward_hook(lambda _, __, out: tokens.all(out))
    parts.kernels = parts.kernels.shared(tokens.around)


class PyTorchDenoiser(StepCaching):
    """A `diffusers.WanTransformer3DModel` with the `forward` of this module.

    The `TextState` of the last texts is cached, by the identity of their tensors, until `forget`.

    Attributes:
        dtype: the dtype of its arithmetic.
        pairs: see `Denoiser`.

    Args:
        module: the transformer; its weights may be elsewhere until it is called.
        speed: execution options; `compute` changes them.
    """

    def __init__(self, module: Any, speed: Speed = EAGER) -> None:
        # Not the dtype of any parameter: norms are always in float32.
        self._module = module
        self.dtype: torch.dtype = module.patch_embedding.weight.dtype
        self._texts = TextStates()
        self._graphed: CudaGraphRunner | None = None
        self._face: torch.Tensor | None = None
        self._engines: BlockEngines | None = None
        self.compute(speed)

    def compute(
        self,
        speed: Speed,
        on_degraded: Callable[[str, Fact], None] | None = None,
        engines: BlockEngines | None = None,
    ) -> None:
        """Apply a plan's `Speed`, and block engines until `forget`, from the next call on.

        Args:
            on_degraded: called with each field of `Speed` that cannot be applied, and the reason.
            engines: opened for this model; blocks are then not compiled or fused, and passes not paired.
        """

        def report(field: str) -> OnDegraded:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        face = self._face
        self.forget()
        self._face, self._engines = face, engines
        if engines is not None:
            speed = speed.replace(compiled=False, paired=False, fused=False)
        self._step = CompiledStep(block_step, report("compiled")) if speed.compiled else None
        self._face_step = None
        if speed.compiled and animate.face_blocks(self._module):
            self._face_step = CompiledStep(animate.face_step, report("compiled"))
        if engines is None:
            face_step = self._face_step or animate.face_step
            install(self._module, speed, self._step or block_step, face_step=face_step)
        else:
            install(self._module, speed, EngineStep(engines), wide=True)
        use_int8_kernels(self._module, used=speed.int8_kernels, on_failed=report("int8_kernels"))
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._cache_keys_values = speed.text_kept
        self.pairs = speed.paired
        self._graphed = CudaGraphRunner(self._predict, report("graphed")) if speed.graphed else None

    def steer(self, scales: tuple[float, ...], face: torch.Tensor | None = None) -> None:
        """See `execution.components.ControlDenoiser`."""
        self._module.control_scales, self._face = scales, face
        self._texts.clear()
        if self._graphed is not None:
            self._graphed.forget()  # a graph contains them

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """See `execution.components.PyTorchDenoiser`."""
        if step_cache != NONE and animate.face_blocks(self._module):
            cache_single_stream(type(self._module.blocks[0]))
        with super().caching(step_cache, sharing):
            yield

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        run = partial(self._pass, latents, timestep, text_embeds, which)
        return run_pass(self._engines, self._graphed, self.reset_cache, run)

    def _pass(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str
    ) -> torch.Tensor:
        if not self._caches:
            return self._run(latents, timestep, {which: text_embeds})
        with self._module.cache_context(which):
            return self._run(latents, timestep, {which: text_embeds})

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """See `Denoiser`."""
        if not self.pairs:
            return super().together(latents, timestep, texts)
        return self._run(torch.cat([latents] * len(texts)), timestep, texts).split(1)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return sum(step.seconds for step in (self._step, self._face_step) if step is not None)

    def forget(self) -> None:
        """Free everything cached for a text or a size; block engines are not used from then on."""
        if self._engines is not None:
            self._engines = None
            _use_step(self._module, block_step)
        self._texts.clear()
        self._face = None
        self._module.__dict__.pop("_tables", None)  # see `_rotation`
        if self._graphed is not None:
            self._graphed.forget()

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def _run(self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        text = self._texts.later(tuple(texts.values()), partial(self._project, tuple(texts)))
        if self._graphed is None:
            return self._predict(latents, timestep, text)
        return self._graphed(latents, timestep, text)

    def _project(self, passes: tuple[str, ...], embeds: torch.Tensor) -> TextState:
        embeds = embeds.to(self.dtype)
        face = None if self._face is None else animate.face_tokens(self._module, self._face, passes, embeds)
        return project_text(self._module, embeds, keys_values=self._cache_keys_values, face=face)

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], TextState]) -> torch.Tensor:
        output: torch.Tensor = self._module(latents.to(self.dtype), timestep.reshape(-1), text)[0]
        return output
