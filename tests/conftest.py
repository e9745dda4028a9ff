"""Fixtures that many tests share: tiny models, a machine, a plan."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.manager.machine import Machine
from runtime.manager.planner import resolve
from runtime.models.spec import ModelSpec
from runtime.models.wan import read_spec
from tests import tiny_models

GIB = 1 << 30

CPU_MACHINE = Machine(
    system="Linux x86_64",
    cpu="Test CPU",
    cores=2,
    ram_bytes=24 * GIB,
    ram_free_bytes=20 * GIB,
    gpus=(),
    gpu_problem=None,
    torch_version="2.13.0+cpu",
    torch_cuda=None,
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSpec]:
    """Return a function that gives the tiny model of an architecture, built once."""
    root = tmp_path_factory.mktemp("models")

    def get(architecture: str) -> ModelSpec:
        directory = root / architecture
        if not directory.exists():
            tiny_models.build(architecture, directory)
        return read_spec(directory, architecture)

    return get


def tiny_plan(spec: ModelSpec, output: Path, **values: object) -> ExecutionPlan:
    """Plan a tiny clip on the CPU."""
    wanted = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 4, "seed": 3, "fps": 8}
    return resolve(GenerationRequest(**(wanted | values)), spec, CPU_MACHINE, output)
