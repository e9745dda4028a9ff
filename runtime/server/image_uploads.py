"""Uploads of images and videos: routes for programs and pages, and the one that gradio_client's `handle_file` uses.

An upload is answered with the name of its copy, "sha256:DIGEST/NAME", which requests take as an image or a video.
Gradio's own upload route and folder are not used, and no route sends an image: only jobs read the copies.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.core.cancel import never
from runtime.core.errors import LimitError, TandemError
from runtime.core.images import ImageUse, VideoUse
from runtime.server.gradio_requests import IMAGES, UPLOAD, VIDEOS, RefusedError
from runtime.server.image_queue import ImageQueue

Kept = TypeVar("Kept")

_PRIVATE = {"Cache-Control": "private, no-store"}
_MOST_NAME = 200
# Of an image that was sent without a name.
NAMELESS = "image"


class Keep(Protocol):
    """Checks and keeps an image: given its file's content, its name, and the visitor's name or "" for the owner."""

    def __call__(self, data: bytes, name: str, visitor: str, check: Callable[[], None] = never) -> ImageUse:
        """Return the image; `check` is called while it is decoded."""


class KeepVideo(Protocol):
    """Checks and keeps a video of the owner: given its file's content and its name."""

    def __call__(self, data: bytes, name: str, check: Callable[[], None] = never) -> VideoUse:
        """Return the video; `check` is called while it is read."""


def routes(keep: Keep, redact: Callable[[str], str] = str, keep_video: KeepVideo | None = None) -> list[BaseRoute]:
    """Return the routes of a page. The middleware has checked the login and the size.

    Args:
        redact: removes from a message what a visitor should not read.
        keep_video: `None` for a page that takes no videos.
    """

    queue = ImageQueue()

    async def run(request: Request, size: int, work: Callable[[Callable[[], None]], Kept]) -> Kept:
        visitor = request.user.display_name
        try:
            return await queue.run(request, visitor, size, work)
        except ClientDisconnect as error:
            raise RefusedError("server.request_incomplete", 400) from error
        except TandemError as error:
            status = 429 if isinstance(error, LimitError) else 422
            raise RefusedError(error.fact, status, text=redact(f"{error.what} {error.remedy}".strip())) from error

    async def keep_upload(request: Request, data: bytes, name: str) -> ImageUse:
        visitor = request.user.display_name
        return await run(request, len(data), lambda check: keep(data, plain_name(name), visitor, check))

    async def video(request: Request) -> Response:
        """Keep the video that is the request's body."""
        assert keep_video is not None
        data, name = await request.body(), plain_name(unquote(request.path_params["name"]))
        use = await run(request, len(data), partial(keep_video, data, name))
        values = {"video": use.reference, "width": use.width, "height": use.height, "seconds": use.seconds}
        return JSONResponse(values, headers=_PRIVATE)

    async def image(request: Request) -> Response:
        """Keep the image that is the request's body."""
        use = await keep_upload(request, await request.body(), unquote(request.path_params["name"]))
        values: dict[str, Any] = {"image": use.reference, "width": use.width, "height": use.height}
        return JSONResponse(values, headers=_PRIVATE)

    async def upload(request: Request) -> Response:
        """Keep the image of a form, as gradio_client sends it."""
        try:
            async with request.form(max_files=1, max_fields=0) as form:
                file = form.get("files")
                if not isinstance(file, UploadFile):
                    raise RefusedError("server.form_not_one_file")
                use = await keep_upload(request, await file.read(), file.filename or NAMELESS)
        except (HTTPException, ValueError, AssertionError) as error:  # of the form's syntax, or with more parts
            if isinstance(error, RefusedError):
                raise
            raise RefusedError("server.form_not_one_file") from error
        return JSONResponse([use.reference], headers=_PRIVATE)

    return [
        Route(f"{IMAGES}{{name}}", image, methods=["POST"]),
        Route(UPLOAD, upload, methods=["POST"]),
        *([] if keep_video is None else [Route(f"{VIDEOS}{{name}}", video, methods=["POST"])]),
    ]


def plain_name(name: str) -> str:
    """Return the name of a file as messages can show it: without folders, and without control characters."""
    last = name.replace("\\", "/").rpartition("/")[2].strip()[-_MOST_NAME:]
    return last if last and last.isprintable() and last not in {".", ".."} else NAMELESS
