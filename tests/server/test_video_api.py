"""The HTTP API of a running server: OpenAI's client, errors, files, events, metrics, schema."""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.request import FIELDS
from runtime.pipeline.files import CLIP, clip_name
from runtime.queue.store import JobStore
from runtime.server.serve import until_stopped
from runtime.server.video_requests import _from_json, request_of
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.app_server import MODEL, ROOT, App, make_cache, serving, serving_here
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.fuzz.raw_http import exchange, send
from tests.image_files import saved
from tests.models.test_other_programs import EXPERT_VALUES, EXPERTS, WAN2GP
from tests.queue.samples import add_job
from tests.sounds import heard, loudness, pitch, sound_in, tone, write_clip
from tests.tiny_models import build
from tests.video.test_reader import H264, make
from tests.waiting import until

SMALL = {"prompt": "a red boat", "steps": 2, "seed": 5}


@pytest.fixture(scope="module")
def server(api: App) -> App:
    save_safetensors(api.cache_dir / "weights" / "upscalers" / "small.safetensors", COMPACT_CONFIG)
    build("wan2.1-vace", api.cache_dir / "weights" / "steered")
    return api


@pytest.fixture
def http(server: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: App) -> Iterator[Any]:
    openai = pytest.importorskip("openai")  # a second of processor time, so only where it is used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of OpenAI's own service
        with openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as connected:
            yield connected


def create(http: httpx.Client, headers: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    answer = http.post("v1/videos", json={**SMALL, **values}, headers=headers)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def ended(http: httpx.Client, video: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}

    def is_ended() -> bool:
        shown.update(http.get(f"v1/videos/{video}").json())
        return shown["status"] in {"completed", "failed"}

    until(is_ended, pause=0.1)
    return shown


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".") and "Traceback" not in error["message"]
    return answer.status_code, error["param"], error["code"]


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_openais_client_makes_a_video_with_the_shipped_model(client: Any, tmp_path: Path) -> None:
    assert {"diorama", MODEL} <= {model.id for model in client.models.list()}
    made = client.videos.create(
        prompt="a red boat sails left", model="diorama", size="64x48", seconds="0.5", extra_body={"steps": 3, "seed": 4}
    )
    assert (made.object, made.model, made.size) == ("video", "diorama", "64x48")
    assert made.status in {"queued", "in_progress"}
    shown = made
    end = time.monotonic() + 120
    while shown.status not in {"completed", "failed"} and time.monotonic() < end:
        time.sleep(0.2)
        shown = client.videos.retrieve(made.id)
    assert (shown.status, shown.progress, shown.error) == ("completed", 100, None)
    assert shown.created_at <= shown.completed_at <= time.time()
    client.videos.download_content(made.id).write_to_file(tmp_path / "video.mp4")
    request = read_metadata(tmp_path / "video.mp4")["request"]
    wanted = {"prompt": "a red boat sails left", "width": 64, "height": 48, "steps": 3, "seed": 4}
    assert request | wanted == request
    assert shown.seconds == f"{request['frames'] / request['fps']:.3f}"[:5].rstrip("0")
    assert client.videos.download_content(made.id, variant="thumbnail").read()[8:12] == b"WEBP"
    assert made.id in [video.id for video in client.videos.list(limit=1)]
    assert client.videos.delete(made.id).deleted
    with pytest.raises(pytest.importorskip("openai").NotFoundError):
        client.videos.retrieve(made.id)
    assert made.id not in [video.id for video in client.videos.list()]


@pytest.mark.slow
def test_a_downloaded_video_has_its_sound(http: httpx.Client, tmp_path: Path) -> None:
    count, fps = 9, 16
    clip = write_clip(tmp_path / "loud.mp4", tone(count / fps), count=count, fps=fps)
    fields = {"prompt": "a red boat", "model": "diorama", "steps": "1", "frames": "9", "seed": "1"}
    for sound in ("on", "off"):
        files = {"extend": (clip.name, clip.read_bytes(), "video/mp4")}
        answer = http.post("v1/videos", data={**fields, "sound": sound, "interpolate": "2"}, files=files)
        assert answer.status_code == 200, answer.text
        shown = ended(http, answer.json()["id"])
        assert (shown["status"], shown["sound"]) == ("completed", sound == "on")
        for variant in ("video", "plain"):
            content = http.get(f"v1/videos/{shown['id']}/content", params={"variant": variant}).content
            (tmp_path / "v.mp4").write_bytes(content)
            if sound == "off":
                assert sound_in(tmp_path / "v.mp4") is None
                continue
            played = heard(tmp_path / "v.mp4")
            assert played.samples.shape == (1, round((2 * count - 1) / fps * 48_000))
            assert abs(pitch(played, 0.1, 0.5) - 440) < 1
            assert loudness(played, count / fps + 0.03, 1) < 1e-3


@pytest.mark.slow
def test_openais_client_sends_an_image_and_nested_fields(client: Any, http: httpx.Client, tmp_path: Path) -> None:
    image = saved(tmp_path / "boat.png")
    made = client.videos.create(
        prompt="a red boat",
        model="diorama",
        input_reference=(image.name, image.read_bytes()),
        extra_body={"steps": 1, "backends": {"vae": "pytorch"}, "loras": [], "size": "64x48", "frames": 5},
    )
    assert ended(http, made.id)["status"] == "completed"
    content = http.get(f"v1/videos/{made.id}/content").content
    (tmp_path / "v.mp4").write_bytes(content)
    request = read_metadata(tmp_path / "v.mp4")["request"]
    assert request["backends"] == {"vae": "pytorch"}
    assert request["image"].endswith("/boat.png")


def test_the_documented_example_downloads_a_video(server: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = next(one for one in examples if "OpenAI" in one).replace("http://127.0.0.1:7860/", server.url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of OpenAI's own service
        exec(example.replace('size="192x112", ', 'size="64x32", '), {})
    assert (tmp_path / "boat.mp4").read_bytes()[4:8] == b"ftyp"


def test_an_image_in_json_is_a_data_url(http: httpx.Client, tmp_path: Path) -> None:
    data = base64.b64encode(saved(tmp_path / "a.png").read_bytes()).decode()
    made = create(http, model="diorama", steps=1, input_reference={"image_url": f"data:image/png;base64,{data}"})
    assert http.delete(f"v1/videos/{made['id']}").json() == {
        "id": made["id"],
        "object": "video.deleted",
        "deleted": True,
    }


def test_a_video_in_a_form_or_as_a_data_url_is_changed(http: httpx.Client, tmp_path: Path) -> None:
    clip = make(tmp_path / "a clip.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=16:duration=0.6"))
    fields = {"prompt": "a red boat", "model": "diorama", "size": "64x48", "steps": "2", "strength": "0.5"}
    answer = http.post("v1/videos", data=fields, files={"video": (clip.name, clip.read_bytes(), "video/mp4")})
    assert answer.status_code == 200, answer.text
    assert answer.json()["frames"] == 9
    assert ended(http, answer.json()["id"])["status"] == "completed"
    (tmp_path / "v.mp4").write_bytes(http.get(f"v1/videos/{answer.json()['id']}/content").content)
    assert read_metadata(tmp_path / "v.mp4")["request"]["video"].endswith("/a clip.mp4")
    data = base64.b64encode(clip.read_bytes()).decode()
    made = create(http, None, **fields, video={"video_url": f"data:video/mp4;base64,{data}"})
    http.delete(f"v1/videos/{made['id']}")


def test_control_videos_and_references_in_a_form_or_as_data_urls_steer(http: httpx.Client, tmp_path: Path) -> None:
    noise = ("-f", "lavfi", "-i", "testsrc=size=64x32:rate=16:duration=0.6")
    clip = make(tmp_path / "depth.mp4", *H264, inputs=noise)
    image = saved(tmp_path / "boat.png", 40, 30)
    fields = {"prompt": "a red boat", "model": "steered", "size": "64x32", "steps": "1", "guidance_scale": "1"}
    video = (clip.name, clip.read_bytes(), "video/mp4")
    files: list[Any] = [("control", video), ("mask", video)]
    files += [(name, (image.name, image.read_bytes(), "image/png")) for name in ("references", "references[]")]
    answer = http.post("v1/videos", data={**fields, "control_scale": "1, 0.5"}, files=files)
    assert answer.status_code == 200, answer.text
    assert answer.json()["frames"] == 9
    assert ended(http, answer.json()["id"])["status"] == "completed"
    (tmp_path / "v.mp4").write_bytes(http.get(f"v1/videos/{answer.json()['id']}/content").content)
    request = read_metadata(tmp_path / "v.mp4")["request"]
    assert (request["control"][-10:], request["mask"][-10:]) == ("/depth.mp4", "/depth.mp4")
    assert [name[-9:] for name in request["references"]] == ["/boat.png"] * 2 and request["control_scale"] == [1, 0.5]
    picture = {"image_url": f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"}
    steering = {"video_url": f"data:video/mp4;base64,{base64.b64encode(clip.read_bytes()).decode()}"}
    made = create(http, None, **fields, control=steering, references=[picture, picture], control_scale=0.5)
    http.delete(f"v1/videos/{made['id']}")
    made = create(http, None, **fields, control=steering, mask="box:10,20,30,40", outpaint=[25, 0, 25, 0])
    http.delete(f"v1/videos/{made['id']}")
    form = {**fields, "mask": "box:10,20,30,40", "outpaint": "25, 0, 25, 0"}
    answer = http.post("v1/videos", data=form, files=[("control", video)])
    assert answer.status_code == 200, answer.text
    http.delete(f"v1/videos/{answer.json()['id']}")
    unreadable = {"video_url": "data:video/mp4;base64,AAAA"}
    # A mask may be an image that holds for all frames.
    made = create(http, None, **fields, control=steering, mask=picture)
    http.delete(f"v1/videos/{made['id']}")
    files = [("control", video), ("mask", (image.name, image.read_bytes(), "image/png"))]
    answer = http.post("v1/videos", data=fields, files=files)
    assert answer.status_code == 200, answer.text
    http.delete(f"v1/videos/{answer.json()['id']}")
    for values, param, code in (
        ({"references": [picture] * 9}, "references", "request.too_many_images"),
        ({"references": ["/etc/passwd"]}, "references", "server.api_image"),
        ({"references": picture["image_url"]}, "references", "server.api_image"),
        ({"keyframes": [picture], "keyframe_seconds": [1]}, "keyframes", "image.model_without_keyframes"),
        ({"keyframes": ["/etc/passwd"], "keyframe_seconds": [1]}, "keyframes", "server.api_image"),
        ({"mask": steering}, "mask", "control.mask_alone"),
        ({"control": picture}, "control", "server.api_video"),
        ({"control": steering, "mask": {**steering, **picture}}, "mask", "server.api_mask"),
        ({"control": steering, "mask": {"image_url": "data:image/png;base64,AAAA"}}, "mask", "source.no_video"),
        ({"control": {"video_url": "data:video/mp4;base64,AAAA"}}, "control", "source.no_video"),
        ({"control_scale": [1, 2, 3]}, "control_scale", "control.scales"),
        ({"control_scale": "much"}, "control_scale", "request.not_numbers"),
        ({"control": steering, "model": "diorama"}, "control", "control.model_without"),
        # Before the file is read.
        ({"control": unreadable, "model": "diorama"}, "control", "control.model_without"),
        ({"video": unreadable}, "video", "source.model_without"),
        ({"join": unreadable}, "join", "source.join_alone"),
        ({"control": steering, "mask": "box:0,0,0,0"}, "mask", "request.boxes"),
        ({"mask": "box:0,0,50,50"}, "mask", "control.mask_alone"),
        ({"control": "box:0,0,50,50"}, "control", "server.api_video"),
        ({"control": steering, "outpaint": [1, 2]}, "outpaint", "request.sides"),
        ({"video": steering}, "video", "source.model_without"),
    ):
        refused = http.post("v1/videos", json={**fields, **values})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, code), refused.text


def test_bad_values_are_refused(http: httpx.Client, subtests: pytest.Subtests) -> None:
    """What the API itself reads, and one value for each rule of requests, plans and models."""
    damaged = {"image_url": "data:image/png;base64,AAAA"}
    for values, status, param, code in (
        ({"prompt": ""}, 400, "prompt", "request.prompt_empty"),
        ({"prompt": None}, 400, "prompt", "request.not_text"),
        ({"prompt": "[0s: a boat] [5s: a ball]"}, 400, "prompt", "planner.prompt_without_sections"),
        ({"steps": 0}, 400, "steps", "request.out_of_range"),
        ({"stepz": 2}, 400, "stepz", "request.unknown_field"),
        ({"size": "big"}, 400, "size", "settings.not_a_size"),
        ({"size": "64x32", "width": 64}, 400, "size", "server.api_excludes"),
        ({"size": "63x32"}, 400, "width", "planner.not_a_multiple"),
        ({"seconds": "long"}, 400, "seconds", "request.not_a_number"),
        ({"model": "sora-2"}, 404, "model", "model_not_found"),
        ({"model": "/etc"}, 404, "model", "model_not_found"),
        ({"model": ["diorama"]}, 404, "model", "model_not_found"),
        ({"image": "/etc/passwd"}, 400, "image", "server.api_image"),
        ({"image": f"sha256:{'0' * 64}/a.png"}, 400, "image", "server.api_image"),
        ({"input_reference": {"image_url": "http://127.0.0.1/a.png"}}, 400, "input_reference", "server.api_image"),
        ({"input_reference": {"file_id": "file-1"}}, 400, "input_reference", "server.api_image"),
        ({"model": "diorama", "image": damaged}, 400, "image", "image.format_unknown"),
        ({"input_reference": damaged}, 400, "image", "image.model_without"),
        ({"video": "/etc/passwd"}, 400, "video", "server.api_video"),
        ({"video": f"sha256:{'0' * 64}/a.mp4"}, 400, "video", "server.api_video"),
        ({"video": {"video_url": "http://127.0.0.1/a.mp4"}}, 400, "video", "server.api_video"),
        ({"video": {"image_url": "data:image/png;base64,AAAA"}}, 400, "video", "server.api_video"),
        ({"video": {"video_url": "data:video/mp4;base64,AAAA"}}, 400, "video", "source.no_video"),
        ({"strength": 0}, 400, "strength", "request.out_of_range"),
        ({"loras": ["../secret.safetensors"]}, 400, "loras", "form.lora_is_path"),
        ({"vae_precision": "float16"}, 400, "vae_precision", "planner.vae_16bit_on_cpu"),
        ({"upscale": 5}, 400, "upscale", "request.not_a_choice"),
        ({"interpolate": 3}, 400, "interpolate", "request.not_a_choice"),
        ({"interpolate": 4, "fps": 100}, 400, "interpolate", "interpolate.too_fast"),
        ({"upscale": 2, "upscaler": "../secret.safetensors"}, 400, "upscaler", "request.upscaler_name"),
        ({"upscale": 2, "upscaler": "no-such"}, 400, "upscaler", "upscaler.unknown"),
    ):
        with subtests.test(msg=str(values)):
            answer = http.post("v1/videos", json={**SMALL, **values})
            assert error_of(answer) == (status, param, code), answer.text


def test_null_is_the_default_of_every_optional_field(http: httpx.Client) -> None:
    names = [name for name in (*FIELDS, "size", "input_reference") if name not in {*SMALL, "model"}]
    made = create(http, model=None, **dict.fromkeys(names))
    assert made["model"] == MODEL
    empty: list[Any] = [("prompt", (None, "a boat")), ("image", ("", b"", "application/octet-stream"))]
    empty += [(name, (None, "")) for name in (*FIELDS, "size", "backends[vae]", "loras[]") if name not in {"prompt"}]
    answer = http.post("v1/videos", files=[*empty, ("input_reference", ("", b""))])
    assert answer.status_code == 200, answer.text
    for one in (made, answer.json()):
        http.delete(f"v1/videos/{one['id']}")


def test_numbers_may_be_text_and_sizes_have_several_signs(http: httpx.Client, subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"seed": "5", "steps": "2", "fps": "8", "shift": "1.5"}, {"seed": 5, "steps": 2, "fps": 8}),
        *(({"size": size}, {"size": "64x32"}) for size in ("64X32", "64×32", "64*32", " 64 x 32 ")),
        ({"width": "64", "height": "32", "frames": "5"}, {"size": "64x32", "frames": 5}),
    ]
    for values, expected in cases:
        with subtests.test(msg=str(values)):
            made = create(http, None, **values)
            assert made | expected == made
            http.delete(f"v1/videos/{made['id']}")
    for wrong in ("x", "1e999", "nan", "", "1" * 5000):
        assert error_of(http.post("v1/videos", json={**SMALL, "seed": wrong}))[:2] == (400, "seed")


def test_forms_of_data_urls(tmp_path: Path, subtests: pytest.Subtests) -> None:
    data = saved(tmp_path / "a.png").read_bytes()
    text = base64.b64encode(data).decode()
    for url in (
        f"data:image/png;base64,{text}",
        f"data:image/png;charset=utf-8;base64,{text}",
        f"DATA:image/PNG;BASE64,{text}",
        "data:image/png;base64," + base64.encodebytes(data).decode().replace("\n", "\r\n"),
        f"data:image/png;base64,{quote(text, safe='')}",
        f"data:image/png;base64,{text.rstrip('=')}",
        f"data:image/png,{quote(data, safe='')}",
    ):
        with subtests.test(msg=url[:40]):
            _, images = _from_json(json.dumps({"prompt": "a", "image": {"image_url": url}}).encode())
            assert images["image"][0] == data
    for url in ("data:image/png;base64", "data:text/plain,a", "http://a/b.png", "data:image/png;base64,A"):
        with pytest.raises(InvalidRequestError):
            _from_json(json.dumps({"prompt": "a", "image": {"image_url": url}}).encode())


def test_images_are_copies_and_not_paths(tmp_path: Path) -> None:
    values = {"prompt": "a", "model": MODEL}
    copies = {"image": "sha256:" + "0" * 64 + "/a.png"}
    assert request_of(values, copies).image == copies["image"]
    for name, code in (("image", "image"), ("last_image", "image"), ("video", "video")):
        for images in ({}, copies):
            with pytest.raises(InvalidRequestError) as refused:
                request_of({**values, name: str(saved(tmp_path / "a.png"))}, images)
            assert (refused.value.field, refused.value.code) == (name, f"server.api_{code}")


def test_bodies_that_cannot_be_read_are_refused(http: httpx.Client, subtests: pytest.Subtests) -> None:
    for body, kind, status, code in (
        (b"{", "application/json", 400, "server.api_not_json"),
        (b"[]", "application/json", 400, "server.not_an_object"),
        (b'{"prompt": "a", "steps": NaN}', "application/json", 400, "server.api_not_json"),
        (b'{"prompt": "a", "steps": 1e999}', "application/json", 400, "server.api_not_json"),
        (b'{"prompt": "a", "prompt": "b"}', "application/json", 400, "server.api_field_repeated"),
        (b'{"prompt": ' + b"[" * 100_000, "application/json", 400, "server.api_not_json"),
        (b'{"prompt": "\xff"}', "application/json", 400, "server.api_not_json"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "server.api_not_json"),
        (b"x" * (9 << 20), "application/json", 413, "server.body_too_large"),
        (b"prompt=a", "application/x-www-form-urlencoded", 415, "server.api_media_type"),
        (b"a", "", 415, "server.api_media_type"),
        (b"--x--", "multipart/form-data; boundary=x; charset=idna", 415, "server.api_charset"),
        (b"--x--", 'multipart/form-data; charset="UTF-16"; boundary=x', 415, "server.api_charset"),
        (b"a", "multipart/form-data", 400, "server.api_not_a_form"),
        (b"a", "multipart/form-data; boundary=x", 400, "server.api_not_a_form"),
        (b"--x\r\n\r\na\r\n--x--\r\n", "multipart/form-data; boundary=x", 400, "server.api_not_a_form"),
    ):
        with subtests.test(msg=f"{kind} {body[:30]!s}"):
            answer = http.post("v1/videos", content=body, headers={"Content-Type": kind} if kind else {})
            assert error_of(answer)[0::2] == (status, code), answer.text


def test_form_fields_are_text(http: httpx.Client) -> None:
    parts = [
        ("prompt", (None, "12")),
        ("steps", (None, "2")),
        ("shift", (None, "auto")),
        ("guidance_scale", (None, "1.5")),
    ]
    made = http.post("v1/videos", files=parts)
    assert made.status_code == 200, made.text
    assert (made.json()["prompt"], made.json()["steps"]) == ("12", 2)
    twice = http.post("v1/videos", files=[("prompt", (None, "a")), ("steps", (None, "2")), ("steps", (None, "3"))])
    assert error_of(twice) == (400, "steps", "server.api_field_repeated")
    nested = http.post("v1/videos", files=[("prompt", (None, "a")), ("steps[a]", (None, "2"))])
    assert error_of(nested) == (400, "steps[a]", "request.unknown_field")
    file = http.post("v1/videos", files=[("prompt", (None, "a")), ("steps", ("a.png", b"2"))])
    assert error_of(file) == (400, "steps", "server.api_image")
    http.delete(f"v1/videos/{made.json()['id']}")


def test_the_same_idempotency_key_gives_the_same_video(http: httpx.Client, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "once"}
    first = create(http, key)
    assert create(http, key)["id"] == first["id"]
    # The same request in a form, with another boundary each time.
    again = http.post("v1/videos", files=[(name, (None, str(value))) for name, value in SMALL.items()], headers=key)
    assert again.json()["id"] == first["id"]
    assert error_of(http.post("v1/videos", json={**SMALL, "steps": 1}, headers=key))[0::2] == (
        409,
        "queue.submission_differs",
    )
    assert error_of(http.post("v1/videos", json=SMALL, headers={"Idempotency-Key": "a b"}))[0] == 400
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda _: create(http, {"Idempotency-Key": "race"})["id"], range(8)))
    assert len(set(many)) == 1
    for video in (first["id"], many[0]):
        assert http.delete(f"v1/videos/{video}").status_code == 200
    assert error_of(http.post("v1/videos", json=SMALL, headers=key))[0::2] == (409, "queue.submission_deleted")


def test_pages_of_the_list_have_every_video_once(http: httpx.Client) -> None:
    made = [create(http, steps=1)["id"] for _ in range(5)]
    for order, expected in (("asc", made), ("desc", made[::-1])):
        found: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = http.get("v1/videos", params={"limit": 2, "order": order, **after}).json()
            assert page["object"] == "list" and len(page["data"]) <= 2
            found += [one["id"] for one in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert len(found) == len(set(found))
        assert [one for one in found if one in made] == expected
    assert error_of(http.get("v1/videos", params={"after": "ffffffff"}))[0] == 404
    for wrong in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}):
        assert error_of(http.get("v1/videos", params=wrong))[:2] == (400, next(iter(wrong)))
    for one in made:
        http.delete(f"v1/videos/{one}")


def test_content_supports_ranges(http: httpx.Client) -> None:
    made = create(http)["id"]
    assert ended(http, made)["status"] == "completed"
    path = f"v1/videos/{made}/content"
    whole = http.get(path)
    assert whole.headers["content-type"] == "video/mp4" and whole.headers["accept-ranges"] == "bytes"
    part = http.get(path, headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    assert part.headers["content-range"] == f"bytes 4-7/{len(whole.content)}"
    assert http.get(path, headers={"Range": "bytes=-8"}).content == whole.content[-8:]
    assert http.get(path, headers={"Range": f"bytes={len(whole.content)}-"}).status_code == 416
    assert http.get(path, headers={"Range": f"bytes=0-{'9' * 300}"}).status_code == 206
    assert error_of(http.get(path, headers={"Range": "bytes=" + "9" * 300 + "-"})) == (
        416,
        "Range",
        "server.api_range",
    )
    for ignored in ("bytes=0-1,2-3", "lines=0-1", "bytes=z", "bytes=5-2", "bytes=-"):
        answer = http.get(path, headers={"Range": ignored})
        assert (answer.status_code, len(answer.content)) == (200, len(whole.content))
    assert http.head(path).headers["content-length"] == str(len(whole.content))
    assert http.head(path, headers={"Range": "bytes=0-1"}).status_code == 200
    tag, date = whole.headers["etag"], whole.headers["last-modified"]
    for method in ("GET", "HEAD"):
        for name, value, status in (
            ("If-None-Match", tag, 304),
            ("If-None-Match", f'"other", W/{tag}', 304),
            ("If-None-Match", "*", 304),
            ("If-None-Match", '"other"', 200),
            ("If-Modified-Since", date, 304),
            ("If-Modified-Since", "Thu, 01 Jan 1970 00:00:00 GMT", 200),
            ("If-Modified-Since", "yesterday", 200),
        ):
            found = http.request(method, path, headers={name: value})
            assert (found.status_code, found.headers["etag"]) == (status, tag), (name, value)
            assert bool(found.content) == (status == 200 and method == "GET")
    assert http.get(path, headers={"If-None-Match": '"x"', "If-Modified-Since": date}).status_code == 200
    assert http.get(path, headers={"If-Range": tag, "Range": "bytes=0-1"}).status_code == 206
    assert http.get(path, headers={"If-Range": '"x"', "Range": "bytes=0-1"}).status_code == 200
    thumbnail = http.get(path, params={"variant": "thumbnail"}).headers["etag"]
    again = http.get(path, params={"variant": "thumbnail"}, headers={"If-None-Match": thumbnail})
    assert (again.status_code, again.content) == (304, b"")
    assert error_of(http.get(path, params={"variant": "spritesheet"}))[:2] == (400, "variant")


def test_a_running_video_has_no_content_and_is_stopped_by_its_deletion(http: httpx.Client, server: App) -> None:
    made = create(http, steps=900)["id"]
    until(lambda: http.get(f"v1/videos/{made}").json()["status"] == "in_progress", pause=0.1)
    assert error_of(http.get(f"v1/videos/{made}/content"))[0::2] == (409, "server.api_not_ready")
    assert http.delete(f"v1/videos/{made}").json()["deleted"] is True
    assert error_of(http.get(f"v1/videos/{made}"))[0] == 404
    metrics = http.get("metrics").text
    assert 'tandem_queue_jobs{kind="video",state="running"} 0.0' in metrics


def test_events_stream_progress_and_previews_until_the_end(http: httpx.Client, tmp_path: Path) -> None:
    """Of a video that is interpolated and upscaled; that and the decoded one can be downloaded."""
    submitted = create(http, steps=20, interpolate=2, upscale=2, upscaler="small")
    made = submitted["id"]
    assert (submitted["size"], submitted["frames"]) == ("128x64", 18)
    with http.stream("GET", f"v1/videos/{made}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = list(read_events(answer.iter_lines()))
    names = [name for name, _ in events]
    assert names[-1] == "video.completed" and set(names[:-1]) <= {"video.progress", "video.preview", "video.warning"}
    steps = [data["step"] for name, data in events if name == "video.progress"]
    assert steps == sorted(steps) and max(steps) >= 3
    percents = [data["progress"] for name, data in events if name == "video.progress"]
    assert percents == sorted(percents) and events[-1][1]["progress"] == 100
    preview = next(data for name, data in events if name == "video.preview")
    assert base64.b64decode(preview["b64_json"])[8:12] == b"WEBP"
    sizes = {}
    for variant in ("video", "plain"):
        file = tmp_path / f"{variant}.mp4"
        file.write_bytes(http.get(f"v1/videos/{made}/content", params={"variant": variant}).content)
        sizes[variant] = (read_info(file).width, read_info(file).height, read_info(file).frames)
    assert sizes == {"video": (128, 64, 18), "plain": (64, 32, 9)}
    # A stream of an ended video has only its end.
    with http.stream("GET", f"v1/videos/{made}/events") as answer:
        assert [name for name, _ in read_events(answer.iter_lines())][-1] == "video.completed"
    assert error_of(http.get("v1/videos/ffffffff/events"))[0] == 404


def test_a_video_whose_plan_cannot_be_read_has_no_events(http: httpx.Client, server: App) -> None:
    path = server.cache_dir / "jobs.sqlite"
    with contextlib.closing(JobStore(path)) as store:
        video = add_job(store, instance="of another version").id
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE jobs SET plan = '{}', state = 'failed' WHERE id = ?", [video])
    assert http.get(f"v1/videos/{video}").json()["status"] == "failed"
    assert error_of(http.get(f"v1/videos/{video}/events")) == (404, None, "server.api_no_video")
    http.delete(f"v1/videos/{video}")


def test_what_is_finished_can_be_watched(http: httpx.Client, server: App) -> None:
    made = create(http, steps=900)["id"]
    clips = server.cache_dir / "jobs" / made / CLIP
    clips.mkdir(parents=True)
    (clips / clip_name(21)).write_bytes(bytes(range(10)))
    with http.stream("GET", f"v1/videos/{made}/events") as answer:
        shown = (data["clip"] for name, data in read_events(answer.iter_lines()) if name == "video.progress")
        path = next(clip for clip in shown if clip is not None)
    found = http.get(path, headers={"Range": "bytes=2-"})
    assert (found.status_code, found.content, found.headers["content-type"]) == (206, bytes(range(2, 10)), "video/mp4")
    before, _, after = path.rpartition("21")  # the video's identifier may contain it, too
    assert error_of(http.get(f"{before}20{after}")) == (404, "count", "server.api_no_clip")
    http.delete(f"v1/videos/{made}")


@pytest.mark.slow
def test_a_deleted_video_ends_its_stream(http: httpx.Client, server: App) -> None:
    made = create(http, steps=900)["id"]
    ends: list[str] = []

    def follow() -> None:
        with httpx.stream("GET", f"{server.url}v1/videos/{made}/events", timeout=60) as answer:
            ends.extend(name for name, _ in read_events(answer.iter_lines()))

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: http.get(f"v1/videos/{made}").json()["status"] == "in_progress", pause=0.1)
    assert http.delete(f"v1/videos/{made}").status_code == 200
    thread.join(30)
    assert not thread.is_alive() and ends[-1] in {"error", "video.failed"}


def test_metrics_count_videos_and_seconds(http: httpx.Client) -> None:
    http.get("metrics")
    made = create(http, steps=1)["id"]
    ended(http, made)
    text = http.get("metrics").text
    for stage in ("encode", "denoise", "decode", "mux", "total", "load"):
        assert re.search(rf'tandem_stage_seconds_count{{model="{MODEL}",stage="{stage}"}} [1-9]', text), stage
    assert re.search(r'tandem_videos_total{result="completed"} [1-9]', text)
    assert 'tandem_queue_jobs{kind="video",state="queued"} 0.0' in text
    assert "tandem_workers 1.0" in text
    assert re.search(r'tandem_memory_bytes{device="ram",kind="total"} [1-9]', text)
    assert re.search(r'tandem_worker_memory_bytes{gpu="0"} [1-9]', text)


def test_a_plan_is_that_of_the_video_and_creates_none(http: httpx.Client) -> None:
    before = http.get("v1/videos").json()["data"]
    answer = http.post("v1/videos/plan", json=SMALL)
    plan = answer.json()
    assert (answer.status_code, plan["object"]) == (200, "video.plan")
    assert 0 <= plan["shortest"] <= plan["duration"] <= plan["longest"] and plan["loading"] >= 0
    assert 0 < plan["memory_bytes"] < plan["free_bytes"]
    assert http.get("v1/videos").json()["data"] == before
    made = create(http)
    ended(http, made["id"])
    for name in ("model", "size", "seconds", "frames", "fps", "steps"):
        assert plan[name] == made[name], name
    assert error_of(http.post("v1/videos/plan", json={**SMALL, "sise": 1}))[2] == "request.unknown_field"
    assert error_of(http.get("v1/videos/plan"))[0] == 404


def test_a_grid_is_a_batch_with_a_sheet(http: httpx.Client, subtests: pytest.Subtests) -> None:
    grid: dict[str, list[Any]] = {"steps": [1, 2], "seed": ["3", 4]}
    answer = http.post("v1/videos/batch", json={**SMALL, "prompt": "a {red|blue} boat", "grid": grid})
    assert answer.status_code == 200, answer.text
    batch = answer.json()
    made = [(video["steps"], video["seed"], video["batch"]) for video in batch["data"]]
    assert made == [(steps, seed, batch["id"]) for steps in (1, 2) for seed in (3, 4)]
    ended(http, batch["data"][-1]["id"])
    listed = http.get(f"v1/videos/batch/{batch['id']}").json()
    assert [video["id"] for video in listed["data"]] == [video["id"] for video in batch["data"]]
    sheet = http.get(f"v1/videos/batch/{batch['id']}/sheet")
    assert sheet.headers["content-type"] == "image/png" and sheet.content.startswith(b"\x89PNG")
    # The videos of a grid without seeds have one seed.
    batch = http.post("v1/videos/batch", json={**SMALL, "seed": None, "grid": {"fps": [4, 8]}}).json()
    assert len({video["seed"] for video in batch["data"]}) == 1
    before = len(http.get("v1/videos", params={"limit": 100}).json()["data"])
    cases: list[tuple[Any, str, str]] = [
        (None, "grid", "request.grid_not_lists"),
        ({"stepz": [1]}, "grid", "request.grid_field"),
        ({"steps": [1, 0]}, "steps", "request.out_of_range"),
        ({"image": ["/etc/passwd"]}, "image", "server.api_image"),
        ({"mask": [f"sha256:{'0' * 64}/a.png"]}, "mask", "server.api_mask"),
        ({"loras": [["../secret.safetensors"]]}, "loras", "form.lora_is_path"),
        ({"model": ["/etc"]}, "model", "model_not_found"),
        ({"width": [64, 65]}, "width", "planner.not_a_multiple"),
        ({"seed": list(range(40)), "steps": list(range(1, 41))}, "grid", "queue.batch_too_large"),
    ]
    for wrong, param, code in cases:
        with subtests.test(msg=str(wrong)[:60]):
            assert error_of(http.post("v1/videos/batch", json={**SMALL, "grid": wrong}))[1:] == (param, code)
    assert len(http.get("v1/videos", params={"limit": 100}).json()["data"]) == before
    for path in ("00000000", "00000000/sheet", "../x", "x"):
        assert http.get(f"v1/videos/batch/{path}").status_code == 404


def test_settings_of_other_programs(http: httpx.Client) -> None:
    answer = http.post("v1/videos/settings", json={"prompt": json.dumps(EXPERTS), "workflow": None})
    found = answer.json()
    assert (answer.status_code, found["program"], found["nearest_model"]) == (200, "ComfyUI", "wan2.2-i2v-a14b")
    assert found["request"] == EXPERT_VALUES
    assert {"name": "sampler_name", "value": "euler"} in found["left_out"]
    answer = http.post("v1/videos/settings", json={"json": json.dumps(WAN2GP | {"seed": 10**17})})
    assert answer.json()["program"] == "Wan2GP" and "seed" not in answer.json()["request"]
    others: list[dict[str, Any]] = [{}, {"comment": "x"}, {"prompt": 5}, {"json": {"nodes": [[]]}}]
    for tags in others:
        assert error_of(http.post("v1/videos/settings", json=tags))[2] == "server.api_no_settings", tags


def test_the_schema_has_every_field_and_route(http: httpx.Client) -> None:
    schema = http.get("v1/openapi.json").json()
    request = schema["components"]["schemas"]["CreateVideo"]
    assert set(request["properties"]) == {*FIELDS, "size", "input_reference", "enhance"}
    assert request["required"] == ["prompt"] and request["additionalProperties"] is False
    assert request["properties"]["steps"]["maximum"] == FIELDS["steps"].json_schema()["maximum"]
    assert {"get", "post"} == set(schema["paths"]["/v1/videos"])
    assert {"get", "delete"} == set(schema["paths"]["/v1/videos/{video_id}"])
    for path in ("plan", "batch", "settings"):
        assert {"post"} == set(schema["paths"][f"/v1/videos/{path}"])
    text = json.dumps(schema)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in schema["components"]["schemas"], name


def test_the_schema_can_be_read_as_a_page(http: httpx.Client) -> None:
    answer = http.get("v1/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert f"curl {http.base_url}v1/videos" in answer.text
    for path in http.get("v1/openapi.json").json()["paths"]:
        assert f"{path}</code>" in answer.text
    for name in (*FIELDS, "size", "input_reference"):
        assert f"<code>{name}</code>" in answer.text
    assert not re.search(r"(?:src|href)=.?(?:https?:)?//|<script|@import|url\(", answer.text)
    names = re.findall(r' id="([^"]+)"', answer.text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]+)"', answer.text)) <= set(names)


@pytest.mark.slow
def test_a_deleted_job_store_is_reported_and_refuses_videos(tmp_path: Path) -> None:
    with serving_here(make_cache(tmp_path), page=False) as own, httpx.Client(base_url=own.url, timeout=60) as http:
        kept = (tmp_path / "jobs.sqlite").rename(tmp_path / "kept")
        for method, path in (("GET", "healthz"), ("GET", "v1/videos"), ("POST", "v1/videos")):
            answer = http.request(method, path, json=SMALL if method == "POST" else None)
            assert error_of(answer)[0::2] == (503, "queue.store_deleted"), path
        kept.rename(tmp_path / "jobs.sqlite")
        assert http.get("healthz").status_code == 200
        # Another process has made a new one meanwhile: its videos are made.
        for file in tmp_path.glob("jobs.sqlite*"):
            file.unlink()
        JobStore(tmp_path / "jobs.sqlite").close()
        assert ended(http, create(http)["id"])["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("page", [False, True], ids=["serve", "web app"])
def test_videos_beyond_a_limit_expire(page: bool, tmp_path: Path) -> None:
    running = serving_here(make_cache(tmp_path), page=page, keep_videos=1, keep_days=2.0)
    with running as own, httpx.Client(base_url=own.url, timeout=60) as http:
        first, second = [ended(http, create(http)["id"]) for _ in range(2)]
        assert second["expires_at"] - second["completed_at"] == 2 * 86_400
        until(lambda: http.get(f"v1/videos/{first['id']}").status_code == 404, pause=0.1)
        listed = http.get("v1/videos").json()
        assert [one["id"] for one in listed["data"]] == [second["id"]]
        assert listed["retention"] == {"days": 2.0, "videos": 1, "bytes": None}
        # The file is removed after the entry.
        until(lambda: len(list((tmp_path / "outputs").glob("*.mp4"))) == 1, pause=0.1)


def test_other_routes_methods_sites_and_hosts_are_refused(http: httpx.Client, server: App) -> None:
    assert error_of(http.get("v1/nothing"))[0] == 404
    assert error_of(http.get("/"))[0] == 404
    assert error_of(http.put("v1/videos"))[0] == 405
    assert error_of(http.get("v1/videos", headers={"Host": "evil.example"}))[0] == 403
    assert error_of(http.post("v1/videos", json=SMALL, headers={"Origin": "https://evil.example"}))[0] == 403
    assert error_of(http.get("v1/videos", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 403
    for path in ("v1/videos/../../etc/passwd", "v1/videos/%2e%2e%2fjobs.sqlite/content", "v1/videos/%00/content"):
        assert error_of(http.get(path))[0] == 404
    assert http.get("healthz").json() == {"status": "ok"}
    assert exchange(server.port, b"GET /healthz HTTP/1.0\r\n\r\n").status == 200
    assert exchange(server.port, b"GET /healthz HTTP/1.1\r\n\r\n").status == 400
    evil = b"GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert exchange(server.port, evil).status == 403
    assert http.get("healthz").headers["x-content-type-options"] == "nosniff"


@pytest.mark.slow
def test_incomplete_bodies_end_within_the_deadline_and_false_lengths_are_refused(server: App) -> None:
    port = int(server.url.rstrip("/").rpartition(":")[2])
    kind = {b"Content-Type": b"application/json"}
    too_long = send(port, b"POST", b"/v1/videos", {**kind, b"Content-Length": b"99999999999"}, b"{}")
    assert too_long.status == 413
    with socket.create_connection(("127.0.0.1", port), timeout=40) as connection:
        connection.sendall(
            b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{" % port
        )
        began = time.monotonic()
        while connection.recv(1000):
            pass
        assert time.monotonic() - began < 30
    # An upload that ends early.
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            b"Content-Length: 900000\r\n\r\n--x\r\n" % port + b"x" * 300_000
        )
    assert send(port, b"GET", b"/healthz").status == 200
    assert "Traceback" not in server.printed()


def test_an_upload_that_ends_early_leaves_no_file_and_frees_its_place(http: httpx.Client, server: App) -> None:
    port = int(server.url.rstrip("/").rpartition(":")[2])
    before = {path for path in (server.cache_dir / "images").rglob("*") if path.is_file()}
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    for _ in range(5):  # more than may run at once
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: multipart/form-data; boundary=x\r\n"
                b"Content-Length: 9000000\r\n\r\n" % port + part + b"x" * 600_000
            )
    large = {"image": {"image_url": "data:image/png;base64," + "A" * 500_000}}
    until(lambda: http.post("v1/videos", json={**SMALL, **large}).status_code == 400, pause=0.1)
    assert {path for path in (server.cache_dir / "images").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_all_followers_of_a_video_get_its_events(http: httpx.Client, server: App) -> None:
    made = create(http, steps=60)["id"]

    def follow(_: int) -> list[str]:
        with (
            httpx.Client(base_url=server.url, timeout=60) as own,
            own.stream("GET", f"v1/videos/{made}/events") as answer,
        ):
            return [name for name, _ in read_events(answer.iter_lines())]

    # The slow reader's socket buffer fills long before the end, which must not delay the others.
    port = int(server.url.rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow, ThreadPoolExecutor(20) as pool:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /v1/videos/%s/events HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (made.encode(), port))
        found = list(pool.map(follow, range(20)))
    for names in found:
        assert names[-1] == "video.completed" and "video.completed" not in names[:-1]
        assert "video.progress" in names


def test_many_clients_poll_at_once(server: App) -> None:
    with httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=40)) as http:
        made = create(http, steps=1)["id"]
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: http.get(f"v1/videos/{made}").status_code, range(200)))
    assert set(answers) == {200}


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_ends_serving() -> None:
    before = signal.getsignal(signal.SIGINT)
    addresses: list[str] = []

    def started(url: str) -> None:
        addresses.append(url)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        until_stopped(contextlib.nullcontext("http://127.0.0.1/"), started)
    finally:
        signal.signal(signal.SIGINT, before)
    assert addresses == ["http://127.0.0.1/"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_the_server_and_a_job_resumes(tmp_path: Path) -> None:
    """In a process of its own."""
    cache = make_cache(tmp_path / "cache")
    with serving(cache, program=("app.py", "serve")) as first, httpx.Client(base_url=first.url, timeout=60) as http:
        made = create(http, steps=200)["id"]
        with contextlib.closing(JobStore(cache / "jobs.sqlite")) as store:
            until(lambda: any(values["event"] == "StepDone" for _, _, values in store.log.events(made)), pause=0.05)
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(60) == 0
    with serving(cache, program=("app.py", "serve")) as second, httpx.Client(base_url=second.url, timeout=60) as http:
        assert ended(http, made)["status"] == "completed"
        (tmp_path / "v.mp4").write_bytes(http.get(f"v1/videos/{made}/content").content)
    assert read_metadata(tmp_path / "v.mp4")["earlier"]["step"] > 0
