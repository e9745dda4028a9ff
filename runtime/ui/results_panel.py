"""The panel of results in Make: a strip of recent videos, and what can be done with the one that is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from runtime.core.batches import typed
from runtime.core.errors import StoreError
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import Group, JobRecord, State
from runtime.queue.sheets import write_sheet
from runtime.queue.views import Job
from runtime.ui.formatting import render
from runtime.ui.jobs_panel import JobsPanel, title
from runtime.ui.panels import Call, Reply, drawn, unknown_action

_SHOWN = 12
# The prompts that are offered, of so many of the newest videos.
_MOST_PROMPTS, _SEARCHED_PROMPTS, _LONGEST_SEARCH = 50, 400, 200
_DONE: tuple[State, ...] = ("done",)


@dataclass(frozen=True)
class Card:
    """One video of the strip.

    Attributes:
        members: ids of the videos of its group, for which the card stands; its own if it has none.
        poster: address of its still image; empty if there is none.
        line: shown without an image.
        width, height: of the video in pixels.
    """

    id: str
    members: Sequence[str]
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

    def _actions(self) -> Mapping[str, Callable[[Call], Reply]]:
        return {**super()._actions(), "prompts": self._prompts}

    def _job_actions(self) -> Mapping[str, Callable[[JobRecord, Call], Reply]]:
        more = {"discard": self._discard, "reveal": self._reveal, "sheet": self._sheet}
        return {**super()._job_actions(), **more}

    def _prompts(self, call: Call) -> Reply:
        """Return the prompts of recent videos that contain the words of a search, the newest first."""
        search = call.values.get("search", "")
        words = search[:_LONGEST_SEARCH] if isinstance(search, str) else ""
        jobs = self._store.list(owner=self._owner, search=words, limit=_SEARCHED_PROMPTS)
        prompts = dict.fromkeys(str(typed(job.request, "prompt")) for job in jobs)
        return {"prompts": list(prompts)[:_MOST_PROMPTS]}

    def _sheet(self, job: JobRecord, _call: Call) -> Reply:
        """Write the contact sheet of a job's batch."""
        if job.batch is None:
            raise StoreError("queue.not_in_batch", job=job.id)
        sheet = write_sheet(self._store, job.batch, self._outputs_dir)
        return {"message": f"Saved in the folder of videos: {sheet.picture.name}, {sheet.page.name}."}

    def _delete(self, call: Call) -> Reply:
        """Delete a video; the stage shows the next one of its group, or else the newest one."""
        job = self._job(call.target)
        members = [] if job.group is None else list(self._store.groups([job.group])[job.group])
        reply = super()._delete(call)
        place = members.index(job.id) if job.id in members else 0
        neighbors = [*members[place + 1 :], *members[:place][-1:]]
        return reply | {"show": next(iter(neighbors), "") or next((video.id for video in self._videos()), "")}

    def _discard(self, job: JobRecord, call: Call) -> Reply:
        """Delete a video of a group; a running one is stopped."""
        if job.state != "running":
            return self._delete(call)
        self._worker.cancel([job.id])
        return {"message": f"Stopping: {title(job)}."}

    def _restore(self, call: Call) -> Reply:
        return super()._restore(call) | {"show": call.target.split()[0]}

    def _star(self, call: Call, starred: bool) -> Reply:
        return super()._star(call, starred) | {"show": call.target.split()[0]}

    def _reveal(self, job: JobRecord, _call: Call) -> Reply:
        if not self._opens_folders or not self._plays(job):
            raise unknown_action()
        typer.launch(str(job.output), locate=True)
        return {}

    def _strip(self) -> str:
        runs = [job for job in self._store.order.jobs(states=["running"], owner=self._owner) if job.plan]
        # A group has one card: while one of its videos runs, the first, with the picture of its newest finished one.
        cards: dict[Group | str, Card] = {}
        for job, view in [(job, self._worker.job(job.id)) for job in runs]:
            if view is not None:
                cards.setdefault(job.group or job.id, _running_card(view))
        for job in self._videos():
            key = job.group or job.id
            cards[key] = replace(self._card(job), running=key in cards)
        entries = list(cards.items())[:_SHOWN]
        members = self._store.groups([key for key, _ in entries if isinstance(key, Group)])
        stacks = [
            replace(card, members=list(members[key])) if isinstance(key, Group) and members[key] else card
            for key, card in entries
        ]
        return render("results_strip.html", cards=stacks)

    def _videos(self) -> list[JobRecord]:
        """Return recent finished videos that can be played, one of each group.

        `generate --out` may have put one elsewhere.
        """
        videos = self._store.list(states=_DONE, owner=self._owner, limit=_SHOWN, stacked=True)
        return [job for job in videos if self._plays(job)]

    def _card(self, job: JobRecord) -> Card:
        width, height = (1, 1) if job.plan is None else (job.plan.width, job.plan.height)
        poster = self._picture(job)
        return Card(job.id, (job.id,), job.prompt, False, poster, "" if poster else "No picture", width, height)


def _running_card(job: Job) -> Card:
    line = f"{round(100 * job.share)}%"
    return Card(job.id, (job.id,), job.summary.prompt, True, "", line, job.summary.width, job.summary.height)
