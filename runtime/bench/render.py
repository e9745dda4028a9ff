"""A benchmark's result as tables of text and as an SVG picture; reads what `Bench.to_json` returns. No torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

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
QUALITY_HEADINGS = ("Configuration", "VRAM", "GPU total", "RAM", "Forward error", "PSNR", "SSIM", "LPIPS", "Repeats")
_PLOTTED = (("encode", "reading the prompt"), ("denoise", "denoising"), ("decode", "decoding"), ("mux", "saving"))
_WIDTH, _ROW, _BAR_HEIGHT = 1000, 46, 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 170, 270, 78, 44
_NAME_CHARACTERS, _WHY_CHARACTERS = 20, 95
_TICKS = 5
# Colors by Okabe and Ito: distinguishable with any color vision, on white and on black.
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1b1b1f; }
.small { font-size: 12px; fill: #55555f; }
.title { font-size: 16px; font-weight: 600; }
.ground { fill: #ffffff; }
.grid { stroke: #e2e2e8; }
.whisker { stroke: #1b1b1f; }
.why { font-size: 12px; fill: #55555f; stroke: #ffffff; stroke-width: 5px; paint-order: stroke; }
.encode { fill: #cc79a7; } .denoise { fill: #0072b2; } .decode { fill: #e69f00; } .mux { fill: #009e73; }
@media (prefers-color-scheme: dark) {
  text { fill: #ececf1; }
  .small { fill: #a6a6b2; }
  .why { fill: #a6a6b2; stroke: #17171b; }
  .ground { fill: #17171b; }
  .grid { stroke: #34343c; }
  .whisker { stroke: #ececf1; }
  .denoise { fill: #3a9bd9; }
}
"""
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
            similarity: tuple[str, ...] = ("the reference", "", "", "")
        elif one["quality"] is None:
            similarity = (_error(one), one["not_compared"] or "not compared", "", "")
        else:
            similarity = (_error(one), *_similarity(one["quality"]))
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
        f"LPIPS: {result['lpips']}.",
    ]
    if result["cancelled"]:
        lines.insert(0, "Cancelled: these are the measurements until then.")
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


def _worst_component(one: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the component with the largest relative error, and that error."""
    found = {name: part["error"] for name, part in one["parts"].items() if part["error"] is not None}
    return max(found.items(), key=lambda item: item[1]) if found else None


def _error(one: Mapping[str, Any]) -> str:
    worst = _worst_component(one)
    if worst is None:
        return next((part["why"] for part in one["parts"].values()), "")
    return "none" if not worst[1] else f"{worst[1]:.1e} ({worst[0]})"


def _similarity(quality: Mapping[str, Any]) -> Sequence[str]:
    psnr = "same frames" if quality["same"] else f"{quality['psnr']:.1f} dB"
    lpips = "" if quality["lpips"] is None else f"{quality['lpips']:.4f}"
    return psnr, f"{quality['ssim']:.4f}", lpips


def _peak(by_stage: Mapping[str, int]) -> str:
    if not by_stage:
        return ""
    stage = max(by_stage, key=lambda name: by_stage[name])
    return f"{memory_size(by_stage[stage])} ({stage})"


def svg(result: Mapping[str, Any], title: str) -> str:
    """Return a picture as SVG: seconds stacked by stage, with memory and PSNR; for light and dark backgrounds.

    Args:
        result: as `Bench.to_json` returns it.
        title: one line.
    """
    rows: Sequence[Mapping[str, Any]] = result["configurations"]
    ends = [one["stages"]["total"]["high"] for one in rows if "total" in one["stages"]]
    step, most = _ticks(max(ends, default=1.0) or 1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(rows) + _BOTTOM
    floor = _TOP + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>',
        _text(16, 28, title, "title"),
        *_legend(),
    ]
    for tick in range(round(most / step) + 1):
        x = _LEFT + tick * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{floor}"/>')
        parts.append(_text(x, floor + 18, f"{tick * step:g} s", "small", "middle"))
    for index, one in enumerate(rows):
        parts += _bar(one, result["reference"], _TOP + index * _ROW, scale)
    return "\n".join([*parts, "</svg>", ""])


def _bar(one: Mapping[str, Any], reference: str, top: float, scale: float) -> list[str]:
    middle = top + _ROW / 2
    parts = [_text(_LEFT - 12, middle + 4, _cut(one["name"], _NAME_CHARACTERS), "", "end")]
    if not one["stages"]:
        return [*parts, _text(_LEFT + 6, middle + 4, _cut(state_text(one), _WHY_CHARACTERS), "why")]
    x = float(_LEFT)
    for stage, _ in _PLOTTED:
        seconds = one["stages"].get(stage, {"median": 0.0})["median"]
        size = f'x="{x:.2f}" y="{middle - _BAR_HEIGHT / 2}" width="{seconds * scale:.2f}" height="{_BAR_HEIGHT}"'
        parts.append(f'<rect class="{stage}" {size}><title>{stage} {number(seconds)} s</title></rect>')
        x += seconds * scale
    total = one["stages"]["total"]
    low, high = (_LEFT + total[name] * scale for name in ("low", "high"))
    if total["count"] > 1:
        parts.append(
            f'<path class="whisker" fill="none" d="M{low:.2f} {middle - 5}v10M{low:.2f} {middle}H{high:.2f}'
            f'M{high:.2f} {middle - 5}v10"/>'
        )
    right = _WIDTH - _RIGHT + 14
    parts.append(_text(right, middle - 3, f"{number(total['median'])} s{_late_state(one)}"))
    parts.append(_text(right, middle + 13, _labels(one, reference), "small"))
    return parts


def _late_state(one: Mapping[str, Any]) -> str:
    return "" if one["state"] == "measured" else f", then {one['state']}"


def _labels(one: Mapping[str, Any], reference: str) -> str:
    found = []
    for kind in ("vram", "ram"):
        peaks = one["memory"][kind].values()
        if peaks and (kind == "vram" or not one["memory"]["vram"]):
            found.append(f"{memory_size(max(peaks))} {kind.upper()}")
    quality = one["quality"]
    if one["name"] == reference:
        found.append("the reference")
    elif quality is not None:
        found.append("same frames" if quality["same"] else f"PSNR {quality['psnr']:.1f} dB")
    return " · ".join(found)


def _legend() -> list[str]:
    parts, x = [], 16.0
    for stage, title in _PLOTTED:
        parts.append(f'<rect class="{stage}" x="{x}" y="44" width="12" height="12"/>')
        parts.append(_text(x + 18, 55, title, "small"))
        x += 44 + 6.6 * len(title)
    parts.append(_text(x, 55, "whisker: minimum to maximum of the total", "small"))
    return parts


def _ticks(most: float) -> tuple[float, float]:
    """Return a round distance between ticks, and the position of the last one."""
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, step * math.ceil(most / step)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
