"""Many calls at once to both pages of a running app: every accepted one is a job, and the buttons keep working."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest
from gradio import routes
from gradio_client import Client
from starlette.authentication import SimpleUser

from runtime.core.facts import Fact
from runtime.server.gradio_requests import JOIN, RefusedError
from runtime.server.security import ValidationMiddleware
from runtime.ui.formatting import page_text
from tests.app_server import MODEL, Server, make_cache, serving
from tests.fuzz.raw_http import Answer, send
from tests.sharing_app import link_of
from tests.waiting import TIMEOUT, until

# More than Gradio's queue had slots.
MANY = 90
CALL = "/gradio_api/call/generate"
# A job of some minutes.
LONG = ["a red boat", None, MODEL, 192, 128, 9, 8, 1000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--share", "--share-size", "192x128", "--share-steps", "1000", "--share-queue", "1")
    with serving(make_cache(tmp_path_factory.mktemp("many")), *flags, program=("-m", "tests.sharing_app")) as running:
        link_of(running.cache_dir)
        yield running
    assert "Traceback" not in (running.cache_dir / "server.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Sender:
    """Sends requests to one page as one user."""

    port: int
    functions: dict[str, int]
    cookie: str = ""

    def post(self, path: str, body: object) -> Answer:
        headers = {b"Cookie": self.cookie.encode(), b"Content-Type": b"application/json"}
        return send(self.port, b"POST", path.encode(), headers, json.dumps(body).encode())

    def join(self, function: str, session: str, *values: object) -> int:
        call = {"fn_index": self.functions[function], "session_hash": session, "data": values}
        return self.post(JOIN, call).status

    def generate(self, *values: object) -> int:
        return self.post(CALL, {"data": [*values, *LONG[len(values) :]]}).status

    def press(self, action: str) -> None:
        """Press a button of the owner's panel Queue."""
        call = {"action": action, "target": "", "values": {}, "view": {}, "form": [], "drawn": {}}
        assert self.post("/tandem/panels/queue", call).status == 200

    def join_many(self, name: str) -> set[int]:
        """Let `MANY` pages follow a job; return the statuses of the answers."""
        with ThreadPoolExecutor(4) as pool:
            return set(pool.map(lambda number: self.join("attach", f"{name}{number}", ""), range(MANY)))

    @contextmanager
    def stream(self, session: str) -> Iterator[Callable[[str], object]]:
        """Open a session's stream; yield a function that waits until the stream has sent a text."""
        path, cookie = f"/gradio_api/queue/data?session_hash={session}", {"Cookie": self.cookie}
        seen = ""
        with httpx.stream("GET", f"http://127.0.0.1:{self.port}{path}", headers=cookie, timeout=TIMEOUT) as answer:
            sent = answer.iter_text()

            def wait_for(text: str) -> None:
                nonlocal seen
                while text not in seen:
                    seen += next(sent)

            yield wait_for


def sender(port: int, auth: tuple[str, str] | None = None) -> Sender:
    client: Any = Client(f"http://127.0.0.1:{port}/", auth=auth, verbose=False)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    names = {one["id"]: str(one["props"].get("elem_id")) for one in client.config["components"]}
    functions: dict[str, int] = {}
    for one in client.config["dependencies"]:
        shown, buttons = len(one["outputs"]) > 1, {names.get(target[0], "") for target in one["targets"]}
        functions |= {name: one["id"] for name in buttons & {"attach", "cancel", "generate"} if one["backend_fn"]}
        assert shown or "attach" not in buttons
    client.close()
    return Sender(port, functions, cookie)


@pytest.fixture
def owner(server: Server) -> Iterator[Sender]:
    made = sender(int(server.url.rstrip("/").rpartition(":")[2]))
    yield made
    made.press("cancel-all")


def visitor(server: Server) -> Sender:
    port, user, password = link_of(server.cache_dir)
    return sender(port, (user, password))


def states(cache_dir: Path) -> Counter[str]:
    with closing(sqlite3.connect(cache_dir / "jobs.sqlite")) as store:
        return Counter(state for (state,) in store.execute("SELECT state FROM jobs"))


def newest(cache_dir: Path) -> str:
    with closing(sqlite3.connect(cache_dir / "jobs.sqlite")) as store:
        return str(store.execute("SELECT id FROM jobs ORDER BY number DESC LIMIT 1").fetchone()[0])


@pytest.mark.slow
def test_many_watchers_of_one_visitor_do_not_delay_another(server: Server, owner: Sender) -> None:
    many, other = visitor(server), visitor(server)
    assert many.generate() == 200
    assert many.join_many("many") <= {200, 429}
    before = states(server.cache_dir)
    assert other.generate() == 200
    assert states(server.cache_dir).total() == before.total() + 1
    # The limit of videos, not of watchers.
    assert other.generate() == 429 and states(server.cache_dir).total() == before.total() + 1
    assert other.join("attach", "others", "") == 200
    with other.stream("others") as wait_for:
        wait_for("data-job=")
        assert other.join("cancel", "others", newest(server.cache_dir)) == 200
        until(lambda: states(server.cache_dir)["cancelled"] == before["cancelled"] + 1)


@pytest.mark.slow
def test_a_page_that_newer_ones_replaced_is_told_so(server: Server, owner: Sender) -> None:
    many = visitor(server)
    assert many.generate() == 200
    ended = page_text(Fact("server.watch_ended", {"maximum": 4})).what
    assert many.join("attach", "page0", "") == 200
    with many.stream("page0") as wait_for:
        wait_for("data-job=")
        for number in range(1, 5):
            assert many.join("attach", f"page{number}", "") == 200
        wait_for(ended)


@pytest.mark.slow
def test_every_accepted_call_is_a_job_and_cancel_all_ends_it(tmp_path: Path) -> None:
    with serving(make_cache(tmp_path)) as server:
        owner = sender(int(server.url.rstrip("/").rpartition(":")[2]))
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda number: owner.generate(f"boat {number}"), range(MANY))) == {200}
        assert states(tmp_path).total() == MANY
        owner.press("pause-all")
        assert owner.join_many("tab") == {200}
        assert owner.join("attach", "shown", "") == 200
        with owner.stream("shown") as wait_for:
            wait_for("data-job=")
            owner.press("cancel-all")
            assert states(tmp_path)["queued"] == 0
            wait_for("process_completed")
        server.process.kill()
        server.process.wait()
        assert states(tmp_path).total() == MANY


@pytest.mark.slow
def test_a_refused_call_is_answered_as_refused(server: Server, owner: Sender) -> None:
    before = states(server.cache_dir).total()
    answer = owner.post(CALL, {"data": [""]})
    assert answer.status == 422 and b"The prompt is empty." in answer.body
    answer = visitor(server).post(CALL, {"data": ["a red boat", None, MODEL, 4096, 4096]})
    assert answer.status == 422 and str(server.cache_dir).encode() not in answer.body
    assert states(server.cache_dir).total() == before


def test_the_calls_of_a_visitor_that_wait_or_run_are_limited() -> None:
    with gr.Blocks() as page:
        gr.Button().click(lambda: None)
    app = routes.App.create_app(page)
    calls = app.get_blocks()._queue.event_ids_to_events
    visitors: Any = SimpleNamespace(most_calls=2, link="", owns=lambda session, name: True)
    passed = []

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["user"].display_name)
        body = (await receive())["body"]
        assert len(body) != len(request_body)
        assert int(dict(scope["headers"]).get(b"content-length", len(body))) == len(body)

    request_body = b'{"fn_index":0,"session_hash":"a","data":[]}'

    async def body() -> dict[str, Any]:
        return {"type": "http.request", "body": request_body}

    def join(name: str) -> None:
        user = SimpleUser(name)
        headers = [(b"content-length", str(len(request_body)).encode())]
        scope = {"type": "http", "method": "POST", "path": JOIN, "headers": headers, "query_string": b"", "app": app}
        asyncio.run(validation(scope | {"user": user}, body, None))  # type: ignore[arg-type]
        calls[str(len(calls))] = SimpleNamespace(request=SimpleNamespace(user=user))

    validation = ValidationMiddleware(gradio, visitors, {})
    for name in ("anna", "anna", "ben"):
        join(name)
    with pytest.raises(RefusedError) as refused:
        join("anna")
    assert (refused.value.fact.code, refused.value.status_code) == ("server.requests_busy", 429)
    assert passed == ["anna", "anna", "ben"]
