"""axe-core finds nothing serious on any tab, in a wide and a narrow window, in light and dark.

axe-core comes with the package axe-playwright-python; only its script is used.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.browser.conftest import OpenPage, ask, start, wait_for_state

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
async (rules) => (await axe.run(document, { runOnly: rules, resultTypes: ['violations'] })).violations
  .filter((one) => ['serious', 'critical'].includes(one.impact))
  .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target.join(' ')}: ${node.failureSummary}`))
"""
# The colors of a scheme are there, and none still fades to its new value.
SHOWS = """
(scheme) => document.body.classList.contains('dark') === (scheme === 'dark')
  && !document.getAnimations().some((one) => one instanceof CSSTransition && one.playState === 'running')
"""


def serious_issues(page: Any, rules: Sequence[str] = RULES) -> list[str]:
    """Return the serious issues that axe-core finds on a page."""
    if not page.evaluate("'axe' in window"):
        found = importlib.util.find_spec("axe_playwright_python")
        if found is None or found.origin is None:
            pytest.skip("axe-playwright-python is not installed")
        page.evaluate((Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    return cast("list[str]", page.evaluate(_RUN, list(rules)))


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    page.wait_for_timeout(400)  # a fade would lower the contrast


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
            # Nothing lies beside the window.
            beside = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert beside <= 0, f"{tab} at {width} px is {beside} px too wide"
            if width in AXE_WIDTHS:
                for scheme, rules in (("light", RULES), ("dark", COLORS)):
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_function(SHOWS, arg=scheme)
                    found += [f"{tab} at {width} px, {scheme}: {line}" for line in serious_issues(page, rules)]
    assert found == []
