"""A short run with a fixed seed, and whether the checks find what they look for. For a long run: `python -m tests.fuzz
files`.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.errors import ModelError
from tests.fuzz.files import KINDS, Change, Places, reading

pytestmark = pytest.mark.slow


def test_damaged_files_are_refused_without_tracebacks(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        for kind in KINDS:
            reader.run(kind, {"model": 40, "video": 15}.get(kind, 100), seed=3)
    # The test proves nothing if no file is refused, or if all are.
    assert all(reader.found[f"{kind}: refused"] for kind in KINDS)
    assert all(reader.found[f"{kind}: read"] for kind in KINDS)


def _faulty(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    """Return a reader with the fault that the only change names."""
    del chance
    marker = places.folder / "marker"

    def read() -> None:
        match changes[0].kind if changes else "nothing":
            case "waits":
                os.mkfifo(places.example / "fifo")
                (places.example / "fifo").read_bytes()
            case "waits once" if not marker.exists():
                marker.touch()
                time.sleep(100)
            case "computes":
                while True:
                    pass
            case "computes too long":
                end = time.process_time() + 0.75
                while time.process_time() < end:
                    pass
            case "takes memory":
                bytearray(300 << 20)
            case "dies":
                os._exit(0)
            case "raises":
                raise KeyError
            case "says much":
                raise ModelError("model.file_missing", file="x" * 2000)

    return read


def test_faults_of_readers_are_found(tmp_path: Path) -> None:
    with reading(tmp_path, {"faulty": _faulty}, seconds=0.5) as reader:
        for kind in ("waits", "computes", "computes too long", "takes memory", "dies", "raises", "says much"):
            with pytest.raises(AssertionError):
                reader.judge(("faulty", 0, [Change(kind, 0)]))
        reader.judge(("faulty", 0, [Change("waits once", 0)]))
        assert reader.repeated
        reader.judge(("faulty", 0, [Change("nothing", 0)]))
        assert reader.found == {"faulty: read": 2}
