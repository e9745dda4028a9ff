"""Engine keys, shape profiles, and differences of keys."""

import json
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.planner.engine_index import EngineKey, ShapeProfile, differences, find
from tests.engines.engine_files import key, put

CHANGES: dict[str, Any] = {
    "program": "vae_next",
    "family": "cosmos",
    "architecture": "c" * 64,
    "weights": "d" * 64,
    "export_revision": 2,
    "profiles": (ShapeProfile.fixed((9, 14, 24)),),
    "precision": "bfloat16",
    "backend": "tensorrt",
    "builder": "onnx_tensorrt",
    "options": (("threads", "4"),),
    "versions": (("torch", "2.14.0"),),
    "device": "NVIDIA H200 sm90 CUDA 13.0",
    "system": "Windows AMD64",
}


def test_every_field_is_part_of_the_identity() -> None:
    assert set(CHANGES) == {field.name for field in fields(EngineKey)}
    digests = {key(**{name: value}).digest() for name, value in CHANGES.items()}
    assert len(digests | {key().digest()}) == len(CHANGES) + 1


def test_a_key_survives_json_and_keeps_its_digest() -> None:
    wanted = key(profiles=(ShapeProfile.fixed((1, 2, 3)), ShapeProfile((1, 2, 3), (2, 2, 3), (9, 9, 9))))
    read = EngineKey.from_json(json.loads(json.dumps(wanted.to_json())))
    assert read == wanted
    assert read.digest() == wanted.digest()


def test_a_digest_stays_the_same_over_releases() -> None:
    assert key().digest() == "288e222d09de67a6"


def test_the_order_of_options_and_versions_does_not_matter() -> None:
    one = key(options=(("a", "1"), ("b", "2")), versions=(("x", "1"), ("y", "2")))
    other = key(options=(("b", "2"), ("a", "1")), versions=(("y", "2"), ("x", "1")))
    assert one == other
    assert one.digest() == other.digest()


def test_a_key_of_other_types_is_refused(subtests: pytest.Subtests) -> None:
    others: list[object] = [None, True, 1.5, [], {}, [1], [["a"]], [{"min": [1, 1, 1]}], "absent"]
    for name, value in product([*CHANGES, "none of them"], others):
        with subtests.test(msg=f"{name}: {value}"):
            values = json.loads(json.dumps(key().to_json()))
            if value == "absent":
                values.pop(name, None)
                values.setdefault("more", 1)
            else:
                values[name] = value
            if name in {"options", "versions", "profiles"} and value == []:
                assert getattr(EngineKey.from_json(values), name) == ()
                continue
            with pytest.raises(ValidationError):
                EngineKey.from_json(values)


@pytest.mark.parametrize("size", [[0, 1, 1], [1, 1], [1, 1, 1, 1], [1, 1, "1"], [1, 1, True], [3, 1, 1], None])
def test_an_invalid_profile_is_refused(size: object) -> None:
    values = json.loads(json.dumps(key().to_json()))
    values["profiles"] = [{"min": size, "opt": [2, 2, 2], "max": [2, 2, 2]}]
    with pytest.raises(ValidationError):
        EngineKey.from_json(values)


SIZES = st.tuples(*[st.integers(1, 9)] * 3)


@given(SIZES, SIZES)
def test_a_profile_serves_sizes_within_its_range(one: LatentSize, other: LatentSize) -> None:
    low = tuple(map(min, one, other))
    high = tuple(map(max, one, other))
    profile = ShapeProfile(low, low, high)  # type: ignore[arg-type]  # three sizes each
    assert profile.serves(one)
    assert profile.serves(other)
    assert not profile.serves((high[0] + 1, low[1], low[2]))
    assert not profile.serves((low[0], low[1] - 1, low[2]))


WORDS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    (
        {"profiles": (ShapeProfile.fixed((21, 90, 160)),)},
        {"profiles": (ShapeProfile.fixed((21, 60, 104)),)},
        ["It was built for 21 latent frames of 832x480, not 21 latent frames of 1280x720."],
    ),
    (
        {"profiles": ()},
        {"profiles": (ShapeProfile((1, 14, 24), (1, 14, 24), (9, 14, 24)), ShapeProfile.fixed((1, 60, 104)))},
        [
            "It was built for 1 latent frame of 192x112 to 9 latent frames of 192x112, 1 latent frame of 832x480, "
            "not no size."
        ],
    ),
    (
        {"versions": (("tensorrt", "11.0"),)},
        {"versions": (("tensorrt", "10.16"),)},
        ["It was built with TensorRT 10.16; 11.0 is installed."],
    ),
    (
        {"versions": (("onnxruntime", "1.30"), ("torch", "2.13.0"))},
        {"versions": (("torch", "2.11.0"), ("triton", "3.5"))},
        [
            "It was built without ONNX Runtime; 1.30 is installed.",
            "It was built with PyTorch 2.11.0; 2.13.0 is installed.",
            "It was built with triton 3.5, which is not installed.",
        ],
    ),
    ({"precision": "float32"}, {"precision": "bfloat16"}, ["It was built in bfloat16, not float32."]),
    ({"weights": "1" * 64}, {"weights": "2" * 64}, ["It was built from other weights."]),
    ({"architecture": "1" * 64}, {"architecture": "2" * 64}, ["It was built from another architecture."]),
    ({"export_revision": "a"}, {"export_revision": 1}, ["It was exported by another version of Tandem."]),
    (
        {"device": "NVIDIA H200 sm90 CUDA 13.0"},
        {"device": "NVIDIA L4 sm89 CUDA 12.8"},
        ["It was built on NVIDIA L4 sm89 CUDA 12.8; this is NVIDIA H200 sm90 CUDA 13.0."],
    ),
    (
        {"device": "x86_64 avx avx2"},
        {"device": "NVIDIA L4 sm89 CUDA 12.8"},
        ["It was built on NVIDIA L4 sm89 CUDA 12.8; this is x86_64."],
    ),
    # Of two processors what differs, and not all that they have.
    (
        {"device": "x86_64 avx avx2 fma"},
        {"device": "x86_64 avx avx2 avx512_bf16 fma"},
        ["It was built on a processor with avx512_bf16, unlike this one."],
    ),
    (
        {"device": "x86_64 amx_bf16 amx_int8 amx_tile avx avx512_bf16 avx512f fma"},
        {"device": "x86_64 avx f16c fma"},
        ["It was built on a processor with f16c and without amx_bf16, amx_int8, amx_tile and 2 more."],
    ),
    ({"device": "x86_64 avx"}, {"device": "aarch64 asimd sve"}, ["It was built on aarch64; this is x86_64."]),
    ({"system": "Linux x86_64"}, {"system": "Windows AMD64"}, ["It was built on Windows AMD64; this is Linux x86_64."]),
    (
        {"builder": "onnx_tensorrt", "backend": "tensorrt"},
        {"builder": "onnxruntime", "backend": "onnxruntime"},
        ["It was built by onnxruntime for ONNX Runtime, not by onnx_tensorrt."],
    ),
    (
        {"options": (("cuda_graphs", "on"),)},
        {"options": (("execution_provider", "cpu"),)},
        ["It was built with cuda graphs unset, not on.", "It was built with execution provider cpu, not unset."],
    ),
    ({"program": "vae_next"}, {"program": "vae_first"}, ["It is for the program vae_first, not vae_next."]),
    ({"family": "cosmos"}, {"family": "wan"}, ["It is for the model family wan, not cosmos."]),
]


@pytest.mark.parametrize(("wanted", "found", "sentences"), WORDS)
def test_differences_of_keys(wanted: dict[str, Any], found: dict[str, Any], sentences: list[str]) -> None:
    assert list(map(str, differences(key(**wanted), key(**found), scale=8))) == sentences


def test_every_differing_field_has_a_difference() -> None:
    for name, value in CHANGES.items():
        assert len(differences(key(), key(**{name: value}))) == 1, name


def test_find_accepts_engines_of_more_sizes_and_no_unverified_ones(tmp_path: Any) -> None:
    wide = put(tmp_path, key())
    exact = put(tmp_path, key(profiles=(ShapeProfile.fixed((9, 14, 24)),)), seconds_per_call=0.3)
    fast = put(tmp_path, key(profiles=(ShapeProfile((1, 1, 1), (9, 14, 24), (99, 99, 99)),)), seconds_per_call=0.01)
    wanted, latent = exact.key, (9, 14, 24)
    assert find([wide, fast, exact], wanted, latent) == exact
    assert find([wide, fast], wanted, latent) == fast
    assert find([wide, fast, exact], wanted, (100, 14, 24)) is None
    for spoilt in (
        replace(exact, verified=False),
        replace(exact, problem=Fact("engine.file_changed", {"file": "engine.pt2"})),
    ):
        assert find([spoilt], wanted, latent) is None
    for name, value in CHANGES.items():
        other = put(tmp_path, key(**{name: value}))
        assert (find([other], key(), latent) is not None) == (name == "profiles"), name
