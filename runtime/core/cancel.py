"""Cancelling: a token that is set from anywhere and checked at each stage, step and decoded chunk."""

from threading import Event


class CancelledError(Exception):
    """Raised by `Cancel.check`. Not an error: the job ends with the `Cancelled` event."""


class Cancel:
    """A one-way switch, safe between threads."""

    def __init__(self) -> None:
        self._event = Event()

    def request(self) -> None:
        """Ask the job to stop at its next check."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise `CancelledError` if somebody asked to stop."""
        if self._event.is_set():
            raise CancelledError
