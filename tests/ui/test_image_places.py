"""The places of images: what they offer for each model, and the answers to their script."""

import base64
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.facts import Fact
from runtime.core.images import ImageUse
from runtime.core.request import OVERLAPS, PREPROCESSING
from runtime.core.settings import Settings
from runtime.models.catalogue import find
from runtime.models.images import all_models, find_image, image_models, keep_image
from runtime.models.spec import ModelSpec
from runtime.ui import image_places
from runtime.ui.formatting import paragraph
from runtime.ui.image_places import ImageAnswers, places_html, used_images
from runtime.video.image_decoder import FORMATS
from runtime.video.mp4 import VideoWriter, read_frame
from tests.image_files import encoded, picture, saved, taking_images
from tests.plans import machine, tiny_plan
from tests.tiny_models import ANIMATE


@pytest.fixture
def answers(tmp_path: Path) -> ImageAnswers:
    settings = Settings(cache_dir=tmp_path / "cache")
    return ImageAnswers(
        settings,
        lambda data, name, _visitor: keep_image(data, name, "image", settings.cache_dir),
        {},
        machine,
        pictures=True,
    )


def test_a_model_has_the_places_that_it_needs(tiny: Callable[[str], ModelSpec]) -> None:
    spec = replace(tiny("wan2.1"), video_input=None)
    assert places_html(tiny("wan2.1"), {}).count("data-place") == 1
    assert "data-place" not in places_html(tiny("wan2.1"), {}, videos=False)

    def places(**known: Any) -> str:
        able = taking_images(spec, **known)
        return places_html(able, {"a": able, "b": spec})

    assert "data-place" not in places_html(spec, {"b": spec})
    assert 'data-able="[]"' in places_html(spec, {"b": spec})
    optional, required = places(), places(required=True, last="required")
    assert optional.count("data-place") == 2 and "required" not in optional  # one is of a video to extend
    assert required.count("data-place") == 3 and required.count('aria-required="true"') == 2
    for last, further in (("optional", []), ("keyframe", ["keyframes"])):
        made = places(last=last)
        assert re.findall('data-place="([a-z_]+)"', made) == ["image", *further, "last_image", "extend"]
        assert "required" not in made and ('id="keyframe-seconds"' in made) == bool(further)
    steered = tiny("wan2.1-vace")
    everything, visitors = places_html(steered, {}), places_html(steered, {}, videos=False)
    starts, videos = ["image", "last_image"], ["extend", "join", "control", "mask"]
    assert re.findall('data-place="([a-z_]+)"', everything) == [*starts, *videos, "references"]
    assert everything.count('accept="video/*,.mkv') == 3 and 'id="control-scale"' in everything
    assert re.findall('option value="([a-z]+)"', everything) == [*PREPROCESSING]
    assert re.findall('data-place="([a-z_]+)"', visitors) == [*starts, "references"]
    assert 'id="control-scale"' not in places_html(tiny("wan2.1"), {})
    animated = places_html(tiny(ANIMATE), {"a": tiny(ANIMATE)})
    assert re.findall('data-place="([a-z]+)"', animated) == ["image", "control", "face", "background", "mask"]
    assert animated.count('aria-required="true"') == 3 and 'id="preprocess"' not in animated
    assert re.findall('option value="([0-9]+)"', animated) == [*OVERLAPS]
    assert 'data-able="[]"' in animated and 'id="control-scale"' not in animated
    assert f'data-able="[[&#34;{spec.name}&#34;, &#34;{spec.title}&#34;]]"' in optional


def test_file_dialogs_show_the_formats_that_are_read(tiny: Callable[[str], ModelSpec]) -> None:
    """What is chosen otherwise, or dropped, is refused with the name of its format."""
    (accepted,) = re.findall(r'accept="([^"]+)"', places_html(taking_images(tiny("wan2.1")), {}, videos=False))
    suffixes = {one for one in accepted.split(",") if one.startswith(".")}
    assert {*accepted.split(",")} - suffixes == {Image.MIME[name] for name in FORMATS}
    assert {Image.registered_extensions()[suffix] for suffix in suffixes} <= {*FORMATS}


def test_the_shipped_model_has_example_images(
    answers: ImageAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], ModelSpec]
) -> None:
    saved(tmp_path / "boat.png", 192, 112)
    monkeypatch.setattr(image_places, "EXAMPLES", tmp_path)
    image_places.examples.cache_clear()
    shipped = taking_images(find("diorama", tmp_path / "weights"))
    assert 'data-example="boat"' in places_html(shipped, {})
    assert "data-example" not in places_html(taking_images(tiny("wan2.1")), {})
    found = answers.answer({"what": "example", "name": "boat"}, None, "")
    assert (found["width"], found["height"]) == (192, 112)
    kept = find_image(found["image"], "image", tmp_path / "cache")
    assert kept.path.read_bytes() == (tmp_path / "boat.png").read_bytes()
    for name in ("../boat", "cat", ""):
        with pytest.raises(InvalidRequestError):
            answers.answer({"what": "example", "name": name}, None, "")
    image_places.examples.cache_clear()


def test_a_picture_of_a_kept_image_is_small(answers: ImageAnswers, tmp_path: Path) -> None:
    use = keep_image(encoded(picture(1200, 300)), "wide.png", "image", tmp_path / "cache")
    found = answers.answer({"what": "picture", "image": use.reference}, None, "")
    assert (found["width"], found["height"]) == (1200, 300)
    with Image.open(io.BytesIO(base64.b64decode(found["picture"].partition(",")[2]))) as small:
        assert small.size == (512, 128)
    use.path.unlink()
    with pytest.raises(InvalidRequestError) as refused:
        answers.answer({"what": "picture", "image": use.reference}, None, "")
    assert refused.value.code == "image.copy_missing"
    # A visitors' page has no pictures of images: they may be another visitor's.
    visitors = ImageAnswers(answers._settings, answers._keep, {}, machine, pictures=False)
    with pytest.raises(InvalidRequestError) as refused:
        visitors.answer({"what": "picture", "image": use.reference}, None, "")
    assert refused.value.code == "ui.unknown_action"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"what": "frame", "seconds": 1},
        {"what": "moment", "video": "/etc/passwd", "seconds": 1},
        {"what": "moment", "video": "sha256:0", "seconds": -1},
        {"what": "moment", "video": "sha256:0", "seconds": float("nan")},
        {"what": "frame", "job": "12345678", "seconds": None},
        {"what": "picture", "image": ["a"]},
        {"what": "example"},
        {"what": 3},
    ],
)
def test_other_questions_are_refused(answers: ImageAnswers, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        answers.answer(asked, None, "")
    assert refused.value.code == "ui.unknown_action"


def test_a_page_cannot_have_a_picture_of_a_file_of_its_choice(answers: ImageAnswers, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        answers.answer({"what": "picture", "image": str(saved(tmp_path / "own.png"))}, None, "")
    assert refused.value.code == "ui.unknown_action"


def test_a_text_model_names_those_that_start_from_images_and_offers_one_that_runs(
    tmp_path: Path, tiny: Callable[[str], ModelSpec]
) -> None:
    settings, text = Settings(cache_dir=tmp_path / "cache"), tiny("wan2.1")
    able = replace(taking_images(text), name="images")

    def answer(
        models: dict[str, ModelSpec], ram_free_gib: float = 20, kind: str = "image", *, pictures: bool = True
    ) -> dict[str, Any]:
        def keep(data: bytes, name: str, _visitor: str) -> ImageUse:
            return keep_image(data, name, "image", settings.cache_dir)

        page = ImageAnswers(settings, keep, models, lambda: machine(ram_free_gib=ram_free_gib), pictures=pictures)
        return page.answer({"what": "refusal", "model": "Tiny", "kind": kind}, None, "")

    titles = [spec.title for spec in image_models(settings.weights_dir)]
    with_model = answer({"text": text, "images": able})
    assert with_model["error"] == paragraph(Fact("image.model_without", {"model": "Tiny", "models": titles}))
    assert with_model["offer"] == {"name": able.name, "title": able.title, "installed": True, "place": "image"}
    assert "\n" not in json.dumps(with_model)
    # A model to download is offered to the owner only, and none that is too large.
    assert not answer({"text": text}, 2000)["offer"]["installed"]
    assert "offer" not in answer({"text": text}, 2000, pictures=False)
    assert "offer" not in answer({"text": text, "images": able}, 0.001)
    # A video goes to a model that starts from one or is steered by one, and not to one that needs two.
    steered, animated = tiny("wan2.1-vace"), tiny(ANIMATE)
    without = replace(text, video_input=None)
    by_video = answer({spec.name: spec for spec in (animated, without, steered)}, kind="video")
    assert by_video["offer"] == {"name": steered.name, "title": steered.title, "installed": True, "place": "control"}
    titles = [spec.title for spec in all_models(settings.weights_dir) if spec.video_input or spec.control_input]
    titles = [title for title in titles if "Animate" not in title]
    assert by_video["error"] == paragraph(Fact("source.model_without", {"model": "Tiny", "models": titles}))
    started = answer({"text": text, "steered": steered}, kind="video")
    assert started["offer"]["place"] == "video"


def test_a_frame_is_the_one_of_that_number(tmp_path: Path) -> None:
    grays = [20, 70, 120, 170, 220]
    frames = np.stack([np.full((32, 64, 3), gray, np.uint8) for gray in grays])
    video = tmp_path / "steps.mp4"
    with VideoWriter(video, 64, 32, 8, 10) as writer:
        writer.write(frames)
        writer.close_stream()
        writer.finish("steps", {})
    for number, gray in enumerate(grays):
        with Image.open(io.BytesIO(read_frame(video, number))) as frame:
            assert (frame.size, frame.mode) == ((64, 32), "RGB")
            assert abs(np.asarray(frame).astype(int) - gray).max() <= 2
    with pytest.raises(OutputError) as refused:
        read_frame(video, len(grays))
    assert refused.value.code == "video.frame_unreadable"
    (tmp_path / "text.mp4").write_text("text")
    with pytest.raises(OutputError):
        read_frame(tmp_path / "text.mp4", 0)


def test_the_images_of_a_job_are_shown_while_their_copies_exist(
    tmp_path: Path, tiny: Callable[[str], ModelSpec]
) -> None:
    use = keep_image(encoded(picture()), "boat.png", "image", tmp_path)
    plan = tiny_plan(replace(taking_images(tiny("wan2.1")), image=use), tmp_path / "a.mp4", image=use.reference)
    (shown,) = used_images(plan.images)
    assert (shown.label, shown.name) == ("Image", "boat.png")
    assert shown.picture.startswith("data:image/webp;base64,")
    assert used_images(plan.images, pictures=False)[0].picture == ""
    use.path.unlink()
    assert used_images(plan.images)[0].picture == ""
    assert used_images({}) == []
