"""Commands and the web app with a cache folder that is read-only, or belongs to another user."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.queue.store import JobStore
from tests.app_server import ROOT, environment, free_port
from tests.facts import fact

if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None:
    pytest.skip("needs root on Linux, and setpriv", allow_module_level=True)

pytestmark = pytest.mark.slow

# Root without its rights on files of others.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
OTHER_USER = 12345
# Remedies that name the folder to change.
REMEDY = "TANDEM_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    JobStore(folder / "jobs.sqlite").close()
    (folder / "settings.json").write_text("{}")
    (folder / "weights" / "mine").mkdir(parents=True)
    return folder


def run(cache_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, without arguments the web app."""
    app = arguments or ("--no-browser", "--port", str(free_port()))
    return subprocess.run(
        [*UNPRIVILEGED, sys.executable, "app.py", *app],
        cwd=ROOT,
        env=environment() | {"TANDEM_CACHE_DIR": str(cache_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(cache_dir: Path, *arguments: str) -> str:
    """Return what is wrong; the next line has to name the remedy, and nothing follows."""
    done = run(cache_dir, *arguments)
    printed = done.stdout + done.stderr
    assert done.returncode == 2, printed
    what, remedy = done.stderr.splitlines()[-2:]
    assert what.startswith("Error: ") and remedy.startswith("To do: ") and REMEDY in remedy
    assert "Traceback" not in printed and "Internal error" not in printed
    return what.removeprefix("Error: ")


def unreadable(code: str, path: Path) -> str:
    """Return what a refusal of this code says of a file or folder."""
    return str(fact(code, file=path, folder=path, variable=REMEDY))


def give_away(path: Path, mode: int) -> None:
    path.chmod(mode)
    os.chown(path, OTHER_USER, OTHER_USER)


@pytest.fixture
def read_only(small_disk: Path) -> Path:
    folder = small_disk / "cache"
    folder.mkdir()
    JobStore(folder / "jobs.sqlite").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    return folder


def test_a_read_only_cache(read_only: Path) -> None:
    reason = os.strerror(errno.EROFS)
    assert refusal(read_only) == str(fact("pipeline.outputs_folder", folder=read_only / "outputs", reason=reason))
    assert refusal(read_only, "jobs", "list") == str(fact("queue.store_read_only", file=read_only / "jobs.sqlite"))
    for works in (["--version"], ["models", "list"], ["plan", "a red boat"]):
        assert run(read_only, *works).returncode == 0, works
    doctor = run(read_only, "doctor")
    assert doctor.returncode == 2 and REMEDY in doctor.stdout


def test_a_cache_of_another_user(cache: Path) -> None:
    give_away(cache, 0o700)
    assert run(cache, "--version").returncode == 0
    for arguments in ([], ["plan", "a red boat"]):
        assert refusal(cache, *arguments) == unreadable("settings.file_unreadable", cache / "settings.json")


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("jobs.sqlite", ("jobs", "list"), "queue.store_read_only"),
        ("settings.json", ("plan", "a red boat"), "settings.file_unreadable"),
        ("weights", ("models", "list"), "model.weights_folder_unreadable"),
        ("weights", ("doctor",), ""),
    ],
)
def test_a_file_of_another_user(name: str, arguments: tuple[str, ...], code: str, cache: Path) -> None:
    give_away(cache / name, 0o600)
    before = (cache / "jobs.sqlite").read_bytes()
    if code:
        assert refusal(cache, *arguments) == unreadable(code, cache / name)
    else:
        done = run(cache, *arguments)
        assert done.returncode == 2 and "Weights folder" in done.stdout
    assert (cache / "jobs.sqlite").read_bytes() == before
    assert not list(cache.glob("*.damaged-*"))
