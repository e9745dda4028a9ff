"""How a command ends: exit codes, errors as two lines of text, and one JSON object for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.estimates import StrategyForecast
from runtime.core.facts import Fact, Text, render

DONE, INTERNAL_ERROR, USER_ERROR, CANCELLED = 0, 1, 2, 130


def emit_json(value: dict[str, Any]) -> None:
    """Write one JSON object as the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def report_error(fact: Fact, *, as_json: bool, strategies: Sequence[StrategyForecast] = ()) -> int:
    """Report a user error and return the exit code.

    Args:
        strategies: those that there are, if memory is short.
    """
    text = render(fact)
    terminal.error(text.what, text.remedy)
    if as_json:
        ladder = {"ladder": [strategy.to_json() for strategy in strategies]} if strategies else {}
        emit_json({"error": _error_json(fact, text, internal=False), **ladder})
    return USER_ERROR


def report_internal_error(error: str, *, as_json: bool) -> int:
    """Report an internal error with the log's path and return the exit code."""
    fact = Fact("internal_error", {"error": error.rstrip("."), "log": settings.load().log_file})
    text = render(fact)
    terminal.error(text.what, text.remedy)
    if as_json:
        emit_json({"error": _error_json(fact, text, internal=True)})
    return INTERNAL_ERROR


def _error_json(fact: Fact, text: Text, *, internal: bool) -> dict[str, Any]:
    stated = fact.model_dump(mode="json")
    return {"what": text.what, "remedy": text.remedy, "defect": internal, **stated}
