"""HunyuanVideo's blocks: equal to diffusers', compiled once for each kind, shared by several processes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch._dynamo.testing import CompileCounterWithBackend

from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, Speed, Split
from runtime.execution.attention import attention, sparse_kernel
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.parallel.proxies import GroupManager, SharedDenoiser
from runtime.families.hunyuan_video.transformer import PyTorchDenoiser, fuse, install
from runtime.models.spec import ModelSpec

Tiny = Callable[[str], ModelSpec]
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
TWO = Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=False)
TIMES = torch.tensor([500.0, 6000.0])
# Latent frames, rows and columns, and tokens of the text. With two processes: as many tokens of the clip as of the
# text, more, fewer, and an odd number of both together.
SIZES = {"equal": ((2, 4, 4), 8), "long clip": ((3, 6, 8), 5), "long text": ((1, 4, 4), 11), "odd": ((3, 6, 4), 7)}


def load(spec: ModelSpec) -> Any:
    """Return the transformer in float32."""
    module = HunyuanVideoTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    return module.to(torch.float32).eval().requires_grad_(False)


def inputs(size: tuple[int, int, int] = (2, 4, 6), text: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seeded latents, timesteps and a text, of CLIP's embedding and `text` tokens."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn((1, 16, *size), generator=generator)
    return latents, TIMES, torch.randn((1, 1 + text, 32), generator=generator)


def by_diffusers(
    spec: ModelSpec, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor, padding: int = 0
) -> torch.Tensor:
    """Return diffusers' prediction with a text that is padded."""
    module, count = load(spec), text.shape[1] - 1
    tokens = torch.nn.functional.pad(text[:, 1:], (0, 0, 0, padding))
    mask = (torch.arange(count + padding) < count)[None]
    pooled = text[:, 0, : module.config.pooled_projection_dim]
    output: torch.Tensor = module(latents, times[:1], tokens, mask, pooled, guidance=times[1:], return_dict=False)[0]
    return output


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by rounding in float32 at most."""
    return bool((got - wanted).norm() / wanted.norm() < 2e-6)


@pytest.mark.parametrize("padding", [0, 5])
def test_a_pass_equals_diffusers(padding: int, tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    denoiser = PyTorchDenoiser(load(spec))
    for size in ((2, 4, 6), (3, 6, 4)):
        given = inputs(size)
        assert close(denoiser(*given), by_diffusers(spec, *given, padding=padding))


def test_fused_projections_equal_diffusers(tiny: Tiny) -> None:
    spec, given = tiny("hunyuan-video"), inputs()
    module = load(spec)
    denoiser = PyTorchDenoiser(module, Speed(fused=True))
    double, single = module.transformer_blocks[0].attn, module.single_transformer_blocks[0].attn
    for fused, last in (
        (double.to_qkv, double.to_v),
        (double.to_added_qkv, double.add_v_proj),
        (single.to_qkv, single.to_v),
    ):
        assert last.weight.untyped_storage().data_ptr() == fused.weight.untyped_storage().data_ptr()
        # The pass reads the fused matrix only: without it, the projections' values are lost.
        fused.weight.data = fused.weight.data.clone()
        last.weight.data.zero_()
    wanted = by_diffusers(spec, *given)
    assert close(denoiser(*given), wanted)
    # A matrix that the projections are no longer views of is dropped.
    install(module)
    assert not hasattr(double, "to_qkv")
    assert not hasattr(double, "to_added_qkv")
    assert not hasattr(single, "to_qkv")
    assert not close(denoiser(*given), wanted)


def test_a_projection_with_an_adapter_is_not_fused(tiny: Tiny) -> None:
    spec, given = tiny("hunyuan-video"), inputs()
    module = load(spec)
    adapted = module.single_transformer_blocks[1].attn
    adapted.to_q = torch.nn.Sequential(adapted.to_q)
    denoiser = PyTorchDenoiser(module)
    assert fuse(module)
    assert not fuse(module)
    assert not hasattr(adapted, "to_qkv")
    assert close(denoiser(*given), by_diffusers(spec, *given))


def test_single_blocks_pass_their_tokens_on_without_a_copy(tiny: Tiny) -> None:
    module = load(tiny("hunyuan-video"))
    denoiser, last = PyTorchDenoiser(module), len(module.single_transformer_blocks) - 1
    made: dict[int, int] = {}
    given: dict[int, int] = {}

    def watched(index: int, step: Any, block: Any, both: torch.Tensor, *rest: Any) -> torch.Tensor:
        given[index] = both.data_ptr()
        out: torch.Tensor = step(block, both, *rest)
        made[index] = out.data_ptr()
        return out

    for index, block in enumerate(module.single_transformer_blocks):
        block.step = partial(watched, index, block.step)
    denoiser(*inputs())
    assert last > 0
    assert all(given[index + 1] == made[index] for index in range(last))


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Begin and end with nothing compiled."""
    discard_compiled_code()
    yield
    discard_compiled_code()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
def test_blocks_are_compiled_once_for_each_kind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    module, counter = load(tiny("hunyuan-video")), CompileCounterWithBackend("aot_eager")
    assert len(module.transformer_blocks) > 1
    assert len(module.single_transformer_blocks) > 1
    given, compiler = inputs(), torch.compile
    wanted = PyTorchDenoiser(module)(*given)

    def compile_with_counter(function: Any, *, options: Any, **settings: Any) -> Any:
        del options  # Inductor's
        return compiler(function, backend=counter, **settings)

    monkeypatch.setattr(torch, "compile", compile_with_counter)
    degraded: list[tuple[str, Fact]] = []
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(Speed(compiled=True, fused=True), lambda field, reason: degraded.append((field, reason)))
    assert denoiser.compile_seconds == 0
    assert close(denoiser(*given), wanted)
    assert counter.frame_count == 2
    assert not degraded
    seconds = denoiser.compile_seconds
    assert seconds > 0
    denoiser(*given)
    assert (counter.frame_count, denoiser.compile_seconds) == (2, seconds)


def test_the_texts_tokens_are_exact_with_sparse_attention(tiny: Tiny) -> None:
    module = load(tiny("hunyuan-video"))
    latents, times, text = inputs((3, 22, 26), text=90)
    exact = PyTorchDenoiser(module)(latents, times, text)
    denoiser = PyTorchDenoiser(module, Speed(sparse_tau=1.0))
    sparse = denoiser(latents, times, text)
    assert 1e-5 < (sparse - exact).norm() / exact.norm() < 0.5
    blocks = [*module.transformer_blocks, *module.single_transformer_blocks]
    kernels = [attention("native"), *[attention(sparse_kernel(1.0, 90))] * (len(blocks) - 1)]
    assert [block.attend for block in blocks] == kernels
    denoiser.begin_step(fresh=True, exact=True)
    assert torch.equal(denoiser(latents, times, text), exact)


def test_rotation_tables_are_computed_once_until_forgotten(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tiny("hunyuan-video"))
    computed: list[None] = []
    module.rope.register_forward_hook(lambda *_: computed.append(None))
    denoiser, given = PyTorchDenoiser(module), inputs()
    wanted = denoiser(*given)
    assert torch.equal(denoiser(*given), wanted)
    assert len(computed) == 1
    denoiser(*inputs((3, 4, 4)))
    assert len(computed) == 2
    denoiser.forget()
    denoiser(*inputs((3, 4, 4)))
    assert len(computed) == 3


@pytest.fixture(scope="module")
def shared(tiny: Tiny) -> Iterator[SharedDenoiser]:
    """The transformer in two processes."""
    manager = GroupManager()
    with closing(manager.load(TWO, tiny("hunyuan-video"), "transformer", PART, lambda: None)) as found:
        assert isinstance(found.part, SharedDenoiser)
        yield found.part
    manager.stop_processes()


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES)
def test_a_pass_of_two_processes_equals_that_of_one(case: str, shared: SharedDenoiser, tiny: Tiny) -> None:
    given = inputs(*SIZES[case])
    wanted = PyTorchDenoiser(load(tiny("hunyuan-video")))(*given)
    torch.testing.assert_close(shared(*given), wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.01


def test_passes_with_texts_of_different_lengths_are_shared(shared: SharedDenoiser, tiny: Tiny) -> None:
    latents, times, first = inputs(text=4)
    second = inputs(text=11)[2]
    denoiser = PyTorchDenoiser(load(tiny("hunyuan-video")))
    texts = {PROMPTED: first, UNPROMPTED: second}
    for got, text in zip(shared.together(latents, times, texts), texts.values(), strict=True):
        torch.testing.assert_close(got, denoiser(latents, times, text), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_fp8_attention_rounds_as_in_one_process(tiny: Tiny) -> None:
    spec, speed, given = tiny("hunyuan-video"), Speed(attention="fp8"), inputs((4, 46, 46))
    exact = PyTorchDenoiser(load(spec))(*given)
    wanted = PyTorchDenoiser(load(spec), speed)(*given)
    assert (wanted - exact).abs().max() > 1e-4
    manager = GroupManager()
    try:
        with closing(manager.load(TWO, spec, "transformer", PART, lambda: None, speed)) as found:
            assert isinstance(found.part, SharedDenoiser)
            torch.testing.assert_close(found.part(*given), wanted, rtol=0, atol=1e-5)
    finally:
        manager.stop_processes()


def steps_of(denoiser: PyTorchDenoiser | SharedDenoiser) -> list[torch.Tensor]:
    """Return the predictions of four steps whose changes differ, and of the first again."""
    latents, times, text = inputs((3, 6, 4))
    found = []
    for scale in (1.0, 1.001, 1.3, 1.301):
        found.append(denoiser(latents * scale, times, text).clone())
    denoiser.begin_step(fresh=True, exact=False)
    return [*found, denoiser(latents, times, text)]


def test_the_step_cache_skips_blocks_after_small_changes(tiny: Tiny) -> None:
    module = load(tiny("hunyuan-video"))
    denoiser = PyTorchDenoiser(module)
    exact = steps_of(denoiser)
    calls: list[Any] = []

    def counting(step: Any, block: Any, *given: Any) -> Any:
        calls.append(block)
        return step(block, *given)

    for block in (*module.transformer_blocks, *module.single_transformer_blocks):
        block.step = partial(counting, block.step)
    blocks = len(module.transformer_blocks) + len(module.single_transformer_blocks)
    with denoiser.caching("first-block:0.02"):
        cached = steps_of(denoiser)
    # The first block of all five, and the others of the first, the third and the one after the reset.
    assert len(calls) == 5 + 3 * (blocks - 1)
    for index, (got, wanted) in enumerate(zip(cached, exact, strict=True)):
        assert torch.equal(got, wanted) == (index in {0, 2, 4})
    assert all(map(torch.equal, steps_of(denoiser), exact))


@pytest.mark.parametrize(("step_cache", "exact"), [("magcache:0.1", {0, 4}), ("taylorseer:2", {0, 1, 3, 4})])
def test_scheduled_caches_reuse_residuals(step_cache: str, exact: set[int], tiny: Tiny) -> None:
    denoiser = PyTorchDenoiser(load(tiny("hunyuan-video")))
    wanted = steps_of(denoiser)
    with denoiser.caching(step_cache):
        cached = steps_of(denoiser)
    for index, (got, whole) in enumerate(zip(cached, wanted, strict=True)):
        assert torch.equal(got, whole) == (index in exact)


@pytest.mark.slow
@pytest.mark.parametrize("step_cache", ["first-block:0.02", "magcache:0.1", "taylorseer:2"])
def test_processes_that_share_a_pass_skip_blocks_together(step_cache: str, shared: SharedDenoiser, tiny: Tiny) -> None:
    denoiser = PyTorchDenoiser(load(tiny("hunyuan-video")))
    with denoiser.caching(step_cache), shared.caching(step_cache):
        for got, wanted in zip(steps_of(shared), steps_of(denoiser), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
