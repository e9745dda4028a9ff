"""Limits for visitors of a share link."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, LimitError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.models.spec import ModelSpec
from runtime.server import visitor_limits, visitors
from runtime.server.visitor_limits import Limits
from runtime.ui.sharing import make_password

LIMITS = Limits(frames=33, steps=20, sizes=((192, 112), (160, 160)), waiting=2, waiting_all=5, per_hour=3)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    return tiny("wan2.2-a14b")


def asked(**values: Any) -> GenerationRequest:
    wanted: dict[str, Any] = {"prompt": "a boat", "width": 192, "height": 112, "frames": 33, "steps": 20}
    return GenerationRequest(**wanted | values)


def exceeded(field: str, value: int, maximum: int) -> Fact:
    return Fact("server.visitor_maximum", {"field": field, "value": value, "maximum": maximum})


def too_large(width: int, height: int) -> Fact:
    return Fact(
        "server.visitor_size", {"field": "width", "width": width, "height": height, "maximum": "192×112 or 160×160"}
    )


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({}, None, None),
        ({"width": 112, "height": 192}, None, None),
        ({"width": 160, "height": 160}, None, None),
        ({"width": 16, "height": 16, "frames": 1, "steps": 1}, None, None),
        ({"frames": 37}, "frames", exceeded("frames", 37, 33)),
        ({"steps": 21}, "steps", exceeded("steps", 21, 20)),
        ({"width": 208}, "width", too_large(208, 112)),
        ({"height": 160}, "width", too_large(192, 160)),
        ({"width": 8192, "height": 16}, "width", too_large(8192, 16)),
    ],
    ids=str,
)
def test_videos_over_the_limits_are_rejected(values: dict[str, Any], field: str | None, expected: Fact | None) -> None:
    if field is None:
        visitor_limits.check_request(asked(**values), LIMITS)
        return
    with pytest.raises(InvalidRequestError) as refused:
        visitor_limits.check_request(asked(**values), LIMITS)
    assert (refused.value.field, refused.value.fact) == (field, expected)


@pytest.mark.parametrize(
    ("own", "everybody", "before", "expected"),
    [
        (0, 0, (), None),
        (1, 4, (0.0, 0.0), None),
        (2, 2, (), Fact("server.visitor_queue_full", {"maximum": 2})),
        (0, 5, (), Fact("server.queue_full")),
        (0, 0, (6450.0, 7000.0, 9900.0), Fact("server.visitor_rate", {"maximum": 3, "minutes": 1})),
        (0, 0, (7600.0, 9000.0, 9900.0), Fact("server.visitor_rate", {"maximum": 3, "minutes": 20})),
        (0, 0, (6400.0, 9000.0, 9900.0), None),
        # The clock is one that never goes back, but starts anywhere.
        (0, 0, (-5000.0, -4000.0, -3000.0), None),
    ],
)
def test_the_queue_has_limits(own: int, everybody: int, before: tuple[float, ...], expected: Fact | None) -> None:
    if expected is None:
        visitor_limits.check_queue(LIMITS, own, everybody, before, 10_000.0)
        return
    with pytest.raises(LimitError) as refused:
        visitor_limits.check_queue(LIMITS, own, everybody, before, 10_000.0)
    assert refused.value.fact == expected


def test_a_visitor_may_choose_the_shift(spec: ModelSpec) -> None:
    assert visitor_limits.filled_in(asked(shift=5.0), spec, LIMITS).shift == 5.0


def test_execution_settings_of_visitors_are_ignored(spec: ModelSpec) -> None:
    wanted = asked(vae_precision="float32", attention="native", compile="never", offload="model")
    assert visitor_limits.filled_in(wanted, spec, LIMITS) == visitor_limits.filled_in(asked(), spec, LIMITS)


@pytest.mark.parametrize("limits", [LIMITS, replace(LIMITS, waiting=1, per_hour=1)])
def test_every_limit_is_described(limits: Limits) -> None:
    text = visitor_limits.describe_limits(limits)
    for number in (limits.frames, limits.steps, limits.per_hour):
        assert str(number) in text
    assert "192×112" in text
    assert ("one video at a time" in text) == (limits.waiting == 1)


def test_limits_default_to_the_model(spec: ModelSpec, tmp_path: Path) -> None:
    own = visitor_limits.limits_of(Settings(cache_dir=tmp_path), spec)
    assert (own.frames, own.steps) == (spec.defaults.frames, spec.defaults.steps)
    visitor_limits.check_request(visitor_limits.filled_in(GenerationRequest(prompt="a boat"), spec, own), own)
    changed = visitor_limits.limits_of(
        Settings(cache_dir=tmp_path, share_frames=5, share_steps=2, share_size=(64, 48)), spec
    )
    assert (changed.frames, changed.steps, changed.sizes) == (5, 2, ((64, 48),))


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        Limits(frames=2, steps=1, sizes=((50, 40),), waiting=1, waiting_all=1, per_hour=1),
        Limits(frames=7, steps=3, sizes=((8191, 8191),), waiting=1, waiting_all=1, per_hour=1),
    ],
    ids=str,
)
def test_defaults_are_within_the_limits(spec: ModelSpec, limits: Limits) -> None:
    filled = visitor_limits.filled_in(GenerationRequest(prompt="a boat"), spec, limits)
    visitor_limits.check_request(filled, limits)
    assert (int(filled.frames) - 1) % spec.vae.scale_factor_temporal == 0
    assert int(filled.width) % spec.strides[0] == int(filled.height) % spec.strides[1] == 0


def test_a_models_smallest_size_is_the_least_that_visitors_get(tiny: Callable[[str], ModelSpec]) -> None:
    least = Limits(frames=9, steps=2, sizes=((50, 40),), waiting=1, waiting_all=1, per_hour=1)
    defaults = visitor_limits.defaults_within(tiny("ltx-2"), least)
    assert (defaults["width"], defaults["height"]) == (64, 64)


def test_visitors_cannot_choose_backends_or_memory_strategies(spec: ModelSpec) -> None:
    wish = GenerationRequest(
        prompt="a boat", backends={"all": "inductor"}, build="always", offload="group", quantization="fp8", seed=7
    )
    filled = visitor_limits.filled_in(wish, spec, LIMITS)
    assert (filled.backends, filled.build, filled.offload, filled.quantization) == ({}, "never", "auto", "auto")
    assert (filled.prompt, filled.seed) == ("a boat", 7)


def test_models_given_by_a_path_are_not_for_visitors(spec: ModelSpec, tmp_path: Path) -> None:
    here = replace(spec, name="tiny", directory=tmp_path / "weights" / "tiny")
    elsewhere = replace(spec, name="own", directory=tmp_path / "own")
    same_name = replace(spec, name="tiny", directory=tmp_path / "other" / "tiny")
    folders = {"tiny": tmp_path / "weights" / "tiny", "diorama": tmp_path / "diorama"}
    assert visitors.visitors_models({"tiny": here, str(tmp_path / "own"): elsewhere}, folders) == {"tiny": here}
    assert visitors.visitors_models({str(tmp_path / "other" / "tiny"): same_name}, folders) == {}


def test_paths_are_removed_from_visitors_messages() -> None:
    folders = {"the cache folder": Path("/home/anna/Cache"), "the home folder": Path("/home/anna")}
    text = visitors.without_paths("The disk of /home/anna/Cache/outputs is full; see /home/anna/notes.", folders)
    assert text == "The disk of the cache folder/outputs is full; see the home folder/notes."


def test_passwords_are_random_syllables() -> None:
    made = {make_password() for _ in range(200)}
    assert len(made) == 200
    for password in made:
        groups = password.split("-")
        assert [len(group) for group in groups] == [6, 6, 6, 6]
        assert all(letter in "aeiou" for group in groups for letter in group[1::2])


def test_visitors_cannot_fill_the_disk() -> None:
    visitor_limits.check_disk(1 << 29)
    with pytest.raises(LimitError) as refused:
        visitor_limits.check_disk((1 << 29) - 1)
    assert refused.value.code == "server.disk_full"


def test_a_length_in_seconds_counts_as_its_frames(spec: ModelSpec) -> None:
    filled = visitor_limits.filled_in(asked(frames="auto", seconds=2, fps=16), spec, LIMITS)
    assert (filled.frames, filled.seconds) == (33, "auto")
    visitor_limits.check_request(filled, LIMITS)
    longer = visitor_limits.filled_in(asked(frames="auto", seconds=3, fps=16), spec, LIMITS)
    with pytest.raises(InvalidRequestError) as caught:
        visitor_limits.check_request(longer, LIMITS)
    assert caught.value.fact == exceeded("frames", 49, 33)
    with pytest.raises(InvalidRequestError):
        visitor_limits.filled_in(asked(seconds=1), spec, LIMITS)
