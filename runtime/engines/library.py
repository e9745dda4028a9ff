"""What `engines list|verify|delete|prune` do, without printing anything."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, TandemError
from runtime.engines import manifest
from runtime.engines.build import EmitProgress, verify_engine
from runtime.engines.identity import device_like, device_text, program_key_parts, runnable_programs
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import SWAPPED, UNREADABLE_KEY, EngineRecord, device_words


@dataclass(frozen=True)
class Listing:
    """All engines, the last used first, what they take on disk together, and what they may."""

    engines: tuple[EngineRecord, ...]
    total_bytes: int
    max_bytes: int


@dataclass(frozen=True)
class Verified:
    """One engine after verification.

    Attributes:
        engine: with what was found; `usable` says whether it passed.
        skipped: why it could not be verified here, which says nothing about the engine.
        remedy: what to do about that.
    """

    engine: EngineRecord
    skipped: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Pruned:
    """What was deleted, what is left, and whether that is as little as asked: pinned and used engines stay."""

    deleted: tuple[EngineRecord, ...]
    total_bytes: int
    max_bytes: int

    @property
    def enough(self) -> bool:
        """Whether the rest takes at most what was asked."""
        return self.total_bytes <= self.max_bytes


def listing(store: EngineStore) -> Listing:
    """Return what is in the store."""
    engines = sorted(store.index(), key=lambda record: (-record.last_used, record.id))
    return Listing(tuple(engines), _total(store), store.max_bytes)


def choose(store: EngineStore, wanted: Sequence[str]) -> list[EngineRecord]:
    """Return the engines that ids, or their beginnings, mean; all engines where none is given.

    Raises:
        EngineError: where one means no engine or several.
    """
    engines = store.index()
    chosen: dict[str, EngineRecord] = {}
    for text in wanted:
        found = [record for record in engines if text and record.id.startswith(text.lower())]
        if not found:
            raise EngineError(f"There is no engine {text[:40]!r}.", "See which there are: engines list.")
        if len(found) > 1:
            ids = ", ".join(record.id for record in found)
            raise EngineError(f"{text[:40]!r} is the beginning of several engines: {ids}.", "Give more of the id.")
        chosen[found[0].id] = found[0]
    return list(chosen.values()) if wanted else engines


def delete(store: EngineStore, engines: Iterable[EngineRecord]) -> int:
    """Delete engines, pinned ones too, and return the bytes that this freed.

    Raises:
        EngineError: for the first that cannot be deleted; those before it are.
    """
    freed = 0
    for record in engines:
        size = manifest.folder_bytes(store.path(record.id))
        store.delete(record.id)
        freed += size
    return freed


def prune(store: EngineStore, max_bytes: int | None = None) -> Pruned:
    """Delete broken engines, then the least recently used, until the rest takes at most `max_bytes`.

    Args:
        max_bytes: `None` stands for the store's own limit.

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
    emit_progress: EmitProgress,
    cancel: Cancel,
    notes: Path | None = None,
) -> Iterator[Verified]:
    """Prove engines against PyTorch, one after the other, and write down what is found.

    Args:
        models: where their weights are looked for.
        machine: where they run.
        emit_progress: called with lines for people and the share done, where that is known.
        cancel: checked about ten times a second.
        notes: the folder of the noted weights' digests, see `identity.program_key_parts`.

    Raises:
        CancelledError: if that was asked for.
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
            yield Verified(record, error.what, error.remedy)


def owner(record: EngineRecord, models: Sequence[ModelSpec], notes: Path | None = None) -> tuple[ModelSpec, str]:
    """Return the model and component that an engine was built from, or, where weights are swapped, can run.

    Args:
        notes: see `identity.program_key_parts`.

    Raises:
        EngineError: if none of the models has its weights.
    """
    name = record.key.program
    # The one that it was built from is the first to look at.
    for spec in sorted(models, key=lambda spec: spec.name != record.model):
        components = [part for part in spec.component_names if name in runnable_programs(spec, part)]
        for component in sorted(components, key=lambda part: part != record.component):
            try:
                architecture, weights = program_key_parts(spec, component, name, notes)
            except (TandemError, OSError, ValueError):  # a damaged model has nobody's weights
                continue
            if architecture == record.key.architecture and record.key.weights in {weights, SWAPPED}:
                return spec, component
    raise EngineError(
        f"No model here has the weights of the engine {record.id}, built from {record.model or 'an unknown one'}.",
        "Put the model back, or delete the engine.",
    )


def _device(record: EngineRecord, machine: Machine) -> str:
    devices = ["cpu", *(f"cuda:{index}" for index in range(len(machine.gpus)))]
    for device in devices:
        if device_text(machine, device) == record.key.device and record.key.system == machine.system:
            return device
    there = device_words(record.key.device, device_text(machine, device_like(record.key.device, machine)))
    raise EngineError(f"The engine {record.id} was built on {there}.", "Build it here, and delete that.")


def _total(store: EngineStore) -> int:
    return sum(manifest.folder_bytes(store.path(record.id)) for record in store.index())
