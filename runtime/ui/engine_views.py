"""The engine library as the tab shows it: HTML as text. Knows nothing about gradio, the store or threads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from runtime.core.facts import Fact, render
from runtime.core.plan import BACKEND_TITLES
from runtime.core.units import byte_size
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, UNREADABLE_KEY, EngineRecord
from runtime.planner.shapes import LatentSize, ShapeProfile
from runtime.queue.tasks import Task
from runtime.ui import formatting
from runtime.ui.break_even import Payoff

PROGRAM_TITLES: Mapping[str, str] = {
    "text_encoder": "Text encoder",
    "transformer": "Transformer",
    "vae_first": "VAE decoder, first step",
    "vae_next": "VAE decoder, further steps",
    "vae_clip": "VAE decoder, whole clips",
}
_STATES = {"queued": "Waiting", "running": "Running", "done": "Done", "failed": "Failed", "cancelled": "Cancelled"}
_COLUMNS = ("Engine", "Serves", "Runs on", "On disk", "Speed", "Error", "Built", "Pays off", "Last used", "")


@dataclass(frozen=True)
class Entry:
    """One engine with what was found out about it: why it is stale, and whether it pays off, where that is known."""

    record: EngineRecord
    spec: ModelSpec | None
    stale: Sequence[Fact]
    payoff: Payoff | None


@dataclass(frozen=True)
class PartRow:
    """One part of the model at the current settings: what will run it, and what engines cost and save there."""

    component: str
    title: str
    now: str
    payoff: str


def said(message: str) -> str:
    """Return what came of a button's press; it is read out."""
    return f'<p class="aside" role="status" aria-live="polite">{escape(message)}</p>'


def parts(rows: Sequence[PartRow], what: str, total: str, problem: str) -> str:
    """Return the block for the settings of the form: a row per part, and what builds."""
    body = "".join(
        f'<tr><th scope="row">{escape(row.title)}</th><td data-label="Now">{escape(row.now)}</td>'
        f'<td data-label="Engines">{escape(row.payoff)}</td><td class="acts">'
        f"{_button('build', 'Build', row.component, f'Build engines for the part {row.title}')}</td></tr>"
        for row in rows
    )
    return (
        '<section class="shelf"><h2>For the current settings</h2>'
        f'<p class="aside">{escape(what)}</p>'
        f'<p class="trouble"{"" if problem else " hidden"}>{escape(problem)}</p>'
        f'<table{"" if rows else " hidden"}><thead><tr><th scope="col">Part</th><th scope="col">Now</th>'
        '<th scope="col">Engines</th><th scope="col"><span class="unseen">Build</span></th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
        f'<p class="row-end"><span>{escape(total)}</span>'
        f"{_button('build', 'Build all', 'all', 'Build engines for all parts', strong=True, off=bool(problem))}</p>"
        "</section>"
    )


def work(tasks: Sequence[tuple[Task, int]]) -> str:
    """Return what waits, runs and has ended, the newest first; with each, how much is ahead of it."""
    items = "".join(_task(task, ahead) for task, ahead in reversed(tasks))
    return f'<section class="shelf"{"" if tasks else " hidden"}><h2>Work</h2><ul class="work">{items}</ul></section>'


def disk(total_bytes: int, max_bytes: int, count: int) -> str:
    """Return how much room engines take, of how much."""
    share = min(total_bytes / max_bytes, 1.0) if max_bytes else float(total_bytes > 0)
    said = f"{count} engine{'' if count == 1 else 's'}, {byte_size(total_bytes)} of at most {byte_size(max_bytes)}"
    beyond = (
        "Deletes broken engines, then the least recently used, until the rest keeps to the limit; pinned ones stay."
    )
    prune = _button(
        "prune", "Prune to the limit", "", "Prune to the limit", confirm=f"Prune to {byte_size(max_bytes)}? {beyond}"
    )
    return (
        '<section class="shelf"><h2 id="library-heading" tabindex="-1">Library</h2><div class="row-end">'
        f'<div class="disk"><p>{escape(said)}</p><div class="meter" role="meter" aria-label="Disk used by engines" '
        f'aria-valuemin="0" aria-valuemax="{max_bytes}" aria-valuenow="{min(total_bytes, max_bytes)}" '
        f'aria-valuetext="{escape(said, quote=True)}"><span class="weights" style="width:{100 * share:.1f}%"></span>'
        f"</div></div>{prune}</div></section>"
    )


def table(entries: Sequence[Entry]) -> str:
    """Return the engines, one row each."""
    if not entries:
        return (
            '<section class="shelf"><p class="aside">No engines yet. They are built once and kept here.</p></section>'
        )
    head = "".join(
        f'<th scope="col">{title}</th>' if title else '<th scope="col"><span class="unseen">Actions</span></th>'
        for title in _COLUMNS
    )
    rows = "".join(_row(entry) for entry in entries)
    return (
        '<section class="shelf"><div class="scroll" tabindex="0" role="region" aria-label="Engines">'
        f'<table class="engines"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def serves(record: EngineRecord, spec: ModelSpec | None) -> str:
    """Return the sizes that an engine serves, in pixels and frames; in latent units where its model is not here."""
    if record.key.program == "text_encoder":
        return "any size"
    return ", ".join(_profile(record.key.program, profile, spec) for profile in record.key.profiles)


def _profile(program: str, profile: ShapeProfile, spec: ModelSpec | None) -> str:
    low, high = (_size(program, latent, spec) for latent in (profile.min, profile.max))
    return low if low == high else f"{low} to {high}"


def _size(program: str, latent: LatentSize, spec: ModelSpec | None) -> str:
    frames, height, width = latent
    if spec is None:
        return f"{frames} × {height} × {width} latent"
    pixels = formatting.size(width * spec.vae.scale_factor_spatial, height * spec.vae.scale_factor_spatial)
    if program not in {"transformer", "vae_clip"}:
        return f"{pixels}, any length"
    count = (frames - 1) * spec.vae.scale_factor_temporal + 1
    return f"{pixels}, {count} frame{'' if count == 1 else 's'}"


def _row(entry: Entry) -> str:
    record = entry.record
    key = record.key
    known = key != UNREADABLE_KEY
    title = PROGRAM_TITLES.get(key.program, key.program) if known else "Unreadable"
    state, why = _state(entry)
    backend = BACKEND_TITLES.get(key.backend, key.backend)
    cells = (
        ("Serves", serves(record, entry.spec)),
        ("Runs on", f"{backend}, {key.precision}" if known else ""),
        ("On disk", byte_size(record.file_bytes)),
        ("Speed", _speed(record)),
        ("Error", _error(record)),
        ("Built", _built(record)),
        ("Pays off", str(entry.payoff) if entry.payoff else ""),
        ("Last used", _when(record.last_used)),
    )
    name = f"{title} {record.id}"
    again = "It can be imported again from its file." if key.builder == IMPORTED else "It can be built again."
    delete = f"Delete {title.lower()} ({byte_size(record.file_bytes)})? {again}"
    acts = (
        _button("unpin" if record.pinned else "pin", "Unpin" if record.pinned else "Pin", record.id, f"Pin {name}")
        + _button("verify", "Verify", record.id, f"Verify {name}")
        + _button("delete", "Delete", record.id, f"Delete {name}", confirm=delete)
    )
    pinned = '<span class="tag">pinned</span>' if record.pinned else ""
    return (
        f'<tr data-engine="{escape(record.id, quote=True)}" data-state="{state}">'
        f'<th scope="row">{escape(title)} {pinned}'
        f"<small>{escape(record.model)} <code>{escape(record.id)}</code></small>"
        f'<small class="stale"{"" if why else " hidden"}>{escape(why)}</small></th>'
        + "".join(f'<td data-label="{label}">{escape(value)}</td>' for label, value in cells)
        + f'<td class="acts">{acts}</td></tr>'
    )


def _state(entry: Entry) -> tuple[str, str]:
    record = entry.record
    if record.problem is not None:
        return "broken", f"Not used: {record.problem}"
    if not record.verified:
        return "broken", f"Not used: {record.detail}"
    if entry.stale:
        return "stale", f"Stale: {' '.join(map(str, entry.stale))}"
    return "ready", ""


def _task(task: Task, ahead: int) -> str:
    state = "stopping" if task.cancelling else task.state
    title = "Stopping…" if state == "stopping" else _STATES[task.state]
    if task.state == "queued":
        line = f"{ahead} ahead in the queue." if ahead else "Starting."
    elif task.state == "running":
        line = task.line
    else:
        line = "" if task.result is None else " ".join(filter(None, render(task.result)))
    percent = None if task.share is None else round(100 * task.share)
    value = "" if percent is None else f' aria-valuenow="{percent}"'
    bar = (
        f'<div class="bar" role="progressbar" aria-label="{escape(task.title, quote=True)}" aria-valuemin="0" '
        f'aria-valuemax="100"{value}{"" if task.state == "running" else " hidden"}>'
        f'<span style="width:{percent or 0}%"{"" if percent else " class=waiting"}></span></div>'
    )
    # The log is worth its room while there is something to follow, or to find out.
    log = escape("\n".join(task.log)) if task.state in {"running", "failed"} else ""
    cancel = _button("cancel", "Cancel", task.id, f"Cancel: {task.title}", off=state == "stopping")
    return (
        f'<li data-chore="{task.id}" data-kind="{task.kind}" data-state="{state}">'
        f'<p class="row-end"><span><strong>{escape(task.title)}</strong> <span class="tag">{title}</span></span>'
        f'{cancel if task.open else "<span></span>"}</p>{bar}<p class="said">{escape(line)}</p>{_found(task.found)}'
        f'<pre tabindex="0" aria-label="Log"{"" if log else " hidden"}>{log}</pre></li>'
    )


def _found(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="found" aria-label="What was found"{"" if lines else " hidden"}>{items}</ul>'


def _button(
    act: str, title: str, of: str, name: str, *, confirm: str = "", strong: bool = False, off: bool = False
) -> str:
    return (
        f'<button type="button" class="button{" strong" if strong else ""}" data-act="{act}" '
        f'data-of="{escape(of, quote=True)}" data-confirm="{escape(confirm, quote=True)}" '
        f'aria-label="{escape(name, quote=True)}"{" disabled" if off else ""}>{title}</button>'
    )


def _built(record: EngineRecord) -> str:
    if record.key.builder == IMPORTED:
        return "elsewhere"
    return f"in {formatting.duration(record.build_seconds)}" if record.build_seconds else ""


def _speed(record: EngineRecord) -> str:
    if not record.seconds_per_call:
        return "not measured"
    return f"{record.pytorch_seconds_per_call / record.seconds_per_call:.1f} times PyTorch"


def _error(record: EngineRecord) -> str:
    if not record.verified and record.detail.code == "engine.not_compared_yet":
        return ""
    return "not finite" if math.isnan(record.error) else f"{record.error:.0e} of {record.tolerance:.0e}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M") if seconds else ""
