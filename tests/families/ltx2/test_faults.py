"""LTX-2's jobs under faults: killed processes, out of memory, NaN in one stream, sound of another length."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from runtime.core.errors import CheckpointError
from runtime.core.events import (
    Event,
    Failed,
    OutOfMemory,
    Paused,
    Resumed,
    StageStarted,
    StepDone,
    VideoSaved,
    Warned,
)
from runtime.core.plan import ExecutionPlan
from runtime.core.request import SOUND_DECODERS
from runtime.execution.residency import Residency
from runtime.execution.streams import Streams
from runtime.families.ltx2.conditioning import PyTorchConnectors
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.families.ltx2.vae import (
    PyTorchImageEncoder,
    PyTorchSpectrumDecoder,
    PyTorchVideoDecoder,
    PyTorchVocoder,
)
from runtime.models.spec import ModelSpec
from runtime.pipeline import checkpoint
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.families.ltx2.test_parity import timed
from tests.families.test_second_family import frames
from tests.image_files import with_saved
from tests.pipeline.failing import Failing, full
from tests.pipeline.killing import killed
from tests.pipeline.runs import Choice, events_of, never
from tests.plans import tiny_plan
from tests.sounds import sound_in

Tiny = Callable[[str], ModelSpec]
STEPS = 3


class Clip(NamedTuple):
    """A job of a tiny LTX-2."""

    spec: ModelSpec
    plan: ExecutionPlan
    job: Path

    def run(self, pause_at: Choice = never) -> list[Event]:
        """Run it with checkpoints."""
        with Residency() as residency:
            return events_of(self.plan, self.spec, residency, pause_at=pause_at, checkpoints=CheckpointFolder(self.job))

    @property
    def files(self) -> set[str]:
        """The names of the files beside the video, hidden ones too."""
        return {path.name for path in self.plan.output.parent.iterdir()}

    @property
    def seen_and_heard(self) -> tuple[bytes, bytes]:
        """The frames and the lossless sound of its video."""
        kind, sound = sound_in(self.plan.output) or ("", None)
        assert kind == "flac"
        assert sound is not None
        return frames(str(self.plan.output)), sound.samples.tobytes()


@pytest.fixture
def make(tiny: Tiny, tmp_path: Path) -> Callable[..., Clip]:
    """Return a function that plans a clip with lossless sound, from the images of these fields."""

    def made(name: str = "clip", *, images: Sequence[str] = (), **values: object) -> Clip:
        spec, out = tiny("ltx-2.3"), tmp_path / name / "out" / "x.mp4"
        out.parent.mkdir(parents=True)
        spec, files = with_saved(spec, images, tmp_path)
        values = {**files, **timed(images), "steps": STEPS, "sound": "lossless", "guidance_scale": 1.0, **values}
        return Clip(spec, tiny_plan(spec, out, **values), tmp_path / name / "job")

    return made


Make = Callable[..., Clip]
# What a job that nothing interrupts shows and plays; equal plans run once.
_WHOLE: dict[str, tuple[bytes, bytes]] = {}


def whole(clip: Clip) -> tuple[bytes, bytes]:
    """Return the frames and the sound of a clip that nothing interrupts; its files are deleted."""
    key = clip.plan.model_dump_json(exclude={"output"})
    if key not in _WHOLE:
        with Residency() as residency:
            assert isinstance(events_of(clip.plan, clip.spec, residency)[-1], VideoSaved)
        _WHOLE[key] = clip.seen_and_heard
        clip.plan.output.unlink()
    return _WHOLE[key]


def save_each_step() -> None:
    """Save a checkpoint after each step, however short the steps are."""
    checkpoint._SHARE = 1e9


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks")
def test_a_job_killed_in_any_stage_resumes_to_the_same_frames_and_sound(make: Make, subtests: pytest.Subtests) -> None:
    guided = {"guidance_scale": 3.0, "negative_prompt": "blue ball"}
    wanted = whole(make(**guided))
    # Stages begin twice for each component: to load, and to compute.
    moments: dict[str, tuple[dict[str, Any], list[int]]] = {
        "connectors": ({"event": "StageStarted", "count": 4}, []),
        "between steps": ({"event": "StepDone", "count": 2}, [1]),
        "vocoder": ({"event": "StageStarted", "count": 12}, [STEPS]),
        "saving": ({"rename": "x.mp4", "count": 1}, [STEPS]),
    }
    for stage, (moment, resumed) in moments.items():
        with subtests.test(stage=stage):
            clip = make(stage, **guided)
            assert killed(clip.spec, clip.plan, clip.job, prepare=save_each_step, **moment) == -9
            assert not clip.plan.output.exists()
            events = clip.run()
            assert isinstance(events[-1], VideoSaved)
            assert [event.step for event in events if isinstance(event, Resumed)] == resumed
            assert clip.seen_and_heard == wanted
            # What the killed process was writing is gone.
            assert clip.files == {"x.mp4"}
            assert {path.name for path in clip.job.iterdir()} == {"checkpoint.safetensors"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks")
def test_a_job_with_a_keyframe_resumes_after_kills_and_lack_of_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ("image", "keyframes[0]")
    guided = {"images": images, "guidance_scale": 3.0, "negative_prompt": "blue ball"}
    wanted = whole(make(**guided))
    killed_clip = make("killed", **guided)
    moment: dict[str, Any] = {"event": "StepDone", "count": 2}
    assert killed(killed_clip.spec, killed_clip.plan, killed_clip.job, prepare=save_each_step, **moment) == -9
    other = make("other", images=["image"], guidance_scale=3.0, negative_prompt="blue ball")
    # The checkpoint is not that of a clip with other images.
    with pytest.raises(CheckpointError):
        CheckpointFolder(killed_clip.job).load(other.spec, other.plan)
    events = killed_clip.run()
    assert [event.step for event in events if isinstance(event, Resumed)] == [1]
    assert killed_clip.seen_and_heard == wanted
    for kind, name, at in ((PyTorchImageEncoder, "latents", len(images)), (PyTorchStreamDenoiser, "__call__", 6)):
        full_clip = make(f"full {at}", **guided)
        with monkeypatch.context() as patched:
            Failing(patched, kind, name, at, full)
            events = full_clip.run()
        assert [event.retried for event in events if isinstance(event, OutOfMemory)] == [True]
        assert full_clip.seen_and_heard == wanted


@pytest.mark.parametrize(
    ("kind", "name", "at", "stage", "component"),
    [
        (PyTorchConnectors, "__call__", 1, "encode", "connectors"),
        (PyTorchStreamDenoiser, "__call__", 2, "denoise", "transformer"),
        (PyTorchVideoDecoder, "_decoded", 1, "decode", "vae"),
        (PyTorchSpectrumDecoder, "__call__", 1, "decode", "audio_vae"),
        (PyTorchVocoder, "__call__", 1, "decode", "vocoder"),
    ],
)
def test_out_of_memory_is_retried_with_the_same_frames_and_sound(
    kind: Any, name: str, at: int, stage: str, component: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make()
    wanted = whole(clip)
    with monkeypatch.context() as patched:
        Failing(patched, kind, name, at, full)
        events = clip.run()
    (out,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert (out.stage, out.component, out.memory, out.retried, out.lossless) == (stage, component, "RAM", True, True)
    assert out.fact.data["component"] == component
    # No step is repeated.
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3]
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.plan["keep_loaded"] is False
    assert clip.seen_and_heard == wanted
    assert clip.files == {"x.mp4"}


def test_a_vocoder_that_never_fits_fails_the_job_which_resumes_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make()
    wanted = whole(clip)
    with monkeypatch.context() as patched:
        patched.setattr(PyTorchVocoder, "__call__", full)
        events = clip.run()
    assert [event.retried for event in events if isinstance(event, OutOfMemory)] == [True, False]
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert (failed.fact.code, failed.fact.data["component"]) == ("pipeline.out_of_memory_resumable", "vocoder")
    assert not clip.files
    assert Resumed(step=STEPS, of=STEPS) in clip.run()
    assert clip.seen_and_heard == wanted


def test_a_video_is_saved_without_sound_that_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    clip = make()
    seen, _ = whole(clip)
    streams = Streams.of(clip.plan)
    assert streams is not None

    def silenced(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda joined: streams.join(streams.split(joined)[0], torch.full(streams.sound, value))

    cases: dict[str, tuple[Any, int, Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
        # In the last step: earlier ones change the frames of those that follow.
        "nan": (PyTorchStreamDenoiser, STEPS, silenced(float("nan")), ()),
        "inf": (PyTorchStreamDenoiser, STEPS, silenced(float("inf")), ()),
        "audio_vae": (PyTorchSpectrumDecoder, 1, lambda values: values * torch.inf, SOUND_DECODERS[:1]),
        "vocoder": (PyTorchVocoder, 1, lambda values: values * torch.nan, SOUND_DECODERS),
    }
    for name, (kind, at, fail, decoders) in cases.items():
        # At once, and after a pause behind the last step, whose latents the checkpoint has.
        for paused in (False, True):
            with subtests.test(case=name, paused=paused), monkeypatch.context() as patched:
                clip = make(f"{name} {paused}")
                Failing(patched, kind, "__call__", at, fail)
                if paused:
                    stopped = clip.run(lambda event: isinstance(event, StepDone) and event.step == STEPS)
                    assert stopped[-1] == Paused(step=STEPS, of=STEPS)
                events = clip.run()
                saved = events[-1]
                assert isinstance(saved, VideoSaved), saved
                assert not saved.sound
                codes = [event.fact.code for event in events if isinstance(event, Warned)]
                assert codes.count("pipeline.sound_not_finite") == 1
                assert "pipeline.sound_not_finite" in [fact.code for fact in saved.warnings]
                ran = {event.part for event in events if isinstance(event, StageStarted) and event.stage == "decode"}
                assert ran == {"vae", *decoders}
                assert sound_in(clip.plan.output) is None
                assert frames(str(clip.plan.output)) == seen


def test_frames_that_failed_fail_the_job_whatever_the_sound(
    make: Make, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    cases: dict[str, tuple[Any, str, int, Callable[[Any], Any], str]] = {
        "last step": (
            PyTorchStreamDenoiser,
            "__call__",
            STEPS,
            lambda joined: joined * torch.nan,
            "pipeline.not_finite",
        ),
        "decoder": (
            PyTorchVideoDecoder,
            "_decoded",
            1,
            lambda decoded: decoded * torch.nan,
            "execution.vae_not_finite",
        ),
        "black": (PyTorchVideoDecoder, "_decoded", 1, lambda decoded: decoded * 0 - 1, "pipeline.clip_black"),
        "blank": (PyTorchVideoDecoder, "_decoded", 1, lambda decoded: decoded * 0, "pipeline.clip_blank"),
    }
    for case, (kind, name, at, fail, code) in cases.items():
        with subtests.test(case=case), monkeypatch.context() as patched:
            clip = make(case)
            Failing(patched, kind, name, at, fail)
            failed = clip.run()[-1]
            assert isinstance(failed, Failed)
            assert (failed.fact.code, failed.internal) == (code, False)
            assert not clip.files


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_sound_of_another_length_is_fitted_to_the_frames(
    share: float, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make()
    _, heard = whole(clip)

    def resized(samples: torch.Tensor) -> torch.Tensor:
        count = int(share * samples.shape[2])
        return samples[..., :count] if share < 1 else samples.repeat(1, 1, 2)[..., :count]

    Failing(monkeypatch, PyTorchVocoder, "__call__", 1, resized)
    assert isinstance(clip.run()[-1], VideoSaved)
    _, sound = sound_in(clip.plan.output) or ("", None)
    assert sound is not None
    count = round(9 / 8 * sound.rate)
    assert sound.samples.shape == (2, count)
    before = np.frombuffer(heard, np.float32).reshape(2, count)
    kept = round(share * before.shape[1]) - sound.rate // 10 if share < 1 else count - sound.rate // 10
    assert np.array_equal(sound.samples[:, :kept], before[:, :kept])
    if share < 1:
        assert not sound.samples[:, round(0.6 * count) :].any()
