"""Print a result as a JSON object on a line, and append it to a file."""

import json
import os
import sys
from pathlib import Path
from typing import Any


def say(file: str, **found: Any) -> None:
    """Print a measurement and append it to a file in $OUT, by default in the current folder."""
    line = json.dumps(found)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    with (Path(os.environ.get("OUT", ".")) / file).open("a", encoding="utf-8") as results:
        results.write(line + "\n")
