"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in requests and plans.

`models.loras` finds and checks the files.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.frozen import FrozenModel

SUFFIX = ".safetensors"
BOTH: Literal["both"] = "both"
Expert = Literal["both", "high", "low"]
# The experts that a LoRA can change.
EXPERTS: tuple[Expert, ...] = (BOTH, "high", "low")
MAX_LORAS = 8
# Larger weights destroy the picture; most LoRAs are trained for 1.
MAX_WEIGHT = 4.0
_LONGEST_NAME = 1_000
# The part of the steps in which an adapter without a range is active.
START, END = 0.0, 1.0
_DEFAULTS: Mapping[str, Any] = {"weight": 1.0, "expert": BOTH, "start": START, "end": END}
_KEYS = frozenset({"file", *_DEFAULTS})
_RANGE = re.compile(r"(.*)@([0-9.]+)-([0-9.]+)", re.DOTALL)
# A weight and a range that is none, which no file is called.
_BAD_RANGE = re.compile(r"(.*:[0-9.]+)@([^-]*)-?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Lora:
    """One adapter, as requested.

    Attributes:
        file: a name in the folder `loras` of the cache's weights, without suffix, or the path of a .safetensors file.
        weight: the factor of its change.
        expert: the expert that it changes, "high" or "low" noise; with "both", the file's name may determine it.
        start, end: the part of a video's steps in which it is active, as fractions of their number. A step belongs to
            the part in which it begins.
    """

    file: str
    weight: float = 1.0
    expert: Expert = BOTH
    start: float = START
    end: float = END

    @property
    def is_name(self) -> bool:
        """Whether `file` can only be a name in the cache: not a path, and nothing that leads out of a folder."""
        parts = self.file.split("/")
        plain = all(part.strip() and part not in {".", ".."} for part in parts) and not self.file.startswith("~")
        return plain and "\\" not in self.file and ":" not in self.file and not self.file.endswith(SUFFIX)

    def __str__(self) -> str:
        """Return it in the notation of `--lora`."""
        expert = "" if self.expert == BOTH else f"{self.expert}="
        part = "" if (self.start, self.end) == (START, END) else f"@{self.start:.12g}-{self.end:.12g}"
        return f"{expert}{self.file}:{self.weight:.12g}{part}"


class LoraUse(FrozenModel):
    """One adapter whose file was found and checked.

    Attributes:
        file: as requested.
        path: the file.
        digest: the file's SHA-256 in hexadecimal.
        weight, expert, start, end: see `Lora`.
        steps: the number of denoising steps, without guidance, that it was distilled for; `None` if it was not.
        without_effect: layers in the file that belong to a part that the model does not have, "*" for all numbers.
    """

    file: str
    path: Path
    digest: str
    weight: float
    expert: Expert = BOTH
    steps: int | None = None
    without_effect: tuple[str, ...] = ()
    start: float = START
    end: float = END

    @property
    def has_range(self) -> bool:
        """Whether it is active in a part of the steps only."""
        return (self.start, self.end) != (START, END)

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.path.stem

    @property
    def identity(self) -> str:
        """What determines its change to a model's weights, and when."""
        part = f"@{self.start!r}-{self.end!r}" if self.has_range else ""
        return f"{self.digest}:{self.weight!r}{part}"

    def changes(self, component: str) -> bool:
        """Return whether it changes a component's weights; "transformer" is the high-noise expert, or the only one."""
        changed = {BOTH: ("transformer", "transformer_2"), "low": ("transformer_2",)}
        return component in changed.get(self.expert, ("transformer",))

    def requested(self) -> Lora:
        """Return it as requested."""
        return Lora(self.file, self.weight, self.expert, self.start, self.end)

    def in_all_steps(self) -> "LoraUse":
        """Return it without a range."""
        return self.replace(start=START, end=END)

    def summary(self) -> dict[str, Any]:
        """Return what results record of it, as JSON values: its name and digest, not its path."""
        return {"name": self.name, **self.model_dump(mode="json", exclude={"file", "path", "without_effect"})}


def active_ranges(loras: Sequence[LoraUse], component: str, step: int, steps: int) -> tuple[int, ...]:
    """Return the numbers of the adapters with a range that change a component in a step.

    Args:
        step: its number, from 0, of all `steps` that run.
    """
    return tuple(
        number
        for number, use in enumerate(loras)
        if use.has_range and use.changes(component) and use.start <= step / steps < use.end
    )


def loads_of_ranges(loras: Sequence[LoraUse], expert_steps: Mapping[str, int]) -> dict[str, int]:
    """Return how often components are loaded while their steps run, because other adapters become active.

    Components that none of the adapters with a range changes in a step are left out.

    Args:
        expert_steps: the steps of each component, in order.
    """
    loads, first, steps = dict[str, int](), 0, sum(expert_steps.values())
    for name, count in expert_steps.items():
        active = [active_ranges(loras, name, step, steps) for step in range(first, first + count)]
        if any(active):
            loads[name] = len(list(groupby(active)))
        first += count
    return loads


def read_loras(value: object) -> tuple[Lora, ...]:
    """Read a list of adapters: each a `Lora`, a mapping of its fields, text as `--lora` takes it, or (file, weight).

    Raises:
        InvalidRequestError: for anything else, or a weight out of range.
    """
    if not isinstance(value, list | tuple):
        raise InvalidRequestError("loras", "lora.not_a_list", value=shortened(value))
    if len(value) > MAX_LORAS:
        raise InvalidRequestError("loras", "lora.too_many", count=len(value), most=MAX_LORAS)
    loras: list[Lora] = []
    for lora in map(_lora, value):
        same = (other for other in loras if (other.file, other.expert) == (lora.file, lora.expert))
        if any(other.start < lora.end and lora.start < other.end for other in same):
            raise InvalidRequestError("loras", "lora.repeated", file=shortened(lora.file))
        loras.append(lora)
    return tuple(loras)


def parse_lora(text: str) -> Lora:
    """Read `[high=|low=]FILE[:WEIGHT][@START-END]`; what follows the last colon is a weight if it is a number.

    Raises:
        InvalidRequestError: for a weight or a range that is not possible, or an empty name.
    """
    expert, separator, rest = text.partition("=")
    if not (separator and expert in EXPERTS):
        expert, rest = BOTH, text
    start: object = START
    end: object = END
    if part := _RANGE.fullmatch(rest) or _BAD_RANGE.fullmatch(rest):
        rest, start, end = part.groups()
    file, colon, number = rest.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:  # part of the name, as in C:\style.safetensors
        file, weight = rest, 1.0
    return _checked(file if colon else rest, weight, expert, start, end)


def _lora(entry: object) -> Lora:
    match entry:
        case Lora():
            return _checked(entry.file, entry.weight, entry.expert, entry.start, entry.end)
        case str():
            return parse_lora(entry)
        case Mapping() if "file" in entry and set(entry) <= _KEYS:
            values = {**_DEFAULTS, **{key: value for key, value in entry.items() if value is not None}}
            return _checked(entry["file"], *(values[key] for key in _DEFAULTS))
        case [file, weight]:
            return _checked(file, weight, BOTH)
    raise InvalidRequestError("loras", "lora.not_a_lora", value=shortened(entry))


def _checked(file: object, weight: object, expert: object, start: object = START, end: object = END) -> Lora:
    data = {"file": shortened(file)}
    if not isinstance(file, str) or not file.strip() or not file.isprintable() or len(file) > _LONGEST_NAME:
        raise InvalidRequestError("loras", "lora.bad_name", **data)
    factor = _number(weight)
    if factor is None:
        raise InvalidRequestError(
            "loras", "lora.weight_not_a_number", **data, weight=shortened(weight), most=MAX_WEIGHT
        )
    if not 0 < factor <= MAX_WEIGHT:
        raise InvalidRequestError("loras", "lora.weight_out_of_range", **data, weight=factor, most=MAX_WEIGHT)
    expert_name = next((name for name in EXPERTS if name == expert), None)
    if expert_name is None:
        raise InvalidRequestError(
            "loras", "lora.unknown_expert", **data, expert=shortened(expert), choices=list(EXPERTS)
        )
    first, last = _number(start), _number(end)
    if first is None or last is None or not START <= first < last <= END:
        raise InvalidRequestError("loras", "lora.bad_range", **data, start=shortened(start), end=shortened(end))
    return Lora(file, factor, expert_name, first, last)


def _number(value: object) -> float | None:
    """Return a finite number, or one in a text; `None` for anything else."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
