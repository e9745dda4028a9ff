"""What `doctor` finds on machines of all kinds, and that every finding that asks for something says what to do."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from runtime.machine.packages import PACKAGES, Package, import_problem, installed_as, installed_versions
from runtime.machine.probe import Machine, probe, visible
from runtime.planner.doctor import Finding, examine
from tests.plans import gpu, machine

# Without packages nothing is imported, which takes seconds.
BARE = machine(packages=())
ON_GPU = replace(machine(gpu=gpu(), torch_cuda="13.0", packages=()), driver_cuda=(13, 0))


def findings(on: Machine, folder: Path, engines: Path | None = None) -> dict[str, Finding]:
    """Return the findings by name."""
    return {found.name: found for found in examine(on, folder, folder / "weights", engines or folder / "engines")}


@pytest.mark.parametrize(
    ("on", "name", "state", "detail", "fix"),
    [
        (BARE, "GPU", "note", "no NVIDIA GPU", ""),
        (replace(BARE, system="Darwin arm64", unified_memory=True), "GPU", "note", "memory it would share", ""),
        (replace(BARE, gpu_problem="the NVIDIA driver does not answer"), "GPU", "problem", "answer", "driver"),
        (machine(gpu=gpu(), packages=()), "GPU", "problem", "built without CUDA", "install"),
        (replace(ON_GPU, driver_cuda=(12, 4)), "GPU", "problem", "supports CUDA 12.4", "580 or later"),
        (
            replace(ON_GPU, gpus=(gpu(capability=(6, 1)),)),
            "GPU",
            "problem",
            "has no kernels for Test GPU",
            "built for CUDA 12.",
        ),
        (ON_GPU, "GPU", "ok", "driver 580.0 (CUDA 13.0)", ""),
        (BARE, "CPU", "ok", "2 cores, Linux x86_64", ""),
        (BARE, "Memory", "ok", "32.0 of 32.0 GiB of swap", ""),
        (machine(ram_free_gib=1, packages=()), "Memory", "problem", "1.0 of 24.0 GiB free", "Close"),
        (BARE, "C++ compiler", "ok", "g++", ""),
        (replace(BARE, compiler=None), "C++ compiler", "note", "Inductor", "Install g++"),
        (
            replace(BARE, compiler=None, system="Darwin arm64"),
            "C++ compiler",
            "note",
            "Inductor",
            "xcode-select",
        ),
        (machine(packages=(("onnxruntime", "1.24.1"),)), "ONNX Runtime", "ok", "1.24.1", ""),
        (BARE, "ONNX Runtime", "note", "not installed: no ONNX Runtime engines", "install.sh"),
        (ON_GPU, "TensorRT", "note", "not installed", "install.sh"),
        (ON_GPU, "bitsandbytes", "note", "no 8-bit and 4-bit weights", "pip install bitsandbytes"),
        (
            replace(ON_GPU, packages=(("bitsandbytes", "0.48.0"),)),
            "bitsandbytes",
            "note",
            "0.48.0, but it cannot be used: ModuleNotFoundError",
            "pip install --force-reinstall bitsandbytes==0.48.0",
        ),
    ],
)
def test_findings(on: Machine, name: str, state: str, detail: str, fix: str, tmp_path: Path) -> None:
    found = findings(on, tmp_path)[name]
    assert found.state == state
    assert detail in found.detail
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)


@pytest.mark.parametrize("on", [BARE, ON_GPU, replace(ON_GPU, driver_cuda=(11, 8))])
def test_whatever_is_a_problem_has_its_fix(on: Machine, tmp_path: Path) -> None:
    found = findings(on, tmp_path)
    assert all(one.fix for one in found.values() if one.state == "problem")
    assert json.loads(json.dumps([one.to_json() for one in found.values()]))


def test_what_only_a_gpu_uses_is_not_missed_on_a_cpu(tmp_path: Path) -> None:
    titles = {package.title for package in PACKAGES if package.needs_gpu}
    assert titles.isdisjoint(findings(BARE, tmp_path))
    assert titles <= set(findings(ON_GPU, tmp_path))


def test_an_engine_folder_elsewhere_is_looked_at(tmp_path: Path) -> None:
    assert "Engine folder" not in findings(BARE, tmp_path)
    assert str(tmp_path / "far") in findings(BARE, tmp_path / "near", tmp_path / "far")["Engine folder"].detail


def package(module: str) -> Package:
    """Return a package that is imported by that name."""
    return Package("x", "X", ("no-such-distribution", "pytest"), module, "nothing")


def test_why_a_package_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("fine", "print('hello')"),
        ("broken", "raise OSError('libfoo.so: cannot open shared object file')"),
        ("endless", "import time; time.sleep(60)"),
        ("crashing", "import os; os.abort()"),
        ("leaving", "import os; os._exit(3)"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_problem(package("fine")) is None
    assert import_problem(package("broken")) == "OSError: libfoo.so: cannot open shared object file"
    assert "longer than 0.5 seconds" in (import_problem(package("endless"), seconds=0.5) or "")
    assert "crashed" in (import_problem(package("crashing")) or "") or sys.platform == "win32"
    assert "exit code 3" in (import_problem(package("leaving")) or "")


def test_versions_come_from_metadata() -> None:
    assert installed_as(package("x")) == ("pytest", pytest.__version__)
    assert installed_as(Package("x", "X", ("no-such-distribution",), "x", "nothing")) is None
    code = "import sys; from runtime.machine.probe import probe; probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_this_machine_is_told_as_json(tmp_path: Path) -> None:
    here = probe(tmp_path / "not" / "there")
    assert json.loads(json.dumps(asdict(here)))["cores"] == here.cores
    assert here.disk_free_bytes
    assert here.packages == installed_versions()
    assert probe().disk_free_bytes is None


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0, 5, 1", [0]),
        ("1,1", [1]),
        ("GPU-b", [1]),
        ("GPU-c,0", [2, 0]),
        ("MIG-x", []),
    ],
)
def test_gpus_that_are_hidden_are_not_there(setting: str | None, indices: list[int]) -> None:
    assert visible(setting, ["GPU-a1", "GPU-b2", "GPU-c3"]) == indices
