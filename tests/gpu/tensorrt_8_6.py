"""Load TensorRT 8.6 in one process with torch, with lazy binding, since some of its libraries are missing."""

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch  # noqa: F401 - first, with its symbols for itself


def is_installed() -> bool:
    """Whether the installed TensorRT is one that needs this."""
    try:
        return version("tensorrt").startswith("8.")
    except PackageNotFoundError:
        return False


def load() -> None:
    """Import TensorRT with lazy binding; later imports return the same module."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    try:
        importlib.import_module("tensorrt")
    finally:
        sys.setdlopenflags(flags)
