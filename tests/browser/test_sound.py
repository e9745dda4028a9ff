"""Sound in a browser: clips are heard, muted, marked, exported, compared one track at a time, and restored."""

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runtime.core.request import GenerationRequest
from runtime.models.catalogue import find
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.store import NAME, JobStore
from runtime.video.reader import read_info
from tests.app_server import MODEL, Server
from tests.browser.conftest import SMALL, OpenPage
from tests.browser.test_accessibility import serious_issues
from tests.browser.test_export import save
from tests.browser.test_history import search
from tests.browser.test_queue import go
from tests.plans import machine
from tests.queue.samples import result_of
from tests.sounds import tone, write_clip

pytestmark = pytest.mark.browser

CAN_PLAY = """() => ['mp4a.40.2', 'flac'].map((codec) =>
  document.createElement('video').canPlayType(`video/mp4; codecs="avc1.64001f, ${codec}"`))"""
# Whether each video of the comparison is heard.
HEARD = "() => [...document.querySelectorAll('[data-compare] video')].map((video) => !video.muted)"
# What is not wholly within a small window.
CUT_OFF = """() => [...document.querySelectorAll('#transport :is(button, input, .time)')]
  .filter((node) => node.checkVisibility())
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))"""
SECONDS, FPS = 2, 8


def add_clip(server: Server, prompt: str, *, sound: str | None) -> str:
    """Add a finished job to the server's store; return its id.

    Args:
        sound: the field of the request; `None` for a silent video.
    """
    outputs = server.cache_dir / "outputs"
    outputs.mkdir(exist_ok=True)
    spec = find(MODEL, server.cache_dir / "weights")
    values = {"width": 64, "height": 32, "frames": SECONDS * FPS + 1, "fps": FPS, "steps": 2, "seed": 5}
    request = GenerationRequest.from_mapping(
        {"prompt": prompt, "model": MODEL, "upscale": "off", **values, "sound": sound or "on"}
    )
    output = outputs / f"{prompt.replace(' ', '-')}.mp4"
    plan = resolve(request, spec, PlanningContext(machine(), output)).replace(sound=sound is not None)
    wave = None if sound is None else tone(SECONDS, hz=(440.0, 660.0))
    write_clip(output, wave, count=SECONDS * FPS + 1, fps=FPS, lossless=sound == "lossless")
    with closing(JobStore(server.cache_dir / NAME)) as store:
        job = store.add(request, plan, instance="test")
        store.log.record(job.id, result_of(plan).model_copy(update={"sound": sound is not None}))
    return job.id


def is_heard(page: Any, selector: str) -> None:
    """Wait until a video plays and its sound is decoded."""
    page.wait_for_function(
        """(selector) => {
          const video = document.querySelector(selector);
          return video.currentTime > 0 && !video.muted && video.webkitAudioDecodedByteCount > 0;
        }""",
        arg=selector,
    )


class Clips(NamedTuple):
    """The ids of jobs: with AAC, with FLAC, and without sound."""

    loud: str
    lossless: str
    silent: str


@pytest.fixture(scope="module")
def clips(server: Server, chromium: Any) -> Clips:
    """Add the clips; skip where Chromium does not play their sound."""
    page = chromium.new_page()
    playable = page.evaluate(CAN_PLAY)
    page.close()
    if "" in playable:
        pytest.skip(f"this Chromium does not play AAC or FLAC: {playable}")
    return Clips(
        add_clip(server, "a foghorn sounds", sound="on"),
        add_clip(server, "a bell sounds", sound="lossless"),
        add_clip(server, "no horn sounds", sound=None),
    )


def stage(page: Any, job: str) -> None:
    """Show a clip on the stage, and wait for it."""
    page.evaluate("(id) => window.tandem.show(id)", job)
    page.wait_for_selector(f"#status .status[data-job='{job}']")
    page.wait_for_selector("#picture video")


def test_the_player_has_sound(open_page: OpenPage, clips: Clips) -> None:
    page = open_page()
    # The stage: without sound at first, as browsers demand.
    stage(page, clips.silent)
    page.wait_for_selector("#transport .sound", state="hidden")
    stage(page, clips.loud)
    page.wait_for_selector("#picture video[data-sound]")
    page.wait_for_selector("#transport [data-mute][aria-pressed=true]")
    assert page.evaluate("document.querySelector('#picture video').muted")
    assert not serious_issues(page, part="#transport")
    page.click("#transport [data-mute]")
    is_heard(page, "#picture video")
    page.wait_for_selector("#transport [data-mute][aria-pressed=false]")
    page.evaluate(
        """() => {
          const bar = document.querySelector('#transport [data-volume]');
          bar.value = 0.25;
          bar.dispatchEvent(new Event('input', {bubbles: true}));
        }"""
    )
    page.wait_for_function("() => document.querySelector('#picture video').volume === 0.25")
    # Another clip with sound keeps both, and M turns the sound off.
    stage(page, clips.lossless)
    is_heard(page, "#picture video")
    assert page.evaluate("document.querySelector('#picture video').volume") == 0.25
    page.keyboard.press("m")
    page.wait_for_function("() => document.querySelector('#picture video').muted")
    page.keyboard.press("m")
    is_heard(page, "#picture video")
    page.set_viewport_size(SMALL)
    page.wait_for_selector("#transport [data-mute]")
    assert page.evaluate(CUT_OFF) == []
    assert not page.complaints


def test_history_marks_plays_and_exports_sound(open_page: OpenPage, clips: Clips, tmp_path: Path) -> None:
    page = open_page()
    stage(page, clips.lossless)
    page.click("#transport [data-mute]")
    is_heard(page, "#picture video")
    go(page, "History")
    search(page, "sounds", 3)
    badges = {
        job: page.locator(f"#history-gallery li[data-job='{job}'] .size-badge").all_inner_texts()
        for job in (clips.loud, clips.lossless, clips.silent)
    }
    assert badges == {clips.loud: ["sound"], clips.lossless: ["sound"], clips.silent: []}
    # The stage is heard only while it is seen.
    page.wait_for_function("() => document.querySelector('#picture video').muted")
    # The viewer: the browser's controls.
    page.click(f"#history-gallery li[data-job='{clips.loud}'] .poster")
    page.wait_for_selector("[data-detail] video[controls]")
    page.evaluate("document.querySelector('[data-detail] video').muted = false")
    is_heard(page, "[data-detail] video")
    assert "AAC" in page.inner_text("[data-detail] dl")
    # An export without loss.
    page.click("[data-detail] [data-export]")
    page.select_option("#export-format", "gif")
    page.wait_for_selector("#export-lossless", state="hidden")
    assert "no sound" in page.inner_text("#export-about")
    page.select_option("#export-format", "prores")
    page.check("#export-lossless")
    assert not serious_issues(page, part="form.export")
    assert read_info(save(page, tmp_path)).sound == ("pcm_s24le",)
    page.click("form.export [data-close]")
    with page.expect_download() as download:
        page.click("[data-detail] a:has-text('Copy without metadata')")
    assert read_info(Path(download.value.path())).sound == ("aac",)
    page.keyboard.press("Escape")
    page.wait_for_selector("#lightbox", state="hidden")
    page.click("[role=tab]:has-text('Make')")
    is_heard(page, "#picture video")
    assert not page.complaints


def test_one_of_two_compared_clips_is_heard(open_page: OpenPage, clips: Clips) -> None:
    page = open_page()
    go(page, "History")
    search(page, "sounds", 3)
    # Of two compared clips one is heard, or none.
    page.evaluate("(pair) => window.tandem.compare(pair)", [clips.loud, clips.lossless])
    page.wait_for_selector("[data-compare] [data-hear=B]")
    assert page.evaluate(HEARD) == [False, False]
    page.click("[data-compare] [data-play]")
    page.click("[data-compare] [data-hear=A]")
    page.wait_for_function(f"() => String(({HEARD})()) === 'true,false'")
    page.click("[data-compare] [data-hear=B]")
    page.wait_for_function(f"() => String(({HEARD})()) === 'false,true'")
    pressed = "[...document.querySelectorAll('[data-hear]')].map((one) => one.getAttribute('aria-pressed'))"
    assert page.evaluate(pressed) == ["false", "true"]
    page.click("[data-compare] [data-hear=B]")
    page.wait_for_function(f"() => String(({HEARD})()) === 'false,false'")
    page.keyboard.press("Escape")
    # A silent clip has no button.
    page.evaluate("(pair) => window.tandem.compare(pair)", [clips.silent, clips.lossless])
    page.wait_for_selector(f"[data-compare='{clips.silent} {clips.lossless}']")
    assert page.locator("[data-compare] [data-hear]").count() == 1
    page.keyboard.press("Escape")

    # Its settings, with the sound.
    page.click(f"#history-gallery li[data-job='{clips.lossless}'] .poster")
    page.click("[data-reuse]:has-text('Use its settings')")
    stored = "document.querySelector('#stored-sound :is(input, textarea)').value"
    page.wait_for_function(f"() => {stored} === 'lossless'")
    assert not page.complaints
