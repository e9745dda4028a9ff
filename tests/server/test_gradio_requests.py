"""What is let through to gradio: routes, bodies, files."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.server import gradio_requests
from runtime.server.gradio_requests import RefusedError, access
from runtime.server.job_files import find_output, is_single_range
from tests.facts import fact

INPUTS = {0: 2, 7: 0}


def body(**values: Any) -> bytes:
    return json.dumps({"fn_index": 0, "session_hash": "abc", "data": ["a", None]} | values).encode()


def test_a_valid_call_is_read() -> None:
    assert gradio_requests.read_call(body(), INPUTS)["data"] == ["a", None]
    assert gradio_requests.read_call(body(fn_index=7, data=[]), INPUTS)["fn_index"] == 7
    assert gradio_requests.read_call(body(session_hash=None, fn_index=None), INPUTS, api=0)["session_hash"] is None
    short = body(data=["a"], fn_index=None)
    assert gradio_requests.read_call(short, INPUTS, api=0, defaults=[None, 3])["data"] == ["a", 3]


def test_an_uploaded_image_is_named_as_in_requests() -> None:
    name = f"sha256:{'a' * 64}/boat.png"
    file = {"path": name, "orig_name": "boat.png", "meta": {"_type": "gradio.FileData"}}
    assert gradio_requests.read_call(body(data=[file, name]), INPUTS)["data"] == [name, name]
    for other in (
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        {"path": name},
        {"path": [name], "meta": {"_type": "gradio.FileData"}},
        [file],
    ):
        with pytest.raises(RefusedError) as refused:
            gradio_requests.read_call(body(data=[other, None]), INPUTS)
        assert refused.value.fact.code == "server.call_files"


def test_calls_that_gradio_cannot_handle_are_refused(subtests: pytest.Subtests) -> None:
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    cases: list[tuple[str, dict[str, Any], list[bytes]]] = [
        ("not_json", {}, [b"", b"\xff", b"[" * 100_000]),
        ("not_an_object", {}, [b"[]"]),
        ("not_found", {"kind": "function"}, [body(fn_index=number) for number in (1, True, "0", None)]),
        ("call_values", {"count": 2}, [body(data=["a"]), body(data={})]),
        ("session_name", {}, [body(session_hash=None)]),
        ("session_name", {}, [body(session_hash=name) for name in ("../x", 5, "x" * 65)]),
        ("call_unsupported", {}, [body(batched=True), body(batched=[]), body(oauth_token="x")]),
        ("call_type", {"name": "trigger_id"}, [body(trigger_id=float("nan")), body(trigger_id="1")]),
        ("call_type", {"name": "event_id"}, [body(event_id=1)]),
        ("call_type", {"name": "simple_format"}, [body(simple_format=float("inf"))]),
        ("call_files", {}, [body(data=[file, 1]), body(data=[[{"deep": {"path": "http://127.0.0.1/"}}], 1])]),
        ("call_files", {}, [body(event_data={"url": "http://127.0.0.1/"})]),
        ("call_too_large", {}, [body(data=[deep, 1]) for deep in (json.loads("[" * 30 + "]" * 30), [0] * 6_000)]),
    ]
    for code, data, bodies in cases:
        for sent in bodies:
            with subtests.test(msg=f"{code}: {sent[:60]!r}"):
                with pytest.raises(RefusedError) as refused:
                    gradio_requests.read_call(sent, INPUTS)
                assert refused.value.fact == fact(f"server.{code}", **data)
                assert refused.value.status_code == 422


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"session_hash": None}, "server.session_name"),
        ({"fn_index": "1"}, "server.not_found"),
        ({"fn_index": None}, "server.not_found"),
        ({"event_id": None}, "server.not_found"),
        ({"event_id": "../0"}, "server.not_found"),
        ({"event_id": "0" * 31}, "server.not_found"),
    ],
    ids=str,
)
def test_a_cancellation_must_name_an_event(values: dict[str, Any], code: str) -> None:
    good = {"session_hash": "abc", "fn_index": 0, "event_id": "0" * 32}
    assert gradio_requests.read_cancel(json.dumps(good).encode()) == good
    with pytest.raises(RefusedError) as refused:
        gradio_requests.read_cancel(json.dumps(good | values).encode())
    assert refused.value.fact.code == code


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", "/", "public"),
        ("HEAD", "/", "public"),
        ("POST", "/login", "public"),
        ("POST", "/login/", "public"),
        ("GET", "/assets/index-DphvyggB.js", "public"),
        ("GET", "/config", "login"),
        ("POST", "/gradio_api/queue/join", "login"),
        ("POST", "/gradio_api/call/generate", "login"),
        ("GET", f"/gradio_api/call/generate/{'0' * 32}", "login"),
        ("GET", "/gradio_api/queue/data", "login"),
        ("POST", "/", None),
        ("PUT", "/login", None),
        ("DELETE", "/config", None),
        ("GET", "/login", None),
        ("GET", "/logout", None),
        ("GET", "/gradio_api/token", None),
        ("GET", "//config", None),
        ("GET", "/assets/../config", None),
        ("GET", "/assets/..", None),
        ("GET", "/assets/a\0", None),
        ("GET", "/pwa_icon/99999", None),
        ("POST", "/gradio_api/upload", "login"),  # Tandem's own route, see `image_uploads`
        ("GET", "/gradio_api/upload", None),
        ("POST", "/gradio_api/upload/", None),
        ("POST", "/tandem/images/boat.png", "login"),
        ("GET", "/tandem/images/boat.png", None),
        ("POST", "/tandem/images/", None),
        ("POST", "/tandem/images/a/b", None),
        ("POST", "/tandem/videos/boat.mp4", "login"),
        ("GET", "/tandem/videos/boat.mp4", None),
        ("POST", "/tandem/videos/a/b", None),
        ("POST", "/gradio_api/component_server", None),
        ("POST", "/gradio_api/api/generate", None),
        ("POST", "/gradio_api/run/generate", None),
        ("POST", "/gradio_api/call/v2/generate", None),
        ("POST", "/gradio_api/call/other", None),
        ("GET", "/gradio_api/file=/etc/passwd", "login"),  # Tandem's own route, see `job_files`
        ("POST", "/gradio_api/file=/etc/passwd", None),
        ("GET", "/video/0123abcd.mp4", None),
        ("GET", "/gradio_api/stream/a/b/1/playlist.m3u8", None),
        ("GET", "/gradio_api/call/generate/../../token", None),
    ],
)
def test_only_the_routes_that_are_used_are_open(method: str, path: str, needed: str | None) -> None:
    assert access(method, path) == needed
    if path.startswith("/tandem/videos/"):
        assert access(method, path, visitors=True) is None


def test_only_videos_in_the_outputs_folder_are_served(tmp_path: Path) -> None:
    outputs = tmp_path / "Cache" / "outputs"
    (outputs / "sub.mp4").mkdir(parents=True)
    video, secret = outputs / "a video.mp4", tmp_path / "Cache" / "secret.mp4"
    for path in (video, secret, outputs / "notes.txt", outputs / ".part"):
        path.write_bytes(b"x")
    assert find_output(str(video), outputs) == video
    for asked in (
        str(secret),
        str(outputs / "notes.txt"),
        str(outputs / ".part"),
        str(outputs / "sub.mp4"),
        str(outputs),
        str(outputs / ".." / "secret.mp4"),
        f"{outputs}/x/../a video.mp4",
        f"{outputs}/..\\secret.mp4",
        f"{video}\0.mp4",
        f"{outputs}/{'x' * 5000}.mp4",
        "a video.mp4",
        "",
        "file.mp4",
        "http://127.0.0.1/a.mp4",
        "/etc/passwd",
    ):
        assert find_output(asked, outputs) is None, asked


def test_symlinks_out_of_the_outputs_folder_are_not_followed(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    (tmp_path / "secret.mp4").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    (outputs / "real.mp4").write_bytes(b"x")
    (outputs / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (outputs / "folder").symlink_to(tmp_path)
    (outputs / "round.mp4").symlink_to(outputs / "round.mp4")
    (outputs / "text.mp4").symlink_to(tmp_path / "notes.txt")
    (outputs / "inside.mp4").symlink_to(outputs / "real.mp4")
    for name in ("out.mp4", "folder/secret.mp4", "round.mp4", "text.mp4"):
        assert find_output(str(outputs / name), outputs) is None, name
    assert find_output(str(outputs / "inside.mp4"), outputs) == outputs / "real.mp4"


@pytest.mark.parametrize(
    ("value", "readable"),
    [
        (b"bytes=0-", True),
        (b"bytes=5-9", True),
        (b"bytes=-9", True),
        (b"bytes=-", False),
        (b"bytes=0-1-2", False),
        (b"bytes=0-1,4-5", False),
        (b"bytes=\xb2-\xb3", False),
        (b"bytes=" + b"9" * 5000 + b"-", False),
        (b"lines=0-1", False),
    ],
)
def test_only_single_ranges_are_accepted(value: bytes, readable: bool) -> None:
    assert is_single_range(value) == readable


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/tandem/now"),
        ("POST", "/tandem/panels/queue"),
        ("POST", "/tandem/control"),
        ("GET", "/tandem/before/0123abcd.mp4"),
        ("POST", "/gradio_api/run/predict"),
    ],
)
def test_the_owners_routes_are_closed_to_visitors(method: str, path: str) -> None:
    assert access(method, path) == "login"
    assert access(method, path, visitors=True) is None
    assert access("GET", "/video/0123abcd.mp4", visitors=True) == "login"
