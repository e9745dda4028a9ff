"""Work that goes on where memory runs out: in the next more frugal way, from where it was."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from runtime.components.memory import give_back, ran_out
from runtime.core.duration import duration
from runtime.core.errors import MachineError
from runtime.core.events import STAGE_TITLES, OutOfMemory
from runtime.jobs.course import Course
from runtime.manager.relief import Memory, Relief, next_way

Result = TypeVar("Result")

_MEMORY_TITLES: dict[Memory, str] = {"VRAM": "video memory (VRAM)", "RAM": "memory (RAM)"}
_SMALLER = "Ask for a smaller size or fewer frames, or close other programs."
_NOTICED_SECONDS = 0.5
_NOTICED_TIMES = 1.05

logger = logging.getLogger(__name__)


def enduring(course: Course, work: Callable[[], Result]) -> Result:
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
        course.residency.free()
        give_back(unreachable=True)
        _go_on(course, full)


def _go_on(course: Course, full: Memory) -> None:
    """Put the next way into the course's plan, and tell of it."""
    plan = course.plan
    stage, component = course.doing
    memory: Memory = full if plan.components[component].device.startswith("cuda") else "RAM"
    allowed = plan.on_out_of_memory
    relief = next_way(plan, course.spec, component, memory, lossy=allowed == "any")
    other = relief or next_way(plan, course.spec, component, memory, lossy=True)
    taken = relief is not None and allowed != "ask"
    lost = time.perf_counter() - course.done_at
    part = plan.title(component)
    part = part if part.startswith("VAE") else part.lower()
    what = f"This machine ran out of {_MEMORY_TITLES[memory]}: {STAGE_TITLES[stage].lower()}, {part}."
    if other is None:
        message = what
    else:
        message = f"{what} {'It goes on' if taken else 'It can go on'} so: {_described(other)}."
        if taken and lost >= _NOTICED_SECONDS:
            message = f"{message} {duration(lost)} of work were done again."
    course.emit(
        OutOfMemory(
            stage=stage,
            component=component,
            memory=memory,
            instead=other.rung.title if other else "",
            flags=_flags(other) if other else "",
            times_as_long=round(other.times_as_long, 2) if other else 1.0,
            lossless=other.rung.lossless if other else True,
            lost_seconds=round(lost, 3),
            taken=taken,
            message=message,
            plan=other.plan if other and taken else None,
        )
    )
    if other is None or not taken:
        raise MachineError(what, _remedy(course, other))
    course.plan = other.plan
    course.straight = False
    course.warnings.append(message)
    course.done_at = time.perf_counter()


def _described(way: Relief) -> str:
    described = way.rung.title[0].lower() + way.rung.title[1:]
    if way.times_as_long >= _NOTICED_TIMES:
        described = f"{described}, about {way.times_as_long:.1f} times as long"
    return described if way.rung.lossless else f"{described}, the video a little less exact"


def _remedy(course: Course, way: Relief | None) -> str:
    kept = f" It goes on after step {course.step} of {course.plan.steps}." if course.keeper.keeps else ""
    if way is None:
        return f"{_SMALLER} Resumed, it goes on after step {course.step}." if kept else _SMALLER
    verb = "Resume the job" if kept else "Generate again"
    return f"{verb} with {_flags(way)}: {_described(way)}.{kept}"


def _flags(way: Relief) -> str:
    """Return what takes this way unasked: what no flag asks for, such as tiles, is allowed by one."""
    permitted = "retry" if way.rung.lossless else "any"
    return way.rung.flags or f"--on-out-of-memory {permitted}"
