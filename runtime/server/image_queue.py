"""A queue for images that users send: one of each user is decoded at a time, apart from other requests."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from runtime.core.cancel import CancelledError
from runtime.core.errors import LimitError
from runtime.video.image_messages import MAX_FILE_BYTES

Result = TypeVar("Result")
# Images that wait or are decoded, each in memory: of one user, and of all.
_MOST, _MOST_ALL = 32, 128
_MOST_BYTES, _MOST_BYTES_ALL = 2 * MAX_FILE_BYTES, 8 * MAX_FILE_BYTES


@dataclass
class _User:
    sizes: list[int] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class ImageQueue:
    """Decodes the images of requests on a thread of its own. For one event loop.

    Users take turns: an image waits for at most one image of each other user.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "images")
        self._users: dict[str, _User] = {}

    async def run(self, request: Request, user: str, size: int, call: Callable[[Callable[[], None]], Result]) -> Result:
        """Return what a function that decodes images returns.

        Args:
            request: whose body was read; if its client leaves, the decoding ends.
            size: of the images' files in bytes.
            call: is given a function that it passes on as `check`, see `models.images.with_images`.

        Raises:
            ClientDisconnect: if the client has left.
            LimitError: if too many images wait.
        """
        with self._waiting(user, size) as waiting:
            work = asyncio.create_task(self._run(waiting, call))
            leaving = asyncio.create_task(_until_left(request))
            try:
                await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientDisconnect
                return work.result()
            finally:
                work.cancel()
                leaving.cancel()
                await asyncio.gather(work, leaving, return_exceptions=True)

    async def _run(self, user: _User, call: Callable[[Callable[[], None]], Result]) -> Result:
        ended = threading.Event()

        def check() -> None:
            if ended.is_set():
                raise CancelledError

        async with user.turn:
            try:
                return await asyncio.wrap_future(self._thread.submit(call, check))
            finally:
                ended.set()

    @contextmanager
    def _waiting(self, user: str, size: int) -> Iterator[_User]:
        waiting = self._users.setdefault(user, _User())
        everyone = [entry.sizes for entry in self._users.values()]
        try:
            if (
                len(waiting.sizes) >= _MOST
                or sum(map(len, everyone)) >= _MOST_ALL
                or sum(waiting.sizes) + size > _MOST_BYTES
                or sum(map(sum, everyone)) + size > _MOST_BYTES_ALL
            ):
                raise LimitError("server.uploads_busy")
            waiting.sizes.append(size)
            try:
                yield waiting
            finally:
                waiting.sizes.remove(size)
        finally:
            if not waiting.sizes:
                self._users.pop(user, None)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
