"""A benchmark's result as tables for people: headings and rows of text. Pure; reads what `Bench.to_json` gave."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.core.units import memory_size

Rows = list[tuple[str, ...]]
TIMES = ("Configuration", "All", "Prompt", "Denoise", "A step", "Decode", "Save", "First run", "Loading", "Build")
FIGURES = ("Configuration", "VRAM", "GPU in all", "RAM", "Error of a pass", "PSNR", "SSIM", "LPIPS", "Repeats")
_STAGES = ("total", "encode", "denoise")
_LATER = ("decode", "mux")
_HUNDRED, _TEN, _TENTH = 100, 10, 0.1


def times(result: Mapping[str, Any]) -> Rows:
    """Return `TIMES`: medians, with the least and the most, in seconds, of those configurations that have any."""
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


def figures(result: Mapping[str, Any]) -> Rows:
    """Return `FIGURES`: memory at the peak, and how alike the clip is to the reference's."""
    rows: Rows = []
    for one in result["configurations"]:
        if not one["stages"]:
            continue
        if one["name"] == result["reference"]:
            likeness: tuple[str, ...] = ("the reference", "", "", "")
        elif one["quality"] is None:
            likeness = (_error(one), one["not_compared"] or "not compared", "", "")
        else:
            likeness = (_error(one), *_likeness(one["quality"]))
        repeats = {True: "yes", False: "no", None: ""}[one["repeats"]]
        memory = [_peak(one["memory"][kind]) for kind in ("vram", "gpu", "ram")]
        rows.append((one["name"], *memory, *likeness, repeats))
    return rows


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return what to read below the tables."""
    floor = result["noise_floor"]
    if floor is None:
        noise = "Two equal runs of it were not made, so there is no noise floor."
    elif floor["same"]:
        noise = "Two equal runs of it give the same frames, bit for bit."
    else:
        noise = f"Two equal runs of it are {floor['psnr']:.1f} dB apart, SSIM {floor['ssim']:.4f}: the noise floor."
    how = "all loaded at once, in turn" if result["together"] else "each loaded for its turn"
    lines = [f"{one['name']}: {one['runs_on']}." for one in result["configurations"] if one["stages"]]
    lines += [
        f"Reference: {result['reference']} ({result['reference_is']}). {noise}",
        f"Seconds: median (least–most) of {result['runs']} runs after {result['warmup']} to warm up, {how}; loading "
        "and building come on top. VRAM: allocated by PyTorch; GPU in all: engines and its reserve too; RAM: "
        "beyond what the process held before.",
        f"LPIPS: {result['lpips']}.",
    ]
    if result["cancelled"]:
        lines.insert(0, "Cancelled: this is what was measured before.")
    return lines


def outcomes(result: Mapping[str, Any]) -> list[str]:
    """Return what became of those configurations that were not measured, or not to the end."""
    lines = []
    for one in result["configurations"]:
        if one["state"] != "measured":
            runs = f", after {one['runs']} runs" if one["runs"] else ""
            lines.append(f"{one['name']}: {said(one)}{runs}. {one['remedy']}".rstrip())
    return lines


def said(one: Mapping[str, Any]) -> str:
    """Return what became of a configuration that was not measured."""
    if one["state"] == "waiting":
        return "not measured"
    why = one["why"].rstrip(".")
    return f"{one['state']}: {why}" if one["state"] != "same" else why


def built_before(one: Mapping[str, Any]) -> str:
    """Return what building the engines took when they were built."""
    seconds = sum(engine["build_seconds"] for engine in one["engines"])
    return f"{seconds_text(seconds)}, earlier" if seconds else ""


def spread_text(figure: Mapping[str, Any] | None) -> str:
    """Return "3.42 (3.40–3.51)"; the median alone of one run."""
    if figure is None:
        return ""
    median = number(figure["median"])
    return median if figure["count"] == 1 else f"{median} ({number(figure['low'])}–{number(figure['high'])})"


def seconds_text(seconds: float) -> str:
    """Return "3.42 s"."""
    return f"{number(seconds)} s"


def number(value: float) -> str:
    """Return a number of seconds with three digits or so: 123, 12.3, 1.23, 0.123."""
    if value >= _HUNDRED:
        return f"{value:.0f}"
    if value >= _TEN:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= _TENTH else f"{value:.3f}"


def worst_part(one: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the part whose forward pass is farthest from the reference's, and how far."""
    found = {name: part["error"] for name, part in one["parts"].items() if part["error"] is not None}
    return max(found.items(), key=lambda item: item[1]) if found else None


def _error(one: Mapping[str, Any]) -> str:
    worst = worst_part(one)
    if worst is None:
        return next((part["why"] for part in one["parts"].values()), "")
    return "none" if not worst[1] else f"{worst[1]:.1e} ({worst[0]})"


def _likeness(quality: Mapping[str, Any]) -> Sequence[str]:
    psnr = "same frames" if quality["same"] else f"{quality['psnr']:.1f} dB"
    lpips = "" if quality["lpips"] is None else f"{quality['lpips']:.4f}"
    return psnr, f"{quality['ssim']:.4f}", lpips


def _peak(by_stage: Mapping[str, int]) -> str:
    if not by_stage:
        return ""
    stage = max(by_stage, key=lambda name: by_stage[name])
    return f"{memory_size(by_stage[stage])} ({stage})"
