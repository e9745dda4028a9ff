"""The exportable form of the VAE's decoder equals diffusers', and runs on engines in jobs of both families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from runtime.cli.main import run
from runtime.core.facts import Fact
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.execution.engine_components import EngineGroupDecoder
from runtime.families.hunyuan_video.vae import PyTorchVideoDecoder
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS, groups_of
from tests.execution.test_image_components import Engines, no_fallback, opened
from tests.families.framepack_models import pipeline as framepack
from tests.families.test_second_family import frames
from tests.image_files import picture

Tiny = Callable[[str], ModelSpec]


@pytest.fixture(scope="module")
def vae(tiny: Tiny) -> AutoencoderKLHunyuanVideo:
    """Return diffusers' VAE with its groups."""
    module = AutoencoderKLHunyuanVideo.from_pretrained(tiny("hunyuan-video").directory / "vae").eval()
    module.use_framewise_decoding = True
    return module


@pytest.fixture(scope="module")
def programs(tiny: Tiny) -> dict[str, Program]:
    spec = tiny("hunyuan-video")
    return {name: load_program(spec, "vae", name, device="cpu", dtype="float32") for name in GROUP_PROGRAMS}


def noise(count: int) -> torch.Tensor:
    return torch.randn(1, 16, count, 4, 6, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 4, 5, 7, 8, 9])
def test_a_decoder_on_engines_equals_diffusers(
    vae: AutoencoderKLHunyuanVideo, programs: dict[str, Program], count: int
) -> None:
    latents, engines = noise(count), Engines(programs)
    decoded = vae.decode(latents / vae.config.scaling_factor).sample[0].permute(1, 2, 3, 0)
    decoder = EngineGroupDecoder(opened(engines), no_fallback)
    torch.testing.assert_close(decoder.window(latents), decoded, rtol=1e-5, atol=1e-5)
    assert len(engines.calls) == len(groups_of(count))
    found = torch.cat(list(decoder.frames(latents, 1)))
    torch.testing.assert_close(found, decoded.clamp(-1, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_pytorch_decodes_from_the_group_that_fails(tiny: Tiny, programs: dict[str, Program], failing: int) -> None:
    latents, reasons = noise(8), list[Fact]()
    directory = tiny("hunyuan-video").directory / "vae"
    reference = PyTorchVideoDecoder(AutoencoderKLHunyuanVideo.from_pretrained(directory).eval())

    def wrong(call: int, outputs: dict[str, Any]) -> None:
        if call == failing:
            outputs["frames"] = torch.full_like(outputs["frames"], torch.nan)

    def fall_back(reason: Fact) -> PyTorchVideoDecoder:
        reasons.append(reason)
        return reference

    engines = Engines(programs, wrong)
    found = torch.cat(list(EngineGroupDecoder(opened(engines), fall_back).frames(latents, 1)))
    torch.testing.assert_close(found, torch.cat(list(reference.frames(latents, 1))), rtol=1e-5, atol=1e-5)
    assert [reason.code for reason in reasons] == ["execution.engine_not_finite"]
    assert len(engines.calls) == failing


@pytest.mark.slow
@pytest.mark.parametrize(("family", "length"), [("hunyuan-video", 17), ("framepack", 73)])
def test_a_job_decodes_on_engines(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, length: int
) -> None:
    given = ["--width", "48", "--height", "32", "--frames", str(length), "--steps", "1", "--seed", "3"]
    if family == "framepack":
        folder = tmp_path / "framepack-f1"
        framepack().save_pretrained(folder)
        picture(48, 32).save(tmp_path / "image.png")
        given += ["--image", str(tmp_path / "image.png")]
    else:
        folder = tiny(family).directory
    pixels = []
    for backend in ("pytorch", "onnxruntime"):
        out = str(tmp_path / f"{backend}.mp4")
        chosen = ["--backend", f"vae={backend}", "--build", "missing", "--out", out, "--json"]
        assert run(["generate", "a red boat", "--model", str(folder), *given, *chosen]) == 0
        made = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert made["plan"]["components"]["vae"]["backend"] == backend, made["plan"]["components"]["vae"]
        pixels.append(torch.frombuffer(bytearray(frames(out)), dtype=torch.uint8).float())
    assert pixels[0].shape == pixels[1].shape
    # OpenVINO may compute in bfloat16; other noise differs by 37.
    assert (pixels[0] - pixels[1]).abs().mean() < 5
