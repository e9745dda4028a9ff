"""What a page shows of a job in each of its states."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from runtime.core.events import (
    STAGE_TITLES,
    Cancelled,
    Event,
    Failed,
    FramesDecoded,
    Planned,
    StageStarted,
    StepDone,
    TerminalEvent,
    VideoSaved,
)
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import CLIP, clip_name
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import Ahead, Kind
from runtime.queue.run import ControlPoller, Run
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.server.watchers import Watch
from runtime.ui import formatting, job_view, stage
from tests.plans import tiny_plan
from tests.ui.page_texts import line

AUDIENCE = job_view.Audience(
    "The log has the details: logs/tandem.log",
    lambda job: job_view.file_url(job.plan.output),
    job_view.clip_address,
)


class EmptyQueue:
    """Stands in for the worker where its line is empty."""

    def ahead(self, job: Job) -> dict[str, str]:
        return {}

    def words(self, model: str) -> dict[str, tuple[str, ...]]:
        return {"Colors": ("red",), "Things": ("boat", "ball")}


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


@pytest.fixture
def job(store: JobStore, tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Job:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "a video.mp4", prompt="<b>red</b> & blue")
    request = GenerationRequest(prompt=plan.prompt, model=plan.model)
    return Job(store.add(request, plan), plan, spec.title, store)


def saved(job: Job) -> VideoSaved:
    return VideoSaved(
        video=job.plan.output,
        request=job.plan.request_json(),
        plan=job.plan.to_json(),
        timings={"encode": 0.2, "denoise": 3.0, "decode": 1.0, "mux": 0.1, "total": 4.3},
        load_seconds=1.5,
        peak_memory_bytes=1 << 30,
        warnings=(Fact("pipeline.unknown_words", {"words": ["<i>"], "field": "prompt"}),),
    )


def begin(job: Job, store: JobStore) -> None:
    assert store.order.claim("here") is not None
    job.refresh()


def append_events(job: Job, store: JobStore, *events: Event) -> None:
    """Record events as the job's worker does."""
    if events and store.get(job.id).state == "queued":
        begin(job, store)
    run = Run(store.get(job.id), ControlPoller(store))
    for event in events:
        run.settle(event) if isinstance(event, TerminalEvent) else run.emit(event)
    job.refresh()


def show(job: Job, store: JobStore, *events: Event) -> job_view.View:
    append_events(job, store, *events)
    return job_view.view(job, cast(JobQueue, EmptyQueue()), AUDIENCE, "<svg></svg>", job.progress.now)


def test_a_running_job_shows_stage_step_and_time(job: Job, store: JobStore) -> None:
    begin(job, store)
    steps = [StepDone(step=n, of=4, seconds=2.0, part="transformer", preview=b"webp") for n in (1, 2)]
    view = show(job, store, Planned(plan=job.plan), StageStarted(stage="denoise", part="transformer"), *steps)
    assert 'data-state="running"' in view.status
    assert "step 3 of 4" in view.status
    assert re.search(r"about \d+ (s|min) left", view.status)
    assert 'role="progressbar"' in view.status and "aria-valuenow" in view.status
    assert "data:image/webp;base64,d2VicA==" in view.picture
    assert view.busy and not view.stopping


def test_a_job_that_decodes_shows_frames_instead_of_steps(job: Job, store: JobStore) -> None:
    begin(job, store)
    step = StepDone(step=4, of=4, seconds=2.0, part="transformer", preview=None)
    view = show(job, store, Planned(plan=job.plan), step, StageStarted(stage="decode", part="vae"))
    assert "step 4" not in view.status
    running = job_view.running_line(job.progress.at(0.0))
    assert (running.title, running.detail) == ("Decoding frames", f"0 of {job.plan.frames} frames")


def test_a_queued_job_shows_how_many_are_ahead(job: Job) -> None:
    def shown(*kinds: Kind, seconds: float | None = None) -> str:
        ahead = {str(number): Ahead(kind, False, seconds) for number, kind in enumerate(kinds)}
        queue = cast(JobQueue, SimpleNamespace(ahead=lambda _job: ahead, seconds_until=lambda _ahead: seconds))
        return job_view.view(job, queue, AUDIENCE, "", 0.0).status

    assert line("ui.starting") in shown()
    assert line("ui.videos_ahead", count=1) in shown("video")
    assert f"{line('ui.videos_ahead', count=2)} {line('ui.starts_in', seconds=240)}" in shown(
        "video", "video", seconds=240.0
    )
    assert line("ui.tasks_ahead", count=1) in shown("task")
    assert line("ui.tasks_ahead", count=2) in shown("video", "task")


def test_a_paused_job_is_shown_as_paused(job: Job, store: JobStore) -> None:
    store.hold([job.id], True)
    job.refresh()
    view = show(job, store)
    assert "Paused" in view.status and view.busy


def test_an_interrupted_job_shows_how_to_resume(job: Job, store: JobStore) -> None:
    begin(job, store)
    show(job, store, Planned(plan=job.plan), StageStarted(stage="encode"))
    store.interrupt(job.id, "here", None)
    job.refresh()
    view = show(job, store)
    assert line("ui.interrupted", job=job.id) in view.status
    assert 'data-action="resume"' in view.status and not view.busy

    async def heard() -> list[Event]:
        return [event async for event in job_view.follow_events(job, Watch())]

    assert isinstance(asyncio.run(heard())[-1], Failed)


def test_a_cancelled_job_is_shown_as_stopping_at_once(job: Job, store: JobStore) -> None:
    begin(job, store)
    view = show(job, store, Planned(plan=job.plan), StageStarted(stage="encode"))
    assert STAGE_TITLES["encode"] in view.status
    job.request_cancel()
    assert "Stopping…" in show(job, store).status
    assert show(job, store).stopping
    ended = show(job, store, Cancelled())
    assert line("ui.nothing_saved") in ended.status and not ended.busy


def test_a_finished_job_shows_video_and_details(job: Job, store: JobStore) -> None:
    view = show(job, store, Planned(plan=job.plan), FramesDecoded(frames=9, of=9), saved(job))
    assert f'src="{job_view.file_url(job.plan.output)}"' in view.picture
    assert "a%20video.mp4" in view.picture
    for expected in (
        "Seed",
        "3",
        "1.0 GB at most",
        "denoising 3.0 s",
        "loading before that 1.5 s",
        "PyTorch on the CPU",
    ):
        assert expected in view.facts
    assert "&lt;b&gt;red&lt;/b&gt; &amp; blue" in view.facts
    assert "<b>red" not in view.facts + view.picture + view.status
    assert "<i>" not in view.facts


def test_a_video_elsewhere_is_named_and_not_played(job: Job, store: JobStore) -> None:
    """`generate --out` writes anywhere, and files disappear; neither may show a player without a video."""
    steps = StepDone(step=1, of=1, seconds=1.0, part="transformer", preview=b"webp")
    show(job, store, Planned(plan=job.plan), steps)
    owner = replace(AUDIENCE, address=lambda job: job_view.video_address(job, job.plan.output.parent))
    append_events(job, store, saved(job))
    missing = job_view.view(job, cast(JobQueue, EmptyQueue()), owner, "", 0.0)
    assert line("ui.video_gone", file=job.plan.output) in missing.status
    job.plan.output.write_bytes(b"a video")
    assert "<video" in job_view.view(job, cast(JobQueue, EmptyQueue()), owner, "", 0.0).picture
    elsewhere = replace(owner, address=lambda job: job_view.video_address(job, job.plan.output.parent / "outputs"))
    view = job_view.view(job, cast(JobQueue, EmptyQueue()), elsewhere, "", 0.0)
    assert line("ui.video_outside", file=job.plan.output) in view.status
    assert "<video" not in view.picture and "data:image/webp;base64,d2VicA==" in view.picture
    assert "download=" not in view.facts


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (Cancelled(), "Cancelled: last preview"),
        (Failed(fact=Fact("text", {"what": "a", "remedy": "b"})), "Failed: last preview"),
    ],
)
def test_the_last_preview_stays_when_a_job_ends_without_video(
    job: Job, store: JobStore, end: Event, words: str
) -> None:
    step = StepDone(step=1, of=4, seconds=1.0, part="transformer", preview=b"webp")
    view = show(job, store, Planned(plan=job.plan), step, end)
    assert "data:image/webp;base64,d2VicA==" in view.picture and words in view.picture
    # Also on a page that is opened later.
    record = store.get(job.id)
    later = Job(record, job.plan, job.model_title, store)
    later.refresh()
    assert job_view.view(later, cast(JobQueue, EmptyQueue()), AUDIENCE, "<svg></svg>", 0.0).picture == view.picture


def test_unknown_words_are_stated_first(job: Job, store: JobStore) -> None:
    view = show(job, store, Planned(plan=job.plan), saved(job))
    assert line("ui.cannot_draw", model=job.model_title, words="&lt;i&gt;") in view.status
    assert line("ui.can_draw", words=["boat", "ball"]) in view.status
    assert line("ui.video_ready") not in view.status
    (unknown,) = saved(job).warnings
    assert escape(formatting.page_text(unknown).what) not in view.facts


def test_many_unknown_words_are_not_all_listed(job: Job, store: JobStore) -> None:
    unknown = Fact("pipeline.unknown_words", {"words": ["x" * 300, *map(str, range(40))], "field": "prompt"})
    view = show(job, store, Planned(plan=job.plan), saved(job).model_copy(update={"warnings": (unknown,)}))
    assert f"cannot draw: {'x' * 30}…, 0, 1, " in view.status and "9, 10 and 29 more." in view.status
    negative = Fact("pipeline.unknown_words", unknown.data | {"field": "negative prompt"})
    assert "“9”, “10” and 29 more: " in formatting.page_text(negative).what


def test_a_finished_job_shows_loras_step_cache_and_shift(job: Job) -> None:
    done = saved(job)
    assert not {"LoRA", "Step cache", "Shift"} & {name for name, _ in job_view.result_rows(done, job.plan, "Tiny")}
    used = {"loras": [{"file": "a", "weight": 0.5, "expert": "low"}], "step_cache": "first-block:0.2", "shift": 5.0}
    rows = job_view.result_rows(done.model_copy(update={"request": {**done.request, **used}}), job.plan, "Tiny")
    assert {("LoRA", "low=a:0.5"), ("Step cache", "first-block:0.2"), ("Shift", "5")} <= set(rows)


@pytest.mark.parametrize(("sound", "codec"), [("on", "AAC"), ("lossless", "FLAC, lossless"), ("off", None)])
def test_a_finished_job_shows_its_sound(sound: str, codec: str | None, job: Job, store: JobStore) -> None:
    request = {**saved(job).request, "sound": sound}
    done = saved(job).model_copy(update={"sound": codec is not None, "request": request})
    assert dict(job_view.result_rows(done, job.plan, "Tiny")).get("Sound") == codec
    view = show(job, store, Planned(plan=job.plan), done)
    assert ("data-sound" in view.picture) == (codec is not None)


def test_reasons_of_a_finished_job_name_settings_as_the_form_does(job: Job, store: JobStore) -> None:
    cause = Fact("planner.vae_bfloat16", {"gpu": "Tesla T4"})
    unavailable = Fact("planner.asked_unavailable", {"backend": "tensorrt", "cause": cause})
    vae = job.plan.components["vae"]
    # A reason of all components is there once, without their names.
    both = job.plan.with_component("vae", vae.replace(reasons=(*vae.reasons, unavailable)))
    append_events(job, store, Planned(plan=both))
    (name, _), common = job_view.backend_reasons(saved(job), both)
    assert "vae" in name.lower() and common == ("", formatting.sentences(vae.reasons))
    plan = job.plan.with_component("vae", vae.replace(reasons=(unavailable,)))
    append_events(job, store, Planned(plan=plan))
    reasons = job_view.backend_reasons(saved(job), plan)
    text = next(reason for names, reason in reasons if "vae" in names.lower())
    assert len({reason for _, reason in reasons}) == len(reasons)
    assert "Use “VAE precision: float32”, or float16." in text and "--" not in text
    # Earlier versions saved text.
    done = saved(job)
    done.plan["components"]["vae"].pop("reasons")
    assert any("--vae-precision" in reason for _, reason in job_view.backend_reasons(done, plan))


def test_an_error_has_a_description_and_a_remedy(job: Job, store: JobStore) -> None:
    assert (
        "<strong>No memory.</strong> <span>Close a program.</span>"
        in show(job, store, Failed(fact=Fact("text", {"what": "no memory.", "remedy": "Close a program."}))).status
    )


def test_an_internal_error_names_the_log(job: Job, store: JobStore) -> None:
    assert AUDIENCE.details in show(job, store, Failed.because_of(ZeroDivisionError())).status


def test_every_state_has_the_same_children(job: Job, store: JobStore) -> None:
    """gradio patches child by child: only with the same ones do live regions stay and the preview not flicker."""

    def tags(html: str) -> list[str]:
        return [part.split(">")[0].split(" ")[0] for part in html.split("<")[1:]]

    views = [
        show(job, store),
        show(job, store, Planned(plan=job.plan)),
        show(job, store, Failed(fact=Fact("text", {"what": "a", "remedy": "b"}))),
    ]
    assert len({tuple(tags(view.status)) for view in views} | {tuple(tags(job_view.status_html(job_view.IDLE)))}) == 1


def test_following_ends_with_the_job(job: Job, store: JobStore) -> None:
    async def collect() -> tuple[list[job_view.View], list[Event]]:
        async def views() -> list[job_view.View]:
            return [view async for view in stage.follow_views(job, cast(JobQueue, EmptyQueue()), AUDIENCE, "", Watch())]

        async def events() -> list[Event]:
            return [event async for event in job_view.follow_events(job, Watch())]

        async def work() -> None:
            for event in (Planned(plan=job.plan), StageStarted(stage="encode"), Cancelled()):
                await asyncio.sleep(0.01)
                append_events(job, store, event)

        seen, heard, _ = await asyncio.gather(views(), events(), work())
        return seen, heard

    seen, heard = asyncio.run(collect())
    assert seen[0].busy and not seen[-1].busy
    assert [type(event).__name__ for event in heard] == ["Planned", "StageStarted", "Cancelled"]


def test_a_running_job_plays_its_finished_sections(job: Job, store: JobStore) -> None:
    plan = job.plan.replace(sections=3, steps=4)
    begin(job, store)
    events: list[Event] = [Planned(plan=plan), StageStarted(stage="denoise", part="transformer")]
    steps = [StepDone(step=n, of=12, seconds=1.0, part="transformer", preview=b"webp") for n in range(1, 6)]
    view = show(job, store, *events, *steps)
    assert "section 2 of 3, step 2 of 4" in view.status
    assert "<video" not in view.picture
    assert re.search(r'<span>\s*<button[^>]*data-action="finish"', view.status)
    folder = store.folder(job.id)
    assert folder is not None
    clip = folder / CLIP / clip_name(1)
    clip.parent.mkdir(parents=True)
    clip.write_bytes(b"")
    view = show(job, store)
    assert (
        f'<video src="tandem/clip/{job.id}/1.mp4" aria-label="Video so far: 1 of 3 sections" data-grows' in view.picture
    )
    assert "1 of 3 sections, section 2 is made" in view.picture
    assert "data:image/webp;base64,d2VicA==" in view.picture
    # A request to end early replaces the button; the last section has none.
    store.finish_early(job.id)
    job.refresh()
    view = show(job, store)
    assert line("ui.ends_after_section") in view.status
    assert re.search(r'<span hidden>\s*<button[^>]*data-action="finish"', view.status)
    # What is finished can be played after the end of a job without a video.
    view = show(job, store, Cancelled())
    assert line("ui.sections_kept") in view.status
    assert f"tandem/clip/{job.id}/1.mp4" in view.picture and "base64" not in view.picture


def test_a_video_that_is_decoded_plays_its_first_frames(job: Job, store: JobStore) -> None:
    begin(job, store)
    show(job, store, Planned(plan=job.plan), StageStarted(stage="decode", part="vae"))
    folder = store.folder(job.id)
    assert folder is not None
    (folder / CLIP).mkdir(parents=True)
    (folder / CLIP / clip_name(3)).write_bytes(b"")
    view = show(job, store, FramesDecoded(frames=4, of=job.plan.frames, playable=3, preview=b"webp"))
    label = f"Video so far: 3 of {job.plan.frames} frames"
    assert f'<video src="tandem/clip/{job.id}/3.mp4" aria-label="{label}" data-grows' in view.picture
    assert f'<p class="so-far">3 of {job.plan.frames} frames</p>' in view.picture
    assert "base64" not in view.picture
    # A worker that was killed has left the file.
    assert "<video" not in show(job, store, Cancelled()).picture


def test_a_video_that_ended_early_can_be_continued(job: Job, store: JobStore) -> None:
    plan = job.plan.replace(sections=3)
    job.plan.output.write_bytes(b"")
    address = replace(AUDIENCE, address=lambda job: job_view.video_address(job, job.plan.output.parent))
    begin(job, store)
    append_events(job, store, Planned(plan=plan), saved(job).model_copy(update={"sections": (2, 3, 5)}))
    view = job_view.view(job, cast(JobQueue, EmptyQueue()), address, "", 0.0)
    assert line("ui.video_unfinished", made=2, of=3) in view.status
    assert re.search(r'<span>\s*<button[^>]*data-action="resume"[^>]*>Continue this video', view.status)
    # Another address than that of the whole video, which takes the place of this one.
    assert f'src="{job_view.file_url(job.plan.output)}?2"' in view.picture
