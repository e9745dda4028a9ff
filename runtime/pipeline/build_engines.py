"""Building engines without making a video: which ones a model and a size want, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, MachineError
from runtime.core.plan import PYTORCH, EngineUse, ExecutionPlan
from runtime.core.request import ALL, AUTO, GenerationRequest
from runtime.engines.build import EmitProgress
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineRecord
from runtime.planner.engine_offers import Offers
from runtime.planner.resolve import resolve


@dataclass(frozen=True)
class Wanted:
    """One engine to build, of `component`, which runs on `device`."""

    component: str
    use: EngineUse
    backend: str
    device: str


@dataclass(frozen=True)
class Built:
    """What became of one: its record, or the error."""

    wanted: Wanted
    record: EngineRecord | None
    error: EngineError | None


def wanted_engines(request: GenerationRequest, spec: ModelSpec, engines: EngineService) -> list[Wanted]:
    """Return the engines for a size: of the backends asked for, or of every one that can be built here for "auto".

    Where backends are named, components without one want nothing. Engines that several components share come once.

    Raises:
        InvalidRequestError: for a size that the model cannot make.
        MachineError: if a backend that was asked for cannot build here.
    """
    plan = resolve(request, spec, engines.machine, Path("none.mp4"))
    offers = engines.offers(spec)
    found: dict[str, Wanted] = {}
    for name in plan.components:
        if request.backends and not {name, ALL} & set(request.backends):
            continue
        for wanted in _of_component(name, request.backend(name), plan, offers):
            found.setdefault(wanted.use.id, wanted)
    return list(found.values())


def build_all(
    wanted: list[Wanted],
    spec: ModelSpec,
    engines: EngineService,
    emit_progress: EmitProgress,
    cancel: Cancel,
    *,
    again: bool,
) -> Iterator[Built]:
    """Build engines, yielding after each; one that fails does not keep the others.

    Args:
        again: build also those that are there.

    Raises:
        CancelledError: within a tenth of a second of being asked; those built before stay.
    """
    for one in wanted:
        try:
            record = engines.build(spec, one.component, one.use, one.device, emit_progress, cancel, again=again)
        except EngineError as error:
            yield Built(one, None, error)
        else:
            yield Built(one, record, None)


def _of_component(name: str, asked: str, plan: ExecutionPlan, offers: Offers) -> Iterator[Wanted]:
    if asked == PYTORCH:
        return
    device = plan.components[name].device
    offered = [offer for offer in offers(name, plan.latent_size, device) if asked in {AUTO, offer.backend}]
    able = [offer for offer in offered if offer.problem is None]
    if asked != AUTO:
        if not able:
            if not offered:
                raise MachineError("pipeline.backend_unsupported", backend=asked, component=name, device=device)
            offer = offered[0]
            raise MachineError("pipeline.not_buildable", backend=asked, problem=offer.problem, fix=offer.remedy)
        able = able[:1]
    for offer in able:
        for use in offer.uses:
            yield Wanted(name, use, offer.backend, device)
