"""The kernel kills a worker in a control group that runs out of memory: the page stays up, and the job resumes."""

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.models.registry import read_spec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.store import NAME, JobStore
from tests.app_server import MODEL, make_cache, serving
from tests.pipeline.test_resume import stream_of
from tests.plans import machine
from tests.queue.planted import Planted
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")]

# Two processes with PyTorch need about 1 GiB.
LIMIT = 3 << 30
# Runs the web app in the control group of the first argument.
IN_GROUP = """
import os, runpy, sys
from pathlib import Path

if __name__ == "__main__":
    (Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
    sys.argv = ["app.py", *sys.argv[2:]]
    runpy.run_path("app.py", run_name="__main__")
"""


@contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """Yield the folder of a new control group whose processes have `limit` bytes of memory and no swap."""
    mounted = Path("/sys/fs/cgroup")
    group, files = mounted / f"tandem-test-{os.getpid()}", {"memory.max": limit, "memory.swap.max": 0}
    if (mounted / "memory").is_dir():
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        (own,) = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
        group = mounted / "memory" / own.lstrip("/") / group.name
        files = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        for name, value in files.items():
            if not (group / name).exists():
                pytest.skip(f"control groups have no {name} here")
            (group / name).write_text(str(value))
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())  # workers end after the web app
        group.rmdir()


def test_the_page_stays_up_and_the_job_resumes_after_the_kernel_killed_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "cache")
    planted = Planted(tmp_path / "planted", monkeypatch)
    planted.add("allocate", event="StepDone", step=3)
    script = tmp_path / "in_group.py"
    script.write_text(IN_GROUP)
    spec = read_spec(cache / "weights" / MODEL, MODEL)
    values = {"prompt": "a red boat", "model": MODEL, "width": 64, "height": 32, "frames": 9, "steps": 8, "seed": 7}
    request = GenerationRequest.from_mapping(values)
    outputs = [cache / "outputs" / f"{name}.mp4" for name in ("killed", "undisturbed")]
    outputs[0].parent.mkdir()
    with (
        limited_group(LIMIT) as group,
        serving(cache, program=(str(script), str(group))) as server,
        closing(JobStore(cache / NAME)) as store,
    ):
        killed, undisturbed = (
            store.add(request, resolve(request, spec, PlanningContext(machine(), path))) for path in outputs
        )
        until(lambda: store.log.deaths(killed.id), meanwhile=lambda: server.process.poll() is None)
        with urllib.request.urlopen(server.url, timeout=60) as page:
            assert page.status == 200
        until(lambda: not store.get(undisturbed.id).open, meanwhile=lambda: server.process.poll() is None)
        with urllib.request.urlopen(server.url, timeout=60) as page:
            assert page.status == 200
        (death,) = store.log.deaths(killed.id)
        assert death["out_of_memory"]
        reason = Fact("queue.exit_out_of_memory")
        assert Fact.model_validate(death["how"]) == reason
        assert store.log.deaths(undisturbed.id) == []
        saved = store.get(killed.id).saved
        assert saved is not None
        assert Fact("queue.worker_replaced", {"how": reason}) in saved.warnings
        assert [values["step"] for _, _, values in store.log.events(killed.id) if values["event"] == "Resumed"]
    assert stream_of(outputs[0]) == stream_of(outputs[1])
