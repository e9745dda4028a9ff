"""Triton's kernels of `row_operations` against PyTorch; `test_row_operations` runs this in Triton's interpreter."""

import pytest
import torch

from runtime.models import row_kernels, row_operations

WIDTHS = [64, 96]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tables", [1, 5])
@pytest.mark.parametrize(("given", "wanted"), [("float32", "float32"), ("float32", "float16"), ("float16", "float16")])
def test_layer_norm(width: int, tables: int, given: str, wanted: str) -> None:
    torch.manual_seed(1)
    x = (3 + 2 * torch.randn(2, 5, width)).to(getattr(torch, given))
    arguments = (x, torch.randn(1, tables, width), torch.randn(1, tables, width), 1e-6, getattr(torch, wanted))
    close(row_kernels.layer_norm(*arguments), row_operations.layer_norm(*arguments))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tables", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_add_gated(width: int, tables: int, dtype: str) -> None:
    torch.manual_seed(2)
    x, y = torch.randn(2, 2, 5, width).to(getattr(torch, dtype))
    gate = torch.randn(1, tables, width)
    close(row_kernels.add_gated(x, y, gate), row_operations.add_gated(x, y, gate))


@pytest.mark.parametrize(("heads", "head_width"), [(2, 32), (3, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotate_pairs(heads: int, head_width: int, dtype: str) -> None:
    torch.manual_seed(3)
    # Part of a larger tensor, as where queries, keys and values are one product.
    x = torch.randn(2, 5, 3 * heads, head_width).to(getattr(torch, dtype))[:, :, :heads]
    cos, sin = torch.randn(2, 1, 5, 1, head_width)
    close(row_kernels.rotate_pairs(x, cos, sin), row_operations.rotate_pairs(x, cos, sin))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("timesteps", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("norms", [0, 1, 2])
@pytest.mark.parametrize("kind", ["gated", "added", "alone"])
def test_add_norms(width: int, timesteps: int, dtype: str, norms: int, kind: str) -> None:
    torch.manual_seed(6)
    x, y = torch.randn(2, 1, 5, width).to(getattr(torch, dtype))
    table = torch.randn(timesteps, 5, width)
    gate, *rows = table.unbind(1)
    modulations = [(rows[0], rows[1]), (rows[2], rows[3])][:norms]
    for first in (0, 2, 5):
        arguments = (x, None if kind == "alone" else y, gate if kind == "gated" else None, modulations, first, 1e-6)
        for got, wanted in zip(row_kernels.add_norms(*arguments), row_operations.add_norms(*arguments), strict=True):
            close(got, wanted)
    plain = (x, y, gate[:1].clone(), [None], 0, 1e-6)
    for got, wanted in zip(row_kernels.add_norms(*plain), row_operations.add_norms(*plain), strict=True):
        close(got, wanted)


@pytest.mark.parametrize(("width", "distance"), [(64, 1), (64, 8), (96, 16), (96, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_rotate(width: int, distance: int, dtype: str) -> None:
    torch.manual_seed(7)
    # Part of a larger tensor, as where queries, keys and values are one product.
    x = torch.randn(2, 5, 3 * width).to(getattr(torch, dtype))
    weight, (cos, sin) = 1 + 0.1 * torch.randn(width), torch.randn(2, 1, 5, width // 2)
    for part in (*x.split(width, dim=2), x[:, ::2, :width]):
        angles = (cos[:, : part.shape[1]], sin[:, : part.shape[1]], distance)
        for factors in (weight, None):
            given = (part, factors, 1e-6)
            close(row_kernels.norm_rotate(*given), row_operations.norm_rotate(*given))
            turned = (part, factors, 1e-6, *angles)
            close(row_kernels.norm_rotate(*turned), row_operations.norm_rotate(*turned))


def in_fp8(*size: int) -> torch.Tensor:
    """Random values that float8_e4m3fn has: the interpreter rounds others wrongly, which tests/gpu compares."""
    values = (100 * torch.randn(size)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    values[..., 0] = 448
    return values


@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_rows(width: int) -> None:
    torch.manual_seed(4)
    x = in_fp8(7, width) * 2.0 ** torch.arange(-20, 22, 6)[:, None]
    x[3] = 0
    (rounded, scales), (wanted, wanted_scales) = row_kernels.quantize_rows(x), row_operations.quantize_rows(x)
    torch.testing.assert_close(scales, wanted_scales)
    assert torch.equal(rounded.float(), wanted.float())


@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_gelu_rows(width: int) -> None:
    torch.manual_seed(8)
    x = 3 * torch.randn(7, width)
    x[3] = 0
    (rounded, scales), (wanted, wanted_scales) = (
        function(x) for function in (row_kernels.quantize_gelu_rows, row_operations.quantize_gelu_rows)
    )
    torch.testing.assert_close(scales, wanted_scales)
    # The interpreter rounds a few values wrongly, see `in_fp8`.
    far = (rounded.float() - wanted.float()).abs() > 0.13 * wanted.float().abs() + 1e-3
    assert far.float().mean().item() < 0.05


def test_to_and_from_fp8() -> None:
    torch.manual_seed(5)
    x, scale = in_fp8(3, 5, 2, 8), torch.tensor(2.0)
    x[0, 0, 0, 1] = 1e9
    rounded = row_kernels.to_fp8(x / 2, scale)
    assert torch.equal(rounded.float(), x.clamp(max=448))
    assert torch.equal(row_kernels.from_fp8(rounded, scale, torch.float32), x.clamp(max=448) / 2)
