"""Functions compiled by Inductor while a job runs, and as they are where that fails. Knows nothing about models.

What is compiled is kept on disk, so that the next process only reads it: `keep_in`.
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

# Called with the reason why something runs uncompiled.
OnDegraded = Callable[[Fact], None]

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# So many kinds of inputs are compiled for before all is forgotten: sizes, and tensors that lie otherwise in memory.
_LIMIT = 32
# Kinds of inputs that were compiled for, by function: PyTorch keeps compiled code per function.
_COMPILED: dict[Callable[..., Any], set[Any]] = {}

logger = logging.getLogger(__name__)


def keep_in(folder: Path) -> None:
    """Keep compiled code in a folder, unless the environment names one: Inductor's, and kernels written for Triton."""
    os.environ.setdefault(_INDUCTOR, str(folder))
    os.environ.setdefault(_TRITON, str(folder / "triton"))


class WithFallback:
    """Computes something in a faster way, and in the plain one once that has failed.

    Attributes:
        seconds: that the first call of each kind in this process took: what is compiled starts in none.

    Args:
        failure: code of the reason.
        on_degraded: called once with it.
    """

    def __init__(self, failure: str, on_degraded: OnDegraded | None = None) -> None:
        self.seconds = 0.0
        self._failure = failure
        self._on_degraded = on_degraded
        self._gave_up = False

    def run(self, fast: Callable[..., Any], plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what `plain` returns."""
        if not self._gave_up:
            kinds, kind = _COMPILED.setdefault(plain, set()), _kind(arguments)
            started = time.perf_counter()
            try:
                result = fast(*arguments)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                self._give_up(error)
            else:
                if kind not in kinds:
                    kinds.add(kind)
                    self.seconds += time.perf_counter() - started
                return result
        return plain(*arguments)

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s", self._failure, exc_info=error)
        self._gave_up = True
        if self._on_degraded is not None:
            self._on_degraded(Fact(self._failure, {"error": f"{type(error).__name__}: {first_line(error)}"}))


class CompiledStep(WithFallback):
    """A function of modules and tensors, compiled for each set of shapes, without a break.

    Args:
        function: must not write into what it is given.
        on_degraded: called once if it cannot be compiled; the function itself runs from then on.
    """

    def __init__(self, function: Callable[..., Any], on_degraded: OnDegraded | None = None) -> None:
        super().__init__("execution.compilation_failed", on_degraded)
        self._function = function
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns."""
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
    """Let PyTorch forget what it compiled in this process; what is on disk stays."""
    torch.compiler.reset()
    for kinds in _COMPILED.values():
        kinds.clear()


def _kind(arguments: Any) -> Any:
    """Return what of the arguments another compilation would be needed for, roughly."""
    if isinstance(arguments, torch.Tensor):
        return (tuple(arguments.shape), arguments.dtype, arguments.device)
    if isinstance(arguments, tuple | list):
        return tuple(map(_kind, arguments))
    return type(arguments)
