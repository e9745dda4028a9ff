"""Stopping: a token that is set from anywhere and checked at each stage, step and decoded chunk."""

from threading import Event


class CancelledError(Exception):
    """Raised by `Cancel.check`. Not an error: the job ends with the `Cancelled` event."""


class PausedError(Exception):
    """Raised by `Cancel.check_pause`. Not an error: the run ends with the `Paused` event, and the job can go on."""


class Cancel:
    """A one-way switch, safe between threads. Whoever asks for both is taken to want the job cancelled."""

    def __init__(self) -> None:
        self._event = Event()
        self._pause = Event()

    def request(self) -> None:
        """Ask the job to stop at its next check."""
        self._event.set()

    def pause(self) -> None:
        """Ask the job to stop once the step that runs is done and kept."""
        self._pause.set()

    @property
    def requested(self) -> bool:
        """Whether somebody asked to cancel."""
        return self._event.is_set()

    @property
    def pausing(self) -> bool:
        """Whether somebody asked to pause."""
        return self._pause.is_set()

    def check(self) -> None:
        """Raise `CancelledError` if somebody asked to cancel."""
        if self._event.is_set():
            raise CancelledError

    def check_pause(self) -> None:
        """Raise `CancelledError` or `PausedError` if somebody asked: called where nothing is lost by it."""
        self.check()
        if self._pause.is_set():
            raise PausedError
