"""Errors that users can fix.

    TandemError                 carries a fact: a code and data
    ├── InvalidRequestError     a value that was asked for; `field` names it
    ├── ModelError              a model folder that is missing, damaged or of another family
    ├── OutputError             a file or folder that cannot be written, a disk that is full
    ├── SettingsError           a flag, environment variable or settings file
    ├── MachineError            something this machine lacks: memory, ffmpeg, a free port
    │   ├── MemoryShortError    no memory strategy fits; `strategies` has the forecast of each
    │   ├── DeviceLostError     the CUDA context of a process is broken: only a new process can use the GPU
    │   └── GroupError          the process of one of several GPUs failed
    ├── EngineError             an engine that cannot be built, is damaged or does not run
    ├── LimitError              an action that visitors of a share link may not take, or not now
    ├── CheckpointError         a checkpoint that cannot be written or used
    ├── DownloadError           a model that cannot be downloaded, verified or stored
    ├── BadResultError          the model returned NaN or Inf, or the clip is degenerate
    └── StoreError              a job that does not exist, or a job store that cannot be read or written

Every TandemError is a user error and ends with exit code 2. Any other exception is an internal error and ends with exit
code 1. Cancellation is neither: see `cancel.CancelledError`.
"""

import errno
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from runtime.core.estimates import StrategyForecast
from runtime.core.facts import Fact, render

# The code of every `DeviceLostError`.
DEVICE_LOST = "execution.device_lost"
# The codes of errors of a video that does not fit on its disk.
DISK_FULL = frozenset({"video.disk_full", "video.disk_too_small"})
# The codes of errors of a job store that can be used again later, as it is.
STORE_UNAVAILABLE = frozenset(
    {"queue.store_locked", "queue.store_disk_full", "queue.store_read_only", "queue.store_deleted"}
)
# The codes of errors of a model's files. A job fails again until they are replaced, so that no resume is offered.
MODEL_UNUSABLE = frozenset(
    f"model.{name}"
    for name in (
        "component_incomplete",
        "component_unloadable",
        "part_unloadable",
        "scale_missing",
        "scale_not_finite",
        "scheduler_unknown",
        "tensor_missing",
        "tokenizer_missing",
    )
)
# Texts of plain RuntimeErrors of CUDA and its libraries, which have no type of their own.
_VRAM_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# CUDA's error when the capture of a graph ends in which a call had failed.
_FAILED_CAPTURE = "previous error during capture"


class TandemError(Exception):
    """Base of all errors that the user can fix: a code from `core.messages`, and data."""

    def __init__(self, code: str, /, **data: Any) -> None:
        super().__init__(code)
        self.fact = Fact(code, data)

    @property
    def code(self) -> str:
        """Code of the fact, such as "model.folder_missing"."""
        return self.fact.code

    @property
    def data(self) -> dict[str, Any]:
        """Data of the fact."""
        return self.fact.data

    @property
    def what(self) -> str:
        """One line that describes the error, in the words of the command line."""
        return render(self.fact).what

    @property
    def remedy(self) -> str:
        """One line that describes the remedy, in the words of the command line."""
        return render(self.fact).remedy

    def __str__(self) -> str:
        """Return the description, for logs."""
        return self.what


class InvalidRequestError(TandemError):
    """A requested value that is not valid; `field` is its name in `GenerationRequest`."""

    def __init__(self, field: str, code: str, /, **data: Any) -> None:
        super().__init__(code, **{"field": field, **data})
        self.field = field


class ModelError(TandemError):
    """A model folder that is missing, damaged or of another family."""


class OutputError(TandemError):
    """A file or folder that cannot be written."""


class SettingsError(TandemError):
    """An invalid flag, environment variable or settings file."""


class MachineError(TandemError):
    """Something that this machine lacks."""


class MemoryShortError(MachineError):
    """No memory strategy fits, or none of those that the request allows.

    Args:
        strategies: the forecast of every strategy, fastest first.
        where: the memory that components run in: "video memory" or "memory".
    """

    def __init__(self, code: str, /, *, strategies: Sequence[StrategyForecast], where: str, **data: Any) -> None:
        super().__init__(code, where=where, **data)
        self.strategies = tuple(strategies)
        self.where = where


class DeviceLostError(MachineError):
    """The CUDA context of a process is broken (a sticky error, such as an illegal memory access).

    Worker processes end then, and their job resumes in a new one.
    """

    def __init__(self, code: str = DEVICE_LOST, /, **data: Any) -> None:
        super().__init__(code, **data)


class GroupError(MachineError):
    """A job runs on several GPUs and the process of one of them ended, failed or stopped answering."""


class EngineError(TandemError):
    """An engine that cannot be built, is damaged or does not run; PyTorch can take over.

    `log` holds the last lines of the build log, if there is one.
    """

    def __init__(self, code: str, /, *, log: str = "", **data: Any) -> None:
        super().__init__(code, **data)
        self.log = log


class LimitError(TandemError):
    """An action that visitors of a share link may not take, or not now."""


class EnhancerError(TandemError):
    """A chat model or server that does not enhance a prompt; the prompt stays as it is."""


class CheckpointError(TandemError):
    """A checkpoint that cannot be written or used; the job continues without it."""


class DownloadError(TandemError):
    """A model that cannot be downloaded, verified or stored; complete files are kept."""


class BadResultError(TandemError):
    """The model's output is unusable: NaN, Inf, or a degenerate clip."""


class StoreError(TandemError):
    """A job that does not exist or is in another state, or a job store that cannot be read or written."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, without its full stop; the name of its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def ran_out(error: BaseException) -> Literal["VRAM", "RAM"] | None:
    """Return the memory whose exhaustion caused an error: the GPU's, this machine's, or none.

    Libraries wrap such errors (torch.export in errors of its own), so the causes of an error count too; those of a
    `TandemError`, which states its own reason, do not. An error that was raised while another one was handled is not
    its consequence, unless it was raised as such (`raise … from`), or by the end of a CUDA graph's capture.
    """
    for cause in _causes(error):
        # By name, because this package does not import torch.
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(cause).__mro__):
            return "VRAM"
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in _VRAM_WORDS):
            return "VRAM"
        if ram_ran_out(cause):
            return "RAM"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then what caused it, the last cause last."""
    ids: set[int] = set()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        yield error
        if isinstance(error, TandemError):
            return
        error = error.__cause__ or (error.__context__ if _FAILED_CAPTURE in str(error) else None)


def ram_ran_out(error: BaseException) -> bool:
    """Return whether an error means that this machine's memory (RAM) is full.

    PyTorch's allocator raises a RuntimeError, mapping a file an OSError. oneDNN has one text for all failures to create
    a kernel; for a size and dtype that it supports, that is memory for the kernel's code.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return "DefaultCPUAllocator" in str(error) or str(error) == "could not create a primitive"
    return isinstance(error, MemoryError)
