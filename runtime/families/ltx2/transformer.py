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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import NONE
from runtime.execution.attention import Attention, BlockKernels, attention, exact_attention
from runtime.execution.block_engines import BlockEngines
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
from runtime.models.quantization import linear_of_gelu
from runtime.models.row_operations import add_norms, by_token, computed, layer_norm, norm_rotate
from runtime.upstream.diffusers import cache_single_stream

# The text for the video and for the sound, each (1, text tokens, width), or the keys and values of each in a block.
BlockText = tuple[torch.Tensor, torch.Tensor] | tuple[tuple[torch.Tensor, torch.Tensor], ...]
# `block_step` or a compiled version of it.
BlockStep = Callable[..., torch.Tensor]
# Names of the matrices that `fuse` adds to an attention, as diffusers names them.
_FUSED, _FUSED_OTHER = "to_qkv", "to_kv"
# CUDA graphs of a clip: of the four kinds of passes.
_GRAPHS = 4
# The tables of a stream: shift, scale and gate of self-attention and of the feed-forward, from LTX-2.3 on also of the
# attention to the text, and then scale and shift for the sound's attention to the video or the other way, the same for
# the other one, and the gate.
_SELF, _FEED_FORWARD, _TEXT, _CROSS = 0, 3, 6, 5
# The sound's few values pass as many operations as the video's: each of them takes one kernel instead of several.
_FEWEST = 0


class Angles(NamedTuple):
    """The rotation of a stream's tokens in one attention; see `row_operations.norm_rotate`."""

    cos: torch.Tensor
    sin: torch.Tensor
    distance: int


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
        video, sound: (timesteps, rows, width), see `_SELF`.
        text, sound_text: shift and scale of the text, (1, 2, width), if they depend on the timestep.
    """

    video: torch.Tensor
    sound: torch.Tensor
    text: torch.Tensor | None
    sound_text: torch.Tensor | None


# Hidden states, what is added to them, (1, tokens, width), and its gate, (timesteps, width).
_Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class _Stream(NamedTuple):
    """A block and its layers for one stream, its table, and how its tokens attend to each other."""

    block: Any
    attn: Any
    text_attn: Any
    table: torch.Tensor
    first_count: int
    rotation: Angles
    attend: Attention
    attend_text: Attention
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
        None if isolated else rotations,
        _attend(video, x, text[0], skips=skips),
        _attend(sound, y, text[1], skips=skips),
    )
    (x,) = _sum(video, x, _feed_forward(block.ff, x_normed), _row(video, _FEED_FORWARD + 2))
    (y,) = _sum(sound, y, _feed_forward(block.audio_ff, y_normed), _row(sound, _FEED_FORWARD + 2))
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
        block.attn1,
        block.attn2,
        tables[0],
        first_count,
        rotations.video,
        block.attend,
        block.attend_text,
        block.norm1.eps,
        block.video_cross_attn_adaln,
    )
    sound = _Stream(
        block,
        block.audio_attn1,
        block.audio_attn2,
        tables[1],
        0,
        rotations.sound,
        block.attend_other,
        block.attend_other,
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
    _, normed = _sum(stream, x, None, None, _modulation(stream, _SELF, _SELF + 1))
    modulation = _modulation(stream, _TEXT, _TEXT + 1) if stream.modulates_text else None
    x, normed = _sum(stream, x, _attend_self(stream, normed, skips=skips), _row(stream, _SELF + 2), modulation)
    return x, _attend_text(stream, normed, text), _row(stream, _TEXT + 2) if stream.modulates_text else None


def _attend_self(stream: _Stream, x: torch.Tensor, *, skips: bool) -> torch.Tensor:
    """Return the result of self-attention, (1, tokens, width), of normed hidden states."""
    attn, block = stream.attn, stream.block
    if skips:
        return _projected(attn, _in_heads(attn, attn.to_v(x)), x)
    fused = getattr(attn, _FUSED, None)
    layers = (attn.to_q, attn.to_k, attn.to_v)
    q, k, v = [layer(x) for layer in layers] if fused is None else fused(x).chunk(3, 2)
    q, k = _normed(block, attn.norm_q, q, stream.rotation), _normed(block, attn.norm_k, k, stream.rotation)
    return _projected(attn, stream.attend(_in_heads(attn, q), _in_heads(attn, k), _in_heads(attn, v)), x)


def _attend_text(stream: _Stream, x: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the result of attention to the text, (1, tokens, width), of normed hidden states."""
    attn = stream.text_attn
    query = _normed(stream.block, attn.norm_q, attn.to_q(x))
    return _projected(attn, stream.attend_text(_in_heads(attn, query), *text), x)


def _finish(
    video: _Stream, sound: _Stream, rotations: Rotations | None, of_video: _Attended, of_sound: _Attended
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states after all attention and their norm for the feed-forward, of the video and of the sound.

    Args:
        rotations: `None` if the streams do not attend to each other.
    """
    if rotations is not None:
        block, x_angles, y_angles = video.block, rotations.video_cross, rotations.sound_cross
        x, x_asks, x_tells = _sum(video, *of_video, *_cross_modulations(video))
        y, y_tells, y_asks = _sum(sound, *of_sound, *_cross_modulations(sound))
        x_added = _attend_other(
            block, block.audio_to_video_attn, x_asks, y_tells, x_angles, y_angles, block.attend_other
        )
        y_added = _attend_other(
            block, block.video_to_audio_attn, y_asks, x_tells, y_angles, x_angles, block.attend_video
        )
        of_video, of_sound = (x, x_added, _row(video, -1)), (y, y_added, _row(sound, -1))
    x, x_normed = _sum(video, *of_video, _modulation(video, _FEED_FORWARD, _FEED_FORWARD + 1))
    y, y_normed = _sum(sound, *of_sound, _modulation(sound, _FEED_FORWARD, _FEED_FORWARD + 1))
    return x, x_normed, y, y_normed


def _row(stream: _Stream, number: int) -> torch.Tensor:
    """Return a row of a stream's table, (timesteps, width); negative numbers count from the end."""
    return stream.table[:, number]


def _modulation(stream: _Stream, shift: int, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and shift of a norm."""
    return _row(stream, scale), _row(stream, shift)


def _sum(
    stream: _Stream, x: torch.Tensor, y: torch.Tensor | None, gate: torch.Tensor | None, *norms: Any
) -> tuple[torch.Tensor, ...]:
    """See `row_operations.add_norms`."""
    out: tuple[torch.Tensor, ...] = computed(
        add_norms, x, y, gate, norms, stream.first_count, stream.epsilon, fewest=_FEWEST
    )
    return out


def _cross_modulations(stream: _Stream) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the scale and shift of a stream in the video's attention to the sound, and in the sound's to the video."""
    return [(_row(stream, -_CROSS + place), _row(stream, -_CROSS + place + 1)) for place in (0, 2)]


def _attend_other(
    block: Any,
    attn: Any,
    x: torch.Tensor,
    other: torch.Tensor,
    rotation: Angles,
    other_rotation: Angles,
    attend: Attention,
) -> torch.Tensor:
    """Return the result of a stream's attention to the other one, (1, tokens, width); both are normed."""
    fused = getattr(attn, _FUSED_OTHER, None)
    k, v = (attn.to_k(other), attn.to_v(other)) if fused is None else fused(other).chunk(2, 2)
    q, k = _normed(block, attn.norm_q, attn.to_q(x), rotation), _normed(block, attn.norm_k, k, other_rotation)
    attended = attend(_in_heads(attn, q), _in_heads(attn, k), _in_heads(attn, v))
    return _projected(attn, attended, x)


def _normed(block: Any, norm: Any, x: torch.Tensor, angles: Angles | tuple[()] = ()) -> torch.Tensor:
    """Return normed queries or keys, (1, tokens, width), rotated if there are angles."""
    x, weight = (norm(x), None) if block.norms_apart else (x, norm.weight)
    out: torch.Tensor = computed(norm_rotate, x, weight, norm.eps, *angles, fewest=_FEWEST)
    return out


def _in_heads(attn: Any, x: torch.Tensor) -> torch.Tensor:
    """Return (1, tokens, heads, head width) of (1, tokens, width)."""
    return x.unflatten(2, (attn.heads, -1))


def _projected(attn: Any, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the projection of a result of attention, (1, tokens, heads, head width).

    Args:
        x: what the queries were projected from, which decides the gates.
    """
    if attn.to_gate_logits is not None:
        attended = attended * (2.0 * torch.sigmoid(attn.to_gate_logits(x))).unsqueeze(-1)
    out: torch.Tensor = attn.to_out[0](attended.flatten(2))
    return out


def _feed_forward(feed_forward: Any, x: torch.Tensor) -> torch.Tensor:
    expand, reduce = feed_forward.net[0], feed_forward.net[2]
    out: torch.Tensor = linear_of_gelu(reduce, expand.proj(x)) if expand.approximate == "tanh" else reduce(expand(x))
    return out


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


def install(module: Any, speed: Speed = EAGER, step: BlockStep = block_step) -> None:
    """Replace `forward` of a loaded transformer and its blocks; later calls change the options.

    Hooks that diffusers adds later wrap the new `forward` as they would wrap the original.

    Args:
        module: a `diffusers.LTX2VideoTransformer3DModel`, without hooks at the first call.
        speed: has the kernels of the video's self-attention. Its attention to the text runs on the same one if that is
            exact; all other attention is "native".
        step: `block_step`, or a compiled version of it.
    """
    if not hasattr(module, "kernels"):
        module.forward = MethodType(_forward, module)
    for layers in _fusible(module):
        unfuse_if_stale(*layers)
    attend_other, attend_text = attention("native"), exact_attention(speed.attention)
    for block in module.transformer_blocks:
        if not hasattr(block, "step"):
            block.forward = MethodType(_block_forward, block)
        block.step, block.attend_text = step, attend_text
        block.attend_other = block.attend_video = attend_other
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
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """See `execution.components.PyTorchDenoiser`; the family has no block engines."""
        assert engines is None
        assert not speed.paired

        def report(field: str) -> Callable[[Fact], None]:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        self._forget_values()
        self._step = CompiledStep(block_step, report("compiled")) if speed.compiled else None
        install(self._module, speed, self._step or block_step)
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._keeps_text = speed.text_kept and not _modulates_text(self._module)
        self._graphed = None
        if speed.graphed:
            self._graphed = CudaGraphRunner(self._predict, report("graphed"), _GRAPHS, shares_memory=True)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0 if self._step is None else self._step.seconds

    def forget(self) -> None:
        """Forget the shapes of the streams, and free everything cached for a text or a size."""
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

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
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
