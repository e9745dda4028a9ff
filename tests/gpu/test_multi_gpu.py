"""One worker per GPU: jobs run in parallel and give the same video on any GPU; and passes that two GPUs share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime.core.events import StageStarted, VideoSaved
from runtime.core.plan import Split
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from tests.families.ltx2.test_parity import make, planned
from tests.gpu.errors import relative_error
from tests.gpu.test_cuda import on_cuda
from tests.pipeline.test_resume import stream_of
from tests.plans import with_strategy
from tests.queue.test_worker import watch

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs and a CUDA build of PyTorch"),
]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    """A queue with a worker process on each GPU."""
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    made = JobQueue(tmp_path, tmp_path / "outputs", engines, None, JobStore(tmp_path / "jobs.sqlite"))
    made.start_workers(tmp_path / "log.txt")
    yield made
    made.close()


def request(**values: object) -> GenerationRequest:
    """Ask for a short clip."""
    wanted: dict[str, object] = {"prompt": "a red boat sails left", "seed": 7, "frames": 9}
    return GenerationRequest.from_mapping(wanted | values)


def test_every_gpu_has_a_worker(queue: JobQueue) -> None:
    def run(count: int, steps: int) -> list[Job]:
        jobs = [queue.submit(request(steps=steps)) for _ in range(count)]
        for job in jobs:
            assert isinstance(list(watch(job))[-1], VideoSaved), job.events[-1]
        return jobs

    def devices(jobs: list[Job]) -> set[str]:
        return {job.plan.components["transformer"].device for job in jobs}

    used: set[str] = set()
    # A worker claims its first job after it has imported PyTorch: some take longer than others.
    while len(used) < GPUS:
        used |= devices(run(GPUS, 4))
    jobs = run(3 * GPUS, 100)
    assert devices(jobs) == {f"cuda:{index}" for index in range(GPUS)}
    # Each job used one GPU only, and all GPUs worked at the same time.
    assert all(len({part.device for part in job.plan.components.values()}) == 1 for job in jobs)
    began = [queue.store.get(job.id).started or 0.0 for job in jobs]
    ended = [queue.store.get(job.id).ended or 0.0 for job in jobs]
    assert max(began[:GPUS]) < min(ended[:GPUS])
    assert len({stream_of(job.plan.output) for job in jobs}) == 1
    assert all(any(isinstance(event, StageStarted) for event in job.events) for job in jobs)


def test_a_job_can_use_several_gpus(queue: JobQueue) -> None:
    requests = [request(steps=4, gpus=gpus) for gpus in (1, 2, 1, GPUS, 2, 1)]
    jobs = [queue.submit(one) for one in requests]
    for job, asked in zip(jobs, requests, strict=True):
        saved = list(watch(job))[-1]
        assert isinstance(saved, VideoSaved), saved
        assert job.plan.gpus == asked.gpus
        split = saved.plan["split"]
        assert (1 if split is None else len(set(split["devices"]))) == asked.gpus


@pytest.mark.parametrize(("guidance", "sequence"), [(2, 1), (1, 2)])
def test_a_clip_with_sound_of_two_gpus_equals_that_of_one(
    guidance: int, sequence: int, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = tiny("ltx-2.3")
    plan = on_cuda(with_strategy(planned(spec, 3.0, tmp_path, steps=3), keep_loaded=True), "float32")
    split = Split(devices=("cuda:0", "cuda:1"), guidance=guidance, sequence=sequence, decode=False)
    wanted, got = make(spec, plan), make(spec, plan.replace(split=split))
    for name in ("video", "sound"):
        assert relative_error(getattr(got, name), getattr(wanted, name)) < 1e-3
