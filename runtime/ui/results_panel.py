"""The panel of results in Make: a strip of recent videos, and what can be done with the one that is shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord, State
from runtime.queue.views import Job
from runtime.ui.formatting import render
from runtime.ui.jobs_panel import JobsPanel
from runtime.ui.panels import Call, Reply, drawn, unknown_action

_SHOWN = 12
_DONE: tuple[State, ...] = ("done",)


@dataclass(frozen=True)
class Card:
    """One video of the strip.

    Attributes:
        poster: address of its still image; empty if there is none.
        line: shown without an image.
        width, height: of the video in pixels.
    """

    id: str
    prompt: str
    running: bool
    poster: str
    line: str
    width: int
    height: int


class ResultsPanel(JobsPanel):
    """The panel; see `panels.Panel`.

    Args:
        opens_folders: whether the browser runs on this machine, which has a screen.
    """

    def __init__(
        self, worker: JobQueue, models: dict[str, ModelSpec], outputs_dir: Path, *, opens_folders: bool
    ) -> None:
        super().__init__(worker, models, outputs_dir)
        self._opens_folders = opens_folders

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the strip: running videos, then finished ones, the newest first."""
        return drawn({"strip": self._strip})

    def _job_actions(self) -> Mapping[str, Callable[[JobRecord, Call], Reply]]:
        return {**super()._job_actions(), "reveal": self._reveal}

    def _delete(self, call: Call) -> Reply:
        reply = super()._delete(call)
        return reply | {"show": next((job.id for job in self._videos()), "")}

    def _reveal(self, job: JobRecord, _call: Call) -> Reply:
        if not self._opens_folders or not self._plays(job):
            raise unknown_action()
        typer.launch(str(job.output), locate=True)
        return {}

    def _strip(self) -> str:
        runs = self._store.order.jobs(states=["running"], owner=self._owner)
        cards = [_running_card(job) for job in map(self._worker.job, [run.id for run in runs if run.plan]) if job]
        cards += [self._card(job) for job in self._videos()]
        return render("results_strip.html", cards=cards[:_SHOWN])

    def _videos(self) -> list[JobRecord]:
        """Return recent finished videos that can be played: `generate --out` may have put one elsewhere."""
        return [job for job in self._store.list(states=_DONE, owner=self._owner, limit=_SHOWN) if self._plays(job)]

    def _card(self, job: JobRecord) -> Card:
        width, height = (1, 1) if job.plan is None else (job.plan.width, job.plan.height)
        poster = self._picture(job)
        return Card(job.id, job.prompt, False, poster, "" if poster else "No picture", width, height)


def _running_card(job: Job) -> Card:
    line = f"{round(100 * job.share)}%"
    return Card(job.id, job.summary.prompt, True, "", line, job.summary.width, job.summary.height)
