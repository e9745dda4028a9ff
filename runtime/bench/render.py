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
    for one in result["configurations"]:
        if not one["stages"]:
            continue
        stages, first = one["stages"], one["first"]
        cells = [spread_text(stages.get(name)) for name in _STAGES]
        cells += [spread_text(one["step"]), *(spread_text(stages.get(name)) for name in _LATER)]
        early = [seconds_text(first[name]) if first else "" for name in ("wall", "load")]
        build = seconds_text(one["build_seconds"]) if one["build_seconds"] else built_before(one)
        rows.append((one["name"], *cells, *early, build))
    return rows


def quality_rows(result: Mapping[str, Any]) -> Rows:
    """Return rows for `QUALITY_HEADINGS`: peak memory, and similarity to the reference's clip."""
    rows: Rows = []
    for one in result["configurations"]:
        if not one["stages"]:
            continue
        if one["name"] == result["reference"]:
            similarity: tuple[str, ...] = ("the reference", "")
        elif one["quality"] is None:
            similarity = (one["not_compared"] or "not compared", "")
        else:
            similarity = _similarity(one["quality"])
        repeats = {True: "yes", False: "no", None: ""}[one["repeats"]]
        memory = [_peak(one["memory"][kind]) for kind in ("vram", "gpu", "ram")]
        rows.append((one["name"], *memory, *similarity, repeats))
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
    lines = [f"{one['name']}: {one['runs_on']}." for one in result["configurations"] if one["stages"]]
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
    for one in result["configurations"]:
        if one["state"] != "measured":
            runs = f", after {one['runs']} runs" if one["runs"] else ""
            lines.append(f"{one['name']}: {state_text(one)}{runs}. {one['remedy']}".rstrip())
    return lines


def state_text(one: Mapping[str, Any]) -> str:
    """Return the state of a configuration and the reason for it."""
    if one["state"] == "waiting":
        return "not measured"
    why = one["why"].rstrip(".")
    return f"{one['state']}: {why}" if one["state"] != "same" else why


def built_before(one: Mapping[str, Any]) -> str:
    """Return the seconds of earlier engine builds."""
    seconds = sum(engine["build_seconds"] for engine in one["engines"])
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
