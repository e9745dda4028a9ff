"""Generate captions of scenes: a grammar with synonyms, free word order and omitted attributes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace

from tools.diorama import lexicon as lx
from tools.diorama.world import BACKDROPS, COLOURS, MOTIONS, SUBJECTS, TIMES, USUAL, WEATHERS, Scenes

# Shares of training captions that are empty, name one attribute, or do not name the subject.
EMPTY, SINGLE, PARTIAL = 0.10, 0.07, 0.06
OMIT = (0.1, 0.5, 0.9)  # how often a caption leaves out what is usual; each of its captions draws one of these
COLOUR_UNSAID = 0.2
UNKNOWN = "zzz"  # replaces any word outside the vocabulary


@dataclass(frozen=True)
class Facts:
    """One scene in names; ``None`` leaves an attribute unsaid. ``subjects`` pairs each subject with its colour."""

    subjects: tuple[tuple[str | None, str | None], ...] = ()
    motion: str | None = None
    backdrop: str | None = None
    time: str | None = None
    weather: str | None = None


@dataclass
class Wording:
    """How a sentence is worded; ``plain`` takes the usual word for everything."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    plain: bool = False

    def pick(self, options: tuple, usual: float = 0.4) -> str:
        """One of ``options``, the first with at least chance ``usual``."""
        if self.plain or self.rng.random() < usual:
            return options[0]
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        """True in ``share`` of the cases, never where plain."""
        return not self.plain and self.rng.random() < share


def facts(scenes: Scenes, index: int) -> Facts:
    """All that scene ``index`` shows, in names."""
    pairs = zip(scenes.subject[index].tolist(), scenes.colour[index].tolist(), strict=True)
    return Facts(
        tuple((SUBJECTS[s], COLOURS[c]) for s, c in pairs if s >= 0),
        MOTIONS[int(scenes.motion[index])],
        BACKDROPS[int(scenes.backdrop[index])],
        TIMES[int(scenes.time[index])],
        WEATHERS[int(scenes.weather[index])],
    )


def usual(known: Facts) -> list[str]:
    """The attributes of a scene that its caption may leave out, because a person would draw them so."""
    names = [s for s, _ in known.subjects]
    if not names or None in names:
        return []
    return [a for a, table in USUAL.items() if all(getattr(known, a) in table[s] for s in names if s)]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def noun_phrase(known: Facts, w: Wording) -> tuple[str, bool]:
    """What is seen, and whether it is more than one; the phrase may be empty."""
    if not known.subjects:
        return "", False

    def words(subject: str | None, colour: str | None, plural: bool) -> str:
        tint = w.pick(lx.COLOUR_WORDS[colour], 0.7) if colour else ""
        adjective = w.rng.choice(lx.SUBJECT_ADJECTIVES) if w.chance(0.3) else ""
        if known.motion is None and subject and w.chance(0.1):
            adjective = w.rng.choice(lx.OWN_VERBS[subject])[2]  # "a flying bird"
        if subject is None:
            noun = "things" if plural else "thing"
        elif w.plain:
            noun = lx.SUBJECT_NOUNS[subject][0][plural]
        else:
            noun = w.pick(tuple(n[plural] for n in lx.SUBJECT_NOUNS[subject]), 0.5)
        return " ".join(x for x in (adjective, tint, noun) if x)

    def with_article(text: str) -> str:
        return f"the {text}" if w.chance(0.2) else f"{_article(text)} {text}"

    if len(known.subjects) == 1:
        return with_article(words(*known.subjects[0], False)), False
    first, second = known.subjects
    if first == second:
        number = w.pick(("two", "two", "a pair of", "2", "a couple of"), 0.5)
        return f"{number} {words(*first, True)}", True
    pair = [first, second]
    if w.chance(0.5):
        pair.reverse()
    joint = w.pick(("and", "and", "with", "next to"), 0.6)
    return f" {joint} ".join(with_article(words(*s, False)) for s in pair), True


def verb_phrase(known: Facts, form: int, w: Wording) -> str:
    """The motion, or what the subject usually does; ``form`` is 0 for "sails", 1 for "sail", 2 for "sailing"."""
    motion = known.motion
    names = {s for s, _ in known.subjects}
    own = lx.OWN_VERBS[next(iter(names)) or ""] if len(names) == 1 and None not in names else ()
    if motion is None and not (own and w.chance(0.7)):
        return ""
    adverb = w.rng.choice(lx.ADVERBS) if w.chance(0.2) else ""
    if motion is None:
        verb = w.rng.choice(own)[form]
        return f"{verb} {adverb}".strip() if w.chance(0.7) else f"{adverb} {verb}".strip()
    bare = motion == "bouncing" or (motion in lx.MOTION_VERBS and (w.rng.random() < 0.55 or w.plain))
    if bare:
        verb = lx.MOTION_VERBS[motion][0][form] if w.plain else w.rng.choice(lx.MOTION_VERBS[motion])[form]
        direction = w.pick(lx.DIRECTIONS[motion]) if motion in ("up", "down") and w.chance(0.3) else ""
        if direction.startswith(verb.rsplit(" ", maxsplit=1)[-1]):
            direction = ""
    else:
        verbs = (*own, *own, *lx.GENERIC) if own else lx.GENERIC
        verb = verbs[0][form] if w.plain else w.rng.choice(verbs)[form]
        direction = w.pick(lx.DIRECTIONS[motion])
    order = [adverb, verb, direction] if w.chance(0.5) else [verb, direction, adverb]
    return " ".join(x for x in order if x)


def _place(known: Facts, w: Wording) -> str:
    if known.backdrop is None:
        return ""
    adjective = w.rng.choice(lx.PLACE_ADJECTIVES) if w.chance(0.25) else ""
    return " ".join(w.pick(lx.PLACES[known.backdrop], 0.3).format(adjective).split())


def _weather(known: Facts, w: Wording) -> str:
    if known.weather is None:
        return ""
    if known.weather == "snow" and known.backdrop not in (None, "snow") and w.chance(0.35):
        return "in the snow"
    if known.weather == "clear" and known.time == "day" and w.chance(0.3):
        return w.rng.choice(("on a sunny day", "in sunny weather", "in sunshine"))
    phrases = lx.WEATHER_WHEN[known.weather]
    if known.time not in (None, "day"):
        phrases = tuple(p for p in phrases if not p.endswith(" day"))
    return w.pick(phrases, 0.25)


def adverbials(known: Facts, w: Wording) -> list[str]:
    """Place, time and weather, in any order, some of them joined."""
    place = _place(known, w)
    if known.backdrop == "sky" and known.time and w.chance(0.2):
        noun = w.rng.choice(lx.TIME_NOUNS[known.time])
        return [x for x in (f"in the {noun} sky", _weather(known, w)) if x]
    unclear = known.weather == "snow" and known.backdrop in (None, "snow")
    if known.time and known.weather and not unclear and w.chance(0.3):
        noun = w.pick(lx.TIME_NOUNS[known.time], 0.6)
        adjective = w.pick(lx.WEATHER_ADJECTIVES[known.weather], 0.6)
        if known.time == "day" and known.weather == "clear" and w.chance(0.5):
            adjective = "sunny"
        joined = f"on a {adjective} {noun}"
        parts = [place, joined]
    else:
        when = w.pick(lx.TIMES_WHEN[known.time], 0.3) if known.time else ""
        parts = [place, when, _weather(known, w)]
    parts = [p for p in parts if p]
    if not w.plain and w.rng.random() < 0.5:
        w.rng.shuffle(parts)
    return parts


def _tags(known: Facts, w: Wording) -> str:
    parts = [noun_phrase(known, w)[0]]
    if w.chance(0.6):
        parts = [re.sub(r"\b(a|an|the) ", "", parts[0])]
    if known.backdrop:
        parts.append(w.rng.choice(lx.PLACE_TAGS[known.backdrop]))
    if known.time:
        parts.append(w.rng.choice(lx.TIME_NOUNS[known.time]))
    if known.weather:
        parts.append(w.rng.choice(lx.WEATHER_TAGS[known.weather]))
    if known.motion:
        parts.append(verb_phrase(known, 2, w))
    parts = [p for p in parts if p]
    if w.chance(0.5):
        w.rng.shuffle(parts)
    return ", ".join(parts)


def sentence(known: Facts, w: Wording) -> str:
    """One sentence that says what ``known`` holds and nothing else."""
    if w.chance(0.12):
        return _tags(known, w)
    who, plural = noun_phrase(known, w)
    where = adverbials(known, w)
    if not who:
        pieces = [verb_phrase(known, 2, w), *where] if w.chance(0.5) else [*where, verb_phrase(known, 2, w)]
        return ", ".join(p for p in pieces if p)
    style = 0.0 if w.plain else w.rng.random()
    comma = ", " if w.chance(0.4) else " "
    if style < 0.42:
        text = " ".join(x for x in (who, verb_phrase(known, int(plural), w)) if x)
        return comma.join([text, *where])
    if style < 0.62:
        text = " ".join(x for x in (who, verb_phrase(known, int(plural), w)) if x)
        split = w.rng.randint(0, len(where))
        front, back = " ".join(where[:split]), where[split:]
        if w.chance(0.5):
            front = re.sub(r"^(on|in|at) (a|an|the) ", "", front)
        return (f"{front}, " if front else "") + comma.join([text, *back])
    going = verb_phrase(known, 2, w)
    if style < 0.82:
        be = w.pick((" is", "")) if not plural else w.pick((" are", ""))
        parts = [going, *where] if w.chance(0.6) else [*where, going]
        opening = w.rng.choice(lx.OPENINGS) + " " if w.chance(0.3) and not be else ""
        return (opening + who + (be if going else "") + " " + comma.join(p for p in parts if p)).strip()
    there = "there are" if plural else "there is"
    opening = there if w.chance(0.5) else w.rng.choice(lx.OPENINGS)
    text = f"{opening} {who} " + comma.join(p for p in ([*where, going] if w.chance(0.5) else [going, *where]) if p)
    return text.strip()


def _nameless(known: Facts, w: Wording) -> Facts:
    """Without the subject, sometimes with its colour, and with some of the rest."""

    def keep(value: str | None) -> str | None:
        return None if w.rng.random() < 0.4 else value

    subjects = tuple((None, c) for _, c in known.subjects) if w.rng.random() < 0.3 else ()
    return Facts(subjects, keep(known.motion), keep(known.backdrop), keep(known.time), keep(known.weather))


def brief(known: Facts, rng: random.Random, omit: float) -> Facts:
    """``known`` without some of what is usual (each left out with chance ``omit``), sometimes without colours."""
    unsaid = {a: None for a in usual(known) if rng.random() < omit}
    subjects = known.subjects
    if rng.random() < COLOUR_UNSAID * omit:
        subjects = tuple((s, None) for s, _ in subjects)
    return replace(known, subjects=subjects, **unsaid)


def _single(known: Facts, w: Wording) -> tuple[str, Facts]:
    """One attribute alone, as a negative prompt names it, and what it says."""
    colour = known.subjects[0][1]
    what = w.rng.randrange(1, 6)
    if what == 1 and colour and len({c for _, c in known.subjects}) == 1:
        return w.pick(lx.COLOUR_WORDS[colour], 0.7), Facts(((None, colour),))
    if what == 2 and known.backdrop:
        tag = w.rng.choice(lx.PLACE_TAGS[known.backdrop])
        return w.rng.choice((_place(known, w), tag)), Facts(backdrop=known.backdrop)
    if what == 3 and known.time:
        options = (w.rng.choice(lx.TIMES_WHEN[known.time]), w.rng.choice(lx.TIME_NOUNS[known.time]))
        return w.rng.choice(options), Facts(time=known.time)
    if what == 4 and known.motion:
        mentioned = Facts(motion=known.motion)
        return verb_phrase(mentioned, 2, w), mentioned
    assert known.weather
    mentioned = Facts(weather=known.weather)
    return w.rng.choice((w.rng.choice(lx.WEATHER_TAGS[known.weather]), _weather(mentioned, w))), mentioned


def sprinkle(text: str, w: Wording) -> str:
    """``text`` with a few added words without meaning, some of them unknown."""
    words = text.split()
    for _ in range(w.rng.choice((1, 1, 1, 2, 3))):
        extra = UNKNOWN if w.rng.random() < 0.5 else w.rng.choice(_HARMLESS)
        words.insert(w.rng.randint(0, len(words)), extra)
    return " ".join(words)


# Fillers that would change the meaning in the wrong place stay out of the sprinkling.
_LOADED = {"two", "2", "both", "pair", "up", "down", "no", "not", "without", "top", "bottom", "side", "around", "sun",
           "moon", "sunlight", "moonlit", "moonlight", "starry", "cloudy", "cloud", "wave", "hill", "mountain", "house",
           "building", "street", "tree", "cactus", "dune", "peak", "field", "ice", "winter", "sunny", "dark", "day",
           "landscape", "high", "low", "over", "under", "together", "many", "few", "light", "another"}  # fmt: skip
_HARMLESS = tuple(f for f in lx.FILLERS if f not in _LOADED)


def training_caption(known: Facts, rng: random.Random) -> tuple[str, Facts]:
    """A training caption and the attributes it states.

    Mostly a sentence that leaves out some of what is usual, sometimes one attribute, no subject, or nothing.
    """
    w = Wording(rng)
    luck = rng.random()
    if luck < EMPTY:
        return "", Facts()
    if luck < EMPTY + SINGLE:
        return _single(known, w)
    nameless = luck < EMPTY + SINGLE + PARTIAL
    mentioned = _nameless(known, w) if nameless else brief(known, rng, rng.choice(OMIT))
    text = sentence(mentioned, w)
    return (sprinkle(text, w) if rng.random() < 0.2 else text), mentioned


def image_caption(known: Facts, rng: random.Random) -> str:
    """A short caption for a clip that starts from an image: the motion, and of the rest what a person would repeat."""
    w = Wording(rng)
    luck = rng.random()
    if luck < EMPTY:
        return ""
    if luck < 0.3:
        who = "they" if len(known.subjects) > 1 else "it"
        text = f"{who} {verb_phrase(known, int(len(known.subjects) > 1), w)}"
        return text if rng.random() < 0.6 else verb_phrase(known, 2, w)
    subjects = tuple((s, c if rng.random() < 0.3 else None) for s, c in known.subjects)
    if len({s for s, _ in subjects}) == 1:  # twins are "two boats"
        subjects = tuple((s, subjects[0][1]) for s, _ in subjects)
    backdrop = known.backdrop if rng.random() < 0.2 else None
    text = sentence(Facts(subjects, known.motion, backdrop), w)
    return re.sub(r"\b(a|an) (?!pair|couple)", "the ", text, count=1) if rng.random() < 0.6 else text


def prompt(known: Facts, rng: random.Random) -> str:
    """A complete sentence with every attribute, in free wording, for grading."""
    return sentence(known, Wording(rng))


def vocabulary() -> list[str]:
    """Every word the grammar can say or passes over: sorted, and after them those that are like another."""
    return [*first_words(), *sorted(lx.LIKE)]


def first_words() -> list[str]:
    """The vocabulary without the words of ``LIKE``, sorted."""
    texts: list[str] = list(lx.FILLERS)
    for table in (lx.COLOUR_WORDS, lx.DIRECTIONS, lx.PLACES, lx.PLACE_TAGS, lx.TIMES_WHEN, lx.TIME_NOUNS,
                  lx.WEATHER_WHEN, lx.WEATHER_ADJECTIVES, lx.WEATHER_TAGS):  # fmt: skip
        texts += [t for row in table.values() for t in row]
    for rows in (lx.SUBJECT_NOUNS, lx.OWN_VERBS, lx.MOTION_VERBS):
        texts += [t for row in rows.values() for forms in row for t in forms]
    texts += [t for forms in lx.GENERIC for t in forms]
    texts += [*lx.SUBJECT_ADJECTIVES, *lx.PLACE_ADJECTIVES, *lx.ADVERBS, *lx.OPENINGS]
    texts += ["a couple of", "next to", "there is", "there are", "in sunshine", "on a sunny day", "traveling"]
    return sorted(set(re.findall(r"[a-z0-9]+", " ".join(texts).lower())) - set(lx.LIKE))
