"""What a page shows of a job: picture, status line, result; how it can be resumed; how pages and programs follow it.

Following changes nothing: closing a page leaves its job running. Gradio patches changed attributes and texts into the
page, child by child. Every state therefore has the same elements in the same order: nothing moves, the preview does
not flicker, and screen readers keep their live regions.
"""

import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runtime.core.errors import MODEL_UNUSABLE
from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    OutOfMemory,
    Planned,
    Resumed,
    StepDone,
    TerminalEvent,
    VideoSaved,
)
from runtime.core.facts import Fact, capitalized, first_words, lowered
from runtime.core.plan import BACKEND_TITLES, INTERPOLATOR_TITLES, ExecutionPlan
from runtime.core.progress import OF_FRAMES, Progress
from runtime.core.request import FIELDS, LOSSLESS, NO_NAG, OFF, STAGES
from runtime.core.step_cache import NONE
from runtime.core.units import counted, memory_size
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job, Task
from runtime.server.job_files import find_output
from runtime.server.watchers import Watch
from runtime.ui import fields, formatting
from runtime.ui.formatting import page_text, render, sentences
from runtime.ui.image_places import used_images
from runtime.ui.restored import settings_of

# At most this late, a page that has to end is noticed.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Audience:
    """Who sees a page: the owner or visitors.

    Attributes:
        details: where the details of an internal error are, as a sentence.
        address: returns the address of a finished job's video.
        clip: returns the address of the clip of a running job's finished sections or frames, by their number.
        redact: removes from a text what the audience must not see.
        panels: whether their page has the panels, which add to the queue and resume jobs.
        opens_folders: whether their browser runs on this machine, which has a screen.
    """

    details: str
    address: Callable[[Job], str]
    clip: Callable[[Job, int], str]
    redact: Callable[[str], str] = str
    panels: bool = True
    opens_folders: bool = False


@dataclass(frozen=True)
class Line:
    """The status line.

    Attributes:
        state: idle, queued, running, stopping, done, failed or cancelled.
        title: the stage.
        detail: step or frame.
        left: the estimated time left.
        fraction: share that is done, 0 to 1; `None` while it is unknown.
        what, remedy: of an error.
        field: whose value the error is about.
        checkpoint: from which step a job that ended without a video continues.
        resumable: whether it can be resumed.
        alternative: the lower-memory strategy that it can be resumed with.
        finishable: whether it can be stopped after the section that is made.
        continues: whether its video ended early and can be continued.
    """

    state: str
    title: str = ""
    detail: str = ""
    left: str = ""
    fraction: float | None = None
    what: str = ""
    remedy: str = ""
    field: str = ""
    checkpoint: str = ""
    resumable: bool = False
    alternative: str = ""
    finishable: bool = False
    continues: bool = False


# Below a preview, and without one.
_ENDED_WITHOUT_VIDEO = {"failed": "Failed: last preview", "cancelled": "Cancelled: last preview"}
_WITHOUT_PICTURE = {
    "idle": "Your video will appear here.",
    "queued": "Waiting.",
    "running": "The first preview will appear soon.",
    "stopping": "The first preview will appear soon.",
    "failed": "No video.",
    "cancelled": "Cancelled.",
}
# Of the frame before there is a job, in pixels.
_USUAL_SIZE = (192, 112)

IDLE = Line("idle", "Ready", "Describe a scene, then select Generate.", left="Ctrl + Enter generates")


@dataclass(frozen=True)
class View:
    """The HTML that a page shows of a job, and the state of its buttons."""

    picture: str
    status: str
    facts: str
    busy: bool
    stopping: bool
    job_id: str


def view(job: Job, worker: JobQueue, audience: Audience, icon: str, now: float) -> View:
    """Return what to show of a job at `now`, in seconds of the monotonic clock."""
    progress = job.progress
    line = status_line(job, progress, worker, audience, now)
    address = audience.address(job) if line.state == "done" else ""
    size, poster = (job.summary.width, job.summary.height), poster_address(job, audience)
    clip = _clip(job, progress, line, audience)
    before = _before(job, progress, address, audience)
    return View(
        picture=picture_html(progress, line.state, icon, address, poster, size, clip, before=before),
        status=status_html(line, job.id, panels=audience.panels),
        facts=_facts(job, progress, address, audience),
        busy=progress.end is None and job.state != "interrupted",
        stopping=line.state == "stopping",
        job_id=job.id,
    )


@dataclass(frozen=True)
class Clip:
    """The clip of a job's finished sections, or first frames.

    Attributes:
        address: where it is served.
        of: "2 of 4 sections", or "33 of 81 frames".
        making: the number of the section that is made meanwhile; 0 if none is.
    """

    address: str
    of: str
    making: int


@dataclass(frozen=True)
class Before:
    """What a finished video can be compared with.

    Attributes:
        address: where its clip is served.
        title: of the button.
    """

    address: str
    title: str


@dataclass(frozen=True)
class Cell:
    """One video of a group.

    Attributes:
        number: in the group, from 1.
        state: queued, running, stopping, done, failed or cancelled.
        text: what it does, or why there is no video.
        still: address of its last preview or its still image; empty without one.
        address: of its video; empty if it is not played.
        percent: progress of a running one.
        sound: whether its video has sound.
    """

    id: str
    number: int
    state: str
    text: str
    still: str
    address: str
    percent: int | None
    selected: bool
    starred: bool
    sound: bool


@dataclass(frozen=True)
class Grid:
    """The videos of a group.

    Attributes:
        rows: how many are in view at once; the others are scrolled to.
    """

    cells: Sequence[Cell]
    columns: int
    rows: int


def _clip(job: Job, progress: Progress, line: Line, audience: Audience) -> Clip | None:
    clip = None if line.state == "done" else job.clip
    if clip is None:
        return None
    summary = job.summary
    of = counted(summary.frames, "frame") if summary.sections == 1 else counted(summary.sections, "section")
    return Clip(
        address=audience.clip(job, clip[0]),
        of=f"{clip[0]} of {of}",
        # While the last of them is being saved, it is still the one that is made.
        making=progress.section if line.state in {"running", "stopping"} and progress.section > clip[0] else 0,
    )


def _before(job: Job, progress: Progress, address: str, audience: Audience) -> Before | None:
    """Return what a video was made from: its control video, the video that it changes, or its decoded frames."""
    saved = progress.end
    if not address or not audience.panels or not isinstance(saved, VideoSaved):
        return None
    for field in ("control", "video"):
        if field in job.summary.inputs:
            title = f"Compare with the {FIELDS[field].label.lower()}"
            return Before(f"tandem/before/{job.id}.mp4", title)
    plain = saved.plain
    return None if plain is None else Before(file_url(plain, saved), "Compare with the frames as they were decoded")


async def follow_events(job: Job, watch: Watch) -> AsyncIterator[Event]:
    """Yield every event of a job, up to and including the terminal one, unless `watch` ends first."""
    position = 0
    while not watch.ended:
        count = job.changes.count
        interrupted, events = job.state == "interrupted", job.events
        position = min(position, len(events))  # a resumed job starts a new list
        for event in events[position:]:
            position += 1
            yield event
            if isinstance(event, TerminalEvent):
                return
        if interrupted:
            yield Failed(fact=_interrupted(job))
            return
        await job.changes.after(count, _LOOK_SECONDS)


def status_line(job: Job, progress: Progress, worker: JobQueue, audience: Audience, now: float) -> Line:
    """Return the status line of a job."""
    if progress.end is not None:
        return _ended(progress.end, job, worker, audience)
    if job.state == "interrupted":
        return _resumable(Line("failed", what=page_text(_interrupted(job)).what), job)
    if job.cancelling:
        return Line("stopping", "Stopping…", fraction=progress.fraction)
    if job.held:
        return Line("queued", "Paused", "Paused until you resume it.", fraction=progress.fraction)
    if job.state == "queued":
        return Line("queued", "Waiting", waiting_text(job, worker))
    line = running_line(progress.at(now))
    if job.finishing:
        return replace(line, left=page_text(Fact("ui.ends_after_section")).what)
    return replace(line, finishable=job.summary.sections > 1 and progress.section < job.summary.sections)


def waiting_text(of: Job | Task, worker: JobQueue) -> str:
    """Return what a queued job or task waits for and, as far as it is known, how long: a build waits for all videos."""
    if isinstance(of, Task) and of.kind == "build":
        waits = Fact("ui.build_waits_idle" if of.idle else "ui.build_waits")
        seconds = of.seconds_left
        return sentences([waits] if seconds is None else [waits, Fact("ui.takes", {"seconds": seconds})])
    ahead = worker.ahead(of)
    if not ahead:
        return sentences([Fact("ui.starting")])
    code = "ui.videos_ahead" if {job.kind for job in ahead.values()} <= {"video"} else "ui.tasks_ahead"
    place, seconds = Fact(code, {"count": len(ahead)}), worker.seconds_until(ahead)
    return sentences([place] if seconds is None else [place, Fact("ui.starts_in", {"seconds": seconds})])


def picture_html(
    progress: Progress | None,
    state: str,
    icon: str,
    address: str = "",
    poster: str = "",
    size: tuple[int, int] = _USUAL_SIZE,
    clip: Clip | None = None,
    grid: Grid | None = None,
    before: Before | None = None,
) -> str:
    """Return the frame with the video, or else with the last preview: dimmed if the job ended without a video.

    Args:
        address: where the video is served; empty without one.
        poster: address of a finished video's still image, for a video that is not served.
        size: width and height of the video in pixels.
        clip: of what is finished, while there is no video; the last preview is of the section that is made meanwhile.
        grid: the videos of a group, which take the whole frame.
        before: what the video can be compared with.
    """
    still = preview_address(progress) if progress else ""
    if state == "done":
        still = "" if address else still or poster
    if clip is not None and not clip.making:
        still = ""
    saved = progress.end if progress else None
    words = _ENDED_WITHOUT_VIDEO.get(state, "") if still else "" if clip else _WITHOUT_PICTURE.get(state, "")
    label = f"Video: {saved.request['prompt']}" if isinstance(saved, VideoSaved) else "Video"
    return render(
        "player_picture.html",
        state=state,
        still=still,
        alt="Last preview of the video" if state in _ENDED_WITHOUT_VIDEO else "Preview of the video so far",
        address=clip.address if clip else address,
        label=f"Video so far: {clip.of}" if clip else label,
        sound=isinstance(saved, VideoSaved) and saved.sound,
        clip=clip,
        icon=icon,
        text="" if grid else words,
        size=size,
        grid=grid,
        before=before,
    )


def preview_address(progress: Progress) -> str:
    """Return the last preview as an address; empty without one."""
    preview = progress.preview
    return f"data:image/webp;base64,{base64.b64encode(preview).decode()}" if preview else ""


def status_html(line: Line, job_id: str = "", *, panels: bool = True) -> str:
    """Return the status line with its bar, live regions, error and buttons to resume.

    Args:
        panels: whether the page can resume jobs.
    """
    busy = line.state in {"queued", "running", "stopping"}
    # Stages are announced to screen readers, steps are not.
    announced = {"idle": "", "running": line.title}.get(line.state, f"{line.title} {line.detail}".strip())
    return render(
        "player_status.html",
        line=line,
        what=capitalized(line.what),
        job=job_id,
        percent=None if line.fraction is None else round(100 * line.fraction),
        busy=busy,
        spoken=", ".join(part for part in (line.title, line.detail, line.left) if part),
        announced=announced,
        panels=panels,
    )


def _ended(end: TerminalEvent, job: Job, worker: JobQueue, audience: Audience) -> Line:
    """Return the status line of a job that ended."""
    if isinstance(end, VideoSaved):
        return _done(end, job, worker, audience)
    if isinstance(end, Cancelled):
        fact = Fact("ui.nothing_saved" if job.clip is None else "ui.sections_kept")
        return _resumable(Line("cancelled", "Cancelled.", page_text(fact).what), job)
    text = page_text(end.fact, job.plan.components)
    remedy = audience.details if end.internal else audience.redact(text.remedy)
    line = Line("failed", what=audience.redact(text.what), remedy=remedy)
    return line if end.fact.code in MODEL_UNUSABLE else _resumable(line, job)


def _done(saved: VideoSaved, job: Job, worker: JobQueue, audience: Audience) -> Line:
    """Return the status line of a finished video: what is wrong with it comes first."""
    seed = f"Seed {saved.request['seed']}."
    if saved.sections is not None and saved.continues:
        count, of, _ = saved.sections
        detail = page_text(Fact("ui.video_unfinished", {"made": count, "of": of})).what
        continued = page_text(Fact("ui.video_can_continue")).what if audience.panels else ""
        return Line("done", "Done", f"{detail} {seed} {continued}".strip(), fraction=1.0, continues=audience.panels)
    if not audience.address(job):
        lost = Fact("ui.video_outside" if saved.video.exists() else "ui.video_gone", {"file": saved.video})
        return Line("done", "Done", page_text(lost).what, fraction=1.0)
    unknown = next((fact for fact in saved.warnings if _is_unknown_words(fact)), None)
    if unknown is not None:
        # The largest group has the things.
        words = max(worker.words(job.summary.model).values(), key=len, default=())
        detail = f"{page_text(Fact('ui.can_draw', {'words': words})).what} {seed}" if words else seed
        title = Fact("ui.cannot_draw", {"model": job.model_title, "words": first_words(unknown.data["words"])})
        return Line("done", page_text(title).what, detail, fraction=1.0)
    return Line("done", "Done", f"{page_text(Fact('ui.video_ready')).what} {seed}", fraction=1.0)


def _is_unknown_words(fact: Fact) -> bool:
    return fact.code == "pipeline.unknown_words" and fact.data.get("field") == "prompt"


def poster_address(job: Job, audience: Audience) -> str:
    """Return the address of a finished job's still image; only the owner's page serves them."""
    return f"tandem/poster/{job.id}.webp" if audience.panels else ""


def _facts(job: Job, progress: Progress, address: str, audience: Audience) -> str:
    if isinstance(progress.end, VideoSaved):
        return audience.redact(result_html(progress.end, job, address, audience))
    # Warnings matter most while the job can still be stopped.
    lines = [page_text(fact, job.plan.components).what for fact in progress.warnings] if job.open else []
    return audience.redact(render("warnings.html", lines=lines)) if lines else ""


def _interrupted(job: Job) -> Fact:
    # Visitors have no command line.
    return Fact("ui.interrupted" if job.owner is None else "server.interrupted", {"job": job.id})


def running_line(progress: Progress) -> Line:
    """Return what a running job does, how far it is, and the time left."""
    detail = ""
    if progress.stage == "denoise" and progress.steps:
        # The step that runs, not the last finished one: 1 of 20 during the first step.
        steps = progress.plan.steps if progress.section and progress.plan is not None else progress.steps
        detail = f"step {progress.section_step} of {steps}"
    elif progress.building is not None:
        detail = page_text(progress.building.progress).what
    elif progress.stage in OF_FRAMES:
        detail = f"{progress.frames} of {progress.frame_count} frames"
    time_left = formatting.time_left(progress.seconds_left)
    if progress.section and progress.plan is not None:
        detail = f"section {progress.section} of {progress.plan.sections}, {detail}"
        rest = progress.section_seconds_left
        if rest is not None and rest >= 1 and progress.section < progress.plan.sections:
            time_left = f"{formatting.time_left(rest).removesuffix(' left')} for this section, {time_left}"
    return Line("running", progress.title, detail, time_left, progress.fraction)


def _resumable(line: Line, job: Job) -> Line:
    """Return the line of a job that ended without a video, with how it can be resumed."""
    status = resume_status(job.events, job.checkpoint_step)
    return replace(line, checkpoint=status.checkpoint, resumable=True, alternative=status.alternative)


_STAGES = {
    "encode": "reading the prompt",
    "denoise": "denoising",
    "decode": "decoding",
    "interpolate": "interpolating",
    "upscale": "upscaling",
    "mux": "saving",
}


def file_url(path: Path, saved: VideoSaved | None = None) -> str:
    """Return the address of a video in the outputs folder, relative to the page so that it works behind a proxy.

    Args:
        saved: of a video that may be continued; a continued one has another address, so that no page plays the old one.
    """
    version = "" if saved is None or saved.sections is None else f"?{saved.sections[0]}"
    return f"gradio_api/file={quote(path.as_posix())}{version}"


def video_address(job: Job, outputs_dir: Path) -> str:
    """Return the address of a finished job's video on the owner's page; empty if it is not in the outputs folder."""
    saved = job.progress.end
    if not isinstance(saved, VideoSaved) or find_output(str(saved.video), outputs_dir) is None:
        return ""
    return file_url(saved.video, saved)


def clip_address(job: Job, count: int) -> str:
    """Return the address of the clip of a job's finished sections or frames on the owner's page."""
    return f"tandem/clip/{job.id}/{count}.mp4"


def result_html(saved: VideoSaved, job: Job, address: str, audience: Audience) -> str:
    """Return the block below a finished video.

    Args:
        address: where the video is served; empty if it is not.
    """
    rows = result_rows(saved, job.plan, job.model_title)
    plain = saved.plain if address and audience.panels else None
    return render(
        "result.html",
        job=job.id,
        request=dict(saved.request),
        settings=settings_of(saved),
        name=saved.video.name,
        address=address,
        panels=audience.panels,
        opens_folders=audience.opens_folders,
        in_batch=job.group is not None,
        # The status line states the unknown words.
        warning_lines=[
            page_text(fact, job.plan.components).what for fact in saved.warnings if not _is_unknown_words(fact)
        ],
        summary=_summary(saved),
        parts=_parts(saved),
        rows=rows,
        images=used_images(job.summary.inputs, pictures=audience.panels),
        reasons=backend_reasons(saved, job.plan),
        plain="" if plain is None else file_url(plain),
        plain_name="" if plain is None else plain.name,
    )


def _parts(saved: VideoSaved) -> list[tuple[str, float, float]]:
    """Return the prompt of each part of a video that was extended, and when it starts and ends in seconds."""
    parts, frames = [], 0
    for part in saved.plan.get("parts") or ():
        start, frames = frames, frames + part["frames"]
        parts.append((str(part["prompt"]), start / saved.request["fps"], frames / saved.request["fps"]))
    return parts if len(parts) > 1 else []


def _summary(saved: VideoSaved) -> str:
    """Return the most important facts of a video as one line."""
    request = saved.request
    places = dict.fromkeys(part["backend"] for part in saved.plan["components"].values())
    return " · ".join(
        (
            f"Seed {request['seed']}",
            formatting.size(*saved.size),
            f"{saved.frames / saved.fps:.1f} s",
            counted(request["steps"], "step"),
            f"made in {formatting.duration(saved.timings['total'])}",
            ", ".join(BACKEND_TITLES.get(name, name) for name in places),
        )
    )


def backend_reasons(saved: VideoSaved, plan: ExecutionPlan) -> list[tuple[str, str]]:
    """Return why components ran where they did: names and the reason that they share; no names if all share it."""
    reasons: dict[str, tuple[str, ...]] = {}
    for name, part in saved.plan["components"].items():
        # Earlier versions saved text.
        facts = [page_text(Fact(**fact)).what for fact in part["reasons"]] if "reasons" in part else [part["reason"]]
        reasons[lowered(plan.title(name))] = tuple(dict.fromkeys(map(str, filter(None, facts))))
    common = [text for text in next(iter(reasons.values()), ()) if all(text in texts for texts in reasons.values())]
    names_by_text: dict[str, list[str]] = {}
    for title, texts in reasons.items():
        names_by_text.setdefault(" ".join(text for text in texts if text not in common), []).append(title)
    rows = [(capitalized(", ".join(names)), text) for text, names in names_by_text.items() if text]
    return [*rows, ("", " ".join(common))] if common else rows


def result_rows(saved: VideoSaved, plan: ExecutionPlan, model: str) -> list[tuple[str, str]]:
    """Return names and values that describe a video."""
    request = saved.request
    rows = [
        ("Seed", str(request["seed"])),
        ("Video", f"{formatting.size(*saved.size)}, {formatting.length(saved.frames, saved.fps)}"),
        ("Model", f"{model}, {request['steps']} steps, {_guidance(request)}"),
        *_finished(saved),
        *_extras(request),
        ("Time", _time(saved)),
        ("Memory", f"{memory_size(saved.peak_memory_bytes)} at most"),
    ]
    return rows + [("Ran on", place) for place in _places(saved.plan["components"], plan)]


def _guidance(request: Mapping[str, Any]) -> str:
    second = request.get("guidance_scale_2")
    return f"guidance {request['guidance_scale']:g}" + ("" if second is None else f" and {second:g}")


def _finished(saved: VideoSaved) -> list[tuple[str, str]]:
    """Return what was done with the frames, and how the sound is saved if there is some."""
    request, rows = saved.request, []
    if saved.sound:
        rows.append(("Sound", "FLAC, lossless" if request.get("sound") == LOSSLESS else "AAC"))
    if saved.plan.get("looping") is not None:
        rows.append(("Loop", {"same frame": "ends on its first frame"}.get(saved.plan["looping"], "played backwards")))
    if saved.plan.get("interpolation") is not None:
        times = f"{request['interpolate']} times from {request['fps']} fps"
        by = INTERPOLATOR_TITLES[saved.plan["interpolation"].get("by", "minterpolate")]
        rows.append(("Interpolated", f"{times} by {by}"))
    if saved.plan.get("upscaling") is not None:
        made = formatting.size(request["width"], request["height"])
        rows.append(("Upscaled", f"{request['upscale']} times from {made} by {request['upscaler']}"))
    return rows


def _extras(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings that differ from their defaults."""
    loras, step_cache = fields.loras_text(request.get("loras")), request.get("step_cache", NONE)
    rows = [("LoRA", line) for line in loras.splitlines()]
    rows += [] if step_cache == NONE else [("Step cache", str(step_cache))]
    guidance_cache = request.get("guidance_cache", OFF)
    rows += [] if guidance_cache == OFF else [("Guidance cache", str(guidance_cache))]
    rows += [] if request.get("nag", NO_NAG) == NO_NAG else [("Negative attention", f"{request['nag']:g}")]
    rows += [("Stages", STAGES["2"])] if request.get("stages") == "2" else []
    rows += [("Strength", f"{request['strength']:g}")] if request.get("video") else []
    shift = request.get("shift")
    return rows if shift is None else [*rows, ("Shift", f"{shift:g}")]


def _time(saved: VideoSaved) -> str:
    stages = ", ".join(
        f"{_STAGES.get(name, name)} {formatting.duration(seconds)}"
        for name, seconds in saved.timings.items()
        if name != "total"
    )
    loading = f"; loading before that {formatting.duration(saved.load_seconds)}" if saved.load_seconds >= 0.05 else ""  # noqa: PLR2004 - shows as 0.0 s
    return f"{formatting.duration(saved.timings['total'])}: {stages}{loading}"


def _places(components: Mapping[str, Mapping[str, Any]], plan: ExecutionPlan) -> list[str]:
    """Return each place with the components that ran there."""
    parts: dict[str, list[str]] = {}
    for name, choice in components.items():
        title = plan.title(name)
        parts.setdefault(_where(choice), []).append(lowered(title))
    return [f"{place}: {', '.join(names)}" for place, names in parts.items()]


def _where(choice: Mapping[str, Any]) -> str:
    backend = BACKEND_TITLES.get(choice["backend"], choice["backend"])
    return f"{backend} on {choice['device'].replace('cpu', 'the CPU')}, {choice['dtype']}"


@dataclass(frozen=True)
class ResumeStatus:
    """How a job can be resumed.

    Attributes:
        checkpoint: where the job stopped and from which step it continues, as sentences.
        step: last step of the checkpoint; `None` if the job starts over.
        memory: where memory ran out and how much work was lost; empty if it did not run out.
        alternative: the lower-memory strategy that the job can be resumed with; empty if there is none.
        changes: to the request, for that strategy.
    """

    checkpoint: str
    step: int | None
    memory: str
    alternative: str
    changes: Mapping[str, Any]


def resume_status(events: Sequence[Event], step: int | None) -> ResumeStatus:
    """Return how a job can be resumed.

    Args:
        events: of its last run.
        step: of its checkpoint, which may be newer than the last event; `None` if there is none.
    """
    reached, of = step or 0, 0
    memory: OutOfMemory | None = None
    for event in events:
        if isinstance(event, Planned):
            of = event.plan.total_steps
        elif isinstance(event, Resumed | StepDone):
            reached, of = max(reached, event.step), event.of
        elif isinstance(event, OutOfMemory):
            memory = event
    changes = {} if memory is None or memory.retried else memory.changes
    alternative = "" if memory is None or memory.strategy is None or not changes else page_text(memory.strategy).what
    problem = "" if memory is None else _memory(memory)
    return ResumeStatus(sentences(_kept(reached, of, step)), step, problem, alternative, changes)


def _kept(reached: int, of: int, step: int | None) -> list[Fact]:
    if not reached:
        return [Fact("resume.not_begun")] if of else []
    if reached != of:
        stopped = Fact("resume.stopped", {"step": reached, "steps": of})
    elif of > 1:
        stopped = Fact("resume.steps_done", {"steps": of})
    else:
        stopped = Fact("resume.step_done")
    if step is None:
        return [stopped, Fact("resume.no_checkpoint")]
    if step == reached:
        return [stopped, Fact("resume.decoding" if reached == of else "resume.from_there")]
    return [stopped, Fact("resume.after_step", {"step": step}) if step else Fact("resume.first_step")]


def _memory(memory: OutOfMemory) -> str:
    if memory.lost_seconds < 1 or memory.retried:
        return page_text(memory.fact).what
    return sentences([memory.fact, Fact("resume.work_lost", {"seconds": memory.lost_seconds})])
