"""`enhance`, and `generate --enhance`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.models.spec import ModelSpec
from runtime.video.mp4 import read_metadata
from tests.chat_models import ANSWER, ChatServer, chat_server, save_chat_model
from tests.cli.refusals import check_refusals, refused

Tiny = Callable[[str], ModelSpec]
SMALL = ["--width", "32", "--height", "32", "--frames", "5", "--fps", "8", "--steps", "1", "--guidance", "1"]


@pytest.fixture
def model(tiny: Tiny, cache_dir: Path) -> list[str]:
    """The option of a tiny model."""
    assert cache_dir
    return ["--model", str(tiny("wan2.1").directory)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    with chat_server() as running:
        monkeypatch.setenv("TANDEM_ENHANCER", running.address)
        monkeypatch.setenv("TANDEM_ENHANCER_MODEL", "small")
        monkeypatch.setenv("TANDEM_ENHANCER_KEY", "secret")
        yield running


def test_a_chat_model_prints_a_prompt(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_ENHANCER", str(save_chat_model(tmp_path / "chat")))
    capfd.readouterr()
    assert run(["enhance", "a red boat", *model]) == 0
    out, err = capfd.readouterr()
    assert out.strip() == ANSWER and "chat" in err and "it/s" not in err
    assert run(["enhance", "a red boat", *model, "--from-image", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result == {"prompt": ANSWER, "original_prompt": "a red boat", "enhancer": "chat"}


def test_videos_are_made_of_enhanced_prompts_and_both_are_stored(
    model: list[str], server: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.text = "Enhanced prompt: {A|A} red boat sails."
    made = "{A|A} red boat sails."
    out = tmp_path / "made.mp4"
    assert run(["generate", "a {red|red} boat", "--enhance", *model, *SMALL, "--out", str(out)]) == 0
    assert made in capfd.readouterr().err
    metadata = read_metadata(out)
    request = metadata["request"]
    assert (request["prompt"], request["original_prompt"]) == (made, "a red boat")
    assert request["template"] == "a {red|red} boat"
    assert "secret" not in json.dumps(metadata)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a boat\na kite\n")
    server.asked.clear()
    assert (
        run(["generate", "--prompts", str(prompts), "--grid", "seed=1..2", "--enhance", *model, *SMALL, "--json"]) == 0
    )
    videos = json.loads(capfd.readouterr().out)["videos"]
    stored = [(video["request"]["prompt"], video["request"]["original_prompt"]) for video in videos]
    assert sorted(stored) == [(made, "a boat")] * 2 + [(made, "a kite")] * 2
    assert [body["messages"][1]["content"] for body in server.asked] == ["a boat", "a kite"]


def test_bad_input_is_two_lines(
    model: list[str],
    server: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["enhance", "", *model], "request.prompt_empty", {}),
        (["enhance", "a {red|blue} boat", *model], "enhancer.template", {}),
        (["enhance", "a boat", "--model", "none"], "model.unknown", {}),
    ]
    check_refusals(cases, capsys, subtests)
    server.status = 401
    assert refused(["enhance", "a boat", *model], capsys, began=True).code == "enhancer.key_refused"
    generate = ["generate", "a boat", "--enhance", *model]
    assert refused([*generate, *SMALL], capsys, began=True).code == "enhancer.key_refused"
    assert refused([*generate, "--width", "31"], capsys).code != "enhancer.key_refused"
    for name, code in (("TANDEM_ENHANCER_MODEL", "enhancer.no_model_name"), ("TANDEM_ENHANCER", "enhancer.none")):
        monkeypatch.delenv(name)
        assert refused(["enhance", "a boat", *model], capsys).code == code
    assert refused([*generate, *SMALL], capsys).code == "enhancer.none"
