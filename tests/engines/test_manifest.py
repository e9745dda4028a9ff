"""engine.json: written and read, never trusted; every damage is a problem of the record."""

import itertools
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.sessions import open_session
from runtime.planner.choice.engine_index import UNREADABLE_KEY, EngineRecord
from tests.engines.engine_files import key, put, record, same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of one whole engine."""
    path = tmp_path / key().digest()
    path.mkdir()
    put(path, key())
    return path


DETAIL = Fact("engine.stored_text", {"text": "“ü” \ud800 \x1b[31m"})
PROBLEM = Fact("engine.file_changed", {"file": "engine.pt2"})


@pytest.mark.parametrize("error", [0.0, 1e-6, math.inf, math.nan])
def test_record_survives_writing(folder: Path, error: float) -> None:
    record = put(folder, key(), error=error, detail=DETAIL, pinned=True, problem=PROBLEM)
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


VALUES: tuple[Any, ...] = ([], {}, True, 7, "text", None, -1, 1e999, 10**400, "absent")


def test_values_of_other_types_are_a_problem(folder: Path, subtests: pytest.Subtests) -> None:
    before, whole = manifest.read(folder), (folder / manifest.NAME).read_bytes()
    for name, value in itertools.product(FIELDS, VALUES):
        with subtests.test(name=name, value=value):
            (folder / manifest.NAME).write_bytes(whole)
            record = spoil(folder, **{name: value})
            if same(record, before) or record.problem is None:
                # Some of the values are right for some of the fields.
                assert type(getattr(record, name)) in {bool, str, float, Fact, type(None)} or record.loras == ()
                assert record.key == key()
            elif name == "problem":
                assert record.problem
            else:
                assert record.key == UNREADABLE_KEY
                assert record.id == folder.name
                assert not record.usable


@pytest.mark.parametrize("data", [[], [1], "text", 7, {"cause": {"code": "engine.failed", "data": [1]}}])
def test_a_fact_with_data_of_another_type_is_a_problem(folder: Path, data: Any) -> None:
    record = spoil(folder, detail={"code": "engine.not_compared_yet", "data": data})
    assert record.problem is not None or not data
    assert record.id == folder.name


def test_another_engines_key_is_a_problem(folder: Path) -> None:
    other = key(versions=(("torch", "2.14.0"),))
    record = spoil(folder, key=asdict(other))
    assert record.problem == Fact("engine.manifest_changed")
    assert record.key == UNREADABLE_KEY
    record = spoil(folder, key=asdict(other), id=other.digest())
    assert record.problem == Fact("engine.manifest_changed")


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
def test_invalid_file_entries_are_a_problem(folder: Path, files: list[Any]) -> None:
    problem = spoil(folder, files=files).problem
    assert problem is not None
    assert problem.code == "engine.manifest_invalid"
    assert problem.data["field"].startswith("files.")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", Fact("engine.manifest_damaged")),
        (b"{", Fact("engine.manifest_damaged")),
        (b"\xff\xfe\x00", Fact("engine.manifest_damaged")),
        (b"[" * 100_000, Fact("engine.manifest_damaged")),
        (b"null", Fact("engine.manifest_foreign")),
        (b"[]", Fact("engine.manifest_foreign")),
        (b"{}", Fact("engine.manifest_foreign")),
        (b'{"format": 3}', Fact("engine.manifest_format", {"format": "3", "expected": 2})),
        (b'{"format": true}', Fact("engine.manifest_format", {"format": "True", "expected": 2})),
        (b'{"format": NaN}', Fact("engine.manifest_damaged")),
        (b'{"format": ' + b"1" * 5000 + b"}", Fact("engine.manifest_damaged")),
        (b'{"format": 2}', Fact("engine.manifest_invalid", {"field": "id", "error": "Field required"})),
        (b" " * (2 << 20), Fact("engine.manifest_too_large")),
    ],
    ids=range(13),
)
def test_invalid_manifest_is_a_problem(folder: Path, content: bytes, problem: Fact) -> None:
    (folder / manifest.NAME).write_bytes(content)
    record = manifest.read(folder)
    assert record.problem == problem
    assert record.key == UNREADABLE_KEY


def test_truncated_manifest_is_a_problem(folder: Path) -> None:
    whole = (folder / manifest.NAME).read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        (folder / manifest.NAME).write_bytes(whole[:length])
        assert manifest.read(folder).problem


def test_manifest_that_is_not_a_regular_file_is_a_problem(folder: Path) -> None:
    path = folder / manifest.NAME
    path.rename(folder / "aside")
    assert manifest.read(folder).problem == Fact("engine.file_missing", {"file": "engine.json"})
    path.mkdir()
    assert manifest.read(folder).problem == Fact("engine.file_not_regular", {"file": "engine.json"})
    path.rmdir()
    path.symlink_to(folder / "aside")
    assert manifest.read(folder).problem == Fact("engine.file_not_regular", {"file": "engine.json"})
    path.unlink()
    os.mkfifo(path)
    assert manifest.read(folder).problem == Fact("engine.file_not_regular", {"file": "engine.json"})
    assert manifest.read(folder / "gone").problem == Fact("engine.file_missing", {"file": "engine.json"})


def other_size(size: int) -> Fact:
    """Return the problem of an engine file that should have 600 bytes."""
    return Fact("engine.file_other_size", {"file": "engine.pt2", "size": size, "expected": 600})


def test_damaged_engine_files_are_named(folder: Path, tmp_path: Path) -> None:
    record, engine = manifest.read(folder), folder / "engine.pt2"
    whole = engine.read_bytes()
    flipped = bytearray(whole)
    flipped[300] ^= 1
    engine.write_bytes(flipped)
    assert manifest.check_sizes(folder, record) is None
    assert manifest.check_hashes(folder, record) == Fact("engine.file_changed", {"file": "engine.pt2"})
    engine.write_bytes(whole[:-1])
    assert manifest.check_sizes(folder, record) == Fact(
        "engine.file_other_size", {"file": "engine.pt2", "size": 599, "expected": 600}
    )
    engine.write_bytes(b"")
    assert manifest.check_hashes(folder, record) == Fact(
        "engine.file_other_size", {"file": "engine.pt2", "size": 0, "expected": 600}
    )
    engine.write_bytes(whole + b"x")
    assert manifest.check_sizes(folder, record) == Fact(
        "engine.file_other_size", {"file": "engine.pt2", "size": 601, "expected": 600}
    )
    engine.rename(tmp_path / "outside")
    assert manifest.check_sizes(folder, record) == Fact("engine.file_missing", {"file": "engine.pt2"})
    engine.symlink_to(tmp_path / "outside")
    assert manifest.check_sizes(folder, record) == Fact("engine.file_not_regular", {"file": "engine.pt2"})
    engine.unlink()
    engine.mkdir()
    assert manifest.check_hashes(folder, record) == Fact("engine.file_not_regular", {"file": "engine.pt2"})


def test_data_files_are_part_of_the_engine(folder: Path) -> None:
    (folder / "engine.onnx.data").write_bytes(b"weights")
    files = manifest.hashed_files(folder, "engine.pt2")
    assert [(file.name, file.bytes) for file in files] == [("engine.pt2", 600), ("engine.onnx.data", 7)]
    record = replace(manifest.read(folder), files=files)
    (folder / "engine.onnx.data").write_bytes(b"weighty")
    assert manifest.check_hashes(folder, record) == Fact("engine.file_changed", {"file": "engine.onnx.data"})


@pytest.mark.parametrize(
    ("swap", "most_read", "loaded"),
    [("replaced", 4, b"good"), ("replaced", 0, b"good"), ("written", 4, b"good"), ("written", 0, b"evil")],
)
def test_a_file_that_changes_after_its_check_is_not_used(
    swap: str, most_read: int, loaded: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and times are the same. A file that is too large to be read once is mapped."""
    monkeypatch.setattr(manifest, "_MOST_READ", most_read)
    file = tmp_path / "engine.pt2"
    file.write_bytes(b"good")
    known = record(key(), files=manifest.hashed_files(tmp_path, file.name))
    status = file.stat()
    closed, content = [], []

    class Opened:
        def close(self) -> None:
            closed.append(True)

    def open_engine(folder: Path, _record: object, given: manifest.Content, **_: object) -> Opened:
        target = folder / "other" if swap == "replaced" else file
        target.write_bytes(b"evil")
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        target.replace(file)
        content.append(given[:])
        return Opened()

    monkeypatch.setattr("runtime.engines.sessions.inductor.open_engine", open_engine)
    with pytest.raises(EngineError) as error:
        open_session(tmp_path, known, device="cpu", weights=dict)
    assert error.value.fact.data["cause"] == Fact("engine.file_changed", {"file": file.name})
    assert closed and content == [loaded]
