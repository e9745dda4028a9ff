"""A job under way: its plan as it changes, and what it tells. Builds what the plan wants before anything runs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from runtime.components.residency import Residency
from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.events import EngineProgress, Event, FellBack, StageStarted, Warned
from runtime.core.plan import BACKEND_TITLES, EngineUse, ExecutionPlan
from runtime.models.spec import ModelSpec

Emit = Callable[[Event], None]


class Course:
    """What changes while a job runs. Use as a context manager: its engines are kept from deletion until it ends.

    Attributes:
        plan: what runs where, fallbacks included.
        warnings: all that was said beside the result.
    """

    def __init__(self, plan: ExecutionPlan, spec: ModelSpec, emit: Emit, cancel: Cancel) -> None:
        self.plan = plan
        self.warnings: list[str] = []
        self._spec = spec
        self._emit = emit
        self._cancel = cancel
        self._kept = ExitStack()

    def __enter__(self) -> "Course":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the engines."""
        self._kept.close()

    def warn(self, message: str) -> None:
        """Tell something that the user should read beside the result."""
        self.warnings.append(message)
        self._emit(Warned(message))

    def loading(self, name: str) -> None:
        """Tell that a component is loaded."""
        self._cancel.check()
        self._emit(StageStarted("load", name))

    def fell_back(self, name: str, reason: str) -> None:
        """Tell that PyTorch runs a component from here on; `reason` is a sentence."""
        part = self.plan.components[name]
        backend = part.backend if part.engines else part.asked
        said = f"{self.plan.title(name)}: PyTorch instead of {BACKEND_TITLES[backend]}. {reason}"
        self.plan = self.plan.with_component(name, part.in_pytorch(reason))
        self.warnings.append(said)
        self._emit(FellBack(name, backend, said))

    def get_engines(self, residency: Residency) -> None:
        """Build the engines that are not there or damaged; a component whose engine cannot be built falls back.

        Raises:
            CancelledError: within a tenth of a second of being asked; nothing of the build is left.
        """
        for name, part in self.plan.components.items():
            if part.fell_back:
                self.fell_back(name, part.reason)
            elif part.engines and not residency.holds(self._spec, self.plan, name):
                try:
                    for use in part.engines:
                        self._get_engine(name, use, residency)
                except EngineError as error:
                    self.fell_back(name, f"{error.what} {error.remedy}")
                else:
                    there = replace(part, engines=tuple(replace(use, build=False) for use in part.engines))
                    self.plan = self.plan.with_component(name, there)

    def _get_engine(self, name: str, use: EngineUse, residency: Residency) -> None:
        engines = residency.engines
        problem = None if use.build or self.plan.build == "never" else engines.problem(use.id)
        if problem is not None:
            self.warn(f"{self.plan.title(name)}: the engine {use.id} is of no use ({problem}) and is built anew.")
        if use.build or problem is not None:
            self._emit(StageStarted("build", name))
            device = self.plan.components[name].device
            again = self.plan.build == "always" or problem is not None
            engines.build(self._spec, name, use, device, partial(self._building, name), self._cancel, again=again)
        # Building the next one makes room in the library, but not of this one's.
        self._kept.enter_context(engines.store.using(use.id))

    def _building(self, name: str, line: str, share: float | None) -> None:
        self._emit(EngineProgress(name, line, share))
