"""Sparse attention: its definition, its limits, and which blocks and steps use it."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from runtime.core.plan import ComponentPlan, Speed
from runtime.execution.attention import BlockKernels, attention, kernels_of, problem, sparse_kernel
from runtime.execution.attention import with_usable_attention as usable
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.sparse_attention import attend_sparse
from runtime.families.wan.transformer import PyTorchDenoiser, install
from runtime.families.wan.transformer import block_step as wan_step
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.engines.contract.wheels import pinned, unpacked

# Six whole blocks of tokens and 16 more.
TOKENS, HEADS, WIDTH, BLOCK = 400, 2, 32, 64
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())


def inputs(smooth: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of two batches whose neighbours are alike, as those of a video are."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn((2, TOKENS // smooth, HEADS, WIDTH), generator=generator).repeat_interleave(smooth, 1)
    q, k, v = 0.7 * torch.randn((3, 2, TOKENS, HEADS, WIDTH), generator=generator) + shared
    return 2 * q, k + 5, v


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, last: int = 0) -> torch.Tensor:
    """Return the attention of one head, (tokens, width), block by block."""
    parts = [slice(start, min(start + BLOCK, len(q))) for start in range(0, len(q), BLOCK)]
    exact_from = (len(q) - last) // BLOCK if last else len(parts)
    k = k - torch.stack([k[part].mean(0) for part in parts]).mean(0)
    means = torch.stack([k[part].mean(0) for part in parts])
    out = []
    for row, part in enumerate(parts):
        query = q[part].mean(0)
        deviation = (query.square() * means.square().mean(0)).sum().sqrt()
        terms, total = torch.zeros_like(q[part]), torch.zeros(part.stop - part.start, 1)
        for column, other in enumerate(parts):
            near = abs(row - column) <= 1 or row >= exact_from or column >= exact_from
            if near or means[column] @ query > tau * deviation:
                weights = (q[part] @ k[other].T / WIDTH**0.5).exp()
            else:
                alike = (means[column] @ query / WIDTH**0.5).exp()
                weights = alike.expand(part.stop - part.start, other.stop - other.start)
            terms, total = terms + weights @ v[other], total + weights.sum(1, keepdim=True)
        out.append(terms / total)
    return torch.cat(out)


@pytest.mark.parametrize(("tau", "last"), [(0.0, 0), (1.0, 0), (1.0, 90), (4.0, 0)])
def test_it_equals_its_definition(tau: float, last: int) -> None:
    q, k, v = inputs()
    attended = attend_sparse(q, k, v, tau, last)
    for batch in range(2):
        for head in range(HEADS):
            expected = by_definition(q[batch, :, head], k[batch, :, head], v[batch, :, head], tau, last)
            torch.testing.assert_close(attended[batch, :, head], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "last"), [(0.0, 0), (1.0, 0), (1.0, 90), (2.0, 17)])
def test_it_equals_the_published_reference(tau: float, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, comfy-kitchen computes the algorithm in float32."""
    monkeypatch.syspath_prepend(str(unpacked(f"comfy-kitchen=={pinned('comfy-kitchen')}")))
    kitchen: Any = import_module("comfy_kitchen")
    assert not kitchen.sol_attn_is_available(torch.device("cpu"))
    q, k, v = (torch.cat([x] * 4, dim=3) for x in inputs())  # heads of 128 channels
    blocks = -(-TOKENS // BLOCK)
    exact = [(TOKENS - last) // BLOCK if last else blocks, blocks]
    expected = kitchen.sol_attn(q, k, v, tau=tau, sink_blocks=exact, sink_q=exact)
    torch.testing.assert_close(attend_sparse(q, k, v, tau, last), expected, rtol=0, atol=2e-5)


def error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, last: int = 0) -> torch.Tensor:
    """Return the relative error of each token against exact attention."""
    exact = attention("native")(q, k, v)
    difference = attend_sparse(q, k, v, tau, last) - exact
    return torch.linalg.vector_norm(difference, dim=(0, 2, 3)) / torch.linalg.vector_norm(exact, dim=(0, 2, 3))


def test_a_higher_threshold_is_less_exact() -> None:
    errors = [float(error(*inputs(), tau).mean()) for tau in (-100.0, 0.0, 1.0, 4.0)]
    assert errors[0] < 1e-5
    assert errors == sorted(errors)
    assert errors[1] > 1e-3


def test_blocks_of_equal_tokens_are_pooled_exactly() -> None:
    q, k, v = inputs(smooth=20)
    alike = [x[:, :: TOKENS // 8][:, :8].repeat_interleave(BLOCK, 1)[:, :TOKENS] for x in (q, k, v)]
    assert float(error(alike[0], alike[1], alike[2], 4.0).max()) < 1e-5


def test_the_last_tokens_attend_and_are_attended_to_exactly() -> None:
    q, k, v = inputs()
    last = 70  # their first block is the fifth, from token 320 on
    errors = error(q, k, v, 4.0, last)
    assert errors[320:].max() < 1e-5
    assert errors[:320].mean() > 1e-2
    # Only the last tokens' values, which no pooled term blurs, reach the first ones through exact scores.
    alone = torch.zeros_like(v)
    alone[:, 320:330] = v[:, 320:330]
    moved = alone.clone()
    moved[:, 320:330] = alone[:, 320:330].flip(1)
    changes = [
        (attend_sparse(q, k, x, 4.0, given) - attend_sparse(q, k, y, 4.0, given))[:, :64].abs().max()
        for given in (last, 0)
        for x, y in [(alone, moved)]
    ]
    assert changes[0] > 1e-4
    assert changes[1] < 1e-6


def test_a_sequence_of_one_block_is_exact() -> None:
    q, k, v = (x[:, :50] for x in inputs())
    assert error(q, k, v, 4.0).max() < 1e-5


class Block:
    """What `BlockKernels` needs of a transformer's block."""

    attend: Callable[..., torch.Tensor]


def test_the_first_block_and_exact_steps_keep_the_exact_kernel() -> None:
    blocks = [Block() for _ in range(3)]
    kernels = BlockKernels(Speed(attention="flash", sparse_tau=1.5))
    exact, sparse = attention("flash"), attention(sparse_kernel(1.5, 7))
    kernels.choose(blocks, last=7)
    assert [block.attend for block in blocks] == [exact, sparse, sparse]
    kernels.exact = True
    kernels.choose(blocks, last=7)
    assert [block.attend for block in blocks] == [exact] * 3
    kernels.exact = False
    kernels.choose(blocks, last=8)
    assert [block.attend for block in blocks] == [exact, *[attention(sparse_kernel(1.5, 8))] * 2]
    assert exact != sparse != attention(sparse_kernel(1.5, 8))
    dense = BlockKernels(Speed(attention="flash"))
    dense.choose(blocks, last=7)
    assert [block.attend for block in blocks] == [exact] * 3


def test_an_unusable_kernel_is_replaced_by_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(attention="flash", sparse_tau=1.0)
    assert kernels_of(speed) == {"attention": "flash", "sparse_tau": sparse_kernel(1.0)}
    assert problem(sparse_kernel(1.0), "cpu", torch.bfloat16, WIDTH) is None
    assert usable(speed, "cpu", torch.bfloat16, WIDTH) == (speed, {})

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("runtime.execution.attention.attend_sparse", fail)
    found, problems = usable(speed, "cpu", torch.bfloat16, WIDTH + 1)
    assert (found.attention, found.sparse_tau) == ("flash", None)
    assert problems["sparse_tau"].code == "execution.attention_unavailable"
    assert problems["sparse_tau"].data == {"attention": "sol", "reason": "no kernel"}


def passes(spec: ModelSpec, denoiser: PyTorchDenoiser) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prediction of a sparse step and of an exact one, of a clip of seven blocks of tokens."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn((1, spec.vae.z_dim, 4, 20, 20), generator=generator)
    text = torch.randn((1, 512, 32), generator=generator)
    results = []
    for exact in (False, True):
        denoiser.begin_step(fresh=True, exact=exact)
        results.append(denoiser(latents, torch.tensor(500), text).clone())
    return results[0], results[1]


@pytest.mark.parametrize("architecture", ["wan2.1", "wan2.2-ti2v-5b"])
def test_a_denoiser_is_exact_in_exact_steps(architecture: str, tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny(architecture)
    module = load_module(spec, "transformer", PART)
    _, wanted = passes(spec, PyTorchDenoiser(module))
    sparse, exact = passes(spec, PyTorchDenoiser(module, Speed(sparse_tau=1.0)))
    assert torch.equal(exact, wanted)
    assert 1e-5 < (sparse - wanted).norm() / wanted.norm() < 0.5


def test_blocks_are_compiled_once_for_each_kernel(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1")
    module = load_module(spec, "transformer", PART)
    denoiser = PyTorchDenoiser(module)
    discard_compiled_code()
    counter = CompileCounter()
    install(module, Speed(sparse_tau=1.0), torch.compile(wan_step, backend=counter, fullgraph=True, dynamic=False))
    first = passes(spec, denoiser)
    assert counter.frame_count == 2
    assert all(torch.equal(x, y) for x, y in zip(first, passes(spec, denoiser), strict=True))
    assert counter.frame_count == 2
    expected = passes(spec, PyTorchDenoiser(module, Speed(sparse_tau=1.0)))
    for one, two in zip(first, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("step_cache", ["first-block:1e-06", "taylorseer:2"])
def test_a_step_cache_keeps_sparse_attention(step_cache: str, tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1")
    denoiser = PyTorchDenoiser(load_module(spec, "transformer", PART), Speed(sparse_tau=1.0))
    expected = passes(spec, denoiser)
    with denoiser.caching(step_cache):
        found = passes(spec, denoiser)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
