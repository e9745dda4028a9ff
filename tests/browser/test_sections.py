"""Videos made in sections in the browser: each family's form, a video that is watched, ended early and continued.

The worker is stopped while the page is looked at, so that a slow machine sees the same states.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from runtime.queue.store import NAME, JobStore
from tests import tiny_models
from tests.app_server import Server, make_cache, serving
from tests.browser.conftest import PHONE, OpenPage, advance, open_chip, start, tick, wait_for_state
from tests.browser.test_accessibility import serious_issues
from tests.browser.test_images import chosen, file, given, hand, select_model, value
from tests.families import framepack_models
from tests.ui.page_texts import line
from tests.waiting import stop_process, until

pytestmark = pytest.mark.browser

DEFAULTS = {"width": 48, "height": 32, "frames": 109, "fps": 12, "steps": 60, "guidance_scale": 4.0}
PROMPT = "[0s: a red boat sails left] [3s: a blue ball rolls right]"
VIDEO = "#picture video[data-grows]"
IMAGE_MODELS = {"Inverted", "Vanilla"}
# Fields of the form by what opens them, and which models have them.
FIELDS = {
    "advanced": {
        "#field-negative_prompt": {"Tiny"},
        "#field-guidance_scale_2": {"Tiny"},
        "#field-guidance_scale": {"Tiny", "Inverted", "Vanilla", "Hunyuan"},
    },
    "length": {"#length-seconds": {"Inverted", "Vanilla"}, "#field-frames": {"Tiny", "Hunyuan"}},
    "images": {"#images [data-place=image]": IMAGE_MODELS, "#images [data-place=last_image]": {"Inverted"}},
}


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a web app with tiny models of three families, of which one has both orders of sections."""
    cache = make_cache(tmp_path_factory.mktemp("sections"))
    card = {"license": "none", "sizes": [[48, 32], [32, 48]], "frame_counts": [37, 109], "defaults": DEFAULTS}
    card |= {"latent_rgb_factors": [[0.1, -0.1, 0.05]] * 4, "latent_rgb_bias": [0.0, 0.0, 0.0]}
    for name, order in (("inverted", "inverted_anti_drifting"), ("vanilla", "vanilla")):
        framepack_models.pipeline().save_pretrained(cache / "weights" / name)
        sidecar = card | {"title": name.capitalize(), "sampling_type": order}
        (cache / "weights" / name / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    hunyuan = tiny_models.build("hunyuan-video", cache / "weights" / "hunyuan")
    sidecar = card | {"title": "Hunyuan", "frame_counts": [9], "defaults": DEFAULTS | {"frames": 9}}
    sidecar["latent_rgb_factors"] = [[0.1, -0.1, 0.05]] * 16
    (hunyuan / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    with serving(cache, "--model", "vanilla") as running:
        yield running
    assert "Traceback" not in (cache / "server.txt").read_text(encoding="utf-8")


def custom_length(page: Any, seconds: float) -> None:
    """Choose a length in seconds, and close what the chip opened."""
    tick(page, "#length input[value=custom]")
    open_chip(page, "length")
    page.fill("#length-seconds", str(seconds))
    page.keyboard.press("Escape")
    page.wait_for_selector("#pop-length", state="hidden")


def lasts(page: Any, seconds: float) -> None:
    """Wait until the video on the stage is so long."""
    page.wait_for_function(
        "(seconds) => Math.abs(document.querySelector('#picture video')?.duration - seconds) < 0.05", arg=seconds
    )


@contextmanager
def stopped_in_section_2(server: Server, job: str) -> Iterator[None]:
    """Stop the worker in the second section of a video."""
    with closing(JobStore(server.cache_dir / NAME)) as store:

        def in_section_2() -> bool:
            names = [event["event"] for _, _, event in store.log.events(job)]
            return "SectionDone" in names and "StepDone" in names[names.index("SectionDone") :]

        until(in_section_2)
        with store.database.reading() as connection:
            (pid,) = (row["pid"] for row in connection.execute("SELECT pid FROM workers"))
    stop_process(pid, server.cache_dir / NAME)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_form_follows_the_family(open_page: OpenPage, able: Server) -> None:
    page = open_page(url=able.url)
    advance(page)
    for title in ("Hunyuan", "Inverted", "Tiny", "Vanilla"):
        select_model(page, title)
        page.wait_for_selector(f"[data-chip=model]:text-is('{title}')")
        tick(page, "#length input[value=custom]")
        takes_files = title in {*IMAGE_MODELS, "Tiny"}  # images, or a video
        page.wait_for_selector("[data-chip=images]", state="visible" if takes_files else "hidden")
        for opener, fields in FIELDS.items():
            if opener == "length" or (opener == "images" and title in IMAGE_MODELS):
                open_chip(page, opener)
            for field, models in fields.items():
                page.wait_for_selector(field, state="visible" if title in models else "hidden")
            page.keyboard.press("Escape")
        lacking = page.get_attribute("#card .model", "data-lacks").split()
        for name, field in (
            ("loras", "#field-loras"),
            ("compile", "#field-compile"),
            ("step_cache", "#field-step_cache"),
        ):
            page.wait_for_selector(field, state="hidden" if name in lacking else "visible")
    # Whole sections; the error of a prompt is at its field.
    custom_length(page, 7)
    open_chip(page, "length")
    page.wait_for_selector("#length [data-length]:text-is('6.1 s, 2 sections, 73 frames at 12 fps')")
    assert value(page, "frames") == 73
    hand(page, file(60, 40, "boat.png"))
    chosen(page, "boat.png")
    page.fill("#field-prompt textarea", "[0s: a red boat] [3,5s: a ball]")
    page.click("#generate")
    page.wait_for_selector("#field-prompt .field-error:has-text('[3,5s: a ball]')")
    page.fill("#field-prompt textarea", "a red boat")
    page.wait_for_selector("#field-prompt .field-error", state="detached")
    assert page.complaints == []


def test_a_video_is_watched_while_it_is_made_ended_and_continued(open_page: OpenPage, able: Server) -> None:
    page = open_page(url=able.url)
    select_model(page, "Inverted")
    page.wait_for_selector("[data-chip=model]:text-is('Inverted')")
    hand(page, file(60, 40, "boat.png"))
    chosen(page, "boat.png")
    page.fill("#field-prompt textarea", PROMPT)
    custom_length(page, 12)
    start(page)
    job = page.get_attribute("#status .status", "data-job")
    # The first section plays, and the preview of the next one is shown.
    with stopped_in_section_2(able, job):
        page.wait_for_selector(f"{VIDEO}[src='tandem/clip/{job}/1.mp4']")
        page.wait_for_selector("#picture .so-far:has-text('1 of 4 sections, section 2 is made')")
        lasts(page, 33 / 12)
        page.wait_for_function("() => document.querySelector('#picture video').currentTime > 0.1")
        page.wait_for_selector("#picture .preview:not([hidden])")
        page.wait_for_selector("#status .detail:has-text(' of 4, step ')")
        page.click("#status [data-action=finish]")
        page.wait_for_selector("#message:has-text('Ends after the current section')")
        page.wait_for_selector(f"#status .left:has-text('{line('ui.ends_after_section')}')")
    wait_for_state(page, "done")
    page.wait_for_selector(f"#status .detail:has-text('{line('ui.video_unfinished', made=2, of=4)}')")
    lasts(page, 69 / 12)
    assert page.locator(VIDEO).count() == 0
    with closing(JobStore(able.cache_dir / NAME)) as store:
        video = store.get(job).output
    early = video.read_bytes()
    page.click("#status [data-action=resume]:has-text('Continue this video')")
    page.wait_for_selector("#status .detail:has-text('section 4 of 4')")
    wait_for_state(page, "done")
    page.wait_for_selector(f"#status .detail:has-text('{line('ui.video_ready')}')")
    lasts(page, 145 / 12)
    assert page.is_hidden("#status [data-action=resume]") and page.is_hidden("#status [data-action=finish]")
    assert video.read_bytes() != early
    # The MP4 brings back prompt, length and image.
    other = open_page(url=able.url)
    hand(other, given(video.read_bytes(), "mine.mp4"))
    other.wait_for_selector("[data-chip=model]:text-is('Inverted')")
    open_chip(other, "images")
    chosen(other, "boat.png")
    open_chip(other, "length")
    other.wait_for_selector("#length [data-length]:has-text('4 sections')")
    assert other.input_value("#field-prompt textarea") == PROMPT
    assert (value(other, "frames"), value(other, "steps")) == (145, 60)
    assert page.complaints == other.complaints == []


def test_a_running_video_with_sections_fits_a_phone_and_is_accessible(open_page: OpenPage, able: Server) -> None:
    page = open_page(PHONE, url=able.url, color_scheme="dark")
    hand(page, file(60, 40, "boat.png"))
    chosen(page, "boat.png")
    page.fill("#field-prompt textarea", PROMPT)
    custom_length(page, 120)
    start(page)
    with stopped_in_section_2(able, page.get_attribute("#status .status", "data-job")):
        page.wait_for_selector(VIDEO)
        page.wait_for_selector("#status [data-action=finish]")
        assert serious_issues(page) == []
        beside = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert beside <= 0
        page.click("[role=tab]:has-text('Queue')")
        page.click("#queue-list [data-action=finish]")
    page.click("[role=tab]:has-text('Make')")
    wait_for_state(page, "done")
    page.click("[role=tab]:has-text('History')")
    page.wait_for_selector("#history-gallery [data-action=resume]:has-text('Continue')")
    assert page.complaints == []
