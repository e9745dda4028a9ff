"""Validation of requests that does not depend on the model."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.core.errors import InvalidRequestError
from runtime.core.loras import Lora
from runtime.core.request import AUTO, MAX_PROMPT_CHARACTERS, MAX_SEED, MAX_SHIFT, MIN_SHIFT, GenerationRequest

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.integers()),
)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [("none", "none"), ("first-block", "first-block"), ("first-block:0.20", "first-block:0.2"),
     ("first-block:1", "first-block:1"), ("first-block:1e-3", "first-block:0.001"), ("magcache", "magcache"),
     ("magcache:0.120", "magcache:0.12"), ("taylorseer:2.0", "taylorseer:2"), ("taylorseer:8", "taylorseer:8")],
)  # fmt: skip
def test_a_step_cache_is_stored_in_its_shortest_notation(asked: str, kept: str) -> None:
    request = GenerationRequest(prompt="a boat", step_cache=asked)
    assert request.step_cache == kept
    assert GenerationRequest.from_mapping(request.to_json()) == request


@pytest.mark.parametrize(
    "value", ["", "first", "none:0.1", "first-block:", "first-block:0", "first-block:-1", "first-block:1.1",
              "first-block:nan", "first-block:inf", "first-block:x", "magcache:0", "magcache:2", "taylorseer:1",
              "taylorseer:2.5", "taylorseer:9", None, 7, [], {}, True, "x" * 10_000],
)  # fmt: skip
def test_an_invalid_step_cache_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest(prompt="a boat", step_cache=value)  # type: ignore[arg-type]  # on purpose
    assert refused.value.field == "step_cache" and len(refused.value.what) < 100


@pytest.mark.parametrize(
    ("asked", "kept"),
    [(None, None), ("auto", None), (5, 5.0), (MIN_SHIFT, 0.1), (MAX_SHIFT, 100.0), (3.25, 3.25)],
)
def test_a_shift_is_a_number_or_the_default(asked: object, kept: float | None) -> None:
    request = GenerationRequest(prompt="a boat", shift=asked)  # type: ignore[arg-type]  # as it is given
    assert request.shift == kept
    assert GenerationRequest.from_mapping(request.to_json()) == request


@pytest.mark.parametrize(
    "value", [0, -1, 0.0999, 100.1, 1e30, 10**400, math.nan, math.inf, -math.inf, "", "5", "none", True, [], {}, b"5"]
)
def test_an_invalid_shift_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest(prompt="a boat", shift=value)  # type: ignore[arg-type]  # on purpose
    assert refused.value.field == "shift" and len(refused.value.what) < 100
    assert "from 0.1 to 100" in refused.value.remedy


def test_requests_of_earlier_versions_are_read() -> None:
    stored = GenerationRequest(prompt="a boat", loras=["a:0.5"]).to_json()  # type: ignore[arg-type]  # as it is given
    assert GenerationRequest.from_mapping(stored).loras == (Lora("a", 0.5),)
    for name in ("loras", "step_cache", "shift", "vae_precision"):
        del stored[name]
    read = GenerationRequest.from_mapping(stored)
    assert (read.loras, read.step_cache, read.shift, read.vae_precision) == ((), "none", None, "auto")


def test_all_fields_but_the_prompt_have_defaults() -> None:
    request = GenerationRequest(prompt="  a red boat ")
    assert request.prompt == "a red boat"
    assert request.negative_prompt is None
    assert {request.width, request.frames, request.steps, request.guidance_scale, request.seed} == {AUTO}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("width", -16),
        ("width", 10**9),
        ("width", 16.5),
        ("width", "190"),
        ("width", True),
        ("width", None),
        ("frames", 0),
        ("fps", 0),
        ("fps", math.nan),
        ("steps", 0),
        ("guidance_scale", math.inf),
        ("guidance_scale", math.nan),
        ("guidance_scale", -0.1),
        ("guidance_scale_2", "3"),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("negative_prompt", "a\x00b"),
        ("model", ""),
        ("prompt", ""),
        ("prompt", "x" * (MAX_PROMPT_CHARACTERS + 1)),
        ("prompt", 7),
    ],
)
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerationRequest.from_mapping({"prompt": "a red boat", field: value})
    assert caught.value.field == field
    assert caught.value.what.endswith(".")
    assert caught.value.remedy.endswith(".")


def test_whole_floats_are_numbers() -> None:
    # Browsers and JSON have one number type.
    request = GenerationRequest.from_mapping({"prompt": "a red boat", "width": 192.0, "guidance_scale": 4})
    assert (request.width, type(request.width)) == (192, int)
    assert (request.guidance_scale, type(request.guidance_scale)) == (4.0, float)


@pytest.mark.parametrize(
    "text", ["🚤 a red boat", "une barque rouge à l’aube", "红色的船", "a\tred\nboat", "👩‍🚀 star"]
)
def test_unicode_and_line_ends_are_text(text: str) -> None:
    assert GenerationRequest(prompt=text).prompt == text


def test_unknown_settings_are_named() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest.from_mapping({"prompt": "a red boat", "widht": 192})
    assert (refused.value.code, refused.value.data["field"]) == ("request.unknown_field", "'widht'")


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # speed is not what is tested
@given(st.dictionaries(st.sampled_from(sorted(GenerationRequest.model_fields)), ANYTHING))
def test_any_mapping_gives_a_request_or_one_refusal(values: dict[str, Any]) -> None:
    try:
        request = GenerationRequest.from_mapping(values)
    except InvalidRequestError as error:
        assert "\n" not in error.what
        assert "\n" not in error.remedy
    else:
        assert GenerationRequest.from_mapping(request.to_json()) == request
