"""engine.json survives everything, and nothing in it is believed."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.engines import manifest
from runtime.planner.engine_index import UNREADABLE_KEY, EngineRecord
from tests.engines.made import key, put, same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of one whole engine."""
    path = tmp_path / key().digest()
    path.mkdir()
    put(path, key())
    return path


@pytest.mark.parametrize("error", [0.0, 1e-6, math.inf, math.nan])
def test_what_is_written_is_read(folder: Path, error: float) -> None:
    record = put(folder, key(), error=error, detail="“ü” \ud800 \x1b[31m", pinned=True, problem="it is odd")
    read = manifest.read(folder)
    # What is not finite has no number.
    assert same(read, replace(record, error=error if math.isfinite(error) else math.nan))
    assert manifest.check_hashes(folder, record) is None


def spoil(folder: Path, **changes: Any) -> EngineRecord:
    """Change some of what engine.json holds, and read it."""
    path = folder / manifest.NAME
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "absent"}))
    return manifest.read(folder)


FIELDS = sorted({*EngineRecord.__dataclass_fields__, "format"} - {"file_bytes"})


@pytest.mark.parametrize("value", [[], {}, True, 7, "text", None, -1, 1e999, 10**400, "absent"], ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_wrong_types_are_a_problem_and_never_an_exception(folder: Path, name: str, value: Any) -> None:
    before = manifest.read(folder)
    record = spoil(folder, **{name: value})
    if same(record, before) or record.problem is None:
        # Some of the values are right for some of the fields.
        assert type(getattr(record, name)) in {bool, str, float, type(None)} or record.loras == ()
        assert record.key == key()
    elif name == "problem":
        assert record.problem
    else:
        assert record.key == UNREADABLE_KEY
        assert record.id == folder.name
        assert not record.usable


def test_another_engines_key_is_a_problem(folder: Path) -> None:
    other = key(versions=(("torch", "2.14.0"),))
    record = spoil(folder, key=other.to_json())
    assert record.problem == "engine.json was changed, or is another engine's"
    assert record.key == UNREADABLE_KEY
    record = spoil(folder, key=other.to_json(), id=other.digest())
    assert record.problem == "engine.json was changed, or is another engine's"


FILE = {"name": "engine.pt2", "bytes": 600, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        [FILE | {"name": "../engine.pt2"}],
        [FILE | {"name": "/etc/passwd"}],
        [FILE | {"name": "a\\b"}],
        [FILE | {"name": "C:x"}],
        [FILE | {"name": ".."}],
        [FILE | {"name": ""}],
        [FILE | {"name": "a\0"}],
        [FILE | {"bytes": -1}],
        [FILE | {"sha256": "0" * 63 + "\n"}],
        [FILE | {"sha256": None}],
        [FILE, None],
    ],
)
def test_files_that_cannot_be_are_a_problem(folder: Path, files: list[Any]) -> None:
    assert "file" in str(spoil(folder, files=files).problem)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut short or not JSON"),
        (b"{", "cut short or not JSON"),
        (b"\xff\xfe\x00", "cut short or not JSON"),
        (b"[" * 100_000, "cut short or not JSON"),
        (b"null", "not an engine's"),
        (b"[]", "not an engine's"),
        (b"{}", "not an engine's"),
        (b'{"format": 2}', "its format is 2, not 1"),
        (b'{"format": NaN}', "holds NaN"),
        (b'{"format": ' + b"1" * 5000 + b"}", "cannot be used"),
        (b" " * (2 << 20), "too large"),
    ],
    ids=range(11),
)
def test_what_is_no_manifest_is_a_problem(folder: Path, content: bytes, said: str) -> None:
    (folder / manifest.NAME).write_bytes(content)
    record = manifest.read(folder)
    assert said in str(record.problem)
    assert record.key == UNREADABLE_KEY


def test_any_cut_is_a_problem(folder: Path) -> None:
    whole = (folder / manifest.NAME).read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        (folder / manifest.NAME).write_bytes(whole[:length])
        assert manifest.read(folder).problem


def test_a_manifest_that_is_no_file_is_a_problem(folder: Path) -> None:
    path = folder / manifest.NAME
    path.rename(folder / "aside")
    assert manifest.read(folder).problem == "engine.json is missing"
    path.mkdir()
    assert manifest.read(folder).problem == "engine.json is not a file"
    path.rmdir()
    path.symlink_to(folder / "aside")
    assert manifest.read(folder).problem == "engine.json is not a file"
    path.unlink()
    os.mkfifo(path)
    assert manifest.read(folder).problem == "engine.json is not a file"
    assert manifest.read(folder / "gone").problem == "engine.json is missing"


def test_damaged_engine_files_are_named(folder: Path, tmp_path: Path) -> None:
    record, engine = manifest.read(folder), folder / "engine.pt2"
    whole = engine.read_bytes()
    flipped = bytearray(whole)
    flipped[300] ^= 1
    engine.write_bytes(flipped)
    assert manifest.check_sizes(folder, record) is None
    assert manifest.check_hashes(folder, record) == "engine.pt2 was changed since it was built"
    engine.write_bytes(whole[:-1])
    assert manifest.check_sizes(folder, record) == "engine.pt2 is cut short: 599 of 600 bytes"
    engine.write_bytes(b"")
    assert manifest.check_hashes(folder, record) == "engine.pt2 is cut short: 0 of 600 bytes"
    engine.write_bytes(whole + b"x")
    assert manifest.check_sizes(folder, record) == "engine.pt2 is too long: 601 bytes, not 600"
    engine.rename(tmp_path / "outside")
    assert manifest.check_sizes(folder, record) == "engine.pt2 is missing"
    engine.symlink_to(tmp_path / "outside")
    assert manifest.check_sizes(folder, record) == "engine.pt2 is not a file"
    engine.unlink()
    engine.mkdir()
    assert manifest.check_hashes(folder, record) == "engine.pt2 is not a file"


def test_files_beside_the_engine_count(folder: Path) -> None:
    (folder / "engine.onnx.data").write_bytes(b"weights")
    files = manifest.hashed_files(folder, "engine.pt2")
    assert [(file.name, file.bytes) for file in files] == [("engine.pt2", 600), ("engine.onnx.data", 7)]
    record = replace(manifest.read(folder), files=files)
    (folder / "engine.onnx.data").write_bytes(b"weighty")
    assert manifest.check_hashes(folder, record) == "engine.onnx.data was changed since it was built"
