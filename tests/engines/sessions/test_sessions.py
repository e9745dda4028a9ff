"""Sessions of Inductor and ONNX Runtime: equality with the program, lifetime of outputs, refused inputs and files."""

import gc
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.sessions import open_session
from runtime.engines.sessions.inductor import InductorSession
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession, load_session
from runtime.engines.verify import verify
from runtime.planner.choice.engine_index import SWAPPED
from tests.engines.conftest import DECODER_STEPS, INDUCTOR, PROFILES, Build, Built, relative
from tests.engines.engine_files import refusal
from tests.tiny_models import SHALLOW, SHALLOW_TI2V

ROOT = Path(__file__).parents[3]
ENGINES = [INDUCTOR, "cpu", "openvino"]


@pytest.fixture(params=ENGINES)
def transformer(request: pytest.FixtureRequest, built: Build) -> Built:
    """Return the transformer of a model with two experts on each backend in turn, for a range of sizes."""
    return built(request.param, SHALLOW, "transformer", "transformer")


STEPS = [
    ("cpu", SHALLOW, DECODER_STEPS),
    ("openvino", SHALLOW, DECODER_STEPS),
    pytest.param(("inductor", SHALLOW_TI2V, DECODER_STEPS), marks=INDUCTOR.marks),
    *(pytest.param((name, SHALLOW_TI2V, PROFILES["vae_next"]), marks=pytest.mark.slow) for name in ("cpu", "openvino")),
]


@pytest.fixture(params=STEPS, ids=["cpu", "openvino", "inductor", "cpu-sizes", "openvino-sizes"])
def vae_next(request: pytest.FixtureRequest, built: Build) -> Built:
    """Return the VAE's recurrent step on each backend in turn, for one size and for a range."""
    builder, architecture, profile = request.param
    return built(builder, architecture, "vae", "vae_next", "float32", profile)


@pytest.mark.slow
def test_transformer_equals_pytorch_at_every_size(transformer: Built) -> None:
    with transformer.session() as session:
        result = verify(session, transformer.program(), PROFILES["transformer"], "float32")
    assert result.error < 1e-5, result.detail
    assert result.seconds_per_call > 0


@pytest.mark.slow
def test_transformer_equals_pytorch_for_any_text_length(transformer: Built) -> None:
    program = transformer.program()
    with transformer.session() as session:
        for words in (0, 1, 100, 512):
            inputs = program.inputs((2, 4, 6))
            generator = torch.Generator().manual_seed(words)
            inputs["text_embeds"] = torch.randn(1, 512, 32, generator=generator)
            inputs["text_embeds"][:, words:] = 0
            assert relative(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"]) < 1e-5


@pytest.mark.slow
def test_vae_equals_pytorch_over_several_steps(vae_next: Built) -> None:
    program = vae_next.program()
    (profile,) = vae_next.record.key.profiles
    with vae_next.session() as session:
        result = verify(session, program, profile, "float32")
        assert result.error < 1e-5, result.detail
        ours = theirs = program.inputs((2, 4, 6))
        for step in range(4):
            # A shorter step at the end has buffers of another size.
            z = program.inputs((1 if step == 3 and profile.serves((1, 4, 6)) else 2, 4, 6), seed=step)["z"]
            ours, theirs = session.infer(**ours | {"z": z}), program.run(**theirs | {"z": z})
            assert all(relative(ours[name], theirs[name]) < 1e-4 for name in theirs)
            ours.pop("frames")
            theirs.pop("frames")


def test_outputs_stay_valid_until_the_call_after_the_next(transformer: Built) -> None:
    program = transformer.program()
    with transformer.session() as session:
        first = session.infer(**program.inputs((3, 6, 8), seed=1))["velocity"]
        copy = first.clone()
        second = session.infer(**program.inputs((3, 6, 8), seed=2))["velocity"]
        assert torch.equal(first, copy)
        assert not torch.equal(first, second)


def test_other_sizes_are_refused_and_the_session_stays_usable(transformer: Built) -> None:
    program = transformer.program()
    inputs = program.inputs((3, 6, 8))
    with transformer.session() as session:
        for size in ((6, 6, 8), (3, 6, 14), (3, 5, 8)):
            wrong = inputs | {"latents": torch.zeros(1, 16, *size)}
            with refusal("engine.other_shape") as refused:
                session.infer(**wrong)
            assert refused.value.data["tensor"] == "latents"
        with refusal("engine.other_inputs") as refused:
            session.infer(latents=inputs["latents"], text_embeds=inputs["text_embeds"])
        assert set(refused.value.data["expected"]) - set(refused.value.data["given"]) == {"timestep"}
        assert relative(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"]) < 1e-5


def test_closed_session_raises(transformer: Built) -> None:
    session = transformer.session()
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.infer(**transformer.program().inputs((3, 6, 8)))


@pytest.mark.slow
@pytest.mark.compiler
def test_both_experts_run_on_one_package(built: Build) -> None:
    high = built("inductor", SHALLOW, "transformer", "transformer")
    low = built("inductor", SHALLOW, "transformer_2", "transformer")
    assert high.record.key.weights == SWAPPED
    assert high.folder == low.folder
    for component in ("transformer", "transformer_2"):
        program = high.program(component)
        with high.session(component) as session:
            assert verify(session, program, PROFILES["transformer"], "float32").error < 1e-5
    with high.session("transformer_2") as session:
        assert not verify(session, high.program("transformer"), PROFILES["transformer"], "float32").passed


@pytest.mark.slow
@pytest.mark.compiler
def test_supplied_weights_are_used_in_place_and_freed(built: Build) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    weights = engine.program().module.state_dict()
    name = "blocks.0.attn1.to_q.weight"
    held = StorageWeakRef(weights[name].untyped_storage())
    session = InductorSession((engine.folder / "engine.pt2").read_bytes(), device="cpu", weights=weights)
    inputs = engine.program().inputs((3, 6, 8))
    before = session.infer(**inputs)["velocity"]
    weights[name].zero_()
    assert not torch.equal(session.infer(**inputs)["velocity"], before)
    del weights
    gc.collect()
    assert not held.expired()
    session.close()
    gc.collect()
    assert held.expired()


@pytest.mark.slow
@pytest.mark.compiler
def test_repeated_opening_does_not_leak_memory(built: Build) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    inputs = engine.program().inputs((3, 6, 8))
    held = []
    for _ in range(4):
        maps = Path("/proc/self/maps").read_text().count("wrapper.so") if sys.platform == "linux" else 0
        with engine.session() as session:
            session.infer(**inputs)
        held.append(maps)
    assert len(set(held[1:])) == 1


@pytest.mark.slow
@pytest.mark.compiler
def test_experts_alternate_on_one_package(built: Build) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    parts = ("transformer", "transformer_2")
    programs = {part: engine.program(part) for part in parts}
    inputs = programs["transformer"].inputs((3, 6, 8))
    with engine.session("transformer") as high, engine.session("transformer_2") as low:
        for _ in range(2):
            for session, part in ((high, "transformer"), (low, "transformer_2")):
                given = session.infer(**inputs)["velocity"]
                assert relative(given, programs[part].run(**inputs)["velocity"]) < 1e-5


@pytest.mark.slow
@pytest.mark.compiler
def test_weights_of_another_model_are_refused(built: Build) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    with refusal("engine.weight_missing"):
        InductorSession((engine.folder / "engine.pt2").read_bytes(), device="cpu", weights={})
    weights = engine.program().module.state_dict()
    weights["proj_out.bias"] = weights["proj_out.bias"][:-1]
    with refusal("engine.weight_missing") as refused:
        InductorSession((engine.folder / "engine.pt2").read_bytes(), device="cpu", weights=weights)
    assert refused.value.data["weight"] == "proj_out.bias"


def test_changed_file_is_never_opened(transformer: Built, tmp_path: Path) -> None:
    name = transformer.record.files[0].name
    data = bytearray((transformer.folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with refusal("engine.unusable") as refused:
        open_session(tmp_path, transformer.record, device="cpu", weights=dict)
    assert refused.value.data["cause"] == Fact("engine.file_changed", {"file": name})
    (tmp_path / name).unlink()
    with refusal("engine.unusable") as refused:
        open_session(tmp_path, transformer.record, device="cpu", weights=dict)
    assert refused.value.data["cause"] == Fact("engine.file_missing", {"file": name})


_OPEN_DAMAGED = """
import os, sys
from dataclasses import replace
from pathlib import Path
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.sessions import open_session

folder, engine_id = Path(sys.argv[1]), sys.argv[2]
record = manifest.read(folder, engine_id)
path = folder / record.files[0].name
whole = path.read_bytes()
for damaged in (b"", os.urandom(5000), whole[: len(whole) // 2], Path("README.md").read_bytes()):
    path.write_bytes(damaged)
    files = manifest.hashed_files(folder, path.name)
    known = replace(record, files=files, file_bytes=files[0].bytes, problem=None)
    try:
        open_session(folder, known, device="cpu", weights=dict)
    except EngineError as error:
        print(error.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", [INDUCTOR, "cpu"])
def test_damaged_file_with_a_matching_hash_is_an_error_and_no_crash(built: Build, tmp_path: Path, backend: str) -> None:
    engine = built(backend, SHALLOW, "transformer", "transformer")
    folder = shutil.copytree(engine.folder, tmp_path / "engine")
    # In a process of its own, which shows a crash.
    run = subprocess.run(
        [sys.executable, "-c", _OPEN_DAMAGED, str(folder), engine.record.id],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    code = "engine.package_not_loaded" if backend == "inductor" else "engine.onnx_not_loaded"
    assert run.stdout.splitlines() == [code] * 4


def test_missing_provider_is_an_error(built: Build) -> None:
    engine = built("cpu", SHALLOW, "transformer", "transformer")
    with pytest.raises(EngineError) as error:
        OnnxRuntimeSession(engine.folder / "engine.onnx", provider="cuda", precision="float32", device="cpu")
    assert (error.value.code, error.value.data["provider"]) == ("engine.provider_missing", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_a_provider_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime runs the model on the CPU instead."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "copy", [value], [])
    graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1]))
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with refusal("engine.provider_not_started"):
        load_session(model.SerializeToString(), provider="cuda", precision="float32", device=torch.device("cpu"))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_session_prints_nothing(built: Build, capfd: pytest.CaptureFixture[str], backend: str) -> None:
    engine = built(backend, SHALLOW, "transformer", "transformer")
    capfd.readouterr()
    with engine.session() as session, pytest.raises(EngineError):
        inputs = engine.program().inputs((3, 6, 8))
        session.infer(**inputs)
        session.infer(**inputs | {"latents": torch.zeros(1, 16, 9, 9, 9)})
    assert capfd.readouterr() == ("", "")


def test_the_bytes_that_were_hashed_are_loaded(built: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced between the two."""
    engine = built("cpu", SHALLOW, "transformer", "transformer")
    folder = tmp_path / engine.folder.name
    shutil.copytree(engine.folder, folder)
    import_module = importlib.import_module

    def swap(name: str) -> object:
        (folder / "other").write_bytes(b"no engine")
        (folder / "other").replace(folder / engine.record.files[0].name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", swap)
    with refusal("engine.unusable") as refused:
        open_session(folder, engine.record, device="cpu", weights=dict)
    assert refused.value.data["cause"].code == "engine.file_changed"
