"""The command line: one of two front ends for requests, plans and events."""

import os
import sys
from importlib.util import find_spec

from runtime.core.environment import (
    collect_garbage_less_often,
    limit_thread_spinning,
    restart_without_variables_of_python,
)
from runtime.core.foreign_variables import prepare


def main() -> None:
    """Run the command line and exit; if a package is missing, print how to install it."""
    _open_closed_streams()
    restart_without_variables_of_python()
    prepare()
    limit_thread_spinning()
    collect_garbage_less_often()
    # CUDA counts GPUs in the driver's order, which plans use.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Otherwise huggingface_hub 2 asks huggingface.co, also with a mirror, which programs count as agents
    # (utils/_detect_agent.py), and names them and PyTorch's version in each download's request.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # Warnings for developers would mix with the output, also in child processes.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        from runtime.cli.main import main as run
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and find_spec((error.name or "").partition(".")[0]) is None:
            _end(f"The package {error.name!r} is not installed for this Python.", "Start Tandem with")
        if not os.environ.get("PYTHONPATH"):
            raise
        _end(f"A module of PYTHONPATH may be in the way: {error!r}.", "Unset PYTHONPATH, or start Tandem with")
    run()


def _open_closed_streams() -> None:
    """Open standard streams that the caller has closed: files would take their numbers, and be written to by prints."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))


def _end(what: str, start_with: str) -> None:
    """Exit with a user error whose remedy is the installer."""
    sys.stderr.write(f"Error: {' '.join(what.split())}\n")
    sys.stderr.write(f"To do: {start_with} ./install.sh (install.bat on Windows), which has what Tandem needs.\n")
    sys.exit(2)
