"""Measure what exports of videos need: bits per pixel and nanoseconds per pixel of each format, and their fit.

    .venv/bin/python -m bench.exports Cache/outputs/*.mp4

The fit, bits per pixel = factor × (bits per pixel in H.264 at the usual constant rate factor) ** exponent, and the
median of the times are the constants of `runtime/video/export_formats.py`. Times are those of one core: they are
multiplied by the square root of the number of cores, by which estimates divide.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from runtime.video.export import Clip, ExportPlan, export
from runtime.video.export_formats import FORMATS, MP4, START_SECONDS, USUAL_CRF, ExportFormat

# A steeper fit of few videos says nothing of simpler or richer ones.
MOST = 1.4


def measure(clip: Clip, kind: ExportFormat, folder: Path) -> tuple[int, float]:
    """Return the bytes of an export without the metadata, and its seconds."""
    plan = ExportPlan.of([replace(clip, metadata={})], kind)
    target = folder / f"x{kind.suffix or '.zip'}"
    began = time.monotonic()
    export(plan, target)
    return target.stat().st_size, time.monotonic() - began


def main() -> None:
    """Print a table of the formats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", nargs="+", type=Path, help="MP4 files in H.264")
    clips = [Clip.read(path) for path in parser.parse_args().videos]
    source = [(clip.bits or math.nan) * 2 ** ((clip.crf - USUAL_CRF) / 6) for clip in clips]
    shown = ", ".join(f"{clip.info.path.name} {value:.3f}" for clip, value in zip(clips, source, strict=True))
    print(f"Bits per pixel in H.264 at {USUAL_CRF}: {shown}")  # noqa: T201
    print("| format | bits per pixel | factor | exponent | worst error | ns per pixel |")  # noqa: T201
    print("| --- | --- | ---: | ---: | ---: | ---: |")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        for kind in FORMATS.values():
            if kind.name == MP4:
                continue
            rows = []
            for clip in clips:
                plan = ExportPlan.of([clip], kind)
                size, seconds = measure(clip, kind, Path(folder))
                pixels = plan.width * plan.height * plan.frames
                rows.append((8 * size / pixels, (seconds - START_SECONDS) * 1e9 / pixels))
            result, times = map(list, zip(*rows, strict=True))
            exponent = min(float(np.polyfit(np.log(source), np.log(result), 1)[0]), MOST)
            factor = float(np.mean(np.log(result) - exponent * np.log(source)))
            errors = [abs(math.log(y) - factor - exponent * math.log(x)) for x, y in zip(source, result, strict=True)]
            speed = statistics.median(times) * math.sqrt(os.cpu_count() or 1)
            shown = ", ".join(f"{value:.2f}" for value in result)
            cells = (kind.name, shown, f"{math.exp(factor):.2f}", f"{exponent:.2f}", f"×{math.exp(max(errors)):.1f}")
            print(f"| {' | '.join(cells)} | {max(speed, 0):.0f} |")  # noqa: T201


if __name__ == "__main__":
    main()
