"""The exportable forms of the text encoders equal transformers' modules, and PyTorch takes over from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextModel, LlamaModel

from runtime.core.facts import Fact
from runtime.engines.programs import load_program
from runtime.execution.engine_components import EngineTextModel
from runtime.execution.text_encoder import PyTorchTextModel
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.execution.test_image_components import Engines, opened
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("words", [1, 9, 77])
def test_the_forms_equal_transformers(tiny: Tiny, name: str, words: int) -> None:
    spec = tiny("hunyuan-video")
    program = load_program(spec, name, name, device="cpu", dtype="float32")
    length = spec.encoders[name].max_tokens
    assert length == (351 if name == "text_encoder" else 77)
    mask = (torch.arange(length) < words).long()[None]
    ids = torch.randint(2, 18, (1, length), generator=torch.Generator().manual_seed(0)) * mask
    with torch.inference_mode():
        if name == "text_encoder":
            llama = LlamaModel.from_pretrained(spec.directory / name).eval()
            expected = llama(ids, mask, output_hidden_states=True).hidden_states[-3]
        else:
            expected = CLIPTextModel.from_pretrained(spec.directory / name).eval()(ids, mask).last_hidden_state
    found = program.run(input_ids=ids, attention_mask=mask)["embeds"]
    torch.testing.assert_close(found, expected * mask.unsqueeze(-1), rtol=1e-5, atol=1e-5)


def test_the_pooled_embedding_is_that_of_the_last_token(tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    module = CLIPTextModel.from_pretrained(spec.directory / "text_encoder_2").eval()
    program = load_program(spec, "text_encoder_2", "text_encoder_2", device="cpu", dtype="float32")
    ids, mask = torch.ones(1, 77, dtype=torch.int64), torch.ones(1, 77, dtype=torch.int64)
    ids[0, :6], mask[0, 7:] = torch.tensor([3, 4, 5, 6, 7, 8]), 0
    with torch.inference_mode():
        expected = module(ids[:, :7], mask[:, :7]).pooler_output
    torch.testing.assert_close(program.run(input_ids=ids, attention_mask=mask)["embeds"][:, 6], expected)


@pytest.mark.parametrize("fails", [False, True])
def test_texts_are_padded_for_the_engine_only(tiny: Tiny, fails: bool) -> None:
    spec = tiny("hunyuan-video")
    program = load_program(spec, "text_encoder", "text_encoder", device="cpu", dtype="float32")
    part = tiny_plan(spec, Path("x.mp4")).components["text_encoder"]
    reference = PyTorchTextModel(load_module(spec, "text_encoder", part), "cpu")
    ids, mask = torch.randint(2, 18, (1, 101)), torch.ones(1, 101, dtype=torch.int64)

    def wrong(_: int, outputs: dict[str, Any]) -> None:
        if fails:
            outputs["embeds"] = torch.full_like(outputs["embeds"], torch.nan)

    reasons: list[Fact] = []

    def fall_back(reason: Fact) -> PyTorchTextModel:
        reasons.append(reason)
        return reference

    engines = Engines({"text_encoder": program}, wrong)
    found = EngineTextModel(opened(engines), fall_back, program="text_encoder", length=351)(ids, mask)
    assert engines.calls[0]["input_ids"].shape == (1, 351)
    torch.testing.assert_close(found, reference(ids, mask), rtol=1e-5, atol=1e-5)
    assert [reason.code for reason in reasons] == ["execution.engine_not_finite"] * fails
