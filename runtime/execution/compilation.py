"""Compilation by Inductor while a job runs, with a fallback to eager mode. Independent of models.

`cache_compiled_code_in` sets the disk cache, from which later processes load compiled code.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.core.disk_caches import COMPILED, evict, files_of
from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.locks import held
from runtime.upstream.torch import hit_recompile_limit, recompile_limit

# Called with the reason of a fallback.
OnDegraded = Callable[[Fact], None]

_LOCK = ".lock"
_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_FLASH4, _USE_FLASH4 = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
# Dynamo recompiles a function for each new size or memory layout. After this many, all compiled code is discarded.
_RECOMPILE_LIMIT = 32
# Signatures of the inputs that each function was compiled for in this process.
_COMPILED: dict[Callable[..., Any], set[Any]] = {}

logger = logging.getLogger(__name__)


def cache_compiled_code_in(folder: Path) -> None:
    """Cache compiled code in a folder, unless environment variables name another one.

    That of Inductor, of Triton, and of FlashAttention 4, which compiles its kernels for the GPU and reads the variables
    when it is imported. It fails if it cannot write to its folder: then its kernels are not cached.
    """
    os.environ.setdefault(_INDUCTOR, str(folder))
    os.environ.setdefault(_TRITON, str(folder / "triton"))
    kernels = folder / "flash4"
    with contextlib.suppress(OSError):
        kernels.mkdir(parents=True, exist_ok=True)
        if os.access(kernels, os.W_OK):
            os.environ.setdefault(_FLASH4, str(kernels))
            os.environ.setdefault(_USE_FLASH4, "1")


def limit_compiled_code(folder: Path, max_bytes: int = COMPILED.max_bytes) -> None:
    """Remove the least recently used files of the cache of compiled code beyond the limit.

    What is missing is compiled again. Does nothing if another process does it.
    """
    with contextlib.suppress(TimeoutError, OSError), held(folder / _LOCK, seconds=0):
        evict([entry for entry in files_of(folder) if entry.path.name != _LOCK], max_bytes)


class WithFallback:
    """Runs fast functions until one fails, then the plain ones.

    Args:
        failure: code of the `Fact` that reports a failure.
        on_degraded: called once with that fact.

    Attributes:
        seconds: time that compiling took: by how much the first call with each input signature took longer than the
            second. Until then the whole first call counts.
    """

    def __init__(self, failure: str, on_degraded: OnDegraded | None = None) -> None:
        self.seconds = 0.0
        self._first_seconds: dict[tuple[Callable[..., Any], Any], float] = {}
        self._failure = failure
        self._on_degraded = on_degraded
        self._failed = False

    def run(self, fast: Callable[..., Any], plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the result of `fast`, or of `plain` after a failure. Out-of-memory errors are raised."""
        if not self._failed:
            compiled, signature = _COMPILED.setdefault(plain, set()), _signature(arguments)
            started = time.perf_counter()
            try:
                result = fast(*arguments)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                self._report(error)
            else:
                self._count(plain, signature, time.perf_counter() - started, first=signature not in compiled)
                compiled.add(signature)
                return result
        return plain(*arguments)

    def _count(self, plain: Callable[..., Any], signature: Any, seconds: float, *, first: bool) -> None:
        if first:
            self._first_seconds[plain, signature] = seconds
            self.seconds += seconds
        else:
            self.seconds -= min(seconds, self._first_seconds.pop((plain, signature), 0.0))

    def _report(self, error: Exception) -> None:
        logger.warning("%s", self._failure, exc_info=error)
        self._failed = True
        if self._on_degraded is not None:
            self._on_degraded(Fact(self._failure, {"error": f"{type(error).__name__}: {first_line(error)}"}))


class CompiledStep(WithFallback):
    """A function of modules and tensors, compiled for each set of shapes, without graph breaks.

    Args:
        function: must not modify its arguments.
        on_degraded: called once if compilation fails; the function runs uncompiled from then on.
    """

    def __init__(self, function: Callable[..., Any], on_degraded: OnDegraded | None = None) -> None:
        super().__init__("execution.compilation_failed", on_degraded)
        self._function = function
        # By default, PyTorch 2.11 measures kernels of reductions in each process, although the chosen one is cached.
        # Compiling from the cache takes 1.1 s without that, 2.7 s with it (H100); steps take as long.
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False, options={"dynamic_scale_rblock": False})

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of the function."""
        return self.run(self._run, self._function, arguments)

    def _run(self, *arguments: Any) -> Any:
        try:
            with recompile_limit(_RECOMPILE_LIMIT):
                return self._compiled(*arguments)
        except Exception as error:
            if not hit_recompile_limit(error):
                raise
        discard_compiled_code()
        return self._compiled(*arguments)


def discard_compiled_code() -> None:
    """Discard this process's compiled code; the cache on disk stays."""
    torch.compiler.reset()
    for signatures in _COMPILED.values():
        signatures.clear()


def _signature(arguments: Any) -> Any:
    """Return what compiled code depends on: shapes, dtypes, devices, numbers, and of a block the attention kernel."""
    if isinstance(arguments, torch.Tensor):
        return (tuple(arguments.shape), arguments.dtype, arguments.device)
    if isinstance(arguments, tuple | list):
        return tuple(map(_signature, arguments))
    if isinstance(arguments, int):
        return arguments
    return type(arguments), getattr(arguments, "attend", None)
