"""More models, in a browser: offered with licence and size, downloaded after asking, then in the choice of models."""

import json
from pathlib import Path

import pytest

from runtime.models.wan import read_spec
from tests.browser.conftest import OpenPage, ready
from tests.models.hub import of_folder, served
from tests.served import MODEL, make_cache, serving

pytestmark = pytest.mark.browser

NAME, FOLDER = "wan2.2-t2v-a14b", "Wan2.2-T2V-A14B-Diffusers"


def test_a_model_is_downloaded_after_asking_and_chosen(open_page: OpenPage, tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    model = cache / "weights" / MODEL
    assert read_spec(model, MODEL).experts == 2
    with served(**{FOLDER: of_folder(model)}) as hub:
        (cache / "settings.json").write_text(json.dumps({"hub": hub.address}))
        with serving(cache) as server:
            page = open_page(url=server.url)
            page.click("#more-models > button")
            item = f"#models-view [data-model='{NAME}']"
            page.wait_for_selector(f"{item}[data-state=absent]")
            assert "Licence Apache-2.0, about 137.5 GB at most" in page.inner_text(item)
            page.click(f"{item} [data-act=download]")
            assert "Its licence is Apache-2.0" in page.inner_text("dialog[open]")
            page.keyboard.press("Escape")
            assert not hub.asked
            page.click(f"{item} [data-act=download]")
            page.click("dialog[open] .strong")
            page.wait_for_selector("#models-view :text('is here, whole and right')")
            assert page.query_selector(item) is None
            for _ in range(2):
                page.click("#field-model input")
                page.wait_for_selector(f"[role=option]:has-text('{FOLDER}')")
                page.keyboard.press("Escape")
                page.reload()
                ready(page)
            assert page.complaints == []
