"""`bench.peers`: peers run in processes of their own, and the table has what they measured and what failed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers.__main__ import table

ROOT = Path(__file__).parents[2]


def test_the_table_has_a_row_for_each_variant_and_the_errors() -> None:
    rows: list[dict[str, Any]] = [
        {"variant": "one", "size": "832x480", "seconds": 2.512},
        {"variant": "one", "size": "1280x720", "seconds": 9.95},
        {"variant": "two", "note": "a step of 40, 20 of them computed", "size": "832x480", "seconds": 1.25},
        {"variant": "three", "size": "1280x720", "error": "RuntimeError: no kernel"},
    ]
    lines = table(rows, "a GPU").splitlines()
    assert lines[0] == "a GPU"
    assert lines[2:4] == ["| seconds a pass | 832x480 | 1280x720 |", "| --- | ---: | ---: |"]
    assert lines[4:6] == ["| one | 2.51 | 9.95 |", "| two (a step of 40, 20 of them computed) | 1.25 |  |"]
    assert lines[7:] == ["- three 1280x720: RuntimeError: no kernel"]


@pytest.mark.slow
def test_peers_are_measured_and_one_that_fails_does_not_stop_others(tmp_path: Path) -> None:
    options = ["--tiny", "--device", "cpu", "--lightx2v", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.peers", *options],
        cwd=ROOT,
        # Nothing is compiled, which takes most of the time; tests of compiled blocks do that.
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {row["peer"]: row for row in rows}
    assert list(found) == ["diffusers", "tandem", "lightx2v"]
    assert all(found[peer]["seconds"] > 0 and found[peer]["size"] == "64x48" for peer in ("diffusers", "tandem"))
    assert "lightx2v_platform" in found["lightx2v"]["error"]
    assert f"| {found['tandem']['variant']} | " in done.stdout
    assert f"- lightx2v : {found['lightx2v']['error']}" in done.stdout
