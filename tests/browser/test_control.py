"""Control videos in the browser: what the model sees, the part that is used, a drawn mask, before and after."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import tiny_models
from tests.app_server import DEFAULTS, Server, make_cache, serving
from tests.browser.test_images import chosen, given, hand
from tests.video.test_reader import make

pytestmark = pytest.mark.browser

SEEN = "#images [data-place=control] .seen img"


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a web app with a tiny model that control videos steer, and one that videos start from."""
    cache = make_cache(tmp_path_factory.mktemp("control"))
    model = tiny_models.build("wan2.1-vace", cache / "weights" / "steered")
    sidecar = json.loads((cache / "weights" / "tiny" / "tandem.json").read_text(encoding="utf-8"))
    sidecar |= {"title": "Steered", "defaults": DEFAULTS | {"negative_prompt": ""}}
    (model / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    with serving(cache, "--model", "steered") as running:
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


def drop(page: Any, clip: Path) -> None:
    hand(page, given(clip.read_bytes(), clip.name, "video/webm"))
    chosen(page, f"{clip.name}, 3.0 s", "control")
