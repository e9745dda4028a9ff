"""`python -m tests.fuzz [MINUTES] [SEED]`: run the fuzz test for a long time; the last line is JSON with the counts."""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.attack import attacking, round_of

_EXAMPLES = 25


def main() -> None:
    """Run rounds with new seeds until the time is over."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as folder, attacking(Path(folder)) as (attack, clients):
        end = time.monotonic() + 60 * minutes
        first = seed
        while time.monotonic() < end:
            round_of(attack, clients, _EXAMPLES, seed)
            seed += 1
            sys.stderr.write(f"seed {seed - 1}: {sum(attack.sent.values())} requests, {dict(attack.statuses)}\n")
        counts = {
            "seeds": [first, seed - 1],
            "requests": sum(attack.sent.values()),
            "by kind": dict(attack.sent),
            "by status": dict(sorted(attack.statuses.items())),
            "let in": dict(sorted(attack.jobs.items())),
            "slowest first byte, s": round(attack.slowest, 2),
        }
    sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
