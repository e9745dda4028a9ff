"""What the tabs Queue and History show: from the job store to the parts of the page."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError, StoreError, TandemError
from runtime.core.events import OutOfMemory
from runtime.core.facts import Fact, render
from runtime.core.units import byte_size
from runtime.pipeline.checkpoint_files import POSTER
from runtime.queue import disk_usage
from runtime.queue.records import RESUMABLE, JobRecord, State
from runtime.queue.service import Job, JobQueue
from runtime.server.job_files import find_output
from runtime.ui import acceleration, compare, formatting, history_view, queue_view, result_view
from runtime.ui.jobs_request import SHOWN, Asked, is_id, unknown
from runtime.ui.resume_status import Standing, standing
from runtime.video.similarity import Similarity, similarity

_PAGE = 24
_MOST_ENDED = 10
_ENDED_STATES: tuple[State, ...] = ("done", *RESUMABLE)
_UNDONE: tuple[State, ...] = ("interrupted", "failed")

logger = logging.getLogger(__name__)


class Shown:
    """The jobs that somebody may see.

    Args:
        outputs_dir: where the videos are that can be played.
        owner: whose jobs are shown; `None` is the person whose Tandem this is, who sees the whole queue too.
    """

    def __init__(self, worker: JobQueue, outputs_dir: Path, owner: str | None = None) -> None:
        self._worker = worker
        self._store = worker.store
        self._outputs_dir = outputs_dir
        self._owner = owner

    def parts(self, asked: Asked) -> dict[str, str]:
        """Return the parts of the open tab, by name."""
        draw: Mapping[str, Callable[[], str]] = {
            "line": self._line,
            "ended": self._ended,
            "gallery": lambda: self._gallery(asked),
            "room": self._room,
            "detail": lambda: self._detail(asked.open),
            "compare": lambda: self._compare(asked.pair, compare.comparison),
            "settings": lambda: self._compare(asked.pair, compare.table),
        }
        drawn = {}
        for name in SHOWN[asked.tab]:
            try:
                drawn[name] = draw[name]()
            except StoreError as error:
                drawn[name] = queue_view.line([], told(error)) if name == "line" else ""
            except Exception:  # a defect: the rest of the page is shown all the same
                logger.exception("The part %s of the page could not be drawn", name)
                drawn[name] = '<p class="trouble">This cannot be shown. The log has the details.</p>'
        return drawn

    def queue(self) -> list[JobRecord]:
        """Return what runs and waits, in order."""
        return [job for job in self._store.queue() if self._owner is None or job.owner == self._owner]

    def mine(self, job_id: str) -> JobRecord:
        """Return a job that may be touched: one's own; on one's own machine any that waits or runs.

        Raises:
            TandemError: for any other.
        """
        if not is_id(job_id):
            raise unknown()
        job = self._store.get(job_id)
        if job.owner != self._owner and not (self._owner is None and job.open):
            raise unknown()
        return job

    def _line(self) -> str:
        return queue_view.line([self._row(job) for job in self.queue()], _advice(self._store.problem))

    def _row(self, record: JobRecord) -> queue_view.Row:
        stopping = record.asked == "cancel"
        state = "stopping" if stopping else "pausing" if record.asked == "pause" else "running"
        told, percent, waits = "", None, False
        if record.state == "queued":
            state = "paused" if record.held else "waiting"
        live = self._worker.job(record.id) if record.kind == "video" else None
        if live is not None and record.state == "running":
            progress = live.progress.at(time.monotonic())
            percent = round(100 * progress.fraction)
            waits = progress.waits is not None and state == "running"
            steps = f"step {progress.step} of {progress.steps}" if progress.steps else ""
            told = ", ".join(filter(None, (progress.title, steps, formatting.time_left(progress.seconds_left))))
            # What went wrong on the way, and what it cost.
            full = [event.fact for event in live.events if isinstance(event, OutOfMemory)]
            told = f"{told}. {render(full[-1]).what}" if full else told
        elif live is not None:
            told = _stopped(live) if record.begun else ""
        else:
            task = next((one for one in self._worker.tasks() if one.id == record.id), None)
            told = "" if task is None else task.line
            percent = None if task is None or task.share is None else round(100 * task.share)
        return queue_view.Row(
            id=record.id,
            title=record.prompt or record.title,
            state=state,
            video=record.kind == "video",
            line=told,
            percent=percent,
            visitor=record.owner is not None and self._owner is None,
            waits=waits,
        )

    def _ended(self) -> str:
        found = self._store.list(states=_UNDONE, owner=self._owner, limit=_MOST_ENDED)
        jobs = []
        for job in found:
            stands = self.standing(job)
            jobs.append(
                queue_view.Ended(
                    id=job.id,
                    title=job.prompt,
                    state=job.state,
                    what=_wrong(job),
                    kept=stands.kept,
                    memory=stands.memory,
                    way=stands.way,
                )
            )
        return queue_view.ended(jobs)

    def standing(self, job: JobRecord) -> Standing:
        """Return how a job stands that ended without a video."""
        live = self._worker.job(job.id)
        return standing((), None) if live is None else standing(live.events, live.kept)

    def _gallery(self, asked: Asked) -> str:
        found = self._store.list(
            states=_states(asked.state),
            search=asked.search,
            owner=self._owner,
            deleted=asked.state == history_view.DELETED,
            limit=_PAGE + 1,
            offset=_PAGE * asked.page,
        )
        cards = [self._card(job) for job in found[:_PAGE]]
        searched = bool(asked.search.strip()) or asked.state != history_view.ALL
        return history_view.gallery(cards, asked.page, len(found) > _PAGE, searched)

    def _card(self, job: JobRecord) -> history_view.Card:
        folder = self._store.folder(job.id)
        size = disk_usage.video_bytes(job)
        return history_view.Card(
            id=job.id,
            prompt=job.prompt,
            state=job.state,
            when=history_view.when(job.ended or job.created),
            poster=f"tandem/poster/{job.id}.webp" if folder is not None and (folder / POSTER).is_file() else "",
            size=byte_size(size) if size else "",
            deleted=job.deleted is not None,
        )

    def _room(self) -> str:
        old = {}
        for days in history_view.AGES:
            jobs = disk_usage.older_than(self._store, self._owner, days)
            if jobs:
                old[days] = (len(jobs), sum(disk_usage.video_bytes(job) for job in jobs))
        return history_view.room(disk_usage.measure(self._store, self._owner), old)

    def _detail(self, job_id: str) -> str:
        try:
            job = self.mine(job_id) if job_id else None
        except TandemError:  # it is gone
            job = None
        return history_view.detail(None if job is None else self._told_of(job))

    def _told_of(self, job: JobRecord) -> history_view.Detail:
        saved, live = job.saved, self._worker.job(job.id)
        told: list[tuple[str, str]] = []
        if saved is not None and job.plan is not None and live is not None:
            told = result_view.rows(saved, job.plan, live.model_title)
        size, kept = disk_usage.video_bytes(job), disk_usage.checkpoint_bytes(self._store, job.id)
        told += [("Made", history_view.when(job.ended or job.created)), ("Job", job.id)]
        told += [("Video on disk", byte_size(size))] if size else []
        told += [("Checkpoints", byte_size(kept))] if kept else []
        told += [("Second half of", job.parent)] if job.parent else []
        reasons = () if saved is None else dict.fromkeys(part["reason"] for part in saved.plan["components"].values())
        plays = self._plays(job)
        missing = "Its file is not there any more." if not size else f"It lies elsewhere: {job.output}"
        stands = self.standing(job) if job.resumable else None
        return history_view.Detail(
            id=job.id,
            prompt=job.prompt,
            state=job.state,
            request=job.request if saved is None else saved.request,
            told=told,
            video=result_view.file_url(job.output) if plays else "",
            name=job.output.name,
            warnings=() if saved is None else [render(fact).what for fact in saved.warnings],
            why=" ".join(reasons),
            what=missing if job.state == "done" and not plays else _wrong(job),
            kept="" if stands is None else f"{stands.memory} {stands.kept}".strip(),
            resumable=job.resumable,
            deleted=job.deleted is not None,
            again=self.again(job) if kept and job.state == "done" and job.deleted is None else {},
        )

    def again(self, job: JobRecord) -> dict[str, Any]:
        """Return the settings of a finished video's second half; none where it has none of its own."""
        folder, made = self._store.folder(job.id), job.plan
        if folder is None or made is None or made.guidance_scale_2 is None:
            return {}
        if not (folder / "boundary.safetensors").is_file():
            return {}
        backend = made.asked.backend("transformer_2")
        return {"guidance_scale_2": made.guidance_scale_2, "fps": made.fps, "backend": backend}

    def _clips(self, pair: Sequence[str]) -> tuple[list[JobRecord], list[compare.Clip]]:
        """Return two finished videos to compare.

        Raises:
            InvalidRequestError: if one is not there.
        """
        jobs = [self.mine(one) for one in pair]
        clips = []
        for job in jobs:
            saved = job.saved
            if saved is None or not self._plays(job) or job.plan is None:
                raise _not_there()
            ran = "; ".join(value for name, value in result_view.rows(saved, job.plan, "") if name == "Ran on")
            clips.append(
                compare.Clip(job.id, result_view.file_url(job.output), saved.request, saved.timings["total"], ran)
            )
        return jobs, clips

    def _compare(self, pair: Sequence[str], draw: Callable[[compare.Clip, compare.Clip], str]) -> str:
        try:
            _, clips = self._clips(pair)
        except TandemError:  # one was deleted meanwhile
            return ""
        return draw(*clips) if clips else ""

    def numbers(self, pair: Sequence[str]) -> str:
        """Measure how alike two videos are, and say it.

        Raises:
            TandemError: if that cannot be.
        """
        jobs, clips = self._clips(pair)
        if not clips:
            return ""
        found = None
        if clips[0].size == clips[1].size:
            try:
                found = _measured(*((job.output, job.output.stat().st_mtime_ns) for job in jobs))
            except OSError as error:  # deleted since
                raise _not_there() from error
        one, other = clips
        return compare.numbers(one, other, found)

    def _plays(self, job: JobRecord) -> bool:
        """Whether a job's video is there, and is served."""
        return job.state == "done" and find_output(str(job.output), self._outputs_dir) is not None


@lru_cache(maxsize=64)
def _measured(one: tuple[Path, int], other: tuple[Path, int]) -> Similarity:
    """Compare two files as they were at those times."""
    return similarity(one[0], other[0])


def _advice(problem: Fact | None) -> str:
    return "" if problem is None else " ".join(render(problem))


def _not_there() -> InvalidRequestError:
    return InvalidRequestError("pair", "One of the two videos is not there.", "Pick another one.")


def _stopped(job: Job) -> str:
    progress = job.progress
    return f"stopped after step {progress.step} of {progress.steps}" if progress.step else ""


def _states(wanted: str) -> tuple[State, ...]:
    return tuple(state for state in _ENDED_STATES if wanted in {state, history_view.ALL, history_view.DELETED})


def _wrong(job: JobRecord) -> str:
    if job.state == "interrupted":
        return "Tandem ended while it was made."
    return "" if job.failure is None else history_view.words(f"{job.failure.what} {job.failure.remedy}".strip())


def told(error: TandemError) -> str:
    """Return an error in a line, as the page says it."""
    return acceleration.in_form_words(f"{error.what[:1].upper()}{error.what[1:]} {error.remedy}")
