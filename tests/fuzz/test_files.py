"""A short run with a fixed seed. For a long run: `python -m tests.fuzz files`."""

from pathlib import Path

from tests.fuzz.files import KINDS, reading


def test_damaged_files_are_refused_without_tracebacks(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        for kind in KINDS:
            reader.run(kind, {"model": 40, "video": 15}.get(kind, 100), seed=3)
    # The test proves nothing if no file is refused, or if all are.
    assert all(reader.found[f"{kind}: refused"] for kind in KINDS)
    assert all(reader.found[f"{kind}: read"] for kind in KINDS)
