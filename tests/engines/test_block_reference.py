"""Block engines are verified in a model's first blocks, with their weights: what is wrong in a part is found."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.engines import block_reference
from runtime.engines.block_programs import BlockProgram
from runtime.engines.block_reference import compare_blocks
from runtime.engines.build import siblings
from runtime.engines.builders import BUILDERS
from runtime.engines.builders.onnxruntime import OnnxRuntimeBlocks
from runtime.engines.key_parts import TOKENS_OPTION
from runtime.engines.programs import load_program
from runtime.engines.reference import BlocksOnDevice, encoded_prompt
from runtime.engines.service import EngineService
from runtime.engines.sessions import Session
from runtime.engines.store import EngineStore
from runtime.engines.verify import Comparison, Verification
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile
from tests.engines import engine_files

pytestmark = pytest.mark.usefixtures("forked_children")

PARTS = ("block_qkv", "block_query", "block_feed_forward")
TOKENS = 64
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def diorama() -> ModelSpec:
    return find("diorama", Path("none"))


class Part(Session):
    """A part of a block in PyTorch, in a precision, with a fault after it; records the numbers of tokens.

    Args:
        after: changes the outputs for given inputs.
    """

    def __init__(
        self,
        program: BlockProgram,
        after: Callable[[Mapping[str, torch.Tensor], Tensors], Tensors] = lambda _, outputs: outputs,
    ) -> None:
        self._program, self._after = program, after
        self.tokens: set[int] = set()

    def infer(self, **inputs: torch.Tensor) -> Tensors:
        tensors = self._program.part.tensors
        given = {
            name: tensor.to(getattr(torch, tensors[name].dtype or self._program.dtype))
            for name, tensor in inputs.items()
        }
        self.tokens.add(len(given["x"]))
        return self._after(given, self._program.run(**given))

    def close(self) -> None:
        """Nothing is loaded."""


def part_of(spec: ModelSpec, program: str, dtype: str, device: str = "cpu") -> BlockProgram:
    """Load a part."""
    loaded = load_program(spec, "transformer", program, device=device, dtype=dtype, tokens=TOKENS)
    assert isinstance(loaded, BlockProgram)
    return loaded


def key_of(spec: ModelSpec, program: str, precision: str, tokens: int = TOKENS) -> EngineKey:
    """Return the key of a block engine."""
    made = OnnxRuntimeBlocks(tokens=tokens).key(
        spec,
        "transformer",
        program,
        (ShapeProfile.fixed((1, 1, 1)),),
        precision=precision,
        machine=probe(),
        device="cpu",
    )
    assert (TOKENS_OPTION, str(tokens)) in made.options
    return made


TEXTS: dict[Path, torch.Tensor] = {}


def text_of(spec: ModelSpec) -> torch.Tensor:
    """Return the prompt's embeddings, encoded once for each model."""
    if spec.directory not in TEXTS:
        found = encoded_prompt(spec, "cpu")
        assert found is not None
        TEXTS[spec.directory] = found
    return TEXTS[spec.directory]


def verified(spec: ModelSpec, session: Session, program: str, precision: str) -> Verification:
    """Verify an engine."""
    return compare_blocks(session, spec, "transformer", key_of(spec, program, precision), "cpu", text_of(spec))


@pytest.mark.slow
@pytest.mark.parametrize("program", PARTS)
def test_parts_equal_the_familys_own_blocks(diorama: ModelSpec, program: str) -> None:
    session = Part(part_of(diorama, program, "float32"))
    found = verified(diorama, session, program, "float32")
    assert found.passed, found.detail
    assert found.error < 1e-5
    # The clip's tokens are more than one call takes: full chunks and a last one, and few tokens.
    assert max(session.tokens) == TOKENS
    assert len(session.tokens) > 1


def test_engines_of_a_model_that_attends_to_images_are_verified(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1-flf2v")
    spec = replace(spec, defaults=replace(spec.defaults, width=64, height=64, frames=9))
    found = verified(spec, Part(part_of(spec, "block_query", "float32")), "block_query", "float32")
    assert found.passed, found.detail
    assert found.error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "dtype"),
    [("block_qkv", "float16"), ("block_query", "bfloat16"), ("block_feed_forward", "float16")],
)
def test_rounding_passes_and_is_not_float32(diorama: ModelSpec, program: str, dtype: str) -> None:
    session = Part(part_of(diorama, program, dtype))
    found = verified(diorama, session, program, dtype)
    assert found.passed, found.detail
    assert program != "block_query" or not verified(diorama, session, program, "float32").passed


@pytest.mark.slow
def test_errors_of_all_parts_add_up(diorama: ModelSpec) -> None:
    def off(_: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        return {name: output * 1.05 for name, output in outputs.items()}

    parts = {program: Part(part_of(diorama, program, "float16")) for program in PARTS}
    last, key = parts.pop("block_feed_forward"), key_of(diorama, "block_feed_forward", "float16")
    arguments = (last, diorama, "transformer", key, "cpu", text_of(diorama))
    alone, together = compare_blocks(*arguments), compare_blocks(*arguments, parts)
    assert alone.passed
    assert together.passed
    assert min(alone.error, together.error) > 0
    assert all(part.tokens for part in parts.values())
    # Another part's fault shows in the blocks' result only.
    wrong = compare_blocks(*arguments, {"block_qkv": Part(part_of(diorama, "block_qkv", "float16"), off)})
    assert not wrong.passed
    compared = wrong.detail.data.get("compared", wrong.detail)
    assert compared.data["where"].startswith("the result of 4 blocks, t = ")


def test_engines_of_the_other_parts_are_found(tmp_path: Path) -> None:
    store = EngineStore(tmp_path, 1 << 40)
    wanted = engine_files.key(program="block_query", weights="swapped")
    found = engine_files.add(store, replace(wanted, program="block_qkv"))
    engine_files.add(store, replace(wanted, program="block_feed_forward"), verified=False)
    engine_files.add(store, replace(wanted, program="block_feed_forward", precision="float16"))
    engine_files.add(store, wanted)
    with siblings(store, wanted) as folders:
        assert [folder.name for folder in folders] == [found.id]
    with siblings(store, engine_files.key()) as folders:
        assert folders == ()


def test_an_engine_that_adds_nothing_fails(diorama: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(inputs: Mapping[str, torch.Tensor], _: Tensors) -> Tensors:
        return {"x": inputs["x"].clone()}

    found = verified(
        diorama, Part(part_of(diorama, "block_feed_forward", "float16"), skipped), "block_feed_forward", "float16"
    )
    assert not found.passed
    assert found.detail.code == "engine.compared_change"
    assert found.detail.data["error"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("precision", "passed"), [("float16", True), ("float32", False)])
def test_the_stream_may_be_rounded_to_the_precision(precision: str, *, passed: bool) -> None:
    before = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    expected = before + 1e-3 * before.flip(0)
    comparison = Comparison("block_query", precision)
    comparison.add_change(expected.half().float(), expected, before, "x")
    assert comparison.result().passed == passed


def test_an_engine_wrong_with_one_blocks_weights_only_fails(diorama: ModelSpec) -> None:
    program = part_of(diorama, "block_qkv", "float16")
    seen: list[float] = []

    def off(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        weights = float(inputs["q_weight"].float().sum())
        if weights not in seen:
            seen.append(weights)
        return (
            outputs | {"k": outputs["k"] * 1.1} if weights == seen[min(3, len(seen) - 1)] and len(seen) > 3 else outputs
        )

    found = verified(diorama, Part(program, off), "block_qkv", "float16")
    assert len(seen) == 4
    assert not found.passed
    assert found.error == pytest.approx(0.1, rel=0.05)


def test_an_engine_wrong_at_its_most_tokens_only_fails(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1")
    tokens = 8192

    def off(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        return {name: one * (1.5 if len(inputs["x"]) == tokens else 1) for name, one in outputs.items()}

    small = replace(spec, defaults=replace(spec.defaults, width=64, height=64, frames=5))
    session = Part(part_of(spec, "block_query", "float32"), off)
    key = key_of(spec, "block_query", "float32", tokens)
    found = compare_blocks(session, small, "transformer", key, "cpu", text_of(spec))
    assert not found.passed
    assert session.tokens == {64, 32, tokens}


def test_only_the_first_blocks_are_on_the_device(diorama: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Watched(BlocksOnDevice):
        def __init__(self, blocks: torch.nn.ModuleList, device: torch.device) -> None:
            made.append(len(blocks))
            super().__init__(blocks, device)

    monkeypatch.setattr(block_reference, "BlocksOnDevice", Watched)
    assert diorama.transformer.num_layers > 4
    verified(diorama, Part(part_of(diorama, "block_qkv", "float32")), "block_qkv", "float32")
    assert made == [4]


@pytest.mark.slow
@pytest.mark.parametrize("program", PARTS)
def test_block_engines_are_built_verified_and_measured(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "2")
    spec = tiny("wan2.2-a14b")
    spec = replace(spec, defaults=replace(spec.defaults, width=64, height=64, frames=9))
    service = EngineService(EngineStore(tmp_path / "engines", 1 << 40), probe(), tmp_path)
    [offer] = [
        one for one in service.offers(spec)("transformer", (3, 4, 8), "cpu") if one.builder == "onnxruntime_blocks"
    ]
    [use] = [use for use in offer.engines if use.program == program]
    assert use.builder in BUILDERS
    timers = PyTorchTimerFactory(service)
    record = service.build(spec, "transformer", use, "cpu", lambda *_: None, Cancel(), timers=timers)
    assert record.usable
    assert 0 < record.error < 1e-5
    assert set(record.baselines) == {"eager"}
    assert min(record.seconds_per_call, record.pytorch_seconds_per_call) > 0
    [again] = service.verify([record], [spec], lambda *_: None, Cancel(), timers=timers)
    assert again.engine.usable
    assert again.skipped is None
