"""The choice of engines for a whole plan: by the seconds of its forecast, and by memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from runtime.core.errors import MemoryShortError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.history import Run, history_tag, runs_of
from tests.planner.test_block_engines import A14B, EXPERTS, FOUR, GPU, H200, blocks, measured, plan, use, whole
from tests.plans import GIB
from tests.published_specs import spec

# Forward passes of a clip, of both experts.
PASSES = 80
# Comparisons below this speedup are within timing noise.
NOISE = 1.03
# Seconds of a pass: in earlier jobs in PyTorch and on the engine, 0 for no job, then as measured when the engine was
# built: on the engine and in compiled PyTorch.
TIMINGS = list(product((0.0, 2.0), (0.0, 1.0, 4.0), (1.0,), (0.9, 1.02, 2.5)))
# For several GPUs, some of which each value is one.
SOME_TIMINGS = TIMINGS[::4]


def jobs(made: ExecutionPlan, seconds: float) -> list[Run]:
    """Return the history of a job of a plan whose passes took so long."""
    return runs_of(made, made, spec(A14B), H200, {"denoise": PASSES * seconds}, {}) if seconds else []


def note(made: ExecutionPlan, component: str = "transformer") -> dict[str, Any]:
    """Return the numbers of the reason for a component's backend."""
    facts = (fact.data.get("how") for fact in made.components[component].reasons)
    found = next(fact for fact in facts if isinstance(fact, Fact))
    return found.data


@cache
def job_plans(kind: Callable[[], EngineOffer], gpus: int) -> list[ExecutionPlan]:
    """Return the plans of jobs in PyTorch and on engines."""
    settings: dict[str, Any] = {"on": FOUR, "gpus": gpus, "compile": "always"}
    return [plan([], backend="pytorch", **settings), plan([kind()], **settings)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gpus", "timings"), [(whole, 1, TIMINGS), (blocks, 1, TIMINGS), (blocks, 2, SOME_TIMINGS)]
)
def test_reasons_and_forecasts_agree(
    kind: Callable[[], EngineOffer],
    gpus: int,
    timings: Sequence[tuple[float, float, float, float]],
    subtests: pytest.Subtests,
) -> None:
    for timing in timings:
        with subtests.test(msg=str(timing)):
            check_agreement(timing, kind, gpus)


def check_agreement(timing: tuple[float, float, float, float], kind: Callable[[], EngineOffer], gpus: int) -> None:
    """Check the choice between PyTorch and an engine, its reason, and the forecasts of both."""
    in_jobs, on_engine, engine, compiled = timing
    offer = measured(kind(), engine, eager=2 * compiled, compiled=compiled)
    in_pytorch, on_engines = job_plans(kind, gpus)
    settings: dict[str, Any] = {
        "on": FOUR,
        "gpus": gpus,
        "compile": "always",
        "history": [*jobs(in_pytorch, in_jobs), *jobs(on_engines, on_engine)],
    }
    made, asked = plan([offer], backend="auto", **settings), plan([offer], **settings)
    numbers, shown = note(made), made.seconds["denoise"].likely
    if made.components["transformer"].engines:
        assert numbers["times"] >= NOISE
        assert shown == pytest.approx(PASSES * numbers["seconds"])
        assert made.seconds == asked.seconds
    else:
        assert numbers["times"] < NOISE
        assert shown == pytest.approx(PASSES * numbers["pytorch"])
        assert made.seconds["total"].likely < NOISE * asked.seconds["total"].likely
    if in_jobs:
        without = plan([offer], **settings | {"backend": "pytorch"})
        assert numbers["pytorch"] == pytest.approx(in_jobs)
        assert without.seconds["denoise"].likely == pytest.approx(PASSES * in_jobs)
        assert made.seconds["total"].likely <= without.seconds["total"].likely
    if on_engine:
        assert numbers["seconds"] == pytest.approx(on_engine)
    elif not in_jobs and kind is whole:
        assert (numbers["seconds"], numbers["pytorch"]) == (engine, compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_jobs", "on_engine", "engine", "compiled", "faster"),
    [
        # No jobs: as measured when the engine was built.
        (0.0, 0.0, 1.0, 2.5, 2.5),
        # Jobs of one kind: the other one follows from the ratio that was measured then.
        (3.0, 0.0, 1.0, 2.5, 2.5),
        (0.5, 0.0, 1.0, 2.5, 2.5),
        (0.0, 4.0, 1.0, 2.5, 2.5),
        (0.0, 4.0, 1.0, 0.9, 0.9),
        # Jobs of both kinds count first.
        (3.0, 2.0, 1.0, 0.9, 1.5),
        (1.5, 2.0, 1.0, 2.5, 0.75),
    ],
)
def test_jobs_count_before_measurements_at_the_build(
    in_jobs: float, on_engine: float, engine: float, compiled: float, faster: float
) -> None:
    offer = measured(whole(), engine, eager=2 * compiled, compiled=compiled)
    history = [
        *jobs(plan([], backend="pytorch", compile="always"), in_jobs),
        *jobs(plan([offer], compile="always"), on_engine),
    ]
    made = plan([offer], backend="auto", compile="always", history=history)
    assert note(made)["times"] == pytest.approx(faster)
    assert made.components["transformer"].backend == ("tensorrt" if faster > 1 else "pytorch")


def test_of_two_engines_the_one_with_the_shorter_forecast_is_used() -> None:
    # Measured on another day, when all was slower.
    first, second = measured(whole(), 1.0, compiled=2.0, eager=4.0), measured(blocks(), 1.4, compiled=5.0, eager=9.0)
    made = plan([first, second], backend="auto")
    assert made.components["transformer"].in_blocks
    assert made.components["transformer"].reasons[0].code == "planner.fastest_measured"
    assert made.seconds["denoise"].likely < plan([first]).seconds["denoise"].likely
    assert made.seconds["denoise"].likely == pytest.approx(PASSES * note(made)["seconds"])


def test_another_builders_jobs_do_not_count() -> None:
    offer = measured(whole(), 1.0, eager=5.0, compiled=2.5)
    other = replace(offer, engines=tuple(one.replace(builder="torch_tensorrt") for one in offer.engines))
    history = jobs(plan([other]), 9.0)
    assert plan([offer], backend="auto", history=history).components["transformer"].backend == "tensorrt"
    assert plan([other], history=history).seconds["denoise"].likely == pytest.approx(PASSES * 9.0)


def test_an_attention_kernel_that_was_not_measured_is_not_compared() -> None:
    offer = measured(whole(), 1.0, eager=5.0, compiled=2.5)
    part = plan([offer], backend="auto", attention="native").components["transformer"]
    assert (part.backend, part.reasons[-1].code) == ("pytorch", "planner.compared_in_other_precision")
    # Baselines of block engines are without attention.
    apart = measured(blocks(), 1.0, eager=5.0, compiled=2.5)
    assert plan([apart], backend="auto", attention="native").components["transformer"].in_blocks


def test_an_engine_that_slows_down_the_rest_of_the_clip_gives_way() -> None:
    """Engines of one expert's blocks exclude paired passes, which the other expert gains from."""
    small: dict[str, Any] = {"width": 192, "height": 112, "frames": 9, "backend": "auto", "offload": "none"}
    offer = measured(blocks(), 0.01, eager=0.05)
    in_pytorch = plan([], **small)
    assert in_pytorch.speed.paired
    requested = small | {"backends": {"transformer": "tensorrt"}}
    unpaired = plan([], others={"transformer": [offer]}, **requested).speed
    assert not unpaired.paired
    history = jobs(in_pytorch, 0.05)
    tag = history_tag(unpaired, "transformer")
    history += [run.replace(seconds=0.2, kind=run.kind.replace(speed=tag)) for run in history]
    made = plan([], others={"transformer": [offer]}, history=history, **small)
    part = made.components["transformer"]
    assert part.reasons[-1] == Fact("planner.engine_slows")
    assert made.seconds["denoise"].likely == pytest.approx(PASSES * 0.05)
    asked = plan([], others={"transformer": [offer]}, history=history, **requested)
    assert asked.seconds["total"].likely > made.seconds["total"].likely
    # Where both experts have engines, both are used.
    both = plan([offer], history=history, **small)
    assert [part.in_blocks for part in both.components.values()] == [False, True, True, False]


def on_gpu(gib: int) -> Any:
    """Return the machine with a GPU of so much memory."""
    return replace(H200, gpus=(replace(GPU, total_bytes=gib * GIB, free_bytes=(gib - 1) * GIB),))


def text(gigabytes: float) -> EngineOffer:
    """Return an engine of the text encoder that saves little."""
    made = EngineOffer(
        backend="tensorrt",
        builder="b",
        engines=(use("text_encoder"),),
        file_bytes=int(gigabytes * 1e9),
        in_blocks=False,
    )
    return measured(made, 0.01, eager=0.02)


def sized(offer: EngineOffer, gigabytes: float, seconds: float = 0.5) -> EngineOffer:
    """Return an engine of a transformer of so many bytes, four times as fast as PyTorch."""
    uses = tuple(one.replace(context_bytes=10_000_000) for one in offer.engines)
    return measured(
        replace(offer, engines=uses, file_bytes=int(gigabytes * 1e9)), seconds, eager=8 * seconds, compiled=4 * seconds
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "experts", "encoder", "engines"),
    [
        # gigabytes of the engines of both experts and of the text encoder; which of the three are used
        (139, (29, 29), 12, "yyy"),
        (48, (29, 29), 12, "yyy"),
        # Both experts give way, since the weights of one in PyTorch need offload too. The text encoder does not.
        (24, (29, 29), 12, "yNN"),
        # Only the text encoder does not fit.
        (48, (29, 29), 60, "Nyy"),
        # One expert does not fit, but its weights in PyTorch do.
        (48, (29, 60), 12, "yyN"),
        (48, (60, 29), 60, "NNy"),
        (24, (60, 60), 60, "NNN"),
    ],
)
def test_engines_give_way_one_at_a_time(gib: int, experts: tuple[float, float], encoder: float, engines: str) -> None:
    offers: dict[str, Sequence[EngineOffer]] = {
        "text_encoder": [text(encoder)],
        **{name: [sized(whole(), size)] for name, size in zip(EXPERTS, experts, strict=True)},
    }
    made = plan([], others=offers, on=on_gpu(gib), backend="auto")
    for name, fate in zip(offers, engines, strict=True):
        part = made.components[name]
        assert bool(part.engines) == (fate == "y"), name
        if fate == "N":
            assert part.reasons[-1] == Fact("planner.engine_memory")
            assert part.badge == Fact("planner.engine_memory")
    # The plan is that of requesting the engines that were kept.
    kept = {name: "tensorrt" if fate == "y" else "pytorch" for name, fate in zip(offers, engines, strict=True)}
    asked = plan([], others=offers, on=on_gpu(gib), backends=kept)
    assert made.strategy == asked.strategy


@pytest.mark.slow
def test_requested_engines_never_give_way() -> None:
    offers: dict[str, Sequence[EngineOffer]] = {
        "text_encoder": [text(12)],
        **{name: [sized(whole(), 29)] for name in EXPERTS},
    }
    for requested in ({"transformer": "tensorrt"}, dict.fromkeys(EXPERTS, "tensorrt")):
        with pytest.raises(MemoryShortError):
            plan([], others=offers, on=on_gpu(24), backends=requested)
    made = plan([], others=offers, on=on_gpu(24), backends={"text_encoder": "tensorrt"})
    assert [part.backend for part in made.components.values()] == ["tensorrt", "pytorch", "pytorch", "pytorch"]
