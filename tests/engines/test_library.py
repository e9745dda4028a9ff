"""Operations on the engine library: choosing, deleting, pruning, finding the model of an engine, verifying."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.build import BuildRequest, verify_engine
from runtime.engines.key_parts import device_text, program_key_parts
from runtime.engines.service import EngineService, Verified
from runtime.engines.store import EngineStore, Pruned
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord
from tests.engines import child_entries
from tests.engines.engine_files import add, key, refusal, visible


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    """Return a store that is not there yet."""
    return EngineStore(tmp_path / "engines", 25_000)


def ignore(fact: Fact, fraction: float | None) -> None:
    """Ignore progress."""


def three(store: EngineStore) -> list[EngineRecord]:
    """Add three engines."""
    return [add(store, key(export_revision=number), b"x" * 5_000) for number in range(3)]


def test_choosing_by_prefix(store: EngineStore) -> None:
    assert (store.index(), store.total_bytes()) == ([], 0)
    assert store.choose([]) == []
    engines = three(store)
    assert store.total_bytes() == sum(manifest.folder_bytes(store.path(record.id)) for record in engines)
    assert {record.id for record in store.choose([])} == {record.id for record in engines}
    chosen = store.choose([engines[2].id[:6].upper(), engines[2].id, engines[0].id])
    assert [record.id for record in chosen] == [engines[2].id, engines[0].id]
    for text in ("", "nothing", "../..", "0" * 16):
        with refusal("engine.not_found"):
            store.choose([text])


def test_ambiguous_prefix_is_refused(store: EngineStore) -> None:
    store.max_bytes = 1 << 40
    engines = [add(store, key(export_revision=number), b"x") for number in range(17)]
    begins = [record.id[0] for record in engines]
    several = next(letter for letter in begins if begins.count(letter) > 1)
    with refusal("engine.id_ambiguous") as refused:
        store.choose([several])
    assert refused.value.data["matches"] == [record.id for record in store.index() if record.id.startswith(several)]


def test_deleting_and_pruning(store: EngineStore) -> None:
    engines = three(store)
    store.pin(engines[0].id, pinned=True)
    size = manifest.folder_bytes(store.path(engines[0].id))
    assert store.prune() == Pruned((), store.total_bytes(), 25_000)
    pruned = store.prune(0)
    assert [record.id for record in pruned.deleted] == [engines[1].id, engines[2].id]
    assert not pruned.enough
    assert pruned.total_bytes == size
    assert sum(store.delete(record.id) for record in store.choose([])) == size
    assert visible(store) == []


def test_owner_of_an_engine(tiny: Callable[[str], ModelSpec], store: EngineStore, tmp_path: Path) -> None:
    models = [tiny("wan2.1"), tiny("wan2.2-a14b"), tiny("wan2.2-ti2v-5b")]
    notes = tmp_path / "notes"
    service = EngineService(store, probe(), notes)
    for spec in models:
        for component, program in (("vae", "vae_next"), ("transformer", "transformer")):
            architecture, weights = program_key_parts(spec, component, program, notes)
            wanted = key(program=program, architecture=architecture, weights=weights)
            record = add(store, wanted, b"x", model=spec.name, component=component)
            assert service.owner(record, models) == (spec, component)
    both = models[1]
    architecture, weights = program_key_parts(both, "transformer_2", "transformer", notes)
    second = add(store, key(architecture=architecture, weights=weights), b"x", model="renamed", component="transformer")
    assert service.owner(second, models) == (both, "transformer_2")
    shared = add(store, key(architecture=architecture, weights="swapped"), b"x", model=both.name)
    assert service.owner(shared, models) == (both, "transformer")
    with pytest.raises(EngineError) as unowned:
        service.owner(second, models[2:])
    assert unowned.value.fact == Fact("engine.no_model_with_weights", {"engine": second.id, "model": "renamed"})


def test_engines_of_other_models_or_machines_are_skipped(tiny: Callable[[str], ModelSpec], store: EngineStore) -> None:
    spec, service = tiny("wan2.1"), EngineService(store, probe(), None)
    architecture, weights = program_key_parts(spec, "transformer", "transformer")
    without_model = add(store, key(), b"x")
    elsewhere = add(store, key(architecture=architecture, weights=weights), b"x")
    damaged = add(store, key(architecture=architecture, weights=weights, precision="float16"), b"x")
    (store.path(damaged.id) / manifest.NAME).write_text("{")
    engines = store.choose([without_model.id, elsewhere.id, damaged.id])
    found = list(service.verify(engines, [spec], ignore, Cancel()))
    assert found[0].skipped == Fact("engine.no_model_with_weights", {"engine": without_model.id, "model": "diorama"})
    assert found[1].skipped is not None
    assert (found[1].skipped.code, found[1].skipped.data["engine"]) == ("engine.other_device", elsewhere.id)
    assert found[1].skipped.data["cause"].code in {"engine.differs_more_instructions", "engine.differs_instructions"}
    assert found[2] == Verified(engines[2])
    assert {record.id for record in store.index() if record.usable} == {without_model.id, elsewhere.id}
    cancel = Cancel()
    cancel.request()
    with pytest.raises(CancelledError):
        next(service.verify(engines, [spec], ignore, cancel))


def verify(spec: ModelSpec, record: EngineRecord, store: EngineStore, task: str) -> EngineRecord:
    """Verify with an odd child."""
    request = BuildRequest(spec=spec, component="transformer", key=record.key, device="cpu")
    return verify_engine(record, request, store, ignore, Cancel(), getattr(child_entries, task))


@pytest.mark.usefixtures("forked_entries")
def test_result_of_verification_is_stored(tiny: Callable[[str], ModelSpec], store: EngineStore) -> None:
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
    content = engine.read_bytes()
    engine.write_bytes(b"y" * len(content))
    found = verify(spec, replace(record, problem=None), store, "make")
    assert found.problem == Fact("engine.file_changed", {"file": "engine.pt2"})
    assert store.index()[0].problem == found.problem
    # A problem that is gone is forgotten once a verification has found none.
    engine.write_bytes(content)
    assert verify(spec, store.index()[0], store, "find_nan").problem is None
    store.delete(record.id)
    with pytest.raises(EngineError) as gone:
        verify(spec, record, store, "find_nan")
    assert gone.value.fact == Fact("engine.not_found", {"engine": record.id})
    assert visible(store) == []
