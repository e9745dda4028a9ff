"""Batches and grids: what varies, in which order, and what is refused."""

from typing import Any

import pytest

from runtime.core.batches import AXES, axes_of, grid_of, read_axis, varied
from runtime.core.errors import InvalidRequestError
from runtime.core.request import AUTO, FIELDS, PROMPT_SOURCES, GenerationRequest

BOAT = GenerationRequest(prompt="a boat", seed=7)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("steps=10,20", [{"steps": 10}, {"steps": 20}]),
        ("seed=1..3", [{"seed": 1}, {"seed": 2}, {"seed": 3}]),
        ("guidance=4.5", [{"guidance_scale": 4.5}]),
        ("guidance_scale=1, 2", [{"guidance_scale": 1}, {"guidance_scale": 2}]),
        ("step-cache=none|magcache:0.1", [{"step_cache": "none"}, {"step_cache": "magcache:0.1"}]),
        ("prompt=a boat, at sea|a kite", [{"prompt": "a boat, at sea"}, {"prompt": "a kite"}]),
        ("backend=vae=pytorch", [{"backends": ["vae=pytorch"]}]),
        ("lora=style:0.5,style:1", [{"loras": ["style:0.5"]}, {"loras": ["style:1"]}]),
        ("seconds=auto,2", [{"seconds": "auto"}, {"seconds": 2}]),
    ],
)
def test_axes_are_read(text: str, changes: list[dict[str, Any]]) -> None:
    assert read_axis(text) == changes
    assert len(grid_of(BOAT, [read_axis(text)])) == len(changes)


def test_the_last_axis_varies_first() -> None:
    made = grid_of(BOAT, axes_of({"steps": [2, 3], "seed": [1, 2]}))
    assert [(request.steps, request.seed) for request in made] == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert varied([request.to_json() for request in made]) == {"seed": [1, 2], "steps": [2, 3]}


def test_a_grid_has_one_seed_and_other_prompts_are_templates_again() -> None:
    made = grid_of(BOAT.replace(seed=AUTO), [read_axis("steps=1,2,3")])
    assert len({request.seed for request in made}) == 1 and made[0].seed != AUTO
    of_template = BOAT.replace(template="a {boat|kite}")
    assert [request.template for request in grid_of(of_template, [read_axis("prompt=a,b")])] == [None, None]
    assert {request.template for request in grid_of(of_template, [read_axis("steps=1,2")])} == {"a {boat|kite}"}
    made = [of_template.replace(prompt=prompt, seed=seed) for seed, prompt in enumerate(("a boat", "a kite"))]
    assert varied([request.to_json() for request in made]) == {"seed": [0, 1]}
    assert varied([]) == {} == varied([BOAT.to_json()])


@pytest.mark.parametrize(
    ("texts", "field", "code"),
    [
        (["steps"], "grid", "request.grid_without_values"),
        (["steps="], "grid", "request.grid_without_values"),
        (["steps=1,,2"], "grid", "request.grid_without_values"),
        (["stepz=1"], "grid", "request.grid_field"),
        (["template=a"], "grid", "request.grid_field"),
        (["seed=3..1"], "grid", "request.grid_range"),
        (["seed=1..9999999"], "grid", "request.grid_range"),
        (["steps=1", "steps=2"], "grid", "request.grid_repeated"),
        (["steps=1", "seed=2", "fps=8", "crf=1"], "grid", "request.grid_axes"),
        (["seed=1..40", "steps=1..40"], "grid", "queue.batch_too_large"),
        (["steps=1,0"], "steps", "request.out_of_range"),
        (["width=wide"], "width", "request.not_whole"),
        (["sound=on,loud"], "sound", "request.not_a_choice"),
    ],
)
def test_grids_are_refused(texts: list[str], field: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grid_of(BOAT, [read_axis(text) for text in texts])
    assert (refused.value.field, refused.value.code) == (field, code)


def test_a_grid_of_an_unknown_field_names_those_that_it_can_vary() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_axis("stepz=1")
    known = refused.value.data["known"]
    assert {"prompt", "negative-prompt", "steps", "seed", "guidance", "guidance_scale_2"} < set(known)
    assert {AXES[name] for name in known} == set(FIELDS) - {*PROMPT_SOURCES, "keyframes", "keyframe_seconds"}
    assert len(known) == len({AXES[name] for name in known})


@pytest.mark.parametrize("grid", [None, [], "steps", *({"steps": steps} for steps in (5, [], [1] * 1001, "12"))])
def test_a_grid_in_json_has_lists(grid: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        axes_of(grid)
    assert refused.value.code == "request.grid_not_lists"
