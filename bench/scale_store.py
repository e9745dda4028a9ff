"""Measure the job store at the rate of a cluster: seconds of each operation, CPU time and bytes of each job.

    python -m bench.scale_store --folder DIR [--queued 1000 10000 100000] [--jobs 100]

Drives `JobStore` on a file in DIR in one process, as a head does for its workers and clients: each queue length has a
new file, in which jobs are claimed, run and replaced, with the events of a video of 40 steps. Prints a JSON object for
each; docs/scale.md has a run.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.core.events import CheckpointSaved, Event, FramesDecoded, Planned, StageStarted, StepDone
from runtime.queue.records import VIDEOS
from runtime.queue.store import JobStore
from tests.queue.samples import result_of, sample_plan, sample_request

_KEYS = 200
_STEPS = 40
_CHECKPOINT_STEPS = 8
_BATCH = 1000
# A client asks for its video every ten seconds or so, during a job of four minutes.
_POLLS = 25


class Clock:
    """Wall and CPU seconds of each operation, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, float] = defaultdict(float)

    def time(self, name: str, what: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call a function and note how long it took."""
        wall, cpu = time.perf_counter(), time.process_time()
        found = what(*values, **named)
        self.wall[name].append(time.perf_counter() - wall)
        self.cpu[name] += time.process_time() - cpu
        return found


def events(seed: int) -> Sequence[Event]:
    """Return what a worker reports of one video."""
    plan = sample_plan(seed=seed, steps=_STEPS)
    steps: list[Event] = []
    for step in range(1, _STEPS + 1):
        steps.append(StepDone(step=step, of=_STEPS, seconds=1.0, part="transformer"))
        if step % _CHECKPOINT_STEPS == 0:
            steps.append(CheckpointSaved(step=step))
    frames = [FramesDecoded(frames=4 * number + 1, of=81) for number in range(21)]
    stages = [StageStarted(stage=stage) for stage in ("encode", "denoise", "decode")]
    return [Planned(plan=plan), *stages[:2], *steps, stages[2], *frames, result_of(plan)]


def measure(folder: Path, queued: int, jobs: int) -> dict[str, Any]:
    """Return the figures of a store in which `queued` jobs wait, after `jobs` jobs have run."""
    store, clock = JobStore(folder / "jobs.sqlite"), Clock()
    request, plan, reported = sample_request(steps=_STEPS), sample_plan(steps=_STEPS), events(1)
    for start in range(0, queued, _BATCH):
        owner = f"key:{start // _BATCH % _KEYS}"
        store.add_all([(request, plan)] * min(_BATCH, queued - start), owner=owner)
    before = _bytes(folder)
    for number in range(jobs):
        owner = f"key:{number % _KEYS}"
        clock.time("add", store.add_once, request, plan, owner=owner, admit=lambda _count, _times: None)
        job = clock.time("claim", store.order.claim, f"head.{number}", VIDEOS)
        for event in reported:
            kind = "step" if isinstance(event, StepDone | FramesDecoded) else "event"
            clock.time(kind, store.log.record, job.id, event)
        for _ in range(_POLLS):
            clock.time("poll", store.get, job.id)
    for number in range(20):
        clock.time("controls", store.controls, [job.id])
        clock.time("list", store.list, owner=f"key:{number}", limit=21)
        clock.time("news", store.log.events_since, store.log.jobs_changed_since(0)[0] - 5, ("VideoSaved",))
    for _ in range(3):
        clock.time("queue", store.order.jobs)
        clock.time("waiting", store.order.waiting, 40)
        clock.time("counts", store.order.counts)
        last = store.list(states=["queued"], limit=1)[0].id
        clock.time("ahead", store.order.ahead, last)
        clock.time("count_ahead", store.order.count_ahead, last)
    own = ("add", "claim", "step", "event", "poll")
    cpu = sum(clock.cpu[name] for name in own) / jobs
    done = sum(len(clock.wall[name]) for name in own)
    figures = {
        "queued": queued,
        "median_ms": {name: round(1000 * statistics.median(values), 3) for name, values in clock.wall.items()},
        "worst_ms": {name: round(1000 * max(values), 1) for name, values in clock.wall.items()},
        "transactions_per_second": round(done / sum(sum(clock.wall[name]) for name in own)),
        "transactions_per_job": done // jobs,
        "cpu_ms_per_job": round(1000 * cpu, 1),
        "bytes_per_job": round((_bytes(folder) - before) / jobs),
        "bytes_per_queued": round(before / queued),
    }
    store.close()
    return figures


def _bytes(folder: Path) -> int:
    return (folder / "jobs.sqlite").stat().st_size


def main() -> None:
    """Measure each length of the queue."""
    parser = argparse.ArgumentParser(description="Measure the job store at the rate of a cluster.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--queued", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--jobs", type=int, default=100)
    arguments = parser.parse_args()
    for queued in arguments.queued:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            figures = measure(folder, queued, arguments.jobs)
        finally:
            shutil.rmtree(folder)
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
