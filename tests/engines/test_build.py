"""Building in a child process: every failure is an error with a code, leaves no files, and can be retried."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import build as build_module
from runtime.engines.build import BuildRequest, Entry, build_engine
from runtime.engines.builders import BuildNeeds
from runtime.engines.builders.inductor import InductorBuilder
from runtime.engines.child import run_child
from runtime.engines.store import EngineStore
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord
from tests.engines import child_entries
from tests.engines.engine_files import add, key, refusal, visible
from tests.facts import fact
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_entries")

ROOT = Path(__file__).parents[2]
ENGINE = key().digest()


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    """Return a store that is not there yet."""
    return EngineStore(tmp_path / "engines", 1 << 40)


@pytest.fixture
def request_(tiny: Callable[[str], ModelSpec]) -> BuildRequest:
    """Return what is to be built."""
    return BuildRequest(spec=tiny("wan2.1"), component="transformer", key=key(), device="cpu")


def odd(task: str) -> Entry:
    """Return an entry of the child process by its name."""
    entry: Entry = getattr(child_entries, task)
    return entry


def ignore(fact: Fact, fraction: float | None) -> None:
    """Ignore progress."""


def attempt(request: BuildRequest, store: EngineStore, task: str) -> EngineRecord:
    """Build with an odd child."""
    return build_engine(request, store, ignore, Cancel(), odd(task))


@pytest.mark.usefixtures("spawned_children")
def test_an_engine_is_built_once_with_progress_and_log(request_: BuildRequest, store: EngineStore) -> None:
    reported: list[tuple[Fact, float | None]] = []
    record = build_engine(request_, store, lambda *progress: reported.append(progress), Cancel(), odd("make"))
    assert (Fact("engine.compiling"), 0.5) in reported
    assert reported[-1][1] == 1.0
    assert store.index() == [record]
    assert "s  Compiling." in (store.path(record.id) / "build.log").read_text()
    # The second time nothing is started.
    assert build_engine(request_, store, ignore, Cancel(), child_entries.never) == record
    again = attempt(replace(request_, again=True), store, "make")
    assert again.built_at > record.built_at
    assert (store.folder / "made").read_text() == "made\n" * 2
    assert visible(store) == sorted([ENGINE, "made"])


def test_damaged_engine_is_rebuilt_and_the_problem_reported(request_: BuildRequest, store: EngineStore) -> None:
    add(store, key())
    (store.path(ENGINE) / "engine.pt2").write_bytes(b"")
    reported: list[Fact] = []
    record = build_engine(request_, store, lambda fact, _: reported.append(fact), Cancel(), odd("make"))
    cause = Fact("engine.file_other_size", {"file": "engine.pt2", "size": 0, "expected": 600})
    assert reported[0] == Fact("engine.existing_unusable", {"cause": cause})
    assert record.usable


def test_engine_that_fails_verification_is_stored_and_not_rebuilt(request_: BuildRequest, store: EngineStore) -> None:
    with pytest.raises(EngineError) as wrong:
        attempt(request_, store, "make_wrong")
    cause = Fact("engine.compared_not_finite", {"where": "velocity"})
    assert (wrong.value.code, wrong.value.data["cause"]) == ("engine.built_wrong", cause)
    assert [record.usable for record in store.index()] == [False]
    with pytest.raises(EngineError) as still_wrong:
        attempt(request_, store, "make")
    assert still_wrong.value.fact == wrong.value.fact
    assert attempt(replace(request_, again=True), store, "make").usable


def exception(text: str) -> Fact:
    """Return the fact for an internal error in the child."""
    return Fact("engine.child_exception", {"error": text})


REFUSED = Fact("engine.tensorrt_parse_failed", {"version": "10", "detail": "Foo is unknown"})
FAILURES = [
    ("raise_", "child_failed", {"cause": exception("ValueError: the shape is odd")}, "about to fail"),
    ("refuse", "child_refused", {"cause": REFUSED}, "EngineError"),
    ("exhaust", "child_out_of_memory", {}, "MemoryError"),
    ("exhaust_within", "child_out_of_memory", {}, "RuntimeError"),
    ("die", "child_crashed", {"signal": 11}, "last words"),
    ("exit_", "child_ended", {"exit_code": 0}, "bye"),
    ("forget", "not_finished", {"cause": Fact("engine.file_missing", {"file": "engine.json"})}, ""),
]


@pytest.mark.parametrize(("task", "code", "data", "log"), FAILURES, ids=[failure[0] for failure in FAILURES])
def test_a_failure_is_reported_with_the_end_of_the_log(
    request_: BuildRequest, store: EngineStore, task: str, code: str, data: dict[str, object], log: str
) -> None:
    with pytest.raises(EngineError) as failed:
        attempt(request_, store, task)
    assert failed.value.code == f"engine.{code}"
    assert failed.value.data.items() >= data.items()
    if code != "not_finished":
        assert failed.value.data["action"] == Fact("engine.not_built", {"engine": request_.title})
    assert log in failed.value.log
    assert visible(store) == []


def test_a_build_that_failed_can_be_retried(request_: BuildRequest, store: EngineStore) -> None:
    with refusal("engine.child_failed"):
        attempt(request_, store, "raise_")
    assert attempt(request_, store, "make").usable


@pytest.mark.usefixtures("spawned_children")
def test_output_of_the_child_goes_only_to_the_log(request_: BuildRequest, store: EngineStore) -> None:
    reported: list[Fact] = []
    build_engine(request_, store, lambda fact, _: reported.append(fact), Cancel(), odd("babble"))
    assert reported[1:-1] == [Fact("engine.compiling")]
    log = (store.path(ENGINE) / "build.log").read_text()
    for words in ('{"type": "done"}', "no progress", "from C", "red\n", "100%\n", "xxx"):
        assert words in log
    assert "\x1b" not in log
    assert len(log) < 20_000


TQDM = """
import sys
from pathlib import Path
from runtime.engines.child import run_child
from tests.engines.child_entries import show_progress

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(run_child(show_progress, None, folder, folder / "log", print, lambda: None).result)
"""


def test_a_child_that_uses_tqdm_leaves_no_semaphores(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TQDM)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{'counted': 3}\n", "")


def test_temporary_files_of_a_child_are_in_its_folder(tmp_path: Path) -> None:
    outcome = run_child(child_entries.show_temporary_folders, None, tmp_path, tmp_path / "log", ignore, lambda: None)
    assert outcome.result is not None, outcome.log
    assert all(Path(folder).is_relative_to(tmp_path) for folder in outcome.result["folders"])


def test_a_child_that_reports_nothing_is_cancelled(tmp_path: Path) -> None:
    checks = count()

    def cancel() -> None:
        if next(checks):
            raise CancelledError

    with pytest.raises(CancelledError):
        run_child(child_entries.pause, None, tmp_path, tmp_path / "log", ignore, cancel)
    assert not (tmp_path / "ended").exists()


@pytest.mark.usefixtures("spawned_children")
def test_child_that_cannot_be_started_is_an_error(
    request_: BuildRequest, store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(process: SpawnProcess) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(SpawnProcess, "start", start)
    with refusal("engine.child_not_started"):
        build_engine(request_, store, ignore, Cancel(), odd("make"))
    assert visible(store) == []


@pytest.mark.usefixtures("spawned_children")
def test_full_disk_is_reported(request_: BuildRequest, store: EngineStore) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limits[1]))
    try:
        with refusal("engine.child_disk_full"):
            attempt(request_, store, "fill")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert visible(store) == []
    assert attempt(request_, store, "make").usable


def test_full_file_system_is_reported(request_: BuildRequest, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        store = EngineStore(disk / "engines", 1 << 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_module, "free_disk_bytes", lambda folder: 1 << 60)
            with refusal("engine.child_disk_full"):
                attempt(request_, store, "fill")
            assert visible(store) == []
            assert attempt(request_, store, "make").usable
            (disk / "rest").write_bytes(b"x" * (1 << 20))
            with contextlib.suppress(OSError), (disk / "more").open("wb") as file:
                while file.write(b"x" * 4096):
                    file.flush()
            with refusal("engine.store_disk_full", "engine.child_disk_full"):
                attempt(replace(request_, again=True), store, "make")
        assert store.index()[0].usable
        assert store.verify_hash(store.index()[0]) is None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("lack", ["memory", "disk", "video memory"])
def test_build_that_does_not_fit_is_refused_before_the_start(
    request_: BuildRequest, store: EngineStore, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    field = {"memory": "ram_bytes", "disk": "disk_bytes", "video memory": "vram_bytes"}[lack]
    needs = replace(BuildNeeds(ram_bytes=0, disk_bytes=0, vram_bytes=0), **{field: 1 << 60})
    monkeypatch.setattr(InductorBuilder, "needs", lambda *_: needs)
    with refusal(f"engine.needs_{lack.replace(' ', '_')}") as failed:
        build_engine(request_, store, ignore, Cancel(), child_entries.never)
    assert failed.value.data["needed"] == 1 << 60
    assert 0 <= failed.value.data["free"] < 1 << 60
    assert visible(store) == []


class Hanging:
    """A build that never ends, and the processes in it."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.begun = threading.Event()

    def __call__(self, fact: Fact, fraction: float | None) -> None:
        """Take the process ids from the child's progress."""
        if fact.code == "engine.builder_output":
            self.pids = [int(word) for word in fact.data["line"].split()[1:]]
            self.begun.set()

    def then(self, act: Callable[[], None]) -> None:
        """Act as soon as it hangs."""
        assert self.begun.wait(60)
        act()


def await_end(pids: list[int]) -> None:
    """Wait until none of the processes lives."""

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_children")
def test_cancelling_ends_all_processes_at_once(request_: BuildRequest, store: EngineStore) -> None:
    cancel, hanging = Cancel(), Hanging()
    threading.Thread(target=hanging.then, args=(cancel.request,)).start()
    with pytest.raises(CancelledError):
        build_engine(request_, store, hanging, cancel, odd("hang"))
    assert len(hanging.pids) == 3
    await_end(hanging.pids)
    assert visible(store) == []
    with pytest.raises(CancelledError):
        build_engine(request_, store, ignore, cancel, child_entries.never)
    assert attempt(request_, store, "make").usable


def test_killed_child_is_reported(request_: BuildRequest, store: EngineStore) -> None:
    hanging = Hanging()
    threading.Thread(target=hanging.then, args=(lambda: os.kill(hanging.pids[0], signal.SIGKILL),)).start()
    with refusal("engine.child_killed"):
        build_engine(request_, store, hanging, Cancel(), odd("hang"))
    await_end(hanging.pids[:1] + hanging.pids[2:])
    os.kill(hanging.pids[1], signal.SIGKILL)  # it left the group, and its parent was killed
    assert visible(store) == []
    assert attempt(request_, store, "make").usable


PARENT = """
import signal, sys
from pathlib import Path
from runtime.core.cancel import Cancel
from runtime.engines import build as build_module
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.store import EngineStore
from runtime.models.registry import read_spec
from tests.engines import child_entries
from tests.engines.engine_files import key
_, model, folder, task = sys.argv
# Where the tests were started in the background, SIGINT is ignored by all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
request = BuildRequest(spec=read_spec(Path(model), "wan2.1"), component="transformer", key=key(), device="cpu")
say = lambda fact, fraction: print(fact, flush=True)
record = build_engine(request, EngineStore(Path(folder), 1 << 40), say, Cancel(), getattr(child_entries, task))
print("built", record.id, record.built_at, flush=True)
"""


@contextlib.contextmanager
def parent(request: BuildRequest, store: EngineStore, task: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that builds."""
    command = [sys.executable, "-c", PARENT, str(request.spec.directory), str(store.folder), task]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids that a hanging build reports."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("pids "):
            return [int(word) for word in line.split()[1:]]
    raise AssertionError("the build did not begin")


def test_ctrl_c_leaves_no_files(request_: BuildRequest, store: EngineStore) -> None:
    with parent(request_, store, "hang") as process:
        pids = pids_of(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) != 0
    await_end(pids)
    assert visible(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("space", ["without", "with a space"])
def test_child_of_a_killed_parent_ends_and_the_next_build_works(
    request_: BuildRequest, tmp_path: Path, space: str
) -> None:
    store = EngineStore(tmp_path / space / "engines", 1 << 40)
    with parent(request_, store, "hang") as process:
        pids = pids_of(process)
        elsewhere = list(store.folder.glob(".building-*/elsewhere"))
        assert bool(elsewhere) == (" " in space)
        scratch = [Path(path.read_text()) for path in elsewhere]
        process.kill()
        process.wait()
        await_end(pids)
    # A lock may outlive its process by an instant.
    until(lambda: store.index() or not visible(store))
    assert visible(store) == []
    assert not any(path.exists() for path in scratch)
    assert attempt(request_, store, "make").usable


@pytest.mark.slow
def test_concurrent_builds_in_two_processes_build_once(request_: BuildRequest, store: EngineStore) -> None:
    with parent(request_, store, "make") as one, parent(request_, store, "make") as other:
        ends = [process.communicate(timeout=60)[0].splitlines() for process in (one, other)]
    assert ends[0][-1] == ends[1][-1]
    assert ends[0][-1].startswith(f"built {ENGINE}")
    waits = str(fact("engine.waiting", engine=request_.title))
    assert sum(waits in line for lines in ends for line in lines) == 1
    assert (store.folder / "made").read_text() == "made\n"
    assert visible(store) == sorted([ENGINE, "made"])


def test_concurrent_rebuilds_in_one_process_build_once(request_: BuildRequest, store: EngineStore) -> None:
    found: list[EngineRecord] = []
    insist = replace(request_, again=True)
    threads = [threading.Thread(target=lambda: found.append(attempt(insist, store, "make"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert (store.folder / "made").read_text() == "made\n"


def test_waiting_for_another_build_can_be_cancelled(request_: BuildRequest, store: EngineStore) -> None:
    cancel = Cancel()
    with store.building(ENGINE, wait=lambda: None):
        threading.Timer(0.3, cancel.request).start()
        with pytest.raises(CancelledError):
            build_engine(request_, store, ignore, cancel, odd("make"))
    assert visible(store) == []
