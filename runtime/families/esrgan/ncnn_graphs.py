"""Upscalers in ncnn's files: their layers are compared with the network of their configuration. Imports no torch."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.families.esrgan.spec import (
    COMPACT,
    DENSE,
    DENSE_CONVOLUTIONS,
    UpscalerSpec,
    config_of,
    parameters,
    read_architecture,
)
from runtime.models.ncnn_files import NcnnLayer, read_ncnn
from runtime.models.stored_weights import PLAIN, StoredWeight, WeightFiles

# The layers whose first parameters are of shapes, and their last number: channels, size of the kernel, padding, bias
# and number of values.
_WITH_SHAPES, _SHAPES = ("Convolution", "PReLU"), 6
_SLOPE, _RESIDUAL = 0.2, 0.2
# A leaky ReLU after a convolution: its kind and slope.
_LEAKY = [(9, 2.0), (10, (_SLOPE,))]


def read_upscaler(path: Path) -> WeightFiles:
    """Return the weights of an upscaler in ncnn's files, by BasicSR's names.

    Args:
        path: the `.param`.

    Raises:
        ModelError: see `ncnn_files.read_ncnn`; if the network is another one, or ends with an interpolation.
    """
    layers = read_ncnn(path)
    with_weights = [layer for layer in layers if layer.weights]
    # A compact network has a PReLU after each convolution but the last; an RRDBNet none.
    compact = any(layer.kind == "PReLU" for layer in layers)
    names = _compact_names(len(with_weights)) if compact else _rrdb_names(len(with_weights))
    weights = {
        f"{name}.{role}": StoredWeight(PLAIN, tensor.shape, tensor)
        for name, layer in zip(names, with_weights, strict=False)
        for role, tensor in layer.weights.items()
    }
    shapes = {name: weight.shape for name, weight in weights.items()}
    config = config_of(shapes)
    if config is None or parameters(config) != shapes:
        raise _other_network(path)
    spec, expressions = read_architecture(config), _Expressions()
    try:
        computed = expressions.of_layers(layers)
    except (ValueError, LookupError, TypeError) as error:
        raise _other_network(path) from error
    if computed != (expressions.compact(spec) if spec.kind == COMPACT else expressions.rrdb(spec)):
        raise _other_network(path)
    return WeightFiles.of(weights, config, None)


def _other_network(path: Path) -> ModelError:
    return ModelError("model.ncnn_invalid", file=path.name, cause=Fact("ncnn.other_network"))


def _compact_names(number: int) -> list[str]:
    return [f"body.{index}" for index in range(number)]


def _rrdb_names(number: int) -> list[str]:
    """Return the names of convolutions in the order in which they are computed."""
    ends = ["conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"]
    blocks = (number - len(ends) - 1) // (DENSE * DENSE_CONVOLUTIONS)
    body = [
        f"body.{block}.rdb{dense + 1}.conv{index + 1}"
        for block in range(blocks)
        for dense in range(DENSE)
        for index in range(DENSE_CONVOLUTIONS)
    ]
    return ["conv_first", *body, *ends]


class _Expressions:
    """What networks compute, as numbers: equal expressions have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._weights = count()

    def of(self, *parts: Hashable) -> int:
        """Return the number of an operation on expressions."""
        return self._numbers.setdefault(parts, len(self._numbers))

    def convolution(self, x: int, slope: float = 0.0) -> int:
        """Return a convolution with the next weights, and a leaky ReLU after it unless its slope is 0."""
        return self.of("convolution", next(self._weights), x, slope)

    def prelu(self, x: int) -> int:
        """Return a `PReLU` with the next weights."""
        return self.of("prelu", next(self._weights), x)

    def total(self, *terms: tuple[int, float]) -> int:
        """Return the sum of expressions, each times a factor."""
        return self.of("sum", *sorted(terms))

    def of_layers(self, layers: Sequence[NcnnLayer]) -> int:
        """Return what the last layer computes.

        Raises:
            ValueError, LookupError: if a layer is of another kind than those of upscalers.
        """
        self._weights = count()
        tensors: dict[str, int] = {}
        for layer in layers:
            inputs, values = [tensors[name] for name in layer.inputs], dict(layer.parameters)
            outputs = [self._layer(layer.kind, inputs, values)] * len(layer.outputs)
            tensors |= zip(layer.outputs, outputs, strict=True)
        return tensors[layers[-1].outputs[0]]

    def _layer(self, kind: str, inputs: list[int], values: Mapping[int, Any]) -> int:
        # Those of shapes are checked with the weights.
        settings = {number: value for number, value in values.items() if kind not in _WITH_SHAPES or number > _SHAPES}
        layer: tuple[Any, ...] = (kind, *settings.items())
        match layer:
            case ["Input"]:
                expression = self.of("source")
            case ["Split"]:
                expression = inputs[0]
            case ["Concat"]:
                expression = self.of("joined", *inputs)
            case ["BinaryOp"]:
                expression = self.total(*((x, 1.0) for x in inputs))
            case ["PReLU"]:
                expression = self.prelu(*inputs)
            case ["Convolution"]:
                expression = self.convolution(*inputs)
            case ["Convolution", *leaky] if leaky == _LEAKY:
                expression = self.convolution(inputs[0], _SLOPE)
            case ["Eltwise", (0, 1.0), (1, factors)]:
                expression = self.total(*zip(inputs, factors, strict=True))
            case ["PixelShuffle", (0, scale)]:
                expression = self.of("shuffle", *inputs, scale)
            case ["Interp", (0, 1.0), (1, scale), (2, width)] if scale == width:
                expression = self.of("nearest", *inputs, scale)
            case _:
                raise ValueError(kind)
        return expression

    def compact(self, spec: UpscalerSpec) -> int:
        """Return what a compact network computes; see `programs.CompactNetwork`."""
        self._weights = count()
        source = self.of("source")
        hidden = self.prelu(self.convolution(source))
        for _ in range(spec.depth):
            hidden = self.prelu(self.convolution(hidden))
        scale = float(spec.scale)
        shuffled = self.of("shuffle", self.convolution(hidden), scale)
        return self.total((shuffled, 1.0), (self.of("nearest", source, scale), 1.0))

    def rrdb(self, spec: UpscalerSpec) -> int:
        """Return what an RRDBNet for a factor of 4 computes; see `programs.RrdbNetwork`."""
        self._weights = count()
        first = self.convolution(self.of("source"))
        hidden = first
        for _ in range(spec.depth):
            block = hidden
            for _ in range(DENSE):
                joined, x = [hidden], hidden
                for _ in range(DENSE_CONVOLUTIONS - 1):
                    joined.append(self.convolution(x, _SLOPE))
                    x = self.of("joined", *joined)
                hidden = self.total((self.convolution(x), _RESIDUAL), (hidden, 1.0))
            hidden = self.total((hidden, _RESIDUAL), (block, 1.0))
        hidden = self.total((first, 1.0), (self.convolution(hidden), 1.0))
        for _ in range(2):
            hidden = self.convolution(self.of("nearest", hidden, 2.0), _SLOPE)
        return self.convolution(self.convolution(hidden, _SLOPE))
