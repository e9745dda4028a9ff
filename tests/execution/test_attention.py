"""Attention kernels: availability checks, and the error of attention in FP8."""

import pytest
import torch
import torch.nn.functional as F

from runtime.core.request import ATTENTIONS
from runtime.execution import attention as attention_module
from runtime.execution.attention import attention, problem, sparse_kernel
from runtime.execution.fp8_attention import attend_fp8, scale_for
from runtime.models.row_operations import to_fp8

TOKENS, HEADS, WIDTH = 2304, 2, 32


def inputs(spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Gaussian queries, keys and values."""
    q, k, v = torch.randn((3, 1, TOKENS, HEADS, WIDTH), generator=torch.Generator().manual_seed(1))
    return spread * q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention by its definition."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v).transpose(1, 2)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖result - expected‖ / ‖expected‖."""
    return float((result - expected).norm() / expected.norm())


def test_native_attention_is_exact() -> None:
    assert relative(attention("native")(*inputs()), exact(*inputs())) < 1e-5


@pytest.mark.parametrize(("spread", "least", "most"), [(1.0, 0.03, 0.09), (4.0, 0.05, 0.13)])
def test_error_of_fp8_on_gaussian_inputs(spread: float, least: float, most: float) -> None:
    given = inputs(spread)
    assert least < relative(attend_fp8(*given), exact(*given)) < most


def test_small_probabilities_are_not_lost_in_fp8() -> None:
    # One key has the largest probability; each other one has about a thousandth of it, and together they have more.
    q, k, v = inputs()
    k = torch.zeros_like(k)
    k[:, 0] = 1.0
    q = torch.full_like(q, 7.0 / WIDTH**0.5)
    v = v.abs()
    expected = exact(q, k, v)
    weight = F.softmax(q[0, 0, 0] @ k[0, :, 0].T / WIDTH**0.5, dim=-1)
    assert weight[1:].sum() > weight[0] > 900 * weight[1]
    assert relative(attend_fp8(q, k, v), expected) < 0.06


def test_attention_to_few_keys_is_not_rounded() -> None:
    q, k, v = inputs()
    few = k[:, :512], v[:, :512]
    assert relative(attend_fp8(q, *few), exact(q, *few)) < 1e-5


def test_quantized_values_use_the_range_of_e4m3() -> None:
    scale = scale_for(torch.tensor(3.0))
    values = to_fp8(torch.tensor([-3.0, 0.01, 1.5]), scale)
    assert values.float().tolist()[0] == -448.0
    assert (values.float() / scale).tolist() == pytest.approx([-3.0, 0.01, 1.5], rel=0.05)
    assert scale_for(torch.tensor(0.5)).item() == 896.0
    scale = scale_for(torch.tensor(0.0))
    assert to_fp8(torch.zeros(3), scale).float().tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(scale)


@pytest.mark.parametrize("kind", [*list(ATTENTIONS)[1:-1], sparse_kernel(1.0)])
def test_each_kernel_is_checked_before_use(kind: str) -> None:
    why = problem(kind, "cpu", torch.bfloat16, WIDTH)
    # On a CPU, PyTorch has flash attention, and FP8 and sparse attention are emulated.
    runs = kind in {"native", "flash", "fp8", sparse_kernel(1.0)}
    assert (why is None) is runs, why
    if why is not None:
        assert why.code == "execution.attention_unavailable"
        assert why.data["attention"] == kind
        assert why.data["reason"]
        assert "\n" not in why.data["reason"]


def test_a_kernel_for_which_memory_runs_out_is_not_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(attention_module._KINDS, "flash", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        problem("flash", "cpu", torch.float32, 40)
