"""Earlier prompts, videos one after the other, and a grid."""

from typing import Any

import httpx
import pytest

from runtime.video.mp4 import read_metadata
from tests.app_server import Server
from tests.browser.conftest import OpenPage, ask, await_job_after, ready, saved_videos, start, wait_for_state
from tests.browser.test_accessibility import serious_issues
from tests.browser.test_images import value
from tests.chat_models import ANSWER
from tests.waiting import until

pytestmark = pytest.mark.browser


def test_prompts_come_back_and_videos_follow_each_other_until_that_is_off(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    ready(page)
    ask(page, "a {red|red} boat")
    start(page)
    wait_for_state(page, "done")
    first = page.get_attribute("#status .status", "data-job")
    # By keyboard: open, filter, choose.
    page.fill("#field-prompt textarea", "")
    page.focus("[data-chip=prompts]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pop-prompts [data-prompt]")
    page.keyboard.type("zebra")
    page.wait_for_selector("#pop-prompts [data-prompt]", state="detached")
    page.fill("#prompt-search", "boat")
    page.wait_for_selector("#pop-prompts [data-prompt]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value === 'a {red|red} boat'")
    page.wait_for_selector("#pop-prompts", state="hidden")
    # One after the other, with other seeds.
    page.click("#endless")
    await_job_after(page, first)
    await_job_after(page, page.get_attribute("#status .status", "data-job"))
    page.click("#endless")
    assert page.get_attribute("#endless", "aria-pressed") == "false"
    wait_for_state(page, "done")
    # A grid is queued with the prompt of the form.
    page.click("[role=tab]:has-text('Queue')")
    page.click("#queue-add .grid summary")
    page.select_option("[name=grid_0]", "steps")
    page.fill("[name=values_0]", "1,2")
    page.click("#queue-add [data-action=add]")
    page.wait_for_selector("#message:has-text('2 videos')")
    # Later tests count videos.
    until(lambda: not open_videos(server))


def open_videos(server: Server) -> list[str]:
    """Return the IDs of videos that are queued or being made."""
    videos = httpx.get(f"{server.url}v1/videos?limit=100").json()["data"]
    return [video["id"] for video in videos if video["status"] in {"queued", "in_progress"}]


def written(page: Any, text: str) -> None:
    """Wait until the prompt is a text."""
    page.wait_for_function("(text) => document.querySelector('#field-prompt textarea').value === text", arg=text)


def test_a_prompt_is_enhanced_and_can_be_had_back(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    before = saved_videos(server)
    original = "#original-prompt .original"
    assert page.get_attribute("#enhance", "aria-disabled") is None and not page.is_visible(original)
    # A template stands for several prompts.
    ask(page, "a {red|blue} boat")
    page.click("#enhance")
    page.wait_for_selector("#message:has-text('template')")
    ask(page, "a boat")
    page.focus("#enhance")
    page.keyboard.press("Enter")
    written(page, ANSWER)
    page.wait_for_selector(original)
    assert page.inner_text(f"{original} q") == "a boat" and serious_issues(page) == []
    # The browser's undo, and the button.
    page.focus("#field-prompt textarea")
    page.keyboard.press("Control+z")
    written(page, "a boat")
    page.wait_for_selector(original, state="hidden")
    page.keyboard.press("Control+Shift+z")
    written(page, ANSWER)
    page.click("#enhance-undo")
    written(page, "a boat")
    page.wait_for_selector(original, state="hidden")
    # It is stopped, and then edited and made into a video, which has both texts.
    # Both at once: the tiny chat model may have answered before a second click.
    page.evaluate("() => ['#enhance', '#enhance-stop'].forEach((id) => document.querySelector(id).click())")
    page.wait_for_selector("#enhance-stop", state="hidden")
    written(page, "a boat")
    page.click("#enhance")
    written(page, ANSWER)
    page.fill("#field-prompt textarea", f"{ANSWER} at dusk")
    start(page)
    wait_for_state(page, "done")
    (video,) = saved_videos(server) - before
    request = read_metadata(video)["request"]
    assert (request["prompt"], request["original_prompt"]) == (f"{ANSWER} at dusk", "a boat")
    # An emptied prompt is a new one; the video's settings have both again, also after a reload.
    page.fill("#field-prompt textarea", "")
    page.wait_for_selector(original, state="hidden")
    page.click("#facts .menu summary")
    page.click("#facts [data-use=all]")
    written(page, f"{ANSWER} at dusk")
    page.wait_for_selector(original)
    page.reload()
    ready(page)
    written(page, f"{ANSWER} at dusk")
    assert value(page, "original_prompt") == "a boat" and page.complaints == []
