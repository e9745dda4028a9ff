"""A cluster on Ray: its key, what nodes accept, leases, and that killed processes lose nothing."""

import base64
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import strategies as st

from runtime import __version__
from runtime.core.errors import MachineError, ModelError, OutputError, SettingsError, StoreError
from runtime.core.events import Cancelled, StepDone
from runtime.core.facts import Fact
from runtime.queue.store import JobStore
from runtime.server.api_keys import ApiKeys, KeyLimits
from runtime.server.cluster import node, ray_process, transfer
from runtime.server.cluster.cluster_key import VARIABLE, given_key, make_key
from runtime.server.cluster.problems import problems_of
from runtime.server.cluster.ray_process import RayProcess, free_port, versions
from tests.app_server import ROOT, environment
from tests.cluster_machines import Machines, machines
from tests.families import framepack_models
from tests.fuzz.examples import try_many
from tests.fuzz.random_requests import METHODS
from tests.fuzz.raw_http import Answer, send
from tests.image_files import saved
from tests.queue.samples import add_job


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    assert make_key(tmp_path) == key == given_key(tmp_path, {})
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "cluster.key").stat().st_mode) == 0o600
    assert given_key(tmp_path, {VARIABLE: "a" * 64}) == make_key(tmp_path, {VARIABLE: "a" * 64}) == "a" * 64
    assert make_key(tmp_path) == key
    with pytest.raises(SettingsError):
        make_key(tmp_path, {VARIABLE: "short"})


def test_ray_that_does_not_start_is_an_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "start.py"
    script.write_text("print('out of file descriptors')")
    monkeypatch.setattr(ray_process, "_SCRIPT", script)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MachineError) as failed:
        RayProcess({"head": ""}, "a" * 64, {}, cpus=0)
    assert failed.value.fact == Fact("server.cluster_ray_failed", {"output": "out of file descriptors"})
    assert list(tmp_path.iterdir()) == [script]


def test_a_free_port_has_a_number() -> None:
    assert free_port() > 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_rays_files_are_private() -> None:
    """Ray lets everyone write to the folder that it is given, so that lies in one of this user's."""
    pytest.importorskip("ray")
    arguments = {"head": "", "port": str(free_port()), "no-monitor": "", "include-dashboard": "false"}
    before = {path for path in Path(tempfile.gettempdir()).glob("tandem-ray-*")}
    ray = RayProcess(arguments, "a" * 64, {}, cpus=0)
    try:
        made = {path for path in Path(tempfile.gettempdir()).glob("tandem-ray-*")} - before
        assert made and all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in made)
        assert any(path.is_socket() for folder in made for path in folder.rglob("sockets/*"))
    finally:
        ray.close()


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
    old = store.order.claim_job(job.id, "head.node0")
    assert old is not None
    assert store.order.claim_job(job.id, "head.node1") is None
    store.put_back(job.id, old.lease)
    new = store.order.claim_job(job.id, "head.node1")
    assert new is not None and new.lease > old.lease
    step = StepDone(step=1, of=4, seconds=0.1, part="transformer")
    assert not store.log.record(job.id, step, old.lease)
    assert not store.log.record(job.id, Cancelled(), old.lease)
    store.log.set_live_progress(job.id, {"event": "EngineProgress"}, old.lease)
    store.put_back(job.id, old.lease)
    with pytest.raises(StoreError), store.holding(job.id, old.lease):
        pass
    assert store.log.events(job.id)[-1][2]["event"] == "PutBack"
    assert store.get(job.id).state == "running" and store.get(job.id).live is None
    with store.holding(job.id, new.lease):
        pass
    assert store.log.record(job.id, step, new.lease)


@pytest.mark.slow
def test_requests_reach_the_worker_and_keys_are_checked(tmp_path: Path) -> None:
    """Cancel, pause and an early end of a video on a node; then who may ask for the cluster."""
    pytest.importorskip("ray")
    framepack_models.pipeline().save_pretrained(tmp_path / "head" / "weights" / "framepack-f1")
    with machines(tmp_path, 1) as cluster:
        store = JobStore(tmp_path / "head" / "jobs.sqlite")

        def happened(job: str, name: str) -> list[Any]:
            return [values for _, _, values in store.log.events(job) if values["event"] == name]

        def wait_for(job: str, state: str) -> None:
            cluster.wait(lambda: store.get(job).state == state, 180)

        cancelled = cluster.submit(0, steps=400)
        cluster.wait(lambda: happened(cancelled, "StepDone"), 180)
        store.request_cancel([cancelled])
        wait_for(cancelled, "cancelled")

        paused = cluster.submit(1, steps=40)
        cluster.wait(lambda: len(happened(paused, "StepDone")) > 2, 180)
        store.hold([paused], True)
        wait_for(paused, "queued")
        wait_for(cluster.submit(2), "done")
        assert store.get(paused).held
        store.hold([paused], False)
        wait_for(paused, "done")
        steps = [values["step"] for values in happened(paused, "StepDone")]
        assert steps == list(range(1, 41)) and happened(paused, "Resumed")

        picture = base64.b64encode(saved(tmp_path / "boat.png", 48, 32).read_bytes()).decode()
        fields = {"model": "framepack-f1", "size": "48x32", "frames": 145, "steps": 20}
        fields |= {"input_reference": {"image_url": f"data:image/png;base64,{picture}"}}
        early = cluster.submit(3, **fields)
        cluster.wait(lambda: happened(early, "SectionDone"), 180)
        store.finish_early(early)
        wait_for(early, "done")
        assert store.get(early).continues
        store.resume(early)
        wait_for(early, "done")
        ended = store.get(early).saved
        assert ended is not None and ended.sections == (4, 4, 145)
        sections = [values["section"] for values in happened(early, "SectionDone")]
        assert sections == [1, 2, 3, 4]  # none twice: the second run has those of the first

        check_problems(cluster)
        check_access(cluster)
    assert problems_of(tmp_path / "head", store.path) == ()


def check_problems(cluster: Machines) -> None:
    """Check that the head and `jobs` show a machine of another version, and one whose worker does not start."""
    joining = "import sys, runtime; runtime.__version__ = '0.0.1'; from runtime.cli import main; main()"
    command = [sys.executable, "-c", joining, "worker", "--join", f"127.0.0.1:{cluster.port}"]
    variables = {
        "TANDEM_CACHE_DIR": str(cluster.folder / "old"),
        "TANDEM_CLUSTER_KEY": make_key(cluster.folder / "head"),
    }
    tried = subprocess.run(
        command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, check=False
    )
    assert tried.returncode == 2 and "0.0.1" in tried.stderr and __version__ in tried.stderr, tried

    # The disk of a node is gone: the next process of its worker cannot start.
    (cluster.folder / "node0").rename(cluster.folder / "gone")
    (cluster.folder / "node0").touch()
    os.kill(cluster.workers()[0]["pid"], signal.SIGKILL)

    def shown() -> dict[str, Any]:
        view = cluster.get("v1/cluster")
        return {node["state"]: node["problem"] for node in view["nodes"] if node["problem"] is not None}

    cluster.wait(lambda: "starting" in shown(), 120)
    problems = shown()
    assert problems["refused"]["code"] == "server.cluster_refused"
    assert problems["refused"]["data"] == {"found": "Tandem 0.0.1", "wanted": f"Tandem {__version__}"}
    assert problems["starting"]["code"] == "server.cluster_start_failed", problems

    def listed() -> list[dict[str, str]]:
        command = [sys.executable, "app.py", "jobs", "list", "--json"]
        variables = {"TANDEM_CACHE_DIR": str(cluster.folder / "head")}
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])["cluster"]
        assert all(f"{one['host']}: {one['what']} {one['remedy']}" in done.stderr for one in found), done
        return list(found)

    cluster.wait(lambda: len(listed()) == 2, 60)
    failed, refused = listed()
    assert failed["host"] == refused["host"] == socket.gethostname()
    assert "The worker does not start: " in failed["what"] and "tries again" in failed["remedy"]
    assert f"it has Tandem 0.0.1; the head has Tandem {__version__}." in refused["what"]
    assert f"Install Tandem {__version__} there" in refused["remedy"]


def check_access(cluster: Machines) -> None:
    """Check who may ask for the cluster before and after there is an API key; odd requests tell nothing."""
    key = make_key(cluster.folder / "head")

    def ask(
        path: str, given: str | None, method: bytes = b"GET", more: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> Answer:
        headers = {} if given is None else {b"Authorization": f"Bearer {given}".encode()}
        return send(cluster.port, method, path.encode(), {**headers, **more})

    overview, joining, videos = "/v1/cluster", "/v1/cluster/join", "/v1/videos"
    assert [ask(path, None).status for path in (overview, joining, videos)] == [200, 401, 200]
    anna = ApiKeys(cluster.folder / "head").add("anna", KeyLimits())
    statuses = {
        given: [ask(path, given).status for path in (overview, joining, videos)]
        for given in (None, anna, key, key[:-1], "")
    }
    refused = [401, 401, 401]
    assert statuses == {None: refused, anna: [401, 401, 200], key: [200, 200, 401], key[:-1]: refused, "": refused}
    headers = st.fixed_dictionaries({}, optional={
        b"Authorization": st.sampled_from([b"Bearer \xff", b"Basic " + key.encode(), b"", b"Bearer " + anna.encode()]),
        b"X-Forwarded-For": st.just(b"127.0.0.1"),
        b"Origin": st.just(b"http://evil.example"),
        b"Host": st.sampled_from([b"evil.example", b""]),
    })  # fmt: skip
    ends = st.sampled_from(
        ["", "/", "/join", "//join", "/join/", "/../videos", "/%6aoin", "x", ";join", "?key=" + key, "/\u0001"]
    )
    starts = st.sampled_from(
        ["/v1/cluster", "/v1//cluster", "//v1/cluster", "/V1/CLUSTER", "/x/../v1/cluster", "/v1/%63luster"]
    )
    port = json.loads(ask(joining, key).body)["port"]

    def odd(one: tuple[bytes, str, str, dict[bytes, bytes]]) -> None:
        method, start, end, more = one
        answer = ask(start + end, None, method, more)
        assert 300 <= answer.status < 500 or answer.status == 0, (one, answer)
        assert str(port).encode() not in answer.body and b'"nodes"' not in answer.body, (one, answer)

    try_many(st.tuples(METHODS, starts, ends, headers), odd, 200, seed=5)
    assert ask(joining, key).status == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
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
