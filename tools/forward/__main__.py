"""Measure single forward passes: `python -m tools.forward [--config "NAME: FLAGS"]… [the flags of generate]`."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence

from runtime.bench import result_files
from runtime.cli import exit_codes, terminal
from runtime.cli.bench import DEFAULT_RUNS, DEFAULT_WARMUP, PROMPT, SEED, read_configurations
from runtime.cli.exit_codes import cancel_on_signals
from runtime.cli.flags import flags_in
from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from tools.forward.measure import HEADINGS, PARTS, Forward, ForwardSetup, notes, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, save forward.json and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.forward",
        allow_abbrev=False,
        description="Measure one pass of a transformer and one decode in several configurations. Flags of `generate` "
        "apply to all configurations.",
    )
    parser.add_argument("--config", action="append", metavar='"NAME: FLAGS"', help="a configuration; repeatable")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable (default: transformer, vae)")
    parser.add_argument("--random", action="store_true", help="random weights; the model need not be installed")
    parser.add_argument("--rate", type=_rate, metavar="TFLOPS", help="of the device, for a lower bound of the time")
    parser.add_argument("--no-exact", action="store_true", help="without errors against float32")
    parser.add_argument("--no-baseline", action="store_true", help="without diffusers' own module")
    parser.add_argument(
        "--runs", type=_count(1), default=DEFAULT_RUNS, metavar="N", help=f"timed passes (default: {DEFAULT_RUNS})"
    )
    parser.add_argument(
        "--warmup", type=_count(0), default=DEFAULT_WARMUP, metavar="N", help=f"before (default: {DEFAULT_WARMUP})"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for forward.json (default: a new one in the cache folder)")
    given, others = parser.parse_known_args(arguments)
    try:
        loaded, machine = settings.load(), probe()
        common = {"prompt": PROMPT, "seed": SEED, **flags_in(shlex.join(others))}
        configurations = read_configurations(common, given.config or ["as planned:"])
        setup = ForwardSetup(
            machine=machine,
            engines=EngineService.from_settings(loaded, machine),
            weights_dir=loaded.weights_dir,
            parts=tuple(dict.fromkeys(given.part or ForwardSetup.parts)),
            random=given.random,
            runs=given.runs,
            warmup=given.warmup,
            tera_operations=given.rate,
            exact=not given.no_exact,
            baseline=not given.no_baseline,
        )
        target = result_files.new_folder(loaded.cache_dir, given.out) / "forward.json"
        forward = Forward(
            setup, configurations, terminal.line, lambda measured: result_files.write_json(target, measured.to_json())
        )
        with cancel_on_signals() as cancel:
            forward.measure(cancel)
    except TandemError as error:
        parser.error(f"{error.what} {error.remedy}")
    except ValueError as error:
        parser.error(str(error))
    result = forward.to_json()
    terminal.table(HEADINGS, rows(result))
    for note in notes(result):
        terminal.result(note)
    terminal.result(f"Saved {target}")
    if forward.cancelled:
        return exit_codes.CANCELLED
    return exit_codes.DONE if any(one["stages"] for one in result["configurations"]) else exit_codes.USER_ERROR


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError("a positive number such as 790 is needed")
    return rate


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed")
        return int(text)

    return count


if __name__ == "__main__":
    sys.exit(main())
