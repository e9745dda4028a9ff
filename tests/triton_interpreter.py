"""Checks of Triton's kernels in Triton's interpreter, which computes them on a CPU, value by value."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_checks(checks: Path) -> None:
    """Run a file of tests in the interpreter, or skip without Triton."""
    pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
    # A process of its own: what is read in for the interpreter stays so.
    command = [sys.executable, "-m", "pytest", str(checks), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
