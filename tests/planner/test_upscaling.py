"""Plans of videos that are upscaled: sizes, memory, seconds, backends and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import EngineRef, ExecutionPlan, Upscaling
from runtime.core.request import UPSCALER, GenerationRequest
from runtime.families.esrgan import upscalers
from runtime.machine.probe import Machine
from runtime.models.requested import with_finishers
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.resolve import PlanningContext, resolve
from runtime.planner.strategies import next_strategy
from runtime.planner.upscaling import calls_of, run_of
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, save_safetensors
from tests.plans import gpu, machine

CLIP = {"prompt": "a red boat", "width": 320, "height": 192, "frames": 9, "steps": 2, "seed": 1}

Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a weights folder with two small upscalers, and no published ones."""
    monkeypatch.setattr(upscalers, "_MODULE", "no_such_package")
    save_safetensors(tmp_path / "upscalers" / "compact.safetensors", COMPACT_CONFIG)
    save_safetensors(tmp_path / "upscalers" / "dense.safetensors", {**RRDB_CONFIG, "scale": 2})
    return tmp_path


def plan(
    spec: ModelSpec,
    weights: Path,
    on: Machine | None = None,
    offers: Callable[..., Any] = lambda *_: (),
    history: Any = (),
    **values: Any,
) -> ExecutionPlan:
    """Resolve a request; `spec` is a model without an upscaler."""
    request = GenerationRequest.from_mapping(CLIP | values)
    context = PlanningContext(on or machine(), Path("x.mp4"), offers, history)
    return resolve(request, with_finishers(spec, request, weights), context)


@pytest.mark.parametrize(
    ("values", "size", "name", "crf"),
    [
        ({"upscale": 4}, (1280, 768), "compact", 17),
        ({"upscale": "3", "upscaler": "COMPACT", "crf": 3}, (960, 576), "COMPACT", 3),
        ({"upscale": 2, "upscaler": "dense", "width": 64, "height": 64}, (128, 128), "dense", 10),
    ],
)
def test_the_upscaler_is_the_last_component(
    values: dict[str, Any], size: tuple[int, int], name: str, crf: int, weights: Path, tiny: Tiny
) -> None:
    spec = tiny("wan2.2-a14b")
    plain = plan(spec, weights, **{**values, "upscale": "off"})
    made = plan(spec, weights, **values)
    part, memory = made.components[UPSCALER], made.memory[-1]
    assert list(made.components) == [*plain.components, UPSCALER]
    assert (made.video_size, made.crf, made.plain_crf) == (size, crf, plain.crf)
    assert made.video_size[0] == made.width * int(made.upscale)
    assert (plain.upscaling, plain.video_size, plain.upscale) == (None, (plain.width, plain.height), "off")
    assert (part.backend, part.dtype, memory.component) == ("pytorch", "float32", UPSCALER)
    assert memory.peak_bytes > plain.memory[-1].peak_bytes
    assert part.seconds is not None
    assert made.seconds["upscale"] == part.seconds
    assert made.seconds["total"].likely == pytest.approx(plain.seconds["total"].likely + part.seconds.likely)
    assert made.forecast.seconds == made.seconds["total"]
    # What a video's metadata restores.
    restored = GenerationRequest.from_mapping(made.request_json())
    assert (restored.upscale, restored.upscaler.lower()) == (made.upscale, name.lower())
    assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made


def test_tiles_where_memory_is_short(weights: Path, tiny: Tiny) -> None:
    large: dict[str, Any] = {"width": 1008, "height": 992, "upscale": 4}
    roomy, short = (plan(tiny("wan2.1"), weights, machine(ram_free_gib=gib), **large) for gib in (20, 2))
    assert roomy.upscaling == Upscaling(width=4032, height=3968, tile=None, batch=1)
    assert short.upscaling is not None
    assert short.upscaling.tile is not None
    assert short.engine_size(UPSCALER) == (1, short.upscaling.tile, short.upscaling.tile)
    assert roomy.engine_size(UPSCALER) == (1, 992, 1008)
    assert roomy.engine_size("vae") == roomy.latent_size


def test_a_gpu_upscales_batches_in_float16(weights: Path, tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), weights, machine(gpu=gpu(), torch_cuda="13.0"), upscale=2)
    assert made.upscaling is not None
    assert (made.upscaling.batch, made.components[UPSCALER].dtype) == (8, "float16")
    assert made.components[UPSCALER].device == made.components["vae"].device


@pytest.mark.parametrize(("instructions", "dtype"), [((), "float32"), (("avx512_bf16", "fma"), "bfloat16")])
def test_a_cpu_upscales_frames_one_by_one(weights: Path, tiny: Tiny, instructions: tuple[str, ...], dtype: str) -> None:
    here = replace(machine(), cpu_instructions=instructions)
    made = plan(tiny("wan2.1"), weights, here, upscale=2)
    assert made.upscaling is not None
    assert (made.upscaling.batch, made.components[UPSCALER].dtype) == (1, dtype)


def test_the_model_decides_whether_videos_are_upscaled(
    weights: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("wan2.1")
    model = replace(model, defaults=replace(model.defaults, upscale="3"))
    assert plan(model, weights).upscale == "3"
    assert plan(model, weights, upscale=2).upscale == "2"
    assert plan(model, weights, upscale="off").upscaling is None
    monkeypatch.setattr(upscalers, "_MODULE", "no_such_package")
    without = plan(model, tmp_path / "none")
    assert without.upscaling is None
    assert "planner.not_upscaled" in [fact.code for fact in without.warnings]
    with pytest.raises(InvalidRequestError):
        plan(model, tmp_path / "none", upscaler="compact")


@pytest.mark.parametrize(
    ("backend", "ready", "speedup", "chosen", "builds"),
    [
        ("auto", True, 2.0, "onnxruntime", False),
        ("auto", True, 0.5, "pytorch", False),
        ("auto", False, 0.0, "pytorch", False),
        ("onnxruntime", False, 0.0, "onnxruntime", True),
        ("pytorch", True, 2.0, "pytorch", False),
        ("inductor", True, 2.0, "pytorch", False),
    ],
)
def test_the_backend(
    backend: str, ready: bool, speedup: float, chosen: str, builds: bool, weights: Path, tiny: Tiny
) -> None:
    calls: list[Any] = []

    def offers(component: str, size: Any, device: str) -> list[EngineOffer]:
        if component != UPSCALER:
            return []
        calls.append((size, device))
        use = {"id": "a" * 16, "program": UPSCALER, "builder": "onnxruntime", "precision": "float32"}
        engine = {**use, "profile": (size, size, size), "build": not ready}
        seconds: dict[str, Any] = {"seconds": 0.1, "baselines": {"eager": 0.1 * speedup}} if ready else {}
        uses = (EngineRef.model_validate(engine),)
        return [EngineOffer(backend="onnxruntime", builder="onnxruntime", engines=uses, **seconds)]

    made = plan(tiny("wan2.1"), weights, offers=offers, upscale=2, backends={UPSCALER: backend})
    part = made.components[UPSCALER]
    assert (part.backend, any(use.build for use in part.engines)) == (chosen, builds)
    assert made.fell_back(UPSCALER) == (backend == "inductor")
    assert calls == ([] if backend == "pytorch" else [((1, 192, 320), "cpu")])
    later = plan(tiny("wan2.1"), weights, offers=offers, upscale=2, backends={UPSCALER: backend}, build="idle")
    # Engines that are not requested are built too when no video waits.
    assert bool(later.components[UPSCALER].later) == (not ready)
    assert later.components[UPSCALER].backend == ("pytorch" if builds else chosen)
    if chosen == "onnxruntime" and ready:
        assert made.seconds["upscale"].likely == pytest.approx(0.1 * 9)


def test_a_finished_job_corrects_the_forecast(weights: Path, tiny: Tiny) -> None:
    request = GenerationRequest.from_mapping(CLIP | {"upscale": 2})
    spec = with_finishers(tiny("wan2.1"), request, weights)
    before = plan(tiny("wan2.1"), weights, upscale=2)
    run = run_of(before, spec, machine(), 5.0, loaded=False)
    after = plan(tiny("wan2.1"), weights, history=[run], upscale=2)
    assert after.seconds["upscale"].likely == pytest.approx(5.0)
    assert after.seconds["upscale"].measured
    assert calls_of(after, spec).flops(9) == run.flops


def test_an_engine_that_was_not_measured_takes_about_as_long_as_jobs_in_pytorch(weights: Path, tiny: Tiny) -> None:
    spec = with_finishers(tiny("wan2.1"), GenerationRequest.from_mapping(CLIP | {"upscale": 2}), weights)
    run = run_of(plan(tiny("wan2.1"), weights, upscale=2), spec, machine(), 0.5, loaded=False)
    size = (1, 192, 320)
    use = EngineRef(
        id="e1", program=UPSCALER, builder="onnxruntime", precision="float32", profile=(size, size, size), build=True
    )
    offer = EngineOffer(backend="onnxruntime", builder="onnxruntime", engines=(use,))
    made = plan(tiny("wan2.1"), weights, offers=lambda *_: [offer], history=[run], upscale=2, build="missing")
    seconds = made.seconds["upscale"]
    assert (made.components[UPSCALER].backend, seconds.measured, seconds.inferred) == ("onnxruntime", False, True)
    assert [seconds.low, seconds.likely] == pytest.approx([0.3 * 0.5, 0.5])


def test_less_memory_for_the_upscaler_is_less_for_the_decoder(weights: Path, tiny: Tiny) -> None:
    request = GenerationRequest.from_mapping(CLIP | {"upscale": 2})
    spec, made = with_finishers(tiny("wan2.1"), request, weights), plan(tiny("wan2.1"), weights, upscale=2)
    fallback = next_strategy(made, spec, UPSCALER, "RAM", lossy=True)
    assert fallback is not None
    assert fallback.plan.memory[-1].component == UPSCALER
    assert fallback.plan.upscaling == made.upscaling


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"upscale": 4, "upscaler": "none-such"}, "upscaler.unknown", "upscaler"),
        ({"upscale": 4, "upscaler": "dense"}, "upscaler.scale", "upscale"),
        ({"upscale": 5}, "request.not_a_choice", "upscale"),
        ({"upscale": True}, "request.not_a_choice", "upscale"),
        ({"upscale": 2, "upscaler": "../compact.safetensors"}, "request.upscaler_name", "upscaler"),
        ({"upscale": 2, "upscaler": ""}, "request.upscaler_name", "upscaler"),
    ],
)
def test_refusals(values: dict[str, Any], code: str, field: str, weights: Path, tiny: Tiny) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(tiny("wan2.1"), weights, **values)
    assert (caught.value.fact.code, caught.value.field) == (code, field)


def test_without_an_upscaler_a_plan_says_how_to_get_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upscalers, "_MODULE", "no_such_package")
    with pytest.raises(InvalidRequestError) as caught:
        plan(tiny("wan2.1"), tmp_path, upscale=2)
    assert (caught.value.fact.code, caught.value.field) == ("upscaler.none", "upscale")
    assert caught.value.fact.data["package"] == upscalers.PACKAGE
    assert plan(tiny("wan2.1"), tmp_path, upscaler="none-such").upscaling is None
