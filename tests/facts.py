"""Look for a fact, with some of its data, in facts, plans or errors, and in the facts within their data."""

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.core.errors import TandemError
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, ExecutionPlan


def fact(code: str, **data: Any) -> Fact:
    """Return a fact."""
    return Fact(code, data)


def facts_in(value: object) -> Iterator[Fact]:
    """Yield each fact in a value, then those in its data.

    Args:
        value: facts, collections of facts, errors, or plans with their warnings, badges and reasons.
    """
    match value:
        case Fact():
            yield value
            yield from facts_in(value.data)
        case TandemError():
            yield from facts_in(value.fact)
        case ExecutionPlan():
            yield from facts_in((value.warnings, value.components))
        case ComponentPlan():
            yield from facts_in((value.badge, value.reasons))
        case Mapping():
            yield from facts_in(tuple(value.values()))
        case list() | tuple():
            for one in value:
                yield from facts_in(one)


def _matches(value: object, wanted: object) -> bool:
    if isinstance(wanted, Fact):
        return isinstance(value, Fact) and value.code == wanted.code and holds(value.data, wanted.data)
    if isinstance(wanted, list) and isinstance(value, list):
        return len(value) == len(wanted) and all(map(_matches, value, wanted))
    return value == wanted


def holds(data: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether the wanted data are among others; facts among them need only some of their data too."""
    return all(name in data and _matches(data[name], value) for name, value in wanted.items())


def states(value: object, wanted: str | Fact) -> bool:
    """Return whether a value contains a fact of this code, with these data among its own."""
    wanted = Fact(wanted) if isinstance(wanted, str) else wanted
    return any(_matches(one, wanted) for one in facts_in(value))
