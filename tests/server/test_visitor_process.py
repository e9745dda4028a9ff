"""The process of the visitors' page: it is started again if it is killed, and ends with the owner's."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client

from runtime.core.settings import Settings
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.queue.worker import WorkerConfig
from runtime.ui.visitor_process import VisitorProcess, VisitorsConfig
from tests.app_server import Server, make_cache, serving
from tests.fuzz.raw_http import send
from tests.plans import no_engines
from tests.server.test_flood import visitors_port
from tests.sharing_app import link_of
from tests.waiting import until

if sys.platform == "win32":
    pytest.skip("Windows has no SIGKILL", allow_module_level=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(
        make_cache(tmp_path), "--share", "--share-steps", "400", program=("-m", "tests.sharing_app")
    ) as running:
        link_of(running.cache_dir)
        yield running


def processes(server: Server) -> list[int]:
    """Return the ids of the processes that served the visitors' page, in order."""
    log = (server.cache_dir / "logs" / "tandem.log").read_text(encoding="utf-8")
    return [int(number) for number in re.findall(r"visitors' page is served by process (\d+)", log)]


def log_in(server: Server) -> Any:
    port, user, password = link_of(server.cache_dir)
    return Client(f"http://127.0.0.1:{port}/", auth=(user, password), verbose=False)


def refused(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return False
    return True


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_ends_with_the_owners(server: Server) -> None:
    own, port = int(server.url.rstrip("/").rpartition(":")[2]), visitors_port(server)
    (first,) = processes(server)
    assert first != server.process.pid
    visitor = log_in(server)
    job = visitor.submit("a red boat", steps=60, api_name="/generate")
    assert next(iter(job))["event"] == "Planned"
    os.kill(first, signal.SIGKILL)
    assert send(own, b"GET", b"/config").status == 200
    visitor.close()
    until(lambda: len(processes(server)) == 2, pause=0.1)
    # The same link and password work again, and the visitor's first video is made.
    visitor = log_in(server)
    assert visitor.predict("a red boat", steps=1, frames=1, api_name="/generate")["event"] == "VideoSaved"
    visitor.close()
    until(lambda: len(list((server.cache_dir / "outputs").glob("*.mp4"))) == 2)
    server.process.kill()
    server.process.wait()

    until(lambda: refused(port), pause=0.1)


@pytest.mark.slow
def test_logins_stay_valid_when_the_process_is_started_again(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(tiny("wan2.1").directory, folder / "tiny")
    app = WorkerConfig(
        app="0" * 8, store_path=tmp_path / "jobs.sqlite", weights_dir=folder, engines=no_engines(tmp_path)
    )
    settings = Settings(cache_dir=tmp_path)
    page = VisitorProcess(VisitorsConfig(app, settings, {"tiny": look_up("tiny", folder)}, ("visitor", "secret")))
    page.start()
    try:
        page.wait()
        client: Any = Client(f"http://127.0.0.1:{page.port}/", auth=("visitor", "secret"), verbose=False)
        cookies = {b"Cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items()).encode()}
        client.close()
        until(lambda: page._logins is not None and page._logins.tokens)
        process = page._process
        assert process is not None
        process.kill()
        until(lambda: page._process not in (process, None))

        def answers() -> bool:
            # A request waits in the socket's queue until the process has started, at times longer than `send` does.
            with contextlib.suppress(TimeoutError):
                return send(page.port, b"GET", b"/config", cookies).status == 200
            return False

        until(answers, pause=0.1)
        assert send(page.port, b"GET", b"/config").status == 401
    finally:
        page.close()
