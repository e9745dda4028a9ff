"""Worker processes: the app that supervises them imports no torch, and outlives whatever happens to a worker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.events import Resumed, VideoSaved
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.queue.service import Job, JobQueue
from runtime.queue.store import JobStore
from tests.pipeline.test_resume import stream_of
from tests.queue.test_worker import small
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

STEPS = 12


class App:
    """A queue with a real worker process, as the web app has it."""

    def __init__(self, folder: Path) -> None:
        engines = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)
        self.folder = folder
        self.store = JobStore(folder / "jobs.sqlite")
        self.queue = JobQueue(folder / "weights", folder / "outputs", engines, None, self.store)
        self.queue.start_workers(folder / "log.txt")

    @property
    def pid(self) -> int:
        """The worker's process."""
        until(self.queue.worker_pids)
        return self.queue.worker_pids()[0]

    def kill(self) -> None:
        """Kill the worker, and wait until another one has taken its place."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.queue.worker_pids().get(0, pid) != pid)

    def wait_for_step(self, job: Job) -> None:
        """Wait until a job runs and has done a step of this run."""
        until(lambda: job.state == "running" and job.progress.step > 0, meanwhile=lambda: job.open)

    def end(self, job: Job) -> VideoSaved:
        """Wait for a video."""
        until(lambda: not job.open)
        assert isinstance(job.progress.end, VideoSaved), job.progress.end
        return job.progress.end


@pytest.fixture(scope="module")
def app(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("app")
    shutil.copytree(tiny("wan2.2-a14b").directory, folder / "weights" / "tiny")
    made = App(folder)
    yield made
    made.queue.close()


@pytest.fixture(scope="module")
def whole(app: App) -> str:
    """The video stream of a job that nothing happened to."""
    job = app.queue.submit(small(seed=5, steps=STEPS))
    app.end(job)
    return stream_of(job.plan.output)


STAGES = [("encode", "text_encoder"), ("denoise", "transformer_2"), ("decode", "vae")]


@pytest.mark.parametrize(("stage", "part"), STAGES)
def test_a_job_resumes_by_itself_after_its_worker_was_killed(app: App, whole: str, stage: str, part: str) -> None:
    job = app.queue.submit(small(seed=5, steps=STEPS))

    def reached() -> bool:
        return any(
            values.get("stage") == stage and (part == "vae" or values.get("part") == part)
            for _, _, values in app.store.events(job.id)
        )

    until(reached, meanwhile=lambda: job.open, pause=0.002)
    app.kill()
    saved = app.end(job)
    (death,) = app.store.deaths(job.id)
    assert death["how"] == "signal 9, SIGKILL"
    assert "queue.worker_replaced" in [fact.code for fact in saved.warnings] or any(
        "signal 9, SIGKILL" in str(fact) for fact in saved.warnings
    )
    assert stream_of(job.plan.output) == whole
    if stage == "decode":
        assert any(isinstance(event, Resumed) and event.step == STEPS for event in job.events)


def test_a_second_death_fails_the_job(app: App) -> None:
    job = app.queue.submit(small(seed=6, steps=1000))
    app.wait_for_step(job)
    app.kill()
    until(lambda: app.store.deaths(job.id))
    app.wait_for_step(job)
    app.kill()
    until(lambda: not job.open)
    record = app.store.get(job.id)
    assert record.state == "failed" and record.failure is not None
    assert record.failure.fact.code == "queue.worker_died_again"


def test_a_running_job_is_cancelled_and_paused_from_here(app: App) -> None:
    paused, cancelled = (app.queue.submit(small(seed=7, steps=1000)) for _ in range(2))
    app.wait_for_step(paused)
    app.queue.hold([paused.id], True)
    until(lambda: paused.held and paused.state == "queued")
    app.wait_for_step(cancelled)
    cancelled.request_cancel()
    until(lambda: cancelled.state == "cancelled")
    app.queue.cancel([paused.id])
    assert paused.state == "cancelled"


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WEB = """
import json, sys, urllib.request
from pathlib import Path

def main():
    from runtime.core import settings
    from runtime.ui.app import serve
    with serve(settings.load()) as url:
        page = urllib.request.urlopen(url, timeout=60).read()
    print(json.dumps({"torch": sorted({"torch", "diffusers", "transformers"} & set(sys.modules)), "page": len(page)}))

if __name__ == "__main__":
    main()
"""


def test_the_web_process_imports_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "web.py"
    script.write_text(WEB)
    values = {"TANDEM_CACHE_DIR": str(tmp_path / "cache"), "TANDEM_BROWSER": "0", "TANDEM_PORT": str(free_port())}
    path = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, **values, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["torch"] == [] and found["page"] > 1000
