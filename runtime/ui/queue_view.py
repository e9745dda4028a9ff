"""The queue as its tab shows it: HTML as text. Knows nothing about gradio, the store or threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MOST_VARIATIONS = 100
_STATES = {
    "running": "Running", "pausing": "Pausing…", "stopping": "Stopping…", "waiting": "Waiting", "paused": "Paused",
}  # fmt: skip
_ENDED = {"interrupted": "Interrupted", "failed": "Failed", "cancelled": "Cancelled"}


@dataclass(frozen=True)
class Row:
    """One job or piece of work in the line.

    Attributes:
        title: the prompt, or what is done.
        state: running, pausing, stopping, waiting or paused.
        video: whether it can be edited and paused.
        line: how far it is.
        percent: of a running one, where it is known.
        visitor: whether it is a visitor's.
        waits: whether it was taken up, and waits for other GPUs.
    """

    id: str
    title: str
    state: str
    video: bool
    line: str = ""
    percent: int | None = None
    visitor: bool = False
    waits: bool = False

    @property
    def runs(self) -> bool:
        """Whether it is at work."""
        return self.state in {"running", "pausing", "stopping"}


@dataclass(frozen=True)
class Ended:
    """One job that ended without a video and can go on.

    Attributes:
        state: interrupted, failed or cancelled.
        what: what went wrong, and what to do about it.
        kept: what of it is kept.
        memory: where memory ran out.
        way: in which other way it could go on.
    """

    id: str
    title: str
    state: str
    what: str
    kept: str
    memory: str
    way: str


def beside(*, desk: bool) -> str:
    """Return what stands below the button that generates.

    Args:
        desk: whether the page has one, which adds to the queue.
    """
    add = button("add", "Add to queue", "", "Add to queue") if desk else ""
    return (
        f'<div class="beside" data-desk>{add}'
        '<label class="button">Settings from a video<input type="file" id="restore" class="unseen" '
        'accept="video/mp4,.mp4"></label><p id="restored" class="aside" role="status" aria-live="polite"></p></div>'
    )


def add_form() -> str:
    """Return what asks for many videos at once; its buttons take the settings of the other tab."""
    return (
        '<section class="shelf" data-desk><h2>Add several</h2><form class="several" data-form="add">'
        '<label for="several-prompts">Prompts, one per line</label>'
        '<textarea id="several-prompts" name="prompts" rows="3" aria-describedby="several-info"></textarea>'
        '<p class="aside" id="several-info">With the settings of Make. Empty: its prompt.</p>'
        '<div class="row-end"><p><label for="several-count">Variations of each</label> '
        f'<input id="several-count" name="variations" type="number" min="1" max="{MOST_VARIATIONS}" value="1"></p>'
        f"{button('add', 'Add to queue', '', 'Add to queue', strong=True)}</div></form></section>"
    )


def line(rows: Sequence[Row], problem: str = "") -> str:
    """Return what runs and waits, in order."""
    waiting = [row for row in rows if not row.runs]
    items = "".join(
        _item(row, up=row in waiting[1:], down=row in waiting[:-1], place=_place(row, waiting)) for row in rows
    )
    empty = "" if rows else '<p class="aside">Nothing waits or runs.</p>'
    paused = [row for row in rows if row.video and row.state in {"paused", "pausing"}]
    held = bool(paused) and len(paused) == sum(row.video for row in rows)
    count = f"{len(rows)} in the queue" if rows else ""
    everything = (
        button("go-on-all", "Go on with all", "", "Go on with all")
        if held
        else button("pause-all", "Pause all", "", "Pause all", off=not any(row.video for row in rows))
    )
    question = f"Cancel {'everything' if len(rows) > 1 else 'it'} that runs and waits ({len(rows)})?"
    return (
        '<section class="shelf" data-desk><div class="row-end"><h2 data-heading tabindex="-1">Queue</h2>'
        f'<span class="acts">{everything}'
        f"{button('cancel-all', 'Cancel all', '', 'Cancel all', confirm=question, off=not rows)}</span></div>"
        f'<p class="unseen" role="status" aria-live="polite">{count}</p>'
        f'<p class="trouble"{"" if problem else " hidden"}>{escape(problem)}</p>'
        f'{empty}<ol class="work queue"{"" if rows else " hidden"}>{items}</ol></section>'
    )


def ended(jobs: Sequence[Ended]) -> str:
    """Return the jobs that can be taken up again, the newest first."""
    items = "".join(_ended(job) for job in jobs)
    return (
        f'<section class="shelf" data-desk{"" if jobs else " hidden"}><h2>Can go on</h2>'
        f'<ul class="work">{items}</ul></section>'
    )


def button(
    act: str, title: str, of: str, name: str, *, confirm: str = "", strong: bool = False, off: bool = False
) -> str:
    """Return a button of the desk: what it does and of what, its name for who does not see it, and what it asks."""
    return (
        f'<button type="button" class="button{" strong" if strong else ""}" data-act="{act}" '
        f'data-of="{escape(of, quote=True)}" data-confirm="{escape(confirm, quote=True)}" '
        f'aria-label="{escape(name, quote=True)}" aria-disabled="{str(off).lower()}">{title}</button>'
    )


def _place(row: Row, waiting: Sequence[Row]) -> str:
    return str(waiting.index(row) + 1) if row in waiting else "▸"


def _item(row: Row, *, up: bool, down: bool, place: str) -> str:
    title = f"“{row.title}”" if row.video else row.title
    percent = "" if row.percent is None else f' aria-valuenow="{row.percent}"'
    bar = (
        f'<div class="bar" role="progressbar" aria-label="{escape(f"Progress of {title}", quote=True)}" '
        f'aria-valuemin="0" aria-valuemax="100"{percent}{"" if row.runs else " hidden"}>'
        f'<span style="width:{row.percent or 0}%"{"" if row.percent else " class=waiting"}></span></div>'
    )
    acts = ""
    if not row.runs:
        acts += button("up", "↑", row.id, f"Move up: {title}", off=not up)
        acts += button("down", "↓", row.id, f"Move down: {title}", off=not down)
        if row.video and not row.visitor:
            acts += button("edit", "Edit", row.id, f"Edit: {title}")
    if row.video:
        goes = row.state in {"waiting", "running"}
        acts += button(*(("pause", "Pause") if goes else ("go-on", "Go on")), row.id, f"Pause or go on: {title}")
    acts += button("cancel", "Cancel", row.id, f"Cancel: {title}", off=row.state == "stopping")
    tag = f'<span class="tag">{_STATES["waiting" if row.waits else row.state]}</span>'
    whose = '<span class="tag">visitor</span>' if row.visitor else ""
    return (
        f'<li data-job="{row.id}" data-state="{row.state}"><div class="row-end">'
        f'<p class="title"><span class="place" aria-hidden="true">{place}</span> <strong>{escape(row.title)}</strong> '
        f'{tag}{whose}</p><span class="acts">{acts}</span></div>{bar}<p class="said">{escape(row.line)}</p></li>'
    )


def _ended(job: Ended) -> str:
    title = f"“{job.title}”"
    other = (
        button("other-way", f"Go on: {escape(job.way[:1].lower() + job.way[1:])}", job.id, f"Go on, {job.way}: {title}")
        if job.way
        else ""
    )
    lines = "".join(f'<p class="said">{escape(one)}</p>' for one in (job.memory or job.what, job.kept) if one)
    return (
        f'<li data-job="{job.id}" data-state="{job.state}"><div class="row-end">'
        f'<p class="title"><strong>{escape(job.title)}</strong> <span class="tag">{_ENDED[job.state]}</span></p>'
        f'<span class="acts">{button("resume", "Resume", job.id, f"Resume: {title}", strong=not job.way)}{other}'
        f"{button('delete', 'Delete', job.id, f'Delete: {title}')}</span></div>{lines}</li>"
    )
