"""The command line: one face of the jobs."""

from runtime.cli.main import main

__all__ = ["main"]
