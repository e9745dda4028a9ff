"""Measure how fast each badge of the acceleration panel follows its TensorRT toggle, in Chromium.

    python -m bench.chips

The app runs on the description of a machine with a GPU, with a tiny model; the page is a real one. Prints a JSON object
per part: median and worst of 20 toggles, in milliseconds.
"""

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.app_server import make_cache, serving
from tests.browser.conftest import ready
from tests.browser.test_acceleration import ROWS, unfold

_TOGGLES = 20
_PAUSE_MS = 150
# Presses a toggle and resolves with the milliseconds until its chip says something else.
_TOGGLED = """(part) => new Promise((done) => {
  const chip = () => document.querySelector(`#part-${part} .chip`).innerText;
  const before = chip(), began = performance.now();
  const look = () => chip() === before ? requestAnimationFrame(look) : done(performance.now() - began);
  document.querySelector(`#tensorrt-${part} input`).click();
  look();
})"""


def main() -> None:
    """Measure."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(make_cache(Path(folder)), program=("-m", "tests.small_gpu_app", "1.05")) as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page()
        page.goto(server.url)
        ready(page)
        unfold(page)
        for part in ROWS:
            times = []
            for _ in range(_TOGGLES):
                page.wait_for_timeout(_PAUSE_MS)
                times.append(page.evaluate(_TOGGLED, part))
            found = {"part": part, "median_ms": round(statistics.median(times)), "worst_ms": round(max(times))}
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
