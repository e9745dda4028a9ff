"""Block engines of LTX-2's transformer: the parts of a block between its attentions, with the weights as inputs.

Each stream has its own layers of its own width, and so its own parts, which compute each token by itself. The parts of
the video's stream in one block, and what runs between them:

    block_qkv            x -> q, k, v                           norm, projections, norms of q and k, rotary embedding
      self-attention     q, k, v -> attended
    block_query          x, attended -> x, query                output projection, norm, the text's query
      text               query, text -> attended
    block_cross          x, attended -> x, query, key, value    output projection, norms, query to the sound, and key
                                                                and value for the sound
      other stream       query, key and value of the other stream -> attended
    block_feed_forward   x, attended -> x                       output projection, norm, feed-forward

Those of the sound's stream are `block_sound_qkv`, and so on. From LTX-2.3 on, each head of an attention has a gate. Its
logits come from the tokens that the queries are projected from: `next_gate` of one part is `gate` of the next.

All arithmetic of the residual stream is float32; matrix products are in the dtype of the weights, or in FP8
(`engines.fp8`). `modulation` is the block's table plus the timestep's vectors.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F

from runtime.engines.block_programs import TOKENS, BlockPart, BlockTensor
from runtime.engines.fp8 import linear
from runtime.families.ltx2.spec import TransformerSpec
from runtime.models.spec import ModelSpec

# Rows of a stream's table: shift, scale and gate of self-attention and of the feed-forward, from LTX-2.3 on also of the
# attention to the text, and then scale and shift for the sound's attention to the video or the other way, the same for
# the other one, and the gate; the last rows are counted from the end.
SELF, FEED_FORWARD, TEXT, CROSS = 0, 3, 6, -5
_ROWS, _TEXT_ROWS, _CROSS_ROWS = 6, 3, 5
# Rows of the scale and shift, from `CROSS` on, for the video's attention to the sound, and for the other one.
VIDEO_ASKS, SOUND_ASKS = 0, 2


class _Paths(NamedTuple):
    """The layers of a stream in a block: self-attention, attention to text, to the other stream and from it."""

    own: str
    text: str
    asks: str
    tells: str
    feed_forward: str


_VIDEO = _Paths("attn1", "attn2", "audio_to_video_attn", "video_to_audio_attn", "ff")
_SOUND = _Paths("audio_attn1", "audio_attn2", "video_to_audio_attn", "audio_to_video_attn", "audio_ff")


class _Linear(NamedTuple):
    """The path of a linear layer, and its channels."""

    path: str
    outputs: int
    inputs: int


def rows_of(*, modulated_text: bool) -> int:
    """Return the number of rows of a stream's table, see `SELF`."""
    return _ROWS + (_TEXT_ROWS if modulated_text else 0) + _CROSS_ROWS


class _StreamPart(BlockPart):
    """A part of one stream.

    Args:
        sound: whether it is the sound's stream.
    """

    variadic = True
    # `gate` and `next_gate` come after these.
    _inputs: ClassVar[tuple[str, ...]]
    _outputs: ClassVar[tuple[str, ...]]

    def __init__(self, spec: ModelSpec, *, sound: bool = False) -> None:
        super().__init__()
        transformer = cast("TransformerSpec", spec.transformer)
        self._sound = sound
        self._width = transformer.sound_width if sound else transformer.width
        self._heads = transformer.sound_heads if sound else transformer.num_attention_heads
        self._cross_width, self._cross_heads = transformer.sound_width, transformer.sound_heads
        self._splits_heads = transformer.splits_heads
        self._modulates_text = transformer.modulated_text
        self.register_buffer("_swap_index", torch.tensor([1, 0]), persistent=False)
        self.register_buffer("_signs", torch.tensor([[-1.0], [1.0]]), persistent=False)
        layers, norms = self._layers(_SOUND if sound else _VIDEO)
        if not transformer.gated:
            layers.pop("gate", None)
        self.inputs = self._inputs + (("gate",) if transformer.gated and "attended" in self._inputs else ())
        self.outputs = self._outputs + (("next_gate",) if "gate" in layers else ())
        self.weights = {
            **{
                f"{name}_{kind}": f"{layer.path}.{kind}"
                for name, layer in layers.items()
                for kind in ("weight", "bias")
            },
            **{name: f"{path}.weight" for name, (path, _) in norms.items()},
        }
        rows = rows_of(modulated_text=transformer.modulated_text)
        self.tensors = {
            **self._activations(),
            "x": BlockTensor((TOKENS, self._width), "float32"),
            "modulation": BlockTensor((rows, self._width), "float32"),
            **{f"{name}_weight": BlockTensor((layer.outputs, layer.inputs)) for name, layer in layers.items()},
            **{f"{name}_bias": BlockTensor((layer.outputs,)) for name, layer in layers.items()},
            **{name: BlockTensor((width,)) for name, (_, width) in norms.items()},
        }

    @abstractmethod
    def _layers(self, paths: _Paths) -> tuple[dict[str, _Linear], dict[str, tuple[str, int]]]:
        """Return the linear layers, and the paths and channels of the norms' weights, by name."""

    @abstractmethod
    def _activations(self) -> dict[str, BlockTensor]:
        """Return the inputs and outputs of so many tokens, except `x`."""

    @abstractmethod
    def _compute(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return `_outputs`, and what `next_gate` is projected from, if the part has queries."""

    def forward(self, *tensors: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Take `inputs` and `weights`, and return `outputs`, in these orders."""
        values = dict(zip((*self.inputs, *self.weights), tensors, strict=True))
        *outputs, asking = self._compute(values)
        if "gate_weight" in values:
            outputs.append(self._projected(values, "gate", asking).to(asking.dtype))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _projected(self, values: Mapping[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, values[f"{name}_weight"], values[f"{name}_bias"])

    def _query_or_key(self, values: Mapping[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
        """Return normed queries or keys, (tokens, width), float32."""
        return self._rms_norm(self._projected(values, name, x), values[f"rms_{name}"])

    def _rotated(self, values: Mapping[str, Any], x: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotate pairs of channels; `x` is (tokens, width), the tables are (tokens, width / 2), float32."""
        # Of the channels of a pair, see `row_operations.norm_rotate`.
        distance = x.shape[1] // heads // 2 if self._splits_heads else 1
        pairs = x.unflatten(1, (-1, 2, distance))
        cos, sin = (values[name].unflatten(1, (-1, 1, distance)) for name in ("cos", "sin"))
        return (pairs * cos + pairs.index_select(2, self._swap_index) * (sin * self._signs)).flatten(1)

    def _attended(self, values: Mapping[str, Any], heads: int) -> torch.Tensor:
        """Return the projection of a result of attention, (tokens, width), float32."""
        attended = values["attended"]
        if "gate" in values:
            gates = 2 * torch.sigmoid(values["gate"].float())
            gated = attended.float().unflatten(1, (heads, -1)) * gates.unsqueeze(2)
            attended = gated.flatten(1).to(attended.dtype)
        return self._projected(values, "out", attended).float()

    def _modulated(self, values: Mapping[str, Any], normed: torch.Tensor, shift: int, scale: int) -> torch.Tensor:
        """Return a norm with the rows of the table applied to it, in the dtype of the weights."""
        shifted = normed * (1 + _row(values, scale)) + _row(values, shift)
        return self._rounded(values, shifted)

    def _rounded(self, values: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return x.to(values[next(iter(self.weights))].dtype)


class BlockQKV(_StreamPart):
    """Queries, keys and values of self-attention, from the residual stream.

    `q`, `k` and `v` are (tokens, width), `cos` and `sin` (tokens, width / 2), float32: those of
    `row_operations.norm_rotate`.
    """

    _inputs = ("x", "modulation", "cos", "sin")
    _outputs = ("q", "k", "v")

    def _layers(self, paths: _Paths) -> tuple[dict[str, _Linear], dict[str, tuple[str, int]]]:
        attention, width = paths.own, self._width
        layers = {name: _Linear(f"{attention}.to_{name}", width, width) for name in ("q", "k", "v")}
        gate = _Linear(f"{attention}.to_gate_logits", self._heads, width)
        return layers | {"gate": gate}, {f"rms_{name}": (f"{attention}.norm_{name}", width) for name in ("q", "k")}

    def _activations(self) -> dict[str, BlockTensor]:
        angles = BlockTensor((TOKENS, self._width // 2), "float32")
        return {
            **dict.fromkeys(("q", "k", "v"), BlockTensor((TOKENS, self._width))),
            **dict.fromkeys(("cos", "sin"), angles),
            "next_gate": BlockTensor((TOKENS, self._heads)),
        }

    def _compute(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        x = self._modulated(values, self._rms_norm(values["x"]), SELF, SELF + 1)
        q, k = (self._rotated(values, self._query_or_key(values, name, x), self._heads) for name in ("q", "k"))
        return q.to(x.dtype), k.to(x.dtype), self._projected(values, "v", x).to(x.dtype), x


class BlockQuery(_StreamPart):
    """The residual stream after self-attention, and the queries to the text; all are (tokens, width)."""

    _inputs = ("x", "attended", "modulation")
    _outputs = ("x", "query")

    def _layers(self, paths: _Paths) -> tuple[dict[str, _Linear], dict[str, tuple[str, int]]]:
        width = self._width
        layers = {
            "out": _Linear(f"{paths.own}.to_out.0", width, width),
            "q": _Linear(f"{paths.text}.to_q", width, width),
            "gate": _Linear(f"{paths.text}.to_gate_logits", self._heads, width),
        }
        return layers, {"rms_q": (f"{paths.text}.norm_q", width)}

    def _activations(self) -> dict[str, BlockTensor]:
        return {
            **dict.fromkeys(("attended", "query"), BlockTensor((TOKENS, self._width))),
            **dict.fromkeys(("gate", "next_gate"), BlockTensor((TOKENS, self._heads))),
        }

    def _compute(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        x = values["x"] + self._attended(values, self._heads) * _row(values, SELF + 2)
        normed = self._rms_norm(x)
        modulated = (
            self._modulated(values, normed, TEXT, TEXT + 1) if self._modulates_text else self._rounded(values, normed)
        )
        return x, self._query_or_key(values, "q", modulated).to(modulated.dtype), modulated


class BlockCross(_StreamPart):
    """The residual stream after the attention to the text, and what the attentions between the streams take.

    `query` is for this stream's attention, `key` and `value` for the other one's: each (tokens, the sound's width).
    `cos` and `sin` are (tokens, the sound's width / 2), float32.
    """

    _inputs = ("x", "attended", "modulation", "cos", "sin")
    _outputs = ("x", "query", "key", "value")

    def _layers(self, paths: _Paths) -> tuple[dict[str, _Linear], dict[str, tuple[str, int]]]:
        width, cross = self._width, self._cross_width
        layers = {
            "out": _Linear(f"{paths.text}.to_out.0", width, width),
            "q": _Linear(f"{paths.asks}.to_q", cross, width),
            "k": _Linear(f"{paths.tells}.to_k", cross, width),
            "v": _Linear(f"{paths.tells}.to_v", cross, width),
            "gate": _Linear(f"{paths.asks}.to_gate_logits", self._cross_heads, width),
        }
        return layers, {"rms_q": (f"{paths.asks}.norm_q", cross), "rms_k": (f"{paths.tells}.norm_k", cross)}

    def _activations(self) -> dict[str, BlockTensor]:
        angles = BlockTensor((TOKENS, self._cross_width // 2), "float32")
        return {
            "attended": BlockTensor((TOKENS, self._width)),
            **dict.fromkeys(("query", "key", "value"), BlockTensor((TOKENS, self._cross_width))),
            **dict.fromkeys(("cos", "sin"), angles),
            "gate": BlockTensor((TOKENS, self._heads)),
            "next_gate": BlockTensor((TOKENS, self._cross_heads)),
        }

    def _compute(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        attended = self._attended(values, self._heads)
        x = values["x"] + (attended * _row(values, TEXT + 2) if self._modulates_text else attended)
        normed = self._rms_norm(x)
        asks, tells = (SOUND_ASKS, VIDEO_ASKS) if self._sound else (VIDEO_ASKS, SOUND_ASKS)
        asking, telling = (self._modulated(values, normed, CROSS + row + 1, CROSS + row) for row in (asks, tells))
        query, key = (
            self._rotated(values, self._query_or_key(values, name, from_x), self._cross_heads).to(from_x.dtype)
            for name, from_x in (("q", asking), ("k", telling))
        )
        return x, query, key, self._projected(values, "v", telling).to(telling.dtype), asking


class BlockFeedForward(_StreamPart):
    """The residual stream after the attention to the other stream and the feed-forward, (tokens, width).

    `attended` is (tokens, the sound's width).
    """

    _inputs = ("x", "attended", "modulation")
    _outputs = ("x",)

    def _layers(self, paths: _Paths) -> tuple[dict[str, _Linear], dict[str, tuple[str, int]]]:
        width, inner = self._width, 4 * self._width
        layers = {
            "out": _Linear(f"{paths.asks}.to_out.0", width, self._cross_width),
            "expand": _Linear(f"{paths.feed_forward}.net.0.proj", inner, width),
            "contract": _Linear(f"{paths.feed_forward}.net.2", width, inner),
        }
        return layers, {}

    def _activations(self) -> dict[str, BlockTensor]:
        return {
            "attended": BlockTensor((TOKENS, self._cross_width)),
            "gate": BlockTensor((TOKENS, self._cross_heads)),
        }

    def _compute(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        x = values["x"] + self._attended(values, self._cross_heads) * _row(values, -1)
        normed = self._modulated(values, self._rms_norm(x), FEED_FORWARD, FEED_FORWARD + 1)
        inner = F.gelu(self._projected(values, "expand", normed), approximate="tanh")
        return x + self._projected(values, "contract", inner).float() * _row(values, FEED_FORWARD + 2), x


def _row(values: Mapping[str, Any], number: int) -> torch.Tensor:
    """Return a row of the table, (1, width); negative numbers count from the end."""
    table: torch.Tensor = values["modulation"]
    start = number % table.shape[0]
    return table[start : start + 1]


BLOCK_PARTS: Mapping[str, Callable[[ModelSpec], BlockPart]] = {
    "block_qkv": BlockQKV,
    "block_query": BlockQuery,
    "block_cross": BlockCross,
    "block_feed_forward": BlockFeedForward,
    "block_sound_qkv": partial(BlockQKV, sound=True),
    "block_sound_query": partial(BlockQuery, sound=True),
    "block_sound_cross": partial(BlockCross, sound=True),
    "block_sound_feed_forward": partial(BlockFeedForward, sound=True),
}
