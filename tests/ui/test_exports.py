"""Exports on the pages: the form, the stream, whose videos they are, and what ends an export."""

import asyncio
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.authentication import SimpleUser
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.core.facts import Fact
from runtime.core.settings import Settings
from runtime.queue.store import JobStore
from runtime.server.gradio_requests import access
from runtime.ui import exports
from runtime.ui.formatting import page_text
from runtime.video.export_formats import FORMATS
from runtime.video.reader import read_info
from tests.plans import no_engines
from tests.queue.test_retention import made
from tests.sounds import tone, write_clip
from tests.thread_queue import RunningQueue
from tests.video.test_export import FRAMES, make
from tests.waiting import until


class AsUser:
    """What the middleware does: names the user of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "user": SimpleUser("")}, receive, send)


class Page:
    """The routes of the owner's page, and two of the owner's videos; `theirs` is a visitor's."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(cache_dir=folder)
        self.outputs = settings.outputs_dir
        self.outputs.mkdir()
        self.queue = RunningQueue(folder, self.outputs, no_engines(folder), start=False)
        store: JobStore = self.queue.store
        self.clips = [made(store, self.outputs, owner) for owner in (None, None, "visitor")]
        for number, clip in enumerate(self.clips):
            make(self.outputs / f"{clip}.mp4", first=number)
        self.app = AsUser(Starlette(routes=exports.routes(exports.owners_video(self.queue, settings))))
        self.client = TestClient(self.app)

    def export(self, *clips: str, **values: Any) -> tuple[list[dict[str, Any]], bytes]:
        """Return the lines and the file of an export."""
        call = {"clips": clips, "format": "gif", "start": None, "end": None, **values}
        answer = self.client.post("/tandem/export", json=call)
        assert answer.status_code == 200
        return split(answer.content)


def split(content: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the lines of a stream, and the file after them."""
    lines, rest = [], content
    while rest:
        line, _, rest = rest.partition(b"\n")
        lines.append(json.loads(line))
        if "name" in lines[-1]:
            break
    return lines, rest


@pytest.fixture
def page(tmp_path: Path) -> Any:
    made_page = Page(tmp_path)
    yield made_page
    made_page.queue.close()


def test_an_export_is_streamed_and_leaves_nothing(page: Page) -> None:
    first, second, _ = page.clips
    html = page.client.get(f"/tandem/export/{first}").text
    assert all(f'value="{name}"' in html for name in FORMATS) and "export-start" in html
    lines, file = page.export(first, start=0.25)
    assert lines[0] == {"share": 0.0} and lines[-1] == {"name": f"{first}.gif", "type": "image/gif", "size": len(file)}
    assert file.startswith(b"GIF89a")
    lines, file = page.export(first, second, format="png")
    assert lines[-1]["name"] == f"{first}-joined.zip" and file.count(b"frame-00026.png") and file.startswith(b"PK")
    assert page.client.get(f"/tandem/export/{first}-{second}").text.count("export-start") == 0
    until(lambda: {path.name for path in page.outputs.iterdir()} == {f"{clip}.mp4" for clip in page.clips})


def test_sound_is_exported_without_loss_on_request(page: Page, tmp_path: Path) -> None:
    first, second, _ = page.clips
    assert "data-lossless" not in page.client.get(f"/tandem/export/{first}").text
    write_clip(page.outputs / f"{second}.mp4", tone(1.5))
    html = page.client.get(f"/tandem/export/{second}").text
    for entry in FORMATS.values():
        (option,) = re.findall(f'<option value="{entry.name}"[^>]*>', html)
        assert ("data-lossless" in option) == bool(entry.lossless)
        assert (escape(page_text(Fact("export.no_sound")).what) in option) == (not entry.sound)
    for lossless, codec in ((True, "pcm_s24le"), (False, "pcm_s16le")):
        _, file = page.export(second, format="prores", start=0.5, lossless_sound=lossless)
        (tmp_path / "x.mov").write_bytes(file)
        assert read_info(tmp_path / "x.mov").sound == (codec,)


def test_only_ones_own_videos_and_valid_calls_are_exported(page: Page, subtests: pytest.Subtests) -> None:
    first, _, theirs = page.clips
    assert page.client.get(f"/tandem/export/{theirs}").status_code == 422
    for clips, values in (
        ([theirs], {}),
        ([first, theirs], {}),
        (["0123abcd"], {}),
        ([first], {"format": "exe"}),
        ([first], {"start": 99}),
        ([first], {"start": 1, "end": 0.5}),
    ):
        with subtests.test(f"{clips} {values}"):
            lines, _ = page.export(*clips, **values)
            assert list(lines[-1]) == ["error"] and str(page.outputs) not in lines[-1]["error"]
    times = {"format": "gif", "start": None, "end": None}
    calls: list[Any] = [[], {"clips": []}, {**times, "clips": [first] * 51}, {**times, "clips": ["\ud800"]}]
    calls += [{**times, "clips": [first], "start": value} for value in ("1", True, 10**400, float("nan"))]
    calls.append({**times, "clips": [first], "lossless_sound": "yes"})
    for call in calls:
        with subtests.test(str(call)[:40]):
            assert page.client.post("/tandem/export", content=json.dumps(call)).status_code == 422
    for visitors in (False, True):
        assert access("POST", "/tandem/export", visitors=visitors) == "login"
        assert access("GET", "/tandem/export/0123abcd-0123abce", visitors=visitors) == "login"
        assert access("GET", "/tandem/export/0123abcd-", visitors=visitors) is None
        assert access("GET", "/tandem/export", visitors=visitors) is None


def test_leaving_ends_an_export_and_only_one_runs_for_a_user(page: Page) -> None:
    long = page.clips[0]
    make(page.outputs / f"{long}.mp4", count=300, width=640, height=480)
    call = json.dumps({"clips": [long], "format": "av1", "start": 0.1, "end": None}).encode()
    scope: Scope = {
        "type": "http", "method": "POST", "path": "/tandem/export", "headers": [], "query_string": b"",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip

    async def leave_while_it_runs() -> None:
        started, left = asyncio.Event(), asyncio.Event()
        bodies = iter([{"type": "http.request", "body": call, "more_body": False}])

        async def receive() -> Any:
            for message in bodies:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"share" in message.get("body", b"") and list(page.outputs.glob(".tandem-*/.tandem-*/complete.mp4")):
                started.set()

        running = asyncio.create_task(page.app(scope, receive, send))
        await started.wait()
        busy = await asyncio.to_thread(page.export, page.clips[1])
        assert list(busy[0][-1]) == ["error"]
        left.set()
        await running

    asyncio.run(leave_while_it_runs())
    until(lambda: not list(page.outputs.glob(".tandem-*")))
    lines, file = page.export(page.clips[1])
    assert lines[-1]["size"] == len(file) and FRAMES
