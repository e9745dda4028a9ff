"""LTX-2 from the command line and through `run_job`: videos, sound, the prompt cache, checkpoints and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.core.events import Failed, Paused, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.sound import Sound
from runtime.execution.residency import Residency
from runtime.execution.streams import Streams
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline import stages
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.video.mp4 import read_metadata
from tests.families.conftest import Command
from tests.families.test_second_family import frames
from tests.image_files import saved, with_saved
from tests.models.hub import of_folder, served
from tests.pipeline.computed_blocks import blocks_computed
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan
from tests.sounds import sound_in, write_clip
from tests.tiny_models import LTX2_ARCHITECTURES

SIZE = ("--width", "96", "--height", "64", "--frames", "9", "--steps", "3", "--seed", "3", "--fps", "8")
Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def sounds(monkeypatch: pytest.MonkeyPatch) -> list[Sound]:
    """Return the list of sounds that jobs decode from now on."""
    decoded, decode = [], stages.decode_sound

    def recorded(context: Any) -> Sound:
        decoded.append(decode(context))
        return decoded[-1]

    monkeypatch.setattr(stages, "decode_sound", recorded)
    return decoded


def test_a_job_makes_a_video_and_takes_the_embeddings_from_the_cache(
    command: Command, tiny: Tiny, cache_dir: Path, tmp_path: Path
) -> None:
    model, pixels = str(tiny("ltx-2.3").directory), []
    for number in range(2):
        out = str(tmp_path / f"{number}.mp4")
        code, made = command("generate", "a red boat", "--model", model, *SIZE, "--out", out)
        assert code == 0, made
        pixels.append(frames(out))
        # Of the prompt and of the negative prompt; the text encoder's states are not stored.
        assert len(list((cache_dir / "prompts").glob("*.safetensors"))) == 2
    assert list(made["plan"]["components"]) == [
        "text_encoder",
        "connectors",
        "transformer",
        "vae",
        "audio_vae",
        "vocoder",
    ]
    assert {part["backend"] for part in made["plan"]["components"].values()} == {"pytorch"}
    assert pixels[0] == pixels[1]
    assert len(pixels[0]) == 9 * 64 * 96 * 3
    assert len(set(pixels[0])) > 16


def test_a_video_starts_from_an_image(command: Command, tiny: Tiny, tmp_path: Path) -> None:
    model, out = str(tiny("ltx-2").directory), str(tmp_path / "x.mp4")
    image = str(saved(tmp_path / "image.png", 96, 64))
    code, made = command("generate", "a", "--model", model, *SIZE, "--image", image, "--out", out)
    assert code == 0, made
    assert list(made["plan"]["components"])[:4] == ["text_encoder", "connectors", "vae_encoder", "transformer"]


@pytest.mark.parametrize("fields", [("image", "last_image"), ("last_image",)])
def test_a_video_ends_with_an_image(fields: tuple[str, ...], command: Command, tiny: Tiny, tmp_path: Path) -> None:
    model, out = str(tiny("ltx-2").directory), str(tmp_path / "x.mp4")
    given: list[str] = []
    for field in fields:
        file = saved(tmp_path / f"{field}.png", 96, 64, turned=field == "image")
        given += [f"--{field.replace('_', '-')}", str(file)]
    code, made = command("generate", "a", "--model", model, *SIZE, *given, "--out", out)
    assert code == 0, made
    assert list(made["plan"]["images"]) == [*fields]
    # The clip has two latent frames, the transformer's sequence three.
    assert (made["plan"]["latent_shape"], made["plan"]["tokens"]) == ([1, 16, 2, 2, 3], 3 * 2 * 3)
    without = command("generate", "a", "--model", model, *SIZE, *given[:-2], "--out", str(tmp_path / "other.mp4"))
    assert without[0] == 0
    assert frames(out) != frames(str(tmp_path / "other.mp4"))
    # The size follows from the last image only if there is no other.
    tall = str(saved(tmp_path / "tall.png", 64, 96))
    code, made = command("plan", "a", "--model", model, *SIZE[4:], *given[:-1], tall)
    assert (code, made["plan"]["latent_shape"][3:]) == (0, [16, 24] if "image" in fields else [24, 16])
    # It does not end on exactly its last image, nor does it jump there as a loop.
    for loop in (given, given[-2:], [*given[-2:], "--image", given[-1]]):
        code, made = command("plan", "a", "--model", model, *SIZE, *loop, "--loop", "on")
        assert (code, made["plan"]["looping"]) == (0, "backwards")


def test_a_video_goes_through_keyframes(command: Command, tiny: Tiny, tmp_path: Path) -> None:
    model, out = str(tiny("ltx-2").directory), str(tmp_path / "x.mp4")
    first, second = (str(saved(tmp_path / f"{turned}@.png", 96, 64, turned=turned)) for turned in (False, True))
    size = ("--model", model, *SIZE, "--frames", "17")
    code, made = command(
        "generate", "a", *size, "--keyframe", f"{first}@1.9", "--keyframe", f"{second}@0.3", "--out", out
    )
    assert code == 0, made
    # The nearest first frames of the latent frames after the first one.
    assert made["plan"]["keyframes"] == {"keyframes[0]": 9, "keyframes[1]": 1}
    assert [*made["plan"]["images"]] == ["keyframes[0]", "keyframes[1]"]
    # Three latent frames of the clip, and two.
    assert (made["plan"]["latent_shape"][2], made["plan"]["tokens"]) == (3, 5 * 2 * 3)
    request = read_metadata(Path(out))["request"]
    assert request["keyframe_seconds"] == [1.9, 0.3]
    assert [name.rpartition("/")[2] for name in request["keyframes"]] == ["False@.png", "True@.png"]
    # A copy is named like a file.
    code, again = command("plan", "a", *size, "--keyframe", f"{request['keyframes'][0]}@0.5s", "--last-image", second)
    assert (code, again["plan"]["keyframes"]) == (0, {"keyframes[0]": 1, "last_image": 9})


def test_a_model_is_downloaded_by_its_name(
    command: Command, tiny: Tiny, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with served() as hub:
        monkeypatch.setenv("TANDEM_HUB", hub.address)
        hub.repositories["diffusers/LTX-2.3-Diffusers"] = of_folder(tiny("ltx-2.3").directory)
        code, made = command("models", "download", "ltx-2.3", "--yes")
    assert code == 0, made
    assert Path(made["folder"]) == cache_dir.resolve() / "weights" / "LTX-2.3-Diffusers"
    assert command("generate", "a", "--model", "ltx-2.3", *SIZE, "--out", str(tmp_path / "1.mp4"))[0] == 0


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_the_sound_is_as_long_as_the_video(architecture: str, tiny: Tiny, tmp_path: Path, sounds: list[Sound]) -> None:
    spec = tiny(architecture)
    plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64, frames=17)
    with Residency() as residency:
        events = events_of(plan, spec, residency)
    assert isinstance(events[-1], VideoSaved), events[-1]
    (sound,) = sounds
    assert spec.sound is not None
    assert (sound.rate, len(sound.samples)) == (spec.sound.rate, 2)
    assert sound.samples.dtype == np.float32
    # A spectrogram of a few latents lacks 3 of its frames, of 10 ms.
    assert sound.samples.shape[1] / sound.rate == pytest.approx(17 / 8, abs=0.05)
    (kind, track) = sound_in(plan.output) or ("", None)
    assert kind == "aac"
    assert track is not None
    # The file's sound is as long as its frames.
    assert track.samples.shape[1] / track.rate == pytest.approx(17 / 8, abs=0.05)
    parts = [event.part for event in events if isinstance(event, StageStarted) and event.stage == "decode"]
    assert parts == ["vae", "audio_vae", "vocoder"]


def test_without_sound_its_decoders_are_not_loaded(tiny: Tiny, tmp_path: Path, sounds: list[Sound]) -> None:
    spec = tiny("ltx-2.3")
    plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64)
    assert plan.sound
    with Residency() as residency:
        loud = events_of(plan, spec, residency)
        pixels = frames(str(plan.output))
    silent = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64, sound="off")
    with Residency() as residency:
        events = events_of(silent, spec, residency)
    assert isinstance(loud[-1], VideoSaved)
    assert isinstance(events[-1], VideoSaved)
    assert not any(isinstance(event, StageStarted) and event.part in {"audio_vae", "vocoder"} for event in events)
    assert len(sounds) == 1
    assert sound_in(plan.output) is None
    # The streams attend to each other, whether the sound is decoded or not.
    assert frames(str(plan.output)) == pixels


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_a_paused_job_resumes_to_the_same_video_and_sound(
    architecture: str, tiny: Tiny, tmp_path: Path, sounds: list[Sound]
) -> None:
    spec, out = tiny(architecture), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, negative_prompt="blue ball", width=96, height=64)
    with Residency() as residency:
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
        wanted = frames(str(out))
        out.unlink()
        folder = CheckpointFolder(tmp_path / "job")
        first = events_of(
            plan, spec, residency, pause_at=lambda e: isinstance(e, StepDone) and e.step == 2, checkpoints=folder
        )
        assert first[-1] == Paused(step=2, of=4)
        again = events_of(plan, spec, residency, checkpoints=CheckpointFolder(tmp_path / "job"))
    assert Resumed(step=2, of=4) in again
    assert [event.step for event in again if isinstance(event, StepDone)] == [3, 4]
    assert frames(str(out)) == wanted
    assert np.array_equal(sounds[0].samples, sounds[1].samples)


@pytest.mark.parametrize(("step_cache", "images"), [("first-block:0.9", ("image", "last_image")), ("taylorseer:2", ())])
def test_a_step_cache_leaves_out_blocks_of_every_pass(
    step_cache: str, images: tuple[str, ...], tiny: Tiny, tmp_path: Path
) -> None:
    spec, files = with_saved(tiny("ltx-2.3"), images, tmp_path)

    def made(cache: str, residency: Residency) -> tuple[int, bytes]:
        """Return how many feed-forwards were computed, and the frames."""
        fields = {"negative_prompt": "blue ball", "guidance_scale": 3.0, "steps": 8, "step_cache": cache, **files}
        plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64, **fields)
        events: list[Any] = []
        count = blocks_computed(lambda: events.extend(events_of(plan, spec, residency)))
        assert isinstance(events[-1], VideoSaved), events[-1]
        return count, frames(str(plan.output))

    with Residency() as residency:
        plain, cached, again = (made(cache, residency) for cache in ("none", step_cache, step_cache))
    # Two blocks, each with a feed-forward for each stream; four passes a step. The connectors have a few.
    denoising = 2 * 2 * 4 * 8
    assert denoising <= plain[0] < denoising + 8
    assert denoising // 4 < cached[0] < denoising - 8
    assert cached == again
    assert plain[1] != cached[1]


def test_a_checkpoint_is_of_one_frame_rate(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    with Residency() as residency:
        for fps in (8, 16):
            plan = tiny_plan(spec, tmp_path / "x.mp4", fps=fps, width=96, height=64)
            events = events_of(
                plan,
                spec,
                residency,
                pause_at=lambda event: isinstance(event, StepDone) and event.step == 2,
                checkpoints=CheckpointFolder(tmp_path / "job"),
            )
            assert not any(isinstance(event, Resumed) for event in events)


def test_nan_in_one_stream_ends_the_job(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64)

    def damaged(layer: str) -> Residency:
        def load(spec: ModelSpec, name: str, part: Any, device: str | None) -> torch.nn.Module:
            module = load_module(spec, name, part, device)
            if layer and name == layer.partition(".")[0]:
                torch.nn.init.constant_(module.get_parameter(f"{layer.partition('.')[2]}.bias"), float("nan"))
            return module

        return Residency(load=load)

    for layer, code in (
        ("transformer.audio_proj_out", "pipeline.not_finite"),
        ("transformer.proj_out", "pipeline.not_finite"),
    ):
        with damaged(layer) as residency:
            failed = events_of(plan, spec, residency)[-1]
        assert isinstance(failed, Failed)
        assert failed.fact.code == code, layer
        assert not plan.output.exists()


def test_what_the_family_does_not_make_is_refused(
    command: Command, tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    out = str(tmp_path / "x.mp4")
    clip = str(write_clip(tmp_path / "clip.mp4", None))
    image = str(saved(tmp_path / "image.png", 96, 64))
    refusals: list[tuple[str, tuple[str, ...], str]] = [
        ("ltx-2", ("--step-cache", "magcache"), "planner.no_mag_ratios"),
        ("ltx-2", ("--guidance-cache", "0.05", "--guidance", "1"), "planner.no_guidance_to_cache"),
        ("ltx-2", ("--gpus", "2"), "planner.no_usable_gpus"),
        ("ltx-2", ("--attention", "flash4"), "planner.attention_needs_gpu"),
        ("ltx-2", ("--shift", "3"), "scheduler.shift_fixed"),
        ("ltx-2", ("--quantization", "bnb-4bit"), "planner.quantization_needs_gpu"),
        ("ltx-2", ("--video", clip), "source.model_without"),
        # One latent frame is the first and the last one.
        ("ltx-2", ("--last-image", image, "--frames", "1"), "planner.too_short_for_last_image"),
        ("ltx-2", ("--keyframe", f"{image}@0.5", "--frames", "1"), "planner.too_short_for_last_image"),
        ("ltx-2", ("--keyframe", f"{image}@0.01"), "planner.keyframe_first"),
        ("ltx-2", ("--keyframe", f"{image}@60"), "planner.keyframe_outside"),
        ("ltx-2", ("--keyframe", f"{image}@0.1", "--last-image", image), "planner.keyframes_too_close"),
        ("ltx-2", ("--keyframe", f"{image}@0.1", "--keyframe", f"{image}@0.2"), "planner.keyframes_too_close"),
        ("ltx-2", ("--keyframe", f"{image}@-1"), "request.out_of_range"),
        ("ltx-2", ("--keyframe", f"{image}@nan"), "request.not_numbers"),
        ("ltx-2", ("--keyframe", image), "cli.keyframe_without_time"),
        ("ltx-2", ("--keyframe", f"{image}@"), "cli.keyframe_without_time"),
        ("ltx-2", ("--keyframe", "@1"), "request.image_file"),
        ("ltx-2", ("--sound", "loud"), "request.not_a_choice"),
        ("ltx-2", ("--frames", "10"), "planner.frame_count"),
        ("ltx-2", ("--width", "48"), "planner.not_a_multiple"),
        # A frame of one latent has no reflection to pad it with.
        ("ltx-2", ("--width", "32", "--height", "32"), "planner.side_too_short"),
        ("ltx-2", ("--height", "32"), "planner.side_too_short"),
        ("ltx-2.3", ("--height", "16"), "planner.side_too_short"),
        # The scheduler fixes the noise of the first step and of the last one.
        ("ltx-2.3", ("--steps", "1"), "planner.too_few_steps"),
    ]
    for model, options, code in refusals:
        with subtests.test(model=model, options=options):
            given = ("a", "--model", str(tiny(model).directory), *SIZE, *options)
            refused = [command("plan", *given), command("generate", *given, "--out", out)]
            assert [exit_code for exit_code, _ in refused] == [2, 2]
            assert {made["error"]["code"] for _, made in refused} == {code}
            assert not Path(out).exists()


def test_engines_that_are_asked_for_are_reported_as_lacking(command: Command, tiny: Tiny) -> None:
    model = str(tiny("ltx-2").directory)
    able = {"transformer", "vae", "audio_vae", "vocoder"}
    for backend, lacking in (("all=onnxruntime", None), ("connectors=tensorrt", {"connectors"})):
        code, made = command("plan", "a", "--model", model, *SIZE, "--backend", backend)
        parts = made["plan"]["components"]
        assert code == 0
        of_engines = able if lacking is None else set()
        assert {name for name, part in parts.items() if part["backend"] != "pytorch"} == of_engines
        codes = {name: [reason["code"] for reason in part["reasons"]] for name, part in parts.items()}
        named = {name for name, reasons in codes.items() if "planner.not_supported" in reasons}
        assert named == (lacking or set(parts) - able - {"vae_encoder"})


def test_parameters_are_those_of_the_files(tiny: Tiny, tmp_path: Path) -> None:
    for architecture in LTX2_ARCHITECTURES:
        spec = tiny(architecture)
        plan = tiny_plan(replace(spec, image=None), tmp_path / "x.mp4", width=96, height=64)

        def loaded(name: str, spec: ModelSpec = spec, plan: Any = plan) -> int:
            module = load_module(spec, name, plan.components[name])
            state = module.state_dict()
            return sum(weight.numel() for weight in state.values())

        # Images are not read by the text encoder, so those parts are not loaded.
        assert {name: loaded(name) for name in plan.components} == {
            name: count for name, count in spec.parameters.items() if name in plan.components
        }


def test_streams_are_joined_and_split() -> None:
    streams = Streams((1, 2, 3, 4, 5), (1, 2, 7, 3), 24.0)
    video, sound = torch.randn(streams.video), torch.randn(streams.sound)
    again = streams.split(streams.join(video, sound))
    assert torch.equal(again[0], video)
    assert torch.equal(again[1], sound)
