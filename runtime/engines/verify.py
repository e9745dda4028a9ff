"""Proves an engine against PyTorch: the same seeded inputs through both, and how far the outputs are apart."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.engines.programs import Program, full_float32
from runtime.engines.sessions import Session
from runtime.planner.shapes import LatentSize, ShapeProfile

# Relative. Sums in another order give 1e-6 in float32, and TensorFloat-32, which may not be used, 1e-3. Rounding to
# eleven or eight bits, layer after layer, gives 1e-3 and 1e-2; a wrong engine gives 0.1 and more.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
_TIMED_SECONDS = 1.0
_FEWEST_CALLS = 3
_MOST_CALLS = 20


@dataclass(frozen=True)
class Verification:
    """What comparing found.

    Attributes:
        error: ‖out − ref‖/‖ref‖, the worst of all outputs and sizes; NaN if an output held NaN or Inf.
        tolerance: what it may be.
        passed: whether it is not more.
        seconds_per_call, pytorch_seconds_per_call: medians at the profile's best size.
        detail: in words.
    """

    error: float
    tolerance: float
    passed: bool
    seconds_per_call: float
    pytorch_seconds_per_call: float
    detail: str


def verify(session: Session, program: Program, profile: ShapeProfile, precision: str) -> Verification:
    """Compare an engine with its program at the smallest, the best and the largest size.

    Args:
        session: the engine, opened.
        program: the reference: in float32 where memory allows.
        precision: of the arithmetic in the engine; it sets the tolerance.

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
            # The engine may fit where the float32 reference does not; its best size must.
            if size == profile.opt:
                raise
            skipped.append(_words(size))
            continue
        if not error <= worst:
            worst, where = error, f"{name} at {_words(size)}"
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
    """Return the worst output's error and name; NaN for one that is not finite."""
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
    # Where zeros are expected (the caches of time's first doubling), only zeros will do.
    return float(torch.linalg.vector_norm(output.float() - reference.float())) / (length or 1.0)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median of some calls after a first, in seconds."""
    taken: list[float] = []
    call()
    while len(taken) < _FEWEST_CALLS or (sum(taken) < _TIMED_SECONDS and len(taken) < _MOST_CALLS):
        _wait_for(device)
        started = time.perf_counter()
        call()
        _wait_for(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _detail(error: float, where: str, tolerance: float, skipped: list[str]) -> str:
    if math.isnan(error):
        found = f"{where} holds NaN or Inf, or has another shape"
    else:
        found = f"relative error {error:.1e} ({where or 'everywhere'}), allowed {tolerance:.0e}"
    return f"{found}; not compared for want of memory: {', '.join(skipped)}" if skipped else found


def _words(size: LatentSize) -> str:
    return "×".join(map(str, size))
