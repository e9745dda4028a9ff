"""LTX-2's video VAE on engines: equal to diffusers' modules, in a whole job, and replaced by PyTorch if one fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.core.events import FellBack, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.residency import Residency
from runtime.families.ltx2.components import video_decoder, video_encoder
from runtime.machine.probe import probe
from runtime.models.requested import with_inputs
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.models.vae_groups import CLIP_PROGRAM
from runtime.models.weights import load_module
from runtime.planner.resolve import PlanningContext, resolve
from tests.image_files import saved
from tests.pipeline.failing import Failing
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_programs_equal_the_parts_in_pytorch(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    part = tiny_plan(spec, tmp_path / "x.mp4", height=64).components["vae"]
    latents = torch.randn(1, spec.vae.z_dim, 3, 2, 3, generator=torch.Generator().manual_seed(1))
    decode = load_program(spec, "vae", CLIP_PROGRAM, device="cpu", dtype="float32")
    expected = torch.cat([*video_decoder(load_module(spec, "vae", part), "cpu").frames(latents, 1)])
    torch.testing.assert_close(decode.run(z=latents)["frames"], expected, rtol=0, atol=1e-6)
    encode = load_program(spec, VAE_ENCODER, "vae_encoder_first", device="cpu", dtype="float32")
    (image,) = encode.inputs((1, 2, 3)).values()
    module = load_module(spec, VAE_ENCODER, part)
    exact = video_encoder(module, "cpu").latents([image[0].permute(2, 0, 1)], 1)
    torch.testing.assert_close(encode.run(frames=image)["z"], exact, rtol=1e-5, atol=1e-5)


def broken(_: Any) -> Any:
    """Raise what an engine raises that fails."""
    raise RuntimeError("broken")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("inductor", marks=pytest.mark.compiler)])
def test_a_job_runs_both_parts_of_the_vae_on_engines(
    backend: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
    clip = {"prompt": "x", "width": 64, "height": 64, "frames": 9, "steps": 2, "seed": 3, "fps": 8, "crf": 0}

    def run(**values: Any) -> tuple[VideoSaved, list[str]]:
        image, last = saved(tmp_path / "in.png", 64, 64), saved(tmp_path / "last.png", 64, 64, turned=True)
        request = GenerationRequest.from_mapping(clip | {"image": str(image), "last_image": str(last)} | values)
        spec = with_inputs(tiny("ltx-2.3"), request, tmp_path, tmp_path)
        plan = resolve(request, spec, PlanningContext(service.machine, tmp_path / "x.mp4", service.offers(spec)))
        with Residency(service) as residency:
            events = events_of(plan, spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return events[-1], [event.component for event in events if isinstance(event, FellBack)]

    def pixels(video: Path) -> np.ndarray:
        return np.frombuffer(frames_of(video), "uint8").astype(int)

    plain, _ = run()
    assert plain.plan["components"]["vae"]["backend"] == "pytorch"
    expected = pixels(plain.video)
    # Only the larger part is built by Inductor, whose builds take long.
    encoder = "pytorch" if backend == "inductor" else backend
    asked: dict[str, Any] = {"backends": {"vae": backend, VAE_ENCODER: encoder}}
    made, fell_back = run(**asked)
    assert {name: made.plan["components"][name]["backend"] for name in asked["backends"]} == asked["backends"]
    assert not fell_back and made.sound
    records = service.store.index()
    encoders = () if encoder == "pytorch" else ("vae_encoder_first",)
    assert {record.key.program for record in records} == {CLIP_PROGRAM, *encoders}
    assert all(record.usable for record in records)
    exact = all(record.key.precision == "float32" for record in records)
    # In bfloat16 one step of 8-bit colors, now and then two.
    assert np.abs(pixels(made.video) - expected).mean() < (0.05 if exact else 1.5)
    if backend == "inductor":
        return  # what follows a failure is the same for every backend
    # Each part in turn fails in one of its calls, and PyTorch computes it; each image is a call.
    for call, component in enumerate((VAE_ENCODER, VAE_ENCODER, "vae"), 1):
        with pytest.MonkeyPatch.context() as patched:
            Failing(patched, OpenEngines, "infer", call, broken)
            repaired, fell_back = run(**asked)
        assert fell_back == [component]
        assert np.abs(pixels(repaired.video) - expected).mean() < (0.05 if exact else 1.5)
