"""The routes for uploads, behind the middleware that limits them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.core.cancel import never
from runtime.core.errors import LimitError
from runtime.core.facts import as_text
from runtime.core.images import ImageUse
from runtime.models.images import images_dir, keep_image
from runtime.models.videos import keep_video
from runtime.server import gradio_requests, image_uploads, security
from runtime.server.gradio_requests import RefusedError
from runtime.video.image_decoder import FORMATS, MIN_SIDE
from runtime.video.image_process import PROCESS
from tests.facts import fact
from tests.image_files import encoded, many_scans, picture
from tests.video.test_reader import H264, make

BOAT = encoded(picture())


class Anna:
    """Stands in for the login: every request is of one user."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "user": SimpleNamespace(display_name="anna")}, receive, send)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    def keep(data: bytes, name: str, visitor: str, check: Callable[[], None] = never) -> ImageUse:
        assert visitor == "anna"
        if name == "late.png":
            raise LimitError("server.images_full")
        return keep_image(data, name, "image", tmp_path, check=check)

    limits = Middleware(security.ValidationMiddleware, visitors=None, submissions={})
    middleware = [Middleware(ExceptionMiddleware), Middleware(Anna), limits]
    routes = image_uploads.routes(
        keep,
        lambda text: text.replace(str(tmp_path), "the cache"),
        lambda data, name, check=never: keep_video(data, name, tmp_path, check=check),
    )
    app = Starlette(routes=routes, middleware=middleware)
    with TestClient(app) as made:
        yield made


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in images_dir(tmp_path).iterdir()] if images_dir(tmp_path).exists() else []


def test_a_body_and_a_form_are_the_same_image(client: TestClient, tmp_path: Path) -> None:
    plain = client.post("/tandem/images/boat.png", content=BOAT)
    form = client.post("/gradio_api/upload", files={"files": ("boat.png", BOAT)}, params={"upload_id": "x"})
    assert (plain.status_code, form.status_code) == (200, 200)
    (copy,) = copies(tmp_path)
    assert copy.read_bytes() == BOAT
    assert plain.json() == {"image": f"sha256:{copy.name}/boat.png", "width": 64, "height": 48}
    assert form.json() == [plain.json()["image"]]
    assert plain.headers["cache-control"] == form.headers["cache-control"] == "private, no-store"


def test_a_video_is_kept_or_refused_with_a_remedy(client: TestClient, tmp_path: Path) -> None:
    clip = make(tmp_path / "x.mp4", *H264).read_bytes()
    kept = client.post("/tandem/videos/a%20boat.mp4", content=clip)
    (copy,) = copies(tmp_path)
    assert copy.read_bytes() == clip
    reference = f"sha256:{copy.name}/a boat.mp4"
    assert kept.json() == {"video": reference, "width": 32, "height": 24, "seconds": pytest.approx(1, abs=0.1)}
    for data, code in ((b"", "empty"), (b"text", "no_video"), (clip[:900], "no_video"), (BOAT, "no_video")):
        answer = client.post("/tandem/videos/boat.mp4", content=data)
        assert (answer.status_code, answer.text) == (422, as_text(fact(f"source.{code}", file="boat.mp4")))
    assert copies(tmp_path) == [copy]


@pytest.mark.parametrize(
    ("sent", "name"),
    [("my%20boat.png", "my boat.png"), ("b%C3%BCrd.png", "bürd.png"), ("..", "image"), ("%0A", "image"),
     ("..%5C..%5Cboat.png", "boat.png"), ("a%00b.png", "image"), ("%22%3E.png", '">.png'), ("x" * 600, "x" * 200)],
)  # fmt: skip
def test_names_are_plain(sent: str, name: str, client: TestClient) -> None:
    if sent != "..":  # clients resolve it
        answer = client.post(f"/tandem/images/{sent}", content=BOAT)
        assert answer.json()["image"].partition("/")[2] == name
    assert image_uploads.plain_name(sent) == "image" if sent == ".." else True


@pytest.mark.parametrize(
    ("data", "code", "more"),
    [
        (b"", "empty", {}),
        (b"text", "format_unknown", {"formats": FORMATS}),
        (BOAT[:100], "damaged", {}),
        (encoded(picture(1, 1)), "too_small", {"width": 1, "height": 1, "least": MIN_SIDE}),
    ],
)
def test_bad_images_are_refused_with_a_remedy(
    data: bytes, code: str, more: dict[str, Any], client: TestClient, tmp_path: Path
) -> None:
    for answer in (
        client.post("/tandem/images/boat.png", content=data),
        client.post("/gradio_api/upload", files={"files": ("boat.png", data)}),
    ):
        assert answer.status_code == 422 and answer.text == as_text(fact(f"image.{code}", file="boat.png", **more))
    assert copies(tmp_path) == []


@pytest.mark.slow
def test_images_that_take_too_long_are_refused(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROCESS._limits, "seconds", 1.5)
    data = many_scans()
    for answer in (
        client.post("/tandem/images/boat.jpg", content=data),
        client.post("/gradio_api/upload", files={"files": ("boat.jpg", data)}),
    ):
        assert answer.status_code == 422 and answer.text == as_text(fact("image.slow", file="boat.jpg", seconds=1.5))
    assert copies(tmp_path) == []


def test_hostile_images_are_answers_about_the_image(client: TestClient) -> None:
    """Whatever a decoder raises, and a GIF whose comment takes minutes to skip, as the owner and visitors send them."""
    gif = encoded(picture(), "GIF")
    table = 13 + 3 * 2 ** ((gif[10] & 7) + 1)
    long = gif[:table] + b"\x21\xfe" + b"\x01a" * 1_000_000 + b"\0" + gif[table:]
    avif = encoded(picture(), "AVIF")
    damaged = [avif[:at] + bytes([avif[at] ^ 0xFF]) + avif[at + 1 :] for at in range(20, len(avif), 41)]
    began = time.monotonic()
    statuses = []
    for data in (long, avif[: len(avif) // 2], *damaged):
        plain = client.post("/tandem/images/x", content=data)
        form = client.post("/gradio_api/upload", files={"files": ("x", data)})
        assert plain.status_code == form.status_code
        statuses.append(plain.status_code)
    assert {*statuses[:2]} == {422} and {*statuses} <= {200, 422}
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("charset", ["idna", "punycode", "utf-16", "zip", "no such"])
def test_forms_are_in_utf_8(charset: str, client: TestClient) -> None:
    """Decoding long texts as IDNA takes seconds of the event loop."""
    name = b"\xc3\xbc" * 50_000
    body = b'--x\r\nContent-Disposition: form-data; name="' + name + b'"\r\n\r\nx\r\n--x--\r\n'
    kind = {"Content-Type": f'multipart/form-data; charset="{charset}"; boundary=x'}
    answer = client.post("/gradio_api/upload", content=body, headers=kind)
    assert answer.status_code == 415


def test_a_limit_is_answered_as_one(client: TestClient) -> None:
    answer = client.post("/tandem/images/late.png", content=BOAT)
    assert answer.status_code == 429 and answer.text == as_text(fact("server.images_full"))


def test_forms_with_anything_else_are_refused(client: TestClient, tmp_path: Path) -> None:
    boat = ("boat.png", BOAT)
    kinds: list[dict[str, Any]] = [
        {"files": {"other": boat}},
        {"files": [("files", boat), ("files", boat)]},
        {"files": {"files": boat}, "data": {"more": "x"}},
        {"data": {"files": "text"}},
        {"content": BOAT},
        {"content": b"--x\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"--y\r\n\r\n", "headers": {"Content-Type": "multipart/form-data"}},
        {"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
    ]
    for kind in kinds:
        answer = client.post("/gradio_api/upload", **kind)
        assert answer.status_code == 422, kind
    assert copies(tmp_path) == []


def test_a_body_that_is_too_large_is_not_kept(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradio_requests, "MAX_UPLOAD_BYTES", 1000)
    for address in ("/tandem/images/boat.png", "/gradio_api/upload"):
        answer = client.post(address, content=bytes(1001))
        assert answer.status_code == 413 and "1.0 KB" in answer.text
    assert copies(tmp_path) == []


def test_few_uploads_are_read_at_once() -> None:
    """Others are refused before their bodies take memory, and an upload that breaks off counts no more."""
    entered = 0

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal entered
        entered += 1

    async def check() -> None:
        layer = security.ValidationMiddleware(app, None, {})
        gone = asyncio.Event()

        async def stalled() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def whole() -> Message:
            return {"type": "http.request", "body": BOAT, "more_body": False}

        async def send(_message: Message) -> None:
            pass

        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/tandem/images/x",
            "headers": [],
            "query_string": b"",
        }
        held = [asyncio.create_task(layer(scope, stalled, send)) for _ in range(security._MOST_UPLOADS)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await layer(scope, whole, send)
        assert (refused.value.fact.code, refused.value.status_code, entered) == ("server.uploads_busy", 429, 0)
        gone.set()
        for ended in await asyncio.gather(*held, return_exceptions=True):
            assert isinstance(ended, RefusedError) and ended.status_code == 400
        await layer(scope, whole, send)
        assert entered == 1

    asyncio.run(check())
