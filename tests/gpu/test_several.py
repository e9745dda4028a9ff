"""One worker per GPU: jobs run side by side, each on its own, and give the same video on any."""

from pathlib import Path

import pytest
import torch

from runtime.core.events import StageStarted, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.queue.service import JobQueue
from runtime.queue.store import JobStore
from tests.pipeline.test_resume import stream_of
from tests.queue.test_worker import watch

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs and a CUDA build of PyTorch"),
]


def test_each_gpu_has_its_worker(tmp_path: Path) -> None:
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    worker = JobQueue(tmp_path, tmp_path / "outputs", engines, None, JobStore(tmp_path / "jobs.sqlite"))
    worker.start_workers(tmp_path / "log.txt")
    request = GenerationRequest.from_mapping({"prompt": "a red boat sails left", "seed": 7, "frames": 9, "steps": 20})
    try:
        jobs = worker.submit_all([request] * 3 * GPUS)
        for job in jobs:
            assert isinstance(list(watch(job))[-1], VideoSaved), job.events[-1]
        ran = [job.plan.components["transformer"].device for job in jobs]
        assert set(ran) == {f"cuda:{index}" for index in range(GPUS)}
        # Nothing of a job went to another GPU's memory, and all were busy at once.
        assert all(len({part.device for part in job.plan.components.values()}) == 1 for job in jobs)
        began = [worker.store.get(job.id).started or 0.0 for job in jobs]
        ended = [worker.store.get(job.id).ended or 0.0 for job in jobs]
        assert max(began[:GPUS]) < min(ended[:GPUS])
        assert len({stream_of(job.plan.output) for job in jobs}) == 1
        assert all(any(isinstance(event, StageStarted) for event in job.events) for job in jobs)
    finally:
        worker.close()


def test_a_job_may_have_several(tmp_path: Path) -> None:
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    worker = JobQueue(tmp_path, tmp_path / "outputs", engines, None, JobStore(tmp_path / "jobs.sqlite"))
    worker.start_workers(tmp_path / "log.txt")
    wanted = {"prompt": "a red boat sails left", "seed": 7, "frames": 9, "steps": 4}
    requests = [GenerationRequest.from_mapping(wanted | {"gpus": gpus}) for gpus in (1, 2, 1, GPUS, 2, 1)]
    try:
        jobs = worker.submit_all(requests)
        for job, request in zip(jobs, requests, strict=True):
            saved = list(watch(job))[-1]
            assert isinstance(saved, VideoSaved), saved
            assert job.plan.gpus == request.gpus
            split = saved.plan["split"]
            assert (1 if split is None else len(set(split["devices"]))) == request.gpus
    finally:
        worker.close()
