"""Engines that several tests share: built once, from tiny models, by the real builders."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from runtime.engines import child, manifest
from runtime.engines.builders import BUILDERS, Builder
from runtime.engines.builders.onnxruntime import OnnxRuntimeBuilder
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.engines.sessions import Session, open_session
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from tests.conftest import shared_folder
from tests.engine_library import EngineLibrary

# An engine whose build compiles C++ for up to a minute.
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.compiler])

# What the tiny models are small enough for, and small enough for tests.
PROFILES = {
    "text_encoder": ShapeProfile.fixed((1, 1, 1)),
    "text_encoder_2": ShapeProfile.fixed((1, 1, 1)),
    "transformer": ShapeProfile((1, 4, 4), (3, 6, 8), (5, 10, 12)),
    "image_encoder": ShapeProfile.fixed((1, 1, 1)),
    "vae_encoder_first": ShapeProfile((1, 2, 2), (1, 4, 6), (1, 5, 8)),
    "vae_encoder_next": ShapeProfile((1, 2, 2), (1, 4, 6), (1, 5, 8)),
    "vae_first": ShapeProfile((1, 2, 2), (1, 4, 6), (1, 5, 8)),
    "vae_next": ShapeProfile((1, 2, 2), (2, 4, 6), (4, 5, 8)),
}
# Of the decoder's steps, whose exports for a range of sizes take much longer.
DECODER_STEPS = ShapeProfile.fixed((2, 4, 6))


@dataclass(frozen=True)
class Built:
    """An engine with its folder and record, and the program that it is to equal."""

    folder: Path
    record: EngineRecord
    spec: ModelSpec
    component: str

    def program(self, component: str | None = None, dtype: str = "float32") -> Program:
        """Load the program, of another component's weights if asked."""
        return load_program(self.spec, component or self.component, self.record.key.program, device="cpu", dtype=dtype)

    def session(self, component: str | None = None) -> Session:
        """Open the engine, with another component's weights if asked."""

        def weights() -> dict[str, torch.Tensor]:
            return self.program(component, self.record.key.precision).module.state_dict()

        return open_session(self.folder, self.record, device="cpu", weights=weights)


Build = Callable[..., Built]


@pytest.fixture(scope="module")
def forked_entries() -> Iterator[None]:
    """Fork the children of `run_child` from a process that has imported `child_entries`, which takes a second.

    Unlike the process of `forked_children`, it imports no libraries.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if "forkserver" in multiprocessing.get_all_start_methods():
            server: Any = forkserver.ForkServer()
            server.set_forkserver_preload(["tests.engines.child_entries"])
            patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
            patch.setattr(child, "_START_METHOD", "forkserver")
            stack.callback(server._stop)
        yield


@pytest.fixture
def spawned_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the children of `run_child` as the app does, where `forked_entries` is in use."""
    monkeypatch.setattr(child, "_START_METHOD", "spawn")


@pytest.fixture(scope="session")
def built(
    tiny: Callable[[str], ModelSpec], engine_library: EngineLibrary, tmp_path_factory: pytest.TempPathFactory
) -> Build:
    """Return a function that returns an engine of `engine_library` in a folder that all tests share."""
    root, machine = shared_folder(tmp_path_factory, "built"), probe()

    def build(
        builder: str,
        architecture: str,
        component: str,
        program: str,
        precision: str = "float32",
        profile: ShapeProfile | None = None,
    ) -> Built:
        maker: Builder = BUILDERS[builder] if builder in BUILDERS else OnnxRuntimeBuilder(builder)
        spec, profiles = tiny(architecture), (profile or PROFILES[program],)
        key = maker.key(spec, component, program, profiles, precision=precision, machine=machine, device="cpu")
        folder = root / key.digest()
        with FileLock(f"{folder}.lock"):
            if not (folder / manifest.NAME).exists():
                folder.mkdir(exist_ok=True)
                engine_library.write(spec, component, key, folder, maker)
        return Built(folder, manifest.read(folder), spec, component)

    return build


def relative(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖out − ref‖/‖ref‖."""
    return float((output.float() - reference.float()).norm() / reference.float().norm())
