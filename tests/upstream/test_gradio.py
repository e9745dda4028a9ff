"""Gradio's private names that `runtime.upstream.gradio` uses: each test names what broke."""

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from gradio import http_server, networking, routes, tunneling
from gradio.blocks import Blocks
from gradio.queueing import Queue
from gradio.server_messages import EstimationMessage, ProcessCompletedMessage, ProcessGeneratingMessage

from runtime.core.settings import ROOT
from runtime.upstream import gradio as private


def page() -> gr.Blocks:
    with gr.Blocks() as made:
        text = gr.Textbox("hello")
        gr.Button().click(lambda one, two: one, [text, gr.State(5)], text, api_name="queued")
        gr.Button().click(lambda: None, None, None, queue=False, api_name="direct")
        gr.Button().click(None, None, None, js="() => {}", api_name="browser")
    return made


@pytest.fixture
def app() -> routes.App:
    return routes.App.create_app(page())


_LOADS = """
import ast, inspect, sys, tracemalloc
parsed, parse = [], ast.parse
ast.parse = lambda source, *rest, **named: parsed.append(str(source)) or parse(source, *rest, **named)
from runtime.upstream.gradio import load
load()
import gradio
assert not [source for source in parsed if "class Textbox" in source]
assert inspect.getfile(gradio.Textbox).endswith("textbox.py")
gradio.component_meta.extract_class_source_code(inspect.getsource(gradio.Textbox), "Textbox")
assert [source for source in parsed if "class Textbox" in source]
page = gradio.Blocks()
with page:
    box, state = gradio.Textbox("hello"), gradio.State([5])
    for _ in range(300):
        gradio.State()
app = gradio.routes.App.create_app(page)
session = app.state_holder["one"]
session._update_value_in_config(box._id, "a large value")
session[state._id] = [6]
assert not list(session.components)[1:]
assert (app.state_holder["one"][state._id], app.state_holder["two"][state._id]) == ([6], [5])
session[box._id] = gradio.Textbox("changed")
assert [app.state_holder[name][box._id].value for name in ("one", "two", "one")] == ["changed", "hello", "changed"]
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
for number in range(100):
    app.state_holder[str(number)][box._id]
assert tracemalloc.get_traced_memory()[0] - before < 100 * 5_000
queue = page._queue
assert (queue.ANAYLTICS_CACHE_FREQUENCY, queue.ANALYTICS_MAX_EVENTS) == (sys.maxsize, 1)
"""


@pytest.mark.slow
def test_gradio_is_loaded_without_what_takes_time_and_memory() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", _LOADS], check=True, timeout=120, cwd=ROOT)


def test_an_event_may_show_its_progress_on_no_component() -> None:
    """`ui.form` relies on an empty list, which is not replaced by the outputs."""
    with gr.Blocks() as made:
        text = gr.Textbox()
        gr.Button().click(lambda: "", None, text, show_progress_on=[])
    (event,) = made.get_config_file()["dependencies"]
    assert event["show_progress_on"] == []
    scripts = Path(inspect.getfile(gr)).parent / "templates/frontend/assets"
    assert any("this.show_progress_on||this.outputs" in one.read_text("utf-8") for one in scripts.glob("Blocks-*.js"))


def test_functions_have_defaults_and_a_queued_flag(app: routes.App) -> None:
    found = private.functions(app)
    queued = private.function_number(app, "queued")
    assert found[queued] == private.PageFunction(("hello", 5), True, "queued")
    assert found[private.function_number(app, "direct")] == private.PageFunction((), False, "direct")
    assert private.function_number(app, "browser") not in found


def test_log_in_tokens_are_read_from_cookies(app: routes.App) -> None:
    app.auth = None
    assert not private.requires_login(app)
    app.auth = [("me", "secret")]
    assert private.requires_login(app)
    app.tokens["abc"] = "me"
    for name in (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}"):
        assert private.login_token(app, {name: "abc"}) == "abc"
        assert private.login_token(app, {name: "abd"}) is None
        assert name.replace(app.cookie_id, "{app.cookie_id}") in inspect.getsource(routes)


def test_the_newest_logins_are_kept(app: routes.App) -> None:
    app.tokens = {name: "me" for name in "abc"}
    kept = private.logins(app, most=2)
    assert kept == private.Logins(app.cookie_id, {"b": "me", "c": "me"}) and app.tokens == kept.tokens
    assert private.logins(app, most=2) == kept
    assert "app.tokens[token] = username" in inspect.getsource(routes)


def test_sessions_and_events_are_found_in_the_queue(app: routes.App) -> None:
    assert not private.has_session(app, "one") and not private.has_event(app, "0" * 32)
    queue = app.get_blocks()._queue
    queue.pending_event_ids_session["one"] = {"0" * 32}
    assert private.has_event(app, "0" * 32)
    source = inspect.getsource(Queue)
    for name in ("pending_messages_per_session", "event_ids_to_events", "pending_event_ids_session"):
        assert f"self.{name}" in source, name


@pytest.mark.parametrize("reads", [True, False])
def test_the_tasks_of_a_stream_end_with_it(app: routes.App, reads: bool) -> None:
    private.load()
    blocks = app.get_blocks()
    blocks.is_running = True
    scope = {"type": "http", "method": "GET", "path": "/gradio_api/queue/data", "query_string": b"session_hash=one"}

    def heartbeats() -> int:
        return sum("heartbeat" in str(task.get_coro()) for task in asyncio.all_tasks())

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body") and not reads:
            await asyncio.Event().wait()

    async def client_leaves() -> None:
        results: asyncio.Queue[Any] = asyncio.Queue()
        results.put_nowait(EstimationMessage(rank=0, queue_size=1))
        blocks._queue.pending_messages_per_session["one"] = results
        stream = asyncio.create_task(app({**scope, "headers": []}, receive, send))
        while not (results.empty() and heartbeats()):
            await asyncio.sleep(0.01)
        stream.cancel()
        await asyncio.wait([stream])
        await asyncio.sleep(0.1)
        assert not heartbeats()

    asyncio.run(asyncio.wait_for(client_leaves(), 60))


def test_the_queue_has_pauses_that_can_be_longer() -> None:
    made = page()
    private.poll_less(made)
    source = inspect.getsource(Queue)
    for name, most in (("sleep_when_free", 0.01), ("progress_update_sleep_when_free", 60.0)):
        assert getattr(made._queue, name) == most and f"await asyncio.sleep(self.{name})" in source, name


def test_old_results_that_nobody_read_are_forgotten(app: routes.App) -> None:
    queue = app.get_blocks()._queue
    names = ["running", *"abcd", "read"]
    for name in names:
        queue.pending_messages_per_session[name] = asyncio.Queue()
        queue.pending_event_ids_session[name] = {f"event of {name}"}
    for name in names[:-1]:
        for message in (EstimationMessage(rank=1, queue_size=2), "a result", EstimationMessage(rank=0, queue_size=1)):
            queue.pending_messages_per_session[name].put_nowait(message)
    queue.pending_event_ids_session["forgotten by gradio"] = set()
    queue.pending_event_ids_session["read"] = set()
    queue.event_ids_to_events = {
        "event of running": SimpleNamespace(session_hash="running"),
        "a" * 32: SimpleNamespace(session_hash="a" * 32),
    }
    for name in ("page", "a" * 32, "b" * 32):
        _ = app.state_holder[name]
    private.forget_unread(app, most=3, whole=3)
    assert list(app.state_holder.session_data) == ["page", "a" * 32]
    assert list(queue.pending_messages_per_session) == list(queue.pending_event_ids_session) == ["running", *"bcd"]
    for results in queue.pending_messages_per_session.values():
        assert (results.qsize(), results.get_nowait()) == (1, "a result")
    assert not private.has_event(app, "event of a") and private.has_event(app, "event of b")


def test_of_older_calls_only_the_last_result_is_kept(app: routes.App) -> None:
    queue = app.get_blocks()._queue
    running, complete = (
        ProcessGeneratingMessage(output={}, success=True),
        ProcessCompletedMessage(output={}, success=True),
    )
    for name in ("page", "old", "new"):
        queue.pending_messages_per_session[name] = asyncio.Queue()
        queue.pending_event_ids_session[name] = {"event" if name == "page" else name}
        for message in (running, running, complete):
            queue.pending_messages_per_session[name].put_nowait(message)
    private.forget_unread(app, most=9, whole=1)
    left = {name: found.qsize() for name, found in queue.pending_messages_per_session.items()}
    assert left == {"page": 3, "old": 1, "new": 3}
    assert queue.pending_messages_per_session["old"].get_nowait() is complete
    assert private.has_event(app, "old")


def test_the_open_calls_of_a_user_are_counted(app: routes.App) -> None:
    def event(user: str) -> Any:
        return SimpleNamespace(request=SimpleNamespace(user=SimpleNamespace(display_name=user)))

    app.get_blocks()._queue.event_ids_to_events = {"0": event("anna"), "1": event("ben"), "2": event("anna")}
    assert [private.open_calls(app, name) for name in ("anna", "ben", "cleo")] == [2, 1, 0]


def test_a_page_is_served_by_another_server() -> None:
    class Server:
        app: object = None
        closed = False

        def start(self, app: object) -> None:
            self.app = app

        def close(self) -> None:
            self.closed = True

    server, before = Server(), http_server.start_server
    app = routes.App.create_app(page())
    with private.served_by(server, "http://127.0.0.1:9/", private.Logins("id", {"a": "me"})):
        assert http_server.start_server is not before
        assert http_server.start_server(app, "127.0.0.1", 9)[2:] == ("http://127.0.0.1:9/", server)
    assert http_server.start_server is before and server.app is app
    assert private.login_token(app, {"access-token-id": "a"}) == "a"
    assert "http_server.start_server(" in inspect.getsource(Blocks.launch)
    assert "self.server.close()" in inspect.getsource(Blocks.close)
    assert "verbose" in inspect.signature(Blocks.close).parameters


def test_the_share_server_and_the_tunnel_program_have_addresses() -> None:
    assert private.share_api_address().startswith("https://")
    assert private.share_server_address() == networking.GRADIO_SHARE_SERVER_ADDRESS
    program = private.tunnel_program()
    assert program.address == tunneling.BINARY_URL and program.checksum is not None
    assert callable(tunneling.Tunnel.download_binary)
    assert issubclass(tunneling.ChecksumMismatchError, Exception)
