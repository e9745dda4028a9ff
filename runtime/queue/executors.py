"""Executors of claimed jobs: `VideoExecutor` makes videos, `TaskExecutor` does other work, such as building engines.

Both return how the job ends and never raise; `run.Run` stores it. Neither imports torch before it executes something.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core import settings
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import DISK_FULL, EngineError, TandemError
from runtime.core.events import (
    EngineProgress,
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    TerminalEvent,
    VideoSaved,
    WaitsForDisk,
)
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.request import FINISHERS, GenerationRequest
from runtime.engines.imported.importing import describe_matches, device_here, import_engine, inspect_engine
from runtime.engines.imported.matching import find_matches
from runtime.engines.service import EngineService
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import find, look_up
from runtime.models.enhancers import LocalEnhancer
from runtime.models.latent_files import LatentFile
from runtime.models.prompt_guides import asked, prompt_in
from runtime.models.registry import finishing_models
from runtime.models.requested import model_for
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.pipeline.build_engines import BuildResult, build_all, wanted_engines
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.files import Stamps
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.job_planning import seconds_gained
from runtime.queue.records import (
    BuildEngines,
    BuildProgress,
    CompileCode,
    DecodeLatents,
    DeleteEngine,
    EnhancePrompt,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    work_of,
)
from runtime.queue.run import Outcome, PutBack, Run, TaskEnded, Work, outcome_of
from runtime.video.mp4 import check_output

if TYPE_CHECKING:  # these import torch
    from typing_extensions import Unpack

    from runtime.execution.residency import Residency
    from runtime.pipeline.run import JobOptions

_POLL_SECONDS = 0.1
# Videos wait while less than this is free on their disk: one after another would be computed and then not saved.
_LEAST_FREE_BYTES = 50_000_000
# Smaller gains of a clip are within noise.
_FASTER = 1.03

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VideoExecutor:
    """Makes videos in this process.

    Attributes:
        plan: returns the model and the plan of a job; may wait, and raise what `run.outcome_of` takes.
        residency: returns the loaded models; imports PyTorch.
        history: receives the timings of the jobs.
        files: what identifies the model's files in checkpoints; by default they are read.
        waits_for_disk: whether a job waits while the disk of its video is full, instead of failing.
    """

    plan: Callable[[Work], tuple[ModelSpec, ExecutionPlan]]
    residency: Callable[[], "Residency"]
    history: HistoryFile | None
    files: Stamps | None = None
    waits_for_disk: bool = False

    def execute(self, work: Work) -> Outcome:
        """Make the video of a job and return how it ended. Never raises."""
        try:
            if self.waits_for_disk:
                await_disk(work)
            outcome = self._make(work, *self.plan(work))
        except Exception as error:
            outcome = outcome_of(error, work)
        return after_full_disk(outcome, work) if self.waits_for_disk else outcome

    def _make(self, work: Work, spec: ModelSpec, plan: ExecutionPlan) -> Outcome:
        record = work.record
        try:
            residency = self.residency()
            from runtime.pipeline.checkpoint import CheckpointFolder
        except Exception as error:
            logger.exception("job %s could not start", record.id)
            return Failed(fact=Fact("queue.pytorch_broken", {"error": str(error)}))
        checkpoints = None if work.folder is None else CheckpointFolder(work.folder, self.files)
        if record.finish:
            work.cancel.finish_early()
        outcome = make_video(
            plan,
            spec,
            work.emit,
            work.cancel,
            residency,
            history=self.history,
            checkpoints=checkpoints,
            job_id=record.id,
        )
        if checkpoints is not None and isinstance(outcome, VideoSaved) and not outcome.continues:
            checkpoints.clear()
        return outcome


def make_video(
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: Callable[[Event], None],
    cancel: Cancel,
    residency: "Residency",
    **options: "Unpack[JobOptions]",
) -> TerminalEvent | PutBack:
    """Run a job in this thread and return how it ended; see `pipeline.run.run_job`.

    Args:
        emit: called with each event but the terminal one.
    """
    from runtime.pipeline.run import run_job

    outcome: TerminalEvent | PutBack = PutBack()

    def follow(event: Event) -> None:
        nonlocal outcome
        if isinstance(event, TerminalEvent):
            outcome = event
        else:
            emit(event)

    run_job(plan, spec, follow, cancel, residency, **options)
    return outcome


def await_disk(work: Work) -> None:
    """Wait until the disk of a job's video has space.

    Raises:
        CancelledError, PausedError: if that was requested meanwhile.
    """
    folder = work.record.output.parent
    if _is_full(folder):
        work.emit(WaitsForDisk(wanted=_LEAST_FREE_BYTES))
    while _is_full(folder):
        work.cancel.check_pause()
        time.sleep(_POLL_SECONDS)


def after_full_disk(outcome: Outcome, work: Work) -> Outcome:
    """Return how a job ends whose disk may have filled up: it waits for space instead of failing."""
    if isinstance(outcome, Failed) and outcome.fact.code in DISK_FULL and _is_full(work.record.output.parent):
        logger.warning("job %s: the disk is full; it is queued again", work.record.id)
        return PutBack()
    return outcome


def _is_full(folder: Path) -> bool:
    """Return whether the disk of a folder has no space for a video."""
    with contextlib.suppress(OSError):  # saving the video reports it
        return free_disk_bytes(folder) < _LEAST_FREE_BYTES
    return False


@dataclass(frozen=True)
class TaskExecutor:
    """Builds, inspects, imports, verifies, deletes or prunes engines, compiles code, decodes latents, enhances prompts.

    Attributes:
        engines: the engine library.
        weights_dir: the user's models.
        gpu: index of the worker's GPU, which builds engines; 0 on a machine without GPUs.
        free: frees the loaded models: builders measure, and engines that are compared need memory.
        compile_code: compiles what a request runs in PyTorch with the loaded models; returns the result.
        load: loads what runs a request, with new engines.
    """

    engines: EngineService
    weights_dir: Path
    gpu: int
    free: Callable[[], None]
    compile_code: Callable[[GenerationRequest, Cancel], Fact]
    load: Callable[[GenerationRequest, Cancel], None]

    def execute(self, run: Run) -> Outcome:
        """Execute a task and return how it ended; what was finished before a cancellation stays. Never raises."""
        logger.info("task %s: %s starts", run.id, run.record.title)
        try:
            run.cancel.check()
            return TaskEnded("done", _Task(self, run).result())
        except Exception as error:
            if isinstance(error, EngineError) and error.log:
                run.report({"event": "TaskLog", "text": error.log})
            return outcome_of(error, run)


class _Task:
    """One task that runs, with the attributes of its executor."""

    def __init__(self, executor: TaskExecutor, run: Run) -> None:
        self.engines, self.weights_dir, self.gpu = executor.engines, executor.weights_dir, executor.gpu
        self.free, self.compile_code, self.load = executor.free, executor.compile_code, executor.load
        self._run, self._cancel = run, run.cancel
        # Engines that it built before an interruption are not built again.
        self._created = run.record.created
        self._activity: Fact | None = None

    def result(self) -> Fact:
        """Run the task and return its result.

        Raises:
            CancelledError: if it was cancelled.
            TandemError: if it failed.
        """
        work = work_of(self._run.record)
        match work:
            case BuildEngines():
                result = self._build(work)
            case CompileCode():
                self._report(Fact("task.compiling"), None)
                result = self.compile_code(GenerationRequest.from_mapping(work.request), self._cancel)
            case InspectEngine():
                result = self._inspect(work)
            case ImportEngine():
                result = self._import(work)
            case VerifyEngine():
                result = self._verify(work)
            case DeleteEngine():
                result = self._delete(work)
            case DecodeLatents():
                result = self._decode(work)
            case EnhancePrompt():
                result = self._enhance(work)
            case PruneEngines():
                # Engines that stay loaded for the next video may be deleted too.
                self.free()
                pruned = self.engines.store.prune(work.max_bytes)
                code = "task.pruned" if pruned.enough else "task.pruned_in_part"
                result = Fact(code, {"count": len(pruned.deleted), "left": pruned.total_bytes})
        return result

    def _build(self, work: BuildEngines) -> Fact:
        self._report(Fact("task.looking"), None)
        request = GenerationRequest.from_mapping(work.request)
        spec = model_for(request, self.weights_dir, self.engines.cache_dir, needs_image=False)
        engines = wanted_engines(_narrowed(request, work.component), spec, self.engines, work.engines, self.gpu)
        if not engines:
            return Fact("task.nothing_to_build")
        again = request.build == "always"
        built_before = {record.id for record in self.engines.store.index() if record.built_at >= self._created}
        self.free()
        failed: list[EngineError] = []
        new: set[str] = set()
        built = 0

        def report(fact: Fact, share: float | None) -> None:
            self._report(fact, (built + len(failed) + (share or 0.0)) / len(engines))

        builds = [
            BuildProgress(
                program=engine.use.program, backend=engine.backend, component=engine.component, expected=engine.seconds
            )
            for engine in engines
        ]

        def begin(number: int) -> float:
            if number < len(builds):
                builds[number] = builds[number].model_copy(update={"state": "running"})
            self._report_builds(builds)
            return time.monotonic()

        began = begin(0)
        for result in build_all(
            engines,
            spec,
            self.engines,
            report,
            self._cancel,
            again=lambda use: again and use.id not in built_before,
        ):
            if result.error is None:
                built += 1
                new.add(result.wanted.use.id)
            else:
                failed.append(result.error)
                self._report_problem(result.error.fact)
                if result.error.log:
                    self._run.report({"event": "TaskLog", "text": result.error.log})
            number = built + len(failed) - 1
            builds[number] = _ended(builds[number], result, time.monotonic() - began, self._created)
            began = begin(number + 1)
        if failed and not built:
            raise failed[0]
        if self._run.record.idle:
            self._load(request)
        self._report(Fact("task.finished"), 1.0)
        counts = {"built": built, "wanted": len(engines)}
        if failed:
            return Fact("task.built_in_part", {**counts, "cause": failed[0].fact})
        return self._gain(request, spec, new, counts) or Fact("task.built", counts)

    def _load(self, request: GenerationRequest) -> None:
        """Load what the next clip runs on, which takes seconds; it does that itself if this fails or makes room."""
        self._report(Fact("task.loading"), 1.0)
        try:
            self.load(request.replace(backends={}, build="never"), self._cancel)
        except CancelledError:
            logger.info("task %s: makes room before all engines are loaded", self._run.id)
        except Exception:
            logger.exception("task %s: its engines could not be loaded", self._run.id)
            self.free()

    def _gain(
        self, request: GenerationRequest, spec: ModelSpec, built: Collection[str], counts: Mapping[str, int]
    ) -> Fact | None:
        """Return how much faster clips of a request's size are with engines that were built; `None` if they are not."""
        offers, cache = self.engines.offers(spec), self.engines.cache_dir
        history = () if cache is None else HistoryFile(cache, self.engines.machine).read()
        context = PlanningContext(self.engines.machine, Path("none.mp4"), offers, history, self.gpu)
        try:
            plan = resolve(request.replace(backends={}, build="never"), spec, context)
        except TandemError:  # the engines are for another machine than the plan's, or memory is short now
            return None
        now, before = seconds_gained(plan, offers, built)
        if before < _FASTER * now:
            return None
        return Fact("task.built_faster", {**counts, "seconds": now, "before": before})

    def _inspect(self, work: InspectEngine) -> Fact:
        self._report(Fact("task.opening", {"file": work.path.name}), None)
        spec = look_up(work.model, self.weights_dir)
        self.free()
        contract = inspect_engine(work.path, device_here(self.engines.machine), self._report, self._cancel)
        facts = contract.describe()
        self._report_file(facts)
        matches = find_matches(contract, spec, work.component)
        self._report_file([*facts, *describe_matches(matches, spec)])
        return Fact("task.inspected")

    def _import(self, work: ImportEngine) -> Fact:
        spec = look_up(work.model, self.weights_dir)
        self.free()
        timers = PyTorchTimerFactory(self.engines)
        done = import_engine(work.path, spec, work.component, self.engines, self._report, self._cancel, timers=timers)
        self._report_file(done.describe())
        code = "task.imported" if done.compared else "task.imported_unverified"
        return Fact(code, {"engine": done.engine.id, "detail": done.engine.detail})

    def _verify(self, work: VerifyEngine) -> Fact:
        chosen = self.engines.store.choose([work.engine])
        finishes = not FINISHERS.isdisjoint(record.component for record in chosen)
        by_name = {spec.name: spec for spec in (finishing_models(self.weights_dir) if finishes else ())}
        models = [by_name.get(name) or look_up(name, self.weights_dir) for name in work.models]
        self.free()
        timers = PyTorchTimerFactory(self.engines)
        (result,) = self.engines.verify(chosen, models, self._report, self._cancel, timers=timers)
        if result.skipped is not None:
            raise EngineError(result.skipped.code, **result.skipped.data)
        if not result.engine.usable:
            raise EngineError("engine.verified_wrong", cause=result.engine.problem or result.engine.detail)
        return Fact("task.verified", {"detail": result.engine.detail})

    def _decode(self, work: DecodeLatents) -> Fact:
        # It imports torch.
        from runtime.pipeline.decode import decode_file

        self.free()
        spec = find(work.model, self.weights_dir)
        request = DecodeRequest(latents=work.latents, spec=spec, output=work.output, channels=work.channels)

        def emit(event: Event) -> None:
            match event:
                case EngineProgress():
                    self._report(event.progress, event.share)
                case FramesDecoded():
                    self._report(Fact("task.decoding"), event.frames / event.of)
                case FellBack():
                    self._report_problem(event.fact)

        with LatentFile(work.latents) as file:
            plan = DecodePlan.of(request, file, self.weights_dir, self.engines.machine, self.gpu)
            check_output(plan.output, plan.width, plan.height, plan.layout.count, plan.crf)
            done = decode_file(plan, file, settings.load(), self.engines, emit, self._cancel)
        facts = {"frames": done.frames, "rate": done.rate, "backend": done.backend, "video": done.video}
        return Fact("task.decoded", facts)

    def _enhance(self, work: EnhancePrompt) -> Fact:
        # It imports torch.
        from runtime.execution.chat_model import loaded

        self._report(Fact("task.loading_enhancer", {"model": work.title}), None)
        enhancer = LocalEnhancer(work.folder, work.title, work.parameters)
        gpu = None if device_here(self.engines.machine) == "cpu" else self.gpu
        with loaded(enhancer, gpu, self.free) as model:
            self._report(Fact("task.enhancing"), None)
            answer = model.answer(asked(work.instructions, work.prompt), self._cancel.check)
        # Not in the result, which is logged.
        self._report_file([Fact("task.enhanced_prompt", {"prompt": prompt_in(answer, work.most)})])
        return Fact("task.enhanced")

    def _delete(self, work: DeleteEngine) -> Fact:
        (chosen,) = self.engines.store.choose([work.engine])
        try:
            freed = self.engines.store.delete(chosen.id)
        except EngineError:  # it may be loaded for the next video
            self.free()
            freed = self.engines.store.delete(chosen.id)
        return Fact("task.deleted", {"freed": freed})

    def _report(self, fact: Fact, share: float | None) -> None:
        """Store progress: the current activity, and the share done, 0 to 1, if known."""
        value = fact.model_dump(mode="json")
        changed, self._activity = fact != self._activity, fact
        if changed:
            self._run.report({"event": "TaskProgress", "fact": value})
        self._run.show({"fact": value, "share": share}, at_once=changed)

    def _report_builds(self, builds: Sequence[BuildProgress]) -> None:
        """Store the state of every build; one of them has just begun, or the last has ended."""
        self._run.report({"event": "TaskBuilds", "builds": [build.model_dump(mode="json") for build in builds]})

    def _report_problem(self, fact: Fact) -> None:
        """Append a fact to the log, with what to do."""
        self._run.report({"event": "TaskProblem", "fact": fact.model_dump(mode="json")})

    def _report_file(self, facts: Sequence[Fact]) -> None:
        """Store what is known about an inspected file, or an enhanced prompt."""
        self._run.report({"event": "TaskFound", "facts": [fact.model_dump(mode="json") for fact in facts]})


def _ended(progress: BuildProgress, result: BuildResult, took: float, created: float) -> BuildProgress:
    """Return the state of a build that has ended; engines from before `created` were kept."""
    changes: dict[str, object] = {"took": took}
    if result.record is None:
        changes |= {"state": "failed", "problem": None if result.error is None else result.error.fact}
    else:
        record = result.record
        changes["state"] = "kept" if record.built_at < created else "done"
        if record.seconds_per_call and record.pytorch_seconds:
            changes["speedup"] = record.pytorch_seconds / record.seconds_per_call
    return progress.model_copy(update=changes)


def _narrowed(request: GenerationRequest, component: str | None) -> GenerationRequest:
    """Return the request with a backend for one component alone: the others then want no engine."""
    if component is None:
        return request
    backends = {component: request.backend(component)}
    if component == "vae":
        # "vae" would also select the encoder.
        backends[VAE_ENCODER] = PYTORCH
    return GenerationRequest.from_mapping(request.to_json() | {"backends": backends})
