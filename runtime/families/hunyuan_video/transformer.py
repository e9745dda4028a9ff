"""HunyuanVideo's transformer on diffusers' modules and weights, in blocks that compile without graph breaks.

Equal to `diffusers.HunyuanVideoTransformer3DModel` up to rounding. Differences:

- The text's padding is left out instead of masked, so that attention takes no mask and any kernel computes it.
- The tables of the rotary embedding are computed once per size. The text's tokens are rotated by no angle, so that a
  single block rotates queries and keys of all tokens at once.
- Queries, keys and values can come from one matrix (`fuse`). The feed-forward of a single block keeps its own: together
  they would save reading the input once, and hold three more tensors of tokens × width while the block attends.
- The clip's and the text's tokens stay in one tensor from one single block to the next.
- Attention is called directly rather than through a processor, which a compiler cannot trace.
- Several processes can share a pass: each has an equal share of the sequence of the clip's and the text's tokens.

`install` replaces `forward` of a loaded module and its blocks. Blocks keep diffusers' calling convention, so that its
hooks, and with them offloading, still work, and so that other modules with the same blocks (FramePack's) can use them.
All layers run within `forward` of the module, because hooks bring those outside of blocks there.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.execution.attention import BlockKernels
from runtime.execution.block_engines import BlockEngines, BoundWeights, run_pass
from runtime.execution.compilation import CompiledStep
from runtime.execution.components import PROMPTED, OnDegraded
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.fused_layers import fuse as fuse_layers
from runtime.execution.fused_layers import unfuse_if_stale
from runtime.execution.memory import release_cached_memory
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.rotation import Rotation, rotate, rotation_tables
from runtime.execution.step_caches import StepCaching
from runtime.models.packed_layers import use_int8_kernels

# Queries, keys and values, each (1, tokens, heads, head width).
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# `double_step`, `single_step`, or a version of one of them that is compiled or on block engines.
DoubleStep = Callable[..., tuple[torch.Tensor, torch.Tensor]]
SingleStep = Callable[..., torch.Tensor]
# Linear layers of queries, keys and values.
Projections = tuple[Any, Any, Any]


# Names of the matrices that `fuse` adds to a block's attention, as diffusers names them.
_FUSED, _FUSED_TEXT = "to_qkv", "to_added_qkv"


class _Stream(NamedTuple):
    """The layers of a double block for one kind of tokens; `fused` is the matrix of all `projections`, if there is."""

    norm1: Any
    projections: Projections
    fused: Any
    norm_query: Any
    norm_key: Any
    to_out: Any
    norm2: Any
    feed_forward: Any


def _streams(block: Any) -> tuple[_Stream, _Stream]:
    """Return a double block's layers for the clip's tokens and for the text's."""
    attn = block.attn
    return (
        _Stream(
            block.norm1,
            _projections(attn),
            getattr(attn, _FUSED, None),
            attn.norm_q,
            attn.norm_k,
            attn.to_out[0],
            block.norm2,
            block.ff,
        ),
        _Stream(
            block.norm1_context,
            _text_projections(attn),
            getattr(attn, _FUSED_TEXT, None),
            attn.norm_added_q,
            attn.norm_added_k,
            attn.to_add_out,
            block.norm2_context,
            block.ff_context,
        ),
    )


def _projections(attn: Any) -> Projections:
    """Return the projections of the clip's tokens; in a single block, of all tokens."""
    return attn.to_q, attn.to_k, attn.to_v


def _text_projections(attn: Any) -> Projections:
    """Return the projections of the text's tokens in a double block."""
    return attn.add_q_proj, attn.add_k_proj, attn.add_v_proj


def double_step(
    block: Any, x: torch.Tensor, text: torch.Tensor, embedded: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one block with weights of their own for the clip's tokens and the text's. It is compiled as a whole.

    Args:
        block: a `HunyuanVideoTransformerBlock` after `install`.
        x: the clip's tokens, (1, tokens, width). A process that shares a pass may have none, here or in `text`.
        text: the text's tokens, (1, text tokens, width).
        embedded: the timestep, guidance scale and pooled text, (1, width).
        rotation: of the clip's tokens and then the text's.

    Returns:
        The tokens after the block, shaped like `x` and `text`.
    """
    clip_layers, text_layers = _streams(block)
    clip_rows, text_rows = (_modulation(layers.norm1, embedded, 6) for layers in (clip_layers, text_layers))
    heads, count = block.attn.heads, x.shape[1]
    own_rotation = rotation[0][:, :count], rotation[1][:, :count]
    # Nested calls, so that intermediate values are freed as soon as possible.
    attended = block.attend(
        *_joined(
            _stream_qkv(clip_layers, x, clip_rows, heads, own_rotation),
            _stream_qkv(text_layers, text, text_rows, heads, None),
        )
    ).flatten(2)
    to_clip, to_text = attended.split([count, text.shape[1]], dim=1)
    return _add_stream(clip_layers, x, to_clip, clip_rows), _add_stream(text_layers, text, to_text, text_rows)


def single_step(block: Any, both: torch.Tensor, embedded: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Run one block with the same weights for all tokens. It is compiled as a whole.

    Args:
        block: a `HunyuanVideoSingleTransformerBlock` after `install`.
        both: the clip's tokens and then the text's, (1, tokens, width).
        embedded, rotation: see `double_step`.

    Returns:
        The tokens after the block, shaped like `both`.
    """
    shift, scale, gate = _modulation(block.norm, embedded, 3)
    out: torch.Tensor = both + gate * block.proj_out(_single_inner(block, both, shift, scale, rotation))
    return out


def _single_inner(
    block: Any, both: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """Return a single block's results of attention and inner layer, (1, tokens, width + inner width)."""
    attn, normed = block.attn, block.norm.norm(both) * (1 + scale) + shift
    fused = getattr(attn, _FUSED, None)
    qkv = _qkv(normed, _projections(attn), fused, attn.norm_q, attn.norm_k, attn.heads, rotation)
    # Compiled, the activation is written to its place in the joined tensor; only the result of attention is copied.
    return torch.cat([block.attend(*qkv).flatten(2), block.act_mlp(block.proj_mlp(normed))], dim=2)


class EngineSteps:
    """`double_step` and `single_step` on block engines; tokens are float32.

    Only attention sees all tokens at once. The rest of a block runs over them in chunks, on the engines or, for what
    they do not compute, in PyTorch.
    """

    def __init__(self, engines: BlockEngines) -> None:
        self._engines = engines

    def double(
        self, block: Any, x: torch.Tensor, text: torch.Tensor, embedded: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `double_step`."""
        engines, dtype = self._engines, embedded.dtype
        qkv, first = engines.outputs("block_qkv", rotation[0]), 0
        streams = []
        for layers, tokens in zip(_streams(block), (x.contiguous(), text.contiguous()), strict=True):
            view, rows = _view_of(layers), _rows(layers.norm1, embedded, 6)
            weights = engines.weights(view, x.device, ("block_qkv", "block_feed_forward"))
            self._project(layers.norm1, view, tokens, rows[:, :2], weights, rotation, qkv, first)
            streams.append((layers, tokens, rows[:, 2:].contiguous(), weights, first))
            first += tokens.shape[1]
        attended = _attended_by(block, qkv)
        results = []
        for layers, tokens, rows, weights, first in streams:
            (out,) = engines.outputs("block_feed_forward", tokens)
            for part in engines.chunks(tokens.shape[1]):
                here, attended_here = tokens[:, part], attended[:, first + part.start : first + part.stop]
                engines.run(
                    "block_feed_forward",
                    {"x": here, "attended": attended_here, "modulation": rows},
                    weights,
                    (out[:, part],),
                    partial(_wide_feed_forward, layers, here, attended_here, rows, dtype),
                )
            results.append(out)
        return results[0], results[1]

    def single(self, block: Any, both: torch.Tensor, embedded: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """See `single_step`."""
        engines, dtype = self._engines, embedded.dtype
        rows, view = _rows(block.norm, embedded, 3), _view_of_single(block)
        weights = engines.weights(view, both.device, ("block_qkv", "block_single"))
        qkv = engines.outputs("block_qkv", both)
        self._project(block.norm, view, both, rows[:, :2], weights, rotation, qkv, 0)
        attended = _attended_by(block, qkv)
        (out,) = engines.outputs("block_single", both)
        for part in engines.chunks(both.shape[1]):
            here, attended_here = both[:, part], attended[:, part]
            engines.run(
                "block_single",
                {"x": here, "attended": attended_here, "modulation": rows},
                weights,
                (out[:, part],),
                partial(_wide_single, block, here, attended_here, rows, dtype),
            )
        return out

    def _project(
        self,
        norm: Any,
        view: Any,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        weights: BoundWeights,
        rotation: Rotation,
        qkv: tuple[torch.Tensor, ...],
        first: int,
    ) -> None:
        """Write queries, keys and values of tokens, the first of which is number `first` of all."""
        rows = rows.contiguous()
        for part in self._engines.chunks(tokens.shape[1]):
            here, place = tokens[:, part], slice(first + part.start, first + part.stop)
            cos, sin = (angles[:, place] for angles in rotation)
            written = tuple(tensor[:, place] for tensor in qkv)
            self._engines.run(
                "block_qkv",
                {"x": here, "modulation": rows, "cos": cos.squeeze(2), "sin": sin.squeeze(2)},
                weights,
                written,
                partial(_wide_qkv, norm, view, here, rows, (cos, sin), written[0].dtype),
            )


def _view_of(layers: _Stream) -> torch.nn.Module:
    """Return a stream's layers by the names of `block_programs`."""
    view = torch.nn.Module()
    view.to_q, view.to_k, view.to_v = layers.projections
    view.norm_q, view.norm_k, view.to_out = layers.norm_query, layers.norm_key, layers.to_out
    view.expand, view.contract = layers.feed_forward.net[0].proj, layers.feed_forward.net[2]
    return view


def _view_of_single(block: Any) -> torch.nn.Module:
    """Return a single block's layers by the names of `block_programs`."""
    view = torch.nn.Module()
    view.to_q, view.to_k, view.to_v = block.attn.to_q, block.attn.to_k, block.attn.to_v
    view.norm_q, view.norm_k = block.attn.norm_q, block.attn.norm_k
    view.expand, view.contract = block.proj_mlp, block.proj_out
    return view


def _rows(norm: Any, embedded: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the shifts, scales and gates of an adaptive norm, (1, rows, width), float32."""
    return torch.cat(_modulation(norm, embedded, rows), dim=1).float()


def _attended_by(block: Any, qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the result of attention of rotated queries, keys and values, (1, tokens, width)."""
    attended: torch.Tensor = block.attend(*(tensor.unflatten(2, (block.attn.heads, -1)) for tensor in qkv))
    return attended.flatten(2).contiguous()


def _wide_qkv(
    norm: Any, view: Any, x: torch.Tensor, rows: torch.Tensor, rotation: Rotation, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Compute `block_qkv` in PyTorch."""
    normed = (norm.norm(x) * (1 + rows[:, 1:2]) + rows[:, 0:1]).to(dtype)
    heads = rotation[0].shape[-1]
    q, k, v = (layer(normed).unflatten(2, (-1, heads)) for layer in (view.to_q, view.to_k, view.to_v))
    return rotate(view.norm_q(q), rotation), rotate(view.norm_k(k), rotation), v


def _wide_feed_forward(
    layers: _Stream, x: torch.Tensor, attended: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `block_feed_forward` in PyTorch."""
    x = x + layers.to_out(attended).float() * rows[:, 0:1]
    normed = (layers.norm2(x) * (1 + rows[:, 2:3]) + rows[:, 1:2]).to(dtype)
    out: torch.Tensor = x + layers.feed_forward(normed).float() * rows[:, 3:4]
    return out


def _wide_single(
    block: Any, x: torch.Tensor, attended: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `block_single` in PyTorch."""
    normed = (block.norm.norm(x) * (1 + rows[:, 1:2]) + rows[:, 0:1]).to(dtype)
    both = torch.cat([attended, block.act_mlp(block.proj_mlp(normed))], dim=2)
    out: torch.Tensor = x + block.proj_out(both).float() * rows[:, 2:3]
    return out


def _joined(of_clip: Qkv, of_text: Qkv) -> Qkv:
    """Return queries, keys and values of the clip's tokens and then the text's."""
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(of_clip, of_text, strict=True))
    return q, k, v


def _modulation(norm: Any, embedded: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the shifts, scales and gates of an adaptive norm, `rows` tensors of (1, 1, width)."""
    vectors: torch.Tensor = norm.linear(norm.silu(embedded))
    return vectors.unsqueeze(1).chunk(rows, dim=2)


def _qkv(
    normed: torch.Tensor,
    projections: Projections,
    fused: Any,
    norm_query: Any,
    norm_key: Any,
    heads: int,
    rotation: Rotation | None,
) -> Qkv:
    """Return queries, keys and values, each (1, tokens, heads, head width).

    Args:
        fused: the matrix of all projections, if there is one.
        rotation: of these tokens; `None` if they are not rotated.
    """
    parts = [layer(normed) for layer in projections] if fused is None else fused(normed).chunk(3, dim=2)
    q, k, v = (part.unflatten(2, (heads, -1)) for part in parts)
    q, k = norm_query(q), norm_key(k)
    return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)


def _stream_qkv(
    layers: _Stream, x: torch.Tensor, rows: tuple[torch.Tensor, ...], heads: int, rotation: Rotation | None
) -> Qkv:
    """Return queries, keys and values of one kind of tokens, see `_qkv`."""
    if not x.shape[1]:
        none = x.unflatten(2, (heads, -1))
        return none, none, none
    normed = layers.norm1.norm(x) * (1 + rows[1]) + rows[0]
    return _qkv(normed, layers.projections, layers.fused, layers.norm_query, layers.norm_key, heads, rotation)


def _add_stream(
    layers: _Stream, x: torch.Tensor, attended: torch.Tensor, rows: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return one kind of tokens after the block, shaped like `x`; `attended` is the result of attention."""
    if not x.shape[1]:
        return x
    _, _, gate, shift, scale, gate_inner = rows
    x = x + layers.to_out(attended) * gate
    normed = layers.norm2(x) * (1 + scale) + shift
    return x + gate_inner * layers.feed_forward(normed)


def install(
    module: Any,
    speed: Speed = EAGER,
    double: DoubleStep = double_step,
    single: SingleStep = single_step,
    *,
    forward: Callable[..., torch.Tensor] | None = None,
    wide: bool = False,
) -> None:
    """Replace `forward` of a loaded transformer and its blocks; later calls change the options.

    Hooks that diffusers adds later wrap the new `forward` as they would wrap the original.

    Args:
        module: has blocks of both kinds, without hooks at the first call.
        forward: computes a pass of the module; `predict` by default. Later calls do not change it.
        speed: has the attention kernels.
        double, single: the steps of both kinds of blocks.
        wide: whether tokens are float32 between blocks, whatever the dtype of the weights.
    """
    if not hasattr(module, "is_wide"):
        module.forward = MethodType(forward or predict, module)
    for blocks, block_forward in (
        (module.transformer_blocks, _double_forward),
        (module.single_transformer_blocks, _single_forward),
    ):
        for block in blocks:
            if not hasattr(block, "step"):
                block.forward = MethodType(block_forward, block)
    module.kernels = BlockKernels(speed)
    module.kernels.choose(_blocks(module))
    for layers in _fusible(module):
        unfuse_if_stale(*layers)
    _use_steps(module, double, single, wide=wide)


def _use_steps(
    module: Any, double: DoubleStep = double_step, single: SingleStep = single_step, *, wide: bool = False
) -> None:
    module.is_wide = wide
    for block in module.transformer_blocks:
        block.step = double
    for block in module.single_transformer_blocks:
        block.step = single


def _blocks(module: Any) -> list[Any]:
    """Return all blocks in the order in which they run."""
    return [*module.transformer_blocks, *module.single_transformer_blocks]


def fuse(module: Any) -> bool:
    """Fuse the blocks' projections of queries, keys and values, see `fused_layers.fuse`; return whether any was."""
    fused = [fuse_layers(*layers) for layers in _fusible(module)]
    return any(fused)


def _fusible(module: Any) -> Iterator[tuple[Any, str, Projections]]:
    """Yield the arguments of `fused_layers` for all blocks: a module, the name of its fused layer, and its layers."""
    for block in module.transformer_blocks:
        yield block.attn, _FUSED, _projections(block.attn)
        yield block.attn, _FUSED_TEXT, _text_projections(block.attn)
    for block in module.single_transformer_blocks:
        yield block.attn, _FUSED, _projections(block.attn)


def _double_forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: None,
    rotary_emb: Rotation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a double block. The signature begins as that of diffusers' blocks, but the rotation is of all tokens."""
    assert attention_mask is None, "padding is left out"
    out: tuple[torch.Tensor, torch.Tensor] = self.step(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
    return out


def _single_forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: None,
    rotary_emb: Rotation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a single block; see `_double_forward`. The results are parts of one tensor."""
    assert attention_mask is None, "padding is left out"
    out = self.step(self, _in_one(hidden_states, encoder_hidden_states), temb, rotary_emb)
    clip, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
    return clip, text


def _in_one(x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the tokens of both, (1, tokens, width); without a copy if they lie one after the other in memory."""
    count, width = x.shape[1] + text.shape[1], x.shape[2]
    adjacent = (
        x.untyped_storage().data_ptr() == text.untyped_storage().data_ptr()
        and x.stride()[1:] == text.stride()[1:] == (width, 1)
        and text.storage_offset() == x.storage_offset() + x.shape[1] * width
    )
    if not adjacent:
        return torch.cat([x, text], dim=1)
    return x.as_strided((1, count, width), (count * width, width, 1))


def share_tokens(module: Any, tokens: Tokens) -> None:
    """Divide a transformer's tokens among several processes, after `install`.

    The clip's tokens and the text's are one sequence, of which each process has an equal share: most have tokens of the
    clip only. The shares are gathered after the last projection.
    """
    module.shared_tokens = tokens
    module.kernels = module.kernels.shared(tokens.around)


def run_blocks(
    module: Any, x: torch.Tensor, text: torch.Tensor, embedded: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """Run all blocks and the last projection.

    Args:
        module: a transformer after `install`.
        x: the clip's tokens, (1, tokens, width), embedded.
        text: the text's tokens without padding, (1, text tokens, width), refined.
        embedded: see `double_step`.
        rotation: of the clip's tokens; those of the text are not rotated.

    Returns:
        The projection of the clip's tokens, (1, tokens, values of a patch).
    """
    shared: Tokens | None = getattr(module, "shared_tokens", None)
    count = x.shape[1]
    module.kernels.choose(_blocks(module), last=text.shape[1])
    rotation = _with_text(rotation, text.shape[1])
    if shared is not None:
        shared.count = count + text.shape[1]
        tokens, first = shared.own(torch.cat([x, text], dim=1)), shared.own_first(count)
        # Copies with the strides of a block's results, so that blocks are compiled once.
        x, text = (part.clone(memory_format=torch.contiguous_format) for part in tokens.tensor_split([first], dim=1))
        rotation = shared.own(rotation[0]), shared.own(rotation[1])
    if module.is_wide:
        x, text = x.float(), text.float()
    for block in module.transformer_blocks:
        x, text = block(x, text, embedded, None, rotation)
    for block in module.single_transformer_blocks:
        x, text = block(x, text, embedded, None, rotation)
    if shared is not None:
        x = _in_one(x, text)
    # The layer itself would round wide tokens, or fail: it expects tokens in the dtype of its weights.
    norm = module.norm_out
    scale, shift = norm.linear(norm.silu(embedded)).chunk(2, dim=1)
    x = norm.norm(x) * (1 + scale)[:, None] + shift[:, None]
    projected: torch.Tensor = module.proj_out(x.to(embedded.dtype))
    return projected if shared is None else shared.all(projected)[:, :count]


def _with_text(rotation: Rotation, text_tokens: int) -> Rotation:
    """Return the tables of the clip's tokens followed by those of tokens that are not rotated."""
    cos, sin = (
        F.pad(table, (0, 0, 0, 0, 0, text_tokens), value=value)
        for table, value in zip(rotation, (1.0, 0.0), strict=True)
    )
    return cos, sin


def _rotation(module: Any, latents: torch.Tensor) -> Rotation:
    """Return the clip's rotation tables for a size; the last ones are cached until `PyTorchDenoiser.forget`."""
    key = (tuple(latents.shape[2:]), latents.device)
    cached: tuple[Any, Rotation] | None = module.__dict__.get("_tables")
    if cached is None or cached[0] != key:
        cos, sin = (table[None, :, None] for table in module.rope(latents))
        cached = (key, rotation_tables(cos, sin))
        module.__dict__["_tables"] = cached
    return cached[1]


def predict(module: Any, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the velocity, as `HunyuanVideoTransformer3DModel.forward` does with a mask of the text's padding.

    Padding tokens have no influence on others: the refiner and all blocks mask their keys. So a text without them gives
    the same, and attention without a mask.

    Args:
        module: a `HunyuanVideoTransformer3DModel` after `install`.
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
    rotation = _rotation(module, x)
    # As in the pipeline, the guidance scale has the transformer's dtype.
    embedded, _ = module.time_text_embed(timestep, pooled, guidance[0].to(dtype) if guidance else None)
    tokens = module.context_embedder(tokens, timestep, None)
    return unpatched(
        run_blocks(module, module.x_embedder(x), tokens, embedded, rotation), frames, height, width, config
    )


def unpatched(x: torch.Tensor, frames: int, height: int, width: int, config: Any) -> torch.Tensor:
    """Return latents, (1, channels, frames, height, width), of the values of their patches.

    Args:
        x: (1, tokens, values of a patch).
        frames, height, width: in tokens.
        config: of the transformer.
    """
    x = x.reshape(1, frames, height, width, -1, config.patch_size_t, config.patch_size, config.patch_size)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class PyTorchDenoiser(StepCaching):
    """A `diffusers.HunyuanVideoTransformer3DModel`; see `execution.components.PyTorchDenoiser`.

    Of a plan's `Speed` it applies the attention kernel, compilation, fused projections and CUDA graphs. The text is
    refined at every step, because its refiner depends on the timestep.
    """

    pairs = False
    # `forward` of the module, see `install`.
    _forward: ClassVar[Callable[..., torch.Tensor]] = staticmethod(predict)

    def __init__(self, module: Any, speed: Speed = EAGER) -> None:
        self._module = module
        self._engines: BlockEngines | None = None
        self._graphed: CudaGraphRunner | None = None
        self.dtype: torch.dtype = module.x_embedder.proj.weight.dtype
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """See `execution.components.PyTorchDenoiser`."""

        def report(field: str) -> Callable[[Fact], None]:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        self.forget()
        if engines is not None:
            speed = speed.replace(compiled=False, fused=False)
        steps = (double_step, single_step) if speed.compiled else ()
        self._compiled = [CompiledStep(step, report("compiled")) for step in steps]
        self._engines = engines
        if engines is None:
            install(self._module, speed, *self._compiled, forward=self._forward)
        else:
            on_engines = EngineSteps(engines)
            install(self._module, speed, on_engines.double, on_engines.single, forward=self._forward, wide=True)
        use_int8_kernels(self._module, used=speed.int8_kernels, on_failed=report("int8_kernels"))
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._graphed = CudaGraphRunner(self._predict, report("graphed")) if speed.graphed else None

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return sum(step.seconds for step in self._compiled)

    def forget(self) -> None:
        """Free the tables of the last size and CUDA graphs; block engines are not used from then on."""
        if self._engines is not None:
            self._engines = None
            _use_steps(self._module)
        self._module.__dict__.pop("_tables", None)  # see `_rotation`
        if self._graphed is not None:
            self._graphed.forget()

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `execution.components.Denoiser`."""
        run = partial(self._pass, latents, timestep, text_embeds, which)
        return run_pass(self._engines, self._graphed, self.reset_cache, run)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def _pass(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str
    ) -> torch.Tensor:
        if self._graphed is not None:
            return self._graphed(latents, timestep, lambda: text_embeds)
        with self._module.cache_context(which) if self._caches else nullcontext():
            return self._predict(latents, timestep, lambda: text_embeds)

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], torch.Tensor]) -> torch.Tensor:
        velocity: torch.Tensor = self._module(latents, timestep, text())
        return velocity
