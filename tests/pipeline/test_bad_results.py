"""Degenerate clips fail with what was detected, the likely cause, and a remedy."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, Failed, FramesDecoded, Resumed, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import EngineRef
from runtime.execution.residency import Residency
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.blank_video import Fault, blank_video_error, likely_cause
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job
from tests.pipeline.test_resume import run, steps_of, stream_of, whole
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
DEGRADE: dict[Fault, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "black": lambda frames, first: torch.full_like(frames, -1.0),
    "blank": lambda frames, first: torch.full_like(frames, 0.3),
    "frozen": lambda frames, first: first.expand_as(frames),
}


def degrade(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Replace the frames of the VAE decoder by degenerate ones."""

    class DegenerateDecoder(PyTorchVideoDecoder):
        def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
            first: torch.Tensor | None = None
            for frames in super().frames(latents, chunk, tile):
                first = frames[:1] if first is None else first
                yield DEGRADE[fault](frames, first)

    monkeypatch.setattr("runtime.families.wan.components.PyTorchVideoDecoder", DegenerateDecoder)


@pytest.mark.slow
def test_a_degenerate_clip_fails_without_a_video_and_can_be_decoded_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    spec = tiny("wan2.1")
    out = tmp_path / "out" / "x.mp4"
    out.parent.mkdir()
    plan = tiny_plan(spec, out)
    wanted = whole(plan, spec)
    for fault in DEGRADE:
        with subtests.test(fault=fault):
            with monkeypatch.context() as patched:
                degrade(patched, fault)
                end = run(plan, spec, tmp_path / "job")[-1]
            assert isinstance(end, Failed)
            assert end.fact == Fact(f"pipeline.clip_{fault}", {"cause": Fact("cause.weights")})
            assert not end.internal
            assert list(out.parent.iterdir()) == []
    again = run(plan, spec, tmp_path / "job")
    assert Resumed(step=4, of=4) in again
    assert steps_of(again) == []
    assert isinstance(again[-1], VideoSaved)
    assert (frames_of(out), stream_of(out)) == wanted


def test_zeroed_decoder_weights_are_detected(tiny: Tiny, tmp_path: Path) -> None:
    """Weights that really are damaged."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    weights = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file(
        {name: torch.zeros_like(t) if name.startswith("decoder.conv_out") else t for name, t in tensors.items()},
        weights,
        metadata={"format": "pt"},
    )
    from runtime.models.registry import read_spec

    spec = read_spec(tmp_path / "model", "broken")
    end = run(tiny_plan(spec, tmp_path / "x.mp4"), spec, None)[-1]
    assert isinstance(end, Failed)
    assert end.fact.code == "pipeline.clip_blank"
    assert not (tmp_path / "x.mp4").exists()


USE = EngineRef(id="1", program="vae_next", builder="b", precision="float16", profile=((1, 4, 8),) * 3)


@pytest.mark.parametrize(
    ("fault", "component", "part", "values", "cause"),
    [
        (
            "black",
            "vae",
            {"backend": "tensorrt", "engines": (USE,)},
            {},
            Fact("cause.vae_engine", {"backend": "tensorrt", "precision": "float16"}),
        ),
        (
            "blank",
            "vae",
            {"backend": "onnxruntime", "engines": (USE,)},
            {"guidance_scale": 40.0},
            Fact("cause.vae_engine", {"backend": "onnxruntime", "precision": "float16"}),
        ),
        ("frozen", "vae", {"backend": "tensorrt", "engines": (USE,)}, {}, Fact("cause.weights")),
        ("black", "vae", {}, {"guidance_scale": 40.0}, Fact("cause.guidance_scale", {"scale": 40.0})),
        (
            "frozen",
            "transformer",
            {"backend": "inductor", "engines": (USE,)},
            {},
            Fact("cause.transformer_engine", {"component": "transformer", "backend": "inductor"}),
        ),
        (
            "blank",
            "transformer",
            {"quantization": "bnb-4bit"},
            {},
            Fact("cause.quantization", {"quantization": "bnb-4bit"}),
        ),
        ("black", "transformer", {"dtype": "float16"}, {}, Fact("cause.float16")),
        ("black", "vae", {"dtype": "float16"}, {}, Fact("cause.vae_precision", {"dtype": "float16"})),
        ("blank", "vae", {"dtype": "bfloat16"}, {}, Fact("cause.vae_precision_or_weights", {"dtype": "bfloat16"})),
        ("black", "vae", {"dtype": "bfloat16"}, {"steps": 2}, Fact("cause.few_steps", {"steps": 2})),
        ("frozen", "vae", {"dtype": "bfloat16"}, {}, Fact("cause.weights")),
        ("blank", "vae", {}, {"steps": 1}, Fact("cause.few_steps", {"steps": 1})),
        ("frozen", "vae", {}, {}, Fact("cause.weights")),
    ],
)
def test_the_likely_cause_follows_from_the_plan(
    fault: Fault, component: str, part: dict[str, Any], values: dict[str, Any], cause: Fact, tiny: Tiny, tmp_path: Path
) -> None:
    plan = tiny_plan(tiny("wan2.1"), tmp_path / "x.mp4")
    plan = plan.with_component(component, plan.components[component].replace(**part)).replace(**values)
    assert likely_cause(fault, plan) == cause
    error = blank_video_error(fault, plan)
    assert error.remedy == str(cause) and "\n" not in error.what + error.remedy


@pytest.mark.slow
def test_the_shipped_models_clips_are_not_degenerate_and_have_previews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.pipeline.previews._SECONDS", 0.0)
    monkeypatch.setattr("runtime.pipeline.previews._SHARE", 1e6)
    spec = find("diorama", tmp_path)
    prompts = ["a black cat sits still at night", "a white balloon in the snow", "darkness", "nothing"]
    with Residency() as residency:
        for seed, prompt in enumerate(prompts):
            events: list[Event] = []
            values = {"prompt": prompt, "seed": seed, "steps": 2, "guidance_scale": 1.0}
            run_job(tiny_plan(spec, tmp_path / "x.mp4", **values), spec, events.append, Cancel(), residency)
            assert isinstance(events[-1], VideoSaved), (prompt, events[-1])
    decoded = [event.preview for event in events if isinstance(event, FramesDecoded)]
    assert all(preview is not None and preview[:4] == b"RIFF" for preview in decoded)
    import io

    from PIL import Image

    counts = [Image.open(io.BytesIO(preview)).n_frames for preview in decoded if preview]  # type: ignore[attr-defined]  # of animations
    assert counts == [event.frames for event in events if isinstance(event, FramesDecoded)]


def test_a_second_run_of_a_finished_job_repeats_no_step(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    out = tmp_path / "out" / "x.mp4"
    out.parent.mkdir()
    plan = tiny_plan(spec, out)
    run(plan, spec, tmp_path / "job")
    first = stream_of(out)
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency, checkpoints=CheckpointFolder(tmp_path / "job"))
    assert [event for event in events if isinstance(event, StepDone)] == []
    assert [path.name for path in out.parent.iterdir()] == ["x.mp4"]
    assert stream_of(out) == first
