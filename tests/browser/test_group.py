"""The variations of a prompt: a grid on the stage, one card in the strip, a stack in History."""

from typing import Any

import pytest

from tests.browser.conftest import OpenPage, ask, await_job_after, ready, start, wait_for_state
from tests.browser.test_accessibility import serious_issues

pytestmark = pytest.mark.browser


def make_variations(page: Any) -> None:
    """Make a video, then four variations; a sound marks the end of each, of the variations once."""
    page.evaluate("() => localStorage.setItem('tandem.sound', 'on')")
    ask(page, "a red boat")
    start(page)
    wait_for_state(page, "done")
    page.wait_for_function("() => window.tandem.chimes === 1")
    first = page.get_attribute("#status .status", "data-job")
    page.click("#facts [data-action=variations]")
    await_job_after(page, first)
    wait_for_state(page, "done")
    page.wait_for_function("() => window.tandem.chimes > 1")
    assert page.evaluate("() => window.tandem.chimes") == 2


def compare_two(page: Any, ids: list[str]) -> None:
    """Compare the first variation, which is selected, with the third one by the keyboard."""
    page.focus("#facts [data-compare-with]")
    page.keyboard.press("Enter")
    page.wait_for_function("(id) => document.activeElement.dataset.pick === id", arg=ids[1])
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector(f'#comparison[open] [data-compare="{ids[2]} {ids[0]}"]')
    page.keyboard.press("Escape")
    page.wait_for_selector("#comparison:not([open])", state="attached")


def open_and_delete_stack(page: Any, ids: list[str]) -> None:
    """Open and close the stack of a group in History, delete it as a whole, and restore it."""
    members = " ".join(ids)
    page.click("[role=tab]:has-text('History')")
    page.focus(f'#history-gallery [data-job="{members}"] .poster')
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('#history-gallery .of-stack').length === 4")
    page.wait_for_function("(id) => document.activeElement.dataset.target === id", arg=ids[0])
    page.click("#history-gallery .of-stack .count-badge >> nth=0")
    page.wait_for_selector(f'#history-gallery [data-job="{members}"]')
    page.keyboard.press("Delete")
    page.wait_for_selector("#message:has-text('4 videos')")
    page.wait_for_selector(f'#history-gallery [data-job="{members}"]', state="detached")
    page.click("#message [data-action=restore]")
    page.wait_for_selector(f'#history-gallery [data-job="{members}"]')


def test_variations_fill_the_stage_and_are_kept_and_discarded_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light")
    make_variations(page)
    page.wait_for_function("() => [...document.querySelectorAll('.cells video')].filter((v) => !v.paused).length === 4")
    ids = page.evaluate("() => [...document.querySelectorAll('[data-pick]')].map((pick) => pick.dataset.pick)")

    def selected(job: str) -> None:
        """Wait until a variation is selected, and the row below is about it."""
        page.wait_for_selector(f'[data-pick="{job}"][aria-pressed=true]')
        page.wait_for_selector(f'#facts [data-action=again][data-target="{job}"]')

    # Keys do nothing while text is typed.
    page.focus("#field-prompt textarea")
    for key in ("2", "k", "x"):
        page.keyboard.press(key)
    assert page.input_value("#field-prompt textarea").endswith("2kx")
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("2")
    selected(ids[1])
    page.keyboard.press("ArrowDown")
    selected(ids[3])
    page.keyboard.press("k")
    page.wait_for_selector(f'#picture [data-action=unstar][data-target="{ids[3]}"]')
    page.keyboard.press("Enter")
    page.wait_for_selector(f'[data-pick="{ids[0]}"]', state="hidden")
    page.keyboard.press("3")
    selected(ids[2])
    assert page.is_visible(f'[data-pick="{ids[2]}"]') and page.is_hidden(f'[data-pick="{ids[3]}"]')
    page.keyboard.press("Escape")
    assert page.is_visible(f'[data-pick="{ids[0]}"]')
    # A discarded one can be restored; the next one is selected.
    page.keyboard.press("x")
    page.wait_for_selector(f'[data-pick="{ids[2]}"]', state="detached")
    selected(ids[3])
    page.click("#message [data-action=restore]")
    selected(ids[2])
    page.dblclick(f'[data-pick="{ids[0]}"]')
    page.wait_for_selector(f'[data-pick="{ids[1]}"]', state="hidden")
    page.keyboard.press("1")
    page.wait_for_selector(f'[data-pick="{ids[1]}"]', state="visible")
    # A reload shows the same, and the strip has the group once.
    selected(ids[0])
    page.reload()
    ready(page)
    selected(ids[0])
    page.wait_for_selector(f'#picture [data-action=unstar][data-target="{ids[3]}"]')
    page.wait_for_selector(f'#recent [data-members="{" ".join(ids)}"][aria-current=true]')
    assert serious_issues(page, part="#stage") == []
    compare_two(page, ids)
    open_and_delete_stack(page, ids)
    assert page.complaints == []
