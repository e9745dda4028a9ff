"""`--image` on the command line: refusals with exit code 2, and a job that keeps its own copy."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.models import requested
from runtime.models.images import images_dir
from runtime.models.spec import ModelSpec
from runtime.queue.store import open_store
from runtime.video.mp4 import read_metadata
from tests.cli.test_bad_input import refused
from tests.hostile_files import HOSTILE
from tests.image_files import bomb, encoded, picture, saved

Tiny = Callable[[str], ModelSpec]
SMALL = ["--frames", "5", "--steps", "1", "--seed", "3"]


@pytest.fixture
def spec(tiny: Tiny, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A tiny model that starts from an image, which requests find by any name."""
    made = tiny("wan2.2-ti2v-5b")
    defaults = replace(made.defaults, width=64, height=32)
    made = replace(made, defaults=defaults)
    for name in ("find", "look_up"):
        monkeypatch.setattr(requested, name, lambda *_: made)
    return made


FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.touch(),
    "cut": lambda path: path.write_bytes(encoded(picture(640, 480))[:1500]),
    "text": lambda path: path.write_text("a boat"),
    "bomb": lambda path: path.write_bytes(bomb(10_000)),
    "pixel": lambda path: path.write_bytes(encoded(picture(1, 1))),
    "strip": lambda path: path.write_bytes(encoded(picture(900, 20))),
    "heic": lambda path: path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100)),
    "missing": lambda path: None,
    "folder": HOSTILE["folder"],
    "fifo": HOSTILE["fifo"],
    "device": HOSTILE["device"],
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize(
    ("kind", "says", "to_do"),
    [
        ("empty", "is empty", "PNG or JPEG"),
        ("cut", "damaged or incomplete", "save it again"),
        ("text", "not an image", "JPEG, PNG"),
        ("bomb", "more than 50 million pixels", "smaller"),
        ("pixel", "1 × 1 pixels", "larger"),
        ("strip", "more than 8 times", "Crop"),
        ("heic", "HEIC", "PNG or JPEG"),
        ("missing", "No such file", "Check its name"),
        ("folder", "is not a file", "PNG or JPEG"),
        ("fifo", "is not a file", "PNG or JPEG"),
        ("device", "is not a file", "PNG or JPEG"),
        ("loop", "cannot be read", "Check its name"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_bad_images(
    command: str,
    kind: str,
    says: str,
    to_do: str,
    spec: ModelSpec,
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "boat.png"
    FILES[kind](path)
    what, remedy = refused([command, "a boat", "--image", str(path)], capsys)
    assert "boat.png" in what and says in what and to_do in remedy
    assert not images_dir(cache_dir).exists()
    assert not open_store(cache_dir).list()


@pytest.mark.parametrize(
    ("flags", "says", "to_do"),
    [
        (["--image", ""], "--image is not a file's name", "PNG or JPEG"),
        (["--image", "a\x07b"], "--image is not a file's name", "PNG or JPEG"),
        (["--image", "x" * 5000], "--image is not a file's name", "PNG or JPEG"),
        (["--image", "sha256:boat"], "names no image", "64 hexadecimal"),
        (["--image", f"sha256:{'a' * 64}"], "no longer in the cache", "file again"),
        (["--last-image", "boat.png"], "needs a first one", "Give one with --image"),
        (["--image", "boat.png", "--last-image", "boat.png"], "does not end with an image", "Leave --last-image out"),
        (["--image-fit", "stretch"], "--image-fit is 'stretch'", "crop, fit"),
        (["--image-position", "101"], "--image-position is 101", "to 100"),
        (["--image-position", "top"], "'top', not a number", "from 0 to 100"),
        (["--image", "boat.png", "--width", "100"], "width is 100", "96 or 128"),
    ],
)
def test_flags(
    flags: list[str],
    says: str,
    to_do: str,
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "boat.png")
    what, remedy = refused(["plan", "a boat", *flags], capsys)
    assert says in what and to_do in remedy


def test_a_model_without_images(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requested, "find", lambda *_: replace(spec, image_input=None))
    what, _ = refused(["generate", "a boat", "--image", str(saved(tmp_path / "boat.png"))], capsys)
    assert "does not start from an image" in what


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command that must succeed; return its JSON."""
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_a_plan_shows_the_image_and_copies_nothing(
    spec: ModelSpec, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boat = saved(tmp_path / "boat.png", 96, 96)
    planned = answered(["plan", "a boat", "--image", str(boat), *SMALL, "--width", "64", "--height", "32"], capsys)
    assert planned["plan"]["images"]["image"]["name"] == "boat.png"
    assert any("50 % of the image boat.png is cut" in warning for warning in planned["warnings"])
    assert not images_dir(cache_dir).exists()
    assert run(["plan", "a boat", "--image", str(boat), *SMALL]) == 0
    assert "Image: boat.png, 96x96" in capsys.readouterr().out


def test_a_job_keeps_its_image(
    spec: ModelSpec,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "boat.png", 640, 320)
    made = answered(["generate", "a boat", "--image", "boat.png", "--image-position", "20", *SMALL], capsys)
    (copy,) = images_dir(cache_dir).iterdir()
    assert made["request"]["image"] == f"sha256:{copy.name}/boat.png"
    assert (made["request"]["width"], made["request"]["height"]) == (64, 32)
    assert read_metadata(Path(made["video"]))["request"] == made["request"]
    shown = answered(["jobs", "show", made["job"], "--with-prompt"], capsys)["job"]
    assert shown["request"]["image"] == made["request"]["image"] and shown["request"]["image_position"] == 20.0
    # Names of files can be as private as prompts.
    assert "boat.png" not in json.dumps(answered(["jobs", "show", made["job"]], capsys)["job"]["request"])
    os.remove(tmp_path / "boat.png")  # noqa: PTH107 - the current folder
    again = answered(["generate", "a boat", "--image", made["request"]["image"], *SMALL], capsys)
    assert again["plan"]["images"] == made["plan"]["images"]
