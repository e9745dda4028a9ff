"""The preview of control frames: what it depends on, which frames it sends, and what ends it."""

import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.control_frames import made_frames
from runtime.models.images import keep_image
from runtime.models.spec import ModelSpec
from runtime.models.videos import keep_video
from runtime.server.gradio_requests import RefusedError
from runtime.ui import control_preview, form
from runtime.ui.control_preview import MOST_FRAMES, about, marked
from runtime.ui.formatting import page_text
from runtime.ui.plan_preview import PlanPreview
from tests.image_files import encoded, picture
from tests.preprocessor_files import save_depth
from tests.ui.test_form import GOOD
from tests.video.test_reader import H264, make


class Page:
    """The route on one model, and the form's values for a control video of 3 s at 8 frames per second."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.folder, self.spec, self.models = folder, spec, {spec.name: spec}
        self.preview = PlanPreview(
            EngineService(EngineStore(folder / "engines", 10**9), probe(), folder), probe, tuple, folder
        )
        file = make(folder / "walk.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=96x48:rate=8:duration=3"))
        self.video = keep_video(file.read_bytes(), "walk.mp4", folder)
        self.client = TestClient(Starlette(routes=control_preview.routes(self.preview, self.models)))

    def form(self, **values: Any) -> list[Any]:
        settings = GOOD | {"model": self.spec.name, "width": 64, "height": 32, "frames": 9, "fps": 8}
        settings |= {"control": self.video.reference, **values}
        return [settings[name] for name in form.NAMES]

    def plan(self, **values: Any) -> ExecutionPlan:
        planned = self.preview.preview(form.read_settings(self.form(**values), self.models), self.spec)
        assert planned.plan is not None, planned.error
        return planned.plan

    def lines(self, **values: Any) -> list[dict[str, Any]]:
        answer = self.client.post("/tandem/control", json={"form": self.form(**values)})
        assert answer.status_code == 200 and answer.headers["cache-control"] == "private, no-store"
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module")
def page(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(tiny("wan2.1-vace"), tmp_path_factory.mktemp("control"))


def opened(line: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(line["picture"].partition(",")[2]))).convert("RGB")


def test_the_frames_are_those_of_the_plan(page: Page) -> None:
    key, *frames = page.lines(control_start=1.0, preprocess="edges")
    plan = page.plan(control_start=1.0, preprocess="edges")
    shown = about(plan, page.preview)
    assert shown is not None and key == {"key": shown["key"]}
    assert [line["frame"] for line in frames] == list(range(9)) and (shown["frames"], shown["every"]) == (9, 1)
    assert {opened(line).size for line in frames} == {(64, 32)}
    # Edges are white on black; a mask marks what changes.
    edges = opened(frames[0])
    assert 0 < sum(edges.convert("L").histogram()[200:]) < 64 * 32 / 2
    half = Image.new("RGB", (96, 48))
    half.paste("white", (0, 0, 48, 48))
    mask = keep_image(encoded(half), "mask.png", "mask", page.folder)
    red = opened(page.lines(mask=mask.reference)[1]).resize((2, 1), Image.Resampling.BOX)
    plain = opened(page.lines()[1]).resize((2, 1), Image.Resampling.BOX)
    left, right = ([image.getpixel((x, 0)) for image in (red, plain)] for x in (0, 1))
    assert max(abs(a - b) for a, b in zip(*right, strict=True)) < 8
    assert max(abs(a - b) for a, b in zip(*left, strict=True)) > 30


def test_frames_that_are_given_are_seen_with_a_control_video_and_without(page: Page) -> None:
    black, white = (
        keep_image(encoded(Image.new("RGB", (64, 32), color)), f"{color}.png", "image", page.folder).reference
        for color in ("black", "white")
    )
    extended_form = {"control": "", "extend": page.video.reference, "extend_frames": "5", "fps": "auto"}
    seen = {}
    for name, values in (
        ("alone", {"control": "", "image": white, "last_image": black}),
        ("steered", {"image": white, "last_image": black}),
        ("extended", extended_form),
    ):
        key, *frames = page.lines(**values)
        shown = control_preview.seen(page.plan(**values), page.spec, page.preview)
        assert shown is not None and key == {"key": shown["key"]}
        assert [line["frame"] for line in frames] == list(range(shown["frames"]))
        assert about(page.plan(**values), page.preview) is None or name == "steered"
        seen[name] = [float(np.asarray(opened(line).convert("L")).mean()) for line in frames], shown
    (alone, _), (steered, _), (extended, _) = seen.values()
    assert alone[0] > 250 and alone[-1] < 5 and all(abs(gray - 127) < 3 for gray in alone[1:-1])
    assert steered[0] > 250 and steered[-1] < 5 and steered[1:-1] != alone[1:-1]
    assert all(abs(gray - 127) < 3 for gray in extended[5:])
    # The given ones are of the video: not of one color.
    assert all(len(opened(line).getcolors(2**16) or []) > 9 for line in page.lines(**extended_form)[1:6])
    lines = [shown["line"] for _, shown in seen.values()]
    given = [page_text(Fact("ui.given_frames", {"frames": 9, "first": n, "last": m})).what for n, m in ((1, 1), (5, 0))]
    assert [lines[0], lines[2]] == given and lines[1] == (about(page.plan(), page.preview) or {})["line"]
    assert len({shown["key"] for _, shown in seen.values()}) == 3


def test_a_set_of_frames_has_another_key_if_it_differs(page: Page) -> None:
    mask = keep_image(encoded(picture(96, 48)), "mask.png", "mask", page.folder)
    changes: list[dict[str, Any]] = [
        {}, {"control_start": 0.5}, {"preprocess": "gray"}, {"mask": mask.reference}, {"frames": 5}, {"width": 32},
        {"image_fit": "fit"}, {"image_position": 20}, {"fps": 6}, {"outpaint": "0,0,50,0"},
    ]  # fmt: skip
    keys = [(about(page.plan(**values), page.preview) or {})["key"] for values in changes]
    assert len({*keys}) == len(changes)
    same = about(page.plan(steps=7, seed="3", control_scale="0.5"), page.preview)
    assert same is not None and same["key"] == keys[0]
    assert about(page.plan(control=""), page.preview) is None


def test_the_line_names_the_part_that_is_used(page: Page) -> None:
    for values, code, data in (
        ({"control_start": 1.0}, "ui.control_part", {"frames": 9, "start": 1.0, "end": 2.125, "seconds": 3.0}),
        ({"control_start": 1.9, "frames": 9}, "ui.control_to_end", {"frames": 9, "start": 1.9}),
    ):
        shown = about(page.plan(**values), page.preview)
        assert shown is not None and shown["line"] == page_text(Fact(code, data)).what


def test_of_a_long_clip_every_second_frame_is_sent(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_preview, "MOST_FRAMES", 6)
    assert MOST_FRAMES > 81
    assert [line["frame"] for line in page.lines(frames=9)[1:]] == [0, 2, 4, 6, 8]


def test_what_cannot_be_shown_is_one_line(page: Page) -> None:
    (line,) = page.lines(control_start=9)
    assert "walk.mp4" in line["error"] and len(line["error"].splitlines()) == 1
    assert page.lines(control="") == []
    for body in ({}, {"form": "x"}, {"form": {"path": "/etc/passwd"}}):
        assert page.client.post("/tandem/control", json=body).status_code == 422
    (line,) = [json.loads(part) for part in page.client.post("/tandem/control", json={"form": [1]}).text.splitlines()]
    assert line["error"]


def test_a_page_that_leaves_ends_the_reading_and_only_some_streams_run(page: Page) -> None:
    endpoint = control_preview._Previews(page.preview, page.models)

    async def leave() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"form": page.form()}).encode()}

        async def begin() -> Any:
            scope = {"type": "http", "method": "POST", "path": "/tandem/control", "headers": []}
            response: Any = await endpoint.frames(Request(scope, receive))
            await anext(response.body_iterator)
            return response.body_iterator

        streams = [await begin() for _ in range(4)]
        with pytest.raises(RefusedError) as refused:
            await begin()
        assert refused.value.status_code == 429
        for stream in streams:
            await stream.aclose()
        assert "frame" in json.loads([line async for line in await begin()][-1])

    asyncio.run(leave())
    endpoint._thread.shutdown()


def test_what_changes_is_seen_through_a_color() -> None:
    frame, changes = Image.new("RGB", (4, 2), (0, 200, 0)), Image.new("L", (4, 2))
    changes.paste(255, (0, 0, 2, 2))
    seen = marked(frame, changes)
    assert seen.getpixel((3, 0)) == (0, 200, 0) != seen.getpixel((0, 0))


def test_frames_of_a_model_are_shown_once_they_are_made(page: Page) -> None:
    shown = about(page.plan(), page.preview)
    assert shown is not None and set(shown["missing"]) == {"depth", "pose"}
    refused = page.lines(preprocess="depth")
    assert len(refused) == 1 and "Apache-2.0" in refused[0]["error"]
    save_depth(page.folder)
    plan = page.plan(preprocess="depth")
    before, (key, *plain) = about(plan, page.preview), page.lines(preprocess="depth")
    assert before is not None and set(before["missing"]) == {"pose"} and key == {"key": before["key"]}
    assert [line["picture"] for line in plain] == [line["picture"] for line in page.lines()[1:]]
    place = made_frames(plan, page.folder)
    assert place is not None
    place.write(np.full((32, 64), 20 * number, np.uint8) for number in range(9))
    after, (key, *frames) = about(plan, page.preview), page.lines(preprocess="depth")
    assert after is not None and key == {"key": after["key"]} != {"key": before["key"]}
    assert len(after["line"]) < len(before["line"])
    levels = [opened(line).convert("L").getpixel((32, 16)) for line in frames]
    assert np.abs(np.array(levels) - 20 * np.arange(9)).max() < 4
