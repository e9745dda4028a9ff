"""`generate` and `jobs resume`: run one job in this process; Ctrl-C cancels it.

The job is in the store from the start, claimed by this process: it does not wait in the web app's queue.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runtime.cli import exit_codes, terminal
from runtime.cli.interrupts import cancel_on_signals
from runtime.core import settings
from runtime.core.errors import InvalidRequestError, StoreError, TandemError
from runtime.core.events import Cancelled, Event, Failed, FellBack, OutOfMemory, VideoSaved, Warned
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.execution.residency import Residency
from runtime.machine.probe import Machine, probe
from runtime.models.loras import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.history import HistoryFile
from runtime.pipeline.outputs import make_folder, output_path
from runtime.planner.resolve import resolve
from runtime.queue import recovery
from runtime.queue.execution import ControlPoller, JobRecorder, Planner, run
from runtime.queue.process_lock import Instance
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore, open_store


@dataclass(frozen=True)
class _Machine:
    """What jobs on this machine run with."""

    settings: Settings
    machine: Machine
    engines: EngineService
    history: HistoryFile

    @classmethod
    def found(cls) -> "_Machine":
        """Read the settings and probe the machine."""
        loaded, machine = settings.load(), probe()
        return cls(
            loaded, machine, EngineService.from_settings(loaded, machine), HistoryFile(loaded.cache_dir, machine)
        )


def generate(request: GenerationRequest, out: str | None, *, as_json: bool) -> int:
    """Generate one video and return the exit code."""
    here = _Machine.found()
    spec = model_for(request, here.settings.weights_dir)
    output = _target(request, out, here.settings.outputs_dir)
    plan = resolve(request, spec, here.machine, output, here.engines.offers(spec), here.history.read())
    with ExitStack() as stack:
        store, job = _stored(here, stack, request, plan)
        return _run(here, store, job, spec, plan, as_json=as_json)


def resume(beginning: str, *, as_json: bool) -> int:
    """Resume a job and return the exit code.

    Raises:
        StoreError: if there is no such job, or it cannot be resumed.
    """
    here = _Machine.found()
    store = open_store(here.settings.cache_dir)
    check_stored(store)
    with Instance(store.path) as own:
        recovery.recover(store, own.id)
        job = store.take(store.find(beginning).id, own.id)
        try:
            spec, plan = Planner(here.settings.weights_dir, here.engines, here.history).plan(
                job, here.machine, deaths=store.deaths(job.id)
            )
        except TandemError as error:
            store.record(job.id, Failed.because_of(error))
            raise
        return _run(here, store, job, spec, plan, as_json=as_json)


def check_stored(store: JobStore) -> None:
    """Check that a store is on disk, and warn if it was repaired.

    Raises:
        StoreError: if the jobs cannot be stored.
    """
    if store.problem:
        raise StoreError(store.problem.code, **store.problem.data)
    if store.notice:
        terminal.warning(str(store.notice))


def _stored(
    here: _Machine, stack: ExitStack, request: GenerationRequest, plan: ExecutionPlan
) -> tuple[JobStore, JobRecord]:
    """Return the job in the store; in a store in memory, with the reason, if the cache folder's cannot be written."""
    store = open_store(here.settings.cache_dir)
    try:
        own = stack.enter_context(Instance(store.path))
        return store, store.add(request, plan, instance=own.id)
    except StoreError as error:
        store.close()
        store = JobStore(None, problem=error.fact)
        return store, store.add(request, plan, instance="here")


def _run(
    here: _Machine, store: JobStore, record: JobRecord, spec: ModelSpec, plan: ExecutionPlan, *, as_json: bool
) -> int:
    progress = terminal.ProgressLine()
    if store.notice:
        terminal.warning(str(store.notice))

    poller = ControlPoller(store)
    with cancel_on_signals() as cancel, poller.polling():
        job = JobRecorder(record.id, store, cancel)

        def emit(event: Event) -> None:
            warnings = job.record(event)
            progress.event(event)
            for one in (event, *warnings):
                if isinstance(one, Warned | FellBack) or (isinstance(one, OutOfMemory) and one.retried):
                    terminal.warning(str(one.fact))

        with poller.following(job), Residency(here.engines) as residency, progress.shown():
            run(job, record, plan, spec, emit, residency, here.history, store)
    return _report_end(job, store, as_json=as_json)


def _report_end(job: JobRecorder, store: JobStore, *, as_json: bool) -> int:
    end = job.end
    if isinstance(end, VideoSaved):
        _report(end)
        if as_json:
            exit_codes.emit_json(end.result_json() | {"job": job.id})
        return exit_codes.DONE
    again = "" if store.temporary else f" To resume it: jobs resume {job.id}"
    if isinstance(end, Failed):
        if end.internal:
            return exit_codes.report_internal_error(str(end.fact.data.get("error", end.fact)), as_json=as_json)
        return exit_codes.report_error(end.fact, as_json=as_json)
    if not isinstance(end, Cancelled):
        store.put_back(job.id)
        terminal.line(f"Paused.{again}")
        return exit_codes.CANCELLED
    terminal.line(f"Cancelled. Nothing was saved.{again}")
    return exit_codes.CANCELLED


def _target(request: GenerationRequest, out: str | None, outputs_dir: Path) -> Path:
    if out is None:
        make_folder(outputs_dir)
        return output_path(outputs_dir, request.prompt)
    if not out.isprintable() or not out.strip():
        raise InvalidRequestError("out", "cli.out_unreadable")
    return Path(out).expanduser().resolve()


def _report(end: VideoSaved) -> None:
    timings = end.timings
    stages = ", ".join(f"{name} {timings[name]:.1f} s" for name in ("encode", "denoise", "decode", "mux"))
    terminal.line(f"Saved {end.video}")
    terminal.line(
        f"Seed {end.request['seed']} · {timings['total']:.1f} s ({stages}) · loading {end.load_seconds:.1f} s"
    )
