"""VACE's jobs under faults, and with LoRAs of both kinds of blocks: the same frames, whatever happens meanwhile."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import OutOfMemory, Resumed, StepDone, VideoSaved
from runtime.core.loras import Lora
from runtime.execution.residency import Residency
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.families.ltx2.test_faults import save_each_step
from tests.families.ltx2.test_several_gpus import PART
from tests.families.test_second_family import frames
from tests.families.wan.test_vace import inputs, reference
from tests.lora_files import save
from tests.pipeline.failing import Failing, full
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_control import planned
from tests.pipeline.test_from_video import Clip

Tiny = Callable[[str], ModelSpec]
STEPS, RANK = 3, 2


@pytest.fixture
def clip(tiny: Tiny, tmp_path: Path) -> Clip:
    """A clip with all inputs, whose video is in a folder of its own."""
    values = {"control_scale": [0.5, 2], "frames": 5, "steps": STEPS, "guidance_scale": 1.0}
    made = planned(tiny("wan2.1-vace"), tmp_path, "control", "mask", "references", **values)
    out = tmp_path / "out" / "x.mp4"
    out.parent.mkdir()
    return Clip(made.plan.replace(output=out), made.spec)


def run(clip: Clip, job: Path) -> list[Any]:
    """Run a job with checkpoints."""
    with Residency() as residency:
        return events_of(clip.plan, clip.spec, residency, checkpoints=CheckpointFolder(job))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks")
def test_a_job_killed_in_any_stage_resumes_to_the_same_frames(
    clip: Clip, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    assert isinstance(run(clip, tmp_path / "whole")[-1], VideoSaved)
    wanted = frames(str(clip.plan.output))
    clip.plan.output.unlink()
    # Stages begin twice for each component: to load, and to compute.
    moments: dict[str, tuple[dict[str, Any], list[int]]] = {
        "encoding": ({"event": "StageStarted", "count": 4}, []),
        "frames": ({"event": "FramesDecoded", "count": 1}, [STEPS]),
    }
    for stage, (moment, resumed) in moments.items():
        with subtests.test(stage=stage):
            job = tmp_path / stage
            assert killed(clip.spec, clip.plan, job, prepare=save_each_step, **moment) == -9
            assert not clip.plan.output.exists()
            events = run(clip, job)
            assert isinstance(events[-1], VideoSaved)
            assert [event.step for event in events if isinstance(event, Resumed)] == resumed
            assert frames(str(clip.plan.output)) == wanted
            assert [path.name for path in clip.plan.output.parent.iterdir()] == ["x.mp4"]
            clip.plan.output.unlink()


@pytest.mark.parametrize(
    ("kind", "name", "at", "stage", "component"),
    [
        (PyTorchVideoEncoder, "video_latents", 2, "encode", "vae_encoder"),
        (PyTorchDenoiser, "__call__", 2, "denoise", "transformer"),
        (PyTorchVideoDecoder, "frames", 1, "decode", "vae"),
    ],
)
def test_out_of_memory_is_retried_with_the_same_frames(
    kind: Any,
    name: str,
    at: int,
    stage: str,
    component: str,
    clip: Clip,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(run(clip, tmp_path / "whole")[-1], VideoSaved)
    wanted = frames(str(clip.plan.output))
    Failing(monkeypatch, kind, name, at, full)
    events = run(clip, tmp_path / "job")
    (out,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert (out.stage, out.component, out.retried, out.lossless) == (stage, component, True, True)
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3]
    assert isinstance(events[-1], VideoSaved) and frames(str(clip.plan.output)) == wanted


def test_a_lora_changes_both_kinds_of_blocks(tiny: Tiny, tmp_path: Path) -> None:
    spec, random, tensors = tiny("wan2.1-vace"), torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    module = reference(spec)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and "blocks." in name:
            down = torch.randn(RANK, layer.in_features, generator=random)
            up = 0.1 * torch.randn(layer.out_features, RANK, generator=random)
            tensors |= {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
            layer.weight.data += 0.5 * up @ down
    assert sum("vace_blocks" in name for name in tensors) == 2 * (2 * 10 + 3)
    style = save(tmp_path / "style.safetensors", tensors)
    latents, control, texts = inputs(spec)
    timestep, scales = torch.tensor(400.0), (0.5, 1.5)
    with torch.no_grad():
        wanted = module(latents, timestep[None], texts[0], None, control, torch.tensor(scales), return_dict=False)[0]
    predictions = []
    for loras in ([Lora(str(style), 0.5)], []):
        denoiser = PyTorchDenoiser(load_module(with_loras(spec, loras, tmp_path), "transformer", PART))
        denoiser.steer(scales)
        predictions.append(denoiser(torch.cat([latents, control], dim=1), timestep, texts[0]))
    torch.testing.assert_close(predictions[0], wanted, rtol=0, atol=2e-5)
    assert (predictions[1] - wanted).norm() > 0.05 * wanted.norm()
