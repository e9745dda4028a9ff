"""Worker processes: the app that supervises them imports no torch, and jobs resume after a worker died."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.core.events import Resumed, VideoSaved
from runtime.core.facts import Fact
from runtime.engines import child
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import SECTIONS
from runtime.queue.done_command import DoneCommand
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.supervisor import Supervisor
from runtime.queue.views import Job
from tests.families import framepack_models
from tests.image_files import saved
from tests.pipeline.test_resume import stream_of
from tests.queue.planted import Planted
from tests.queue.test_worker import small
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

STEPS = 12
KILLED = Fact("queue.exited", {"how": "signal 9, SIGKILL"})


class App:
    """A queue with a real worker process, as the web app has it, and tiny models in its weights folder."""

    def __init__(self, folder: Path, planted: Planted) -> None:
        self.engines = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)
        self.planted = planted
        self.outputs = folder / "outputs"
        self.store = JobStore(folder / "jobs.sqlite")
        self.queue = JobQueue(folder / "weights", self.outputs, self.engines, None, self.store)
        self.ended = folder / "ended"
        self.queue.on_done = ("sh", "-c", 'echo $TANDEM_JOB $TANDEM_STATE >> "$0"', str(self.ended))
        DoneCommand(self.store, self.queue.on_done)
        self.queue.start_workers(folder / "log.txt")

    def kill(self) -> None:
        """Kill the worker, and wait until it is replaced."""
        until(self.queue.worker_pids)
        pid = self.queue.worker_pids()[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.queue.worker_pids().get(0, pid) != pid)

    def ends_of(self, job: Job) -> list[str]:
        """Return the states with which the command at the end was called for a job, at least one."""

        def states() -> list[str]:
            lines = self.ended.read_text().splitlines() if self.ended.exists() else []
            return [state for name, state in (line.split() for line in lines) if name == job.id]

        until(states)
        return states()

    def spawned_children(self) -> list[int]:
        """Return the processes that the worker spawned, such as one that builds an engine."""
        worker = psutil.Process(self.queue.worker_pids()[0])
        return [one.pid for one in worker.children(recursive=True) if "spawn_main" in " ".join(one.cmdline())]

    def wait_for_step(self, job: Job) -> None:
        """Wait until a job runs and has done a step of this run."""

        def running() -> bool:
            job.refresh()  # an earlier run's progress is gone then
            return job.state == "running" and job.progress.step > 0

        until(running, meanwhile=lambda: job.open)

    def run(self, **values: object) -> tuple[Job, VideoSaved]:
        """Make a video."""
        job = self.queue.submit(small(seed=5, **values))
        until(lambda: not job.open)
        assert isinstance(job.progress.end, VideoSaved), job.progress.end
        assert self.planted.pending() == 0
        return job, job.progress.end

    def died_in(self, job: Job) -> list[tuple[str | None, Fact]]:
        """Return the stage and the cause of each death of a job's worker."""
        return self.deaths(job.id)

    def deaths(self, job_id: str) -> list[tuple[str | None, Fact]]:
        """Return the same for a job or a build, by id."""
        return [(death["stage"], Fact.model_validate(death["how"])) for death in self.store.log.deaths(job_id)]


@pytest.fixture(scope="module")
def app(
    forked_children: None, tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    """An app whose workers are forked, so that they need not import PyTorch again."""
    folder = tmp_path_factory.mktemp("app")
    shutil.copytree(tiny("wan2.2-a14b").directory, folder / "weights" / "tiny")
    shutil.copytree(tiny("wan2.2-i2v-a14b").directory, folder / "weights" / "images")
    framepack_models.pipeline().save_pretrained(folder / "weights" / "framepack-f1")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("runtime.queue.supervisor._START_METHOD", child._START_METHOD)
        monkeypatch.setattr("runtime.queue.supervisor._MOST_DELAY_SECONDS", 0.05)
        made = App(folder, Planted(folder / "planted", monkeypatch))
        yield made
        made.queue.close()


@pytest.fixture(scope="module")
def undisturbed(app: App) -> str:
    """The video stream of a job whose worker was not killed."""
    job, _ = app.run(steps=STEPS)
    return stream_of(job.plan.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "at"),
    [
        ("denoise", {"event": "StepDone", "step": 5}),
        ("save", {"event": "StageStarted", "stage": "save"}),
    ],
)
def test_a_job_resumes_by_itself_after_its_worker_was_killed(
    app: App, undisturbed: str, stage: str, at: dict[str, Any]
) -> None:
    app.planted.add("kill", **at)
    job, end = app.run(steps=STEPS)
    assert app.died_in(job) == [(stage, KILLED)]
    assert Fact("queue.worker_replaced", {"how": KILLED}) in end.warnings
    assert stream_of(job.plan.output) == undisturbed
    resumed = [event.step for event in job.events if isinstance(event, Resumed)]
    assert resumed == ([STEPS] if stage in {"decode", "save"} else resumed)
    assert [path.name for path in app.outputs.iterdir() if path.suffix != ".mp4"] == []
    assert app.ends_of(job) == ["done"]


@pytest.mark.slow
def test_a_job_from_an_image_resumes_after_its_worker_was_killed_and_the_image_is_gone(
    app: App, tmp_path: Path
) -> None:
    values = {"model": "images", "image": str(saved(tmp_path / "boat.png", 32, 32)), "steps": 4}
    wanted, _ = app.run(**values)
    app.planted.add("kill", event="StepDone", step=2)
    job = app.queue.submit(small(seed=5, **values))
    (tmp_path / "boat.png").unlink()
    until(lambda: not job.open)
    assert isinstance(job.progress.end, VideoSaved), job.progress.end
    assert app.died_in(job) == [("denoise", KILLED)]
    assert stream_of(job.plan.output) == stream_of(wanted.plan.output)


@pytest.mark.slow
def test_a_video_made_in_sections_resumes_by_itself_after_its_worker_was_killed(app: App, tmp_path: Path) -> None:
    image = str(saved(tmp_path / "boat.png", 32, 32))
    values: dict[str, Any] = {"model": "framepack-f1", "image": image, "frames": 73, "steps": 2}
    wanted, _ = app.run(**values)
    app.planted.add("kill", event="StepDone", step=3)  # in the middle of the second section
    job, end = app.run(**values)
    assert app.died_in(job) == [("denoise", KILLED)]
    (resumed,) = [event.step for event in job.events if isinstance(event, Resumed)]
    assert resumed in {2, 3}
    assert end.sections == (2, 2, 73)
    assert stream_of(job.plan.output) == stream_of(wanted.plan.output)
    folder = app.store.folder(job.id)
    assert folder is not None
    assert not (folder / SECTIONS).exists()


@pytest.mark.slow
def test_a_second_death_without_progress_fails_the_job(app: App) -> None:
    for _ in range(2):
        app.planted.add("kill", event="StageStarted", stage="denoise")
    job = app.queue.submit(small(seed=6, steps=STEPS))
    until(lambda: not job.open)
    record = app.store.get(job.id)
    assert record.state == "failed" and record.failure is not None
    assert record.failure.fact.code == "queue.worker_died_again"
    assert app.ends_of(job) == ["failed"]


@pytest.mark.slow
def test_a_job_in_a_worker_process_is_paused_and_cancelled(app: App) -> None:
    paused, cancelled = (app.queue.submit(small(seed=7, steps=1000)) for _ in range(2))
    app.wait_for_step(paused)
    app.queue.hold([paused.id], True)
    until(lambda: paused.held and paused.state == "queued")
    app.wait_for_step(cancelled)
    cancelled.request_cancel()
    until(lambda: cancelled.state == "cancelled")
    app.queue.cancel([paused.id])
    assert paused.state == "cancelled"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_spawned_worker_that_uses_tqdm_has_no_semaphore(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "tiny")
    monkeypatch.setattr("runtime.queue.supervisor._START_METHOD", "spawn")
    app = App(tmp_path, Planted(tmp_path / "planted", monkeypatch))
    app.planted.add("use tqdm", event="StageStarted", stage="encode")
    app.run(steps=1)
    maps = Path("/proc", str(app.queue.worker_pids()[0]), "maps").read_text()
    app.queue.close()
    assert "libtorch" in maps and "/dev/shm/sem." not in maps


ENGINE_SIZE = {"width": 64, "height": 32, "frames": 9, "steps": 2}


@pytest.mark.slow
def test_an_idle_build_whose_worker_was_killed_is_started_over(app: App) -> None:
    values = {**ENGINE_SIZE, "backends": {"text_encoder": "onnxruntime"}}
    _, end = app.run(**values)
    assert end.plan["components"]["text_encoder"]["backend"] == "pytorch"
    (build,) = app.store.list(kinds=["build"])
    until(app.spawned_children)
    children = app.spawned_children()
    app.kill()
    until(lambda: not any(map(psutil.pid_exists, children)))
    until(lambda: not app.store.get(build.id).open)
    assert app.store.get(build.id).state == "done"
    assert [how for _, how in app.deaths(build.id)] == [KILLED]
    (engine,) = app.engines.store.index()
    assert engine.usable
    visible = [path.name for path in app.engines.store.folder.iterdir() if not path.name.startswith(".")]
    assert visible == [engine.id]
    _, again = app.run(**values)
    assert again.plan["components"]["text_encoder"]["backend"] == "onnxruntime"
    assert len(app.store.list(kinds=["build"])) == 1


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WEB = """
import json, sys, urllib.request
from pathlib import Path
from typing import Any

def main():
    from runtime.core import settings
    from runtime.ui.app import serve
    with serve(settings.load()) as url:
        page = urllib.request.urlopen(url, timeout=60).read()
    print(json.dumps({"torch": sorted({"torch", "diffusers", "transformers"} & set(sys.modules)), "page": len(page)}))

if __name__ == "__main__":
    main()
"""


def test_a_supervisor_ends_when_it_is_closed(tmp_path: Path) -> None:
    threads_before = threading.enumerate()
    with contextlib.closing(JobStore(tmp_path / "jobs.sqlite")) as store:
        supervisor = Supervisor(store, [])
        supervisor.start()
        supervisor.close()
        new_threads = [thread for thread in threading.enumerate() if thread not in threads_before]
        assert not any(thread.name == "supervisor" for thread in new_threads)


@pytest.mark.slow
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
