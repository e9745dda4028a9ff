"""Fixtures that many tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from tests import tiny_models


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all processes of this test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    return folder


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


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point Tandem at an empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(folder))
    return folder
