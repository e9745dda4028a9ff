"""Chooses a component's backend from the engines offered for it. Pure: `engines.service` makes the offers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, EngineUse, LatentSize
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.planner.constraints import ComponentSettings, Conflict, conflict

# Speedup from which an engine is chosen automatically: timings vary by less.
_MIN_SPEEDUP = 1.03


@dataclass(frozen=True, kw_only=True)
class EngineOffer:
    """Engines of one builder for a component.

    Attributes:
        backend, builder: what runs and what builds them.
        uses: the engines; `build` marks those to build. Empty if the backend does not support the device.
        missing: why an engine must be built; `None` if all exist.
        misfit: the closest existing engine's difference in a few words: "engine for other sizes".
        problem: why none can be built on this machine; `None` if they can.
        build_seconds: estimated time to build the missing ones.
        seconds, pytorch_seconds: measured seconds of one call, for the VAE of the whole clip; 0 if not measured.
        file_bytes: size of the existing ones.
    """

    backend: str
    builder: str
    uses: tuple[EngineUse, ...]
    missing: Fact | None = None
    misfit: Fact | None = None
    problem: Fact | None = None
    build_seconds: float = 0.0
    seconds: float = 0.0
    pytorch_seconds: float = 0.0
    file_bytes: int = 0

    @property
    def ready(self) -> bool:
        """Whether all engines exist."""
        return bool(self.uses) and not any(use.build for use in self.uses)

    @property
    def speed_up(self) -> float:
        """Speedup against PyTorch, both measured on this machine; 0 if not measured."""
        return self.pytorch_seconds / self.seconds if self.ready and self.seconds else 0.0


# Offers for a component at a latent size on a device, the preferred builder first.
Offers = Callable[[str, LatentSize, str], Sequence[EngineOffer]]


@dataclass(frozen=True)
class Choice:
    """The backend of a component with its reasons and its badge; `offer` is that of its engines."""

    backend: str
    uses: tuple[EngineUse, ...]
    reasons: tuple[Fact, ...]
    badge: Fact
    offer: EngineOffer | None = None


def no_offers(_component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
    """Offer nothing: everything runs in PyTorch."""
    return ()


def admit(
    offers: Iterable[EngineOffer], case: ComponentSettings, machine: Machine
) -> tuple[list[EngineOffer], Conflict | None]:
    """Remove the offers that other settings exclude.

    Returns:
        The remaining offers, and why the first buildable one was removed. An offer that the machine excludes remains if
        its engines exist and are verified; otherwise the exclusion is its `problem`.
    """
    admitted, excluded = [], None
    for offer in offers:
        precision = offer.uses[-1].precision if offer.uses else ""
        against = conflict(replace(case, backend=offer.backend, precision=precision), machine)
        if against is not None and against.setting:
            excluded = excluded or (against if offer.problem is None else None)
        elif against is not None and not offer.ready and offer.problem is None:
            admitted.append(replace(offer, problem=against.fact))
        else:
            admitted.append(offer)
    return admitted, excluded


def choose(
    asked: str, build: str, offers: Iterable[EngineOffer], in_pytorch: Fact, excluded: Conflict | None = None
) -> Choice:
    """Choose a component's backend.

    Args:
        asked: a backend, or "auto".
        build: "auto", "missing", "never" or "always".
        offers: see `admit`.
        in_pytorch: device and precision in PyTorch, with the reason.
        excluded: why the preferred engines are not among the offers.
    """
    if asked == PYTORCH:
        return _pytorch(Fact("planner.badge_as_asked"), in_pytorch, Fact("planner.as_asked"))
    if asked == AUTO:
        return _fastest(build, list(offers), in_pytorch, excluded)
    return _asked_for(asked, build, [offer for offer in offers if offer.backend == asked])


def _pytorch(badge: Fact, *reasons: Fact) -> Choice:
    return Choice(PYTORCH, (), reasons, badge)


def _engines(offer: EngineOffer, build: str, reason: Fact) -> Choice:
    uses = tuple(use.replace(build=True) for use in offer.uses) if build == "always" else offer.uses
    if not any(use.build for use in uses):
        badge = Fact("planner.badge_ready")
    elif offer.build_seconds:
        badge = Fact("planner.badge_builds", {"seconds": offer.build_seconds})
    else:
        badge = Fact("planner.badge_builds_unknown")
    return Choice(offer.backend, uses, (reason,), badge, offer)


def _fastest(build: str, offers: list[EngineOffer], in_pytorch: Fact, excluded: Conflict | None) -> Choice:
    if build in {"missing", "always"}:
        buildable = [offer for offer in offers if offer.problem is None]
        if buildable and (build == "always" or not any(offer.ready for offer in offers)):
            first = buildable[0]
            how = _building(first, build)
            return _engines(first, build, Fact("planner.likely_fastest", {"backend": first.backend, "how": how}))
    measured = [offer for offer in offers if offer.speed_up]
    best = max(measured, key=lambda offer: offer.speed_up, default=None)
    if best is None:
        if excluded is not None:
            return _pytorch(excluded.fact, in_pytorch, excluded.fact)
        nearest = next((offer.missing for offer in offers if offer.misfit), None)
        reasons = [] if nearest is None else [Fact("planner.no_engine_fits", {"cause": nearest})]
        return _pytorch(_why_none(offers), in_pytorch, *reasons)
    if best.speed_up < _MIN_SPEEDUP:
        return _pytorch(Fact("planner.badge_none_faster"), in_pytorch, Fact("planner.none_faster"))
    code = "planner.fastest_measured" if len(measured) > 1 else "planner.faster_measured"
    return _engines(best, "never", Fact(code, {"backend": best.backend, "how": _speed(best)}))


def _why_none(offers: list[EngineOffer]) -> Fact:
    if any(offer.ready for offer in offers):
        return Fact("planner.badge_not_measured")
    misfit = next((offer.misfit for offer in offers if offer.misfit), None)
    problem = offers[0].problem if offers and all(offer.problem is not None for offer in offers) else None
    return misfit or problem or Fact("planner.badge_no_engine")


def _asked_for(asked: str, build: str, offers: list[EngineOffer]) -> Choice:
    ready = next((offer for offer in offers if offer.ready), None)
    if ready is not None and build != "always":
        return _engines(ready, build, Fact("planner.asked_engine", {"backend": asked, "how": _speed(ready)}))
    buildable = next((offer for offer in offers if offer.problem is None), None)
    if buildable is None:
        problem = offers[0].problem if offers else None
        if problem is None:
            unsupported = Fact("planner.not_supported", {"backend": asked})
            return _pytorch(unsupported, unsupported)
        return _pytorch(problem, Fact("planner.asked_unavailable", {"backend": asked, "cause": problem}))
    if build == "never":
        badge = buildable.misfit or Fact("planner.badge_not_built", {"backend": asked})
        return _pytorch(badge, Fact("planner.asked_not_built", {"backend": asked, "cause": buildable.missing}))
    how = _building(buildable, build)
    return _engines(buildable, build, Fact("planner.asked_engine", {"backend": asked, "how": how}))


def _building(offer: EngineOffer, build: str) -> Fact:
    if offer.ready:
        return Fact("planner.built_again") if build == "always" else _speed(offer)
    if offer.build_seconds:
        return Fact("planner.built_first", {"seconds": offer.build_seconds, "cause": offer.missing})
    return Fact("planner.built_first_unknown", {"cause": offer.missing})


def _speed(offer: EngineOffer) -> Fact:
    precision = offer.uses[-1].precision
    if not offer.speed_up:
        return Fact("planner.speed_unknown", {"precision": precision})
    return Fact("planner.speed", {"precision": precision, "times": offer.speed_up})
