"""More models, in a browser: offered with license and size, downloaded after asking, watched and cancelled."""

import pytest

from tests.app_server import MODEL, Server
from tests.browser.conftest import OpenPage, ready
from tests.models.hub import Fault, LoopbackHub, of_folder

pytestmark = pytest.mark.browser

NAME, FOLDER = "wan2.2-t2v-a14b", "Wan2.2-T2V-A14B-Diffusers"
LAST = "vae/diffusion_pytorch_model.safetensors"


def test_a_download_is_confirmed_and_can_be_cancelled(open_page: OpenPage, server: Server, hub: LoopbackHub) -> None:
    hub.repositories[f"Wan-AI/{FOLDER}"] = of_folder(server.cache_dir / "weights" / MODEL)
    hub.faults[LAST] = Fault("stall", after=1000)
    item = f"#models-list [data-model='{NAME}']"
    page = open_page()
    page.click("#more-models > button")
    page.wait_for_selector(f"{item}[data-state=absent]")
    assert "License: Apache-2.0. Download: up to 137.5 GB. Minimum hardware: 6 GB card" in page.inner_text(item)

    page.click(f"{item} [data-action=download]")
    assert "License: Apache-2.0" in page.inner_text("dialog[open]")
    page.keyboard.press("Escape")
    assert not hub.requests
    page.click(f"{item} [data-action=download]")
    page.click("dialog[open] .strong")
    # The download continues without its page.
    page.wait_for_selector(f"{item}[data-state=running] :text('vae/')")
    page.reload()
    ready(page)
    page.click("#more-models > button")
    page.wait_for_selector(f"{item}[data-state=running] .bar[aria-valuenow]:not([hidden])")
    page.click(f"{item} [data-action=cancel]")
    page.wait_for_selector(f"{item}[data-state=cancelled]")
    assert "Received data is kept" in page.inner_text(item)
    assert not (server.cache_dir / "weights" / FOLDER).exists()
    assert page.complaints == []
