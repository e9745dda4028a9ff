"""The kernels of sparse attention on a GPU, compared with the definition in float32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from runtime.core.plan import Speed
from runtime.execution.attention import attention, problem, sparse_kernel
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.sparse_attention import attend_sparse, emulate
from runtime.families.wan.transformer import PyTorchDenoiser
from tests.gpu.errors import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
DEVICE = "cuda:0"
# The kernels round to INT8, which also moves the selection of blocks near the threshold.
ROUNDING = 0.06


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    why = problem(sparse_kernel(1.0), DEVICE, torch.bfloat16, 128)
    if why is not None:
        pytest.skip(str(why))
    yield
    discard_compiled_code()


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return queries, keys and values of four heads whose neighbours are alike."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    shared = torch.randn((1, tokens // 50 + 1, 4, 128), device=DEVICE, generator=generator)
    noise = torch.randn((3, 1, tokens, 4, 128), device=DEVICE, generator=generator)
    return [(shared.repeat_interleave(50, 1)[:, :tokens] + own).to(dtype) for own in noise]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "tau", "last"), [(4096, 1.0, 0), (4001, 0.5, 0), (4001, 1.5, 300), (60, 1.0, 0)])
def test_the_kernels_agree_with_the_definition(tokens: int, tau: float, last: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(tokens, dtype)
    out = attend_sparse(q, k, v, tau, last)
    blocks = -(-tokens // 64)
    wanted = emulate(q.float(), k.float(), v.float(), tau, (tokens - last) // 64 if last else blocks)
    assert out.dtype == dtype and out.is_contiguous()
    assert relative_error(out.float(), wanted) < ROUNDING


def test_the_last_tokens_are_exact() -> None:
    q, k, v = inputs(4001)
    exact = attention("native")(q.float(), k.float(), v.float())
    out = attend_sparse(q, k, v, 4.0, 300).float()
    assert relative_error(out[:, -300:], exact[:, -300:]) < ROUNDING
    assert relative_error(out[:, :-400], exact[:, :-400]) > relative_error(out[:, -300:], exact[:, -300:])


def test_views_of_a_joint_projection_are_taken_as_they_are() -> None:
    q, k, v = inputs(4096)
    together = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=2)
    views = [part.unflatten(2, (4, 128)) for part in together.chunk(3, dim=2)]
    assert torch.equal(attend_sparse(views[0], views[1], views[2], 1.0), attend_sparse(q, k, v, 1.0))


def test_heads_of_another_width_are_reported() -> None:
    why = problem(sparse_kernel(1.0), DEVICE, torch.bfloat16, 64)
    assert why is not None and why.code == "execution.attention_unavailable"


def test_compiled_blocks_call_the_kernels() -> None:
    torch.manual_seed(3)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 128, "num_layers": 3, "ffn_dim": 64}
    module: Any = WanTransformer3DModel(**sizes, text_dim=32, freq_dim=32).to(DEVICE, torch.bfloat16).eval()
    generator = torch.Generator(DEVICE).manual_seed(1)
    latents = torch.randn((1, 16, 4, 40, 40), device=DEVICE, generator=generator)
    text = torch.randn((1, 512, 32), device=DEVICE, generator=generator)
    results = {}
    for compiled in (False, True):
        denoiser = PyTorchDenoiser(module)
        denoiser.compute(Speed(sparse_tau=1.0, compiled=compiled), _raise)
        for exact in (False, True):
            denoiser.begin_step(fresh=True, exact=exact)
            results[compiled, exact] = denoiser(latents, torch.tensor(500.0, device=DEVICE), text).float().clone()
    for exact in (False, True):
        assert relative_error(results[True, exact], results[False, exact]) < 0.02
    assert relative_error(results[False, False], results[False, True]) > 1e-4


def _raise(field: str, reason: object) -> None:
    raise AssertionError(f"{field}: {reason}")
