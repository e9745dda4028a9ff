"""A job under way: its plan as it changes, how far it is, and what it tells.

Takes up what an earlier run left, and builds what the plan wants before anything runs.
"""

import copy
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import CheckpointError, EngineError
from runtime.core.events import EngineProgress, Event, FellBack, Resumed, Stage, StageStarted, Warned
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, EngineUse, ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.checkpoint import Checkpoint, CheckpointFolder
from runtime.pipeline.checkpoint_policy import CheckpointPolicy
from runtime.pipeline.metrics import Clock
from runtime.pipeline.sampling import Conditioning, Reached, Step, get_schedule
from runtime.pipeline.scheduler_state import restore, snapshot

Emit = Callable[[Event], None]

# What of a plan changes while it is carried out.
_DECIDED = (
    "components",
    "strategy",
    "decode_flops",
    "memory",
    "seconds",
    "strategies",
    "split",
    "speed",
)


class RunContext:
    """What changes while a job runs.

    Use as a context manager: its engines are kept from deletion until it ends, and where it ends before its time, what
    is done is kept.

    Attributes:
        plan: what runs where, fallbacks included.
        warnings: all that was said beside the result.
        doing: the stage that runs, and the component at work.
        conditioning: the prompt, once it is read.
        reached: how far sampling is; `None` before the first step.
        done_at: when that was, by the performance counter.
        earlier: what came of earlier runs, see `VideoSaved`.
        straight: whether this run does all the work, in one way: what it takes says something about the next.
        look: sees the frames before they are encoded, see `flow.run_job`.
        read_anew: whether the text encoder ran: texts of earlier jobs are known.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        spec: ModelSpec,
        emit: Emit,
        cancel: Cancel,
        residency: Residency,
        clock: Clock,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.emit = emit
        self.cancel = cancel
        self.residency = residency
        self.clock = clock
        self.warnings: list[Fact] = []
        self.doing: tuple[Stage, str] = ("load", "text_encoder")
        self.conditioning: Conditioning | None = None
        self.reached: Reached | None = None
        self.done_at = time.perf_counter()
        self.earlier: dict[str, Any] = {}
        self.straight = True
        self.look: Callable[[np.ndarray], None] | None = None
        self.read_anew = True
        self._compiled_before = residency.compile_seconds
        self._planned = plan
        self._checkpoints = checkpoints
        self.keeper = CheckpointPolicy(checkpoints, spec, emit)
        self._kept = ExitStack()

    def __enter__(self) -> "RunContext":
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let go of the engines; keep what is done, if not all of it is."""
        self._kept.close()
        if kind is not None and issubclass(kind, Exception):
            self._keep()

    @property
    def compiled_seconds(self) -> float:
        """Seconds spent on compiling in this run."""
        return self.residency.compile_seconds - self._compiled_before

    @property
    def step(self) -> int:
        """Denoising steps done."""
        return 0 if self.reached is None else self.reached.steps

    def warn(self, fact: Fact) -> None:
        """Emit a fact to show with the result, unless this run or an earlier one has emitted it."""
        if fact not in self.warnings:
            self.warnings.append(fact)
            self.emit(Warned(fact=fact))

    def schedule(self) -> tuple[Any, list[Step]]:
        """Return a scheduler before its first step, and the plan's steps.

        Raises:
            ModelError: if the model's scheduler cannot be loaded.
        """
        # A copy, for a step leaves more in a scheduler than setting its timesteps takes out again.
        scheduler = copy.deepcopy(self._scheduler)
        return scheduler, get_schedule(self.plan, scheduler, self.spec.boundary_ratio)

    @cached_property
    def _scheduler(self) -> Any:
        return load_scheduler(self.spec, self.plan.shift, self.plan.components["transformer"].device)

    def begin(self, stage: Stage, name: str) -> None:
        """Tell that a stage begins, with a component at work."""
        self.doing = (stage, name)
        self.emit(StageStarted(stage=stage, part=name))

    def loading(self, name: str) -> None:
        """Tell that a component is loaded."""
        self.cancel.check()
        self.begin("load", name)

    def read(self, conditioning: Conditioning) -> None:
        """Note that the prompt is read."""
        self.conditioning = conditioning
        self.done_at = time.perf_counter()
        self._keep()

    def reach(self, steps: int, latents: torch.Tensor, scheduler: Any) -> Reached:
        """Note what is done, and return it."""
        state = None
        try:
            state = snapshot(scheduler)
        except CheckpointError as error:
            self.warn(Fact("pipeline.step_not_resumable", {"cause": error.fact}))
        self.reached = Reached(steps, latents, state)
        self.done_at = time.perf_counter()
        return self.reached

    def keep(self, steps: Sequence[Step], seconds: float, *, reached: bool = True) -> None:
        """Keep what is done if that is due, and in any case between both experts and after the last step.

        Args:
            seconds: that the last step took.
            reached: whether it was noted by `reach`; with a step cache, not every one can be gone on from.
        """
        self.keeper.after_step(seconds)
        if not reached:
            return
        between = self.step < len(steps) and steps[self.step].expert != steps[self.step - 1].expert
        if between or self.step == len(steps) or self.keeper.due(self._checkpoint):
            self._keep(boundary=between)

    def resume_from_checkpoint(self) -> None:
        """Go on from what an earlier run left; a checkpoint that is of no use is told of and removed."""
        if self._checkpoints is None:
            return
        try:
            found = self._checkpoints.load(self.spec, self.plan)
            if found is not None and found.reached is not None and found.reached.scheduler is not None:
                restore(self.schedule()[0], found.reached.scheduler)
        except CheckpointError as error:
            self._checkpoints.clear()
            self.warn(Fact("pipeline.checkpoint_unusable", {"cause": error.fact}))
            return
        if found is None:
            return
        if _decisions(found.planned) == _decisions(self.plan):
            # What had become of the plan goes on; asked for otherwise, that is what counts.
            self.plan = self.plan.replace(**{name: getattr(found.plan, name) for name in _DECIDED})
        guided = found.conditioning.negative is not None or not wants_guidance(self.plan)
        self.conditioning = found.conditioning if guided else None
        self.reached = found.reached
        for fact in found.warnings:
            self.warn(fact)
        self.clock.go_on(found.timings, found.load_seconds)
        self.earlier = {
            "step": found.step,
            "timings": dict(found.timings),
            "load_seconds": round(found.load_seconds, 3),
        }
        self.straight = False
        self.keeper.found(found)
        self.emit(Resumed(step=found.step, of=found.of))

    def _keep(self, *, boundary: bool = False) -> None:
        problem = self.keeper.keep(self._checkpoint, boundary=boundary)
        if problem is not None:
            self.warn(problem)

    def _checkpoint(self) -> Checkpoint | None:
        if self.conditioning is None:
            return None
        if self.reached is not None and self.reached.scheduler is None and self.step < self.plan.steps:
            return None
        return Checkpoint(
            planned=self._planned,
            plan=self.plan,
            of=self.plan.steps,
            conditioning=self.conditioning,
            reached=self.reached,
            warnings=tuple(self.warnings),
            timings=self.clock.timings(),
            load_seconds=self.clock.load_seconds,
        )

    def fell_back(self, name: str, reason: Fact) -> None:
        """Run a component in PyTorch from now on instead of on its engine."""
        part = self.plan.components[name]
        event = FellBack(
            component=name, backend=part.backend if part.engines else self.plan.asked.backend(name), reason=reason
        )
        self.plan = self.plan.with_component(name, part.in_pytorch(str(reason)))
        if event.fact not in self.warnings:
            self.warnings.append(event.fact)
            self.emit(event)

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """Run a component without what a field of the plan's `Speed` says: slower, with the same result."""
        self.plan = self.plan.replace(speed=self.plan.speed.replace(**{field: getattr(EAGER, field)}))
        self.warn(Fact("pipeline.degraded", {"component": name, "reason": reason}))

    def get_engines(self, names: Collection[str]) -> None:
        """Build the engines of components that are not there or damaged; where one cannot be built, PyTorch takes over.

        Raises:
            CancelledError: within a tenth of a second of being asked; nothing of the build is left.
            PausedError: once the engine that is built is there.
        """
        for name, part in self.plan.components.items():
            if name not in names:
                continue
            self.cancel.check_pause()
            if self.plan.fell_back(name):
                self.fell_back(name, Fact("text", {"what": part.reason, "remedy": ""}))
            elif part.engines and not self.residency.holds(self.spec, self.plan, name):
                try:
                    for use in part.engines:
                        self._get_engine(name, use)
                except EngineError as error:
                    self.fell_back(name, error.fact)
                else:
                    there = part.replace(engines=tuple(use.replace(build=False) for use in part.engines))
                    self.plan = self.plan.with_component(name, there)

    def _get_engine(self, name: str, use: EngineUse) -> None:
        engines = self.residency.engines
        problem = None if use.build or self.plan.asked.build == "never" else engines.problem(use.id)
        if problem is not None:
            self.warn(Fact("pipeline.engine_rebuilt", {"component": name, "engine": use.id, "problem": problem}))
        if use.build or problem is not None:
            self.begin("build", name)
            device = self.plan.components[name].device
            again = self.plan.asked.build == "always" or problem is not None
            engines.build(self.spec, name, use, device, partial(self._building, name), self.cancel, again=again)
        # Building the next one makes room in the library, but not of this one's.
        self._kept.enter_context(engines.store.using(use.id))

    def _building(self, name: str, line: str, share: float | None) -> None:
        self.emit(EngineProgress(component=name, line=line, share=share))


def wants_guidance(plan: ExecutionPlan) -> bool:
    """Return whether a plan needs the negative prompt."""
    return any(scale > 1 for scale in (plan.guidance_scale, plan.guidance_scale_2 or 0))


def _decisions(plan: ExecutionPlan) -> tuple[Any, ...]:
    """Return how a plan computes its clip: not what is forecast of it, nor where it goes."""
    parts = [
        (name, part.backend, part.device, part.dtype, part.quantization, [use.id for use in part.engines])
        for name, part in plan.components.items()
    ]
    asked = [plan.asked.backend(name) for name in plan.components], plan.asked.attention, plan.asked.compile
    return parts, asked, plan.strategy, plan.speed.attention, plan.speed.compiled, plan.split
