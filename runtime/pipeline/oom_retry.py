"""Work that goes on where memory runs out: in the next more frugal way, from where it was."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from runtime.core.errors import MachineError
from runtime.core.events import STAGE_TITLES, OutOfMemory
from runtime.core.units import duration
from runtime.execution.memory import ran_out, release_cached_memory
from runtime.pipeline.run_context import RunContext
from runtime.planner.fallback_strategy import FallbackStrategy, Memory, next_way

Result = TypeVar("Result")

_MEMORY_TITLES: dict[Memory, str] = {"VRAM": "video memory (VRAM)", "RAM": "memory (RAM)"}
_SMALLER = "Ask for a smaller size or fewer frames, or close other programs."
_NOTICED_SECONDS = 0.5
_NOTICED_TIMES = 1.05

logger = logging.getLogger(__name__)


def with_oom_retry(context: RunContext, work: Callable[[], Result]) -> Result:
    """Return what `work` returns; where memory runs out in it, all is freed and it is called again, more frugally.

    Args:
        work: reads from `course` what runs where, and how far it is.

    Raises:
        MachineError: if there is no such way, or it may not be taken; it says which one there is.
    """
    while True:
        try:
            return work()
        except Exception as error:
            full = ran_out(error)
            if full is None:
                raise
            # As text, and the rest outside of the handler: an exception's frames hold on to memory that is needed now.
            logger.error("Out of memory\n%s", traceback.format_exc())
        context.residency.free()
        release_cached_memory(unreachable=True)
        _go_on(context, full)


def _go_on(context: RunContext, full: Memory) -> None:
    """Put the next way into the course's plan, and tell of it."""
    plan = context.plan
    stage, component = context.doing
    memory: Memory = full if plan.components[component].device.startswith("cuda") else "RAM"
    allowed = plan.on_out_of_memory
    relief = next_way(plan, context.spec, component, memory, lossy=allowed == "any")
    other = relief or next_way(plan, context.spec, component, memory, lossy=True)
    taken = relief is not None and allowed != "ask"
    lost = time.perf_counter() - context.done_at
    part = plan.title(component)
    part = part if part.startswith("VAE") else part.lower()
    what = f"This machine ran out of {_MEMORY_TITLES[memory]}: {STAGE_TITLES[stage].lower()}, {part}."
    if other is None:
        message = what
    else:
        message = f"{what} {'It goes on' if taken else 'It can go on'} so: {_described(other)}."
        if taken and lost >= _NOTICED_SECONDS:
            message = f"{message} {duration(lost)} of work were done again."
    context.emit(
        OutOfMemory(
            stage=stage,
            component=component,
            memory=memory,
            instead=other.strategy.title if other else "",
            flags=_flags(other) if other else "",
            slowdown=round(other.slowdown, 2) if other else 1.0,
            lossless=other.strategy.lossless if other else True,
            lost_seconds=round(lost, 3),
            taken=taken,
            message=message,
            plan=other.plan if other and taken else None,
        )
    )
    if other is None or not taken:
        raise MachineError(what, _remedy(context, other))
    context.plan = other.plan
    context.straight = False
    context.warnings.append(message)
    context.done_at = time.perf_counter()


def _described(way: FallbackStrategy) -> str:
    described = way.strategy.title[0].lower() + way.strategy.title[1:]
    if way.slowdown >= _NOTICED_TIMES:
        described = f"{described}, about {way.slowdown:.1f} times as long"
    return described if way.strategy.lossless else f"{described}, the video a little less exact"


def _remedy(context: RunContext, way: FallbackStrategy | None) -> str:
    kept = f" It goes on after step {context.step} of {context.plan.steps}." if context.keeper.keeps else ""
    if way is None:
        return f"{_SMALLER} Resumed, it goes on after step {context.step}." if kept else _SMALLER
    verb = "Resume the job" if kept else "Generate again"
    return f"{verb} with {_flags(way)}: {_described(way)}.{kept}"


def _flags(way: FallbackStrategy) -> str:
    """Return what takes this way unasked: what no flag asks for, such as tiles, is allowed by one."""
    permitted = "retry" if way.strategy.lossless else "any"
    return way.strategy.flags or f"--on-out-of-memory {permitted}"
