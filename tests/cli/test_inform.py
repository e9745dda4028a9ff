"""`plan`, `models list` and `doctor`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.models.spec import ModelSpec
from tests.plans import gpu, machine


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """Run a command and return its JSON and its text."""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def test_plan_says_what_would_run_and_leaves_no_trace(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny("wan2.2-a14b").directory)
    result, text = answer(["plan", "a red boat", "--model", directory, "--seed", "7"], capsys)
    assert result["request"]["seed"] == 7
    assert result["plan"]["tokens"] == 32_760
    assert result["plan"]["components"]["transformer_2"]["reason"]
    assert "Low-noise transformer" in text
    assert "Memory at the peak" in text
    assert "Time: about" in text
    assert "(estimated)" in text
    assert result["plan"]["memory"]["peak_bytes"] == result["plan"]["memory_bytes"]
    assert result["plan"]["forecast"]["total"]["low"] < result["plan"]["forecast"]["total"]["seconds"]
    # All that stays loaded fits: there is no ladder to show.
    assert "Asked for by" not in text
    assert not (cache_dir / "outputs").exists()


def test_plan_shows_the_ladder_where_memory_is_short(
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = gpu(free_gib=1.05)
    monkeypatch.setattr("runtime.cli.inform.probe", lambda: machine(gpu=short, torch_cuda="13.0"))
    size = ["--width", "128", "--height", "128", "--frames", "17"]
    model = ["--model", str(tiny("wan2.2-a14b").directory)]
    result, text = answer(["plan", "a red boat", *model, *size], capsys)
    assert "of video memory that are free" in text
    assert "--offload sequential" in text
    assert [rung["taken"] for rung in result["plan"]["ladder"]].count(True) == 1


def test_models_list_names_the_broken_ones(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "broken"):
        shutil.copytree(tiny("wan2.1").directory, cache_dir / "weights" / name)
    (cache_dir / "weights" / "broken" / "vae" / "config.json").unlink()
    result, text = answer(["models", "list"], capsys)
    problems = {model["name"]: model["problem"] for model in result["models"]}
    assert problems["good"] is None
    assert problems["diorama"] is None
    assert "vae/config.json" in problems["broken"]
    assert "vae/config.json" in " ".join(text.split())


def test_doctor_finds_what_is_missing(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = answer(["doctor"], capsys)
    assert result["ok"]
    names = [finding["name"] for finding in result["findings"]]
    assert {"Python", "PyTorch", "CPU", "Memory", "Cache folder", "ffmpeg", "Model diorama"} <= set(names)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/no/such/ffmpeg")
    result, text = answer(["doctor"], capsys, code=2)
    assert not result["ok"]
    (finding,) = [finding for finding in result["findings"] if finding["state"] == "problem"]
    assert finding["name"] == "ffmpeg"
    assert finding["fix"] in text.replace("\n", " ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2
    assert run(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
