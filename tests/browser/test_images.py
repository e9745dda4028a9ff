"""Videos from images in the browser: dropped, cropped, generated, continued from, restored, on a phone."""

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime.models.images import images_dir
from runtime.queue.store import NAME, JobStore
from runtime.video.images import fitted
from runtime.video.mp4 import read_metadata
from tests import tiny_models
from tests.app_server import DEFAULTS, App, make_cache, serving_here
from tests.browser.conftest import PHONE, SMALL, OpenPage, ask, open_chip, start, tick, wait_for_state
from tests.browser.test_accessibility import serious_issues
from tests.image_files import encoded, picture
from tests.video.test_reader import make

pytestmark = pytest.mark.browser

# The page is handed the events of a drop and of a paste; a file cannot come from outside in a test.
HAND = """({files, kind, place}) => {
  const carried = new DataTransfer();
  for (const {data, name, type} of files) {
    carried.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type}));
  }
  const at = document.querySelector(place);
  const options = {bubbles: true, cancelable: true};
  const event = kind === 'drop' ? new DragEvent('drop', {...options, dataTransfer: carried})
    : new ClipboardEvent('paste', {...options, clipboardData: carried});
  at.dispatchEvent(event);
  return event.defaultPrevented;
}"""
SEEN = "#images [data-place=image] .seen:not([hidden]) img"
# What the preview shows of the image, as shares of its width and height: left, top, right, bottom.
SHOWN = """(image) => {
  const {objectFit, objectPosition} = getComputedStyle(image), at = parseFloat(objectPosition) / 100;
  const scales = [image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight];
  const scale = objectFit === 'cover' ? Math.max(...scales) : Math.min(...scales);
  const [w, h] = [image.clientWidth / scale / image.naturalWidth, image.clientHeight / scale / image.naturalHeight];
  return [(1 - w) * at, (1 - h) * at, (1 - w) * at + w, (1 - h) * at + h];
}"""


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Return a web app with four tiny models: from text, an optional image, two images, and a control video."""
    cache = make_cache(tmp_path_factory.mktemp("images"))
    text = cache / "weights" / "tiny"
    for name, architecture in (
        ("first", "wan2.2-ti2v-5b"),
        ("both", "wan2.2-i2v-a14b"),
        ("steered", "wan2.1-vace"),
    ):
        model = tiny_models.build(architecture, cache / "weights" / name)
        sidecar = json.loads((text / "tandem.json").read_text(encoding="utf-8"))
        channels = 48 if architecture == "wan2.2-ti2v-5b" else 16
        sidecar |= {"title": name.capitalize(), "latent_rgb_factors": [[0.1, -0.1, 0.05]] * channels}
        sidecar["defaults"] = DEFAULTS | {"negative_prompt": ""}
        if name == "first":
            sidecar["defaults"]["image_guidance_scale"] = 1.5
        (model / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    with serving_here(cache, model="first") as running:
        yield running
    assert "Traceback" not in (cache / "server.txt").read_text(encoding="utf-8")


def file(width: int, height: int, name: str) -> dict[str, str]:
    return given(encoded(picture(width, height)), name, "image/png")


def given(data: bytes, name: str, kind: str = "") -> dict[str, str]:
    return {"data": base64.b64encode(data).decode(), "name": name, "type": kind}


def hand(page: Any, *files: dict[str, str], kind: str = "drop", place: str = "body") -> None:
    """Drop files at a place of the page, or paste them."""
    assert page.evaluate(HAND, {"files": files, "kind": kind, "place": place})


def chosen(page: Any, name: str, field: str = "image") -> None:
    """Wait until a place shows an image."""
    page.wait_for_selector(f"#images [data-place={field}] .what:text-is('{name}')")
    page.wait_for_selector(f"#images [data-place={field}] .seen:not([hidden])")


def value(page: Any, name: str) -> Any:
    return page.evaluate(
        "(name) => window.tandem.values[document.querySelector('#top header').dataset.fields.split(' ').indexOf(name)]",
        name,
    )


def select_model(page: Any, title: str) -> None:
    """Choose a model, and close what its chip opened."""
    page.keyboard.press("Escape")  # what else is open may cover the chip
    open_chip(page, "model")
    page.click("#field-model input")
    page.click(f"[role=option]:has-text('{title}')")
    page.wait_for_selector("[role=option]", state="detached")
    page.keyboard.press("Escape")
    page.wait_for_selector("#pop-model", state="hidden")


def size(page: Any, pixels: str) -> None:
    """Wait until the size is that of the image."""
    tile = "#size .tile:has(input[value=image]:checked)"
    page.wait_for_selector(f"{tile} small:text-is('{pixels}')", state="attached")
    page.wait_for_selector(f"[data-chip=size]:text-is('{pixels}')")


def offers_size_of_image(page: Any) -> bool:
    """Return whether the size of the image can be chosen."""
    open_chip(page, "size")
    offered = bool(page.is_visible("#size input[value=image]"))
    page.keyboard.press("Escape")
    return offered


def test_an_image_is_dropped_pasted_picked_and_removed(open_page: OpenPage, able: App, tmp_path: Path) -> None:
    page = open_page(url=able.url)
    assert not offers_size_of_image(page)
    assert not page.is_visible("#pop-images")
    hand(page, given(b"notes", "notes.txt"), file(96, 96, "square.png"), file(60, 40, "other.png"))
    chosen(page, "square.png")
    page.wait_for_selector("#images .note:has-text('Only “square.png” was taken; 2 other files were left out.')")
    # The size follows from the image.
    size(page, "32 × 32")
    assert offers_size_of_image(page)
    hand(page, file(90, 45, "wide.png"), kind="paste")
    chosen(page, "wide.png")
    size(page, "64 × 32")
    # By keyboard, and without an image again.
    (tmp_path / "third.png").write_bytes(encoded(picture(50, 50)))
    page.focus("#pick-image")
    page.set_input_files("#pick-image", tmp_path / "third.png")
    chosen(page, "third.png")
    page.focus("[data-clear=image]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#images .what:text-is('or drop or paste it')")
    assert page.evaluate("() => document.activeElement.id") == "pick-image"
    assert not page.is_visible(SEEN) and not offers_size_of_image(page)
    # A bad image is one line at its place, and the form keeps what it has.
    hand(page, file(90, 45, "wide.png"))
    chosen(page, "wide.png")
    page.fill("#field-prompt textarea", "a red boat")
    for data, name, line in (
        (b"", "empty.png", "empty.png is empty."),
        (encoded(picture(640, 480))[:1500], "torn.png", "torn.png is damaged or incomplete."),
        (b"%PDF", "letter.pdf", "letter.pdf is not an image that Tandem reads."),
        (encoded(picture(1, 1)), "dot.png", "dot.png has 1 × 1 pixels"),
    ):
        page.keyboard.press("Escape")
        page.wait_for_selector("#pop-images", state="hidden")
        hand(page, given(data, name), place="#images [data-place=image]")
        page.wait_for_selector(f"#images .note.bad:has-text('{line}')")
    sent = len(page.requests)
    large = "() => Object.defineProperty(File.prototype, 'size', {get: () => 65 * 2 ** 20, configurable: true})"
    page.evaluate(large)
    hand(page, file(20, 20, "large.png"))
    page.wait_for_selector("#images .note.bad:has-text('“large.png” is larger than 64 MB.')")
    assert [url for url in page.requests[sent:] if "large" in url] == []
    assert page.is_visible(SEEN) and value(page, "image").endswith("/wide.png")
    assert page.input_value("#field-prompt textarea") == "a red boat"
    assert [one for one in page.complaints if "422" not in one] == []


def test_guidance_follows_the_image_unless_it_was_changed(open_page: OpenPage, able: App) -> None:
    page = open_page(url=able.url)
    page.wait_for_function("() => window.tandem.restored")
    usual = DEFAULTS["guidance_scale"]

    def wait_for_guidance(scale: float) -> None:
        page.wait_for_function(
            "(scale) => window.tandem.values[document.querySelector('#top header').dataset.fields.split(' ')"
            ".indexOf('guidance_scale')] === scale",
            arg=scale,
        )

    def remove() -> None:
        page.click("[data-clear=image]")
        page.wait_for_selector("#images .what:text-is('or drop or paste it')")

    wait_for_guidance(usual)
    hand(page, file(90, 45, "wide.png"))
    chosen(page, "wide.png")
    wait_for_guidance(1.5)
    remove()
    wait_for_guidance(usual)
    # A value of the user's stays.
    page.evaluate("() => window.tandem.apply({guidance_scale: 2.5})")
    wait_for_guidance(2.5)
    hand(page, file(90, 45, "wide.png"))
    chosen(page, "wide.png")
    size(page, "64 × 32")
    assert value(page, "guidance_scale") == 2.5
    remove()
    assert value(page, "guidance_scale") == 2.5
    # Another model's values come with its choice; back at this one, the image decides again.
    hand(page, file(90, 45, "wide.png"))
    chosen(page, "wide.png")
    select_model(page, "Both")
    wait_for_guidance(usual)
    select_model(page, "First")
    wait_for_guidance(1.5)


def test_a_model_without_images_names_others_and_two_places_take_two(open_page: OpenPage, able: App) -> None:
    page = open_page(url=able.url)
    select_model(page, "Tiny")
    page.wait_for_selector("#images .images[data-model=tiny]", state="attached")
    assert page.locator("#images .place:not([data-place=video])").count() == 0
    hand(page, file(40, 40, "boat.png"))
    page.wait_for_selector("#images .note:has-text('Tiny does not start from an image. Select one of')")
    assert "First" in page.inner_text("#images .note")
    assert page.inner_text("[data-chip=images]") == "+ Video"
    # One that runs here is offered, with the image.
    page.click("#images [data-offer]:has-text('Use First')")
    page.wait_for_selector("#images .images[data-model=first]", state="attached")
    chosen(page, "boat.png")
    page.wait_for_selector("#refused .aside:has-text('All settings are filled in.')", state="attached")
    select_model(page, "Both")
    open_chip(page, "images")
    page.click("[data-clear=image]")
    page.wait_for_selector("#images [data-place=image]:has-text('required')")
    hand(page, file(40, 40, "boat.png"))
    chosen(page, "boat.png")
    hand(page, file(50, 40, "end.png"))
    chosen(page, "end.png", "last_image")
    page.click("[data-clear=image]")
    page.wait_for_selector("#images [data-place=image] .field-error:has-text('A last image needs a first one.')")
    assert page.complaints == []


def test_the_preview_is_what_the_model_sees(open_page: OpenPage, able: App) -> None:
    page = open_page(url=able.url)
    for width, height in ((160, 40), (40, 120)):
        name = f"{width}x{height}.png"
        hand(page, file(width, height, name))
        chosen(page, name)
        tick(page, "#size input[value='64x32']")
        open_chip(page, "images")
        page.wait_for_selector("#images .adjust:not([hidden])")
        page.check("#images input[value=crop]")
        image = page.wait_for_selector(SEEN)
        source = picture(width, height)
        for position in (0, 50, 100):
            page.fill("#image-position", str(position))
            page.wait_for_function("(p) => window.tandem.values.includes(p)", arg=position)
            left, top, right, bottom = (
                share * side for share, side in zip(image.evaluate(SHOWN), (width, height) * 2, strict=True)
            )
            seen = source.resize((64, 32), Image.Resampling.LANCZOS, box=(max(left, 0), max(top, 0), right, bottom))
            model = fitted(source, 64, 32, position=position)
            worst = max(abs(a - b) for a, b in zip(seen.tobytes(), model.tobytes(), strict=True))
            assert worst <= 4, (position, worst)  # the frame on the page has whole pixels
        page.check("#images input[value=fit]")
        page.wait_for_selector("#image-position", state="hidden")
        assert image.evaluate("(image) => getComputedStyle(image).objectFit") == "contain"
    # Nothing is cut: nothing is to be chosen.
    hand(page, file(128, 64, "same.png"))
    chosen(page, "same.png")
    page.wait_for_selector("#images .adjust", state="hidden")
    assert page.complaints == []


def test_a_video_is_extended_and_its_parts_are_played(open_page: OpenPage, able: App) -> None:
    page = open_page(url=able.url)
    hand(page, file(96, 96, "square.png"))
    chosen(page, "square.png")
    size(page, "32 × 32")
    ask(page)
    start(page)
    wait_for_state(page, "done")
    first = page.get_attribute("#status .status", "data-job")
    assert page.locator("#facts .parts").count() == 0
    page.click("#facts .menu summary")
    page.click("#facts [data-extend]")
    page.wait_for_selector("#images [data-place=extend] .seen:not([hidden]) img")
    assert page.locator("#images [data-place=image]").is_hidden()
    page.wait_for_function("() => window.tandem.value('extend')")
    page.keyboard.press("Escape")
    page.fill("#field-prompt textarea", "it sinks")
    start(page)
    page.wait_for_selector(f"#status .status[data-job]:not([data-job='{first}'])")
    wait_for_state(page, "done")
    tiles = page.locator("#facts .parts [data-from]")
    assert tiles.all_inner_texts()[1].splitlines()[0] == "it sinks"
    assert tiles.count() == 2
    begin = float(tiles.nth(1).get_attribute("data-from") or 0)
    page.evaluate("() => window.tandem.stageVideo().pause()")
    tiles.nth(1).click()
    page.wait_for_function("(at) => Math.abs(window.tandem.stageVideo().currentTime - at) < 0.01", arg=begin)
    page.set_viewport_size({"width": 320, "height": 700})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 320
    # The video is cleared before the answer to the click comes.
    assert page.evaluate("() => window.tandem.value('extend')")
    page.evaluate(
        """() => {
            const answered = window.tandem.imageAnswered;
            window.tandem.fill = () => { window.filled = true; };
            window.tandem.imageAnswered = (text) => { answered(text); window.answered = true; };
            document.querySelector("#facts .parts [data-extend]").click();
            document.querySelector("#images [data-clear=extend]").click();
        }"""
    )
    page.wait_for_function("() => window.answered")
    page.wait_for_selector("#images [data-place=image]:not([hidden])")
    assert page.evaluate("() => window.filled") is None
    assert page.complaints == []


def test_a_video_is_made_continued_and_restored_with_its_image(open_page: OpenPage, able: App) -> None:
    page = open_page(url=able.url)
    hand(page, file(96, 96, "square.png"))
    chosen(page, "square.png")
    size(page, "32 × 32")
    ask(page)
    start(page)
    wait_for_state(page, "done")
    first = page.get_attribute("#status .status", "data-job")
    page.click("#facts [popovertarget=details]")
    page.wait_for_selector("#facts .used-images:has-text('square.png') img")
    page.keyboard.press("Escape")
    page.wait_for_selector("#details", state="hidden")
    with closing(JobStore(able.cache_dir / NAME)) as store:
        video = store.get(first).output
    # The last frame, for a model that needs one.
    select_model(page, "Tiny")
    page.wait_for_selector("#images .images[data-model=tiny]", state="attached")
    page.click("#facts .menu summary")
    page.click("#facts [data-continue]")
    page.wait_for_selector("#images [data-place=image] .what:has-text('-frame-9.png')")
    page.wait_for_function("() => document.querySelector('#images .images').dataset.model !== 'tiny'")
    size(page, "32 × 32")
    assert value(page, "model") == "first" or value(page, "model") == "both"
    # One that is shown, of a video in the history.
    page.get_by_role("tab", name="History", exact=True).click()
    page.click(f"#history-gallery [data-job='{first}'] .poster")
    page.wait_for_selector("#history-detail .used-images img")
    page.evaluate("""async () => {
      const video = document.querySelector('#history-detail video');
      video.pause();
      await new Promise((seeked) => { video.onseeked = seeked; video.currentTime = 2.5 / 8; });
    }""")
    page.click("#history-detail [data-continue]:has-text('Start from the frame shown')")
    page.wait_for_selector("#images [data-place=image] .what:has-text('-frame-3.png')")
    # The MP4 brings the image back; without its copy there are the thumbnail and one line.
    data = video.read_bytes()
    hand(page, given(data, "mine.mp4"))
    open_chip(page, "images")
    chosen(page, "square.png")
    digest = read_metadata(video)["images"]["image"]["digest"]
    copy = images_dir(able.cache_dir) / digest
    content = copy.read_bytes()
    copy.unlink()
    other = open_page(url=able.url)
    hand(other, given(data, "mine.mp4"))
    open_chip(other, "images")
    chosen(other, "square.png")
    other.wait_for_selector("#images .field-error:has-text('The copy of the image square.png is no longer')")
    hand(other, given(content, "square.png", "image/png"))
    other.wait_for_selector("#images .field-error", state="detached")
    chosen(other, "square.png")
    assert page.complaints == other.complaints == []


def test_an_image_fits_a_phone_and_is_accessible(open_page: OpenPage, able: App) -> None:
    page = open_page(PHONE, url=able.url, color_scheme="dark")
    hand(page, file(400, 100, "wide.png"))
    chosen(page, "wide.png")
    tick(page, "#size input[value='64x32']")
    open_chip(page, "images")
    page.wait_for_selector("#images .adjust:not([hidden])")
    for viewport in (PHONE, SMALL):
        page.set_viewport_size(viewport)
        assert serious_issues(page) == []
        beside = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert beside <= 0
        generate = page.locator("#generate").bounding_box()
        assert generate["y"] + generate["height"] <= viewport["height"]
        # What the chip opened scrolls within the space above the bar with Generate.
        popover, bar = page.locator("#pop-images").bounding_box(), page.locator("#bar").bounding_box()
        assert popover["y"] >= 0 and popover["y"] + popover["height"] <= bar["y"]
    assert page.complaints == []


def made_video(page: Any, server: App) -> Path:
    """Ask for a video, and return its file when it is done."""
    ask(page)
    start(page)
    wait_for_state(page, "done")
    with closing(JobStore(server.cache_dir / NAME)) as store:
        made: Path = store.get(page.get_attribute("#status .status", "data-job")).output
    return made


def test_a_control_video_a_mask_and_references_are_chosen_and_restored(
    open_page: OpenPage, able: App, tmp_path: Path
) -> None:
    page = open_page(PHONE, url=able.url)
    source = ("-f", "lavfi", "-i", "testsrc=size=64x96:rate=8:duration=1")
    clip = make(tmp_path / "depth.webm", "-c:v", "libvpx", inputs=source)
    select_model(page, "Steered")
    page.wait_for_selector("[data-chip=images]:text-is('+ Control video or images')")
    open_chip(page, "images")
    assert not page.is_visible("#images [data-place=mask]") and not page.is_visible("#control-scale")
    page.keyboard.press("Escape")
    hand(page, given(clip.read_bytes(), "depth.webm", "video/webm"))
    chosen(page, "depth.webm, 1.0 s", "control")
    size(page, "32 × 48")
    assert value(page, "frames") == 5
    page.set_input_files("#pick-mask", clip)
    chosen(page, "depth.webm, 1.0 s", "mask")
    hand(page, file(40, 30, "boat.png"), place="#images [data-place=references]")
    chosen(page, "boat.png", "references")
    page.set_input_files(
        "#pick-references", {"name": "sea.png", "mimeType": "image/png", "buffer": encoded(picture(30, 30))}
    )
    chosen(page, "boat.png, sea.png", "references")
    page.fill("#control-scale", "1, 0.5")
    page.select_option("#preprocess", "edges")
    assert serious_issues(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.keyboard.press("Escape")
    made = made_video(page, able)
    request = read_metadata(made)["request"]
    assert (request["control_scale"], len(request["references"]), request["width"]) == ([1, 0.5], 2, 32)
    assert request["preprocess"] == "edges"
    other = open_page(url=able.url)
    hand(other, given(made.read_bytes(), "mine.mp4"))
    open_chip(other, "images")
    chosen(other, "depth.webm, 1.0 s", "control")
    chosen(other, "boat.png, sea.png", "references")
    assert other.input_value("#control-scale") == "1, 0.5" and other.input_value("#preprocess") == "edges"
    other.click("[data-clear=control]")
    other.wait_for_selector("#images [data-place=control] .what:text-is('or drop it here')")
    assert not other.is_visible("#preprocess")
    assert value(other, "mask") != "" and other.is_visible("#images [data-place=mask]")
    assert page.complaints == [] and other.complaints == []


def test_a_video_is_dropped_changed_and_restored(open_page: OpenPage, able: App, tmp_path: Path) -> None:
    page = open_page(PHONE, url=able.url, color_scheme="dark")
    clip = make(
        tmp_path / "clip.webm", "-c:v", "libvpx", inputs=("-f", "lavfi", "-i", "testsrc=size=96x96:rate=8:duration=1")
    )
    hand(page, file(90, 45, "wide.png"))
    chosen(page, "wide.png")
    # A video takes the place of the image, and is not longer than it is.
    hand(page, given(clip.read_bytes(), "clip.webm", "video/webm"))
    chosen(page, "clip.webm, 1.0 s", "video")
    assert not page.is_visible("#images [data-place=image]")
    size(page, "32 × 32")
    page.wait_for_function("() => window.tandem.values.includes(5)")
    assert (value(page, "image"), value(page, "frames")) == ("", 5)
    page.focus("#strength")
    page.keyboard.press("End")
    steps = value(page, "steps")
    page.wait_for_selector(f"#images .strength output:text-is('1, {steps} of {steps} steps')")
    page.fill("#strength", "0.5")
    for viewport in (PHONE, SMALL):
        page.set_viewport_size(viewport)
        assert serious_issues(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.keyboard.press("Escape")
    made = made_video(page, able)
    request = read_metadata(made)["request"]
    assert (request["strength"], request["frames"], request["width"]) == (0.5, 5, 32)
    # The MP4 brings the video back; without its copy there are the thumbnail and one line.
    copy = images_dir(able.cache_dir) / read_metadata(made)["images"]["video"]["digest"]
    copy.unlink()
    other = open_page(url=able.url)
    hand(other, given(made.read_bytes(), "mine.mp4"))
    open_chip(other, "images")
    chosen(other, "clip.webm, 1.0 s", "video")
    other.wait_for_selector("#images .field-error:has-text('The copy of the video clip.webm is no longer')")
    other.set_input_files("#pick-video", clip)
    other.wait_for_selector("#images .field-error", state="detached")
    other.set_input_files("#pick-video", {"name": "text.mp4", "mimeType": "video/mp4", "buffer": b"a boat"})
    other.wait_for_selector("#images .note.bad:has-text('text.mp4 is not a video that can be read')")
    other.click("[data-clear=video]")
    other.wait_for_selector("#images [data-place=image]", state="visible")
    assert page.complaints == [] and all("422" in line for line in other.complaints)
