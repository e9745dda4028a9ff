"""When a compiled engine pays off: after how many videos the time that it saves exceeds the time to build it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from runtime.core.estimates import BackendSeconds
from runtime.core.plan import ComponentPlan
from runtime.engines.offers import engine_calls
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.choice.engine_offers import EngineOffer
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


def break_even_of_part(
    part: ComponentPlan, offers: Iterable[EngineOffer], records: Iterable[EngineRecord]
) -> tuple[str, BreakEven] | None:
    """Return the backend of a component's engines in use, or of the fastest if none is, and when they pay off.

    Saved seconds are the plan's; `None` if no engine was compared with PyTorch.
    """
    used = part.engines[-1].builder if part.engines else ""
    entry = next((entry for entry in part.compared if entry.builder and used in {"", entry.builder}), None)
    offer = next((offer for offer in offers if entry is not None and offer.builder == entry.builder), None)
    if entry is None or offer is None:
        return None
    ids = {use.id for use in offer.engines}
    built = sum(record.build_seconds for record in records if record.id in ids)
    return entry.backend, BreakEven(built, _saved(part, entry))


def _saved(part: ComponentPlan, entry: BackendSeconds) -> float:
    """Return the seconds that engines save for a component of one video; 0 if they were not compared with PyTorch."""
    pytorch = next((other.seconds for other in part.compared if not other.builder), None)
    in_use = part.engines and part.engines[-1].builder == entry.builder
    seconds = part.seconds if in_use and part.seconds is not None else entry.seconds
    return 0.0 if pytorch is None else pytorch.likely - seconds.likely


def break_even_of_record(record: EngineRecord, preview: Preview | None) -> BreakEven | None:
    """Return when an engine pays off at the previewed settings; `None` if they do not use it.

    Of what several engines of a component save together, it has its share in their time.
    """
    if preview is None or preview.plan is None or not record.seconds_per_call or not record.pytorch_seconds:
        return None
    plan = preview.plan
    saved: list[float] = []
    for name, part in plan.components.items():
        for offer in preview.offers(name, plan.engine_size(name), part.device):
            entry = next((entry for entry in part.compared if entry.builder == offer.builder), None)
            use = next((use for use in offer.engines if use.id == record.id and not use.build), None)
            if entry is not None and use is not None and offer.seconds:
                seconds = engine_calls(use, preview.spec, plan.engine_size(name)) * record.seconds_per_call
                saved.append(min(seconds / offer.seconds, 1.0) * _saved(part, entry))
    return BreakEven(record.build_seconds, sum(saved)) if saved else None


def _brief(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return "less than 1 ms"
    return f"{milliseconds:.0f} ms" if seconds < 1 else formatting.duration(seconds)
