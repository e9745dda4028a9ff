"""Engines that match a component: their sizes and adapters; and the mismatches of those that do not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.imported.adapters import (
    Batch,
    ClipFrames,
    Denormalised,
    MaskedText,
    PaddedIds,
    RepeatedText,
    RestoredRows,
    Timestep,
    Types,
    UnreadRows,
)
from runtime.engines.imported.contract import Contract, Port
from runtime.engines.imported.importing import describe_matches
from runtime.engines.imported.matching import Match, find_matches
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile

LATENTS = Port("sample", "float16", (1, 16, 9, 60, 104))
TIME = Port("timestep", "int64", (1,))
TEXT = Port("encoder_hidden_states", "float16", (1, 512, 4096))
OUT = Port("out", "float16", (1, 16, 9, 60, 104))
# Latents, timestep, text and output of a plan: any number of frames of 45×80.
RANGE = ((1, 16, 1, 45, 80), (1, 16, 9, 45, 80), (1, 16, 21, 45, 80))
CARRIED = (
    replace(LATENTS, sizes=(1, 16, -1, 45, 80), ranges=(RANGE,)),
    TIME,
    replace(TEXT, sizes=(1, 4096, 4096)),
    replace(OUT, sizes=(1, 16, -1, 44, 80)),
)


@pytest.fixture
def wan(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    """Return a model of Wan's true width."""
    spec = tiny("wan2.1")
    return replace(spec, transformer=replace(spec.transformer, text_dim=4096))


def contract(*ports: Port, **changes: Any) -> Contract:
    """Return a contract; the last port is the output."""
    made = Contract(
        backend="tensorrt", made_by="TensorRT 10.3.0", inputs=ports[:-1], outputs=ports[-1:], precision="float16"
    )
    return replace(made, **changes)


def fit(spec: ModelSpec, *ports: Port, component: str | None = None) -> Match:
    """Return the first match."""
    return find_matches(contract(*ports), spec, component)[0]


def of_kind(match: Match, kind: type) -> Any:
    """Return the adapter of a kind, or `None`."""
    return next((adapter for adapter in match.adapters if isinstance(adapter, kind)), None)


def test_plan_with_names_dtypes_and_sizes_of_its_own(wan: ModelSpec) -> None:
    match = fit(wan, *CARRIED)
    assert match.component == "transformer"
    # Of 45 rows patches of two read 44: a clip of 640x352 loses nothing.
    assert match.profiles == (ShapeProfile((1, 44, 80), (9, 44, 80), (21, 44, 80)),)
    assert of_kind(match, UnreadRows) == UnreadRows(1, 0)
    assert of_kind(match, RepeatedText) == RepeatedText(8)
    assert of_kind(match, Timestep) == Timestep(1, True, (1, 2, 2))
    types = (("latents", "float16"), ("timestep", "int64"), ("text_embeds", "float16"))
    assert of_kind(match, Types) == Types(types, (("velocity", "float16"),))
    assert match.batch == Batch(1)
    assert match.exact
    assert len(match.describe()) == 6


def test_matching_contract_needs_only_names_and_timestep(wan: ModelSpec) -> None:
    match = fit(wan, LATENTS, replace(TIME, dtype="float32"), TEXT, OUT)
    assert [type(adapter).__name__ for adapter in match.adapters] == ["Timestep", "Types", "Names"]
    assert match.profiles == (ShapeProfile.fixed((9, 60, 104)),)


@pytest.mark.parametrize("names", [("x", "t", "context"), ("latents", "timesteps", "prompt_embeds"), ("a", "b", "c")])
def test_inputs_are_assigned_by_name_or_axes(wan: ModelSpec, names: tuple[str, str, str]) -> None:
    ports = [replace(port, name=name) for port, name in zip((LATENTS, TIME, TEXT), names, strict=True)]
    match = fit(wan, *reversed(ports), OUT)
    inputs = dict(match.adapters[-1].inputs)  # type: ignore[attr-defined]
    assert inputs == dict(zip(("latents", "timestep", "text_embeds"), names, strict=True))


@pytest.mark.parametrize(
    ("given", "out", "adapter", "height"),
    [
        (45, 44, UnreadRows(1, 0), 44),
        (45, 45, UnreadRows(1, 0), 44),
        (46, 45, RestoredRows(1, 0), 46),
        (46, 44, RestoredRows(2, 0), 46),
        (46, 46, None, 46),
        (46, -1, None, 46),
    ],
)
def test_adapters_of_missing_and_unread_rows(
    wan: ModelSpec, given: int, out: int, adapter: object, height: int
) -> None:
    sizes = (1, 16, 9, given, 80), (1, 16, 9, out, 80)
    match = fit(wan, replace(LATENTS, sizes=sizes[0]), TIME, TEXT, replace(OUT, sizes=sizes[1]))
    assert match.profiles == (ShapeProfile.fixed((9, height, 80)),)
    assert (of_kind(match, UnreadRows) or of_kind(match, RestoredRows)) == adapter
    assert match.exact is not isinstance(adapter, RestoredRows)


def test_dynamic_heights_are_multiples_of_the_patch(wan: ModelSpec) -> None:
    ranges = (((1, 16, 1, 31, 41), (1, 16, 5, 45, 81), (1, 16, 21, 61, 105)),)
    free = replace(LATENTS, sizes=(1, 16, -1, -1, -1), ranges=ranges)
    match = fit(wan, free, TIME, TEXT, replace(OUT, sizes=(1, 16, -1, -1, -1)))
    assert match.profiles == (ShapeProfile((1, 32, 42), (5, 44, 80), (21, 60, 104)),)
    assert of_kind(match, UnreadRows) is None


def test_dynamic_sizes_without_ranges_are_the_models(wan: ModelSpec) -> None:
    free = replace(LATENTS, sizes=(-1, 16, -1, -1, -1))
    (profile,) = fit(wan, free, TIME, replace(TEXT, sizes=(-1, -1, 4096)), free).profiles
    widths, heights = zip(*wan.sizes, strict=True)
    assert profile.min == (1, min(heights) // 8, min(widths) // 8)
    assert profile.max == ((max(wan.frame_counts) - 1) // 4 + 1, max(heights) // 8, max(widths) // 8)
    assert profile.serves(profile.opt)


@pytest.mark.parametrize(
    ("tokens", "mask", "adapter"),
    [
        (512, False, None),
        (1024, False, RepeatedText(2)),
        (4096, False, RepeatedText(8)),
        (700, True, MaskedText(700)),
        (4096, True, MaskedText(4096)),
        (512, True, MaskedText(0)),
        (-1, False, None),
    ],
)
def test_adapters_of_the_text_length(wan: ModelSpec, tokens: int, mask: bool, adapter: object) -> None:
    masks = [Port("encoder_attention_mask", "int64", (1, tokens))] if mask else []
    match = fit(wan, LATENTS, TIME, replace(TEXT, sizes=(1, tokens, 4096)), *masks, OUT)
    assert (of_kind(match, RepeatedText) or of_kind(match, MaskedText)) == adapter
    assert match.exact


def test_engine_with_batch_two(wan: ModelSpec) -> None:
    pair = [replace(port, sizes=(2, *port.sizes[1:])) for port in (LATENTS, TIME, TEXT, OUT)]
    match = fit(wan, *pair)
    assert match.batch == Batch(2)
    assert match.batch.describe() == Fact("engine.adapter_batch", {"size": 2})
    assert of_kind(match, Timestep).count == 2


def test_both_experts_match(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.2-a14b")
    ports = contract(LATENTS, TIME, replace(TEXT, sizes=(1, 512, 32)), OUT)
    both, single = find_matches(ports, spec), find_matches(ports, spec, "transformer_2")
    assert [match.component for match in both] == ["transformer", "transformer_2"]
    assert [match.component for match in single] == ["transformer_2"]
    undecided = Fact("engine.import_compared_later")
    assert [undecided in describe_matches(matches, spec) for matches in (both, single)] == [True, False]


Z = Port("latent", "float32", (1, 16, 21, 60, 104))


@pytest.mark.parametrize(
    ("sizes", "order"),
    [((1, 3, 81, 480, 832), "bcfhw"), ((1, 84, 3, 480, 832), "bfchw"), ((1, 81, 480, 832, 3), "bfhwc")],
)
def test_clip_decoder(wan: ModelSpec, sizes: tuple[int, ...], order: str) -> None:
    found = find_matches(contract(Z, Port("video", "float32", sizes)), wan)
    assert [match.program for match in found] == ["vae_clip", "vae_clip"]
    # Whether it puts mean and deviation back by itself is found out by comparing.
    assert [of_kind(match, Denormalised) is None for match in found] == [False, True]
    assert of_kind(found[0], ClipFrames) == ClipFrames(order, 21, 4)
    assert found[0].profiles == (ShapeProfile((1, 60, 104), (21, 60, 104), (21, 60, 104)),)


def test_text_encoder(wan: ModelSpec) -> None:
    ids, mask = Port("tokens", "int32", (1, 600)), Port("text_mask", "int32", (1, 600))
    match = fit(wan, ids, mask, Port("out", "float16", (1, 600, 4096)))
    assert (match.component, match.profiles) == ("text_encoder", (ShapeProfile.fixed((1, 1, 1)),))
    assert of_kind(match, PaddedIds) == PaddedIds(600)


IMAGE = Port("encoder_hidden_states_image", "float16", (1, 257, 1280))
REFUSED: list[tuple[str, tuple[Port, ...], str | None, str, dict[str, Any]]] = [
    (
        "700 tokens",
        (LATENTS, TIME, replace(TEXT, sizes=(1, 700, 4096)), OUT),
        None,
        "mismatch_long_text",
        {"tokens": 700, "wanted": 512},
    ),
    (
        "77 tokens",
        (LATENTS, TIME, replace(TEXT, sizes=(1, 77, 4096)), OUT),
        None,
        "mismatch_short_text",
        {"tokens": 77, "wanted": 512},
    ),
    (
        "text width",
        (LATENTS, TIME, replace(TEXT, sizes=(1, 512, 768)), OUT),
        None,
        "mismatch_size",
        {"axis": 2, "size": 768, "own": 4096},
    ),
    ("image input", (LATENTS, TIME, TEXT, IMAGE, OUT), None, "mismatch_extra_input", {"input": str(IMAGE)}),
    (
        "36 channels",
        (replace(LATENTS, sizes=(1, 36, 9, 60, 104)), TIME, TEXT, OUT),
        None,
        "mismatch_size",
        {"axis": 1, "size": 36, "own": 16},
    ),
    ("no timestep", (LATENTS, TEXT, OUT), None, "mismatch_missing_input", {"input": "timestep"}),
    (
        "float mask",
        (LATENTS, TIME, TEXT, Port("mask", "float16", (1, 512)), OUT),
        None,
        "mismatch_mask",
        {"mask": "mask (1, 512) float16"},
    ),
    ("tokens out", (LATENTS, TIME, TEXT, replace(OUT, sizes=(1, 14040, 64))), None, "mismatch_outputs", {"axes": 5}),
    ("larger out", (LATENTS, TIME, TEXT, replace(OUT, sizes=(1, 16, 9, 62, 104))), None, "mismatch_output", {}),
    (
        "two rows short of odd",
        (CARRIED[0], *CARRIED[1:3], replace(OUT, sizes=(1, 16, -1, 43, 80))),
        None,
        "mismatch_output",
        {"input": str(CARRIED[0])},
    ),
    ("no colors", (Z, Port("video", "float32", (1, 4, 81, 480, 832))), None, "mismatch_colors", {}),
    (
        "no mask",
        (Port("ids", "int64", (1, 512)), Port("out", "float32", (1, 512, 4096))),
        None,
        "mismatch_ids_and_mask",
        {"inputs": ["ids"]},
    ),
    ("another kind", (LATENTS, TIME, TEXT, OUT), "vae", "mismatch_kind", {"kind": "transformer"}),
]


@pytest.mark.parametrize(
    ("ports", "component", "code", "data"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_mismatch_is_named(
    wan: ModelSpec, ports: tuple[Port, ...], component: str | None, code: str, data: dict[str, Any]
) -> None:
    with pytest.raises(EngineError) as refused:
        find_matches(contract(*ports), wan, component)
    assert refused.value.code == "engine.import_mismatch"
    cause = refused.value.data["cause"]
    assert cause.code == f"engine.{code}"
    assert cause.data.items() >= data.items()


UNKNOWN: list[tuple[str, tuple[Port, ...], str | None, str, dict[str, Any]]] = [
    (
        "eight-bit input",
        (replace(LATENTS, dtype="float8_e4m3fn"), TIME, TEXT, OUT),
        None,
        "import_dtype_unsupported",
        {"tensor": "sample (1, 16, 9, 60, 104) float8_e4m3fn"},
    ),
    (
        "a classifier",
        (Port("image", "float32", (1, 3, 224, 224)), Port("out", "float32", (1, 1000))),
        None,
        "import_kind_unknown",
        {"inputs": ["image (1, 3, 224, 224) float32"]},
    ),
    ("nothing", (Port("out", "float32", (1,)),), None, "import_kind_unknown", {"inputs": []}),
    (
        "no such component",
        (LATENTS, TIME, TEXT, OUT),
        "transformer_2",
        "model.no_such_component",
        {"component": "transformer_2"},
    ),
]


@pytest.mark.parametrize(
    ("ports", "component", "code", "data"), [case[1:] for case in UNKNOWN], ids=[c[0] for c in UNKNOWN]
)
def test_unknown_kind_of_engine_is_refused(
    wan: ModelSpec, ports: tuple[Port, ...], component: str | None, code: str, data: dict[str, Any]
) -> None:
    with pytest.raises(EngineError) as refused:
        find_matches(contract(*ports), wan, component)
    assert refused.value.code == (code if "." in code else f"engine.{code}")
    assert refused.value.data.items() >= data.items()


def test_contract_survives_json() -> None:
    made = contract(*CARRIED, working_bytes=5 << 30, weight_files=("weights.data",))
    assert Contract.from_json(made.to_json()) == made
    made_for = {"backend": "TensorRT", "made_by": "TensorRT 10.3.0", "memory": 5 << 30}
    assert made.describe() == [
        Fact("engine.contract_with_memory", made_for),
        Fact("engine.contract_input", {"tensor": "sample (1, 16, any, 45, 80) float16"}),
        Fact("engine.contract_input", {"tensor": "timestep (1) int64"}),
        Fact("engine.contract_input", {"tensor": "encoder_hidden_states (1, 4096, 4096) float16"}),
        Fact("engine.contract_output", {"tensor": "out (1, 16, any, 44, 80) float16"}),
    ]
