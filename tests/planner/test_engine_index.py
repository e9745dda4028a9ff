"""Engine keys, shape profiles, and differences of keys."""

import json
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile, find
from runtime.planner.choice.key_differences import differences
from tests.engines.engine_files import key, put
from tests.facts import fact

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


def read_key(value: object) -> EngineKey:
    """Read a key from JSON values, as those in manifests are read."""
    return TypeAdapter(EngineKey).validate_json(json.dumps(value))


def test_every_field_is_part_of_the_identity() -> None:
    assert set(CHANGES) == {field.name for field in fields(EngineKey)}
    digests = {key(**{name: value}).digest() for name, value in CHANGES.items()}
    assert len(digests | {key().digest()}) == len(CHANGES) + 1


def test_a_key_survives_json_and_keeps_its_digest() -> None:
    wanted = key(profiles=(ShapeProfile.fixed((1, 2, 3)), ShapeProfile((1, 2, 3), (2, 2, 3), (9, 9, 9))))
    read = read_key(json.loads(json.dumps(asdict(wanted))))
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
            values = json.loads(json.dumps(asdict(key())))
            if value == "absent":
                values.pop(name, None)
                values.setdefault("more", 1)
            else:
                values[name] = value
            if name in {"options", "versions", "profiles"} and value == []:
                assert getattr(read_key(values), name) == ()
                continue
            with pytest.raises(ValidationError):
                read_key(values)


@pytest.mark.parametrize("size", [[0, 1, 1], [1, 1], [1, 1, 1, 1], [1, 1, "1"], [1, 1, True], [3, 1, 1], None])
def test_an_invalid_profile_is_refused(size: object) -> None:
    values = json.loads(json.dumps(asdict(key())))
    values["profiles"] = [{"min": size, "opt": [2, 2, 2], "max": [2, 2, 2]}]
    with pytest.raises(ValidationError):
        read_key(values)


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


SMALL, LARGE = (fact("engine.size", frames=21, height=h, width=w) for h, w in ((480, 832), (720, 1280)))
TINY = {"height": 112, "width": 192}
RANGE = fact("engine.range", low=fact("engine.size", frames=1, **TINY), high=fact("engine.size", frames=9, **TINY))
UNSET = fact("engine.option_unset")


def names(*words: str) -> Fact:
    """Return a list of names."""
    return fact("engine.names", names=words)


DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], list[Fact]]] = [
    ({}, {}, []),
    (
        {"profiles": (ShapeProfile.fixed((21, 90, 160)),)},
        {"profiles": (ShapeProfile.fixed((21, 60, 104)),)},
        [fact("engine.differs_sizes", found=[SMALL], wanted=[LARGE])],
    ),
    (
        {"profiles": ()},
        {"profiles": (ShapeProfile((1, 14, 24), (1, 14, 24), (9, 14, 24)), ShapeProfile.fixed((21, 60, 104)))},
        [fact("engine.differs_sizes", found=[RANGE, SMALL], wanted=[fact("engine.no_size")])],
    ),
    (
        {"versions": (("tensorrt", "11.0"),)},
        {"versions": (("tensorrt", "10.16"),)},
        [fact("engine.differs_version", package="TensorRT", found="10.16", here="11.0")],
    ),
    (
        {"versions": (("onnxruntime", "1.30"), ("torch", "2.13.0"))},
        {"versions": (("torch", "2.11.0"), ("triton", "3.5"))},
        [
            fact("engine.differs_new_package", package="ONNX Runtime", here="1.30"),
            fact("engine.differs_version", package="PyTorch", found="2.11.0", here="2.13.0"),
            fact("engine.differs_missing_package", package="triton", found="3.5"),
        ],
    ),
    (
        {"precision": "float32"},
        {"precision": "bfloat16"},
        [fact("engine.differs_precision", found="bfloat16", wanted="float32")],
    ),
    ({"weights": "1" * 64}, {"weights": "2" * 64}, [fact("engine.differs_weights")]),
    ({"architecture": "1" * 64}, {"architecture": "2" * 64}, [fact("engine.differs_architecture")]),
    ({"export_revision": "a"}, {"export_revision": 1}, [fact("engine.differs_export")]),
    (
        {"device": "NVIDIA H200 sm90 CUDA 13.0"},
        {"device": "NVIDIA L4 sm89 CUDA 12.8"},
        [fact("engine.differs_device", found="NVIDIA L4 sm89 CUDA 12.8", here="NVIDIA H200 sm90 CUDA 13.0")],
    ),
    (
        {"device": "x86_64 avx avx2"},
        {"device": "NVIDIA L4 sm89 CUDA 12.8"},
        [fact("engine.differs_device", found="NVIDIA L4 sm89 CUDA 12.8", here="x86_64")],
    ),
    # Of two processors what differs, and not all that they have.
    (
        {"device": "x86_64 avx avx2 fma"},
        {"device": "x86_64 avx avx2 avx512_bf16 fma"},
        [fact("engine.differs_more_instructions", more=names("avx512_bf16"))],
    ),
    (
        {"device": "x86_64 amx_bf16 amx_int8 amx_tile avx avx512_bf16 avx512f fma"},
        {"device": "x86_64 avx f16c fma"},
        [
            fact(
                "engine.differs_instructions",
                more=names("f16c"),
                fewer=fact("engine.names_and_more", names=["amx_bf16", "amx_int8", "amx_tile"], more=2),
            )
        ],
    ),
    (
        {"device": "x86_64 avx"},
        {"device": "aarch64 asimd sve"},
        [fact("engine.differs_device", found="aarch64", here="x86_64")],
    ),
    (
        {"system": "Linux x86_64"},
        {"system": "Windows AMD64"},
        [fact("engine.differs_device", found="Windows AMD64", here="Linux x86_64")],
    ),
    (
        {"builder": "onnx_tensorrt", "backend": "tensorrt"},
        {"builder": "onnxruntime", "backend": "onnxruntime"},
        [fact("engine.differs_builder", found="onnxruntime", backend="ONNX Runtime", wanted="onnx_tensorrt")],
    ),
    (
        {"options": (("cuda_graphs", "on"),)},
        {"options": (("execution_provider", "cpu"),)},
        [
            fact("engine.differs_option", option="cuda graphs", found=UNSET, wanted="on"),
            fact("engine.differs_option", option="execution provider", found="cpu", wanted=UNSET),
        ],
    ),
    (
        {"program": "vae_next"},
        {"program": "vae_first"},
        [fact("engine.differs_program", found="vae_first", wanted="vae_next")],
    ),
    ({"family": "cosmos"}, {"family": "wan"}, [fact("engine.differs_family", found="wan", wanted="cosmos")]),
]


def test_differences_of_keys(subtests: pytest.Subtests) -> None:
    for wanted, other, facts in DIFFERENCES:
        with subtests.test(msg=str(other)):
            assert list(differences(key(**wanted), key(**other), scale=8)) == facts


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
