"""Which engines a component could run on, and which are taken. Pure: what there is comes from `engines.offers`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.core.plan import BACKEND_TITLES, PYTORCH, EngineUse, LatentSize
from runtime.core.request import AUTO

# An engine must be this much faster than PyTorch to be taken unasked: timings vary by less.
_WORTH_IT = 1.03


@dataclass(frozen=True, kw_only=True)
class EngineOffer:
    """One way to run a component on engines.

    Attributes:
        backend, builder: what runs them and what makes them.
        uses: the engines; those that are not there say `build`. None where the backend does not run on the device.
        missing: why an engine must be built, as in "there is none yet"; empty where all are there.
        problem: why nothing can be built here, `None` where it can.
        remedy: what to do about that, a sentence.
        seconds, pytorch_seconds: of one call, for the VAE of the whole clip, as measured here; 0 if not measured.
        file_bytes: of the engines that are there.
    """

    backend: str
    builder: str
    uses: tuple[EngineUse, ...]
    missing: str = ""
    problem: str | None = None
    remedy: str = ""
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
    """What a component runs on: `backend` is "pytorch" where `uses` is empty."""

    backend: str
    uses: tuple[EngineUse, ...]
    reason: str


def no_offers(_component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
    """Offer nothing: everything runs in PyTorch."""
    return ()


def choose(asked: str, build: str, offers: Iterable[EngineOffer], in_pytorch: str) -> Choice:
    """Decide what a component runs on.

    Args:
        asked: a backend, or "auto".
        build: "auto", "missing", "never" or "always".
        offers: what there is.
        in_pytorch: why and how PyTorch would run it, a sentence.
    """
    if asked == PYTORCH:
        return Choice(PYTORCH, (), f"{in_pytorch} It was asked for.")
    if asked == AUTO:
        return _fastest(build, list(offers), in_pytorch)
    return _asked_for(asked, build, [offer for offer in offers if offer.backend == asked])


def _fastest(build: str, offers: list[EngineOffer], in_pytorch: str) -> Choice:
    if build in {"missing", "always"}:
        buildable = [offer for offer in offers if offer.problem is None]
        if buildable and (build == "always" or not any(offer.ready for offer in offers)):
            first = buildable[0]
            reason = f"{BACKEND_TITLES[first.backend]}, most likely the fastest here: {_building(first, build)}."
            return Choice(first.backend, _to_build(first, build), reason)
    measured = [offer for offer in offers if offer.speed_up]
    best = max(measured, key=lambda offer: offer.speed_up, default=None)
    if best is None:
        return Choice(PYTORCH, (), in_pytorch)
    if best.speed_up < _WORTH_IT:
        return Choice(PYTORCH, (), f"{in_pytorch} No engine measured here is faster.")
    others = "the fastest measured here" if len(measured) > 1 else "faster here"
    return Choice(best.backend, best.uses, f"{BACKEND_TITLES[best.backend]} is {others}: {_speed(best)}.")


def _asked_for(asked: str, build: str, offers: list[EngineOffer]) -> Choice:
    title = BACKEND_TITLES[asked]
    ready = next((offer for offer in offers if offer.ready), None)
    if ready is not None and build != "always":
        return Choice(asked, ready.uses, f"{title}, as asked: {_speed(ready)}.")
    buildable = next((offer for offer in offers if offer.problem is None), None)
    if buildable is None:
        why = f"{offers[0].problem}. {offers[0].remedy}" if offers else "it does not run this component."
        return Choice(PYTORCH, (), f"{title} was asked for, but {why}")
    if build == "never":
        return Choice(
            PYTORCH, (), f"{title} was asked for, but has no engine ({buildable.missing}), and none is to be built."
        )
    return Choice(asked, _to_build(buildable, build), f"{title}, as asked: {_building(buildable, build)}.")


def _to_build(offer: EngineOffer, build: str) -> tuple[EngineUse, ...]:
    return tuple(replace(use, build=True) for use in offer.uses) if build == "always" else offer.uses


def _building(offer: EngineOffer, build: str) -> str:
    if offer.ready:
        return "built anew, as asked" if build == "always" else _speed(offer)
    return f"built first ({offer.missing})"


def _speed(offer: EngineOffer) -> str:
    precision = offer.uses[-1].precision
    if not offer.speed_up:
        return f"{precision}, not measured"
    return f"{precision}, {offer.speed_up:.1f} times as fast as PyTorch when it was measured"
