"""LoRAs in a part of the steps: notation, refusals, and the steps in which they are active."""

from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.loras import Expert, Lora, LoraUse, active_ranges, loads_of_ranges, parse_lora, read_loras

TWO = {"transformer": 2, "transformer_2": 2}


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("style@0-0.5", Lora("style", 1.0, "both", 0.0, 0.5)),
        ("high=style:0.8@0.25-1", Lora("style", 0.8, "high", 0.25, 1.0)),
        (r"C:\style.safetensors:2@.1-.9", Lora(r"C:\style.safetensors", 2.0, "both", 0.1, 0.9)),
        ("style@0-1", Lora("style")),
        ("me@home", Lora("me@home")),
        ("style@first-last:0.5", Lora("style@first-last", 0.5)),
    ],
)
def test_a_range_follows_the_weight(text: str, lora: Lora) -> None:
    assert parse_lora(text) == lora
    assert parse_lora(str(lora)) == lora
    assert read_loras([vars(lora)]) == (lora,)


@pytest.mark.parametrize(
    ("loras", "code"),
    [
        (["style@0.5-0.5"], "lora.bad_range"),
        (["style:0.8@"], "lora.bad_range"),
        (["high=style:0.8@first-0.5"], "lora.bad_range"),
        (["style@0.5-0.2"], "lora.bad_range"),
        (["style@0-1.5"], "lora.bad_range"),
        (["style@0.1.2-0.5"], "lora.bad_range"),
        ([{"file": "style", "start": "first"}], "lora.bad_range"),
        ([{"file": "style", "end": True}], "lora.bad_range"),
        (["style@0-0.5", "style:0.3@0.4-1"], "lora.repeated"),
        (["style@0-0.5", "style"], "lora.repeated"),
    ],
)
def test_ranges_that_are_not_possible_are_refused(loras: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_loras(loras)
    assert (refused.value.field, refused.value.code) == ("loras", code)


def test_a_file_can_have_several_ranges() -> None:
    assert len(read_loras(["style@0-0.5", "style:0.3@0.5-1", "high=style@0-0.5"])) == 3


def use(start: float, end: float, expert: Expert = "both") -> LoraUse:
    """Return a LoRA with a range."""
    return LoraUse(file="a", path=Path("a"), digest="d", weight=1, expert=expert, start=start, end=end)


@pytest.mark.parametrize(
    ("loras", "experts", "active", "loads"),
    [
        ([use(0, 0.5)], {"transformer": 4}, [(0,), (0,), (), ()], {"transformer": 2}),
        ([use(0.3, 1)], {"transformer": 4}, [(), (), (0,), (0,)], {"transformer": 2}),
        ([use(0.25, 0.75)], {"transformer": 4}, [(), (0,), (0,), ()], {"transformer": 3}),
        ([use(0, 0.5), use(0.5, 1)], {"transformer": 2}, [(0,), (1,)], {"transformer": 2}),
        ([use(0, 1), use(0, 0.5)], {"transformer": 2}, [(1,), ()], {"transformer": 2}),
        ([use(0, 0.5)], TWO, [(0,), (0,), (), ()], {"transformer": 1}),
        ([use(0, 0.75)], TWO, [(0,), (0,), (0,), ()], {"transformer": 1, "transformer_2": 2}),
        ([use(0, 0.75, "low")], TWO, [(), (), (0,), ()], {"transformer_2": 2}),
        ([use(0.1, 0.2)], {"transformer": 4}, [(), (), (), ()], {}),
    ],
)  # fmt: skip
def test_a_step_belongs_to_the_range_in_which_it_begins(
    loras: list[LoraUse], experts: dict[str, int], active: list[tuple[int, ...]], loads: dict[str, int]
) -> None:
    names = [name for name, count in experts.items() for _ in range(count)]
    assert [active_ranges(loras, name, step, len(names)) for step, name in enumerate(names)] == active
    assert loads_of_ranges(loras, experts) == loads
