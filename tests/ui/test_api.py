"""The endpoint `/generate` in this process."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.core.events import Cancelled
from runtime.queue.changes import Changes
from runtime.ui import api, form
from runtime.upstream import gradio as private
from tests.app_server import free_port
from tests.fuzz.raw_http import Answer, send
from tests.waiting import until

CALL = b"/gradio_api/call/generate"
ENDED = SimpleNamespace(id="0" * 8, state="cancelled", events=[Cancelled()], changes=Changes())


class Submitted:
    """Stands in for the middleware that submits jobs: every call's job has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["submitted"] = ENDED
        await self._app(scope, receive, send)


@pytest.fixture
def page() -> Iterator[gr.Blocks]:
    with gr.Blocks() as made:
        gr.api(api.endpoint("tiny"), api_name="generate", **form.STREAMED)
    middleware = [Middleware(Submitted)]
    made.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, app_kwargs={"middleware": middleware})
    yield made
    made.close(verbose=False)


def test_a_program_that_reads_no_results_does_not_fill_the_memory(
    page: gr.Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.ui.api._MOST_UNREAD", 5)
    app: Any = page.app
    values = json.dumps({"data": private.functions(app)[0].defaults}).encode()

    def call() -> str:
        answer = send(page.server_port, b"POST", CALL, {b"Content-Type": b"application/json"}, values)
        event = str(json.loads(answer.body)["event_id"])
        until(lambda: not app.get_blocks()._queue.event_ids_to_events)
        return event

    def result(event: str) -> Answer:
        return send(page.server_port, b"GET", CALL + b"/" + event.encode())

    events = [call() for _ in range(10)]
    assert [private.has_event(app, event) for event in events] == [False] * 4 + [True] * 6
    assert b"Cancelled" in result(events[-1]).body
