"""Plans of videos that do not wait for engines: they are built when no video waits, and later videos use them."""

from collections.abc import Callable

from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, EngineRef, ExecutionPlan
from runtime.core.request import AUTO, IDLE, GenerationRequest


def plan_without_waiting(
    request: GenerationRequest, plan_of: Callable[[GenerationRequest], ExecutionPlan]
) -> ExecutionPlan:
    """Return the plan of a request on engines that exist and PyTorch; `ComponentPlan.later` has what is to be built.

    Args:
        plan_of: plans a request, with "missing" or "never" for `build` instead of "idle".
    """
    full_plan = plan_of(request.replace(build="missing") if request.build == IDLE else request)
    later = {name: tuple(use for use in part.engines if use.build) for name, part in full_plan.components.items()}
    plan = plan_of(request.replace(build="never")) if any(later.values()) else full_plan
    components = dict(plan.components)
    for name, part in plan.components.items():
        built = full_plan.components[name]
        asked = request.build == "always" or request.backend(name) != AUTO
        if later[name] and not asked and not _can_be_faster(built, part):
            not_built = Fact("planner.not_built_slower", {"backend": built.backend})
            components[name] = part.replace(reasons=(*part.reasons, not_built))
        elif later[name]:
            components[name] = _postponed(part, built.backend, later[name])
    return plan.replace(request=request, components=components, builds_later=True)


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
