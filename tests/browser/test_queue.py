"""The Queue tab in a browser: many at once, moved, changed, paused, cancelled; and what a killed app leaves."""

from typing import Any

import pytest

from tests.app_server import make_cache, serving
from tests.browser.conftest import DESKTOP, PHONE, OpenPage, ask, ready, start, wait_for_state
from tests.browser.test_page import UNNAMED_INPUTS
from tests.waiting import until

pytestmark = pytest.mark.browser

TITLES = "() => [...document.querySelectorAll('#queue-list .title strong')].map((node) => node.textContent)"


def go(page: Any, tab: str = "Queue") -> None:
    """Open a tab and wait until it shows something."""
    page.click(f"[role=tab]:has-text('{tab}')")
    page.wait_for_selector("#queue-list section" if tab == "Queue" else "#history-gallery section")


def titles(page: Any, *expected: str) -> None:
    """Wait until these are in the queue, in this order."""
    page.wait_for_function(f"(wanted) => JSON.stringify(({TITLES})()) === JSON.stringify(wanted)", arg=list(expected))


def add(page: Any, *prompts: str, variations: int = 1) -> None:
    """Add several, with the settings of Make."""
    page.fill("#several-prompts", "\n".join(prompts))
    page.fill("#several-count", str(variations))
    page.click("#queue-add [data-action=add]")
    page.wait_for_selector("#message:has-text('Added to the queue')")


def act(page: Any, prompt: str, name: str) -> str:
    """Return what finds a button of a job."""
    return f"#queue-list li:has(bdi:text-is('{prompt}')) [data-action='{name}']"


def cancel_all(page: Any) -> None:
    """Cancel what runs and waits, after being asked."""
    page.click("#queue-list [data-action=cancel-all]")
    page.click("dialog[open] .strong")
    titles(page)


def test_queued_jobs_are_moved_edited_and_cancelled(open_page: OpenPage) -> None:
    page, other = open_page(), open_page()
    ask(page, "a red boat", long=True)
    go(page)
    add(page, "a red boat", "a blue ball", "a calm sea", "a boat at night")
    titles(page, "a red boat", "a blue ball", "a calm sea", "a boat at night")
    page.click("#queue-list [data-action=pause-all]")
    page.wait_for_selector("#queue-list [data-action=unpause-all]")
    # Another tab sees the same, and what changes there.
    go(other)
    page.focus(act(page, "a boat at night", "up"))
    page.keyboard.press("Enter")
    titles(page, "a red boat", "a blue ball", "a boat at night", "a calm sea")
    titles(other, "a red boat", "a blue ball", "a boat at night", "a calm sea")
    # The focus goes with the job: pressed once more, it is that one which moves on.
    page.wait_for_function("() => document.activeElement.ariaLabel === 'Move up: “a boat at night”'")
    page.keyboard.press("Enter")
    titles(page, "a red boat", "a boat at night", "a blue ball", "a calm sea")
    page.click(act(page, "a blue ball", "edit"))
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value === 'a blue ball'")
    page.fill("#field-prompt textarea", "a blue ball rolls")
    page.click("#editing [data-action=save]")
    page.wait_for_selector("#message:has-text('Saved')")
    go(page)
    titles(page, "a red boat", "a boat at night", "a blue ball rolls", "a calm sea")
    page.click(act(page, "a calm sea", "cancel"))
    titles(page, "a red boat", "a boat at night", "a blue ball rolls")
    cancel_all(page)
    titles(other)
    assert page.complaints == []


def test_variations_have_different_seeds(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "a red ball", long=True)
    page.fill("#field-seed textarea, #field-seed input", "7")
    go(page)
    page.click("#queue-list h2")
    add(page, variations=3)
    titles(page, *["a red ball"] * 3)
    page.wait_for_selector("[role=tab][data-count='3']")
    page.click("#queue-list li:last-child [data-action=edit]")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '9'")
    page.click("#editing [data-action=leave]")
    go(page)
    cancel_all(page)
    add(page, variations=1)
    page.fill("#several-count", "1000")
    page.click("#queue-add [data-action=add]")
    page.wait_for_selector("#message.error:has-text('Enter a whole number from 1 to 100.')")
    cancel_all(page)


def test_a_job_is_added_while_another_runs_and_a_sound_marks_the_end(open_page: OpenPage) -> None:
    page = open_page()
    page.click("#sound:has-text('Sound off')")
    page.wait_for_selector("#sound:has-text('Sound on')")
    page.reload()
    ready(page)
    page.wait_for_selector("#sound:has-text('Sound on')")
    ask(page, "a red boat", long=True)
    start(page)
    wait_for_state(page, "running")
    page.wait_for_function("() => /^[0-9]+% · Tandem$/.test(document.title)")
    page.fill("#field-prompt textarea", "a blue boat")
    page.click("#actions-more [data-action=add]")
    page.wait_for_selector("#message:has-text('1 video')")
    wait_for_state(page, "done")
    page.wait_for_function("() => window.tandem.chimes >= 1")
    page.wait_for_function("() => document.title === 'Tandem'")
    go(page, "History")
    page.wait_for_selector("#history-gallery .title:has-text('a blue boat')")


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_layout_fits_and_has_accessible_names(open_page: OpenPage, viewport: dict[str, int]) -> None:
    page = open_page(viewport)
    ask(page, "a red boat on the sea", long=True)
    go(page)
    add(page, "a red boat on the calm sea at night", "a blue ball rolls right")
    page.wait_for_selector("#queue-list li >> nth=1")
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(UNNAMED_INPUTS) == []
    assert page.get_attribute("#queue-list .bar", "aria-label") == "Progress of “a red boat on the calm sea at night”"
    cancel_all(page)


def test_a_job_resumes_after_the_app_was_killed(open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = make_cache(tmp_path_factory.mktemp("killed"))
    with serving(cache) as first:
        page = open_page(url=first.url)
        ask(page, "a red boat", long=True, steps=60)
        start(page)
        job = page.get_attribute("#status .status", "data-job")
        # Between both experts every job is kept, however slow the disk is.
        until((cache / "jobs" / str(job) / "boundary.safetensors").exists)
        first.process.kill()
        first.process.wait()
    with serving(cache) as second:
        page = open_page(url=second.url)
        page.wait_for_selector("#status .next:has-text('It stopped at step')")
        assert "Tandem ended while this video was generated." in page.inner_text("#status .alert")
        go(page)
        page.wait_for_selector("#queue-resumable li[data-state=interrupted]")
        assert "continues" in page.inner_text("#queue-resumable li")
        page.click("#queue-resumable [data-action=resume]")
        page.wait_for_selector("#queue-resumable li", state="detached")
        page.click("[role=tab]:has-text('Make')")
        wait_for_state(page, "done")
        assert page.get_attribute("#status .status", "data-job") == job
    assert len(list((cache / "outputs").glob("*.mp4"))) == 1
