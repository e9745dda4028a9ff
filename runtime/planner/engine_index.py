"""What an engine is (its key), what is known of one (its record), and whether one fits what is wanted.

Pure: no torch, no disk. The planner is handed a list of records; `engines.store` makes it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf, nan
from typing import Any

from runtime.core.loras import LoraUse
from runtime.planner.shapes import LatentSize, ShapeProfile

# What `EngineKey.weights` says when one engine serves several weights, handed over as it is loaded.
SWAPPED = "swapped"
# What `EngineKey.builder` says of one that was made elsewhere: its weights are those that it was compared with.
IMPORTED = "imported"
# How `differences` says that the weights are others.
OTHER_WEIGHTS = "built from other weights"
_DIGEST_LENGTH = 16
# So many of a CPU's instruction sets are named where they differ.
_NAMED = 3
_TITLES: Mapping[str, str] = {
    "cuda": "CUDA",
    "inductor": "Inductor",
    "onnx": "ONNX",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-openvino": "ONNX Runtime with OpenVINO",
    "openvino": "OpenVINO",
    "pytorch": "PyTorch",
    "tensorrt": "TensorRT",
    "torch": "PyTorch",
    "torch_tensorrt": "torch-tensorrt",
}
# Fields of a key in the order in which `misfit` names them.
_MISFITS: Mapping[str, str] = {
    "device": "of another GPU or processor",
    "system": "of another system",
    "versions": "of other library versions",
    "architecture": "of another model",
    "weights": "of other weights",
    "export_revision": "of another Tandem",
    "precision": "in another precision",
    "options": "with other options",
    "profiles": "for other sizes",
}


@dataclass(frozen=True, kw_only=True)
class EngineKey:
    """The whole identity of an engine: two engines with equal keys are interchangeable, and doubt is a miss.

    Attributes:
        program: "text_encoder", "transformer", "vae_first" or "vae_next".
        family: of the model, as in "wan".
        architecture: sha256 of the configurations that shape the program.
        weights: sha256 of the weights, or `SWAPPED`.
        export_revision: raised whenever the exported form changes.
        profiles: the sizes it serves.
        precision: of the arithmetic inside: "float32", "bfloat16" or "float16".
        backend, builder: what runs it and what made it.
        options: the builder's, as (name, value), sorted.
        versions: of the libraries that made it, as (package, version), sorted.
        device: GPU with compute capability and CUDA, or the CPU's instruction set.
        system: operating system and processor architecture.
    """

    program: str
    family: str
    architecture: str
    weights: str
    export_revision: int
    profiles: tuple[ShapeProfile, ...]
    precision: str
    backend: str
    builder: str
    options: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    device: str
    system: str

    def __post_init__(self) -> None:
        for name in ("options", "versions"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))

    def digest(self) -> str:
        """Return the engine's id: the first 16 hexadecimal digits of the SHA-256 of the key."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]

    def to_json(self) -> dict[str, Any]:
        """Return the key as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "EngineKey":
        """Read what `to_json` wrote.

        Raises:
            ValueError: if anything is missing, too many or of another type.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError("its key is not an engine's key")
        plain = names - {"export_revision", "profiles", "options", "versions"}
        if not all(isinstance(value[name], str) for name in plain) or type(value["export_revision"]) is not int:
            raise ValueError("its key has values of the wrong type")
        return cls(
            **{name: value[name] for name in plain},
            export_revision=value["export_revision"],
            profiles=tuple(_profile(entry) for entry in _list(value["profiles"])),
            options=_pairs(value["options"]),
            versions=_pairs(value["versions"]),
        )


# The key of an engine whose manifest cannot be read: it equals none that could be wanted.
UNREADABLE_KEY = EngineKey(
    program="unknown",
    family="",
    architecture="",
    weights="",
    export_revision=0,
    profiles=(),
    precision="",
    backend="",
    builder="",
    options=(),
    versions=(),
    device="",
    system="",
)


@dataclass(frozen=True)
class EngineFile:
    """One file of an engine: its name in the engine's folder, its size, its sha256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """What is known of one engine on disk; one that was not proven yet has the defaults.

    Attributes:
        id: the name of its folder.
        key: `UNREADABLE_KEY` where the manifest cannot be read.
        model, component: what it was built from, for people.
        files: the engine file first, then the data files beside it.
        file_bytes: of all its files.
        build_seconds: how long building took.
        seconds_per_call, pytorch_seconds_per_call: medians measured at the optimal size; 0 if not measured.
        error: relative, ‖out − ref‖/‖ref‖, the worst of all outputs and sizes; NaN if an output was not finite.
        tolerance: what `error` may be at most for the precision.
        verified: whether it was.
        detail: what verification found, in words.
        built_at, last_used: seconds since the epoch. `last_used` orders the store's engines by use; where the clock
            was moved back it runs ahead of it.
        pinned: never evicted.
        problem: what is wrong with the files, None if nothing is known to be.
        loras: what was added to the weights that are inside.
    """

    id: str
    key: EngineKey
    model: str
    component: str
    files: tuple[EngineFile, ...]
    file_bytes: int
    build_seconds: float = 0.0
    seconds_per_call: float = 0.0
    pytorch_seconds_per_call: float = 0.0
    error: float = nan
    tolerance: float = 0.0
    verified: bool = False
    detail: str = ""
    built_at: float = 0.0
    last_used: float = 0.0
    pinned: bool = False
    problem: str | None = None
    loras: tuple[LoraUse, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against loading it."""
        return self.verified and self.problem is None


def find(index: Iterable[EngineRecord], wanted: EngineKey, latent: LatentSize) -> EngineRecord | None:
    """Return the usable engine for `wanted`, or one that differs only in that it serves more sizes, if any.

    Args:
        latent: the size it will be called with. The exact key wins, then the fastest.
    """
    fitting = [
        record
        for record in index
        if record.usable
        and _without_profiles(record.key) == _without_profiles(wanted)
        and any(profile.serves(latent) for profile in record.key.profiles)
    ]
    return min(
        fitting, key=lambda record: (record.key != wanted, record.seconds_per_call or inf, record.id), default=None
    )


def differences(wanted: EngineKey, found: EngineKey, scale: int = 1) -> list[str]:
    """Say how an engine that exists differs from the one that is wanted, a sentence per difference.

    Args:
        scale: pixels per latent, to speak of heights and widths in pixels.
    """
    return [
        *_differing_identity(wanted, found),
        *_differing_build(wanted, found, scale),
        *_differing_machine(wanted, found),
    ]


def misfit(wanted: EngineKey, found: EngineKey) -> str:
    """Say in a few words for what else an engine was built; empty where nothing differs.

    What takes longest to mend is named first: another GPU, then other libraries, weights, sizes.
    """
    for name, words in _MISFITS.items():
        if getattr(wanted, name) != getattr(found, name):
            return f"engine {words}"
    return ""


def _differing_identity(wanted: EngineKey, found: EngineKey) -> Iterator[str]:
    for name, title in (("program", "program"), ("family", "model family")):
        if getattr(wanted, name) != getattr(found, name):
            yield f"it is for the {title} {getattr(found, name)}, asked {getattr(wanted, name)}"
    for name in ("architecture", "weights"):
        if getattr(wanted, name) != getattr(found, name):
            yield OTHER_WEIGHTS if name == "weights" else "built from another architecture"
    if wanted.export_revision != found.export_revision:
        yield f"exported by {'an older' if found.export_revision < wanted.export_revision else 'a newer'} Tandem"


def _differing_build(wanted: EngineKey, found: EngineKey, scale: int) -> Iterator[str]:
    if wanted.profiles != found.profiles:
        yield f"built for {_sizes(found.profiles, scale)}, asked {_sizes(wanted.profiles, scale)}"
    if wanted.precision != found.precision:
        yield f"built in {found.precision}, asked {wanted.precision}"
    if (wanted.backend, wanted.builder) != (found.backend, found.builder):
        yield f"built by {found.builder} for {_title(found.backend)}, asked {wanted.builder}"
    for name, asked, there in _changed(wanted.options, found.options):
        yield f"built with {name.replace('_', ' ')} {there or 'unset'}, asked {asked or 'unset'}"


def _differing_machine(wanted: EngineKey, found: EngineKey) -> Iterator[str]:
    for name, here, there in _changed(wanted.versions, found.versions):
        if there is None:
            yield f"built without {_title(name)}, here {here}"
        else:
            yield f"built with {_title(name)} {there}, here {here or 'there is none'}"
    if wanted.device != found.device:
        yield f"built on {device_words(found.device, wanted.device)}"
    if wanted.system != found.system:
        yield f"built on {found.system}, here {wanted.system}"


def is_of_gpu(device: str) -> bool:
    """Whether a key's `device` is a GPU; a CPU is its architecture and instruction sets."""
    return " sm" in device


def device_words(there: str, here: str) -> str:
    """Say of a key's `device` how it differs from the one here: two CPUs by their instruction sets alone."""
    (kind, *instructions), (kind_here, *instructions_here) = there.split() or [""], here.split() or [""]
    more = [name for name in instructions if name not in instructions_here]
    fewer = [name for name in instructions_here if name not in instructions]
    if is_of_gpu(there) or is_of_gpu(here) or kind != kind_here or not (more or fewer):
        there, here = (device if is_of_gpu(device) else device.partition(" ")[0] for device in (there, here))
        return f"{there}, here {here}"
    told = [f"{word} {_some(names)}" for word, names in (("with", more), ("without", fewer)) if names]
    return f"a processor {' and '.join(told)}, unlike this one"


def _some(names: list[str]) -> str:
    left = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])}{f' and {left} more' if left > 0 else ''}"


def _without_profiles(key: EngineKey) -> tuple[object, ...]:
    return tuple(getattr(key, field.name) for field in fields(key) if field.name != "profiles")


def _changed(
    wanted: tuple[tuple[str, str], ...], found: tuple[tuple[str, str], ...]
) -> list[tuple[str, str | None, str | None]]:
    here, there = dict(wanted), dict(found)
    return [
        (name, here.get(name), there.get(name)) for name in sorted(here | there) if here.get(name) != there.get(name)
    ]


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _sizes(profiles: tuple[ShapeProfile, ...], scale: int) -> str:
    return " or ".join(_size(profile, scale) for profile in profiles) or "no size"


def _size(profile: ShapeProfile, scale: int) -> str:
    def words(latent: LatentSize) -> str:
        frames, height, width = latent
        return f"{frames} latent frame{'s' * (frames > 1)} of {height * scale}×{width * scale}"

    if profile.min == profile.max:
        return words(profile.min)
    return f"{words(profile.min)} to {words(profile.max)}"


def _list(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ValueError("its key has values of the wrong type")
    return list(value)


def _profile(value: object) -> ShapeProfile:
    if not isinstance(value, dict) or set(value) != {"min", "opt", "max"}:
        raise ValueError("its key has a shape profile of the wrong type")
    return ShapeProfile(*(_latent(value[name]) for name in ("min", "opt", "max")))


def _latent(value: object) -> LatentSize:
    match value:
        case [int(frames), int(height), int(width)] if not any(isinstance(n, bool) for n in value):
            return frames, height, width
    raise ValueError("its key has a shape profile of the wrong type")


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    pairs = []
    for pair in _list(value):
        match pair:
            case [str(name), str(text)]:
                pairs.append((name, text))
            case _:
                raise ValueError("its key has values of the wrong type")
    return tuple(pairs)
