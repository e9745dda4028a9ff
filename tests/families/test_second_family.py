"""A family outside of `runtime` plans, generates, builds engines and resumes with one entry in the families' table."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.events import Paused, Resumed, StepDone, VideoSaved
from runtime.execution.residency import Residency
from runtime.models import registry
from runtime.models.registry import read_spec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.video.mp4 import find_ffmpeg
from tests.families.ltx.build import build
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan

ROOT = Path(__file__).parents[2]
# How a new process adds the same entry: the only line that the family needs outside of its folder.
REGISTRATION = """
from runtime.models.registry import FAMILIES, Entry
FAMILIES["ltx"] = Entry("LTXPipeline", "tests.families.ltx")
"""
FIELDS = {"--gpus": "gpus", "--step-cache": "step_cache"}
Generate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny LTX-Video model."""
    return build(tmp_path_factory.mktemp("ltx") / "tiny-ltx")


@pytest.fixture(autouse=True)
def registered(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the family here and in child processes, with an empty cache."""
    monkeypatch.setitem(registry.FAMILIES, "ltx", registry.Entry(("LTXPipeline",), "tests.families.ltx"))
    (tmp_path / "sitecustomize.py").write_text(REGISTRATION, encoding="utf-8")
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *before]))
    return cache_dir


@pytest.fixture
def generate(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Return a function that runs `generate` and returns its JSON."""

    def made(*options: str) -> dict[str, Any]:
        out = str(tmp_path / f"{len(list(tmp_path.glob('*.mp4')))}.mp4")
        assert (
            run(["generate", "a red boat", "--seed", "3", "--model", str(model), "--out", out, "--json", *options]) == 0
        )
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return made


def frames(video: str) -> bytes:
    """Return a video's pixels."""
    arguments = [find_ffmpeg(), "-v", "error", "-i", video, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    return subprocess.run(arguments, capture_output=True, check=True).stdout


def mean_difference(pixels: bytes, other: bytes) -> float:
    """Return the mean difference of two clips' values, 0 to 255."""
    return sum(abs(a - b) for a, b in zip(pixels, other, strict=True)) / len(pixels)


def test_a_clip_is_planned(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "a red boat", "--model", str(model), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]
    assert list(plan["components"]) == ["text_encoder", "transformer", "vae"]
    assert plan["latent_shape"] == [1, 8, 3, 12, 16]
    assert plan["memory_bytes"] > 0


def test_limits_come_from_the_family(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "a red boat", "--model", str(model), "--width", "66", "--json"]) == 2
    assert run(["plan", "a red boat", "--model", str(model), "--frames", "8", "--json"]) == 2
    assert run(["plan", "a red boat", "--model", str(model), "--width", "68", "--frames", "13", "--json"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("option", [("--gpus", "2"), ("--step-cache", "first-block:0.1")])
def test_options_that_the_family_does_not_support_are_refused(
    option: tuple[str, str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "a red boat", "--model", str(model), *option, "--json"]) == 2
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert (error["code"], error["data"]["option"]) == ("family.option_unsupported", [FIELDS[option[0]]])


@pytest.mark.slow
def test_engines_give_the_same_clip_as_pytorch(generate: Generate) -> None:
    plain = generate("--backend", "all=pytorch")
    pixels = frames(plain["video"])
    assert len(pixels) == 9 * 48 * 64 * 3
    assert len(set(pixels)) > 16
    on_engines = generate("--backend", "all=onnxruntime")
    parts = on_engines["plan"]["components"]
    assert {name: part["backend"] for name, part in parts.items()} == dict.fromkeys(parts, "onnxruntime")
    assert all(part["engine"] for part in parts.values())
    assert on_engines["warnings"] == []
    other = frames(on_engines["video"])
    assert len(other) == len(pixels)
    # The decoder's engine may compute in bfloat16, and H.264 is lossy.
    assert mean_difference(pixels, other) < 3
    assert mean_difference(pixels, bytes(reversed(pixels))) > 15
    again = generate("--backend", "all=onnxruntime")
    assert [part["engine"] for part in again["plan"]["components"].values()] == [
        part["engine"] for part in parts.values()
    ]
    assert frames(again["video"]) == other


def test_a_paused_job_resumes_to_the_same_clip(model: Path, tmp_path: Path) -> None:
    spec, out = read_spec(model, "tiny-ltx"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, negative_prompt="blue ball")
    with Residency() as residency:
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
        wanted = frames(str(out))
        assert len(wanted) == plan.frames * plan.height * plan.width * 3
        assert len(set(wanted)) > 16
        folder = CheckpointFolder(tmp_path / "job")
        stopped = events_of(
            plan, spec, residency, pause_at=lambda e: isinstance(e, StepDone) and e.step == 2, checkpoints=folder
        )
        assert stopped[-1] == Paused(step=2, of=4)
        again = events_of(plan, spec, residency, checkpoints=CheckpointFolder(tmp_path / "job"))
    assert Resumed(step=2, of=4) in again
    assert frames(str(out)) == wanted
