"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in requests and plans.

`models.loras` finds and checks the files.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
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
_KEYS = frozenset({"file", "weight", "expert"})


@dataclass(frozen=True)
class Lora:
    """One adapter, as requested.

    Attributes:
        file: a name in the folder `loras` of the cache's weights, without suffix, or the path of a .safetensors file.
        weight: the factor of its change.
        expert: the expert that it changes, "high" or "low" noise; with "both", the file's name may determine it.
    """

    file: str
    weight: float = 1.0
    expert: Expert = BOTH

    @property
    def is_name(self) -> bool:
        """Whether `file` can only be a name in the cache: not a path, and nothing that leads out of a folder."""
        parts = self.file.split("/")
        plain = all(part.strip() and part not in {".", ".."} for part in parts) and not self.file.startswith("~")
        return plain and "\\" not in self.file and ":" not in self.file and not self.file.endswith(SUFFIX)

    def __str__(self) -> str:
        """Return it in the notation of `--lora`."""
        expert = "" if self.expert == BOTH else f"{self.expert}="
        return f"{expert}{self.file}:{self.weight:.12g}"


class LoraUse(FrozenModel):
    """One adapter whose file was found and checked.

    Attributes:
        file: as requested.
        path: the file.
        digest: the file's SHA-256 in hexadecimal.
        weight, expert: see `Lora`.
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

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.path.stem

    @property
    def identity(self) -> str:
        """What determines its change to a model's weights."""
        return f"{self.digest}:{self.weight!r}"

    def changes(self, component: str) -> bool:
        """Return whether it changes a component's weights; "transformer" is the high-noise expert, or the only one."""
        changed = {BOTH: ("transformer", "transformer_2"), "low": ("transformer_2",)}
        return component in changed.get(self.expert, ("transformer",))

    def requested(self) -> Lora:
        """Return it as requested."""
        return Lora(self.file, self.weight, self.expert)

    def summary(self) -> dict[str, Any]:
        """Return what results record of it, as JSON values: its name and digest, not its path."""
        return {"name": self.name, **self.model_dump(mode="json", exclude={"file", "path", "without_effect"})}


def read_loras(value: object) -> tuple[Lora, ...]:
    """Read a list of adapters: each a `Lora`, a mapping of its fields, text as `--lora` takes it, or (file, weight).

    Raises:
        InvalidRequestError: for anything else, or a weight out of range.
    """
    if not isinstance(value, list | tuple):
        raise InvalidRequestError("loras", "lora.not_a_list", value=shortened(value))
    if len(value) > MAX_LORAS:
        raise InvalidRequestError("loras", "lora.too_many", count=len(value), most=MAX_LORAS)
    loras: dict[tuple[str, str], Lora] = {}
    for lora in map(_lora, value):
        if (lora.file, lora.expert) in loras:
            raise InvalidRequestError("loras", "lora.repeated", file=shortened(lora.file))
        loras[lora.file, lora.expert] = lora
    return tuple(loras.values())


def parse_lora(text: str) -> Lora:
    """Read `[high=|low=]FILE[:WEIGHT]`; what follows the last colon is a weight if it is a number.

    Raises:
        InvalidRequestError: for a weight out of range or an empty name.
    """
    expert, separator, rest = text.partition("=")
    if not (separator and expert in EXPERTS):
        expert, rest = BOTH, text
    file, colon, number = rest.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:  # part of the name, as in C:\style.safetensors
        file, weight = rest, 1.0
    return _checked(file if colon else rest, weight, expert)


def _lora(entry: object) -> Lora:
    match entry:
        case Lora():
            return _checked(entry.file, entry.weight, entry.expert)
        case str():
            return parse_lora(entry)
        case Mapping() if "file" in entry and set(entry) <= _KEYS:
            values = {"weight": 1.0, "expert": BOTH} | {key: value for key, value in entry.items() if value is not None}
            return _checked(entry["file"], values["weight"], values["expert"])
        case [file, weight]:
            return _checked(file, weight, BOTH)
    raise InvalidRequestError("loras", "lora.not_a_lora", value=shortened(entry))


def _checked(file: object, weight: object, expert: object) -> Lora:
    data = {"file": shortened(file)}
    if not isinstance(file, str) or not file.strip() or not file.isprintable() or len(file) > _LONGEST_NAME:
        raise InvalidRequestError("loras", "lora.bad_name", **data)
    if isinstance(weight, str):
        with suppress(ValueError):
            weight = float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise InvalidRequestError(
            "loras", "lora.weight_not_a_number", **data, weight=shortened(weight), most=MAX_WEIGHT
        )
    if not 0 < weight <= MAX_WEIGHT:
        raise InvalidRequestError("loras", "lora.weight_out_of_range", **data, weight=weight, most=MAX_WEIGHT)
    expert_name = next((name for name in EXPERTS if name == expert), None)
    if expert_name is None:
        raise InvalidRequestError(
            "loras", "lora.unknown_expert", **data, expert=shortened(expert), choices=list(EXPERTS)
        )
    return Lora(file, float(weight), expert_name)
