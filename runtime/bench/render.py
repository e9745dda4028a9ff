"""A benchmark's result as tables of text; reads what `Bench.to_json` returns. No torch."""

from collections.abc import Mapping
from typing import Any

from runtime.core.facts import Fact
from runtime.core.units import counted, memory_size

Rows = list[tuple[str, ...]]
TIMING_HEADINGS = (
    "Configuration",
    "Total",
    "Prompt",
    "Denoise",
    "Step",
    "Decode",
    "Save",
    "First run",
    "Loading",
    "Build",
)
QUALITY_HEADINGS = ("Configuration", "VRAM", "GPU total", "RAM", "PSNR", "SSIM", "Repeats")
_STAGES = ("total", "encode", "denoise")
_LATER = ("decode", "mux")
_HUNDRED, _TEN, _TENTH = 100, 10, 0.1


def timing_rows(result: Mapping[str, Any]) -> Rows:
    """Return rows for `TIMING_HEADINGS`: median (minimum–maximum) seconds of every measured configuration."""
    rows: Rows = []
    for entry in result["configurations"]:
        if not entry["stages"]:
            continue
        stages, first = entry["stages"], entry["first"]
        cells = [spread_text(stages.get(name)) for name in _STAGES]
        cells += [spread_text(entry["step"]), *(spread_text(stages.get(name)) for name in _LATER)]
        early = [seconds_text(first[name]) if first else "" for name in ("wall", "load")]
        build = seconds_text(entry["build_seconds"]) if entry["build_seconds"] else built_before(entry)
        rows.append((entry["name"], *cells, *early, build))
    return rows


def quality_rows(result: Mapping[str, Any]) -> Rows:
    """Return rows for `QUALITY_HEADINGS`: peak memory, and similarity to the reference's clip."""
    rows: Rows = []
    for entry in result["configurations"]:
        if not entry["stages"]:
            continue
        if entry["name"] == result["reference"]:
            similarity: tuple[str, ...] = ("the reference", "")
        elif entry["quality"] is None:
            similarity = (entry["not_compared"] or "not compared", "")
        else:
            similarity = _similarity(entry["quality"])
        repeats = {True: "yes", False: "no", None: ""}[entry["repeats"]]
        memory = [_peak(entry["memory"][kind]) for kind in ("vram", "gpu", "ram")]
        rows.append((entry["name"], *memory, *similarity, repeats))
    return rows


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return lines that explain the tables."""
    floor = result["noise_floor"]
    if floor is None:
        noise = "It did not run twice, so there is no noise floor."
    elif floor["same"]:
        noise = "Two runs of it give the same frames, bit for bit."
    else:
        noise = f"Noise floor: two runs of it differ by {floor['psnr']:.1f} dB PSNR, SSIM {floor['ssim']:.4f}."
    how = "in turn, all loaded" if result["together"] else "in turn, each loaded for its run"
    lines = [f"{entry['name']}: {entry['runs_on']}." for entry in result["configurations"] if entry["stages"]]
    lines += [
        f"Reference: {result['reference']} ({result['reference_is']}). {noise}",
        f"Seconds: median (minimum–maximum) of {counted(result['runs'], 'run')} after "
        f"{counted(result['warmup'], 'warm-up run')}, {how}, "
        "without loading and building. VRAM: allocated by PyTorch; GPU total: with its reserve and engines; RAM: "
        "in addition to the memory of the process before.",
    ]
    if result["cancelled"]:
        lines.insert(0, str(Fact("bench.cancelled")))
    return lines


def outcomes(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each configuration that was not measured completely."""
    lines = []
    for entry in result["configurations"]:
        if entry["state"] != "measured":
            runs = f", after {entry['runs']} runs" if entry["runs"] else ""
            lines.append(f"{entry['name']}: {state_text(entry)}{runs}. {entry['remedy']}".rstrip())
    return lines


def state_text(entry: Mapping[str, Any]) -> str:
    """Return the state of a configuration and the reason for it."""
    if entry["state"] == "waiting":
        return "not measured"
    why = entry["why"].rstrip(".")
    return f"{entry['state']}: {why}" if entry["state"] != "same" else why


def built_before(entry: Mapping[str, Any]) -> str:
    """Return the seconds of earlier engine builds."""
    seconds = sum(engine["build_seconds"] for engine in entry["engines"])
    return f"{seconds_text(seconds)}, earlier" if seconds else ""


def spread_text(figure: Mapping[str, Any] | None) -> str:
    """Return "3.42 (3.40–3.51)"; only the median for one run."""
    if figure is None:
        return ""
    median = number(figure["median"])
    return median if figure["count"] == 1 else f"{median} ({number(figure['low'])}–{number(figure['high'])})"


def seconds_text(seconds: float) -> str:
    """Return "3.42 s"."""
    return f"{number(seconds)} s"


def number(value: float) -> str:
    """Return seconds with about three digits: 123, 12.3, 1.23, 0.123."""
    if value >= _HUNDRED:
        return f"{value:.0f}"
    if value >= _TEN:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= _TENTH else f"{value:.3f}"


def _similarity(quality: Mapping[str, Any]) -> tuple[str, ...]:
    psnr = "same frames" if quality["same"] else f"{quality['psnr']:.1f} dB"
    return psnr, f"{quality['ssim']:.4f}"


def _peak(by_stage: Mapping[str, int]) -> str:
    if not by_stage:
        return ""
    stage = max(by_stage, key=lambda name: by_stage[name])
    return f"{memory_size(by_stage[stage])} ({stage})"
