"""When a compiled engine pays off: after how many videos the time that it saves exceeds the time to build it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from runtime.core.plan import ExecutionPlan
from runtime.engines.offers import engine_calls
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.history import calls_of_plan
from runtime.ui import formatting
from runtime.ui.plan_preview import Preview


@dataclass(frozen=True)
class BreakEven:
    """Build time of engines and time saved per video, in seconds. The build time of imported engines is 0."""

    build_seconds: float
    saved_seconds: float

    def __str__(self) -> str:
        """Return "saves 40 s a video; building took 18 min 0 s, made up for after 27 videos"."""
        saved = f"saves {_brief(self.saved_seconds)} a video" if self.saved_seconds > 0 else "saves no time"
        if not self.build_seconds:
            return saved
        built = f"{saved}; building took {formatting.duration(self.build_seconds)}"
        if self.saved_seconds <= 0:
            return built
        videos = ceil(self.build_seconds / self.saved_seconds)
        return f"{built}, made up for after {'1 video' if videos <= 1 else f'{videos:,} videos'}"


def break_even_of_offer(
    plan: ExecutionPlan, component: str, offer: EngineOffer, records: Sequence[EngineRecord]
) -> BreakEven | None:
    """Return when the engines of an offer pay off for a component; `None` if they are not built and measured."""
    if not offer.speedup:
        return None
    ids = {use.id for use in offer.engines}
    built = sum(record.build_seconds for record in records if record.id in ids)
    return BreakEven(built, calls_of_plan(plan)[component] * (offer.pytorch_seconds - offer.seconds))


def break_even_of_record(record: EngineRecord, preview: Preview | None) -> BreakEven | None:
    """Return when an engine pays off at the previewed settings; `None` if they do not use it."""
    if preview is None or preview.plan is None or not record.seconds_per_call or not record.pytorch_seconds:
        return None
    plan = preview.plan
    calls = 0.0
    for name, part in plan.components.items():
        offered = preview.offers(name, plan.latent_size, part.device)
        uses = (use for offer in offered for use in offer.engines if use.id == record.id and not use.build)
        used = next(uses, None)
        if used is not None:
            calls += calls_of_plan(plan)[name] * engine_calls(used, preview.spec, plan.latent_size)
    saved = calls * (record.pytorch_seconds - record.seconds_per_call)
    return BreakEven(record.build_seconds, saved) if calls else None


def _brief(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return "less than 1 ms"
    return f"{milliseconds:.0f} ms" if seconds < 1 else formatting.duration(seconds)
