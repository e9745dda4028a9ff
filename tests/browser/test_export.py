"""Exports in a browser: the form on Make and in History, files that play, and settings from each of them."""

import base64
from pathlib import Path
from typing import Any

import pytest

from runtime.video.export import Clip, ExportPlan, export
from runtime.video.export_formats import FORMATS
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests import settings_of_others
from tests.app_server import Server
from tests.browser.conftest import DESKTOP, SMALL, OpenPage, ask, saved_videos
from tests.browser.test_accessibility import serious_issues
from tests.browser.test_history import DROP, make, search
from tests.browser.test_page import UNNAMED_INPUTS
from tests.browser.test_queue import go

pytestmark = pytest.mark.browser

PROMPT = "a red boat “at” night, exported"
# Plays a video, or decodes an image; returns the width of its frames.
PLAY = """async ({data, type}) => {
  const address = `data:${type};base64,${data}`;
  if (type.startsWith('image/')) {
    const image = new Image();
    image.src = address;
    await image.decode();
    return image.naturalWidth;
  }
  const video = document.createElement('video');
  video.muted = true;
  video.src = address;
  await video.play();
  while (!video.currentTime) await new Promise(requestAnimationFrame);
  return video.videoWidth;
}"""
CUT_OFF = """
() => [...document.querySelectorAll('form.export *')]
  .filter((node) => node.checkVisibility() && !node.closest('.unseen'))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))
"""


def save(page: Any, folder: Path) -> Path:
    """Press the form's button by keyboard; return the downloaded file."""
    page.focus("form.export [type=submit]")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    page.wait_for_selector(f"form.export .outcome:has-text('{path.name}')")
    return path


def test_videos_are_exported_played_restored_and_joined(open_page: OpenPage, server: Server, tmp_path: Path) -> None:
    page = open_page()
    make(page, PROMPT, seed=77, fps=6)
    video = max(saved_videos(server), key=lambda path: path.stat().st_mtime)
    # From the frame that is shown, of the player.
    page.evaluate("async () => { const video = tandem.stageVideo(); video.pause(); video.currentTime = 0.6; }")
    page.focus("#facts [data-export]")
    page.keyboard.press("Enter")
    page.wait_for_selector("form.export")
    assert page.evaluate("() => document.activeElement.id") == "export-format"
    assert page.evaluate(UNNAMED_INPUTS) == [] and serious_issues(page, part="form.export") == []
    page.click("[data-here=start]")
    assert float(page.input_value("#export-start")) == 0.5
    before = page.inner_text("#export-format option[value=gif]")
    page.select_option("#export-format", "gif")
    assert page.inner_text("#export-format option[value=gif]") == before
    gif = save(page, tmp_path)
    assert read_info(gif).frames == 6 and read_metadata(gif)["export"]["start"] == 0.5
    for viewport in (DESKTOP, SMALL):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    # A part that does not exist is refused where the user is.
    page.fill("#export-end", "0.2")
    page.click("form.export [type=submit]")
    page.wait_for_selector("form.export .outcome:has-text('no frame')")
    page.focus("#export-end")
    page.keyboard.press("Escape")
    assert page.locator("form.export").count() == 0
    assert page.evaluate("() => document.activeElement.matches('#facts [data-export]')")

    page.set_viewport_size(DESKTOP)
    clip = Clip.read(video)
    for kind in FORMATS.values():
        path = tmp_path / f"{kind.name}{kind.suffix}"
        export(ExportPlan.of([clip], kind), path)
        file = path if path.is_file() else min(path.iterdir())
        data, media = base64.b64encode(file.read_bytes()).decode(), kind.media_type if kind.suffix else "image/png"
        if kind.plays:
            assert page.evaluate(PLAY, {"data": data, "type": media}) == clip.info.width, kind.name
        if kind.name.endswith("bit") or kind.name in {"h265", "av1", "last-frame"}:  # files of the same kind
            continue
        ask(page, "something else")
        dropped = {"data": data, "name": file.name, "type": media}
        assert page.evaluate(DROP, dropped)
        page.wait_for_selector(f"#restored:has-text('Settings of “{file.name}”')")
        page.wait_for_function(
            "(prompt) => document.querySelector('#field-prompt textarea').value === prompt", arg=PROMPT
        )
    assert page.input_value("#field-seed :is(input, textarea)") == "77"
    joined_in_history(page, tmp_path)
    page.keyboard.press("Escape")
    page.click("[role=tab]:has-text('Make')")
    settings_of_other_programs(page, tmp_path)
    assert page.complaints == []


def settings_of_other_programs(page: Any, folder: Path) -> None:
    """Drop files of other programs, whose settings fill the form."""
    for file in settings_of_others.write_all(folder):
        ask(page, "something else")
        data = base64.b64encode(file.read_bytes()).decode()
        media = "image/png" if file.suffix == ".png" else ""
        assert page.evaluate(DROP, {"data": data, "name": file.name, "type": media})
        page.wait_for_selector(f"#restored:has-text('Settings of “{file.name}”')")
        written = settings_of_others.prompt_in(file.name)
        page.wait_for_function("(it) => document.querySelector('#field-prompt textarea').value === it", arg=written)
        assert page.input_value("#field-seed :is(input, textarea)") == str(settings_of_others.SEED)
        page.wait_for_selector("#refused:has-text('is the nearest to the model')")


def joined_in_history(page: Any, folder: Path) -> None:
    """Join two videos in the order in which they are selected, and open the form in the viewer."""
    make(page, PROMPT, seed=78)
    go(page, "History")
    search(page, PROMPT, 2)
    boxes = page.locator("#history-gallery [data-select]")
    boxes.nth(1).check()
    assert page.get_attribute("[data-action=join]", "aria-disabled") == "true"
    boxes.nth(0).check()
    page.click("[data-action=join]")
    page.wait_for_selector("#selection form.export")
    assert page.locator("#export-start").count() == 0
    joined = save(page, folder)
    parts = read_metadata(joined)["export"]["parts"]
    assert [part["request"]["seed"] for part in parts] == [77, 78] and read_info(joined).frames == 18
    page.click("form.export [data-close]")
    page.click("#history-gallery .poster")
    page.click("#lightbox [data-export]")
    page.wait_for_selector("#lightbox form.export")
    page.focus("#export-format")
    page.keyboard.press("Escape")
    page.wait_for_selector("form.export", state="detached")
    assert page.is_visible("#lightbox")
