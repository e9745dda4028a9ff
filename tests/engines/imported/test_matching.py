"""Which engines fit, for which sizes, through which adapters; and what is said of those that do not."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime.core.errors import EngineError
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
from runtime.engines.imported.matching import Fitting, fittings
from runtime.models.spec import ModelSpec
from runtime.planner.shapes import ShapeProfile

LATENTS = Port("sample", "float16", (1, 16, 9, 60, 104))
TIME = Port("timestep", "int64", (1,))
TEXT = Port("encoder_hidden_states", "float16", (1, 512, 4096))
OUT = Port("out", "float16", (1, 16, 9, 60, 104))
# Latents, timestep, text and output of the plan that somebody has: any number of frames of 45×80.
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


def fit(spec: ModelSpec, *ports: Port, component: str | None = None) -> Fitting:
    """Return the first fitting."""
    return fittings(contract(*ports), spec, component)[0]


def of_kind(fitting: Fitting, kind: type) -> Any:
    """Return the adapter of a kind, or `None`."""
    return next((adapter for adapter in fitting.adapters if isinstance(adapter, kind)), None)


def test_the_plan_that_somebody_has(wan: ModelSpec) -> None:
    fitting = fit(wan, *CARRIED)
    assert fitting.component == "transformer"
    # Of 45 rows patches of two read 44: a clip of 640x352 loses nothing.
    assert fitting.profiles == (ShapeProfile((1, 44, 80), (9, 44, 80), (21, 44, 80)),)
    assert of_kind(fitting, UnreadRows) == UnreadRows(1, 0)
    assert of_kind(fitting, RepeatedText) == RepeatedText(8)
    assert of_kind(fitting, Timestep) == Timestep(1, True, (1, 2, 2))
    types = (("latents", "float16"), ("timestep", "int64"), ("text_embeds", "float16"))
    assert of_kind(fitting, Types) == Types(types, (("velocity", "float16"),))
    assert fitting.batch == Batch(1)
    assert fitting.exact
    assert len(fitting.lines()) == 6


def test_what_needs_little_gets_little(wan: ModelSpec) -> None:
    fitting = fit(wan, LATENTS, replace(TIME, dtype="float32"), TEXT, OUT)
    assert [type(adapter).__name__ for adapter in fitting.adapters] == ["Timestep", "Types", "Names"]
    assert fitting.profiles == (ShapeProfile.fixed((9, 60, 104)),)


@pytest.mark.parametrize("names", [("x", "t", "context"), ("latents", "timesteps", "prompt_embeds"), ("a", "b", "c")])
def test_names_are_known_or_told_by_their_axes(wan: ModelSpec, names: tuple[str, str, str]) -> None:
    ports = [replace(port, name=name) for port, name in zip((LATENTS, TIME, TEXT), names, strict=True)]
    fitting = fit(wan, *reversed(ports), OUT)
    inputs = dict(fitting.adapters[-1].inputs)  # type: ignore[attr-defined]
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
def test_rows(wan: ModelSpec, given: int, out: int, adapter: object, height: int) -> None:
    sizes = (1, 16, 9, given, 80), (1, 16, 9, out, 80)
    fitting = fit(wan, replace(LATENTS, sizes=sizes[0]), TIME, TEXT, replace(OUT, sizes=sizes[1]))
    assert fitting.profiles == (ShapeProfile.fixed((9, height, 80)),)
    assert (of_kind(fitting, UnreadRows) or of_kind(fitting, RestoredRows)) == adapter
    assert fitting.exact is not isinstance(adapter, RestoredRows)


def test_of_a_range_of_heights_the_even_ones_are_served(wan: ModelSpec) -> None:
    ranges = (((1, 16, 1, 31, 41), (1, 16, 5, 45, 81), (1, 16, 21, 61, 105)),)
    free = replace(LATENTS, sizes=(1, 16, -1, -1, -1), ranges=ranges)
    fitting = fit(wan, free, TIME, TEXT, replace(OUT, sizes=(1, 16, -1, -1, -1)))
    assert fitting.profiles == (ShapeProfile((1, 32, 42), (5, 44, 80), (21, 60, 104)),)
    assert of_kind(fitting, UnreadRows) is None


def test_without_ranges_it_serves_what_the_model_was_made_for(wan: ModelSpec) -> None:
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
def test_text(wan: ModelSpec, tokens: int, mask: bool, adapter: object) -> None:
    masks = [Port("encoder_attention_mask", "int64", (1, tokens))] if mask else []
    fitting = fit(wan, LATENTS, TIME, replace(TEXT, sizes=(1, tokens, 4096)), *masks, OUT)
    assert (of_kind(fitting, RepeatedText) or of_kind(fitting, MaskedText)) == adapter
    assert fitting.exact


def test_a_batch_of_two(wan: ModelSpec) -> None:
    pair = [replace(port, sizes=(2, *port.sizes[1:])) for port in (LATENTS, TIME, TEXT, OUT)]
    fitting = fit(wan, *pair)
    assert fitting.batch == Batch(2)
    assert "2 times" in fitting.batch.cost
    assert of_kind(fitting, Timestep).count == 2


def test_both_experts_are_tried(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.2-a14b")
    ports = contract(LATENTS, TIME, replace(TEXT, sizes=(1, 512, 32)), OUT)
    assert [fitting.component for fitting in fittings(ports, spec)] == ["transformer", "transformer_2"]
    assert [fitting.component for fitting in fittings(ports, spec, "transformer_2")] == ["transformer_2"]


Z = Port("latent", "float32", (1, 16, 21, 60, 104))


@pytest.mark.parametrize(
    ("sizes", "order"),
    [((1, 3, 81, 480, 832), "bcfhw"), ((1, 84, 3, 480, 832), "bfchw"), ((1, 81, 480, 832, 3), "bfhwc")],
)
def test_a_decoder_of_whole_clips(wan: ModelSpec, sizes: tuple[int, ...], order: str) -> None:
    found = fittings(contract(Z, Port("video", "float32", sizes)), wan)
    assert [fitting.program for fitting in found] == ["vae_clip", "vae_clip"]
    # Whether it puts mean and deviation back by itself is found out by comparing.
    assert [of_kind(fitting, Denormalised) is None for fitting in found] == [False, True]
    assert of_kind(found[0], ClipFrames) == ClipFrames(order, 21, 4)
    assert found[0].profiles == (ShapeProfile((1, 60, 104), (21, 60, 104), (21, 60, 104)),)


def test_a_text_encoder(wan: ModelSpec) -> None:
    ids, mask = Port("tokens", "int32", (1, 600)), Port("text_mask", "int32", (1, 600))
    fitting = fit(wan, ids, mask, Port("out", "float16", (1, 600, 4096)))
    assert (fitting.component, fitting.profiles) == ("text_encoder", (ShapeProfile.fixed((1, 1, 1)),))
    assert of_kind(fitting, PaddedIds) == PaddedIds(600)


IMAGE = Port("encoder_hidden_states_image", "float16", (1, 257, 1280))
REFUSED: list[tuple[str, tuple[Port, ...], str | None, str]] = [
    ("700 tokens", (LATENTS, TIME, replace(TEXT, sizes=(1, 700, 4096)), OUT), None, "no multiple of the model's 512"),
    ("77 tokens", (LATENTS, TIME, replace(TEXT, sizes=(1, 77, 4096)), OUT), None, "reads 77 text tokens"),
    ("text width", (LATENTS, TIME, replace(TEXT, sizes=(1, 512, 768)), OUT), None, "768 text values per token"),
    ("image input", (LATENTS, TIME, TEXT, IMAGE, OUT), None, "it takes encoder_hidden_states_image"),
    (
        "36 channels",
        (replace(LATENTS, sizes=(1, 36, 9, 60, 104)), TIME, TEXT, OUT),
        None,
        "36 channels, and the model 16",
    ),
    ("no timestep", (LATENTS, TEXT, OUT), None, "none of its inputs is a timestep"),
    ("float mask", (LATENTS, TIME, TEXT, Port("mask", "float16", (1, 512)), OUT), None, "may be factors or summands"),
    ("tokens out", (LATENTS, TIME, TEXT, replace(OUT, sizes=(1, 14040, 64))), None, "one tensor of 5 axes"),
    ("larger out", (LATENTS, TIME, TEXT, replace(OUT, sizes=(1, 16, 9, 62, 104))), None, "of sample"),
    ("two rows short of odd", (CARRIED[0], *CARRIED[1:3], replace(OUT, sizes=(1, 16, -1, 43, 80))), None, "of sample"),
    ("eight-bit edge", (replace(LATENTS, dtype="float8_e4m3fn"), TIME, TEXT, OUT), None, "cannot be handed over"),
    ("a classifier", (Port("image", "float32", (1, 3, 224, 224)), Port("out", "float32", (1, 1000))), None, "no kind"),
    ("nothing", (Port("out", "float32", (1,)),), None, "it takes nothing"),
    ("no colours", (Z, Port("video", "float32", (1, 4, 81, 480, 832))), None, "three colours"),
    ("no mask", (Port("ids", "int64", (1, 512)), Port("out", "float32", (1, 512, 4096))), None, "ids and a mask"),
    ("named otherwise", (LATENTS, TIME, TEXT, OUT), "vae", "by its inputs and outputs it is a transformer"),
    ("no such component", (LATENTS, TIME, TEXT, OUT), "transformer_2", "has no component 'transformer_2'"),
]


@pytest.mark.parametrize(("ports", "component", "says"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_no_adapter_bridges(wan: ModelSpec, ports: tuple[Port, ...], component: str | None, says: str) -> None:
    with pytest.raises(EngineError, match=re.escape(says)):
        fittings(contract(*ports), wan, component)


def test_a_contract_is_written_and_read_back_whole() -> None:
    made = contract(*CARRIED, working_bytes=5 << 30, beside=("weights.data",))
    assert Contract.from_json(made.to_json()) == made
    assert made.lines()[1:] == [
        "takes sample (1, 16, any, 45, 80) float16",
        "takes timestep (1) int64",
        "takes encoder_hidden_states (1, 4096, 4096) float16",
        "gives out (1, 16, any, 44, 80) float16",
    ]
