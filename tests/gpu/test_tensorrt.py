"""TensorRT's builders and session on tiny models. Skipped without an NVIDIA GPU and TensorRT."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import is_block_program
from runtime.engines import manifest, tensorrt_library
from runtime.engines.block_programs import BlockProgram
from runtime.engines.builders import BUILDERS
from runtime.engines.builders.tensorrt import OnnxTensorRT, TensorRTBlocks, log_layers
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.engines.reference import full_float32
from runtime.engines.sessions import Session, open_session
from runtime.engines.sessions.tensorrt import TensorRTBlockSession, TensorRTSession
from runtime.engines.verify import verify
from runtime.families.ltx2.spec import BLOCK_PROGRAMS
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineKey, EngineRecord, ShapeProfile
from tests.gpu import tensorrt_8_6
from tests.gpu.errors import relative_error
from tests.gpu.opset17 import to_opset_17
from tests.tiny_models import LTX2_ARCHITECTURES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="needs TensorRT"),
]

DEVICE = "cuda:0"
SIZE = (3, 8, 6)
PROFILES = {
    "text_encoder": ShapeProfile.fixed((1, 1, 1)),
    "transformer": ShapeProfile.fixed(SIZE),
    "vae_first": ShapeProfile.fixed((1, 8, 6)),
    "vae_next": ShapeProfile.fixed((2, 8, 6)),
}
PARTS = [
    ("text_encoder", "text_encoder"),
    ("transformer", "transformer"),
    ("vae", "vae_first"),
    ("vae", "vae_next"),
]
BLOCKS = ("block_qkv", "block_query", "block_feed_forward")
# Block programs by the architecture of the tiny model.
BLOCKS_OF = [
    *(("wan2.1", name) for name in BLOCKS),
    *((architecture, name) for architecture in LTX2_ARCHITECTURES for name in BLOCK_PROGRAMS),
]
# The most tokens of the block engines here; slices of a multiple of 64 tokens are aligned.
TOKENS = 256
TWO = (ShapeProfile((2, 4, 4), SIZE, (5, 8, 8)), ShapeProfile((5, 8, 8), (7, 12, 12), (9, 16, 16)))

Make = Callable[..., tuple[Path, EngineRecord, Program]]


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that builds an engine of the tiny Wan2.1, once per key."""
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
    root, made = tmp_path_factory.mktemp("engines"), {}

    def build(
        component: str,
        name: str,
        precision: str = "float32",
        builder_name: str = "onnx_tensorrt",
        profiles: tuple[ShapeProfile, ...] = (),
        architecture: str = "wan2.1",
    ) -> tuple[Path, EngineRecord, Program]:
        spec = tiny(architecture)
        builder = BUILDERS[builder_name]
        if tensorrt_8_6.is_installed():
            builder = (TensorRTBlocks if is_block_program(name) else OnnxTensorRT)(prepare=to_opset_17)
        reason = BUILDERS[builder_name].unavailable(probe())
        if reason is not None:
            pytest.skip(str(reason))
        key = builder.key(
            spec,
            component,
            name,
            profiles or (PROFILES.get(name, ShapeProfile.fixed((1, 1, 1))),),
            precision=precision,
            machine=probe(),
            device=DEVICE,
        )
        # Tiny models gain nothing from a long search.
        options = dict(key.options) | {"optimization_level": "1"}
        if is_block_program(name):
            options["tokens"] = str(TOKENS)
        key = replace(key, options=tuple(options.items()))
        folder = root / key.digest()
        if key not in made:
            folder.mkdir()
            program = load_program(spec, component, name, device=DEVICE, dtype=precision, tokens=TOKENS)
            builder.build(program, key, folder, lambda line, share: None)
            made[key] = record(key, folder, builder.file_name)
        return folder, made[key], load_program(spec, component, name, device=DEVICE, dtype="float32", tokens=TOKENS)

    return build


def record(key: EngineKey, folder: Path, file_name: str) -> EngineRecord:
    """Return an engine's record as the build writes it, not verified."""
    files = manifest.hashed_files(folder, file_name)
    blank = manifest.unreadable(folder, Fact("engine.file_missing", {"file": "engine.json"}))
    size = sum(file.bytes for file in files)
    return replace(blank, key=key, id=key.digest(), files=files, file_bytes=size, problem=None)


def opened(folder: Path, found: EngineRecord, graphs: str = "on") -> Session:
    """Open an engine with CUDA graphs on or off."""
    key = replace(found.key, options=tuple((dict(found.key.options) | {"cuda_graphs": graphs}).items()))
    return open_session(folder, replace(found, key=key), device=DEVICE, weights=dict)


@pytest.mark.parametrize("builder", ["onnx_tensorrt", "torch_tensorrt"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(("component", "name"), PARTS)
def test_each_program_equals_pytorch(make: Make, component: str, name: str, precision: str, builder: str) -> None:
    folder, found, program = make(component, name, precision, builder)
    with opened(folder, found) as session:
        result = verify(session, program, PROFILES[name], precision)
    assert result.passed, result.detail


def test_cuda_graphs_do_not_change_outputs_or_share_buffers(make: Make) -> None:
    folder, found, program = make("transformer", "transformer")
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with opened(folder, found, "off") as plain, opened(folder, found) as captured:
        for seed in range(6):
            given = program.inputs(SIZE, seed)
            out = captured.infer(**given)["velocity"]
            assert relative_error(out, plain.infer(**given)["velocity"]) < 1e-5
            outputs.append((out, out.clone()))
            # An output stays until the call after the next.
            assert all(torch.equal(*pair) for pair in outputs[-2:])
        assert isinstance(captured, TensorRTSession)
        assert len(captured._graphs) == 2


def test_vae_caches_are_reused(make: Make) -> None:
    first_folder, first_record, first_program = make("vae", "vae_first")
    next_folder, next_record, next_program = make("vae", "vae_next")
    latents = torch.randn(1, first_program.spec.vae.z_dim, 9, 8, 6, device=DEVICE)
    with (
        opened(first_folder, first_record) as first,
        opened(next_folder, next_record) as following,
        full_float32(latents.device),
    ):
        out, wanted = first.infer(z=latents[:, :, :1]), first_program.run(z=latents[:, :, :1])
        for start in range(1, 9, 2):
            caches = [{k: v for k, v in found.items() if k != "frames"} for found in (out, wanted)]
            z = latents[:, :, start : start + 2]
            out, wanted = following.infer(z=z, **caches[0]), next_program.run(z=z, **caches[1])
            assert relative_error(out["frames"], wanted["frames"]) < 1e-3


def test_two_profiles_work_and_other_sizes_are_errors(make: Make) -> None:
    folder, found, program = make("transformer", "transformer", profiles=TWO)
    with opened(folder, found) as session:
        for profile in (*TWO, TWO[0]):
            assert verify(session, program, profile, "float32").passed
        with pytest.raises(EngineError, match="built for"):
            session.infer(**program.inputs((9, 18, 18)))
        assert verify(session, program, TWO[1], "float32").passed


def test_inputs_are_converted_to_the_engines_dtype(make: Make) -> None:
    folder, found, program = make("transformer", "transformer")
    inputs = program.inputs(SIZE)
    strided = inputs["latents"].transpose(3, 4).contiguous().transpose(3, 4)
    with opened(folder, found) as session:
        wanted = session.infer(**inputs)["velocity"].clone()
        odd = {
            "latents": strided.double().cpu(),
            "timestep": inputs["timestep"].half(),
            "text_embeds": inputs["text_embeds"],
        }
        assert torch.equal(session.infer(**odd)["velocity"], wanted)
        with pytest.raises(EngineError, match="has the inputs"):
            session.infer(latents=strided)


@pytest.mark.parametrize("data", [b"", b"not a plan", b"ftrt" + bytes(4096)])
def test_an_invalid_plan_is_an_error(make: Make, tmp_path: Path, data: bytes) -> None:
    make("text_encoder", "text_encoder")
    path = tmp_path / "engine.plan"
    path.write_bytes(data)
    with pytest.raises(EngineError, match="engine file"):
        TensorRTSession(path, device=DEVICE)


def test_a_changed_file_is_never_opened(make: Make, tmp_path: Path) -> None:
    folder, found, _ = make("text_encoder", "text_encoder")
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    data = bytearray((copy / "engine.plan").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "engine.plan").write_bytes(data)
    with pytest.raises(EngineError, match="changed"):
        opened(copy, found)


def test_closing_frees_memory(make: Make) -> None:
    folder, found, program = make("vae", "vae_next")
    inputs, free = program.inputs(PROFILES["vae_next"].opt), []
    for _ in range(8):
        with opened(folder, found) as session:
            for _ in range(4):
                session.infer(**inputs)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[2] - (4 << 20)
    with pytest.raises(RuntimeError, match="closed"):
        session.infer(**inputs)


def test_sessions_share_one_working_memory(make: Make) -> None:
    folder, found, program = make("transformer", "transformer")
    inputs = program.inputs(SIZE)
    with opened(folder, found, "off") as one, opened(folder, found, "off") as other:
        assert isinstance(one, TensorRTSession)
        assert isinstance(other, TensorRTSession)
        wanted = one.infer(**inputs)["velocity"].clone()
        assert torch.equal(other.infer(**inputs)["velocity"], wanted)
        assert one.context_bytes > 0
        assert one._memory is other._memory
    vae_folder, vae_record, vae = make("vae", "vae_next")
    with opened(folder, found) as one, opened(vae_folder, vae_record) as other:
        # Graphs stay valid when another session needs more memory.
        graphs = [one.infer(**inputs)["velocity"].clone() for _ in range(4)]
        other.infer(**vae.inputs(PROFILES["vae_next"].opt))
        graphs += [one.infer(**inputs)["velocity"].clone() for _ in range(2)]
        assert all(torch.equal(out, wanted) for out in graphs)


def test_release_frees_buffers_and_keeps_outputs(make: Make) -> None:
    folder, found, program = make("vae", "vae_first")
    inputs = program.inputs(PROFILES["vae_first"].opt)
    with opened(folder, found) as session:
        before = torch.cuda.memory_allocated()
        out = session.infer(**inputs)
        kept = {name: tensor.clone() for name, tensor in out.items()}
        session.release()
        assert all(torch.equal(out[name], tensor) for name, tensor in kept.items())
        again = session.infer(**inputs)
        assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
        del out, again, kept
        session.release()
        assert torch.cuda.memory_allocated() <= before


class Failing:
    """An execution context of which one method raises what a binding might raise."""

    def __init__(self, context: object, method: str) -> None:
        self._context = context
        self._method = method

    def __getattr__(self, name: str) -> object:
        if name == self._method:
            return self._fail
        return getattr(self._context, name)

    def _fail(self, *_: object) -> bool:
        raise RuntimeError("std::bad_function_call")


@pytest.mark.parametrize("method", ["set_optimization_profile_async", "set_input_shape", "execute_async_v3"])
def test_exceptions_of_tensorrt_are_engine_errors(make: Make, method: str) -> None:
    folder, found, program = make("transformer", "transformer", profiles=TWO)
    with opened(folder, found) as session:
        assert isinstance(session, TensorRTSession)
        context = session._context
        session._context = Failing(context, method)
        with pytest.raises(EngineError):
            session.infer(**program.inputs((7, 12, 12)))
        session._context = context
        assert verify(session, program, TWO[1], "float32").passed


def block(make: Make, name: str, architecture: str = "wan2.1") -> tuple[Path, EngineRecord, BlockProgram]:
    """Build a block engine; return it with its program in float32."""
    folder, found, program = make("transformer", name, "float16", "tensorrt_blocks", architecture=architecture)
    assert isinstance(program, BlockProgram)
    return folder, found, program


def block_session(folder: Path, found: EngineRecord) -> TensorRTBlockSession:
    """Open a block engine."""
    session = open_session(folder, found, device=DEVICE, weights=dict)
    assert isinstance(session, TensorRTBlockSession)
    return session


def in_half(program: BlockProgram, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return inputs in the dtypes of a float16 engine."""
    return {
        name: tensor if program.part.tensors[name].dtype else tensor.half()
        for name, tensor in program.inputs_for(tokens, seed).items()
    }


def outputs_for(program: BlockProgram, tokens: int) -> dict[str, torch.Tensor]:
    """Return buffers of NaN for the outputs of a float16 engine."""
    known = program.part.tensors
    return {
        name: torch.full(
            known[name].shape(tokens),
            float("nan"),
            dtype=torch.float32 if known[name].dtype else torch.float16,
            device=DEVICE,
        )
        for name in program.output_names
    }


@pytest.mark.parametrize(("architecture", "name"), BLOCKS_OF)
def test_each_block_part_equals_pytorch_for_any_number_of_tokens(make: Make, architecture: str, name: str) -> None:
    folder, found, program = block(make, name, architecture)
    # Without weights: only code.
    assert sum(file.bytes for file in found.files) < 2_000_000
    with closing(block_session(folder, found)) as session:
        assert session.most_tokens == TOKENS
        for tokens in (TOKENS, 64, 1, 191, TOKENS):
            inputs = program.inputs_for(tokens, seed=tokens)
            wanted = program.run(**inputs)
            out = session.infer(**inputs)
            assert {key: tensor.shape for key, tensor in out.items()} == {k: t.shape for k, t in wanted.items()}
            assert all(relative_error(out[key].float(), wanted[key]) < 1e-2 for key in wanted)
        with pytest.raises(EngineError) as refused:
            session.infer(**program.inputs_for(TOKENS + 1))
        assert refused.value.code == "engine.other_shape"


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("stream", ["default", "own"])
def test_block_engines_write_into_slices(make: Make, name: str, stream: str) -> None:
    folder, found, program = block(make, name)
    total, size = 3 * TOKENS // 2, TOKENS // 2
    inputs = in_half(program, total)
    outputs = outputs_for(program, total + 64)
    counted = {key for key, tensor in program.part.tensors.items() if "tokens" in tensor.sizes}
    chosen = torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()
    with closing(block_session(folder, found)) as session:
        chosen.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(chosen):
            for start in range(0, total, size):
                part = slice(start, start + size)
                given = {key: tensor[part] if key in counted else tensor for key, tensor in inputs.items()}
                session.write(given, {key: tensor[part] for key, tensor in outputs.items()})
        torch.cuda.current_stream().wait_stream(chosen)
        wanted = program.run(**{key: tensor.float() for key, tensor in inputs.items()})
        for key, reference in wanted.items():
            assert relative_error(outputs[key][:total].float(), reference) < 1e-2
            assert outputs[key][total:].isnan().all()


def test_block_engines_run_in_a_cuda_graph(make: Make) -> None:
    folder, found, program = block(make, "block_query")
    full, rest = in_half(program, TOKENS, 1), in_half(program, 64, 2)
    outs = outputs_for(program, TOKENS), outputs_for(program, 64)
    with closing(block_session(folder, found)) as session:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            session.write(full, outs[0])
            session.write(rest, outs[1])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            # Full and last chunks alternate, as in a pass.
            for _ in range(3):
                session.write(full, outs[0])
                session.write(rest, outs[1])
        # New values at the same addresses.
        for inputs, seed in ((full, 3), (rest, 4)):
            for key, tensor in in_half(program, inputs["x"].shape[0], seed).items():
                inputs[key].copy_(tensor)
        for out in outs:
            for tensor in out.values():
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for inputs, out in ((full, outs[0]), (rest, outs[1])):
            wanted = program.run(**{key: tensor.float() for key, tensor in inputs.items()})
            assert all(relative_error(out[key].float(), wanted[key]) < 1e-2 for key in wanted)
        # Without the graph it works as before.
        again = outputs_for(program, TOKENS)
        session.write(full, again)
        assert all(torch.equal(again[key], outs[0][key]) for key in again)
        graph.reset()


def test_a_thousand_passes_of_a_block_take_no_more_memory(make: Make) -> None:
    parts = {name: block(make, name) for name in BLOCKS}
    sessions = {name: block_session(folder, found) for name, (folder, found, _) in parts.items()}
    calls = []
    for name, (_, _, program) in parts.items():
        for tokens in (TOKENS, 128):
            calls.append((sessions[name], in_half(program, tokens), outputs_for(program, tokens)))
    try:
        free = 0
        for index in range(1000):
            for session, inputs, outputs in calls:
                session.write(inputs, outputs)
            if index == 10:
                torch.cuda.synchronize()
                first = [{key: tensor.clone() for key, tensor in outputs.items()} for _, _, outputs in calls]
                free = torch.cuda.mem_get_info()[0]
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] >= free - (1 << 20)
        for (_, _, outputs), before in zip(calls, first, strict=True):
            assert all(torch.equal(outputs[key], before[key]) for key in before)
    finally:
        for session in sessions.values():
            session.close()


def test_tensors_that_a_block_engine_cannot_take_are_errors(make: Make) -> None:
    folder, found, program = block(make, "block_query")
    inputs, outputs = in_half(program, 128), outputs_for(program, 128)
    width = inputs["x"].shape[1]
    wide = torch.zeros(128, 2 * width, device=DEVICE)
    odd = torch.zeros(128 * width + 1, device=DEVICE)[1:].view(128, width)
    wrong: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = [
        ("engine.other_inputs", {"x": inputs["x"]}, outputs),
        ("engine.other_inputs", {**inputs, "y": inputs["x"]}, outputs),
        ("engine.other_outputs", inputs, {"x": outputs["x"]}),
        ("engine.other_outputs", inputs, outputs_for(program, 64)),
        ("engine.other_shape", {**inputs, "x": inputs["x"][:64]}, outputs),
        ("engine.other_shape", {**inputs, "modulation": inputs["modulation"][:5]}, outputs),
        ("engine.tensorrt_tensor_refused", {**inputs, "x": inputs["x"].half()}, outputs),
        ("engine.tensorrt_tensor_refused", {**inputs, "x": inputs["x"].cpu()}, outputs),
        ("engine.tensorrt_tensor_refused", {**inputs, "x": wide[:, :width]}, outputs),
        ("engine.tensorrt_tensor_refused", {**inputs, "x": odd}, outputs),
        ("engine.tensorrt_tensor_refused", inputs, {**outputs, "x": outputs["x"].cpu()}),
    ]
    with closing(block_session(folder, found)) as session:
        for code, given, written in wrong:
            with pytest.raises(EngineError) as refused:
                session.write(given, written)
            assert refused.value.code == code
        session.write(inputs, outputs)
        wanted = program.run(**{key: tensor.float() for key, tensor in inputs.items()})
        assert all(relative_error(outputs[key].float(), wanted[key]) < 1e-2 for key in wanted)
    with pytest.raises(RuntimeError, match="closed"):
        session.write(inputs, outputs)


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_a_damaged_block_plan_is_an_error(make: Make, tmp_path: Path, keep: float) -> None:
    folder, _, _ = block(make, "block_query")
    data = (folder / "engine.plan").read_bytes()
    path = tmp_path / "engine.plan"
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(EngineError):
        TensorRTBlockSession(path, device=DEVICE)


def test_layers_are_in_the_log_of_the_build(make: Make, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, _, _ = block(make, "block_feed_forward")
    log_layers(tensorrt_library.load(), folder / "engine.plan", torch.device(DEVICE))
    lines = capfd.readouterr().err.strip().splitlines()
    layers = [json.loads(line) for line in lines]
    assert all(len(line) < 500 for line in lines)
    assert all({"Name", "LayerType", "Inputs", "Outputs"} <= set(layer) for layer in layers)
    log_layers(tensorrt_library.load(), tmp_path / "none", torch.device(DEVICE))
    assert "cannot be listed" in capfd.readouterr().err
