"""The command line: one of two front ends for requests, plans and events."""

import os
import sys

from runtime.core.environment import collect_garbage_less_often, limit_thread_spinning


def main() -> None:
    """Run the command line and exit; if a package is missing, print how to install it."""
    limit_thread_spinning()
    collect_garbage_less_often()
    # CUDA counts GPUs in the driver's order, which plans use.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Warnings for developers would mix with the output, also in child processes.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        from runtime.cli.main import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"Error: The package {error.name!r} is not installed for this Python.\n")
        sys.stderr.write("To do: Start Tandem with ./install.sh (install.bat on Windows), which installs it.\n")
        sys.exit(2)
    run()
