"""What a worker of a node may send: other files, parts and events than a job's change nothing on the head.

What a head answers: one with another key, or none, is not joined.
"""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from runtime.core.errors import MachineError, OutputError, StoreError
from runtime.core.events import Failed, StepDone, Warned
from runtime.core.facts import Fact
from runtime.pipeline.files import LATEST
from runtime.queue.records import JobRecord
from runtime.queue.run import PutBack, WorkerLost
from runtime.queue.store import JobStore
from runtime.server.cluster import remote_executor, transfer
from runtime.server.cluster.node import ask
from runtime.server.cluster.remote_executor import _Receiver
from tests.hostile_files import DEEP
from tests.queue.samples import sample_plan, sample_request, sample_result

CONTENT = b"content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


def claimed(store: JobStore, worker: str = "head.node0") -> JobRecord:
    """Queue a video and claim it."""
    plan = sample_plan().replace(output=store.path.parent / "outputs" / "x.mp4") if store.path else sample_plan()
    record = store.order.claim_job(store.add(sample_request(), plan).id, worker)
    assert record is not None
    return record


def files(folder: Path) -> set[str]:
    """Return all files in a folder but the job store."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if not name.startswith("jobs.sqlite")}


@pytest.mark.parametrize(
    "name",
    ["../../x.mp4", "/etc/x", "sections/../../x.mkv", "..\\x", "sections/x.mkv\0", "video.mp4/../x", "", "jobs.sqlite",
     ".video.mp4.1", "clip/0001.mp4/x", "C:\\x.mkv", "sections/" + "x" * 300 + ".txt", None, 7, b"video.mp4"],
)  # fmt: skip
def test_only_files_of_a_job_are_written(name: Any, store: JobStore, tmp_path: Path) -> None:
    receiver = _Receiver(claimed(store), store)
    before = files(tmp_path)
    for kind, value in (("part", (name, 0, CONTENT)), ("complete", (name, DIGEST))):
        with pytest.raises(OutputError) as refused:
            receiver.take(kind, value)
        assert refused.value.code == "server.cluster_file_refused"
    receiver.close()
    assert files(tmp_path) == before


def test_parts_do_not_make_a_file_larger_than_what_is_sent(store: JobStore, tmp_path: Path) -> None:
    receiver = _Receiver(claimed(store), store)
    for offset in (1, 1 << 50, -1):
        with pytest.raises(OutputError) as refused:
            receiver.take("part", (LATEST, offset, CONTENT))
        assert refused.value.code == "server.cluster_file_damaged"
    receiver.take("part", (LATEST, 0, CONTENT))
    receiver.take("part", (LATEST, len(CONTENT), CONTENT))
    with pytest.raises(OutputError) as refused:
        receiver.take("complete", (LATEST, DIGEST))
    assert refused.value.code == "server.cluster_file_damaged"
    receiver.close()
    assert not any(name.endswith((LATEST, ".part")) for name in files(tmp_path))


def test_an_older_lease_changes_neither_files_nor_the_job(store: JobStore) -> None:
    record = claimed(store)
    old = _Receiver(record, store)
    store.put_back(record.id, record.lease)
    again = store.order.claim_job(record.id, "head.node1")
    assert again is not None and again.lease > record.lease
    new = _Receiver(again, store)
    for receiver in (new, old):
        receiver.take("part", (LATEST, 0, CONTENT))
    new.take("complete", (LATEST, DIGEST))
    for kind, value in (("complete", (LATEST, DIGEST)), ("files", [])):
        with pytest.raises(StoreError) as lost:
            old.take(kind, value)
        assert lost.value.code == "queue.lease_lost"
    assert not store.log.record(record.id, Failed(fact=Fact("queue.exit_unknown")), record.lease)
    assert store.get(record.id).state == "running"
    folder = store.folder(record.id)
    assert folder is not None and (folder / LATEST).read_bytes() == CONTENT
    old.close()
    assert (folder / LATEST).read_bytes() == CONTENT


@pytest.mark.parametrize("event", [None, "VideoSaved", {"event": "VideoSaved"}, ("event", 1), Fact("queue.x")])
def test_what_is_no_event_is_refused(event: Any, store: JobStore) -> None:
    with pytest.raises(OutputError) as refused:
        _Receiver(claimed(store), store).event(event)
    assert refused.value.code == "server.cluster_events_refused"
    with pytest.raises(OutputError):
        _Receiver(claimed(store), store).outcome(event)


def test_an_end_is_no_event_and_an_event_no_end(store: JobStore) -> None:
    receiver = _Receiver(claimed(store), store)
    for take, value in (
        (receiver.event, sample_result()),
        (receiver.event, Failed(fact=Fact("queue.exit_unknown"))),
        (receiver.outcome, StepDone(step=1, of=4, seconds=0.1, part="transformer")),
        (receiver.outcome, WorkerLost(Fact("queue.exit_unknown"))),
    ):
        with pytest.raises(OutputError) as refused:
            take(value)
        assert refused.value.code == "server.cluster_events_refused"
    assert receiver.outcome(PutBack()) == PutBack()


def test_events_are_bounded(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_executor, "_LARGEST_EVENT_BYTES", 100_000)
    monkeypatch.setattr(remote_executor, "_MOST_EVENT_BYTES", 300_000)
    receiver = _Receiver(claimed(store), store)
    large = Warned(fact=Fact("queue.exit_unknown", {"text": "x" * 100_000}))
    with pytest.raises(OutputError) as refused:
        receiver.event(large)
    assert refused.value.code == "server.cluster_events_refused"
    # Previews are not stored with the events.
    receiver = _Receiver(claimed(store), store)
    shown = StepDone(step=1, of=4, seconds=0.1, part="transformer", preview=os.urandom(50_000))
    for _ in range(50):
        receiver.event(shown)
    sent = 0
    with pytest.raises(OutputError):
        while True:
            receiver.event(Warned(fact=Fact("queue.exit_unknown", {"text": "x" * 1000})))
            sent += 1
    assert 200 < sent < 300


def test_a_video_is_saved_only_if_its_file_was_received(store: JobStore) -> None:
    record = claimed(store)
    receiver, saved = _Receiver(record, store), sample_result()
    with pytest.raises(OutputError) as refused:
        receiver.outcome(saved)
    assert refused.value.fact == Fact("server.cluster_file_damaged", {"name": transfer.VIDEO})
    receiver.take("part", (transfer.VIDEO, 0, CONTENT))
    receiver.take("complete", (transfer.VIDEO, DIGEST))
    assert receiver.outcome(saved) == saved
    assert record.output.read_bytes() == CONTENT


class _Head(BaseHTTPRequestHandler):
    """A head that answers each machine with what its path names."""

    answers: ClassVar[Mapping[str, tuple[int, bytes]]] = {}
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        """Answer."""
        self.keys.append(self.headers["Authorization"])
        status, body = self.answers[parse_qs(urlsplit(self.path).query)["host"][0]]
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the machine reads no more
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_head_with_another_key_or_odd_answers_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "other key": (401, b"{}", "server.cluster_key_wrong"),
        "forbidden": (403, b"", "server.cluster_not_a_head"),
        "text": (200, b"hello", "server.cluster_not_a_head"),
        "list": (200, b"[]", "server.cluster_not_a_head"),
        "no port": (200, b'{"port": "1; x", "versions": {}}', "server.cluster_not_a_head"),
        "deep": (200, DEEP, "server.cluster_not_a_head"),
        "endless": (200, b" " * 50_000_000, "server.cluster_not_a_head"),
    }
    monkeypatch.setattr(_Head, "answers", {name: (status, body) for name, (status, body, _) in cases.items()})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Head) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, (_, _, code) in cases.items():
            monkeypatch.setattr("socket.gethostname", lambda name=name: name)
            with pytest.raises(MachineError) as refused:
                ask(f"127.0.0.1:{server.server_address[1]}", "the key")
            assert refused.value.code == code, name
        server.shutdown()
    # What speaks another protocol.
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(MachineError) as refused:
            ask(f"127.0.0.1:{listener.getsockname()[1]}", "the key")
        assert refused.value.code == "server.cluster_not_a_head"
    assert set(_Head.keys) == {"Bearer the key"}
