"""HunyuanVideo from the command line and through `run_job`: videos, the prompt cache, checkpoints and refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.events import Event, Paused, Resumed, StepDone, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.loras import Lora
from runtime.execution.residency import Residency
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.families.conftest import Command
from tests.families.hunyuan_lora_files import block_factors, comfy, peft, underscored
from tests.families.test_second_family import frames
from tests.lora_files import save
from tests.models.hub import of_folder, served
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan

SIZE = ("--width", "64", "--height", "32", "--frames", "9", "--steps", "4", "--seed", "3")
Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def model(tiny: Tiny) -> str:
    """Return the folder of a tiny model with embedded guidance."""
    return str(tiny("hunyuan-video").directory)


def test_a_job_makes_a_video(command: Command, model: str, cache_dir: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "1.mp4")
    code, made = command("generate", "a red boat", "--model", model, *SIZE, "--guidance", "5", "--out", out)
    assert code == 0, made
    assert list(made["plan"]["components"]) == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert {part["backend"] for part in made["plan"]["components"].values()} == {"pytorch"}
    assert made["request"]["guidance_scale"] == 5
    pixels = frames(out)
    assert len(pixels) == 9 * 32 * 64 * 3
    assert len(set(pixels)) > 16
    assert len(list((cache_dir / "prompts").glob("*.safetensors"))) == 2
    # The second video takes the embeddings of both encoders from the cache.
    other = str(tmp_path / "2.mp4")
    assert command("generate", "a red boat", "--model", model, *SIZE, "--guidance", "5", "--out", other)[0] == 0
    assert frames(other) == pixels
    assert len(list((cache_dir / "prompts").glob("*.safetensors"))) == 2


def test_a_model_is_downloaded_by_its_name(
    command: Command, tiny: Tiny, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with served() as hub:
        monkeypatch.setenv("TANDEM_HUB", hub.address)
        hub.repositories["hunyuanvideo-community/HunyuanVideo"] = of_folder(tiny("hunyuan-video").directory)
        code, made = command("models", "download", "hunyuan-video", "--yes")
    assert code == 0, made
    assert Path(made["folder"]) == cache_dir.resolve() / "weights" / "HunyuanVideo"
    assert command("generate", "a", "--model", "hunyuan-video", *SIZE, "--out", str(tmp_path / "1.mp4"))[0] == 0


@pytest.mark.slow
def test_a_job_uses_the_step_cache(command: Command, model: str, tmp_path: Path) -> None:
    pixels = []
    for cache in ("none", "first-block:0.0001", "first-block:1"):
        out = str(tmp_path / f"{cache.replace(':', '-')}.mp4")
        code, made = command("generate", "a red boat", "--model", model, *SIZE, "--step-cache", cache, "--out", out)
        assert code == 0, made
        pixels.append(frames(out))
    assert pixels[0] == pixels[1] != pixels[2]


@pytest.mark.slow
def test_a_lora_is_added_for_one_video(command: Command, tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    spec, pixels, out = tiny("hunyuan-video"), [], str(tmp_path / "x.mp4")
    factors = block_factors(spec.transformer)
    save(cache_dir / "weights" / "loras" / "musubi.safetensors", underscored(factors))
    save(cache_dir / "weights" / "loras" / "styles" / "comfy.safetensors", comfy(factors))
    for lora in ("", "musubi:0.8", "styles/comfy:0.8", "musubi", ""):
        given = ("--lora", lora) if lora else ()
        code, made = command("generate", "a", "--model", str(spec.directory), *SIZE, *given, "--out", out)
        assert code == 0, made
        pixels.append(frames(out))
    # The same file in another spelling is the same video.
    assert pixels[0] == pixels[4] and pixels[1] == pixels[2]
    assert len({*pixels}) == 3
    save(cache_dir / "weights" / "loras" / "text.safetensors", {"lora_te1_layers_0.alpha": torch.ones(())})
    refused, made = command("generate", "a", "--model", str(spec.directory), *SIZE, "--lora", "text", "--out", out)
    assert (refused, made["error"]["code"]) == (2, "lora.unknown_tensor")


@pytest.mark.slow
def test_a_checkpoint_is_valid_for_the_same_loras(tiny: Tiny, tmp_path: Path) -> None:
    out, job = tmp_path / "x.mp4", tmp_path / "job"
    style = save(tmp_path / "style.safetensors", peft(block_factors(tiny("hunyuan-video").transformer)))

    def run(folder: CheckpointFolder, stop: int = 0) -> list[Event]:
        spec = with_loras(tiny("hunyuan-video"), [Lora(str(style))], tmp_path)
        plan = tiny_plan(spec, out, loras=(str(style),))
        with Residency() as residency:
            return events_of(
                plan,
                spec,
                residency,
                pause_at=lambda event: isinstance(event, StepDone) and event.step == stop,
                checkpoints=folder,
            )

    run(CheckpointFolder(tmp_path / "whole"))
    wanted = frames(str(out))
    run(CheckpointFolder(job), stop=2)
    assert Resumed(step=2, of=4) in run(CheckpointFolder(job))
    assert frames(str(out)) == wanted
    run(CheckpointFolder(tmp_path / "other"), stop=2)
    save(style, peft(block_factors(tiny("hunyuan-video").transformer, seed=5)))
    events = run(CheckpointFolder(tmp_path / "other"))
    assert Warned(fact=Fact("pipeline.checkpoint_unusable", {"cause": Fact("checkpoint.other_clip")})) in events
    assert not any(isinstance(event, Resumed) for event in events)
    assert frames(str(out)) != wanted


@pytest.mark.parametrize("architecture", ["hunyuan-video", pytest.param("hunyuan-video-cfg", marks=pytest.mark.slow)])
def test_a_paused_job_resumes_to_the_same_video(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    spec, out = tiny(architecture), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, negative_prompt="blue ball", guidance_scale=5.0)
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


def test_embedded_guidance_takes_one_pass(tiny: Tiny, tmp_path: Path) -> None:
    embedded, twice = (tiny_plan(tiny(name), tmp_path / "x.mp4") for name in ("hunyuan-video", "hunyuan-video-cfg"))
    assert (embedded.embedded_guidance, embedded.guidance_scale) == (6.0, 1.0)
    assert (twice.embedded_guidance, twice.guidance_scale) == (None, 6.0)
    assert 2 * embedded.step_flops == twice.step_flops
    assert embedded.request_json()["guidance_scale"] == twice.request_json()["guidance_scale"] == 6.0


def test_the_tokens_after_the_limit_are_cut_and_reported(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("hunyuan-video")
    plan = tiny_plan(spec, tmp_path / "x.mp4", prompt="a red zebra " + 300 * "boat ")
    with Residency() as residency:
        events = events_of(plan, spec, residency)
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    found = {fact.code: fact for fact in saved.warnings if fact.code.startswith("pipeline.")}
    assert [*found] == ["pipeline.unknown_words", "pipeline.text_cut"]
    assert found["pipeline.unknown_words"].data["words"] == ["zebra"]
