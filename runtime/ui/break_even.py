"""After how many videos an engine saves more time than its build took, from measurements on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from runtime.core.plan import ExecutionPlan
from runtime.planner.engine_index import EngineRecord
from runtime.planner.engine_offers import EngineOffer
from runtime.planner.history import calls_of
from runtime.ui import formatting


@dataclass(frozen=True)
class BreakEven:
    """Build time of engines and time saved per video, in seconds; imported engines have no build time."""

    build_seconds: float
    saved_seconds: float

    def __str__(self) -> str:
        """Return "18 min 0 s to build, saves 40 s a video: after 27 videos"."""
        saved = f"saves {_short(self.saved_seconds)} a video" if self.saved_seconds > 0 else "saves no time"
        if not self.build_seconds:
            return saved
        built = f"{formatting.duration(self.build_seconds)} to build"
        if self.saved_seconds <= 0:
            return f"{built}, {saved}"
        videos = ceil(self.build_seconds / self.saved_seconds)
        after = "after 1 video" if videos <= 1 else f"after {videos:,} videos"
        return f"{built}, {saved}: {after}"


def calls(plan: ExecutionPlan) -> Mapping[str, float]:
    """Return how often one video calls each component that an `EngineOffer` measured."""
    return calls_of(plan.steps, plan.guidance_scale, plan.guidance_scale_2, plan.expert_steps)


def of_offer(
    plan: ExecutionPlan, component: str, offer: EngineOffer, records: Sequence[EngineRecord]
) -> BreakEven | None:
    """Return cost and savings of an offer's engines for one component; `None` if they are not built and measured."""
    if not offer.speed_up:
        return None
    ids = {use.id for use in offer.uses}
    built = sum(record.build_seconds for record in records if record.id in ids)
    return BreakEven(built, calls(plan)[component] * (offer.pytorch_seconds - offer.seconds))


def _short(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return "less than 1 ms"
    return f"{milliseconds:.0f} ms" if seconds < 1 else formatting.duration(seconds)
