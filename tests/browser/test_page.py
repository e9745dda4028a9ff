"""The page in a browser: what people do with it, from the first word to the video."""

import re

import pytest

from tests.app_server import Server
from tests.browser.conftest import (
    DESKTOP,
    PHONE,
    OpenPage,
    ask,
    await_job_after,
    ready,
    saved_videos,
    start,
    state,
    wait_for_state,
)

pytestmark = pytest.mark.browser

UNNAMED_INPUTS = """
() => [...document.querySelectorAll('button, input, textarea, select, video, [role=progressbar]')]
  .filter((node) => node.checkVisibility())
  .filter((node) => {
    const labelled = (node.getAttribute('aria-labelledby') || '').split(' ').map((id) => document.getElementById(id));
    const names = [node.getAttribute('aria-label'), node.textContent, ...labelled.map((l) => l && l.textContent),
      ...[...(node.labels || [])].map((label) => label.textContent)];
    return !names.some((name) => name && name.trim());
  }).map((node) => node.outerHTML)
"""
PLAYING = (
    "() => { const v = document.querySelector('#picture video'); return v && v.videoWidth > 0 && v.currentTime > 0.2 }"
)


def test_a_prompt_becomes_a_playing_video(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    ask(page, "a red boat on the calm sea", long=True)
    page.evaluate("""() => {
      window.seen = new Set();
      new MutationObserver(() => {
        const bar = document.querySelector('#status [role=progressbar]');
        window.seen.add(bar.getAttribute('aria-valuetext').replace(/\\d+/g, 'N'));
        if (document.querySelector('#picture img.preview[src^="data:image/webp"]')) window.seen.add('preview');
      }).observe(document.querySelector('#stage'), {subtree: true, childList: true, attributes: true});
    }""")
    start(page)
    wait_for_state(page, "done")
    page.wait_for_function(PLAYING)
    seen = page.evaluate("() => [...window.seen]")
    assert "preview" in seen
    assert any(re.match(r"Denoising, step N of N, (about N s left|almost done)", text) for text in seen), seen
    with page.expect_download() as download:
        page.click("#facts a[download]")
    assert download.value.suggested_filename.endswith(".mp4")
    assert download.value.path().read_bytes()[4:8] == b"ftyp"
    facts = page.inner_text("#facts")
    for expected in (
        "a red boat on the calm sea",
        "192 × 192, 9 frames · 1.1 s at 8 fps",
        "PyTorch on the CPU",
        "denoising",
    ):
        assert expected in facts
    assert page.is_visible("#generate")
    assert not page.is_visible("#cancel")
    assert page.complaints == []


def test_no_other_host_is_contacted(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    assert page.requests
    assert [url for url in page.requests if not url.startswith((server.url, "data:", "blob:"))] == []


def test_cancel_stops_the_job_and_leaves_no_file(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    before = saved_videos(server)
    ask(page, long=True)
    shown = page.get_attribute("#status .status", "data-job")
    page.focus("#generate")
    page.keyboard.press("Enter")
    await_job_after(page, shown)
    wait_for_state(page, "running")
    page.wait_for_function("() => document.activeElement.id === 'cancel'")
    page.keyboard.press("Enter")
    wait_for_state(page, "cancelled")
    assert "Nothing was saved." in page.inner_text("#status")
    page.wait_for_selector("#generate", state="visible")
    assert page.input_value("#field-prompt textarea") == "a red boat on the sea"
    assert saved_videos(server) == before


def test_a_reload_shows_the_running_job(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    ask(page, "a blue boat at night", long=True)
    start(page)
    wait_for_state(page, "running")
    page.reload()
    ready(page)
    wait_for_state(page, "running", "done")
    assert page.input_value("#field-prompt textarea") == "a blue boat at night"
    assert page.input_value("#field-width input") == "192"
    # A second tab shows the same job, and may stop watching without harm.
    other = page.context.new_page()
    other.goto(server.url)
    wait_for_state(other, "running", "done")
    other.close()
    wait_for_state(page, "done")
    page.wait_for_function(PLAYING)
    page.reload()
    wait_for_state(page, "done")
    assert "a blue boat at night" in page.inner_text("#facts")


def test_a_second_job_waits_for_the_first(open_page: OpenPage) -> None:
    first, second = open_page(), open_page()
    ask(first, "a red boat", long=True)
    start(first)
    wait_for_state(first, "running")
    ask(second, "a blue ball")
    start(second)
    wait_for_state(second, "queued", "done")
    if state(second) == "queued":
        assert "1 video is ahead." in second.inner_text("#status")
    first.click("#cancel")
    wait_for_state(first, "cancelled")
    wait_for_state(second, "done")
    assert "a blue ball" in second.inner_text("#facts")


def test_errors_name_the_field_and_keep_the_form(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "")
    page.click("#generate")
    wait_for_state(page, "failed")
    assert page.inner_text("#status [role=alert]").split("\n") == [
        "The prompt is empty.",
        "Describe the video in a sentence.",
    ]
    ask(page, "a red ball")
    page.fill("#field-width input", "190")
    assert page.is_checked("#size input[value=custom]")
    page.click("#generate")
    page.wait_for_selector("#field-width input[aria-invalid=true]")
    assert page.inner_text("#status [role=alert]").split("\n") == [
        "“Width” is 190; Tiny supports multiples of 16.",
        "Use 176 or 192.",
    ]
    assert page.input_value("#field-prompt textarea") == "a red ball"
    assert page.input_value("#field-width input") == "190"
    page.fill("#field-width input", "64")
    assert page.get_attribute("#field-width input", "aria-invalid") is None


def test_hostile_text_is_shown_as_text(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "<img src=x onerror=window.hit=1> `${window.hit=1}` {{this}} \u202e 🚤")
    start(page)
    wait_for_state(page, "done")
    assert "<img src=x onerror=window.hit=1> `${window.hit=1}` {{this}}" in page.inner_text("#facts")
    assert page.evaluate("() => window.hit") is None


def test_the_seed_used_can_be_used_again(open_page: OpenPage) -> None:
    page = open_page()
    ask(page)
    page.fill("#field-seed textarea, #field-seed input", "1234")
    start(page)
    wait_for_state(page, "done")
    assert "Seed 1234." in page.inner_text("#status")
    page.click("#random-seed")
    assert page.input_value("#field-seed textarea, #field-seed input") == ""
    page.click("#facts [data-use=seed]")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '1234'")


def test_the_settings_used_can_be_used_again(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "a red ball rolls")
    page.fill("#field-height input", "48")
    start(page)
    wait_for_state(page, "done")
    ask(page, "something else")
    page.click("#size input[value='32x64']")
    page.click("#facts [data-use=all]")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '48'")
    assert page.input_value("#field-prompt textarea") == "a red ball rolls"
    assert page.is_checked("#size input[value=custom]")


def test_examples_and_sizes_fill_the_form(open_page: OpenPage) -> None:
    page = open_page()
    page.click("#examples button >> nth=0")
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value.length > 10")
    page.click("#size input[value='32x64']")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '64'")
    assert page.input_value("#field-width input") == "32"
    page.fill("#field-fps input", "4")
    page.wait_for_function("() => document.querySelector('#length').textContent.includes('2.3 s at 4 fps')")


def test_the_form_follows_the_model_and_is_restored_with_it(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "a green kite")
    page.fill("#field-fps input", "4")
    page.click("#field-model input")
    page.click("[role=option]:has-text('Diorama')")
    page.wait_for_function("() => document.querySelector('#field-width input').value === '192'")
    # Fields are set one after the other: what is typed before its field has its turn would give way.
    page.wait_for_function("() => document.querySelector('#field-fps input').value === '16'")
    page.wait_for_selector("#size input[value='192x112']:checked")
    page.fill("#field-fps input", "12")
    page.wait_for_function("() => localStorage.getItem('tandem.form').includes('\"fps\":12')")
    page.reload()
    ready(page)
    page.wait_for_function("() => document.querySelector('#field-fps input').value === '12'")
    page.wait_for_selector("#size input[value='192x112']:checked")
    assert page.input_value("#field-model input").startswith("Diorama")
    assert page.input_value("#field-prompt textarea") == "a green kite"


def test_keyboard_alone_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "")
    page.focus("#field-prompt textarea")
    page.keyboard.type("a red boat")
    stops = []
    for _ in range(15):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        if stops[-1] == "generate":
            break
    assert stops[-1] == "generate", stops
    shown = page.get_attribute("#status .status", "data-job")
    page.keyboard.press("Enter")
    await_job_after(page, shown)
    wait_for_state(page, "done")
    page.wait_for_function("() => document.activeElement.id === 'generate'")
    page.focus("#field-prompt textarea")
    page.keyboard.type(" at night")
    page.keyboard.press("Control+Enter")
    page.wait_for_function("() => document.querySelector('#facts').innerText.includes('a red boat at night')")


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_width_in_both_color_schemes(
    open_page: OpenPage, viewport: dict[str, int], scheme: str
) -> None:
    page = open_page(viewport, color_scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    edges = "['#theme', '#top header'].map((one) => document.querySelector(one).getBoundingClientRect().right)"
    button, header = page.evaluate(f"() => {edges}")
    assert button <= header + 1
    assert page.locator("#generate").bounding_box()["y"] < viewport["height"] - 50
    lightness = page.evaluate(
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (max(lightness) < 80) == (scheme == "dark"), lightness
    page.click("#theme")
    page.wait_for_function(
        f"() => document.body.classList.contains('dark') === {'false' if scheme == 'dark' else 'true'}"
    )


def test_the_page_has_accessible_names(open_page: OpenPage) -> None:
    page = open_page()
    page.click("#more > button")
    assert page.evaluate("() => document.documentElement.lang") == "en"
    assert page.title() == "Tandem"
    assert page.locator("h1").count() == 1
    assert page.evaluate(UNNAMED_INPUTS) == []
    page.wait_for_selector("#more > button[aria-expanded=true]")
    assert page.get_attribute("#size", "role") == "radiogroup"
    described = page.get_attribute("#field-width input", "aria-describedby")
    assert page.inner_text(f"#{described}") == "A multiple of 16."
    page.focus("#size input[value='64x32']")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '64'")
    assert state(page) in {"idle", "done", "failed", "cancelled"}


def test_the_layout_is_stable_when_a_job_starts_and_ends(open_page: OpenPage) -> None:
    page = open_page()
    places = """() => ['#picture .mat', '#actions', '#size'].map((s) => {
      const box = document.querySelector(s).getBoundingClientRect(); return [box.x, box.y, box.width, box.height] })"""
    before = page.evaluate(places)
    ask(page, long=True)
    page.fill("#field-width input", "64")
    page.evaluate("() => scrollTo(0, 0)")
    start(page)
    wait_for_state(page, "running")
    assert page.evaluate(places) == before
    wait_for_state(page, "done")
    assert page.evaluate(places) == before
