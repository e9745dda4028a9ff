"""Configurations of a benchmark: names, defaults, comparison of their plans."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runtime.bench.configurations import (
    backend_text,
    check_names,
    clip_difference,
    fallback_text,
    fit_together,
    in_float32,
    named_flags,
    plan_key,
    standard,
    without_builds,
)
from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import MemoryStrategy
from runtime.core.facts import Fact
from runtime.core.plan import EngineRef, ExecutionPlan, LatentSize
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.resolve import PlanningContext, resolve
from tests import published_specs
from tests.plans import GIB, gpu, machine, tiny_plan

SIZE: LatentSize = (1, 4, 8)


def use(name: str, *, build: bool) -> EngineRef:
    """Return an engine of a component."""
    return EngineRef(
        id=name, program=name, builder="onnxruntime", precision="float32", profile=(SIZE, SIZE, SIZE), build=build
    )


def offer(backend: str, *, build: bool, problem: Fact | None = None) -> EngineOffer:
    """Offer an engine that is there, or could be."""
    return EngineOffer(backend=backend, builder=backend, engines=(use("e", build=build),), problem=problem)


def large(free_gib: float = 139) -> ExecutionPlan:
    """Plan Wan2.1-1.3B on a GPU: bfloat16 but for the VAE, as asked."""
    here = machine(gpu=gpu(free_gib=free_gib), torch_cuda="13.0", ram_free_gib=100)
    return resolve(
        GenerationRequest(prompt="x", seed=1, vae_precision="float32"),
        published_specs.spec("wan2.1-1.3b"),
        PlanningContext(here, Path("x.mp4")),
    )


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("onnx: --backend all=onnxruntime", "onnx", "--backend all=onnxruntime"),
        ("auto:", "auto", ""),
        (' 20 steps :--steps 20 --model "a:b"', "20 steps", '--steps 20 --model "a:b"'),
    ],
)
def test_name_and_flags(text: str, name: str, flags: str) -> None:
    assert named_flags(text) == (name, flags)


@pytest.mark.parametrize("text", ["", "--steps 4", ": --steps 4", "   :", "a\x07: --steps 4", "x" * 41 + ":"])
def test_a_missing_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        named_flags(text)
    assert refused.value.code == "bench.configuration_unnamed"


def test_a_repeated_name_is_refused() -> None:
    check_names(["a", "b"])
    with pytest.raises(InvalidRequestError) as refused:
        check_names(["a", "b", "a"])
    assert (refused.value.code, refused.value.data["configuration"]) == ("bench.configuration_repeated", "a")


@pytest.mark.parametrize(
    ("offers", "build", "names"),
    [
        ([], "auto", ["pytorch", "auto"]),
        ([offer("onnxruntime", build=False)], "auto", ["pytorch", "onnxruntime", "auto"]),
        ([offer("inductor", build=True)], "auto", ["pytorch", "inductor", "auto"]),
        ([offer("inductor", build=True)], "never", ["pytorch", "auto"]),
        ([offer("inductor", build=False)], "never", ["pytorch", "inductor", "auto"]),
        ([offer("tensorrt", build=True, problem=Fact("machine.no_gpu"))], "auto", ["pytorch", "auto"]),
    ],
)
def test_default_configurations(
    offers: Sequence[EngineOffer], build: str, names: list[str], tiny: Callable[[str], ModelSpec]
) -> None:
    plan = tiny_plan(tiny("wan2.1"), Path("x.mp4"))
    request = GenerationRequest(prompt="x", build=build)
    found = standard(request, plan, lambda *_: offers)
    assert [one.name for one in found] == names
    assert found[0].request.backends == {"all": "pytorch"}
    assert found[-1].only_if_new and not found[-1].request.backends


def test_a_backend_that_lacks_a_component_is_left_out(tiny: Callable[[str], ModelSpec]) -> None:
    plan = tiny_plan(tiny("wan2.1"), Path("x.mp4"))
    found = standard(
        GenerationRequest(prompt="x"),
        plan,
        lambda name, *_: [offer("inductor", build=True)] if name == "vae" else [],
    )
    assert [one.name for one in found] == ["pytorch", "auto"]


def test_float32_is_the_reference_if_pytorch_uses_less_precision() -> None:
    first, second, *_ = standard(GenerationRequest(prompt="x"), large(), lambda *_: [])
    assert (first.name, first.float32, second.name, second.float32) == ("float32", True, "pytorch", False)
    plan = in_float32(large())
    assert {part.dtype for part in plan.components.values()} == {"float32"}
    assert plan.components["transformer"].weights_bytes == 2 * large().components["transformer"].weights_bytes
    assert plan.components["vae"].weights_bytes == large().components["vae"].weights_bytes
    short = large(free_gib=large().memory_bytes / GIB + 2)
    assert in_float32(short) == short


def test_configurations_fit_together_only_if_all_fit() -> None:
    plan = large()
    plan = plan.replace(
        memory=(plan.memory[0].replace(weights_bytes=10 * GIB, working_bytes=0, overhead_bytes=0),), free_bytes=30 * GIB
    )
    assert fit_together([plan, plan])
    assert not fit_together([plan, plan, plan])
    assert fit_together([])


def test_plan_keys_ignore_fields_that_components_resolve() -> None:
    plan = large()
    assert plan_key(plan) == plan_key(
        plan.replace(request=plan.request.replace(backends={"all": "pytorch"}, build="never"))
    )
    # The VAE's dtype contains the effect of its precision.
    assert plan_key(plan) == plan_key(plan.replace(request=plan.request.replace(vae_precision="auto")))
    assert plan_key(plan) != plan_key(plan.replace(steps=plan.steps + 1))
    assert plan_key(plan) != plan_key(plan.replace(shift=5.0))
    other = plan.components["vae"].replace(dtype="bfloat16")
    assert plan_key(plan) != plan_key(plan.with_component("vae", other))
    assert plan_key(plan) != plan_key(plan.replace(strategy=plan.strategy.replace(offload="group")))


def test_backend_text() -> None:
    plan = large()
    assert backend_text(plan) == "PyTorch, bfloat16 (text_encoder, transformer); PyTorch, float32 (vae)"
    assert backend_text(in_float32(plan)) == "PyTorch, float32"
    fp8 = plan.components["transformer"].replace(quantization="fp8")
    assert "PyTorch, fp8 (transformer)" in backend_text(plan.with_component("transformer", fp8))
    onnx = plan.components["vae"].replace(backend="onnxruntime", engines=(use("vae", build=False),))
    assert "ONNX Runtime, float32 (vae)" in backend_text(plan.with_component("vae", onnx))


def test_a_fallback_to_pytorch_is_reported() -> None:
    plan = large()
    assert fallback_text(plan) is None
    plan = plan.with_component("vae", plan.components["vae"].replace(reasons=(Fact("engine.none_yet"),)))
    text = fallback_text(plan.replace(request=plan.request.replace(backends={"vae": "inductor"})))
    assert text == "VAE decoder: PyTorch instead of Inductor. There is none yet."
    assert fallback_text(plan.replace(request=plan.request.replace(backends={"vae": "pytorch"}))) is None


def test_engines_are_built_once() -> None:
    plan = large()
    plan = plan.replace(request=plan.request.replace(build="always"))
    part = plan.components["vae"].replace(backend="inductor", engines=(use("vae", build=True),))
    again = without_builds(plan.with_component("vae", part))
    assert again.request.build == "missing"
    assert not any(one.build for one in again.components["vae"].engines)
    assert without_builds(plan.replace(request=plan.request.replace(build="never"))).request.build == "never"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"steps": 7, "guidance_scale": 2.0, "strategy": MemoryStrategy(offload="group")}, None),
        ({"frames": 5}, "another size"),
        ({"width": 16}, "another size"),
        ({"seed": 2}, "another seed"),
        ({"prompt": "y"}, "another prompt"),
        ({"negative_prompt": "y"}, "another prompt"),
        ({"model_directory": Path("other")}, "another model"),
    ],
)
def test_clip_difference(change: dict[str, object], why: str | None) -> None:
    plan = large()
    assert clip_difference(plan.replace(**change), plan) == why
