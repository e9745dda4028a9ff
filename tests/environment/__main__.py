"""Set each variable of the table alone, for hours; the last line is JSON with what refused and what failed.

python -m tests.environment [RUN...]      some of install, plan, serve, app, generate; all without arguments
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.environment.cases import ALONE, REFUSED, RUNS, TABLE, make_cache, runs_with


def main(chosen: list[str]) -> int:
    """Run the table; return the exit code."""
    results: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = make_cache(Path(folder))
        pairs = [("", ""), *TABLE.items(), *REFUSED.items()]
        pairs += [(name, value) for name, more in ALONE.items() for value in more]
        for name, value in pairs:
            values = {name: value} if name else {}
            for run in [run for run in runs_with(name) if run in chosen]:
                result = RUNS[run](cache_dir, values)
                sys.stderr.write(f"{name or '(nothing set)'} {value!r} {run}: {result}\n")
                if result != "works":
                    results.setdefault(f"{name}={value}", {})[run] = result
    sys.stdout.write(f"{json.dumps(results)}\n")
    return int(any(result != "refuses" for runs in results.values() for result in runs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(RUNS)))
