"""What the commands on the engine library do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import library, manifest
from runtime.engines.build import verify_engine
from runtime.engines.identity import device_text, program_key_parts
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineRecord
from tests.engines import odd_child
from tests.engines.made import add, key, visible


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    """Return a store that is not there yet."""
    return EngineStore(tmp_path / "engines", 25_000)


def ignore(fact: Fact, fraction: float | None) -> None:
    """Ignore progress."""


def three(store: EngineStore) -> list[EngineRecord]:
    """Add three engines."""
    return [add(store, key(export_revision=number), b"x" * 5_000) for number in range(3)]


def test_listing_and_choosing(store: EngineStore) -> None:
    assert library.listing(store) == library.Listing((), 0, 25_000)
    assert library.choose(store, []) == []
    engines = three(store)
    store.touch(engines[1].id)
    listed = library.listing(store)
    assert [record.id for record in listed.engines] == [engines[number].id for number in (1, 2, 0)]
    assert listed.total_bytes == sum(manifest.folder_bytes(store.path(record.id)) for record in engines)
    assert {record.id for record in library.choose(store, [])} == {record.id for record in engines}
    chosen = library.choose(store, [engines[2].id[:6].upper(), engines[2].id, engines[0].id])
    assert [record.id for record in chosen] == [engines[2].id, engines[0].id]
    for text in ("", "nothing", "../..", "0" * 16):
        with pytest.raises(EngineError, match="There is no engine"):
            library.choose(store, [text])


def test_the_beginning_of_several_ids_is_refused(store: EngineStore) -> None:
    store.max_bytes = 1 << 40
    engines = [add(store, key(export_revision=number), b"x") for number in range(17)]
    begins = [record.id[0] for record in engines]
    several = next(letter for letter in begins if begins.count(letter) > 1)
    with pytest.raises(EngineError, match="several engines"):
        library.choose(store, [several])


def test_deleting_and_pruning(store: EngineStore) -> None:
    engines = three(store)
    store.pin(engines[0].id)
    size = manifest.folder_bytes(store.path(engines[0].id))
    assert library.prune(store) == library.Pruned((), library.listing(store).total_bytes, 25_000)
    pruned = library.prune(store, size - 1)
    assert [record.id for record in pruned.deleted] == [engines[1].id, engines[2].id]
    assert not pruned.enough
    assert pruned.total_bytes == size
    assert library.delete(store, library.choose(store, [])) == size
    assert visible(store) == []


def test_the_model_of_an_engine_is_found(tiny: Callable[[str], ModelSpec], store: EngineStore, tmp_path: Path) -> None:
    models = [tiny("wan2.1"), tiny("wan2.2-a14b"), tiny("wan2.2-ti2v-5b")]
    notes = tmp_path / "notes"
    for spec in models:
        for component, program in (("vae", "vae_next"), ("transformer", "transformer")):
            architecture, weights = program_key_parts(spec, component, program, notes)
            wanted = key(program=program, architecture=architecture, weights=weights)
            record = add(store, wanted, b"x", model=spec.name, component=component)
            assert library.owner(record, models, notes) == (spec, component)
    both = models[1]
    architecture, weights = program_key_parts(both, "transformer_2", "transformer", notes)
    second = add(store, key(architecture=architecture, weights=weights), b"x", model="renamed", component="transformer")
    assert library.owner(second, models, notes) == (both, "transformer_2")
    shared = add(store, key(architecture=architecture, weights="swapped"), b"x", model=both.name)
    assert library.owner(shared, models, notes) == (both, "transformer")
    with pytest.raises(EngineError) as unowned:
        library.owner(second, models[2:], notes)
    assert unowned.value.fact == Fact("engine.no_model_with_weights", {"engine": second.id, "model": "renamed"})


def test_what_cannot_be_verified_here_is_skipped_and_said(tiny: Callable[[str], ModelSpec], store: EngineStore) -> None:
    spec, machine = tiny("wan2.1"), probe()
    architecture, weights = program_key_parts(spec, "transformer", "transformer")
    of_nobody = add(store, key(), b"x")
    elsewhere = add(store, key(architecture=architecture, weights=weights), b"x")
    damaged = add(store, key(architecture=architecture, weights=weights, precision="float16"), b"x")
    (store.path(damaged.id) / manifest.NAME).write_text("{")
    engines = library.choose(store, [of_nobody.id, elsewhere.id, damaged.id])
    found = list(library.verify(store, engines, [spec], machine, ignore, Cancel()))
    assert found[0].skipped == Fact("engine.no_model_with_weights", {"engine": of_nobody.id, "model": "diorama"})
    assert found[1].skipped is not None
    assert (found[1].skipped.code, found[1].skipped.data["engine"]) == ("engine.other_device", elsewhere.id)
    assert "processor with avx512" in str(found[1].skipped)
    assert found[2] == library.Verified(engines[2])
    assert {record.id for record in store.index() if record.usable} == {of_nobody.id, elsewhere.id}
    cancel = Cancel()
    cancel.request()
    with pytest.raises(CancelledError):
        next(library.verify(store, engines, [spec], machine, ignore, cancel))


def verify(spec: ModelSpec, record: EngineRecord, store: EngineStore, task: str) -> EngineRecord:
    """Verify with an odd child."""
    return verify_engine(spec, "transformer", record, store, "cpu", ignore, Cancel(), getattr(odd_child, task))


def test_what_verifying_finds_is_written_down(tiny: Callable[[str], ModelSpec], store: EngineStore) -> None:
    spec, record = tiny("wan2.1"), add(store, key(device=device_text(probe(), "cpu")))
    engine = store.path(record.id) / "engine.pt2"
    found = verify(spec, record, store, "find_nan")
    assert (found.verified, found.detail) == (False, Fact("engine.compared_not_finite", {"where": "velocity"}))
    assert not store.index()[0].usable
    found = verify(spec, record, store, "die")
    assert found.problem is not None
    assert (found.problem.code, found.problem.data["signal"]) == ("engine.child_crashed", 11)
    assert found.problem.data["action"].code == "engine.not_verified"
    with pytest.raises(EngineError) as exhausted:
        verify(spec, record, store, "exhaust")
    assert exhausted.value.code == "engine.child_out_of_memory"
    whole = engine.read_bytes()
    engine.write_bytes(b"y" * len(whole))
    found = verify(spec, replace(record, problem=None), store, "make")
    assert found.problem == Fact("engine.file_changed", {"file": "engine.pt2"})
    assert store.index()[0].problem == found.problem
    # A problem that is gone is forgotten once a verification has found none.
    engine.write_bytes(whole)
    assert verify(spec, store.index()[0], store, "find_nan").problem is None
    store.delete(record.id)
    with pytest.raises(EngineError) as gone:
        verify(spec, record, store, "find_nan")
    assert gone.value.fact == Fact("engine.not_found", {"engine": record.id})
    assert visible(store) == []
