"""Runs one task in a worker process: build, inspect, import, verify, delete or prune engines, or decode latents."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.events import EngineProgress, Event, FellBack, FramesDecoded
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH
from runtime.core.request import GenerationRequest
from runtime.engines.imported.importing import describe_matches, device_here, import_engine, inspect_engine
from runtime.engines.imported.matching import find_matches
from runtime.engines.service import EngineService
from runtime.models.catalogue import find, look_up
from runtime.models.requested import model_for
from runtime.models.spec import VAE_ENCODER
from runtime.pipeline.baselines import Baselines
from runtime.pipeline.build_engines import BuildResult, build_all, wanted_engines
from runtime.queue.records import (
    BuildEngines,
    BuildProgress,
    DecodeLatents,
    DeleteEngine,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    Work,
)
from runtime.queue.store import JobStore

_PROGRESS_SECONDS = 0.2


class TaskRecorder:
    """Writes the progress of a task that this process runs to the store.

    Attributes:
        cancel: what the task checks.
    """

    def __init__(self, task_id: str, store: JobStore) -> None:
        self.id = task_id
        self.cancel = Cancel()
        self._store = store
        self._last: Fact | None = None
        self._reported_at = 0.0

    def report(self, fact: Fact, share: float | None) -> None:
        """Store progress: the current activity, and the share done, 0 to 1, if known."""
        now = time.monotonic()
        if fact != self._last:
            self._last = fact
            self._store.record_task_event(self.id, {"event": "TaskProgress", "fact": fact.model_dump(mode="json")})
        elif now - self._reported_at < _PROGRESS_SECONDS:
            return
        self._reported_at = now
        self._store.show(self.id, {"fact": fact.model_dump(mode="json"), "share": share})

    def write(self, text: str) -> None:
        """Append to the log."""
        self._store.record_task_event(self.id, {"event": "TaskLog", "text": text})

    def builds(self, builds: Sequence[BuildProgress]) -> None:
        """Store the state of every build of this task; one of them has just begun, or the last has ended."""
        values = [one.model_dump(mode="json") for one in builds]
        self._store.record_task_event(self.id, {"event": "TaskBuilds", "builds": values})

    def problem(self, fact: Fact) -> None:
        """Append a fact to the log, with what to do."""
        self._store.record_task_event(self.id, {"event": "TaskProblem", "fact": fact.model_dump(mode="json")})

    def found(self, facts: Sequence[Fact]) -> None:
        """Store what is known about an inspected file."""
        facts_json = [fact.model_dump(mode="json") for fact in facts]
        self._store.record_task_event(self.id, {"event": "TaskFound", "facts": facts_json})


@dataclass(frozen=True)
class TaskRunner:
    """Runs one task.

    Attributes:
        recorder: receives the progress.
        engines: the engine library.
        weights_dir: the user's models.
        gpu: index of the worker's GPU, which builds engines; 0 on a machine without GPUs.
        free: frees the loaded models: builders measure, and engines that are compared need memory.
        created: when the task was queued; engines that it built before an interruption are not built again.
    """

    recorder: TaskRecorder
    engines: EngineService
    weights_dir: Path
    gpu: int
    free: Callable[[], None]
    created: float

    def run(self, work: Work) -> Fact:
        """Run a task and return its result.

        Raises:
            CancelledError: if it was cancelled; what was finished before stays.
            TandemError: if it failed.
        """
        match work:
            case BuildEngines():
                return self._build(work)
            case InspectEngine():
                return self._inspect(work)
            case ImportEngine():
                return self._import(work)
            case VerifyEngine():
                return self._verify(work)
            case DeleteEngine():
                return self._delete(work)
            case DecodeLatents():
                return self._decode(work)
            case PruneEngines():
                # Engines that stay loaded for the next video may be deleted too.
                self.free()
                pruned = self.engines.store.prune(work.max_bytes)
                code = "task.pruned" if pruned.enough else "task.pruned_in_part"
                return Fact(code, {"count": len(pruned.deleted), "left": pruned.total_bytes})

    def _build(self, work: BuildEngines) -> Fact:
        self.recorder.report(Fact("task.looking"), None)
        request = GenerationRequest.from_mapping(work.request)
        spec = model_for(request, self.weights_dir, self.engines.cache_dir, needs_image=False)
        wanted = wanted_engines(_narrowed(request, work.component), spec, self.engines, work.engines, self.gpu)
        if not wanted:
            return Fact("task.nothing_to_build")
        again = request.build == "always"
        built_before = {record.id for record in self.engines.store.index() if record.built_at >= self.created}
        self.free()
        failed: list[EngineError] = []
        built = 0

        def report(fact: Fact, share: float | None) -> None:
            self.recorder.report(fact, (built + len(failed) + (share or 0.0)) / len(wanted))

        builds = [
            BuildProgress(program=one.use.program, backend=one.backend, component=one.component, expected=one.seconds)
            for one in wanted
        ]

        def begin(number: int) -> float:
            if number < len(builds):
                builds[number] = builds[number].model_copy(update={"state": "running"})
            self.recorder.builds(builds)
            return time.monotonic()

        began = begin(0)
        for one in build_all(
            wanted,
            spec,
            self.engines,
            report,
            self.recorder.cancel,
            again=lambda use: again and use.id not in built_before,
        ):
            if one.error is None:
                built += 1
            else:
                failed.append(one.error)
                self.recorder.problem(one.error.fact)
                if one.error.log:
                    self.recorder.write(one.error.log)
            number = built + len(failed) - 1
            builds[number] = _ended(builds[number], one, time.monotonic() - began, self.created)
            began = begin(number + 1)
        if failed and not built:
            raise failed[0]
        self.recorder.report(Fact("task.finished"), 1.0)
        counts = {"built": built, "wanted": len(wanted)}
        return Fact("task.built_in_part", {**counts, "cause": failed[0].fact}) if failed else Fact("task.built", counts)

    def _inspect(self, work: InspectEngine) -> Fact:
        self.recorder.report(Fact("task.opening", {"file": work.path.name}), None)
        spec = look_up(work.model, self.weights_dir)
        self.free()
        contract = inspect_engine(
            work.path, device_here(self.engines.machine), self.recorder.report, self.recorder.cancel
        )
        facts = contract.describe()
        self.recorder.found(facts)
        matches = find_matches(contract, spec, work.component)
        self.recorder.found([*facts, *describe_matches(matches, spec)])
        return Fact("task.inspected")

    def _import(self, work: ImportEngine) -> Fact:
        spec = look_up(work.model, self.weights_dir)
        self.free()
        device = device_here(self.engines.machine)
        done = import_engine(
            work.path,
            spec,
            work.component,
            self.engines,
            device,
            self.recorder.report,
            self.recorder.cancel,
            baselines=Baselines(self.engines),
        )
        self.recorder.found(done.describe())
        code = "task.imported" if done.compared else "task.imported_unverified"
        return Fact(code, {"engine": done.engine.id, "detail": done.engine.detail})

    def _verify(self, work: VerifyEngine) -> Fact:
        chosen = self.engines.store.choose([work.engine])
        models = [look_up(name, self.weights_dir) for name in work.models]
        self.free()
        baselines = Baselines(self.engines)
        (found,) = self.engines.verify(chosen, models, self.recorder.report, self.recorder.cancel, baselines=baselines)
        if found.skipped is not None:
            raise EngineError(found.skipped.code, **found.skipped.data)
        if not found.engine.usable:
            raise EngineError("engine.verified_wrong", cause=found.engine.problem or found.engine.detail)
        return Fact("task.verified", {"detail": found.engine.detail})

    def _decode(self, work: DecodeLatents) -> Fact:
        # It imports torch.
        from runtime.pipeline.decode import DecodeRequest, decode_file

        self.free()
        spec = find(work.model, self.weights_dir)
        request = DecodeRequest(latents=work.latents, spec=spec, output=work.output, channels=work.channels)

        def emit(event: Event) -> None:
            match event:
                case EngineProgress():
                    self.recorder.report(event.progress, event.share)
                case FramesDecoded():
                    self.recorder.report(Fact("task.decoding"), event.frames / event.of)
                case FellBack():
                    self.recorder.problem(event.fact)

        done = decode_file(request, settings.load(), self.engines, emit, self.recorder.cancel, gpu=self.gpu)
        rate = done.frames / done.seconds if done.seconds else 0.0
        return Fact("task.decoded", {"frames": done.frames, "rate": rate, "backend": done.backend, "video": done.video})

    def _delete(self, work: DeleteEngine) -> Fact:
        (chosen,) = self.engines.store.choose([work.engine])
        try:
            freed = self.engines.store.delete(chosen.id)
        except EngineError:  # it may be loaded for the next video
            self.free()
            freed = self.engines.store.delete(chosen.id)
        return Fact("task.deleted", {"freed": freed})


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
        # Which names both parts of the VAE otherwise.
        backends[VAE_ENCODER] = PYTORCH
    return GenerationRequest.from_mapping(request.to_json() | {"backends": backends})
