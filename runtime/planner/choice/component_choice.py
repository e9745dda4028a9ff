"""Choice of the backend of one component, with its reasons."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from runtime.core.estimates import BackendSeconds, basis
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, EngineRef
from runtime.core.request import AUTO
from runtime.planner.choice.engine_offers import EAGER_PATH, Comparison, EngineOffer, PyTorchPath
from runtime.planner.constraints import Conflict

# Minimum speedup over PyTorch for the automatic choice of an engine. Smaller differences are within timing noise.
_MIN_SPEEDUP = 1.03


@dataclass(frozen=True)
class Choice:
    """The backend of a component, with the reasons and the badge to show.

    Attributes:
        engines: the engines; empty for PyTorch.
        offer: the offer that was chosen; `None` for PyTorch.
        compared: see `ComponentPlan`.
    """

    backend: str
    engines: tuple[EngineRef, ...]
    reasons: tuple[Fact, ...]
    badge: Fact
    offer: EngineOffer | None = None
    compared: tuple[BackendSeconds, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """Whether the engines compute parts of each block of a transformer."""
        return self.offer is not None and self.offer.in_blocks


@dataclass(frozen=True)
class PyTorchAlternative:
    """What PyTorch would run instead of engines.

    Attributes:
        compare_plans: compares the plan with an offer's engines with that in PyTorch; `None` to compare single calls,
            as they were measured when the engines were built.
    """

    path: PyTorchPath = EAGER_PATH
    compare_plans: Callable[[EngineOffer], Comparison] | None = None

    def compare(self, offer: EngineOffer) -> Comparison:
        """Compare the engines of an offer with PyTorch."""
        return offer.compared(self.path) if self.compare_plans is None else self.compare_plans(offer)


_EAGER = PyTorchAlternative()


def on_offer(offer: EngineOffer) -> Choice:
    """Return the choice of existing engines, without a reason, to forecast a plan with them."""
    return Choice(offer.backend, offer.engines, (), Fact("planner.badge_ready"), offer)


def choose(
    backend: str,
    build: str,
    offers: Iterable[EngineOffer],
    in_pytorch: Fact,
    excluded: Conflict | None = None,
    alternative: PyTorchAlternative = _EAGER,
) -> Choice:
    """Choose a component's backend.

    Args:
        backend: its name, or "auto".
        build: "auto", "missing", "never" or "always".
        offers: see `admit`.
        in_pytorch: the device and precision in PyTorch, and why; a reason of the choice if PyTorch is chosen.
        excluded: the conflict that removed the preferred offer, from `admit`.
        alternative: what PyTorch would run. Only engines that are faster are chosen for "auto".
    """
    if backend == PYTORCH:
        as_asked = Fact("planner.as_asked")
        return _use_pytorch(as_asked, in_pytorch, as_asked)
    if backend == AUTO:
        return _choose_fastest(build, list(offers), in_pytorch, excluded, alternative)
    return _choose_requested(backend, build, [offer for offer in offers if offer.backend == backend], alternative)


def _use_pytorch(badge: Fact, *reasons: Fact) -> Choice:
    return Choice(PYTORCH, (), reasons, badge)


def _use_engines(offer: EngineOffer, build: str, reason: Fact) -> Choice:
    uses = tuple(use.replace(build=True) for use in offer.engines) if build == "always" else offer.engines
    if not any(use.build for use in uses):
        badge = Fact("planner.badge_ready")
    elif offer.build_seconds:
        badge = Fact("planner.badge_builds", {"seconds": offer.build_seconds})
    else:
        badge = Fact("planner.badge_builds_unknown")
    reasons = (reason, Fact("planner.in_blocks")) if offer.in_blocks else (reason,)
    return Choice(offer.backend, uses, reasons, badge, offer)


def _choose_fastest(
    build: str, offers: list[EngineOffer], in_pytorch: Fact, excluded: Conflict | None, alternative: PyTorchAlternative
) -> Choice:
    if build in {"missing", "always"}:
        buildable = [offer for offer in offers if offer.problem is None and not offer.on_request]
        if buildable and (build == "always" or not any(offer.ready for offer in offers)):
            first = buildable[0]
            how = _build_note(first, build, alternative)
            return _use_engines(first, build, Fact("planner.likely_fastest", {"backend": first.backend, "how": how}))
    measured = [offer for offer in offers if alternative.compare(offer).speedup]
    best = max(measured, key=lambda offer: alternative.compare(offer).speedup, default=None)
    if best is None:
        ready = [offer for offer in offers if offer.ready]
        if ready:
            cause = _not_compared(ready, alternative.path)
            return _use_pytorch(cause, in_pytorch, cause)
        if excluded is not None:
            return _use_pytorch(excluded.fact, in_pytorch, excluded.fact)
        badge = _badge_without_engine(offers)
        missing = next((offer.missing for offer in offers if offer.misfit), None)
        reasons = [] if missing is None else [Fact("planner.no_engine_fits", {"cause": missing})]
        helps = [badge] if badge.code == "planner.badge_build" else []
        return _use_pytorch(badge, *helps, *reasons, in_pytorch)
    note = {"backend": best.backend, "how": _speed_note(best, alternative)}
    if alternative.compare(best).speedup < _MIN_SPEEDUP:
        none_faster = Fact("planner.none_faster", note)
        return _use_pytorch(none_faster, in_pytorch, none_faster)
    code = "planner.fastest_measured" if len(measured) > 1 else "planner.faster_measured"
    return _use_engines(best, "never", Fact(code, note))


def _not_compared(ready: list[EngineOffer], path: PyTorchPath) -> Fact:
    """Return why none of the engines that exist could be compared with what PyTorch would run."""
    measured = next((offer for offer in ready if offer.seconds and path.kind in offer.baselines), None)
    if measured is not None and not measured.is_compared(path):
        return Fact("planner.compared_in_other_precision", {"backend": measured.backend})
    return Fact("planner.not_compared", {"path": path.title})


def _badge_without_engine(offers: list[EngineOffer]) -> Fact:
    """Return the badge if no engine is ready: what helps, otherwise why there is none."""
    misfit = next((offer.misfit for offer in offers if offer.misfit), None)
    buildable = next((offer for offer in offers if offer.problem is None and not offer.on_request), None)
    if buildable is not None and buildable.build_seconds:
        lack = buildable.misfit or misfit or Fact("planner.badge_no_engine")
        return Fact("planner.badge_build", {"lack": lack, "seconds": buildable.build_seconds})
    problem = offers[0].problem if offers and all(offer.problem is not None for offer in offers) else None
    return misfit or problem or Fact("planner.badge_no_engine")


def _choose_requested(backend: str, build: str, offers: list[EngineOffer], alternative: PyTorchAlternative) -> Choice:
    # The fastest; the preferred one if they were not measured.
    ready = min(
        (offer for offer in offers if offer.ready),
        key=lambda offer: alternative.compare(offer).engine or inf,
        default=None,
    )
    if ready is not None and build != "always":
        note = {"backend": backend, "how": _speed_note(ready, alternative)}
        return _use_engines(ready, build, Fact("planner.asked_engine", note))
    buildable = next((offer for offer in offers if offer.problem is None), None)
    if buildable is None:
        problem = offers[0].problem if offers else None
        if problem is None:
            unsupported = Fact("planner.not_supported", {"backend": backend})
            return _use_pytorch(unsupported, unsupported)
        return _use_pytorch(problem, Fact("planner.asked_unavailable", {"backend": backend, "cause": problem}))
    if build == "never":
        not_built = Fact("planner.asked_not_built", {"backend": backend, "cause": buildable.missing})
        return _use_pytorch(buildable.misfit or not_built, not_built)
    how = _build_note(buildable, build, alternative)
    return _use_engines(buildable, build, Fact("planner.asked_engine", {"backend": backend, "how": how}))


def _build_note(offer: EngineOffer, build: str, alternative: PyTorchAlternative) -> Fact:
    if offer.ready:
        return Fact("planner.built_again") if build == "always" else _speed_note(offer, alternative)
    if offer.build_seconds:
        return Fact("planner.built_first", {"seconds": offer.build_seconds, "cause": offer.missing})
    return Fact("planner.built_first_unknown", {"cause": offer.missing})


def _speed_note(offer: EngineOffer, alternative: PyTorchAlternative) -> Fact:
    precision = offer.engines[-1].precision
    compared = alternative.compare(offer)
    if not compared.speedup:
        return Fact("planner.speed_unknown", {"precision": precision})
    data = {
        "precision": precision,
        "seconds": compared.engine,
        "pytorch": compared.pytorch,
        "path": alternative.path.title,
        "times": compared.speedup,
        "basis": basis(measured=compared.measured),
    }
    if compared.attention:
        return Fact("planner.speed_in_blocks", {**data, "attention": compared.attention})
    return Fact("planner.speed", data)
