"""Compare a forward pass of Wan2.2-A14B's transformer with other programs on the same device, in one run.

    python -m bench.peers [--size WxH …] [--frames N] [--lightx2v CHECKOUT] [--cache-dit [FOLDER]] [--only PEER …]
    python -m bench.peers --tiny                               tiny sizes, also on a CPU

PEER is of `diffusers`, `tandem`, `lightx2v`, and, with --cache-dit, `cache_dit` and `step_cache`, Tandem's own. Each
runs in a process of its own, so that what one imports and sets does not change another. Random weights of one expert at
full size: speed does not depend on their values. Each is measured with its fastest exact settings, its first pass of
each size left out:

    diffusers    as its pipelines run it, not compiled
    tandem       the passes of a job: compiled, in bfloat16, in FP8, and in FP8 with attention in FP8
    lightx2v     its own transformer from a checkout, with folders `lightx2v` and `lightx2v_platform`; it needs loguru,
                 einops and gguf. Compiled, with the fastest attention that is installed, in bfloat16 and FP8
    cache_dit    on diffusers, compiled, in a loop of --steps steps of one pass, of the first size; FOLDER has the
                 package, if it is not installed
    step_cache   the same loop with Tandem's step caches, compiled

Prints each measurement as a JSON line, and a table in Markdown at the end. No measurement starts after --seconds, and a
part that fails is reported with its error.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.peers.case import Case

ROOT = Path(__file__).parents[2]
PEERS = ("diffusers", "tandem", "lightx2v", "cache_dit", "step_cache")
PACKAGES = ("torch", "diffusers", "triton", "torchao", "flash-attn-4", "nvidia-cudnn-frontend", "cache-dit")
# How long a process may take to end after the last measurement has begun.
GRACE_SECONDS = 90.0


def main() -> None:
    """Run every peer, print the table."""
    arguments = _arguments()
    ends = time.time() + arguments.seconds
    rows: list[dict[str, Any]] = []
    for peer in _peers(arguments):
        case = Case(
            sizes=[(64, 48)] if arguments.tiny else arguments.size,
            frames=5 if arguments.tiny else arguments.frames,
            steps=arguments.steps,
            tiny=arguments.tiny,
            device=arguments.device,
            ends=ends,
            checkout=str(arguments.lightx2v or ""),
        )
        rows += _run(peer, case, arguments.cache_dit)
    _write(table(rows, _heading(arguments)))


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=_size, nargs="+", default=[(832, 480)], metavar="WxH")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--steps", type=int, default=40, help="of the loops of cache_dit and step_cache")
    parser.add_argument("--lightx2v", type=Path, metavar="CHECKOUT")
    parser.add_argument("--cache-dit", nargs="?", const="", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="PEER")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--device", default="cuda:0", help="cpu with --tiny")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def _peers(arguments: argparse.Namespace) -> list[str]:
    given = {"lightx2v": arguments.lightx2v is not None}
    given |= dict.fromkeys(("cache_dit", "step_cache"), arguments.cache_dit is not None)
    return [peer for peer in PEERS if given.get(peer, True) and (not arguments.only or peer in arguments.only)]


def _run(peer: str, case: Case, cache_dit: str | None) -> list[dict[str, Any]]:
    """Run one peer in a process of its own; return its measurements, or its error."""
    folders = [cache_dit] if peer == "cache_dit" and cache_dit else []
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"bench.peers.{peer}", case.to_json()]
    rows: list[dict[str, Any]] = []
    left = max(case.ends - time.time(), 0.0) + GRACE_SECONDS
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
        printed, error = done.stdout, done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired as expired:
        printed, error = (expired.stdout or b"").decode(), "It did not end in time."
    for line in printed.splitlines():
        if line.startswith("{"):
            rows.append({"peer": peer, **json.loads(line)})
    if error:
        rows.append({"peer": peer, "variant": peer, "error": error.splitlines()[-1][:200]})
    for row in rows:
        _write(json.dumps(row))
    return rows


def _heading(arguments: argparse.Namespace) -> str:
    device = f"{platform.machine()} CPU"
    if arguments.device.startswith("cuda"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        device = found[0] if found else arguments.device
    versions = [f"Python {platform.python_version()}", *filter(None, map(_version, PACKAGES))]
    day = datetime.now(timezone.utc).date()
    model = "a tiny model" if arguments.tiny else f"Wan2.2-A14B, {arguments.frames} frames"
    return f"{device}, {day}. {model}. {', '.join(versions)}."


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def table(rows: list[dict[str, Any]], heading: str) -> str:
    """Return a table of measurements in Markdown: a row for each variant, a column for each size, then errors.

    Args:
        rows: each has `variant`, and `error`, or `size` and `seconds`; `note` is added to the variant.
    """
    sizes = list(dict.fromkeys(row["size"] for row in rows if "seconds" in row))
    variants = list(dict.fromkeys(_name(row) for row in rows if "seconds" in row))
    found = {(_name(row), row["size"]): row["seconds"] for row in rows if "seconds" in row}
    lines = [heading, "", f"| seconds a pass | {' | '.join(sizes)} |", f"| --- |{' ---: |' * len(sizes)}"]
    for name in variants:
        cells = (found.get((name, size)) for size in sizes)
        lines.append(f"| {name} | {' | '.join('' if cell is None else f'{cell:.3g}' for cell in cells)} |")
    failed = [row for row in rows if "error" in row]
    lines += ["", *(f"- {row['variant']} {row.get('size', '')}: {row['error']}" for row in failed)] if failed else []
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    return f"{row['variant']} ({row['note']})" if row.get("note") else str(row["variant"])


if __name__ == "__main__":
    main()
