"""`python -m tests.chaos [MINUTES] [SEED]`: 15 minutes with seed 1 by default; the last line is JSON.

Exits with 1 if something did not hold.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import problems, run


def main() -> None:
    """Run, and print what was found."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), minutes, seed)
    wrong = problems(found)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
