"""Magnitude ratios of a model: those of its blocks' residuals, with which MagCache then runs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.errors import InvalidRequestError
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import machine
from tools.mag_ratios import Recorder, measured, store

Tiny = Callable[[str], ModelSpec]


class Blocks(torch.nn.Module):
    """Two blocks, the second of which doubles its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Linear(4, 4, bias=False)])
        self.blocks[1].weight.data = 2 * torch.eye(4)
        self.proj_out = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_the_residual_of_all_blocks_is_recorded() -> None:
    recorder, tokens = Recorder(), torch.randn(1, 3, 4)
    with recorder.listening():
        Blocks()(tokens)
    assert torch.allclose(recorder.sizes[0], tokens.norm(dim=-1).flatten())
    Blocks()(tokens)
    assert len(recorder.sizes) == 1, "it listens no longer"


def test_measured_ratios_are_stored_and_planned_with(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    spec = find(str(folder), tmp_path)
    with pytest.raises(InvalidRequestError) as refused:
        planned(spec, tmp_path)
    assert refused.value.code == "planner.no_mag_ratios"
    small = replace(spec, defaults=replace(spec.defaults, width=16, height=16, frames=5))
    with Residency() as residency:
        ratios = measured(small, residency, "a boat", 4, tmp_path)
    assert list(ratios) == ["transformer", "transformer_2"]
    assert sum(map(len, ratios.values())) == 4
    assert all(own[0] == 1.0 and min(own) > 0 for own in ratios.values())
    path = store(spec, ratios)
    before: dict[str, Any] = json.loads(path.read_text())
    assert before["mag_ratios"] == ratios
    again = find(str(folder), tmp_path)
    assert {name: list(own) for name, own in again.mag_ratios.items()} == ratios
    assert planned(again, tmp_path).mag_ratios
    # What else the file has stays.
    path.write_text(json.dumps(before | {"title": "Mine"}))
    store(again, ratios)
    assert json.loads(path.read_text())["title"] == "Mine"


def planned(spec: ModelSpec, folder: Path) -> Any:
    request = GenerationRequest(prompt="a boat", steps=4, step_cache="magcache")
    return resolve(request, spec, PlanningContext(machine(), folder / "x.mp4"))
