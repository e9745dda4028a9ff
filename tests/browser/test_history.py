"""The tab History in a browser: search, play, reuse, delete, restore and compare videos; settings from a file."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import OutputError
from runtime.video.mp4 import read_metadata
from tests.app_server import Server
from tests.browser.conftest import DESKTOP, PHONE, OpenPage, ask, saved_videos, start, wait_for_state
from tests.browser.test_page import UNNAMED_INPUTS
from tests.browser.test_queue import go

pytestmark = pytest.mark.browser

# A file cannot be dragged from outside in a test: the page is handed the same event.
DROP = """({data, name}) => {
  const carried = new DataTransfer();
  carried.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type: 'video/mp4'}));
  const event = new DragEvent('drop', {bubbles: true, cancelable: true, dataTransfer: carried});
  document.querySelector('#compose').dispatchEvent(event);
  return event.defaultPrevented;
}"""
TIMES = "() => [...document.querySelectorAll('[data-compare] video')].map((v) => v.currentTime * v.dataset.fps)"


def make(page: Any, prompt: str, **values: int) -> str:
    """Make a video and return its job's id."""
    ask(page, prompt)
    for name, value in values.items():
        page.fill(f"#field-{name} :is(input[type=number], input, textarea) >> nth=0", str(value))
    start(page)
    wait_for_state(page, "done")
    return str(page.get_attribute("#status .status", "data-job"))


def search(page: Any, words: str, count: int) -> None:
    """Look for words, and wait until so many are found."""
    page.fill("#history-search", words)
    page.wait_for_function(f"() => document.querySelectorAll('#history-gallery li').length === {count}")


def test_a_video_is_found_shown_reused_deleted_and_restored(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    job = make(page, "a red ball sails at night", seed=11, fps=5)
    go(page, "History")
    search(page, "NIGHT sails ball", 1)
    page.wait_for_function("() => document.querySelector('#history-gallery img').naturalWidth > 10")
    page.focus("#history-gallery .poster")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-detail]")
    page.wait_for_function("() => document.activeElement.tagName === 'H2'")
    facts = page.inner_text("[data-detail]")
    for expected in ("a red ball sails at night", "64 × 32", "PyTorch on the CPU", "denoising", "MiB at most", "KB"):
        assert expected in facts
    page.wait_for_function("() => document.querySelector('[data-detail] video').videoWidth === 64")
    page.click("[data-reuse]")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '11'")
    go(page, "History")
    with page.expect_download() as download:
        page.click("[data-detail] a:has-text('Copy without metadata')")
    copy = Path(download.value.path())
    assert b"sails" not in copy.read_bytes() and copy.read_bytes()[4:8] == b"ftyp"
    with pytest.raises(OutputError):
        read_metadata(copy)
    assert [path for path in saved_videos(server) if path.name.startswith(".")] == []
    page.click("[data-detail] [data-action=delete]")
    search(page, "NIGHT sails ball", 0)
    page.click("#message [data-action=restore]")
    search(page, "NIGHT sails ball", 1)
    # It is also listed under “Deleted” while it can be restored.
    page.click(f"#history-gallery [data-action=open][data-target='{job}']")
    page.click("[data-detail] [data-action=delete]")
    page.select_option("#history-state", "deleted")
    page.click(f"#history-gallery li[data-job='{job}'] [data-action=restore]")
    page.select_option("#history-state", "all")
    search(page, job[:6], 1)
    assert page.complaints == []


def test_a_report_has_prompts_only_on_demand(open_page: OpenPage, server: Server) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    job = make(page, "a calm blue boat at night")
    go(page, "History")
    search(page, job, 1)
    page.click("#history-gallery .poster")
    page.click("[data-report]")
    page.wait_for_selector("#message:has-text('without prompts and paths')")
    report = page.evaluate("() => navigator.clipboard.readText()")
    assert json.loads(report)["id"] == job
    assert "blue" not in report and str(server.cache_dir) not in report
    page.check(".with-prompts")
    page.click("[data-report]")
    page.wait_for_selector("#message:text-is('The report is copied.'), #message:has-text('The report is copied.')")
    page.wait_for_function("async () => (await navigator.clipboard.readText()).includes('a calm blue boat at night')")


def test_two_clips_play_in_sync_and_are_compared(open_page: OpenPage) -> None:
    page = open_page()
    ids = [make(page, "a boat sails left", seed=1, fps=8), make(page, "a boat sails left", seed=2, fps=4)]
    go(page, "History")
    search(page, "sails left", 2)
    assert page.get_attribute("#history-finder [data-action=compare]", "aria-disabled") == "true"
    for job in reversed(ids):
        page.check(f"[data-pick='{job}']")
    page.click("#history-finder [data-action=compare]")
    page.wait_for_selector(".numbers:has-text('PSNR')")
    assert "over 9 frames" in page.inner_text(".numbers") and "SSIM 0." in page.inner_text(".numbers")
    differing = page.locator("#history-settings tr.differs th").all_inner_texts()
    assert {"Seed", "Frames per second"} <= set(differing) and "Steps" not in differing
    page.wait_for_function("() => document.activeElement.tagName === 'H2'")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    # The same frame of both, though one is made to play twice as fast.
    page.wait_for_function(f"() => ({TIMES})().every((frame) => Math.abs(frame - 2.5) < 0.01)")
    assert page.inner_text("[data-frame]") == "3 / 9"
    page.focus("[data-scrub]")
    page.keyboard.press("End")
    page.wait_for_function(f"() => ({TIMES})().every((frame) => Math.abs(frame - 8.5) < 0.01)")
    page.click("[data-play]")
    page.wait_for_selector("[data-play]:has-text('Pause')")
    page.wait_for_function(f"() => {{ const [a, b] = ({TIMES})(); return a > 2 && a < 8 && Math.abs(a - b) < 2 }}")
    page.wait_for_selector("[data-play]:has-text('Play')")
    page.click("[data-wipe]")
    boxes = [page.locator("[data-compare] video").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0] == boxes[1]
    page.set_viewport_size(PHONE)
    page.click("[data-wipe]")
    boxes = [page.locator("[data-compare] video").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"]
    page.click("[data-action=close-compare]")
    page.wait_for_selector("[data-compare]", state="detached")
    assert page.complaints == []


def test_a_dropped_video_restores_its_settings(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    make(page, "a red boat “at” night\n🚤", seed=77, fps=6)
    whole = max(saved_videos(server), key=lambda path: path.stat().st_mtime)
    data = whole.read_bytes()

    def drop(content: bytes, name: str, answer: str) -> None:
        assert page.evaluate(DROP, {"data": base64.b64encode(content).decode(), "name": name})
        page.wait_for_selector(f"#restored:has-text('{answer}')")

    ask(page, "something else")
    drop(data[:600], "torn.mp4", "“torn.mp4” is damaged or not an MP4.")
    drop(b"a letter to a friend", "letter.mp4", "“letter.mp4” is damaged or not an MP4.")
    drop(b"", "empty.mp4", "“empty.mp4” is damaged or not an MP4.")
    foreign = data.replace(b'"tandem"', b'"random"')
    drop(foreign, "foreign.mp4", "“foreign.mp4” has no settings.")
    assert page.input_value("#field-prompt textarea") == "something else"
    sent = len(page.requests)
    drop(data, "mine.mp4", "Settings of “mine.mp4” are filled in.")
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value.startsWith('a red boat')")
    assert page.input_value("#field-prompt textarea") == "a red boat “at” night\n🚤"
    assert page.input_value("#field-seed :is(input, textarea)") == "77"
    assert page.input_value("#field-fps input") == "6"
    # By keyboard too; and the file itself goes nowhere.
    ask(page, "something else")
    page.set_input_files("#restore", whole)
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value.startsWith('a red boat')")
    assert [url for url in page.requests[sent:] if "upload" in url] == []
    assert page.complaints == []


def test_checkpoints_are_removed_after_confirmation(open_page: OpenPage) -> None:
    page = open_page()
    job = make(page, "a blue ball on the sea")
    go(page, "History")
    page.click(f"#history-gallery [data-target='{job}']")
    page.wait_for_selector("[data-detail] .rerun")
    page.click("#history-storage [data-action=remove-checkpoints]")
    page.click("dialog[open] .strong")
    page.wait_for_selector("[data-detail] .rerun", state="detached")
    page.wait_for_selector("#history-storage [data-action=remove-checkpoints]", state="detached")


def test_low_noise_steps_run_again(open_page: OpenPage) -> None:
    page = open_page()
    job = make(page, "a boat on the calm sea", seed=5)
    go(page, "History")
    page.click(f"#history-gallery [data-target='{job}']")
    page.click("[data-detail] .rerun summary")
    page.fill("[name=guidance_scale_2]", "7.5")
    page.click("[data-action=rerun]")
    page.wait_for_selector("#message:has-text('The low-noise steps run again.')")
    page.click("[role=tab]:has-text('Make')")
    page.wait_for_function(f"() => document.querySelector('#status .status').dataset.job !== '{job}'")
    wait_for_state(page, "done")
    assert "guidance 3 and 7.5" in page.inner_text("#facts")


@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"])
def test_the_layout_fits_and_has_accessible_names(open_page: OpenPage, viewport: dict[str, int], scheme: str) -> None:
    page = open_page(viewport, color_scheme=scheme)
    go(page, "History")
    if not page.locator("#history-gallery .poster").count():
        page.click("[role=tab]:has-text('Make')")
        make(page, "a red boat on the sea")
        go(page, "History")
    page.click("#history-gallery .poster >> nth=0")
    page.wait_for_selector("[data-detail]")
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(UNNAMED_INPUTS) == []
    assert page.complaints == []
