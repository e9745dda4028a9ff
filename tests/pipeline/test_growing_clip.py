"""The first frames of a video can be watched while the others are decoded, by tiny real models."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.core.events import Cancelled, Event, FramesDecoded, OutOfMemory, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.families.wan import components
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.spec import ModelSpec
from runtime.pipeline import growing_clip
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.files import CLIP, clip_name, finished_clip
from tests.pipeline.killing import killed
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_resume import stream_of
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan, with_strategy
from tests.waiting import until

Tiny = Callable[[str], ModelSpec]
WIDTH, HEIGHT, FRAMES = 64, 32, 33
DELIMITER = b"\0\0\0\1\x09"


def encoded(stream: Path) -> int:
    """Return how many frames a stream has."""
    return stream.read_bytes().count(DELIMITER) if stream.exists() else 0


def decode_slowly(job: Path, patch: pytest.MonkeyPatch, *, starving: bool = False) -> None:
    """Let whole frames take minutes a chunk by the clock of clips.

    Args:
        job: the folder of the job. A chunk comes once the frames before it are encoded, if they are.
        starving: whether memory runs out before the last chunk of the first decoding.
    """
    seconds, starved = [0.0], [not starving]

    class Slow(PyTorchVideoDecoder):
        def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
            count, stream = 0, job / CLIP / growing_clip._STREAM
            for frames in super().frames(latents, chunk, tile):
                yield frames
                if tile is None:
                    count, seconds[0] = count + len(frames), seconds[0] + 100.0
                    # The encoder has been started if there is its folder; it makes its file a little later.
                    until(lambda count=count: not stream.parent.is_dir() or encoded(stream) >= count)  # type: ignore[misc]  # bound now
                    if count > FRAMES - 9 and not starved[0]:
                        starved[0] = True
                        raise torch.OutOfMemoryError("on purpose")

    patch.setattr(components, "PyTorchVideoDecoder", Slow)
    patch.setattr(growing_clip, "time", SimpleNamespace(monotonic=lambda: seconds[0]))


def _decode_slowly(job: Path) -> None:
    decode_slowly(job, pytest.MonkeyPatch())


class Clip:
    """A plan with its model, and runs of it."""

    def __init__(self, spec: ModelSpec, folder: Path, **values: object) -> None:
        self.spec, self.job = spec, folder / "job"
        # Decoded as 1 frame and then 8 at a time.
        self.plan: ExecutionPlan = tiny_plan(spec, folder / "x.mp4", frames=FRAMES, steps=2, **values)
        # What is found at each event that reports frames: its clip's number, and frames.
        self.found: dict[int, np.ndarray] = {}

    @property
    def video(self) -> tuple[bytes, str]:
        """The video's frames and the digest of its stream."""
        return frames_of(self.plan.output), stream_of(self.plan.output)

    def whole(self) -> tuple[bytes, str]:
        """Return the video of a job without a folder, which writes no clip."""
        with Residency() as residency:
            assert isinstance(events_of(self.plan, self.spec, residency)[-1], VideoSaved)
        found = self.video
        self.plan.output.unlink()
        return found

    def run(self, cancel_at: Choice = never, *, starving: bool = False) -> list[Event]:
        """Run the job with a slow decoder."""

        def look(event: Event) -> bool:
            if isinstance(event, FramesDecoded) and event.playable not in {0, *self.found}:
                newest = finished_clip(self.job)
                assert newest is not None
                assert newest[0] == event.playable < event.frames
                found = np.frombuffer(frames_of(newest[1]), np.uint8)
                self.found[event.playable] = found.reshape(-1, self.plan.height, self.plan.width, 3)
            if isinstance(event, OutOfMemory):
                assert not (self.job / CLIP).exists()
            return cancel_at(event)

        with pytest.MonkeyPatch.context() as patch, Residency() as residency:
            decode_slowly(self.job, patch, starving=starving)
            return events_of(self.plan, self.spec, residency, cancel_at=look, checkpoints=CheckpointFolder(self.job))


def numbers(clip: Clip) -> list[int]:
    """Return the numbers of frames of the clips that are there; nothing else is."""
    return sorted(int(path.stem) for path in (clip.job / CLIP).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.1", "wan2.2-ti2v-5b"])
def test_the_first_frames_can_be_watched_while_others_are_decoded(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    clip = Clip(tiny(architecture), tmp_path)
    wanted = clip.whole()
    events = clip.run()
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert clip.video == wanted
    # At 8 frames a second, the shortest is of 8; on a busy machine it is of more. All but the newest frames are encoded
    # when a chunk comes.
    made = list(clip.found)
    assert 8 <= made[0] <= made[-1] and 16 <= made[-1] < 25 and made == sorted(made)
    # The video's own frames, which are noise: H.264 halves their colors.
    video = np.frombuffer(wanted[0], np.uint8).reshape(-1, HEIGHT, WIDTH, 3).astype(float)
    for count, frames in clip.found.items():
        assert len(frames) == count
        own, other = (((frames - one) ** 2).mean() for one in (video[:count], video[1 : count + 1]))
        assert own < other / 1.5
    assert numbers(clip) == made[-2:]
    CheckpointFolder(clip.job).clear()
    assert not (clip.job / CLIP).exists()


@pytest.mark.slow
def test_after_out_of_memory_the_clip_is_made_again(tiny: Tiny, tmp_path: Path) -> None:
    clip = Clip(tiny("wan2.1"), tmp_path)
    wanted = clip.whole()
    events = clip.run(starving=True)
    assert isinstance(events[-1], VideoSaved), events[-1]
    (lack,) = (index for index, event in enumerate(events) if isinstance(event, OutOfMemory))
    for part in (events[:lack], events[lack:]):
        playable = [event.playable for event in part if isinstance(event, FramesDecoded)]
        assert playable[0] == 0 and max(playable) >= 8 and playable == sorted(playable)
    assert clip.video == wanted


def test_frames_that_come_at_once_after_the_last_tile_are_not_encoded_twice(tiny: Tiny, tmp_path: Path) -> None:
    clip = Clip(tiny("wan2.1"), tmp_path)
    clip.plan = with_strategy(clip.plan, decode_tile=4)
    assert isinstance(clip.run()[-1], VideoSaved)
    assert not clip.found and not (clip.job / CLIP).exists()


def test_a_cancelled_video_keeps_no_clip(tiny: Tiny, tmp_path: Path) -> None:
    clip = Clip(tiny("wan2.1"), tmp_path)
    events = clip.run(lambda event: isinstance(event, FramesDecoded) and event.playable > 0)
    assert events[-1] == Cancelled()
    assert len(clip.found) == 1
    assert not (clip.job / CLIP).exists()


def test_a_clip_that_cannot_be_written_does_not_fail_the_video(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clip = Clip(tiny("wan2.1"), tmp_path)
    clip.job.mkdir()
    (clip.job / CLIP).write_text("no folder")
    assert isinstance(clip.run()[-1], VideoSaved)
    (logged,) = [record for record in caplog.records if record.name == "runtime.pipeline.growing_clip"]
    assert not clip.found and logged.levelname == "WARNING"


@pytest.mark.slow
def test_a_killed_job_keeps_its_clip_and_resumes(tiny: Tiny, tmp_path: Path) -> None:
    clip = Clip(tiny("wan2.1"), tmp_path)
    wanted = clip.whole()
    prepare = partial(_decode_slowly, clip.job)
    assert killed(clip.spec, clip.plan, clip.job, event="FramesDecoded", count=4, prepare=prepare) == -9
    newest = finished_clip(clip.job)
    assert newest is not None and newest[1].name == clip_name(newest[0])
    assert len(frames_of(newest[1])) == newest[0] * WIDTH * HEIGHT * 3
    assert (clip.job / CLIP / growing_clip._STREAM).exists()
    assert isinstance(clip.run()[-1], VideoSaved)
    assert clip.video == wanted
    assert numbers(clip) == list(clip.found)[-2:]
