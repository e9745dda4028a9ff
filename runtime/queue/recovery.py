"""Recovery after a process died: why it died, the new state of its jobs, and the plan of a job that runs again."""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runtime.core.errors import StoreError, TandemError
from runtime.core.events import Failed, Stage, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.processes import describe_exit
from runtime.models.spec import ModelSpec
from runtime.planner.strategies import next_strategy
from runtime.queue.instances import WorkerRegistry, app_of, is_alive
from runtime.queue.records import STARTS_OVER, JobRecord, read_death
from runtime.queue.store import JobStore
from runtime.video.mp4 import read_metadata, sweep

# Exit code of a worker whose CUDA context is broken: only a new process can use the GPU again.
EXIT_DEVICE_LOST = 75

# After so many deaths without progress a job fails, even if it had not begun: its claim may crash the worker.
_MOST_DEATHS = 5
# Most deaths after the job has begun. Workers of a cluster are killed more often for other reasons; Spark's tasks and
# Ray's fail after four as well.
LOCAL_DEATHS, CLUSTER_DEATHS = 2, 4
# Events that end a run of a job, and those of one that waits to begin.
_ENDED = frozenset({"WorkerDied", "PutBack", "QueuedAgain", "Edited", "Interrupted"})
_WAITS = frozenset({"WaitsForDisk", "WaitsForGpus"})

logger = logging.getLogger(__name__)


def recover(store: JobStore, own_app: str) -> Sequence[str]:
    """Find the jobs whose process died, update their state, and return their ids.

    A job whose video is complete is done: its process died just before it stored that. Others are interrupted.

    Args:
        own_app: the calling app; supervisors settle the jobs of their own workers.
    """
    if store.path is None:
        return []
    alive: dict[str, bool] = {own_app: True}
    ids = []
    registry = WorkerRegistry(store.database)
    for app in registry.apps() - {own_app}:
        if not is_alive(store.path, app):
            registry.remove_app(app)
    for job in store.order.jobs(states=["running"]):
        if job.instance is None:
            continue
        app = app_of(job.instance)
        if app not in alive:
            alive[app] = is_alive(store.path, app)
        if not alive[app]:
            state = store.interrupt(job.id, job.instance, _finished(job))
            if state is not None:
                logger.info("job %s: its process died; %s", job.id, state)
                ids.append(job.id)
            _sweep(job)
    return ids


def put_back(store: JobStore, worker: str) -> None:
    """Put the job of a worker that was killed because its app ends back into the queue; it did not fail.

    Raises:
        StoreError: if the store cannot be read or written.
    """
    for job, saved in _left_by(store, worker):
        if saved is not None or job.kind == "task":
            store.interrupt(job.id, worker, saved)
        else:
            store.put_back(job.id)


def settle_worker(
    store: JobStore,
    worker: str,
    how: Fact,
    *,
    out_of_memory: bool = False,
    counted: bool = True,
    most: int = LOCAL_DEATHS,
) -> None:
    """Queue the job of a dead worker again, so that it resumes, or fail it.

    A job or build fails at its `most`th death in a row without progress: a death does not count towards the next ones
    if the job had come further than at every death before. Deaths before it had begun do not count, up to a limit.
    Another task is never queued again: an engine file may have crashed the worker.

    Args:
        how: the worker ended, see `exit_reason`.
        out_of_memory: whether the system killed it because memory ran out.
        counted: whether the job may be the cause.
        most: `LOCAL_DEATHS` or `CLUSTER_DEATHS`.

    Raises:
        StoreError: if the store cannot be read or written.
    """
    for job, saved in _left_by(store, worker):
        if saved is not None or job.pending == "cancel":
            store.interrupt(job.id, worker, saved)
            continue
        events = [values for _, _, values in store.log.events(job.id)]
        work = _current_work(events)
        work["begun"] = work["begun"] and counted
        death = {"event": "WorkerDied", "how": how.model_dump(), "out_of_memory": out_of_memory, **work}
        deaths = _without_progress([*events, death])
        fails = work["begun"] and sum(entry["begun"] for entry in deaths) >= most
        if job.kind != "task" and not fails and len(deaths) < _MOST_DEATHS:
            if store.restart(job.id, worker, death):
                logger.warning("job %s: its worker died (%s); it is queued again", job.id, how)
            continue
        error = StoreError("queue.worker_died" if job.kind == "task" else "queue.worker_died_again", how=how)
        if job.kind == "video":
            store.log.record(job.id, Failed.because_of(error))
        else:
            store.finish(job.id, "failed", error.fact)


def _without_progress(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the deaths since a job came further than at every death before, see `records.Death`.

    How far it came are the sections that it has finished, then steps, then decoded frames.
    """
    deaths: list[Mapping[str, Any]] = []
    furthest = place = (0, 0, 0)
    for values in events:
        if values["event"] in STARTS_OVER:
            deaths, furthest, place = [], (0, 0, 0), (0, 0, 0)
        elif values["event"] == "SectionDone":
            place = (_count(values, "section"), 0, 0)
        elif values["event"] == "StepDone":
            place = (place[0], _count(values, "step"), 0)
        elif values["event"] == "FramesDecoded":
            place = (*place[:2], _count(values, "frames"))
        elif values["event"] == "WorkerDied":
            deaths = [*(deaths if place <= furthest else ()), read_death(values)]
            furthest, place = max(furthest, place), (place[0], 0, 0)
    return deaths


def _count(values: Mapping[str, Any], name: str) -> int:
    """Return a number of a stored event; 0 if it cannot be read."""
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _current_work(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether a running job has begun, its stage, and the component that it runs or builds an engine for."""
    begun = False
    for values in reversed(events):
        if values["event"] == "StageStarted":
            return {"begun": True, "stage": values["stage"], "part": values["part"]}
        if values["event"] in _ENDED:
            break
        begun = begun or values["event"] not in _WAITS
        if values["event"] == "Planned":
            break
    return {"begun": begun, "stage": None, "part": None}


def avoid_causes(plan: ExecutionPlan, spec: ModelSpec, deaths: Sequence[Mapping[str, Any]]) -> ExecutionPlan:
    """Return a plan without the likely causes of a job's worker deaths, and with warnings about them.

    A component whose engine ran when the worker died runs in PyTorch. If the system killed the worker because memory
    ran out, the job continues with the next lower-memory strategy that the request permits.

    Args:
        deaths: the events "WorkerDied" of the job.
    """
    for death in deaths:
        if not death["begun"]:
            continue
        how = Fact.model_validate(death["how"])
        replaced = Fact("queue.worker_replaced", {"how": how})
        part = plan.components.get(death["part"])
        if part is not None and death["out_of_memory"]:
            if replaced not in plan.warnings:  # otherwise the plan has the strategy already
                plan = _with_less_memory(plan, spec, death["stage"], death["part"])
        elif part is not None and part.engines:
            reason = Fact("queue.engine_disabled", {"how": how, "backend": part.backend})
            for name in plan.sharing_engines(death["part"]):
                plan = _in_pytorch(plan, name, reason)
        plan = _with_warning(plan, replaced)
    return plan


def _in_pytorch(plan: ExecutionPlan, component: str, reason: Fact) -> ExecutionPlan:
    part = plan.components[component]
    plan = plan.with_component(component, part.in_pytorch(reason))
    if plan.fell_back(component):  # the job reports it
        return plan
    data = {"component": component, "backend": part.backend, "reason": reason}
    return _with_warning(plan, Fact("event.fell_back", data))


def _with_less_memory(plan: ExecutionPlan, spec: ModelSpec, stage: Stage, component: str) -> ExecutionPlan:
    fallback = next_strategy(plan, spec, component, "RAM", lossy=plan.request.on_out_of_memory == "any")
    if fallback is None or not fallback.permitted:
        return plan
    return _with_warning(fallback.plan, fallback.event(stage, component, "RAM", 0.0).fact)


def _with_warning(plan: ExecutionPlan, warning: Fact) -> ExecutionPlan:
    return plan if warning in plan.warnings else plan.replace(warnings=(*plan.warnings, warning))


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the Linux kernel has killed because memory ran out; 0 where it does not count them.

    Attributes:
        count: in the control group of this process, which its workers share, or else on the whole machine.
        certain: whether it is the control group's count, which other programs do not increase.
    """

    count: int = 0
    certain: bool = False

    @classmethod
    def read(cls, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> "MemoryKills":
        """Read the counter of a control group of version 1 or 2, or else the machine's."""
        for path in _group_counters(proc, groups):
            count = _oom_kills(path)
            if count is not None:
                return cls(count, certain=True)
        return cls(_oom_kills(proc / "vmstat") or 0)

    def since(self, before: "MemoryKills") -> Fact | None:
        """Return how a process that was lost after `before` ended, if the kernel has killed one meanwhile."""
        if self.count <= before.count:
            return None
        return Fact("queue.exit_out_of_memory" if self.certain else "queue.exit_probably_out_of_memory")


def exit_reason(code: int, before: MemoryKills, now: MemoryKills) -> tuple[Fact, bool]:
    """Return how a worker process ended, and whether the system killed it because memory ran out.

    Args:
        code: its exit code; negative for a signal.
        before, now: the kernel's count from seconds before its end, and from after it.
    """
    killed = now.since(before)
    if sys.platform != "win32" and code == -signal.SIGKILL and killed is not None:
        return killed, True
    if code == EXIT_DEVICE_LOST:
        return Fact("queue.exit_device_lost"), False
    return Fact("queue.exited", {"how": describe_exit(code)}), False


def _group_counters(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the files that may have the counter of this process's control group, the most specific first."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, name = groups / "memory", "memory.oom_control"
        elif not controllers:
            folder, name = groups, "memory.events"
        else:
            continue
        yield folder / path.lstrip("/") / name
        yield folder / name  # in a container, whose own group is the root


def _oom_kills(counters: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _left_by(store: JobStore, worker: str) -> Iterator[tuple[JobRecord, VideoSaved | None]]:
    """Yield the jobs of a dead worker with the results of those that it had finished; their partial files are gone."""
    for job in store.running_on(worker):
        saved = _finished(job)
        _sweep(job)
        yield job, saved


def _sweep(job: JobRecord) -> None:
    """Remove the partial files beside a job's video."""
    if job.kind == "video":
        with contextlib.suppress(OSError):  # a disk that does not answer; see `storage.tidy`
            sweep(job.output.parent)


def _finished(job: JobRecord) -> VideoSaved | None:
    """Return the result of a job from its video's metadata; `None` if the video is missing or another job's."""
    try:
        if job.kind != "video" or not job.output.is_file():
            return None
        metadata = read_metadata(job.output)
        saved = VideoSaved.model_validate({**metadata, "video": job.output})
    except (TandemError, ValidationError, OSError):
        return None
    # A video that ended early may be continued by now; if not, the job makes it again from its sections.
    return saved if metadata.get("job") == job.id and not saved.continues else None
