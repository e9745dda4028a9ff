"""Offload, quantization and tiles on a GPU: same latents, less memory, no leak. Skipped without a GPU."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.offload import pin
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.quantization import fp8_weight, install_fp8_linear
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.pipeline.sampling import decode
from runtime.planner.execution_options import with_less_memory
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu.errors import relative_error
from tests.gpu.test_cuda import on_cuda
from tests.pipeline.test_parity import sample
from tests.plans import Alone, machine, tiny_plan, with_strategy
from tests.tiny_models import ARCHITECTURES

pytestmark = [
    # bitsandbytes' own, of a layer that is 544 wide.
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]

OFFLOADS = ("model", "group", "sequential")
# Of diorama's velocity, whose small width is the hardest case. Weights alone make 0.05 (fp8) and 0.27 (4 bits) there.
ERRORS = {"bnb-8bit": 0.08, "bnb-4bit": 0.4, "fp8": 0.15}
PACKAGES = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "fp8": "torchao"}


def offloaded(plan: ExecutionPlan, offload: str, quantization: str = "none") -> ExecutionPlan:
    """Return the plan with another memory strategy and the same computation."""
    plan = with_strategy(plan, offload=offload).replace(speed=with_less_memory(plan.speed, offload, quantization))
    for name, part in plan.components.items():
        if name.startswith("transformer"):
            plan = plan.with_component(name, part.replace(quantization=quantization))
    return plan


@pytest.fixture
def diorama() -> tuple[ModelSpec, ExecutionPlan]:
    """The shipped model, and a short clip of it on the GPU in bfloat16."""
    spec = find("diorama", Path("none"))
    request = GenerationRequest(prompt="a red boat sails left", seed=7, frames=5, steps=4)
    return spec, on_cuda(resolve(request, spec, PlanningContext(machine(), Path("x.mp4"))), "bfloat16")


def held() -> int:
    """Return the bytes that PyTorch holds on the GPU."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offload_does_not_change_latents(
    architecture: str, offload: str, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = tiny(architecture)
    plan = on_cuda(tiny_plan(spec, tmp_path / "x.mp4"), "float32")
    with Residency() as residency:
        wanted = sample(spec, plan, residency)
        for _ in range(2):
            assert relative_error(sample(spec, offloaded(plan, offload), residency), wanted.cpu()) < 1e-6


def on_gpu(residency: Residency) -> dict[str, int]:
    """Return the bytes of each transformer's weights that lie on the GPU, by its name."""
    parts = {key.name: loaded.part for key, loaded in residency._loaded.items() if key.name.startswith("transformer")}
    return {
        name: sum(weight.nbytes for weight in part._module.parameters() if weight.is_cuda)
        for name, part in parts.items()
    }


@pytest.mark.parametrize("offload", OFFLOADS)
def test_weights_leave_the_gpu_between_stages_and_jobs(offload: str, diorama: tuple[ModelSpec, ExecutionPlan]) -> None:
    spec, plan = diorama
    with Residency() as residency:
        sample(spec, plan, residency)  # CUDA's libraries take their workspace, and keep it
    plan, before, slack = offloaded(plan, offload), held(), 1 << 20
    with Residency() as residency:
        for _ in range(3):
            sample(spec, plan, residency)
            assert held() - before < slack
            assert on_gpu(residency) == {"transformer": 0, "transformer_2": 0}
            with residency.denoiser(spec, Alone(plan), "transformer"):
                on_device = on_gpu(residency)
            assert on_device["transformer_2"] == 0
            assert (on_device["transformer"] > spec.parameters["transformer"]) == (offload == "model")
    assert held() - before < slack


@pytest.mark.parametrize("kind", ERRORS)
def test_quantized_weights_leave_the_gpu_when_freed(kind: str, diorama: tuple[ModelSpec, ExecutionPlan]) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"needs {PACKAGES[kind]}")
    spec, plan = diorama
    with Residency() as residency:
        sample(
            spec, with_strategy(offloaded(plan, "none", kind), keep_loaded=True), residency
        )  # libraries take workspaces
    before = held()
    with Residency() as residency:
        sample(spec, with_strategy(offloaded(plan, "none", kind), keep_loaded=True), residency)
        assert held() - before > spec.parameters["transformer"] / 2
    assert held() - before < 1 << 20


@pytest.mark.parametrize("offload", ["none", *OFFLOADS])
@pytest.mark.parametrize("kind", ERRORS)
def test_the_quantized_velocity_is_close(kind: str, offload: str, diorama: tuple[ModelSpec, ExecutionPlan]) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"needs {PACKAGES[kind]}")
    spec, plan = diorama
    latents = torch.randn(plan.latent_shape, generator=torch.Generator().manual_seed(1)).to("cuda:0")
    text = torch.randn(1, spec.max_sequence_length, 128, generator=torch.Generator().manual_seed(2)).to("cuda:0")
    timestep = torch.tensor(500.0, device="cuda:0")
    with Residency() as residency:
        with residency.denoiser(spec, Alone(plan), "transformer") as denoiser:
            wanted = denoiser(latents, timestep, text).float().cpu()
        plan = offloaded(plan, offload, kind)
        if kind == "bnb-8bit" and offload != "none":
            with (
                pytest.raises(InvalidRequestError) as refused,
                residency.denoiser(spec, Alone(plan), "transformer"),
            ):
                pass
            assert (refused.value.code, refused.value.field) == ("planner.8bit_offloaded", "offload")
            return
        for _ in range(2):
            with residency.denoiser(spec, Alone(plan), "transformer") as denoiser:
                for _ in range(2):
                    got = denoiser(latents, timestep, text).float()
                assert 0 < relative_error(got, wanted) < ERRORS[kind]


@pytest.mark.parametrize("rows", [1, 16, 41, 48, 64, 272, 2048])
@pytest.mark.parametrize("inner", [3072, 12288, 15360])
def test_fp8_layers_take_any_number_of_rows(inner: int, rows: int) -> None:
    pytest.importorskip("torchao")
    layer = torch.nn.Linear(inner, 3072, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(1, rows, inner, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        wanted = layer(x).float().cpu()
        layer.weight = fp8_weight(layer.weight)
        install_fp8_linear(layer)
        assert 0 < relative_error(layer(x).float(), wanted) < 0.06


def test_a_job_with_all_options_at_once(diorama: tuple[ModelSpec, ExecutionPlan], tmp_path: Path) -> None:
    spec, plan = diorama
    plan = with_strategy(offloaded(plan, "group"), decode_tile=16).replace(output=tmp_path / "x.mp4")
    events: list[Event] = []
    with Residency() as residency:
        for _ in range(2):
            run_job(plan, spec, events.append, Cancel(), residency)
            assert isinstance(events[-1], VideoSaved), events[-1]


def test_tiled_frames_equal_untiled_frames(diorama: tuple[ModelSpec, ExecutionPlan]) -> None:
    spec, plan = diorama
    with Residency() as residency:
        latents = sample(spec, plan, residency)
        with residency.video_decoder(spec, Alone(plan)) as decoder:
            whole = torch.cat(list(decode(decoder, latents, 2, Cancel()))).float()
            tiled = torch.cat(list(decode(decoder, latents, 2, Cancel(), 16))).float()
    assert 10 * math.log10(255**2 / (whole - tiled).square().mean().item()) > 40


def test_weights_are_page_locked_in_place() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(5)]).requires_grad_(requires_grad=False)
    wanted = [parameter.clone() for parameter in module.parameters()]
    assert pin(module)
    for parameter, value in zip(module.parameters(), wanted, strict=True):
        assert parameter.is_pinned()
        assert torch.equal(parameter, value)
