"""The English text of every fact: one module per package that states them.

A template is a `str.format` string over the fact's data, with the conversions of `core.facts`. `what` describes the
fact in one line and `remedy` the solution in another; warnings and reasons have no remedy.
"""

from collections.abc import Mapping

from runtime.core.messages import (
    bench,
    cli,
    core,
    engines,
    execution,
    families,
    machine,
    models,
    pipeline,
    planner,
    queue,
    server,
    ui,
    video,
)
from runtime.core.messages.message import Message

_MODULES = (
    core,
    machine,
    video,
    models,
    planner,
    engines,
    execution,
    families,
    pipeline,
    queue,
    server,
    bench,
    cli,
    ui,
)


def _merged(*tables: Mapping[str, Message]) -> dict[str, Message]:
    merged: dict[str, Message] = {}
    for table in tables:
        assert not merged.keys() & table.keys(), merged.keys() & table.keys()
        merged |= table
    return merged


MESSAGES: Mapping[str, Message] = _merged(*(module.MESSAGES for module in _MODULES))
