"""The history as its tab shows it: HTML as text. Knows nothing about gradio, the store or threads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Any

from runtime.core.request import AUTO, BACKENDS
from runtime.core.units import byte_size
from runtime.queue.disk_usage import DiskUsage
from runtime.ui import acceleration, result_view
from runtime.ui.queue_view import button

ALL, DELETED = "all", "deleted"
# What may be looked for, by the name of its state.
FILTERS: Mapping[str, str] = {
    ALL: "All", "done": "Done", "failed": "Failed", "cancelled": "Cancelled", "interrupted": "Interrupted",
    DELETED: "Deleted",
}  # fmt: skip
# Videos older than so many days may be deleted at once.
AGES = (7, 30, 90, 365)


@dataclass(frozen=True)
class Card:
    """One job in the gallery.

    Attributes:
        when: when it ended, in words.
        poster: address of a still; empty where there is none.
        size: of its file.
        deleted: it can be had back.
    """

    id: str
    prompt: str
    state: str
    when: str
    poster: str = ""
    size: str = ""
    deleted: bool = False


@dataclass(frozen=True)
class Detail:
    """Everything about one job.

    Attributes:
        video: its address; empty where there is none.
        name: of its file.
        request: as used where that is known, else as asked for.
        told: what there is to know, each with its name.
        warnings: told beside the video.
        why: why its parts ran where they did.
        what: of one that failed: what went wrong, and what to do.
        kept: from where one without a video goes on.
        resumable: whether it can go on.
        again: whether its second half can be redone, and with which guidance and speed it was made.
    """

    id: str
    prompt: str
    state: str
    request: Mapping[str, Any]
    told: Sequence[tuple[str, str]]
    video: str = ""
    name: str = ""
    warnings: Sequence[str] = ()
    why: str = ""
    what: str = ""
    kept: str = ""
    resumable: bool = False
    deleted: bool = False
    again: Mapping[str, Any] = field(default_factory=dict)


def controls() -> str:
    """Return what looks for jobs; its values go with every question of the page."""
    options = "".join(f'<option value="{name}">{title}</option>' for name, title in FILTERS.items())
    return (
        '<div class="finder" data-desk role="search" aria-label="History">'
        '<p><label for="history-search">Search</label>'
        '<input type="search" id="history-search" maxlength="200" autocomplete="off" '
        'placeholder="words of the prompt"></p>'
        f'<p><label for="history-state">Show</label><select id="history-state">{options}</select></p>'
        '<p class="picked"><span id="picked" role="status">Pick two clips to compare them.</span> '
        f"{button('compare', 'Compare', '', 'Compare the two picked clips', off=True)}</p></div>"
    )


def gallery(cards: Sequence[Card], page: int, more: bool, searched: bool) -> str:
    """Return one page of the gallery.

    Args:
        page: from 0.
        more: whether there are older ones.
        searched: whether only some were looked for.
    """
    nothing = "Nothing found." if searched or page else "No videos yet. Those that are made are kept here."
    empty = "" if cards else f'<p class="aside">{nothing}</p>'
    items = "".join(_card(card) for card in cards)
    turns = (
        f'<nav class="row-end" aria-label="Pages of the history"{"" if page or more else " hidden"}>'
        f"{button('page', 'Newer', str(max(page - 1, 0)), 'Newer videos', off=page == 0)}"
        f"<span>Page {page + 1}</span>{button('page', 'Older', str(page + 1), 'Older videos', off=not more)}</nav>"
    )
    return (
        '<section class="shelf" data-desk><h2 data-heading tabindex="-1">History</h2>'
        f'<p class="unseen" role="status" aria-live="polite">{len(cards)} shown, page {page + 1}</p>{empty}'
        f'<ul class="gallery"{"" if cards else " hidden"}>{items}</ul>{turns}</section>'
    )


def room(taken: DiskUsage, old: Mapping[int, tuple[int, int]]) -> str:
    """Return how much room videos take, and what may go.

    Args:
        old: how many jobs are older than so many days, and their bytes.
    """
    said = f"{_videos(taken.videos)}, {byte_size(taken.video_bytes)}. Checkpoints: {byte_size(taken.checkpoint_bytes)}."
    offers = []
    if taken.finished_bytes:
        size = byte_size(taken.finished_bytes)
        offers.append(
            button(
                "clean",
                f"Remove checkpoints of finished videos: {size}",
                "",
                "Remove checkpoints of finished videos",
                confirm=f"Remove {size} of checkpoints? The videos stay; their second halves cannot be redone then.",
            )
        )
    for days, (count, size_then) in old.items():
        many = f"{count} {'job' if count == 1 else 'jobs'} older than {days} days"
        offers.append(
            button(
                "delete-old",
                f"Delete {many}: {byte_size(size_then)}",
                str(days),
                f"Delete {many}",
                confirm=f"Delete {many} ({byte_size(size_then)})? They can be had back for 7 days, under “Deleted”.",
            )
        )
    if taken.deleted:
        gone = f"{taken.deleted} deleted {'job' if taken.deleted == 1 else 'jobs'}"
        offers.append(
            button(
                "purge",
                f"Remove {gone} for good: {byte_size(taken.deleted_bytes)}",
                "",
                f"Remove {gone} for good",
                confirm=f"Remove {gone} and their files for good? They cannot be had back then.",
            )
        )
    return (
        f'<section class="shelf" data-desk><h2>DiskUsage</h2><p class="aside">{said}</p>'
        f'<div class="acts offers">{"".join(offers)}</div></section>'
    )


def detail(one: Detail | None) -> str:
    """Return everything about one job, and what can be done with it."""
    if one is None:
        return ""
    title = escape(f"“{one.prompt}”", quote=True)
    video = (
        f'<video src="{one.video}" controls loop playsinline preload="metadata" aria-label="Video: {title}"></video>'
        if one.video
        else ""
    )
    wrong = f'<p class="trouble">{escape(one.what)}</p>' if one.what else ""
    kept = f'<p class="aside">{escape(one.kept)}</p>' if one.kept else ""
    return (
        f'<section class="shelf whole" data-desk data-detail="{one.id}">'
        f'<div class="row-end"><h2 tabindex="-1">{FILTERS.get(one.state, one.state.title())}</h2>'
        f"{button('close', 'Close', '', 'Close the details')}</div>"
        f'{video}<p class="caption">{escape(one.prompt)}</p>{wrong}{kept}{result_view.notes(one.warnings)}'
        f'<div class="acts">{_acts(one)}</div>{_again(one)}{result_view.listed(one.told)}'
        f'<p class="why">{escape(one.why)}</p></section>'
    )


def when(seconds: float | None) -> str:
    """Return a time of the clock: "2026-11-20 18:05"."""
    return "" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _acts(one: Detail) -> str:
    title = f"“{one.prompt}”"
    settings = escape(json.dumps(dict(one.request)), quote=True)
    if one.deleted:
        return button("undelete", "Have back", one.id, f"Have back: {title}", strong=True)
    made = ""
    if one.video:
        name = escape(one.name, quote=True)
        made = (
            f'<a class="button strong" href="{one.video}" download="{name}">Download</a>'
            f'<a class="button" href="tandem/copy/{one.id}.mp4" download="tandem-{one.id}.mp4" '
            'title="The same pictures, without prompt and settings in the file">Copy without metadata</a>'
        )
    resume = button("resume", "Resume", one.id, f"Resume: {title}", strong=True) if one.resumable else ""
    return (
        f"{resume}{made}"
        f'<button type="button" class="button" data-reuse="{settings}">Use its settings</button>'
        f'<span class="report"><button type="button" class="button" data-report="{one.id}">Copy report</button>'
        '<label><input type="checkbox" class="with-prompts"> with prompts and paths</label></span>'
        f"{button('delete', 'Delete', one.id, f'Delete: {title}')}"
    )


def _again(one: Detail) -> str:
    """Return the form that redoes a second half."""
    if not one.again:
        return ""
    titles = dict(zip(BACKENDS, ("Automatic", "TensorRT", "Inductor", "ONNX Runtime", "PyTorch"), strict=True))
    options = "".join(
        f'<option value="{name}"{" selected" if name == one.again["backend"] else ""}>{title}</option>'
        for name, title in titles.items()
    )
    return (
        '<details class="again"><summary>Redo the second half</summary>'
        '<form data-form="redo"><p class="aside">The low-noise transformer anew, from where the first one ended: '
        "detail changes, the scene stays.</p>"
        f'<p><label>Low-noise guidance <input name="guidance_scale_2" type="number" min="0" max="100" step="0.5" '
        f'value="{one.again["guidance_scale_2"]:g}"></label> '
        f'<label>Frames per second <input name="fps" type="number" min="1" max="120" '
        f'value="{one.again["fps"]}"></label> '
        f'<label>Runs on <select name="backend">{options}</select></label></p>'
        f"{button('redo', 'Redo', one.id, 'Redo the second half', strong=True)}</form></details>"
    )


def _card(card: Card) -> str:
    title = f"“{card.prompt}”"
    picture = f'<img src="{card.poster}" alt="" loading="lazy" decoding="async">' if card.poster else ""
    state = "" if card.state == "done" and not card.deleted else f'<span class="tag">{FILTERS[card.state]}</span>'
    below = " · ".join(filter(None, (card.when, card.size)))
    pick = (
        f'<label class="pick"><input type="checkbox" data-pick="{card.id}" '
        f'aria-label="{escape(f"Compare {title}", quote=True)}"> Compare</label>'
        if card.state == "done" and not card.deleted
        else "<span></span>"
    )
    back = button("undelete", "Have back", card.id, f"Have back: {title}") if card.deleted else ""
    return (
        f'<li data-job="{card.id}" data-state="{card.state}">'
        f'<button type="button" class="poster" data-act="open" data-of="{card.id}" data-confirm="" '
        f'aria-label="{escape(f"Show {title}", quote=True)}">{picture}</button>'
        f'<p class="title">{escape(card.prompt)}</p><p class="below">{state} {escape(below)}</p>{pick}{back}</li>'
    )


def _videos(count: int) -> str:
    return f"{count} video{'' if count == 1 else 's'}"


def redo_changes(values: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the form that redoes a second half changes; numbers come as a browser has them, as text.

    Args:
        made: as in `Detail.again`.
    """
    if not made:
        return {}
    changes: dict[str, Any] = {}
    for name, kind in (("guidance_scale_2", float), ("fps", int)):
        given = values.get(name)
        try:
            changes[name] = kind(given) if isinstance(given, str | int | float) else given
        except ValueError:
            changes[name] = given
    backend = values.get("backend", AUTO)
    if backend != made["backend"]:
        changes["backends"] = {"transformer_2": backend}
    return {name: value for name, value in changes.items() if name == "backends" or value != made[name]}


def words(sentence: str) -> str:
    """Return a sentence as the page says it."""
    return acceleration.in_form_words(sentence)
