"""`plan`, `models list` and `doctor`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.facts import sentence, short
from runtime.core.settings import ROOT
from runtime.core.units import memory_size
from runtime.models.catalogue import download_bytes, known_models, not_downloaded
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import FIT_KINDS
from tests.cli.conftest import SHOWN
from tests.facts import fact
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.plans import gpu, machine

BOAT = str(ROOT / "examples" / "boat.png")


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """Run a command and return its JSON and its text."""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def memory_text(result: dict[str, Any]) -> str:
    """Return a part of the line on the memory that a plan needs."""
    memory = result["plan"]["memory"]
    return f" {memory_size(memory['peak_bytes'])} of {memory_size(memory['free_bytes'])} "


def test_plan_shows_decisions_and_writes_nothing(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny("wan2.2-a14b").directory)
    result, text = answer(["plan", "a red boat", "--model", directory, "--seed", "7"], capsys)
    assert result["request"]["seed"] == 7
    assert result["plan"]["tokens"] == 32_760
    assert result["plan"]["components"]["transformer_2"]["reason"]
    assert "Low-noise transformer" in text
    assert memory_text(result) in text
    assert "Time: about" in text
    assert "(estimated)" in text
    assert result["plan"]["memory"]["peak_bytes"] == result["plan"]["memory_bytes"]
    assert result["plan"]["forecast"]["total"]["low"] < result["plan"]["forecast"]["total"]["seconds"]
    save_safetensors(cache_dir / "weights" / "upscalers" / "small.safetensors", COMPACT_CONFIG)
    flags = ["--upscale", "2", "--upscaler", "small", "--interpolate", "2"]
    upscaled, text = answer(["plan", "a red boat", "--model", directory, *flags], capsys)
    assert (upscaled["plan"]["upscaling"]["width"], upscaled["plan"]["upscaling"]["height"]) == (1664, 960)
    assert "1664x960" in text
    assert upscaled["plan"]["forecast"]["upscale"]["seconds"] > 0
    assert upscaled["plan"]["interpolation"] == {
        "factor": 2,
        "frames": 162,
        "fps": 32,
        "by": "minterpolate",
    }
    assert "162 frames at 32 fps" in text
    assert upscaled["plan"]["forecast"]["interpolate"]["seconds"] > 0
    # The plan says that the model makes no sound.
    assert (upscaled["request"]["sound"], upscaled["plan"]["sound"]) == ("on", False)
    assert "makes no sound" in text and "with sound" not in text
    off, _ = answer(["plan", "a red boat", "--model", directory, "--no-sound"], capsys)
    assert off["request"]["sound"] == "off" and not off["warnings"]
    lossless, _ = answer(["plan", "a red boat", "--model", directory, "--sound", "lossless"], capsys)
    assert lossless["request"]["sound"] == "lossless" and len(lossless["warnings"]) == 1
    # All weights fit in memory, so no other strategies are shown.
    assert "Strategies for" not in text and "All strategies" not in text
    assert not (cache_dir / "outputs").exists()


# Runs the command of each line of standard input in a process of its own, forked from one that has imported the command
# line only; prints the exit code and those of the packages of the line that it has imported.
_IMPORTED = """
import contextlib, io, json, os, sys
from runtime.cli.main import run
for line in sys.stdin:
    command, packages = json.loads(line)
    if os.fork() == 0:
        if command == ["models", "list"]:  # which computes for half a second what each published model needs
            from runtime.cli import models
            every = models.not_downloaded
            models.not_downloaded = lambda weights: every(weights)[:1]
        if command == ["doctor"]:  # which imports each package in a process of its own
            from runtime.machine import doctor
            doctor.PACKAGES = doctor.PACKAGES[:0]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = run(command)
        print(json.dumps([code, sorted(set(packages) & set(sys.modules))]), flush=True)
        os._exit(0)
    os.wait()
"""
# The published models are not downloaded here, so that what they need is planned.
SLOW_PACKAGES: list[tuple[list[str], list[str]]] = [
    (["plan", "a red boat"], ["torch", "numpy", "asyncio", "unittest", "huggingface_hub", "gradio"]),
    *((["plan", "a red boat", "--model", name, "--width", "64", "--height", "64", "--build", "missing"], ["torch"])
      for name in ("diorama", "wan2.2-t2v-a14b", "wan2.1-t2v-1.3b")),
    (["models", "list"], ["torch", "numpy", "unittest", "gradio"]),
    (["models", "verify"], ["torch", "numpy", "unittest", "gradio"]),
    (["jobs", "list"], ["torch", "diffusers", "gradio"]),
    (["jobs", "show", "1a2b3c4d"], ["torch", "diffusers", "gradio"]),
    (["jobs", "delete", "--yes", "1a2b3c4d"], ["torch", "diffusers", "gradio"]),
    (["engines", "list"], ["torch", "numpy", "gradio"]),
    (["engines", "prune"], ["torch", "numpy", "gradio"]),
    (["doctor"], ["torch", "diffusers", "gradio"]),
    (["--help"], ["torch", "numpy", "gradio"]),
    (["--version"], ["torch", "numpy", "gradio"]),
    (["generate", "a red boat", "--width", "65"], ["torch"]),
    (["generate", "[0s: a red boat]"], ["torch"]),
    (["generate", "[1s: a boat] [0.5s: a ball]", "--model", "framepack-i2v", "--image", BOAT], ["torch"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_commands_import_no_slow_packages(cache_dir: Path, subtests: pytest.Subtests) -> None:
    lines = "".join(f"{json.dumps(case)}\n" for case in SLOW_PACKAGES)
    command = [sys.executable, "-c", _IMPORTED]
    done = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, _), (code, imported) in zip(SLOW_PACKAGES, found, strict=True):
        with subtests.test(msg=" ".join(arguments)):
            assert imported == []
            refused = arguments[0] == "generate" or "1a2b3c4d" in arguments
            # Memory may be short for the published models.
            assert code == 2 if refused else code in ((0, 2) if "--model" in arguments else (0,))


def test_published_models_are_listed_and_cannot_generate(
    few_models: None, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [spec.name for spec in not_downloaded(cache_dir)] == [known.name for known in known_models()]
    for spec in not_downloaded(cache_dir):  # weights have 2 or 4 bytes, and tokenizers up to 0.1 GB
        assert 2 * spec.total_parameters <= download_bytes(spec) <= 4 * spec.total_parameters + 10**8
    result, text = answer(["models", "list"], capsys)
    here = {model["name"]: model["here"] for model in result["models"]}
    assert here == {"diorama": True} | dict.fromkeys(SHOWN, False)
    (row,) = [line for line in text.splitlines() if line.startswith("wan2.2-t2v-a14b ")]
    assert " 126.2 GB " in row
    needs = next(model["needs"] for model in result["models"] if model["name"] == "wan2.2-t2v-a14b")
    assert needs["class"] in FIT_KINDS and needs["class"].replace("_", " ") in row
    shown, text = answer(["models", "show", "A14B"], capsys)
    assert shown == next(model for model in result["models"] if model["name"] == "wan2.2-t2v-a14b")
    line = text.splitlines()[0]
    assert "34,384.8 M " in line and line.endswith("`./install.sh models download wan2.2-t2v-a14b`")
    refused, _ = answer(["models", "show", "none"], capsys, code=2)
    assert refused["error"]["code"] == "model.unknown"
    result, text = answer(["generate", "a red boat", "--model", "A14B"], capsys, code=2)
    assert result["error"]["code"] == "model.weights_not_downloaded"
    assert "Wan-AI/Wan2.2-T2V-A14B-Diffusers" in result["error"]["remedy"]


def test_plan_shows_all_strategies_if_memory_is_short(
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little = gpu(free_gib=1.05)
    monkeypatch.setattr("runtime.cli.plan_and_doctor.probe", lambda: machine(gpu=little, torch_cuda="13.0"))
    size = ["--width", "128", "--height", "128", "--frames", "17"]
    model = ["--model", str(tiny("wan2.2-a14b").directory)]
    result, text = answer(["plan", "a red boat", *model, *size], capsys)
    assert memory_text(result) in text
    assert "--offload sequential" in text
    assert [strategy["taken"] for strategy in result["plan"]["ladder"]].count(True) == 1
    lacks = {strategy["lacks"] for strategy in result["plan"]["ladder"] if strategy["quantization"] == "bnb-4bit"}
    lacking = fact("machine.gpu_package_missing", package="bitsandbytes")
    assert lacks == {short(lacking)}
    assert str(fact("strategy.unavailable", cause=lacking)) in text


@pytest.mark.parametrize("with_gpu", [True, False], ids=["gpu", "cpu"])
def test_a_plan_refused_for_memory_shows_all_strategies(
    with_gpu: bool, cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    little = machine(gpu=gpu(free_gib=8), torch_cuda="13.0", ram_free_gib=16) if with_gpu else machine(ram_free_gib=16)
    monkeypatch.setattr("runtime.cli.plan_and_doctor.probe", lambda: little)
    arguments = ["plan", "a red boat", "--model", "wan2.2-t2v-a14b"]
    result, text = answer(arguments, capsys, code=2)
    *_, what, remedy = text.strip().splitlines()
    assert what == f"Error: {result['error']['what']}"
    assert remedy == f"To do: {result['error']['remedy']}"
    assert len(result["ladder"]) == (10 if with_gpu else 2)
    for strategy in result["ladder"]:
        assert not strategy["taken"] and strategy["peak_bytes"] > 0
    where = "video memory" if with_gpu else "memory"
    heading, *rows = text.splitlines()[1:-2]
    assert heading.startswith("Strategy ") and len(rows) == len(result["ladder"])
    for row, strategy in zip(rows, result["ladder"], strict=True):
        if strategy["lacks"]:
            verdict = fact("strategy.unavailable", cause=sentence(strategy["lacks"]))
        elif strategy["fits"] or strategy["fits_ram"]:
            verdict = fact("strategy.too_little", memory="RAM" if strategy["fits"] else where)
        else:
            verdict = fact("strategy.too_little_of_both", memory=where)
        assert row.startswith(strategy["title"]) and row.endswith(f"  {verdict}")
    assert run([*arguments, "--width", "833", "--json"]) == 2
    assert "ladder" not in json.loads(capsys.readouterr().out)


def test_models_list_names_damaged_models(
    tiny: Callable[[str], ModelSpec], few_models: None, cache_dir: Path, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.slow
def test_doctor_finds_what_is_missing(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = answer(["doctor"], capsys)
    assert result["ok"]
    names = [finding["name"] for finding in result["findings"]]
    assert {"Python", "PyTorch", "CPU", "Memory", "Cache folder", "ffmpeg", "Model diorama"} <= set(names)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/no/such/ffmpeg")
    monkeypatch.setattr("runtime.machine.doctor.PACKAGES", ())  # each is imported in a process of its own
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


def test_times_in_a_prompt_that_cannot_be_read_are_refused(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "[1-2s: jumps]", "--model", "framepack-i2v", "--seconds", "3"]
    result, text = answer([*command, "--image", BOAT], capsys, code=2)
    assert result["error"]["code"] == "planner.prompt_times"
    assert len(text.splitlines()) == 2
