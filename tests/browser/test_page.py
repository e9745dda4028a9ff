"""The page in a browser: what people do with it, from the first word to the video."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.app_server import Server, make_cache, serving
from tests.browser.conftest import (
    DESKTOP,
    ENDLESS,
    PHONE,
    SMALL,
    OpenPage,
    advance,
    ask,
    await_job_after,
    customize,
    fill_field,
    open_chip,
    ready,
    saved_videos,
    start,
    state,
    tick,
    wait_for_state,
)
from tests.ui.page_texts import line

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
# Texts and controls that reach beyond the window or are wider than their box.
CUT_OFF = """
() => ['button', 'label', 'legend', 'input', 'select', 'textarea', 'p', 'small', 'h2', 'td', 'th']
  .flatMap((tag) => [...document.querySelectorAll(`#columns ${tag}`)])
  .filter((node) => node.checkVisibility() && !node.closest('.unseen') && node.getBoundingClientRect().width > 1)
  .filter((node) => !node.closest('.recent, #chips .chips'))  // rows that are scrolled
  .filter((node) => {
    const box = node.getBoundingClientRect();
    return box.left < -1 || box.right > innerWidth + 1
      || (getComputedStyle(node).overflowX !== 'visible' && node.scrollWidth > node.clientWidth + 2);
  }).map((node) => node.outerHTML.slice(0, 200))
"""
PLAYING = (
    "() => { const v = document.querySelector('#picture video'); return v && v.videoWidth > 0 && v.currentTime > 0.2 }"
)
# The mark of a picture that is not of the refused request.
EARLIER = "() => getComputedStyle(document.querySelector('#picture .blank span'), '::before').content"


def choose_diorama(page: Any) -> None:
    """Choose the shipped model."""
    open_chip(page, "model")
    page.click("#field-model input")
    page.click("[role=option]:has-text('Diorama')")
    page.wait_for_function("() => document.querySelector('#field-width input').value === '192'")
    page.wait_for_selector("#card h2:has-text('Diorama')")


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
    page.click("#facts [popovertarget=details]")
    facts = page.inner_text("#details")
    assert "192 × 192 · 1.1 s · " in page.inner_text("#details .summary")
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
    # No other host is contacted.
    assert page.requests
    assert [url for url in page.requests if not url.startswith((server.url, "data:", "blob:"))] == []


def test_cancel_stops_the_job_and_leaves_no_file_but_the_last_preview(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    before = saved_videos(server)
    ask(page, long=True, steps=ENDLESS)
    shown = page.get_attribute("#status .status", "data-job")
    page.focus("#generate")
    page.keyboard.press("Enter")
    await_job_after(page, shown)
    wait_for_state(page, "running")
    page.wait_for_function("() => document.activeElement.id === 'cancel'")
    page.wait_for_selector("#picture img.preview[src^='data:image/webp']")
    # The prompt stays on a phone.
    page.set_viewport_size(SMALL)
    page.evaluate("() => scrollTo(0, 0)")
    assert page.input_value("#field-prompt textarea") == "a red boat on the sea"
    for seen in ("#field-prompt textarea", "#queue-next [data-action=add]", "#cancel"):
        box = page.locator(seen).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= SMALL["height"], seen
    page.set_viewport_size(DESKTOP)
    page.keyboard.press("Enter")
    wait_for_state(page, "cancelled")
    page.wait_for_selector("#queue-next", state="hidden")
    assert line("ui.nothing_saved") in page.inner_text("#status")
    page.wait_for_selector("#generate", state="visible")
    assert page.input_value("#field-prompt textarea") == "a red boat on the sea"
    assert saved_videos(server) == before
    # The last preview stays.
    assert page.is_visible("#picture img.preview") and "Cancelled: last preview" in page.inner_text("#picture")
    assert page.is_visible("#status [data-action=resume]")
    # After a refused request it is marked as that of an earlier video.
    assert page.evaluate(EARLIER) == "none"
    page.fill("#field-prompt textarea", "")
    page.click("#generate")
    wait_for_state(page, "failed")
    assert "Earlier video." in page.evaluate(EARLIER)


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
    assert "a blue boat at night" in page.text_content("#facts")


def test_a_second_job_waits_for_the_first(open_page: OpenPage) -> None:
    first, second = open_page(), open_page()
    ask(first, "a red boat", long=True, steps=ENDLESS)
    start(first)
    wait_for_state(first, "running")
    ask(second, "a blue ball")
    start(second)
    wait_for_state(second, "queued", "done")
    if state(second) == "queued":
        assert line("ui.videos_ahead", count=1) in second.inner_text("#status")
    first.click("#cancel")
    wait_for_state(first, "cancelled")
    wait_for_state(second, "done")
    assert "a blue ball" in second.text_content("#facts")


FILL = "getComputedStyle(document.querySelector('#generate')).backgroundColor"
ACCENT = "'rgb(29, 106, 102)'"


def test_errors_name_the_field_and_keep_the_form_as_it_was_typed(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "a red boat")
    start(page)
    wait_for_state(page, "done")
    earlier = page.locator("#picture").bounding_box()
    page.fill("#field-prompt textarea", "")
    page.click("#generate")
    wait_for_state(page, "failed")
    # The picture of an earlier job comes after the error.
    alert, picture = (page.locator(name).bounding_box() for name in ("#status", "#picture"))
    assert alert["y"] + alert["height"] <= picture["y"] and alert["y"] == earlier["y"]
    # There is none yet.
    assert page.evaluate(EARLIER) == "none"
    assert page.inner_text("#status [role=alert]").split("\n") == [
        "The prompt is empty.",
        "Describe the video in a sentence.",
    ]
    ask(page, "a red ball")
    wait_for_state(page, "done")  # the error is out of date
    customize(page, width="190")
    page.click("#generate")
    page.wait_for_selector("#field-width input[aria-invalid=true]")
    page.wait_for_selector("#status [role=alert]:has-text('Width')")  # the forecast marks the field too
    assert page.inner_text("#status [role=alert]").split("\n") == [
        "“Width” is 190; Tiny supports multiples of 16.",
        "Use 176 or 192.",
    ]
    assert page.input_value("#field-prompt textarea") == "a red ball"
    assert page.input_value("#field-width input") == "190"
    page.mouse.move(0, 0)
    page.wait_for_function(f"() => {FILL} !== {ACCENT}")  # Generate is not offered as what to do next
    fill_field(page, "width", "64")
    page.wait_for_function(f"() => {FILL} === {ACCENT}")
    page.wait_for_selector("#field-width input:not([aria-invalid])", state="attached")
    # A typed number is never changed.
    customize(page, frames="100001")
    page.wait_for_selector("#forecast :text('Invalid setting')")
    assert page.input_value("#field-frames input") == "100001"
    page.click("#generate")
    page.wait_for_selector("#field-frames input[aria-invalid=true]")
    error = page.inner_text("#field-frames .field-error")
    assert "100001" in error and "from 1 to 4001" in error
    assert page.get_attribute("#field-frames input", "aria-describedby") == "field-frames-info error-frames"
    assert page.input_value("#field-frames input") == "100001"
    fill_field(page, "frames", "9")
    page.wait_for_selector(".field-error", state="detached")
    page.wait_for_selector("#forecast :text('About')")
    page.wait_for_selector("#status .status:not([data-state=failed])", state="attached")


def test_recent_videos_are_shown_repeated_and_deleted_below_the_picture(open_page: OpenPage) -> None:
    page = open_page()

    def shown() -> str:
        return str(page.get_attribute("#status .status", "data-job"))

    made = []
    for prompt in ("a red boat", "a very long boat " * 60):
        ask(page, prompt)
        start(page)
        wait_for_state(page, "done")
        made.append(shown())
    page.wait_for_selector(f'#recent [data-show="{made[1]}"][aria-current=true]')
    # A long prompt is cut, and shown on request.
    page.click("#facts [popovertarget=details]")
    cut = page.locator("#facts .clamp").bounding_box()["height"]
    page.click("#facts .show-all")
    more, summary = (page.locator(f"#details {name}").bounding_box() for name in (".show-all", ".summary"))
    assert more["y"] + more["height"] <= summary["y"]
    assert page.locator("#facts .clamp").bounding_box()["height"] > 2 * cut
    page.keyboard.press("Escape")
    page.wait_for_selector("#details", state="hidden")
    # A short clip shows tenths of a second: nine frames at eight a second.
    page.wait_for_selector("#transport .time:text-matches('^[01][.][0-9] / 1[.]1 s$')")
    # A small video fills the stage; its original size is a choice that stays.
    large = page.locator("#picture video").bounding_box()["width"]
    page.click("#transport [data-actual]")
    assert page.locator("#picture video").bounding_box()["width"] < large / 4
    page.reload()
    ready(page)
    page.wait_for_selector("#picture video")
    page.wait_for_selector("#transport [data-actual][aria-pressed=true]")
    assert page.locator("#picture video").bounding_box()["width"] < large / 4
    page.click("#transport [data-actual]")
    assert page.locator("#picture video").bounding_box()["width"] == large
    # While another video runs, an older one can be shown, and the running one again.
    ask(page, "a slow boat", long=True)
    start(page)
    wait_for_state(page, "running")
    running = shown()
    # An answer about the running one comes late, and is remembered before the press is followed.
    page.evaluate(
        "([selector, running]) => { document.querySelector(selector).click(); tandem.remember(running); }",
        [f'#recent [data-show="{made[0]}"]', running],
    )
    page.wait_for_selector(f'#status .status[data-job="{made[0]}"][data-state=done]')
    page.click(f'#recent [data-show="{running}"]')
    page.wait_for_selector(f'#status .status[data-job="{running}"]')
    wait_for_state(page, "done")
    page.click("#facts [data-action=again]")
    await_job_after(page, running)
    wait_for_state(page, "done")
    again = shown()
    page.click("#facts .menu summary")
    page.click("#facts [data-action=delete]")
    page.wait_for_selector(f'#status .status[data-job="{running}"]')
    assert page.locator(f'#recent [data-show="{again}"]').count() == 0
    assert page.complaints == []


def test_the_video_on_the_stage_is_compared_with_a_recent_one_by_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    made = []
    for prompt in ("a red boat", "a blue ball", "a kite"):
        ask(page, prompt)
        start(page)
        wait_for_state(page, "done")
        made.append(page.get_attribute("#status .status", "data-job"))
        page.wait_for_selector(f'#recent [data-show="{made[-1]}"][data-done]')
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        page.focus("#facts [data-compare-with]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#pick:has-text('Select the video to compare with.')")
        # Escape ends the choice; the next press begins it again, with the focus on the strip.
        page.keyboard.press("Escape")
        page.wait_for_function("() => !document.querySelector('#pick').textContent")
        page.keyboard.press("Enter")
        page.wait_for_selector("#facts [data-compare-with][aria-pressed=true]")
        assert page.evaluate("() => document.activeElement.dataset.show") == made[1]
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(f'#comparison[open] [data-compare="{made[0]} {made[2]}"]')
        assert page.inner_text("#comparison tbody tr >> nth=0").split("\n")[0].startswith("Prompt")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("() => document.querySelector('[data-frame]').textContent.startsWith('2 /')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#comparison:not([open])", state="attached")
        assert page.get_attribute("#facts [data-compare-with]", "aria-pressed") == "false"
    assert state(page) == "done" and page.complaints == []


def test_the_first_seconds_play_while_others_are_decoded(open_page: OpenPage) -> None:
    page = open_page()
    ask(page)
    customize(page, width="224", height="224")
    customize(page, frames="241")
    advance(page)
    page.fill("#field-steps input", "1")
    page.press("#field-steps input", "Tab")
    start(page)
    page.wait_for_selector("#picture video[data-grows]")
    first = page.get_attribute("#picture video", "src")
    assert re.fullmatch("tandem/clip/[0-9a-f]{8}/[0-9]+[.]mp4", first)
    assert re.fullmatch("[0-9]+ of 241 frames", page.inner_text("#picture .so-far"))
    page.wait_for_function("() => document.querySelector('#picture video').currentTime > 0.2")
    page.wait_for_selector(f"#picture video[data-grows]:not([src='{first}'])")
    assert state(page) == "running" and page.is_hidden("#picture .preview")
    # A longer clip continues where the one before was.
    page.wait_for_function("() => document.querySelector('#picture video').currentTime > 0.2")
    page.click("#cancel")
    wait_for_state(page, "cancelled")
    page.wait_for_selector("#picture video", state="detached")
    assert page.complaints == []


def test_hostile_text_is_shown_as_text_and_the_seed_and_settings_used_can_be_used_again(open_page: OpenPage) -> None:
    page = open_page()
    hostile = "<img src=x onerror=window.hit=1> `${window.hit=1}` {{this}} \u202e 🚤"
    ask(page, hostile)
    customize(page, height="48")
    fill_field(page, "seed", "1234")
    start(page)
    wait_for_state(page, "done")
    page.click("#facts [popovertarget=details]")
    assert "<img src=x onerror=window.hit=1> `${window.hit=1}` {{this}}" in page.inner_text("#facts")
    page.keyboard.press("Escape")
    assert "Seed 1234." in page.inner_text("#status")
    fill_field(page, "seed", "")
    page.click("#facts .menu summary")
    page.click("#facts [data-use=seed]")
    page.wait_for_function("() => document.querySelector('#field-seed :is(input, textarea)').value === '1234'")
    ask(page, "something else")
    tick(page, "#size input[value='32x64']")
    page.click("#facts .menu summary")
    page.click("#facts [data-use=all]")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '48'")
    assert page.input_value("#field-prompt textarea") == hostile
    assert page.is_checked("#size input[value=custom]")
    assert page.evaluate("() => window.hit") is None


def test_sizes_and_lengths_have_accessible_names_and_fill_the_form(open_page: OpenPage) -> None:
    page = open_page()
    advance(page)
    assert page.evaluate("() => document.documentElement.lang") == "en"
    assert page.title() == "Tandem"
    assert page.locator("h1").count() == 1
    assert page.evaluate(UNNAMED_INPUTS) == []
    assert page.get_attribute("#advanced", "aria-expanded") == "true"
    described = page.get_attribute("#field-width input", "aria-describedby")
    assert page.text_content(f"#{described}") == "A multiple of 16."
    page.click("[data-close-advanced]")
    # By keyboard.
    open_chip(page, "size")
    page.focus("#size input[value='64x32']")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '64'")
    assert state(page) in {"idle", "done", "failed", "cancelled"}
    page.keyboard.press("Escape")
    tick(page, "#size input[value='64x32']")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '32'")
    tick(page, "#size input[value='32x64']")
    page.wait_for_function("() => document.querySelector('#field-height input').value === '64'")
    assert page.input_value("#field-width input") == "32"
    assert not page.is_visible("#field-width")
    page.wait_for_selector("[data-chip=size][aria-label='Size: 1:2, 32 × 64']")
    fill_field(page, "fps", "4")
    open_chip(page, "length")
    page.wait_for_selector("#length .tile:has-text('2.3 s')")
    assert page.inner_text("#length legend") == "Length 2.3 s, 9 frames at 4 fps"
    assert page.inner_text("[data-chip=length]") == "2.3 s"
    page.keyboard.press("Escape")
    tick(page, "#size input[value=custom]")
    fill_field(page, "width", "64")
    # A size in the list stays open while it is typed.
    open_chip(page, "size")
    assert page.is_visible("#field-width") and page.is_checked("#size input[value=custom]")


def test_words_of_the_model_make_a_sentence_and_others_are_marked(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "")
    choose_diorama(page)
    open_chip(page, "model")
    for group, word, sentence in (
        ("Colors", "orange", "an orange"),
        ("Times of day", "at night", "an orange at night"),
        ("Things", "boat", "an orange boat at night"),
        ("Places", "on the sea", "an orange boat on the sea at night"),
        ("Colors", "red", "a red boat on the sea at night"),
    ):
        page.click(f"#card label:text-is('{group}')")
        page.click(f"#card [data-word='{word}']")
        page.wait_for_function(
            "(text) => document.querySelector('#field-prompt textarea').value === text", arg=sentence
        )
    page.fill("#field-prompt textarea", "a red boat on a calm sea at night")
    page.click("#card label:text-is('Places')")
    page.click("#card [data-word='over the hills']")
    page.wait_for_function(
        "() => document.querySelector('#field-prompt textarea').value.includes('boat over the hills')"
    )
    page.fill("#field-prompt textarea", "Two Dragons, a café-castle: RED boats")
    page.wait_for_selector("#unknown-words .unknown:has-text('Diorama does not know: Dragons, café, castle.')")
    assert page.locator("#field-prompt .marks mark").all_inner_texts() == ["Dragons", "café", "castle"]
    assert page.get_attribute("#unknown-words .unknown", "aria-live") == "polite"
    # A long word, or many, do not push anything off the page.
    page.fill("#field-prompt textarea", f"{'x' * 300} {' '.join(f'word{n}' for n in range(40))}")
    page.wait_for_selector("#unknown-words .unknown:has-text('and 29 more.')")
    unknown, column = (page.locator(one).bounding_box() for one in ("#unknown-words .unknown", "#compose"))
    assert page.evaluate(CUT_OFF) == [] and unknown["width"] <= column["width"] and unknown["height"] < 120
    # A known word can take the place of an unknown one.
    page.keyboard.press("Escape")
    page.wait_for_selector("#pop-model", state="hidden")
    page.fill("#field-prompt textarea", "an old dragon flies")
    page.wait_for_selector("#unknown-words .instead:has-text('dragon')")
    page.click("#unknown-words [data-replace=dragon]:text-is('balloon')")
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value === 'an old balloon flies'")
    page.fill("#field-prompt textarea", "a red boat")
    page.wait_for_function("() => !document.querySelector('#unknown-words .unknown').textContent")
    assert page.is_hidden("#unknown-words .chips")
    open_chip(page, "model")
    page.focus("#get-models button:text-is('Get models')")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=tab][aria-selected=true]:has-text('Models')")


def test_presets_set_several_fields_name_a_change_and_can_be_ones_own(open_page: OpenPage) -> None:
    page = open_page()
    page.wait_for_selector("#presets input[value=balanced]:checked", state="attached")
    # The costs are there once the model's engines are known.
    open_chip(page, "quality")
    page.wait_for_selector("#presets .tile:has([value=balanced]) small:text-matches('^[0-9.]+ s, [0-9]+')")
    tick(page, "#presets input[value=best]")
    page.wait_for_function("() => document.querySelector('#field-steps input').value === '8'")
    page.wait_for_selector("[data-chip=quality]:text-is('Best')")
    advance(page)
    assert page.input_value("#field-vae_precision") == "float32"
    page.fill("#field-steps input", "5")
    page.wait_for_selector("[data-chip=quality]:text-is('Custom')")
    assert page.locator("#presets input:checked").count() == 0
    tick(page, "#presets input[value=balanced]")
    page.wait_for_function("() => document.querySelector('#field-steps input').value === '4'")
    page.wait_for_function("() => document.querySelector('#field-vae_precision').value === 'auto'")
    # Settings are saved as a preset of one's own.
    customize(page, width="48")
    page.fill("#field-steps input", "3")
    page.press("#field-steps input", "Tab")
    open_chip(page, "quality")
    page.fill("#preset-name", "Quick look")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-chip=quality]:text-is('Quick look')")
    assert page.get_attribute("[data-own-preset]", "aria-pressed") == "true"
    page.keyboard.press("Escape")
    page.fill("#field-prompt textarea", "a kite")
    page.click("#reset")
    page.wait_for_selector("[data-own-preset][aria-pressed=false]", state="attached")
    page.reload()
    ready(page)
    open_chip(page, "quality")
    page.click("[data-own-preset='Quick look']")
    page.wait_for_selector("[data-own-preset][aria-pressed=true]")
    page.wait_for_selector("#presets legend .tag", state="hidden")  # it is not "Custom"
    assert (page.input_value("#field-steps input"), page.input_value("#field-width input")) == ("3", "48")
    assert page.input_value("#field-prompt textarea") == "a kite"
    page.click("[data-remove-preset]")
    page.wait_for_selector("[data-own-preset]", state="detached")
    assert page.complaints == []


def test_reset_sets_everything_but_model_and_prompt_to_its_default(open_page: OpenPage) -> None:
    page = open_page()
    page.wait_for_selector("[data-chip=quality]:text-is('Balanced')")
    page.fill("#field-prompt textarea", "a green kite")
    page.wait_for_function("() => window.tandem.value('prompt') === 'a green kite'")
    before = page.evaluate("() => window.tandem.values")
    assert not page.is_visible("#reset")
    advance(page)
    page.fill("#field-steps input", "5")
    fill_field(page, "fps", "9")
    page.fill("#field-negative_prompt textarea", "fog")
    page.fill("#field-loras textarea", "none:0.5")
    tick(page, "#size input[value='32x64']")
    page.select_option("#field-vae_precision", "float32")
    page.wait_for_selector("[data-chip=quality]:text-is('Custom')")
    page.click("#reset")
    page.wait_for_selector("[data-chip=quality]:text-is('Balanced')")
    page.wait_for_function("(before) => JSON.stringify(window.tandem.values) === JSON.stringify(before)", arg=before)
    assert page.input_value("#field-prompt textarea") == "a green kite"
    # Settings has a default model and size: for Reset, and for a browser that has stored no form.
    page.click("#open-settings")
    page.select_option("#default-model", "diorama")
    page.select_option("#default-size", "112x192")
    page.wait_for_selector("#settings-sheet [data-part=storage] .meter")  # drawing the other parts keeps the choice
    assert page.input_value("#default-size") == "112x192"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.id") == "open-settings"
    page.click("#reset")
    page.wait_for_selector("#size input[value='112x192']:checked", state="attached")
    assert page.input_value("#field-prompt textarea") == "a green kite"
    page.evaluate("() => localStorage.removeItem('tandem.form')")
    page.reload()
    ready(page)
    page.wait_for_selector("#size input[value='112x192']:checked", state="attached")
    assert page.input_value("#field-prompt textarea") == ""
    assert page.complaints == []


def test_the_answer_to_a_file_is_in_view_and_reset_and_other_settings_are_not_called_those_of_the_file(
    open_page: OpenPage, tmp_path: Path
) -> None:
    page, foreign, file = open_page(), tmp_path / "foreign.mp4", tmp_path / "mine.json"
    foreign.write_bytes(b"a letter to a friend")
    page.set_input_files("#restore", foreign)
    # The answer to it is above the bar.
    page.wait_for_function(
        """() => {
          const line = document.querySelector('#restored');
          const { left, bottom, height } = line.getBoundingClientRect();
          return height > 0 && line.contains(document.elementFromPoint(left + 5, bottom - 3));
        }"""
    )
    file.write_text(json.dumps({"prompt": "a green kite", "fps": 9}), encoding="utf-8")
    page.set_input_files("#restore", file)
    page.wait_for_selector("#restored:has-text('Settings of “mine.json”')")
    page.wait_for_selector("#refused:has-text('All settings are filled in.')")
    page.set_input_files("#restore", file)  # the same again
    page.wait_for_selector("#refused:has-text('All settings are filled in.')")
    advance(page)
    page.click("#reset")
    page.wait_for_function("() => document.querySelector('#restored').textContent === 'Defaults of the model:'")
    page.wait_for_function("() => document.querySelector('#field-fps input').value !== '9'")
    page.wait_for_selector("#refused:has-text('All settings are filled in.')")
    page.evaluate("() => window.tandem.fill({prompt: 'a red kite'})")
    page.wait_for_function("() => document.querySelector('#field-prompt textarea').value === 'a red kite'")
    assert page.inner_text("#restored") == ""
    # A change by hand makes both lines history.
    page.set_input_files("#restore", file)
    page.wait_for_selector("#restored:has-text('Settings of “mine.json”')")
    page.wait_for_selector("#refused:has-text('All settings are filled in.')")
    page.focus("#field-prompt textarea")
    page.keyboard.type("s")
    page.wait_for_function("() => !document.querySelector('#restored').textContent")
    assert not page.inner_text("#refused").strip()


def test_a_message_moves_nothing_of_the_form_and_covers_no_bar(open_page: OpenPage) -> None:
    page = open_page()
    page.wait_for_selector("[data-chip=quality]:text-is('Balanced')")
    page.wait_for_selector("#forecast .forecast:has-text('About')")
    places = """() => ['#field-prompt', '#chips', '#bar', '#stage'].map((id) => {
      const { top, height } = document.querySelector(id).getBoundingClientRect();
      return [top, height];
    })"""
    before = page.evaluate(places)
    page.evaluate("() => window.tandem.panels.notify('Added to the queue: 1 video.')")
    page.wait_for_selector("#message", state="visible")
    assert page.evaluate(places) == before
    # The last rows of the other tabs can be scrolled to above it.
    page.click("[role=tab]:has-text('Engines')")
    page.wait_for_selector("#engines-storage .meter")
    page.evaluate("() => scrollTo(0, document.documentElement.scrollHeight)")
    message, last = page.locator("#message").bounding_box(), page.locator("div[data-panel=engines]").bounding_box()
    assert message and last and last["y"] + last["height"] <= message["y"]
    # On a phone it is above the bar.
    page.set_viewport_size(PHONE)
    page.click("[role=tab]:has-text('Make')")
    page.evaluate("() => window.tandem.panels.notify('Deleted.', { undo: ['x'] })")
    # The bar is measured after its text has changed.
    page.wait_for_function(
        """() => {
          const box = (name) => document.querySelector(name).getBoundingClientRect();
          const message = box("#message"), bar = box("#bar");
          return message.height && message.bottom <= bar.top;
        }"""
    )


def test_the_form_follows_the_model_and_is_restored_with_it_by_a_page_that_then_draws_nothing(
    open_page: OpenPage,
) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "a green kite")
    fill_field(page, "fps", "4")
    choose_diorama(page)
    # Fields are set one after the other: what is typed before its field has its turn would give way.
    page.wait_for_function("() => document.querySelector('#field-fps input').value === '16'")
    page.wait_for_selector("#size input[value='192x112']:checked", state="attached")
    fill_field(page, "fps", "12")
    page.wait_for_function("() => localStorage.getItem('tandem.form')?.includes('\"fps\":12')")
    page.add_init_script(
        """const requestFrame = window.requestAnimationFrame;
        window.requested = 0;
        window.requestAnimationFrame = (draw) => { window.requested += 1; return requestFrame.call(window, draw); };"""
    )
    page.reload()
    ready(page)
    page.wait_for_function("() => document.querySelector('#field-fps input').value === '12'")
    page.wait_for_selector("#size input[value='192x112']:checked", state="attached")
    assert page.input_value("#field-model input").startswith("Diorama")
    assert page.input_value("#field-prompt textarea") == "a green kite"
    # An open page draws nothing while nothing happens.
    # Gradio's timer requests a frame in each frame; see page.js.
    page.wait_for_function(
        "() => { const before = window.before; window.before = window.requested; return before === window.before; }",
        polling=500,
    )


def test_keyboard_alone_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#field-prompt textarea", "")
    page.focus("#field-prompt textarea")
    page.keyboard.type("a red boat")
    stops = []
    for _ in range(11):  # the chips
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
    page.wait_for_function("() => document.querySelector('#facts').textContent.includes('a red boat at night')")
    # A chip opens and closes by keyboard, and has the focus again.
    page.focus("[data-chip=size]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pop-size", state="visible")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.closest('#pop-size') !== null")
    page.keyboard.press("Escape")
    page.wait_for_selector("#pop-size", state="hidden")
    assert page.evaluate("() => document.activeElement.dataset.chip") == "size"
    # The keys of the player, and the sheet that lists them.
    page.wait_for_function(PLAYING)
    page.keyboard.press("k")
    page.wait_for_function("() => document.querySelector('#picture video').paused")
    before = page.evaluate("() => document.querySelector('#picture video').currentTime = 0")
    page.keyboard.press(".")
    page.wait_for_function("(before) => document.querySelector('#picture video').currentTime > before", arg=before)
    page.keyboard.press("?")
    page.wait_for_selector("#keys", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#keys", state="hidden")


def test_commands_are_found_by_their_words(open_page: OpenPage) -> None:
    page = open_page()
    page.keyboard.press("Control+k")
    page.keyboard.type("queue open")
    page.keyboard.press("Enter")
    page.wait_for_selector("#queue-list", state="visible")
    page.keyboard.press("Control+k")
    # A chip is opened on Make from another tab.
    page.wait_for_selector("#palette", state="visible")
    page.keyboard.type("no such command")
    assert page.locator("#palette [role=option]").count() == 0
    page.fill("#palette input", "size")
    assert page.locator("#palette [aria-selected=true]").inner_text().startswith("Size")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pop-size", state="visible")
    page.keyboard.press("Escape")
    # Settings can be opened, and its choices made at once.
    page.keyboard.press("Control+k")
    page.fill("#palette input", "theme dark")
    page.keyboard.press("Enter")
    page.wait_for_selector("body.dark")
    page.keyboard.press("Control+k")
    page.fill("#palette input", "settings")  # other commands have the word, too
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings-sheet", state="visible")
    assert page.is_checked("#settings-sheet [name=theme][value=dark]")
    page.click("#settings-sheet [data-go=History]")
    page.wait_for_selector("#history-storage details[open]")
    assert page.is_hidden("#settings-sheet")
    # The first stop of the page leads to the prompt.
    page.click("[role=tab]:has-text('Engines')")
    page.focus(".skip")
    assert page.locator(".skip").bounding_box()["width"] > 20
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.matches('#field-prompt textarea')")


# Whether the bar covers no part of the field that has the focus.
UNCOVERED = """() => {
  const field = document.activeElement.getBoundingClientRect();
  const bar = document.querySelector('#bar').getBoundingClientRect();
  return field.left >= bar.right || field.bottom <= bar.top + 1;
}"""


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [(SMALL, "dark"), (PHONE, "light"), (DESKTOP, "light")],
    ids=["small", "phone", "desktop"],
)
def test_the_page_fits_every_width_in_both_color_schemes(
    open_page: OpenPage, viewport: dict[str, int], scheme: str
) -> None:
    page = open_page(viewport, color_scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    edges = "['#open-settings', '#top header'].map((one) => document.querySelector(one).getBoundingClientRect().right)"
    button, header = page.evaluate(f"() => {edges}")
    assert button <= header + 1
    assert page.evaluate(CUT_OFF) == []
    # Generate is in view wherever the page is scrolled to, and covers no field that has the focus.
    advance(page)
    for field in ("#field-prompt textarea", "#field-loras textarea"):
        page.focus(field)
        page.wait_for_function(UNCOVERED)
        assert page.locator("#generate").bounding_box()["y"] < viewport["height"] - 50
    # An answer of the server that adds rows above the field does not push it behind the bar either.
    page.evaluate("() => document.querySelector('#field-loras').before(document.createElement('hr'))")
    page.add_style_tag(content="#settings hr { height: 20rem; }")
    page.wait_for_function(UNCOVERED)
    page.evaluate("() => document.querySelector('#settings hr').remove()")
    assert page.evaluate(CUT_OFF) == []
    lightness = page.evaluate(
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (max(lightness) < 80) == (scheme == "dark"), lightness
    page.keyboard.press("Control+,")
    other = "light" if scheme == "dark" else "dark"
    page.check(f"#settings-sheet [name=theme][value={other}]")
    page.wait_for_function(f"() => document.body.classList.contains('dark') === {str(other == 'dark').lower()}")
    assert page.evaluate(CUT_OFF) == []
    page.check("#settings-sheet [name=theme][value=system]")
    page.wait_for_function(f"() => document.body.classList.contains('dark') === {str(scheme == 'dark').lower()}")


def test_the_layout_is_stable_when_a_job_starts_and_ends(open_page: OpenPage) -> None:
    page = open_page()
    places = """() => ['#stage', '#actions', '#chips', '#recent'].map((s) => {
      const box = document.querySelector(s).getBoundingClientRect(); return [box.x, box.y, box.width, box.height] })"""
    # The first video of all makes the strip appear.
    ask(page)
    start(page)
    wait_for_state(page, "done")
    page.wait_for_selector("#recent [data-show]")
    before = page.evaluate(places)
    ask(page, long=True)
    tick(page, "#size input[value='64x32']")
    page.click("#advanced")
    page.wait_for_selector("#field-steps", state="hidden")
    start(page)
    wait_for_state(page, "running")
    assert page.evaluate(places) == before
    wait_for_state(page, "done")
    assert page.evaluate(places) == before


def test_make_is_one_screen(open_page: OpenPage) -> None:
    page = open_page({"width": 1440, "height": 900})
    # The shipped model with all its words, and the list of models.
    choose_diorama(page)
    page.wait_for_selector("[data-chip=quality]:text-is('Balanced')")
    customize(page, frames="5")
    ask(page, "a red boat sails on the sea")
    start(page)
    wait_for_state(page, "done")
    page.wait_for_function(PLAYING)
    for viewport in ({"width": 1440, "height": 900}, {"width": 1920, "height": 1080}, DESKTOP):
        page.set_viewport_size(viewport)
        # Everything is on the screen, and the video fills at least 80 % of the stage in one direction.
        page.wait_for_function(
            """(height) => {
              const parts = ['#generate', '#transport [data-play]', '#facts .actions', '#recent [data-show]'];
              const stage = document.querySelector('#stage').getBoundingClientRect();
              const video = document.querySelector('#picture video'), box = video.getBoundingClientRect();
              const scale = Math.min(box.width / video.videoWidth, box.height / video.videoHeight);
              return document.documentElement.scrollHeight <= height
                && parts.every((part) => document.querySelector(part).getBoundingClientRect().bottom <= height)
                && Math.max(scale * video.videoWidth / stage.width, scale * video.videoHeight / stage.height) >= 0.8;
            }""",
            arg=viewport["height"],
        )
    for name in ("model", "images", "size", "length", "quality", "seed"):
        open_chip(page, name)
        box = page.locator(f"#pop-{name}").bounding_box()
        assert box["x"] >= 0 and box["y"] + box["height"] <= DESKTOP["height"], name


def test_an_example_becomes_a_video(open_page: OpenPage, server: Server, tmp_path: Path) -> None:
    with serving(make_cache(tmp_path)) as empty:
        page = open_page(url=empty.url)
        assert page.locator("#examples img").evaluate_all("(all) => all.every((one) => one.naturalWidth > 0)")
        assert page.is_hidden("#picture")
        page.click("#examples [data-suggestion] >> nth=1")
        page.wait_for_function("() => document.querySelector('#field-prompt textarea').value.includes('boat')")
        page.wait_for_selector("[data-chip=seed]:text-is('Seed: 7')")
        # Its seed belongs to its prompt.
        page.fill("#field-prompt textarea", "a blue kite")
        page.wait_for_selector("[data-chip=seed]:text-is('Seed: random')")
        page.click("#examples [data-make] >> nth=0")
        page.wait_for_selector('#status .status:not([data-job=""])')
        assert "balloon" in page.input_value("#field-prompt textarea")
        assert page.is_hidden("#examples") and page.is_visible("#picture")
        page.evaluate("() => document.querySelector('#cancel')?.click()")  # it may be done by now
        wait_for_state(page, "cancelled", "done")


def test_on_a_phone_the_prompt_comes_first_and_the_picture_right_below(open_page: OpenPage) -> None:
    page = open_page(PHONE)
    ask(page)
    start(page)
    wait_for_state(page, "done")
    page.reload()
    ready(page)
    page.wait_for_selector("#picture video")
    for viewport in (PHONE, SMALL):
        page.set_viewport_size(viewport)
        page.evaluate("() => scrollTo(0, 0)")
        prompt, chips, picture = (page.locator(one).bounding_box() for one in ("#field-prompt", "#chips", "#picture"))
        assert prompt["y"] + prompt["height"] <= chips["y"] and chips["y"] + chips["height"] <= picture["y"]
        # The tab key has the same order.
        sections = "#field-prompt, #chips, #bar, #stage"
        page.focus("#field-prompt textarea")
        visited = ["field-prompt"]
        while visited[-1] != "stage" and len(visited) < 30:
            page.keyboard.press("Tab")
            visited.append(page.evaluate("(sections) => document.activeElement.closest(sections)?.id", sections))
        assert list(dict.fromkeys(visited)) == ["field-prompt", "chips", "bar", "stage"], visited
        assert picture["y"] + 60 < page.locator("#bar").bounding_box()["y"]
        # Another video of the strip, below, brings the picture into view.
        page.locator("#recent [data-show]").first.scroll_into_view_if_needed()
        page.locator("#recent [data-show]").first.click()
        page.wait_for_function(
            "() => { const box = document.querySelector('#picture').getBoundingClientRect(); return box.top >= 0 }"
        )
