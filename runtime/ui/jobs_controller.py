"""What the tabs Queue and History do. Their handlers answer raw HTTP too, so none trusts what it is sent."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.request import AUTO, Auto
from runtime.core.units import byte_size
from runtime.models.spec import ModelSpec
from runtime.queue import batch, disk_usage, recovery
from runtime.queue.records import JobRecord
from runtime.queue.service import JobQueue
from runtime.ui import compare, form, history_view, queue_view
from runtime.ui.jobs_presenter import Shown, told
from runtime.ui.jobs_request import Asked, read, unknown

Updates = tuple[Any, ...]
Says = dict[str, Any]

# What a view goes to, in this order; after them comes what the script hears.
PARTS = ("line", "ended", "compare", "numbers", "settings", "detail", "gallery", "room")

logger = logging.getLogger(__name__)


class JobsController:
    """The handlers of both tabs.

    Args:
        outputs_dir: videos in it are removed with their jobs.
        owner: whose jobs these are; `None` is the person whose Tandem this is, who steers the whole queue.
    """

    def __init__(
        self, worker: JobQueue, models: dict[str, ModelSpec], outputs_dir: Path, owner: str | None = None
    ) -> None:
        self._worker = worker
        self._store = worker.store
        self._models = models
        self._outputs_dir = outputs_dir
        self._owner = owner
        self._shown = Shown(worker, outputs_dir, owner)
        self._acts: Mapping[str, Callable[[Asked, Sequence[Any]], Says]] = {
            "look": self._nothing,
            "page": self._nothing,
            "close": self._nothing,
            "close-compare": self._nothing,
            "add": self._add,
            "pause-all": self._hold_all,
            "go-on-all": self._hold_all,
            "cancel-all": self._cancel_all,
            "clean": self._clean,
            "delete-old": self._delete_old,
            "purge": self._purge,
            "delete": self._delete,
            "undelete": self._undelete,
            "compare": self._compare,
            "measure": self._measure,
        }
        self._acts_of_one: Mapping[str, Callable[[JobRecord, Asked, Sequence[Any]], Says]] = {
            "open": self._open,
            "up": self._move,
            "down": self._move,
            "pause": self._hold,
            "go-on": self._hold,
            "cancel": self._cancel,
            "edit": self._edit,
            "save": self._save,
            "resume": self._resume,
            "other-way": self._go_on,
            "redo": self._redo,
        }

    def act(self, message: Any, *values: Any) -> Updates:
        """Do what a button says, and show what has changed."""
        asked = Asked("look")
        says: Says
        try:
            asked = read(message)
            says = self._do(asked, values)
        except TandemError as error:
            says = {"said": told(error), "wrong": True}
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("The jobs could not be changed")
            says = {"said": f"Something broke inside Tandem: {error!r} The log has the details.", "wrong": True}
        if "open" in says:
            asked = replace(asked, open=says["open"])
        drawn = self._shown.parts(asked)
        if "numbers" in says:
            drawn["numbers"] = says.pop("numbers")
        elif asked.tab == "history" and not asked.pair:
            drawn["numbers"] = ""
        marks = {name: _mark(html) for name, html in drawn.items()}
        updates = [
            gr.skip() if name not in drawn or asked.marks.get(name) == marks[name] else drawn[name] for name in PARTS
        ]
        return (*updates, json.dumps(says | {"number": asked.number, "marks": marks}))

    def _do(self, asked: Asked, values: Sequence[Any]) -> Says:
        if asked.act in self._acts:
            return self._acts[asked.act](asked, values)
        if asked.act in self._acts_of_one:
            return self._acts_of_one[asked.act](self._shown.mine(asked.of), asked, values)
        raise unknown()

    def _nothing(self, _asked: Asked, _values: Sequence[Any]) -> Says:
        return {}

    def _add(self, asked: Asked, values: Sequence[Any]) -> Says:
        given = asked.values
        lines = given.get("prompts", "")
        prompts = [line.strip() for line in lines.splitlines() if line.strip()] if isinstance(lines, str) else []
        count = _count(given.get("variations", 1))
        if prompts:
            values = form.with_prompt(values, prompts[0])
        request = form.read(values, self._models)
        seeds: list[int | Auto] = [AUTO if request.seed == AUTO else int(request.seed) + n for n in range(count)]
        jobs = self._worker.submit_all(batch.combined(request, prompts, seeds), self._owner)
        many = "1 video" if len(jobs) == 1 else f"{len(jobs)} videos"
        return {"said": f"Added to the queue: {many}.", "added": [job.id for job in jobs]}

    def _hold_all(self, asked: Asked, _values: Sequence[Any]) -> Says:
        held = asked.act == "pause-all"
        self._worker.hold([job.id for job in self._shown.queue() if job.kind == "video"], held)
        return {"said": "Paused." if held else "Going on."}

    def _cancel_all(self, _asked: Asked, _values: Sequence[Any]) -> Says:
        ids = [job.id for job in self._shown.queue()]
        self._worker.cancel(ids)
        return {"said": f"Cancelled: {len(ids)}."}

    def _clean(self, _asked: Asked, _values: Sequence[Any]) -> Says:
        freed = disk_usage.remove_finished_checkpoints(self._store, self._owner)
        return {"said": f"Removed: {byte_size(freed)} of checkpoints."}

    def _delete_old(self, asked: Asked, values: Sequence[Any]) -> Says:
        if asked.of not in {str(age) for age in history_view.AGES}:
            raise unknown()
        old = disk_usage.older_than(self._store, self._owner, int(asked.of))
        return self._delete(replace(asked, of=" ".join(job.id for job in old)), values) if old else {}

    def _purge(self, _asked: Asked, _values: Sequence[Any]) -> Says:
        gone = self._store.list(owner=self._owner, deleted=True)
        for job in self._store.purge(0, [job.id for job in gone]):
            recovery.remove_files(self._store, job, self._outputs_dir)
        return {"said": f"Removed for good: {_jobs(gone)}."}

    def _delete(self, asked: Asked, _values: Sequence[Any]) -> Says:
        jobs = self._several(asked.of)
        for job in jobs:
            self._store.delete(job.id)
        return {"said": f"Deleted: {_jobs(jobs)}.", "undo": [job.id for job in jobs], "open": ""}

    def _undelete(self, asked: Asked, _values: Sequence[Any]) -> Says:
        jobs = self._several(asked.of)
        for job in jobs:
            self._store.undelete(job.id)
        return {"said": f"Had back: {_jobs(jobs)}."}

    def _several(self, ids: str) -> list[JobRecord]:
        jobs = [self._shown.mine(one) for one in ids.split()]
        if not jobs:
            raise unknown()
        return jobs

    def _compare(self, asked: Asked, _values: Sequence[Any]) -> Says:
        return {"compare": True, "numbers": compare.MEASURING} if asked.pair else {}

    def _measure(self, asked: Asked, _values: Sequence[Any]) -> Says:
        return {"numbers": self._shown.numbers(asked.pair)}

    def _open(self, job: JobRecord, _asked: Asked, _values: Sequence[Any]) -> Says:
        return {"open": job.id}

    def _move(self, job: JobRecord, asked: Asked, _values: Sequence[Any]) -> Says:
        """Move past the neighbour that waits."""
        waiting = [one.id for one in self._store.queue() if one.state == "queued"]
        place = waiting.index(job.id) if job.id in waiting else 0
        if asked.act == "down":
            self._store.move(job.id, next(iter(waiting[place + 2 :]), None))
        elif place > 0:
            self._store.move(job.id, waiting[place - 1])
        return {}

    def _hold(self, job: JobRecord, asked: Asked, _values: Sequence[Any]) -> Says:
        self._worker.hold([job.id], asked.act == "pause")
        return {}

    def _cancel(self, job: JobRecord, _asked: Asked, _values: Sequence[Any]) -> Says:
        self._worker.cancel([job.id])
        return {"said": f"{'Cancelled' if job.state == 'queued' else 'Stopping'}: {_title(job)}."}

    def _edit(self, job: JobRecord, _asked: Asked, _values: Sequence[Any]) -> Says:
        return {"edit": {"id": job.id, "title": _title(job), "request": dict(job.request)}}

    def _save(self, job: JobRecord, _asked: Asked, values: Sequence[Any]) -> Says:
        request = form.read(values, self._models)
        # An empty field means that the seed stays what it was.
        seed = job.request["seed"] if request.seed == AUTO else request.seed
        self._worker.edit(job.id, request.replace(seed=seed))
        return {"said": "Saved. It keeps its place in the queue.", "saved": job.id}

    def _resume(self, job: JobRecord, _asked: Asked, _values: Sequence[Any]) -> Says:
        self._worker.resume(job.id)
        return {"said": f"Goes on: {_title(job)}.", "watch": job.id}

    def _go_on(self, job: JobRecord, _asked: Asked, _values: Sequence[Any]) -> Says:
        self._worker.resume(job.id, self._shown.standing(job).changes)
        return {"said": f"Goes on: {_title(job)}.", "watch": job.id}

    def _redo(self, job: JobRecord, asked: Asked, _values: Sequence[Any]) -> Says:
        changes = history_view.redo_changes(asked.values, self._shown.again(job))
        again = self._worker.redo_second_half(job.id, changes, self._owner)
        return {"said": "The second half is made anew.", "watch": again.id}


def _count(given: Any) -> int:
    text_given = str(given).strip() if isinstance(given, str | int | float) else ""
    most = queue_view.MOST_VARIATIONS
    if not text_given.isascii() or not text_given.isdigit() or not 1 <= int(text_given[:9]) <= most:
        raise InvalidRequestError(
            "variations", f"Variations of each is “{text_given[:20]}”.", f"Give a number from 1 to {most}."
        )
    return int(text_given)


def _title(job: JobRecord, most: int = 60) -> str:
    title = job.prompt or job.title
    return f"“{title if len(title) <= most else f'{title[: most - 1]}…'}”"


def _jobs(jobs: Sequence[JobRecord]) -> str:
    return _title(jobs[0]) if len(jobs) == 1 else f"{len(jobs)} jobs"


def _mark(drawn: str) -> str:
    return hashlib.sha256(drawn.encode("utf-8", "surrogatepass")).hexdigest()[:12]
