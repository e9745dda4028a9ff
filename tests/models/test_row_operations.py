"""Operations between two matrix products: what runs where, and their kernels in Triton's interpreter."""

import math
from pathlib import Path

import pytest
import torch

from runtime.models import row_operations
from runtime.models.row_operations import add_gated, computed, quantize_rows
from tests.triton_interpreter import run_checks


def test_kernels_equal_pytorch() -> None:
    run_checks(Path(__file__).with_name("row_kernels_checks.py"))


def test_pytorch_computes_on_a_cpu() -> None:
    x, y = torch.randn(2, 1, 4, 8)
    gate = torch.randn(1, 4, 8)
    assert torch.equal(computed(add_gated, x, y, gate), x + y * gate)


def test_pytorch_computes_after_a_kernel_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    monkeypatch.setattr(row_operations, "_FAILED", failed)
    monkeypatch.setattr(row_operations, "_FEWEST_VALUES", 1)
    # Here Triton is missing, or has no GPU to compile for.
    monkeypatch.setattr(row_operations, "triton_runs_on", lambda device: True)
    x = torch.randn(1, 4, 8)
    for _ in range(2):
        assert torch.equal(computed(add_gated, x, x, torch.ones(1, 1, 8)), 2 * x)
        assert len(failed) == 1


def test_rows_are_rounded_to_fp8() -> None:
    x = torch.randn(5, 64) * 10.0 ** torch.arange(-6, 4, 2)[:, None]
    x[2] = 0
    rounded, scales = quantize_rows(x)
    assert rounded.float().abs().amax(1).tolist() == [448, 448, 0, 448, 448]
    # Half of the distance of neighbours with four significant bits.
    bound = (x.abs() / 16).maximum(scales * 2.0**-9) * (1 + 1e-6)
    assert ((rounded.float() * scales - x).abs() <= bound).all()
    assert math.isclose(scales[4].item(), x[4].abs().max().item() / 448, rel_tol=1e-6)
