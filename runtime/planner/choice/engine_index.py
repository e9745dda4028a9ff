"""Engine keys (identity), shape profiles and records (metadata of an engine on disk); finds the record for a key.

`engines.store` reads the records and passes them to the planner.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, nan
from typing import Annotated

from pydantic import ConfigDict, Field

from runtime.core.facts import Fact
from runtime.core.loras import LoraUse
from runtime.core.plan import LatentSize, is_block_program
from runtime.core.units import shape_text
from runtime.models.spec import IMAGE_ENCODER, is_text_encoder
from runtime.models.vae_groups import IMAGE_PROGRAM

# `EngineKey.weights` of an engine without weights: they are supplied when it is loaded.
SWAPPED = "swapped"
# `EngineKey.builder` of an engine that was made elsewhere: its weights are those that it was compared with.
IMPORTED = "imported"
# The programs that compute one latent frame in a call.
STEPS = frozenset({"vae_first", "vae_next", "vae_encoder_first", "vae_encoder_next", IMAGE_PROGRAM})
_DIGEST_LENGTH = 16
_Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, order=True)
class ShapeProfile:
    """A range of latent sizes that one engine serves, and the size that it is optimized for.

    Attributes:
        min, opt, max: (frames, height, width) in latent units. For `vae_next` frames counts the latent frames of one
            call, for the VAE's other steps it is 1. Programs that serve clips of any size have (1, 1, 1), see
            `serves_any_clip`.

    Raises:
        ValueError: if a size is below 1, or min ≤ opt ≤ max does not hold.
    """

    min: LatentSize
    opt: LatentSize
    max: LatentSize

    def __post_init__(self) -> None:
        for low, best, high in zip(self.min, self.opt, self.max, strict=True):
            if not 1 <= low <= best <= high:
                raise ValueError(f"not a shape profile: {self.min}, {self.opt}, {self.max}")

    @classmethod
    def fixed(cls, latent: LatentSize) -> "ShapeProfile":
        """Return the profile that serves one size only."""
        return cls(latent, latent, latent)

    def serves(self, latent: LatentSize) -> bool:
        """Return whether an engine of this profile accepts latents of a size."""
        return all(low <= n <= high for low, n, high in zip(self.min, latent, self.max, strict=True))

    def __str__(self) -> str:
        """Return "9×14×24", or "1×14×24 to 21×60×104": frames × height × width in latent units."""
        sizes = [self.min] if self.min == self.max else [self.min, self.max]
        return " to ".join(shape_text(size) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class EngineKey:
    """The complete identity of an engine. Engines with equal keys are interchangeable; in doubt keys differ.

    Attributes:
        program: one of `engines.programs`, or of `ModelSpec.block_programs`.
        family: of the model, a key of `models.registry.FAMILIES`.
        architecture: SHA-256 of the configuration values that shape the program.
        weights: SHA-256 of the weights, or `SWAPPED`.
        export_revision: digest of the source code of the exported program; 1 for imported engines, and for engines
            of versions that did not hash it.
        profiles: the sizes that it serves.
        precision: of the arithmetic inside: "float32", "bfloat16" or "float16".
        backend, builder: what runs it and what made it.
        options: the builder's, as (name, value), sorted.
        versions: of the libraries that made it, as (package, version), sorted.
        device: GPU with compute capability and CUDA version, or the CPU's instruction sets.
        system: operating system and processor architecture.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    program: str
    family: str
    architecture: str
    weights: str
    export_revision: int | str
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
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


# The key of an engine whose manifest cannot be read; never equal to a wanted key.
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
    """One file of an engine: its name in the engine's folder, its size, and its SHA-256 in hexadecimal."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[^./\\:\x00][^/\\:\x00]*$")]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """Metadata of an engine on disk. The defaults are those of an engine that was not verified.

    Attributes:
        id: the name of its folder.
        key: `UNREADABLE_KEY` if the manifest cannot be read.
        model, component: what it was built from.
        files: the engine file first, then the data files that belong to it.
        file_bytes: of all its files.
        build_seconds: duration of the build, with loading, comparison and measurements.
        seconds_per_call: median at the optimal size; 0 if not measured.
        pytorch_seconds_per_call: of the program in PyTorch, in the precision of the engine; 0 if not measured.
        baselines: seconds of what PyTorch would run instead of the engine, at the optimal size: the component as the
            family computes it, in the dtype of a plan without engines, "eager" and "compiled" as far as measured.
        context_bytes: GPU memory that the engine needs while it runs, besides weights, inputs and outputs.
        error: relative, ‖out − ref‖/‖ref‖, the largest of all outputs and sizes; NaN if an output was not finite.
        largest_error: the largest |out − ref| of all outputs, relative to the output's largest |ref|.
        tolerance: the largest `error` allowed for the precision.
        verified: whether the error was within the tolerance.
        detail: the result of verification for people.
        built_at, last_used: seconds since the epoch. `last_used` orders engines by use; after the clock was set back
            it runs ahead of it.
        pinned: never evicted.
        problem: why the engine cannot be used; `None` if no problem is known.
        loras: the LoRAs in its weights.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    id: str
    key: EngineKey
    model: str
    component: str
    files: Annotated[tuple[EngineFile, ...], Field(min_length=1)]
    file_bytes: int
    build_seconds: _Positive = 0.0
    seconds_per_call: _Positive = 0.0
    pytorch_seconds_per_call: _Positive = 0.0
    baselines: Mapping[str, _Positive] = field(default_factory=dict)
    context_bytes: Annotated[int, Field(ge=0)] = 0
    error: _Positive = nan
    largest_error: _Positive = 0.0
    tolerance: _Positive = 0.0
    verified: bool = False
    detail: Fact = Fact("engine.not_compared_yet")  # noqa: RUF009 - facts are frozen
    built_at: _Positive = 0.0
    last_used: _Positive = 0.0
    pinned: bool = False
    problem: Fact | None = None
    loras: tuple[LoraUse, ...] = ()

    @property
    def pytorch_seconds(self) -> float:
        """Seconds of what PyTorch would run instead, at its fastest; 0 if not measured."""
        return min(self.baselines.values(), default=0.0)

    @property
    def usable(self) -> bool:
        """Whether it was verified and has no known problem."""
        return self.verified and self.problem is None


def serves_any_clip(program: str) -> bool:
    """Return whether a program sees no latents, so that its engines serve clips of any size."""
    return is_text_encoder(program) or program == IMAGE_ENCODER or is_block_program(program)


def is_of_gpu(device: str) -> bool:
    """Return whether a key's `device` is a GPU; a CPU's is its architecture and instruction sets."""
    return " sm" in device


def find(index: Iterable[EngineRecord], target: EngineKey, latent: LatentSize) -> EngineRecord | None:
    """Return a usable engine for `target`, or one that differs only in its sizes and serves `latent`.

    The exact key comes first, then the fastest; `None` if there is none.
    """
    matching = [
        record
        for record in index
        if record.usable
        and _without_profiles(record.key) == _without_profiles(target)
        and any(profile.serves(latent) for profile in record.key.profiles)
    ]
    return min(
        matching, key=lambda record: (record.key != target, record.seconds_per_call or inf, record.id), default=None
    )


def _without_profiles(key: EngineKey) -> tuple[object, ...]:
    return tuple(getattr(key, field.name) for field in fields(key) if field.name != "profiles")
