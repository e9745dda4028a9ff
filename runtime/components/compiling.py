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

from runtime.components.memory import ran_out
from runtime.core.errors import first_line

# Hears why something runs uncompiled, in a sentence.
Stumbled = Callable[[str], None]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# PyTorch compiles one function for so many different inputs; then it gives up.
_MOST_KINDS = 6
# What was compiled already, by function: PyTorch keeps that with the function, whoever compiled it.
_COMPILED: dict[Callable[..., Any], set[Any]] = {}

logger = logging.getLogger(__name__)


def keep_in(folder: Path) -> None:
    """Keep compiled code in a folder, unless the environment names one."""
    os.environ.setdefault(_VARIABLE, str(folder))


class CompiledStep:
    """A function of modules and tensors, compiled for each set of shapes, without a break.

    Attributes:
        seconds: spent on compiling so far.

    Args:
        function: must not write into what it is given.
        stumbled: hears once that it cannot be compiled; the function itself runs from then on.
        dynamic: compile once for all sizes.
    """

    def __init__(
        self, function: Callable[..., Any], stumbled: Stumbled | None = None, *, dynamic: bool = False
    ) -> None:
        self._function = function
        self._stumbled = stumbled
        self._compiled: Callable[..., Any] | None = torch.compile(function, fullgraph=True, dynamic=dynamic)
        self._dynamic = dynamic
        self._kinds = _COMPILED.setdefault(function, set())
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns."""
        if self._compiled is None:
            return self._function(*arguments)
        kind = _kind(arguments)
        if kind in self._kinds:
            return self._compiled(*arguments)
        if len(self._kinds) >= _MOST_KINDS and not self._dynamic:
            torch.compiler.reset()
            for kinds in _COMPILED.values():
                kinds.clear()
        started = time.perf_counter()
        try:
            result = self._compiled(*arguments)
        except Exception as error:
            if ran_out(error) is not None:
                raise
            logger.warning("A function could not be compiled", exc_info=error)
            self._compiled = None
            if self._stumbled is not None:
                self._stumbled(f"PyTorch could not compile it ({type(error).__name__}: {first_line(error)}).")
        else:
            self._kinds.add(kind)
            self.seconds += time.perf_counter() - started
            return result
        return self._function(*arguments)


def _kind(arguments: Any) -> Any:
    """Return what of the arguments another compilation would be needed for, roughly."""
    if isinstance(arguments, torch.Tensor):
        return (tuple(arguments.shape), arguments.dtype, arguments.device)
    if isinstance(arguments, tuple | list):
        return tuple(map(_kind, arguments))
    return type(arguments)
