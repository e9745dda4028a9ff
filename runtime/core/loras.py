"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): as they are asked for, and as they are used.

Knows nothing about files: `models.loras` finds and checks them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError

SUFFIX = ".safetensors"
BOTH = "both"
# Which of a model's experts one changes.
EXPERTS = (BOTH, "high", "low")
MAX_LORAS = 8
# Weights beyond this break any picture; most are made for 1.
MAX_WEIGHT = 4.0
_LONGEST_NAME = 1_000
_FIELDS = frozenset({"file", "weight", "expert"})
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Lora:
    """One adapter, as asked for.

    Attributes:
        file: a name in the folder `loras` of the cache's weights, without suffix, or the path of a .safetensors file.
        weight: what its change is multiplied by.
        expert: which expert it changes: "high" or "low" noise, or "both", which lets a file's own name say it.
    """

    file: str
    weight: float = 1.0
    expert: str = BOTH

    @property
    def is_name(self) -> bool:
        """Whether it can only be one of the cache's: no path, and nothing that leads out of a folder."""
        parts = self.file.split("/")
        plain = all(part.strip() and part not in {".", ".."} for part in parts) and not self.file.startswith("~")
        return plain and "\\" not in self.file and ":" not in self.file and not self.file.endswith(SUFFIX)

    def __str__(self) -> str:
        """Return it as `--lora` takes it."""
        expert = "" if self.expert == BOTH else f"{self.expert}="
        return f"{expert}{self.file}:{self.weight:.12g}"


@dataclass(frozen=True, kw_only=True)
class LoraUse:
    """One adapter whose file was found and checked.

    Attributes:
        file: as it was asked for.
        path: of the file.
        digest: the file's sha256 in hexadecimal.
        weight: see `Lora`.
        expert: "high", "low" or "both".
        steps: how many denoising steps it was distilled for, without guidance; `None` for one that was not.
    """

    file: str
    path: Path
    digest: str
    weight: float
    expert: str = BOTH
    steps: int | None = None

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        return self.path.stem

    @property
    def identity(self) -> str:
        """What of it changes a model's weights."""
        return f"{self.digest}:{self.weight!r}"

    def changes(self, component: str) -> bool:
        """Whether it changes the weights of a component, "transformer" being the high-noise expert, or the only one."""
        return component in {BOTH: ("transformer", "transformer_2"), "low": ("transformer_2",)}.get(
            self.expert, ("transformer",)
        )

    def asked(self) -> Lora:
        """Return it as it was asked for."""
        return Lora(self.file, self.weight, self.expert)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; `from_json` reads them back."""
        return {**vars(self), "path": str(self.path)}

    def told(self) -> dict[str, Any]:
        """Return what is told of it beside a video, as JSON types: its name and digest, not where it lies."""
        told = {name: value for name, value in vars(self).items() if name not in {"file", "path"}}
        return {"name": self.name, **told}

    @classmethod
    def from_json(cls, values: object) -> "LoraUse":
        """Read `to_json` back.

        Raises:
            ValueError: if it is anything else.
        """
        match values:
            case {
                "file": str(file),
                "path": str(path),
                "digest": str(digest),
                "weight": float(weight),
                "expert": str(expert),
                "steps": None | int() as steps,
            } if expert in EXPERTS:
                return cls(file=file, path=Path(path), digest=digest, weight=weight, expert=expert, steps=steps)
        raise ValueError("its LoRAs have values of the wrong type")


def read_loras(value: object) -> tuple[Lora, ...]:
    """Read a list of adapters: each a `Lora`, a mapping of its fields, text as `--lora` takes it, or (file, weight).

    Raises:
        InvalidRequestError: for anything else, or a weight out of bounds.
    """
    if not isinstance(value, list | tuple):
        raise _wrong(f"loras is {_shown(value)}.", 'Give a list, as in ["style", "high=fast:0.8"].')
    if len(value) > MAX_LORAS:
        raise _wrong(f"{len(value)} LoRAs are too many.", f"Give at most {MAX_LORAS}.")
    found = tuple(_lora(entry) for entry in value)
    twice = next((lora for place, lora in enumerate(found) if _target(lora) in map(_target, found[:place])), None)
    if twice is not None:
        raise _wrong(f"The LoRA {_shown(twice.file)} is there twice.", "Give it once, with the weight that you want.")
    return found


def parse_lora(text: str) -> Lora:
    """Read `[high=|low=]FILE[:WEIGHT]`; what follows the last colon is a weight if it is a number.

    Raises:
        InvalidRequestError: for a weight out of bounds or an empty name.
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
        case Mapping() if "file" in entry and set(entry) <= _FIELDS:
            return _checked(entry["file"], entry.get("weight", 1.0), entry.get("expert", BOTH))
        case [file, weight]:
            return _checked(file, weight, BOTH)
    raise _wrong(f"loras holds {_shown(entry)}.", "Give FILE, FILE:WEIGHT, high=FILE or low=FILE.")


def _checked(file: object, weight: object, expert: object) -> Lora:
    if not isinstance(file, str) or not file.strip() or not file.isprintable() or len(file) > _LONGEST_NAME:
        raise _wrong(
            f"The LoRA's name is {_shown(file)}: empty or unreadable.", "Give a name, or a .safetensors file's path."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise _wrong(
            f"The weight of the LoRA {_shown(file)} is {_shown(weight)}, not a number.", f"Give one up to {MAX_WEIGHT}."
        )
    if not 0 < weight <= MAX_WEIGHT:
        raise _wrong(
            f"The weight of the LoRA {_shown(file)} is {weight:g}.",
            f"Give one above 0 and up to {MAX_WEIGHT:g}; most are made for 1.",
        )
    if expert not in EXPERTS:
        raise _wrong(f"The LoRA {_shown(file)} is for {_shown(expert)}.", f"Take one of {', '.join(EXPERTS)}.")
    return Lora(file, float(weight), str(expert))


def _target(lora: Lora) -> tuple[str, str]:
    return lora.file, lora.expert


def _wrong(what: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError("loras", what, remedy)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
