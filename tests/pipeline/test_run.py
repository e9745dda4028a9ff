"""Jobs on tiny real models: the video, the last event, and the files that are left."""

import gc
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from runtime.core.cancel import Cancel
from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    FramesDecoded,
    Planned,
    StageStarted,
    StepDone,
    TerminalEvent,
    VideoSaved,
    Warned,
    to_json,
)
from runtime.core.facts import Fact
from runtime.core.plan import EngineRef
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.sampling import Conditioning, SamplingState
from runtime.video.mp4 import read_metadata
from runtime.video.preview import resize
from tests.full_disk import fill
from tests.pipeline.runs import Choice, events_of, never
from tests.plans import tiny_plan, with_strategy
from tests.tiny_models import ARCHITECTURES

Tiny = Callable[[str], ModelSpec]


def run(spec: ModelSpec, output: Path, stop: Choice = never, **values: object) -> list[Event]:
    """Run a tiny job; `stop` returns whether to cancel at an event."""
    with Residency() as residency:
        events = events_of(tiny_plan(spec, output, **values), spec, residency, cancel_at=stop)
    assert [event for event in events if isinstance(event, TerminalEvent)] == events[-1:]
    return events


def frames_of(video: Path) -> bytes:
    """Return the decoded frames of a video, as RGB bytes."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    return subprocess.run([*command, "-"], check=True, capture_output=True).stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_job_makes_the_requested_video(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    events = run(tiny(architecture), out)
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert isinstance(events[0], Planned)
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3, 4]
    assert [event.frames for event in events if isinstance(event, FramesDecoded)][-1] == 9
    stages = [event.stage for event in events if isinstance(event, StageStarted)]
    assert [stage for i, stage in enumerate(stages) if stage not in stages[:i]] == [
        "load",
        "encode",
        "denoise",
        "decode",
        "save",
    ]
    assert len(frames_of(out)) == 9 * 32 * 64 * 3
    assert set(saved.timings) == {"encode", "denoise", "decode", "mux", "total"}
    assert saved.peak_memory_bytes > 1e6
    assert os.listdir(tmp_path) == ["x.mp4"]  # noqa: PTH208 - names, hidden ones too
    json.dumps([to_json(event) for event in events])


def test_the_stream_suits_players(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    run(tiny("wan2.1"), out)
    log = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(out)], capture_output=True, check=False).stderr
    text = log.decode("utf-8", "replace")
    assert "Video: h264" in text
    assert "yuv420p(tv, bt709" in text
    assert "64x32" in text
    assert "8 fps" in text
    data = out.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_the_video_has_metadata(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    prompt = 'a red boat; "calm" = #1 \\ \n 🚤'
    saved = run(tiny("wan2.2-a14b"), out, prompt=prompt)[-1]
    assert isinstance(saved, VideoSaved)
    facts = read_metadata(out)
    assert facts["request"]["prompt"] == prompt
    assert facts["seed"] == 3
    assert facts["plan"]["components"]["vae"]["backend"] == "pytorch"
    assert facts["timings"] == saved.timings
    assert set(facts["versions"]) == {"tandem", "python", "torch", "diffusers"}
    again = GenerationRequest.from_mapping(facts["request"])
    assert (again.width, again.frames, again.guidance_scale_2) == (64, 9, 3.0)


def test_the_same_seed_gives_the_same_video(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(spec, tmp_path / f"{name}.mp4", seed=seed)
    one, same, other = (frames_of(tmp_path / f"{name}.mp4") for name in "abc")
    assert one == same
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    [
        lambda event: isinstance(event, Planned),
        lambda event: isinstance(event, StageStarted) and event.stage == "encode",
        lambda event: isinstance(event, StepDone) and event.step == 1,
        lambda event: isinstance(event, StepDone) and event.step == 4,
        lambda event: isinstance(event, FramesDecoded) and event.frames == 1,
        lambda event: isinstance(event, StageStarted) and event.stage == "save",
    ],
)
def test_cancelling_stops_and_leaves_no_files(when: Callable[[Event], bool], tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    out.write_bytes(b"the old video")
    events = run(tiny("wan2.2-a14b"), out, stop=when)
    assert events[-1] == Cancelled()
    requested = next(index for index, event in enumerate(events) if when(event))
    assert sum(isinstance(event, StepDone) for event in events[requested + 1 :]) == 0
    assert out.read_bytes() == b"the old video"
    assert os.listdir(tmp_path) == ["x.mp4"]  # noqa: PTH208 - names, hidden ones too


def test_unknown_words_and_a_cut_prompt_are_reported(tiny: Tiny, tmp_path: Path) -> None:
    events = run(tiny("wan2.1"), tmp_path / "x.mp4", prompt="a red zeppelin, at the Zeppelin", negative_prompt="moose")
    warnings = [event.fact for event in events if isinstance(event, Warned)]
    unknown = [fact.data for fact in warnings if fact.code == "pipeline.unknown_words"]
    assert unknown == [
        {"words": ["zeppelin", "Zeppelin"], "field": "prompt"},
        {"words": ["moose"], "field": "negative prompt"},
    ]
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert list(saved.warnings) == warnings
    sentence = "The model does not know “zeppelin”, “Zeppelin”: the prompt was encoded without these words."
    assert sentence in saved.result_json()["warnings"]
    events = run(tiny("wan2.1"), tmp_path / "x.mp4", prompt="boat " * 600)
    assert Warned(fact=Fact("pipeline.text_cut", {"field": "prompt"})) in events


@pytest.mark.parametrize(
    ("part", "fact"),
    [
        ("transformer", Fact("pipeline.not_finite", {"step": 1, "of": 4})),
        ("vae", Fact("execution.vae_not_finite")),
    ],
)
def test_nan_fails_the_job(part: str, fact: Fact, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    weights = folder / part / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    last = sorted(name for name in tensors if name.startswith(("decoder.conv_out", "proj_out")))[-1]
    tensors[last] = torch.full_like(tensors[last], float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    out = tmp_path / "out"
    out.mkdir()
    end = run(read_spec(folder, "broken"), out / "x.mp4")[-1]
    assert isinstance(end, Failed)
    assert end.fact == fact
    assert not end.internal
    assert list(out.iterdir()) == []


def test_float16_that_overflows_after_block_engines_failed_is_left(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    # Activations above 65,504, the largest number of float16.
    tensors["blocks.0.ffn.net.0.proj.bias"].fill_(1e5)
    tensors["blocks.0.ffn.net.2.weight"] *= 1e-6
    save_file(tensors, weights, metadata={"format": "pt"})
    spec = read_spec(folder, "large")
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=2)
    part = plan.components["transformer"]
    size = (1, 1, 1)
    uses = tuple(
        EngineRef(id=f"gone-{name}", program=name, builder="gone", precision="float16", profile=(size, size, size))
        for name in spec.block_programs
    )
    in_float16 = part.replace(dtype="float16", weights_bytes=part.weights_bytes // 2)
    fallen = in_float16.replace(failed_engines=uses, reasons=(Fact("execution.engine_not_finite"),))
    with Residency() as residency:
        (failed,) = events_of(plan.with_component("transformer", in_float16), spec, residency)[-1:]
        assert isinstance(failed, Failed) and failed.fact.code == "pipeline.not_finite"
        saved = events_of(plan.with_component("transformer", fallen), spec, residency)[-1]
        wanted = events_of(plan.replace(output=tmp_path / "y.mp4"), spec, residency)[-1]
    assert isinstance(saved, VideoSaved) and isinstance(wanted, VideoSaved)
    left = Fact("pipeline.left_float16", {"component": "transformer", "dtype": "float32"})
    assert left in saved.warnings and left not in wanted.warnings
    assert saved.plan["components"]["transformer"]["dtype"] == "float32"
    assert saved.plan["components"]["transformer"]["weights_bytes"] == part.weights_bytes
    assert frames_of(tmp_path / "x.mp4") == frames_of(tmp_path / "y.mp4")


@pytest.mark.slow
def test_a_full_disk_is_reported_and_leaves_no_files(small_disk: Path, tiny: Tiny) -> None:
    out = small_disk / "x.mp4"
    out.write_bytes(b"the old video")

    def leave_64_kib(event: Event) -> bool:
        if isinstance(event, StepDone):
            filler = fill(small_disk)
            os.truncate(filler, filler.stat().st_size - 65_536)
        return False

    wanted: dict[str, Any] = {"width": 128, "height": 128, "frames": 49, "steps": 1}
    end = run(tiny("wan2.1"), out, leave_64_kib, **wanted)[-1]
    assert isinstance(end, Failed)
    assert end.fact == Fact("video.disk_full", {"file": out})
    # A clip that certainly does not fit is refused before it is computed.
    events = run(tiny("wan2.1"), out, **wanted | {"frames": 97})
    assert isinstance(events[-1], Failed) and events[-1].fact.code == "video.disk_too_small"
    assert not any(isinstance(event, StageStarted) for event in events)
    assert out.read_bytes() == b"the old video"
    assert {path.name for path in small_disk.iterdir()} == {"filler", "x.mp4"}


@pytest.mark.slow
@pytest.mark.parametrize(("pause", "drawn"), [(0.0, [True, True, True]), (3600.0, [True, False, False])])
def test_previews_have_a_minimum_interval(
    pause: float, drawn: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.pipeline.previews._SECONDS", pause)
    monkeypatch.setattr("runtime.pipeline.previews._SHARE", 1e6)
    events = run(find("diorama", tmp_path), tmp_path / "x.mp4", steps=3, frames=5)
    assert [event.preview is not None for event in events if isinstance(event, StepDone)] == drawn
    # The last one becomes the poster, however fast the job was.
    poster = [event.preview for event in events if isinstance(event, FramesDecoded)][-1]
    assert poster is not None
    middle = np.frombuffer(frames_of(tmp_path / "x.mp4"), np.uint8).reshape(5, 32, 64, 3)[2:3]
    with Image.open(io.BytesIO(poster)) as image:
        image.seek(image.n_frames // 2)  # type: ignore[attr-defined]  # of animations
        apart = np.asarray(image.convert("RGB"), np.float32) - resize(middle)[0]
    assert np.abs(apart).mean() < 12


@pytest.mark.slow
@pytest.mark.parametrize("stop", [never, lambda event: isinstance(event, StepDone)], ids=["saved", "cancelled"])
def test_a_jobs_tensors_are_freed_without_garbage_collection(stop: Choice, tiny: Tiny, tmp_path: Path) -> None:
    """Latents and embeddings are on the GPU, and Python collects cycles rarely."""
    # The first job imports libraries, whose handled import errors hold frames until a collection.
    run(tiny("wan2.1"), tmp_path / "first.mp4", stop)
    gc.collect()
    gc.disable()
    # Errors that other tests raised on purpose hold frames of their jobs.
    before = {id(found) for found in gc.get_objects()}
    try:
        run(tiny("wan2.1"), tmp_path / "x.mp4", stop)
        tracked = (found for found in gc.get_objects() if type(found) in {RunContext, Conditioning, SamplingState})
        assert not [found for found in tracked if id(found) not in before]
    finally:
        gc.enable()


def test_an_internal_error_is_one_line(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("runtime.pipeline.stages.get_noise", broken)
    end = run(tiny("wan2.1"), tmp_path / "x.mp4")[-1]
    assert isinstance(end, Failed)
    assert end.internal
    assert end.fact == Fact("event.internal_error", {"error": "ZeroDivisionError('oops')"})
    assert "\n" not in end.what


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_names_the_memory(
    error: Exception, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("runtime.pipeline.stages.get_noise", full)
    end = run(tiny("wan2.1"), tmp_path / "x.mp4")[-1]
    data = {"stage": "denoise", "component": "transformer", "memory": "RAM"}
    assert end == Failed(fact=Fact("pipeline.out_of_memory", data))


@pytest.mark.slow
def test_components_are_kept_or_freed_as_planned(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    loads: list[str | None] = []

    def emit(event: Event) -> None:
        if isinstance(event, StageStarted) and event.stage == "load":
            loads.append(event.part)

    keep = tiny_plan(spec, tmp_path / "x.mp4")
    free = keep.replace(strategy=keep.strategy.replace(keep_loaded=False))
    with Residency() as residency:
        for plan in (keep, keep):
            run_job(plan, spec, emit, Cancel(), residency)
        assert loads == ["text_encoder", "transformer", "transformer_2", "vae"]
        residency.free()
        loads.clear()
        for plan in (free, free):
            run_job(plan, spec, emit, Cancel(), residency)
        assert loads == ["text_encoder", "transformer", "transformer_2", "vae"] * 2
    with Residency() as residency:
        loads.clear()
        for plan in (with_strategy(keep, freed=("text_encoder",)),) * 2:
            run_job(plan, spec, emit, Cancel(), residency)
        assert loads == ["text_encoder", "transformer", "transformer_2", "vae", "text_encoder"]
