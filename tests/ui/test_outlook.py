"""What the panel says of a plan: chips, sum, memory, time; from real plans and offers with figures of our own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError, TandemError
from runtime.core.plan import EngineUse, LatentSize
from runtime.core.request import GenerationRequest
from runtime.manager.machine import Machine
from runtime.manager.offers import EngineOffer, Offers, no_offers
from runtime.manager.planner import resolve
from runtime.models.spec import ModelSpec
from runtime.ui import acceleration, clip_time
from runtime.ui.clip_time import Payoff
from runtime.ui.foresight import Foreseen
from runtime.ui.outlook import Outlook, outlook
from tests.engines.made import key
from tests.plans import gpu, machine
from tests.ui.records import record

GPU = machine(gpu=gpu(), torch_cuda="13.0")


def offer(component: str, backend: str = "tensorrt", **values: Any) -> EngineOffer:
    """Return an offer whose engine is there: PyTorch takes 3 s a call, it takes 1 s."""
    size = (1, 1, 1)
    build = values.pop("build", False)
    use = EngineUse(
        id=f"{component}-{backend}",
        program=component,
        builder=backend,
        precision="float16",
        profile=(size, size, size),
        build=build,
    )
    given = {"missing": "there is none yet" if build else "", "seconds": 1.0, "pytorch_seconds": 3.0} | values
    return EngineOffer(backend=backend, builder=backend, uses=(use,), **given)


def offering(*offers: EngineOffer) -> Offers:
    """Offer each where its program is a component's name."""

    def of(component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
        return [one for one in offers if one.uses[0].program == component]

    return of


def foresee(
    spec: ModelSpec, here: Machine = GPU, offers: Offers = no_offers, *, complete: bool = True, **values: Any
) -> Foreseen:
    """Foresee a tiny clip."""
    wanted = {"prompt": "x", "width": 64, "height": 32, "frames": 9, "steps": 10, "guidance_scale": 4.0} | values
    try:
        plan = resolve(GenerationRequest.from_mapping(wanted), spec, here, Path("x.mp4"), offers)
    except TandemError as error:
        return Foreseen(None, error, offers, (), here, complete)
    return Foreseen(plan, None, offers, (), here, complete)


def look(spec: ModelSpec, **values: Any) -> Outlook:
    """Return what the panel says."""
    return outlook(foresee(spec, **values), spec.component_names)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    return tiny("wan2.2-a14b")


@pytest.mark.parametrize(
    ("values", "text", "kind"),
    [
        ({}, "PyTorch: the model is small", "plain"),
        ({"here": machine()}, "PyTorch: no NVIDIA GPU was found", "plain"),
        ({"backends": {"vae": "pytorch"}}, "PyTorch: as chosen", "plain"),
        ({"offers": offering(offer("vae"))}, "TensorRT: engine ready, 3.0 times as fast", "ready"),
        (
            {"offers": offering(offer("vae", build=True)), "backends": {"vae": "tensorrt"}},
            "TensorRT: builds first",
            "build",
        ),
        (
            {"offers": offering(offer("vae", build=True)), "backends": {"vae": "tensorrt"}, "build": "never"},
            "PyTorch: TensorRT has no engine",
            "instead",
        ),
        (
            {"offers": offering(offer("vae", problem="TensorRT is not installed", build=True, remedy="Install it."))}
            | {"backends": {"vae": "tensorrt"}},
            "PyTorch: TensorRT is not installed",
            "instead",
        ),
    ],
)
def test_a_chip_says_what_will_happen(spec: ModelSpec, values: dict[str, Any], text: str, kind: str) -> None:
    seen = look(spec, **values)
    chip = seen.chips["vae"]
    assert (chip.text, chip.kind) == (text, kind)
    plan = foresee(spec, **values).plan
    assert plan is not None
    assert chip.reason == plan.components["vae"].reason


def test_a_build_takes_as_long_as_the_last_of_its_kind(spec: ModelSpec) -> None:
    values: dict[str, Any] = {"offers": offering(offer("vae", build=True)), "backends": {"vae": "tensorrt"}}
    foreseen = foresee(spec, **values)
    plan = foreseen.plan
    assert plan is not None
    wanted = offer("vae", build=True)
    alike = [
        record(key(program="vae", builder="tensorrt"), build_seconds=seconds, built_at=at)
        for seconds, at in ((240.0, 2.0), (90.0, 1.0))
    ]
    other = record(key(program="vae", builder="inductor"), build_seconds=1.0, built_at=3.0)
    assert clip_time.build_estimate(wanted, [*alike, other]) == 240
    assert clip_time.build_estimate(wanted, [other]) is None
    chips = outlook(replace(foreseen, records=[*alike, other]), spec.component_names).chips
    assert chips["vae"].text == "TensorRT: builds first, about 4 min 0 s"


def test_the_sum_tells_shares_builds_and_time(spec: ModelSpec) -> None:
    every = [offer(name) for name in spec.component_names]
    assert look(spec).line == "Auto: PyTorch"
    # The text encoder twice, each expert 5 steps of two calls, the VAE once, a second each.
    assert look(spec, offers=offering(*every)).line == "Auto: TensorRT for 4 of 4 parts, about 23 s"
    half = look(spec, offers=offering(*every), backends={"vae": "pytorch", "text_encoder": "pytorch"})
    assert half.line == "As chosen: TensorRT for 2 of 4 parts, about 29 s"
    mixed = offering(*every[:3], offer("vae", "onnxruntime", build=True))
    wanted = look(spec, offers=mixed, backends={"vae": "onnxruntime"})
    assert wanted.line == "As chosen: TensorRT for 3 and ONNX Runtime for 1 of 4 parts, 1 to build first"
    assert wanted.time == "not measured here yet"


def test_without_guidance_a_step_is_one_call(spec: ModelSpec) -> None:
    every = offering(*(offer(name) for name in spec.component_names))
    seen = look(spec, offers=every, guidance_scale=1.0, guidance_scale_2=1.0)
    assert seen.time == "about 12 s"


def test_memory_is_weights_and_what_is_worked_on(spec: ModelSpec) -> None:
    seen, plan = look(spec).memory, foresee(spec).plan
    assert seen is not None and plan is not None
    assert seen.weights + seen.working == plan.memory_bytes
    assert (seen.where, seen.free) == ("video memory", GPU.gpus[0].free_bytes)
    on_cpu = look(spec, here=machine()).memory
    assert on_cpu is not None
    assert (on_cpu.where, on_cpu.free) == ("memory", machine().ram_free_bytes)


def test_a_form_that_cannot_be_is_said_at_every_chip(spec: ModelSpec) -> None:
    seen = look(spec, width=65)
    assert isinstance(foresee(spec, width=65).error, InvalidRequestError)
    assert set(seen.chips) == set(spec.component_names)
    assert {chip.kind for chip in seen.chips.values()} == {"stopped"}
    assert "multiples of 16" in seen.problem and seen.remedy == "Take 64 or 80."
    assert seen.memory is None
    full = look(spec, here=machine(ram_free_gib=0.1))
    assert isinstance(foresee(spec, here=machine(ram_free_gib=0.1)).error, MachineError)
    assert full.line == "Does not fit"


def test_what_is_not_known_yet_is_not_guessed(spec: ModelSpec) -> None:
    seen = look(spec, complete=False)
    assert not seen.complete
    assert {chip.text for chip in seen.chips.values()} == {"Looking for engines…"}


def test_every_outlook_has_the_same_children(spec: ModelSpec) -> None:
    """gradio patches child by child: only with the same ones nothing jumps and live regions stay."""

    def tags(html: str) -> list[str]:
        return [part.split(">")[0].split(" ")[0] for part in html.split("<")[1:]]

    views = [Outlook(""), look(spec), look(spec, width=65)]
    assert len({tuple(tags(acceleration.sum_html(view))) for view in views}) == 1
    assert len({tuple(tags(acceleration.chip_html("vae", chip))) for chip in look(spec).chips.values()}) == 1


def test_reasons_are_shown_as_text(spec: ModelSpec) -> None:
    hostile = machine(gpu=replace(gpu(), name='<img src=x onerror="hit()">'), torch_cuda="13.0")
    html = "".join(map(str, acceleration.show(look(spec, here=hostile))))
    assert "<img" not in html
    assert "&lt;img" in html


@pytest.mark.parametrize(
    ("build", "saved", "words"),
    [
        (1080.0, 40.0, "18 min 0 s to build, saves 40 s a video: after 27 videos"),
        (8.0, 20.0, "8.0 s to build, saves 20 s a video: after 1 video"),
        (74.0, 0.011, "1 min 14 s to build, saves 11 ms a video: after 6,728 videos"),
        (8.0, 0.0001, "8.0 s to build, saves less than 1 ms a video: after 80,000 videos"),
        (8.0, -1.0, "8.0 s to build, saves no time"),
    ],
)
def test_when_building_pays_off(build: float, saved: float, words: str) -> None:
    assert str(Payoff(build, saved)) == words


def test_tensorrt_is_out_of_question_without_a_gpu() -> None:
    assert acceleration.tensorrt_problem(machine()) == "no NVIDIA GPU was found"
