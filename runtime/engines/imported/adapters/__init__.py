"""What bridges an engine made elsewhere and the program that it stands for: small pure functions of named tensors.

Each adapter says what it does (`title`), what that costs (`cost`) and whether the result stays what PyTorch computes
(`exact`, up to rounding). `enter` changes what goes in, `leave` what comes out; tensors have the program's names
between them (`programs`). Which ones an engine needs is decided in `fitting`. Importing them imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from runtime.engines.imported.adapters.clip_and_text import ClipFrames, Denormalised, PaddedIds
from runtime.engines.imported.adapters.common import Adapter, Batch, Names, Types
from runtime.engines.imported.adapters.transformer import (
    TEXT_MASK,
    MaskedText,
    RepeatedText,
    RestoredRows,
    Timestep,
    UnreadRows,
)

__all__ = [
    "TEXT_MASK",
    "Adapter",
    "Batch",
    "ClipFrames",
    "Denormalised",
    "MaskedText",
    "Names",
    "PaddedIds",
    "RepeatedText",
    "RestoredRows",
    "Timestep",
    "Types",
    "UnreadRows",
    "from_json",
    "to_json",
]
_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        Names,
        Types,
        Timestep,
        RepeatedText,
        MaskedText,
        UnreadRows,
        RestoredRows,
        Batch,
        Denormalised,
        ClipFrames,
        PaddedIds,
    )
}


def to_json(adapters: Sequence[Adapter]) -> list[dict[str, Any]]:
    """Return adapters as JSON values."""
    return [{"kind": type(adapter).__name__, **asdict(adapter)} for adapter in adapters]  # type: ignore[call-overload]


def from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Adapter, ...]:
    """Read what `to_json` wrote.

    Raises:
        KeyError, TypeError: if it is anything else.
    """
    made: list[Adapter] = []
    for value in values:
        fields = {name: _tuples(field) for name, field in value.items() if name != "kind"}
        made.append(_KINDS[value["kind"]](**fields))
    return tuple(made)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
