"""`generate` and `jobs resume`: run one job in this process; Ctrl-C cancels it.

The job is added to the store as claimed by this process, so it does not wait in the web app's queue.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.cli import exit_codes, terminal
from runtime.cli.conversion import read_output, read_path
from runtime.cli.exit_codes import cancel_on_signals
from runtime.cli.jobs import check_stored
from runtime.cli.plan_and_doctor import clip_text, time_text
from runtime.core import settings
from runtime.core.environment import program
from runtime.core.errors import MODEL_UNUSABLE, OutputError, StoreError
from runtime.core.events import FINISHING, Cancelled, Event, Failed, FellBack, OutOfMemory, Planned, VideoSaved, Warned
from runtime.core.facts import Fact, Words, cut, render
from runtime.core.files import give_usual_permissions
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.core.units import counted, duration
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, probe
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.models.wildcards import with_prompt
from runtime.pipeline.files import make_folder
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue import recovery
from runtime.queue.done_command import DoneCommand
from runtime.queue.executors import VideoExecutor
from runtime.queue.instances import Instance
from runtime.queue.job_planning import JobReplanner, continuation, queue_builds
from runtime.queue.records import JobRecord
from runtime.queue.run import ControlPoller, Outcome, Run, Work
from runtime.queue.sheets import write_sheet
from runtime.queue.store import JobStore, open_store
from runtime.video.interpolation import check_interpolator
from runtime.video.mp4 import check_output

if TYPE_CHECKING:  # it imports torch
    from runtime.execution.residency import Residency

# A video that takes longer is generated after a question.
_ASK_SECONDS = 3 * 3600
_PROMPT_SHOWN = 60


@dataclass(frozen=True)
class _Environment:
    """Settings, machine, engines and timing history that a job needs."""

    settings: Settings
    machine: Machine
    engines: EngineService
    history: HistoryFile

    @classmethod
    def load(cls) -> "_Environment":
        """Read the settings and probe the machine."""
        loaded, machine = settings.load(), probe()
        return cls(
            loaded, machine, EngineService.from_settings(loaded, machine), HistoryFile(loaded.cache_dir, machine)
        )


def generate(
    request: GenerationRequest, out: str | None, *, confirmed: bool, as_json: bool, enhances: bool = False
) -> int:
    """Generate one video and return the exit code.

    What the end needs, such as the output's folder and the encoder, is checked before the job exists.

    Args:
        confirmed: skips the question before a video that takes hours.
        enhances: whether the prompt is enhanced first.
    """
    environment = _Environment.load()
    if enhances:
        _planned(environment, request, out)  # what is refused is refused before minutes of work
        (request,) = _enhanced(environment, [request])
    request, spec, plan = _planned(environment, request, out)
    terminal.line(clip_text(spec, plan))
    terminal.line(time_text(plan))
    seconds = plan.seconds["load"].likely + plan.seconds["total"].likely
    if seconds >= _ASK_SECONDS and not confirmed and not as_json and sys.stdin.isatty():
        terminal.ask("Generate it?")
    with ExitStack() as stack:
        store, job = _stored(environment, stack, request, plan)
        queue_missing_engines(store, job, plan, spec, environment.engines.store)
        return _run(environment, store, job, lambda _: (spec, plan), as_json=as_json)


def generate_all(
    requests: Sequence[GenerationRequest], *, confirmed: bool, as_json: bool, enhances: bool = False
) -> int:
    """Generate the videos of a batch one after the other, and a contact sheet; return the exit code.

    All are planned before the first one starts. Those that wait are paused jobs; see `resume_batch`.

    Args:
        confirmed: skips the question before hours of work.
        enhances: whether the prompts are enhanced first.
    """
    environment = _Environment.load()
    if enhances:
        _planned(environment, requests[0])
        requests = _enhanced(environment, requests)
    planned = [_planned(environment, request) for request in requests]
    seconds = sum(plan.seconds["total"].likely for *_, plan in planned)
    terminal.line(f"{counted(len(planned), 'video')}, about {duration(seconds)} in all.")
    if seconds >= _ASK_SECONDS and not confirmed and not as_json and sys.stdin.isatty():
        terminal.ask("Generate them?")
    store = open_store(environment.settings.cache_dir)
    if store.notice:
        terminal.warning(str(store.notice))
    plans = [(request, plan) for request, _, plan in planned]
    try:
        jobs = store.add_all(plans, held=True)
    except StoreError as error:
        store.close()
        store = JobStore(None, problem=error.fact)
        jobs = store.add_all(plans, held=True)
    by_job = {job.id: (spec, plan) for job, (_, spec, plan) in zip(jobs, planned, strict=True)}
    for job in jobs:
        queue_missing_engines(store, job, by_job[job.id][1], by_job[job.id][0], environment.engines.store)
    return _run_all(environment, store, jobs, lambda work: by_job[work.record.id], as_json=as_json)


def _enhanced(environment: _Environment, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    # It imports an HTTP client, which few videos need.
    from runtime.cli.enhance import enhanced

    return enhanced(requests, environment.settings, environment.machine)


def _planned(
    environment: _Environment, request: GenerationRequest, out: str | None = None
) -> tuple[GenerationRequest, ModelSpec, ExecutionPlan]:
    """Return a request as it is stored, its model and its plan, whose video can be saved.

    Args:
        out: see `read_output`.
    """
    request = with_prompt(request, environment.settings.cache_dir)
    spec = model_for(request, environment.settings.weights_dir, environment.settings.cache_dir)
    output = read_output(out, request.prompt, environment.settings.outputs_dir)
    offers = environment.engines.offers(spec)
    plan = resolve(request, spec, PlanningContext(environment.machine, output, offers, environment.history.read()))
    _check_saving(plan, output)
    return request, spec, plan


def resume_batch(id_prefix: str, *, as_json: bool) -> int:
    """Generate what is missing of the batch of the job whose id starts with `id_prefix`; return the exit code.

    Raises:
        StoreError: if the job does not exist, is no part of a batch, or all of its videos are made.
    """
    environment = _Environment.load()
    store = open_store(environment.settings.cache_dir)
    check_stored(store)
    with Instance(store.path) as instance:
        recovery.recover(store, instance.id)
    job = store.find(id_prefix)
    if job.batch is None:
        raise StoreError("queue.not_in_batch", job=job.id)
    members = store.list(batches=[job.batch], oldest_first=True)
    missing = [member for member in members if member.resumable or (member.state == "queued" and member.held)]
    if not missing:
        raise StoreError("queue.batch_done", job=job.id)
    for member in missing:
        _check_resumed(member, None, environment.settings.outputs_dir)
    replanner = JobReplanner(environment.settings.weights_dir, environment.engines, environment.history)

    def plan(work: Work) -> tuple[ModelSpec, ExecutionPlan]:
        return replanner.plan(work.record, environment.machine, deaths=store.log.deaths(work.record.id))

    return _run_all(environment, store, missing, plan, as_json=as_json)


def _run_all(
    environment: _Environment,
    store: JobStore,
    jobs: Sequence[JobRecord],
    plan: Callable[[Work], tuple[ModelSpec, ExecutionPlan]],
    *,
    as_json: bool,
) -> int:
    """Run jobs of a batch that wait, until one is cancelled; write its contact sheet, and return the exit code."""
    batch, code, saved = jobs[0].batch, exit_codes.DONE, dict[str, VideoSaved]()
    hint = "" if store.temporary else f" To continue: `{program()} jobs resume {jobs[0].id} --all`"
    command = DoneCommand(store, environment.settings.on_done)
    with Instance(store.path) as instance, _Loaded(environment) as loaded:
        for number, job in enumerate(jobs, 1):
            terminal.line(f"Video {number} of {len(jobs)}: {cut(job.prompt, _PROMPT_SHOWN)}")
            try:
                record = store.start(job.id, instance.id)
            except StoreError as error:  # it was started or deleted elsewhere
                terminal.warning(str(error.fact))
                continue
            outcome, components = _make(environment, store, record, plan, loaded, hint)
            ended = _report_end(outcome, components, hint, job_id=job.id, as_json=False)
            code = code or ended
            if isinstance(outcome, VideoSaved):
                saved[job.id] = outcome
            if ended == exit_codes.CANCELLED:
                break
        # While the job store knows this process: the warnings are stored, too.
        saved |= _with_warnings(saved, command)
    sheet = None if batch is None or not saved else write_sheet(store, batch, environment.settings.outputs_dir)
    if sheet is not None:
        terminal.result_path(sheet.picture)
        terminal.result_path(sheet.page)
    if as_json:
        files = {"sheet": sheet and str(sheet.picture), "page": sheet and str(sheet.page)}
        videos = [end.result_json() | {"job": job_id} for job_id, end in saved.items()]
        exit_codes.emit_json({"batch": batch, "videos": videos, **files, "code": code})
    return code


def extend(id_prefix: str, changes: Mapping[str, object], out: str | None, *, confirmed: bool, as_json: bool) -> int:
    """Generate a longer video from that of the job whose id starts with `id_prefix`; see `generate`.

    Args:
        changes: fields of the request that differ from those of the job.

    Raises:
        StoreError: if the job does not exist, or has no video.
    """
    store = open_store(settings.load().cache_dir)
    check_stored(store)
    job = store.find(id_prefix)
    store.close()
    saved = job.saved
    if saved is None or not saved.video.is_file():
        raise StoreError("queue.no_video", job=job.id)
    request = continuation(job.generation_request(), saved.plain or saved.video, changes)
    return generate(request, out, confirmed=confirmed, as_json=as_json)


def queue_missing_engines(
    store: JobStore, job: JobRecord, plan: ExecutionPlan, spec: ModelSpec, library: EngineStore
) -> None:
    """Queue the engines that a plan leaves for later, and print that, or why they are not queued.

    Args:
        library: where the engines will be.
    """
    if not any(part.later for part in plan.components.values()):
        return
    if store.temporary:
        terminal.warning(str(Fact("cli.builds_not_stored", {"cause": store.problem})))
    elif queue_builds(job, plan, spec, store, library):
        terminal.line(str(Fact("cli.builds_queued")))
    else:
        terminal.line(str(Fact("cli.builds_known")))


def resume(id_prefix: str, out: str | None, *, as_json: bool) -> int:
    """Resume the job whose id starts with `id_prefix` and return the exit code.

    Args:
        out: another file for the video.

    Raises:
        StoreError: if the job does not exist, or cannot be resumed.
        MachineError: if its video could not be encoded; the job stays as it is.
    """
    environment = _Environment.load()
    store = open_store(environment.settings.cache_dir)
    check_stored(store)
    with Instance(store.path) as instance:
        recovery.recover(store, instance.id)
        job = store.find(id_prefix)
        try:
            if job.resumable:
                _check_resumed(job, out, environment.settings.outputs_dir)
        except OutputError as error:
            hint = " To save it elsewhere, add --out FILE.mp4."
            return exit_codes.report_error(error.fact, as_json=as_json, hint=hint)
        job = store.start(job.id, instance.id, None if out is None else read_path("out", out, "cli.out_unreadable"))
        replanner = JobReplanner(environment.settings.weights_dir, environment.engines, environment.history)

        def plan(work: Work) -> tuple[ModelSpec, ExecutionPlan]:
            return replanner.plan(work.record, environment.machine, deaths=store.log.deaths(job.id))

        return _run(environment, store, job, plan, as_json=as_json)


def _check_resumed(job: JobRecord, out: str | None, outputs_dir: Path) -> None:
    if job.plan is None:
        return
    output = job.output if out is None else read_path("out", out, "cli.out_unreadable")
    if output.parent == outputs_dir:
        make_folder(outputs_dir)
    _check_saving(job.plan, output)


def _check_saving(plan: ExecutionPlan, output: Path) -> None:
    """Check that ffmpeg can make the video of a plan, and that it can be saved.

    Raises:
        OutputError, MachineError: if not.
    """
    check_output(output, *plan.video_size, plan.video_frames, plan.crf, plan.sound_format)
    if plan.interpolation > 1 and plan.interpolator == "minterpolate":
        check_interpolator()


def _stored(
    environment: _Environment, stack: ExitStack, request: GenerationRequest, plan: ExecutionPlan
) -> tuple[JobStore, JobRecord]:
    """Add a job to the store and return both; the store is in memory if the cache folder cannot be written."""
    store = open_store(environment.settings.cache_dir)
    if store.notice:
        terminal.warning(str(store.notice))
    try:
        instance = stack.enter_context(Instance(store.path))
        return store, store.add(request, plan, instance=instance.id)
    except StoreError as error:
        store.close()
        store = JobStore(None, problem=error.fact)
        return store, store.add(request, plan, instance="memory")


def _run(
    environment: _Environment,
    store: JobStore,
    record: JobRecord,
    plan: Callable[[Work], tuple[ModelSpec, ExecutionPlan]],
    *,
    as_json: bool,
) -> int:
    hint = _resume_hint(record, store)
    command = DoneCommand(store, environment.settings.on_done)
    with _Loaded(environment) as loaded:
        outcome, components = _make(environment, store, record, plan, loaded, hint)
        warned = _with_warnings({record.id: outcome} if isinstance(outcome, VideoSaved) else {}, command)
        outcome = warned.get(record.id, outcome)
    return _report_end(outcome, components, hint, job_id=record.id, as_json=as_json)


class _Loaded:
    """The models that stay loaded from one job to the next, until the end of the `with` block."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment
        self._exit = ExitStack()
        self._residency: Residency | None = None

    def __enter__(self) -> "_Loaded":
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def residency(self) -> "Residency":
        """Return what holds them."""
        # It imports torch, which takes seconds that a refused request does not need.
        from runtime.execution.residency import Residency

        if self._residency is None:
            self._residency = self._exit.enter_context(Residency(self._environment.engines))
        return self._residency


def _make(
    environment: _Environment,
    store: JobStore,
    record: JobRecord,
    plan: Callable[[Work], tuple[ModelSpec, ExecutionPlan]],
    loaded: _Loaded,
    hint: str,
) -> tuple[Outcome | None, Sequence[str]]:
    """Run a job that this process has claimed; return its end and the model's components.

    Args:
        hint: printed when the process is ended at once.
    """
    progress = terminal.ProgressLine()
    components: Sequence[str] = ()
    poller = ControlPoller(store)

    def show(event: Event) -> None:
        nonlocal components
        progress.event(event)
        if isinstance(event, Planned):
            components = list(event.plan.components)
        if isinstance(event, Warned | FellBack) or (isinstance(event, OutOfMemory) and event.retried):
            terminal.warning(render(event.fact, Words(components)).what)

    executor = VideoExecutor(plan, loaded.residency, environment.history)
    with (
        cancel_on_signals(hint) as cancel,
        poller.polling(),
        Run(record, poller, cancel=cancel, listener=show) as run,
        progress.shown(),
    ):
        run.settle(executor.execute(run))
    if isinstance(run.outcome, VideoSaved) and environment.settings.outputs_dir not in run.outcome.video.parents:
        for video in filter(None, (run.outcome.video, run.outcome.plain)):
            give_usual_permissions(video)
    return run.outcome, components


def _with_warnings(saved: Mapping[str, VideoSaved], command: DoneCommand) -> dict[str, VideoSaved]:
    """Wait for the owner's commands, print why some have failed, and return the videos with these warnings by job."""
    failures = command.wait()
    for failure in failures.values():
        terminal.warning(str(failure))
    return {job: end.with_warning(failures[job]) if job in failures else end for job, end in saved.items()}


def _resume_hint(job: JobRecord, store: JobStore) -> str:
    return "" if store.temporary else f" To resume it: `{program()} jobs resume {job.id}`"


def _report_end(end: Outcome | None, components: Sequence[str], hint: str, *, job_id: str, as_json: bool) -> int:
    if isinstance(end, VideoSaved):
        _print_saved(end)
        if as_json:
            exit_codes.emit_json(end.result_json() | {"job": job_id})
        return exit_codes.DONE
    if isinstance(end, Failed):
        if end.internal:
            error = str(end.fact.data.get("error", end.fact))
            return exit_codes.report_internal_error(error, as_json=as_json, hint=hint)
        hint = "" if end.fact.code in MODEL_UNUSABLE else hint
        return exit_codes.report_error(end.fact, as_json=as_json, components=components, hint=hint)
    if not isinstance(end, Cancelled):
        terminal.line(f"Paused.{hint}")
        return exit_codes.CANCELLED
    terminal.line(f"{Fact('cli.nothing_saved')}{hint}")
    return exit_codes.CANCELLED


def _print_saved(end: VideoSaved) -> None:
    timings = end.timings
    names = [name for name in ("encode", "denoise", "decode", *FINISHING, "mux") if name in timings]
    stages = ", ".join(f"{name} {timings[name]:.1f} s" for name in names)
    terminal.line(
        f"Saved. Seed {end.request['seed']} · {timings['total']:.1f} s ({stages}) · loading {end.load_seconds:.1f} s"
    )
    terminal.result_path(end.video)
