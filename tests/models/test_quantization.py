"""Quantization: its arithmetic, what it refuses, and the results of the pinned libraries."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.errors import MachineError, ModelError
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan
from runtime.models.quantization import check_quantized, compute_dtype, diffusers_config, loading_arguments
from tests.conftest import build_once
from tests.engines.contract import wheels

KINDS = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "fp8": "torchao"}
# Relative errors of a small random transformer in bfloat16, with a margin: measured 0.005, 0.023 and 0.011.
ERRORS = {"bnb-8bit": 0.02, "bnb-4bit": 0.06, "fp8": 0.03}


def part(quantization: str, dtype: str = "bfloat16", device: str = "cpu") -> ComponentPlan:
    """Return a transformer's plan."""
    return ComponentPlan(
        backend="pytorch", device=device, dtype=dtype, weights_bytes=0, reasons=(), quantization=quantization
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "bfloat16", "computes_in"),
    [
        ("fp8", "bfloat16", True, "bfloat16"),
        ("fp8", "float32", True, "bfloat16"),
        ("fp8", "float16", True, "bfloat16"),
        ("bnb-4bit", "bfloat16", True, "bfloat16"),
        ("bnb-4bit", "float32", True, "bfloat16"),
        ("bnb-4bit", "float32", False, "float16"),
        ("bnb-8bit", "float16", False, "float16"),
    ],
)
def test_it_computes_in_16_bits(kind: str, dtype: str, bfloat16: bool, computes_in: str) -> None:
    assert compute_dtype(part(kind, dtype), bfloat16=bfloat16) == computes_in


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_is_refused(kind: str) -> None:
    with pytest.raises(MachineError) as caught:
        loading_arguments(part(kind), ())
    assert caught.value.fact == Fact("quantization.needs_gpu", {"kind": kind, "device": "cpu"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KINDS[kind], None)
    with pytest.raises(MachineError) as caught:
        diffusers_config(kind, torch.bfloat16)
    assert caught.value.fact == Fact("quantization.package_missing", {"kind": kind, "package": KINDS[kind]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_cannot_be_imported_states_why(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, KINDS[kind], raising=False)
    (tmp_path / f"{KINDS[kind]}.py").write_text("raise OSError('libcudart.so.13 is missing\\nmore')\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MachineError) as caught:
        diffusers_config(kind, torch.bfloat16)
    assert caught.value.code == "quantization.package_broken"
    assert caught.value.data == {"kind": kind, "package": KINDS[kind], "reason": "libcudart.so.13 is missing"}


def test_a_model_without_a_layer_to_quantize_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        check_quantized(torch.nn.Linear(3, 3), "fp8", "transformer", "Wan")
    data = {"kind": "fp8", "component": "transformer", "model": "Wan"}
    assert caught.value.fact == Fact("quantization.no_layer_fits", data)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what `quantize_on_cpu` finds of each kind, in one process, whose imports take most of the time."""

    def quantize(folder: Path) -> dict[str, dict[str, Any]]:
        packages = [wheels.unpacked(f"{name}=={wheels.pinned(name)}") for name in sorted(set(KINDS.values()))]
        lines = wheels.run("tests.models.quantize_on_cpu", folder, *KINDS, packages=packages, libraries=folder)
        return dict(zip(KINDS, map(json.loads, lines[-len(KINDS) :]), strict=True))

    return build_once(tmp_path_factory, "quantized", quantize)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_pinned_libraries_quantize_and_quantized_weights_can_be_offloaded(
    kind: str, quantized: dict[str, dict[str, Any]]
) -> None:
    found = quantized[kind]
    placements = ["device"] if kind == "bnb-8bit" else ["device", "whole", "blocks", "leaves"]
    assert list(found["errors"]) == placements
    for error in found["errors"].values():
        assert 0 < error < ERRORS[kind]
    # Only the blocks' linear layers are quantized.
    assert found["quantized"] == 3 * 10
    assert found["kept"] == ["torch.bfloat16"] * 3
    # A LoRA gives what quantizing the changed weights would have given, bit for bit.
    lora = found["lora"]
    assert lora["same"]
    assert lora["layers"] == 10 + 1
    assert lora["changed"] > 0.01
    assert lora["twice"] > 0.01
    own = {"bnb-8bit": "Int8Params", "bnb-4bit": "Params4bit", "fp8": "Float8Tensor"}
    assert lora["types"] == [own[kind], "Parameter"]
    cached = found["cached"]
    assert cached["same"]
    assert cached["types"]
    assert cached["settings"] == (1 if kind == "fp8" else 0)
    assert cached["damaged"] == [[True, False, ["quantization.cache_damaged"]]] * 3
    joined = found["joined"]
    assert joined["same"]
    assert joined["layers"] == 2 * 7 + 6
    assert joined["changed"] > 0.01
    # The first of two control blocks has a projection before it; those after them keep their precision.
    assert found["steered"]["quantized"] == 2 * 10 + 1
    assert 0 < found["steered"]["error"] < ERRORS[kind]
    assert found["animated"]["quantized"] == {"blocks": 2 * 4, "encoders": 0}
    # The face's first tokens are zeros: a row without a scale would make NaN.
    assert 0 < found["animated"]["error"] < 2 * ERRORS[kind]
    assert found.get("streamed") == ([True, True] if kind == "fp8" else None)
