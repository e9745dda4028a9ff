"""The English text of every fact: one module per package that states them.

A template is a `str.format` string over the fact's data, with the conversions of `core.facts`. `what` describes the
fact in one line and `remedy` the solution in another; warnings and reasons have no remedy.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Message(NamedTuple):
    """The templates of one code; `badge` is a short form of `what` for badges and tables."""

    what: str
    remedy: str = ""
    badge: str = ""


def _merged(*tables: Mapping[str, Message]) -> dict[str, Message]:
    merged: dict[str, Message] = {}
    for table in tables:
        assert not merged.keys() & table.keys(), merged.keys() & table.keys()
        merged |= table
    return merged


def _load() -> dict[str, Message]:
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

    return _merged(
        core.MESSAGES,
        machine.MESSAGES,
        video.MESSAGES,
        models.MESSAGES,
        planner.MESSAGES,
        engines.MESSAGES,
        execution.MESSAGES,
        families.MESSAGES,
        pipeline.MESSAGES,
        queue.MESSAGES,
        server.MESSAGES,
        bench.MESSAGES,
        cli.MESSAGES,
        ui.MESSAGES,
    )


MESSAGES: Mapping[str, Message] = _load()
