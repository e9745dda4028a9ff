"""Build engines without making a video: those that a model and a size need, one after the other."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError, MachineError
from runtime.core.plan import PYTORCH, EngineRef, ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest
from runtime.engines.child import Report
from runtime.engines.frame_decoders import build_frame_engine, buildable_engines, builder_of, frame_engine
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.spec import FRAME_DECODER, ModelSpec, is_transformer
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.choice.engine_offers import EngineOffer, Offers, admit, refused
from runtime.planner.constraints import ComponentSettings
from runtime.planner.forecast import build_seconds
from runtime.planner.resolve import PlanningContext, resolve

Result = TypeVar("Result")
# Waits until an engine may be built, and returns the token of its build. The token is cancelled if the build must
# make room; then the engine is built again. Raises `CancelledError` if all builds are cancelled.
Turns = Callable[[], Cancel]


@dataclass(frozen=True)
class WantedEngine:
    """An engine to build for `component`, which runs on `device`; `seconds` is about how long building it takes."""

    component: str
    use: EngineRef
    backend: str
    device: str
    seconds: float


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the engine's record, or the error."""

    wanted: WantedEngine
    record: EngineRecord | None
    error: EngineError | None


def wanted_engines(
    request: GenerationRequest, spec: ModelSpec, engines: EngineService, only: Collection[str] = (), gpu: int = 0
) -> list[WantedEngine]:
    """Return the engines for a size: of the requested backends, or for "auto" of every backend that may be faster.

    If the request names backends, only the components that it names get engines. Shared engines appear once.

    Args:
        only: ids of engines; others of the requested backends are left out.
        gpu: index of the GPU that they are for and that builds them, if the machine has GPUs.

    Raises:
        InvalidRequestError: for a size that the model cannot make, or settings that exclude a requested backend.
        MachineError: if a requested backend cannot build on this machine.
    """
    plan = resolve(
        request.replace(backends={}), spec.for_images(), PlanningContext(engines.machine, Path("none.mp4"), gpu=gpu)
    )
    offers = engines.offers(spec)
    index = engines.store.index()
    engines_by_id: dict[str, WantedEngine] = {}
    for name in plan.components:
        if request.backends and not request.has_backend(name):
            continue
        for offer, use, device in _of_component(name, request, plan, offers, engines.machine, only):
            if use.id not in engines_by_id:
                seconds = build_seconds(spec.owner_of(name), name, use.program, use.builder, use.profile[1], index)
                engines_by_id[use.id] = WantedEngine(name, use, offer.backend, device, seconds)
    return list(engines_by_id.values())


def build_frame_engines(
    request: GenerationRequest,
    spec: ModelSpec,
    engines: EngineService,
    emit_progress: Report,
    cancel: Cancel,
    *,
    again: bool,
    turns: Turns | None = None,
) -> Iterator[BuildResult]:
    """Build the engines of a decoder of single frames and yield each result; a failure does not stop the others.

    They are those of the backends that the request names, or of every backend, for its width and height.

    Args:
        turns: see `build_all`.

    Raises:
        MachineError: if a requested backend cannot build on this machine.
        CancelledError: see `build_all`.
    """
    device = "cuda:0" if engines.machine.gpus and engines.machine.torch_cuda else "cpu"
    latent = frame_latents(request, spec)
    backend = request.backend(FRAME_DECODER)
    if backend == PYTORCH:
        return
    if backend == AUTO:
        frame_engines = buildable_engines(engines, spec, latent, device)
    else:
        frame_engines = [frame_engine(engines, spec, builder_of(engines, backend, device), latent, device)]
    index = engines.store.index()
    for engine in frame_engines:
        seconds = build_seconds(spec, FRAME_DECODER, FRAME_DECODER, engine.key.builder, engine.use.profile[1], index)
        what = WantedEngine(FRAME_DECODER, engine.use, engine.key.backend, device, seconds)
        try:
            build = partial(build_frame_engine, engines, spec, engine, emit_progress, again=again)
            built = _in_turn(build, cancel, turns)
        except EngineError as error:
            yield BuildResult(what, None, error)
        else:
            yield BuildResult(what, built.record, None)


def frame_latents(request: GenerationRequest, spec: ModelSpec) -> tuple[int, int]:
    """Return the (height, width) of the latents of a decoder of single frames, for a request's size."""
    architecture: Any = spec.vae
    height = spec.defaults.height if request.height == AUTO else int(request.height)
    width = spec.defaults.width if request.width == AUTO else int(request.width)
    rows, columns = architecture.latent_size(height, width)
    return int(rows), int(columns)


def build_all(
    builds: list[WantedEngine],
    spec: ModelSpec,
    engines: EngineService,
    emit_progress: Report,
    cancel: Cancel,
    *,
    again: Callable[[EngineRef], bool],
    turns: Turns | None = None,
) -> Iterator[BuildResult]:
    """Build engines and yield each result; a failure does not stop the others.

    Args:
        again: whether to rebuild an engine that exists.
        turns: by default, engines are built at once.

    Raises:
        CancelledError: within a tenth of a second of the request; engines that were built stay.
    """
    timers = PyTorchTimerFactory(engines)
    for build in builds:
        try:
            attempt = partial(
                engines.build,
                spec,
                build.component,
                build.use,
                build.device,
                emit_progress,
                again=again(build.use),
                timers=timers,
            )
            record = _in_turn(attempt, cancel, turns)
        except EngineError as error:
            yield BuildResult(build, None, error)
        else:
            yield BuildResult(build, record, None)


def _in_turn(build: Callable[..., Result], cancel: Cancel, turns: Turns | None) -> Result:
    """Build one engine and return what `build`, which takes `cancel`, returns; again if it had to make room."""
    while True:
        token = cancel if turns is None else turns()
        try:
            return build(cancel=token)
        except CancelledError:
            cancel.check()
            if turns is None:
                raise


def _of_component(
    name: str,
    request: GenerationRequest,
    plan: ExecutionPlan,
    offers: Offers,
    machine: Machine,
    only: Collection[str],
) -> Iterator[tuple[EngineOffer, EngineRef, str]]:
    """Yield the offers to build for a component, each of their engines, and the device."""
    backend = request.backend(name)
    if backend == PYTORCH:
        return
    device = plan.components[name].device
    offered = [offer for offer in offers(name, plan.engine_size(name), device) if backend in {AUTO, offer.backend}]
    # Those that a video with these settings can use.
    case = ComponentSettings(
        component=name,
        backend=backend,
        device=device,
        offload="none" if device == "cpu" else request.offload,
        quantization=request.quantization if is_transformer(name) else "none",
        gpus=plan.gpus,
        step_cache=request.step_cache,
        attention=request.attention,
    )
    against = None if backend == AUTO else refused(backend, offered, case, machine)
    if against is not None and against.setting == "gpus" and request.gpus == AUTO:
        # A video on this backend runs on one GPU then.
        case = replace(case, gpus=1)
        against = refused(backend, offered, case, machine)
    if against is not None:
        raise against.refusal
    able = [offer for offer in admit(offered, case, machine)[0] if offer.problem is None]
    if backend != AUTO:
        if not able:
            if not offered:
                raise MachineError("pipeline.backend_unsupported", backend=backend, component=name, device=device)
            raise MachineError("pipeline.not_buildable", backend=backend, cause=offered[0].problem)
        able = able if only else able[:1]
    else:
        able = [offer for offer in able if not offer.on_request]
        # Of the engines of whole transformers and of their blocks, one kind for each backend.
        kinds = {offer.backend: offer.in_blocks for offer in reversed(able)}
        able = [offer for offer in able if offer.in_blocks == kinds[offer.backend]]
    for offer in able:
        for use in offer.engines if not only else (use for use in offer.engines if use.id in only):
            yield offer, use, device
