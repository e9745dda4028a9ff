"""LTX-2's transformer of both streams in a faster order of operations, on diffusers' modules and weights.

Equal to `diffusers.LTX2VideoTransformer3DModel` up to rounding (tests/families/ltx2/test_transformer.py). Differences:

- The tables of the rotary embeddings are computed once per size, with one value for each pair of channels.
- The text is projected once per clip; its keys and values can be kept if they do not depend on the timestep.
- All tokens of a stream have the same timestep, except those of latent frames that are given: the first one, and
  keyframes, which precede it (diffusers appends them; the order of tokens changes no result). So timesteps are embedded
  once or twice, instead of for each token.
- A sum and the norms after it, and a norm and the rotation after it, are one operation each (`row_operations`).
- Projections of the same input can be one matrix (`fuse`): queries, keys and values of self-attention, and keys and
  values of the other stream.
- Every token of a text is one that the connectors made, so attention takes no mask and any kernel computes it.

Both streams are one tensor between blocks, (1, numbers), in which the sound's tokens follow the video's. So step caches
keep and reuse the residuals of both together.

Several processes can compute a pass together (`share_tokens`). Each has a share of the video's tokens and all of the
sound's, which are few. Only attention to the video needs tokens of other processes: the video's self-attention, and the
sound's attention to the video, in which each process computes some heads and sends the result to all.

`install` replaces `forward` of a loaded module and its blocks, so that diffusers' hooks, and with them offloading and
caching, still work. Dropout is left out: its probability is 0.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import NONE
from runtime.execution.attention import Attention, BlockKernels, attention, exact_attention
from runtime.execution.attention_guidance import attend_text
from runtime.execution.block_engines import BlockEngines, BoundWeights, parts_of, run_pass
from runtime.execution.compilation import CompiledStep
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, OnDegraded
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.fused_layers import fuse as fuse_layers
from runtime.execution.fused_layers import unfuse_if_stale
from runtime.execution.memory import release_cached_memory
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.step_caches import Sharing, StepCaching
from runtime.execution.streams import Streams
from runtime.execution.text_states import TextState, TextStates
from runtime.families.ltx2.block_programs import CROSS, FEED_FORWARD, SELF, SOUND_ASKS, TEXT, VIDEO_ASKS, rows_of
from runtime.families.ltx2.spec import TransformerSpec
from runtime.models.packed_layers import use_int8_kernels
from runtime.models.quantization import linear_of_gelu
from runtime.models.row_operations import (
    EPSILON,
    RowCall,
    add_norms,
    by_token,
    computed,
    layer_norm,
    norm_rotate,
    quantize_gelu_rows,
    rounding_calls,
)
from runtime.upstream.diffusers import cache_single_stream

# The text for the video and for the sound, each (1, text tokens, width), or the keys and values of each in a block; see
# `Denoiser` for a negative prompt.
BlockText = tuple[torch.Tensor, torch.Tensor] | tuple[tuple[torch.Tensor, torch.Tensor], ...]
# `block_step` or a compiled version of it.
BlockStep = Callable[..., torch.Tensor]
# Names of the matrices that `fuse` adds to an attention, as diffusers names them.
_FUSED, _FUSED_OTHER = "to_qkv", "to_kv"
# CUDA graphs of a clip: of the four kinds of passes.
_GRAPHS = 4
# The sound's few values pass as many operations as the video's: each of them takes one kernel instead of several.
_FEWEST = 0


class Angles(NamedTuple):
    """The rotation of a stream's tokens in one attention; see `row_operations.norm_rotate`."""

    cos: torch.Tensor
    sin: torch.Tensor
    distance: int

    def of(self, part: slice) -> "Angles":
        """Return the rotation of some of the tokens."""
        return self._replace(cos=self.cos[:, part], sin=self.sin[:, part])


class Rotations(NamedTuple):
    """The rotations of both streams' tokens, in their self-attention and in the attention to each other."""

    video: Angles
    sound: Angles
    video_cross: Angles
    sound_cross: Angles

    def of_share(self, tokens: Tokens) -> "Rotations":
        """Return those of this process's share of the video's tokens."""
        video, video_cross = (
            Angles(tokens.own(angles.cos), tokens.own(angles.sin), angles.distance)
            for angles in (self.video, self.video_cross)
        )
        return self._replace(video=video, video_cross=video_cross)


class Modulation(NamedTuple):
    """What blocks add to their tables, float32.

    Attributes:
        video, sound: (timesteps, rows, width), see `block_programs.SELF`.
        text, sound_text: shift and scale of the text, (1, 2, width), if they depend on the timestep.
    """

    video: torch.Tensor
    sound: torch.Tensor
    text: torch.Tensor | None
    sound_text: torch.Tensor | None


# Hidden states, what is added to them, (1, tokens, width), and its gate, (timesteps, width).
_Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class _Stream(NamedTuple):
    """A block and its layers for one stream, its table, and how its tokens attend to each other.

    Attributes:
        asks, tells: the attention of this stream to the other one, and of the other one to this.
        rotation, cross_rotation: of its tokens in self-attention, and between the streams.
    """

    block: Any
    is_sound: bool
    attn: Any
    text_attn: Any
    asks: Any
    tells: Any
    feed_forward: Any
    table: torch.Tensor
    first_count: int
    rotation: Angles
    cross_rotation: Angles
    attend: Attention
    attend_text: Attention
    attend_cross: Attention
    epsilon: float
    modulates_text: bool


def block_step(
    block: Any,
    joined: torch.Tensor,
    tokens: int,
    text: BlockText,
    modulation: Modulation,
    rotations: Rotations,
    first_count: int = 0,
    skips: bool = False,
    isolated: bool = False,
) -> torch.Tensor:
    """Run one block. The function is compiled as a whole.

    Args:
        block: a `LTX2VideoTransformerBlock` after `install`.
        joined: hidden states of both streams, (1, numbers).
        tokens: of the video.
        text: see `BlockText`.
        first_count: the number of the video's first tokens that have the first of two timesteps.
        skips: whether the results of self-attention are its values.
        isolated: whether the streams do not attend to each other.

    Returns:
        The hidden states after the block, shaped like `joined`.
    """
    x, y = _separate(block, joined, tokens)
    video, sound = _streams(block, modulation, rotations, first_count)
    if isinstance(text[0], torch.Tensor):
        text = text_keys_values(block, text, modulation)
    # Nested calls, so that intermediate values are freed as soon as possible.
    x, x_normed, y, y_normed = _finish(
        video,
        sound,
        _attend(video, x, text[0], skips=skips),
        _attend(sound, y, text[1], skips=skips),
        isolated=isolated,
    )
    (x,) = _sum(video, x, _feed_forward(block.ff, x_normed), _row(video, FEED_FORWARD + 2))
    (y,) = _sum(sound, y, _feed_forward(block.audio_ff, y_normed), _row(sound, FEED_FORWARD + 2))
    return torch.cat([x.flatten(1), y.flatten(1)], dim=1)


def text_keys_values(
    block: Any, texts: tuple[torch.Tensor, torch.Tensor], modulation: Modulation | None = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return a block's keys and values of both texts, each (1, text tokens, heads, head width).

    Args:
        modulation: of the timestep, if they depend on it.
    """
    added = (None, None) if modulation is None else (modulation.text, modulation.sound_text)
    layers = (block.attn2, "prompt_scale_shift_table"), (block.audio_attn2, "audio_prompt_scale_shift_table")
    results = []
    for text, rows_added, (attn, name) in zip(texts, added, layers, strict=True):
        states = text
        if block.cross_attn_adaln:
            table = getattr(block, name)[None].float()
            rows = table if rows_added is None else table + rows_added
            shift, scale = rows.chunk(2, dim=1)
            states = (text * (1 + scale) + shift).to(text.dtype)
        keys = _normed(block, attn.norm_k, attn.to_k(states))
        results.append((_in_heads(attn, keys), _in_heads(attn, attn.to_v(states))))
    return tuple(results)


def _separate(block: Any, joined: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states of the video and of the sound, each (1, tokens, width), as views."""
    width, sound_width = block.scale_shift_table.shape[1], block.audio_scale_shift_table.shape[1]
    x, y = joined.tensor_split([tokens * width], dim=1)
    return x.unflatten(1, (tokens, width)), y.unflatten(1, (-1, sound_width))


def _streams(block: Any, modulation: Modulation, rotations: Rotations, first_count: int) -> tuple[_Stream, _Stream]:
    """Return a block's streams of video and sound."""
    tables = [
        torch.cat([own, other]).float() + added
        for own, other, added in (
            (block.scale_shift_table, block.video_a2v_cross_attn_scale_shift_table, modulation.video),
            (block.audio_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table, modulation.sound),
        )
    ]
    video = _Stream(
        block,
        False,
        block.attn1,
        block.attn2,
        block.audio_to_video_attn,
        block.video_to_audio_attn,
        block.ff,
        tables[0],
        first_count,
        rotations.video,
        rotations.video_cross,
        block.attend,
        block.attend_text,
        block.attend_other,
        block.norm1.eps,
        block.video_cross_attn_adaln,
    )
    sound = _Stream(
        block,
        True,
        block.audio_attn1,
        block.audio_attn2,
        block.video_to_audio_attn,
        block.audio_to_video_attn,
        block.audio_ff,
        tables[1],
        0,
        rotations.sound,
        rotations.sound_cross,
        block.attend_other,
        block.attend_other,
        block.attend_video,
        block.norm1.eps,
        block.audio_cross_attn_adaln,
    )
    return video, sound


def _attend(stream: _Stream, x: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor], *, skips: bool) -> _Attended:
    """Return hidden states after self-attention, the result of attention to the text, and its gate.

    Args:
        x: hidden states, (1, tokens, width).
        text: keys and values.
    """
    _, normed = _sum(stream, x, None, None, _modulation(stream, SELF, SELF + 1))
    added = _attend_self(stream, normed, skips=skips)
    x, normed = _sum(stream, x, added, _row(stream, SELF + 2), _text_modulation(stream))
    return x, _attend_text(stream, normed, text), _text_gate(stream)


def _attend_self(stream: _Stream, x: torch.Tensor, *, skips: bool) -> torch.Tensor:
    """Return the result of self-attention, (1, tokens, width), of normed hidden states."""
    attn = stream.attn
    if skips:
        return _projected(attn, attn.to_v(x), _gate(attn, x))
    attended = stream.attend(*(_in_heads(attn, tensor) for tensor in _qkv(stream, x)))
    return _projected(attn, attended.flatten(2), _gate(attn, x))


def _qkv(stream: _Stream, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of self-attention, each (1, tokens, width), of normed hidden states."""
    attn, block = stream.attn, stream.block
    fused = getattr(attn, _FUSED, None)
    layers = (attn.to_q, attn.to_k, attn.to_v)
    q, k, v = [layer(x) for layer in layers] if fused is None else fused(x).chunk(3, 2)
    return _normed(block, attn.norm_q, q, stream.rotation), _normed(block, attn.norm_k, k, stream.rotation), v


def _attend_text(stream: _Stream, x: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the result of attention to the text, (1, tokens, width), of normed hidden states."""
    attn = stream.text_attn
    return _projected(attn, _attended_text(stream, _text_query(stream, x), text), _gate(attn, x))


def _attended_text(stream: _Stream, query: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return attention to the keys and values of the text, (1, tokens, width), before the gate; see `Denoiser`."""
    return attend_text(stream.attend_text, _in_heads(stream.text_attn, query), *text, stream.block.nag)


def _text_query(stream: _Stream, x: torch.Tensor) -> torch.Tensor:
    """Return the queries to the text, (1, tokens, width), of normed hidden states."""
    return _normed(stream.block, stream.text_attn.norm_q, stream.text_attn.to_q(x))


def _finish(
    video: _Stream, sound: _Stream, of_video: _Attended, of_sound: _Attended, *, isolated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states after all attention and their norm for the feed-forward, of the video and of the sound.

    Args:
        isolated: whether the streams do not attend to each other.
    """
    if not isolated:
        x, x_asks, x_tells = _cross_norms(video, *of_video)
        y, y_asks, y_tells = _cross_norms(sound, *of_sound)
        x_added = _attend_other(video, x_asks, sound, y_tells)
        y_added = _attend_other(sound, y_asks, video, x_tells)
        of_video, of_sound = (x, x_added, _row(video, -1)), (y, y_added, _row(sound, -1))
    x, x_normed = _sum(video, *of_video, _modulation(video, FEED_FORWARD, FEED_FORWARD + 1))
    y, y_normed = _sum(sound, *of_sound, _modulation(sound, FEED_FORWARD, FEED_FORWARD + 1))
    return x, x_normed, y, y_normed


def _row(stream: _Stream, number: int) -> torch.Tensor:
    """Return a row of a stream's table, (timesteps, width); negative numbers count from the end."""
    return stream.table[:, number]


def _modulation(stream: _Stream, shift: int, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and shift of a norm."""
    return _row(stream, scale), _row(stream, shift)


def _text_modulation(stream: _Stream) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scale and shift of the norm before the attention to the text, if it has any."""
    return _modulation(stream, TEXT, TEXT + 1) if stream.modulates_text else None


def _text_gate(stream: _Stream) -> torch.Tensor | None:
    """Return the gate of the attention to the text, (timesteps, width), if it has one."""
    return _row(stream, TEXT + 2) if stream.modulates_text else None


def _sum(
    stream: _Stream, x: torch.Tensor, y: torch.Tensor | None, gate: torch.Tensor | None, *norms: Any
) -> tuple[torch.Tensor, ...]:
    """See `row_operations.add_norms`."""
    out: tuple[torch.Tensor, ...] = computed(
        add_norms, x, y, gate, norms, stream.first_count, stream.epsilon, fewest=_FEWEST
    )
    return out


def _cross_norms(
    stream: _Stream, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a sum, and its norms for a stream's attention to the other one and for the other's to it."""
    places = (VIDEO_ASKS, SOUND_ASKS)
    x, of_video, of_sound = _sum(
        stream, x, y, gate, *(_modulation(stream, CROSS + place + 1, CROSS + place) for place in places)
    )
    return (x, of_sound, of_video) if stream.is_sound else (x, of_video, of_sound)


def _attend_other(stream: _Stream, x: torch.Tensor, other_stream: _Stream, other: torch.Tensor) -> torch.Tensor:
    """Return the result of a stream's attention to the other one, (1, tokens, width); both are normed."""
    attn, (k, v) = stream.asks, _told(other_stream, other)
    q = _cross_query(stream, x)
    attended = stream.attend_cross(_in_heads(attn, q), _in_heads(attn, k), _in_heads(attn, v))
    return _projected(attn, attended.flatten(2), _gate(attn, x))


def _cross_query(stream: _Stream, x: torch.Tensor) -> torch.Tensor:
    """Return a stream's queries to the other one, (1, tokens, the sound's width)."""
    return _normed(stream.block, stream.asks.norm_q, stream.asks.to_q(x), stream.cross_rotation)


def _told(stream: _Stream, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stream's keys and values for the other one, each (1, tokens, the sound's width)."""
    attn = stream.tells
    fused = getattr(attn, _FUSED_OTHER, None)
    k, v = (attn.to_k(x), attn.to_v(x)) if fused is None else fused(x).chunk(2, 2)
    return _normed(stream.block, attn.norm_k, k, stream.cross_rotation), v


def _normed(block: Any, norm: Any, x: torch.Tensor, angles: Angles | tuple[()] = ()) -> torch.Tensor:
    """Return normed queries or keys, (1, tokens, width), rotated if there are angles."""
    x, weight = (norm(x), None) if block.norms_apart else (x, norm.weight)
    out: torch.Tensor = computed(norm_rotate, x, weight, norm.eps, *angles, fewest=_FEWEST)
    return out


def _in_heads(attn: Any, x: torch.Tensor) -> torch.Tensor:
    """Return (1, tokens, heads, head width) of (1, tokens, width)."""
    return x.unflatten(2, (attn.heads, -1))


def _gate(attn: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of the gates of an attention, (1, tokens, heads); `None` if it has none.

    Args:
        x: what the queries are projected from.
    """
    return None if attn.to_gate_logits is None else attn.to_gate_logits(x)


def _projected(attn: Any, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return the projection of a result of attention; both are (1, tokens, width)."""
    if gate is not None:
        attended = (_in_heads(attn, attended) * (2.0 * torch.sigmoid(gate)).unsqueeze(-1)).flatten(2)
    out: torch.Tensor = attn.to_out[0](attended)
    return out


def _feed_forward(feed_forward: Any, x: torch.Tensor) -> torch.Tensor:
    expand, reduce = feed_forward.net[0], feed_forward.net[2]
    out: torch.Tensor = linear_of_gelu(reduce, expand.proj(x)) if expand.approximate == "tanh" else reduce(expand(x))
    return out


class _Before(NamedTuple):
    """What `EngineStep` has of a stream before the streams attend to each other.

    Attributes:
        x: hidden states, (1, tokens, width), float32.
        query, key, value: to the other stream and for it, each (1, tokens, the sound's width).
        gates: logits of the attention to the other stream, (1, tokens, heads), if it has any.
    """

    x: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gates: tuple[torch.Tensor, ...]


class EngineStep:
    """`block_step` on block engines; hidden states are float32.

    Attention sees all tokens. The rest of a block runs over those of each stream in chunks, on the engines or, for what
    they do not compute, in PyTorch. Where the streams do not attend to each other, the engines compute the queries,
    keys and values nevertheless, and the gate of the result is 0.
    """

    def __init__(self, engines: BlockEngines) -> None:
        self._engines = engines

    def __call__(
        self,
        block: Any,
        joined: torch.Tensor,
        tokens: int,
        text: BlockText,
        modulation: Modulation,
        rotations: Rotations,
        first_count: int = 0,
        skips: bool = False,
        isolated: bool = False,
    ) -> torch.Tensor:
        """See `block_step`; `joined` is not modified."""
        weights = self._engines.weights(block, joined.device)
        streams = _streams(block, modulation, rotations, first_count)
        if isolated:
            for stream in streams:
                stream.table[:, -1] = 0
        if isinstance(text[0], torch.Tensor):
            text = text_keys_values(block, text, modulation)
        before = [
            self._until_cross(stream, x, of_text, weights, skips=skips)
            for stream, x, of_text in zip(streams, _separate(block, joined, tokens), text, strict=True)
        ]
        out = torch.empty_like(joined)
        results = _separate(block, out, tokens)
        for stream, own, other, result in zip(streams, before, reversed(before), results, strict=True):
            self._finish(stream, own, None if isolated else other, result, weights)
        return out

    def _until_cross(
        self,
        stream: _Stream,
        x: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        weights: BoundWeights,
        *,
        skips: bool,
    ) -> _Before:
        """Attend to the stream itself and to the text."""
        attended, *gates = self._attend_self(stream, x, weights, skips=skips)
        outputs = self._outputs("cross", stream, x)
        for part, here in self._parts(stream, x):
            inputs = _inputs(x[:, part], attended[:, part], *(gate[:, part] for gate in gates))
            own, query, *text_gates = self._outputs("query", stream, x[:, part])
            self._run("query", here, inputs, weights, (own, query, *text_gates), partial(_part_query, here, **inputs))
            of_text = _attended_text(stream, query, text).contiguous()
            inputs = _inputs(own, of_text, *text_gates)
            written = tuple(tensor[:, part] for tensor in outputs)
            self._run("cross", here, inputs, weights, written, partial(_part_cross, here, **inputs))
        own, query, key, value, *gates = outputs
        return _Before(own, query, key, value, tuple(gates))

    def _attend_self(
        self, stream: _Stream, x: torch.Tensor, weights: BoundWeights, *, skips: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the result of self-attention, (1, tokens, width), and the logits of its gates if it has any.

        Queries, keys and values are freed at the end.
        """
        q, k, v, *gates = outputs = self._outputs("qkv", stream, x)
        for part, here in self._parts(stream, x):
            written = tuple(tensor[:, part] for tensor in outputs)
            self._run("qkv", here, {"x": x[:, part]}, weights, written, partial(_part_qkv, here, x[:, part]))
        if skips:
            return v, *gates
        attended = stream.attend(*(_in_heads(stream.attn, tensor) for tensor in (q, k, v)))
        return attended.flatten(2).contiguous(), *gates

    def _finish(
        self, stream: _Stream, own: _Before, other: _Before | None, out: torch.Tensor, weights: BoundWeights
    ) -> None:
        """Attend to the other stream, if given, and write the hidden states after the block to `out`."""
        for part, here in self._parts(stream, own.x):
            query = own.query[:, part]
            if other is None:
                attended = torch.zeros_like(query)
            else:
                heads = (_in_heads(stream.asks, tensor) for tensor in (query, other.key, other.value))
                attended = stream.attend_cross(*heads).flatten(2).contiguous()
            inputs = _inputs(own.x[:, part], attended, *(gate[:, part] for gate in own.gates))
            run = partial(_part_feed_forward, here, **inputs)
            self._run("feed_forward", here, inputs, weights, (out[:, part],), run)

    def _parts(self, stream: _Stream, x: torch.Tensor) -> list[tuple[slice, _Stream]]:
        """Return the chunks of a stream's tokens, each with the stream of these tokens alone."""
        return [
            (
                part,
                stream._replace(
                    table=table,
                    first_count=0,
                    rotation=stream.rotation.of(part),
                    cross_rotation=stream.cross_rotation.of(part),
                ),
            )
            for part, table in parts_of(self._engines, x.shape[1], stream.table, stream.first_count)
        ]

    def _outputs(self, part: str, stream: _Stream, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._engines.outputs(_program(part, stream), x)

    def _run(
        self,
        part: str,
        stream: _Stream,
        inputs: Mapping[str, torch.Tensor],
        weights: BoundWeights,
        outputs: tuple[torch.Tensor, ...],
        in_pytorch: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]],
    ) -> None:
        """See `BlockEngines.run`; what all calls of a part take is added to `inputs`."""
        angles = {"qkv": stream.rotation, "cross": stream.cross_rotation}.get(part)
        tables = {} if angles is None else {"cos": angles.cos, "sin": angles.sin}
        inputs = {**inputs, "modulation": stream.table, **tables}
        self._engines.run(_program(part, stream), inputs, weights, outputs, in_pytorch)


def _inputs(x: torch.Tensor, attended: torch.Tensor, *gates: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the parts after an attention take, by name; there is at most one tensor of gates."""
    return {"x": x, "attended": attended, **dict(zip(("gate",), gates, strict=False))}


def _program(part: str, stream: _Stream) -> str:
    """Return the name of a part's program for a stream, see `block_programs.BLOCK_PARTS`."""
    return f"block_{'sound_' if stream.is_sound else ''}{part}"


def _with_gate(attn: Any, asking: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a part's outputs, and the logits of the next attention's gates if it has any."""
    gate = _gate(attn, asking)
    return outputs if gate is None else (*outputs, gate)


def _part_qkv(stream: _Stream, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute `block_programs.BlockQKV` in PyTorch.

    This and the next functions take hidden states in float32, of one timestep, and return them so.
    """
    _, normed = _sum(stream, x, None, None, _modulation(stream, SELF, SELF + 1))
    normed = normed.to(stream.block.compute_dtype)
    return _with_gate(stream.attn, normed, *_qkv(stream, normed))


def _part_query(
    stream: _Stream, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute `block_programs.BlockQuery` in PyTorch."""
    added = _projected(stream.attn, attended, gate)
    x, normed = _sum(stream, x, added, _row(stream, SELF + 2), _text_modulation(stream))
    normed = normed.to(stream.block.compute_dtype)
    return _with_gate(stream.text_attn, normed, x, _text_query(stream, normed))


def _part_cross(
    stream: _Stream, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute `block_programs.BlockCross` in PyTorch."""
    x, *norms = _cross_norms(stream, x, _projected(stream.text_attn, attended, gate), _text_gate(stream))
    asking, telling = (normed.to(stream.block.compute_dtype) for normed in norms)
    return _with_gate(stream.asks, asking, x, _cross_query(stream, asking), *_told(stream, telling))


def _part_feed_forward(
    stream: _Stream, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `block_programs.BlockFeedForward` in PyTorch."""
    added = _projected(stream.asks, attended, gate)
    x, normed = _sum(stream, x, added, _row(stream, -1), _modulation(stream, FEED_FORWARD, FEED_FORWARD + 1))
    inner = _feed_forward(stream.feed_forward, normed.to(stream.block.compute_dtype))
    (x,) = _sum(stream, x, inner, _row(stream, FEED_FORWARD + 2))
    return x


def project_text(module: Any, embeds: torch.Tensor, *, keys_values: bool) -> TextState:
    """Return the state of text embeddings in a transformer.

    Args:
        embeds: (1, tokens, video's width + sound's width).
        keys_values: whether each block's keys and values are kept; see `TextState`.
    """
    config = module.config
    widths = config.cross_attention_dim, config.audio_cross_attention_dim
    if config.use_prompt_embeddings:
        widths = config.caption_channels, config.caption_channels
    texts = embeds.split(widths, dim=2)
    if config.use_prompt_embeddings:
        texts = module.caption_projection(texts[0]), module.audio_caption_projection(texts[1])
    assert not keys_values or not _modulates_text(module)
    return TextState(texts, text_keys_values, module.transformer_blocks if keys_values else None)


def _modulates_text(module: Any) -> bool:
    """Return whether keys and values of the text depend on the timestep."""
    return bool(module.prompt_modulation and module.config.use_prompt_adaln_single)


def install(module: Any, speed: Speed = EAGER, step: BlockStep = block_step, *, wide: bool = False) -> None:
    """Replace `forward` of a loaded transformer and its blocks; later calls change the options.

    Hooks that diffusers adds later wrap the new `forward` as they would wrap the original.

    Args:
        module: a `diffusers.LTX2VideoTransformer3DModel`, without hooks at the first call.
        speed: has the kernels of the video's self-attention. Its attention to the text runs on the same one if that is
            exact; all other attention is "native". It also has the scale by which the attention to the text is
            guided, see `attention_guidance`.
        step: `block_step`, a compiled version of it, or an `EngineStep`.
        wide: whether hidden states are float32 between blocks, whatever the dtype of the weights.
    """
    if not hasattr(module, "kernels"):
        module.forward = MethodType(_forward, module)
    for layers in _fusible(module):
        unfuse_if_stale(*layers)
    native, exact = attention("native"), exact_attention(speed.attention)
    for block in module.transformer_blocks:
        if not hasattr(block, "step"):
            block.forward = MethodType(_block_forward, block)
        block.attend_text, block.norms_apart, block.nag = exact, False, speed.nag
        block.attend_other = block.attend_video = native
        # Not the dtype of a block's parameters, which may be quantized.
        block.compute_dtype = module.proj_in.weight.dtype
    _use_step(module, step, wide=wide)
    module.kernels = BlockKernels(speed)
    module.kernels.choose(module.transformer_blocks)


def share_tokens(module: Any, tokens: Tokens) -> None:
    """Divide the video's tokens among several processes; each computes the sound, see above.

    Args:
        module: a `diffusers.LTX2VideoTransformer3DModel` after `install`, which must not be called again. Its heads in
            both streams are a multiple of the processes.
    """
    module.shared_tokens = tokens
    module.kernels = module.kernels.shared(tokens.around)
    attend_video = tokens.around_whole("native")
    for block in module.transformer_blocks:
        block.attend_video = attend_video


def _use_step(module: Any, step: BlockStep, *, wide: bool = False) -> None:
    for block in module.transformer_blocks:
        block.step = step
    module.is_wide = wide


def row_calls(
    sizes: TransformerSpec, dtype: torch.dtype, device: str, *, timesteps: int, fused: bool, rounded: bool
) -> Iterator[RowCall]:
    """Yield the operations of `row_operations` of a block that is not compiled, and those after the last block.

    Args:
        timesteps: of the video: 2 with given latent frames.
        fused: whether projections of the same input are one matrix, see `fuse`.
        rounded: whether weights are in FP8.
    """
    rows = rows_of(modulated_text=sizes.modulated_text)
    of_video = sizes.width, sizes.num_attention_heads, timesteps
    for width, heads, times in (of_video, (sizes.sound_width, sizes.sound_heads, 1)):
        x = torch.ones(1, 2, width, dtype=dtype, device=device)
        row = torch.ones(times, rows, width, dtype=torch.float32, device=device)[:, 0]
        pair, gate = (row, row), row if sizes.modulated_text else None
        of_text = pair if sizes.modulated_text else None
        sums = [(None, None, (pair,)), (x, row, (of_text,)), (x, gate, (pair, pair)), (x, row, (pair,)), (x, row, ())]
        sums += [(x, gate, (pair,))] if gate is None else []  # where the streams do not attend to each other
        yield from ((add_norms, (x, *added, 1, EPSILON)) for added in sums)
        projected = _columns(x, 3 if fused else 1)
        weight = torch.ones(width, dtype=dtype, device=device)
        yield norm_rotate, (projected, weight, EPSILON, *_angles_like(projected, heads, splits=sizes.splits_heads))
        yield norm_rotate, (x, weight, EPSILON)
        asking = torch.ones(1, 2, sizes.sound_width, dtype=dtype, device=device)
        weight = torch.ones(sizes.sound_width, dtype=dtype, device=device)
        angles = _angles_like(asking, heads, splits=sizes.splits_heads)
        yield from ((norm_rotate, (x, weight, EPSILON, *angles)) for x in (asking, _columns(asking, 2 if fused else 1)))
        if rounded:
            yield from rounding_calls((width,), dtype, device)
            yield from rounding_calls((4 * width,), dtype, device, quantize_gelu_rows)
    last, row = (torch.ones(1, count, sizes.width, device=device) for count in (2, timesteps))
    yield layer_norm, (last.to(dtype), row, row, EPSILON, dtype)


def _columns(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first columns of a matrix that is so many times wider."""
    return x.repeat(1, 1, count)[..., : x.shape[2]]


def _angles_like(x: torch.Tensor, heads: int, *, splits: bool) -> Angles:
    """Return angles of 1 for `x`, (1, tokens, width); see `TransformerSpec.splits_heads`."""
    width = x.shape[2]
    angles = torch.ones(1, x.shape[1], width // 2, dtype=torch.float32, device=x.device)
    return Angles(angles, angles, width // heads // 2 if splits else 1)


def fuse(module: Any) -> bool:
    """Fuse projections of the same input, see `fused_layers.fuse`; return whether any was fused."""
    fused = [fuse_layers(*layers) for layers in _fusible(module)]
    return any(fused)


def _fusible(module: Any) -> Iterator[tuple[Any, str, tuple[Any, ...]]]:
    """Yield the arguments of `fused_layers` for all blocks: a module, the name of its fused layer, and its layers."""
    for block in module.transformer_blocks:
        for attn in (block.attn1, block.audio_attn1):
            yield attn, _FUSED, (attn.to_q, attn.to_k, attn.to_v)
        for attn in (block.audio_to_video_attn, block.video_to_audio_attn):
            yield attn, _FUSED_OTHER, (attn.to_k, attn.to_v)


def _block_forward(
    self: Any,
    hidden_states: torch.Tensor,
    tokens: int,
    text: BlockText,
    modulation: Modulation,
    rotations: Rotations,
    first_count: int = 0,
    skips: bool = False,
    isolated: bool = False,
) -> torch.Tensor:
    """Run one block. The signature begins as that of diffusers' block, but hidden states are of both streams."""
    out: torch.Tensor = self.step(
        self, hidden_states, tokens, text, modulation, rotations, first_count, skips, isolated
    )
    return out


def _forward(
    self: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: Callable[[], TextState],
    streams: Streams,
    skipping: frozenset[int],
    isolated: bool,
) -> torch.Tensor:
    """Return the prediction of both streams, joined, in the dtype of the weights.

    Args:
        latents: joined, see `Streams`.
        timestep: (1,): of all tokens, or (2,): of the video's given latent frames and of all else.
        text: returns the state of the text. It is called here, because offloaded weights are on the device by now.
        skipping: the blocks that skip their self-attention.
        isolated: whether the streams do not attend to each other.
    """
    dtype: torch.dtype = self.proj_in.weight.dtype
    video, sound = streams.split(latents)
    x = video.flatten(2).transpose(1, 2).to(dtype)
    first_count = streams.given * video.shape[3] * video.shape[4] if len(timestep) > 1 else 0
    shared: Tokens | None = getattr(self, "shared_tokens", None)
    if shared is not None:
        shared.count = x.shape[1]
        x, first_count = shared.own(x), shared.own_first(first_count)
    rotations = _rotations(self, streams, latents.device)
    x = self.proj_in(x)
    y = self.audio_proj_in(sound.transpose(1, 2).flatten(2).to(dtype))
    modulation, outer = _modulate(self, timestep, dtype)
    tokens, count = x.shape[1], y.shape[1]
    state = text()
    joined = torch.cat([x.flatten(1), y.flatten(1)], dim=1)
    if self.is_wide:
        joined = joined.float()
    del x, y
    self.kernels.choose(self.transformer_blocks)
    for block in self.transformer_blocks:
        # Offloading by layer brings the weights of a norm where its own `forward` is called.
        block.norms_apart = "forward" in vars(block.attn1.norm_q)
    for index, block in enumerate(self.transformer_blocks):
        joined = block(
            joined, tokens, state.for_block(index), modulation, rotations, first_count, index in skipping, isolated
        )
    x, y = joined.tensor_split([joined.shape[1] - count * self.audio_proj_in.out_features], dim=1)
    ends = (
        (x.unflatten(1, (tokens, -1)), self.norm_out, self.proj_out, outer[0], first_count),
        (y.unflatten(1, (count, -1)), self.audio_norm_out, self.audio_proj_out, outer[1], 0),
    )
    predictions = []
    for hidden, norm, project, table, first in ends:
        shift, scale = by_token(table, hidden.shape[1], first)
        predictions.append(project(computed(layer_norm, hidden, 1 + scale, shift, norm.eps, dtype)))
    predicted, predicted_sound = predictions
    if shared is not None:
        predicted = shared.all(predicted)
    return streams.join(
        predicted.transpose(1, 2),
        predicted_sound.unflatten(2, (sound.shape[1], sound.shape[3])).transpose(1, 2),
    )


def _modulate(
    module: Any, timestep: torch.Tensor, dtype: torch.dtype
) -> tuple[Modulation, tuple[torch.Tensor, torch.Tensor]]:
    """Return the blocks' modulation, and the last tables of both streams, (timesteps, 2, width), float32."""
    config, time = module.config, timestep[-1:]
    # From LTX-2.3 on, the other stream's timestep decides how a stream attends to it.
    other = time if config.cross_attn_mod else timestep
    factor = config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier

    def embedded(layer: Any, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, embedding = layer(times, batch_size=1, hidden_dtype=dtype)
        return rows.unflatten(1, (layer.num_mod_params, -1)).float(), embedding[:, None].float()

    def table(
        layers: tuple[Any, Any, Any], times: torch.Tensor, crossing: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, embedding = embedded(layers[0], times)
        crosses, gates = embedded(layers[1], crossing)[0], embedded(layers[2], crossing * factor)[0]
        return torch.cat([rows, crosses.expand(len(rows), -1, -1), gates.expand(len(rows), -1, -1)], dim=1), embedding

    video, embedding = table(
        (module.time_embed, module.av_cross_attn_video_scale_shift, module.av_cross_attn_video_a2v_gate),
        timestep,
        other,
    )
    sound, sound_embedding = table(
        (module.audio_time_embed, module.av_cross_attn_audio_scale_shift, module.av_cross_attn_audio_v2a_gate),
        time,
        time,
    )
    text = sound_text = None
    if _modulates_text(module):
        text, sound_text = (embedded(layer, time)[0] for layer in (module.prompt_adaln, module.audio_prompt_adaln))
    outer = module.scale_shift_table.float() + embedding, module.audio_scale_shift_table.float() + sound_embedding
    return Modulation(video, sound, text, sound_text), outer


def _rotations(module: Any, streams: Streams, device: torch.device) -> Rotations:
    """Return the rotations of this process's tokens for a size.

    The last ones are cached until `PyTorchStreamDenoiser.forget`.
    """
    key = (streams, device)
    cached: tuple[Any, Rotations] | None = module.__dict__.get("_tables")
    if cached is None or cached[0] != key:
        _, _, frames, height, width = streams.video
        places = module.rope.prepare_video_coords(1, frames, height, width, device, fps=streams.fps)
        for number in reversed(streams.keyframes):
            # A keyframe has the places of a latent frame, and the time of one frame.
            keyframe = places[:, :, : height * width].clone()
            keyframe[:, 0, :, 0], keyframe[:, 0, :, 1] = number / streams.fps, (number + 1) / streams.fps
            places = torch.cat([keyframe, places], dim=2)
        times = module.audio_rope.prepare_audio_coords(1, streams.sound[2], device)
        layers = (
            (module.rope, places),
            (module.audio_rope, times),
            (module.cross_attn_rope, places[:, :1]),
            (module.cross_attn_audio_rope, times[:, :1]),
        )
        rotations = Rotations(*(_angles(layer.rope_type, *layer(coords)) for layer, coords in layers))
        if (shared := getattr(module, "shared_tokens", None)) is not None:
            rotations = rotations.of_share(shared)
        cached = (key, rotations)
        module.__dict__["_tables"] = cached
    return cached[1]


def _angles(kind: str, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """Return a rotation of diffusers' tables.

    Args:
        kind: "interleaved": pairs are adjacent, and tables have the same value for both channels, (1, tokens, width);
            or "split": pairs are half of a head apart, and tables are (1, heads, tokens, half of the head width).
    """
    if kind == "interleaved":
        return Angles(cos[..., ::2].contiguous(), sin[..., ::2].contiguous(), 1)
    return Angles(cos.transpose(1, 2).flatten(2), sin.transpose(1, 2).flatten(2), cos.shape[-1])


class PyTorchStreamDenoiser(StepCaching):
    """A `diffusers.LTX2VideoTransformer3DModel` with the `forward` of this module.

    See `execution.components.StreamDenoiser` and `PyTorchDenoiser`. Of a plan's `Speed` it applies the attention
    kernels, compilation, CUDA graphs, fused projections, and kept keys and values of the text.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        speed: execution options; `compute` changes them.
    """

    pairs = False

    def __init__(self, module: Any, speed: Speed = EAGER) -> None:
        self._module = module
        self._streams: Streams | None = None
        self._skipping: frozenset[int] = frozenset()
        self.dtype: torch.dtype = module.proj_in.weight.dtype
        self._texts = TextStates()
        self._graphed: CudaGraphRunner | None = None
        # What was recorded in clips before, by the kernels.
        self._recorded: dict[Hashable, set[Hashable]] = {}
        self._engines: BlockEngines | None = None
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """See `execution.components.PyTorchDenoiser`; on engines, blocks are not compiled or fused."""
        assert not speed.paired

        def report(field: str) -> Callable[[Fact], None]:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        self._forget_values()
        self._engines = engines
        if engines is not None:
            speed = speed.replace(compiled=False, fused=False)
        self._step = CompiledStep(block_step, report("compiled")) if speed.compiled else None
        if engines is None:
            install(self._module, speed, self._step or block_step)
        else:
            install(self._module, speed, EngineStep(engines), wide=True)
        use_int8_kernels(self._module, used=speed.int8_kernels, on_failed=report("int8_kernels"))
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._keeps_text = speed.text_kept and not _modulates_text(self._module)
        self._graphed = None
        if speed.graphed:
            kernels = speed.attention, speed.fused, speed.text_kept, speed.nag
            recorded = self._recorded.setdefault(kernels, set())
            self._graphed = CudaGraphRunner(
                self._predict, report("graphed"), _GRAPHS, shares_memory=True, recorded=recorded
            )

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0 if self._step is None else self._step.seconds

    def forget(self) -> None:
        """Forget the streams' shapes and what is cached for a text or a size, and use no block engines from then on."""
        if self._engines is not None:
            self._engines = None
            _use_step(self._module, block_step)
        self._streams = None
        self._forget_values()

    def _forget_values(self) -> None:
        self._texts.clear()
        self._module.__dict__.pop("_tables", None)  # see `_rotations`
        if self._graphed is not None:
            self._graphed.forget()

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """See `execution.components.PyTorchDenoiser`."""
        if step_cache != NONE:
            cache_single_stream(type(self._module.transformer_blocks[0]))
        with super().caching(step_cache, sharing):
            yield

    def _parts(self, residual: torch.Tensor, sharing: Sharing | None) -> tuple[torch.Tensor, ...]:
        video, sound = residual.tensor_split([-self._sound_numbers], dim=1)
        video = video.unflatten(1, (-1, self._module.proj_in.out_features))
        return video if sharing is None else sharing.real(video), sound

    @property
    def _sound_numbers(self) -> int:
        """Numbers of the sound's hidden states."""
        assert self._streams is not None
        tokens: int = self._streams.sound[2] * self._module.audio_proj_in.out_features
        return tokens

    def see(self, streams: Streams, skipping_blocks: tuple[int, ...]) -> None:
        """See `execution.components.StreamDenoiser`."""
        if streams != self._streams and self._graphed is not None:
            # What was recorded reads the rotations of another size, which are no longer cached.
            self._graphed.forget()
        self._streams, self._skipping = streams, frozenset(skipping_blocks)

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `execution.components.Denoiser`.

        Args:
            latents: joined, see `Streams`.
            timestep: scalar, or two if latent frames are given: their timestep, and that of all else.
            text_embeds: (1, tokens, video's width + sound's width).
            which: also `SKIPPING`, in which some blocks skip their self-attention, and `ISOLATED`, in which the streams
                do not attend to each other.
        """
        run = partial(self._pass, latents, timestep, text_embeds, which)
        return run_pass(self._engines, self._graphed, self.reset_cache, run)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def _pass(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str
    ) -> torch.Tensor:
        assert self._streams is not None, "call `see` first"
        skipping = self._skipping if which == SKIPPING else frozenset()
        options = self._streams, skipping, which == ISOLATED
        text = self._texts.later((text_embeds,), self._project)
        if self._graphed is not None:
            return self._graphed(latents, timestep, text, *options)
        with self._module.cache_context(which) if self._caches else nullcontext():
            return self._predict(latents, timestep, text, *options)

    def _predict(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], TextState], *options: Any
    ) -> torch.Tensor:
        predicted: torch.Tensor = self._module(latents, timestep.reshape(-1), text, *options)
        return predicted

    def _project(self, embeds: torch.Tensor) -> TextState:
        return project_text(self._module, embeds.to(self.dtype), keys_values=self._keeps_text)
