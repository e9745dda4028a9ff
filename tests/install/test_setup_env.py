"""Decisions of tools/setup_env.py (PyTorch build, disk space, macOS), and the consistency of install.bat."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

from runtime.machine.compatibility import tensorrt_rtx_problem
from tests.install.conftest import REPO
from tests.plans import gpu, machine

GPUS = [pytest.param(False, id="no-gpu"), pytest.param(True, id="gpu")]


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", REPO / "tools/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "check_disk", lambda nvidia: None)
    return module


def offer(monkeypatch: pytest.MonkeyPatch, module: ModuleType, configured: list[str], **indexes: list[str]) -> None:
    """Make pip find these builds of PyTorch on the configured, CPU and CUDA indexes."""
    urls = {module.CPU_INDEX: indexes.get("cpu", []), module.CUDA_INDEX: indexes.get("cuda", [])}
    monkeypatch.setattr(module, "torch_versions", lambda *options: urls[options[1]] if options else configured)


PYPI = ["2.15.0", "2.13.0", "2.11.0"]


def test_linux_without_gpu_uses_a_cpu_build_of_the_configured_index(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    offer(monkeypatch, setup_env, ["2.13.0+cpu", *PYPI], cpu=["2.13.0+cpu"])
    assert setup_env.choose_torch(False)[:2] == ("torch==2.13.0+cpu", [])


def test_linux_without_gpu_uses_the_cpu_index(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    offer(monkeypatch, setup_env, PYPI, cpu=["2.13.0+cpu"])
    assert setup_env.choose_torch(False)[:2] == ("torch==2.13.0+cpu", ["--index-url", setup_env.CPU_INDEX])


def test_linux_without_gpu_or_cpu_index_uses_the_cuda_build_and_reports_it(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    offer(monkeypatch, setup_env, PYPI)
    requirement, index, size = setup_env.choose_torch(False)
    assert (requirement, index) == ("torch==2.13.0", [])
    assert "3 GB" in size
    assert "cannot be reached: using the default package, which contains CUDA" in capsys.readouterr().err


def test_linux_with_gpu_uses_no_cpu_build(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    offer(monkeypatch, setup_env, ["2.13.0+cpu", *PYPI])
    assert setup_env.choose_torch(True)[:2] == ("torch===2.13.0", [])


def test_windows(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    offer(monkeypatch, setup_env, PYPI, cuda=["2.13.0+cu130"])
    assert setup_env.choose_torch(False)[:2] == ("torch==2.13.0", [])
    assert setup_env.choose_torch(True)[:2] == ("torch==2.13.0+cu130", ["--index-url", setup_env.CUDA_INDEX])
    offer(monkeypatch, setup_env, PYPI)
    assert setup_env.choose_torch(True)[:2] == ("torch==2.13.0", [])


@pytest.mark.parametrize("nvidia", GPUS)
def test_mac_uses_the_default_package(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, nvidia: bool) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert setup_env.choose_torch(nvidia)[:2] == ("torch==2.13.0", [])


def test_an_unreachable_index_is_reported_before_a_download_is_announced(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    offer(monkeypatch, setup_env, [])
    with pytest.raises(setup_env.SetupError, match="cannot reach the package index"):
        setup_env.choose_torch(False)


@pytest.mark.parametrize(
    ("platform", "version", "nvidia", "suits"),
    [
        ("linux", "2.13.0+cpu", False, True),
        ("linux", "2.13.0", False, True),
        ("linux", "2.11.0+rocm6.4", False, True),
        ("linux", "2.13.0+cpu", True, False),
        ("linux", "2.13.0", True, True),
        ("linux", "2.10.0", True, False),
        ("linux", "2.14.0", False, False),
        ("win32", "2.13.0", True, False),
        ("win32", "2.13.0+cu130", True, True),
    ],
)
def test_an_installed_pytorch_is_used_if_it_suits(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, platform: str, version: str, nvidia: bool, suits: bool
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert setup_env.suits(version, nvidia) is suits


@pytest.mark.skipif(sys.platform == "win32", reason="scripts in its place need a POSIX shell")
def test_nvidia_smi_without_a_gpu_means_no_gpu(setup_env: ModuleType, tmp_path: Path) -> None:
    for name, script in {
        "none": "echo 'No devices were found'",
        "broken": "exit 9",
        "one": "echo 'GPU 0: Test'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    found = {name: setup_env.has_nvidia_gpu(str(tmp_path / name)) for name in ("none", "broken", "one", "absent")}
    assert found == {"none": False, "broken": False, "one": True, "absent": False}
    assert setup_env.has_nvidia_gpu("driver")
    assert not setup_env.has_nvidia_gpu("")


@pytest.mark.parametrize(("nvidia", "needed"), [(False, "3 GB"), (True, "18 GB")])
def test_a_nearly_full_disk_is_reported_first(
    monkeypatch: pytest.MonkeyPatch, setup_env: ModuleType, nvidia: bool, needed: str
) -> None:
    monkeypatch.undo()  # the real check_disk
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 * 10**9, 98 * 10**9, 2 * 10**9))
    monkeypatch.setattr(setup_env, "installed_torch", lambda: None)
    with pytest.raises(setup_env.SetupError, match=f"2.0 GB free; installing takes about {needed}"):
        setup_env.check_disk(nvidia)


def test_a_folder_that_no_virtual_environment_can_be_in_is_refused(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / f"a{os.pathsep}b"
    folder.mkdir()
    monkeypatch.setattr(setup_env, "VENV", folder / ".venv")
    with pytest.raises(setup_env.SetupError, match="no virtual environment can be made") as caught:
        setup_env.prepare_venv()
    assert str(folder) in caught.value.what and "move Tandem" in caught.value.remedy
    assert not any(folder.iterdir())


def test_tensorrt_for_rtx_is_installed_on_the_gpus_that_it_supports(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    (tmp_path / "requirements-gpu.txt").write_text("torchao==1\ntensorrt-rtx-cu13-libs==1.7\n", "utf-8")
    for capability in ("7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1"):
        with subtests.test(msg=capability), pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup_env, "ask_venv", lambda code, capability=capability: capability)
            installed: list[str] = []
            patch.setattr(setup_env, "pip", lambda *args, doing, installed=installed: installed.append(args[1]))
            setup_env.install_gpu_extras()
            major, minor = map(int, capability.split("."))
            supported = tensorrt_rtx_problem(machine(gpu=gpu(capability=(major, minor)))) is None
            assert installed == ["torchao==1", *(["tensorrt-rtx-cu13-libs==1.7"] if supported else [])]


def test_tensorrt_for_rtx_is_left_out_where_pytorch_finds_no_gpu(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "ask_venv", lambda code: None)
    assert not setup_env.has_rtx_gpu()


def test_the_torch_range_equals_the_requirements(setup_env: ModuleType) -> None:
    (low, high), text = setup_env.TORCH_RANGE, (REPO / "requirements.txt").read_text("utf-8")
    assert f"\ntorch>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}\n" in text
    assert low <= tuple(int(part) for part in setup_env.TORCH.split(".")[:2]) <= high


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-gpu.txt", "requirements-dev.txt"])
def test_requirements_are_pinned(name: str) -> None:
    lines = [line for line in (REPO / name).read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert all(
        re.match(r"[\w-]+(\[\w+\])?==[\d.]+(b\d+)?(; (python_version|platform_machine|sys_platform) .*)?$", line)
        for line in lines
        if not line.startswith("torch")
    )


# install.bat runs on Windows only; its text is checked.


def test_install_bat_is_consistent() -> None:
    text = (REPO / "install.bat").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n"), "cmd reads labels wrongly where lines end in LF"
    assert text.isascii()
    lines = text.decode().splitlines()
    labels = {line[1:] for line in lines if line.startswith(":")}
    code = "\n".join(line for line in lines if not line.startswith("rem"))
    assert set(re.findall(r"(?:goto|call) :?(\w+)", code)) == labels
    probe = next(line for line in lines if line.startswith('set "PROBE='))[len('set "PROBE=') : -1]
    assert '"' not in probe
    assert "%" not in probe
    assert subprocess.run([sys.executable, "-I", "-c", probe], check=False).returncode == 0
    assert r"tools\setup_env.py" in text.decode()
