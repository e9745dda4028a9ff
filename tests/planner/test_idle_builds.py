"""Which engines are built when no video waits: those that can be faster than what runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.plan import EngineRef, ExecutionPlan, LatentSize
from runtime.core.request import GenerationRequest
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.history import Run, runs_of
from runtime.planner.resolve import PlanningContext, resolve
from tests.planner.test_block_engines import H200, blocks, use
from tests.plans import GIB, machine
from tests.published_specs import spec

MODEL = "wan2.1-1.3b"
CPU = replace(machine(ram_free_gib=120), ram_bytes=128 * GIB)


def missing(component: str, offer: EngineOffer | None = None) -> EngineOffer:
    """Return an offer whose engines are to be built."""
    offer = offer or EngineOffer(backend="tensorrt", builder="onnx_tensorrt", engines=(use(component),))
    engines: tuple[EngineRef, ...] = offer.engines
    return replace(offer, engines=tuple(engine.replace(build=True) for engine in engines), file_bytes=0)


def on_cpu(component: str) -> EngineOffer:
    """Return an offer of ONNX Runtime whose engine is to be built."""
    return replace(missing(component), backend="onnxruntime", builder="onnxruntime")


def planned(component: str, offer: EngineOffer, on: Machine = H200, history: Sequence[Run] = (), **asked: Any) -> Any:
    """Plan a clip as the web app does, with an offer for one component."""
    fields = {"prompt": "a red boat", "seed": 1, "width": 832, "height": 480, "frames": 81, "build": "idle", **asked}

    def offers(name: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
        return [offer] if name == component else []

    context = PlanningContext(on, Path("x.mp4"), offers, history)
    return resolve(GenerationRequest.from_mapping(fields), spec(MODEL), context, builds_later=True)


def ran(made: ExecutionPlan, denoise: float, decode: float) -> list[Run]:
    """Return the history after a job of a plan that took so many times as long as its forecast."""
    timings = {"denoise": denoise * made.seconds["denoise"].likely, "decode": decode * made.seconds["decode"].likely}
    return runs_of(made, made, spec(MODEL), H200, timings, {})


@pytest.mark.parametrize(
    ("component", "on", "asked", "is_built"),
    [
        ("vae", H200, {"compile": "never"}, True),
        # The VAE's kernels are faster than an engine of large convolutions can be.
        ("vae", H200, {"compile": "always"}, False),
        ("vae", H200, {"compile": "always", "backends": {"vae": "tensorrt"}}, True),
        ("vae", H200, {"compile": "always", "build": "always"}, True),
        ("transformer", H200, {"compile": "never"}, True),
        # Compiled blocks with FlashAttention 4.
        ("transformer", H200, {"compile": "always"}, False),
        ("text_encoder", H200, {"compile": "always"}, True),
        ("vae", CPU, {}, True),
        ("transformer", CPU, {}, True),
    ],
    ids=lambda value: "" if isinstance(value, Machine) else str(value),
)
def test_only_what_can_be_faster_is_built(component: str, on: Machine, asked: dict[str, Any], is_built: bool) -> None:
    offer = on_cpu(component) if on is CPU else missing(component)
    part = planned(component, offer, on, **asked).components[component]
    assert bool(part.later) is is_built
    codes = {reason.code for reason in part.reasons}
    assert ("planner.built_later" in codes, "planner.not_built_slower" in codes) == (is_built, not is_built)


@pytest.mark.parametrize(
    ("component", "eager", "compiled", "is_built"),
    [
        # Seconds of jobs without and with compiled code, as factors of their forecasts; 0 where there was none.
        ("transformer", 0, 1.0, False),
        ("transformer", 0, 1.5, True),
        ("vae", 0, 1.0, False),
        ("vae", 0, 2.0, True),
        ("vae", 1.0, 1.0, False),
        # PyTorch is faster uncompiled than it was estimated, and engines may be too.
        ("vae", 0.5, 1.0, True),
    ],
)
def test_what_was_measured_counts(component: str, eager: float, compiled: float, is_built: bool) -> None:
    history = []
    for times, mode in ((eager, "never"), (compiled, "always")):
        if times:
            history += ran(planned(component, missing(component), compile=mode), times, times)
    part = planned(component, missing(component), history=history, compile="always").components[component]
    assert bool(part.later) is is_built


@pytest.mark.parametrize(
    ("asked", "changes", "is_built"),
    [
        ({}, {}, True),
        ({}, {"idle_builds": False}, False),
        ({}, {"builds_later": False}, False),
        ({}, {"machine": H200}, False),
        ({"build": "never"}, {}, False),
        ({"backends": {"text_encoder": "pytorch"}}, {}, False),
        ({"build": "idle"}, {"idle_builds": False}, True),
    ],
)
def test_engines_of_small_models_are_built_by_default_on_cpus(
    asked: dict[str, Any], changes: dict[str, Any], is_built: bool, tiny: Callable[[str], ModelSpec]
) -> None:
    changes = {"machine": CPU, "idle_builds": True, "builds_later": True, **changes}
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, "width": 32, "height": 32, **asked})
    context = PlanningContext(
        changes["machine"],
        Path("x.mp4"),
        lambda name, _latent, _device: [on_cpu(name)] if name == "text_encoder" else [],
        idle_builds=changes["idle_builds"],
    )
    made = resolve(request, tiny("wan2.1"), context, builds_later=changes["builds_later"])
    assert bool(made.components["text_encoder"].later) is is_built
    assert not any(part.engines for part in made.components.values())
    # A large model's are not.
    large = resolve(request.replace(width=832, height=480), spec(MODEL), context, builds_later=True)
    assert bool(large.components["text_encoder"].later) is (asked.get("build") == "idle")


def test_a_second_clip_is_forecast_on_the_engines_that_are_built() -> None:
    plain = planned("transformer", missing("transformer"), CPU, build="never")
    made = planned("transformer", on_cpu("transformer"), CPU)
    running, second = made.components["transformer"].seconds, made.second_seconds
    assert made.seconds["total"] == plain.seconds["total"]
    assert not plain.builds and made.builds
    assert "later" not in plain.seconds and made.seconds["later"] == second
    # An engine that was not measured takes between 0.3 and 1 times PyTorch's seconds.
    assert second.low == pytest.approx(plain.second_seconds.low - running.low + 0.3 * running.likely)
    assert second.likely == pytest.approx(plain.second_seconds.likely)


def test_block_engines_are_built() -> None:
    part = planned("transformer", missing("transformer", blocks()), compile="always").components["transformer"]
    assert len(part.later) == 3
