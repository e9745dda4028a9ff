"""After a sticky CUDA error the worker process is replaced and the job resumes; the app stays up."""

import os
from pathlib import Path

import pytest
import torch

from runtime.core.events import VideoSaved
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.queue.service import JobQueue
from runtime.queue.store import JobStore
from tests.pipeline.test_resume import stream_of
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]

# Imported by the worker as it starts: the fourth step reads outside of a tensor, once.
PLANTED = '''
import os, sys
from pathlib import Path

def plant():
    from runtime.queue.execution import JobRecorder
    record = JobRecorder.record

    def recorded(self, event):
        mark = Path(os.environ["TANDEM_TEST_MARK"])
        if type(event).__name__ == "StepDone" and event.step == 4 and not mark.exists():
            mark.touch()
            import torch
            torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
        return record(self, event)

    JobRecorder.record = recorded

def run_next():
    """Run the sitecustomize module that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    own = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))

run_next()
if any("spawn_main" in argument for argument in sys.orig_argv):
    plant()
'''


def test_an_illegal_access_replaces_the_worker_and_the_job_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(PLANTED)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(planted), str(Path(__file__).parents[2]), *filter(None, before)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("TANDEM_TEST_MARK", str(tmp_path / "mark"))
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    store = JobStore(tmp_path / "jobs.sqlite")
    queue = JobQueue(tmp_path, tmp_path / "outputs", engines, None, store)
    queue.start_workers(tmp_path / "log.txt")
    request = GenerationRequest.from_mapping({"prompt": "a red boat sails left", "seed": 7, "frames": 9, "steps": 8})
    try:
        first, second = queue.submit_all([request, request])
        until(lambda: not first.open and not second.open)
        assert isinstance(first.progress.end, VideoSaved), first.progress.end
        assert [death["how"] for death in store.deaths(first.id)] == ["CUDA error"]
        assert store.deaths(second.id) == []
        assert stream_of(first.plan.output) == stream_of(second.plan.output)
    finally:
        queue.close()
