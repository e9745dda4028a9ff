"""A chat model in PyTorch: its answer, its template, and what cannot be loaded."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime.core.cancel import Cancel, CancelledError, never
from runtime.core.errors import EnhancerError, MachineError, ModelError
from runtime.execution.chat_model import ChatModel, loaded
from runtime.models.enhancers import LocalEnhancer
from runtime.models.prompt_guides import asked
from tests.chat_models import ANSWER, save_chat_model

MESSAGES = asked("Write more.", "a red boat")
_WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ messages[0].content }} assistant"
)


def at(folder: Path) -> LocalEnhancer:
    """Return the chat model of a folder."""
    return LocalEnhancer(folder, folder.name, 1554)


def test_it_answers_the_same_each_time_and_stops_when_cancelled(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "chat")
    freed: list[bool] = []
    with loaded(at(folder), None, lambda: freed.append(True)) as model:
        assert [model.answer(MESSAGES, never) for _ in range(2)] == [ANSWER, ANSWER]
        cancel = Cancel()
        cancel.request()
        with pytest.raises(CancelledError):
            model.answer(MESSAGES, cancel.check)
        with pytest.raises(EnhancerError) as caught:
            model.answer(asked("x " * 2_000, "a boat"), never)
        assert caught.value.code == "enhancer.prompt_too_long"
    assert not freed  # there is memory for all
    huge = LocalEnhancer(folder, "huge", 10**13)
    with pytest.raises(MachineError) as short, loaded(huge, None, lambda: freed.append(True)):
        raise AssertionError
    assert short.value.code == "enhancer.no_memory" and freed


def test_templates_without_a_system_role_are_used_and_broken_ones_refused(tmp_path: Path) -> None:
    model = ChatModel(at(save_chat_model(tmp_path / "chat", template=_WITHOUT_SYSTEM)), "cpu", "float32")
    assert model.answer(MESSAGES, never) == ANSWER
    broken = ChatModel(at(save_chat_model(tmp_path / "broken", template="{{ messages.x.y }}")), "cpu", "float32")
    with pytest.raises(EnhancerError) as caught:
        broken.answer(MESSAGES, never)
    assert caught.value.code == "enhancer.template_failed"


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "chat")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        ChatModel(at(folder), "cpu", "float32")
    assert caught.value.code == "enhancer.weights_missing"
    # An architecture that transformers lacks, with code of its own, which must not run.
    (folder / "own.py").write_text("raise SystemExit")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        ChatModel(at(folder), "cpu", "float32")
    assert caught.value.code == "enhancer.unloadable"
