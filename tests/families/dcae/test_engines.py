"""Engines of frame decoders on each backend: built in a child process, compared with PyTorch, stored, evicted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.settings import Settings
from runtime.engines.builders import BUILDERS, Builder
from runtime.engines.builders.inductor import InductorBuilder
from runtime.engines.builders.onnxruntime import OnnxRuntimeBuilder
from runtime.engines.frame_decoders import build_frame_engine, buildable_engines, frame_engine
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.engines.verify import LARGEST_TOLERANCES, TOLERANCES, tolerance_of
from runtime.machine.probe import probe
from runtime.models.registry import read_spec
from runtime.models.spec import FRAME_BATCH, FRAME_DECODER, ModelSpec
from tests.engine_library import EngineLibrary
from tests.engines.conftest import INDUCTOR
from tests.engines.contract import wheels
from tests.families.dcae import decoders
from tests.plans import GPU_PACKAGES, gpu, machine

pytestmark = pytest.mark.usefixtures("forked_children")
ONNX_RUNTIME, OPENVINO = OnnxRuntimeBuilder("cpu"), OnnxRuntimeBuilder("openvino")
LATENTS = {"dc": (3, 4), "owl": (8, 8), "owl-landscape": (8, 8)}


def model(kind: str, folder: Path) -> ModelSpec:
    """Return a tiny decoder."""
    if kind == "dc":
        decoders.save_autoencoder(folder / kind)
    else:
        decoders.save_owl(folder / kind, decoders.OWL if kind == "owl" else decoders.OWL_LANDSCAPE)
    return read_spec(folder / kind, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "builder"),
    [
        pytest.param("dc", ONNX_RUNTIME, id="dc-cpu"),
        pytest.param("owl", ONNX_RUNTIME, id="owl-cpu"),
        pytest.param("dc", OPENVINO, id="dc-openvino"),
        pytest.param("owl", InductorBuilder(), id="owl-inductor", marks=INDUCTOR.marks),
        pytest.param("owl-landscape", ONNX_RUNTIME, id="owl-landscape-cpu"),
    ],
)
def test_engines_equal_pytorch(builder: Builder, kind: str, tmp_path: Path) -> None:
    spec = model(kind, tmp_path)
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
    one = frame_engine(service, spec, builder, LATENTS[kind], "cpu", precision="float32")
    # The provider is part of the key; the child builds for it.
    assert one.key.precision == "float32"
    record = build_frame_engine(service, spec, one, lambda *_: None, Cancel()).record
    assert record is not None
    assert record.usable, record.detail
    assert record.error < 1e-5
    assert record.pytorch_seconds > 0
    program = load_program(spec, FRAME_DECODER, FRAME_DECODER, device="cpu", dtype="float32")
    inputs = program.inputs((FRAME_BATCH, *LATENTS[kind]), seed=7)
    with service.open(spec, FRAME_DECODER, [one.use], "cpu") as engines:
        out = engines.infer(FRAME_DECODER, **inputs)["decoded_frames"]
        expected = program.run(**inputs)["decoded_frames"]
        assert (out - expected).norm() / expected.norm() < 1e-5


def test_a_machine_without_a_gpu_builds_an_engine_of_each_backend(tmp_path: Path) -> None:
    spec = model("dc", tmp_path)
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), machine())
    found = buildable_engines(service, spec, (3, 4), "cpu")
    assert [one.key.backend for one in found] == ["onnxruntime", "inductor"]
    assert all(one.record is None and one.key.precision == "float32" and not one.takes_any for one in found)


@pytest.mark.slow
def test_engines_are_evicted_verified_and_found_stale_like_others(
    tmp_path: Path, engine_library: EngineLibrary
) -> None:
    spec = model("dc", tmp_path)
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
    for size in ((3, 4), (2, 4)):
        one = frame_engine(service, spec, OnnxRuntimeBuilder(), size, "cpu", precision="float32")
        engine_library.add(service, spec, FRAME_DECODER, one.key)
    records = service.store.index()
    assert [service.why_stale(record, [spec]) for record in records] == [[], []]
    (done,) = service.verify(records[:1], [spec], lambda *_: None, Cancel())
    assert done.engine.usable
    assert done.skipped is None
    # Other weights in the same folder.
    decoders.save_autoencoder(tmp_path / "dc", seed=9)
    assert [fact.code for fact in service.why_stale(records[0], [spec])] == ["engine.differs_weights"]
    service.store.pin(records[1].id, pinned=True)
    assert [record.id for record in service.store.prune(0).deleted] == [records[0].id]
    service.store.pin(records[1].id, pinned=False)
    assert [record.id for record in service.store.prune(0).deleted] == [records[1].id]


def test_frames_are_within_a_hundredth_in_any_precision() -> None:
    for precision in ("float32", "float16", "bfloat16"):
        assert tolerance_of(FRAME_DECODER, precision) == min(TOLERANCES[precision], 1e-2)
        assert LARGEST_TOLERANCES[precision] > 0
    assert tolerance_of("vae_next", "bfloat16") == TOLERANCES["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LATENTS)
def test_tensorrt_for_rtx_builds_a_plan_with_both_profiles(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for package in ("libs", "bindings"):
        name = f"tensorrt-rtx-cu13-{package}"
        monkeypatch.syspath_prepend(wheels.unpacked(f"{name}=={wheels.pinned(name)}"))
    spec = model(kind, tmp_path)
    here = machine(gpu=gpu(capability=(8, 9)), torch_cuda="13.0", packages=GPU_PACKAGES)
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), here)
    builder = BUILDERS["tensorrt_rtx"]
    key = frame_engine(service, spec, builder, LATENTS[kind], "cuda:0").key
    assert [profile.min[0] for profile in key.profiles] == [8, 1]
    program = load_program(spec, FRAME_DECODER, FRAME_DECODER, device="cpu", dtype=key.precision)
    loaded: Any = program.module
    parameters = sum(one.nbytes for one in loaded.parameters())
    builder.build(program, key, tmp_path, lambda fact, share: None)
    assert (tmp_path / builder.file_name).stat().st_size > 0.5 * parameters
    assert "LayerType" in capfd.readouterr().err
    assert torch.float16 == getattr(torch, key.precision)
