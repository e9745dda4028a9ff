"""The tab History in a browser: search, play, reuse, delete, restore and compare videos; settings from a file."""

import base64
import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import OutputError
from runtime.video.mp4 import read_metadata
from tests.app_server import Server
from tests.browser.conftest import (
    DESKTOP,
    PHONE,
    OpenPage,
    advance,
    ask,
    fill_field,
    saved_videos,
    start,
    wait_for_state,
)
from tests.browser.test_page import UNNAMED_INPUTS
from tests.browser.test_queue import go
from tests.waiting import until

pytestmark = pytest.mark.browser

# A file cannot be dragged from outside in a test: the page is handed the same event.
DROP = """({data, name, type = ''}) => {
  const carried = new DataTransfer();
  carried.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type}));
  const event = new DragEvent('drop', {bubbles: true, cancelable: true, dataTransfer: carried});
  document.body.dispatchEvent(event);
  return event.defaultPrevented;
}"""
TIMES = "() => [...document.querySelectorAll('[data-compare] video')].map((v) => v.currentTime * v.dataset.fps)"

# Each of these local times as it is shown at 10:00.
RELATIVE_TIMES = """() => {
  const now = new Date(2026, 2, 30, 10, 0, 30);
  const times = [[30, 10, 1], [30, 10, 0], [30, 9, 59], [30, 9, 1], [30, 8, 7], [29, 23, 59], [28, 10, 0]];
  return times.map(([day, hour, minute]) => window.tandem.relativeTime(new Date(2026, 2, day, hour, minute), now));
}"""


def make(page: Any, prompt: str, **values: int) -> str:
    """Make a video and return its job's id."""
    ask(page, prompt)
    for name, value in values.items():
        fill_field(page, name, str(value))
    start(page)
    wait_for_state(page, "done")
    return str(page.get_attribute("#status .status", "data-job"))


def search(page: Any, words: str, count: int, prompt: str = "") -> None:
    """Look for words, and wait until so many are found; with `prompt`, until all of them are videos of it.

    Until the search is answered, as many clips of other tests may be there, and its start clears the selection.
    """

    def answers(response: Any) -> bool:
        return "panels/history" in response.url and response.request.post_data_json["view"]["search"] == words

    with page.expect_response(answers):
        page.fill("#history-search", words)
    page.wait_for_function(
        """([count, prompt]) => {
          const cards = [...document.querySelectorAll('#history-gallery li')];
          const found = (card) => 'plays' in card.dataset && card.querySelector('.title').textContent === prompt;
          return cards.length === count && (!prompt || cards.every(found));
        }""",
        arg=[count, prompt],
    )


def test_a_video_is_found_shown_reused_deleted_and_restored(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    job = make(page, "a red ball sails at night", seed=11, fps=5)
    # Other values than those of the video, so that it shows when these are filled in.
    fill_field(page, "seed", "4")
    fill_field(page, "fps", "6")
    go(page, "History")
    search(page, "NIGHT sails ball", 1)
    page.wait_for_function("() => document.querySelector('#history-gallery img').naturalWidth > 10")
    card = f"#history-gallery li[data-job='{job}']"
    page.focus("#history-state")
    # It plays under the pointer, and stops when that leaves.
    page.hover(f"{card} .poster")
    page.wait_for_function("() => document.querySelector('#history-gallery .poster video')?.currentTime > 0")
    page.hover("#history-search")
    page.wait_for_selector("#history-gallery .poster video", state="detached")
    page.focus(f"{card} .poster")
    page.keyboard.press("Enter")
    page.wait_for_selector("#lightbox[open] [data-detail]")
    page.wait_for_function("() => document.activeElement.matches('.about')")
    facts = page.inner_text("[data-detail]")
    for expected in ("a red ball sails at night", "64 × 32", "PyTorch on the CPU", "denoising", "MB at most", "KB"):
        assert expected in facts
    page.wait_for_function("() => document.querySelector('[data-detail] video').videoWidth === 64")
    page.click("[data-reuse]:has-text('Use its settings')")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '11'")
    page.wait_for_function("() => document.querySelector('#field-fps input').value === '5'")
    fill_field(page, "seed", "3")
    fill_field(page, "fps", "7")
    go(page, "History")
    page.click(f"{card} .poster")
    page.click("[data-reuse]:has-text('Use its seed')")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '11'")
    assert page.input_value("#field-fps input") == "7"
    go(page, "History")
    page.click(f"{card} .poster")
    with page.expect_download() as download:
        page.click("[data-detail] a:has-text('Copy without metadata')")
    copy = Path(download.value.path())
    assert b"sails" not in copy.read_bytes() and copy.read_bytes()[4:8] == b"ftyp"
    with pytest.raises(OutputError):
        read_metadata(copy)
    assert [path for path in saved_videos(server) if path.name.startswith(".")] == []
    deleted_and_restored(page, card)
    search(page, job[:6], 1)
    assert page.complaints == []


def deleted_and_restored(page: Any, card: str) -> None:
    """Delete the clip that is shown, restore it at once, delete it again, and restore it from the deleted ones."""
    page.click("[data-detail] [data-action=delete-open]")
    page.wait_for_selector(f"{card}", state="detached")
    page.wait_for_selector("#lightbox:not([open])", state="attached")
    page.click("#message [data-action=restore]")
    page.wait_for_selector(card)
    # It is also listed under “Deleted” while it can be restored.
    page.click(f"{card} .poster")
    page.click("[data-detail] [data-action=delete-open]")
    page.wait_for_selector(f"{card}", state="detached")
    page.fill("#history-search", "")
    page.select_option("#history-state", "deleted")
    page.click(f"{card} [data-action=restore]")
    page.select_option("#history-state", "all")


def check_times(page: Any) -> None:
    """Check that times are relative, with the date as the title, and what each distance reads as."""
    time = page.locator("#history-gallery time").first
    assert re.fullmatch(r"just now|[1-9] min ago", time.inner_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", time.get_attribute("title") or "")
    assert page.evaluate(RELATIVE_TIMES) == [
        "just now", "just now", "1 min ago", "59 min ago", "today 08:07", "yesterday 23:59", "2026-03-28 10:00",
    ]  # fmt: skip


def test_clips_are_shown_starred_and_selected_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    go(page, "Queue")
    # Other prompts: variations of one would be a stack.
    page.fill("#several-prompts", "\n".join(f"a {color} kite over the harbor" for color in ("red", "blue", "green")))
    page.click("#queue-add [data-action=add]")
    go(page, "History")
    search(page, "harbor kite", 3)
    page.wait_for_function("() => document.querySelectorAll('#history-gallery li[data-plays]').length === 3")
    ids = page.evaluate("() => [...document.querySelectorAll('#history-gallery li')].map((card) => card.dataset.job)")
    focused = "() => document.activeElement.closest('li')?.dataset.job"
    check_times(page)
    page.focus("#history-gallery .poster")
    assert page.locator("#history-gallery .poster video").count() == 0
    # The lightbox: arrows, Escape, and the focus is back on the last clip.
    page.keyboard.press("Enter")
    shown = "#lightbox[open] [data-detail='{}']"
    page.wait_for_selector(shown.format(ids[0]))
    assert page.get_attribute("#lightbox [data-action=previous]", "aria-disabled") == "true"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(shown.format(ids[1]))
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(shown.format(ids[2]))
    page.wait_for_selector("#lightbox [data-action=next][aria-disabled=true]")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(shown.format(ids[1]))
    page.focus("#lightbox [data-action=star]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#lightbox [data-action=unstar][aria-pressed=true]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#lightbox:not([open])", state="attached")
    page.wait_for_function("(id) => document.activeElement.closest('li')?.dataset.job === id", arg=ids[1])
    page.select_option("#history-state", "starred")
    page.wait_for_function("() => document.querySelectorAll('#history-gallery li').length === 1")
    page.select_option("#history-state", "all")
    page.wait_for_function("() => document.querySelectorAll('#history-gallery li').length === 3")
    # The selection: with Shift and the arrows, then Delete; the focus goes to the clip that stays.
    page.focus(f"[data-job='{ids[0]}'] .poster")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_selector("#selected:text-is('2 selected')")
    assert page.get_attribute("#selection [data-action=compare]", "aria-disabled") == "false"
    page.keyboard.press("Delete")
    page.wait_for_selector("#message:has-text('Deleted: 2 videos.')")
    page.wait_for_function("() => document.querySelectorAll('#history-gallery li').length === 1")
    assert page.evaluate(focused) == ids[2]
    page.click("#message [data-action=restore]")
    page.wait_for_function("() => document.querySelectorAll('#history-gallery li').length === 3")
    # By mouse: from the first to the last with Shift.
    page.check(f"[data-select='{ids[0]}']")
    page.click(f"[data-select='{ids[2]}']", modifiers=["Shift"])
    page.wait_for_selector("#selected:text-is('3 selected')")
    assert page.get_attribute("#selection [data-action=compare]", "aria-disabled") == "true"
    page.click("[data-action=select-none]")
    page.wait_for_selector("#selection", state="hidden")
    assert page.complaints == []


def test_a_closed_lightbox_stays_closed_whatever_the_server_still_answers(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    name = secrets.token_hex(4)  # if the test is run again, the clips of the first run are there
    ids = [make(page, f"{name} on the grass"), make(page, f"{name} on the grass again")]
    go(page, "History")
    search(page, name, 2)
    page.click(f"#history-gallery [data-job='{ids[1]}'] .title")
    page.wait_for_selector(f"#lightbox[open] [data-detail='{ids[1]}']")
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.post_data_json["action"] == "open":
            held.append(route)
        else:
            route.continue_()

    page.route("**/tandem/panels/history", hold)
    page.wait_for_selector("#lightbox [data-action=next][aria-disabled=false]")
    page.keyboard.press("ArrowRight")
    until(lambda: page.wait_for_timeout(20) or held, seconds=30)
    page.keyboard.press("Escape")
    page.wait_for_selector("#lightbox:not([open])", state="attached")
    answered = "({ detail }) => { window.answered = detail.call.action === 'open'; }"
    page.evaluate(f"() => document.addEventListener('tandem:reply', {answered})")
    held[0].continue_()
    page.wait_for_function("() => window.answered")
    assert page.locator("#lightbox[open]").count() == 0
    page.wait_for_function("(id) => document.activeElement.closest('li')?.dataset.job === id", arg=ids[1])


def test_a_report_has_prompts_only_on_demand(open_page: OpenPage, server: Server) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    job = make(page, "a calm blue boat at night")
    go(page, "History")
    search(page, job, 1)
    page.click("#history-gallery .poster")
    page.click("[data-report]")
    page.wait_for_selector("#lightbox #message:has-text('without prompts and paths')")
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
    ids.append(make(page, "a boat sails left", seed=1, fps=4))
    go(page, "History")
    search(page, "sails left", 3)

    def compare(*jobs: str) -> None:
        for job in jobs:
            page.check(f"[data-select='{job}']")
        page.click("#selection [data-action=compare]")
        page.wait_for_selector("#comparison[open]")

    compare(ids[0], ids[2])
    # The frame rate does not change the frames.
    page.wait_for_selector(".numbers:has-text('over 9 frames')")
    assert page.locator("#comparison tbody th").all_inner_texts()[0] == "Frames per second"
    page.keyboard.press("Escape")
    page.wait_for_selector("#comparison:not([open])", state="attached")
    page.click("[data-action=select-none]")
    compare(*ids[:2])
    differing = page.locator("#comparison tbody th").all_inner_texts()
    assert {"Seed", "Frames per second"} <= set(differing) and "Steps" not in differing
    assert page.locator(".numbers").count() == 0
    page.wait_for_function("() => document.activeElement.tagName === 'H2'")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    # The same frame of both, though one is made to play twice as fast.
    page.wait_for_function(f"() => ({TIMES})().every((frame) => Math.abs(frame - 2.5) < 0.01)")
    assert page.inner_text("[data-frame]") == "3 / 9"
    page.focus("[data-scrub]")
    page.keyboard.press("End")
    page.wait_for_function(f"() => ({TIMES})().every((frame) => Math.abs(frame - 8.5) < 0.01)")
    page.click("[data-compare] [data-play]")
    page.wait_for_selector("[data-compare] [data-play]:has-text('Pause')")
    page.wait_for_function(f"() => {{ const [a, b] = ({TIMES})(); return a > 2 && a < 8 && Math.abs(a - b) < 2 }}")
    page.wait_for_selector("[data-compare] [data-play]:has-text('Play')")
    page.click("[data-wipe]")
    boxes = [page.locator("[data-compare] video").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0] == boxes[1]
    page.set_viewport_size(PHONE)
    page.click("[data-wipe]")
    boxes = [page.locator("[data-compare] video").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"]
    page.click("[data-action=close-compare]")
    page.wait_for_selector("[data-compare]", state="detached")
    assert page.evaluate("() => document.activeElement.dataset.action") == "compare"
    assert page.complaints == []


def test_a_dropped_file_restores_its_settings_on_any_tab(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    make(page, "a red boat “at” night\n🚤", seed=77, fps=6)
    whole = max(saved_videos(server), key=lambda path: path.stat().st_mtime)
    data = whole.read_bytes()

    def drop(content: bytes, name: str, answer: str, place: str = "#restored") -> None:
        assert page.evaluate(DROP, {"data": base64.b64encode(content).decode(), "name": name})
        page.wait_for_selector(f"{place}:has-text('{answer}')")

    ask(page, "something else")
    # What has no settings may be a video to change.
    drop(data[:600], "torn.mp4", "torn.mp4 is not a video that can be read", "#images .note")
    drop(b"", "empty.mp4", "empty.mp4 is empty", "#images .note")
    go(page, "History")
    drop(b"a letter to a friend", "letter.mp4", "letter.mp4 is not a video that can be read", "#images .note")
    drop(data.replace(b'"tandem"', b'"random"'), "foreign.mp4", "foreign.mp4", "#images [data-place=video] .what")
    page.click("#images [data-clear=video]")
    page.keyboard.press("Escape")
    go(page, "History")
    # For others, the reason appears where the file was dropped.
    drop(b"{", "torn.json", "“torn.json” is damaged or not JSON.", "#message.error")
    assert page.locator("#history-gallery").is_visible()
    assert page.input_value("#field-prompt textarea") == "something else"
    sent = len(page.requests)
    drop(data, "mine.mp4", "Settings of “mine.mp4”")
    page.wait_for_selector("#refused:has-text('All settings are filled in.')")
    assert page.is_visible("#restored")
    assert page.input_value("#field-prompt textarea") == "a red boat “at” night\n🚤"
    assert page.input_value("#field-seed :is(input, textarea)") == "77"
    assert page.input_value("#field-fps input") == "6"
    # By keyboard too; and the file itself goes nowhere.
    ask(page, "something else")
    advance(page)
    page.focus("#restore")
    page.set_input_files("#restore", whole)
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value.startsWith('a red boat')")
    # What is not valid is listed with its reason, and the rest is filled in.
    hostile = {"prompt": "a calm sea", "width": "NaN", "frames": -5, "model": "../../etc/passwd", "seed": 3, "<b>": 1}
    go(page, "Queue")
    drop(json.dumps({"request": hostile}).encode(), "settings.json", "Settings of “settings.json”")
    page.wait_for_selector("#refused:has-text('except for')")
    lines = page.locator("#refused li").all_inner_texts()
    assert [line.split(" ")[0] for line in lines] == ["Width", "Frames", "Model", "'<b>'"], lines
    assert page.is_visible("#refused .trouble")
    assert page.input_value("#field-prompt textarea") == "a calm sea"
    assert page.input_value("#field-seed :is(input, textarea)") == "3"
    assert [url for url in page.requests[sent:] if "upload" in url] == []
    assert [line for line in page.complaints if "422" not in line] == []  # the three files that are no videos


def leave_checkpoint(server: Server, job: str) -> None:
    """Write a checkpoint of a finished video, as one that could not be removed."""
    (server.cache_dir / "jobs" / job / "checkpoint.safetensors").write_bytes(b"x" * 1000)


def test_checkpoints_are_removed_after_confirmation(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    leave_checkpoint(server, make(page, "a blue ball on the sea"))
    go(page, "History")
    page.click(".storage summary")
    page.click("#history-storage [data-action=remove-checkpoints]")
    page.wait_for_selector("dialog[open]:has-text('those that ended early can no longer be continued')")
    page.click("dialog[open] .strong")
    page.wait_for_selector("#history-storage [data-action=remove-checkpoints]", state="detached")


def test_comparison_and_storage_are_used_by_keyboard(open_page: OpenPage, server: Server) -> None:
    page = open_page({"width": 320, "height": 640})
    prompt = "keys on the sea"
    ids = [make(page, prompt, seed=one) for one in (1, 2)]
    leave_checkpoint(server, ids[0])
    go(page, "History")
    search(page, prompt, 2)
    page.focus(f"[data-job='{ids[1]}'] .poster")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_selector("#selected:text-is('2 selected')")
    page.focus("#selection [data-action=compare]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#comparison[open] [data-compare]")
    focused = "() => document.activeElement.matches({})"
    for stop in ("[data-play]", "[data-step='-1']", "[data-step='1']", "[data-scrub]", "[data-wipe]"):
        page.keyboard.press("Tab")
        assert page.evaluate(focused.format(json.dumps(stop))), stop
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-compare][data-mode=wipe]")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert page.input_value("[data-edge]") == "0"
    page.keyboard.press("Escape")
    page.wait_for_selector("#comparison:not([open])", state="attached")
    assert page.evaluate(focused.format("'[data-action=compare]'"))
    page.keyboard.press("Escape")
    page.fill("#history-search", "")
    page.focus(".storage summary")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(focused.format("'#history-storage [data-action]'"))
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog.ask[open]")
    assert page.evaluate("() => document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.ask", state="detached")
    assert page.evaluate(focused.format("'#history-storage [data-action]'"))
    assert page.complaints == []


def test_the_layout_fits_and_has_accessible_names(open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    make(page, "x" * 300 + " סירה \u202eאדומה")
    go(page, "History")
    for width in (DESKTOP["width"], PHONE["width"], 320):
        page.set_viewport_size({"width": width, "height": 800})
        page.click("#history-gallery .poster >> nth=0")
        page.wait_for_selector("#lightbox[open] [data-detail]")
        for box in ("html", "#lightbox", "#lightbox .about"):
            assert page.evaluate(
                "(box) => { const node = document.querySelector(box); return node.scrollWidth <= node.clientWidth }",
                box,
            ), (width, box)
        assert page.evaluate(UNNAMED_INPUTS) == []
        # A long prompt is cut, and shown on request.
        page.wait_for_selector("#lightbox .show-all:text-is('Show all')")
        cut = page.locator("#lightbox .caption").bounding_box()["height"]
        page.click("#lightbox .show-all")
        assert page.locator("#lightbox .caption").bounding_box()["height"] > 2 * cut
        page.keyboard.press("Escape")
        page.wait_for_selector("#lightbox:not([open])", state="attached")
    assert page.complaints == []
