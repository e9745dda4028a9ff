"""Plans claimed jobs for the machine as it is when they start, and queues the builds that a plan leaves for later."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.preprocessors import PreprocessorUse
from runtime.core.request import AUTO, CONTROL_FIELDS, CONTROL_VIDEOS, GenerationRequest
from runtime.core.templates import is_template, literal
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.choice.engine_offers import Offers
from runtime.planner.forecast import build_seconds
from runtime.planner.history import compilation_runs
from runtime.planner.placement import usable_gpus
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.records import CompileCode, JobRecord
from runtime.queue.recovery import avoid_causes
from runtime.queue.store import JobStore

logger = logging.getLogger(__name__)

# What the continuation of a video does not take over from it.
_OF_FIRST_PART = (
    "seed",
    "width",
    "height",
    "fps",
    "image",
    "last_image",
    "keyframes",
    "keyframe_seconds",
    "video",
    "strength",
    "loop",
    "extend_frames",
    "join",
    "outpaint",
    *CONTROL_FIELDS,
    "control_scale",
    "preprocess",
    "overlap",
    "control_start",
)


class JobReplanner:
    """Plans claimed jobs for the machine as it is when they start.

    Args:
        weights_dir: the user's models.
        engines: the engine library.
        history: measured times of earlier jobs.
        builds_later: see `planner.resolve.resolve`.
    """

    def __init__(
        self, weights_dir: Path, engines: EngineService, history: HistoryFile | None, *, builds_later: bool = False
    ) -> None:
        self._builds_later = builds_later
        self._weights_dir = weights_dir
        self._engines = engines
        self._history = history

    def plan(
        self,
        record: JobRecord,
        machine: Machine,
        gpu: int = 0,
        more_gpus: Sequence[int] | None = None,
        deaths: Sequence[Mapping[str, object]] = (),
        check: Callable[[], None] = never,
    ) -> tuple[ModelSpec, ExecutionPlan]:
        """Return the model and the plan of a claimed job; a job that started before keeps its plan if it can.

        Args:
            gpu, more_gpus: `gpu` and `others` of `planner.resolve.PlanningContext`.
            deaths: see `recovery.avoid_causes`.
            check: see `models.images.with_images`.

        Raises:
            TandemError: if the job cannot run on this machine now.
        """
        spec = model_for(record.generation_request(), self._weights_dir, self._engines.cache_dir, check=check)
        if record.begun and record.plan is not None and _has_same_inputs(record.plan, spec):
            planned = record.plan.replace(
                model_directory=spec.directory,
                output=record.output,
                image=spec.image,
                last_image=spec.last_image,
                keyframes=spec.keyframes,
                extend=spec.extend,
                join=spec.join,
                video=spec.video,
                **{field: getattr(spec, field) for field in CONTROL_VIDEOS},
                references=spec.references,
                preprocessor=_moved(record.plan.preprocessor, spec.preprocessor),
                loras=spec.loras,
            )
            moved = move_to_gpu(planned, gpu, machine, more_gpus)
            if moved is not None:
                return spec, avoid_causes(moved, spec, deaths)
            logger.info("job %s: this machine lacks devices of its plan; it is planned again", record.id)
        plan = self._resolved(record.generation_request(), spec, record.output, machine, gpu, more_gpus)
        return spec, avoid_causes(plan, spec, deaths)

    def plan_request(
        self, request: GenerationRequest, machine: Machine, gpu: int, check: Callable[[], None]
    ) -> tuple[ModelSpec, ExecutionPlan]:
        """Return the model and the plan of a request whose video is not saved, on one GPU.

        Raises:
            TandemError: if it cannot run on this machine now.
        """
        spec = model_for(request, self._weights_dir, self._engines.cache_dir, check=check)
        return spec, self._resolved(request, spec, Path("none.mp4"), machine, gpu, ())

    def _resolved(
        self,
        request: GenerationRequest,
        spec: ModelSpec,
        output: Path,
        machine: Machine,
        gpu: int,
        more_gpus: Sequence[int] | None,
    ) -> ExecutionPlan:
        history = () if self._history is None else self._history.read()
        context = PlanningContext(
            machine,
            output,
            self._engines.offers(spec),
            history,
            gpu,
            more_gpus,
            idle_builds=self._engines.idle_builds,
        )
        return resolve(request, spec, context, builds_later=self._builds_later)


def continuation(asked: GenerationRequest, video: Path, changes: Mapping[str, object]) -> GenerationRequest:
    """Return the request that makes a video longer: that of the video with a new seed, and with changes.

    Args:
        asked: for the video.
        video: with the frames as they were decoded.

    Raises:
        InvalidRequestError: for changes that are not valid.
    """
    new = GenerationRequest(prompt="none").to_json()
    # With another seed, the template would make another prompt.
    template = literal(asked.prompt) if is_template(asked.prompt) and "prompt" not in changes else None
    kept = {name: new[name] for name in _OF_FIRST_PART} | {"extend": str(video), "template": template}
    kept |= {"original_prompt": None} if "prompt" in changes else {}
    length = {name: AUTO for name in ("frames", "seconds")} if {"frames", "seconds"} & {*changes} else {}
    return GenerationRequest.from_mapping({**asked.to_json(), **kept, **length, **changes})


def _has_same_inputs(plan: ExecutionPlan, spec: ModelSpec) -> bool:
    """Whether a plan is for a model's LoRAs, images and video; the files may be in another folder now."""
    inputs = [
        [
            None if use is None else use.digest
            for use in (
                *(source.image, source.last_image, source.extend, source.join, source.video),
                *(getattr(source, field) for field in CONTROL_VIDEOS),
                *source.references,
                *source.keyframes,
            )
        ]
        for source in (plan, spec)
    ]
    loras = [[(use.digest, use.weight, use.expert) for use in uses] for uses in (plan.loras, spec.loras)]
    makers = [None if source.preprocessor is None else source.preprocessor.digest for source in (plan, spec)]
    return loras[0] == loras[1] and inputs[0] == inputs[1] and makers[0] == makers[1]


def _moved(planned: PreprocessorUse | None, now: PreprocessorUse | None) -> PreprocessorUse | None:
    """Return a plan's model of control frames where its folders are now."""
    return planned if planned is None or now is None else planned.replace(folders=now.folders)


def move_to_gpu(
    plan: ExecutionPlan, gpu: int, machine: Machine, more_gpus: Sequence[int] | None = None
) -> ExecutionPlan | None:
    """Return a plan with its CUDA components on other GPUs; `None` if it needs more GPUs than there are.

    Args:
        gpu: index of the only GPU, or of the first of several.
        more_gpus: indices of further GPUs that the plan may use; by default, all usable ones.
    """
    on_cuda = [name for name, part in plan.components.items() if part.device.startswith("cuda")]
    if on_cuda and gpu >= len(machine.gpus):
        return None
    moved = {name: plan.components[name].replace(device=f"cuda:{gpu}") for name in on_cuda}
    split = plan.split
    if split is not None and on_cuda:
        further = [index for index in (usable_gpus(machine) if more_gpus is None else more_gpus) if index != gpu]
        if 1 + len(further) < plan.gpus:
            return None
        split = split.replace(devices=tuple(f"cuda:{index}" for index in [gpu, *further][: plan.gpus]))
    return plan.replace(components={**plan.components, **moved}, split=split)


def seconds_gained(plan: ExecutionPlan, offers: Offers, built: Collection[str]) -> tuple[float, float]:
    """Return the seconds of a plan's clip, and what they were before some engines were built.

    Both are the plan's own comparisons, so that nothing but the engines differs.

    Args:
        offers: those that the plan chose from.
        built: ids of the engines.
    """
    now = before = plan.seconds["total"].likely
    for name, part in plan.components.items():
        offered = offers(name, plan.engine_size(name), part.device)
        new = {offer.builder for offer in offered if not {use.id for use in offer.engines}.isdisjoint(built)}
        alternatives = [entry.seconds.likely for entry in part.compared if entry.builder not in new]
        if part.engines and part.engines[-1].builder in new and alternatives and part.seconds is not None:
            before += min(alternatives) - part.seconds.likely
    return now, before


def queue_builds(
    record: JobRecord, plan: ExecutionPlan, spec: ModelSpec, store: JobStore, library: EngineStore
) -> bool:
    """Queue the builds that a plan leaves for when no video waits; return whether something was queued.

    Nothing is queued if the same engines are queued already, or could not be built or were cancelled recently.

    Args:
        library: where the engines will be.
    """
    later = {name: part.later for name, part in plan.components.items() if part.later}
    if not later:
        return False
    request = record.generation_request()
    work = request.replace(
        backends={name: BUILDERS[uses[0].builder].backend for name, uses in later.items()},
        build="always" if request.build == "always" else "missing",
        seed=0,
    )
    ids = {use.id for uses in later.values() for use in uses}
    gpu = _gpu_of(plan, later)
    title, index = build_title(plan, spec, list(later)), library.index()
    # Components may share engines.
    seconds = {
        use.id: build_seconds(spec.owner_of(name), name, use.program, use.builder, use.profile[1], index)
        for name, uses in later.items()
        for use in uses
    }
    return store.add_idle_build(title, library.folder, work.to_json(), ids, gpu, seconds=sum(seconds.values()))


def queue_compilation(
    record: JobRecord, plan: ExecutionPlan, spec: ModelSpec, store: JobStore, machine: Machine, library: EngineStore
) -> bool:
    """Queue what a plan compiles for later clips; return whether something was queued, as `queue_builds` does.

    Args:
        machine: whose GPU compiles.
    """
    if not plan.speed.compiled_later:
        return False
    work = CompileCode(request=record.generation_request().replace(compile="always", build="never").to_json())
    *_, in_cache = compilation_runs(plan, spec, machine, 0.0, cached=True)
    title = Fact(
        "task.compile", {"model": spec.title, "width": plan.width, "height": plan.height, "frames": plan.frames}
    )
    gpu = _gpu_of(plan, plan.components)
    return store.add_idle_build(title, library.folder, work.model_dump(), {in_cache.cached_code}, gpu)


def _gpu_of(plan: ExecutionPlan, components: Iterable[str]) -> int:
    """Return the index of the one GPU of components that are not on the CPU; 0 if all are."""
    devices = {plan.components[name].device for name in components} - {"cpu"}
    return int(min(devices, default="cuda:0").removeprefix("cuda:"))


def build_title(plan: ExecutionPlan, spec: ModelSpec, components: Sequence[str], backend: str = "") -> Fact:
    """Return the title of a task that builds engines for components, with one backend or those that fit."""
    among = list(plan.components)
    data: dict[str, object] = {"model": spec.title, "width": plan.width, "height": plan.height, "frames": plan.frames}
    complete = set(components) >= set(among)
    if not complete:
        data["components"] = {"names": list(components), "among": among}
    if backend:
        return Fact("task.build_all_with" if complete else "task.build_with", {**data, "backend": backend})
    return Fact("task.build_all" if complete else "task.build", data)
