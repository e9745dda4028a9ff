"""Facts: every code in use has a message, every message is used, and data fills the templates."""

import ast
from pathlib import Path
from string import Formatter

import pytest

from runtime.core.errors import TandemError
from runtime.core.facts import Fact, Words, capitalized, render
from runtime.core.messages import MESSAGES, Message

RUNTIME = Path(__file__).parents[2] / "runtime"


def codes_of(call: ast.Call) -> set[str]:
    """Return the codes that a call of `Fact("…")` or of an error states."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called != "Fact" and not called.endswith("Error"):
        return set()
    codes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return {code for code in codes if "." in code and " " not in code}


def test_every_code_has_a_message_and_every_message_is_stated() -> None:
    literals: set[str] = set()
    stated: set[str] = set()
    for path in RUNTIME.rglob("*.py"):
        if "messages" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                stated |= codes_of(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.add(node.value)
    assert len(stated) > 500
    assert not stated - MESSAGES.keys()
    assert not MESSAGES.keys() - literals - {"text", "internal_error"}


def test_templates_can_be_read(subtests: pytest.Subtests) -> None:
    for code, message in MESSAGES.items():
        with subtests.test(msg=code):
            for template in message:
                list(Formatter().parse(template))


def test_a_fact_is_rendered_in_the_words_of_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(Words):
        def setting(self, name: str, value: str | None = None) -> str:
            return f"“{name.capitalize()}: {value}”"

    message = Message(
        "{part:component} needs {size:memory}; {gpus:n GPU}.", "Take {set[offload=group]} or {other:setting}."
    )
    monkeypatch.setitem(MESSAGES, "test.one", message)
    fact = Fact("test.one", {"part": "vae", "size": 3 << 30, "gpus": 2, "other": ("compile", "never")})
    assert render(fact) == (
        "VAE decoder needs 3.0 GiB; 2 GPUs.",
        "Take --offload group or --compile never.",
    )
    assert render(fact, Page()).remedy == "Take “Offload: group” or “Compile: never”."


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("no GPU was found.", "No GPU was found."),
        ("wan2.2-a14b needs more.", "wan2.2-a14b needs more."),
        ("GPU 0 is full.", "GPU 0 is full."),
        ("", ""),
    ],
)
def test_a_sentence_starts_with_a_capital_unless_it_starts_with_a_name(text: str, wanted: str) -> None:
    assert capitalized(text) == wanted


def test_a_fact_survives_json_with_its_cause() -> None:
    fact = Fact("a.b", {"cause": Fact("c.d", {"n": 1}), "path": Path("/x"), "names": ("p", "q")})
    again = Fact.model_validate_json(fact.model_dump_json())
    assert Fact(again.code, again.data) == fact
    assert fact.data["names"] == ["p", "q"]


def test_an_unknown_code_is_rendered_with_its_data() -> None:
    assert render(Fact("newer.code", {"n": 1})).what == "newer.code {'n': 1}"


def test_an_error_carries_code_and_data() -> None:
    error = TandemError("model.folder_missing", folder=Path("/x"))
    assert (error.code, error.data) == ("model.folder_missing", {"folder": "/x"})
