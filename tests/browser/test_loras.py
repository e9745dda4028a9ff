"""The list of LoRA files in Make, in a browser and by keyboard."""

import shutil

import pytest

from runtime.models.registry import read_spec
from tests.app_server import MODEL, Server
from tests.browser.conftest import DESKTOP, OpenPage, advance
from tests.browser.test_page import UNNAMED_INPUTS
from tests.lora_files import factors, peft, save

pytestmark = pytest.mark.browser

FIELD = "#field-loras textarea"
SMALL = {"width": 320, "height": 640}


def test_files_are_selected_by_keyboard(open_page: OpenPage, server: Server) -> None:
    folder = server.cache_dir / "weights" / "loras"
    spec = read_spec(server.cache_dir / "weights" / MODEL, MODEL)
    (folder / "styles").mkdir(parents=True, exist_ok=True)
    for name in ("styles/ink", *"abcdefg"):
        save(folder / f"{name}.safetensors", peft(factors(spec.transformer)))
    (folder / "broken.safetensors").write_bytes(b"x" * 100)
    try:
        page = open_page()
        advance(page)
        row = "[data-lora='styles/ink']"
        page.wait_for_selector(row)
        page.fill("#lora-search", "ink")
        page.wait_for_selector("[data-lora=a]", state="hidden")
        page.focus(f"{row} input[type=checkbox]")
        page.keyboard.press("Space")
        assert page.input_value(FIELD) == "styles/ink:1"
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowLeft")
        assert page.input_value(FIELD) == "styles/ink:0.95"
        page.keyboard.press("Tab")
        # What is typed is used, or refused; without a number the strength stays.
        for refused in ("0", "-1"):
            page.fill(f"{row} input[type=number]", refused)
            assert page.input_value(FIELD) == f"styles/ink:{refused}"
            assert page.is_checked(f"{row} input[type=checkbox]")
        page.wait_for_selector("#forecast:has-text('above 0 and up to 4')")
        page.fill(f"{row} input[type=number]", "0.9")
        page.fill(f"{row} input[type=number]", "")
        page.press(f"{row} input[type=number]", "Shift+Tab")
        page.wait_for_function("(row) => document.querySelector(`${row} input[type=number]`).value === '0.9'", arg=row)
        page.keyboard.press("Tab")
        page.keyboard.type("0.5")
        page.wait_for_function("() => window.tandem.values.includes('styles/ink:0.5')")
        # The text field is the other way round; lines for other files stay.
        page.fill("#lora-search", "")
        page.fill(FIELD, "high=a:0.4\nelsewhere")
        page.wait_for_selector("[data-lora=a] .strength:not([hidden])")
        assert page.input_value("[data-lora=a] input[type=number]") == "0.4"
        assert not page.is_checked(f"{row} input[type=checkbox]")
        page.fill("[data-lora=a] input[type=number]", "2")
        assert page.input_value(FIELD) == "high=a:2\nelsewhere"
        page.uncheck("[data-lora=a] input[type=checkbox]")
        assert page.input_value(FIELD) == "elsewhere"
        page.wait_for_selector("[data-lora=broken] input[type=checkbox]:disabled")
        assert page.inner_text("[data-lora=broken]").count("broken") == 2  # its name, and its file in the reason
        assert page.evaluate(UNNAMED_INPUTS) == []
        for viewport in (DESKTOP, SMALL):
            page.set_viewport_size(viewport)
            assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")

        page.fill(FIELD, "")
        page.wait_for_function("() => window.tandem.values.includes('')")
        assert page.complaints == []
    finally:
        shutil.rmtree(folder)


def test_a_part_of_the_steps_is_set_by_keyboard(open_page: OpenPage, server: Server) -> None:
    folder = server.cache_dir / "weights" / "loras"
    spec = read_spec(server.cache_dir / "weights" / MODEL, MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "ink.safetensors", peft(factors(spec.transformer)))
    try:
        page = open_page()
        advance(page)
        row = "[data-lora=ink]"
        page.check(f"{row} input[type=checkbox]")
        page.focus(f"{row} summary")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.type("50")
        page.wait_for_function("() => window.tandem.values.includes('ink:1@0-0.5')")
        # Further lines of the same file stay.
        page.fill(FIELD, "ink:0.5@0.25-1\nink:0.3@0-0.25")
        page.wait_for_function("(row) => document.querySelector(`${row} [data-range=start]`).value === '25'", arg=row)
        page.fill(f"{row} [data-range=start]", "30")
        assert page.input_value(FIELD) == "ink:0.5@0.3-1\nink:0.3@0-0.25"
        page.uncheck(f"{row} input[type=checkbox]")
        assert not page.input_value(FIELD)
    finally:
        shutil.rmtree(folder)
