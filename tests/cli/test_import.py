"""`engines import` on the command line: output, confirmation and invalid input."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.facts import render
from runtime.engines.imported.importing import WARNING
from runtime.models.spec import ModelSpec
from tests.cli.refusals import check_refusals, refused
from tests.cli.test_engines import printed
from tests.engines import exported_files
from tests.facts import fact


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_an_imported_engine_is_listed_and_planned(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny("wan2.1")
    path = exported_files.transformer(spec, tmp_path / "foreign.onnx")
    capsys.readouterr()
    model = ["--model", str(spec.directory)]
    result = printed(["engines", "import", str(path), "--yes", *model], capsys)
    engine = result["engine"]
    assert isinstance(engine, dict)
    assert engine["usable"]
    assert engine["builder"] == "imported"
    assert result["serves"] == "64x32, 9 frames"
    assert result["exact"] is True
    assert len(result["adapters"]) == 6  # type: ignore[arg-type]
    listed = printed(["engines", "list"], capsys)
    assert [row["id"] for row in listed["engines"]] == [engine["id"]]  # type: ignore[attr-defined]
    size = ["--width", "64", "--height", "32", "--frames", "9", "--backend", "transformer=onnxruntime"]
    assert run(["plan", "a red boat", *model, *size, "--json"]) == 0
    out, _ = capsys.readouterr()
    assert engine["id"] in out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_import_warns_and_asks_for_confirmation(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(bytes(100))
    assert run(["engines", "import", str(path)]) == 2
    note, what, to_do = capsys.readouterr().err.splitlines()
    error, remedy = render(fact("cli.trust_not_confirmed", file="x.onnx"))
    assert (note, what, to_do) == (f"Note: {WARNING}", f"Error: {error}", f"To do: {remedy}")
    assert "--yes" in to_do
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer in ("n", "", "yesterday"):
        monkeypatch.setattr("builtins.input", lambda answer=answer: answer)
        assert run(["engines", "import", str(path)]) == 130
        assert "[y/N]" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda: "Y")
    assert refused(["engines", "import", str(path)], capsys, began=True).code == "engine.onnx_damaged"
    engines = cache_dir / "engines"
    assert [entry.name for entry in engines.iterdir()] == [".locks"]


def test_bad_input_is_refused(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    (tmp_path / "text.plan").write_text("hello\n")
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "plan.plan").write_bytes(bytes(100))
    text = str(tmp_path / "text.plan")
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        ([""], "cli.file_unreadable", {"field": "file"}),
        (["a\x07b"], "cli.file_unreadable", {"field": "file"}),
        ([str(tmp_path / "none.plan")], "engine.import_unreadable", {"file": "none.plan"}),
        ([text], "engine.import_text", {"file": "text.plan"}),
        ([str(tmp_path / "empty.onnx")], "engine.import_empty", {"file": "empty.onnx"}),
        ([str(tmp_path / "plan.plan")], "engine.import_not_a_plan", {"file": "plan.plan"}),
        ([text, "--component", "eyes"], "model.no_such_component", {"component": "'eyes'"}),
        ([text, "--model", "no-such"], "model.unknown", {"name": "no-such"}),
        ([text, "--no-such-flag"], "cli.usage", {"help": "./install.sh engines import --help"}),
    ]
    agreed = [([*arguments, "--yes"], code, data) for arguments, code, data in cases]
    check_refusals(agreed, capsys, subtests, ["engines", "import"])
