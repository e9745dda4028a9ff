"""Verification and baselines on a GPU: a reference takes the memory of one block, PyTorch is measured compiled too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.engines.block_reference import compare_blocks
from runtime.engines.programs import load_program
from runtime.engines.reference import ExactConvolutions, encoded_prompt, full_float32, load_reference
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.engines.verify import cases_of, errors
from runtime.execution.memory import release_cached_memory
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.test_block_reference import PARTS, Part, key_of, part_of
from tests.gpu import wide_models
from tests.pipeline.test_baselines import PROGRAMS, component_of
from tests.pipeline.test_baselines import key_of as component_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]

DEVICE = "cuda:0"
BLOCKS = 6
SIZE = (2, 8, 8)


@pytest.mark.parametrize("name", ["text_encoder", "transformer"])
def test_the_reference_equals_the_program_on_the_gpu(tiny: Callable[[str], ModelSpec], name: str) -> None:
    spec = tiny("wan2.2-a14b")
    found = load_reference(spec, name, name, DEVICE)
    plain = load_program(spec, name, name, device=DEVICE, dtype="float32")
    for case in cases_of(found, ShapeProfile.fixed((1, 1, 1) if name == "text_encoder" else SIZE)):
        assert case.expected is not None
        with full_float32(torch.device(DEVICE)):
            expected = plain.run(**case.inputs)
        assert all(errors(case.expected[key], expected[key])[0] < 1e-6 for key in expected)


def test_large_convolutions_are_exact_in_float32() -> None:
    torch.manual_seed(0)
    given, weight = torch.randn(8, 512, 64, 64), torch.randn(1024, 512, 3, 3) / 68
    expected = torch.conv2d(given, weight, padding=1)
    with full_float32(torch.device(DEVICE)), ExactConvolutions():
        found = torch.conv2d(given.to(DEVICE), weight.to(DEVICE), padding=1)
    assert errors(found.cpu(), expected)[0] < 1e-5


def test_the_reference_takes_the_memory_of_one_block(tmp_path: Path) -> None:
    spec = find(str(wide_models.build("wan2.1-1.3b", tmp_path / "wide", BLOCKS)), tmp_path)
    program = load_reference(spec, "transformer", "transformer", DEVICE)
    inputs = program.inputs(SIZE)
    program.run(**inputs)
    release_cached_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    program.run(**inputs)
    one = 4 * spec.transformer.block_parameters / BLOCKS
    # Activations of few tokens, and of 512 tokens of text, are small.
    assert one < torch.cuda.max_memory_allocated() - before < 1.5 * one


@pytest.mark.parametrize("program", PARTS)
def test_parts_of_blocks_are_compared_on_the_gpu(tiny: Callable[[str], ModelSpec], program: str) -> None:
    spec = tiny("wan2.2-a14b")
    text = encoded_prompt(spec, DEVICE)
    assert text is not None
    part = Part(part_of(spec, program, "float16", DEVICE))
    found = compare_blocks(part, spec, "transformer", key_of(spec, program, "float16"), DEVICE, text)
    assert found.passed, found.detail
    assert found.error > 1e-5


@pytest.mark.parametrize("program", PROGRAMS)
def test_pytorch_is_measured_eager_and_compiled(tiny: Callable[[str], ModelSpec], tmp_path: Path, program: str) -> None:
    spec = tiny("wan2.2-a14b")
    service = EngineService(EngineStore(tmp_path / "engines", 1 << 40), probe(), tmp_path)
    key = component_key(spec, program, service)
    baseline = PyTorchTimerFactory(service)(spec, component_of(program), key, DEVICE)
    assert baseline is not None
    found = baseline(program, key.profiles[0].opt)
    assert set(found) == ({"eager"} if program == "text_encoder" else {"eager", "compiled"})
    assert all(0 < seconds < 1 for seconds in found.values())
