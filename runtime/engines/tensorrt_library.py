"""Imports TensorRT: one process-wide logger, errors as facts, and the differences between versions.

Supports TensorRT 8.6, 10 and 11, and TensorRT for RTX 1.7, whose Python API is that of TensorRT 10 and 11. Importing
this module imports neither, so that machines without them can run Tandem. Each difference between versions is one small
function here.
"""

import functools
import importlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line, ran_out
from runtime.core.facts import Fact, cut
from runtime.upstream.torch import cuda_failure

_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|insufficient memory|memory allocation|\bbad_alloc\b", re.IGNORECASE)
_MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx_bindings"}
# The beginning of the message in which TensorRT for RTX lists an engine's layers, one in a line, then a blank line.
_LAYERS = "Layers:\n"
_KEPT_MESSAGES = 20
_LONGEST_LINE = 400
_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "FP8": torch.float8_e4m3fn,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}

# Receives a line of TensorRT's log, and the fraction of the build that is done, where it is known.
ReportLine = Callable[[str, float | None], None]


@dataclass
class Messages:
    """The last errors and warnings that TensorRT logged, and the layers of an engine that TensorRT for RTX built."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layers: tuple[str, ...] = ()

    def failure(self, code: str, **data: Any) -> Exception:
        """Return the exception for a failed call: `torch.OutOfMemoryError` if memory ran out, else an `EngineError`.

        Args:
            code: of the fact; its data gets TensorRT's last message as `detail`.
        """
        last = (self.errors or self.warnings)[-1:]
        error = EngineError(code, detail=one_line(last[0]) if last else Fact("engine.tensorrt_silent"), **data)
        if any(_OUT_OF_MEMORY.search(line) for line in self.errors):
            return torch.OutOfMemoryError(error.what)
        return error


def one_line(text: str) -> str:
    """Return a message of TensorRT, which may span pages, as one line of limited length."""
    joined = " ".join(text.split())
    return cut(joined, _LONGEST_LINE)


def load(library: str = "tensorrt", *, needs_gpu: bool = True) -> Any:
    """Import TensorRT or TensorRT for RTX.

    Args:
        library: "tensorrt" or "tensorrt_rtx".
        needs_gpu: whether it is used for more than building with TensorRT for RTX.

    Raises:
        EngineError: if it is not installed, cannot be loaded, or there is no usable GPU.
    """
    # Without a GPU `tensorrt.Runtime(...)` wraps a null pointer, and using it ends the process.
    if needs_gpu and not torch.cuda.is_available():
        raise EngineError("engine.tensorrt_without_gpu")
    try:
        return importlib.import_module(_MODULES[library])
    except (ImportError, OSError) as error:
        raise EngineError("engine.tensorrt_not_loadable", error=str(error)) from error


# TensorRT keeps the first logger that it is given for the whole process: there is one logger, and listeners register.
_listeners: list[Callable[[str, str], None]] = []
_lock = threading.Lock()


@functools.cache
def logger(library: str = "tensorrt") -> Any:
    """Return the logger of this process for a library."""
    trt = load(library, needs_gpu=False)
    levels = {
        trt.ILogger.INTERNAL_ERROR: "error",
        trt.ILogger.ERROR: "error",
        trt.ILogger.WARNING: "warning",
        trt.ILogger.INFO: "info",
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined,misc] # the base class is known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            level = "layers" if msg.startswith(_LAYERS) else levels.get(severity)
            if level is None:
                return
            with _lock:
                listeners = list(_listeners)
            for listener in listeners:
                listener(level, msg.strip())

    return Logger()


@contextmanager
def listen(report: ReportLine | None = None) -> Iterator[Messages]:
    """Collect TensorRT's log messages within the block, and pass each line to `report`."""
    messages = Messages()

    def receive(level: str, text: str) -> None:
        if level == "error":
            messages.errors = [*messages.errors, text][-_KEPT_MESSAGES:]
        elif level == "warning":
            messages.warnings = [*messages.warnings, text][-_KEPT_MESSAGES:]
        elif level == "layers":
            messages.layers = tuple(text.partition("\n\n")[0].splitlines()[1:])
            return
        if report is not None:
            report(f"TensorRT: {text}" if level == "info" else f"TensorRT {level}: {text}", None)

    with _lock:
        _listeners.append(receive)
    try:
        yield messages
    finally:
        with _lock:
            _listeners.remove(receive)


def torch_dtype(trt_dtype: Any) -> torch.dtype:
    """Return the torch dtype of a `tensorrt.DataType`.

    Raises:
        EngineError: if torch has no such dtype.
    """
    if trt_dtype.name not in _TORCH_DTYPES:
        raise EngineError("engine.tensorrt_unknown_dtype", dtype=trt_dtype.name)
    return _TORCH_DTYPES[trt_dtype.name]


@contextmanager
def failures(device: torch.device, code: str = "engine.tensorrt_not_run") -> Iterator[None]:
    """Raise what TensorRT, CUDA or PyTorch raise in the block as `EngineError` or `torch.OutOfMemoryError`.

    An error after which this process cannot use the GPU any more is raised as PyTorch's own, whatever TensorRT makes of
    it: only a new process helps.

    Args:
        code: of the fact, whose data has the error's first line as `detail`.
    """
    try:
        yield
    except Exception as error:  # bindings raise errors of any type
        # Asking the device would spoil the capture of a CUDA graph.
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call] # torch's own
        lost = None if capturing else cuda_failure(device)
        if lost is not None:
            raise lost from error
        if isinstance(error, EngineError | MemoryError | OSError | torch.OutOfMemoryError):
            raise
        if ran_out(error) == "VRAM":
            raise torch.OutOfMemoryError(first_line(error)) from error
        raise EngineError(code, detail=one_line(first_line(error))) from error


def create_context(trt: Any, engine: Any, runtime_config: Any = None) -> Any | None:
    """Return an execution context without working memory, or None if TensorRT cannot create one.

    Args:
        runtime_config: an `IRuntimeConfig`, for TensorRT for RTX.
    """
    if hasattr(trt, "ExecutionContextAllocationStrategy"):
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if runtime_config is None:
            return engine.create_execution_context(strategy)
        runtime_config.set_execution_context_allocation_strategy(strategy)
        return engine.create_execution_context(runtime_config)
    return engine.create_execution_context_without_device_memory()


def context_bytes(engine: Any) -> int:
    """Return the working memory that a context of an engine needs, for any of its shapes."""
    if hasattr(engine, "device_memory_size_v2"):
        return int(engine.device_memory_size_v2)
    return int(engine.device_memory_size)


def set_context_memory(context: Any, memory: torch.Tensor) -> None:
    """Give an execution context its working memory, which the caller keeps."""
    if hasattr(context, "set_device_memory"):
        context.set_device_memory(memory.data_ptr(), memory.numel())
    else:
        context.device_memory = memory.data_ptr()


# The working memory of each GPU; it is freed with the last session that uses it.
_context_memory: "weakref.WeakValueDictionary[torch.device, torch.Tensor]" = weakref.WeakValueDictionary()


def context_memory(device: torch.device, size: int) -> torch.Tensor:
    """Return working memory of at least `size` bytes that all contexts on a GPU share: only one of them runs at a time.

    It is a torch tensor, so that PyTorch and TensorRT share one memory pool. A larger one replaces it where needed; the
    earlier one is freed when no session references it; sessions with CUDA graphs keep theirs.

    Raises:
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """
    with _lock:
        memory = _context_memory.get(device)
        if memory is None or memory.numel() < size:
            memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            _context_memory[device] = memory
        return memory
