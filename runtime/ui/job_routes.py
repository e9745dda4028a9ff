"""What is fetched beside gradio, read only: how the jobs stand, posters, copies without metadata, reports.

Nothing here takes a path: a job's id names what is sent, and only its owner's.
"""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from runtime.core.errors import StoreError, TandemError
from runtime.core.settings import Settings
from runtime.pipeline.checkpoint_files import POSTER
from runtime.queue.records import JobRecord
from runtime.queue.service import JobQueue
from runtime.queue.support_report import report
from runtime.ui.files import find_output
from runtime.video.preview import still
from runtime.video.strip_metadata import bare_copy

_ID = re.compile(r"[0-9a-f]{8}")
# What a page is told the end of.
_LAST = 30
_PRIVATE = {"Cache-Control": "private, no-store"}
# A finished job's poster never changes.
_KEPT = {"Cache-Control": "private, max-age=86400"}


def routes(worker: JobQueue, settings: Settings, owner: Callable[[Request], str | None]) -> list[BaseRoute]:
    """Return the routes, for gradio's server to begin with.

    Args:
        owner: returns whose jobs a request may see; `None` is the person whose Tandem this is.
    """
    parcels = _Parcels(worker, settings, owner)
    return [
        Route("/tandem/now", parcels.now),
        Route("/tandem/poster/{name}.webp", parcels.poster),
        Route("/tandem/copy/{name}.mp4", parcels.copy),
        Route("/tandem/report/{name}.json", parcels.report),
        Route("/tandem/report/whole/{name}.json", parcels.whole_report),
    ]


class _Parcels:
    def __init__(self, worker: JobQueue, settings: Settings, owner: Callable[[Request], str | None]) -> None:
        self._worker = worker
        self._store = worker.store
        self._settings = settings
        self._owner = owner

    async def now(self, request: Request) -> Response:
        """Answer with how the owner's last jobs stand, how many wait, and how far the one is that runs."""
        if not _logged_in(request):
            return _refused(401)
        try:
            told = await asyncio.to_thread(self._now, self._owner(request))
        except StoreError as error:
            return PlainTextResponse(error.what, 503, _PRIVATE)
        return JSONResponse(told, headers=_PRIVATE)

    def _now(self, owner: str | None) -> dict[str, Any]:
        queue = [job for job in self._store.queue() if owner is None or job.owner == owner]
        own = [job for job in queue if job.owner == owner and job.kind == "video"]
        running = next((job for job in own if job.state == "running"), None)
        live = None if running is None else self._worker.job(running.id)
        jobs = {job.id: job.state for job in (*self._store.list(owner=owner, limit=_LAST), *queue)}
        percent = None if live is None else round(100 * live.progress.fraction)
        return {"queue": len(queue), "percent": percent, "jobs": jobs}

    async def poster(self, request: Request) -> Response:
        """Answer with a still of a finished video."""
        job = await self._asked(request)
        folder = None if job is None else self._store.folder(job.id)
        if folder is None:
            return _refused(404)
        try:
            picture = await asyncio.to_thread(lambda: still((folder / POSTER).read_bytes()))
        except (OSError, ValueError):
            return _refused(404)
        return Response(picture, media_type="image/webp", headers=_KEPT)

    async def copy(self, request: Request) -> Response:
        """Answer with a video's copy that says nothing of how it was made; it is removed once it is sent."""
        job = await self._asked(request)
        video = None if job is None else find_output(str(job.output), self._settings.outputs_dir)
        if job is None or video is None:
            return _refused(404)
        kept = ExitStack()
        try:
            copy = await asyncio.to_thread(kept.enter_context, bare_copy(video))
        except TandemError as error:
            return PlainTextResponse(f"{error.what} {error.remedy}", 503, _PRIVATE)
        return _Lent(copy, kept, f"tandem-{job.id}.mp4")

    async def report(self, request: Request) -> Response:
        """Answer with all that is known of a job but prompts and paths."""
        return await self._report(request, with_prompt=False)

    async def whole_report(self, request: Request) -> Response:
        """Answer with all that is known of a job."""
        return await self._report(request, with_prompt=True)

    async def _report(self, request: Request, *, with_prompt: bool) -> Response:
        job = await self._asked(request)
        if job is None:
            return _refused(404)
        told = await asyncio.to_thread(
            report,
            self._store,
            job,
            self._worker.machine(),
            self._settings.log_file,
            self._settings.cache_dir,
            with_prompt=with_prompt,
        )
        return Response(json.dumps(told, indent=2, default=str), media_type="application/json", headers=_PRIVATE)

    async def _asked(self, request: Request) -> JobRecord | None:
        """Return the job that a request names, if it may be told of."""
        name = str(request.path_params["name"])
        if not _logged_in(request) or not _ID.fullmatch(name):
            return None
        try:
            job = await asyncio.to_thread(self._store.get, name)
        except StoreError:
            return None
        return job if job.kind == "video" and job.owner == self._owner(request) else None


class _Lent(FileResponse):
    """Sends a file, and lets go of it however that ends."""

    def __init__(self, path: Path, kept: ExitStack, name: str) -> None:
        super().__init__(path, media_type="video/mp4", filename=name, headers=_PRIVATE)
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._kept.close()


def _logged_in(request: Request) -> bool:
    """Whether the log-in that gradio asks for has been passed."""
    app = request.app
    if app.auth is None and app.auth_dependency is None:
        return True
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(request.cookies.get(name) in app.tokens for name in names)


def _refused(status: int) -> Response:
    return PlainTextResponse("Log in first." if status == 401 else "There is nothing of that name.", status, _PRIVATE)  # noqa: PLR2004 - HTTP
