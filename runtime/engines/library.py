"""The engine library: `engines list|verify|delete|prune`, and why an engine is stale. Prints nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, TandemError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.build import verify_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.child import Report
from runtime.engines.identity import device_like, device_text, program_key_parts, runnable_programs
from runtime.engines.imported.offering import key_here
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import (
    IMPORTED,
    SWAPPED,
    UNREADABLE_KEY,
    EngineKey,
    EngineRecord,
    device_difference,
    differences,
)


@dataclass(frozen=True)
class Listing:
    """All engines, the most recently used first, their total size on disk, and the limit."""

    engines: tuple[EngineRecord, ...]
    total_bytes: int
    max_bytes: int


@dataclass(frozen=True)
class Verified:
    """One engine after verification.

    Attributes:
        engine: with the result; `usable` is whether it passed.
        skipped: why it could not be verified on this machine; its state is unchanged.
    """

    engine: EngineRecord
    skipped: Fact | None = None


@dataclass(frozen=True)
class Pruned:
    """The deleted engines, the size of the rest, and the requested limit. Pinned and used engines stay."""

    deleted: tuple[EngineRecord, ...]
    total_bytes: int
    max_bytes: int

    @property
    def enough(self) -> bool:
        """Whether the rest is within the limit."""
        return self.total_bytes <= self.max_bytes


def listing(store: EngineStore) -> Listing:
    """Return the engines in the store."""
    engines = sorted(store.index(), key=lambda record: (-record.last_used, record.id))
    return Listing(tuple(engines), _total(store), store.max_bytes)


def choose(store: EngineStore, wanted: Sequence[str]) -> list[EngineRecord]:
    """Return the engines with the given ids or prefixes of ids; all engines if none is given.

    Raises:
        EngineError: if a prefix matches no engine, or several.
    """
    engines = store.index()
    chosen: dict[str, EngineRecord] = {}
    for text in wanted:
        found = [record for record in engines if text and record.id.startswith(text.lower())]
        if not found:
            raise EngineError("engine.not_found", engine=text[:40])
        if len(found) > 1:
            raise EngineError("engine.id_ambiguous", engine=text[:40], matches=[record.id for record in found])
        chosen[found[0].id] = found[0]
    return list(chosen.values()) if wanted else engines


def delete(store: EngineStore, engines: Iterable[EngineRecord]) -> int:
    """Delete engines, including pinned ones, and return the freed bytes.

    Raises:
        EngineError: for the first that cannot be deleted; those before it are deleted.
    """
    freed = 0
    for record in engines:
        size = manifest.folder_bytes(store.path(record.id))
        store.delete(record.id)
        freed += size
    return freed


def prune(store: EngineStore, max_bytes: int | None = None) -> Pruned:
    """Delete damaged engines, then the least recently used, until the rest takes at most `max_bytes`.

    Args:
        max_bytes: by default the store's own limit.

    Raises:
        EngineError: if the folder cannot be written.
    """
    limit = store.max_bytes if max_bytes is None else max_bytes
    deleted = store.prune(limit)
    return Pruned(tuple(deleted), _total(store), limit)


def verify(
    store: EngineStore,
    engines: Iterable[EngineRecord],
    models: Sequence[ModelSpec],
    machine: Machine,
    emit_progress: Report,
    cancel: Cancel,
    notes: Path | None = None,
) -> Iterator[Verified]:
    """Compare engines with PyTorch one after the other, and store the results.

    Args:
        models: the models whose weights they may have.
        machine: where they run.
        emit_progress, cancel: see `build.build_engine`.
        notes: see `identity.program_key_parts`.

    Raises:
        CancelledError: if cancelled.
    """
    for record in engines:
        cancel.check()
        if record.key == UNREADABLE_KEY:
            yield Verified(record)
            continue
        try:
            spec, component = owner(record, models, notes)
            device = _device(record, machine)
            yield Verified(verify_engine(spec, component, record, store, device, emit_progress, cancel))
        except TandemError as error:
            yield Verified(record, error.fact)


def owner(record: EngineRecord, models: Sequence[ModelSpec], notes: Path | None = None) -> tuple[ModelSpec, str]:
    """Return the model and component that an engine was built from, or can run if it has no weights.

    Args:
        notes: see `identity.program_key_parts`.

    Raises:
        EngineError: if none of the models has its weights.
    """
    name = record.key.program
    # The model that it was built from comes first.
    for spec in sorted(models, key=lambda spec: spec.name != record.model):
        components = [part for part in spec.component_names if name in runnable_programs(spec, part)]
        for component in sorted(components, key=lambda part: part != record.component):
            try:
                architecture, weights = program_key_parts(spec, component, name, notes)
            except (TandemError, OSError, ValueError):  # a damaged model matches no engine
                continue
            if architecture == record.key.architecture and record.key.weights in {weights, SWAPPED}:
                return spec, component
    raise EngineError("engine.no_model_with_weights", engine=record.id, model=record.model)


def _device(record: EngineRecord, machine: Machine) -> str:
    devices = ["cpu", *(f"cuda:{index}" for index in range(len(machine.gpus)))]
    for device in devices:
        if device_text(machine, device) == record.key.device and record.key.system == machine.system:
            return device
    here = device_text(machine, device_like(record.key.device, machine))
    cause = device_difference(record.key.device, here)
    raise EngineError("engine.other_device", engine=record.id, cause=cause)


def _total(store: EngineStore) -> int:
    return sum(manifest.folder_bytes(store.path(record.id)) for record in store.index())


def why_stale(
    record: EngineRecord, models: Sequence[ModelSpec], machine: Machine, notes: Path | None = None
) -> list[Fact]:
    """Return how an engine differs from the one that this machine would build now; empty for a usable engine.

    Sizes and precision are not compared: other ones make another engine.

    Args:
        models: all models of this machine.
        notes: see `identity.program_key_parts`.
    """
    key = record.key
    if key == UNREADABLE_KEY:
        return []
    spec = next((spec for spec in models if spec.name == record.model), None)
    if spec is None or record.component not in spec.component_names:
        return [Fact("engine.stale_without_model", {"model": record.model})]
    if key.builder != IMPORTED and key.builder not in BUILDERS:
        return [Fact("engine.stale_without_builder", {"builder": key.builder})]
    spec = replace(spec, loras=record.loras)
    try:
        wanted = _wanted_key(record, spec, machine, device_like(key.device, machine), notes)
    except TandemError as error:
        return [error.fact]
    return differences(wanted, key, spec.vae.scale_factor_spatial)


def _wanted_key(record: EngineRecord, spec: ModelSpec, machine: Machine, device: str, notes: Path | None) -> EngineKey:
    """Return the key that building, or importing, an engine again would give now."""
    key = record.key
    if key.builder == IMPORTED:
        return key_here(key, spec, record.component, machine, device, notes)
    return BUILDERS[key.builder].key(
        spec,
        record.component,
        key.program,
        key.profiles,
        precision=key.precision,
        machine=machine,
        device=device,
        notes=notes,
    )
