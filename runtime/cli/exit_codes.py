"""How a command ends: exit codes, cancellation by signals, errors as two lines, and one JSON object for programs."""

import json
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.estimates import StrategyForecast
from runtime.core.facts import Fact, Words, render

DONE, INTERNAL_ERROR, USER_ERROR, CANCELLED = 0, 1, 2, 130


@contextmanager
def cancel_on_signals() -> Iterator[Cancel]:
    """Yield a `Cancel` that the first Ctrl-C or SIGTERM requests; the second one raises KeyboardInterrupt."""
    cancel = Cancel()

    def handle(number: int, _: FrameType | None) -> None:
        if cancel.requested:
            raise KeyboardInterrupt
        cancel.request()
        terminal.line("Stopping…")

    handled = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in handled]
    try:
        yield cancel
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def emit_json(value: dict[str, Any]) -> None:
    """Write one JSON object as the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def report_error(
    fact: Fact, *, as_json: bool, strategies: Sequence[StrategyForecast] = (), components: Collection[str] = ()
) -> int:
    """Report a user error and return the exit code.

    Args:
        components: those of the model that it is about, if known.
        strategies: the forecast of every memory strategy, if memory is short.
    """
    ladder = {"ladder": [strategy.to_json() for strategy in strategies]} if strategies else {}
    _report(fact, as_json=as_json, internal=False, more=ladder, words=Words(components))
    return USER_ERROR


def report_internal_error(error: str, *, as_json: bool) -> int:
    """Report an internal error with the log's path and return the exit code."""
    fact = Fact("internal_error", {"error": error.rstrip("."), "log": settings.load().log_file})
    _report(fact, as_json=as_json, internal=True, more={}, words=Words())
    return INTERNAL_ERROR


def _report(fact: Fact, *, as_json: bool, internal: bool, more: dict[str, Any], words: Words) -> None:
    text = render(fact, words)
    terminal.error(text.what, text.remedy)
    if as_json:
        error = {"what": text.what, "remedy": text.remedy, "defect": internal, **fact.model_dump(mode="json")}
        emit_json({"error": error, **more})
