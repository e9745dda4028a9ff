"""Jobs that continue a video: both parts in one, their seam, metadata, settings, interruptions and refusals."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, Failed, FramesFinished, Resumed, VideoSaved
from runtime.core.images import ClipPart
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.extended import with_extended
from runtime.models.images import open_image
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.continuation import color_table
from runtime.planner.interpolation import Interpolation
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import VideoWriter, read_metadata
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine

Tiny = Callable[[str], ModelSpec]
FIRST, NEW = 7, 9
SIZE = {"width": 64, "height": 32}


def gradient(count: int) -> np.ndarray:
    """Return frames of a moving gradient, (n, height, width, 3) uint8."""
    y, x = np.mgrid[0 : SIZE["height"], 0 : SIZE["width"]]
    frames = [np.stack([3 * x + 5 * index, 4 * y, 90 + x + y], axis=-1) for index in range(count)]
    return np.stack(frames).clip(0, 255).astype(np.uint8)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A video of `FIRST` frames with the metadata of one that Tandem made."""
    path = tmp_path / "first.mp4"
    with VideoWriter(path, SIZE["width"], SIZE["height"], 8, 0) as writer:
        writer.write(gradient(FIRST))
        writer.close_stream()
        request = {"prompt": "a red boat", "fps": 8, **SIZE}
        writer.finish("a red boat", {"tandem": {"request": request, "plan": {}}})
    return path


def planned(spec: ModelSpec, first: Path, **values: Any) -> tuple[ExecutionPlan, ModelSpec]:
    """Plan a continuation."""
    fields: dict[str, Any] = {
        "prompt": "it sinks",
        "frames": NEW,
        "steps": 2,
        "seed": 3,
        "guidance_scale": 1.0,
        "crf": 0,
    }
    request = GenerationRequest.from_mapping(fields | {"extend": str(first)} | values)
    spec = with_extended(spec, request, first.parent, first.parent / "cache")
    return resolve(request, spec, PlanningContext(machine(), first.with_name("both.mp4"))), spec


def pixels(video: Path) -> np.ndarray:
    """Return the frames of a video, (n, height, width, 3)."""
    return np.frombuffer(frames_of(video), "uint8").reshape(-1, SIZE["height"], SIZE["width"], 3)


def made(plan: ExecutionPlan, spec: ModelSpec, **options: Any) -> list[Event]:
    with Residency() as residency:
        return events_of(plan, spec, residency, **options)


def test_the_result_has_both_parts(tiny: Tiny, first: Path) -> None:
    decoded: list[np.ndarray] = []
    plan, spec = planned(tiny("wan2.2-ti2v-5b"), first)
    assert (plan.width, plan.height, plan.fps, plan.video_frames) == (64, 32, 8, FIRST + NEW - 1)
    saved = made(plan, spec, on_frames=decoded.append)[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.frames == len(np.concatenate(decoded)) == len(pixels(plan.output)) == FIRST + NEW - 1
    # What came before is as it was.
    assert np.abs(np.concatenate(decoded)[:FIRST].astype(int) - gradient(FIRST)).mean() < 2
    assert plan.image is not None
    last = np.asarray(open_image(plan.image))
    assert (last == np.concatenate(decoded)[FIRST - 1]).all()
    parts = [{"prompt": "a red boat", "frames": FIRST}, {"prompt": "it sinks", "frames": NEW - 1}]
    assert read_metadata(plan.output)["plan"]["parts"] == parts
    # The settings name the copy of the first video, which gives the same plan, and a third part knows all before it.
    first.unlink()
    request = GenerationRequest.from_mapping(saved.request)
    again = with_extended(tiny("wan2.2-ti2v-5b"), request, first.parent, first.parent / "cache")
    assert (again.extend, again.image) == (spec.extend, spec.image)
    third, _ = planned(tiny("wan2.2-ti2v-5b"), plan.output, prompt="it rises")
    assert third.parts == (*map(ClipPart.model_validate, parts), ClipPart(prompt="it rises", frames=NEW - 1))


def test_both_parts_are_finished(tiny: Tiny, first: Path) -> None:
    plan, spec = planned(tiny("wan2.2-ti2v-5b"), first, interpolate=2)
    assert plan.seconds["interpolate"] == Interpolation.of(plan).seconds(FIRST + NEW - 1, machine(), ())
    events = made(plan, spec)
    saved, count = events[-1], 2 * (FIRST + NEW - 1)
    assert isinstance(saved, VideoSaved)
    assert (saved.frames, saved.fps, len(pixels(plan.output))) == (count, 16, count)
    assert len(pixels(plain_output(plan.output))) == count // 2
    assert [event.frames for event in events if isinstance(event, FramesFinished)][-1] == count
    with pytest.raises(InvalidRequestError) as refused:
        planned(tiny("wan2.2-ti2v-5b"), plan.output)
    assert (refused.value.code, refused.value.data["plain"]) == ("source.finished", "both.plain.mp4")


@pytest.mark.slow
def test_a_killed_continuation_resumes(tiny: Tiny, first: Path, tmp_path: Path) -> None:
    plan, spec = planned(tiny("wan2.2-ti2v-5b"), first, steps=6)
    made(plan, spec)
    whole = pixels(plan.output).copy()
    for moment in ("StepDone", "FramesDecoded"):
        folder = tmp_path / moment
        plan.output.unlink()
        assert killed(spec, plan, folder, event=moment) == -signal.SIGKILL
        assert not plan.output.exists()
        events = made(plan, spec, checkpoints=CheckpointFolder(folder))
        assert any(isinstance(event, Resumed) for event in events)
        assert (pixels(plan.output) == whole).all()


def test_a_video_that_is_gone_fails_in_one_line(tiny: Tiny, first: Path) -> None:
    plan, spec = planned(tiny("wan2.2-ti2v-5b"), first)
    assert plan.extend is not None
    plan.extend.path.unlink()
    end = made(plan, spec)[-1]
    assert isinstance(end, Failed)
    assert (end.fact.code, end.internal) == ("source.gone", False)
    assert not plan.output.exists()


@pytest.mark.parametrize(
    ("model", "values", "field", "code"),
    [
        ("wan2.1", {}, "extend", "source.not_continued"),
        ("wan2.2-ti2v-5b", {"image": "x.png"}, "extend", "source.two_starts"),
        ("wan2.2-ti2v-5b", {"video": "x.mp4"}, "extend", "source.two_starts"),
        ("wan2.2-ti2v-5b", {"width": 96}, "width", "source.other_size"),
        ("wan2.2-ti2v-5b", {"fps": 24}, "fps", "source.other_size"),
        ("wan2.2-ti2v-5b", {"extend": "none.mp4"}, "extend", "source.unreadable"),
        ("wan2.2-ti2v-5b", {"extend": "sha256:" + "0" * 64 + "/x.mp4"}, "extend", "source.copy_missing"),
        ("wan2.2-ti2v-5b", {"extend": "\0"}, "extend", "request.video_file"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    model: str, values: dict[str, Any], field: str, code: str, tiny: Tiny, first: Path
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        planned(tiny(model), first, **values)
    assert (refused.value.field, refused.value.code) == (field, code)


@pytest.mark.parametrize("parts", [None, [], [{"prompt": 1, "frames": FIRST}], [{"prompt": "x", "frames": 3}], "x"])
def test_parts_that_a_file_states_wrongly_are_one(parts: object, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "odd.mp4"
    with VideoWriter(path, SIZE["width"], SIZE["height"], 8, 0) as writer:
        writer.write(gradient(FIRST))
        writer.close_stream()
        writer.finish("x", {"tandem": {"request": [], "plan": {"parts": parts}}})
    plan, _ = planned(tiny("wan2.2-ti2v-5b"), path)
    assert plan.parts == (ClipPart(prompt="", frames=FIRST), ClipPart(prompt="it sinks", frames=NEW - 1))


def test_colors_are_matched_within_limits() -> None:
    frame = gradient(1)[0]
    shifted = (frame * 0.95 + 6).round().astype(np.uint8)
    assert np.abs(color_values(color_table(frame, shifted), frame) - shifted.astype(int)).max() <= 1
    same = color_table(frame, frame)
    assert (color_values(same, frame) == frame).all()
    # Another picture is not followed.
    table = color_table(frame, 255 - frame)
    assert np.abs(table.astype(int) - np.arange(256)).max() < 60
    plain = np.full_like(frame, 100)
    assert (color_table(plain, plain + 9)[:, 100] == 109).all()


def color_values(table: np.ndarray, frame: np.ndarray) -> np.ndarray:
    return np.stack([table[channel][frame[..., channel]] for channel in range(3)], axis=-1)
