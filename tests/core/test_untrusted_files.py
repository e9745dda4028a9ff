"""Reading files of unknown origin: what is no regular file, too large or no JSON is refused at once."""

import errno
import json
import logging
import sys
from pathlib import Path

import pytest

from runtime.core import log, settings
from runtime.core.digests import read_stored
from runtime.core.errors import ModelError, OutputError, SettingsError
from runtime.core.untrusted_files import (
    DuplicateNameError,
    NotRegularFileError,
    TooManyValuesError,
    open_file,
    parse_json,
    read_file,
    read_json,
)
from runtime.machine.probe import probe
from runtime.models.hub.files import read_manifest
from runtime.pipeline.history_file import HistoryFile
from runtime.queue.support_report import _tail
from runtime.video.mp4 import read_metadata
from tests.hostile_files import DEEP, HOSTILE

# A test that hangs fails: opening a FIFO waits for ever.
pytestmark = pytest.mark.timeout(30, func_only=True)


@pytest.mark.parametrize("kind", HOSTILE)
def test_each_of_these_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    HOSTILE[kind](path)
    with pytest.raises((OSError, ValueError)) as refused:
        read_json(path)
    if kind in {"fifo", "device", "folder"}:
        assert isinstance(refused.value, NotRegularFileError)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets only some users make links")
def test_links_are_followed_unless_excluded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1]
    with pytest.raises(OSError) as refused:
        open_file(tmp_path / "link", follow_links=False)
    assert refused.value.errno == errno.ELOOP
    assert read_file(tmp_path / "file", 3) == b"[1]"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_file(tmp_path / "file", 2)


@pytest.mark.parametrize("data", [b"NaN", b"-Infinity", b"1e999", b'{"a": [-1e999]}'])
def test_numbers_that_are_not_finite_are_accepted_on_request_only(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(data)
    parse_json(data, infinite=True)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[1] x", b"'a'", b'"\\ud800"', DEEP, b"[" * 300 + b"]" * 300, b"1" * 5_000]
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(data)


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(DuplicateNameError) as refused:
        parse_json(b'{"x": {"a": 1, "b": 2, "a": 3}}')
    assert refused.value.name == "a"
    values = {"a": 1, "b": [1.5, {"a": None}], "ü": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")}
    assert parse_json(json.dumps(values).encode()) == values


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"[]," * 900_000 + b"[]]",
        b"[" + b"1," * 20_000 + b"1]",
        b'{"a":[' + b"1," * 10_000 + b'1],"b":{"c":[' + b"1," * 10_000 + b"1]}}",
        json.dumps(dict.fromkeys(map(str, range(20_001)))).encode(),
    ],
)
def test_too_many_values_are_refused(data: bytes) -> None:
    with pytest.raises(TooManyValuesError):
        parse_json(data)


def test_values_are_counted_and_not_characters() -> None:
    values = {"text": "[1, 2, {" * 2_000, "numbers": [1] * 19_000}
    assert parse_json(json.dumps(values).encode()) == values
    with pytest.raises(TooManyValuesError):
        parse_json(b"[1, 2, 3]", max_values=2)


# The files of the cache folder.


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_settings_file_is_one_error(kind: str, tmp_path: Path) -> None:
    HOSTILE[kind](tmp_path / "settings.json")
    with pytest.raises(SettingsError) as refused:
        settings.load(environ={"TANDEM_CACHE_DIR": str(tmp_path)})
    assert refused.value.code == "settings.file_invalid"


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", True), ("share_size", [True, True]), ("share_size", [-5, 0]), ("share_size", [64, 10**9]), ("share", 7)],
)
def test_a_setting_of_another_type_is_refused(name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({name: value}))
    with pytest.raises(SettingsError):
        settings.load(environ={"TANDEM_CACHE_DIR": str(tmp_path)})


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_of_the_cache_count_as_damaged(kind: str, tmp_path: Path) -> None:
    for name in ("history.json", "tandem-files.json", "weights.json", "tandem.log", "a.mp4"):
        HOSTILE[kind](tmp_path / name)
    assert HistoryFile(tmp_path, probe()).read() == ()
    assert read_stored(tmp_path) == {}
    with pytest.raises(ModelError) as refused:
        read_manifest(tmp_path)
    assert refused.value.code == "hub.manifest_damaged"
    if kind in {"fifo", "device", "folder"}:
        assert _tail(tmp_path / "tandem.log") == []
    else:
        assert len(_tail(tmp_path / "tandem.log")) == 1
    with pytest.raises(OutputError) as missing:
        read_metadata(tmp_path / "a.mp4")
    assert missing.value.code == "video.no_metadata"


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind in {"fifo", "device", "folder"}])
def test_a_log_file_that_is_no_file_is_not_written(kind: str, tmp_path: Path) -> None:
    HOSTILE[kind](tmp_path / "tandem.log")
    handlers = logging.getLogger("runtime").handlers[:]
    log.start(tmp_path / "tandem.log")
    try:
        assert isinstance(logging.getLogger("runtime").handlers[0], logging.NullHandler)
    finally:
        logging.getLogger("runtime").handlers[:] = handlers
