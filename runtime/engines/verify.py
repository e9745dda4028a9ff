"""Verifies an engine: runs it and PyTorch in float32 on the same inputs, and measures differences and speeds.

A transformer is run along a trajectory from noise to a clip, as sampling runs it: at each of `TIMESTEPS`, with the
latents that follow from the reference's own velocities, and with a prompt that the model's text encoder has encoded.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.core.units import shape_text
from runtime.engines.component_programs import Program
from runtime.engines.reference import ExactConvolutions, full_float32
from runtime.engines.sessions import Session
from runtime.machine.load import LoadMeter
from runtime.models.spec import FRAME_PROGRAMS
from runtime.planner.choice.engine_index import ShapeProfile

# From noise to the last details: sampling gives a transformer all of these, and an error may depend on them.
TIMESTEPS = (999.0, 900.0, 800.0, 500.0, 50.0)
TRAINING_STEPS = 1000.0
# Relative errors of whole outputs. In float32 another order of summation gives 1e-6, and TF32, which must not be used,
# 1e-3. Rounding to 11 or 8 bits in every layer gives 1e-3 or 1e-2, in the shipped model up to 4e-3 or 4e-2; an
# incorrect engine gives 0.1 and more. FP8, which rounds activations and weights to 4 bits, gives 5e-2 in four blocks.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, "fp8": 8e-2}
# The largest error of one value, relative to the output's largest value: finds what is wrong in a few tokens or pixels.
# PyTorch's own rounding gives 5e-3 in float16 and 6e-2 in bfloat16. In a VAE it gives 2e-2 and 2e-1, because it
# normalizes pixels, and some are almost zero.
LARGEST_TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "fp8": 1.5e-1}
_LARGEST_IN_VAES = 4
# The frames of a frame decoder are the result: no later step corrects them. In any precision.
_OF_FRAME_DECODERS = 1e-2
# The error of what a part of a block adds to its input may be so many times as large, relative to what it adds.
_OF_CHANGES = 4
# Not counted in it: the sum itself rounded to the precision, as TensorRT 8.6 does, relative to the sum.
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "fp8": 2.0**-8}
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
# Calls are timed for so long; if they are long, for that.
_TIMED_SECONDS, _LONG_SECONDS = 1.0, 30.0
_FEWEST_CALLS = 3
_MOST_CALLS = 20
# Of such calls, while other programs use the processor.
_MOST_ROUNDS = 3


class Case(NamedTuple):
    """The inputs of one call, and what the reference computes from them.

    Attributes:
        where: the size and the timestep, as in "3×6×8, t = 500".
        required: whether it must be compared; otherwise it is skipped if memory runs out.
        inputs: by name.
        expected: outputs by name; `None` if there was no memory to compute them.
    """

    where: str
    required: bool
    inputs: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor] | None

    def on_cpu(self) -> "Case":
        """Return the case with all tensors on the CPU."""
        inputs = {name: tensor.cpu() for name, tensor in self.inputs.items()}
        expected = None if self.expected is None else {name: output.cpu() for name, output in self.expected.items()}
        return self._replace(inputs=inputs, expected=expected)


@dataclass(frozen=True)
class Verification:
    """The result of a comparison.

    Attributes:
        error: ‖out − ref‖/‖ref‖, the largest of all outputs and cases; NaN if an output has NaN or Inf.
        tolerance: the largest error allowed.
        largest_error: max|out − ref|/max|ref|, the largest of all outputs and cases; 0 if an output has NaN or Inf.
        passed: whether both errors are within their tolerances.
        detail: the result for people.
        seconds_per_call, pytorch_seconds_per_call: medians at the profile's optimal size; 0 if not measured.
    """

    error: float
    tolerance: float
    largest_error: float
    passed: bool
    detail: Fact
    seconds_per_call: float = 0.0
    pytorch_seconds_per_call: float = 0.0


def verify(
    session: Session, program: Program, profile: ShapeProfile, precision: str, text: torch.Tensor | None = None
) -> Verification:
    """Compare an engine with its program at the minimum, optimal and maximum size, and measure both at the optimal.

    Args:
        session: the open engine.
        program: the reference, in float32.
        precision: of the engine's arithmetic; it sets the tolerance.
        text: see `cases_of`.

    Raises:
        EngineError: if the engine does not run at one of the sizes.
    """
    verification = compare(session, cases_of(program, profile, text), program.name, precision)
    if not verification.passed:
        return verification
    inputs = program.inputs(profile.opt)
    return replace(
        verification,
        seconds_per_call=seconds_of(lambda: session.infer(**inputs), program.device),
        pytorch_seconds_per_call=seconds_of(lambda: program.run(**inputs), program.device),
    )


def cases_of(program: Program, profile: ShapeProfile, text: torch.Tensor | None = None) -> Iterator[Case]:
    """Yield what an engine is verified with: a trajectory at the optimal size, and noise at the smallest and largest.

    Args:
        program: the reference, in float32.
        text: an encoded prompt for a transformer; random embeddings by default.

    Raises:
        MemoryError, torch.OutOfMemoryError: if memory runs out at the optimal size.
    """
    for size in sorted({profile.min, profile.opt, profile.max}):
        if size == profile.opt and program.name == "transformer":
            yield from _trajectory(program, size, text)
            continue
        try:
            inputs = program.inputs(size)
            with full_float32(program.device), ExactConvolutions():
                expected = program.run(**inputs)
        except _OUT_OF_MEMORY:
            # The float32 reference may need more memory than the engine.
            if size == profile.opt:
                raise
            yield Case(shape_text(size), required=False, inputs={}, expected=None)
        else:
            yield Case(shape_text(size), size == profile.opt, inputs, expected)


def _trajectory(program: Program, size: LatentSize, text: torch.Tensor | None) -> Iterator[Case]:
    """Yield a case for each of `TIMESTEPS`: from noise, by Euler steps along the reference's velocities."""
    inputs = program.inputs(size)
    if text is not None:
        # The tokens of images, if the model attends to some, come before those of the text.
        inputs["text_embeds"][:, -text.shape[1] :] = text
    for index, (now, after) in enumerate(pairwise((*TIMESTEPS, 0.0))):
        timestep = torch.full_like(inputs["timestep"], now)
        if index % 2:
            # A video from an image, if the model makes both: its first frame has no noise.
            timestep[:-1] = 0
        inputs = inputs | {"timestep": timestep}
        with full_float32(program.device):
            expected = program.run(**inputs)
        yield Case(f"{shape_text(size)}, t = {now:g}", required=True, inputs=inputs, expected=expected)
        latents, condition = inputs["latents"].tensor_split([expected["velocity"].shape[1]], dim=1)
        moved = latents + (after - now) / TRAINING_STEPS * expected["velocity"]
        inputs = inputs | {"latents": torch.cat([moved, condition], dim=1)}


def compare(session: Session, cases: Iterable[Case], program: str, precision: str) -> Verification:
    """Run an engine on cases and compare its outputs with those expected.

    Args:
        program: the name of the engine's program; with the precision of its arithmetic, it sets the tolerances.

    Raises:
        EngineError: if the engine does not take a case.
        MemoryError, torch.OutOfMemoryError: if memory runs out in a required case.
    """
    comparison = Comparison(program, precision)
    for case in cases:
        if case.expected is None:
            comparison.skip(case.where)
            continue
        try:
            outputs = session.infer(**case.inputs)
            for name, reference in case.expected.items():
                comparison.add(outputs[name].to(reference.device), reference, f"{name} at {case.where}")
        except _OUT_OF_MEMORY:
            if case.required:
                raise
            comparison.skip(case.where)
        if comparison.hopeless:
            break
    return comparison.result()


def tolerance_of(program: str, precision: str) -> float:
    """Return the largest relative error of a program's outputs."""
    tolerance = TOLERANCES[precision]
    return min(tolerance, _OF_FRAME_DECODERS) if program in FRAME_PROGRAMS else tolerance


class Comparison:
    """Collects the errors of an engine's outputs.

    Args:
        program: the name of the engine's program; with the precision of its arithmetic, it sets the tolerances.
    """

    def __init__(self, program: str, precision: str) -> None:
        self._tolerance = tolerance_of(program, precision)
        self._rounding = _ROUNDING[precision]
        normalizes_pixels = program.startswith("vae") or program in FRAME_PROGRAMS
        self._largest_tolerance = LARGEST_TOLERANCES[precision] * (_LARGEST_IN_VAES if normalizes_pixels else 1)
        self._worst, self._largest, self._change = _Worst(), _Worst(), _Worst()
        self._skipped: list[str] = []

    def add(self, output: torch.Tensor, reference: torch.Tensor, where: str) -> None:
        """Add an output; both tensors are on one device."""
        relative, largest = errors(output, reference)
        self._worst, self._largest = self._worst.or_(relative, where), self._largest.or_(largest, where)

    def add_change(self, output: torch.Tensor, reference: torch.Tensor, before: torch.Tensor, where: str) -> None:
        """Add an output that is one of the inputs, `before`, and what a part of a block adds to it."""
        error, _ = errors(output - before, reference - before)
        length = float(torch.linalg.vector_norm(reference - before))
        rounded = self._rounding * float(torch.linalg.vector_norm(reference)) / (length or 1.0)
        self._change = self._change.or_(error if math.isnan(error) else max(error - rounded, 0.0), where)

    def skip(self, where: str) -> None:
        """Add a case that could not be compared for lack of memory."""
        self._skipped.append(where)

    @property
    def hopeless(self) -> bool:
        """Whether nothing can change the result any more: an output was not finite."""
        return math.isnan(self._worst.error)

    def result(self) -> Verification:
        """Return the largest errors."""
        worst, largest, change = self._worst, self._largest, self._change
        detail, passed = (
            _detail(worst, self._tolerance, largest, self._largest_tolerance),
            worst.error <= self._tolerance,
        )
        if change.error > _OF_CHANGES * self._tolerance:
            data = {"error": change.error, "where": change.where, "tolerance": _OF_CHANGES * self._tolerance}
            detail, passed = Fact("engine.compared_change", {"compared": detail, **data}), False
        if self._skipped:
            detail = Fact("engine.compared_partly", {"compared": detail, "skipped": list(self._skipped)})
        return Verification(
            error=worst.error,
            tolerance=self._tolerance,
            largest_error=0.0 if self.hopeless else largest.error,
            passed=passed and largest.error <= self._largest_tolerance,
            detail=detail,
        )


class _Worst(NamedTuple):
    """The largest error so far, and where it is; NaN is larger than any number."""

    error: float = 0.0
    where: str = ""

    def or_(self, error: float, where: str) -> "_Worst":
        return self if math.isnan(self.error) or error <= self.error else _Worst(error, where)


def errors(output: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return ‖out − ref‖/‖ref‖ and max|out − ref|/max|ref|; both NaN if the output is not finite or not as large."""
    if output.shape != reference.shape or not torch.isfinite(output).all().item():
        return math.nan, math.nan
    reference = reference.float()
    difference = output.float() - reference
    # Where zeros are expected (the caches of the first temporal upsampling), the output must be zero too.
    length, highest = float(torch.linalg.vector_norm(reference)), float(reference.abs().max())
    relative = float(torch.linalg.vector_norm(difference)) / (length or 1.0)
    return relative, float(difference.abs().max()) / (highest or 1.0)


def seconds_of(call: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """Return the median duration of several calls after a warm-up call, in seconds; on a GPU, of its own work.

    On the CPU, calls are repeated if other programs used the processor meanwhile.

    Args:
        before: called before each call, and not timed.
    """

    def measure() -> Round:
        durations: list[float] = []
        load = LoadMeter()
        while _more(durations):
            before()
            durations.append(_on_gpu(call, device) if device.type == "cuda" else _on_cpu(call))
        return Round(statistics.median(durations), sum(durations), device.type != "cuda" and load.loaded)

    before()
    call()
    return undisturbed(measure)


class Round(NamedTuple):
    """The median and the sum of the durations of several calls, and whether other programs disturbed them."""

    median: float
    spent: float
    loaded: bool


def undisturbed(measure: Callable[[], Round]) -> float:
    """Return the median of a round of calls that nothing disturbed, or the smallest of several that were."""
    rounds: list[Round] = []
    while len(rounds) < _MOST_ROUNDS and sum(each.spent for each in rounds) < _LONG_SECONDS:
        rounds.append(measure())
        if not rounds[-1].loaded:
            return rounds[-1].median
    return min(each.median for each in rounds)


def _more(durations: Sequence[float]) -> bool:
    """Whether another call is worth its time."""
    spent, calls = sum(durations), len(durations)
    if calls < _FEWEST_CALLS:
        return not calls or spent < _LONG_SECONDS
    return spent < _TIMED_SECONDS and calls < _MOST_CALLS


def _on_cpu(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _on_gpu(call: Callable[[], object], device: torch.device) -> float:
    make: Callable[..., Any] = torch.cuda.Event
    with torch.cuda.device(device):
        start, end = make(enable_timing=True), make(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _detail(worst: _Worst, tolerance: float, largest: _Worst, largest_tolerance: float) -> Fact:
    if math.isnan(worst.error):
        fact = Fact("engine.compared_not_finite", {"where": worst.where})
    elif worst.where:
        fact = Fact("engine.compared", {"error": worst.error, "where": worst.where, "tolerance": tolerance})
    else:
        fact = Fact("engine.compared_equal")
    if largest.error > largest_tolerance:
        data = {"largest": largest.error, "where": largest.where, "tolerance": largest_tolerance}
        return Fact("engine.compared_largest", {"compared": fact, **data})
    return fact
