"""Which engine a component is given, case by case."""

import pytest

from runtime.core.plan import EngineUse
from runtime.manager.offers import EngineOffer, choose

HERE = "PyTorch in float32 on the CPU."


def use(*, build: bool = False) -> EngineUse:
    """Return one engine."""
    size = (9, 14, 24)
    return EngineUse(
        id="a" * 16, program="transformer", builder="b", precision="float32", profile=(size, size, size), build=build
    )


def ready(backend: str, speed_up: float = 2.0) -> EngineOffer:
    """Return an engine that is there and measured."""
    return EngineOffer(backend=backend, builder=backend, uses=(use(),), seconds=1.0, pytorch_seconds=speed_up)


def buildable(backend: str) -> EngineOffer:
    """Return one that could be built."""
    return EngineOffer(backend=backend, builder=backend, uses=(use(build=True),), missing="there is none yet")


def impossible(backend: str) -> EngineOffer:
    """Return one that cannot be built here."""
    return EngineOffer(
        backend=backend,
        builder=backend,
        uses=(use(build=True),),
        missing="there is none yet",
        problem="it is not installed",
        remedy="Install it.",
    )


def unmeasured(backend: str) -> EngineOffer:
    """Return an engine that is there but was never timed."""
    return EngineOffer(backend=backend, builder=backend, uses=(use(),))


ORT, IND, TRT = "onnxruntime", "inductor", "tensorrt"


@pytest.mark.parametrize(
    ("asked", "build", "offers", "backend", "builds", "says"),
    [
        ("auto", "auto", [], "pytorch", False, HERE),
        ("auto", "auto", [buildable(ORT)], "pytorch", False, HERE),
        ("auto", "auto", [ready(ORT), ready(IND, 3.0)], IND, False, "the fastest measured here: float32, 3.0 times"),
        ("auto", "auto", [ready(ORT)], ORT, False, "ONNX Runtime is faster here"),
        ("auto", "auto", [ready(ORT, 0.9)], "pytorch", False, "No engine measured here is faster."),
        ("auto", "auto", [ready(ORT, 1.02)], "pytorch", False, "No engine measured here is faster."),
        ("auto", "auto", [unmeasured(ORT)], "pytorch", False, HERE),
        ("auto", "never", [ready(ORT)], ORT, False, "faster here"),
        ("auto", "missing", [ready(ORT), buildable(IND)], ORT, False, "faster here"),
        ("auto", "missing", [buildable(ORT), buildable(IND)], ORT, True, "most likely the fastest here: built first"),
        ("auto", "missing", [impossible(ORT), buildable(IND)], IND, True, "built first (there is none yet)"),
        ("auto", "missing", [impossible(ORT)], "pytorch", False, HERE),
        ("auto", "always", [ready(ORT)], ORT, True, "built anew"),
        ("pytorch", "auto", [ready(ORT)], "pytorch", False, "It was asked for."),
        (ORT, "auto", [buildable(ORT)], ORT, True, "ONNX Runtime, as asked: built first (there is none yet)."),
        (ORT, "missing", [buildable(ORT)], ORT, True, "built first"),
        (ORT, "missing", [ready(ORT, 0.5)], ORT, False, "0.5 times as fast as PyTorch"),
        (ORT, "missing", [unmeasured(ORT)], ORT, False, "not measured"),
        (ORT, "always", [ready(ORT)], ORT, True, "built anew, as asked"),
        (ORT, "never", [ready(ORT)], ORT, False, "as asked"),
        (ORT, "never", [buildable(ORT)], "pytorch", False, "has no engine (there is none yet)"),
        (ORT, "missing", [ready(IND)], "pytorch", False, "does not run this component"),
        (TRT, "missing", [impossible(TRT)], "pytorch", False, "TensorRT was asked for, but it is not installed. Ins"),
        (TRT, "never", [impossible(TRT)], "pytorch", False, "it is not installed"),
        (TRT, "missing", [impossible(TRT), ready(TRT)], TRT, False, "as asked"),
        (TRT, "missing", [impossible(TRT), buildable(TRT)], TRT, True, "built first"),
    ],
)
def test_choices(asked: str, build: str, offers: list[EngineOffer], backend: str, builds: bool, says: str) -> None:
    choice = choose(asked, build, offers, HERE)
    assert choice.backend == backend
    assert says in choice.reason
    assert any(one.build for one in choice.uses) == builds
    assert bool(choice.uses) == (backend != "pytorch")


def test_an_offer_without_engines_is_not_ready() -> None:
    assert not EngineOffer(backend=TRT, builder=TRT, uses=(), problem="it needs an NVIDIA GPU").ready
