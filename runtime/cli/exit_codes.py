"""How a command ends: exit codes, cancellation by signals, errors as two lines, and one JSON object for programs."""

import json
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.cli import terminal
from runtime.core import log, settings
from runtime.core.cancel import Cancel
from runtime.core.estimates import StrategyForecast
from runtime.core.facts import Fact, Words, render
from runtime.core.locks import remove_own_scratch_folders
from runtime.core.processes import kill_descendants

DONE, INTERNAL_ERROR, USER_ERROR, CANCELLED = 0, 1, 2, 130
# The reader of standard output has ended: the code of a program that SIGPIPE ends.
OUTPUT_CLOSED = 141
_SECONDS_TO_TERMINATE = 5.0


@contextmanager
def cancel_on_signals(hint: str = "") -> Iterator[Cancel]:
    """Yield a `Cancel` that the first Ctrl-C or SIGTERM requests.

    The second Ctrl-C ends the process at once, and so does SIGTERM if the body has not ended some seconds later. A
    thread does this, because Python runs no handler while a library computes in the main thread, which takes minutes
    for one step of a large clip on a CPU.

    Args:
        hint: printed when the process is ended at once.
    """
    cancel = Cancel()
    ended = threading.Event()
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)

    def end_now() -> None:
        terminal.end_live()
        terminal.line(f"Stopped at once.{hint}")
        kill_descendants(os.getpid())
        remove_own_scratch_folders()
        os._exit(CANCELLED)

    def end_late() -> None:
        if not ended.wait(_SECONDS_TO_TERMINATE):
            end_now()

    def watch() -> None:
        while numbers := ours.recv(1):
            if ended.is_set() or numbers[0] not in handled:
                continue
            if cancel.requested:
                end_now()
            cancel.request()
            if numbers[0] == signal.SIGTERM:
                terminal.line("Stopping…")
                threading.Thread(target=end_late, name="terminate", daemon=True).start()
            else:
                terminal.line("Stopping… Press Ctrl-C again to stop at once.")

    handled = (signal.SIGINT, signal.SIGTERM)
    wakeup = signal.set_wakeup_fd(pythons.fileno())
    before = [signal.signal(number, lambda *_: None) for number in handled]
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield cancel
    finally:
        ended.set()
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        pythons.close()
        watcher.join()
        ours.close()


def emit_json(value: dict[str, Any]) -> None:
    """Write one JSON object as the last line of standard output."""
    terminal.write(f"{json.dumps(value)}\n".encode())


def report_error(
    fact: Fact,
    *,
    as_json: bool,
    strategies: Sequence[StrategyForecast] = (),
    components: Collection[str] = (),
    hint: str = "",
) -> int:
    """Report a user error and return the exit code.

    Args:
        hint: added to the remedy.
        components: those of the model that it is about, if known.
        strategies: the forecast of every memory strategy, if memory is short.
    """
    ladder = {"ladder": [strategy.to_json() for strategy in strategies]} if strategies else {}
    _report(fact, as_json=as_json, internal=False, more=ladder, words=Words(components), hint=hint)
    return USER_ERROR


def report_internal_error(error: str, *, as_json: bool, hint: str = "") -> int:
    """Report an internal error with the log's path and return the exit code."""
    code = "internal_error" if log.is_written() else "internal_error_without_log"
    fact = Fact(code, {"error": error.rstrip("."), "log": settings.load().log_file})
    _report(fact, as_json=as_json, internal=True, more={}, words=Words(), hint=hint)
    return INTERNAL_ERROR


def _report(fact: Fact, *, as_json: bool, internal: bool, more: dict[str, Any], words: Words, hint: str) -> None:
    text = render(fact, words)
    remedy = f"{text.remedy}{hint}"
    terminal.error(text.what, remedy)
    if as_json:
        error = {"what": text.what, "remedy": remedy, "defect": internal, **fact.model_dump(mode="json")}
        emit_json({"error": error, **more})
