"""Contact sheets: one frame of each of several videos, with a caption below it, in one picture."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from runtime.core.errors import TandemError
from runtime.video.reader import read_info, read_video

# Of one video on the sheet, in pixels.
_WIDTH, _HEIGHT = 320, 320
_GAP, _TEXT_SIZE, _LINE = 12, 14, 20
_MOST_LINES = 3
_PAPER, _INK, _EMPTY = "#ffffff", "#1c1c1c", "#e6e6e6"


@dataclass(frozen=True)
class Captioned:
    """A video of a sheet: its file, `None` for one that was not made, and what is below it."""

    video: Path | None
    caption: str


def draw_sheet(videos: Sequence[Captioned], columns: int) -> bytes:
    """Return a PNG of the middle frames of videos, in rows from left to right; empty places for those without a file.

    Raises:
        MachineError: if there is no ffmpeg.
    """
    font = ImageFont.load_default(_TEXT_SIZE)
    frames = [_middle_frame(entry.video) for entry in videos]
    captions = [_lines(entry.caption, font) for entry in videos]
    height = max((frame.height for frame in frames if frame is not None), default=_HEIGHT // 2)
    text_height = _LINE * max(map(len, captions), default=0)
    step_x, step_y = _WIDTH + _GAP, height + text_height + _GAP
    size = (_GAP + columns * step_x, _GAP + ceil(len(videos) / columns) * step_y)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (frame, lines) in enumerate(zip(frames, captions, strict=True)):
        x, y = _GAP + number % columns * step_x, _GAP + number // columns * step_y
        if frame is None:
            draw.rectangle((x, y, x + _WIDTH - 1, y + height - 1), _EMPTY)
        else:
            sheet.paste(frame, (x + (_WIDTH - frame.width) // 2, y + (height - frame.height) // 2))
        for line_number, line in enumerate(lines):
            draw.text((x, y + height + line_number * _LINE + 2), line, _INK, font)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _middle_frame(video: Path | None) -> Image.Image | None:
    """Return a video's middle frame within the size of a place; `None` if it cannot be read."""
    if video is None:
        return None
    try:
        info = read_info(video)
        frames = next(read_video(info, 1, rate=info.rate, most=1, start=(info.seconds or 0.0) / 2))
    except (TandemError, StopIteration):
        return None
    image = Image.fromarray(frames[0])
    image.thumbnail((_WIDTH, _HEIGHT))
    return image


def _lines(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> list[str]:
    """Return a text in lines that fit below a picture; what does not fit is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= _WIDTH or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"{lines[_MOST_LINES - 1]} …"]
    return [_cut(line, font) for line in lines if line]


def _cut(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    while font.getlength(line) > _WIDTH:
        line = f"{line.rstrip('…')[:-1]}…"
    return line
