"""Makes the control frames of a job with a model, before the job's components are loaded.

Frames stream through the model in batches to a file of the cache, and the model is freed.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.core.events import StageStarted
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.preprocessors import PREPROCESSOR
from runtime.core.request import DEPTH
from runtime.execution.memory import release_cached_memory
from runtime.execution.preprocessors import DepthModel, PoseModel
from runtime.models.control_frames import made_frames, within_borders
from runtime.models.made_frames import blank_frames
from runtime.models.spec import VAE_ENCODER
from runtime.models.videos import clip_frames
from runtime.pipeline.run_context import RunContext
from runtime.video.skeletons import skeletons


def make_control_frames(context: RunContext) -> None:
    """Set `RunContext.control_frames` to what a model makes of the plan's control video: from the cache if it can.

    Warns of frames without people.

    Raises:
        InvalidRequestError, MachineError: see `models.videos.clip_frames`.
        ModelError: if the model cannot be loaded.
        OutputError: if the frames cannot be stored.
    """
    plan = context.plan
    place = made_frames(plan, context.cache_folder())
    assert place is not None
    frames = place.read()
    if frames is None:
        # It has the least memory that a plan forecasts for what reads the frames next.
        context.current = ("encode", VAE_ENCODER)
        context.cancel.check_pause()
        with contextlib.closing(_making(context, place.folder)) as making:
            frames = place.write(making)
        release_cached_memory(unreachable=True)
    context.control_frames = frames
    if plan.preprocess != DEPTH and (blank := blank_frames(frames)):
        context.warn(Fact("preprocess.no_person", {"blank": blank, "frames": len(frames)}))


def _making(context: RunContext, folder: Path) -> Generator[np.ndarray, None, None]:
    """Load the model and yield the frames that it makes; see `MadeFrames.read`."""
    plan, check = context.plan, context.cancel.check
    use, device = plan.preprocessor, plan.components["transformer"].device
    assert use is not None
    context.emit(StageStarted(stage="encode", part=PREPROCESSOR))
    with context.metrics.stage("encode"):
        began = time.perf_counter()
        model = DepthModel(use, device) if use.kind == DEPTH else PoseModel(use, device)
        loaded = time.perf_counter()
        context.residency.load_seconds += loaded - began
        batches = _batches(plan, use.batch, check)
        yield from _depths(model, batches, folder) if isinstance(model, DepthModel) else _poses(model, batches)
        context.preprocess_seconds = time.perf_counter() - loaded


def _batches(plan: ExecutionPlan, batch: int, check: Callable[[], None]) -> Iterator[list[Image.Image]]:
    """Yield the frames of a plan's control video, so many at a time."""
    assert plan.control is not None
    frames = clip_frames(plan.control, within_borders(plan)[0], "control", check)
    while some := list(islice(frames, batch)):
        check()
        yield some


def _depths(model: DepthModel, batches: Iterator[list[Image.Image]], folder: Path) -> Iterator[np.ndarray]:
    """Yield pictures of depth, (height, width) uint8: 255 is the nearest point of the whole clip, 0 the farthest.

    VACE's own program scales each frame by itself. Then everything flickers when one thing comes nearer; here, a
    brightness means one depth in all frames. It needs all depths before the first picture, so they wait in a file.

    Args:
        folder: of that file, which no other process sees.
    """
    low, high, shape = math.inf, -math.inf, (0, 0)
    with tempfile.TemporaryFile(dir=folder) as waiting:
        for batch in batches:
            depths = model.depths(batch)
            low, high, shape = min(low, float(depths.min())), max(high, float(depths.max())), depths.shape[1:]
            waiting.write(depths.tobytes())
        waiting.seek(0)
        size = math.prod(shape) * np.dtype(np.float32).itemsize
        scale = 255 / (high - low) if high > low else 0.0
        while data := waiting.read(size):
            yield np.rint((np.frombuffer(data, np.float32).reshape(shape) - low) * scale).astype(np.uint8)


def _poses(model: PoseModel, batches: Iterator[list[Image.Image]]) -> Iterator[np.ndarray]:
    """Yield pictures of people's poses, (height, width, 3) uint8."""
    for batch in batches:
        for frame, people in zip(batch, model.people(batch), strict=True):
            yield np.asarray(skeletons(people, *frame.size))
