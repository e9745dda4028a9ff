"""The instructions for a chat model by family, and the prompt in its answer."""

import pytest

from runtime.core.errors import EnhancerError
from runtime.models.prompt_guides import MOST_ANSWER_CHARACTERS, instructions, most_characters, prompt_in
from runtime.models.registry import FAMILIES, family_of

ANSWERS = {
    "A red boat.": "A red boat.",
    "  A red\n\nboat. \n": "A red boat.",
    '"A red boat."': "A red boat.",
    "“A red boat.”": "A red boat.",
    "**A red boat.**": "A red boat.",
    "**Prompt:** A red boat.": "A red boat.",
    "Enhanced prompt: A red boat.": "A red boat.",
    "Here is the rewritten prompt:\n\nA red boat.": "A red boat.",
    "```\nA red boat.\n```": "A red boat.",
    "<think>A boat?\nYes.</think>\n\nA red boat.": "A red boat.",
    'A sign reads "Prompt: go".': 'A sign reads "Prompt: go".',
    '"Hello," she says. "Goodbye."': '"Hello," she says. "Goodbye."',
    "Prompting a boat.": "Prompting a boat.",
    "**A boat** and **a kite**": "**A boat** and **a kite**",
    '{"subject": "a boat"}': '{"subject": "a boat"}',
    # Longer ones end with a sentence, else with a word.
    "A boat sails. A kite flies. " + "It is late. " * 5: "A boat sails. A kite flies. It is late.",
    "a boat and " * 10: "a boat and a boat and a boat and a boat",
    "船。" * 30: "船。" * 20,
    "x" * 60: "x" * 40,
}
REFUSED = {
    "": "enhancer.answer_empty",
    " \n": "enhancer.answer_empty",
    '""': "enhancer.answer_empty",
    "```\n\n```": "enhancer.answer_empty",
    "<think>A boat": "enhancer.only_thoughts",
    "<think>A boat</think>": "enhancer.answer_empty",
    "a red\0boat": "enhancer.answer_unusable",
    "a red\ud800boat": "enhancer.answer_unusable",
    "x" * (MOST_ANSWER_CHARACTERS + 1): "enhancer.answer_too_long",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_prompt_is_taken_of_an_answer(answer: str) -> None:
    assert prompt_in(answer, 40) == ANSWERS[answer]


@pytest.mark.parametrize("answer", REFUSED)
def test_an_answer_without_a_prompt_is_refused(answer: str) -> None:
    with pytest.raises(EnhancerError) as caught:
        prompt_in(answer, 40)
    assert caught.value.code == REFUSED[answer]


def test_each_family_has_its_own_rules_within_what_its_encoder_reads() -> None:
    guides = {name: family_of(name).prompt_guide for name in FAMILIES}
    own = {guides[name] for name in ("wan", "hunyuan_video", "framepack", "ltx2")}
    assert len(own | {guides["dcae"]}) == len(own) + 1
    for guide in guides.values():
        of_text, of_image = (instructions(guide, 512, from_image=from_image) for from_image in (False, True))
        assert guide.video in of_text and guide.image in of_image and f"{guide.words} words" in of_text
        assert "at most 19 words" in instructions(guide, 32)
    told = instructions(guides["wan"], 512, {"boat", "a"})
    assert told.endswith("a, boat")
    assert [most_characters(tokens) for tokens in (256, 4_096)] == [1_024, 5_000]
