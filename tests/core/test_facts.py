"""Facts: every code in use has a message, every message is used and can be rendered, and data fills the templates.

Other tests assert codes and data; what the sentences are is checked here.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from runtime.core.errors import DISK_FULL, MODEL_UNUSABLE, STORE_UNAVAILABLE, TandemError
from runtime.core.facts import Fact, Words, capitalized, render, short
from runtime.core.messages import MESSAGES
from runtime.core.messages.message import Message

RUNTIME = Path(__file__).parents[2] / "runtime"


# Values of a template's data, by their conversion; others are text, or numbers where a format asks for one.
SAMPLES: Mapping[str, Any] = {
    **dict.fromkeys(("memory", "bytes", "gib"), 3 << 30),
    **dict.fromkeys(("duration", "about", "latency"), 90.0),
    **dict.fromkeys(("list", "or", "words", "lower_components", "clauses", "sentences", "appended"), ("vae",)),
    **dict.fromkeys(("remedy", "clause", "badge", "advice"), Fact("machine.no_gpu")),
    "latencies": {"eager": 0.5},
    "settings": {"offload": "group"},
    "setting": ["offload", "group"],
    "times": 1.5,
    "named_components": {"names": ["vae"], "among": ["vae"]},
}


def codes_of(call: ast.Call) -> set[str]:
    """Return the codes that a call of `Fact("…")` or of an error states."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called != "Fact" and not called.endswith("Error"):
        return set()
    codes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return {code for code in codes if "." in code and " " not in code}


def names_in(call: ast.Call) -> set[str] | None:
    """Return the names of a fact's data, if the call lists them all."""
    data = call.args[1] if len(call.args) > 1 and isinstance(call.args[0], ast.Constant) else None
    keys: list[ast.expr | None] = data.keys if isinstance(data, ast.Dict) else []
    names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
    names += [keyword.arg for keyword in call.keywords]
    if None in names or (data is not None and not isinstance(data, ast.Dict | ast.Constant)):
        return None
    return {str(name) for name in names}


def fields_of(message: Message) -> dict[str, set[str]]:
    """Return the data that a message needs, each with its conversions."""
    fields: dict[str, set[str]] = {}
    for template in message:
        for _, name, conversion, _ in Formatter().parse(template):
            if name is not None and not name.startswith("set[") and name not in {"tandem", "installer"}:
                fields.setdefault(name, set()).add(conversion or "")
    return fields


def sample(conversions: set[str]) -> Any:
    """Return a value that has all these conversions."""
    known = [SAMPLES[one] for one in sorted(conversions) if one in SAMPLES]
    number = any(one.startswith("n ") or one[-1:] in {"g", "e", "f", "%", ","} for one in conversions)
    return known[0] if known else 3 if number else "transformer"


def calls_in_runtime() -> list[ast.Call | ast.Constant]:
    """Return all calls and all texts of the program, without its messages."""
    nodes: list[ast.Call | ast.Constant] = []
    for path in RUNTIME.rglob("*.py"):
        if "messages" not in path.parts:
            tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            nodes += [node for node in tree if isinstance(node, ast.Call | ast.Constant)]
    return nodes


def test_every_code_has_a_message_and_every_message_is_stated_with_its_data() -> None:
    nodes = calls_in_runtime()
    literals = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    stated = [(code, call) for call in nodes if isinstance(call, ast.Call) for code in codes_of(call)]
    assert len({code for code, _ in stated}) > 500
    assert not {code for code, _ in stated} - MESSAGES.keys()
    assert not MESSAGES.keys() - literals - {"text", "internal_error"}
    # Those who catch errors of images add the file.
    added = {"field", "where", "file"}
    listed = [(code, names) for code, call in stated if (names := names_in(call)) is not None]
    lacking = [(code, fields_of(MESSAGES[code]).keys() - names - added) for code, names in listed]
    assert len(listed) > 500
    assert not [(code, names) for code, names in lacking if names]


def test_groups_of_codes_have_messages() -> None:
    assert MESSAGES.keys() >= DISK_FULL | MODEL_UNUSABLE | STORE_UNAVAILABLE


def test_every_message_is_rendered_in_one_line_each() -> None:
    for code, message in MESSAGES.items():
        fact = Fact(code, {name: sample(conversions) for name, conversions in fields_of(message).items()})
        what, remedy = render(fact)
        assert what and not what.startswith(code), code  # as it does if the data does not suit the template
        assert bool(remedy) == bool(message.remedy), code
        assert short(fact) and code not in short(fact), code
        for text in (what, remedy, short(fact)):
            assert text == text.strip() and "\n" not in text and ".." not in text, code


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
        "VAE decoder needs 3.0 GB; 2 GPUs.",
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
    assert (error.code, error.data) == ("model.folder_missing", {"folder": str(Path("/x"))})
