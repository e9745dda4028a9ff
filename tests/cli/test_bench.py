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
from tests.cli.refusals import check_refusals, refused
from tests.facts import fact
from tests.umask import users_umask, usual_modes

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "64", "--height", "32", "--frames", "5", "--steps", "2"]
Tiny = Callable[[str], ModelSpec]


def test_flags_are_refused(capsys: pytest.CaptureFixture[str], cache_dir: Path, subtests: pytest.Subtests) -> None:
    def invalid(code: str, **data: Any) -> dict[str, Any]:
        return {"configuration": "a", "cause": {"code": code, "data": data}}

    runs, readme = {"field": "runs", "low": 1, "high": 100}, str(ROOT / "README.md")
    out_of_range = {"field": "steps", "value": "0", "nearest": 1, "low": 1, "high": 1000}
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--runs", "0"], "bench.count_invalid", runs | {"value": "'0'"}),
        (["--runs", "-1"], "bench.count_invalid", runs | {"value": "'-1'"}),
        (["--runs", "101"], "bench.count_invalid", runs | {"value": "'101'"}),
        (["--runs", "many"], "bench.count_invalid", runs | {"value": "'many'"}),
        (["--runs", "1.5"], "bench.count_invalid", runs | {"value": "'1.5'"}),
        (["--warmup", "-1"], "bench.count_invalid", {"field": "warmup", "value": "'-1'", "low": 0}),
        (["--warmup", ""], "bench.count_invalid", {"field": "warmup", "value": "''", "low": 0}),
        (["--config", "onnx"], "bench.configuration_unnamed", {"field": "config", "value": "'onnx'"}),
        (["--config", "a:", "--config", "a: --steps 4"], "bench.configuration_repeated", {"configuration": "a"}),
        (["--config", "a: --steps 0"], "bench.configuration_invalid", invalid("request.out_of_range", **out_of_range)),
        (
            ["--config", "a: --unknown 4"],
            "bench.configuration_invalid",
            invalid("cli.flags_invalid", field="flags", problem="No such option: --unknown"),
        ),
        (["--config", "a: a blue ball"], "bench.configuration_invalid", {"configuration": "a", "field": "flags"}),
        (
            ["--config", "a: --negative-prompt 'x"],
            "bench.configuration_invalid",
            invalid("cli.flags_invalid", field="flags", problem="No closing quotation"),
        ),
        (
            ["--config", "a: --steps"],
            "bench.configuration_invalid",
            invalid("cli.flags_invalid", field="flags", problem="Option '--steps' requires an argument"),
        ),
        (
            ["--config", "a: --backend vae"],
            "bench.configuration_invalid",
            invalid("request.not_a_backend", field="backends", value="'vae'"),
        ),
        (["--config", "a: --width 65"], "planner.not_a_multiple", {"field": "width", "able": [64, 80]}),
        (["--backend", "vae=pytorch"], "bench.backend_without_configuration", {}),
        (["--model", "no-such"], "model.unknown", {"name": "no-such"}),
        (["--out", ""], "cli.folder_unreadable", {"field": "out"}),
        (["--out", readme], "bench.folder_is_file", {"field": "out", "folder": readme}),
        (["--out", f"{readme}/x"], "cli.folder_not_created", {"folder": f"{readme}/x"}),
        (["--no-such"], "cli.usage", {"help": "./install.sh bench --help"}),
        (["before.json"], "bench.prompt_is_file", {"prompt": "'before.json'"}),
        (["a", "prompt", "in", "words"], "cli.prompt_unquoted", {"command": "./install.sh bench"}),
    ]
    check_refusals(cases, capsys, subtests, ["bench"])
    named = refused(["bench", "--config", "a: --vae-precision half"], capsys)
    assert "“a”: --vae-precision is 'half'" in named.what


def test_files_that_cannot_be_compared_are_refused_in_either_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path, subtests: pytest.Subtests
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(result(configuration("a"))))
    for content, code in (
        (None, "not_read"),
        ("", "not_a_result"),
        ("[" * 100_000, "not_a_result"),
        ("[]", "not_a_result"),
        ('{"kind": "bench", "schema": 99}', "other_schema"),
        (json.dumps(result(configuration("b"))), "nothing_to_compare"),
        (json.dumps(result(configuration("a")) | {"machine": {"cpu": "x"}}), "two_machines"),
    ):
        if content is not None:
            bad.write_text(content)
        for pair in ((good, bad), (bad, good)):
            with subtests.test(msg=code):
                assert refused(["bench", "compare", *map(str, pair)], capsys).code == f"bench.{code}"


def test_configurations_take_the_options_of_generate() -> None:
    assert flags_in("--steps 4 --backend all=pytorch --backend vae=inductor") == {
        "steps": "4",
        "backend": ["all=pytorch", "vae=inductor"],
    }
    assert flags_in("") == {}
    with pytest.raises(InvalidRequestError) as caught:
        flags_in("--help")
    assert caught.value.code == "cli.flags_invalid"
    assert str(caught.value.data["problem"]).startswith("No such option: --help")


def bench(spec: ModelSpec, out: Path, *flags: str) -> list[str]:
    """Return the arguments of a small benchmark in two configurations."""
    both = ["--config", "plain: --backend all=pytorch", "--config", "three: --backend all=pytorch --steps 3"]
    return ["bench", "--model", str(spec.directory), *SMALL, *both, "--out", str(out), *flags]


@pytest.mark.slow
def test_a_benchmark_is_printed_saved_and_compared(
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
    assert [path.name for path in made] == ["bench.json", "plain-1.mp4", "three-2.mp4"]
    # Although everything in the cache is private.
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, *made)] == usual_modes(2, 3)
    assert printed["files"] == [str(folder / "bench.json")]
    kept = json.loads((folder / "bench.json").read_text())
    assert kept == {name: value for name, value in printed.items() if name != "files"}
    for text in ("Configuration", "plain", "three", "the reference", "bit for bit"):
        assert text in err
    assert "Traceback" not in err
    # Nothing is remembered of it: no jobs, no history, no videos.
    assert not {"jobs.sqlite", "history.json", "outputs"} & {path.name for path in cache_dir.iterdir()}

    assert run(["bench", "compare", str(folder / "bench.json"), str(folder / "bench.json"), "--json"]) == 0
    out, err = capsys.readouterr()
    compared = json.loads(out.strip().splitlines()[-1])
    assert {one["verdict"] for one in compared["differences"]} == {"within the spread"}
    assert compared["versions"] == [] and "Versions: " in err


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
    assert str(fact("bench.cancelled")) in out
    for text in ("\nplain ", "\nthree ", f"Saved {folder / 'bench.json'}"):
        assert text in out
    kept = json.loads((folder / "bench.json").read_text())
    assert kept["cancelled"] is True
    assert all(1 <= one["runs"] < 100 for one in kept["configurations"])
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json"]


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
