"""Packed requirements are unpacked unchanged, in any order of arrival."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu.pack import exact, pack, read, write_script

METADATA = "Metadata-Version: 2.1\nName: made\nVersion: 1\n"


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("xz") is None, reason="needs bash and xz")
def test_parts_may_arrive_one_by_one(tmp_path: Path) -> None:
    wheel, folder, there = tmp_path / "made.whl", tmp_path / "parts", tmp_path / "there"
    folder.mkdir()
    noise = os.urandom(250_000)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "made/__init__.py", "from pathlib import Path\nsize = len(Path(__file__).with_name('x').read_bytes())\n"
        )
        archive.writestr("made/x", noise)
        archive.writestr("made/stubs/y", b"not wanted")
        archive.writestr("made.pth", "import made; made.started = True\n")
        archive.writestr("made-1.dist-info/METADATA", METADATA)
    paths = pack([wheel], folder, "base", 100_000)
    assert [path.stat().st_size <= 100_000 for path in paths] == [True] * 3
    write_script(folder, {"base": paths})
    printed = []
    for part in reversed(paths):
        arrived = tmp_path / f"call {part.name}"
        arrived.mkdir()
        for path in (part, folder / "unpack.sh"):
            shutil.copy(path, arrived)
        show = "import json\ntry:\n import made; print(json.dumps([made.size, made.started]))\n"
        show += "except ImportError: print('{}')"
        command = f'. {arrived.as_posix()!r}/unpack.sh && {sys.executable!r} -c "$SHOW"'
        environment = os.environ | {"TANDEM_THERE": str(there), "SHOW": show}
        done = subprocess.run(["bash", "-euc", command], env=environment, capture_output=True, text=True, check=True)
        printed.append(done.stdout.splitlines())
    assert printed[0] == ["base: 1 of 3 parts arrived", "{}"]
    assert json.loads(printed[2][0]) == [len(noise), True]
    assert not (there / "site" / "made" / "stubs").exists()


def test_packed_versions_are_the_installed_ones(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text('# why\nA_b==1.0; python_version >= "3.11"\na-b==0.9; python_version < "3.11"\nc>=2  # any\n')
    assert exact(read(file)) == {"a-b": "1.0"}
