"""Tandem's entry point. No sub-command: the web app; else the command line."""

import sys
from pathlib import Path

# Missing with `python -P` and PYTHONSAFEPATH.
if str(Path(__file__).parent.resolve()) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent.resolve()))

from runtime.cli import main

if __name__ == "__main__":
    main()
