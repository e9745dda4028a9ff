"""The VAE's precision in a plan: memory, time, history and diagnosis."""

from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import EngineRef, ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.planner import memory_model
from runtime.planner.history import History, Kind, Run, architecture, runs_of
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import gpu, machine
from tests.published_specs import spec

LARGE = spec("wan2.1-1.3b")
H200 = machine(gpu=gpu(free_gib=130), torch_cuda="13.0", ram_free_gib=100)
USE = EngineRef(id="1", program="vae_next", builder="b", precision="float16", profile=((1, 4, 8),) * 3)


def plan(asked: str, history: History = ()) -> ExecutionPlan:
    """Plan Wan2.1-1.3B on a GPU."""
    request = GenerationRequest(prompt="x", seed=1, gpus=1, vae_precision=asked)
    return resolve(request, LARGE, PlanningContext(H200, Path("x.mp4"), history=history))


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("auto", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_only_the_vae_follows_it(asked: str, dtype: str) -> None:
    made = plan(asked)
    dtypes = {name: part.dtype for name, part in made.components.items()}
    assert dtypes == {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": dtype}
    assert made.components["vae"].weights_bytes == LARGE.parameters["vae"] * DTYPE_BYTES[dtype]
    assert made.request.vae_precision == made.request_json()["vae_precision"] == asked
    assert GenerationRequest.from_mapping(made.request_json()).vae_precision == asked
    assert made.to_json()["components"]["vae"]["dtype"] == dtype


def test_16_bits_take_half_the_memory_and_less_time() -> None:
    half, full = plan("auto"), plan("float32")
    assert half.strategy.decode_chunk == full.strategy.decode_chunk
    working = [next(stage.working_bytes for stage in one.memory if stage.stage == "decode") for one in (half, full)]
    # A little more than half: norms are computed in float32.
    assert 0.5 < working[0] / working[1] < 0.54
    assert half.seconds["decode"].likely < full.seconds["decode"].likely
    assert half.seconds["denoise"] == full.seconds["denoise"]


def test_runs_in_another_precision_do_not_count() -> None:
    full = plan("float32")
    peaks = {"encode": 10**10, "denoise": 10**10, "decode": 60 * 10**9}
    ran = runs_of(full, full, LARGE, H200, {"text_encoder": 1.0, "denoise": 99.0, "decode": 77.0}, peaks)
    assert next(run.kind.dtype for run in ran if run.kind.component == "vae") == "float32"
    again = plan("float32", ran)
    assert again.seconds["decode"].measured and again.seconds["decode"].likely == pytest.approx(77.0)
    for other in ("auto", "float16"):
        fresh, informed = plan(other), plan(other, ran)
        assert informed.seconds["decode"] == fresh.seconds["decode"] and not informed.seconds["decode"].measured
        assert [s for s in informed.memory if s.stage == "decode"] == [s for s in fresh.memory if s.stage == "decode"]
        assert informed.seconds["denoise"].measured


def test_a_measured_decode_in_bfloat16_counts_for_it() -> None:
    kind = Kind(
        device="Test GPU", model=architecture(LARGE), component="vae", backend="pytorch", dtype="bfloat16",
        quantization="none", offload="none", speed="channels last",
    )  # fmt: skip
    run = Run(kind=kind, flops=plan("auto").decode_flops, seconds=3.0, working_bytes=1, excess_bytes=None)
    assert plan("auto", [run]).seconds["decode"].likely == pytest.approx(3.0)
    assert plan("float32", [run]).seconds["decode"] == plan("float32").seconds["decode"]


def test_tiles_take_half_too() -> None:
    loads = []
    for dtype in ("bfloat16", "float32"):
        dtypes = dict.fromkeys(LARGE.component_names, dtype)
        loads.append(
            memory_model.Workload(
                spec=LARGE,
                device="cuda:0",
                dtypes=dtypes,
                engine_bytes={},
                engine_seconds={},
                tokens=1,
                latent_shape=(1, 16, 9, 60, 104),
                height=480,
                width=832,
            )
        )
    assert 2 * memory_model.decode_bytes(loads[0], 1, 32) == memory_model.decode_bytes(loads[1], 1, 32)


@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_an_unsupported_precision_is_refused(asked: str) -> None:
    request = GenerationRequest(prompt="x", vae_precision=asked)
    with pytest.raises(InvalidRequestError) as refused:
        resolve(request, LARGE, PlanningContext(machine(ram_free_gib=200), Path("x.mp4")))
    assert refused.value.field == "vae_precision"
    assert (refused.value.code, refused.value.data["precision"]) == ("planner.vae_16bit_on_cpu", asked)
