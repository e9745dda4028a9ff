"""Cancel work on Ctrl-C or SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from runtime.cli import terminal
from runtime.core.cancel import Cancel


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
