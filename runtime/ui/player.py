"""The stage: the picture, and the line and bar below it. HTML as text; knows nothing about gradio or threads.

gradio patches changed attributes and texts into the page, child by child. So every state has the same children in the
same order: nothing jumps, the preview does not flicker, and the live regions stay the ones that screen readers watch.
"""

import base64
from dataclasses import dataclass
from html import escape

from runtime.core.progress import Progress
from runtime.ui import formatting, queue_view

_IDLE = "Your video will appear here."


@dataclass(frozen=True)
class Line:
    """What the status line says.

    Attributes:
        state: idle, queued, running, stopping, done, failed or cancelled.
        title: the stage in words.
        detail: step or frame.
        left: the forecast.
        fraction: share done; `None` while it is unknown.
        what, remedy: of an error.
        field: whose value the error is about.
        kept: from where a job that ended without a video goes on.
        resumable: whether it can be resumed.
        way: in which more frugal way it could go on too.
    """

    state: str
    title: str = ""
    detail: str = ""
    left: str = ""
    fraction: float | None = None
    what: str = ""
    remedy: str = ""
    field: str = ""
    kept: str = ""
    resumable: bool = False
    way: str = ""


IDLE = Line("idle", "Ready", "Describe a scene, then press Generate or Ctrl + Enter.")


def picture(progress: Progress | None, state: str, icon: str, address: str = "") -> str:
    """Return the mat with the preview and, once it is whole, the video over it, which is served at `address`."""
    preview = progress.preview if progress else None
    saved = progress.end if progress and state == "done" else None
    source = f"data:image/webp;base64,{base64.b64encode(preview).decode()}" if preview else ""
    image = (
        f'<img class="preview" src="{source}" alt="Preview of the video so far">'
        if source and state not in {"failed", "cancelled"}
        else '<img class="preview" alt="" hidden>'
    )
    video = "<span hidden></span>"
    if saved is not None:
        label = escape(f"Video: {saved.request['prompt']}", quote=True)  # type: ignore[union-attr]  # state says done
        video = f'<video src="{address}" aria-label="{label}" autoplay muted loop controls playsinline></video>'
    words = {"idle": _IDLE, "queued": "Waiting for its turn.", "failed": "No video.", "cancelled": "Cancelled."}
    blank = "" if source or saved else words.get(state, "The first preview is on its way.")
    return (
        f'<div class="mat" data-state="{state}">{image}{video}'
        f'<p class="blank">{icon if blank else ""}<span>{escape(blank)}</span></p></div>'
    )


def status(line: Line, job_id: str = "", *, desk: bool = True) -> str:
    """Return the line, the bar, what a screen reader hears, the alert, and how a job can go on.

    Args:
        desk: whether the page has one, which takes up jobs again.
    """
    percent = None if line.fraction is None else round(100 * line.fraction)
    busy = line.state in {"queued", "running", "stopping"}
    shown = ", ".join(part for part in (line.title, line.detail, line.left) if part)
    value = "" if percent is None else f' aria-valuenow="{percent}"'
    bar = (
        f'<div class="bar" role="progressbar" aria-label="Progress of the video" aria-valuemin="0" aria-valuemax="100"'
        f'{value} aria-valuetext="{escape(shown, quote=True)}"{"" if busy else " hidden"}>'
        f'<span style="width:{percent or 0}%"{" class=waiting" if busy and not percent else ""}></span></div>'
    )
    what = line.what[:1].upper() + line.what[1:]
    # Stages are announced, steps are not: nobody wants to hear each of them.
    heard = {"idle": "", "running": line.title}.get(line.state, f"{line.title} {line.detail}".strip())
    way = f"Go on: {line.way[:1].lower()}{line.way[1:]}"
    acts = "".join(
        f"<span{'' if there else ' hidden'}>{queue_view.button(act, escape(title), job_id, title)}</span>"
        for act, title, there in (("resume", "Resume", line.resumable), ("other-way", way, line.way))
        if desk
    )
    return (
        f'<div class="status" data-state="{line.state}" data-job="{job_id}" '
        f'data-field="{escape(line.field, quote=True)}">'
        f'<p class="line"><strong>{escape(line.title)}</strong> <span class="detail">{escape(line.detail)}</span> '
        f'<span class="left">{escape(line.left)}</span></p>'
        f"{bar}"
        f'<p class="unseen" role="status" aria-live="polite">{escape(heard)}</p>'
        f'<p class="alert" role="alert"><strong>{escape(what)}</strong> <span>{escape(line.remedy)}</span></p>'
        f'<div class="next" data-desk{"" if desk and line.resumable else " hidden"}><p>{escape(line.kept)}</p>'
        f'<span class="acts">{acts}</span></div>'
        "</div>"
    )


def running(progress: Progress) -> Line:
    """Return the line of a running job."""
    detail = ""
    if progress.stage == "denoise" and progress.steps:
        # The step that is being made, not the last one made: 1 of 20 while the first one runs.
        detail = f"step {min(progress.step + 1, progress.steps)} of {progress.steps}"
    elif progress.building is not None:
        detail = str(progress.building.progress)
    elif progress.stage == "decode":
        detail = f"{progress.frames} of {progress.frame_count} frames"
    return Line("running", progress.title, detail, formatting.time_left(progress.seconds_left), progress.fraction)
