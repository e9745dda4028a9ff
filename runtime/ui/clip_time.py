"""Seconds that a clip takes, and saves on engines, from what was measured of them on this machine. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.manager.engine_index import EngineRecord
from runtime.manager.offers import EngineOffer, Offers
from runtime.ui import text


@dataclass(frozen=True)
class Payoff:
    """What building engines costs once, and saves with each clip, in seconds."""

    build_seconds: float
    saved_seconds: float

    def __str__(self) -> str:
        """Return "18 min 0 s to build, saves 40 s a video: after 27 videos"."""
        built = f"{text.duration(self.build_seconds)} to build"
        if self.saved_seconds <= 0:
            return f"{built}, saves no time"
        videos = ceil(self.build_seconds / self.saved_seconds)
        after = "after 1 video" if videos <= 1 else f"after {videos:,} videos"
        return f"{built}, saves {_fine(self.saved_seconds)} a video: {after}"


def calls(plan: ExecutionPlan, component: str) -> float:
    """Return how often a clip uses what an `EngineOffer` has measured of a component.

    The VAE's offers are of a whole clip. Two experts share the steps about evenly; each step calls a transformer once,
    or twice with guidance.
    """
    scales = {"transformer": plan.guidance_scale, "transformer_2": plan.guidance_scale_2 or 0.0}
    if component in scales:
        experts = 2 if "transformer_2" in plan.components else 1
        return plan.steps / experts * (2 if scales[component] > 1 else 1)
    if component == "text_encoder":
        return 2.0 if any(scale > 1 for scale in scales.values()) else 1.0
    return 1.0


def clip_seconds(plan: ExecutionPlan, offers: Offers) -> float | None:
    """Return how long a clip takes as planned, without loading and building; `None` where a part was not measured."""
    total = 0.0
    for name, part in plan.components.items():
        offered = [offer for offer in offers(name, plan.latent_size, part.device) if offer.speed_up]
        if part.backend == PYTORCH:
            seconds = next((offer.pytorch_seconds for offer in offered), None)
        else:
            ids = [use.id for use in part.engines]
            seconds = next((offer.seconds for offer in offered if [use.id for use in offer.uses] == ids), None)
        if seconds is None:
            return None
        total += calls(plan, name) * seconds
    return total


def payoff(plan: ExecutionPlan, component: str, offer: EngineOffer, records: Sequence[EngineRecord]) -> Payoff | None:
    """Return what an offer's engines cost and save for one component; `None` if they are not built and measured."""
    if not offer.speed_up:
        return None
    ids = {use.id for use in offer.uses}
    built = sum(record.build_seconds for record in records if record.id in ids)
    return Payoff(built, calls(plan, component) * (offer.pytorch_seconds - offer.seconds))


def build_estimate(offer: EngineOffer, records: Sequence[EngineRecord]) -> float | None:
    """Return about how long an offer's missing engines take to build, from the last that were built alike here.

    `None` where nothing like one of them was ever built.
    """
    total = 0.0
    for use in offer.uses:
        if use.build:
            alike = [
                record for record in records if (record.key.program, record.key.builder) == (use.program, use.builder)
            ]
            if not alike:
                return None
            total += max(alike, key=lambda record: record.built_at).build_seconds
    return total


def _fine(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return "less than 1 ms"
    return f"{milliseconds:.0f} ms" if seconds < 1 else text.duration(seconds)
