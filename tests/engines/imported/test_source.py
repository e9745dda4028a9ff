"""What is refused before anything opens a file."""

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import EngineError
from runtime.engines.imported.source import Source, check_library, check_room, look
from runtime.machine.probe import probe


def plan(*, size: int, whole: int, version: tuple[int, ...] = (10, 3, 0, 26)) -> bytes:
    """Return a file that begins as a plan of TensorRT 8.6 or later does."""
    head = struct.pack("<4sIQQ4B", b"ftrt", 0, 1, whole, *version)
    return head + bytes(size - len(head))


def link(path: Path) -> None:
    """Make a link out of the folder."""
    path.symlink_to("/etc/passwd")


FILES: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("none.plan", lambda path: None, "none.plan cannot be read: No such file"),
    ("empty.plan", b"", "empty.plan is empty"),
    ("text.engine", b"hello\n" * 2000, "is a text file"),
    ("text.onnx", "grüße".encode() * 2000, "is a text file"),
    ("random.trt", bytes(range(256)), "is not a plan of TensorRT 8.6"),
    ("zip.plan", b"PK\x03\x04" + bytes(100), "is not a plan"),
    ("short.plan", b"ftrt\0\0\0\0", "cut short: 8 bytes"),
    ("cut.plan", plan(size=300, whole=90_000), "cut short: 300 of 90,000 bytes"),
    ("engine.bin", plan(size=300, whole=300), "does not end as an engine file does"),
    ("folder.plan", Path.mkdir, "is a folder"),
    ("link.plan", link, "is a link"),
    ("pipe.plan", os.mkfifo, "is not a file"),
]


@pytest.mark.parametrize(("name", "content", "says"), FILES, ids=[file[0] for file in FILES])
def test_what_is_no_engine(name: str, content: bytes | Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(EngineError, match=says) as told:
        look(path)
    assert "\n" not in told.value.what + told.value.remedy


def test_a_plan_names_its_tensorrt(tmp_path: Path) -> None:
    path = tmp_path / "a.TRT"
    path.write_bytes(plan(size=300, whole=300))
    source = look(path)
    assert (source.backend, source.bytes, source.version) == ("tensorrt", 300, "10.3.0")


def test_an_unknown_layout_is_left_to_tensorrt(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_bytes(b"ftrt\7" + bytes(300))
    assert look(path).version == ""


def test_without_tensorrt_a_plan_is_refused(tmp_path: Path) -> None:
    machine = replace(probe(), gpus=(), gpu_problem=None)
    with pytest.raises(EngineError, match=r"a\.plan cannot be run here: no NVIDIA GPU"):
        check_library(Source(tmp_path / "a.plan", "tensorrt", 300, "10.3.0"), machine)


def test_what_is_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"takes 9007\.2 TB; .* are free"):
        check_room(Source(tmp_path / "a.plan", "tensorrt", 1 << 53), tmp_path / "engines")
