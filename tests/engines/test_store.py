"""The engine folder: inserting, finding, evicting, concurrency, full and read-only disks, killed processes."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.store import EngineStore, engine_sets
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from tests.engines.engine_files import add, key, put, refusal, visible
from tests.waiting import until

ROOT = Path(__file__).parents[2]
LARGE = 1 << 40
# Actions of a process that is killed.
ENDLESS = 10**9


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    """Return a store that is not there yet."""
    return EngineStore(tmp_path / "engines", LARGE)


def keys(count: int) -> list:
    """Return different keys."""
    return [key(export_revision=number) for number in range(count)]


def test_inserted_engine_is_found(store: EngineStore) -> None:
    assert store.index() == []
    assert store.get(key()) is None
    record = add(store, key())
    for each in (store, EngineStore(store.folder, LARGE)):
        assert each.get(key()) == record
        assert each.index() == [record]
    assert store.get(key(precision="bfloat16")) is None
    assert sorted(path.name for path in store.path(record.id).iterdir()) == ["build.log", "engine.json", "engine.pt2"]
    assert visible(store) == [record.id]


def test_similar_engines_are_listed_with_differences(store: EngineStore) -> None:
    add(store, key(precision="float16", versions=(("torch", "2.11.0"),)))
    near = add(store, key(versions=(("torch", "2.11.0"),)))
    add(store, key(program="vae_next"))
    add(store, key())
    found = store.similar(key())
    assert found[0] == (
        near,
        [Fact("engine.differs_version", {"package": "PyTorch", "found": "2.11.0", "here": "2.13.0"})],
    )
    assert len(found) == 2


def test_an_engine_is_replaced(store: EngineStore) -> None:
    add(store, key(), b"old")
    store.pin(key().digest(), pinned=True)
    record = add(store, key(), b"newer", built_at=2000.0)
    assert record.pinned
    assert store.index() == [record]
    assert (store.path(record.id) / "engine.pt2").read_bytes() == b"newer"
    assert visible(store) == [record.id]


def test_an_unfinished_engine_is_refused(store: EngineStore) -> None:
    store.folder.mkdir()
    engine_id = key().digest()
    with store.building(engine_id, wait=lambda: None), store.workspace(engine_id) as work:
        with refusal("engine.not_finished") as refused:
            store.insert(work.engine, engine_id)
        assert refused.value.data["cause"].code == "engine.file_missing"
        put(work.engine, key(precision="float16"))
        with refusal("engine.not_finished") as refused:
            store.insert(work.engine, engine_id)
        assert refused.value.data["cause"].code == "engine.manifest_changed"
        put(work.engine, key())
        (work.engine / "engine.pt2").write_bytes(b"")
        with refusal("engine.not_finished") as refused:
            store.insert(work.engine, engine_id)
        assert refused.value.data["cause"].code == "engine.file_other_size"
    assert visible(store) == []


def test_pinning_and_deleting(store: EngineStore) -> None:
    record = add(store, key())
    other = EngineStore(store.folder, LARGE)
    assert other.index() == [record]
    assert store.pin(record.id, pinned=True).pinned
    assert [found.pinned for found in other.index()] == [True]
    assert not store.pin(record.id, pinned=False).pinned
    assert other.index() == [record]
    store.delete(record.id)
    assert other.index() == []
    for act in (store.delete, partial(store.pin, pinned=True), partial(store.pin, pinned=False)):
        with refusal("engine.not_found"):
            act(record.id)
    store.touch(record.id)
    with refusal("engine.not_found"), store.using(record.id):
        pass
    assert visible(store) == []


def test_least_recently_used_engines_are_evicted_first(store: EngineStore) -> None:
    records = [add(store, each, b"x" * 10_000, built_at=1000.0 + n) for n, each in enumerate(keys(5))]
    size = manifest.folder_bytes(store.path(records[0].id))
    store.pin(records[1].id, pinned=True)
    store.touch(records[0].id)
    with store.using(records[2].id):
        evicted = store.prune(2 * size).deleted
    # 0 and 2 were used, 1 is pinned.
    assert [record.id for record in evicted] == [records[3].id, records[4].id, records[0].id]
    assert {record.id for record in store.index()} == {records[1].id, records[2].id}
    assert store.prune(LARGE).deleted == ()
    assert [record.id for record in store.prune(0).deleted] == [records[2].id]
    assert visible(store) == [records[1].id]
    assert EngineStore(store.folder / "none", 0).prune(0).deleted == ()
    assert not (store.folder / "none").exists()


def test_new_engine_evicts_others_and_stays(store: EngineStore) -> None:
    store.max_bytes = 30_000
    records = [add(store, each, b"x" * 12_000) for each in keys(3)]
    assert {record.id for record in store.index()} == {records[2].id, records[1].id}
    huge = add(store, key(precision="float16"), b"x" * 50_000)
    assert [record.id for record in store.index()] == [huge.id]


def at(frames: int, height: int = 60, width: int = 104) -> tuple[ShapeProfile, ...]:
    """Return the profile of one size."""
    return (ShapeProfile.fixed((frames, height, width)),)


def plan_of(store: EngineStore, size: tuple[ShapeProfile, ...], used: float, **changes: object) -> list[str]:
    """Add the engines of a model with two experts for one size, used at a time; return their ids."""
    vae = at(1, *size[0].opt[1:])
    ids = []
    for component, program, profiles, precision, length in (
        ("text_encoder", "text_encoder", at(1, 1, 1), "float16", 3000),
        ("transformer", "transformer", size, "float16", 9000),
        ("transformer_2", "transformer", size, "float16", 9000),
        ("vae", "vae_first", vae, "float32", 1000),
        ("vae", "vae_next", vae, "float32", 1000),
    ):
        wanted = key(program=program, profiles=profiles, precision=precision, weights=component * 4, **changes)
        add(store, wanted, bytes(length), component=component)
        ids.append(wanted.digest())
    for one in ids:
        store._rewrite(one, last_used=used)
    return ids


def names(sets: list[tuple[EngineRecord, ...]]) -> list[set[str]]:
    """Return the ids of each set."""
    return [{record.id for record in each} for each in sets]


def test_engines_of_one_plan_are_a_set(store: EngineStore) -> None:
    small, large = plan_of(store, at(21, 30, 52), used=10.0), plan_of(store, at(21), used=20.0)
    short = plan_of(store, at(5), used=30.0)
    assert small[0] == large[0] == short[0]  # one text encoder
    assert large[3:] == short[3:]  # one VAE
    # What several plans share belongs to the one that was used last.
    assert names(engine_sets(store.index())) == [set(small[1:]), set(large[1:3]), set(short)]


def test_engines_with_other_loras_or_versions_are_other_sets(store: EngineStore) -> None:
    plain = plan_of(store, at(21), used=30.0)
    older = plan_of(store, at(21), used=10.0, versions=(("torch", "2.12.0"),))
    with_lora = [
        add(store, key(profiles=at(21), precision="float16", weights=name * 8), component=name).id
        for name in ("transformer", "transformer_2")
    ]
    for one in with_lora:
        store._rewrite(one, last_used=20.0)
    assert names(engine_sets(store.index())) == [set(older), set(with_lora), set(plain)]


def test_a_set_is_kept_or_evicted_as_a_whole(store: EngineStore) -> None:
    first, second = plan_of(store, at(21), used=20.0), plan_of(store, at(21, 30, 52), used=10.0)
    store.touch(first[0])
    size = {record.id: manifest.folder_bytes(store.path(record.id)) for record in store.index()}
    # One byte too much costs the older set, not an engine of the newer one.
    evicted = store.prune(store.total_bytes() - 1).deleted
    assert {record.id for record in evicted} == set(second[1:])
    assert {record.id for record in store.index()} == set(first)
    whole = sum(size[one] for one in first)
    assert store.prune(whole).deleted == ()
    with refusal("engine.limit_deletes_all") as refused:
        store.prune(18_000)
    assert (refused.value.data["needed"], refused.value.data["limit"]) == (whole, 18_000)
    # A pinned engine, or one in use, keeps its set.
    store.pin(first[1], pinned=True)
    assert store.prune(18_000).deleted == ()
    store.pin(first[1], pinned=False)
    with store.using(first[4]):
        assert store.prune(0).deleted == ()
    assert {record.id for record in store.prune(0).deleted} == set(first)


def test_a_new_expert_does_not_evict_the_other(store: EngineStore) -> None:
    """Two engines of 28.6 GB with a limit of 50 GB evicted each other, in every job."""
    store.max_bytes = 15_000
    for component in ("transformer", "transformer_2"):
        add(store, key(profiles=at(21), weights=component * 4), bytes(9000), component=component)
    assert {record.component for record in store.index()} == {"transformer", "transformer_2"}


def test_engines_of_blocks_are_one_set_and_go_last(store: EngineStore) -> None:
    ones = (ShapeProfile.fixed((1, 1, 1)),)
    blocks = []
    for program in ("block_qkv", "block_query", "block_feed_forward"):
        wanted = key(program=program, profiles=ones, weights="swapped", options=(("tokens", "8192"),))
        blocks.append(add(store, wanted, bytes(200)).id)
    later = plan_of(store, at(21), used=time.time() + 100)
    assert names(engine_sets(store.index())) == [set(later), set(blocks)]
    size = sum(manifest.folder_bytes(store.path(one)) for one in blocks)
    add(store, key(versions=(("torch", "2.14.0"),)), bytes(9000))
    store.touch(blocks[0])
    assert {record.id for record in store.prune(size + 12_000).deleted} == set(later)
    assert set(blocks) <= {record.id for record in store.index()}


def test_a_limit_below_one_set_is_refused(store: EngineStore, tiny: Callable[[str], ModelSpec]) -> None:
    a14b = tiny("wan2.2-a14b")
    wanted = key(profiles=at(21), precision="float16")
    one = 2 * a14b.parameters["transformer"]
    store.max_bytes = int(1.9 * one)
    conflict = store.limit_conflict(a14b, "transformer", wanted)
    assert conflict is not None and conflict.code == "engine.limit_below_set"
    assert conflict.data["needed"] == one + 2 * a14b.parameters["transformer_2"]
    # An engine without weights needs nothing.
    assert store.limit_conflict(a14b, "transformer", key(profiles=at(21), weights="swapped")) is None
    store.max_bytes = conflict.data["needed"]
    assert store.limit_conflict(a14b, "transformer", wanted) is None
    # Existing engines count.
    add(store, key(program="text_encoder", profiles=at(1, 1, 1)), bytes(100), component="text_encoder", model=a14b.name)
    assert store.limit_conflict(a14b, "transformer", wanted) is not None


def test_order_of_use_survives_a_clock_set_back(store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [add(store, each) for each in keys(3)]
    for now, record in zip((5000.0, 3000.0, 1.0), (records[2], records[0], records[1]), strict=True):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        store.touch(record.id)
    by_use = sorted(store.index(), key=lambda record: record.last_used)
    assert [record.id for record in by_use] == [records[2].id, records[0].id, records[1].id]
    monkeypatch.setattr(time, "time", lambda: 0.5)
    newest = add(store, key(precision="float16"))
    assert newest.last_used > by_use[-1].last_used


def test_engine_in_use_is_not_deleted(store: EngineStore) -> None:
    record = add(store, key())
    code = (
        "import sys, time; from pathlib import Path; from runtime.engines.store import EngineStore\n"
        "with EngineStore(Path(sys.argv[1]), 1 << 40).using(sys.argv[2]): print('on', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(store.folder), record.id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as user:
        assert user.stdout is not None
        user.stdout.readline()
        with refusal("engine.in_use"):
            store.delete(record.id)
        assert store.prune(0).deleted == ()
        assert [found.id for found in store.index()] == [record.id]
        user.kill()
    assert [found.id for found in store.index()] == [record.id]
    store.delete(record.id)
    assert visible(store) == []


def test_damaged_engine_is_not_used_and_remembered(store: EngineStore) -> None:
    record = add(store, key())
    assert store.verify_hash(record) is None
    engine = store.path(record.id) / "engine.pt2"
    engine.write_bytes(engine.read_bytes().replace(b"e", b"E", 1))
    assert store.index()[0].usable
    assert store.verify_hash(record) == Fact("engine.file_changed", {"file": "engine.pt2"})
    for each in (store, EngineStore(store.folder, LARGE)):
        assert each.index()[0].problem == Fact("engine.file_changed", {"file": "engine.pt2"})
    add(store, key())
    assert store.index()[0].usable


def test_files_whose_hashes_were_compared_are_not_hashed_again_until_they_change(store: EngineStore) -> None:
    record = add(store, key())
    folder, hashed = store.path(record.id), store.hashed(record)
    assert hashed is None

    def settled() -> bool:
        assert store.verify_hash(record) is None
        return store.hashed(record) is not None

    until(settled)
    # With another hash in the record, a file that is hashed would be refused.
    forged = replace(record, files=tuple(replace(file, sha256="0" * 64) for file in record.files))
    changed = Fact("engine.file_changed", {"file": "engine.pt2"})
    with ExitStack() as stack:
        assert manifest.open_checked(folder, forged, stack) == changed
        assert manifest.open_checked(folder, forged, stack, store.hashed(record)) == b"engine" * 100
        times = (folder / "engine.pt2").stat()
        (folder / "engine.pt2").write_bytes(b"Engine" * 100)
        os.utime(folder / "engine.pt2", ns=(times.st_atime_ns, times.st_mtime_ns))
        assert manifest.open_checked(folder, record, stack, store.hashed(record)) == changed


@pytest.mark.parametrize("what", ["emptied", "folder", "link", "gone"])
def test_replaced_engine_files_are_a_problem(store: EngineStore, tmp_path: Path, what: str) -> None:
    record = add(store, key())
    engine = store.path(record.id) / "engine.pt2"
    engine.rename(tmp_path / "outside")
    if what == "emptied":
        engine.write_bytes(b"")
    elif what == "folder":
        engine.mkdir()
    elif what == "link":
        engine.symlink_to(tmp_path / "outside")
    problem = store.index()[0].problem
    assert problem is not None
    codes = {"emptied": "engine.file_other_size", "gone": "engine.file_missing"}
    assert (problem.code, problem.data["file"]) == (codes.get(what, "engine.file_not_regular"), "engine.pt2")
    # Broken ones go first, however recently they were used.
    store.touch(record.id)
    intact = add(store, key(precision="float16"))
    assert [found.id for found in store.prune(manifest.folder_bytes(store.path(intact.id))).deleted] == [record.id]
    assert visible(store) == [intact.id]
    assert (tmp_path / "outside").exists()


def test_a_damaged_manifest_is_listed_deleted_and_replaced(store: EngineStore) -> None:
    record = add(store, key())
    (store.path(record.id) / manifest.NAME).write_text("{")
    assert store.index()[0].problem == Fact("engine.manifest_damaged")
    assert store.get(key()) is None
    assert store.similar(key()) == []
    with refusal("engine.damaged"):
        store.pin(record.id, pinned=True)
    store.touch(record.id)
    assert add(store, key()) == store.get(key())
    (store.path(record.id) / manifest.NAME).write_text("{")
    store.delete(record.id)
    assert visible(store) == []


def test_other_files_in_the_folder_are_not_touched(store: EngineStore, tmp_path: Path) -> None:
    record = add(store, key())
    outside = tmp_path / "outside"
    shutil.copytree(store.path(record.id), outside)
    for name in ("mine", "0123456789ABCDEF", "0123456789abcdef0", ".building-mine"):
        (store.folder / name).mkdir()
    (store.folder / "0123456789abcdef").mkdir()
    (store.folder / "0123456789abcdef" / "mine").write_text("x" * 10_000)
    (store.folder / "fedcba9876543210").write_text("a file")
    (store.folder / "aaaaaaaaaaaaaaaa").symlink_to(outside)
    problems = {found.id: found.problem for found in store.index()}
    assert problems == {
        record.id: None,
        "0123456789abcdef": Fact("engine.file_missing", {"file": "engine.json"}),
        "aaaaaaaaaaaaaaaa": Fact("engine.folder_is_link"),
    }
    assert [found.id for found in store.prune(0).deleted] == [record.id]
    assert len(visible(store)) == 7
    store.delete("aaaaaaaaaaaaaaaa")
    assert len(list(outside.iterdir())) == 3


@contextmanager
def not_root() -> Iterator[None]:
    """Give up root's rights for a while: root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_read_only_folder(store: EngineStore, tmp_path: Path) -> None:
    record = add(store, key())
    # pytest's own folders are closed to others.
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    shutil.rmtree(store.folder / ".locks")
    for folder in (store.folder, store.path(record.id)):
        folder.chmod(0o555)
    with not_root():
        assert store.index() == [record]
        assert store.get(key()) == record
        assert store.similar(key(precision="float16"))[0][0] == record
        with store.using(record.id) as path:
            assert path == store.path(record.id)
        store.touch(record.id)
        for act in (partial(store.pin, pinned=True), partial(store.pin, pinned=False), store.delete):
            with refusal("engine.store_read_only"):
                act(record.id)
        with refusal("engine.store_read_only"), store.building(record.id, wait=lambda: None):
            pass
        with refusal("engine.store_read_only"):
            store.prune(0)
        store.report_problem(record, Fact("engine.failed", {"error": "it does not load"}))
        assert store.index()[0].problem == Fact("engine.failed", {"error": "it does not load"})
    store.folder.chmod(0o000)
    with not_root():
        assert store.index() == []
    store.folder.chmod(0o755)


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300])
def test_folder_that_cannot_be_created(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    store = EngineStore(tmp_path / place, LARGE)
    assert store.index() == []
    assert store.get(key()) is None
    assert store.prune(0).deleted == ()
    with refusal("engine.store_read_only"), store.building(key().digest(), wait=lambda: None):
        pass


def test_folder_that_is_deleted_meanwhile(store: EngineStore) -> None:
    record = add(store, key())
    with store.using(record.id):
        shutil.rmtree(store.folder)
        store.touch(record.id)
        store.report_problem(record, Fact("engine.file_missing", {"file": "engine.pt2"}))
    assert store.index() == []
    with store.building(record.id, wait=lambda: None), store.workspace(record.id) as work:
        put(work.engine, key())
        shutil.rmtree(store.folder)
        with refusal("engine.not_finished"):
            store.insert(work.engine, record.id)
    assert not store.folder.exists()
    add(store, key())
    assert len(store.index()) == 1


def test_full_disk(store: EngineStore) -> None:
    record = add(store, key())
    before = (store.path(record.id) / manifest.NAME).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What the process may write to one file: a write beyond it fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(EngineError) as refused:
            store.pin(record.id, pinned=True)
        assert refused.value.fact == Fact("engine.store_disk_full", {"folder": store.folder})
        store.touch(record.id)
        store.report_problem(record, Fact("engine.failed", {"error": "it does not load"}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (store.path(record.id) / manifest.NAME).read_bytes() == before
    assert store.index()[0].problem == Fact("engine.failed", {"error": "it does not load"})
    assert sorted(path.name for path in store.path(record.id).iterdir()) == ["build.log", "engine.json", "engine.pt2"]
    store.delete(record.id)
    assert visible(store) == []


def work(folder: Path, seed: int, actions: int) -> None:
    """Do everything to a store, at random; any exception but EngineError is a defect."""
    store, rng = EngineStore(folder, 40_000), random.Random(seed)
    for _ in range(actions):
        wanted = rng.choice(keys(6))
        engine_id = wanted.digest()
        try:
            match rng.randrange(8):
                case 0 | 1:
                    add(store, wanted, bytes([rng.randrange(256)]) * 9_000, built_at=time.time())
                case 2:
                    store.delete(engine_id)
                case 3:
                    store.prune(rng.randrange(60_000))
                case 4:
                    store.pin(engine_id, pinned=rng.random() < 0.2)
                case 5:
                    with store.using(engine_id):
                        record = store.get(wanted)
                        assert record is None or record.problem is None, record
                case 6:
                    store.touch(engine_id)
                case 7:
                    for record in store.index():
                        assert record.problem is None or record.problem.code == "engine.file_missing", record
        except EngineError as error:
            assert error.code in {"engine.not_found", "engine.in_use", "engine.limit_deletes_all"}, error.what


@pytest.mark.slow
def test_concurrent_processes(store: EngineStore) -> None:
    store.folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(store.folder, seed, 80)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    for record in store.index():
        assert record.problem is None
        assert store.verify_hash(record) is None
    assert set(visible(store)) == {record.id for record in store.index()}


@pytest.mark.slow
def test_killed_process_leaves_only_complete_engines(store: EngineStore) -> None:
    store.folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    worker = spawn.Process(target=work, args=(store.folder, 0, ENDLESS))
    worker.start()
    until(store.index)
    # Children of one started process are killed at many instants, without the cost of starting Python each time.
    fork = multiprocessing.get_context("fork")
    rng = random.Random(1)
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()
    for seed in range(40):
        child = fork.Process(target=work, args=(store.folder, seed, ENDLESS))
        child.start()
        time.sleep(rng.uniform(0.005, 0.08))
        child.kill()
        child.join()
        for record in store.index():
            assert record.problem is None
            assert store.verify_hash(record) is None
        assert set(visible(store)) == {record.id for record in store.index()}
