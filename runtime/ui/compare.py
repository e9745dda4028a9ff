"""Two clips beside each other: HTML as text. How they play in step is the script's business."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from runtime.core.request import AUTO, label
from runtime.ui import fields, formatting
from runtime.ui.queue_view import button
from runtime.video.similarity import Similarity

MEASURING = '<p class="numbers" role="status">Measuring how alike they are…</p>'


@dataclass(frozen=True)
class Clip:
    """One of the two.

    Attributes:
        video: its address.
        request: every value as used.
        seconds: that making it took.
        ran: what ran where, in a line.
    """

    id: str
    video: str
    request: Mapping[str, Any]
    seconds: float
    ran: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.request["width"], self.request["height"]


def comparison(one: Clip, other: Clip) -> str:
    """Return both clips with the controls that they share."""
    frames = max(one.request["frames"], other.request["frames"])
    return (
        f'<section class="shelf compare" data-desk data-compare="{one.id} {other.id}" data-mode="side">'
        '<div class="row-end"><h2 tabindex="-1">Two clips in step</h2>'
        f"{button('close-compare', 'Close', '', 'Close the comparison')}</div>"
        f'<p class="aside">{escape(pace(one, other))}</p>'
        f'<div class="both">{_video("A", one)}{_video("B", other)}</div>'
        '<div class="steer" role="group" aria-label="Both clips">'
        '<button type="button" class="button strong" data-play>Play</button>'
        '<button type="button" class="button" data-step="-1" aria-label="One frame back">‹</button>'
        '<button type="button" class="button" data-step="1" aria-label="One frame on">›</button>'
        f'<label class="scrub"><span class="unseen">Frame of both clips</span><input type="range" min="0" '
        f'max="{frames - 1}" step="1" value="0" data-scrub></label>'
        f"<output data-frame>1 / {frames}</output>"
        '<button type="button" class="button" data-wipe aria-pressed="false">Wipe</button>'
        '<label class="wipe"><span class="unseen">Where B begins, in percent</span>'
        '<input type="range" min="0" max="100" value="50" data-edge></label></div>'
        "</section>"
    )


def numbers(one: Clip, other: Clip, found: Similarity | None) -> str:
    """Return how alike they are.

    Args:
        found: what was measured; `None` where their sizes differ, which leaves nothing to measure.
    """
    if found is None:
        sizes = f"{formatting.size(*one.size)} and {formatting.size(*other.size)}"
        told = f"{sizes}: clips of different sizes are not measured."
    elif found.identical:
        told = f"Not a pixel differs{_over(one, other)}."
    else:
        told = f"PSNR {found.psnr:.1f} dB, SSIM {found.ssim:.3f}{_over(one, other)}."
    return f'<p class="numbers" role="status">{escape(told)}</p>'


def table(one: Clip, other: Clip) -> str:
    """Return their settings beside each other."""
    rows = "".join(
        f'<tr class="{"differs" if first != second else "same"}"><th scope="row">{escape(name)}</th>'
        f'<td data-label="A">{escape(first)}</td><td data-label="B">{escape(second)}</td></tr>'
        for name, first, second in settings(one, other)
    )
    return (
        '<section class="shelf compare"><table><thead><tr><th scope="col">Setting</th><th scope="col">A</th>'
        f'<th scope="col">B</th></tr></thead><tbody>{rows}</tbody></table></section>'
    )


def settings(one: Clip, other: Clip) -> list[tuple[str, str, str]]:
    """Return each setting with its two values, those that differ first."""
    names = dict.fromkeys((*one.request, *other.request))
    rows = [(label(name).capitalize(), _value(one.request, name), _value(other.request, name)) for name in names]
    rows += [
        ("Ran on", one.ran, other.ran),
        ("Time", formatting.duration(one.seconds), formatting.duration(other.seconds)),
    ]
    return sorted(rows, key=lambda row: row[1] == row[2])


def pace(one: Clip, other: Clip) -> str:
    """Say how clips of different speed or length are kept in step."""
    said = "Frame by frame; the arrow keys step."
    (a, b), (m, n) = ((clip.request["fps"] for clip in (one, other)), (clip.request["frames"] for clip in (one, other)))
    if a != b:
        said += f" B is made for {b} fps and plays at A's {a}."
    if m != n:
        said += f" {'A' if m < n else 'B'} is shorter and waits on its last frame."
    return said


def _over(one: Clip, other: Clip) -> str:
    frames: Sequence[int] = [clip.request["frames"] for clip in (one, other)]
    return f", over the first {min(frames)} frames" if frames[0] != frames[1] else f", over {frames[0]} frames"


def _value(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if name == "loras":
        return fields.loras_text(value).replace("\n", ", ") or "none"
    if name == "shift" and value is None:
        return "the model's own"
    if name == "vae_precision" and value is None:
        return AUTO
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or AUTO
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _video(name: str, clip: Clip) -> str:
    return (
        f'<figure data-clip="{name}"><video src="{clip.video}" muted playsinline preload="auto" tabindex="-1" '
        f'data-fps="{clip.request["fps"]}" data-frames="{clip.request["frames"]}" '
        f'aria-label="Clip {name}: {escape(str(clip.request["prompt"]), quote=True)}"></video>'
        f"<figcaption>{name}</figcaption></figure>"
    )
