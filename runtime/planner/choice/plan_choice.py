"""Choose engines for all components of a plan: those with which its forecast is faster, if they fit into memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError
from runtime.core.estimates import BackendSeconds, MemoryStrategy, Seconds
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, Speed
from runtime.core.request import AUTO, GenerationRequest
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import forecast
from runtime.planner.choice.component_choice import Choice, PyTorchAlternative, choose, on_offer
from runtime.planner.choice.engine_offers import (
    EAGER_PATH,
    Comparison,
    ComponentOffers,
    EngineOffer,
    PyTorchPath,
    admit,
    refused,
)
from runtime.planner.constraints import ComponentSettings
from runtime.planner.forecast import ForecastInputs
from runtime.planner.strategies import Decision


class PlanForecast(NamedTuple):
    """What a plan of certain backends is forecast from, and its memory strategy."""

    inputs: ForecastInputs
    decision: Decision

    @property
    def seconds(self) -> float:
        """The forecast seconds of the clip."""
        return self.decision.chosen.seconds["total"].likely


# Decides the memory strategy for backends, given what PyTorch would run instead. Raises `MemoryShortError`.
Decide = Callable[[Mapping[str, Choice], Mapping[str, PyTorchPath]], PlanForecast]


def choose_engines(
    request: GenerationRequest,
    spec: ModelSpec,
    machine: Machine,
    settings: ComponentSettings,
    in_pytorch: Fact,
    offered: ComponentOffers,
    decide: Decide,
) -> tuple[dict[str, Choice], PlanForecast]:
    """Choose the backend of each component, and the memory strategy.

    Args:
        settings: those of every component.
        in_pytorch: the device and precision in PyTorch, and why.

    Raises:
        InvalidRequestError, MachineError, MemoryShortError: see `planner.resolve.resolve`.
    """
    plain = {name: choose(PYTORCH, "never", (), in_pytorch) for name in spec.component_names}
    measured = any(offer.ready and offer.seconds for name in plain for offer in offered(name))
    # If memory does not suffice without engines, they are compared with eager PyTorch.
    pytorch = _PyTorchPlan(plain, decide, _attempted(plain, {}, decide) if measured else None)
    choices = _choose_each(request, spec, machine, settings, in_pytorch, offered, pytorch)
    automatic = [name for name, choice in choices.items() if choice.engines and request.backend(name) == AUTO]
    chosen, planned = _drop_engines_that_do_not_fit(choices, automatic, in_pytorch, pytorch)
    return {name: replace(choice, compared=choices[name].compared) for name, choice in chosen.items()}, planned


def _attempted(choices: Mapping[str, Choice], paths: Mapping[str, PyTorchPath], decide: Decide) -> PlanForecast | None:
    """Return the plan of backends, `None` if there is none."""
    try:
        return decide(choices, paths)
    except (MemoryShortError, InvalidRequestError, MachineError):
        return None


class _PyTorchPlan:
    """The plan in PyTorch alone, with which engines are compared.

    Args:
        plain: the choice of PyTorch for every component.
        planned: the plan of it; `None` if there is none, or no engine to compare.
    """

    def __init__(self, plain: Mapping[str, Choice], decide: Decide, planned: PlanForecast | None) -> None:
        self._plain, self._decide, self._planned = plain, decide, planned
        self._comparisons: dict[tuple[str, str, tuple[str, ...]], Comparison] = {}
        self._variants: dict[tuple[str, str, tuple[str, ...]], PlanForecast | None] = {}
        self.paths: Mapping[str, PyTorchPath] = {}
        if planned is not None:
            self.paths = {name: forecast.measured_path(*_parts(planned, name)) for name in plain}

    def alternative(self, name: str) -> PyTorchAlternative:
        """Return what PyTorch would run instead of a component's engines."""
        return PyTorchAlternative(self.paths.get(name, EAGER_PATH), partial(self.compare, name))

    def decide(self, choices: Mapping[str, Choice]) -> PlanForecast:
        return self._decide(choices, self.paths)

    def attempt(self, choices: Mapping[str, Choice]) -> PlanForecast | None:
        return _attempted(choices, self.paths, self._decide)

    def compare(self, name: str, offer: EngineOffer) -> Comparison:
        """Compare an offer's engines for a component with PyTorch: by the forecasts of both plans."""
        key = _key(name, offer)
        if key not in self._comparisons:
            self._comparisons[key] = self._compared(name, offer)
        return self._comparisons[key]

    def _compared(self, name: str, offer: EngineOffer) -> Comparison:
        as_built = offer.compared(self.paths.get(name, EAGER_PATH))
        if self._planned is None or not as_built.engine:
            return as_built
        planned = self._with(name, offer)
        if planned is None:
            return as_built
        engine, pytorch = (forecast.known_call(*_parts(variant, name)) for variant in (planned, self._planned))
        measured = engine is not None and pytorch is not None and engine.measured and pytorch.measured
        attention = forecast.attention_between(*_parts(planned, name))
        return Comparison(
            engine=0.0 if engine is None else engine.likely,
            pytorch=0.0 if pytorch is None else pytorch.likely,
            attention=attention,
            measured=measured,
        )

    def _with(self, name: str, offer: EngineOffer) -> PlanForecast | None:
        """Return the plan with an offer's engines for a component, and PyTorch for the others."""
        key = _key(name, offer)
        if key not in self._variants:
            self._variants[key] = self.attempt({**self._plain, name: on_offer(offer)})
        return self._variants[key]

    def compared(self, name: str, offers: Iterable[EngineOffer]) -> tuple[BackendSeconds, ...]:
        """Return the seconds of a clip's component in PyTorch and on measured engines, see `ComponentPlan.compared`."""
        if self._planned is None:
            return ()
        entries = [BackendSeconds(backend=PYTORCH, builder="", seconds=_of_clip(self._planned, name))]
        for offer in offers:
            planned = self._with(name, offer) if self.compare(name, offer).engine else None
            if planned is not None:
                seconds = _of_clip(planned, name)
                entries.append(BackendSeconds(backend=offer.backend, builder=offer.builder, seconds=seconds))
        return tuple(sorted(entries, key=lambda entry: entry.seconds.likely))

    def saved(self, name: str, offer: EngineOffer) -> float:
        """Return the seconds of a clip that an offer's engines for a component save; 0 if they were not measured."""
        compared = self.compare(name, offer)
        calls = 1.0 if self._planned is None else self._planned.inputs.calls[name]
        return calls * (compared.pytorch - compared.engine) if compared.speedup else 0.0


def _key(name: str, offer: EngineOffer) -> tuple[str, str, tuple[str, ...]]:
    return name, offer.builder, tuple(use.id for use in offer.engines)


def _of_clip(planned: PlanForecast, name: str) -> Seconds:
    return forecast.component_seconds(*_parts(planned, name))


def _parts(planned: PlanForecast, name: str) -> tuple[ForecastInputs, MemoryStrategy, str, Speed]:
    """Return what the forecast of a component depends on."""
    chosen = planned.decision.chosen
    return planned.inputs, chosen.strategy, name, chosen.speed


def _choose_each(
    request: GenerationRequest,
    spec: ModelSpec,
    machine: Machine,
    settings: ComponentSettings,
    in_pytorch: Fact,
    offered: ComponentOffers,
    pytorch: _PyTorchPlan,
) -> dict[str, Choice]:
    """Choose the backend of each component by itself."""
    chosen = {}
    for name in spec.component_names:
        requested = request.backend(name)
        # Only the transformers' weights are quantized.
        quantization = request.quantization if is_transformer(name) else "none"
        case = replace(settings, component=name, quantization=quantization)
        if requested not in {AUTO, PYTORCH}:
            against = refused(requested, offered(name), case, machine)
            if against is not None:
                raise against.refusal
        admitted, excluded = admit(offered(name), case, machine)
        choice = choose(requested, request.build, admitted, in_pytorch, excluded, pytorch.alternative(name))
        chosen[name] = replace(choice, compared=pytorch.compared(name, admitted))
    return chosen


def _drop_engines_that_do_not_fit(
    choices: Mapping[str, Choice], automatic: Sequence[str], in_pytorch: Fact, pytorch: _PyTorchPlan
) -> tuple[dict[str, Choice], PlanForecast]:
    """Return the choices without engines that do not fit into memory or do not make the clip faster, and their plan.

    Engines give way one at a time. If one is enough, it is the one without which the clip is fastest. If none is, it is
    the one that frees most memory per second that it saves. In the end, those that fit after all are put back.

    Args:
        automatic: the components whose engines were not requested.

    Raises:
        MemoryShortError: if memory does not suffice with the requested engines alone.
    """
    chosen, candidates, too_large = dict(choices), [*automatic], []

    def saved(name: str) -> float:
        offer = choices[name].offer
        return 0.0 if offer is None else pytorch.saved(name, offer)

    def freed(name: str) -> tuple[bool, float]:
        offer, seconds = choices[name].offer, saved(name)
        size = 0 if offer is None else offer.file_bytes
        return not seconds, size / (seconds or 1.0)

    while True:
        planned = None
        try:
            planned = pytorch.decide(chosen)
        except MemoryShortError:
            if not candidates:
                raise
        better = {}
        for name in candidates:
            if planned is None or saved(name) > 0:
                alternative = pytorch.attempt(chosen | {name: _in_pytorch(in_pytorch)})
                if alternative is not None and (planned is None or alternative.seconds < planned.seconds):
                    better[name] = alternative
        if planned is not None and not better:
            break
        name = min(better, key=lambda component: better[component].seconds) if better else max(candidates, key=freed)
        chosen[name] = _in_pytorch(in_pytorch, slows=planned is not None)
        candidates.remove(name)
        if planned is None:
            too_large.append(name)
    for name in sorted(too_large, key=saved, reverse=True):
        again = pytorch.attempt(chosen | {name: choices[name]})
        if again is not None and (not saved(name) or again.seconds <= planned.seconds):
            chosen[name], planned = choices[name], again
    return chosen, planned


def _in_pytorch(in_pytorch: Fact, *, slows: bool = False) -> Choice:
    """Return the choice of PyTorch because an engine that was not requested does not fit, or slows down the clip."""
    reason = Fact("planner.engine_slows") if slows else Fact("planner.engine_memory")
    return Choice(PYTORCH, (), (in_pytorch, reason), reason)
