"""Images of several users: fair turns, limits, clients that leave, and other requests meanwhile."""

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from runtime.core.cancel import CancelledError
from runtime.core.errors import LimitError
from runtime.models import images
from runtime.models.images import images_dir
from runtime.server import image_queue
from runtime.server.api_keys import NAME, ApiKeys, KeyLimits
from runtime.server.image_queue import ImageQueue
from runtime.video.image_process import PROCESS
from tests.app_server import App
from tests.image_files import encoded, many_scans, picture
from tests.waiting import until

SMALL = {"prompt": "a red boat", "steps": "1", "seed": "5"}
# Of a model that starts from images: others refuse them before they are read.
FROM_IMAGE = {**SMALL, "model": "diorama"}
BOAT = encoded(picture())


class Client:
    """A request whose client may leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_users_take_turns() -> None:
    order: list[str] = []
    begin = threading.Event()

    def call(name: str) -> Callable[[Callable[[], None]], str]:
        def run(_check: Callable[[], None]) -> str:
            begin.wait()
            order.append(name)
            return name

        return run

    async def check() -> None:
        queue = ImageQueue()
        anna = [asyncio.create_task(queue.run(Client().request, "anna", 1, call(f"anna {n}"))) for n in range(4)]
        await asyncio.sleep(0)
        ben = asyncio.create_task(queue.run(Client().request, "ben", 1, call("ben")))
        while len(queue._users) < 2 or not queue._users["ben"].turn.locked():
            await asyncio.sleep(0)
        begin.set()
        assert await asyncio.gather(*anna, ben) == [*(f"anna {n}" for n in range(4)), "ben"]
        assert queue._users == {}

    asyncio.run(check())
    assert order.index("ben") == 1


def test_a_client_that_leaves_ends_its_image() -> None:
    ended: list[BaseException] = []
    begun = threading.Event()

    def call(check: Callable[[], None]) -> None:
        def ends() -> bool:
            check()
            return False

        begun.set()
        try:
            until(ends)
        except CancelledError as error:
            ended.append(error)
            raise

    async def check() -> None:
        queue, first, second = ImageQueue(), Client(), Client()
        running = asyncio.create_task(queue.run(first.request, "anna", 1, call))
        waiting = asyncio.create_task(queue.run(second.request, "anna", 1, call))
        await asyncio.to_thread(begun.wait)
        for client, task in ((second, waiting), (first, running)):
            client.left.set()
            with pytest.raises(ClientDisconnect):
                await task
        assert queue._users == {}
        assert await queue.run(Client().request, "anna", 1, lambda _: 5) == 5

    asyncio.run(check())
    assert len(ended) == 1


def test_few_images_wait() -> None:
    hold = threading.Event()

    async def check() -> None:
        queue = ImageQueue()
        half = image_queue._MOST_BYTES // 2

        def start(user: str, size: int) -> "asyncio.Task[bool]":
            return asyncio.create_task(queue.run(Client().request, user, size, lambda _: hold.wait()))

        held = [start("anna", half), start("anna", half)]
        await asyncio.sleep(0)
        for user, size in (("anna", 1), ("ben", 2 * half + 1)):
            with pytest.raises(LimitError) as refused:
                await start(user, size)
            assert refused.value.code == "server.uploads_busy"
        held += [start(name, 1) for name in ("ben", "cara")]
        held += [start("dora", 0) for _ in range(image_queue._MOST)]
        await asyncio.sleep(0)
        with pytest.raises(LimitError):
            await start("dora", 0)
        hold.set()
        assert all(await asyncio.gather(*held)) and queue._users == {}

    asyncio.run(check())


def test_an_error_is_the_callers() -> None:
    def fail(_check: Callable[[], None]) -> None:
        raise LimitError("server.api_rate")

    async def check() -> None:
        with pytest.raises(LimitError) as raised:
            await ImageQueue().run(Client().request, "anna", 1, fail)
        assert raised.value.code == "server.api_rate"

    asyncio.run(check())


@pytest.fixture(scope="module")
def slow() -> bytes:
    return many_scans()


@pytest.fixture
def users(api: App) -> Iterator[Callable[[str], httpx.Client]]:
    """A function that returns a client with a key of that name."""
    keys, opened = ApiKeys(api.cache_dir), []

    def client(name: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {keys.add(name, KeyLimits())}"}
        opened.append(httpx.Client(base_url=api.url, headers=headers, timeout=60))
        return opened[-1]

    yield client
    for one in opened:
        one.close()
    (api.cache_dir / NAME).unlink()


def post(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("v1/videos", data=FROM_IMAGE, files={"input_reference": ("boat.png", data)})


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def is_reading() -> bool:
    pid = PROCESS.pid
    return pid is not None and psutil.Process(pid).cpu_times().user > 1


def post_when_allowed(client: httpx.Client, data: bytes) -> httpx.Response:
    """Post an image, again while two bodies of this key are being received."""
    while code_of(answer := post(client, data)) == (429, "server.uploads_busy"):
        pass
    return answer


@pytest.mark.slow
def test_slow_images_of_one_key_delay_no_other(
    api: App, users: Callable[[str], httpx.Client], slow: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROCESS._limits, "seconds", 2.0)
    PROCESS.close()
    anna, ben = users("anna"), users("ben")

    def made() -> str:
        """Make a video without an image, and follow its events."""
        video = str(ben.post("v1/videos", json={**SMALL, "steps": 1, "seed": 5}).json()["id"])
        with ben.stream("GET", f"v1/videos/{video}/events") as events:
            assert any("video.completed" in line for line in events.iter_lines())
        return video

    made()  # loads the model, which takes longer than the images
    with ThreadPoolExecutor(8) as threads:
        refused = [threads.submit(post_when_allowed, anna, slow) for _ in range(4)]
        until(is_reading)
        video = made()
        assert not all(one.done() for one in refused)
        # With one, after at most one of the other key's.
        assert code_of(post(ben, BOAT[:100])) == (400, "image.damaged")
        assert not all(one.done() for one in refused)
        assert ben.delete(f"v1/videos/{video}").status_code == 200
        for one in refused:
            assert code_of(one.result()) == (400, "image.slow")


@pytest.mark.slow
def test_images_of_clients_that_have_left_are_not_read(
    api: App, users: Callable[[str], httpx.Client], slow: bytes
) -> None:
    anna, ben = users("anna"), users("ben")
    PROCESS.close()
    request = anna.build_request("POST", "v1/videos", data=FROM_IMAGE, files={"input_reference": ("boat.png", slow)})
    body = request.read()
    head = b"POST /v1/videos HTTP/1.1\r\n" + b"".join(
        b"%s: %s\r\n" % (name, value) for name, value in request.headers.raw
    )
    before = len(list(images_dir(api.cache_dir).glob("*")))

    sockets = [socket.create_connection(("127.0.0.1", api.port)) for _ in range(8)]
    for one in sockets:
        one.sendall(head + b"\r\n" + body)
    until(is_reading)
    for one in sockets:
        one.close()
    since = time.monotonic()
    until(lambda: PROCESS.pid is None or not is_reading())
    assert code_of(post(ben, BOAT[:100])) == (400, "image.damaged")
    assert time.monotonic() - since < 8
    assert len(list(images_dir(api.cache_dir).glob("*"))) == before
    assert anna.get("v1/videos").json()["data"] == []
    assert "Traceback" not in api.printed()


@pytest.mark.slow
def test_a_video_is_deleted_while_its_image_is_read(
    users: Callable[[str], httpx.Client], slow: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the image had been within the limits when it was sent."""
    monkeypatch.setitem(images._DECODED, hashlib.sha256(slow).hexdigest(), (6000, 6000))
    ben = users("ben")
    PROCESS.close()
    made = post(ben, slow).json()["id"]
    until(is_reading)
    since = time.monotonic()
    assert ben.delete(f"v1/videos/{made}").status_code == 200
    assert time.monotonic() - since < 5 and PROCESS.pid is None
    assert ben.get(f"v1/videos/{made}").status_code == 404


def test_whatever_a_decoder_raises_is_an_answer_about_the_image(users: Callable[[str], httpx.Client]) -> None:
    anna = users("anna")
    data = encoded(picture(), "AVIF")
    files: list[Any] = [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(20, len(data), 23)]
    for one in files:
        answer = post(anna, one)
        assert answer.status_code in {200, 400}, answer.text
        if answer.is_success:  # it can be decoded
            assert anna.delete(f"v1/videos/{answer.json()['id']}").is_success
        assert "Traceback" not in answer.text
