"""The plan in a browser: forecast and acceleration follow the settings and are restored with the form."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app_server import Server, make_cache, serving, serving_here
from tests.browser.conftest import (
    DESKTOP,
    PHONE,
    OpenPage,
    advance,
    ask,
    customize,
    fill_field,
    open_chip,
    ready,
    start,
    tick,
    wait_for_state,
)
from tests.browser.test_page import UNNAMED_INPUTS
from tests.ui.page_texts import line

pytestmark = pytest.mark.browser

ROWS = ("text_encoder", "transformer", "transformer_2", "vae")


def unfold(page: Any) -> None:
    """Open the panel Advanced and wait until the badges are there."""
    advance(page)
    page.wait_for_selector("#part-vae .badge:has-text(':')")


def choose(page: Any, field: str, value: str) -> None:
    """Choose a backend or another value."""
    if field.startswith("backend_"):
        page.check(f"#plan-components [name={field}][value={value}]")
    else:
        page.select_option(f"#field-{field}", value)


def chosen(page: Any, part: str) -> str:
    """Return the backend that is chosen for a component."""
    return str(page.get_attribute(f"#part-{part} input:checked", "value"))


def wait_for_chip(page: Any, part: str, words: str) -> None:
    """Wait until a chip says something."""
    page.wait_for_selector(f"#part-{part} .badge:has-text('{words}')")


def test_rows_follow_the_model_the_machine_and_their_own_choice(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    # What the machine lacks is disabled with the reason.
    for part in ROWS:
        cell = page.locator(f"#part-{part} td:has([value=tensorrt])")
        assert cell.locator("input").is_disabled()
        described = cell.locator("input").get_attribute("aria-describedby")
        assert page.inner_text(f"#{described}") == "no NVIDIA GPU was found"
    assert page.inner_text("#field-quantization option[value=fp8]") == "FP8: no NVIDIA GPU was found"
    assert page.locator("#field-quantization option:disabled").count() == 3
    # The layout fits, with accessible names.
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.set_viewport_size(DESKTOP)
    assert page.evaluate(UNNAMED_INPUTS) == []
    assert "NVIDIA" in page.inner_text("#part-vae .why")
    assert page.locator("#plan-summary [aria-live]").count() == 1
    assert page.locator("#part-vae [aria-live]").count() == 0
    assert page.complaints == []
    # A choice changes only its own badge.
    choose(page, "backend_vae", "pytorch")
    wait_for_chip(page, "vae", "PyTorch: as requested")
    choose(page, "backend_vae", "onnxruntime")
    wait_for_chip(page, "vae", "PyTorch: ONNX Runtime engine is built when idle")
    assert "as requested" not in page.inner_text("#part-text_encoder .badge")
    assert line("ui.builds_later", engines=2) in page.inner_text("#plan-summary .plan-line")
    choose(page, "build", "never")
    wait_for_chip(page, "vae", "PyTorch: no ONNX Runtime engine, and none is to be built")
    # The model decides which rows and fields there are.
    assert "High-noise transformer" in page.inner_text("#part-transformer")
    assert page.is_visible("#part-transformer_2")
    assert page.is_visible("#field-loras")
    page.evaluate("() => { document.querySelector('#card .model').dataset.lacks = 'loras' }")
    page.wait_for_selector("#field-loras", state="hidden")


def test_the_forecast_is_in_view_and_quick_changes_end_with_the_last_answer(open_page: OpenPage) -> None:
    page = open_page()
    page.wait_for_selector("#forecast .forecast:has-text('About')")
    assert page.get_attribute("#advanced", "aria-expanded") == "false"
    open_chip(page, "model")
    page.wait_for_selector("#card :text('here.')")
    assert re.search(r"A 1\.1 s clip takes about .* s and .* here", page.inner_text("#card"))
    page.keyboard.press("Escape")
    unfold(page)
    tick(page, "#size input[value=custom]")
    for width in ("32", "33", "48", "49", "65", "64"):
        fill_field(page, "width", width)
    page.wait_for_function("() => !document.querySelector('#forecast').innerText.includes('Invalid')")
    open_chip(page, "size")
    page.fill("#field-width input", "65")
    page.wait_for_selector("#forecast .forecast:has-text('Invalid setting')")
    # The error is not shown at the field while it is being typed, but as soon as the field is left.
    assert page.get_attribute("#field-width input", "aria-invalid") is None
    page.keyboard.press("Tab")
    page.wait_for_selector("#field-width [aria-invalid=true]")
    page.keyboard.press("Escape")
    # It is no component's fault.
    wait_for_chip(page, "vae", "No plan")
    assert "multiples of 16" in page.inner_text("#plan-summary .trouble")
    assert page.is_hidden("#plan-summary .memory")
    # Nothing else of the page complains.
    assert page.get_attribute("#status .status", "data-state") != "failed"
    # A valid size, however it is chosen, removes the error at the field.
    tick(page, "#size input[value='64x32']")
    page.wait_for_selector("#plan-summary .memory", state="visible")
    page.wait_for_selector("#field-width [aria-invalid=true]", state="detached")


def test_choices_are_stored_and_restored_from_a_result(open_page: OpenPage) -> None:
    page = open_page()
    unfold(page)
    choose(page, "backend_vae", "pytorch")
    choose(page, "upscaler", "small")
    choose(page, "interpolate", "2")
    choose(page, "upscale", "2")
    fps = int(page.input_value("#field-fps input"))
    assert f"{fps} to {2 * fps} fps" in page.inner_text("#field-interpolate option[value='2']")
    assert "128 × 64" in page.inner_text("#field-upscale option[value='2']")
    wait_for_chip(page, "upscaler", "PyTorch:")
    choose(page, "build", "never")
    page.wait_for_function("() => localStorage.getItem('tandem.form')?.includes('\"build\":\"never\"')")
    page.reload()
    ready(page)
    unfold(page)
    assert chosen(page, "vae") == "pytorch"
    fields = ("build", "interpolate", "upscale", "upscaler")
    assert [page.input_value(f"#field-{name}") for name in fields] == ["never", "2", "2", "small"]
    ask(page, "a red ball")
    start(page)
    wait_for_state(page, "done")
    page.wait_for_function("() => document.querySelector('#picture video')?.videoWidth === 128")
    page.click("#facts [popovertarget=details]")
    assert "128 × 64" in page.inner_text("#details .summary")
    assert f"at {2 * fps} fps" in page.inner_text("#details")
    plain = page.get_attribute("#details a[download$='.plain.mp4']", "href")
    assert page.request.get(f"{page.url}{plain}").headers["content-type"] == "video/mp4"
    page.keyboard.press("Escape")
    choose(page, "interpolate", "off")
    choose(page, "upscale", "off")
    page.wait_for_selector("#part-upscaler", state="detached")
    choose(page, "backend_vae", "auto")
    page.click("#facts .menu summary")
    page.click("#facts [data-use=all]")
    page.wait_for_selector("#part-vae [value=pytorch]:checked")
    wait_for_chip(page, "vae", "PyTorch: as requested")
    page.wait_for_selector("#part-upscaler")
    assert [page.input_value(f"#field-{name}") for name in ("interpolate", "upscale")] == ["2", "2"]


def test_launch_flags_are_defaults_until_the_user_chooses(
    open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving_here(make_cache(tmp_path_factory.mktemp("preset")), tensorrt=("transformer",)) as other:
        page = open_page(url=other.url)
        unfold(page)
        assert [chosen(page, part) for part in ROWS] == ["auto", "tensorrt", "tensorrt", "auto"]
        wait_for_chip(page, "transformer", "PyTorch: no NVIDIA GPU was found")
        choose(page, "backend_transformer", "pytorch")
        page.wait_for_function(
            "() => localStorage.getItem('tandem.form')?.includes('\"backend_transformer\":\"pytorch\"')"
        )
        page.reload()
        ready(page)
        unfold(page)
        assert [chosen(page, part) for part in ROWS] == ["auto", "pytorch", "tensorrt", "auto"]


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The app on a machine whose GPU has too little memory for the fastest way; nothing is run there."""
    cache = make_cache(tmp_path_factory.mktemp("short"))
    with serving(cache, program=("-m", "tests.small_gpu_app", "1.05")) as running:
        yield running


def ask_for_much(page: Any) -> None:
    """Ask for a clip for which memory is short, and wait until the ways there are are shown."""
    customize(page, width="128", height="128")
    customize(page, frames="17")
    page.wait_for_selector(".strategies .strategy[aria-pressed=true]")


def select_strategies(page: Any) -> None:
    """Select strategies by keyboard and mouse, then the automatic choice again; no button may move."""
    assert page.inner_text(".strategy[aria-pressed=true] span") == "One component at a time"
    assert "too little video memory" in page.inner_text(".strategies li:first-child .strategy:disabled")
    assert "bitsandbytes is not installed" in page.inner_text(".strategy[data-quantization='bnb-4bit']:disabled")
    place = """() => {
      const box = document.querySelector('.strategies').getBoundingClientRect();
      return [box.y - document.querySelector('#settings').firstElementChild.getBoundingClientRect().y, box.height];
    }"""
    before = page.evaluate(place)
    # By keyboard: the next that can be chosen.
    page.focus(".strategy[aria-pressed=true]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".strategy[data-offload=model][aria-pressed=true]")
    assert page.input_value("#field-offload") == "model"
    assert page.input_value("#field-quantization") == "none"
    assert page.evaluate("() => document.activeElement.dataset.offload") == "model"
    assert page.locator(".strategy[aria-pressed=true]").count() == 1
    assert page.evaluate(place) == before
    page.click(".strategy[data-offload=sequential]")
    page.wait_for_selector(".strategy[data-offload=sequential][aria-pressed=true]")
    # Block engines allow the other offloads.
    wait_for_chip(page, "transformer", "offload sequential excludes TensorRT")
    assert page.evaluate(place) == before
    page.click(".strategies button:has-text('Choose automatically')")
    page.wait_for_function("() => document.querySelector('#field-offload').value === 'auto'")
    page.wait_for_selector(".strategy[data-offload=none][aria-pressed=true]")
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_each_badge_follows_its_backend_and_strategies_can_be_selected_if_memory_is_short(
    open_page: OpenPage, short_of_memory: Server
) -> None:
    page = open_page(url=short_of_memory.url)
    unfold(page)
    for part in ROWS:
        planned = page.inner_text(f"#part-{part} .badge")
        for backend in ("tensorrt", "auto"):
            before = page.inner_text(f"#part-{part} .badge")
            choose(page, f"backend_{part}", backend)
            page.wait_for_function(
                "([part, before]) => document.querySelector(`#part-${part} .badge`).innerText !== before",
                arg=[part, before],
            )
        assert page.inner_text(f"#part-{part} .badge") == planned
    ask_for_much(page)
    for viewport in (PHONE, DESKTOP):
        page.set_viewport_size(viewport)
        select_strategies(page)
    assert page.complaints == []
    # A form that does not fit lists all strategies.
    customize(page, width="1024", height="1024")
    customize(page, frames="253")
    page.wait_for_selector(".strategies:has-text('No strategy fits into memory')")
    assert "video memory" in page.inner_text("#plan-summary .trouble")
    assert page.locator(".strategy:enabled").count() == 0
    assert page.locator(".strategy").count() == 9
