"""Verifies an engine: runs it and PyTorch on the same seeded inputs, and measures the difference and both speeds."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.engines.programs import Program, full_float32
from runtime.engines.sessions import Session
from runtime.planner.engine_index import ShapeProfile

# Relative errors. In float32 another order of summation gives 1e-6, and TF32, which must not be used, 1e-3. Rounding
# to 11 or 8 bits in every layer gives 1e-3 or 1e-2; an incorrect engine gives 0.1 and more.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
_TIMED_SECONDS = 1.0
_FEWEST_CALLS = 3
_MOST_CALLS = 20


@dataclass(frozen=True)
class Verification:
    """The result of a comparison.

    Attributes:
        error: ‖out − ref‖/‖ref‖, the largest of all outputs and sizes; NaN if an output has NaN or Inf.
        tolerance: the largest error allowed.
        passed: whether the error is within the tolerance.
        seconds_per_call, pytorch_seconds_per_call: medians at the profile's optimal size.
        detail: the result for people.
    """

    error: float
    tolerance: float
    passed: bool
    seconds_per_call: float
    pytorch_seconds_per_call: float
    detail: Fact


def verify(session: Session, program: Program, profile: ShapeProfile, precision: str) -> Verification:
    """Compare an engine with its program at the minimum, optimal and maximum size.

    Args:
        session: the open engine.
        program: the reference, in float32 if memory allows.
        precision: of the engine's arithmetic; it sets the tolerance.

    Raises:
        EngineError: if the engine does not run at one of the sizes.
    """
    worst, where = 0.0, ""
    sizes = sorted({profile.min, profile.opt, profile.max})
    skipped = []
    for size in sizes:
        try:
            error, name = _compare(session, program, size)
        except (torch.OutOfMemoryError, MemoryError):
            # The float32 reference may need more memory than the engine; the optimal size must be compared.
            if size == profile.opt:
                raise
            skipped.append(_size_text(size))
            continue
        if not error <= worst:
            worst, where = error, f"{name} at {_size_text(size)}"
        if math.isnan(error):
            break
    tolerance = TOLERANCES[precision]
    passed = worst <= tolerance
    inputs = program.inputs(profile.opt)
    return Verification(
        error=worst,
        tolerance=tolerance,
        passed=passed,
        seconds_per_call=_seconds(lambda: session.infer(**inputs), program.device) if passed else 0.0,
        pytorch_seconds_per_call=_seconds(lambda: program.run(**inputs), program.device) if passed else 0.0,
        detail=_detail(worst, where, tolerance, skipped),
    )


def _compare(session: Session, program: Program, size: LatentSize) -> tuple[float, str]:
    """Return the largest error of all outputs and the output's name; NaN if an output is not finite."""
    inputs = program.inputs(size)
    with full_float32(program.device):
        expected = program.run(**inputs)
    given = session.infer(**inputs)
    worst, where = -1.0, ""
    for name, reference in expected.items():
        error = _relative_error(given[name].to(reference.device), reference)
        if not error <= worst:
            worst, where = error, name
        if math.isnan(error):
            break
    return worst, where


def _relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    if output.shape != reference.shape or not torch.isfinite(output).all().item():
        return math.nan
    length = float(torch.linalg.vector_norm(reference.float()))
    # Where zeros are expected (the caches of the first temporal upsampling), the output must be zero too.
    return float(torch.linalg.vector_norm(output.float() - reference.float())) / (length or 1.0)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of several calls after a warm-up call, in seconds."""
    durations: list[float] = []
    call()
    while len(durations) < _FEWEST_CALLS or (sum(durations) < _TIMED_SECONDS and len(durations) < _MOST_CALLS):
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _detail(error: float, where: str, tolerance: float, skipped: list[str]) -> Fact:
    if math.isnan(error):
        found = Fact("engine.compared_not_finite", {"where": where})
    elif where:
        found = Fact("engine.compared", {"error": error, "where": where, "tolerance": tolerance})
    else:
        found = Fact("engine.compared_equal")
    return Fact("engine.compared_partly", {"compared": found, "skipped": skipped}) if skipped else found


def _size_text(size: LatentSize) -> str:
    return "×".join(map(str, size))
