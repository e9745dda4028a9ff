"""Jobs whose transformers are in single files: killed, resumed, and equal to those of the dequantized model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from runtime.core.events import Resumed, VideoSaved
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan
from tests.transformer_files import FORMATS, suffix_of, wide_transformer

Tiny = Callable[[str], ModelSpec]


def run(spec: ModelSpec, output: Path, job: Path | None = None) -> list[object]:
    with Residency() as residency:
        checkpoints = CheckpointFolder(job) if job else None
        return list(events_of(tiny_plan(spec, output), spec, residency, checkpoints=checkpoints))


@pytest.mark.slow
@pytest.mark.parametrize("title", ["BF16", "FP8 with scales", "GGUF Q4_0"])
def test_a_killed_job_of_two_experts_resumes(title: str, tiny: Tiny, tmp_path: Path) -> None:
    weights, plain = tmp_path / "weights", tmp_path / "plain" / "wan2.2-a14b"
    shutil.copytree(tiny("wan2.2-a14b").directory, weights / "base")
    shutil.copytree(weights / "base", plain)
    for expert, folder, seed in (("high", "transformer", 1), ("low", "transformer_2", 2)):
        module: WanTransformer3DModel = wide_transformer(seed)
        held = FORMATS[title](weights / f"wan-{expert}-noise{suffix_of(title)}", dict(module.state_dict()))
        module.load_state_dict({name: tensor.float() for name, tensor in held.items()})
        module.save_pretrained(plain / folder)
    spec = find("wan", weights)
    out = tmp_path / "x.mp4"
    assert killed(spec, tiny_plan(spec, out), tmp_path / "job", event="StepDone", count=3) == -9
    events = run(spec, out, tmp_path / "job")
    assert any(isinstance(event, Resumed) for event in events)
    assert isinstance(events[-1], VideoSaved)
    resumed = frames_of(out)
    assert isinstance(run(spec, out)[-1], VideoSaved)
    assert frames_of(out) == resumed
    # The dequantized model in a folder.
    run(find(str(plain), tmp_path / "none"), out)
    expected = torch.frombuffer(bytearray(frames_of(out)), dtype=torch.uint8).float()
    actual = torch.frombuffer(bytearray(resumed), dtype=torch.uint8).float()
    assert (actual - expected).abs().mean() < 0.5
