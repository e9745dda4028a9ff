"""`jobs …`: what was made, is being made and was interrupted; for people on standard error, returned for programs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from runtime.cli import terminal
from runtime.cli.generate import check_stored
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.events import WaitsForGpus
from runtime.core.facts import shortened
from runtime.core.settings import Settings
from runtime.machine.probe import probe
from runtime.queue import recovery
from runtime.queue.records import STATES, JobRecord, State, event_from_json
from runtime.queue.store import JobStore, open_store
from runtime.queue.support_report import report

_PROMPT_SHOWN = 60
_DAYS_KEPT = round(recovery.KEPT_SECONDS / 86_400)


def listing(states: Sequence[str], search: str) -> dict[str, Any]:
    """Print and return jobs, the newest first."""
    store = _store(settings.load())
    jobs = store.list(states=_states(states) or None, search=search)
    waits = {job.id: _waits(store, job) for job in jobs}
    if jobs:
        terminal.table(
            ("Job", "State", "Asked for", "Prompt"),
            [(job.id, waits[job.id] or _state(job), _when(job.created), _shortened(job.prompt)) for job in jobs],
        )
    else:
        terminal.line("No jobs.")
    return {"jobs": [job_row(job) | {"waits": waits[job.id] or None} for job in jobs]}


def details(beginning: str, *, with_prompt: bool) -> dict[str, Any]:
    """Print and return all that is known of a job."""
    loaded = settings.load()
    store = _store(loaded)
    job = store.find(beginning)
    told = report(store, job, probe(), loaded.log_file, loaded.cache_dir, with_prompt=with_prompt)
    terminal.line(f"Job {job.id}: {_waits(store, job) or _state(job)}, asked for {_when(job.created)}")
    if job.failure is not None:
        terminal.line(f"  {told['failure']['what']} {told['failure']['remedy']}")
    for title in ("request", "versions", "machine"):
        terminal.line(f"{title.title()}: " + ", ".join(f"{name} {value}" for name, value in told[title].items()))
    for name, part in ((told["plan"] or {}).get("components") or {}).items():
        terminal.line(f"{name}: {part['backend']} on {part['device']} in {part['dtype']}. {part['reason']}")
    for event in told["events"]:
        rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in {"n", "at", "event"})
        terminal.line(f"{_when(event['at'])} {event['event']}{': ' if rest else ''}{rest}")
    for line in told["log"]:
        terminal.line(f"log: {line}")
    if job.resumable:
        terminal.line(f"Take it up again: jobs resume {job.id}")
    return {"job": told}


def delete(beginnings: Sequence[str], *, sure: bool) -> dict[str, Any]:
    """Delete jobs, so that they can be had back for some days; ask before.

    Raises:
        StoreError: if one of them is not there, or runs; none is deleted then.
    """
    store = _store(settings.load())
    jobs = {job.id: job for job in map(store.find, beginnings)}
    if not sure:
        _ask(list(jobs.values()))
    for job in jobs:
        store.delete(job)
    ids = " ".join(jobs)
    terminal.line(f"Deleted {ids}. For {_DAYS_KEPT} days they can be had back: jobs undelete {ids}")
    return {"deleted": list(jobs)}


def undelete(beginnings: Sequence[str]) -> dict[str, Any]:
    """Have deleted jobs back."""
    store = _store(settings.load())
    jobs = {job.id: job for job in map(store.find, beginnings)}
    for job in jobs:
        store.undelete(job)
    terminal.line(f"Back in the list: {' '.join(jobs)}.")
    return {"undeleted": list(jobs)}


def job_row(job: JobRecord) -> dict[str, Any]:
    """Return a job as programs read it."""
    return {
        "id": job.id,
        "state": job.state,
        "held": job.held,
        "resumable": job.resumable,
        "prompt": job.prompt,
        "model": job.request["model"],
        "seed": job.request["seed"],
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "video": str(job.output) if job.state == "done" else None,
        "batch": job.batch,
        "parent": job.parent,
        "error": None if job.failure is None else job.failure.error_json(),
    }


def _store(loaded: Settings) -> JobStore:
    """Open the store, and see to it that no job of a dead process is called running."""
    store = open_store(loaded.cache_dir)
    check_stored(store)
    recovery.recover(store, "")
    recovery.purge(store, loaded.outputs_dir)
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
    """Return what a job that was taken up waits for, for people; empty if it is at work or over."""
    if job.state != "running":
        return ""
    told = store.events(job.id)
    last = event_from_json(told[-1][2], job) if told else None
    return str(last.fact) if isinstance(last, WaitsForGpus) else ""


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PROMPT_SHOWN else f"{line[: _PROMPT_SHOWN - 1]}…"
