"""`bench` runs a benchmark, prints tables and saves the results as JSON and SVG; `bench compare` compares two."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.bench import compare as comparing
from runtime.bench import render, result_files
from runtime.bench.benchmark import SCHEMA, Bench, Setup
from runtime.bench.configurations import Configuration, check_names, named_flags, standard
from runtime.bench.recorder import UnwrittenHistory
from runtime.cli import exit_codes, terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.cli.flags import flags_in, request_from_flags
from runtime.core import settings
from runtime.core.errors import InvalidRequestError, SettingsError
from runtime.core.facts import Fact, shortened
from runtime.core.plan import PYTORCH
from runtime.core.request import ALL
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from runtime.models.requested import model_for
from runtime.planner.resolve import PlanningContext, resolve

PROMPT = "a red boat sails left on a calm sea at sunset"
# Fixed, so that results of different versions are comparable.
SEED = "1"
MAX_RUNS = 100
DEFAULT_RUNS, DEFAULT_WARMUP = 3, 1


def measure(
    flags: Mapping[str, Any],
    prompt: str | None,
    configs: Sequence[str],
    *,
    runs: str | None,
    warmup: str | None,
    out: str | None,
    keep_videos: bool,
    as_json: bool,
) -> int:
    """Run a benchmark and return the exit code.

    Args:
        flags: options for all configurations.
        prompt: of all clips; `PROMPT` by default.
        configs: "NAME: FLAGS" each; without any, the default configurations.
        runs, warmup: numbers of measured runs and of warm-up runs as text; `None` for the defaults.
        out: folder for the results; a new one in the cache folder by default.
        keep_videos: whether to keep one video of each configuration.
    """
    run_count = read_count("runs", runs, DEFAULT_RUNS, 1)
    warmup_count = read_count("warmup", warmup, DEFAULT_WARMUP, 0)
    if prompt is not None and prompt.lower().endswith(".json"):
        raise InvalidRequestError("prompt", "bench.prompt_is_file", prompt=shortened(prompt))
    common = {"prompt": PROMPT if prompt is None else prompt, "seed": SEED} | dict(flags)
    loaded, machine = settings.load(), probe()
    engines = EngineService.from_settings(loaded, machine)
    configurations = _configurations(common, configs, loaded, engines)
    folder = result_files.new_folder(loaded.cache_dir, out)
    setup = Setup(
        machine=machine,
        engines=engines,
        history=UnwrittenHistory(loaded.cache_dir, machine),
        weights_dir=loaded.weights_dir,
        folder=folder,
        runs=run_count,
        warmup=warmup_count,
        keep_videos=keep_videos,
    )
    # The results so far are saved after each run, in case the process is killed.
    bench = Bench.of(setup, configurations, terminal.line, lambda so_far: _save(folder, so_far.to_json()))
    with cancel_on_signals() as cancel:
        bench.measure(cancel)
    result = bench.to_json()
    _show(result, folder)
    # If nothing was measured, `_exit_code` prints the error as JSON.
    if as_json and any(configuration["stages"] for configuration in result["configurations"]):
        exit_codes.emit_json(result | {"files": [str(folder / "bench.json")]})
    return _exit_code(bench, as_json=as_json)


def compare(first: str, second: str) -> dict[str, Any]:
    """Compare two result files: print the differences and return them as JSON values."""
    before, after = (comparing.check_result(result_files.read_json(name), SCHEMA, name) for name in (first, second))
    comparison = comparing.compare(before, after)
    terminal.table(comparing.HEADINGS, comparison.rows())
    for message in comparison.left_out:
        terminal.warning(f"Not compared: {message}")
    terminal.result(f"Versions: {'; '.join(comparison.versions) or 'the same'}.")
    terminal.result(comparing.summary(comparison))
    return comparison.to_json()


def read_count(name: str, text: str | None, default: int, minimum: int) -> int:
    """Return the value of an option that takes a whole number.

    Raises:
        InvalidRequestError: if it is not a number from `minimum` to `MAX_RUNS`.
    """
    if text is None:
        return default
    if not text.isdecimal() or not minimum <= int(text) <= MAX_RUNS:
        raise InvalidRequestError(name, "bench.count_invalid", value=shortened(text), low=minimum, high=MAX_RUNS)
    return int(text)


def read_configurations(common: Mapping[str, Any], configs: Sequence[str]) -> list[Configuration]:
    """Return the configurations given by --config; their options override the common ones.

    Raises:
        InvalidRequestError: if a configuration is invalid; the error names it.
    """
    named = [named_flags(text) for text in configs]
    check_names([name for name, _ in named])
    configurations = []
    for name, text in named:
        try:
            request = request_from_flags({**common, **flags_in(text)})
        except InvalidRequestError as error:
            raise InvalidRequestError(
                error.field, "bench.configuration_invalid", configuration=name, cause=error.fact
            ) from error
        configurations.append(Configuration(name=name, flags=text, request=request))
    return configurations


def _configurations(
    common: Mapping[str, Any], configs: Sequence[str], loaded: Settings, engines: EngineService
) -> list[Configuration]:
    if configs:
        return read_configurations(common, configs)
    request = request_from_flags(common)
    if request.backends:
        raise SettingsError("bench.backend_without_configuration")
    spec = model_for(request, loaded.weights_dir, loaded.cache_dir, keep=False)
    unused_output = Path("none.mp4")
    plan = resolve(request.replace(backends={ALL: PYTORCH}), spec, PlanningContext(engines.machine, unused_output))
    return standard(request, plan, engines.offers(spec))


def _save(folder: Path, result: Mapping[str, Any]) -> None:
    result_files.write_json(folder / "bench.json", result)


def _show(result: Mapping[str, Any], folder: Path) -> None:
    terminal.table(render.TIMING_HEADINGS, render.timing_rows(result))
    terminal.table(render.QUALITY_HEADINGS, render.quality_rows(result))
    for message in render.outcomes(result):
        terminal.warning(message)
    for message in render.notes(result):
        terminal.result(message)
    terminal.result(f"Saved {folder / 'bench.json'}")


def _exit_code(bench: Bench, *, as_json: bool) -> int:
    if bench.cancelled:
        return exit_codes.CANCELLED
    if any(entry.runs for entry in bench.entries):
        return exit_codes.DONE
    failed = bench.entries[0]
    why = f"{failed.name}: {failed.why} {failed.remedy}".strip()
    return exit_codes.report_error(Fact("bench.nothing_measured", {"why": why}), as_json=as_json)
