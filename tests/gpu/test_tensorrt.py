"""TensorRT's builders and session on tiny models. Skipped without an NVIDIA GPU and TensorRT."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.builders import BUILDERS
from runtime.engines.builders.tensorrt import OnnxTensorRT
from runtime.engines.programs import Program, load_program
from runtime.engines.sessions import Session, open_session
from runtime.engines.sessions.tensorrt import TensorRTSession
from runtime.engines.verify import verify
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineKey, EngineRecord, ShapeProfile
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import to_opset_17

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
TWO = (ShapeProfile((2, 4, 4), SIZE, (5, 8, 8)), ShapeProfile((5, 8, 8), (7, 12, 12), (9, 16, 16)))

Make = Callable[..., tuple[Path, EngineRecord, Program]]


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that builds an engine of the tiny Wan2.1, once per key."""
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
    root, spec, made = tmp_path_factory.mktemp("engines"), tiny("wan2.1"), {}

    def build(
        component: str,
        name: str,
        precision: str = "float32",
        builder_name: str = "onnx_tensorrt",
        profiles: tuple[ShapeProfile, ...] = (),
    ) -> tuple[Path, EngineRecord, Program]:
        builder = BUILDERS[builder_name]
        if tensorrt_8_6.is_installed():
            builder = OnnxTensorRT(prepare=to_opset_17)
        reason = BUILDERS[builder_name].unavailable(probe())
        if reason is not None:
            pytest.skip(str(reason))
        key = builder.key(
            spec,
            component,
            name,
            profiles or (PROFILES[name],),
            precision=precision,
            machine=probe(),
            device=DEVICE,
        )
        # Tiny models gain nothing from a long search.
        key = replace(key, options=tuple((dict(key.options) | {"optimization_level": "1"}).items()))
        folder = root / key.digest()
        if key not in made:
            folder.mkdir()
            program = load_program(spec, component, name, device=DEVICE, dtype=precision)
            builder.build(program, key, folder, lambda line, share: None)
            made[key] = record(key, folder, builder.file_name)
        return folder, made[key], load_program(spec, component, name, device=DEVICE, dtype="float32")

    return build


def record(key: EngineKey, folder: Path, file_name: str) -> EngineRecord:
    """Return an engine's record as the build writes it, not verified."""
    files = manifest.hashed_files(folder, file_name)
    blank = manifest.unreadable(folder, Fact("engine.file_missing", {"file": "engine.json"}))
    size = sum(file.bytes for file in files)
    return replace(blank, key=key, id=key.digest(), files=files, file_bytes=size, problem=None)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖out - reference‖ / ‖reference‖."""
    return ((out - reference).norm() / reference.norm()).item()


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
    with opened(first_folder, first_record) as first, opened(next_folder, next_record) as following:
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
