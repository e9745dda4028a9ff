"""The Queue tab in a browser: many at once, moved, changed, paused, cancelled; and what a killed app leaves."""

from typing import Any

import pytest

from runtime.pipeline.files import checkpoint_step
from tests.app_server import make_cache, serving
from tests.browser.conftest import DESKTOP, ENDLESS, PHONE, OpenPage, ask, fill_field, ready, start, wait_for_state
from tests.browser.test_page import UNNAMED_INPUTS
from tests.waiting import until

pytestmark = pytest.mark.browser

TITLES = "() => [...document.querySelectorAll('#queue-list .title strong')].map((node) => node.textContent)"

# Counts in `window.lost` how often the focus is nowhere when the queue has changed, and in `window.placed` the rows
# that were moved or are new.
COUNT_LOST = """() => {
  window.lost = window.placed = 0;
  const count = (records) => {
    window.lost += document.activeElement === document.body ? 1 : 0;
    window.placed += records.flatMap((one) => [...one.addedNodes]).filter((node) => node.dataset?.place).length;
  };
  new MutationObserver(count).observe(document.querySelector('#queue-list'), { childList: true, subtree: true });
}"""


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
    # The message that is waited for is not that of an earlier job.
    page.evaluate("() => window.tandem.panels.notify('')")
    page.click("#queue-add [data-action=add]")
    page.wait_for_selector("#message:has-text('Added to the queue')")


def act(page: Any, prompt: str, name: str) -> str:
    """Return what finds a button of a job."""
    return f"#queue-list li:has(bdi:text-is('{prompt}')) [data-action='{name}']"


def drag(page: Any, of: int, onto: int) -> None:
    """Drag a row by its number below another one."""
    grips = page.locator("#queue-list [data-grip]")
    start, end = grips.nth(of).bounding_box(), grips.nth(onto).bounding_box()
    page.mouse.move(start["x"] + 5, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(end["x"] + 5, end["y"] + end["height"], steps=4)
    page.wait_for_selector("#queue-list .drop-after, #queue-list .drop-before")
    page.mouse.up()


def cancel_all(page: Any) -> None:
    """Cancel what runs and waits, after being asked."""
    page.click("#queue-list [data-action=cancel-all]")
    page.click("dialog[open] .strong")
    titles(page)


def empty(page: Any) -> None:
    """Cancel what another test has left."""
    if page.get_attribute("#queue-list [data-action=cancel-all]", "aria-disabled") != "true":
        cancel_all(page)


def test_queued_jobs_are_moved_edited_and_cancelled(open_page: OpenPage) -> None:
    page, other = open_page(), open_page()
    ask(page, "a red boat", long=True, steps=ENDLESS)
    go(page)
    empty(page)
    add(page, "a red boat", "a blue ball", "a calm sea", "a boat at night")
    titles(page, "a red boat", "a blue ball", "a calm sea", "a boat at night")
    page.click("#queue-list [data-action=pause-all]")
    page.wait_for_selector("#queue-list [data-action=unpause-all]")
    # The one that had begun is paused once its step ends.
    page.wait_for_selector("#queue-list li:is([data-state=running], [data-state=pausing])", state="detached")
    # Another tab sees the same, and what changes there.
    go(other)
    page.focus(act(page, "a boat at night", "up"))
    page.keyboard.press("Enter")
    page.wait_for_selector("#foot .unseen:has-text('“a boat at night” is number 3 of 4.')", state="attached")
    titles(page, "a red boat", "a blue ball", "a boat at night", "a calm sea")
    titles(other, "a red boat", "a blue ball", "a boat at night", "a calm sea")
    # The focus goes with the job: pressed once more, it is that one which moves on.
    page.wait_for_function("() => document.activeElement.ariaLabel === 'Move up: “a boat at night”'")
    page.keyboard.press("Enter")
    titles(page, "a red boat", "a boat at night", "a blue ball", "a calm sea")
    # From any button of the row; the focus stays on it, also in the moment in which the row moves.
    page.focus(act(page, "a calm sea", "duplicate"))
    page.evaluate(COUNT_LOST)
    page.keyboard.press("Alt+ArrowUp")
    titles(page, "a red boat", "a boat at night", "a calm sea", "a blue ball")
    page.keyboard.press("Alt+Home")
    titles(page, "a calm sea", "a red boat", "a boat at night", "a blue ball")
    page.wait_for_function("() => document.activeElement.ariaLabel === 'Duplicate with a new seed: “a calm sea”'")
    assert page.evaluate("window.lost") == 0
    # No other row is taken out of the page, where it would lose a click.
    page.evaluate("window.placed = 0")
    drag(page, 0, 3)
    page.wait_for_selector("#foot .unseen:has-text('“a calm sea” is number 4 of 4.')", state="attached")
    titles(page, "a red boat", "a boat at night", "a blue ball", "a calm sea")
    page.click(act(page, "a blue ball", "duplicate"))
    titles(page, "a red boat", "a boat at night", "a blue ball", "a blue ball", "a calm sea")
    page.click("#queue-list li:nth-child(4) [data-action=cancel]")
    titles(page, "a red boat", "a boat at night", "a blue ball", "a calm sea")
    assert page.evaluate("window.placed") == 2
    assert "Seed " in page.inner_text("#queue-list li") and "4 videos" in page.inner_text("#queue-list")
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


def test_a_pressed_button_stays_in_its_place_until_it_is_released(open_page: OpenPage) -> None:
    page, other = open_page(), open_page()
    ask(page, "a red boat", long=True, steps=ENDLESS)
    go(page)
    empty(page)
    add(page, "a red boat", "a blue ball", "a calm sea")
    page.click("#queue-list [data-action=pause-all]")
    page.wait_for_selector("#queue-list [data-action=unpause-all]")
    page.wait_for_selector("#queue-list li:is([data-state=running], [data-state=pausing])", state="detached")
    go(other)
    titles(other, "a red boat", "a blue ball", "a calm sea")
    page.hover(act(page, "a calm sea", "duplicate"))
    page.mouse.down()
    with page.expect_response(lambda answer: "panels/queue" in answer.url and "a blue ball" not in answer.text()):
        other.click(act(other, "a blue ball", "cancel"))
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    page.mouse.up()
    titles(page, "a red boat", "a calm sea", "a calm sea")
    cancel_all(page)


def test_a_long_queue_is_shown_in_parts(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "a red boat", long=True, steps=ENDLESS)
    go(page)
    empty(page)
    add(page, "a red boat", variations=60)
    page.wait_for_selector("#queue-list .aside:has-text('60 videos')")
    page.click("#queue-list [data-action=pause-all]")
    page.wait_for_selector("#queue-list [data-action=unpause-all]")
    assert page.locator("#queue-list li").count() in {50, 51}  # one may run
    page.click("#queue-list [data-action=more-rows]")
    page.wait_for_function("() => document.querySelectorAll('#queue-list li').length === 60")
    page.wait_for_selector("#queue-list [data-action=more-rows]", state="detached")
    cancel_all(page)


def test_variations_have_different_seeds(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "a red ball", long=True, steps=ENDLESS)
    fill_field(page, "seed", "7")
    go(page)
    empty(page)
    page.click("#queue-list h2")
    add(page, variations=3)
    # The rows of a group have its title once.
    titles(page, "a red ball")
    page.wait_for_selector("[role=tab][data-count='3']")
    rows = page.locator("#queue-list li .what").all_inner_texts()
    assert [text.count(f"Variation {number} of 3") for number, text in enumerate(rows, 1)] == [1, 1, 1]
    page.click("#queue-list li:last-child [data-action=edit]")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '9'")
    page.click("#editing [data-action=leave]")
    go(page)
    cancel_all(page)
    add(page, variations=1)
    page.fill("#several-count", "1000")
    page.click("#queue-add [data-action=add]")
    page.wait_for_selector("#message.error:has-text('Enter a whole number from 1 to 100.')")
    empty(page)


def test_a_job_is_added_while_another_runs_and_a_sound_marks_the_end(open_page: OpenPage) -> None:
    page = open_page()
    assert page.is_hidden("#queue-next")
    # It is never beside Generate, which comes and goes at another moment than the status.
    shown = (
        "() => { document.body.classList.add('busy'); return document.querySelector('#queue-next').checkVisibility(); }"
    )
    assert not page.evaluate(shown)
    page.keyboard.press("Control+,")
    page.check("#sound")
    # The headless browser has no notifications: it stays off, and the line says why.
    page.click("#notification")
    page.wait_for_function("() => localStorage.getItem('tandem.notification') === 'off'")
    assert not page.is_checked("#notification")
    page.reload()
    ready(page)
    page.keyboard.press("Control+,")
    assert page.is_checked("#sound")
    page.keyboard.press("Control+,")
    page.wait_for_selector("#settings-sheet", state="hidden")
    ask(page, "a red boat", long=True, steps=50)
    start(page)
    wait_for_state(page, "running")
    page.wait_for_function("() => /^[0-9]+% · Tandem$/.test(document.title)")
    page.fill("#field-prompt textarea", "a blue boat")
    page.keyboard.press("Control+Enter")  # presses Queue next
    page.wait_for_selector("#message:has-text('1 video')")
    wait_for_state(page, "done")
    page.wait_for_function("() => window.tandem.chimes >= 1")
    page.wait_for_function("() => document.title === 'Tandem'")
    go(page, "History")
    page.wait_for_selector("#history-gallery .title:has-text('a blue boat')")


def test_the_layout_fits_and_has_accessible_names(open_page: OpenPage) -> None:
    page = open_page(DESKTOP)
    ask(page, "a red boat on the sea", long=True, steps=ENDLESS)
    go(page)
    add(page, "a red boat on the calm sea at night", "x" * 300, "סירה \u202eאדומה")
    page.wait_for_selector("#queue-list li >> nth=2")
    page.wait_for_function("() => document.querySelector('#queue-list .thumb img')?.naturalWidth > 10")
    for width in (DESKTOP["width"], PHONE["width"], 320):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"), (
            width
        )
        assert page.evaluate(UNNAMED_INPUTS) == []
    # Whichever runs by now.
    row = page.evaluate("""() => {
      const bar = document.querySelector("#queue-list .bar");
      return [bar.getAttribute("aria-label"), bar.closest("li").querySelector("bdi").textContent];
    }""")
    assert row[0] == f"Progress of “{row[1]}”"
    cancel_all(page)


def test_a_job_resumes_after_the_app_was_killed(open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = make_cache(tmp_path_factory.mktemp("killed"))
    with serving(cache) as first:
        page = open_page(url=first.url)
        ask(page, "a red boat", long=True, steps=60)
        start(page)
        job = page.get_attribute("#status .status", "data-job")
        # Between both experts every job is saved, however slow the disk is.
        until(lambda: checkpoint_step(cache / "jobs" / str(job)))
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
