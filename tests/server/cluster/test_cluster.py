"""A cluster on Ray: its key, what nodes accept, leases, and that killed processes lose nothing."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import MachineError, ModelError, OutputError, SettingsError, StoreError
from runtime.core.events import Cancelled, StepDone
from runtime.queue.store import JobStore
from runtime.server.cluster import node, transfer
from runtime.server.cluster.cluster_key import VARIABLE, given_key, make_key
from runtime.server.cluster.ray_process import versions
from tests.cluster_machines import machines
from tests.queue.samples import add_job


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    assert make_key(tmp_path) == key == given_key(tmp_path, {})
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "cluster.key").stat().st_mode) == 0o600
    assert given_key(tmp_path, {VARIABLE: "a" * 64}) == "a" * 64


@pytest.mark.parametrize(("given", "code"), [({}, "missing"), ({VARIABLE: "short"}, "invalid")])
def test_a_missing_or_wrong_key_is_refused(tmp_path: Path, given: dict[str, str], code: str) -> None:
    with pytest.raises(SettingsError) as refused:
        given_key(tmp_path, given)
    assert refused.value.code == f"server.cluster_key_{code}"


@pytest.mark.parametrize(
    ("address", "code"), [("nonsense", "address"), ("a/b:1", "address"), ("127.0.0.1:9", "unreachable")]
)
def test_wrong_addresses_are_refused(address: str, code: str) -> None:
    with pytest.raises(MachineError) as refused:
        node.ask(address, "a" * 64)
    assert refused.value.code == f"server.cluster_{code}"


@pytest.mark.parametrize("name", ["Tandem", "Python", "Ray"])
def test_other_versions_are_refused(name: str) -> None:
    node.check_versions({"versions": versions()})
    with pytest.raises(MachineError) as refused:
        node.check_versions({"versions": versions() | {name: "0"}})
    assert refused.value.data["name"] == name


@pytest.mark.parametrize("name", ["../a.json", "/a.json", "a/../b.json", "a.bin", "a.pt", ".a.json", "a/.b/c.json", ""])
def test_names_of_model_files_that_are_refused(name: str) -> None:
    with pytest.raises(ModelError):
        transfer.check_model_name(name)


@pytest.mark.parametrize(
    "name", ["../checkpoint.safetensors", "a.mkv", "sections/../a.mkv", "sections/a.py", "/video.mp4"]
)
def test_names_of_job_files_that_are_refused(name: str) -> None:
    with pytest.raises(OutputError):
        transfer.check_job_name(name)


def test_a_file_is_resumed_and_damage_is_found(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "there" / "target"
    source.write_bytes(os.urandom(transfer.PART_BYTES + 5))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    first = next(transfer.parts(source))
    transfer.append(target, 0, first)
    assert transfer.received(target) == len(first)
    for part in transfer.parts(source, len(first)):
        transfer.append(target, len(first), part)
    transfer.complete(target, digest)
    assert target.read_bytes() == source.read_bytes()
    transfer.append(target, 0, b"other")
    with pytest.raises(OutputError):
        transfer.complete(target, digest)
    assert target.read_bytes() == source.read_bytes()
    assert not transfer.partial(target).exists()


def test_an_older_lease_writes_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite")
    job = add_job(store)
    old = store.claim_job(job.id, "head.node0")
    assert old is not None
    assert store.claim_job(job.id, "head.node1") is None
    store.put_back(job.id, old.lease)
    new = store.claim_job(job.id, "head.node1")
    assert new is not None and new.lease > old.lease
    step = StepDone(step=1, of=4, seconds=0.1, part="transformer")
    assert not store.record(job.id, step, old.lease)
    assert not store.record(job.id, Cancelled(), old.lease)
    store.show(job.id, {"event": "EngineProgress"}, old.lease)
    store.put_back(job.id, old.lease)
    with pytest.raises(StoreError), store.holding(job.id, old.lease):
        pass
    assert store.events(job.id)[-1][2]["event"] == "PutBack"
    assert store.get(job.id).state == "running" and store.get(job.id).live is None
    with store.holding(job.id, new.lease):
        pass
    assert store.record(job.id, step, new.lease)


@pytest.mark.slow
def test_killed_processes_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """A worker, a raylet and the head are killed while videos are made; frames are those of a server alone."""
    pytest.importorskip("ray")
    folders = [tmp_path / "alone", tmp_path / "cluster"]
    for folder in folders:
        folder.mkdir()
    with machines(folders[0], 0) as alone:
        job = alone.submit(0)
        alone.wait(alone.finished, 180)
        expected = alone.frames(job)
    with machines(folders[1], 2) as cluster:

        def running() -> Any:
            return any(worker["job"] for worker in cluster.workers())

        jobs = [cluster.submit(0) for _ in range(6)]
        for kill in (cluster.kill_worker, cluster.kill_raylet, cluster.kill_head):
            cluster.wait(running, 180)
            kill()
        cluster.wait(cluster.finished, 400)
        assert {video["status"] for video in cluster.videos().values()} == {"completed"}
        assert {cluster.frames(job) for job in jobs} == {expected}
    cluster.wait(lambda: not cluster.left(), 20)
