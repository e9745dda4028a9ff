"""A cache folder with a long history and a full queue, for measurements and for looking at the page."""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np

from runtime.core.events import Failed
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import find
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.store import NAME, JobStore
from runtime.video.mp4 import VideoWriter
from runtime.video.preview import encode_frames
from tests.app_server import MODEL, make_cache
from tests.plans import machine
from tests.queue.samples import result_of

SIZES = ((192, 112), (112, 192), (160, 160), (256, 112))
PROMPTS = (
    "a red boat sails left on a calm sea",
    "a blue ball rolls right at night",
    "two red boats race along the coast while the sun sets behind the hills and a flock of birds crosses the sky, "
    "seen from a low camera that slowly moves to the right",
    "supercalifragilistic" * 12,
    "סירה אדומה על הים",
    "a red boat \u202eturned\u202c around \u2066isolated",
)
_FRAMES = 17


def fill(folder: Path, history: int = 500, queued: int = 100) -> Path:
    """Fill a cache folder: finished videos of several proportions, failures, a queue after a long job."""
    cache = make_cache(folder)
    outputs = cache / "outputs"
    outputs.mkdir()
    spec = find(MODEL, cache / "weights")

    def plan_of(number: int, steps: int = 4) -> tuple[GenerationRequest, ExecutionPlan]:
        width, height = SIZES[number % len(SIZES)] if number % 5 == 0 else SIZES[0]
        request = GenerationRequest(
            prompt=PROMPTS[number % len(PROMPTS)], model=MODEL, width=width, height=height, frames=_FRAMES,
            steps=steps, seed=number,
        )  # fmt: skip
        return request, resolve(request, spec, PlanningContext(machine(), outputs / f"{number:04}.mp4"))

    with closing(JobStore(cache / NAME)) as store:
        for number in range(history):
            job = store.add(*plan_of(number), instance="here")
            own = store.folder(job.id)
            assert own is not None and job.plan is not None
            own.mkdir(parents=True)
            _draw(cache, job.plan, number, own)
            if number % 12 == 11:
                (job.output).unlink()
                (own / "poster.webp").replace(own / "preview.webp")
                fact = Fact("video.disk_full", {"file": str(job.output)})
                store.log.record(job.id, Failed(fact=fact))
            else:
                store.log.record(job.id, result_of(job.plan))
        store.add_all([plan_of(history, 1000), *(plan_of(history + number) for number in range(1, queued + 1))])
    return cache


def _draw(cache: Path, plan: ExecutionPlan, number: int, folder: Path) -> None:
    """Write a video and its poster; clips of one size and color are copies."""
    color = number % 6
    made = cache / "clips" / f"{plan.width}x{plan.height}-{color}.mp4"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        frames = np.zeros((_FRAMES, plan.height, plan.width, 3), np.uint8)
        down, across = np.mgrid[: plan.height, : plan.width]
        for n in range(_FRAMES):
            ball = (down - plan.height / 2) ** 2 + (across - plan.width * (n + 1) / 18) ** 2 < (plan.height / 6) ** 2
            frames[n] = (40 + 30 * color, 120, 220 - 30 * color)
            frames[n] += (down * 30 // plan.height)[..., None].astype(np.uint8)
            frames[n, ball] = (230, 90, 60)
        with VideoWriter(made, plan.width, plan.height, plan.fps, 20) as writer:
            writer.write(frames)
            writer.close_stream()
            writer.finish("clip", {})
        made.with_suffix(".webp").write_bytes(encode_frames(list(frames), 60))
    shutil.copy(made, plan.output)
    shutil.copy(made.with_suffix(".webp"), folder / "poster.webp")
