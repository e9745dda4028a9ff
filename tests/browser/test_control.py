"""Control videos in the browser: what the model sees, the part that is used, a drawn mask, before and after."""

import base64
import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.models.images import images_dir
from runtime.queue.store import NAME, JobStore
from runtime.video.mp4 import read_metadata
from tests import tiny_models
from tests.app_server import DEFAULTS, App, make_cache, serving_here
from tests.browser.conftest import DESKTOP, PHONE, OpenPage, ask, open_chip, start, wait_for_state
from tests.browser.test_accessibility import serious_issues
from tests.browser.test_images import chosen, given, hand, select_model, value
from tests.image_files import encoded
from tests.video.test_reader import make

pytestmark = pytest.mark.browser

SEEN = "#images [data-place=control] .seen img"


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Return a web app with tiny models: videos steer one, one starts from them, and one from images only."""
    cache = make_cache(tmp_path_factory.mktemp("control"))
    text = json.loads((cache / "weights" / "tiny" / "tandem.json").read_text(encoding="utf-8"))
    for name, architecture in (("steered", "wan2.1-vace"), ("still", "wan2.2-i2v-a14b")):
        model = tiny_models.build(architecture, cache / "weights" / name)
        sidecar = text | {"title": name.capitalize(), "defaults": DEFAULTS | {"negative_prompt": ""}}
        (model / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    with serving_here(cache, model="steered") as running:
        yield running
    assert "Traceback" not in (cache / "server.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a video of 3 s, whose frames grow brighter."""
    source = "color=black:size=128x64:rate=8:duration=3,geq=lum='9*N':cb=128:cr=128"
    return make(
        tmp_path_factory.mktemp("clip") / "walk.webm",
        "-c:v",
        "libvpx",
        "-crf",
        "4",
        "-b:v",
        "2M",
        inputs=("-f", "lavfi", "-i", source),
    )


def brightness(page: Any) -> float:
    """Return the mean brightness of what the model sees, 0 to 255."""
    return float(np.asarray(picture_of(page).convert("L")).mean())


def picture_of(page: Any) -> Image.Image:
    data = page.get_attribute(SEEN, "src").partition(",")[2]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def wait_for_frames(page: Any, line: str) -> None:
    """Wait until the page has all frames of the part of the video that the line names."""
    page.wait_for_selector(f"#control-used:text-is('{line}')")


def wait_for_another(page: Any, before: str) -> None:
    """Wait until the page shows another picture of what the model sees."""
    page.wait_for_function("([seen, before]) => document.querySelector(seen).src !== before", arg=[SEEN, before])


def noted(page: Any, percent: int) -> None:
    """Wait until the editor of masks says that about so much changes."""
    near = "|".join(str(number) for number in range(percent - 1, percent + 2))
    page.wait_for_selector(f"#mask-editor .note:text-matches('^({near}) % of the frame changes')")


def stroke(page: Any, *shares: tuple[float, float]) -> None:
    """Drag from point to point on the mask, each in shares of its width and height."""
    page.wait_for_selector("#mask-editor .note:not(:text-is('Reading the frame…'))")
    box = page.locator("#mask-editor canvas").bounding_box()
    for number, (x, y) in enumerate(shares):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        if number == 0:
            page.mouse.down()
    page.mouse.up()


def copy_of(server: App, reference: str) -> Path:
    """Return the file in the cache that a reference names."""
    return images_dir(server.cache_dir) / reference.removeprefix("sha256:")[:64]


def drop(page: Any, clip: Path) -> None:
    hand(page, given(clip.read_bytes(), clip.name, "video/webm"))
    chosen(page, f"{clip.name}, 3.0 s", "control")


def test_the_page_shows_what_the_model_sees_of_the_part_that_is_used(
    open_page: OpenPage, steered: App, clip: Path
) -> None:
    page = open_page(url=steered.url)
    open_chip(page, "images")
    for hidden in ("#control-frames", "#field-control_start", "#control-used", "#images [data-place=mask]"):
        assert not page.is_visible(hidden)
    page.keyboard.press("Escape")
    drop(page, clip)
    wait_for_frames(page, "9 frames: 0.0 to 1.1 s of 3.0 s.")
    assert picture_of(page).size == (64, 32)
    first = brightness(page)
    page.focus("#control-frame")
    page.keyboard.press("End")
    page.wait_for_selector("#control-frames output:text-is('9 of 9')")
    assert brightness(page) > first + 40
    page.keyboard.press("Home")
    # The slider ends where the last part that is long enough begins.
    page.focus("#control-start")
    page.keyboard.press("End")
    wait_for_frames(page, "9 frames: 1.8 to 2.9 s of 3.0 s.")
    assert value(page, "control_start") == 1.8 and brightness(page) > first + 80
    before = page.get_attribute(SEEN, "src")
    # What needs a model that is not installed cannot be chosen.
    assert page.is_disabled("#preprocess option[value=pose]") and page.is_visible(
        "#preprocess-missing [data-get-models]"
    )
    page.select_option("#preprocess", "edges")
    wait_for_another(page, before)
    wait_for_frames(page, "9 frames: 1.8 to 2.9 s of 3.0 s.")
    assert brightness(page) < 40
    # Frames that were there already are not asked for again, and nothing is asked for while nothing changes.
    asked = page.requests.count(f"{steered.url}tandem/control")
    before = page.get_attribute(SEEN, "src")
    page.select_option("#preprocess", "off")
    wait_for_another(page, before)
    assert brightness(page) > first + 80
    page.keyboard.press("Escape")
    assert page.requests.count(f"{steered.url}tandem/control") == asked
    # A file that cannot be used is one line, and nothing is lost.
    open_chip(page, "images")
    page.set_input_files("#pick-control", {"name": "text.mp4", "mimeType": "video/mp4", "buffer": b"a boat"})
    page.wait_for_selector("#images .note.bad:has-text('text.mp4 is not a video that can be read')")
    assert value(page, "control").endswith("/walk.webm") and value(page, "control_start") == 1.8
    assert page.is_visible("#control-frames") and serious_issues(page) == []
    # Another video starts at its beginning.
    page.set_input_files("#pick-control", clip)
    wait_for_frames(page, "9 frames: 0.0 to 1.1 s of 3.0 s.")
    page.click("[data-clear=control]")
    page.wait_for_selector("#control-frames", state="hidden")
    assert not page.is_visible("#control-used") and all("422" in line for line in page.complaints)


def test_frames_that_are_given_borders_and_what_lies_between_two_videos(
    open_page: OpenPage, steered: App, clip: Path
) -> None:
    page = open_page(url=steered.url)
    # A model that takes no video says so before the file is sent, and offers one that does.
    select_model(page, "Still")
    page.wait_for_selector("#images .images[data-model=still]", state="attached")
    hand(page, given(clip.read_bytes(), clip.name, "video/webm"))
    page.wait_for_selector("#images .note.bad:has-text('Still does not start from a video. Select one of')")
    assert not any("tandem/videos" in request for request in page.requests)
    page.click("#images [data-offer]:has-text('Use')")
    page.wait_for_selector("#images .images:not([data-model=still])", state="attached")
    select_model(page, "Steered")
    page.wait_for_selector("#images .images[data-model=steered]", state="attached")
    open_chip(page, "images")
    for clear in page.locator("#images [data-clear]:visible").all():
        clear.click()
    # The first image and the last one, without a control video: the rest is gray.
    for field, color in (("image", "white"), ("last_image", "black")):
        page.set_input_files(
            f"#pick-{field}",
            {"name": f"{color}.png", "mimeType": "image/png", "buffer": encoded(Image.new("RGB", (64, 32), color))},
        )
        chosen(page, f"{color}.png", field)
    wait_for_frames(page, "9 frames: 1 given at the start, 1 at the end.")
    shown = []
    for key in ("Home", "ArrowRight", "End"):
        page.press("#control-frame", key)
        shown.append(round(brightness(page) / 127))
    assert shown == [2, 1, 0]
    # Borders of a control video, in shares of its sides.
    for field in ("image", "last_image"):
        page.click(f"[data-clear={field}]")
    drop(page, clip)
    wait_for_frames(page, "9 frames: 0.0 to 1.1 s of 3.0 s.")
    before = page.get_attribute(SEEN, "src")
    page.fill("#outpaint", "0, 0, 50, 0")
    wait_for_another(page, before)
    page.wait_for_function("() => window.tandem.value('outpaint') === '0, 0, 50, 0'")
    page.click("[data-clear=control]")
    # A video that was made is extended from several frames, and leads to another one.
    page.keyboard.press("Escape")
    ask(page)
    start(page)
    wait_for_state(page, "done")
    page.click("#facts .menu summary")
    page.click("#facts [data-extend]")
    page.wait_for_selector("#images [data-place=extend] .seen:not([hidden]) img")
    page.fill("#extend-frames", "3")
    page.set_input_files("#pick-join", clip)
    chosen(page, f"{clip.name}, 3.0 s", "join")
    wait_for_frames(page, "9 frames: 3 given at the start, 3 at the end.")
    page.press("#control-frame", "End")
    assert brightness(page) < 40
    assert serious_issues(page) == [] and page.complaints == []


def test_a_mask_is_drawn_on_a_phone_and_by_keys(open_page: OpenPage, steered: App, clip: Path) -> None:
    page = open_page(PHONE, url=steered.url, color_scheme="dark")
    drop(page, clip)
    wait_for_frames(page, "9 frames: 0.0 to 1.1 s of 3.0 s.")
    page.click("[data-draw]")
    page.wait_for_selector("#mask-editor .note:text-is('Paint what changes.')")
    assert serious_issues(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    dialog = page.locator("#mask-editor").bounding_box()
    assert dialog["y"] >= 0 and dialog["y"] + dialog["height"] <= PHONE["height"]
    assert page.get_attribute("[data-mask=use]", "aria-disabled") == "true"

    # Keys: a box from the middle to the right edge, its height a fifth of the width.
    page.click("#mask-editor label:has([value=box])")
    page.focus("#mask-editor canvas")
    page.keyboard.press("Space")
    for key in (*["Shift+ArrowRight"] * 5, "Shift+ArrowDown"):
        page.keyboard.press(key)
    page.keyboard.press("Space")
    noted(page, 10)
    page.keyboard.press("Control+z")
    page.wait_for_selector("#mask-editor .note:text-is('Paint what changes.')")
    # A finger: the left half as a box, of which the eraser takes a part.
    stroke(page, (0.01, 0.01), (0.5, 1.2))
    noted(page, 50)
    page.click("#mask-editor label:has([value=eraser])")
    page.fill("#mask-size input", "20")
    stroke(page, (0.25, 0.3), (0.25, 0.6))
    noted(page, 36)
    page.click("[data-mask=invert]")
    noted(page, 64)
    page.click("[data-mask=undo]")
    noted(page, 36)
    before = page.get_attribute(SEEN, "src")
    page.click("[data-mask=use]")
    chosen(page, "drawn mask.png", "mask")
    wait_for_another(page, before)
    assert page.evaluate("() => document.activeElement.matches('[data-draw]')")
    reference = value(page, "mask")
    with Image.open(copy_of(steered, reference)) as kept:
        mask = np.asarray(kept.convert("L"))
    assert mask.shape == (64, 128) and {*np.unique(mask)} >= {0, 255}
    assert mask[:, 70:].max() == 0 and mask[3:6, 4:60].min() == 255 and mask[28:34, 28:36].max() == 0
    seen = np.asarray(picture_of(page)).astype(int)
    assert seen[2:8, 3:28, 0].mean() > seen[2:8, 36:, 0].mean() + 40
    assert page.complaints == []


def test_a_drawn_mask_is_changed_and_is_there_after_a_reload(open_page: OpenPage, steered: App, clip: Path) -> None:
    page = open_page(url=steered.url)
    # This app has no chat model to enhance prompts with.
    assert page.get_attribute("#enhance", "aria-disabled") == "true"
    assert "TANDEM_ENHANCER" in page.get_attribute("#enhance", "title")
    drop(page, clip)
    page.click("[data-draw]")
    page.click("#mask-editor label:has([value=box])")
    stroke(page, (0.01, 0.01), (0.5, 1.2))
    page.click("#mask-editor label:has([value=brush])")
    page.fill("#mask-size input", "30")
    stroke(page, (0.75, 0.5), (0.75, 0.5))
    noted(page, 63)
    page.click("[data-mask=use]")
    chosen(page, "drawn mask.png", "mask")
    reference = value(page, "mask")
    # What was drawn can be changed; Escape keeps the mask as it was. After a reload it is there as an image.
    page.click("[data-draw]")
    noted(page, 63)
    page.click("[data-mask=undo]")
    noted(page, 50)
    page.keyboard.press("Escape")
    page.wait_for_selector("#mask-editor", state="hidden")
    assert value(page, "mask") == reference
    page.reload()
    page.wait_for_function("window.tandem && window.tandem.restored")
    open_chip(page, "images")
    chosen(page, "drawn mask.png", "mask")
    page.click("[data-draw]")
    noted(page, 63)
    page.click("[data-mask=clear]")
    page.wait_for_selector("#mask-editor .note:text-is('Paint what changes.')")
    page.click("[data-mask=cancel]")
    assert page.complaints == []


def test_a_video_is_compared_with_its_control_video(open_page: OpenPage, steered: App, clip: Path) -> None:
    page = open_page(PHONE, url=steered.url)
    drop(page, clip)
    page.keyboard.press("Escape")
    ask(page)
    start(page)
    wait_for_state(page, "done")
    with closing(JobStore(steered.cache_dir / NAME)) as store:
        made = store.get(page.get_attribute("#status .status", "data-job")).output
    assert read_metadata(made)["request"]["control_start"] == 0
    button = "#transport [data-before]"
    page.wait_for_selector(f"{button}[aria-pressed=false]")
    assert page.get_attribute(button, "aria-label") == "Compare with the control video"
    assert not page.is_visible("#transport .divide") and not page.is_visible(".mat > video.before")
    for _ in range(2):
        page.click("#transport [data-play]")
    page.click(button)
    page.wait_for_function("() => document.querySelector('.mat > video.before').readyState >= 2")
    page.click("#transport [data-play]")
    page.wait_for_selector("#transport [data-play][aria-label=Play]")
    videos = "[...document.querySelectorAll('.mat > video')]"
    both = f"{videos}.map((video) => [video.currentTime, video.paused, video.duration])"
    page.fill("#transport [data-position]", "0.5")
    page.wait_for_function(f"() => {both}.every(([now, paused]) => paused && Math.abs(now - 0.5) < 0.001)")
    durations = [duration for _, _, duration in page.evaluate(f"() => {both}")]
    assert durations[0] == durations[1]
    # Keys move the divider, on the picture and not on what its shape leaves.
    edge = "getComputedStyle(document.querySelector('#picture')).getPropertyValue('--edge-at')"
    page.focus("#transport [data-divide]")
    page.keyboard.press("Home")
    left = float(page.evaluate(f"() => parseFloat({edge})"))
    page.keyboard.press("End")
    right = float(page.evaluate(f"() => parseFloat({edge})"))
    shown = page.locator(".mat > video:not(.before)").bounding_box()
    wide = min(shown["width"], shown["height"] * 64 / 32)
    assert abs(right - left - wide) < 1
    assert page.get_attribute("#transport [data-divide]", "aria-valuetext") == "100 percent before"
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        assert serious_issues(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.click(button)
    page.wait_for_selector("#transport .divide", state="hidden")
    assert page.get_attribute(".mat > video.before", "src") is None
    # The clip is kept: the control video itself is not needed any more.
    copy_of(steered, value(page, "control")).unlink()
    page.click(button)
    page.wait_for_function("() => document.querySelector('.mat > video.before').readyState >= 2")
    assert page.complaints == []
