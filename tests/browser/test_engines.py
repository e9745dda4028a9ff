"""The Engines tab in a browser: build and cancel, pin, delete after asking, seen alike by every tab."""

from pathlib import Path
from typing import Any

import pytest

from runtime.engines.store import EngineStore
from runtime.models.registry import read_spec
from tests.app_server import MODEL, Server
from tests.browser.conftest import DESKTOP, OpenPage, ready
from tests.browser.test_acceleration import choose, unfold
from tests.browser.test_page import UNNAMED_INPUTS
from tests.engines import exported_files
from tests.ui.test_plan_preview import insert

pytestmark = pytest.mark.browser

SMALL = {"width": 320, "height": 640}
CUT_OFF = """
() => [...document.querySelectorAll('[data-panel="engines"] *')]
  .filter((node) => node.checkVisibility() && !node.closest('.unseen'))
  .filter((node) => {
    const { left, right } = node.getBoundingClientRect();
    return left < -1 || right > document.documentElement.clientWidth + 1;
  }).map((node) => node.outerHTML.slice(0, 120))
"""


def go(page: Any) -> None:
    """Open the tab and wait until the library is there."""
    page.click("[role=tab]:has-text('Engines')")
    page.wait_for_selector("#engines-storage .meter")


def stock(server: Server, number: int) -> str:
    """Put an engine into the server's library."""
    return insert(EngineStore(server.cache_dir / "engines", 10**10), number)


def test_an_engine_is_deleted_by_keyboard_after_confirmation(open_page: OpenPage, server: Server) -> None:
    kept, gone = stock(server, 1), stock(server, 2)
    page = open_page()
    go(page)
    menu = f"[data-engine='{gone}'] .menu"
    page.wait_for_selector(menu)
    page.focus(f"{menu} > summary")
    # Up from the menu's button leads to its last action.
    page.keyboard.press("ArrowUp")
    page.wait_for_function("() => document.activeElement.dataset.action === 'delete'")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    assert "This frees " in page.inner_text("dialog.ask")
    assert page.evaluate("() => document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.ask", state="detached")
    assert page.evaluate("() => document.activeElement.dataset.target") == gone
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"[data-engine='{gone}']", state="detached")
    assert page.is_visible(f"[data-engine='{kept}']")
    page.wait_for_function("() => document.activeElement.textContent === 'Library'")


def test_pinning_is_shown_in_another_tab_that_holds_no_connection(open_page: OpenPage, server: Server) -> None:
    engine = stock(server, 3)
    page = open_page()
    other, requests = page.context.new_page(), list[str]()
    other.on("request", lambda request: requests.append(request.url))
    other.goto(server.url)
    ready(other)
    go(page)
    go(other)
    page.click(f"[data-engine='{engine}'] .menu > summary")
    page.click(f"[data-action=pin][data-target='{engine}']")
    page.wait_for_selector(f"[data-engine='{engine}'] .tag:text('pinned')")
    other.wait_for_selector(f"[data-engine='{engine}'] .tag:text('pinned')")
    assert "Pinned: transformer." in page.inner_text("#message")
    # Of a browser's tabs one waits for changes: it tells the others, and another one takes its place.
    assert not [url for url in requests if "/tandem/now/" in url or "/heartbeat/" in url]
    with other.expect_request("**/tandem/now/*"):
        page.close()


def test_a_build_survives_a_reload_and_is_cancelled(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    choose(page, "backend_text_encoder", "onnxruntime")
    go(page)
    page.click("#engines-components [data-action=build][data-target=text_encoder]")
    page.wait_for_selector("#engines-tasks li[data-kind=build][data-state=running]")
    page.reload()
    ready(page)
    go(page)
    other = open_page()
    go(other)
    for watching in (page, other):
        watching.wait_for_selector(
            "#engines-tasks li[data-kind=build][data-state=running] .builds li[data-state=running]"
        )
    other.click("#engines-tasks li[data-kind=build] [data-action=cancel]")
    page.wait_for_selector("#engines-tasks li[data-kind=build][data-state=cancelled]")
    assert "Cancelled." in page.inner_text("#engines-tasks")


def test_a_build_adds_an_engine_and_changes_its_badge(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    choose(page, "backend_text_encoder", "onnxruntime")
    go(page)
    page.click("#engines-components [data-action=build][data-target=text_encoder]")
    row = "#engines-table li[data-state=ready]:has-text('Text encoder')"
    page.wait_for_selector(row, timeout=400_000)
    page.click(f"{row} .technical summary")
    assert "any size" in page.inner_text(row)
    builds = page.inner_text("#engines-tasks li[data-kind=build] .builds >> nth=0")
    assert "Text encoder, ONNX Runtime" in builds and "times as fast as PyTorch" in builds
    # Nothing is left to build for it.
    page.wait_for_selector("[data-component=text_encoder] > .acts > [data-action=build]", state="detached")
    page.click("[role=tab]:has-text('Make')")
    page.wait_for_selector("#part-text_encoder .badge[data-kind=ready]")


def test_an_engine_file_is_inspected_trusted_and_imported(open_page: OpenPage, server: Server, tmp_path: Path) -> None:
    spec = read_spec(server.cache_dir / "weights" / MODEL, MODEL)
    path, text = exported_files.transformer(spec, tmp_path / "foreign.onnx"), tmp_path / "text.plan"
    text.write_text("hello", encoding="utf-8")
    page = open_page()
    go(page)
    page.focus("#import > summary")
    page.keyboard.press("Enter")
    file = page.get_by_label("Engine file", exact=True)
    file.fill(str(text))
    page.keyboard.press("Enter")
    page.wait_for_selector("#message:has-text('text.plan is a text file, not an engine. Give a TensorRT plan')")
    file.fill(str(path))
    page.click("#import [data-action=import]")
    page.wait_for_selector("#message:has-text('foreign.onnx holds executable code')")
    assert page.locator("#engines-tasks li[data-kind=inspect], #engines-tasks li[data-kind=import]").count() == 0
    assert "executable code" in page.inner_text("#import-warning")
    page.get_by_label("I trust the source").check()
    page.click("#import [data-action=inspect]")
    looked = "#engines-tasks li[data-kind=inspect][data-state=done] .found"
    page.wait_for_selector(looked)
    found = page.inner_text(looked)
    for expected in (
        "Input sample (1, 16, 3, 5, 8) float16",
        "Could replace the high-noise transformer or low-noise transformer of Tiny for 64x32, 9 frames.",
        "Cross-attention processes 2 times as many tokens.",
    ):
        assert expected in found, expected
    page.click("#import [data-action=import]")
    page.wait_for_selector("#engines-tasks li[data-kind=import][data-state=done]")
    assert "Imported as " in page.inner_text("#engines-tasks li[data-kind=import] .line")
    row = "#engines-table li[data-state=ready]:has(dd:text('imported'))"
    page.wait_for_selector(row)
    assert "Stale" not in page.inner_text(row)
    # Another file has to be trusted again.
    file.press_sequentially("x")
    page.wait_for_function("() => !document.querySelector('#import-trusted').checked")
    # It goes again: other tests share the library.
    page.click(f"{row} .menu > summary")
    page.click(f"{row} [data-action=delete]")
    assert "It can be imported again from its file." in page.inner_text("dialog.ask")
    page.click("dialog.ask .strong")
    page.wait_for_selector(row, state="detached")
    assert page.complaints == []


def test_the_layout_fits_with_accessible_names_and_menus_in_view(open_page: OpenPage, server: Server) -> None:
    stock(server, 4)
    page = open_page()
    go(page)
    page.click("#engines-table .menu >> nth=0")
    page.wait_for_selector("#engines-table [data-action=delete]")
    for viewport in (DESKTOP, SMALL):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    page.click("#import > summary")
    page.wait_for_selector("#import [data-action=import]", state="visible")
    assert page.get_attribute("#import-trusted", "aria-describedby") == "import-warning"
    assert page.get_attribute("#import", "open") is not None
    for viewport in (DESKTOP, SMALL):
        page.set_viewport_size(viewport)
        assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(UNNAMED_INPUTS) == []
    # A menu at the end of the window is scrolled into view.
    page.click("#import > summary")
    page.set_viewport_size({"width": DESKTOP["width"], "height": 420})
    menu = page.locator("#engines-table .menu").last
    # The button is at the lower edge of the window.
    menu.evaluate("(menu) => menu.scrollIntoView({ block: 'end' })")
    # At once: later, answers of the server may move the rows.
    bottom, height = menu.evaluate(
        """async (menu) => {
          menu.querySelector('summary').click();
          await new Promise((done) => menu.addEventListener('toggle', done, { once: true }));
          return [menu.querySelector('.menu-items').getBoundingClientRect().bottom, innerHeight];
        }"""
    )
    assert bottom <= height
    assert page.complaints == []
