"""TensorRT as a library: imported late, its log listened to, its failures told. Versions 8.6, 10 and 11.

Importing this module imports no TensorRT, so that the app runs on machines without it. What its versions do
differently is here, a small function each; everything else that we call is the same in all of them.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.core.errors import EngineError

REMEDY = "The part runs in PyTorch meanwhile; building the engine again mends most of these."
_INSTALL = "Run install.sh (install.bat on Windows) again: it installs requirements-gpu.txt where there is a GPU."
_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|insufficient memory|memory allocation|\bbad_alloc\b", re.IGNORECASE)
_KEPT_ERRORS = 20
_LONGEST_LINE = 400
_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}

Report = Callable[[str, float | None], None]


@dataclass
class Messages:
    """What TensorRT said while it was listened to: its last errors, and warnings for where there is no error."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def failure(self, what: str, remedy: str = REMEDY) -> Exception:
        """Return the exception for something that failed: out of memory is told apart, so that a job can free some.

        Args:
            what: a clause without a full stop; TensorRT's own words follow it.
        """
        said = (self.errors or self.warnings)[-1:]
        text = f"{what}: {one_line(said[0])}" if said else f"{what}; TensorRT did not say why."
        if any(_OUT_OF_MEMORY.search(line) for line in self.errors):
            return torch.OutOfMemoryError(text)
        return EngineError(text, remedy)


def one_line(text: str) -> str:
    """Return TensorRT's words, which may be pages, as one line that can be read."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_LINE else f"{words[:_LONGEST_LINE]}…"


def load() -> Any:
    """Import TensorRT.

    Raises:
        EngineError: if it is not installed, cannot be loaded, or there is no GPU that answers.
    """
    # Without one, `tensorrt.Runtime(...)` is an object around nothing, and its first use ends the process.
    if not torch.cuda.is_available():
        raise EngineError("TensorRT needs an NVIDIA GPU, and PyTorch sees none.", "Choose another backend.")
    try:
        import tensorrt
    except (ImportError, OSError) as error:
        raise EngineError(f"TensorRT cannot be loaded: {error}.", _INSTALL) from error
    return tensorrt


# TensorRT keeps the first logger that it is given for the whole process, so there is one, and listeners come and go.
_listeners: list[Callable[[str, str], None]] = []
_lock = threading.Lock()


@functools.cache
def logger() -> Any:
    """Return the process's one TensorRT logger."""
    trt = load()
    levels = {
        trt.ILogger.INTERNAL_ERROR: "error",
        trt.ILogger.ERROR: "error",
        trt.ILogger.WARNING: "warning",
        trt.ILogger.INFO: "info",
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined,misc] # its base is known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity)
            if level is None:
                return
            with _lock:
                listeners = list(_listeners)
            for listener in listeners:
                listener(level, msg.strip())

    return Logger()


@contextmanager
def listen(report: Report | None = None) -> Iterator[Messages]:
    """Collect what TensorRT says inside the block; `report` gets each line too."""
    messages = Messages()

    def hear(level: str, text: str) -> None:
        if level == "error":
            messages.errors = [*messages.errors, text][-_KEPT_ERRORS:]
        elif level == "warning":
            messages.warnings = [*messages.warnings, text][-_KEPT_ERRORS:]
        if report is not None:
            report(f"TensorRT: {text}" if level == "info" else f"TensorRT {level}: {text}", None)

    with _lock:
        _listeners.append(hear)
    try:
        yield messages
    finally:
        with _lock:
            _listeners.remove(hear)


def torch_dtype(trt_dtype: Any) -> torch.dtype:
    """Return torch's name of a `tensorrt.DataType`.

    Raises:
        EngineError: for one that torch has not.
    """
    if trt_dtype.name not in _TORCH_DTYPES:
        raise EngineError(f"The engine has tensors of type {trt_dtype.name}, which PyTorch has not.", REMEDY)
    return _TORCH_DTYPES[trt_dtype.name]


def create_context(trt: Any, engine: Any, device: torch.device) -> tuple[Any, torch.Tensor] | None:
    """Return an execution context and its working memory, or None if TensorRT made none.

    The memory is torch's, so that both draw on one pool.

    Raises:
        torch.OutOfMemoryError: if there is not enough.
    """
    since_10 = hasattr(trt, "ExecutionContextAllocationStrategy")
    if since_10:
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        size = engine.device_memory_size_v2
    else:
        context = engine.create_execution_context_without_device_memory()
        size = engine.device_memory_size
    if context is None:
        return None
    memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
    if since_10:
        context.set_device_memory(memory.data_ptr(), memory.numel())
    else:
        context.device_memory = memory.data_ptr()
    return context, memory
