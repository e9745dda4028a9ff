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
from runtime.core.settings import ROOT
from runtime.models.catalogue import known_models
from runtime.models.spec import ModelSpec
from tests.plans import gpu, machine


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """Run a command and return its JSON and its text."""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def test_plan_shows_decisions_and_writes_nothing(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny("wan2.2-a14b").directory)
    result, text = answer(["plan", "a red boat", "--model", directory, "--seed", "7"], capsys)
    assert result["request"]["seed"] == 7
    assert result["plan"]["tokens"] == 32_760
    assert result["plan"]["components"]["transformer_2"]["reason"]
    assert "Low-noise transformer" in text
    assert "Peak memory: about" in text
    assert "Time: about" in text
    assert "(estimated)" in text
    assert result["plan"]["memory"]["peak_bytes"] == result["plan"]["memory_bytes"]
    assert result["plan"]["forecast"]["total"]["low"] < result["plan"]["forecast"]["total"]["seconds"]
    # All weights fit in memory, so no other strategies are shown.
    assert "Strategies for" not in text and "All strategies" not in text
    assert not (cache_dir / "outputs").exists()


@pytest.mark.parametrize("model", ["diorama", "wan2.2-t2v-a14b", "wan2.1-t2v-1.3b"])
def test_planning_is_fast_and_imports_no_torch(model: str, cache_dir: Path) -> None:
    arguments = ["plan", "a red boat", "--model", model, "--width", "64", "--height", "64", "--build", "missing"]
    code = (
        # Processor time: how long it takes depends on what else runs.
        "import sys, time; from runtime.cli.main import run; began = time.process_time(); "
        f"run({arguments}); print(time.process_time() - began, file=sys.stderr); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert float(done.stderr.splitlines()[-1]) < 1
    assert "Component" in done.stdout or "Strategies" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "slow_packages"),
    [
        (["plan", "a red boat"], {"torch", "numpy", "asyncio", "unittest", "huggingface_hub", "gradio"}),
        (["models", "list"], {"torch", "numpy", "unittest", "gradio"}),
        (["models", "verify"], {"torch", "numpy", "unittest", "gradio"}),
        (["jobs", "list"], {"torch", "diffusers", "gradio"}),
        (["jobs", "show", "1a2b3c4d"], {"torch", "diffusers", "gradio"}),
        (["jobs", "delete", "--yes", "1a2b3c4d"], {"torch", "diffusers", "gradio"}),
        (["engines", "list"], {"torch", "numpy", "gradio"}),
        (["engines", "prune"], {"torch", "numpy", "gradio"}),
        (["doctor"], {"torch", "diffusers", "gradio"}),
        (["--help"], {"torch", "numpy", "gradio"}),
        (["--version"], {"torch", "numpy", "gradio"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_commands_import_no_slow_packages(arguments: list[str], slow_packages: set[str], cache_dir: Path) -> None:
    code = (
        f"import sys; from runtime.cli.main import run; run({arguments}); "
        f"sys.exit(str({slow_packages} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "set()"


def test_published_models_are_listed_and_cannot_generate(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, text = answer(["models", "list"], capsys)
    here = {model["name"]: model["here"] for model in result["models"]}
    assert here == {"diorama": True} | dict.fromkeys([known.name for known in known_models()], False)
    assert (
        "34,384.8 M weights, at most about 137.5 GB, not installed: `./install.sh models download wan2.2-t2v-a14b`"
        in text
    )
    assert run(["generate", "a red boat", "--model", "A14B"]) == 2
    what, remedy = capsys.readouterr().err.strip().splitlines()
    assert what == "Error: The weights of Wan2.2 T2V-A14B are not downloaded."
    assert "Wan-AI/Wan2.2-T2V-A14B-Diffusers" in remedy


def test_plan_shows_all_strategies_if_memory_is_short(
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = gpu(free_gib=1.05)
    monkeypatch.setattr("runtime.cli.plan_and_doctor.probe", lambda: machine(gpu=short, torch_cuda="13.0"))
    size = ["--width", "128", "--height", "128", "--frames", "17"]
    model = ["--model", str(tiny("wan2.2-a14b").directory)]
    result, text = answer(["plan", "a red boat", *model, *size], capsys)
    assert " of free video memory." in text
    assert "--offload sequential" in text
    assert [strategy["taken"] for strategy in result["plan"]["ladder"]].count(True) == 1
    lacks = {strategy["lacks"] for strategy in result["plan"]["ladder"] if strategy["quantization"] == "bnb-4bit"}
    assert lacks == {"bitsandbytes is not installed"}
    assert "unavailable: bitsandbytes is not" in text


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
    assert len(result["ladder"]) == (9 if with_gpu else 2)
    for strategy in result["ladder"]:
        assert not strategy["taken"] and strategy["peak_bytes"] > 0
        assert strategy["title"] in text
    assert text.count("too little") + text.count("unavailable: ") == len(result["ladder"])
    assert ("too little memory" in text) != with_gpu
    assert run([*arguments, "--width", "833", "--json"]) == 2
    assert "ladder" not in json.loads(capsys.readouterr().out)


def test_models_list_names_damaged_models(
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


def test_times_in_a_prompt_that_cannot_be_read_are_refused(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "[1-2s: jumps]", "--model", "framepack-i2v", "--seconds", "3"]
    result, text = answer([*command, "--image", str(ROOT / "examples" / "boat.png")], capsys, code=2)
    assert result["error"]["code"] == "planner.prompt_times"
    assert len(text.splitlines()) == 2
