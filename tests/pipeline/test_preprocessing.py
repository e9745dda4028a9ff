"""Control frames that models make of a job's control video: the cache, scales, and frames without people."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, StageStarted, VideoSaved
from runtime.core.facts import Fact
from runtime.core.preprocessors import PREPROCESSOR
from runtime.core.request import DEPTH, POSE
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.preprocessors import DepthModel
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.control_frames import control_frames, made_frames
from runtime.models.spec import ModelSpec
from runtime.models.videos import clip_frames
from runtime.pipeline.checkpoint import CheckpointFolder, identity
from runtime.pipeline.preprocessing import _depths
from runtime.pipeline.stages import control_clip
from runtime.planner.preprocessing import run_of, with_preprocessor
from runtime.server.before_clips import make_before
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_control import decoded, planned
from tests.pipeline.test_from_video import Clip
from tests.plans import gpu, machine
from tests.preprocessor_files import save_depth, save_pose

Tiny = Callable[[str], ModelSpec]


def run_with_cache(clip: Clip, cache: Path, job: Path | None = None) -> list[Event]:
    """Run a job that keeps what it makes in a cache."""
    engines = EngineService(EngineStore(cache / "engines", 10**9), probe(), cache)
    checkpoints = None if job is None else CheckpointFolder(job)
    with Residency(engines) as residency:
        return events_of(clip.plan, clip.spec, residency, checkpoints=checkpoints)


def makes(events: list[Event]) -> bool:
    """Whether a model made control frames in a run."""
    return any(isinstance(event, StageStarted) and event.part == PREPROCESSOR for event in events)


@pytest.mark.slow
def test_a_job_makes_control_frames_once(tiny: Tiny, tmp_path: Path) -> None:
    save_depth(tmp_path)
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", preprocess=DEPTH, steps=1, guidance_scale=1.0)
    plan = clip.plan
    place = made_frames(plan, tmp_path)
    assert place is not None and place.read() is None
    # Killed once they are made, before they are read.
    job = tmp_path / "job"
    assert (
        killed(clip.spec, plan, job, event="StageStarted", count=2, engines=tmp_path / "engines", cache=tmp_path) == -9
    )
    made = place.read()
    assert made is not None and len(made) == plan.frames
    events = run_with_cache(clip, tmp_path, job)
    assert isinstance(events[-1], VideoSaved) and not makes(events)
    # Another job makes them again if the file is damaged.
    other = clip._replace(plan=plan.replace(seed=9))
    first = made.copy()
    (file,) = (tmp_path / "control_frames").glob("*.npy")
    file.write_bytes(file.read_bytes()[:-1])
    assert place.read() is None
    assert makes(run_with_cache(other, tmp_path))
    again = place.read()
    assert again is not None and np.array_equal(again, first)
    given = control_clip(plan, made=again).video
    assert given is not None
    shown = np.stack([np.asarray(frame) for frame, _ in control_frames(plan, made=again)])
    assert np.array_equal(given.numpy(), shown)
    before = make_before(plan, tmp_path, cache_dir=tmp_path)
    assert before is not None and np.abs(decoded(before) - shown).mean() < 8
    assert (again.min(), again.max()) == (0, 255) and np.array_equal(shown[..., 0], again)


def test_depth_has_one_scale_for_the_whole_clip(tiny: Tiny, tmp_path: Path) -> None:
    save_depth(tmp_path)
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", "mask", preprocess=DEPTH)
    use, control = clip.plan.preprocessor, clip.plan.control
    assert use is not None and control is not None
    frames = list(clip_frames(control, clip.plan, "control"))
    depths = DepthModel(use, "cpu").depths(frames)
    wanted = np.rint((depths - depths.min()) / (depths.max() - depths.min()) * 255)
    place = made_frames(clip.plan, tmp_path)
    assert place is not None
    made = place.write(_depths(DepthModel(use, "cpu"), iter([frames[:4], frames[4:]]), tmp_path))
    assert np.abs(made.astype(int) - wanted).max() <= 1
    # With a mask, what it keeps is that of the video.
    (shown, changes), *_ = control_frames(clip.plan, made=made)
    assert changes is not None
    kept = np.asarray(changes) == 0
    assert kept.any() and np.array_equal(np.asarray(shown)[kept], np.asarray(frames[0])[kept])
    assert np.array_equal(np.asarray(shown)[~kept], made[0][~kept][:, None].repeat(3, 1))


def test_frames_without_people_are_black_and_reported(tiny: Tiny, tmp_path: Path) -> None:
    save_pose(tmp_path, people=False)
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", preprocess=POSE, steps=1, guidance_scale=1.0)
    saved = run_with_cache(clip, tmp_path)[-1]
    assert isinstance(saved, VideoSaved)
    assert Fact("preprocess.no_person", {"blank": 9, "frames": 9}) in saved.warnings
    place = made_frames(clip.plan, tmp_path)
    assert place is not None
    made = place.read()
    assert made is not None and made.shape == (9, 32, 64, 3) and not made.any()


def test_a_plan_counts_the_model(tiny: Tiny, tmp_path: Path) -> None:
    save_pose(tmp_path)
    values: dict[str, Any] = {"steps": 1, "guidance_scale": 1.0}
    without = planned(tiny("wan2.1-vace"), tmp_path, "control", **values)
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", preprocess=POSE, **values)
    use, memory = clip.plan.preprocessor, clip.plan.memory[0]
    assert use is not None and memory.component == PREPROCESSOR
    assert memory.weights_bytes >= use.weights_bytes > 0 and memory.working_bytes > 0
    for name in ("encode", "total", "load"):
        assert clip.plan.seconds[name].likely > without.plan.seconds[name].likely
    run = run_of(clip.plan, machine(), 100.0, loaded=False)
    known = with_preprocessor(without.plan.replace(preprocessor=use), machine(), (run,))
    assert known.seconds["total"].likely == pytest.approx(without.plan.seconds["total"].likely + 100)
    # On a GPU several frames are computed at once, as far as they fit.
    for free, batch in ((80, 8), (1, 1)):
        on_gpu = machine(gpu=gpu(free_gib=free), torch_cuda="13.0")
        components = {name: part.replace(device="cuda:0") for name, part in without.plan.components.items()}
        plan = with_preprocessor(without.plan.replace(preprocessor=use, components=components), on_gpu, ())
        assert plan.preprocessor is not None and plan.preprocessor.batch == batch
    identities = {identity({}, made.plan) for made in (without, clip)}
    other = use.replace(digest="0" * 64)
    assert len(identities | {identity({}, clip.plan.replace(preprocessor=other))}) == 3
    # The request of a video does not name the model.
    assert "preprocessor" not in clip.plan.request_json()


def test_a_missing_model_is_refused_before_a_job(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        planned(tiny("wan2.1-vace"), tmp_path, "control", preprocess=DEPTH)
    assert (caught.value.code, caught.value.field) == ("preprocess.model_missing", "preprocess")
