"""The panel History: a gallery of finished jobs, their details, disk usage, and the comparison of two videos."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.core.images import NO_BORDERS
from runtime.core.messages.components import TITLES
from runtime.core.request import BACKENDS, CONTROL_SCALE, FIELDS, NO_NAG, OFF, OVERLAP, STRENGTH
from runtime.core.request_fields import AUTO, Choice, ImageFiles, Loras, Scales, StepCache
from runtime.core.units import byte_size, counted
from runtime.pipeline.files import COMPUTE_FIELDS
from runtime.queue import storage
from runtime.queue.records import RESUMABLE, Group, JobRecord, State
from runtime.ui import fields, formatting, job_view
from runtime.ui.formatting import paragraph, render, sentences
from runtime.ui.image_places import used_images
from runtime.ui.jobs_panel import JobsPanel, failure, is_job_id, named, proportions
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.restored import settings_of
from runtime.video.similarity import Similarity
from runtime.video.similarity import similarity as measured_similarity

ALL, STARRED, DELETED = "all", "starred", "deleted"
# The states that can be filtered for, with their titles.
FILTERS: Mapping[str, str] = {
    ALL: "All", STARRED: "Starred", "done": "Done", "failed": "Failed", "cancelled": "Cancelled",
    "interrupted": "Interrupted", DELETED: "Deleted",
}  # fmt: skip
# Ages in days of which jobs can be deleted together.
AGES = (7, 30, 90, 365)
# Videos of earlier versions have no value for these fields.
_DEFAULTS_OF_NEWER: Mapping[str, Any] = {
    "upscaler": AUTO, "strength": STRENGTH, "stages": "1", "references": (), "control_scale": CONTROL_SCALE,
    "preprocess": OFF, "control_start": 0.0, "overlap": OVERLAP, "keyframes": (), "keyframe_seconds": (),
    "outpaint": NO_BORDERS, "extend_frames": AUTO, "nag": NO_NAG,
}  # fmt: skip
_ENDED: tuple[State, ...] = ("done", *RESUMABLE)
_PAGE = 48
_MAX_SEARCH, _MAX_PAGES = 200, 10_000
_PAIR = 2
# The parts that actions change; by default, all but the comparison.
_DRAWN: Mapping[str, Collection[str]] = {
    "refresh": ("gallery", "detail"),
    "more": (),
    "open": ("detail",),
    "star": ("detail",),
    "unstar": ("detail",),
    "again": (),
    "resume": ("gallery", "detail"),
    "measure-storage": ("storage",),
    "compare": ("comparison",),
    "measure": ("comparison",),
}


@dataclass(frozen=True)
class View:
    """What the panel shows.

    Attributes:
        search, state: filters of the gallery.
        pages: how many pages of the gallery are shown.
        stacks: ids of videos whose stacks are open.
        open: the job whose details are shown.
        pair: the ids of the two jobs whose videos are compared, or none.
    """

    search: str = ""
    state: str = ALL
    pages: int = 1
    stacks: frozenset[str] = frozenset()
    open: str = ""
    pair: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """One job in the gallery.

    Attributes:
        picture: address of its still image; empty without one.
        video: address of its video; empty if that cannot be played.
        plays: whether that, or each video of a closed stack, can be played.
        width, height: of the video, in pixels.
        size: of the video on disk, in bytes.
        problem: why there is no video, or where it is.
        stack: the videos of its group that match the view, in the order in which they were queued, if there are
            several. The card of a closed stack shows the newest one that can be played.
        finished: the size of a video that was upscaled, the rate of one that was interpolated, and "sound" of one that
            has it; empty for others.
        place: in an open stack, from 1; 0 for the card of a closed stack or of a video without a group.
    """

    job: JobRecord
    picture: str
    video: str
    plays: bool
    width: int
    height: int
    size: int
    problem: str
    finished: str = ""
    stack: Sequence[JobRecord] = ()
    place: int = 0

    @property
    def jobs(self) -> Sequence[JobRecord]:
        """The videos that the card stands for."""
        return self.stack if self.is_stack else (self.job,)

    @property
    def is_stack(self) -> bool:
        """Whether it is the card of a closed stack."""
        return len(self.stack) > 1 and not self.place

    @property
    def counts(self) -> list[str]:
        """How many videos a stack has, and how many of them are starred or not done."""
        states = Counter(job.state for job in self.stack)
        starred = sum(job.starred for job in self.stack)
        rest = [f"{states[state]} {FILTERS[state].lower()}" for state in RESUMABLE if states[state]]
        return [counted(len(self.stack), "variation"), *([f"{starred} starred"] if starred else []), *rest]

    @property
    def short_problem(self) -> str:
        """`problem`, with the file's name instead of its path if the job failed."""
        output = self.job.output
        return self.problem if self.job.state == "done" else self.problem.replace(str(output), output.name)


@dataclass(frozen=True)
class Clip:
    """One of two compared videos.

    Attributes:
        video: its address.
        request: every value as used.
        model: the model's title.
        seconds: duration of the job.
        places: backends and devices with their components, as one line.
        sound: whether it has sound.
    """

    id: str
    video: str
    request: Mapping[str, Any]
    model: str
    seconds: float
    places: str
    sound: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return self.request["width"], self.request["height"]

    @property
    def interpolation(self) -> int:
        """How many frames the video has for each that was generated."""
        factor = self.request.get("interpolate", OFF)
        return 1 if factor == OFF else int(factor)


class HistoryPanel(JobsPanel):
    """The panel; see `panels.Panel`."""

    def draw(self, call: Call, reply: Reply) -> dict[str, str]:
        """Return the parts that an action changes; the similarity only after it was measured."""
        try:
            view = read_view(call.view)
        except TandemError:  # `act` has reported it
            view = View()
        parts: dict[str, Callable[[], str]] = {
            "gallery": lambda: self._gallery(view),
            "detail": lambda: self._detail(view.open),
            "comparison": lambda: self._comparison(view.pair),
            "storage": self._storage,
        }
        names = _DRAWN.get(call.action, ("gallery", "detail", "storage"))
        selection = {name: draw for name, draw in parts.items() if name in names}
        if "similarity" in reply:
            line = reply.pop("similarity")
            selection["similarity"] = lambda: render("history_similarity.html", line=line)
        return drawn(selection)

    def act(self, call: Call) -> Reply:
        """Carry out an action."""
        read_view(call.view)  # refuses a view that the page does not send
        return super().act(call)

    def _actions(self) -> Mapping[str, Callable[[Call], Reply]]:
        return {
            **super()._actions(),
            "more": self._more,
            "measure-storage": lambda _: {},
            "compare": self._start_comparison,
            "measure": self._measure,
            "remove-checkpoints": self._remove_checkpoints,
            "delete-old": self._delete_old,
            "purge": self._purge_deleted,
        }

    def _job_actions(self) -> Mapping[str, Callable[[JobRecord, Call], Reply]]:
        return {**super()._job_actions(), "open": lambda _job, _call: {"opened": True}}

    def _more(self, call: Call) -> Reply:
        """Return the cards of the view's last page, which the script appends."""
        view = read_view(call.view)
        cards, more = self._cards(view, first=view.pages - 1)
        return {"cards": render("history_cards.html", cards=cards, titles=FILTERS), "more": more}

    def _start_comparison(self, call: Call) -> Reply:
        clips = [self._clip(self._job(job_id)) for job_id in read_view(call.view).pair]
        if not clips:
            return {}
        measured = same_picture(*clips)
        return {"compare": True, "measure": measured, "similarity": "Measuring the similarity…" if measured else ""}

    def _measure(self, call: Call) -> Reply:
        jobs = [self._job(job_id) for job_id in read_view(call.view).pair]
        clips = [self._clip(job) for job in jobs]
        if not clips or not same_picture(*clips):
            return {"similarity": ""}
        try:
            result = _similarity(*((job.output, job.output.stat().st_mtime_ns) for job in jobs))
        except OSError as error:  # it was deleted meanwhile
            raise _video_missing() from error
        return {"similarity": similarity(clips[0].request["frames"] * clips[0].interpolation, result)}

    def _remove_checkpoints(self, _call: Call) -> Reply:
        freed = storage.remove_finished_checkpoints(self._store, self._owner)
        return {"message": f"Removed: {byte_size(freed)} of checkpoints."}

    def _delete_old(self, call: Call) -> Reply:
        if call.target not in map(str, AGES):
            raise unknown_action()
        old = storage.older_than(self._store, self._owner, int(call.target))
        return self._delete(replace(call, target=" ".join(job.id for job in old))) if old else {}

    def _purge_deleted(self, _call: Call) -> Reply:
        jobs = self._store.list(owner=self._owner, deleted=True)
        self._purge(jobs)
        return {"message": f"Removed permanently: {named(jobs)}."}

    def _gallery(self, view: View) -> str:
        cards, more = self._cards(view)
        searched = bool(view.search.strip())
        unreadable = self._store.unreadable if self._owner is None else None
        return render(
            "history_gallery.html",
            cards=cards,
            more=more,
            searched=searched,
            filtered=searched or view.state != ALL,
            state=view.state,
            titles=FILTERS,
            problem="" if unreadable is None else paragraph(unreadable),
        )

    def _cards(self, view: View, first: int = 0) -> tuple[list[Card], bool]:
        """Return the cards of a view from page `first` on, and whether there are more."""
        count = _PAGE * (view.pages - first)
        matching = partial(
            self._store.list,
            states=tuple(state for state in _ENDED if view.state in {state, ALL, STARRED, DELETED}),
            search=view.search,
            owner=self._owner,
            deleted=view.state == DELETED,
            starred=view.state == STARRED,
        )
        records = matching(stacked=True, limit=count + 1, offset=_PAGE * first)
        stacks: dict[Group | None, list[JobRecord]] = defaultdict(list)
        for job in matching(batches={job.batch for job in records[:count] if job.batch is not None}):
            stacks[job.group].insert(0, job)
        cards = [self._stack(stacks[job.group] or [job], view) for job in records[:count]]
        return list(chain.from_iterable(cards)), len(records) > count

    def _stack(self, jobs: Sequence[JobRecord], view: View) -> list[Card]:
        """Return the card of a stack, or those of its videos if it is open."""
        if len(jobs) == 1:
            return [self._card(jobs[0])]
        if any(job.id in view.stacks for job in jobs):
            return [replace(self._card(job), stack=jobs, place=place) for place, job in enumerate(jobs, 1)]
        playable = [job for job in jobs if self._plays(job)]
        front, size = [*jobs, *playable][-1], sum(map(storage.video_bytes, jobs))
        return [replace(self._card(front), stack=jobs, plays=len(playable) == len(jobs), size=size)]

    def _card(self, job: JobRecord) -> Card:
        plays, size = self._plays(job), storage.video_bytes(job)
        video = job_view.file_url(job.output, job.saved) if plays else ""
        return Card(
            job,
            self._picture(job),
            video,
            plays,
            *proportions(job),
            size,
            self._problem(job, plays, size),
            finished="" if job.saved is None else _finished(job.saved),
        )

    def _problem(self, job: JobRecord, plays: bool, size: int) -> str:
        """Return why a job has no video that can be played; empty if it has one."""
        if job.state != "done" or plays:
            return failure(job)
        return f"Saved outside the outputs folder: {job.output}" if size else "The video file is missing."

    def _storage(self) -> str:
        usage = storage.measure(self._store, self._owner, AGES)
        return render("history_storage.html", usage=usage, retention=self._worker.retention)

    def _detail(self, job_id: str) -> str:
        try:
            job = self._job(job_id) if job_id else None
        except TandemError:  # it does not exist any more
            job = None
        if job is None:
            return ""
        saved, live = job.saved, self._worker.job(job.id)
        size, checkpoints = storage.video_bytes(job), storage.checkpoint_bytes(self._store, job.id)
        rows: list[tuple[str, str]] = []
        if saved is not None and job.plan is not None and live is not None:
            rows = job_view.result_rows(saved, job.plan, live.model_title)
        rows += [("Ended", formatting.moment(job.ended or job.created)), ("Job", job.id)]
        rows += [("Video on disk", byte_size(size))] if size else []
        rows += [("Checkpoints", byte_size(checkpoints))] if checkpoints else []
        resume_line = ""
        if job.continues and saved is not None and saved.sections is not None:
            count, of, _ = saved.sections
            unfinished = Fact("ui.video_unfinished", {"made": count, "of": of})
            resume_line = sentences([unfinished, Fact("ui.video_can_continue")])
        elif job.resumable:
            status = self._resume_status(job)
            resume_line = f"{status.memory} {status.checkpoint}".strip()
        card = self._card(job)
        plain = saved.plain if saved is not None and card.video else None
        return render(
            "history_detail.html",
            job=job,
            plain="" if plain is None else job_view.file_url(plain),
            plain_name="" if plain is None else plain.name,
            request=job.request if saved is None else saved.request,
            settings=job.request if saved is None else settings_of(saved),
            rows=rows,
            images=used_images({} if job.plan is None else job.plan.inputs),
            card=card,
            warning_lines=[]
            if saved is None
            else [paragraph(warning, saved.plan.get("components", ())) for warning in saved.warnings],
            reasons=[] if saved is None or job.plan is None else job_view.backend_reasons(saved, job.plan),
            resume_line=resume_line,
            titles=FILTERS,
        )

    def _comparison(self, pair: Sequence[str]) -> str:
        try:
            clips = [self._clip(self._job(job_id)) for job_id in pair]
        except TandemError:  # one was deleted
            return ""
        return comparison_html(*clips) if clips else ""

    def _clip(self, job: JobRecord) -> Clip:
        saved, live = job.saved, self._worker.job(job.id)
        if saved is None or not self._plays(job) or job.plan is None or live is None:
            raise _video_missing()
        places = "; ".join(value for name, value in job_view.result_rows(saved, job.plan, "") if name == "Ran on")
        video, seconds = job_view.file_url(job.output, job.saved), saved.timings["total"]
        return Clip(job.id, video, saved.request, live.model_title, seconds, places, saved.sound)


def _finished(saved: VideoSaved) -> str:
    """Return what upscaling and interpolation made of a video's size and rate, and whether it has sound."""
    size = formatting.size(*saved.size) if saved.plan.get("upscaling") is not None else ""
    rate = f"{saved.fps} fps" if saved.plan.get("interpolation") is not None else ""
    return " · ".join(filter(None, (size, rate, "sound" if saved.sound else "")))


def read_view(view: Mapping[str, Any]) -> View:
    """Read what the panel shows; ids that cannot be are ignored.

    Raises:
        InvalidRequestError: if the page's script does not send such a view.
    """
    match view:
        case {
            "search": str(search), "state": str(state), "pages": int(pages),
            "stacks": [*stacks], "open": opened, "pair": [*pair],
        } if state in FILTERS and 1 <= pages <= _MAX_PAGES and len(search) <= _MAX_SEARCH:  # fmt: skip
            ids = tuple(job_id for job_id in pair if is_job_id(job_id))
            return View(
                search,
                state,
                pages,
                frozenset(job_id for job_id in stacks if is_job_id(job_id)),
                opened if is_job_id(opened) else "",
                ids if len(ids) == _PAIR else (),
            )
    raise unknown_action()


def comparison_html(first: Clip, second: Clip) -> str:
    """Return two videos with shared controls, and what differs."""
    frames = max(first.request["frames"], second.request["frames"])
    rows, same = differences(first, second)
    clips = [("A", first), ("B", second)]
    return render(
        "history_comparison.html", clips=clips, frames=frames, timing=timing(first, second), rows=rows, same=same
    )


def same_picture(first: Clip, second: Clip) -> bool:
    """Return whether two requests differ only in how the video is computed, which should not change its frames."""
    names = {*first.request, *second.request}.difference(COMPUTE_FIELDS)
    return all(_value(first, name) == _value(second, name) for name in names)


def similarity(frames: int, result: Similarity) -> str:
    """Return how similar two videos are as a sentence."""
    if result.identical:
        return paragraph(Fact("ui.pixels_equal", {"frames": frames}))
    return paragraph(Fact("ui.similar", {"psnr": result.psnr, "ssim": result.ssim, "frames": frames}))


def differences(first: Clip, second: Clip) -> tuple[list[tuple[str, str, str]], int]:
    """Return each difference with its two values in the form's words, and the number of equal settings."""
    names = list(dict.fromkeys((*first.request, *second.request)))
    rows = [(_label(name), _value(first, name), _value(second, name)) for name in names]
    changes = [row for row in rows if row[1] != row[2]]
    same = len(rows) - len(changes)
    results = [
        ("Ran on", first.places, second.places),
        ("Time", formatting.duration(first.seconds), formatting.duration(second.seconds)),
    ]
    return changes + [row for row in results if row[1] != row[2]], same


def timing(first: Clip, second: Clip) -> str:
    """Return how videos with different frame rates or lengths are synchronised."""
    words = "Videos play frame by frame; the arrow keys step."
    (a, b), (m, n) = (
        (clip.request["fps"] for clip in (first, second)),
        (clip.request["frames"] for clip in (first, second)),
    )
    if a != b:
        words += f" {paragraph(Fact('ui.plays_at_other_rate', {'made': b, 'plays': a}))}"
    if m != n:
        words += f" {paragraph(Fact('ui.shorter', {'video': 'A' if m < n else 'B'}))}"
    return words


def _label(name: str) -> str:
    return FIELDS[name].label if name in FIELDS else name.replace("_", " ").capitalize()


def _value(clip: Clip, name: str) -> str:
    """Return a setting as the form shows it."""
    value = clip.request.get(name, _DEFAULTS_OF_NEWER.get(name))
    if name == "model":
        return clip.model
    declared = FIELDS.get(name)
    if isinstance(declared, Loras):
        return fields.loras_text(value).replace("\n", ", ") or "none"
    if isinstance(declared, ImageFiles | Scales):
        return str(fields.shown(name, value)).replace("\n", ", ") or "none"
    if isinstance(declared, Choice | StepCache) and (value is None or value in declared.choices):
        return declared.choices[value or next(iter(declared.choices))]
    if name == "shift" and value is None:
        return "the model's default"
    if isinstance(value, Mapping):
        chosen = (f"{TITLES.get(key, key)}: {BACKENDS.get(backend, backend)}" for key, backend in value.items())
        return ", ".join(chosen) or BACKENDS[AUTO]
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


@lru_cache(maxsize=64)
def _similarity(first: tuple[Path, int], second: tuple[Path, int]) -> Similarity:
    """Compare two files, given with their modification times."""
    return measured_similarity(first[0], second[0])


def _video_missing() -> InvalidRequestError:
    return InvalidRequestError("pair", "ui.video_missing")
