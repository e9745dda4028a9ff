"""Findings of `doctor` on several machines: state, code and data, and a fix for every problem; packages; probe."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import MachineError
from runtime.core.facts import Fact, render
from runtime.machine.doctor import Finding, check, examine
from runtime.machine.packages import PACKAGES, Package, import_problem, installed_as, installed_versions
from runtime.machine.probe import Machine, probe, visible
from tests.plans import GIB, gpu, machine

# Without packages nothing is imported, which takes seconds.
BARE = machine(packages=())
ON_RTX = replace(machine(gpu=gpu(capability=(8, 9)), torch_cuda="13.0", packages=()), driver_cuda=(13, 0))
ON_GPU = replace(machine(gpu=gpu(), torch_cuda="13.0", packages=()), driver_cuda=(13, 0))


def findings(on: Machine, folder: Path, engines: Path | None = None) -> dict[str, Finding]:
    """Return the findings by name."""
    return {found.name: found for found in examine(on, folder, engines or folder / "engines")}


@pytest.mark.parametrize(
    ("on", "name", "state", "code", "data"),
    [
        (BARE, "GPU", "note", "doctor.no_gpu", {}),
        (replace(BARE, system="Darwin arm64", unified_memory=True), "GPU", "note", "doctor.no_gpu_unified", {}),
        (
            replace(BARE, gpu_problem=Fact("machine.driver_failed", {"error": "Unknown"})),
            "GPU",
            "problem",
            "machine.driver_failed",
            {"error": "Unknown"},
        ),
        (ON_GPU, "GPU", "ok", "doctor.gpu", {"name": "Test GPU", "driver": "580.0", "cuda": "13.0"}),
        (BARE, "CPU", "ok", "doctor.cpu", {"cores": 2, "system": "Linux x86_64"}),
        (BARE, "Memory", "ok", "doctor.memory_and_swap", {"swap": 32 * GIB, "swap_free": 32 * GIB}),
        (machine(ram_free_gib=1, packages=()), "Memory", "problem", "doctor.memory_low", {"least": 2 * GIB}),
        (BARE, "C++ compiler", "ok", "doctor.path", {"path": BARE.compiler}),
        (
            replace(BARE, compiler=None),
            "C++ compiler",
            "note",
            "doctor.no_compiler",
            {"cause": Fact("machine.no_compiler")},
        ),
        (
            replace(BARE, compiler=None, system="Darwin arm64"),
            "C++ compiler",
            "note",
            "doctor.no_compiler",
            {"cause": Fact("machine.no_compiler_macos")},
        ),
        (machine(packages=(("onnxruntime", "1.24.1"),)), "ONNX Runtime", "ok", "doctor.version", {"version": "1.24.1"}),
        (
            BARE,
            "ONNX Runtime",
            "note",
            "doctor.installer_package_missing",
            {"use": "ONNX Runtime engines"},
        ),
        (ON_GPU, "TensorRT", "note", "doctor.installer_package_missing", {}),
        (
            ON_GPU,
            "bitsandbytes",
            "note",
            "doctor.package_missing",
            {"use": "8-bit and 4-bit weights", "install": f"{sys.executable} -m pip install bitsandbytes"},
        ),
    ],
)
def test_findings(on: Machine, name: str, state: str, code: str, data: dict[str, object], tmp_path: Path) -> None:
    found = findings(on, tmp_path)[name]
    assert (found.state, found.fact.code) == (state, code)
    assert data.items() <= found.fact.data.items()


@pytest.mark.parametrize(
    ("on", "cause"),
    [
        (machine(gpu=gpu(), packages=()), "machine.torch_without_cuda"),
        (replace(ON_GPU, driver_cuda=(12, 4)), "machine.driver_too_old"),
        (replace(ON_GPU, gpus=(gpu(capability=(6, 1)),)), "machine.gpu_too_old"),
    ],
)
def test_an_unusable_gpu_is_a_problem_with_its_cause(on: Machine, cause: str, tmp_path: Path) -> None:
    found = findings(on, tmp_path)["GPU"]
    assert (found.state, found.fact.code, found.fact.data["cause"].code) == ("problem", "doctor.gpu_unusable", cause)
    assert found.to_json()["fix"] == render(found.fact.data["cause"]).remedy != ""


def test_an_installed_package_that_cannot_be_imported_is_to_be_reinstalled(tmp_path: Path) -> None:
    found = findings(replace(ON_GPU, packages=(("bitsandbytes", "0.48.0"),)), tmp_path)["bitsandbytes"]
    assert (found.state, found.fact.code) == ("note", "doctor.package_unusable")
    assert found.fact.data["cause"].data["error"].startswith("ModuleNotFoundError")
    text = found.to_json()
    assert (found.fact.data["version"], text["detail"]) == ("0.48.0", str(found.fact))
    assert text["fix"].endswith("pip install --force-reinstall bitsandbytes==0.48.0`")


def test_an_error_of_a_check_is_a_problem() -> None:
    def fail() -> Fact:
        raise MachineError("machine.package_missing", package="PyTorch")

    assert check("x", fail) == Finding("x", "problem", Fact("machine.package_missing", {"package": "PyTorch"}))
    assert check("x", lambda: Fact("doctor.no_gpu")).state == "ok"


@pytest.mark.parametrize("on", [BARE, ON_GPU, replace(ON_GPU, driver_cuda=(11, 8))])
def test_every_problem_has_a_fix(on: Machine, tmp_path: Path) -> None:
    found = [one.to_json() for one in findings(on, tmp_path).values()]
    assert all(one["fix"] for one in found if one["state"] == "problem")
    assert json.loads(json.dumps(found))


def test_packages_for_gpus_are_not_missing_on_a_cpu(tmp_path: Path) -> None:
    titles = {package.title for package in PACKAGES if package.needs_gpu}
    assert titles.isdisjoint(findings(BARE, tmp_path))
    assert titles <= set(findings(ON_RTX, tmp_path))
    assert titles - set(findings(ON_GPU, tmp_path)) == {"TensorRT for RTX"}


def test_an_engine_folder_outside_the_cache_is_checked(tmp_path: Path) -> None:
    assert "Engine folder" not in findings(BARE, tmp_path)
    assert (
        str(tmp_path / "far")
        == findings(BARE, tmp_path / "near", tmp_path / "far")["Engine folder"].fact.data["folder"]
    )


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
    error = "OSError: libfoo.so: cannot open shared object file"
    assert import_problem(package("broken")) == Fact("package.import_failed", {"error": error})
    assert import_problem(package("endless"), seconds=0.5) == Fact("package.import_slow", {"seconds": 0.5})
    if sys.platform != "win32":
        assert import_problem(package("crashing")) == Fact("package.import_crashed", {"signal": signal.SIGABRT.value})
    assert import_problem(package("leaving")) == Fact("package.import_ended", {"exit_code": 3})


def test_a_package_may_leave_a_program_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the output of the process that imported the package."""
    running = tmp_path / "running"
    running.touch()
    program = f"import os, time\nwhile os.path.exists({str(running)!r}): time.sleep(0.1)"
    text = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}])"
    (tmp_path / "starting.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    try:
        assert import_problem(package("starting"), seconds=30) is None
    finally:
        running.unlink()


def test_versions_come_from_metadata() -> None:
    assert installed_as(package("x")) == ("pytest", pytest.__version__)
    assert installed_as(Package("x", "X", ("no-such-distribution",), "x", "nothing")) is None
    code = "import sys; from runtime.machine.probe import probe; probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_machine_as_json(tmp_path: Path) -> None:
    here = probe(tmp_path / "not" / "there")
    assert json.loads(json.dumps(here.to_json()))["cores"] == here.cores
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
def test_visible_gpus(setting: str | None, indices: list[int]) -> None:
    assert visible(setting, ["GPU-a1", "GPU-b2", "GPU-c3"]) == indices
