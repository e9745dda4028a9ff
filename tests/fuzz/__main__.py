"""Run the fuzz tests for a long time; the last line is JSON with the counts.

python -m tests.fuzz [MINUTES] [SEED]         random requests against the running app
python -m tests.fuzz api [ROUNDS] [SEED]      random requests against the HTTP API
python -m tests.fuzz files [COUNT] [SEED]     damaged files
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import api
from tests.fuzz.attack import attacking, round_of
from tests.fuzz.files import reading

_EXAMPLES = 25


# Of each thousand files; a video takes longest, because ffmpeg reads it.
_SHARES = {"model": 150, "lora": 250, "engine": 200, "cache": 250, "job": 100, "video": 50}


def files(count: int, seed: int) -> None:
    """Read a number of damaged files, in rounds of a thousand with new seeds."""
    with tempfile.TemporaryDirectory() as folder, reading(Path(folder)) as reader:
        for number in range(seed, seed + -(-count // 1000)):
            for kind, share in _SHARES.items():
                reader.run(kind, share, number)
            sys.stderr.write(f"seed {number}: {dict(reader.found)}\n")
        counts = reader.summary()
    sys.stdout.write(f"{json.dumps(counts)}\n")


def http_api(rounds: int, seed: int) -> None:
    """Send rounds of random requests to the HTTP API."""
    with tempfile.TemporaryDirectory() as folder, api.attacking(Path(folder)) as attack:
        for number in range(seed, seed + rounds):
            api.round_of(attack, _EXAMPLES, number)
            api.odd_framing(attack, 4 * _EXAMPLES, number)
            sys.stderr.write(f"seed {number}: {dict(attack.statuses)}\n")
        api.every_route(attack)
        slow = api.slow_readers(attack)
    counts: dict[str, object] = {"by status": dict(sorted(attack.statuses.items()))}
    counts |= {"slowest first byte, s": round(attack.slowest, 2), "median beside slow readers, s": round(slow, 3)}
    sys.stdout.write(f"{json.dumps(counts)}\n")


def main() -> None:
    """Run rounds with new seeds until the time is over."""
    if sys.argv[1:2] == ["files"]:
        files(int(sys.argv[2]) if len(sys.argv) > 2 else 20_000, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
        return
    if sys.argv[1:2] == ["api"]:
        http_api(int(sys.argv[2]) if len(sys.argv) > 2 else 5, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
        return
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
