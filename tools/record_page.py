"""Record the README's picture of the web app: a prompt is typed, previews appear, the video plays.

    python -m tools.record_page .github/readme/app.webp

Starts the app with an empty cache folder. Needs Chromium (see CONTRIBUTING.md).
"""

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.app_server import serving
from tests.browser.conftest import ARGUMENTS, CHROMIUM, ready

DIORAMA = "diorama"
PROMPT, SEED = "a red boat sails to the right on a calm sea at sunset", "7"
WINDOW: Any = {"width": 1200, "height": 760}
SIZE = (960, 608)
QUALITY = 50
# Between two pictures while the video is made, and how long each is shown.
_EVERY_MS, _SHOWN_MS = 350, 200
_FPS = 16
# Ends when the frame is drawn.
SEEK = """(video, seconds) => new Promise((done) => {
  const drawn = () => requestAnimationFrame(() => requestAnimationFrame(done));
  video.addEventListener("seeked", drawn, { once: true });
  video.currentTime = seconds;
})"""


class Recording:
    """Pictures of a page, and how long each is shown."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._pictures: list[Image.Image] = []
        self._milliseconds: list[int] = []

    def add(self, milliseconds: int) -> None:
        """Take a picture."""
        picture = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        self._pictures.append(picture.resize(SIZE, Image.Resampling.LANCZOS))
        self._milliseconds.append(milliseconds)

    def save(self, path: Path) -> None:
        """Write an animated WebP."""
        first, *rest = self._pictures
        first.save(path, save_all=True, append_images=rest, duration=self._milliseconds, loop=0, quality=QUALITY)


def main() -> None:
    """Start the app, make the video, and write the recording."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--model", DIORAMA) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page: Any = browser.new_context(viewport=WINDOW, color_scheme="light").new_page()
        page.goto(server.url)
        ready(page)
        record(page).save(path)
        browser.close()


def record(page: Any) -> Recording:
    """Make the video on a page of an empty cache folder."""
    recording = Recording(page)
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('#examples img')];"
        " return all.length && all.every((one) => one.complete); }"
    )
    page.wait_for_selector("#forecast .forecast:has-text('About')")
    for _ in range(8):
        recording.add(160)
        page.wait_for_timeout(120)
    page.evaluate("(seed) => window.tandem.apply({ seed })", SEED)
    page.wait_for_selector(f"[data-chip=seed]:has-text('{SEED}')")
    page.click("#field-prompt textarea")
    for word in PROMPT.split():
        page.keyboard.type(f"{word} ")
        recording.add(130)
    page.keyboard.press("Backspace")
    recording.add(700)
    page.click("#generate")
    page.mouse.move(600, 740)
    page.wait_for_selector("#status .status[data-state=running]")
    while page.get_attribute("#status .status", "data-state") == "running":
        recording.add(_SHOWN_MS)
        page.wait_for_timeout(_EVERY_MS)
    page.wait_for_function("() => document.querySelector('#picture video')?.readyState >= 2")
    video = page.locator("#picture video")
    video.evaluate("(video) => video.pause()")
    for frame in range(round(video.evaluate("(video) => video.duration") * _FPS)):
        video.evaluate(SEEK, (frame + 0.2) / _FPS)
        recording.add(1000 // _FPS)
    recording.add(900)
    return recording


if __name__ == "__main__":
    main()
