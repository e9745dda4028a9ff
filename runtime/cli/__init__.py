"""The command line: one face of the jobs."""

import os
import sys

from runtime.core.cpu_threads import let_waiting_threads_sleep


def main() -> None:
    """Run the command line and exit; without the packages it stands on, say how to get them."""
    let_waiting_threads_sleep()
    # So that CUDA counts the GPUs as the driver does, from which plans are made.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # What the libraries warn developers of would stand between what people read, in all processes.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        from runtime.cli.main import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"Error: The package {error.name!r} is not installed for this Python.\n")
        sys.stderr.write("To do: Start Tandem with ./install.sh (install.bat on Windows), which installs it.\n")
        sys.exit(2)
    run()
