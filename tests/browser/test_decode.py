"""The form that decodes a file of latents, in a browser: choices, the task, the player, bad latents, both widths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.app_server import Server
from tests.browser.conftest import DESKTOP, PHONE, OpenPage, ready
from tests.browser.test_accessibility import serious_issues
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
    np.save(folder / "nan.npy", np.full((20, 8, 3, 4), np.nan, "float32"))
    return folder


def decode(page: Any, file: Path, channels: str = "rgb") -> str:
    """Fill in the form and start it by keyboard; return the selector of the task."""
    tasks = "#decode :is([data-task], .decoded)"
    before = page.locator(tasks).count()
    if file.is_absolute():
        page.select_option("#decode-file", "")
        page.fill("#decode-path", str(file))
    else:
        page.select_option("#decode-file", file.name)
    page.focus("#decode-channels")
    page.select_option("#decode-model", "tiny-dcae")
    page.fill("#decode-channels", channels)
    page.keyboard.press("Enter")
    page.wait_for_function(f"(count) => document.querySelectorAll('{tasks}').length > count", arg=before)
    return f"#decode-tasks [data-task]:has-text('Decode {file.name}')"


def test_latents_are_decoded_and_played(open_page: OpenPage, latents: Path) -> None:
    page = open_page()
    page.get_by_role("tab", name="Models").click()
    page.focus("#decode summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#decode-model option[value=tiny]", state="attached")
    assert page.evaluate(UNNAMED_INPUTS) == []

    page.select_option("#decode-model", "tiny-dcae")
    page.select_option("#decode-file", "bad.npy")
    page.click("#decode [data-action=decode]")
    page.wait_for_selector("#message.error:has-text('9 channels')")
    nan = decode(page, latents / "nan.npy")
    page.wait_for_selector(f"{nan}[data-state=failed] .line:has-text('nan.npy')")
    # Files in the folder of latents are listed; one that is uploaded is selected, and refused if it has no latents.
    page.set_input_files("#decode-upload-file", {"name": "notes.npy", "mimeType": "", "buffer": b"notes"})
    page.wait_for_selector("#message.error:has-text('notes.npy')")
    (latents / "world.npy").rename(latents.parent / "world 1.npy")
    page.set_input_files("#decode-upload-file", latents.parent / "world 1.npy")
    page.wait_for_function("() => document.querySelector('#decode-file').value === 'world 1.npy'")
    assert page.is_hidden("#decode-path")
    decode(page, Path("world 1.npy"), "rgb,0")
    page.wait_for_selector("#decode-clips .decoded:has-text('20 frames')")
    page.reload()
    ready(page)
    page.get_by_role("tab", name="Models").click()
    page.click("#decode summary")
    page.wait_for_function("() => document.querySelector('#decode-clips video')?.readyState >= 1")
    # Two panels of frames of 16×12, side by side.
    assert page.evaluate("() => document.querySelector('#decode-clips video').videoWidth") == 32
    assert page.get_attribute("#decode-clips a[download]", "download").endswith(".mp4")
    assert serious_issues(page, part="#decode") == []
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        assert page.evaluate(CUT_OFF) == []
    page.select_option("#decode-file", "")
    page.fill("#decode-path", "world.npy")
    page.wait_for_event("response", lambda answer: "panels/decode" in answer.url)
    # What is typed stays while the panel is updated.
    assert page.input_value("#decode-path") == "world.npy"
    assert [text for text in page.complaints if "422" not in text] == []
