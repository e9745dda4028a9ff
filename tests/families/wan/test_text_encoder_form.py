"""The text encoder's exportable form equals transformers' module."""

from collections.abc import Callable

import pytest
import torch
from transformers import UMT5EncoderModel

from runtime.engines.programs import load_program
from runtime.models.spec import ModelSpec


@pytest.mark.parametrize("words", [1, 9, 512])
def test_it_equals_transformers(tiny: Callable[[str], ModelSpec], words: int) -> None:
    spec = tiny("wan2.1")
    module = UMT5EncoderModel.from_pretrained(spec.directory / "text_encoder").eval()
    program = load_program(spec, "text_encoder", "text_encoder", device="cpu", dtype="float32")
    mask = (torch.arange(512) < words).long()[None]
    ids = torch.randint(1, 18, (1, 512), generator=torch.Generator().manual_seed(0)) * mask
    with torch.inference_mode():
        expected = module(ids, mask).last_hidden_state * mask.unsqueeze(-1)
    given = program.run(input_ids=ids, attention_mask=mask)["embeds"]
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert not given[:, words:].any()
