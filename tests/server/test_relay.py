"""The visitors' page behind an unreliable relay: connections that are reset, slow readers, and the end of sharing."""

import contextlib
import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gradio_client import Client

from runtime.queue import store
from tests.app_server import Server, make_cache, serving
from tests.chaos.run import Face
from tests.fuzz.raw_http import send
from tests.server.test_flood import visitors_port
from tests.server.test_visitor_process import log_in, processes, refused
from tests.sharing_app import link_of
from tests.waiting import until

pytestmark = pytest.mark.slow
# More than all buffers of a connection together.
_LARGE = 30_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = make_cache(tmp_path_factory.mktemp("relay"))
    with serving(cache, "--share", "--share-steps", "400", program=("-m", "tests.sharing_app")) as running:
        link_of(running.cache_dir)
        yield running


def printed(server: Server) -> str:
    """Return what the app has printed and logged."""
    files = [server.cache_dir / "server.txt", *(server.cache_dir / "logs").glob("*")]
    return "".join(path.read_text(encoding="utf-8") for path in files)


@pytest.fixture(scope="module")
def visitor(server: Server) -> Face:
    _, user, password = link_of(server.cache_dir)
    face = Face(visitors_port(server), (user, password))
    face.log_in()
    assert face.cookie
    return face


def visitors_process(server: Server, port: int) -> psutil.Process:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            listening = [one.laddr.port for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            if port in listening:
                return child
    raise AssertionError("no process serves the visitors' page")


def connect(face: Face, request: bytes, buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(30)
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", face.port))
    connection.sendall(request)
    return connection


def reset(connection: socket.socket) -> None:
    """Close a connection with RST, as a relay does whose own client is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answer(face: Face, method: str, target: str, body: bytes = b"", **fields: str) -> tuple[int, bytes]:
    """Send a request and return the status and the body of the answer."""
    fields |= {"Connection": "close"} | ({"Content-Length": str(len(body))} if body else {})
    with connect(face, face.head(method, target, **fields) + b"\r\n" + body) as connection:
        data = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    head, _, rest = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def left_open(process: psutil.Process) -> int:
    """Return how many connections and files a process has open, without the store's pool of connections for reading."""
    files = [file for file in process.open_files() if not Path(file.path).name.startswith(store.NAME)]
    return len(process.net_connections()) + len(files)


def submit(face: Face, prompt: str) -> str:
    """Request a video; return the address of its events."""
    body = json.dumps({"data": [prompt]}).encode()
    status, given = answer(face, "POST", "/gradio_api/call/generate", body, **{"Content-Type": "application/json"})
    assert status == 200, given
    return f"/gradio_api/call/generate/{json.loads(given)['event_id']}"


def test_connections_that_break_leave_nothing_behind(server: Server, visitor: Face) -> None:
    status, events = answer(visitor, "GET", submit(visitor, "a boat"))
    (video,) = {name.decode() for name in re.findall(rb"/video/[0-9a-f]{8}[.]mp4", events)} or {""}
    if not video:
        (job,) = set(re.findall(rb'"job": ?"([0-9a-f]{8})"', events))
        video = f"/video/{job.decode()}.mp4"
    file = next((server.cache_dir / "outputs").glob("*.mp4"))
    size = file.stat().st_size
    with file.open("ab") as longer:
        longer.truncate(_LARGE)
    process = visitors_process(server, visitor.port)
    answer(visitor, "GET", "/")
    before = left_open(process)

    head, body = visitor.head("POST", "/gradio_api/call/generate", **{"Content-Length": "900"}), b"{"
    for request in (head[:40], head + b"\r\n", head + b"\r\n" + body):
        for _ in range(10):
            reset(connect(visitor, request))
    for target in ("/", "/config", video):
        for _ in range(10):
            broken = connect(visitor, visitor.head("GET", target) + b"\r\n")
            assert broken.recv(1)
            reset(broken)
    # The stream of events is opened again while the one that was reset still ends.
    watched = submit(visitor, "a second boat")
    for _ in range(5):
        broken = connect(visitor, visitor.head("GET", watched) + b"\r\n")
        broken.recv(1)
        reset(broken)

    # A client that reads a byte at a time, while others are served.
    slow = [connect(visitor, visitor.head("GET", video) + b"\r\n", buffer=2048) for _ in range(5)]
    for _ in range(10):
        assert all(one.recv(1) for one in slow)
        assert answer(visitor, "GET", "/")[0] == 200
    for one in slow:
        reset(one)
    # It comes back for the rest.
    status, rest = answer(visitor, "GET", video, Range=f"bytes={size}-")
    assert (status, len(rest)) == (206, _LARGE - size)
    assert answer(visitor, "GET", submit(visitor, "a third boat"))[0] == 200
    until(lambda: left_open(process) <= before, seconds=60)
    assert process.is_running() and "Traceback" not in printed(server)


def test_the_owner_stops_sharing(server: Server) -> None:
    # Last, because no visitor gets in any more.
    port, videos = visitors_port(server), server.cache_dir / "outputs"
    before = set(videos.glob("*.mp4"))
    visitor, owner = log_in(server), Client(server.url, verbose=False)
    job = visitor.submit("a red boat", steps=400, api_name="/generate")
    assert next(iter(job))["event"] == "Planned"
    config: Any = owner.config
    (button,) = [one["id"] for one in config["components"] if one["props"].get("elem_id") == "stop-sharing"]
    (function,) = [one for one in config["dependencies"] if (button, "click") in map(tuple, one["targets"])]
    call = {"fn_index": function["id"], "session_hash": "own", "data": [""]}
    body = json.dumps(call).encode()
    assert (
        send(server.port, b"POST", b"/gradio_api/queue/join", {b"Content-Type": b"application/json"}, body).status
        == 200
    )
    until(lambda: refused(port), pause=0.1)
    (process,) = processes(server)
    until(lambda: not psutil.pid_exists(process), pause=0.1)
    final: Any = owner.predict("a red boat", steps=1, api_name="/generate")
    assert final["event"] == "VideoSaved"
    assert len(set(videos.glob("*.mp4")) - before) == 1  # the visitor's was cancelled
    visitor.close()
    owner.close()
