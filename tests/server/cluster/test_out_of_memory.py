"""A node's worker is killed because memory runs out: its job resumes with the next lower-memory strategy."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runtime.core.facts import Fact
from runtime.queue.recovery import MemoryKills
from runtime.queue.store import JobStore
from tests.cluster_machines import Machines
from tests.queue.test_out_of_memory import limited_group

GROUP_BYTES = 4 << 30
# Allocates memory, in a control group if one is given, until the process of the first argument ends. Ray has the kernel
# kill its workers before any other process.
BALLOON = """
import os, sys, time
from pathlib import Path

pid, folder = sys.argv[1:]
if folder:
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
held = []
while Path("/proc", pid).exists() and len(held) < 160:
    held.append(bytearray(b"x") * (64 << 20))
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counters are Linux's")
def test_a_job_resumes_with_less_memory_after_its_worker_was_killed(tmp_path: Path) -> None:
    """Have the kernel kill it, or Ray where no control group can be made."""
    pytest.importorskip("ray")
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + (4 << 30)) / memory.total
    cluster = Machines(tmp_path)
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(limited_group(GROUP_BYTES))
        except pytest.skip.Exception:
            group = None
            if threshold > 0.7:
                raise
        stack.callback(cluster.close)
        if group is None:
            cluster.add_node(RAY_memory_usage_threshold=str(threshold), RAY_memory_monitor_refresh_ms="100")
        else:
            cluster.add_node()
            (group / "cgroup.procs").write_text(str(cluster.nodes[0].pid))
        cluster.wait(cluster.workers, 240)
        store = stack.enter_context(contextlib.closing(JobStore(tmp_path / "head" / "jobs.sqlite")))
        job = cluster.submit(0, steps=200)
        cluster.wait(lambda: any(values["event"] == "StepDone" for _, _, values in store.log.events(job)), 180)
        (worker,) = cluster.workers()
        balloon = [sys.executable, "-c", BALLOON, str(worker["pid"]), str(group or "")]
        for _ in range(5):
            subprocess.run(balloon, check=False)  # the kernel may end it instead
            if not psutil.pid_exists(worker["pid"]):
                break
        cluster.wait(lambda: store.log.deaths(job), 60)
        cluster.wait(cluster.finished, 300)
        (death,) = store.log.deaths(job)
        assert death["out_of_memory"] and death["begun"]
        reason = Fact("queue.exit_out_of_memory")
        assert Fact.model_validate(death["how"]) == reason
        saved = store.get(job).saved
        assert saved is not None
        assert Fact("queue.worker_replaced", {"how": reason}) in saved.warnings
        assert "event.out_of_memory_retried" in {warning.code for warning in saved.warnings}


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        (MemoryKills(2, certain=True), MemoryKills(3, certain=True), "queue.exit_out_of_memory"),
        (MemoryKills(2), MemoryKills(4), "queue.exit_probably_out_of_memory"),
        (MemoryKills(2), MemoryKills(2), None),
    ],
)
def test_a_count_that_rose_explains_a_lost_process(before: MemoryKills, now: MemoryKills, code: str | None) -> None:
    found = now.since(before)
    assert (None if found is None else found.code) == code
