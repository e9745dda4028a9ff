"""A shorter list of published models, because `models list` computes for seconds what each needs."""

from pathlib import Path

import pytest

from runtime.cli import models
from runtime.machine.probe import probe
from runtime.models.catalogue import not_downloaded
from runtime.models.spec import ModelSpec

SHOWN = {"wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"}


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `models list` list two of the published models only, always with the memory that is free now."""
    machine = probe()

    def few(weights: Path) -> list[ModelSpec]:
        return [spec for spec in not_downloaded(weights) if spec.name in SHOWN]

    monkeypatch.setattr(models, "not_downloaded", few)
    monkeypatch.setattr(models, "probe", lambda: machine)
