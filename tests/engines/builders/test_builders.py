"""Builders: keys that tell engines apart, defaults, and the VAE and text encoder as they are built by default."""

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from runtime.core.facts import Fact
from runtime.core.request import FINISHERS, UPSCALER
from runtime.engines.builders import BUILDERS, builders_of
from runtime.engines.builders.inductor import InductorBuilder
from runtime.engines.builders.onnxruntime import OnnxRuntimeBuilder
from runtime.engines.programs import load_program
from runtime.engines.sessions.inductor import InductorSession
from runtime.engines.verify import verify
from runtime.machine.probe import Machine, compiles_all_vector_instructions, cpp_compiler, probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, ShapeProfile
from runtime.planner.choice.key_differences import differences
from tests.engines.conftest import PROFILES, Build
from tests.tiny_models import SHALLOW_TI2V

SMALL = ShapeProfile.fixed((1, 2, 2))


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Return this machine."""
    return probe()


def key(builder: str, spec: ModelSpec, machine: Machine, component: str, program: str) -> EngineKey:
    """Return the key of a small float32 engine."""
    return BUILDERS[builder].key(spec, component, program, (SMALL,), precision="float32", machine=machine, device="cpu")


def test_experts_share_an_engine_without_weights(tiny: Callable[[str], ModelSpec], machine: Machine) -> None:
    spec = tiny("wan2.2-a14b")
    one, two = (key("inductor", spec, machine, part, "transformer") for part in ("transformer", "transformer_2"))
    assert one == two
    assert one.weights == SWAPPED
    one, two = (key("onnxruntime", spec, machine, part, "transformer") for part in ("transformer", "transformer_2"))
    assert differences(one, two) == [Fact("engine.differs_weights")]


@pytest.mark.parametrize("program", PROFILES)
def test_gpu_packages_contain_their_weights(program: str) -> None:
    assert InductorBuilder().keeps_weights(program, (SMALL,), "cuda:0")


def test_key_contains_provider_and_versions(tiny: Callable[[str], ModelSpec], machine: Machine) -> None:
    spec = tiny("wan2.1")
    openvino = key("onnxruntime", spec, machine, "vae", "vae_next")
    assert dict(openvino.options) == {"provider": "openvino"}
    assert {"torch", "onnxscript", "onnxruntime-openvino"} == set(dict(openvino.versions))
    plain = OnnxRuntimeBuilder("cpu").key(
        spec, "vae", "vae_next", (SMALL,), precision="float32", machine=machine, device="cpu"
    )
    assert differences(plain, openvino) == [
        Fact("engine.differs_option", {"option": "provider", "found": "openvino", "wanted": "cpu"})
    ]
    assert key("inductor", spec, machine, "vae", "vae_next").weights != SWAPPED
    assert key("inductor", spec, machine, "vae", "vae_first").weights == SWAPPED


def test_builders_of_each_backend() -> None:
    assert [builder.name for builder in builders_of("inductor")] == ["inductor"]
    assert [builder.name for builder in builders_of("onnxruntime")] == ["onnxruntime", "onnxruntime_blocks"]
    assert {builder.backend for name in BUILDERS for builder in [BUILDERS[name]]} == {
        "tensorrt",
        "tensorrt_rtx",
        "inductor",
        "onnxruntime",
    }


def test_missing_compiler_is_reported(machine: Machine) -> None:
    equipped = replace(machine, compiler="g++")
    assert InductorBuilder().unavailable(equipped) is None
    assert OnnxRuntimeBuilder().unavailable(machine) is None
    bare = replace(machine, compiler=None, packages=(("onnx", "1"),))
    why = InductorBuilder().unavailable(bare)
    assert why is not None and why.code.startswith("machine.no_compiler")
    assert OnnxRuntimeBuilder().unavailable(bare) is not None


@pytest.mark.parametrize("fast", [True, False])
def test_only_the_vae_and_networks_of_finished_frames_run_in_bfloat16_on_a_cpu(
    machine: Machine, tiny: Callable[[str], ModelSpec], fast: bool
) -> None:
    spec, machine = tiny("wan2.2-a14b"), replace(machine, cpu_instructions=("avx512_bf16",) if fast else ())
    for builder in (InductorBuilder(), OnnxRuntimeBuilder("openvino")):
        names = [*PROFILES, *FINISHERS]
        chosen = {name: builder.default_precision(spec, name, machine, "cpu") for name in names}
        # OpenVINO would round places, too.
        rounded = ("vae", *FINISHERS) if builder.backend == "inductor" else ("vae", UPSCALER)
        of_frames = "bfloat16" if fast else "float32"
        assert chosen == {name: of_frames if name.startswith(rounded) else "float32" for name in names}
    assert OnnxRuntimeBuilder("cpu").default_precision(spec, "vae_next", machine, "cpu") == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["vae_first", "vae_next"])
def test_vae_in_bfloat16_is_within_tolerance(built: Build, program: str) -> None:
    profile = ShapeProfile.fixed((2 if program == "vae_next" else 1, 4, 6))
    engine = built("openvino", SHALLOW_TI2V, "vae", program, "bfloat16", profile)
    with engine.session() as session:
        result = verify(session, engine.program(), profile, "bfloat16")
    assert result.passed, result.detail
    assert result.error > 1e-5


@pytest.mark.slow
def test_text_encoder_equals_pytorch(built: Build) -> None:
    engine = built("openvino", "wan2.1", "text_encoder", "text_encoder")
    with engine.session() as session:
        result = verify(session, engine.program(), PROFILES["text_encoder"], "float32")
    assert result.error < 1e-5, result.detail


@pytest.mark.skipif(platform.system() != "Linux", reason="trusts no other compilers")
@pytest.mark.parametrize(("prints", "trusted"), [("13.2.0", True), ("9.4.0", False), ("", False)])
def test_only_a_recent_gcc_skips_instruction_set_checks(
    prints: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho '{prints}'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert compiles_all_vector_instructions() is trusted


@pytest.mark.slow
@pytest.mark.compiler
def test_build_with_spaces_in_paths_a_static_cpp_library_and_half_precision(
    tiny: Callable[[str], ModelSpec], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.system() == "Linux":
        # A compiler may link its own C++ library statically, as toolchains for several systems do. A package with a
        # library of its own crashes when it is loaded.
        compiler = tmp_path / "g++"
        compiler.write_text(f'#!/bin/sh\nexec {cpp_compiler()} -static-libstdc++ "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "my engines"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor cache"))
    # As if torch were installed in such a folder, too.
    (folder / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.setattr(cpp_extension, "_TORCH_PATH", str(folder / "torch"))
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder / "torch" / "lib"))
    spec = tiny("wan2.1")
    names, profile = ("text_encoder", "text_encoder"), PROFILES["text_encoder"]
    wanted = InductorBuilder().key(spec, *names, (profile,), precision="bfloat16", machine=machine, device="cpu")
    program = load_program(spec, *names, device="cpu", dtype="bfloat16")
    reported: list[str] = []
    InductorBuilder().build(program, wanted, folder, lambda fact, _: reported.append(fact.code))
    assert list((folder / "inductor cache").iterdir())
    # Precompiled headers are of no use to a single build.
    assert not list((folder / "inductor cache").rglob("*.gch"))
    assert reported == ["engine.exporting", "engine.compiling"]
    reference = load_program(spec, *names, device="cpu", dtype="float32")
    weights = load_program(spec, *names, device="cpu", dtype="bfloat16").module.state_dict()
    with InductorSession((folder / "engine.pt2").read_bytes(), device="cpu", weights=weights) as session:
        result = verify(session, reference, profile, "bfloat16")
    assert result.passed, result.detail
    assert result.error > 1e-5
