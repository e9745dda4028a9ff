"""Standard streams that are closed, full or without a reader."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app_server import ROOT, environment
from tests.facts import fact

if sys.platform == "win32":
    pytest.skip("needs a POSIX shell", allow_module_level=True)

_VIDEO = ("generate", "a red boat", "--width", "64", "--height", "64", "--frames", "1", "--steps", "1", "--out")


def run(cache_dir: Path, arguments: tuple[str, ...], redirections: str) -> subprocess.CompletedProcess[str]:
    """Run the command line by a shell, with redirections; standard output is in the result, also what is redirected."""
    command = f"exec {shlex.join([sys.executable, 'app.py', *arguments])} {redirections}"
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        env=environment() | {"TANDEM_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_none(redirections: str, tmp_path: Path) -> None:
    done = run(tmp_path, ("jobs", "list", "--json"), redirections)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert done.stdout.startswith("{") == (">&-" not in redirections.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("models", "list"), ("jobs", "list", "--json"), ("jobs", "--help")])
def test_a_full_standard_output_is_a_user_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, arguments, ">/dev/full")
    assert done.returncode == 2
    *_, what, remedy = done.stderr.splitlines()
    assert what == f"Error: {fact('cli.output_unwritable', error=os.strerror(28))}"
    assert remedy.startswith("To do: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_error_stops_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, ("jobs", "list", "--json"), "2>/dev/full").stdout.startswith("{")
    assert run(tmp_path, ("jobs", "show", "1a2b"), "2>/dev/full").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_video_is_made_without_standard_streams(redirections: str, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    assert run(tmp_path, (*_VIDEO, str(out)), redirections).returncode == (2 if "full" in redirections else 0)
    assert out.is_file()
