"""A benchmark's result as a picture: seconds stacked by stage, with memory and likeness. An SVG for light and dark."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from runtime.bench.table import number, said
from runtime.core.units import memory_size

_STAGES = (("encode", "reading the prompt"), ("denoise", "denoising"), ("decode", "decoding"), ("mux", "saving"))
_WIDTH, _ROW, _BAR = 1000, 46, 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 170, 270, 78, 44
_NAME_CHARACTERS, _WHY_CHARACTERS = 20, 95
_TICKS = 5
# Told apart with any colour vision, on white and on black alike (Okabe and Ito).
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


def svg(result: Mapping[str, Any], title: str) -> str:
    """Return the picture.

    Args:
        result: as `Bench.to_json` gives it.
        title: what was measured, on one line.
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
        parts += _row(one, result["reference"], _TOP + index * _ROW, scale)
    return "\n".join([*parts, "</svg>", ""])


def _row(one: Mapping[str, Any], reference: str, top: float, scale: float) -> list[str]:
    middle = top + _ROW / 2
    parts = [_text(_LEFT - 12, middle + 4, _cut(one["name"], _NAME_CHARACTERS), "", "end")]
    if not one["stages"]:
        return [*parts, _text(_LEFT + 6, middle + 4, _cut(said(one), _WHY_CHARACTERS), "why")]
    x = float(_LEFT)
    for stage, _ in _STAGES:
        seconds = one["stages"].get(stage, {"median": 0.0})["median"]
        size = f'x="{x:.2f}" y="{middle - _BAR / 2}" width="{seconds * scale:.2f}" height="{_BAR}"'
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
    parts.append(_text(right, middle - 3, f"{number(total['median'])} s{_state(one)}"))
    parts.append(_text(right, middle + 13, _labels(one, reference), "small"))
    return parts


def _state(one: Mapping[str, Any]) -> str:
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
    for stage, title in _STAGES:
        parts.append(f'<rect class="{stage}" x="{x}" y="44" width="12" height="12"/>')
        parts.append(_text(x + 18, 55, title, "small"))
        x += 44 + 6.6 * len(title)
    parts.append(_text(x, 55, "whisker: least to most of the whole run", "small"))
    return parts


def _ticks(most: float) -> tuple[float, float]:
    """Return a round distance between ticks, and the last one."""
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, step * math.ceil(most / step)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
