"""Folders for temporary files: those of killed processes are removed, and no others."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtime.core.locks import remove_scratch_folders, scratch_folder

ROOT = Path(__file__).parents[2]
# Each waits in a process of its own, with its folder in the system's folder for temporary files.
HOLDERS = {
    "a folder": "from runtime.core.locks import scratch_folder\nwith scratch_folder() as folder: wait()",
    "a folder that is being removed": (
        "import shutil\nfrom runtime.core.locks import scratch_folder\nremove = shutil.rmtree\n"
        "def slow(*arguments, **options):\n    remove(*arguments, **options)\n    wait()\n"
        "with scratch_folder() as folder:\n    (folder / 'part').mkdir()\n    shutil.rmtree = slow"
    ),
    "a store": (
        "import sys\nfrom pathlib import Path\nfrom runtime.queue.store import open_store\n"
        "store = open_store(Path(sys.executable))\nassert store.temporary and store.path\nwait()"
    ),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder as the system's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("holder", HOLDERS)
def test_folders_of_killed_processes_are_removed(holder: str, temporary: Path) -> None:
    code = "def wait():\n    print(flush=True)\n    input()\n" + HOLDERS[holder]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with scratch_folder() as own:
            remove_scratch_folders()
            assert own.is_dir()
            assert len(list(temporary.iterdir())) == 2
        other.kill()
    assert len(list(temporary.iterdir())) == 1
    remove_scratch_folders()
    assert list(temporary.iterdir()) == []


def test_new_folders_without_a_lock_are_kept(temporary: Path) -> None:
    for name in ("tandem-scratch-new", "tandem-scratch-old", "tandem-build-old"):
        (temporary / name).mkdir()
        (temporary / name / "file").touch()
        if name.endswith("old"):
            os.utime(temporary / name, (1.0, 1.0))
    remove_scratch_folders()
    assert {path.name for path in temporary.iterdir()} == {"tandem-scratch-new", "tandem-build-old"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_folders_of_other_users_are_kept(temporary: Path) -> None:
    theirs = temporary / "tandem-scratch-theirs"
    theirs.mkdir()
    os.utime(theirs, (1.0, 1.0))
    os.chown(theirs, 12345, 12345)
    remove_scratch_folders()
    assert theirs.is_dir()
