"""axe-core finds nothing serious on any tab and in what Make opens, in a wide and a narrow window, in light and dark.

axe-core comes with the package axe-playwright-python; only its script is used.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.browser.conftest import (
    CHIPS,
    ENDLESS,
    OpenPage,
    advance,
    ask,
    customize,
    fill_field,
    open_chip,
    start,
    wait_for_state,
)
from tests.browser.test_page import UNNAMED_INPUTS, choose_diorama

pytestmark = pytest.mark.browser

TABS = ("Make", "Queue", "History", "Models", "Engines")
WIDTHS = (1280, 390, 320)
# No rule but the target size depends on the width; the narrowest window has the smallest targets.
AXE_WIDTHS = (1280, 320)
# A finished clip, a cancelled one and several cards are on the page; the rules are WCAG 2.2 A and AA.
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
# Of these, the rules on which the color scheme has an influence.
COLORS = ("color-contrast", "link-in-text-block")
_RUN = """
async (part, [runOnly, skipped]) => (await axe.run(part, {
  runOnly, resultTypes: ['violations'], rules: Object.fromEntries(skipped.map((one) => [one, { enabled: false }])),
})).violations
  .filter((one) => ['serious', 'critical'].includes(one.impact))
  .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target.join(' ')}: ${node.failureSummary}`))
"""
# What reaches beyond the window, which has room for a scroll bar.
CUT_OFF = """
(part) => [part, ...part.querySelectorAll('*')]
  .filter((node) => node.checkVisibility() && !node.closest('.unseen'))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.offsetWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))
"""
# The colors of a scheme are there, and none still fades to its new value.
SHOWS = """
(scheme) => document.body.classList.contains('dark') === (scheme === 'dark')
  && !document.getAnimations().some((one) => one instanceof CSSTransition && one.playState === 'running')
"""


def serious_issues(
    page: Any, rules: Sequence[str] = RULES, *, part: str = "html", skipped: Sequence[str] = ()
) -> list[str]:
    """Return the serious issues that axe-core finds in a part of a page, without those of the `skipped` rules."""
    if not page.evaluate("'axe' in window"):
        found = importlib.util.find_spec("axe_playwright_python")
        if found is None or found.origin is None:
            pytest.skip("axe-playwright-python is not installed")
        page.evaluate((Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    return cast("list[str]", page.locator(part).evaluate(_RUN, [list(rules), list(skipped)]))


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    page.wait_for_timeout(400)  # a fade would lower the contrast


def violations(page: Any, part: str = "html") -> list[str]:
    """Return what axe-core finds in a part of the page, in light and dark."""
    found = []
    for scheme, rules in (("light", RULES), ("dark", COLORS)):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(SHOWS, arg=scheme)
        where = f"{part} at {page.viewport_size['width']} px, {scheme}"
        found += [f"{where}: {line}" for line in serious_issues(page, rules, part=part)]
    return found


def beside(page: Any) -> int:
    """Return how many pixels the page is wider than the window."""
    return int(page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_axe_finds_nothing_serious(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light")
    ask(page, "a red boat on the sea")
    start(page)
    wait_for_state(page, "done")
    found = []
    for tab in TABS:
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        open_tab(page, tab)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert beside(page) <= 0, f"{tab} at {width} px is {beside(page)} px too wide"
            if width == WIDTHS[0]:
                found += [f"{tab}: {line}" for line in violations(page)]
                page.emulate_media(color_scheme="light")
            elif width in AXE_WIDTHS:  # the colors are the same
                found += [f"{tab} at {width} px: {line}" for line in serious_issues(page, skipped=COLORS)]
    assert found == []


def test_axe_finds_nothing_serious_in_what_make_opens(open_page: OpenPage) -> None:
    page = open_page({"width": WIDTHS[0], "height": 900}, color_scheme="light")
    choose_diorama(page)  # it has words, images and all presets
    customize(page, width="64", height="48")
    customize(page, frames="5")
    advance(page)
    page.fill("#field-steps input", "2")
    page.select_option("#field-upscaler", "small")
    for field in ("interpolate", "upscale"):
        page.select_option(f"#field-{field}", "2")
    page.click("[data-close-advanced]")
    page.fill("#field-prompt textarea", "a red boat on the sea")
    start(page)
    wait_for_state(page, "done")
    page.set_viewport_size({"width": AXE_WIDTHS[-1], "height": 900})
    found = []

    def check(part: str) -> None:
        page.wait_for_selector(part, state="visible")
        found.extend(violations(page, part) + page.evaluate(UNNAMED_INPUTS))
        found.extend(f"{part} is cut off: {text}" for text in page.locator(part).evaluate(CUT_OFF))

    for chip in dict.fromkeys([*CHIPS.values(), "images"]):
        open_chip(page, chip)
        check(f"#pop-{chip}")
        page.keyboard.press("Escape")
        page.wait_for_selector(f"#pop-{chip}", state="hidden")
    page.click("#facts .menu summary")
    check("#facts")
    page.keyboard.press("Escape")
    page.click("[popovertarget=details]")
    check("#details")
    page.keyboard.press("Escape")
    page.focus("#advanced")
    page.keyboard.press("?")
    check("#keys")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    check("#palette")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+,")
    page.wait_for_selector("#settings-sheet .meter")
    check("#settings-sheet")
    page.keyboard.press("Escape")
    advance(page)
    page.wait_for_selector("#part-vae .badge:has-text(':')")
    check("#settings")
    page.click("[data-close-advanced]")
    check("#transport")
    page.fill("#field-prompt textarea", "a red zeppelin")
    page.wait_for_selector("#unknown-words [data-replace]")
    page.evaluate("() => window.tandem.show('')")
    page.wait_for_selector("#examples [data-suggestion]")
    found += violations(page)
    assert found == []


def test_axe_finds_nothing_serious_in_a_running_and_a_refused_job(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light")
    ask(page, "a red boat", long=True, steps=ENDLESS)
    page.click("[data-close-advanced]")
    fill_field(page, "height", "960")  # more work than axe-core does
    start(page)
    wait_for_state(page, "running")
    page.wait_for_selector("#picture img.preview:not([hidden])")
    found = []
    page.set_viewport_size({"width": AXE_WIDTHS[-1], "height": 900})
    page.wait_for_selector("#queue-next")
    found += violations(page)
    page.click("#cancel")
    wait_for_state(page, "cancelled")
    fill_field(page, "width", "65")
    page.click("#generate")
    wait_for_state(page, "failed")
    page.wait_for_selector("#field-width [aria-invalid=true]")
    found += violations(page, "#pop-size")
    page.keyboard.press("Escape")
    found += violations(page)
    assert found == []
