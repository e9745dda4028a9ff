"""A stranger who floods the visitors' port of a server with few file descriptors, with real processes and sockets."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from gradio_client import Client

from tests.app_server import Server, make_cache, serving
from tests.fuzz.raw_http import send
from tests.sharing_app import link_of

Result = TypeVar("Result")

if sys.platform == "win32":
    pytest.skip("Windows has no limit of open files", allow_module_level=True)

pytestmark = pytest.mark.slow
OPEN_FILES = 256
FLOOD = 250
_LIMITED = (
    f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({OPEN_FILES}, {OPEN_FILES}));"
    "runpy.run_module('tests.sharing_app', run_name='__main__')"
)
_HEAD = b"POST /gradio_api/queue/join HTTP/1.1\r\nHost: 127.0.0.1\r\n"
# Nothing, half a head, half a body, and a request that is invalid.
REQUESTS = (b"", _HEAD, _HEAD + b"Content-Length: 90000\r\n\r\n{", b"\x00\x01\r\n\r\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_cache(tmp_path_factory.mktemp("flood")), "--share", program=("-c", _LIMITED)) as running:
        link_of(running.cache_dir)
        yield running


def visitors_port(server: Server) -> int:
    """Return the port that the tunnel's program leads to."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if "-l" in command:
                return int(command[command.index("-l") + 1])
    raise AssertionError("no tunnel is open")


class Flood:
    """Keeps connections open that send the start of a request; opens those that are closed again, until `stop`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[socket.socket] = []
        self._stopping = threading.Event()
        self.opened = 0
        self._fill()
        self._thread = threading.Thread(target=self._refill, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for one in self._open:
            one.close()

    def _fill(self) -> None:
        while len(self._open) < FLOOD and not self._stopping.is_set():
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", self._port), timeout=1)
                self._open.append(one)
                self.opened += 1
                one.sendall(REQUESTS[self.opened % len(REQUESTS)])
                one.setblocking(False)

    def _refill(self) -> None:
        while not self._stopping.wait(0.05):
            kept = []
            for one in self._open:
                try:
                    ended = one.recv(4096) == b""
                except BlockingIOError:
                    ended = False
                except OSError:
                    ended = True
                if ended:
                    one.close()
                else:
                    kept.append(one)
            self._open = kept
            self._fill()


@contextlib.contextmanager
def flooded(server: Server) -> Iterator[Flood]:
    flood = Flood(visitors_port(server))
    try:
        yield flood
    finally:
        flood.stop()


def written(server: Server) -> int:
    """Return the number of bytes that the server has printed and logged."""
    files = [server.cache_dir / "server.txt", *(server.cache_dir / "logs").glob("*")]
    return sum(path.stat().st_size for path in files)


def test_a_flood_leaves_the_owners_page_and_job_alone(server: Server) -> None:
    own = int(server.url.rstrip("/").rpartition(":")[2])
    client: Any = Client(server.url, verbose=False)
    job = client.submit("a red boat", steps=150, api_name="/generate")
    next(iter(job))
    before = written(server)
    with flooded(server) as flood:
        while not job.done():
            answer = send(own, b"GET", b"/config")
            assert answer.status == 200 and answer.seconds < 10
            time.sleep(0.1)
        # A page opened meanwhile works, and so does another job.
        other: Any = Client(server.url, verbose=False)
        assert Path(other.predict("a red boat", steps=1, api_name="/generate")["video"]).is_file()
        other.close()
        assert flood.opened > FLOOD, "no connection was closed"
    final = job.outputs()[-1]
    assert final["event"] == "VideoSaved" and Path(final["video"]).is_file()
    client.close()
    assert written(server) - before < 100_000
    assert "Too many open files" not in (server.cache_dir / "server.txt").read_text(encoding="utf-8")


# On a busy machine a connection is old, and closed for a newer one, before the client has logged in, or is answered
# after more than the client's five seconds.
_ATTEMPTS = 10


def again(call: Callable[[], Result]) -> Result:
    """Return what a call returns that is made again if its connection is closed.

    Until its cookie is read, a connection is like those of the flood: it may be closed for a newer one. The client
    reports that of the connection on which events arrive as cancelled.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.TimeoutException, CancelledError):
            return call()
    raise AssertionError(f"{_ATTEMPTS} connections were closed or not answered")


def test_visitors_can_log_in_during_a_flood(server: Server) -> None:
    port, user, password = link_of(server.cache_dir)
    with flooded(server):
        visitor = again(lambda: Client(f"http://127.0.0.1:{port}/", auth=(user, password), verbose=False))
        final = again(lambda: visitor.predict("a red boat", steps=1, frames=1, api_name="/generate"))
        assert final["event"] == "VideoSaved"
        visitor.close()


def test_the_server_ends_during_a_flood(server: Server) -> None:
    # Last, because it ends the server.
    with flooded(server):
        began = time.monotonic()
        server.process.terminate()
        server.process.wait(timeout=60)
        assert time.monotonic() - began < 15
