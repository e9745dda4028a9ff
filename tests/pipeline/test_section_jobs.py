"""Videos made in sections on a tiny real model: latents equal diffusers', and jobs resume with the same bits."""

import gc
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoFramepackPipeline

from runtime.core.cancel import Cancel
from runtime.core.errors import OutputError
from runtime.core.events import (
    CheckpointSaved,
    Event,
    Failed,
    FramesDecoded,
    OutOfMemory,
    Paused,
    Resumed,
    SectionDone,
    StepDone,
    VideoSaved,
    Warned,
)
from runtime.core.plan import Split, plain_output
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.families.framepack.transformer import PyTorchSectionDenoiser
from runtime.families.framepack.vae import PyTorchImageLatents, PyTorchSectionDecoder
from runtime.models.images import with_images
from runtime.models.registry import read_spec
from runtime.models.requested import with_finishers
from runtime.pipeline import section_files
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.files import CLIP, SECTIONS, finished_clip
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.families.framepack_models import pipeline
from tests.image_files import picture
from tests.pipeline.failing import Failing, full
from tests.pipeline.killing import killed
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_resume import stream_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine

WIDTH, HEIGHT, STEPS = 48, 32, 2
INVERTED, VANILLA = "FramePackI2V", "FramePack-F1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a tiny model for each order of sections."""
    found = {name: tmp_path_factory.mktemp("models") / name for name in (INVERTED, VANILLA)}
    for saved in found.values():
        pipeline().save_pretrained(saved)
    return found


# Videos of jobs that nothing interrupted, by model and number of images.
_WHOLE: dict[tuple[Path, int], tuple[bytes, str]] = {}


class Clip:
    """A plan with its model, and runs of it."""

    def __init__(self, model: Path, folder: Path, sections: int = 3, *, last: bool = False, **values: Any) -> None:
        self.folder, self.images = folder, [picture(WIDTH, HEIGHT), picture(WIDTH, HEIGHT).rotate(180)][: 1 + last]
        fields: dict[str, Any] = {"prompt": "a red boat sails left", "width": WIDTH, "height": HEIGHT, "seed": 3}
        fields |= {"frames": 36 * sections + 1, "steps": STEPS, "fps": 12, "guidance_scale": 4.0}
        for name, image in zip(("image", "last_image"), self.images, strict=False):
            image.save(folder / f"{name}.png")
            fields[name] = str(folder / f"{name}.png")
        request = GenerationRequest.from_mapping(fields | values)
        self.spec = with_finishers(with_images(read_spec(model, "framepack"), request, folder, folder), request, folder)
        self.plan = resolve(request, self.spec, PlanningContext(machine(), folder / "x.mp4"))

    @property
    def video(self) -> tuple[bytes, str]:
        """The video's frames and the digest of its stream."""
        return frames_of(self.plan.output), stream_of(self.plan.output)

    def whole(self) -> tuple[bytes, str]:
        """Return the video of a job of three sections that nothing interrupts; it is made once for each model."""
        key = self.spec.directory, len(self.images)
        if key not in _WHOLE:
            saved(self.run("whole"))
            _WHOLE[key] = self.video
            self.plan.output.unlink()
        return _WHOLE[key]

    def run(self, job: str | None = "job", pause_at: Choice = never, **given: Any) -> list[Event]:
        """Run the job, with its progress in a folder."""
        checkpoints = None if job is None else CheckpointFolder(self.folder / job)
        with Residency() as residency:
            return events_of(self.plan, self.spec, residency, pause_at=pause_at, checkpoints=checkpoints, **given)

    def parts(self, job: str = "job") -> list[str]:
        """Return the files of sections."""
        return sorted(path.name for path in (self.folder / job / SECTIONS).glob("*") if path.is_file())


Make = Callable[..., Clip]


@pytest.fixture
def make(folders: dict[str, Path], tmp_path: Path) -> Make:
    """Return a function that plans a video."""

    def made(model: str, sections: int = 3, **values: Any) -> Clip:
        return Clip(folders[model], tmp_path, sections, **values)

    return made


def saved(events: list[Event]) -> VideoSaved:
    """Return the result of a run that succeeded."""
    assert isinstance(events[-1], VideoSaved), events[-1]
    return events[-1]


def at_step(number: int) -> Choice:
    """Choose a step of the whole video."""
    return lambda event: isinstance(event, StepDone) and event.step == number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "last", "sections"), [(INVERTED, False, 3), (INVERTED, True, 1), (VANILLA, False, 3)]
)
def test_a_job_makes_the_frames_of_the_pipeline_and_reports_sections(
    model: str, last: bool, sections: int, make: Make, subtests: pytest.Subtests
) -> None:
    clip = make(model, sections, last=last)
    frames: list[np.ndarray] = []
    events = clip.run(on_frames=frames.append)
    assert saved(events).sections == (sections, sections, 36 * sections + 1)
    with subtests.test("reports"):
        done = [event for event in events if isinstance(event, SectionDone)]
        assert [(one.section, one.of) for one in done] == [(n + 1, sections) for n in range(sections)]
        spans = [range(one.start, one.start + one.frames) for one in done]
        assert sorted(number for span in spans for number in span) == list(range(36 * sections + 1))
        assert [event.frames for event in events if isinstance(event, FramesDecoded)][-1] == 36 * sections + 1
        steps = [event for event in events if isinstance(event, StepDone)]
        assert [(one.step, one.of) for one in steps] == [(n + 1, STEPS * sections) for n in range(STEPS * sections)]
        # Each is on disk, and counted by a checkpoint, before it is reported.
        for number, one in enumerate(done):
            before = events[: events.index(one)]
            assert [event.step for event in before if isinstance(event, CheckpointSaved)][-1] == STEPS * (number + 1)
    made = np.concatenate(frames)
    assert len(made) == clip.plan.frames == 36 * sections + 1
    reference = HunyuanVideoFramepackPipeline.from_pretrained(clip.spec.directory)
    wanted = reference(
        image=clip.images[0],
        last_image=clip.images[1] if last else None,
        prompt=clip.plan.prompt,
        width=WIDTH,
        height=HEIGHT,
        num_frames=33 * sections,
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        sampling_type="vanilla" if model == VANILLA else "inverted_anti_drifting",
        generator=torch.Generator("cpu").manual_seed(3),
        output_type="np",
    ).frames[0]
    assert abs(made.astype(int) - (wanted * 255).round().astype(int)).max() <= 1


@pytest.mark.slow
def test_two_processes_make_the_video_of_one(make: Make) -> None:
    clip = make(INVERTED, 2)
    wanted: list[np.ndarray] = []
    made: list[np.ndarray] = []
    saved(clip.run("one", on_frames=wanted.append))
    clip.plan = clip.plan.replace(split=Split(devices=("cpu", "cpu"), guidance=1, sequence=2, decode=False))
    saved(clip.run("two", on_frames=made.append))
    # Not the files: what rounds differently in a few pixels is encoded differently in their blocks.
    assert abs(np.concatenate(made).astype(int) - np.concatenate(wanted)).max() <= 1
    assert np.concatenate(wanted).std() > 10


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pauses"), [(INVERTED, (1, 4)), (VANILLA, (2, 3, 5))])
def test_a_pause_after_any_step_gives_the_same_video(model: str, pauses: tuple[int, ...], make: Make) -> None:
    clip = make(model, last=model == INVERTED)
    wanted = clip.whole()
    before = 0
    for step in pauses:
        events = clip.run(pause_at=at_step(step))
        assert events[-1] == Paused(step=step, of=6)
        assert before == 0 or Resumed(step=before, of=6) in events
        assert [event.step for event in events if isinstance(event, StepDone)] == [*range(before + 1, step + 1)]
        assert len(clip.parts()) == step // STEPS
        before = step
    events = clip.run()
    assert Resumed(step=before, of=6) in events
    assert [event.step for event in events if isinstance(event, StepDone)] == [*range(before + 1, 7)]
    assert saved(events).earlier["step"] == before
    assert clip.video == wanted


@pytest.mark.slow
def test_a_job_without_a_folder_leaves_no_files(make: Make) -> None:
    clip = make(VANILLA, 2)
    before = set(clip.folder.iterdir())
    saved(clip.run(None))
    assert set(clip.folder.iterdir()) - before == {clip.plan.output}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_section_is_made_again(damage: str, make: Make) -> None:
    clip = make(VANILLA)
    wanted = clip.whole()
    clip.run(pause_at=at_step(5))
    part = clip.folder / "job" / SECTIONS / "0000.mkv"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-2000] + bytes(2000))
        (*_, failed) = clip.run()
        assert isinstance(failed, Failed)
        assert failed.fact.code == "video.part_damaged"
    events = clip.run()
    assert not [event for event in events if isinstance(event, Resumed)]
    facts = [event.fact.code for event in events if isinstance(event, Warned)]
    codes = [code for code in facts if code.startswith("pipeline")]
    assert codes == (["pipeline.checkpoint_unusable"] if damage == "missing" else [])
    saved(events)
    assert clip.video == wanted


@pytest.mark.slow
def test_each_section_has_the_prompt_of_its_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections take 3 s each; those of the inverted order are made from the end."""
    seen: list[torch.Tensor] = []
    call = PyTorchSectionDenoiser.__call__

    def recorded(self: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        seen.append(text)
        return call(self, latents, timestep, text)

    monkeypatch.setattr(PyTorchSectionDenoiser, "__call__", recorded)

    def text(prompt: str) -> torch.Tensor:
        """Return the text of a prompt that holds for the whole video."""
        seen.clear()
        make(VANILLA, prompt=prompt).run(prompt, pause_at=at_step(1))
        return seen[0]

    boat, ball = text("a red boat"), text("blue ball rolls right")
    timed = "[0s: a red boat] [3s: blue ball rolls right]"
    for model, wanted in ((VANILLA, (boat, ball, ball)), (INVERTED, (ball, ball, boat))):
        seen.clear()
        clip = make(model, prompt=timed)
        # Also after a resume, with the texts of the checkpoint.
        clip.run(model, pause_at=at_step(3))
        saved(clip.run(model))
        found = seen[::STEPS]
        assert len(found) == 3
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.slow
def test_a_request_to_resume_at_another_speed_starts_over_if_prompts_depend_on_it(make: Make) -> None:
    timed = "[0s: a red boat] [3s: blue ball]"
    for prompt, resumed in ((timed, False), ("a red boat", True)):
        make(VANILLA, prompt=prompt).run(prompt, pause_at=at_step(3))
        events = make(VANILLA, prompt=prompt, fps=24).run(prompt)
        assert any(isinstance(event, Resumed) for event in events) == resumed
        saved(events)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks")
@pytest.mark.parametrize(
    ("model", "moment", "resumed"),
    [
        (VANILLA, {"rename": "0001.mkv", "count": 1}, 4),  # the second section is decoded, and not on disk
        (VANILLA, {"rename": "0001.mp4", "count": 1}, 2),  # the clip of the first section is not on disk
        (INVERTED, {"rename": "checkpoint", "count": 5}, 4),  # it is on disk, and no checkpoint counts it
        (VANILLA, {"rename": "x.mp4", "count": 1}, 6),  # all are joined
    ],
)
def test_a_job_killed_while_it_writes_files_resumes_to_the_same_video(
    model: str, moment: dict[str, Any], resumed: int, make: Make
) -> None:
    clip = make(model)
    wanted = clip.whole()
    assert killed(clip.spec, clip.plan, clip.folder / "job", **moment) == -9
    assert not clip.plan.output.exists()
    events = clip.run()
    assert [event.step for event in events if isinstance(event, Resumed)] == [resumed]
    saved(events)
    assert clip.video == wanted
    assert set(clip.parts()) == {"0000.mkv", "0001.mkv", "0002.mkv"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "name", "at"),
    [
        (INVERTED, PyTorchImageLatents, "sample", 1),
        (INVERTED, PyTorchSectionDenoiser, "__call__", 4),
        (VANILLA, PyTorchSectionDecoder, "window", 2),
    ],
)
def test_out_of_memory_in_a_stage_of_sections_is_retried_with_the_same_video(
    model: str, kind: Any, name: str, at: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make(model)
    wanted = clip.whole()
    Failing(monkeypatch, kind, name, at, full)
    events = clip.run()
    (out,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert out.retried
    saved(events)
    # No step is repeated.
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3, 4, 5, 6]
    assert clip.video == wanted


@pytest.mark.slow
def test_nan_within_a_section_fails_the_job_which_keeps_its_sections(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make(VANILLA)
    wanted = clip.whole()
    with monkeypatch.context() as patched:
        Failing(patched, PyTorchSectionDenoiser, "__call__", 4, lambda result: result * torch.nan)
        (*_, failed) = clip.run()
    assert isinstance(failed, Failed)
    assert failed.fact.code == "pipeline.not_finite"
    assert clip.parts() == ["0000.mkv"]
    events = clip.run()
    assert Resumed(step=3, of=6) in events
    saved(events)
    assert clip.video == wanted


@pytest.mark.slow
def test_nan_of_the_decoder_is_not_stored(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make(VANILLA)
    Failing(monkeypatch, PyTorchSectionDecoder, "window", 2, lambda frames: frames * torch.nan)
    (*_, failed) = clip.run()
    assert isinstance(failed, Failed)
    assert failed.fact.code == "execution.vae_not_finite"
    assert clip.parts() == ["0000.mkv"]


def finishing_after(section: int, clip: Clip, job: str = "job", **given: Any) -> list[Event]:
    """Run a job with a request to finish early during a section."""
    events: list[Event] = []
    cancel = Cancel()

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone) and event.step == section * STEPS - 1:
            cancel.finish_early()

    with Residency() as residency:
        checkpoints = CheckpointFolder(clip.folder / job)
        run_job(clip.plan, clip.spec, emit, cancel, residency, checkpoints=checkpoints, **given)
    return events


@pytest.mark.slow
@pytest.mark.parametrize("model", [INVERTED, VANILLA])
def test_a_video_can_end_after_any_section_and_be_continued(model: str, make: Make) -> None:
    clip = make(model)
    for made in (1, 2, 3):
        events = finishing_after(made, clip)
        assert [event.step for event in events if isinstance(event, StepDone)] == [made * STEPS - 1, made * STEPS]
        early = saved(events)
        # Without the image's own frame, and blended with nothing, if it ends in the middle of the inverted order.
        count = 36 * made + 1 if model == VANILLA or made == 3 else 36 * made - 3
        assert early.sections == (made, 3, count)
        assert (early.frames, early.continues) == (count, made < 3)
        assert len(clip.video[0]) == count * 3 * WIDTH * HEIGHT
        found = read_metadata(clip.plan.output)
        assert found["sections"] == [made, 3, count]
    assert clip.video == clip.whole()


@pytest.mark.slow
def test_a_video_ends_early_with_the_sections_that_a_paused_job_has(make: Make) -> None:
    clip = make(INVERTED)
    early = saved(finishing_after(2, clip, "other"))
    wanted = clip.video
    clip.run(pause_at=at_step(4))
    cancel = Cancel()
    cancel.finish_early()
    events: list[Event] = []
    with Residency() as residency:
        run_job(
            clip.plan, clip.spec, events.append, cancel, residency, checkpoints=CheckpointFolder(clip.folder / "job")
        )
    assert saved(events).sections == early.sections
    assert not [event for event in events if isinstance(event, StepDone)]
    assert clip.video == wanted


def test_the_joined_sections_are_interpolated_and_upscaled(make: Make, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "upscalers" / "small.safetensors", COMPACT_CONFIG)
    clip = make(VANILLA, 1, interpolate=2, upscale=2, upscaler="small")
    done = saved(clip.run())
    infos = [read_info(video) for video in (clip.plan.output, plain_output(clip.plan.output))]
    assert [(info.width, info.height, info.frames) for info in infos] == [
        (2 * WIDTH, 2 * HEIGHT, 2 * 37),
        (WIDTH, HEIGHT, 37),
    ]
    assert done.frames == infos[0].frames
    assert done.timings["interpolate"] > 0 and done.timings["upscale"] > 0


def clips(clip: Clip, job: str = "job") -> list[str]:
    """Return the clips of finished sections."""
    return sorted(path.name for path in (clip.folder / job / CLIP).glob("*.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [INVERTED, VANILLA])
def test_the_clip_of_finished_sections_is_the_video_that_ends_there(model: str, make: Make) -> None:
    """Each is playable before its section is reported, and has the frames of a video that ends with it."""
    clip = make(model, 4)
    found: dict[int, np.ndarray] = {}

    def look(event: Event) -> bool:
        if isinstance(event, SectionDone) and event.section < event.of:
            newest = finished_clip(clip.folder / "job")
            assert newest is not None
            assert newest[0] == event.section
            found[event.section] = np.frombuffer(frames_of(newest[1]), np.uint8).reshape(-1, HEIGHT, WIDTH, 3)
        return False

    saved(clip.run(pause_at=look))
    for made in (1, 3):
        frames: list[np.ndarray] = []
        finishing_after(made, clip, f"early{made}", on_frames=frames.append)
        wanted = np.concatenate(frames)
        assert found[made].shape == wanted.shape
        # Of random weights, frames are noise, whose colors H.264 halves.
        own, other = (((found[made].astype(float) - one) ** 2).mean() for one in (wanted, wanted[::-1]))
        assert own < min(255**2 / 10**2, other / 1.5)
    # Two are kept, since a page may still play the one before; none of them is needed after the video is saved.
    assert clips(clip, "early3") == ["0002.mp4", "0003.mp4"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [INVERTED, VANILLA])
def test_the_clip_grows_after_a_resume_without_the_parts_of_the_earlier_run(model: str, make: Make) -> None:
    clip = make(model)
    clip.run(pause_at=lambda event: isinstance(event, SectionDone))
    shutil.rmtree(clip.folder / "job" / CLIP)
    clip.run(pause_at=lambda event: isinstance(event, SectionDone))
    assert clips(clip) == ["0002.mp4"]
    newest = finished_clip(clip.folder / "job")
    assert newest is not None
    count = len(frames_of(newest[1])) // (3 * WIDTH * HEIGHT)
    assert count == (73 if model == VANILLA else 69)


@pytest.mark.slow
def test_a_clip_that_cannot_be_written_does_not_fail_the_video(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make(VANILLA)
    wanted = clip.whole()

    def full(*_: Any) -> None:
        raise OutputError("video.disk_full", file="x")

    monkeypatch.setattr(section_files, "join_parts", full)
    saved(clip.run())
    assert clip.video == wanted


@pytest.mark.slow
def test_memory_is_the_same_for_six_sections_as_for_three(make: Make) -> None:
    """What is alive when a section is reported does not grow: tensors, and everything that Python allocates."""

    def alive(sections: int, job: str) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def count(event: Event) -> bool:
            if isinstance(event, SectionDone):
                gc.collect()
                # Subclasses, such as the fake tensors that tracing leaves, have no memory of their own.
                tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
                sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
                found.append((sum(sizes.values()), tracemalloc.get_traced_memory()[1]))
                tracemalloc.reset_peak()
            return False

        tracemalloc.start()
        try:
            saved(make(VANILLA, sections).run(job, count))
        finally:
            tracemalloc.stop()
        return found

    saved(make(VANILLA, 2).run("first"))  # loads what is loaded only once
    few, many = alive(3, "few"), alive(6, "many")
    assert len(many) == 6
    # A section's latents take 4 x 9 x 4 x 6 values, its frames 36 x 32 x 48 x 3 bytes.
    assert {tensors for tensors, _ in many[1:5]} == {few[1][0]}
    frames = 36 * WIDTH * HEIGHT * 3
    assert max(peak for _, peak in many[2:5]) < max(peak for _, peak in few[1:]) + frames // 2
