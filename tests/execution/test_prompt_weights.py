"""Embeddings of words with weights, compared with the rule of ComfyUI."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import ModelError
from runtime.core.events import Event, StageStarted, VideoSaved
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import TextEncoder
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_tokenizer
from runtime.pipeline.run import run_job
from tests.plans import no_engines, tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]


def model(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return embeddings that depend on the token and its place."""
    values = torch.sin(ids.double() + torch.arange(ids.shape[1]) / 7)
    return (torch.stack([values, values**2], dim=-1) * mask.unsqueeze(-1)).float()


def test_a_token_is_scaled_in_relation_to_the_empty_prompt(tiny: Tiny) -> None:
    tokenizer = load_tokenizer(tiny("wan2.1"))
    encoder = TextEncoder(tokenizer, model, 24)
    plain, empty = encoder.encode("a red boat").embeds[0], encoder.encode("").embeds[0]
    weighted = encoder.encode("a (red:1.5) boat")
    places = tokenizer("a red boat", return_offsets_mapping=True).offset_mapping
    red = [place for place, (start, end) in enumerate(places) if 2 < end <= 5 and end > start]
    assert red
    for place in range(24):
        expected = empty[place] + (plain[place] - empty[place]) * 1.5 if place in red else plain[place]
        torch.testing.assert_close(weighted.embeds[0, place], expected)
    assert (weighted.unknown_words, weighted.cut) == (encoder.encode("a red boat").unknown_words, False)
    # Text beyond the longest is cut, with its weights.
    assert encoder.encode("(" + "boat " * 40 + ":1.5)").cut
    assert torch.equal(encoder.encode(r"\(a (red:1) boat\)").embeds, encoder.encode("(a red boat)").embeds)


def test_a_tokenizer_without_places_is_refused() -> None:
    class Slow:
        is_fast = False

        def __call__(self, texts: list[str], **_options: object) -> object:
            ids = torch.ones(1, 4, dtype=torch.long)
            return type("Tokens", (), {"input_ids": ids, "attention_mask": ids})

    with pytest.raises(ModelError) as refused:
        TextEncoder(Slow(), model, 4).encode("a (red:1.5) boat")
    assert refused.value.code == "model.tokenizer_without_places"


def test_a_weighted_prompt_has_its_own_place_in_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    """Other weights are other embeddings, and the second run loads no text encoder."""
    spec = tiny("wan2.1")
    with Residency(no_engines(tmp_path)) as residency:

        def embedded(prompt: str) -> tuple[torch.Tensor, bool]:
            """Return the embeddings of a prompt, and whether a text encoder was loaded."""
            events: list[Event] = []
            plan = with_strategy(tiny_plan(spec, tmp_path / "x.mp4", prompt=prompt), keep_loaded=False)
            run_job(plan, spec, events.append, Cancel(), residency)
            assert isinstance(events[-1], VideoSaved)
            part = plan.components["text_encoder"]
            assert residency.prompts is not None
            kept = residency.prompts.find(spec, part, prompt)
            assert kept is not None
            return kept.embeds, StageStarted(stage="load", part="text_encoder") in events

        plain, _ = embedded("a red boat")
        weighted, ran = embedded("a (red:1.5) boat")
        assert ran and not torch.equal(plain, weighted)
        again, ran = embedded("a (red:1.5) boat")
        assert not ran and torch.equal(again, weighted)
