"""Earlier prompts, videos one after the other, and a grid."""

import pytest

from tests.browser.conftest import OpenPage, ask, await_job_after, ready, start, wait_for_state

pytestmark = pytest.mark.browser


def test_prompts_come_back_and_videos_follow_each_other_until_that_is_off(open_page: OpenPage) -> None:
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
