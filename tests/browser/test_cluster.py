"""The tab Cluster in a browser, with a real head and a node on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import DESKTOP, advance, ask, complaint_of, customize, ready, start, wait_for_state
from tests.browser.test_accessibility import AXE_WIDTHS, COLORS, RULES, WIDTHS, serious_issues
from tests.cluster_machines import Machines, machines

pytestmark = pytest.mark.browser
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    with machines(folder, 1, page=True) as running:
        yield running
    assert "Traceback" not in (folder / "head" / "output.txt").read_text(encoding="utf-8")


@pytest.fixture
def page(chromium: Any, cluster: Machines) -> Iterator[Any]:
    """Return the page; nothing runs."""
    with chromium.new_context(viewport=DESKTOP) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.extend(complaint_of(error)))
        page.goto(f"http://127.0.0.1:{cluster.port}/")
        ready(page)
        if page.is_visible("#cancel"):  # the test failed before, and is run again
            page.click("#cancel")
            wait_for_state(page, "cancelled")
        yield page


def test_a_video_of_another_machine_is_followed_and_shown(page: Any, cluster: Machines) -> None:
    """Its progress and preview are in Make, its machine in Cluster, which can be used by keyboard and screen reader."""
    ask(page, "a red boat at sunset")
    customize(page, frames="9")
    advance(page)
    page.fill("#field-steps input", "1000")
    page.press("#field-steps input", "Tab")
    start(page)
    page.wait_for_selector("#status :text('of 1000')", timeout=300_000)
    page.wait_for_selector("#stage img[src^='data:image/webp']")
    page.click("#tab-queue-button")
    page.fill("#several-prompts", "a blue ball")
    page.click("#queue-add [data-action=add]")
    page.click("#tab-cluster-button")
    node = page.locator("#cluster-machines li[data-node]").nth(1)
    node.locator(".workers li:has-text('a red boat at sunset'):has-text('of 1000 steps') [aria-valuenow]").wait_for()
    page.locator("#cluster-queue li:has-text('a blue ball'):has-text('Diorama is loaded on')").wait_for()
    # The key is in the page only while it is asked for, also after the panel was refreshed.
    key = (cluster.folder / "head" / "cluster.key").read_text(encoding="ascii")
    assert key not in page.content()
    page.focus("#cluster-join [data-action=key]")
    page.keyboard.press("Enter")
    page.locator(f"#cluster-join code:has-text('{key}')").wait_for()
    page.wait_for_timeout(1500)
    assert f"worker --join 127.0.0.1:{cluster.port}" in page.inner_text("#cluster-join .with-key")
    assert page.evaluate("document.activeElement.dataset.action") == "key"
    found = []
    for scheme, rules in (("light", RULES), ("dark", COLORS)):
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS if scheme == "light" else AXE_WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)
            assert page.get_by_role("tab").count() == 6, width
            if width in AXE_WIDTHS:
                found += serious_issues(page, rules)
            assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert found == []
    page.keyboard.press("Enter")
    page.locator(f"#cluster-join code:has-text('{key}')").wait_for(state="detached")
    assert key not in page.content()
    page.set_viewport_size(DESKTOP)
    page.click("#tab-queue-button")
    page.click("#queue-list [data-action=cancel-all]")
    page.click("dialog[open] .strong")
    page.click("#tab-make-button")
    wait_for_state(page, "cancelled")
    assert page.complaints == []
