"""`engines import` on the command line: output, confirmation and invalid input."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli.main import run
from runtime.models.spec import ModelSpec
from tests.cli.test_bad_input import refused
from tests.cli.test_engines import printed
from tests.engines import exported_files


@pytest.mark.slow
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


def test_import_warns_and_asks_for_confirmation(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(bytes(100))
    assert run(["engines", "import", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "executable code" in printed
    assert "there is no terminal" in printed
    assert "--yes" in printed
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer in ("n", "", "yesterday"):
        monkeypatch.setattr("builtins.input", lambda answer=answer: answer)
        assert run(["engines", "import", str(path)]) == 130
        assert "[y/N]" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda: "Y")
    assert run(["engines", "import", str(path)]) == 2
    assert "not a valid ONNX file" in capsys.readouterr().err
    engines = cache_dir / "engines"
    assert [entry.name for entry in engines.iterdir()] == [".locks"]


@pytest.mark.parametrize(
    ("file", "flags", "says", "to_do"),
    [
        ("", [], "FILE is empty", "path"),
        ("a\x07b", [], "unreadable", "path"),
        ("none.plan", [], "none.plan cannot be read", "path"),
        ("text.plan", [], "is a text file", ".onnx"),
        ("empty.onnx", [], "is empty", "Copy"),
        ("plan.plan", [], "is not a plan", ".plan"),
        ("text.plan", ["--component", "eyes"], "no component 'eyes'", "text_encoder"),
        ("text.plan", ["--model", "no-such"], "no-such", "diorama"),
        ("text.plan", ["--no-such-flag"], "--no-such-flag", "--help"),
    ],
)
def test_bad_input(
    file: str,
    flags: list[str],
    says: str,
    to_do: str,
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.plan").write_text("hello\n")
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "plan.plan").write_bytes(bytes(100))
    path = str(tmp_path / file) if file.isprintable() and file else file
    what, remedy = refused(["engines", "import", path, "--yes", *flags], capsys)
    assert says in what
    assert to_do in remedy
