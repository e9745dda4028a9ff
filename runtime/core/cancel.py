"""Cancellation: a token that any thread may set, checked at each stage, step and decoded chunk."""

from threading import Event


def never() -> None:
    """Do nothing: the default of parameters that take `Cancel.check`."""


class CancelledError(Exception):
    """Raised by `Cancel.check`. Not an error: the job ends with the `Cancelled` event."""


class PausedError(Exception):
    """Raised by `Cancel.check_pause`. Not an error: the run ends with the `Paused` event and the job is resumable."""


class Cancel:
    """A thread-safe token to cancel or pause a job, which cannot be reset; cancelling takes precedence over pausing."""

    def __init__(self) -> None:
        self._event = Event()
        self._pause = Event()
        self._finish = Event()

    def request(self) -> None:
        """Ask the job to stop at its next check."""
        self._event.set()

    def pause(self) -> None:
        """Ask the job to stop after the current step, with a checkpoint."""
        self._pause.set()

    def finish_early(self) -> None:
        """Ask a job that makes a video in sections to end after the current one, with the video so far."""
        self._finish.set()

    @property
    def finishing(self) -> bool:
        """Whether `finish_early` was called."""
        return self._finish.is_set()

    @property
    def requested(self) -> bool:
        """Whether `request` was called."""
        return self._event.is_set()

    @property
    def pausing(self) -> bool:
        """Whether `pause` was called."""
        return self._pause.is_set()

    def check(self) -> None:
        """Raise `CancelledError` if `request` was called."""
        if self._event.is_set():
            raise CancelledError

    def check_pause(self) -> None:
        """Raise `CancelledError` or `PausedError` if requested; called where no work is lost."""
        self.check()
        if self._pause.is_set():
            raise PausedError
