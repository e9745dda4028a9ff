"""Retry after out-of-memory with the next strategy that needs less memory, from the last finished step."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from runtime.core.errors import MachineError, ran_out
from runtime.core.events import OutOfMemory
from runtime.execution.memory import release_cached_memory
from runtime.pipeline.run_context import RunContext
from runtime.planner.strategies import Memory, next_strategy

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def with_oom_retry(context: RunContext, work: Callable[[], Result]) -> Result:
    """Return what `work` returns; if memory runs out, free everything and call it again with the next strategy.

    Args:
        work: reads the plan and the progress from `context`.

    Raises:
        MachineError: if there is no such strategy, or the request does not allow it.
    """
    while True:
        try:
            return work()
        except Exception as error:
            memory = ran_out(error)
            if memory is None:
                raise
            # Logged as text, and handled outside: the exception's frames hold on to memory that is needed now.
            logger.error("Out of memory\n%s", traceback.format_exc())
        context.residency.free()
        release_cached_memory(unreachable=True)
        _apply_next_strategy(context, memory)


def _apply_next_strategy(context: RunContext, memory: Memory) -> None:
    """Put the next strategy into the context's plan and emit `OutOfMemory`."""
    plan = context.plan
    stage, component = context.current
    if not plan.components[component].device.startswith("cuda"):
        memory = "RAM"
    fallback = next_strategy(plan, context.spec, component, memory, lossy=True)
    if fallback is None:
        event = OutOfMemory(stage=stage, component=component, memory=memory, retried=False)
    else:
        event = fallback.event(stage, component, memory, round(time.perf_counter() - context.progress_at, 3))
    context.emit(event)
    if event.plan is None:
        raise _error(context, event)
    context.plan = event.plan
    context.counts_for_history = False
    context.warnings.append(event.fact)
    context.progress_at = time.perf_counter()


def _error(context: RunContext, event: OutOfMemory) -> MachineError:
    data: dict[str, Any] = {"stage": event.stage, "component": event.component, "memory": event.memory}
    if event.strategy is not None:
        data |= {"changes": dict(event.changes), "effects": event.effects}
    if not context.resumable:
        if event.strategy is None:
            return MachineError("pipeline.out_of_memory", **data)
        return MachineError("pipeline.out_of_memory_strategy", **data)
    data |= {"step": context.step, "of": context.plan.total_steps}
    if event.strategy is None:
        return MachineError("pipeline.out_of_memory_resumable", **data)
    return MachineError("pipeline.out_of_memory_resumable_strategy", **data)
