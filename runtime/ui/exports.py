"""Exports of finished videos on both pages: the form with the formats, and a stream with the progress and the file.

ffmpeg runs on a thread, two at once in all, and ends when the client leaves: the answer is the only trace of an export.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError, MachineError, StoreError, TandemError
from runtime.core.facts import Fact, cut
from runtime.core.settings import Settings
from runtime.queue.job_queue import JobQueue
from runtime.server.gradio_requests import EXPORT, RefusedError, read_object
from runtime.server.job_files import find_output
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.jobs_panel import is_job_id
from runtime.video.export import MOST_CLIPS, ZIP, Clip, ExportPlan, check_export_target, default_target, export
from runtime.video.export_formats import FORMATS, Kind, find_format
from runtime.video.mp4 import video_scratch

# Returns the video of a job by the job's id if the user, "" for the owner, may have it.
FindVideo = Callable[[str, str], Path | None]

_KINDS: dict[Kind, str] = {"video": "Video", "animation": "Moving image", "still": "Still images"}
_MOST_AT_ONCE = 2
_LONGEST_NAME = 40
# How often a stream reports the progress, and notices that its client has left.
_REPORT_SECONDS = 0.25
_MOST_SECONDS = 1e9
_CHUNK_BYTES = 1 << 18
_PRIVATE = {"Cache-Control": "private, no-store"}


def routes(find: FindVideo, redact: Callable[[str], str] = str) -> list[BaseRoute]:
    """Return the routes of a page. The middleware has checked the login and the size.

    Args:
        redact: removes from a message what a visitor should not read.
    """
    exports = _Exports(find, redact)
    return [Route(f"{EXPORT}/{{ids}}", exports.form), Route(EXPORT, exports.export, methods=["POST"])]


def owners_video(worker: JobQueue, settings: Settings) -> FindVideo:
    """Return what finds videos of the owner."""

    def find(job_id: str, _user: str) -> Path | None:
        try:
            job = worker.store.get(job_id)
        except StoreError:
            return None
        is_own = job.kind == "video" and job.owner is None and job.state == "done"
        return find_output(str(job.output), settings.outputs_dir) if is_own else None

    return find


class _Exports:
    """The endpoints."""

    def __init__(self, find: FindVideo, redact: Callable[[str], str]) -> None:
        self._find, self._redact = find, redact
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "exports")
        # A form does not wait for exports.
        self._readers = ThreadPoolExecutor(_MOST_AT_ONCE, "export-forms")
        # Those who have an export that waits or runs.
        self._busy: set[str] = set()

    async def form(self, request: Request) -> Response:
        """Send the form for clips: the formats, each with about how large the file becomes."""
        ids, user = request.path_params["ids"].split("-"), request.user.display_name
        try:
            reading = self._readers.submit(lambda: _form(self._clips(ids, user), ids))
            html = await asyncio.wrap_future(reading)
        except TandemError as error:
            raise RefusedError(error.fact, text=self._redact(paragraph(error.fact))) from error
        return HTMLResponse(html, headers=_PRIVATE)

    async def export(self, request: Request) -> Response:
        """Stream an export: lines of JSON with the progress, one with the file's name and size, then the file."""
        call = read_object(await request.body())
        match call:
            case {"clips": [*ids], "format": str(kind), "start": start, "end": end, **rest} if (
                0 < len(ids) <= MOST_CLIPS and all(map(is_job_id, ids)) and _is_time(start) and _is_time(end)
                and type(lossless := rest.get("lossless_sound", False)) is bool
            ):  # fmt: skip
                lines = self._lines(ids, kind, start, end, request.user.display_name, lossless_sound=lossless)
                return StreamingResponse(lines, media_type="application/octet-stream", headers=_PRIVATE)
        raise RefusedError("server.panel_call_incomplete")

    def _clips(self, ids: Sequence[str], user: str) -> list[Clip]:
        clips = []
        for job_id in ids:
            path = self._find(job_id, user)
            try:
                changed = None if path is None else path.stat().st_mtime_ns
            except OSError:  # it was deleted meanwhile
                changed = None
            if path is None or changed is None:
                raise InvalidRequestError("clips", "export.clip_gone")
            clips.append(_clip(path, changed))
        return clips

    async def _lines(
        self,
        ids: Sequence[str],
        kind: str,
        start: float | None,
        end: float | None,
        user: str,
        *,
        lossless_sound: bool,
    ) -> AsyncIterator[bytes]:
        """Yield the stream of `export`."""
        if user in self._busy:
            yield _line(error=paragraph(Fact("export.busy")))
            return
        self._busy.add(user)
        cancel, folder, share = Cancel(), ExitStack(), 0.0

        def report(done: float) -> None:
            nonlocal share
            share = done

        def work() -> tuple[Path, str]:
            cancel.check()
            clips = self._clips(ids, user)
            if len(clips) == 1:
                clips = [clips[0].cut(start, end)]
            plan = ExportPlan.of(clips, find_format(kind), lossless_sound=lossless_sound)
            scratch = folder.enter_context(video_scratch(clips[0].info.path))
            target = default_target(plan, scratch)
            target = target if plan.format.suffix else target.with_name(f"{target.name}{ZIP}")
            check_export_target(plan, target)
            export(plan, target, report, cancel.check)
            return target, plan.format.media_type

        future = self._threads.submit(work)
        pending = asyncio.wrap_future(future)
        try:
            while not pending.done():
                yield _line(share=share)
                await asyncio.wait([pending], timeout=_REPORT_SECONDS)
            try:
                path, media_type = pending.result()
            except TandemError as error:
                yield _line(error=self._redact(paragraph(error.fact)))
                return
            except CancelledError:
                return
            yield _line(name=path.name, type=media_type, size=path.stat().st_size)
            with path.open("rb") as file:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    yield chunk
        finally:
            cancel.request()
            pending.cancel()
            # At once, or when the thread has noticed.
            future.add_done_callback(lambda _: folder.close())
            self._busy.discard(user)


@lru_cache(maxsize=2 * MOST_CLIPS)
def _clip(path: Path, _changed: int) -> Clip:
    """Return a clip: reading one takes a tenth of a second, and an export needs it again."""
    return Clip.read(path)


def _is_time(value: Any) -> bool:
    """Return whether a value can be a time in seconds, or `None`."""
    return value is None or (type(value) in {int, float} and bool(abs(value) < _MOST_SECONDS))


def _line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _form(clips: Sequence[Clip], ids: Sequence[str]) -> str:
    groups: dict[str, list[dict[str, Any]]] = {title: [] for title in _KINDS.values()}
    for entry in FORMATS.values():
        try:
            plan = ExportPlan.of(clips, entry)
        except MachineError:  # this ffmpeg lacks the encoder
            continue
        notes = [page_text(note).what for note in plan.notes if note.code != "export.copied"]
        plays = [] if entry.plays else [page_text(Fact("export.not_in_browsers")).what]
        about = " ".join([entry.about, *notes, *plays])
        values = {
            "name": entry.name,
            "title": entry.title,
            "about": about,
            "bytes": plan.bytes,
            "seconds": plan.seconds,
            # Whether that is a choice: other sound is encoded without loss anyway, or copied.
            "lossless": bool(plan.sound) and bool(entry.lossless) and plan.sound != entry.lossless,
        }
        # A part of the video does not make one frame smaller.
        groups[_KINDS[entry.kind]].append({**values, "whole": plan.frames == 1})
    first = clips[0]
    names = [cut(str(clip.request.get("prompt") or clip.info.path.name), _LONGEST_NAME) for clip in clips]
    seconds = sum(clip.count for clip in clips) / first.info.rate
    return render(
        "export.html",
        clips=clips,
        names=names,
        ids=ids,
        groups=groups,
        seconds=round(float(seconds), 3),
        fps=float(first.info.rate),
    )
