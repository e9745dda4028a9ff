"""Plans of videos that do not wait for engines: they are built when no video waits, and later videos use them."""

from collections.abc import Callable

from runtime.core.estimates import Seconds
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, EngineRef, ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest


def plan_without_waiting(
    request: GenerationRequest, plan_of: Callable[[GenerationRequest], ExecutionPlan], *, builds_missing: bool
) -> ExecutionPlan:
    """Return the plan of a request on engines that exist and PyTorch; `ComponentPlan.later` has what is to be built.

    Args:
        plan_of: plans a request, with "missing" or "never" for `build` instead of "idle".
        builds_missing: whether missing engines of all components are to be built, and not only those that the request
            asks for.
    """
    full_plan = plan_of(request.replace(build="missing") if builds_missing else request)
    later = {name: tuple(use for use in part.engines if use.build) for name, part in full_plan.components.items()}
    plan = plan_of(request.replace(build="never")) if any(later.values()) else full_plan
    components, seconds = dict(plan.components), plan.seconds["total"]
    for name, part in plan.components.items():
        built = full_plan.components[name]
        asked = request.build == "always" or request.backend(name) != AUTO
        if later[name] and not asked and not _can_be_faster(built, part):
            not_built = Fact("planner.not_built_slower", {"backend": built.backend})
            components[name] = part.replace(reasons=(*part.reasons, not_built))
        elif later[name]:
            components[name] = _postponed(part, built.backend, later[name])
            seconds = _instead_of(seconds, part.seconds, built.seconds)
    made = plan.replace(request=request, components=components, builds_later=True)
    return made.replace(seconds={**plan.seconds, "later": seconds}) if made.builds else made


def _instead_of(total: Seconds, running: Seconds | None, built: Seconds | None) -> Seconds:
    """Return the seconds of a clip, one component of which takes those of engines to be built."""
    if running is None or built is None:
        return total
    likely, low, high = (
        getattr(total, name) - getattr(running, name) + getattr(built, name) for name in ("likely", "low", "high")
    )
    return Seconds(likely, low, high, inferred=total.known and built.known)


def _can_be_faster(built: ComponentPlan, running: ComponentPlan) -> bool:
    """Return whether engines to be built for a component may be faster than what runs, by the low end of the forecast.

    Block engines may: their forecast is that of PyTorch's blocks.
    """
    if built.in_blocks or built.seconds is None or running.seconds is None:
        return True
    return built.seconds.low < running.seconds.likely


def _postponed(part: ComponentPlan, backend: str, later: tuple[EngineRef, ...]) -> ComponentPlan:
    if part.engines:  # they are used while they are built again
        return part.replace(later=later)
    other_reasons = (reason for reason in part.reasons if reason.code != "planner.asked_not_built")
    built_later = Fact("planner.built_later", {"backend": backend})
    return part.replace(later=later, reasons=(built_later, *other_reasons), badge=built_later)
