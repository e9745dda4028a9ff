"""Sound through a job's output: both videos, loops, continued videos, warnings, metadata; and converted files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.core.cancel import Cancel
from runtime.core.events import Event, StageStarted, VideoSaved, Warned
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.request import GenerationRequest
from runtime.core.sound import Sound
from runtime.execution.residency import Residency
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.models.images import with_images
from runtime.models.spec import ModelSpec, SoundSpec
from runtime.pipeline.bad_sound import inspected
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.interpolate import interpolate_file
from runtime.pipeline.interpolate_plan import InterpolationPlan
from runtime.pipeline.metrics import Metrics
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.video_output import VideoOutput
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.image_files import taking_images
from tests.pipeline.test_extended_jobs import planned
from tests.plans import machine, tiny_plan
from tests.sounds import (
    AAC_FRAME,
    frames,
    heard,
    largest_step,
    loudness,
    onset,
    pitch,
    sound_in,
    tone,
    write_clip,
)

Tiny = Callable[[str], ModelSpec]
FRAMES, FPS = 9, 8
SECONDS = FRAMES / FPS


@pytest.fixture
def loud(tiny: Tiny) -> ModelSpec:
    """A model that makes sound."""
    return replace(tiny("wan2.1"), sound=SoundSpec(rate=48_000, channels=2))


def saved(
    plan: ExecutionPlan, spec: ModelSpec, sound: Sound | None, count: int = FRAMES
) -> tuple[VideoSaved, list[Event]]:
    """Save frames and sound as the last stage of a job does."""
    events: list[Event] = []
    pictures = frames(count)
    with (
        Residency() as residency,
        Metrics("cpu", residency) as metrics,
        RunContext(plan, spec, events.append, Cancel(), residency, metrics) as context,
        VideoOutput(context, None, None) as output,
    ):
        output.write(pictures[:1])
        output.write(pictures[1:])
        return output.finish(sound), events


def warned(events: list[Event]) -> list[str]:
    return [event.fact.code for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("values", [{}, {"interpolate": 2}, {"upscale": 2}, {"interpolate": 4, "upscale": 2}])
def test_both_videos_have_the_sound(values: dict[str, Any], loud: ModelSpec, tmp_path: Path) -> None:
    spec = loud
    if "upscale" in values:
        save_safetensors(tmp_path / "small.safetensors", COMPACT_CONFIG)
        spec = replace(loud, upscaler=find_upscaler(str(tmp_path / "small.safetensors"), 2, tmp_path))
    plan = tiny_plan(spec, tmp_path / "x.mp4", **values)
    assert plan.sound and plan.to_json()["sound"] and plan.request_json()["sound"] == "on"
    result, events = saved(plan, spec, tone(2, hz=(440.0, 1_200.0), start=0.5))
    assert result.sound and result.result_json()["sound"] and not warned(events)
    for video in {plan.output, plain_output(plan.output) if plan.keeps_plain else plan.output}:
        played = heard(video)
        assert played.samples.shape == (2, round(SECONDS * 48_000))
        assert abs(onset(played) - 0.5) < AAC_FRAME / 48_000
        assert [round(pitch(played, 0.6, 1.1, channel) / 10) for channel in range(2)] == [44, 120]
        assert abs((read_info(video).seconds or 0) - SECONDS) < 0.011
        metadata = read_metadata(video)
        assert metadata["sound"] and metadata["request"]["sound"] == "on"


def test_lossless_sound_and_none(loud: ModelSpec, tmp_path: Path, tiny: Tiny) -> None:
    plan = tiny_plan(loud, tmp_path / "x.mp4", sound="lossless")
    sound = tone(SECONDS, hz=(440.0, 441.0))
    saved(plan, loud, sound)
    codec, played = sound_in(plan.output) or ("", sound)
    assert codec == "flac" and np.abs(played.samples - sound.samples).max() < 1e-6
    off = tiny_plan(loud, tmp_path / "y.mp4", sound="off")
    assert not off.sound and off.sound_format is None
    silent = tiny_plan(tiny("wan2.1"), tmp_path / "z.mp4")
    assert not silent.sound and silent.request_json()["sound"] == "on"
    result, _ = saved(silent, tiny("wan2.1"), None)
    assert not result.sound and sound_in(silent.output) is None
    assert read_metadata(silent.output)["sound"] is False


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_video_with_good_frames_is_saved_without_bad_sound(bad: float, loud: ModelSpec, tmp_path: Path) -> None:
    sound = tone(SECONDS)
    sound.samples[0, 100] = bad
    plan = tiny_plan(loud, tmp_path / "x.mp4", interpolate=2)
    result, events = saved(plan, loud, sound)
    assert warned(events) == ["pipeline.sound_not_finite"] == [fact.code for fact in result.warnings]
    assert not result.sound
    for video in (plan.output, plain_output(plan.output)):
        assert sound_in(video) is None and read_info(video).frames


def test_silence_and_clipping_are_reported(loud: ModelSpec, tmp_path: Path) -> None:
    plan = tiny_plan(loud, tmp_path / "x.mp4", sound="lossless")
    result, events = saved(plan, loud, tone(SECONDS, level=0.0))
    assert warned(events) == ["pipeline.sound_silent"] and result.sound
    assert not heard(plan.output).samples.any()
    result, events = saved(plan, loud, tone(SECONDS, level=2.0))
    assert warned(events) == ["pipeline.sound_clipped"] and result.sound
    assert np.abs(heard(plan.output).samples).max() <= 1
    # Some peaks are no distortion, and quiet sound is no silence.
    peaks = tone(1)
    peaks.samples[0, :40] = 1.0
    for sound in (peaks, tone(1, level=0.001), Sound(np.zeros((1, 0), np.float32) + 0, 48_000)):
        codes = [fact.code for fact in inspected(sound).warnings]
        assert codes == ([] if sound.samples.size else ["pipeline.sound_silent"])


def test_a_loop_played_backwards_has_its_sound_backwards(loud: ModelSpec, tmp_path: Path) -> None:
    plan = tiny_plan(loud, tmp_path / "x.mp4", loop="on", interpolate=2, sound="lossless")
    assert plan.looping == "backwards"
    sound = tone(SECONDS, hz=(600.0, 600.0), start=0.75)
    saved(plan, loud, sound)
    for video in (plan.output, plain_output(plan.output)):
        played = heard(video)
        count = (2 * FRAMES - 2) * 48_000 // FPS
        assert played.samples.shape == (2, count)
        # The tone begins at 0.75 s, and ends as long after the turn as it began before it.
        turn = (FRAMES - 0.5) / FPS
        backwards = Sound(played.samples[:, ::-1], 48_000)
        assert abs(onset(played) - 0.75) < 0.001
        assert abs((count / 48_000 - onset(backwards)) - (2 * turn - 0.75)) < 0.001
        assert largest_step(Sound(np.tile(played.samples, 2), 48_000)) <= largest_step(sound) + 1e-6


def test_a_loop_that_ends_on_its_image_fades_over(loud: ModelSpec, tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    Image.fromarray(frames(1)[0]).save(file)
    values = {"prompt": "x", "image": str(file), "loop": "on", "width": 64, "height": 32, "frames": FRAMES, "fps": FPS}
    request = GenerationRequest.from_mapping({**values, "steps": 2, "sound": "lossless"})
    spec = with_images(taking_images(loud, last="optional"), request, tmp_path, tmp_path)
    plan = resolve(request, spec, PlanningContext(machine(), tmp_path / "x.mp4"))
    assert plan.looping == "same frame"
    sound = tone(SECONDS, hz=(437.3, 437.3))
    saved(plan, spec, sound)
    played = heard(plan.output)
    assert played.samples.shape == (2, (FRAMES - 1) * 48_000 // FPS)
    assert largest_step(Sound(np.tile(played.samples, 2), 48_000)) <= 1.01 * largest_step(sound)


@pytest.mark.parametrize("first_rate", [24_000, 48_000])
@pytest.mark.parametrize("interpolate", ["off", "2"])
def test_a_continued_video_keeps_its_sound(first_rate: int, interpolate: str, tiny: Tiny, tmp_path: Path) -> None:
    count = 7
    first = write_clip(tmp_path / "first.mp4", tone(count / FPS, first_rate, start=0.3), count=count, lossless=True)
    spec = replace(tiny("wan2.2-ti2v-5b"), sound=SoundSpec(rate=48_000, channels=2))
    plan, spec = planned(spec, first, sound="lossless", interpolate=interpolate)
    saved(plan, spec, tone(SECONDS, hz=(1_000.0, 1_500.0)))
    for video in {plan.output, plain_output(plan.output) if plan.keeps_plain else plan.output}:
        played = heard(video)
        assert played.samples.shape == (2, (count + FRAMES - 1) * 48_000 // FPS)
        assert abs(onset(played) - 0.3) < 0.001
        assert [round(pitch(played, 0.35, 0.74, channel) / 10) for channel in range(2)] == [44, 44]
        assert [round(pitch(played, 0.9, 1.8, channel) / 10) for channel in range(2)] == [100, 150]


def test_a_silent_part_is_silent(tiny: Tiny, tmp_path: Path) -> None:
    count = 7
    first = write_clip(tmp_path / "first.mp4", tone(count / FPS, 24_000), count=count)
    silent, loud = tiny("wan2.2-ti2v-5b"), replace(tiny("wan2.2-ti2v-5b"), sound=SoundSpec(rate=48_000, channels=1))
    plan, spec = planned(silent, first)
    assert not plan.sound and plan.sound_format == "aac"
    result, _ = saved(plan, spec, None)
    played = heard(plan.output)
    assert result.sound and (played.rate, len(played.samples)) == (24_000, 1)
    assert loudness(played, 0.1, 0.8) > 0.3 and loudness(played, 0.95, 1.8) < 1e-3
    # NaN in the new part does not cost the earlier one its sound.
    plan, spec = planned(loud, first)
    bad = tone(SECONDS)
    bad.samples[:] = np.nan
    result, events = saved(plan, spec, bad)
    assert result.sound and warned(events) == ["pipeline.sound_not_finite"]
    assert loudness(heard(plan.output), 0.1, 0.8) > 0.3
    # The other way round.
    write_clip(first, None, count=count)
    plan, spec = planned(loud, first, sound="lossless")
    saved(plan, spec, tone(SECONDS, hz=(1_000.0,)))
    played = heard(plan.output)
    assert abs(onset(played) - count / FPS) < 0.001 and loudness(played, 0, count / FPS - 0.001) == 0
    assert abs(pitch(played, 0.9, 1.8) - 1_000) < 1
    # Neither, or not wanted.
    plan, spec = planned(silent, first)
    assert not saved(plan, spec, None)[0].sound and sound_in(plan.output) is None
    write_clip(first, tone(1), count=count)
    plan, spec = planned(silent, first, sound="off")
    assert not saved(plan, spec, None)[0].sound and sound_in(plan.output) is None


@pytest.mark.parametrize("slow", [False, True])
def test_an_interpolated_file_keeps_its_sound_in_step(slow: bool, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "x.mp4", tone(1.5, hz=(440.0, 900.0), start=0.5))
    events: list[Event] = []
    plan = InterpolationPlan(source=read_info(clip), factor=2, output=tmp_path / "y.mp4", slow=slow)
    interpolate_file(plan, HistoryFile(tmp_path, machine()), events.append, Cancel())
    assert [event.stage for event in events if isinstance(event, StageStarted)][-1] == "save"
    assert warned(events) == (["interpolate.silent"] if slow else [])
    assert read_metadata(plan.output)["sound"] != slow
    if slow:
        assert sound_in(plan.output) is None
        return
    assert (heard(plan.output).samples == heard(clip).samples).all()
    assert heard(clip).samples.shape == (2, 72_000)
