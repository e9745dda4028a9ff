"""Jobs whose transformers are in single files: killed, resumed, and equal to those of the dequantized model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from runtime.core.events import Paused, Resumed, StepDone, VideoSaved
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.pipeline.test_step_cache import blocks, planned, with_ratios
from tests.plans import tiny_plan
from tests.transformer_files import FOLDERS, FORMATS, quantized_folder, suffix_of, wide_transformer

Tiny = Callable[[str], ModelSpec]


def run(spec: ModelSpec, output: Path, job: Path | None = None) -> list[object]:
    with Residency() as residency:
        checkpoints = CheckpointFolder(job) if job else None
        return list(events_of(tiny_plan(spec, output), spec, residency, checkpoints=checkpoints))


@pytest.mark.slow
def test_a_killed_job_of_two_experts_resumes(tiny: Tiny, tmp_path: Path) -> None:
    title = "FP8 with scales"
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


@pytest.mark.slow
def test_magcache_reuses_blocks_of_a_single_file(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "base")
    FORMATS["FP8 with scales"](tmp_path / "model.safetensors", dict(wide_transformer().state_dict()))
    spec = with_ratios(find("model", tmp_path))
    with Residency() as residency:
        plain, _ = blocks(spec, planned(spec, "none"), residency)
        cached, _ = blocks(spec, planned(spec, "magcache:0.2"), residency)
    assert 0 < cached < plain


# One of each kind.
@pytest.mark.slow
@pytest.mark.parametrize("title", ["BF16", "GGUF Q4_K", "nvfp4"])
def test_a_stopped_job_resumes_in_every_kind_of_format(title: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "base")
    module: WanTransformer3DModel = wide_transformer()
    if title in FOLDERS:
        module.save_pretrained(tmp_path / "base" / "transformer")
        quantized_folder(tmp_path / "base", title)
        spec = find("base", tmp_path)
    else:
        FORMATS[title](tmp_path / f"model{suffix_of(title)}", dict(module.state_dict()))
        spec = find("model", tmp_path)
    plan, checkpoints = tiny_plan(spec, tmp_path / "x.mp4"), CheckpointFolder(tmp_path / "job")
    with Residency() as residency:
        stopped = events_of(
            plan, spec, residency, checkpoints=checkpoints, pause_at=lambda one: isinstance(one, StepDone)
        )
        assert isinstance(stopped[-1], Paused), stopped[-1]
    with Residency() as residency:
        resumed = events_of(plan, spec, residency, checkpoints=CheckpointFolder(tmp_path / "job"))
        assert any(isinstance(event, Resumed) for event in resumed)
        assert isinstance(resumed[-1], VideoSaved), resumed[-1]
        frames = frames_of(tmp_path / "x.mp4")
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
    assert frames_of(tmp_path / "x.mp4") == frames
