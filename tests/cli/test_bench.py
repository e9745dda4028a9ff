"""`bench` on the command line: invalid input, results, comparison, Ctrl-C."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.flags import flags_in
from runtime.cli.main import run
from runtime.core.errors import InvalidRequestError
from runtime.models.spec import ModelSpec
from tests.bench.made import configuration, result
from tests.cli.test_bad_input import refused
from tests.umask import users_umask, usual_modes

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "64", "--height", "32", "--frames", "5", "--steps", "2"]
Tiny = Callable[[str], ModelSpec]


@pytest.mark.parametrize(
    ("flags", "says", "to_do"),
    [
        (["--runs", "0"], "--runs is '0'", "from 1 to 100"),
        (["--runs", "-1"], "--runs is '-1'", "from 1 to 100"),
        (["--runs", "101"], "--runs is '101'", "from 1 to 100"),
        (["--runs", "many"], "--runs is 'many'", "from 1 to 100"),
        (["--runs", "1.5"], "--runs is '1.5'", "from 1 to 100"),
        (["--warmup", "-1"], "--warmup is '-1'", "from 0 to 100"),
        (["--warmup", ""], "--warmup is ''", "from 0 to 100"),
        (["--config", "onnx"], "'onnx', without a name", "--config"),
        (["--config", ": --steps 4"], "without a name", "--config"),
        (["--config", "a:", "--config", "a: --steps 4"], "named “a”", "own name"),
        (["--config", "a: --steps 0"], "“a”: --steps is 0", "from 1"),
        (["--config", "a: --shift 0"], "“a”: --shift is 0", "from 0.1"),
        (["--config", "a: --vae-precision half"], "“a”: --vae-precision is 'half'", "float32, bfloat16"),
        (["--config", "a: --no-such 4"], "“a”: No such option: --no-such", "options of `generate`"),
        (["--config", "a: a blue ball"], "“a”: Got unexpected extra argument", "options of `generate`"),
        (["--config", "a: --negative-prompt 'x"], "“a”: No closing quotation", "options of `generate`"),
        (["--config", "a: --steps"], "“a”: Option '--steps' requires", "options of `generate`"),
        (["--config", "a: --backend vae"], "“a”: --backend is 'vae'", "COMPONENT=BACKEND"),
        (["--config", "a: --width 65"], "width is 65", "64 or 80"),
        (["--backend", "vae=pytorch"], "nothing to compare", "Name configurations"),
        (["--model", "no-such"], "no-such", "diorama"),
        (["--out", ""], "--out is empty", "folder"),
        (["--out", str(ROOT / "README.md")], "which is a file", "folder"),
        (["--out", str(ROOT / "README.md" / "x")], "cannot be created", "folder"),
        (["--no-such"], "--no-such", "bench --help"),
        (["before.json"], "before.json' looks like a file", "bench compare A.json B.json"),
        (["a", "prompt", "in", "words"], "unexpected extra argument", "bench --help"),
    ],
)
def test_bad_flags(
    flags: list[str], says: str, to_do: str, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    what, remedy = refused(["bench", *flags], capsys)
    assert says in what and to_do in remedy


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a benchmark result"),
        ('{"kind": "bench", "schema": 99}', "schema 99"),
        (json.dumps(result(configuration("b"))), "can be compared"),
        (json.dumps(result(configuration("a")) | {"machine": {"cpu": "x"}}), "two machines"),
    ],
)
def test_bad_files_to_compare(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(result(configuration("a"))))
    if content is not None:
        bad.write_text(content)
    for pair in ((good, bad), (bad, good)):
        what, _ = refused(["bench", "compare", *map(str, pair)], capsys)
        assert says in what


def test_configurations_take_the_options_of_generate() -> None:
    assert flags_in("--steps 4 --backend all=pytorch --backend vae=inductor") == {
        "steps": "4",
        "backend": ["all=pytorch", "vae=inductor"],
    }
    assert flags_in("") == {}
    with pytest.raises(InvalidRequestError, match="No such option: --help"):
        flags_in("--help")


def bench(spec: ModelSpec, out: Path, *flags: str) -> list[str]:
    """Return the arguments of a small benchmark in two configurations."""
    both = ["--config", "plain: --backend all=pytorch", "--config", "three: --backend all=pytorch --steps 3"]
    return ["bench", "--model", str(spec.directory), *SMALL, *both, "--out", str(out), *flags]


def test_a_benchmark_is_printed_saved_plotted_and_compared(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "here"
    with users_umask(0o022):
        assert run([*bench(tiny("wan2.1"), folder, "--runs", "2", "--keep-videos"), "--json"]) == 0
    out, err = capsys.readouterr()
    printed: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert [one["name"] for one in printed["configurations"]] == ["plain", "three"]
    assert printed["configurations"][1]["flags"] == "--backend all=pytorch --steps 3"
    assert printed["configurations"][1]["request"]["steps"] == 3
    assert printed["configurations"][0]["request"]["seed"] == 1
    assert "sails left" in printed["configurations"][0]["request"]["prompt"]
    made = sorted(folder.iterdir())
    assert [path.name for path in made] == ["bench.json", "bench.svg", "plain-1.mp4", "three-2.mp4"]
    # Although everything in the cache is private.
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, *made)] == usual_modes(2, 4)
    assert printed["files"] == [str(folder / "bench.json"), str(folder / "bench.svg")]
    kept = json.loads((folder / "bench.json").read_text())
    assert kept == {name: value for name, value in printed.items() if name != "files"}
    for text in ("Configuration", "plain", "three", "the reference", "LPIPS:", "bit for bit"):
        assert text in err
    assert "Traceback" not in err
    # Nothing is remembered of it: no jobs, no history, no videos.
    assert not {"jobs.sqlite", "history.json", "outputs"} & {path.name for path in cache_dir.iterdir()}

    assert run(["bench", "compare", str(folder / "bench.json"), str(folder / "bench.json"), "--json"]) == 0
    out, err = capsys.readouterr()
    compared = json.loads(out.strip().splitlines()[-1])
    assert {one["verdict"] for one in compared["differences"]} == {"within the spread"}
    assert "Versions: the same." in err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_keeps_the_measurements(tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = bench(tiny("wan2.1"), folder, "--runs", "100", "--warmup", "0")
    command = [sys.executable, str(ROOT / "app.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "three: run 1 of 100" in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate()
        assert process.returncode == 130
    assert "Stopping…" in err and "Traceback" not in err
    assert "Cancelled: these are the measurements until then." in out
    for text in ("\nplain ", "\nthree ", f"Saved {folder / 'bench.json'}"):
        assert text in out
    kept = json.loads((folder / "bench.json").read_text())
    assert kept["cancelled"] is True
    assert all(1 <= one["runs"] < 100 for one in kept["configurations"])
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.svg"]


_STUCK = """
import hashlib, sys
from runtime.bench.benchmark import Bench
from runtime.cli.main import run
measured = []
def compare(self, entry, measurement):
    measured.append(entry)
    if len(measured) == 2:
        print("stuck", file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # no Python code runs for many minutes
Bench._compare_frames = compare
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_second_ctrl_c_leaves_the_measurements_and_no_other_file(tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = bench(tiny("wan2.1"), folder, "--runs", "100", "--warmup", "0")
    command = [sys.executable, "-c", _STUCK, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "stuck" in line:
                assert len(list(folder.iterdir())) == 2
                process.send_signal(signal.SIGINT)
            elif "Stopping…" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    kept = json.loads((folder / "bench.json").read_text())
    assert kept["cancelled"] is True and kept["configurations"][0]["runs"] == 2
    assert [path.name for path in folder.iterdir()] == ["bench.json"]
