"""Functions compiled by Inductor while a job runs, with a fallback to eager mode. Independent of models.

Compiled code is cached on disk for the next process: `cache_compiled_code_in`.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import first_line
from runtime.core.facts import Fact
from runtime.execution.memory import ran_out
from runtime.upstream.torch import hit_recompile_limit, recompile_limit

# Called with the reason of a fallback.
OnDegraded = Callable[[Fact], None]

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# Limit of recompilations, for other sizes or memory layouts, after which the cache is reset.
_LIMIT = 32
# Kinds of inputs that code was compiled for, by function.
_COMPILED: dict[Callable[..., Any], set[Any]] = {}

logger = logging.getLogger(__name__)


def cache_compiled_code_in(folder: Path) -> None:
    """Cache compiled code of Inductor and Triton in a folder, unless environment variables name another one."""
    os.environ.setdefault(_INDUCTOR, str(folder))
    os.environ.setdefault(_TRITON, str(folder / "triton"))


class WithFallback:
    """Runs a fast function, and the plain one after the fast one has failed.

    Attributes:
        seconds: total time of the first calls for each kind of inputs, which include compilation.

    Args:
        failure: code of the reason for a fallback.
        on_degraded: called once with the reason.
    """

    def __init__(self, failure: str, on_degraded: OnDegraded | None = None) -> None:
        self.seconds = 0.0
        self._failure = failure
        self._on_degraded = on_degraded
        self._failed = False

    def run(self, fast: Callable[..., Any], plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the result of `fast`, or of `plain` after a failure."""
        if not self._failed:
            kinds, kind = _COMPILED.setdefault(plain, set()), _kind(arguments)
            started = time.perf_counter()
            try:
                result = fast(*arguments)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                self._report(error)
            else:
                if kind not in kinds:
                    kinds.add(kind)
                    self.seconds += time.perf_counter() - started
                return result
        return plain(*arguments)

    def _report(self, error: Exception) -> None:
        logger.warning("%s", self._failure, exc_info=error)
        self._failed = True
        if self._on_degraded is not None:
            self._on_degraded(Fact(self._failure, {"error": f"{type(error).__name__}: {first_line(error)}"}))


class CompiledStep(WithFallback):
    """A function of modules and tensors, compiled for each set of shapes, without graph breaks.

    Args:
        function: must not modify its arguments.
        on_degraded: called once if it cannot be compiled; the function then runs uncompiled.
    """

    def __init__(self, function: Callable[..., Any], on_degraded: OnDegraded | None = None) -> None:
        super().__init__("execution.compilation_failed", on_degraded)
        self._function = function
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of the function."""
        return self.run(self._run, self._function, arguments)

    def _run(self, *arguments: Any) -> Any:
        try:
            with recompile_limit(_LIMIT):
                return self._compiled(*arguments)
        except Exception as error:
            if not hit_recompile_limit(error):
                raise
        forget_all()
        return self._compiled(*arguments)


def forget_all() -> None:
    """Discard this process's compiled code; the cache on disk stays."""
    torch.compiler.reset()
    for kinds in _COMPILED.values():
        kinds.clear()


def _kind(arguments: Any) -> Any:
    """Return the properties of the arguments that compiled code depends on, approximately."""
    if isinstance(arguments, torch.Tensor):
        return (tuple(arguments.shape), arguments.dtype, arguments.device)
    if isinstance(arguments, tuple | list):
        return tuple(map(_kind, arguments))
    return type(arguments)
