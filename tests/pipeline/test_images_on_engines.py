"""Videos that start from images on real engines (ONNX Runtime, tiny models)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.images import with_images
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.resolve import PlanningContext, resolve
from tests.engine_library import EngineLibrary
from tests.image_files import picture
from tests.pipeline.runs import events_of
from tests.plans import machine

pytestmark = pytest.mark.slow

Infer = Callable[..., dict[str, torch.Tensor]]
# What videos without images do not have.
OF_IMAGES = dict.fromkeys(["image_encoder", "vae_encoder"], "onnxruntime")


class Bench:
    """A model with an engine library."""

    def __init__(self, spec: ModelSpec, folder: Path, library: EngineLibrary) -> None:
        self.spec, self.folder, self.library = spec, folder, library
        self.engines = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)

    def plan(self, images: int, **backends: str) -> tuple[ModelSpec, ExecutionPlan]:
        """Plan a clip from images; return it with its model."""
        files = {}
        for field in ("image", "last_image")[:images]:
            path = self.folder / f"{field}.png"
            picture(64, 32).rotate(180 if field == "last_image" else 0).save(path)
            files[field] = str(path)
        fields: dict[str, Any] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2, "seed": 3}
        request = GenerationRequest.from_mapping(fields | files | {"backends": backends})
        spec = with_images(self.spec, request, self.folder, self.folder)
        context = PlanningContext(machine(), self.folder / "x.mp4", self.engines.offers(spec))
        return spec, resolve(request, spec, context)

    def stock(self, images: int, **backends: str) -> list[EngineRecord]:
        """Add the engines that a job would build."""
        spec, plan = self.plan(images, **backends)
        return self.library.stock(self.engines, spec, plan)

    def run(self, images: int, name: str, **backends: str) -> tuple[ExecutionPlan, list[Event], torch.Tensor]:
        """Run a job that builds nothing; return its plan, its events and its last latents."""
        spec, plan = self.plan(images, **backends)
        assert not any(use.build for part in plan.components.values() for use in part.engines)
        checkpoints = CheckpointFolder(self.folder / name)
        with Residency(self.engines) as residency:
            events = events_of(plan, spec, residency, checkpoints=checkpoints)
        assert isinstance(events[-1], VideoSaved), events[-1]
        found = checkpoints.load(spec, plan)
        assert found is not None and found.sampling is not None
        return plan, events, found.sampling.latents


def fallen(events: list[Event]) -> list[str]:
    """Return the components that fell back."""
    return [event.component for event in events if isinstance(event, FellBack)]


def apart(latents: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference of latents."""
    return float((latents - wanted).norm() / wanted.norm())


def test_a_job_from_two_images_equals_pytorch_and_falls_back(
    tiny: Callable[[str], ModelSpec], engine_library: EngineLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny("wan2.1-flf2v"), tmp_path, engine_library)
    _, _, wanted = bench.run(2, "pytorch", all="pytorch")
    programs = [record.key.program for record in bench.stock(2, **OF_IMAGES)]
    assert programs == ["image_encoder", "vae_encoder_first", "vae_encoder_next"]
    plan, events, latents = bench.run(2, "engines", **OF_IMAGES)
    assert fallen(events) == []
    assert [use.program for name in OF_IMAGES for use in plan.components[name].engines] == programs
    # The VAE's engines may compute in bfloat16.
    assert apart(latents, wanted) < 1e-2
    infer: Infer = OnnxRuntimeSession.infer

    def failing(self: OnnxRuntimeSession, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if "cache_0" in inputs:
            return {"z": torch.full((1,), math.nan)}
        return infer(self, **inputs)

    monkeypatch.setattr(OnnxRuntimeSession, "infer", failing)
    _, events, latents = bench.run(2, "fallback", **OF_IMAGES)
    assert fallen(events) == ["vae_encoder"]
    assert apart(latents, wanted) < 1e-3


def test_one_engine_makes_videos_from_text_and_from_an_image(
    tiny: Callable[[str], ModelSpec], engine_library: EngineLibrary, tmp_path: Path
) -> None:
    bench = Bench(tiny("wan2.2-ti2v-5b"), tmp_path, engine_library)
    backends = {"vae_encoder": "onnxruntime", "transformer": "onnxruntime"}
    assert [record.component for record in bench.stock(0, **backends)] == ["transformer"]
    from_text, events, latents = bench.run(0, "text", **backends)
    assert fallen(events) == []
    assert "vae_encoder" not in from_text.components
    assert apart(latents, bench.run(0, "text-pytorch", all="pytorch")[2]) < 1e-4
    assert [record.component for record in bench.stock(1, **backends)] == ["vae_encoder"]
    from_image, events, latents = bench.run(1, "image", **backends)
    assert from_image.components["transformer"].engines[0].id == from_text.components["transformer"].engines[0].id
    assert fallen(events) == []
    assert apart(latents, bench.run(1, "image-pytorch", all="pytorch")[2]) < 1e-2
