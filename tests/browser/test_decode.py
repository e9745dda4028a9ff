"""The form that decodes a file of latents, in a browser: choices, the task, the player, bad latents, both widths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.app_server import Server
from tests.browser.conftest import DESKTOP, PHONE, OpenPage
from tests.browser.test_page import UNNAMED_INPUTS
from tests.families.dcae import decoders

pytestmark = pytest.mark.browser

CUT_OFF = """
() => [...document.querySelectorAll('[data-panel="decode"] *')]
  .filter((node) => node.checkVisibility() && !node.closest('.unseen'))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def latents(server: Server) -> Path:
    """Return a folder of latents for the decoder that it installs; 9 channels are one too many."""
    decoders.save_autoencoder(server.cache_dir / "weights" / "tiny-dcae")
    folder = server.cache_dir / "latents"
    folder.mkdir()
    for name, channels in (("world", 8), ("bad", 9)):
        np.save(folder / f"{name}.npy", np.zeros((20, channels, 3, 4), "float32"))
    return folder


def decode(page: Any, file: Path, channels: str = "rgb") -> str:
    """Fill in the form and start it by keyboard; return the selector of the task."""
    tasks = "#decode-tasks [data-task]"
    before = page.locator(tasks).count()
    page.fill("#decode-file", str(file))
    page.select_option("#decode-model", "tiny-dcae")
    page.fill("#decode-channels", channels)
    page.keyboard.press("Enter")
    page.wait_for_function(f"(count) => document.querySelectorAll('{tasks}').length > count", arg=before)
    return f"{tasks}:has-text('Decode {file.name}')"


def test_latents_are_decoded_and_played(open_page: OpenPage, latents: Path) -> None:
    page = open_page()
    page.get_by_role("tab", name="Models").click()
    page.focus("#decode summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#decode-model option[value=tiny]", state="attached")
    assert page.evaluate(UNNAMED_INPUTS) == []

    bad = decode(page, latents / "bad.npy")
    page.wait_for_selector(f"{bad}[data-state=failed] .line:has-text('9 channels')")
    # Files in the folder of latents are listed, and chosen by name.
    options = page.locator("#decode-files option")
    assert [option.get_attribute("value") for option in options.all()] == ["bad.npy", "world.npy"]
    world = decode(page, Path("world.npy"), "rgb,0")
    page.wait_for_selector(f"{world}[data-state=done] .line:has-text('20 frames')")
    page.wait_for_function("() => document.querySelector('#decode-player video')?.readyState >= 1")
    # Two panels of frames of 16×12, side by side.
    assert page.evaluate("() => document.querySelector('#decode-player video').videoWidth") == 32
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    # What is typed stays while the panel is updated.
    assert page.input_value("#decode-file") == "world.npy"
    assert page.complaints == []
