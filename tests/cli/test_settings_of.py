"""`--settings-of FILE`: settings of other programs' files and of Tandem's own, and files without settings."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli.main import run
from runtime.cli.settings_file import settings_of
from runtime.models.spec import ModelSpec
from tests import settings_of_others
from tests.cli.refusals import refused
from tests.models.test_other_programs import EXPERT_VALUES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.name: path for path in settings_of_others.write_all(tmp_path_factory.mktemp("others"))}


def test_settings_are_read_from_each_kind_of_file(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, path in files.items():
        values = settings_of(str(path))
        assert (values["prompt"], values["seed"]) == (settings_of_others.prompt_in(name), settings_of_others.SEED)
        if name in {"comfyui.png", "api.json", "suite.mp4"}:
            assert values | {"prompt": "a boat", "seed": 0} == EXPERT_VALUES
        if name == "framepack.png":
            assert [values[field] for field in ("width", "height", "seconds")] == [640, 608, 6]
        err = capsys.readouterr().err
        assert f"Settings of {name}" in err and "nearest" in err


def test_options_take_precedence(
    files: dict[str, Path],
    cache_dir: Path,
    tiny: Callable[[str], ModelSpec],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", str(tiny("wan2.1").directory), "--width", "32", "--height", "32", "--frames", "5", "--json"]
    assert run(["plan", "--settings-of", str(files["framepack.png"]), *flags]) == 0
    request = json.loads(capsys.readouterr().out.splitlines()[-1])["request"]
    assert (request["prompt"], request["seed"]) == (settings_of_others.prompt_in("framepack.png"), 1234)
    assert (request["steps"], request["width"], request["frames"], request["seconds"]) == (25, 32, 5, "auto")
    videos = ["--steps", "1", "--guidance", "1", "--fps", "8", "--grid", "seed=1,2"]
    assert run(["generate", "--settings-of", str(files["framepack.png"]), *flags, *videos]) == 0
    made = [video["request"] for video in json.loads(capsys.readouterr().out.splitlines()[-1])["videos"]]
    assert [(one["prompt"], one["seed"]) for one in made] == [(request["prompt"], 1), (request["prompt"], 2)]
    # Its LoRAs are not here.
    arguments = ["plan", "another prompt", "--settings-of", str(files["comfyui.png"]), "--model", flags[1]]
    assert refused(arguments, capsys, began=True).code == "lora.unknown"


def test_a_file_of_tandem(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    request = {"prompt": "a red boat", "seed": 5, "shift": None, "steps": 10**9, "model": "diorama", "unknown": 5}
    path.write_text(json.dumps({"tandem": {"request": request}}))
    assert settings_of(str(path)) == {"prompt": "a red boat", "seed": 5, "model": "diorama"}


def test_files_without_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {
        "none.mp4": b"",
        "text.mp4": b"no video",
        "broken.json": b"{",
        "binary.json": b"\xff\xfe\x00",
        "other.json": b"[1]",
        "deep.json": b"[" * 100_000,
        "cut.png": b"\x89PNG\r\n\x1a\n\xff\xff\xff\xfftEXtprompt\0{",
        "plain.png": b"\x89PNG\r\n\x1a\n",
        "huge.json": b'{"type": "WanGP", "x": "' + b"x" * (5 << 20) + b'"}',
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        code = "video.unreadable_file" if name in {"binary.json", "huge.json"} else "cli.no_settings"
        assert refused(["plan", "--settings-of", str(path)], capsys).code == code, name
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in (tmp_path, tmp_path / "pipe.mp4", tmp_path / "missing.png", tmp_path / "missing.json"):
        assert refused(["plan", "--settings-of", str(path)], capsys).code == "video.unreadable_file", path
