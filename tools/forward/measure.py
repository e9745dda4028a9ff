"""Measure one forward pass of each component in several configurations: seconds, memory, error against float32.

Each is compared with diffusers' own module, uncompiled, and with a lower bound: operations divided by a rate.
Components are loaded by plan and `Residency`, as in a job; with random weights no file is read, so that every
architecture can be measured on any machine with enough memory.
"""

import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runtime.bench.benchmark import SCHEMA
from runtime.bench.configurations import Configuration
from runtime.bench.recorder import allocated
from runtime.bench.render import number, spread_text
from runtime.bench.result_files import describe_environment
from runtime.bench.statistics import Spread, spread
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import TandemError, first_line
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.request import AUTO
from runtime.core.units import memory_size
from runtime.engines.service import EngineService
from runtime.execution.memory import release_cached_memory
from runtime.execution.residency import Loader, Residency
from runtime.machine.probe import Machine
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec, is_transformer
from runtime.models.weights import load_module
from runtime.planner.resolve import PlanningContext, resolve
from tools.forward.calls import (
    StandaloneJob,
    as_frames,
    component_call,
    diffusers_call,
    exact_frames,
    exact_velocity,
    in_floats,
    module_timestep,
    relative_error,
    sample_inputs,
    seconds_of,
)
from tools.forward.random_weights import random_module, random_spec

HEADINGS = (
    "Pass",
    "Runs on",
    "Seconds",
    "First pass",
    "Bound",
    "Times the bound",
    "Error",
    "Weights",
    "Working memory",
)
PARTS = ("transformer", "transformer_2", "vae")
BASELINE = "diffusers"
_TERA = 1e12
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForwardSetup:
    """What is measured, and how often.

    Attributes:
        parts: of `PARTS`; those that a model does not have are skipped.
        random: whether weights are random instead of read.
        tera_operations: of the device per second, in 16 bits, for the lower bound; `None` for no bound.
        exact: whether errors against float32 are measured.
        baseline: whether diffusers' own module is measured too.
    """

    machine: Machine
    engines: EngineService | None
    weights_dir: Path
    parts: Sequence[str] = ("transformer", "vae")
    random: bool = False
    runs: int = 3
    warmup: int = 1
    tera_operations: float | None = None
    exact: bool = True
    baseline: bool = True


@dataclass
class Pass:
    """One component in one configuration.

    Attributes:
        name: of the configuration and the component.
        runs_on: backend and precision.
        seconds: of one pass; for the VAE, of the clip.
        first_seconds: of the first pass, which may compile.
        weights_bytes: on the GPU between passes.
        working_bytes: on the GPU during a pass, in addition.
        error: ‖out − ref‖/‖ref‖ against float32.
        operations: of one pass.
        why: the reason for a failure, as a sentence.
    """

    name: str
    configuration: str
    part: str
    flags: str
    runs_on: str
    request: dict[str, Any]
    operations: float
    seconds: Spread | None = None
    first_seconds: float | None = None
    weights_bytes: int | None = None
    working_bytes: int | None = None
    error: float | None = None
    why: str = ""

    def to_json(self, tera_operations: float | None) -> dict[str, Any]:
        """Return the fields as JSON types, the seconds as the stage "pass"."""
        floor = None if tera_operations is None else self.operations / (tera_operations * _TERA)
        values = {name: value for name, value in vars(self).items() if name != "seconds"}
        stages = {} if self.seconds is None else {"pass": self.seconds.to_json()}
        state = "measured" if stages and not self.why else "failed"
        return values | {"stages": stages, "state": state, "floor_seconds": floor}


@dataclass(frozen=True)
class _Case:
    configuration: Configuration
    spec: ModelSpec
    plan: ExecutionPlan


@dataclass
class Forward:
    """A measurement: `measure` runs it, and `to_json` returns its results at any time."""

    setup: ForwardSetup
    configurations: Sequence[Configuration]
    report: Callable[[str], None]
    save: Callable[["Forward"], None] = lambda _: None
    passes: list[Pass] = field(default_factory=list)
    cancelled: bool = False
    _about: dict[str, Any] = field(default_factory=dict)

    def measure(self, cancel: Cancel) -> None:
        """Measure all configurations; stop early, with the results so far, when `cancel` is requested.

        Raises:
            TandemError: if a configuration cannot be planned.
            ValueError: if it cannot be planned with random weights.
        """
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
            cases = [self._planned(one, Path(folder)) for one in self.configurations]
            groups: dict[tuple[Any, ...], list[_Case]] = {}
            for case in cases:
                groups.setdefault((case.spec.directory, case.plan.latent_shape), []).append(case)
            try:
                for group in groups.values():
                    for part in self.setup.parts:
                        if part in group[0].spec.component_names:
                            self._measure_part(group, part, cancel)
            except CancelledError:
                self.cancelled = True
                self.save(self)

    def to_json(self) -> dict[str, Any]:
        """Return the results so far as JSON types."""
        self._about = self._about or describe_environment(self.setup.machine)
        return {
            "schema": SCHEMA,
            "kind": "forward",
            **self._about,
            "random": self.setup.random,
            "tera_operations": self.setup.tera_operations,
            "runs": self.setup.runs,
            "warmup": self.setup.warmup,
            "cancelled": self.cancelled,
            "configurations": [one.to_json(self.setup.tera_operations) for one in self.passes],
        }

    def _planned(self, configuration: Configuration, folder: Path) -> _Case:
        setup, request = self.setup, configuration.request
        if not setup.random:
            spec = model_for(request, setup.weights_dir, None)
            offers = () if setup.engines is None else (setup.engines.offers(spec),)
            context = PlanningContext(setup.machine, folder / "none.mp4", *offers)
            return _Case(configuration, spec, resolve(request, spec, context))
        engine = next((name for name in request.backends.values() if name not in {AUTO, PYTORCH}), None)
        if engine is not None:
            raise ValueError(
                f"Configuration {configuration.name!r}: {BACKEND_TITLES[engine]} engines are built from files; use "
                "--backend all=pytorch with random weights."
            )
        if request.loras:
            raise ValueError(f"Configuration {configuration.name!r}: LoRAs cannot be combined with random weights.")
        spec = model_for(request, setup.weights_dir, None, needs_weights=False)
        own = folder / f"model-{spec.name.replace('/', '-')}"
        spec = replace(spec, directory=own, is_downloaded=True) if own.exists() else random_spec(spec, own)
        return _Case(configuration, spec, resolve(request, spec, PlanningContext(setup.machine, folder / "none.mp4")))

    def _measure_part(self, cases: Sequence[_Case], part: str, cancel: Cancel) -> None:
        """Measure one component at one size: first diffusers' own module, also in float32 for the reference."""
        inputs = sample_inputs(cases[0].spec, cases[0].plan, part)
        reference = self._baseline(cases[0], part, inputs, cancel)
        for case in cases:
            one = _pass(case, part, self.setup.random, case.configuration.name)
            self.passes.append(one)
            with _recording_failures(one):
                self._measure_one(one, case, inputs, reference, cancel)
            self._finish(one)

    def _baseline(self, case: _Case, part: str, inputs: dict[str, torch.Tensor], cancel: Cancel) -> torch.Tensor | None:
        """Measure diffusers' own module and return its output in float32."""
        if not (self.setup.baseline or self.setup.exact):
            return None
        planned = _in_diffusers(case.plan, part)
        one = _pass(case, part, self.setup.random, BASELINE)
        size = f"{case.plan.width}x{case.plan.height}, {case.plan.frames} frames"
        one.name, one.flags = f"{BASELINE} {size}, {part}", ""
        one.runs_on = f"diffusers alone, {planned.dtype}"
        one.request = {**one.request, "quantization": "none", "offload": "none"}
        exact: list[torch.Tensor] = []
        with _recording_failures(one):
            before = allocated(planned.device)
            module: Any = self._loader(case.spec, part, planned, None)
            one.weights_bytes = allocated(planned.device) - before
            call = diffusers_call(module, part, case.spec, inputs)
            if self.setup.baseline:
                self._time(one, call, planned.device, cancel)
            cancel.check()
            if self.setup.exact:
                self.report(f"{one.name}: float32, for the errors")
                if is_transformer(part):
                    timestep = module_timestep(case.spec, inputs)
                    exact.append(exact_velocity(module, **{**inputs, "timestep": timestep}).cpu())
                else:  # the VAE is small enough to be loaded once more, with weights that are not rounded
                    unrounded = self._loader(case.spec, part, planned.replace(dtype="float32"), None)
                    exact.append(exact_frames(unrounded, **inputs))
                    del unrounded
                with torch.no_grad():
                    output = call().float().cpu() if is_transformer(part) else as_frames(call())
                one.error = relative_error(output, exact[0])
            del module, call
        release_cached_memory(unreachable=True)
        if self.setup.baseline:
            self.passes.append(one)
            self._finish(one)
        return exact[0] if exact else None

    def _measure_one(
        self,
        one: Pass,
        case: _Case,
        inputs: dict[str, torch.Tensor],
        reference: torch.Tensor | None,
        cancel: Cancel,
    ) -> None:
        spec, plan, part = case.spec, case.plan, one.part
        device = plan.components[part].device
        job = StandaloneJob(plan, cancel)
        before = allocated(device)
        with (
            Residency(self.setup.engines, self._loader) as residency,
            component_call(residency, spec, job, part) as call,
        ):
            one.weights_bytes = allocated(device) - before
            self._time(one, lambda: deque(call(inputs), maxlen=0), device, cancel)
            cancel.check()
            if reference is not None:
                one.error = relative_error(torch.cat([in_floats(piece) for piece in call(inputs)]), reference)
        if part in job.fallbacks:
            one.seconds, one.error = None, None
            one.why = job.fallbacks[part]

    def _time(self, one: Pass, call: Callable[[], object], device: str, cancel: Cancel) -> None:
        durations: list[float] = []
        with torch.no_grad():
            for number in range(self.setup.warmup + self.setup.runs):
                cancel.check()
                if device.startswith("cuda") and number == min(self.setup.warmup, 1):
                    torch.cuda.reset_peak_memory_stats(device)
                durations.append(seconds_of(call, device))
                if device.startswith("cuda"):
                    one.working_bytes = torch.cuda.max_memory_allocated(device) - (one.weights_bytes or 0)
        one.first_seconds = durations[0]
        one.seconds = spread(durations[self.setup.warmup :])

    @property
    def _loader(self) -> Loader:
        return random_module if self.setup.random else load_module

    def _finish(self, one: Pass) -> None:
        result = f"{one.seconds.median:.3f} s" if one.seconds is not None else "not measured"
        self.report(f"{one.name}: {one.why or result}")
        self.save(self)


def _pass(case: _Case, part: str, random: bool, name: str) -> Pass:
    plan, spec = case.plan, case.spec
    planned = plan.components[part]
    precision = planned.quantization if planned.quantization != "none" else planned.to_json()["dtype"]
    operations = (
        spec.transformer.forward_flops(plan.tokens, spec.max_sequence_length)
        if is_transformer(part)
        else spec.vae.decode_flops(plan.frames, plan.height, plan.width)
    )
    return Pass(
        name=f"{name}, {part}",
        configuration=name,
        part=part,
        flags=case.configuration.flags,
        runs_on=f"{BACKEND_TITLES[planned.backend]}, {precision}",
        request=plan.request_json() | {"part": part, "random": random},
        operations=operations,
    )


def _in_diffusers(plan: ExecutionPlan, part: str) -> ComponentPlan:
    """Return a component's plan with diffusers alone; the VAE in the transformer's precision, its fastest."""
    planned = plan.components[part]
    dtype = plan.components["transformer"].dtype
    return planned.replace(backend=PYTORCH, engines=(), quantization="none", dtype=dtype)


@contextmanager
def _recording_failures(one: Pass) -> Iterator[None]:
    """Record a failure of one pass, so that the next can be measured."""
    try:
        yield
    except _OUT_OF_MEMORY:
        one.why = "Out of memory."
    except TandemError as error:
        one.why = f"{error.what} {error.remedy}"
    except CancelledError:
        raise
    except Exception as error:  # such as a kernel that the GPU does not support; the next may work
        logger.exception("A forward pass failed")
        one.why = f"{type(error).__name__}: {first_line(error)}."


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of a result of `Forward.to_json`, below `HEADINGS`."""
    found: list[tuple[str, ...]] = []
    for one in result["configurations"]:
        seconds = one["stages"].get("pass")
        if seconds is None:
            continue
        bound = one["floor_seconds"]
        error = "" if one["error"] is None else f"{one['error']:.1e}" if one["error"] else "none"
        found.append(
            (
                one["name"],
                one["runs_on"],
                spread_text(seconds),
                number(one["first_seconds"]),
                "" if bound is None else number(bound),
                "" if bound is None else f"{seconds['median'] / bound:.2f}",
                error,
                *(memory_size(one[name]) if one[name] else "" for name in ("weights_bytes", "working_bytes")),
            )
        )
    return found


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: failures, and how it was measured."""
    lines = [f"{one['name']}: {one['why']}" for one in result["configurations"] if one["why"]]
    weights = "random weights" if result["random"] else "the model's weights"
    lines.append(
        f"Seconds: median (least–most) of {result['runs']} passes after {result['warmup']} to warm up; errors against "
        f"float32; {weights}."
    )
    if result["tera_operations"] is not None:
        lines.append(f"Bound: operations divided by {result['tera_operations']:g} TFLOP/s.")
    if result["cancelled"]:
        lines.append("Cancelled: these are the results so far.")
    return lines
