"""Routes that send files and states of jobs: videos, posters, copies without metadata, reports.

Only videos in the outputs folder and files that belong to a job leave this machine. Gradio's own file route would also
serve its cache folder, and repeats request headers, cookies included, in its answers to range requests; the route here
takes its place.
"""

import asyncio
import hashlib
import json
import re
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from runtime.core.errors import StoreError, TandemError
from runtime.core.settings import Settings
from runtime.pipeline.files import POSTER, PREVIEW, clip_of
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import VIDEOS, JobRecord
from runtime.queue.support_report import report
from runtime.server.gradio_requests import FILE, OWN
from runtime.server.image_queue import ImageQueue
from runtime.video.mp4 import copy_without_metadata
from runtime.video.preview import still

# Media types by suffix; files with other suffixes are not served.
_TYPES = {".mp4": "video/mp4"}
# Python reads numbers of at most 4,300 digits.
_RANGE = re.compile(rb"(?i:bytes)=([0-9]{0,1000})-([0-9]{0,1000})")
_ID = re.compile(r"[0-9a-f]{8}")
# The page reports the end of jobs within this time, and follows so many that run, wait or ended.
_RECENT_SECONDS = 60.0
_RECENT_JOBS = 30
# The longest wait for a change; proxies close connections that are silent for a minute.
_WAIT_SECONDS = 15.0
_PRIVATE = {"Cache-Control": "private, no-store"}
# Another picture of a job has another address.
_CACHED = {"Cache-Control": "private, max-age=86400"}


def find_output(requested: str, outputs_dir: Path) -> Path | None:
    """Return the video with that absolute path if it is in the outputs folder, symlinks resolved, else `None`."""
    if "\0" in requested or ".." in re.split(r"[/\\]", requested):
        return None
    try:
        path = Path(requested)
        if not path.is_absolute() or path.suffix.lower() not in _TYPES:
            return None
        real = path.resolve(strict=True)
        inside = real.is_relative_to(outputs_dir.resolve(strict=True)) and real.suffix.lower() in _TYPES
        return real if inside and real.is_file() else None
    except (OSError, RuntimeError, ValueError):  # it does not exist, links form a loop, or the name is invalid
        return None


class SentVideo(FileResponse):
    """Sends a video, which is in `sending` meanwhile; see `JobQueue.sending`."""

    def __init__(self, path: Path, sending: Counter[Path], **values: Any) -> None:
        super().__init__(path, media_type=_TYPES[path.suffix.lower()], **values)
        self._sending, self._video = sending, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        self._sending[self._video] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sending[self._video] -= 1
            if not self._sending[self._video]:
                del self._sending[self._video]


def video_response(path: Path | None, sending: Counter[Path], *, cached: bool) -> Response:
    """Return a response with a file that `find_output` found; status 404 without one.

    Args:
        sending: see `SentVideo`.
        cached: whether caches of the user's own machine may keep it.
    """
    if path is None:
        return PlainTextResponse("There is no such video.", 404, _PRIVATE)
    headers = {"Cache-Control": "private"} if cached else _PRIVATE
    return SentVideo(path, sending, filename=path.name, content_disposition_type="inline", headers=headers)


def is_single_range(value: bytes) -> bool:
    """Return whether a Range header asks for one range of bytes; others are ignored and the whole file is sent.

    Among the others are ranges that end before they start, which RFC 9110 (14.1.1) calls invalid.
    """
    match = _RANGE.fullmatch(value.strip())
    if match is None or not (match[1] or match[2]):
        return False
    return not (match[1] and match[2]) or int(match[1]) <= int(match[2])


def etag_of(content: bytes) -> str:
    """Return the ETag of content."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def routes(worker: JobQueue, settings: Settings) -> list[BaseRoute]:
    """Return the routes of the owner's page. The middleware has checked the login."""
    files = _JobFiles(worker, settings)
    return [
        Route(f"{FILE}{{path:path}}", files.video),
        Route(f"{OWN}now", files.now),
        Route(f"{OWN}now/{{version:int}}", files.now),
        Route(f"{OWN}poster/{{name}}.webp", files.poster),
        Route(f"{OWN}clip/{{name}}/{{count:int}}.mp4", files.clip),
        Route(f"{OWN}before/{{name}}.mp4", files.before),
        Route(f"{OWN}copy/{{name}}.mp4", files.copy),
        Route(f"{OWN}report/{{name}}.json", files.report),
        Route(f"{OWN}report/whole/{{name}}.json", files.report_with_prompt),
    ]


class _JobFiles:
    """The endpoints. They serve the owner's jobs, not those of visitors."""

    def __init__(self, worker: JobQueue, settings: Settings) -> None:
        self._worker = worker
        self._store = worker.store
        self._settings = settings
        self._before = ImageQueue()

    async def video(self, request: Request) -> Response:
        """Send a video by its path, as Gradio's clients ask for it."""
        path = str(request.path_params["path"])
        video = await asyncio.to_thread(find_output, path, self._settings.outputs_dir)
        return video_response(video, self._worker.sending, cached=True)

    async def now(self, request: Request) -> Response:
        """Send the states of recent jobs, the length of the queue and the progress of the running job.

        A request with the `version` of the last answer is answered when the store has changed, or after some seconds:
        a page notices changes and a lost connection at once, also through proxies that buffer streams.
        """
        changes = self._worker.changes
        if "version" in request.path_params:
            await changes.after(request.path_params["version"], _WAIT_SECONDS)
        answer: dict[str, Any] = {"app": self._worker.instance, "version": changes.count}
        with suppress(StoreError):  # the panels report it
            answer |= await asyncio.to_thread(self._now)
        return JSONResponse(answer, headers=_PRIVATE)

    def _now(self) -> dict[str, Any]:
        running = self._store.order.jobs(states=["running"], kinds=VIDEOS, owner=None, limit=1)
        job = self._worker.job(running[0].id) if running else None
        # Pages ask every few seconds: what ends now has run, or was next. It is read first, so that what ends meanwhile
        # is not missing.
        states = self._store.order.ids(limit=_RECENT_JOBS)
        ended = self._store.ended_since(_RECENT_SECONDS, None, _RECENT_JOBS)
        states |= {job_id: end.state for job_id, end in ended.items()}
        percent = None if job is None else round(100 * job.share)
        return {
            "queue": self._store.order.line().jobs,
            "percent": percent,
            "jobs": states,
            # Their batches go on.
            "unfinished": [job_id for job_id, end in ended.items() if not end.ends_batch],
        }

    async def poster(self, request: Request) -> Response:
        """Send a still image of a finished video, or of another job's last preview.

        Addresses differ for each preview (`JobsPanel.picture`), so all can be cached.
        """
        job = await self._job(request)
        folder = None if job is None else self._store.folder(job.id)
        for path in () if folder is None else (folder / POSTER, folder / PREVIEW):
            with suppress(OSError, ValueError):
                picture = await asyncio.to_thread(_still, path)
                return Response(picture, media_type="image/webp", headers={**_CACHED, "ETag": etag_of(picture)})
        return _not_found()

    async def clip(self, request: Request) -> Response:
        """Send the clip of a job's finished sections or frames, by their number; another number has another address."""
        job = await self._job(request)
        folder = None if job is None else self._store.folder(job.id)
        clip = await asyncio.to_thread(clip_of, folder, request.path_params["count"])
        return video_response(clip, self._worker.sending, cached=False)

    async def before(self, request: Request) -> Response:
        """Send a clip of what a finished video was made from, see `before_clips`; it is made for the first request."""
        from runtime.server.before_clips import make_before  # imports numpy, which `serve` does not need

        job = await self._job(request)
        folder = None if job is None else self._store.folder(job.id)
        if job is None or job.state != "done" or job.plan is None or folder is None:
            return _not_found()
        try:
            make = partial(make_before, job.plan, folder, cache_dir=self._settings.cache_dir)
            clip = await self._before.run(request, "", 0, make)
        except TandemError as error:
            return PlainTextResponse(f"{error.what} {error.remedy}", 404, _PRIVATE)
        except ClientDisconnect:
            return _not_found()
        return video_response(clip, self._worker.sending, cached=False)

    async def copy(self, request: Request) -> Response:
        """Send a copy of a video without metadata; the copy is removed once it is sent."""
        job = await self._job(request)
        video = None if job is None else find_output(str(job.output), self._settings.outputs_dir)
        if job is None or video is None:
            return _not_found()
        stack = ExitStack()
        try:
            copy = await asyncio.to_thread(stack.enter_context, copy_without_metadata(video))
        except TandemError as error:
            return PlainTextResponse(f"{error.what} {error.remedy}", 503, _PRIVATE)
        return _TemporaryFile(copy, stack, f"tandem-{job.id}.mp4")

    async def report(self, request: Request) -> Response:
        """Send job diagnostics without prompts and paths."""
        return await self._report(request, with_prompt=False)

    async def report_with_prompt(self, request: Request) -> Response:
        """Send complete job diagnostics."""
        return await self._report(request, with_prompt=True)

    async def _report(self, request: Request, *, with_prompt: bool) -> Response:
        job = await self._job(request)
        if job is None:
            return _not_found()
        diagnostics = await asyncio.to_thread(
            report,
            self._store,
            job,
            self._worker.machine(),
            self._settings.log_file,
            self._settings.cache_dir,
            with_prompt=with_prompt,
        )
        return Response(json.dumps(diagnostics, indent=2, default=str), media_type="application/json", headers=_PRIVATE)

    async def _job(self, request: Request) -> JobRecord | None:
        """Return the job that a request names, if it is a video of the owner."""
        name = str(request.path_params["name"])
        if not _ID.fullmatch(name):
            return None
        try:
            job = await asyncio.to_thread(self._store.get, name)
        except StoreError:
            return None
        return job if job.kind == "video" and job.owner is None else None


class _TemporaryFile(FileResponse):
    """Sends a file, then closes the stack that holds it."""

    def __init__(self, path: Path, stack: ExitStack, name: str) -> None:
        super().__init__(path, media_type="video/mp4", filename=name, headers=_PRIVATE)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stack.close()


def _still(path: Path) -> bytes:
    """Return the middle frame of an animated WebP.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    return still(path.read_bytes())


def _not_found() -> Response:
    return PlainTextResponse("Not found.", 404, _PRIVATE)
