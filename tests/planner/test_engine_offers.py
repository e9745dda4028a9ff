"""The choice of a component's backend from offers."""

from dataclasses import replace
from typing import Any

import pytest

from runtime.core.facts import Fact
from runtime.core.plan import EngineRef
from runtime.core.units import about
from runtime.planner.choice.component_choice import Choice, PyTorchAlternative, choose
from runtime.planner.choice.engine_offers import EngineOffer, PyTorchPath, admit
from runtime.planner.constraints import ComponentSettings, Conflict
from tests.facts import fact, states
from tests.plans import GPU_PACKAGES, gpu, machine

HERE = fact("planner.on_cpu", cause=fact("machine.no_gpu"))
NONE_YET, OTHER_SIZES = fact("engine.none_yet"), fact("engine.misfit_sizes")
NEAREST, NO_TENSORRT = (
    fact("engine.nearest_differs", differences=[]),
    fact("machine.gpu_package_missing", package="TensorRT"),
)


def use(*, build: bool = False) -> EngineRef:
    """Return one engine."""
    size = (9, 14, 24)
    return EngineRef(
        id="a" * 16, program="transformer", builder="b", precision="float32", profile=(size, size, size), build=build
    )


def ready(backend: str, speedup: float = 2.0) -> EngineOffer:
    """Return an engine that is there and measured."""
    return EngineOffer(backend=backend, builder=backend, engines=(use(),), seconds=1.0, baselines={"eager": speedup})


def buildable(backend: str) -> EngineOffer:
    """Return one that could be built."""
    return EngineOffer(
        backend=backend, builder=backend, engines=(use(build=True),), missing=NONE_YET, build_seconds=240
    )


def misfit(backend: str) -> EngineOffer:
    """Return one that could be built, where there is one for another size."""
    return replace(buildable(backend), missing=NEAREST, misfit=OTHER_SIZES)


def impossible(backend: str) -> EngineOffer:
    """Return one that cannot be built here."""
    return EngineOffer(
        backend=backend,
        builder=backend,
        engines=(use(build=True),),
        missing=NONE_YET,
        problem=NO_TENSORRT,
    )


def choose_against(offers: list[EngineOffer], path: PyTorchPath, backend: str = "auto") -> Choice:
    """Choose among offers when PyTorch would run `path`."""
    return choose(backend, "auto", offers, HERE, alternative=PyTorchAlternative(path))


def unmeasured(backend: str) -> EngineOffer:
    """Return an engine that is there but was never timed."""
    return EngineOffer(backend=backend, builder=backend, engines=(use(),))


ORT, IND, TRT = "onnxruntime", "inductor", "tensorrt"


def asked(how: str, **data: Any) -> Fact:
    """Return the reason for a backend that was asked for."""
    return fact("planner.asked_engine", how=fact(f"planner.{how}", **data))


FIRST = {"seconds": 240, "cause": NONE_YET}


def test_choices(subtests: pytest.Subtests) -> None:
    likely = fact("planner.likely_fastest", backend=ORT, how=fact("planner.built_first"))
    fastest = fact("planner.fastest_measured", how=fact("planner.speed", precision="float32", times=3.0))
    cases: list[tuple[str, str, list[EngineOffer], str, bool, Fact]] = [
        ("auto", "auto", [], "pytorch", False, HERE),
        ("auto", "auto", [buildable(ORT)], "pytorch", False, HERE),
        ("auto", "auto", [ready(ORT), ready(IND, 3.0)], IND, False, fastest),
        ("auto", "auto", [ready(ORT)], ORT, False, fact("planner.faster_measured", backend=ORT)),
        ("auto", "auto", [ready(ORT, 0.9)], "pytorch", False, fact("planner.none_faster")),
        ("auto", "auto", [ready(ORT, 1.02)], "pytorch", False, fact("planner.none_faster")),
        ("auto", "auto", [unmeasured(ORT)], "pytorch", False, HERE),
        ("auto", "auto", [misfit(ORT)], "pytorch", False, fact("planner.no_engine_fits", cause=NEAREST)),
        ("auto", "never", [ready(ORT)], ORT, False, fact("planner.faster_measured")),
        ("auto", "missing", [ready(ORT), buildable(IND)], ORT, False, fact("planner.faster_measured")),
        ("auto", "missing", [buildable(ORT), buildable(IND)], ORT, True, likely),
        ("auto", "missing", [impossible(ORT), buildable(IND)], IND, True, fact("planner.built_first", **FIRST)),
        ("auto", "missing", [impossible(ORT)], "pytorch", False, HERE),
        ("auto", "always", [ready(ORT)], ORT, True, fact("planner.built_again")),
        ("pytorch", "auto", [ready(ORT)], "pytorch", False, fact("planner.as_asked")),
        (ORT, "auto", [buildable(ORT)], ORT, True, asked("built_first", **FIRST)),
        (ORT, "missing", [buildable(ORT)], ORT, True, asked("built_first")),
        (ORT, "missing", [ready(ORT, 0.5)], ORT, False, asked("speed", times=0.5, seconds=1.0)),
        (ORT, "missing", [unmeasured(ORT)], ORT, False, asked("speed_unknown")),
        (ORT, "always", [ready(ORT)], ORT, True, asked("built_again")),
        (ORT, "never", [ready(ORT)], ORT, False, asked("speed")),
        (ORT, "never", [buildable(ORT)], "pytorch", False, fact("planner.asked_not_built", cause=NONE_YET)),
        (ORT, "missing", [ready(IND)], "pytorch", False, fact("planner.not_supported", backend=ORT)),
        (TRT, "missing", [impossible(TRT)], "pytorch", False, fact("planner.asked_unavailable", cause=NO_TENSORRT)),
        (TRT, "never", [impossible(TRT)], "pytorch", False, fact("planner.asked_unavailable", cause=NO_TENSORRT)),
        (TRT, "missing", [impossible(TRT), ready(TRT)], TRT, False, asked("speed")),
        (TRT, "missing", [impossible(TRT), buildable(TRT)], TRT, True, asked("built_first")),
    ]
    for wanted, build, offers, backend, builds, reason in cases:
        with subtests.test(msg=f"{wanted}, {build}: {reason.code}"):
            choice = choose(wanted, build, offers, HERE)
            assert choice.backend == backend
            assert states(choice.reasons, reason), choice.reasons
            assert any(one.build for one in choice.engines) == builds
            assert bool(choice.engines) == (backend != "pytorch")


_DATA = {"quantization": "bnb-4bit", "backend": TRT, "in_pytorch": ["backend", "vae=pytorch"]}
EXCLUDED = Conflict(Fact("planner.quantized_on_engine", _DATA), "quantization")


def test_badges(subtests: pytest.Subtests) -> None:
    no_bfloat16 = replace(impossible(TRT), problem=fact("planner.bfloat16", gpu="x"))
    builds = fact("planner.badge_builds", seconds=240)
    cases: list[tuple[str, str, list[EngineOffer], Conflict | None, str, Fact]] = [
        ("auto", "auto", [], None, "pytorch", fact("planner.badge_no_engine")),
        ("auto", "auto", [buildable(ORT)], None, "pytorch", fact("planner.badge_no_engine")),
        ("auto", "auto", [misfit(ORT)], None, "pytorch", OTHER_SIZES),
        ("auto", "auto", [impossible(ORT)], None, "pytorch", NO_TENSORRT),
        ("auto", "auto", [unmeasured(ORT)], None, "pytorch", fact("planner.not_compared")),
        ("auto", "auto", [ready(ORT, 0.9)], None, "pytorch", fact("planner.none_faster")),
        ("auto", "auto", [ready(IND)], EXCLUDED, IND, fact("planner.badge_ready")),
        ("auto", "auto", [], EXCLUDED, "pytorch", EXCLUDED.fact),
        ("auto", "missing", [buildable(IND)], EXCLUDED, IND, builds),
        ("auto", "always", [ready(IND)], None, IND, fact("planner.badge_builds_unknown")),
        ("pytorch", "auto", [ready(ORT)], None, "pytorch", fact("planner.as_asked")),
        (TRT, "auto", [ready(TRT)], None, TRT, fact("planner.badge_ready")),
        (TRT, "auto", [buildable(TRT)], None, TRT, builds),
        (TRT, "always", [ready(TRT)], None, TRT, fact("planner.badge_builds_unknown")),
        (TRT, "never", [buildable(TRT)], None, "pytorch", fact("planner.asked_not_built", backend=TRT)),
        (TRT, "never", [misfit(TRT)], None, "pytorch", OTHER_SIZES),
        (TRT, "auto", [impossible(TRT)], None, "pytorch", NO_TENSORRT),
        (TRT, "auto", [no_bfloat16], None, "pytorch", fact("planner.bfloat16", gpu="x")),
        (TRT, "auto", [ready(ORT)], None, "pytorch", fact("planner.not_supported", backend=TRT)),
    ]
    for wanted, build, offers, excluded, backend, badge in cases:
        with subtests.test(msg=f"{wanted}, {build}: {badge.code}"):
            choice = choose(wanted, build, offers, HERE, excluded)
            assert choice.backend == backend
            assert states(choice.badge, badge), choice.badge


def test_other_settings_keep_engines_out_and_the_machine_says_why() -> None:
    on = machine(gpu=gpu(capability=(7, 5)), torch_cuda="13.0", packages=GPU_PACKAGES)
    case = ComponentSettings(component="transformer", backend="pytorch", device="cuda:0", quantization="bnb-4bit")
    admitted, excluded = admit([impossible(ORT), buildable(TRT)], case, on)
    assert admitted == []
    assert excluded is not None
    assert excluded.fact.code == "planner.quantized_on_engine"
    bfloat16 = replace(buildable(IND), engines=(use(build=True).replace(precision="bfloat16"),))
    (barred,), excluded = admit([bfloat16], replace(case, quantization="none"), on)
    assert excluded is None
    assert barred.problem is not None and barred.problem.code == "planner.bfloat16"
    # One that is there was proven here.
    there = replace(ready(IND), engines=(use().replace(precision="bfloat16"),))
    assert admit([there], replace(case, quantization="none"), on) == ([there], None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1, "about 5 s"), (44, "about 40 s"), (61, "about 1 min"), (900, "about 15 min"), (7300, "about 2 h")],
)
def test_guessed_durations_are_round(seconds: float, words: str) -> None:
    assert about(seconds) == words


def test_an_offer_without_engines_is_not_ready() -> None:
    assert not EngineOffer(backend=TRT, builder=TRT, engines=(), problem=Fact("planner.needs_gpu")).ready


def test_an_engine_is_compared_with_the_path_that_would_run() -> None:
    """Slower than compiled PyTorch, faster than eager: the review's case of an engine that was chosen though slower."""
    offer = replace(ready(TRT), baselines={"eager": 1.5, "compiled": 0.8})
    eager = choose_against([offer], PyTorchPath())
    assert eager.backend == TRT
    assert eager.reasons[0].data["how"].data["pytorch"] == 1.5
    compiled = choose_against([offer], PyTorchPath(compiled=True))
    assert (compiled.backend, compiled.badge.code) == ("pytorch", "planner.none_faster")
    how = compiled.reasons[-1].data["how"]
    assert (how.data["seconds"], how.data["pytorch"]) == (1.0, 0.8)
    assert how.data["path"].code == "planner.path_compiled"


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        # No baseline of this path: jobs in PyTorch on this machine count, or nothing is chosen.
        (PyTorchPath(compiled=True), "pytorch"),
        (PyTorchPath(compiled=True, seconds=2.0), TRT),
        (PyTorchPath(compiled=True, seconds=1.02), "pytorch"),
        # The baseline is of another dtype.
        (PyTorchPath(as_measured=False), "pytorch"),
        (PyTorchPath(as_measured=False, seconds=1.5), TRT),
        # Several GPUs share PyTorch's work.
        (PyTorchPath(faster=1.9), TRT),
        (PyTorchPath(faster=1.98), "pytorch"),
    ],
)
def test_choices_without_a_matching_baseline(path: PyTorchPath, backend: str) -> None:
    chosen = choose_against([ready(TRT)], path)
    assert chosen.backend == backend
    compared = ready(TRT).compared(path)
    if not compared.pytorch:
        code = "planner.not_compared" if path.as_measured else "planner.compared_in_other_precision"
        assert chosen.badge == chosen.reasons[-1]
        assert chosen.badge.code == code


@pytest.mark.parametrize("precision", ["float16", "fp8"])
@pytest.mark.parametrize("quantization", ["none", "fp8", "bnb-8bit"])
def test_fp8_engines_are_compared_with_pytorch_in_fp8_and_others_with_unquantized_weights(
    precision: str, quantization: str
) -> None:
    offer = ready(TRT)
    offer = replace(offer, in_blocks=True, engines=tuple(use.replace(precision=precision) for use in offer.engines))
    compared = offer.compared(PyTorchPath(quantization=quantization))
    assert bool(compared.pytorch) == ((precision, quantization) in {("float16", "none"), ("fp8", "fp8")})


def test_attention_between_block_engines_counts_on_both_sides() -> None:
    offer = replace(ready(TRT, 1.1), in_blocks=True)
    assert offer.compared(PyTorchPath(attention_seconds=4.0)).speedup == pytest.approx(5.1 / 5.0)
    assert choose_against([offer], PyTorchPath()).backend == TRT
    # 10 % of a fifth of a pass is less than timing noise.
    assert choose_against([offer], PyTorchPath(attention_seconds=4.0)).backend == "pytorch"


def test_several_gpus_share_block_engines_too() -> None:
    offer = replace(ready(TRT, 3.0), in_blocks=True)
    # An earlier job on two GPUs took 1.2 s a pass; on one GPU the engines take 2 s with attention.
    path = PyTorchPath(attention_seconds=1.0, faster=2.0, as_measured=False, seconds=1.2)
    compared = offer.compared(path)
    assert (compared.engine, compared.pytorch, compared.attention) == (1.0, 1.2, 0.5)
    chosen = choose_against([offer], path)
    assert chosen.backend == TRT
    assert states(chosen.reasons[0], fact("planner.speed_in_blocks", pytorch=1.2, attention=0.5))
    # With the baseline, both sides are shared alike.
    assert offer.compared(replace(path, as_measured=True)).speedup == pytest.approx(4.0 / 2.0)


def test_an_engine_that_could_not_be_compared_is_named_before_settings() -> None:
    chosen = choose("auto", "auto", [ready(TRT)], HERE, EXCLUDED, PyTorchAlternative(PyTorchPath(as_measured=False)))
    assert chosen.reasons[-1].code == "planner.compared_in_other_precision"
    assert chosen.badge == chosen.reasons[-1]


def test_the_fastest_ready_engine_of_a_requested_backend_runs() -> None:
    slow, fast = ready(TRT), replace(ready(TRT), seconds=0.5, in_blocks=True)
    for offers in ([slow, fast], [fast, slow]):
        assert choose(TRT, "auto", offers, HERE).offer is fast
    assert choose_against([slow, fast], PyTorchPath(attention_seconds=1.0), TRT).offer is slow
    # Those that were not measured come last.
    assert choose(TRT, "auto", [unmeasured(TRT), fast], HERE).offer is fast


def test_an_old_record_without_baselines_is_not_chosen() -> None:
    old = replace(ready(TRT), baselines={})
    chosen = choose("auto", "auto", [old], HERE)
    assert chosen.backend == "pytorch"
    assert chosen.reasons[-1].code == "planner.not_compared"
    assert choose("auto", "missing", [old], HERE).backend == "pytorch"
