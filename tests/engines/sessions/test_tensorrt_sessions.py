"""TensorRT's sessions with a stand-in for the library: buffers, contexts, working memory and failures.

`tests/gpu/test_tensorrt.py` runs them with TensorRT.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.errors import EngineError
from runtime.engines import tensorrt_library
from runtime.engines.block_programs import BlockProgram
from runtime.engines.builders.tensorrt import log_layers
from runtime.engines.component_programs import Program
from runtime.engines.onnx_export import TENSOR_NAMES
from runtime.engines.programs import load_program
from runtime.engines.sessions.tensorrt import TensorRTBlockSession, TensorRTSession
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.engine_files import refusal
from tests.engines.sessions.stand_in_tensorrt import Context, Engine, Graph, InspectedEngine, engines

TOKENS = 128
ANY = ShapeProfile.fixed((1, 1, 1))
BLOCKS = ("block_qkv", "block_query", "block_feed_forward")
Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a session of a program's engine, closed at the end."""
    known: dict[bytes, Engine] = {}
    with ExitStack() as stack:
        stack.enter_context(engines(known))

        def open_(kind: type[Any], engine: Engine, **options: Any) -> Any:
            path = tmp_path / f"{len(known)}.plan"
            path.write_bytes(str(len(known)).encode())
            known[path.read_bytes()] = engine
            return stack.enter_context(kind(path, device="cpu", names=TENSOR_NAMES, **options))

        yield open_


@pytest.fixture(params=BLOCKS)
def part(request: pytest.FixtureRequest, tiny: Callable[[str], ModelSpec]) -> BlockProgram:
    """Each part of a block, in float32."""
    return block(tiny, request.param)


def block(tiny: Callable[[str], ModelSpec], name: str) -> BlockProgram:
    """Return a part of a block, in float32."""
    program = load_program(tiny("wan2.1"), "transformer", name, device="cpu", dtype="float32", tokens=TOKENS)
    assert isinstance(program, BlockProgram)
    return program


def vae(tiny: Callable[[str], ModelSpec], name: str) -> Program:
    """Return a step of the VAE."""
    return load_program(tiny("wan2.1"), "vae", name, device="cpu", dtype="float32")


def outputs_for(program: BlockProgram, tokens: int) -> dict[str, torch.Tensor]:
    """Return buffers for the outputs."""
    return {name: torch.zeros(program.part.tensors[name].shape(tokens)) for name in program.output_names}


def test_a_block_session_writes_what_the_program_computes(opened: Open, part: BlockProgram) -> None:
    engine = Engine(part, ANY)
    session = opened(TensorRTBlockSession, engine)
    assert session.most_tokens == TOKENS
    assert session.context_bytes == engine.device_memory_size
    for tokens in (TOKENS, 64, TOKENS, 1, 64):
        inputs, outputs = part.inputs_for(tokens, tokens), outputs_for(part, tokens)
        session.write(inputs, outputs)
        for name, wanted in part.run(**inputs).items():
            assert torch.equal(outputs[name], wanted)
        found = session.infer(**inputs)
        assert all(torch.equal(found[name], outputs[name]) for name in outputs)
    # One context for each number of tokens, whose shapes are set once.
    assert engine.contexts == 3


def test_slices_of_longer_tensors_are_written_in_place(opened: Open, part: BlockProgram) -> None:
    session = opened(TensorRTBlockSession, Engine(part, ANY))
    inputs, outputs = part.inputs_for(TOKENS), outputs_for(part, TOKENS)
    counted = {name for name, tensor in part.part.tensors.items() if "tokens" in tensor.sizes}
    for start in (0, 64):
        given = {name: one[start : start + 64] if name in counted else one for name, one in inputs.items()}
        session.write(given, {name: one[start : start + 64] for name, one in outputs.items()})
    for name, wanted in part.run(**inputs).items():
        torch.testing.assert_close(outputs[name], wanted)


def test_full_chunks_use_the_profile_for_them(
    opened: Open, tiny: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = block(tiny, "block_query")
    session = opened(TensorRTBlockSession, Engine(part, ANY, profiles=2))
    # TensorRT 11.1 throws.
    monkeypatch.setattr(Context, "fails", RuntimeError("the profile cannot be set"))
    with refusal("engine.tensorrt_not_run"):
        session.infer(**part.inputs_for(TOKENS))
    monkeypatch.setattr(Context, "fails", False)
    for tokens in (TOKENS, 64):
        inputs = part.inputs_for(tokens)
        found = session.infer(**inputs)
        assert all(torch.equal(found[name], wanted) for name, wanted in part.run(**inputs).items())
    assert {tokens: bound._context.profile for tokens, bound in session._contexts.items()} == {TOKENS: 1, 64: 0}


def test_only_recent_contexts_are_kept(opened: Open, tiny: Callable[[str], ModelSpec]) -> None:
    part = block(tiny, "block_query")
    session = opened(TensorRTBlockSession, Engine(part, ANY))
    for tokens in range(1, 30):
        session.infer(**part.inputs_for(tokens))
    assert len(session._contexts) == 8
    session._contexts[29].captured = True
    session.release()
    # A CUDA graph still uses it.
    assert list(session._contexts) == [29]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("engine.other_inputs", lambda given, _: given.pop("x")),
        ("engine.other_inputs", lambda given, _: given.update(y=given["x"])),
        ("engine.other_outputs", lambda _, written: written.pop("x")),
        ("engine.other_outputs", lambda _, written: written.update({k: v[:32] for k, v in written.items()})),
        ("engine.other_shape", lambda given, _: given.update(x=given["x"][:32])),
        ("engine.other_shape", lambda given, _: given.update(modulation=given["modulation"][:5])),
        ("engine.other_shape", lambda given, _: given.update(x=given["x"][0])),
        ("engine.tensorrt_tensor_refused", lambda given, _: given.update(x=given["x"].half())),
        ("engine.tensorrt_tensor_refused", lambda given, _: given.update(x=torch.zeros(24, 64).t())),
        ("engine.tensorrt_tensor_refused", lambda given, _: given.update(x=torch.empty(64 * 24 + 1)[1:].view(64, 24))),
        ("engine.tensorrt_tensor_refused", lambda _, written: written.update(x=written["x"].half())),
    ],
)
def test_tensors_that_an_engine_cannot_take_are_refused(
    opened: Open, tiny: Callable[[str], ModelSpec], code: str, change: Callable[[Any, Any], Any]
) -> None:
    part = block(tiny, "block_query")
    session = opened(TensorRTBlockSession, Engine(part, ANY))
    assert part.spec.transformer.width == 24
    inputs, outputs = part.inputs_for(64), outputs_for(part, 64)
    given, written = dict(inputs), dict(outputs)
    change(given, written)
    with refusal(code):
        session.write(given, written)
    session.write(inputs, outputs)
    assert all(torch.equal(outputs[name], wanted) for name, wanted in part.run(**inputs).items())


def test_more_tokens_than_the_most_are_refused(opened: Open, part: BlockProgram) -> None:
    session = opened(TensorRTBlockSession, Engine(part, ANY))
    with refusal("engine.other_shape"):
        session.infer(**part.inputs_for(TOKENS + 1))


def test_sessions_share_the_largest_working_memory(opened: Open, tiny: Callable[[str], ModelSpec]) -> None:
    parts = {name: block(tiny, name) for name in BLOCKS}
    sessions = [
        opened(TensorRTBlockSession, Engine(parts[name], ANY, memory))
        for name, memory in zip(BLOCKS, (1000, 5000, 3000), strict=True)
    ]
    for _ in range(2):
        for name, session in zip(BLOCKS, sessions, strict=True):
            inputs = parts[name].inputs_for(64)
            found = session.infer(**inputs)
            assert all(torch.equal(found[key], wanted) for key, wanted in parts[name].run(**inputs).items())
    held = {session._contexts[64]._memory.data_ptr() for session in sessions}
    assert len(held) == 1
    # One that a CUDA graph was captured with stays where it is.
    sessions[0]._contexts[64].captured = True
    large = opened(TensorRTBlockSession, Engine(parts["block_qkv"], ANY, 9000))
    large.infer(**parts["block_qkv"].inputs_for(64))
    for name, session in zip(BLOCKS, sessions, strict=True):
        session.infer(**parts[name].inputs_for(64))
    assert {sessions[0]._contexts[64]._memory.data_ptr()} == held
    now = large._contexts[64]._memory
    assert now.numel() >= 9000
    assert sessions[1]._contexts[64]._memory is now


def test_working_memory_is_freed_with_the_last_session(opened: Open, tiny: Callable[[str], ModelSpec]) -> None:
    part = block(tiny, "block_query")
    sessions = [opened(TensorRTBlockSession, Engine(part, ANY)) for _ in range(2)]
    for session in sessions:
        session.infer(**part.inputs_for(64))
    sessions[0].close()
    assert tensorrt_library._context_memory.get(torch.device("cpu")) is not None
    sessions[1].close()
    assert tensorrt_library._context_memory.get(torch.device("cpu")) is None
    with pytest.raises(RuntimeError, match="closed"):
        sessions[1].infer(**part.inputs_for(64))


@pytest.mark.slow
def test_the_vaes_buffers_are_allocated_when_needed_and_freed(opened: Open, tiny: Callable[[str], ModelSpec]) -> None:
    begins, follows = vae(tiny, "vae_first"), vae(tiny, "vae_next")
    size = (2, 8, 6)
    first = opened(TensorRTSession, Engine(begins, ShapeProfile.fixed((1, *size[1:]))), cuda_graphs=False)
    following = opened(TensorRTSession, Engine(follows, ShapeProfile.fixed(size)), cuda_graphs=False)
    for _ in range(2):
        latents = torch.randn(1, begins.spec.vae.z_dim, 7, *size[1:])
        out, wanted = first.infer(z=latents[:, :, :1]), begins.run(z=latents[:, :, :1])
        # One set after one call: a clip has one first step.
        assert sum(bool(buffers) for buffers in first._buffers) == 1
        first.release()
        assert first._buffers == ({}, {})
        for start in (1, 3, 5):
            caches, expected = ({k: v for k, v in one.items() if k != "frames"} for one in (out, wanted))
            z = latents[:, :, start : start + 2]
            out, wanted = following.infer(z=z, **caches), follows.run(z=z, **expected)
            torch.testing.assert_close(out["frames"], wanted["frames"])
        # No input was copied.
        assert not following._staged
        frames = out["frames"].clone()
        following.release()
        assert torch.equal(out["frames"], frames)


FAILURES = [
    (RuntimeError("std::bad_function_call"), EngineError),
    (ValueError("an odd argument"), EngineError),
    (torch.AcceleratorError("CUDA error: invalid argument"), EngineError),
    (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError),
    (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    (True, EngineError),
]


@pytest.mark.parametrize(("fails", "kind"), FAILURES)
@pytest.mark.parametrize("session_kind", [TensorRTSession, TensorRTBlockSession])
def test_errors_of_any_type_are_engine_errors(
    opened: Open,
    tiny: Callable[[str], ModelSpec],
    monkeypatch: pytest.MonkeyPatch,
    fails: Exception | bool,
    kind: type[Exception],
    session_kind: type[Any],
) -> None:
    blocks = session_kind is TensorRTBlockSession
    program = block(tiny, "block_query") if blocks else vae(tiny, "vae_first")
    profile = ANY if blocks else ShapeProfile.fixed((1, 8, 6))
    session = opened(session_kind, Engine(program, profile))
    inputs = program.inputs(profile.opt)
    monkeypatch.setattr(Context, "fails", fails)
    with pytest.raises(kind):
        session.infer(**inputs)
    monkeypatch.setattr(Context, "fails", False)
    found = session.infer(**inputs)
    assert all(torch.equal(found[name], wanted) for name, wanted in program.run(**inputs).items())


def test_an_error_of_a_cuda_graph_is_an_engine_error(
    opened: Open, tiny: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, profile = vae(tiny, "vae_first"), ShapeProfile.fixed((1, 8, 6))
    session = opened(TensorRTSession, Engine(program, profile))
    inputs = program.inputs(profile.opt)
    for _ in range(5):
        session.infer(**inputs)
    # One for each set of buffers.
    assert len(session._graphs) == 2
    monkeypatch.setattr(Graph, "fails", torch.AcceleratorError("CUDA error: invalid argument"))
    with refusal("engine.tensorrt_not_run"):
        session.infer(**inputs)
    session.release()
    assert not session._graphs
    found = session.infer(**inputs)
    assert all(torch.equal(found[name], wanted) for name, wanted in program.run(**inputs).items())


@pytest.mark.parametrize("fails", [RuntimeError("the kernel failed"), True])
def test_a_broken_cuda_context_is_not_an_engine_error(
    opened: Open, tiny: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch, fails: Exception | bool
) -> None:
    part = block(tiny, "block_query")
    session = opened(TensorRTBlockSession, Engine(part, ANY))
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(Context, "fails", fails)
    monkeypatch.setattr(tensorrt_library, "cuda_failure", lambda _: lost)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        session.infer(**part.inputs_for(64))


def test_layers_are_listed_in_the_log_if_they_can_be(
    tmp_path: Path, tiny: Callable[[str], ModelSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    program = block(tiny, "block_qkv")
    # The stand-in of an engine has no inspector: the plan is built all the same.
    for plan, engine in ((b"no inspector", Engine(program, ANY)), (b"inspector", InspectedEngine(program, ANY))):
        (tmp_path / "engine.plan").write_bytes(plan)
        with engines({plan: engine}):
            log_layers(tensorrt_library.load(), tmp_path / "engine.plan", torch.device("cpu"))
    failure, *layers = capsys.readouterr().err.splitlines()
    assert "create_engine_inspector" in failure
    assert [json.loads(layer)["Name"] for layer in layers] == ["layer 0", "layer 1"]


def test_a_file_that_is_no_plan_is_refused(opened: Open, tmp_path: Path) -> None:
    for content in (b"", b"no plan"):
        (tmp_path / "bad.plan").write_bytes(content)
        with refusal("engine.file_unreadable", "engine.tensorrt_plan_refused"):
            TensorRTBlockSession(tmp_path / "bad.plan", device="cpu")
