"""After a sticky CUDA error the worker process is replaced and the job resumes; the app stays up."""

from pathlib import Path

import pytest
import torch

from runtime.core.events import VideoSaved
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from tests.pipeline.test_resume import stream_of
from tests.queue.planted import Planted
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]


def test_an_illegal_access_replaces_the_worker_and_the_job_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Planted(tmp_path / "planted", monkeypatch).add("illegal access", event="StepDone", step=4)
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    store = JobStore(tmp_path / "jobs.sqlite")
    queue = JobQueue(tmp_path, tmp_path / "outputs", engines, None, store)
    queue.start_workers(tmp_path / "log.txt")
    request = GenerationRequest.from_mapping({"prompt": "a red boat sails left", "seed": 7, "frames": 9, "steps": 8})
    try:
        first, second = (queue.submit(request) for _ in range(2))
        until(lambda: not first.open and not second.open)
        assert isinstance(first.progress.end, VideoSaved), first.progress.end
        assert [death["how"]["code"] for death in store.log.deaths(first.id)] == ["queue.exit_device_lost"]
        assert store.log.deaths(second.id) == []
        assert stream_of(first.plan.output) == stream_of(second.plan.output)
    finally:
        queue.close()
