"""The tab Models, in a browser: cards, downloads that are paused and resumed, a repository, deletion, "Use"."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.app_server import MODEL, Server
from tests.browser.conftest import DESKTOP, OpenPage, ready
from tests.browser.test_page import UNNAMED_INPUTS
from tests.models.hub import Fault, LoopbackHub, of_folder
from tests.variant_files import NAME as VARIANT
from tests.variant_files import publish

pytestmark = pytest.mark.browser

NAME, FOLDER = "wan2.2-t2v-a14b", "Wan2.2-T2V-A14B-Diffusers"
LAST = "vae/diffusion_pytorch_model.safetensors"
SMALL = {"width": 320, "height": 640}
CUT_OFF = """
() => [...document.querySelectorAll('[data-panel="models"] *')]
  .filter((node) => node.checkVisibility() && !node.closest('.unseen'))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))
"""


def go(page: Any) -> None:
    """Open the tab and wait for its cards."""
    page.get_by_role("tab", name="Models").click()
    page.wait_for_selector("#models-available .card")


def test_a_download_is_confirmed_paused_resumed_and_removed(
    open_page: OpenPage, server: Server, hub: LoopbackHub
) -> None:
    hub.repositories[f"Wan-AI/{FOLDER}"] = of_folder(server.cache_dir / "weights" / MODEL)
    hub.faults[LAST] = Fault("stall", after=1000, times=9)
    card = f"#models-available [data-model='{NAME}']"
    page = open_page()
    go(page)
    page.wait_for_selector(f"{card}[data-state=absent]")
    shown = page.inner_text(card)
    for expected in ("Apache-2.0", "126.2 GB", "6 GB card", "Default clip"):
        assert expected in shown, expected

    # The original weights are first, or below the variant that fits this machine.
    if not page.is_visible(original := f"{card} [data-target='{NAME}'][data-action=download]"):
        page.click(f"{card} .variants summary")
    page.click(original)
    assert "License: Apache-2.0" in page.inner_text("dialog[open]")
    page.keyboard.press("Escape")
    assert not hub.requests
    page.click(original)
    page.click("dialog[open] .strong")
    # The download continues without its page.
    page.wait_for_selector(f"{card}[data-state=running] :text('vae/')")
    page.reload()
    ready(page)
    go(page)
    page.wait_for_selector(f"{card}[data-state=running] .bar[aria-valuenow]:not([hidden])")
    page.click(f"{card} [data-action=pause]")
    page.wait_for_selector(f"{card}[data-state=cancelled]")
    assert "Received data is kept" in page.inner_text(card)
    assert "Received" in page.inner_text(f"{card} dl")
    assert not (server.cache_dir / "weights" / FOLDER).exists()

    page.click(f"{card} [data-action=download]:text('Resume')")
    page.click("dialog[open] .strong")
    page.wait_for_selector(f"{card}[data-state=running]")
    page.click(f"{card} [data-action=pause]")
    page.wait_for_selector(f"{card}[data-state=cancelled]")
    page.click(f"{card} summary")
    page.click(f"{card} [data-action=discard]")
    page.click("dialog[open] .strong")
    page.wait_for_selector(f"{card}[data-state=absent]")
    assert not (server.cache_dir / "weights" / f".{FOLDER}.partial").exists()
    assert page.complaints == []


def test_one_click_gets_a_variant_that_is_used_with_its_lora(
    open_page: OpenPage, server: Server, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.faults.clear()
    publish(hub, server.cache_dir / "weights" / MODEL, tmp_path)
    page = open_page()
    go(page)
    of_model = f"#models-available [data-model='{NAME}']"
    button = f"{of_model} [data-action=download][data-target='{VARIANT}']"
    page.wait_for_selector(button, state="attached")
    # Which variant fits depends on the machine of the test.
    if not page.is_visible(button):
        page.click(f"{of_model} .variants summary")
    for viewport in (SMALL, DESKTOP):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    page.click(button)
    assert "License: Apache-2.0. Size: 43.0 GB." in page.inner_text("dialog[open]")
    page.click("dialog[open] .strong")
    card = f"#models-installed [data-model='{VARIANT}']"
    page.wait_for_selector(f"{card} [data-action=use]")
    page.click(f"{card} [data-action=use]")
    page.wait_for_selector("#tabs [role=tab][aria-selected=true]:text-is('Make')")
    page.wait_for_function(f"() => window.tandem.values.includes('{VARIANT}')")
    request = json.loads(page.request.get(f"{server.url}v1/models/{VARIANT}").text())
    assert (request["steps"], request["variant"]["name"], len(request["variant"]["loras"])) == (4, "fp8", 2)
    go(page)
    page.wait_for_selector(f"{card} .tag:text('Selected')")
    page.click(f"{card} summary")
    page.wait_for_selector(f"{card} details[open]")
    page.click(f"{card} [data-action=delete]")
    page.click("dialog[open] .strong")
    page.wait_for_selector(card, state="detached")
    assert page.complaints == []


def test_a_model_is_used_and_deleted_by_keyboard(open_page: OpenPage, server: Server) -> None:
    weights = server.cache_dir / "weights"
    shutil.copytree(weights / MODEL, weights / "Second")
    (weights / "Broken").mkdir(exist_ok=True)
    card = "#models-installed [data-model=Second]"
    page = open_page()
    go(page)
    page.wait_for_selector(card)
    assert "Runs well here" in page.inner_text(card)
    assert "no readable Broken/model_index.json" in page.inner_text("#models-installed [data-model=Broken]")
    assert page.evaluate(UNNAMED_INPUTS) == []
    for viewport in (DESKTOP, SMALL):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []

    page.focus(f"{card} [data-action=use]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tabs [role=tab][aria-selected=true]:text-is('Make')")
    page.wait_for_function("() => document.querySelector('#field-model input')?.value.startsWith('Tiny')")
    page.wait_for_function("() => window.tandem.values.includes('Second')")
    go(page)
    page.wait_for_selector(f"{card} .tag:text('Selected')")
    assert page.query_selector(f"{card} [data-action=use]") is None

    # The arrow keys move in the menu, Escape closes it.
    page.focus(f"{card} summary")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(f"{card} details[open]")
    assert page.evaluate("() => document.activeElement.dataset.action") == "verify"
    assert "has no hashes" in page.get_attribute(f"{card} [data-action=verify]", "aria-label")
    for viewport in (DESKTOP, SMALL):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{card} details:not([open])")
    assert page.evaluate("() => document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    assert "This frees " in page.inner_text("dialog.ask")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(card, state="detached")
    page.wait_for_function("() => document.activeElement.matches('[data-heading]')")
    assert not (weights / "Second").exists()
    # The page had selected it.
    page.wait_for_function(f"() => window.tandem.values.includes('{MODEL}')")
    assert page.complaints == []


def test_a_repository_is_looked_up(open_page: OpenPage, server: Server, hub: LoopbackHub) -> None:
    hub.repositories["someone/Own"] = of_folder(server.cache_dir / "weights" / MODEL)
    page = open_page()
    go(page)
    field = page.get_by_label("Repository on Hugging Face")
    field.fill("nonsense")
    page.keyboard.press("Enter")
    page.wait_for_selector("#message:has-text('is not a model')")
    field.fill("someone/Own")
    page.keyboard.press("Enter")
    card = "#models-available [data-model=Own]"
    page.wait_for_selector(f"{card}[data-state=absent] dl:has-text('Download')")
    assert "apache-2.0" in page.inner_text(card)
    page.click(f"{card} summary")
    page.click(f"{card} [data-action=discard]")
    page.click("dialog[open] .strong")
    page.wait_for_selector(card, state="detached")
    assert page.complaints == []
