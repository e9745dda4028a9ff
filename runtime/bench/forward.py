"""One forward pass of a transformer and one decode of a clip, each in several configurations: seconds, memory, error.

Beside each stands what diffusers' own module takes, uncompiled, and the floor: operations over a rate. Parts come by
the plan and `Residency`, as a job has them; with random weights no file is read, so that any architecture can be
measured on any machine that holds it.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runtime.bench.calls import drained, lent, made_up, own_call, seconds_of, timestep_of
from runtime.bench.component_timing import Lent, in_floats, relative_error
from runtime.bench.configurations import Configuration
from runtime.bench.environment import surroundings
from runtime.bench.exact import as_frames, exact_frames, exact_velocity
from runtime.bench.random_weights import random_module, random_spec
from runtime.bench.recorder import allocated
from runtime.bench.rounds import SCHEMA, Tell
from runtime.bench.statistics import Spread, spread
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError, ModelError, TandemError, first_line
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest
from runtime.engines.service import EngineService
from runtime.execution.memory import release_cached_memory
from runtime.execution.residency import Loader, Residency
from runtime.machine.probe import Machine
from runtime.models.known import known_as
from runtime.models.loras import model_for
from runtime.models.spec import ModelSpec, is_transformer
from runtime.models.weights import load_module
from runtime.planner.resolve import resolve

PARTS = ("transformer", "transformer_2", "vae")
BASELINE = "diffusers"
_TERA = 1e12
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForwardSetup:
    """What is measured.

    Attributes:
        parts: of `PARTS`; one that a model has not is passed over.
        random: whether weights are random instead of read.
        tera_operations: a second, in 16 bits: what the floor rests on; `None` for no floor.
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
    """One part in one configuration.

    Attributes:
        name: of the configuration, and the part.
        runs_on: backend and precision.
        seconds: of one pass; of the whole clip for the VAE.
        first_seconds: of the very first, which may compile.
        weights_bytes, working_bytes: on the GPU: what lies there between passes, and what one takes beside that.
        error: ‖out − ref‖/‖ref‖ against float32.
        operations: of one pass.
        why: what went wrong.
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
        """Return the fields as JSON types, the seconds as the one stage there is."""
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
    """Passes under way; `measure` does them, and `to_json` tells of them at any time."""

    setup: ForwardSetup
    configurations: Sequence[Configuration]
    tell: Tell
    saved: Callable[["Forward"], None] = lambda _: None
    passes: list[Pass] = field(default_factory=list)
    cancelled: bool = False
    _about: dict[str, Any] = field(default_factory=dict)

    def measure(self, cancel: Cancel) -> None:
        """Measure all. Ends early, with what was measured so far, once `cancel` is requested.

        Raises:
            TandemError: if a configuration cannot be planned.
        """
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
            cases = [self._planned(one, Path(folder)) for one in self.configurations]
            alike: dict[tuple[Any, ...], list[_Case]] = {}
            for case in cases:
                alike.setdefault((case.spec.directory, case.plan.latent_shape), []).append(case)
            try:
                for group in alike.values():
                    for part in self.setup.parts:
                        if part in group[0].spec.component_names:
                            self._measure_part(group, part, cancel)
            except CancelledError:
                self.cancelled = True
                self.saved(self)

    def to_json(self) -> dict[str, Any]:
        """Return all that was found so far, as JSON types."""
        self._about = self._about or surroundings(self.setup.machine)
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
            spec = _here(request, setup.weights_dir)
            offers = () if setup.engines is None else (setup.engines.offers(spec),)
            return _Case(configuration, spec, resolve(request, spec, setup.machine, folder / "none.mp4", *offers))
        named = next((name for name in request.backends.values() if name not in {AUTO, PYTORCH}), None)
        if named is not None:
            raise InvalidRequestError(
                "backends",
                f"Configuration {configuration.name!r}: {BACKEND_TITLES[named]} engines are built from files, and "
                "random weights have none.",
                "Take --backend all=pytorch, or a model that is here without --random.",
            )
        if request.loras:
            raise InvalidRequestError(
                "loras", f"Configuration {configuration.name!r}: random weights take no LoRA.", "Leave out --lora."
            )
        spec = model_for(request, setup.weights_dir, here=False)
        own = folder / f"model-{spec.name.replace('/', '-')}"
        spec = replace(spec, directory=own, here=True) if own.exists() else random_spec(spec, own)
        return _Case(configuration, spec, resolve(request, spec, setup.machine, folder / "none.mp4"))

    def _measure_part(self, cases: Sequence[_Case], part: str, cancel: Cancel) -> None:
        """Measure one part at one size: diffusers' own first, which float32 is taken from too."""
        given = made_up(cases[0].spec, cases[0].plan, part)
        reference = self._baseline(cases[0], part, given, cancel)
        for case in cases:
            one = _pass(case, part, self.setup.random, case.configuration.name)
            self.passes.append(one)
            with _told(one):
                self._measure_one(one, case, given, reference, cancel)
            self._say(one)

    def _baseline(self, case: _Case, part: str, given: dict[str, torch.Tensor], cancel: Cancel) -> torch.Tensor | None:
        """Measure diffusers' own module, and return what it gives in float32."""
        if not (self.setup.baseline or self.setup.exact):
            return None
        how = _plain(case.plan, part)
        one = _pass(case, part, self.setup.random, BASELINE)
        size = f"{case.plan.width}x{case.plan.height}, {case.plan.frames} frames"
        one.name, one.flags = f"{BASELINE} {size}, {part}", ""
        one.runs_on = f"diffusers alone, {how.dtype}"
        one.request = {**one.request, "quantization": "none", "offload": "none"}
        exact: list[torch.Tensor] = []
        with _told(one):
            before = allocated(how.device)
            module: Any = self._loader(case.spec, part, how, None)
            one.weights_bytes = allocated(how.device) - before
            call = own_call(module, part, case.spec, given)
            if self.setup.baseline:
                self._time(one, call, how.device, cancel)
            cancel.check()
            if self.setup.exact:
                self.tell(f"{one.name}: float32, for the errors")
                if is_transformer(part):
                    inputs = {**given, "timestep": timestep_of(case.spec, given)}
                    exact.append(exact_velocity(module, **inputs).cpu())
                else:  # small enough to be there once more, with weights that were never rounded
                    whole = self._loader(case.spec, part, how.replace(dtype="float32"), None)
                    exact.append(exact_frames(whole, **given))
                    del whole
                with torch.no_grad():
                    output = call().float().cpu() if is_transformer(part) else as_frames(call())
                one.error = relative_error(output, exact[0])
            del module, call
        release_cached_memory(unreachable=True)
        if self.setup.baseline:
            self.passes.append(one)
            self._say(one)
        return exact[0] if exact else None

    def _measure_one(
        self,
        one: Pass,
        case: _Case,
        given: dict[str, torch.Tensor],
        reference: torch.Tensor | None,
        cancel: Cancel,
    ) -> None:
        spec, plan, part = case.spec, case.plan, one.part
        device = plan.components[part].device
        job = Lent(plan, cancel)
        before = allocated(device)
        with (
            Residency(self.setup.engines, self._loader) as residency,
            lent(residency, spec, job, part) as call,
        ):
            one.weights_bytes = allocated(device) - before
            self._time(one, lambda: drained(call(given)), device, cancel)
            cancel.check()
            if reference is not None:
                one.error = relative_error(torch.cat([in_floats(piece) for piece in call(given)]), reference)
        if part in job.fallen:
            one.seconds, one.error = None, None
            one.why = job.fallen[part]

    def _time(self, one: Pass, call: Callable[[], object], device: str, cancel: Cancel) -> None:
        taken: list[float] = []
        with torch.no_grad():
            for number in range(self.setup.warmup + self.setup.runs):
                cancel.check()
                if device.startswith("cuda") and number == min(self.setup.warmup, 1):
                    torch.cuda.reset_peak_memory_stats(device)
                taken.append(seconds_of(call, device))
                if device.startswith("cuda"):
                    one.working_bytes = torch.cuda.max_memory_allocated(device) - (one.weights_bytes or 0)
        one.first_seconds = taken[0]
        one.seconds = spread(taken[self.setup.warmup :])

    @property
    def _loader(self) -> Loader:
        return random_module if self.setup.random else load_module

    def _say(self, one: Pass) -> None:
        took = f"{one.seconds.median:.3f} s" if one.seconds is not None else "not measured"
        self.tell(f"{one.name}: {one.why or took}")
        self.saved(self)


def _here(request: GenerationRequest, weights_dir: Path) -> ModelSpec:
    try:
        return model_for(request, weights_dir)
    except ModelError as error:
        if known_as(request.model) is None:
            raise
        raise ModelError(error.what, f"{error.remedy.rstrip('.')}; or add --random.") from error


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


def _plain(plan: ExecutionPlan, part: str) -> ComponentPlan:
    """Return a part as diffusers alone would run it: the VAE in the transformer's precision, as it is fastest there."""
    planned = plan.components[part]
    dtype = plan.components["transformer"].dtype
    return planned.replace(backend=PYTORCH, engines=(), quantization="none", dtype=dtype)


@contextmanager
def _told(one: Pass) -> Iterator[None]:
    """Note what goes wrong with one pass, and go on with the next."""
    try:
        yield
    except _OUT_OF_MEMORY:
        one.why = "Memory ran out."
    except TandemError as error:
        one.why = f"{error.what} {error.remedy}"
    except CancelledError:
        raise
    except Exception as error:  # a kernel that a GPU has not, a compiler that fails: the next may do
        logger.exception("A forward pass failed")
        one.why = f"{type(error).__name__}: {first_line(error)}."
