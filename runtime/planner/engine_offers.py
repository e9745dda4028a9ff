"""Which engines a component could run on, and which are taken. Pure: what there is comes from `engines.offers`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.core.plan import BACKEND_TITLES, PYTORCH, EngineUse, LatentSize
from runtime.core.request import AUTO
from runtime.core.units import about
from runtime.machine.probe import Machine
from runtime.planner.constraints import Case, Conflict, conflict

# An engine must be this much faster than PyTorch to be taken unasked: timings vary by less.
_WORTH_IT = 1.03


@dataclass(frozen=True, kw_only=True)
class EngineOffer:
    """One way to run a component on engines.

    Attributes:
        backend, builder: what runs them and what makes them.
        uses: the engines; those that are not there say `build`. None where the backend does not run on the device.
        missing: why an engine must be built, as in "there is none yet"; empty where all are there.
        misfit: the same in a few words, where there is an engine for something else: "engine for other sizes".
        problem: why nothing can be built here, `None` where it can.
        remedy: what to do about that, a sentence.
        chip: `problem` in a few words, where it has more.
        build_seconds: about how long building those that are not there takes.
        seconds, pytorch_seconds: of one call, for the VAE of the whole clip, as measured here; 0 if not measured.
        file_bytes: of the engines that are there.
    """

    backend: str
    builder: str
    uses: tuple[EngineUse, ...]
    missing: str = ""
    misfit: str = ""
    problem: str | None = None
    remedy: str = ""
    badge: str = ""
    build_seconds: float = 0.0
    seconds: float = 0.0
    pytorch_seconds: float = 0.0
    file_bytes: int = 0

    @property
    def ready(self) -> bool:
        """Whether all engines are there."""
        return bool(self.uses) and not any(use.build for use in self.uses)

    @property
    def speed_up(self) -> float:
        """How many times as fast as PyTorch, both measured on this machine; 0 if not measured."""
        return self.pytorch_seconds / self.seconds if self.ready and self.seconds else 0.0


# What there is for a component at a latent size on a device, the builder to prefer first.
Offers = Callable[[str, LatentSize, str], Sequence[EngineOffer]]


@dataclass(frozen=True)
class Choice:
    """What a component runs on: `backend` is "pytorch" where `uses` is empty, `chip` says it in a few words."""

    backend: str
    uses: tuple[EngineUse, ...]
    reason: str
    badge: str


def no_offers(_component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
    """Offer nothing: everything runs in PyTorch."""
    return ()


def admit(offers: Iterable[EngineOffer], case: Case, machine: Machine) -> tuple[list[EngineOffer], Conflict | None]:
    """Sort out the offers that other settings or the machine exclude.

    Returns:
        Those that stay, and why the first that could be had was left out because of other settings. What the machine
        excludes stays where its engines are there and proven; else it says so as its `problem`.
    """
    admitted, excluded = [], None
    for offer in offers:
        precision = offer.uses[-1].precision if offer.uses else ""
        against = conflict(replace(case, backend=offer.backend, precision=precision), machine)
        if against is not None and against.setting:
            excluded = excluded or (against if offer.problem is None else None)
        elif against is not None and not offer.ready and offer.problem is None:
            admitted.append(replace(offer, problem=against.reason, remedy=against.remedy, badge=against.badge))
        else:
            admitted.append(offer)
    return admitted, excluded


def choose(
    asked: str, build: str, offers: Iterable[EngineOffer], in_pytorch: str, excluded: Conflict | None = None
) -> Choice:
    """Decide what a component runs on.

    Args:
        asked: a backend, or "auto".
        build: "auto", "missing", "never" or "always".
        offers: what there is.
        in_pytorch: why and how PyTorch would run it, a sentence.
        excluded: why the engines that suit best are not among the offers: other settings exclude them.
    """
    if asked == PYTORCH:
        return _pytorch(f"{in_pytorch} It was asked for.", "as asked")
    if asked == AUTO:
        return _fastest(build, list(offers), in_pytorch, excluded)
    return _asked_for(asked, build, [offer for offer in offers if offer.backend == asked])


def _pytorch(reason: str, badge: str) -> Choice:
    return Choice(PYTORCH, (), reason, f"{BACKEND_TITLES[PYTORCH]}: {badge}")


def _engines(offer: EngineOffer, build: str, reason: str) -> Choice:
    uses = tuple(use.replace(build=True) for use in offer.uses) if build == "always" else offer.uses
    title = BACKEND_TITLES[offer.backend]
    if not any(use.build for use in uses):
        return Choice(offer.backend, uses, reason, f"{title}: engine ready")
    return Choice(offer.backend, uses, reason, f"{title}: builds first{_how_long(offer)}")


def _how_long(offer: EngineOffer) -> str:
    return f", {about(offer.build_seconds)}" if offer.build_seconds else ""


def _fastest(build: str, offers: list[EngineOffer], in_pytorch: str, excluded: Conflict | None) -> Choice:
    if build in {"missing", "always"}:
        buildable = [offer for offer in offers if offer.problem is None]
        if buildable and (build == "always" or not any(offer.ready for offer in offers)):
            first = buildable[0]
            reason = f"{BACKEND_TITLES[first.backend]}, most likely the fastest here: {_building(first, build)}."
            return _engines(first, build, reason)
    measured = [offer for offer in offers if offer.speed_up]
    best = max(measured, key=lambda offer: offer.speed_up, default=None)
    if best is None:
        if excluded is not None:
            return _pytorch(f"{in_pytorch} {excluded.what}", excluded.badge)
        nearest = next((offer.missing for offer in offers if offer.misfit), "")
        reason = f"{in_pytorch} No engine fits: {nearest}." if nearest else in_pytorch
        return _pytorch(reason, _why_none(offers))
    if best.speed_up < _WORTH_IT:
        return _pytorch(f"{in_pytorch} No engine measured here is faster.", "no engine is faster")
    others = "the fastest measured here" if len(measured) > 1 else "faster here"
    return _engines(best, "never", f"{BACKEND_TITLES[best.backend]} is {others}: {_speed(best)}.")


def _why_none(offers: list[EngineOffer]) -> str:
    if any(offer.ready for offer in offers):
        return "its engine is not measured"
    misfit = next((offer.misfit for offer in offers if offer.misfit), "")
    if misfit or not offers or any(offer.problem is None for offer in offers):
        return misfit or "no engine yet"
    return _short(offers[0])


def _short(offer: EngineOffer) -> str:
    return offer.badge or (offer.problem or "").partition(":")[0]


def _asked_for(asked: str, build: str, offers: list[EngineOffer]) -> Choice:
    title = BACKEND_TITLES[asked]
    ready = next((offer for offer in offers if offer.ready), None)
    if ready is not None and build != "always":
        return _engines(ready, build, f"{title}, as asked: {_speed(ready)}.")
    buildable = next((offer for offer in offers if offer.problem is None), None)
    if buildable is None:
        why = f"{offers[0].problem}. {offers[0].remedy}" if offers else "it does not run this component."
        short = _short(offers[0]) if offers else f"{title} does not run this part"
        return _pytorch(f"{title} was asked for, but {why}", short)
    if build == "never":
        return _pytorch(
            f"{title} was asked for, but has no engine ({buildable.missing}), and none is to be built.",
            buildable.misfit or f"no {title} engine, and none is to be built",
        )
    return _engines(buildable, build, f"{title}, as asked: {_building(buildable, build)}.")


def _building(offer: EngineOffer, build: str) -> str:
    if offer.ready:
        return "built anew, as asked" if build == "always" else _speed(offer)
    return f"built first{_how_long(offer)} ({offer.missing})"


def _speed(offer: EngineOffer) -> str:
    precision = offer.uses[-1].precision
    if not offer.speed_up:
        return f"{precision}, not measured"
    return f"{precision}, {offer.speed_up:.1f} times as fast as PyTorch when it was measured"
