"""The parts of a block equal the whole block, and their engines equal them at every number of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.core.errors import EngineError
from runtime.core.plan import ComponentPlan
from runtime.engines.block_programs import BlockProgram
from runtime.engines.programs import load_program
from runtime.engines.sessions.onnxruntime import OnnxRuntimeBlockSession
from runtime.execution.rotation import rotation_tables
from runtime.families.wan.transformer import block_step, install
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.planner.choice.engine_index import SWAPPED, ShapeProfile
from tests.block_engine_files import BUILDER
from tests.block_engine_files import TOKENS as TOKENS_OF_ENGINES
from tests.engine_library import EngineLibrary

ANY = ShapeProfile.fixed((1, 1, 1))
NAMES = ("block_qkv", "block_query", "block_feed_forward")
TOKENS, TEXT = 37, 11

Load = Callable[..., BlockProgram]


@pytest.fixture
def program(tiny: Callable[[str], ModelSpec]) -> Load:
    """Return a function that loads a block program of the tiny A14B."""

    def load(name: str, dtype: str = "float32", tokens: int = 128) -> BlockProgram:
        found = load_program(tiny("wan2.2-a14b"), "transformer", name, device="cpu", dtype=dtype, tokens=tokens)
        assert isinstance(found, BlockProgram)
        return found

    return load


def weights_of(program: BlockProgram, block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a block's parameters as the inputs of a program."""
    return {name: block.get_parameter(path).data for name, path in program.part.weights.items()}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend with heads before tokens; return (tokens, width)."""
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)[0]


def test_parts_equal_the_block(program: Load, tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.2-a14b")
    part = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
    module: Any = load_module(spec, "transformer", part)
    install(module)
    block, heads, width = module.blocks[1], spec.transformer.num_attention_heads, spec.transformer.width
    torch.manual_seed(0)
    x, text, modulation = torch.randn(1, TOKENS, width), torch.randn(1, TEXT, width), torch.randn(1, 6, width)
    angles = torch.rand(1, TOKENS, 1, width // heads // 2).repeat_interleave(2, dim=-1)
    cos, sin = rotation_tables(angles.cos(), angles.sin())
    with torch.no_grad():
        expected = block_step(block, x, text, modulation, (cos, sin))[0]
        table = (block.scale_shift_table + modulation)[0]
        qkv, query, feed_forward = map(program, NAMES)
        shared = {"modulation": table}
        attending = qkv.run(x=x[0], cos=cos[0, :, 0], sin=sin[0, :, 0], **shared, **weights_of(qkv, block))
        q, k, v = (attending[name].view(1, TOKENS, heads, -1).transpose(1, 2) for name in "qkv")
        stream = query.run(x=x[0], attended=attend(q, k, v), **shared, **weights_of(query, block))
        keys = block.attn2.norm_k(block.attn2.to_k(text)).view(1, TEXT, heads, -1).transpose(1, 2)
        values = block.attn2.to_v(text).view(1, TEXT, heads, -1).transpose(1, 2)
        attended = attend(stream["query"].view(1, TOKENS, heads, -1).transpose(1, 2), keys, values)
        out = feed_forward.run(x=stream["x"], attended=attended, **shared, **weights_of(feed_forward, block))["x"]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_inputs_with_the_shapes_and_dtypes_of_a_block(
    name: str, program: Load, tiny: Callable[[str], ModelSpec]
) -> None:
    part = ComponentPlan(backend="pytorch", device="cpu", dtype="float16", weights_bytes=0, reasons=())
    module: Any = load_module(tiny("wan2.2-a14b"), "transformer", part)
    found = program(name, "float16")
    assert not list(found.module.parameters())
    for block in module.blocks:
        given = weights_of(found, block)
        wanted = {tensor: found.inputs_for(5)[tensor] for tensor in given}
        assert {key: (one.shape, one.dtype) for key, one in given.items()} == {
            key: (one.shape, one.dtype) for key, one in wanted.items()
        }


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_writes_what_pytorch_computes_for_any_number_of_tokens(
    name: str, program: Load, engine_library: EngineLibrary, tiny: Callable[[str], ModelSpec]
) -> None:
    found, spec = program(name, tokens=TOKENS_OF_ENGINES), tiny("wan2.2-a14b")
    key = BUILDER.key(spec, "transformer", name, (ANY,), precision="float32", machine=probe(), device="cpu")
    assert (key.weights, dict(key.options)["tokens"]) == (SWAPPED, str(TOKENS_OF_ENGINES))
    engine = engine_library.files(spec, "transformer", key, BUILDER) / BUILDER.file_name
    session = OnnxRuntimeBlockSession(engine, provider="cpu", precision="float32", device="cpu")
    with session:
        assert session.most_tokens == TOKENS_OF_ENGINES
        for tokens in (1, 32, 50, TOKENS_OF_ENGINES):
            inputs = found.inputs_for(tokens, seed=tokens)
            expected = found.run(**inputs)
            # Rows of larger tensors, as chunks of a clip are.
            full = {output: torch.full((tokens + 64, one.shape[1]), torch.nan) for output, one in expected.items()}
            session.write(inputs, {output: one[64:] for output, one in full.items()})
            for output, one in expected.items():
                torch.testing.assert_close(full[output][64:], one, rtol=1e-4, atol=1e-5)
                assert full[output][:64].isnan().all()
        with pytest.raises(EngineError) as other:
            session.write(found.inputs_for(5), {output: one[:4] for output, one in full.items()})
        assert other.value.fact.code == "engine.other_outputs"
        with pytest.raises(EngineError) as larger:
            session.write(found.inputs_for(TOKENS_OF_ENGINES + 1), {})
        assert larger.value.fact.code == "engine.other_shape"
