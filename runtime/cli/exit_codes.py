"""How a command ends: an exit code, two lines for people, one JSON object for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.estimates import StrategyForecast

DONE, DEFECT, USER_ERROR, CANCELLED = 0, 1, 2, 130


def emit_json(value: dict[str, Any]) -> None:
    """Write one JSON object as the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def refuse(what: str, remedy: str, *, as_json: bool, strategies: Sequence[StrategyForecast] = ()) -> int:
    """Say what the user can mend, programs also the ways there are where memory is short; return the exit code."""
    terminal.error(what, remedy)
    if as_json:
        ways = {"ladder": [strategy.to_json() for strategy in strategies]} if strategies else {}
        emit_json({"error": {"what": what, "remedy": remedy, "defect": False}} | ways)
    return USER_ERROR


def defect(what: str, *, as_json: bool) -> int:
    """Say that the fault is ours, and where the details are; return the exit code."""
    remedy = f"The details are in {settings.load().log_file}."
    terminal.error(what, remedy)
    if as_json:
        emit_json({"error": {"what": what, "remedy": remedy, "defect": True}})
    return DEFECT
