"""Fallback strategies after out-of-memory on several machines."""

from typing import Any

import pytest

from runtime.core.facts import Fact
from runtime.core.plan import EngineRef, ExecutionPlan
from runtime.machine.probe import Machine
from runtime.planner.strategies import FallbackStrategy, next_strategy
from tests.facts import fact
from tests.planner.test_strategies import A14B, SMALL, on, plan
from tests.plans import machine
from tests.published_specs import spec

CPU = machine(ram_free_gib=100)
ALONE, GROUP = fact("strategy.one_at_a_time"), fact("strategy.offload_group")


@pytest.mark.parametrize(
    ("model", "where", "values", "component", "memory", "lossy", "title", "flags", "lossless"),
    [
        # All stays loaded, and does not fit after all: the text encoder goes where it is past, else all but one part.
        (A14B, on(140, 500), {}, "transformer", "VRAM", False, fact("strategy.free_text_encoder"), "", True),
        (A14B, on(140, 500), {}, "vae", "VRAM", False, fact("strategy.free_text_encoder"), "", True),
        (A14B, on(140, 500), {}, "text_encoder", "VRAM", False, ALONE, "", True),
        # One component at a time: parts that wait in RAM take as much while they run, blocks that wait do not.
        (A14B, on(75, 500), {}, "transformer", "VRAM", False, GROUP, "--offload group", True),
        (A14B, on(75, 500), {"offload": "model"}, "transformer", "VRAM", False, GROUP, "--offload group", True),
        (
            A14B,
            on(75, 500),
            {"offload": "group"},
            "transformer",
            "VRAM",
            False,
            fact("strategy.offload_sequential"),
            "--offload sequential",
            True,
        ),
        # RAM holds no weights: only what changes the video a little is left, and has to be allowed.
        (A14B, on(40, 16), {}, "transformer", "VRAM", False, None, "", True),
        (
            A14B,
            on(40, 16),
            {},
            "transformer",
            "VRAM",
            True,
            fact("strategy.quantized", quantization="fp8", how=ALONE),
            "--quantization fp8",
            False,
        ),
        # What does not change it comes first where both are allowed.
        (A14B, on(75, 500), {}, "transformer", "VRAM", True, GROUP, "--offload group", True),
        # Decoding: fewer frames at a time, then tiles of them.
        (A14B, on(75, 500), {}, "vae", "VRAM", False, fact("strategy.frame_by_frame", how=ALONE), "", True),
        (SMALL, on(17, 32), {"frames": 33}, "vae", "VRAM", False, None, "", True),
        (
            SMALL,
            on(17, 32),
            {"frames": 33},
            "vae",
            "VRAM",
            True,
            fact("strategy.tiles", side=512, how=ALONE),
            "",
            False,
        ),
        (
            SMALL,
            on(16, 32),
            {"frames": 33},
            "vae",
            "VRAM",
            True,
            fact("strategy.tiles", side=256, how=ALONE),
            "",
            False,
        ),
        # RAM runs out under weights that wait there: they stay on the GPU where they fit.
        (A14B, on(140, 500), {"offload": "group"}, "transformer", "RAM", False, fact("strategy.keep"), "", True),
        (A14B, on(140, 500), {}, "transformer", "RAM", False, None, "", True),
        (SMALL, CPU, {"frames": 33}, "transformer", "RAM", False, ALONE, "", True),
    ],
)
def test_the_next_strategy(
    model: str,
    where: Machine,
    values: dict[str, Any],
    component: str,
    memory: Any,
    lossy: bool,
    title: Fact | None,
    flags: str,
    lossless: bool,
) -> None:
    before = plan(model, where, **values)
    found = next_strategy(before, spec(model), component, memory, lossy=lossy)
    if title is None:
        assert found is None, found
        return
    assert found is not None
    assert found.forecast.title == title
    assert flags in found.plan.strategy.flags
    assert found.plan.strategy.lossless == lossless
    check_taken(found.plan, before)
    assert found.plan.strategy == found.forecast.strategy
    if component != "text_encoder" and memory == "VRAM":
        then, now = (next(s for s in p.memory if s.component == component) for p in (before, found.plan))
        assert now.peak_bytes < then.peak_bytes


def check_taken(after: ExecutionPlan, before: ExecutionPlan) -> None:
    """Check that a plan takes one way of its ladder, and that it is still the same clip."""
    assert [one.strategy for one in after.strategies].count(after.strategy) == 1
    quantized = {name: part.quantization for name, part in after.components.items()}
    assert quantized["vae"] == quantized["text_encoder"] == "none"
    assert quantized["transformer"] == after.strategy.quantization
    left_out = {"offload", "quantization"}
    one, other = ({k: v for k, v in p.request_json().items() if k not in left_out} for p in (after, before))
    assert one == other


@pytest.mark.parametrize("where", [on(140, 500), on(24, 96), on(40, 16), CPU])
@pytest.mark.parametrize("component", ["text_encoder", "transformer", "transformer_2", "vae"])
def test_fallbacks_end(where: Machine, component: str) -> None:
    found = plan(A14B, where)
    for _ in range(12):
        then = next_strategy(found, spec(A14B), component, "RAM" if where is CPU else "VRAM", lossy=True)
        if then is None:
            return
        found = then.plan
    pytest.fail("there is always one more")


def test_engines_keep_their_weights() -> None:
    before = plan(A14B, on(75, 500))
    part = before.components["transformer"]
    size = (1, 1, 1)
    use = EngineRef(
        id="e", program="transformer", builder="onnx_tensorrt", precision="float16", profile=(size, size, size)
    )

    def then(program: str) -> FallbackStrategy | None:
        engine = part.replace(backend="tensorrt", engines=(use.replace(program=program),))
        after = before.with_component("transformer", engine)
        return next_strategy(after, spec(A14B), "transformer_2", "VRAM", lossy=True)

    assert then("transformer") is None
    # Block engines read PyTorch's weights, wherever they wait meanwhile.
    in_blocks = then("block_qkv")
    assert in_blocks is not None
    assert in_blocks.forecast.strategy.offload in {"model", "group"}
    assert in_blocks.plan.components["transformer"].in_blocks


def test_the_forecast_follows() -> None:
    before = plan(A14B, on(75, 500))
    found = next_strategy(before, spec(A14B), "transformer", "VRAM", lossy=False)
    assert found is not None
    assert found.slowdown > 1.0
    assert found.plan.seconds["decode"].likely == pytest.approx(before.seconds["decode"].likely * found.slowdown)
    assert found.plan.seconds["load"] == before.seconds["load"]
