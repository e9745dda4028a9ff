"""Videos that start from images on real engines (ONNX Runtime, tiny models)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import Event, FellBack, StageStarted, VideoSaved
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
from runtime.planner.resolve import PlanningContext, resolve
from tests.image_files import picture
from tests.pipeline.runs import events_of
from tests.plans import machine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

Infer = Callable[..., dict[str, torch.Tensor]]
# What videos without images do not have, and the transformer.
OF_IMAGES = dict.fromkeys(["image_encoder", "vae_encoder", "transformer"], "onnxruntime")


class Bench:
    """A model with an engine library."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.engines = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)

    def run(self, images: int, name: str, **backends: str) -> tuple[ExecutionPlan, list[Event], torch.Tensor]:
        """Run a job; return its plan, its events and its last latents."""
        files = {}
        for field in ("image", "last_image")[:images]:
            path = self.folder / f"{field}.png"
            picture(64, 32).rotate(180 if field == "last_image" else 0).save(path)
            files[field] = str(path)
        fields: dict[str, Any] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2, "seed": 3}
        request = GenerationRequest.from_mapping(fields | files | {"backends": backends})
        spec = with_images(self.spec, request, self.folder, self.folder)
        plan = resolve(request, spec, PlanningContext(machine(), self.folder / "x.mp4", self.engines.offers(spec)))
        checkpoints = CheckpointFolder(self.folder / name)
        with Residency(self.engines) as residency:
            events = events_of(plan, spec, residency, checkpoints=checkpoints)
        assert isinstance(events[-1], VideoSaved), events[-1]
        found = checkpoints.load(spec, plan)
        assert found is not None and found.sampling is not None
        return plan, events, found.sampling.latents


def built(events: list[Event]) -> list[str | None]:
    """Return the components whose engines were built."""
    return [event.part for event in events if isinstance(event, StageStarted) and event.stage == "build"]


def close(latents: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    """Whether latents differ by less than a relative limit."""
    return bool((latents - wanted).norm() / wanted.norm() < limit)


def test_a_job_from_two_images_equals_pytorch_and_falls_back(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny("wan2.1-flf2v"), tmp_path)
    _, _, wanted = bench.run(2, "pytorch", all="pytorch")
    plan, events, latents = bench.run(2, "engines", **OF_IMAGES)
    assert built(events) == ["image_encoder", "vae_encoder", "vae_encoder", "transformer"]
    assert not [event for event in events if isinstance(event, FellBack)]
    assert {use.program for use in plan.components["vae_encoder"].engines} == {"vae_encoder_first", "vae_encoder_next"}
    assert all(record.baselines for record in bench.engines.store.index())
    # The VAE's engines may compute in bfloat16.
    assert close(latents, wanted, 1e-2)
    infer: Infer = OnnxRuntimeSession.infer

    def failing(self: OnnxRuntimeSession, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if "cache_0" in inputs:
            return {"z": torch.full((1,), math.nan)}
        return infer(self, **inputs)

    monkeypatch.setattr(OnnxRuntimeSession, "infer", failing)
    _, events, latents = bench.run(2, "fallback", **OF_IMAGES)
    assert built(events) == []
    assert [event.component for event in events if isinstance(event, FellBack)] == ["vae_encoder"]
    assert close(latents, wanted, 1e-3)


def test_one_engine_makes_videos_from_text_and_from_an_image(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    bench = Bench(tiny("wan2.2-ti2v-5b"), tmp_path)
    backends = {"vae_encoder": "onnxruntime", "transformer": "onnxruntime"}
    from_text, events, latents = bench.run(0, "text", **backends)
    assert built(events) == ["transformer"]
    assert "vae_encoder" not in from_text.components
    assert close(latents, bench.run(0, "text-pytorch")[2], 1e-4)
    from_image, events, latents = bench.run(1, "image", **backends)
    assert built(events) == ["vae_encoder"]
    assert from_image.components["transformer"].engines[0].id == from_text.components["transformer"].engines[0].id
    assert not [event for event in events if isinstance(event, FellBack)]
    assert close(latents, bench.run(1, "image-pytorch")[2], 1e-2)
