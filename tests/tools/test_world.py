"""The drawn world: training scenes, captions and vocabulary."""

import random

import torch

from tools.diorama import captions, lexicon, nets, world
from tools.diorama.world import COLOURS, SUBJECTS


def test_training_never_shows_a_held_out_combination() -> None:
    scenes = world.sample(4000, 1, two_subjects=0.5)
    for slot in (0, 1):
        for i in (scenes.subject[:, slot] >= 0).nonzero()[:, 0].tolist():
            subject = SUBJECTS[int(scenes.subject[i, slot])]
            assert (subject, COLOURS[int(scenes.colour[i, slot])]) not in world.HELD_OUT_COLOURS
            assert (subject, world.BACKDROPS[int(scenes.backdrop[i])]) not in world.HELD_OUT_BACKDROPS
            assert (subject, world.MOTIONS[int(scenes.motion[i])]) not in world.HELD_OUT_MOTIONS


def test_held_out_scenes_are_all_held_out() -> None:
    assert bool(world.held_out(world.sample(200, 2, keep="held_out")).all())


def test_scenes_repeat_from_their_seed() -> None:
    first, again, other = (world.sample(50, seed) for seed in (7, 7, 8))
    assert torch.equal(first.jitter, again.jitter) and torch.equal(first.subject, again.subject)
    assert not torch.equal(first.jitter, other.jitter)


def test_two_subjects_differ_in_colour_unless_twins() -> None:
    scenes = world.sample(2000, 3, two_subjects=1.0)
    twins = scenes.subject[:, 0] == scenes.subject[:, 1]
    assert torch.equal(scenes.colour[:, 0] == scenes.colour[:, 1], twins)


def test_a_caption_is_a_plain_sentence() -> None:
    known = captions.Facts((("boat", "red"),), "left", "sea", "sunset", None)
    assert captions.sentence(known, captions.Wording(plain=True)) == "a red boat sails left on the sea at sunset"


def test_every_full_caption_names_colour_and_subject() -> None:
    rng = random.Random(0)
    scenes = world.sample(300, 4, keep="any")
    for i in range(300):
        known = captions.facts(scenes, i)
        words = captions.prompt(known, rng)
        for subject, colour in known.subjects:
            assert subject is not None and colour is not None
            assert any(w in words for w in lexicon.COLOUR_WORDS[colour]), words
            assert any(n in words for pair in lexicon.SUBJECT_NOUNS[subject] for n in pair), words


def test_captions_with_a_subject_leave_out_only_what_is_usual() -> None:
    rng = random.Random(0)
    scenes = world.sample(1000, 5, usual=0.6)
    assert not world.held_out(scenes).any()
    captioned = [captions.training_caption(captions.facts(scenes, i), rng) for i in range(1000)]
    empty = sum(text == "" for text, _ in captioned) / 1000
    assert 0.06 < empty < 0.15
    assert any(text and not known.subjects for text, known in captioned)
    unsaid = dict.fromkeys(world.USUAL, 0)
    for i, (_, known) in enumerate(captioned):
        shown = captions.facts(scenes, i)
        if [s for s, _ in known.subjects] == [s for s, _ in shown.subjects]:
            for attribute in world.USUAL:
                if getattr(known, attribute) is None:
                    assert attribute in captions.usual(shown)
                    unsaid[attribute] += 1
    assert min(unsaid.values()) > 50
    boat = captions.Facts((("boat", "red"),))
    said = {captions.sentence(boat, captions.Wording(rng)) for _ in range(400)}
    assert "a red boat sails" in said


def test_words_added_later_keep_the_numbers_of_the_others() -> None:
    first = captions.first_words()
    assert captions.vocabulary()[: len(first)] == first and len(first) + 3 <= 568  # as in the shipped tokenizer
    assert set(lexicon.LIKE.values()) <= set(first) and not set(lexicon.LIKE) & set(first)


def test_the_vocabulary_covers_the_grammar() -> None:
    rng = random.Random(0)
    tok = nets.tokenizer()
    scenes = world.sample(1500, 6, keep="any", two_subjects=0.4)
    texts = [captions.prompt(captions.facts(scenes, i), rng) for i in range(1500)]
    assert not any(nets.UNK in ids for ids in tok(texts).input_ids)


def test_training_captions_fit_their_length() -> None:
    rng = random.Random(1)
    tok = nets.tokenizer()
    scenes = world.sample(3000, 7, two_subjects=0.5)
    texts = [captions.training_caption(captions.facts(scenes, i), rng)[0] for i in range(3000)]
    assert max(map(len, tok(texts).input_ids)) < nets.TRAIN_TEXT_LENGTH


def test_captions_for_images_say_the_motion_briefly() -> None:
    rng = random.Random(2)
    tok = nets.tokenizer()
    scenes = world.sample(1000, 8, two_subjects=0.4)
    texts = [captions.image_caption(captions.facts(scenes, i), rng) for i in range(1000)]
    ids = tok(texts).input_ids
    assert not any(nets.UNK in row for row in ids) and max(map(len, ids)) < nets.TRAIN_TEXT_LENGTH
    assert sum(map(len, ids)) / 1000 < 9
    assert 0.06 < texts.count("") / 1000 < 0.15
    plain = captions.Facts((("boat", None),), "left")
    wanted = {"the boat sails left", "it sails left", "sailing left"}
    assert not wanted - {captions.image_caption(plain, rng) for _ in range(4000)}


def test_midway_changes_only_where_subjects_are() -> None:
    scenes = world.sample(50, 9, two_subjects=0.5)
    late = world.midway(scenes, 1)
    same = [k for k in range(world.JITTERS) if k not in (2, 3)]
    assert torch.equal(late.jitter[:, same], scenes.jitter[:, same]) and torch.equal(late.motion, scenes.motion)
    assert bool((late.jitter >= scenes.jitter).all())
