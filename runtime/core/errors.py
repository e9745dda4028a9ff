"""Errors that users can fix.

    TandemError                 carries a fact: a code and data
    ├── InvalidRequestError     a value that was asked for; `field` names it
    ├── ModelError              a model folder that is missing, damaged or of another family
    ├── OutputError             a file or folder that cannot be written, a disk that is full
    ├── SettingsError           a flag, environment variable or settings file
    ├── MachineError            something this machine lacks: memory, ffmpeg, a free port
    │   ├── MemoryShortError    no way to hold the weights fits; `ladder` tells of each what it takes
    │   └── GroupError          of several GPUs one does not do its part any more
    ├── EngineError             an engine that cannot be built, is damaged or does not run
    ├── LimitError              what a visitor of a share link may not do now
    ├── CheckpointError         a checkpoint that cannot be written, or not be used
    ├── DownloadError           a model that a hub does not give, gives wrong, or that cannot be kept
    ├── BadResultError          the model gave NaN or Inf, or a clip that shows nothing
    └── StoreError              a job that is not there, or a job store that cannot be read or written

Every TandemError is a user error and ends with exit code 2. Any other exception is an internal error and ends with exit
code 1. Cancellation is neither: see `cancel.CancelledError`.
"""

import errno
from collections.abc import Sequence
from typing import Any

from runtime.core.estimates import StrategyForecast
from runtime.core.facts import Fact, render


class TandemError(Exception):
    """Base of all errors that the user can fix: a code from `core.messages`, and data.

    Transitional: with two positional arguments they are the text itself, what is wrong and what to do.
    """

    def __init__(self, code: str, remedy: str | None = None, /, **data: Any) -> None:
        super().__init__(code)
        self.fact = Fact(code, data) if remedy is None else Fact("text", {"what": code, "remedy": remedy})

    @property
    def code(self) -> str:
        """What is wrong, such as "model.folder_missing"."""
        return self.fact.code

    @property
    def data(self) -> dict[str, Any]:
        """The values that belong to the code."""
        return self.fact.data

    @property
    def what(self) -> str:
        """One line that says what is wrong, in the words of the command line."""
        return render(self.fact).what

    @property
    def remedy(self) -> str:
        """One line that says what to do about it, in the words of the command line."""
        return render(self.fact).remedy

    def __str__(self) -> str:
        """Return what is wrong, for logs."""
        return self.what


class InvalidRequestError(TandemError):
    """A requested value that is not valid; `field` is its name in `GenerationRequest`."""

    def __init__(self, field: str, code: str, remedy: str | None = None, /, **data: Any) -> None:
        super().__init__(code, remedy, **{"field": field, **data})
        self.field = field


class ModelError(TandemError):
    """A model folder that is missing, damaged or of another family."""


class OutputError(TandemError):
    """A file or folder that cannot be written."""


class SettingsError(TandemError):
    """A flag, environment variable or settings file that cannot be."""


class MachineError(TandemError):
    """Something this machine lacks."""


class MemoryShortError(MachineError):
    """No way to hold the weights fits, or none of those that were asked for.

    Args:
        ladder: every way there is, fastest first, none of them taken.
        where: which memory a model's parts run in: "video memory" or "memory".
    """

    def __init__(
        self,
        code: str,
        remedy: str | None = None,
        /,
        *,
        strategies: Sequence[StrategyForecast],
        where: str,
        **data: Any,
    ) -> None:
        super().__init__(code, remedy, where=where, **data)
        self.strategies = tuple(strategies)
        self.where = where


class GroupError(MachineError):
    """Of several GPUs that work on one job, the process of one died, broke or does not answer any more."""


class EngineError(TandemError):
    """An engine that cannot be built, is damaged or does not run; PyTorch can take over.

    `log` holds the last lines of its build's log, where there was one.
    """

    def __init__(self, code: str, remedy: str | None = None, /, *, log: str = "", **data: Any) -> None:
        super().__init__(code, remedy, **data)
        self.log = log


class LimitError(TandemError):
    """What a visitor of a share link may not do, or not now."""


class CheckpointError(TandemError):
    """A checkpoint that cannot be written or used; the job continues without it."""


class DownloadError(TandemError):
    """A model that a hub does not give or gives wrong, or a connection that breaks; what came whole is kept."""


class BadResultError(TandemError):
    """The model's own output is unusable: NaN, Inf, or a clip that shows nothing."""


class StoreError(TandemError):
    """A job that is not there or not in the state for it, or a job store that cannot be read or written."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, without its full stop; the error's name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def ram_ran_out(error: BaseException) -> bool:
    """Return whether an error says that this machine's memory (RAM) is full.

    PyTorch's allocator says so in a RuntimeError, mapping a file in an OSError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
