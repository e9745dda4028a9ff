"""Blocks compiled once and used by all, held to what they give uncompiled; and what follows where that fails."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from runtime.components.compiling import CompiledStep
from runtime.components.denoiser import PyTorchDenoiser
from runtime.core.plan import Speed
from runtime.models.spec import ModelSpec
from tests.components.test_fast_transformer import Case

Tiny = Callable[[str], ModelSpec]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew, into a folder of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@torch.no_grad()
def test_all_blocks_of_both_experts_share_one_compilation(tiny: Tiny) -> None:
    case = Case(tiny("wan2.2-ti2v-5b"))
    denoisers = [PyTorchDenoiser(case.load(), Speed(compiled=True, text_kept=True)) for _ in range(2)]
    for denoiser in denoisers:
        for text in case.texts:
            wanted = case.wanted(text, 500.0)
            got = denoiser(case.latents, torch.tensor(500.0), text)
            assert (got - wanted).norm() / wanted.norm() < 2e-6
    assert counters["stats"]["unique_graphs"] == 1
    assert denoisers[0].compile_seconds > 0


@torch.no_grad()
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so() -> None:
    said: list[str] = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    step = CompiledStep(breaks, said.append)
    for _ in range(3):
        assert step(torch.zeros(2)).tolist() == [1.0, 1.0]
    (sentence,) = said
    assert sentence.startswith("PyTorch could not compile it (")
    assert "\n" not in sentence


@torch.no_grad()
def test_any_number_of_sizes_is_compiled() -> None:
    said: list[str] = []
    step = CompiledStep(lambda x: x * 2 + 1, said.append)
    for size in range(2, 14):
        assert torch.equal(step(torch.ones(size)), torch.full((size,), 3.0))
    assert not said


@torch.no_grad()
def test_running_out_of_memory_is_not_taken_for_a_failure_to_compile() -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    step = CompiledStep(lambda x: x)
    step._compiled = full
    with pytest.raises(MemoryError):
        step(torch.zeros(1))
