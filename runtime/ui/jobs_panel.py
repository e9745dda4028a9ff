"""Base of the panels Queue and History: access to jobs, and the actions that both panels have."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.core.request import AUTO, GenerationRequest
from runtime.core.units import counted
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import POSTER, PREVIEW
from runtime.queue import storage
from runtime.queue.job_queue import JobQueue, combined
from runtime.queue.records import JobRecord, State
from runtime.queue.store import JobStore
from runtime.server.job_files import find_output
from runtime.ui import theme
from runtime.ui.formatting import paragraph, shown
from runtime.ui.job_view import ResumeStatus, resume_status
from runtime.ui.panels import Call, Reply, unknown_action

# The button Variations adds this many videos with other seeds.
VARIATIONS = 4
_ID_LENGTH = 8
_TITLE_LENGTH = 60
# Jobs in which the last clip of a model is searched.
_SEARCHED = 100
_DONE: tuple[State, ...] = ("done",)
# Of a job whose size is not known.
_USUAL_SIZE = (192, 112)


class JobsPanel:
    """Base of both panels.

    Args:
        outputs_dir: folder of the videos, which can be played and are removed with their jobs.
        owner: whose jobs the panel shows; `None` is the owner of this Tandem, who controls the whole queue.
    """

    def __init__(
        self, worker: JobQueue, models: dict[str, ModelSpec], outputs_dir: Path, owner: str | None = None
    ) -> None:
        self._worker = worker
        self._store = worker.store
        self._models = models
        self._outputs_dir = outputs_dir
        self._owner = owner

    def act(self, call: Call) -> Reply:
        """Carry out an action."""
        actions, job_actions = self._actions(), self._job_actions()
        if call.action in actions:
            return actions[call.action](call)
        if call.action in job_actions:
            return job_actions[call.action](self._job(call.target), call)
        raise unknown_action()

    def _actions(self) -> Mapping[str, Callable[[Call], Reply]]:
        """Return the actions by name."""
        return {
            "refresh": lambda _: {},
            "delete": self._delete,
            "restore": self._restore,
            "star": lambda call: self._star(call, True),
            "unstar": lambda call: self._star(call, False),
        }

    def _job_actions(self) -> Mapping[str, Callable[[JobRecord, Call], Reply]]:
        """Return the actions on one job by name."""
        return {
            "resume": self._resume,
            "resume-alternative": self._resume_alternative,
            "again": lambda job, _: self._add_again(job, 1),
            "variations": lambda job, _: self._add_again(job, VARIATIONS),
        }

    def _job(self, job_id: object) -> JobRecord:
        """Return a job that the panel's user may change: their own; for the owner also any queued or running job.

        Raises:
            TandemError: for any other.
        """
        if not is_job_id(job_id):
            raise unknown_action()
        job = self._store.get(str(job_id))
        if job.owner != self._owner and not (self._owner is None and job.open):
            raise unknown_action()
        return job

    def _jobs(self, ids: str) -> list[JobRecord]:
        jobs = [self._job(job_id) for job_id in ids.split()]
        if not jobs:
            raise unknown_action()
        return jobs

    def _delete(self, call: Call) -> Reply:
        jobs = self._jobs(call.target)
        for job in jobs:
            self._store.delete(job.id)
        return {"message": f"Deleted: {named(jobs)}.", "undo": [job.id for job in jobs]}

    def _restore(self, call: Call) -> Reply:
        jobs = self._jobs(call.target)
        for job in jobs:
            self._store.undelete(job.id)
        return {"message": f"Restored: {named(jobs)}."}

    def _star(self, call: Call, starred: bool) -> Reply:
        jobs = self._jobs(call.target)
        self._store.star([job.id for job in jobs], starred)
        return {"announce": f"{'Starred' if starred else 'Star removed'}: {named(jobs)}."}

    def _purge(self, jobs: Sequence[JobRecord]) -> None:
        for job in self._store.purge(0, [job.id for job in jobs]):
            storage.remove_files(self._store, job, self._outputs_dir)

    def _resume(self, job: JobRecord, _call: Call) -> Reply:
        self._worker.resume(job.id)
        return {"message": f"Resumed: {title(job)}.", "watch": job.id}

    def _resume_alternative(self, job: JobRecord, _call: Call) -> Reply:
        self._worker.resume(job.id, self._resume_status(job).changes)
        return {"message": f"Resumed: {title(job)}.", "watch": job.id}

    def _add_again(self, job: JobRecord, count: int) -> Reply:
        """Queue a job's request with new seeds; copies of a paused job are paused."""
        if job.kind != "video" or job.owner != self._owner:  # the owner may cancel visitors' jobs, but not copy them
            raise unknown_action()
        request = GenerationRequest.model_validate({**job.request, "seed": AUTO})
        added = self._worker.submit_all(
            combined(request, [], [AUTO] * count), self._owner, held=job.state == "queued" and job.held
        )
        return {"message": f"Added to the queue: {counted(len(added), 'video')}.", "watch": added[0].id}

    def _resume_status(self, record: JobRecord) -> ResumeStatus:
        """Return from where a job that ended without a video can be resumed."""
        job = self._worker.job(record.id)
        return resume_status((), None) if job is None else resume_status(job.events, job.checkpoint_step)

    def _plays(self, job: JobRecord) -> bool:
        """Return whether a job's video exists and is served."""
        return job.state == "done" and find_output(str(job.output), self._outputs_dir) is not None

    def _picture(self, job: JobRecord) -> str:
        """Return the address of a job's still image, which differs for each preview; empty if there is none."""
        return picture(self._store, job)


def picture(store: JobStore, job: JobRecord) -> str:
    """Return the address of a job's still image, which differs for each preview; empty if there is none."""
    folder = store.folder(job.id)
    for path in () if folder is None or job.owner is not None else (folder / POSTER, folder / PREVIEW):
        with suppress(OSError):
            return f"tandem/poster/{job.id}.webp?{path.stat().st_mtime_ns:x}"
    return ""


def example_of(store: JobStore, spec: ModelSpec) -> str:
    """Return the address of a frame by a model: one that ships with it, else of the last clip that it made here."""
    shipped = theme.picture_of(spec)
    if shipped:
        return shipped
    done = store.list(states=_DONE, owner=None, limit=_SEARCHED)
    pictures = (picture(store, job) for job in done if job.request.get("model") == spec.name)
    return next(filter(None, pictures), "")


def proportions(job: JobRecord) -> tuple[int, int]:
    """Return width and height of a job's video, in pixels."""
    saved = None if job.result is None else job.result.get("request")
    request = saved if isinstance(saved, Mapping) else job.request
    width, height = request.get("width"), request.get("height")
    if not (isinstance(width, int) and isinstance(height, int)) and job.plan is not None:  # "auto"
        width, height = job.plan.width, job.plan.height
    if isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0:
        return width, height
    return _USUAL_SIZE


def is_job_id(value: object) -> bool:
    """Return whether a value can be the id of a job."""
    return isinstance(value, str) and len(value) == _ID_LENGTH and set(value) <= set("0123456789abcdef")


def title(job: JobRecord) -> str:
    """Return a job's prompt or task in quotation marks, shortened."""
    words = shown(job.prompt or job.title)
    return f"“{words if len(words) <= _TITLE_LENGTH else f'{words[: _TITLE_LENGTH - 1]}…'}”"


def named(jobs: Sequence[JobRecord]) -> str:
    """Return one job's title, or the number of several."""
    noun = "video" if all(job.kind == "video" for job in jobs) else "job"
    return title(jobs[0]) if len(jobs) == 1 else counted(len(jobs), noun)


def failure(job: JobRecord) -> str:
    """Return why a job ended without a video; empty if it did not fail."""
    if job.state == "interrupted":
        return "Tandem ended while this video was generated."
    return "" if job.failure is None else paragraph(job.failure.fact)
