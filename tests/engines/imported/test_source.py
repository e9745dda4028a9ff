"""Files that are refused before a library opens them."""

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import EngineError
from runtime.engines.imported.importing import Source, check_disk_space, check_library, read_source
from runtime.machine.probe import probe
from tests.engines.engine_files import refusal


def plan(*, size: int, whole: int, version: tuple[int, ...] = (10, 3, 0, 26)) -> bytes:
    """Return a file that begins as a plan of TensorRT 8.6 or later does."""
    head = struct.pack("<4sIQQ4B", b"ftrt", 0, 1, whole, *version)
    return head + bytes(size - len(head))


def link(path: Path) -> None:
    """Make a link out of the folder."""
    path.symlink_to("/etc/passwd")


FILES: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("none.plan", lambda path: None, "import_unreadable"),
    ("empty.plan", b"", "import_empty"),
    ("text.engine", b"hello\n" * 2000, "import_text"),
    ("text.onnx", "grüße".encode() * 2000, "import_text"),
    ("random.trt", bytes(range(256)), "import_not_a_plan"),
    ("zip.plan", b"PK\x03\x04" + bytes(100), "import_not_a_plan"),
    ("short.plan", b"ftrt\0\0\0\0", "import_truncated"),
    ("cut.plan", plan(size=300, whole=90_000), "import_incomplete"),
    ("engine.bin", plan(size=300, whole=300), "import_unknown_suffix"),
    ("folder.plan", Path.mkdir, "import_folder"),
    ("link.plan", link, "import_link"),
    ("pipe.plan", os.mkfifo, "import_not_a_file"),
]


@pytest.mark.parametrize(("name", "content", "code"), FILES, ids=[file[0] for file in FILES])
def test_other_files_are_refused(name: str, content: bytes | Callable[[Path], None], code: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(EngineError) as refused:
        read_source(path)
    assert (refused.value.code, refused.value.data["file"]) == (f"engine.{code}", name)
    assert "\n" not in refused.value.what + refused.value.remedy


def test_version_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "a.TRT"
    path.write_bytes(plan(size=300, whole=300))
    source = read_source(path)
    assert (source.backend, source.bytes, source.version) == ("tensorrt", 300, "10.3.0")


def test_plan_with_unknown_layout_has_no_version(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_bytes(b"ftrt\7" + bytes(300))
    assert read_source(path).version == ""


def test_plan_is_refused_without_tensorrt(tmp_path: Path) -> None:
    machine = replace(probe(), gpus=(), gpu_problem=None)
    with refusal("engine.import_no_library") as refused:
        check_library(Source(tmp_path / "a.plan", "tensorrt", 300, "10.3.0"), machine)
    assert refused.value.data["file"] == "a.plan"
    assert refused.value.data["cause"].code == "machine.no_gpu"


def test_file_larger_than_free_disk_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        check_disk_space(Source(tmp_path / "a.plan", "tensorrt", 1 << 53), tmp_path / "engines")
    assert (refused.value.code, refused.value.data["size"]) == ("engine.import_disk_full", 1 << 53)
