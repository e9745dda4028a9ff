"""`jobs list`, `show`, `finish`, `delete` and `undelete`: print the result and return it for `--json`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.environment import program
from runtime.core.errors import InvalidRequestError, StoreError
from runtime.core.events import WaitsForDisk, WaitsForGpus
from runtime.core.facts import Fact, render, shortened
from runtime.core.settings import Settings
from runtime.machine.probe import probe
from runtime.queue import recovery, storage
from runtime.queue.records import STATES, JobRecord, State, event_from_json, task_progress
from runtime.queue.sheets import write_sheet
from runtime.queue.store import JobStore, open_store
from runtime.queue.support_report import report
from runtime.server.cluster.problems import problems_of

_PROMPT_SHOWN = 60
# The newest jobs whose rows are checked before each list; the check of 25,000 takes more than five seconds.
_CHECKED = 1_000
_OPEN: tuple[State, ...] = ("running", "queued")
_DAYS_KEPT = round(storage.KEPT_SECONDS / 86_400)
# Digits of an ID that a deletion needs.
_DELETED_PREFIX = 4


def listing(states: Sequence[str], search: str, limit: int, after: str | None) -> dict[str, Any]:
    """Print and return jobs, newest first.

    Args:
        limit: maximum number; 0 for all.
        after: the last job of the page before, or a prefix of its ID.
    """
    loaded = settings.load()
    store = _store(loaded)
    # So that each damaged row is named, also one that the list would not have; apps check all rows once an hour.
    store.check(_CHECKED)
    number = None if after is None else store.find(after).number
    page = store.list(states=_states(states) or None, search=search, limit=limit + 1 if limit else -1, after=number)
    jobs = page[:limit] if limit else page
    more = len(page) > len(jobs)
    builds = [] if search or after else store.list(states=_states(states) or _OPEN, kinds=["build"], limit=limit or -1)
    waits = {job.id: _waits(store, job) for job in jobs}
    if jobs:
        terminal.table(
            ("Job", "State", "Created", "Prompt"),
            [(job.id, waits[job.id] or _state(job), _when(job.created), _shortened(job.prompt)) for job in jobs],
        )
    else:
        terminal.line(str(Fact("cli.no_jobs")))
    if more:
        terminal.line(f"There are more: `{program()} jobs list --after {jobs[-1].id}`, or --limit 0 for all.")
    if builds:
        terminal.table(
            ("Build", "State", "Created", "Engines"),
            [(build.id, _build_state(build), _when(build.created), build.title) for build in builds],
        )
    unreadable = store.unreadable
    if unreadable is not None:
        terminal.warning(" ".join(render(unreadable)))
    problems = [(problem.host, render(problem.fact)) for problem in problems_of(loaded.cache_dir, store.path)]
    for host, (what, remedy) in problems:
        terminal.warning(f"{host}: {what} {remedy}")
    return {
        "cluster": [{"host": host, "what": what, "remedy": remedy} for host, (what, remedy) in problems],
        "unreadable": [] if unreadable is None else unreadable.data["jobs"],
        "jobs": [job_row(job) | {"waits": waits[job.id] or None} for job in jobs],
        # Only of a page that is not the last one.
        **({"after": jobs[-1].id} if more else {}),
        "builds": [_build_row(build) for build in builds],
    }


def details(id_prefix: str, *, with_prompt: bool) -> dict[str, Any]:
    """Print and return the diagnostics of one job."""
    loaded = settings.load()
    store = _store(loaded)
    job = store.find(id_prefix)
    diagnostics = report(store, job, probe(), loaded.log_file, loaded.cache_dir, with_prompt=with_prompt)
    terminal.result(f"Job {job.id}: {_waits(store, job) or _state(job)}, created {_when(job.created)}")
    if job.failure is not None:
        terminal.result(f"  {diagnostics['failure']['what']} {diagnostics['failure']['remedy']}")
    for title in ("request", "versions", "machine"):
        terminal.result(f"{title.title()}: {_listed(diagnostics[title])}")
    for name, part in ((diagnostics["plan"] or {}).get("components") or {}).items():
        terminal.result(f"{name}: {part['backend']} on {part['device']} in {part['dtype']}. {part['reason']}")
    for event in diagnostics["events"]:
        rest = _listed({name: value for name, value in event.items() if name not in {"n", "at", "event"}})
        terminal.result(f"{_when(event['at'])} {event['event']}{': ' if rest else ''}{rest}")
    for line in diagnostics["log"]:
        terminal.result(f"log: {line}")
    if job.resumable:
        terminal.result(f"To resume it: `{program()} jobs resume {job.id}`")
    return {"job": diagnostics}


def _listed(values: Mapping[str, Any]) -> str:
    """Return values with their names on one line, without those that say nothing."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, "", [], {}))


def finish(id_prefix: str) -> dict[str, Any]:
    """End a job after its current section.

    Raises:
        StoreError: if it does not exist, has ended, or is made whole.
    """
    store = _store(settings.load())
    job = store.find(id_prefix)
    store.finish_early(job.id)
    terminal.result(f"Job {job.id} ends after its current section. To continue it: `{program()} jobs resume {job.id}`")
    return {"finishing": job.id}


def sheet(id_prefix: str) -> dict[str, Any]:
    """Write the contact sheet of a job's batch; print and return its files.

    Raises:
        StoreError: if the job does not exist, or is no part of a batch.
    """
    loaded = settings.load()
    store = _store(loaded)
    job = store.find(id_prefix)
    if job.batch is None:
        raise StoreError("queue.not_in_batch", job=job.id)
    written = write_sheet(store, job.batch, loaded.outputs_dir)
    terminal.line(f"{written.made} of {written.videos} videos are made.")
    terminal.result_path(written.picture)
    terminal.result_path(written.page)
    return {"sheet": str(written.picture), "page": str(written.page), "made": written.made, "videos": written.videos}


def delete(id_prefixes: Sequence[str], *, confirmed: bool) -> dict[str, Any]:
    """Delete jobs after a confirmation; they can be restored for some days.

    Args:
        confirmed: skips the confirmation.

    Raises:
        StoreError: if a job does not exist or is running, or a prefix is too short; then none is deleted.
    """
    short = next((prefix for prefix in id_prefixes if len(prefix) < _DELETED_PREFIX), None)
    if short is not None:  # such as a number of a list, which matches some ID by chance
        raise StoreError("queue.short_job_id", job=short, digits=_DELETED_PREFIX)
    store = _store(settings.load())
    jobs = {job.id: job for job in map(store.find, id_prefixes)}
    if not confirmed:
        _ask(list(jobs.values()))
    for job in jobs:
        store.delete(job)
    terminal.result(str(Fact("cli.jobs_deleted", {"jobs": " ".join(jobs), "days": _DAYS_KEPT})))
    return {"deleted": list(jobs)}


def undelete(id_prefixes: Sequence[str]) -> dict[str, Any]:
    """Restore deleted jobs."""
    store = _store(settings.load())
    jobs = {job.id: job for job in map(store.find, id_prefixes)}
    for job in jobs:
        store.undelete(job)
    terminal.result(f"Restored {' '.join(jobs)}.")
    return {"undeleted": list(jobs)}


def check_stored(store: JobStore) -> None:
    """Check that jobs are stored on disk, and warn if the store was repaired.

    Raises:
        StoreError: if the jobs cannot be stored.
    """
    if store.problem:
        raise StoreError(store.problem.code, **store.problem.data)
    if store.notice:
        terminal.warning(str(store.notice))


def job_row(job: JobRecord) -> dict[str, Any]:
    """Return a job's fields in the JSON output."""
    return {
        "id": job.id,
        "state": job.state,
        "held": job.held,
        "resumable": job.resumable,
        "prompt": job.prompt,
        "model": job.request.get("model"),
        "seed": job.request.get("seed"),
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "video": str(job.output) if job.state == "done" else None,
        "batch": job.batch,
        "error": None if job.failure is None else job.failure.error_json(),
    }


def _build_row(build: JobRecord) -> dict[str, Any]:
    return {
        "id": build.id,
        "state": build.state,
        "held": build.held,
        "idle": build.idle,
        "title": build.title,
        "created": build.created,
        "progress": _progress(build)[0],
        "share": _progress(build)[1],
    }


def _progress(build: JobRecord) -> tuple[str | None, float | None]:
    """Return what a running build does now, and the share done, if known."""
    live = task_progress(build)
    if build.state != "running" or live is None:
        return None, None
    return str(live.fact), live.share


def _build_state(build: JobRecord) -> str:
    if build.state == "queued" and build.idle and not build.held:
        return "waits until idle"
    share = _progress(build)[1]
    return _state(build) if share is None else f"{_state(build)}, {share:.0%}"


def _store(loaded: Settings) -> JobStore:
    """Open the store; mark jobs of dead processes as interrupted, and remove jobs that were deleted long ago."""
    store = open_store(loaded.cache_dir)
    check_stored(store)
    recovery.recover(store, "")
    storage.purge(store, loaded.outputs_dir)
    return store


def _states(texts: Sequence[str]) -> list[State]:
    chosen: list[State] = [state for state in STATES if state in texts]
    for text in texts:
        if text not in STATES:
            raise InvalidRequestError("state", "request.not_a_choice", value=shortened(text), choices=list(STATES))
    return chosen


def _ask(jobs: Sequence[JobRecord]) -> None:
    named = [f"{job.id} {_state(job)}: {_shortened(job.prompt)}" for job in jobs]
    cannot = InvalidRequestError("yes", "cli.delete_not_confirmed")
    terminal.ask("\n".join([*named, "Delete?"]), cannot)


def _state(job: JobRecord) -> str:
    return "paused" if job.held else job.state


def _waits(store: JobStore, job: JobRecord) -> str:
    """Return what a running job waits for, as text; empty if it does not wait."""
    if job.state != "running":
        return ""
    events = store.log.events(job.id)
    last = event_from_json(events[-1][2], job) if events else None
    return str(last.fact) if isinstance(last, WaitsForDisk | WaitsForGpus) else ""


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PROMPT_SHOWN else f"{line[: _PROMPT_SHOWN - 1]}…"
