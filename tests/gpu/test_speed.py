"""PyTorch optimizations on a GPU do not change results. Skipped without a GPU."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import nn

from runtime.core.events import VideoSaved
from runtime.core.plan import EAGER, Speed
from runtime.core.request import ATTENTIONS, GenerationRequest
from runtime.engines.reference import full_float32
from runtime.execution import fp8_attention
from runtime.execution.attention import attention, problem
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.residency import Residency
from runtime.families.wan import vae as wan_vae
from runtime.families.wan.vae import PyTorchVideoDecoder, TritonVaeOps
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu.errors import relative_error
from tests.gpu.test_cuda import on_cuda
from tests.pipeline.runs import events_of
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan
from tests.tiny_models import ARCHITECTURES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
SPEEDS = {
    "text kept": Speed(text_kept=True),
    "paired": Speed(paired=True, text_kept=True),
    "graphed": Speed(graphed=True, text_kept=True),
    "graphed, paired": Speed(graphed=True, paired=True, fused=True),
    "compiled": Speed(compiled=True, fused=True, text_kept=True),
    "all": Speed(compiled=True, graphed=True, paired=True, fused=True, text_kept=True),
}
DEVICE = torch.device("cuda:0")
COMPILED = {"compiled": "wan2.2-a14b", "all": "wan2.2-ti2v-5b"}


def kernels() -> Any:
    """Return Triton's kernels, which only a PyTorch for CUDA can import."""
    return importlib.import_module("runtime.families.wan.vae_kernels")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (architecture, name)
        for architecture in ARCHITECTURES
        for name in SPEEDS
        # Compiling takes most of the time, and is alike for all.
        if not SPEEDS[name].compiled or architecture == COMPILED[name]
    ],
)
def test_optimizations_do_not_change_latents(
    architecture: str, name: str, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec, speed = tiny(architecture), SPEEDS[name]
    plan = on_cuda(tiny_plan(spec, tmp_path / "x.mp4", negative_prompt="blue ball"), "float32")
    with full_float32(DEVICE), Residency() as residency:
        wanted = sample(spec, plan.replace(speed=EAGER), residency).cpu()
        for _ in range(2):
            assert relative_error(sample(spec, plan.replace(speed=speed), residency), wanted) < 1e-4


def test_a_job_runs_as_planned(tmp_path: Path) -> None:
    spec, out = find("diorama", Path("none")), tmp_path / "x.mp4"
    values = {"prompt": "a red boat", "seed": 7, "frames": 9, "steps": 4, "compile": "always"}
    plan = resolve(GenerationRequest.from_mapping(values), spec, PlanningContext(probe(), out))
    assert plan.speed.compiled
    with Residency() as residency:
        saved = events_of(plan, spec, residency)[-1]
    assert isinstance(saved, VideoSaved), saved
    assert not [warning for warning in saved.warnings if warning.code == "pipeline.degraded"]


def test_unavailable_options_are_reported() -> None:
    spec = find("diorama", Path("none"))
    plan = on_cuda(tiny_plan(spec, Path("x.mp4"), width=128, height=96), "float32")
    job = Alone(plan.replace(speed=SPEEDS["all"]))
    with Residency() as residency, residency.denoiser(spec, job, "transformer") as denoiser:
        latents = torch.randn(plan.latent_shape, device="cuda:0")
        texts = torch.randn(2, 1, 512, spec.transformer.text_dim, device="cuda:0")
        timestep = torch.tensor(500.0, device="cuda:0")
        for _ in range(3):
            denoiser.together(latents, timestep, dict(zip((PROMPTED, UNPROMPTED), texts, strict=True)))
    assert not job.fallen


@pytest.mark.parametrize("kind", list(ATTENTIONS)[1:-1])
def test_attention_kernels_agree(kind: str) -> None:
    why = problem(kind, "cuda:0", torch.bfloat16, 128)
    if why is not None:
        pytest.skip(str(why))
    generator = torch.Generator("cuda:0").manual_seed(1)
    q, k, v = torch.randn((3, 1, 4096, 4, 128), device="cuda:0", generator=generator)
    wanted = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 128**0.5).softmax(-1) @ v.transpose(1, 2)
    got = attention(kind)(*(x.bfloat16() for x in (q, k, v))).float().transpose(1, 2)
    assert relative_error(got, wanted.cpu()) < {"fp8": 0.09, "sage": 0.09}.get(kind, 0.01)


def test_a_kernel_for_fp8_that_was_built_before_is_used() -> None:
    why = problem("fp8", "cuda:0", torch.bfloat16, 128)
    if why is not None:
        pytest.skip(str(why))
    fp8_attention.build_kernel(2304, 3, 128, "cuda:0")
    before = fp8_attention._graph.cache_info()
    q, k, v = torch.randn((3, 1, 2304, 3, 128), device="cuda:0", dtype=torch.bfloat16)
    attention("fp8")(q, k, v)
    after = fp8_attention._graph.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


@pytest.mark.parametrize("architecture", ["wan2.1", "wan2.2-ti2v-5b"])
@pytest.mark.parametrize("speed", [Speed(channels_last=True), Speed(channels_last=True, vae_kernels=True)])
def test_optimizations_do_not_change_frames(
    architecture: str, speed: Speed, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = tiny(architecture)
    plan = on_cuda(tiny_plan(spec, tmp_path / "x.mp4"), "float32")
    latents = torch.randn(plan.latent_shape, generator=torch.Generator().manual_seed(1)).to("cuda:0")
    found = []
    with full_float32(DEVICE), Residency() as residency:
        for one in (EAGER, speed):
            job = Alone(plan.replace(speed=one))
            with residency.video_decoder(spec, job) as decoder:
                found.append(torch.cat(list(decoder.frames(latents, 2))).cpu())
            assert not job.fallen
    assert (found[0] - found[1]).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(96, 3, 1, 6, 40), (96, 3, 4, 61, 105), (24, 3, 2, 33, 9), (96, 1, 3, 16, 16)])
def test_triton_convolutions_equal_pytorch(size: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    channels, deep, frames, height, width = size
    generator = torch.Generator("cuda:0").manual_seed(1)
    x = torch.randn((1, channels, frames + deep - 1, height, width), device="cuda:0", generator=generator).to(dtype)
    weight = torch.randn((96, channels, deep, 3, 3), device="cuda:0", generator=generator) * (9 * channels) ** -0.5
    weight = weight.to(dtype)
    if not TritonVaeOps(x.device, dtype).supports(nn.Conv3d(96, 96, 3)):
        pytest.skip("needs a Hopper GPU")
    with full_float32(DEVICE):
        wanted = F.conv3d(x.float(), weight.float(), padding=(0, 1, 1))
    padded = F.pad(x, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last_3d)
    got = kernels().convolve(padded, weight)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    assert relative_error(got.float(), wanted.cpu()) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [20, 96, 384])
def test_triton_kernels_equal_pytorch(channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda:0").manual_seed(1)

    def lying(frames: int) -> torch.Tensor:
        x = torch.randn((1, channels, frames, 33, 47), device="cuda:0", generator=generator).to(dtype)
        return x.contiguous(memory_format=torch.channels_last_3d)

    x, shortcut, before = lying(3), lying(3), lying(2)
    gamma, bias = lying(1)[0, :, :, :1, :1].clone(), lying(1)[0, :, 0, 0, 0].clone()
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(("norm_activate", (x, one, gamma, before, padding)) for one in (None, bias) for padding in (0, 1)),
        ("add_residual", (x, bias, shortcut)),
        ("upsample", (x[0].transpose(0, 1),)),
    ]
    for name, given in calls:
        got, wanted = getattr(kernels(), name)(*given), getattr(wan_vae, name)(*given)
        assert got.stride() == wanted.stride()
        assert relative_error(got.float(), wanted.float().cpu()) < (1e-6 if dtype == torch.float32 else 5e-3)


@torch.inference_mode()
def test_a_block_of_96_channels_equals_diffusers() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=96, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    vae = vae.eval().to("cuda:0", torch.bfloat16)
    latents = torch.randn(1, vae.config.z_dim, 5, 12, 20, device="cuda:0")
    decoder, degraded = PyTorchVideoDecoder(vae), []
    wanted = torch.cat(list(decoder.frames(latents, 2)))
    decoder.compute(Speed(channels_last=True, vae_kernels=True), lambda *what: degraded.append(what))
    for chunk in (1, 3):
        got = torch.cat(list(decoder.frames(latents, chunk)))
        assert relative_error(got, wanted.cpu()) < 0.02
    assert not degraded
