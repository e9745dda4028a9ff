"""Runs functions in processes of their own, and jobs that kill themselves with signal 9 at an event or a rename."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.events import Event
from runtime.core.plan import ExecutionPlan
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job


def forking() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported the libraries; see `tests.conftest`."""
    return multiprocessing.get_context("forkserver")


def killed(
    spec: ModelSpec,
    plan: ExecutionPlan,
    job: Path,
    *,
    event: str = "",
    rename: str = "",
    count: int = 1,
    prepare: Callable[[], None] = bool,  # type: ignore[assignment]  # does nothing
    engines: Path | None = None,
    cache: Path | None = None,
) -> int:
    """Run a job until it is killed; return its exit code, -9 if it was killed in time.

    Args:
        event: it is killed after the `count`th event of this name.
        rename: or just before the `count`th rename of a file whose name begins so.
        prepare: called first in its process.
        engines: the folder of the engines that it may use.
        cache: the folder of the cache that it uses, if it may use engines.
    """
    process = forking().Process(target=_run, args=(spec, plan, job, event, rename, count, prepare, engines, cache))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def _run(
    spec: ModelSpec,
    plan: ExecutionPlan,
    job: Path,
    event: str,
    rename: str,
    count: int,
    prepare: Callable[[], None],
    engines: Path | None,
    cache: Path | None,
) -> None:
    prepare()
    left = count
    replace = Path.replace

    def hit() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def replacing(self: Path, target: Path) -> Path:
        if rename and Path(target).name.startswith(rename):
            hit()
        return replace(self, target)

    def emit(one: Event) -> None:
        if one.event == event:
            hit()

    Path.replace = replacing  # type: ignore[method-assign,assignment]
    service = None if engines is None else EngineService(EngineStore(engines, 10**10), probe(), cache)
    with Residency(service) as residency:
        run_job(plan, spec, emit, Cancel(), residency, checkpoints=CheckpointFolder(job))
