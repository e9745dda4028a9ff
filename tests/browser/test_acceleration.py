"""The acceleration panel in a browser: it follows the settings and is restored with the form."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app_server import Server, make_cache, serving
from tests.browser.conftest import DESKTOP, PHONE, OpenPage, ask, ready, start, wait_for_state
from tests.browser.test_page import UNNAMED_INPUTS

pytestmark = pytest.mark.browser

ROWS = ("text_encoder", "transformer", "transformer_2", "vae")


def unfold(page: Any) -> None:
    """Open the panel and wait until its chips are there."""
    page.wait_for_function("() => /Auto|As chosen/.test(document.querySelector('#acceleration > button').innerText)")
    page.click("#acceleration > button")
    page.wait_for_selector("#part-vae .badge:has-text(':')")


def choose(page: Any, field: str, title: str) -> None:
    """Choose an entry of a list."""
    page.click(f"#field-{field} input")
    page.click(f"[role=option]:has-text('{title}')")


def wait_for_chip(page: Any, part: str, words: str) -> None:
    """Wait until a chip says something."""
    page.wait_for_selector(f"#part-{part} .badge:has-text('{words}')")


def test_the_closed_panel_shows_the_summary(open_page: OpenPage) -> None:
    page = open_page()
    page.wait_for_function("() => document.querySelector('#acceleration > button').innerText.includes('Auto')")
    assert page.get_attribute("#acceleration > button", "aria-expanded") == "false"


def test_a_choice_changes_only_its_own_badge(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    choose(page, "backend_vae", "PyTorch")
    wait_for_chip(page, "vae", "PyTorch: as requested")
    choose(page, "backend_vae", "ONNX Runtime")
    wait_for_chip(page, "vae", "PyTorch: ONNX Runtime engine is built when idle")
    assert "as requested" not in page.inner_text("#part-text_encoder .badge")
    assert "2 engines to build when no video waits" in page.inner_text("#acceleration > button")
    choose(page, "build", "Never")
    wait_for_chip(page, "vae", "PyTorch: no ONNX Runtime engine, and none is to be built")


def test_quick_changes_end_with_the_last_answer(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    for width in ("32", "33", "48", "49", "65", "64"):
        page.fill("#field-width input", width)
    page.wait_for_function("() => !document.querySelector('#part-vae .badge').innerText.includes('Invalid')")
    page.fill("#field-width input", "65")
    wait_for_chip(page, "vae", "Invalid setting")
    assert "multiples of 16" in page.inner_text("#plan-summary .trouble")
    assert page.is_hidden("#plan-summary .memory")
    # Nothing else of the page complains.
    assert page.get_attribute("#status .status", "data-state") != "failed"
    page.fill("#field-width input", "64")
    page.wait_for_selector("#plan-summary .memory", state="visible")


def test_without_a_gpu_tensorrt_is_disabled_with_the_reason(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    for part in ROWS:
        assert page.is_disabled(f"#tensorrt-{part} input")
    assert page.get_attribute("#tensorrt-vae input", "aria-describedby") == "no-tensorrt"
    assert "No NVIDIA GPU was found" in page.inner_text("#no-tensorrt")


def test_choices_are_stored_and_restored_from_a_result(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    choose(page, "backend_vae", "PyTorch")
    choose(page, "build", "Never")
    page.wait_for_function("() => localStorage.getItem('tandem.form').includes('\"build\":\"never\"')")
    page.reload()
    ready(page)
    unfold(page)
    assert page.input_value("#field-backend_vae input") == "PyTorch"
    assert page.input_value("#field-build input") == "Never"
    ask(page, "a red ball")
    start(page)
    wait_for_state(page, "done")
    choose(page, "backend_vae", "Automatic")
    page.click("#facts [data-use=all]")
    page.wait_for_function("() => document.querySelector('#field-backend_vae input').value === 'PyTorch'")
    wait_for_chip(page, "vae", "PyTorch: as requested")


def test_rows_follow_the_model(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    assert "High-noise transformer" in page.inner_text("#part-transformer")
    assert page.is_visible("#part-transformer_2")


@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"])
def test_the_layout_fits_and_has_accessible_names(open_page: OpenPage, viewport: dict[str, int], scheme: str) -> None:
    page = open_page(viewport, color_scheme=scheme)
    unfold(page)
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(UNNAMED_INPUTS) == []
    assert page.get_attribute("#field-backend_vae input", "aria-describedby") == "why-vae"
    assert "NVIDIA" in str(page.text_content("#why-vae"))
    assert page.locator("#plan-summary [aria-live]").count() == 1
    assert page.locator("#part-vae [aria-live]").count() == 0
    assert page.complaints == []


def test_a_badge_does_not_move_the_page(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    place = "() => document.querySelector('#field-build').getBoundingClientRect().y + scrollY"
    before = page.evaluate(place)
    choose(page, "backend_vae", "PyTorch")
    wait_for_chip(page, "vae", "as requested")
    assert page.evaluate(place) == before


def test_launch_flags_are_defaults_until_the_user_chooses(
    open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving(make_cache(tmp_path_factory.mktemp("preset")), "--enable-tensorrt", "--tensorrt-transformer") as other:
        page = open_page(url=other.url)
        unfold(page)
        shown = [page.input_value(f"#field-backend_{part} input") for part in ROWS]
        assert shown == ["Automatic", "TensorRT", "TensorRT", "Automatic"]
        assert page.is_checked("#tensorrt-transformer input") and not page.is_checked("#tensorrt-vae input")
        wait_for_chip(page, "transformer", "PyTorch: no NVIDIA GPU was found")
        choose(page, "backend_transformer", "PyTorch")
        page.wait_for_function(
            "() => localStorage.getItem('tandem.form').includes('\"backend_transformer\":\"pytorch\"')"
        )
        page.reload()
        ready(page)
        unfold(page)
        assert page.input_value("#field-backend_transformer input") == "PyTorch"
        assert page.input_value("#field-backend_transformer_2 input") == "TensorRT"


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The app on a machine whose GPU has too little memory for the fastest way; nothing is run there."""
    cache = make_cache(tmp_path_factory.mktemp("short"))
    with serving(cache, program=("-m", "tests.small_gpu_app", "1.05")) as running:
        yield running


def ask_for_much(page: Any) -> None:
    """Ask for a clip for which memory is short, and wait until the ways there are are shown."""
    page.fill("#field-width input", "128")
    page.fill("#field-height input", "128")
    page.fill("#field-frames input[type=number]", "17")
    page.press("#field-frames input[type=number]", "Tab")
    page.wait_for_selector(".strategies .strategy[aria-pressed=true]")


@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"])
def test_a_strategy_can_be_selected_if_memory_is_short(
    open_page: OpenPage, short_of_memory: Server, viewport: dict[str, int], scheme: str
) -> None:
    page = open_page(viewport, short_of_memory.url, color_scheme=scheme)
    unfold(page)
    ask_for_much(page)
    assert page.inner_text(".strategy[aria-pressed=true] span") == "One component at a time"
    assert "too little video memory" in page.inner_text(".strategies li:first-child .strategy:disabled")
    assert "bitsandbytes is not installed" in page.inner_text(".strategy[data-quantization='bnb-4bit']:disabled")
    place = """() => {
      const box = document.querySelector('.strategies').getBoundingClientRect();
      return [box.y + scrollY, box.height];
    }"""
    before = page.evaluate(place)
    # By keyboard: the next that can be chosen.
    page.focus(".strategy[aria-pressed=true]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".strategy[data-offload=model][aria-pressed=true]")
    assert page.input_value("#field-offload input") == "By component"
    assert page.input_value("#field-quantization input") == "None"
    assert page.evaluate("() => document.activeElement.dataset.offload") == "model"
    assert page.locator(".strategy[aria-pressed=true]").count() == 1
    assert page.evaluate(place) == before
    page.click(".strategy[data-offload=sequential]")
    page.wait_for_selector(".strategy[data-offload=sequential][aria-pressed=true]")
    # Block engines allow the other offloads.
    wait_for_chip(page, "transformer", "offload sequential excludes TensorRT")
    assert page.evaluate(place) == before
    page.click(".strategies button:has-text('Choose automatically')")
    page.wait_for_function("() => document.querySelector('#field-offload input').value === 'Automatic'")
    page.wait_for_selector(".strategy[data-offload=none][aria-pressed=true]")
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.complaints == []


def test_a_form_that_does_not_fit_lists_all_strategies(open_page: OpenPage, short_of_memory: Server) -> None:
    page = open_page(url=short_of_memory.url)
    unfold(page)
    page.fill("#field-width input", "1024")
    page.fill("#field-height input", "1024")
    # As it is typed: once the field is left, it goes down to the most that the model is for.
    page.fill("#field-frames input[type=number]", "253")
    page.wait_for_selector(".strategies:has-text('No strategy fits into memory')")
    assert "video memory" in page.inner_text("#plan-summary .trouble")
    assert page.locator(".strategy:enabled").count() == 0
    assert page.locator(".strategy").count() == 9


def test_each_badge_follows_its_toggle(open_page: OpenPage, short_of_memory: Server) -> None:
    page = open_page(url=short_of_memory.url)
    unfold(page)
    for part in ROWS:
        planned = page.inner_text(f"#part-{part} .badge")
        for _ in range(2):
            before = page.inner_text(f"#part-{part} .badge")
            page.click(f"#tensorrt-{part} input")
            page.wait_for_function(
                "([part, before]) => document.querySelector(`#part-${part} .badge`).innerText !== before",
                arg=[part, before],
            )
        assert page.inner_text(f"#part-{part} .badge") == planned
