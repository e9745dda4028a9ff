"""When a job is kept: seldom enough to cost next to nothing, and whenever its state would be dear to lose."""

import time
from collections.abc import Callable

from runtime.core.errors import CheckpointError
from runtime.core.events import CheckpointSaved, Event
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import Checkpoint, CheckpointFolder

# Of the time that steps take.
_SHARE = 0.01
# What a checkpoint is guessed to take before one was written: the file's opening and syncing, and a slow disk's bytes.
_OPENING_SECONDS, _BYTES_PER_SECOND = 0.01, 100e6


def due(seconds: float, spent: float, cost: float) -> bool:
    """Return whether one more checkpoint keeps what all of them took below 1 % of what the steps took.

    Args:
        seconds: of all steps of this run so far.
        spent: of all checkpoints so far.
        cost: of the next.
    """
    return spent + cost <= _SHARE * seconds


def guessed_cost(size: int) -> float:
    """Return the seconds that writing `size` bytes may take, where nothing was measured yet."""
    return _OPENING_SECONDS + size / _BYTES_PER_SECOND


class CheckpointPolicy:
    """Writes the checkpoints of one run.

    It knows the job only by what it is given: a job that it held, and that held it, would stay until Python looks for
    such, and with it what lies on the GPU.

    Args:
        folder: where to; `None` keeps nothing.
        emit: hears of what is kept.
    """

    def __init__(self, folder: CheckpointFolder | None, spec: ModelSpec, emit: Callable[[Event], None]) -> None:
        self._folder = folder
        self._spec = spec
        self._emit = emit
        self._warned = False
        self._kept: tuple[int, ExecutionPlan] | None = None
        self._seconds = 0.0
        self._spent = 0.0
        self._cost: float | None = None

    @property
    def keeps(self) -> bool:
        """Whether the job can be taken up again from what is on disk."""
        return self._kept is not None

    def found(self, checkpoint: Checkpoint) -> None:
        """Note that this is on disk already."""
        self._kept = (checkpoint.step, checkpoint.plan)

    def after_step(self, seconds: float) -> None:
        """Hear that a step is done, which took `seconds`."""
        self._seconds += seconds

    def due(self, make: Callable[[], Checkpoint | None]) -> bool:
        """Return whether it is time to keep the job; see `keep`."""
        if self._folder is None:
            return False
        if self._cost is None:
            checkpoint = make()
            self._cost = guessed_cost(checkpoint.size if checkpoint else 0)
        return due(self._seconds, self._spent, self._cost)

    def keep(self, make: Callable[[], Checkpoint | None], *, boundary: bool = False) -> Fact | None:
        """Keep the job as it stands, if that is not on disk already.

        Args:
            make: returns the job as it stands, or `None` where there is nothing to keep yet.
            boundary: it stands between both experts.

        Returns:
            The reason if it cannot be kept, the first time: the job continues without.
        """
        checkpoint = None if self._folder is None else make()
        # A fallback changes what comes next even where no step was done since.
        if self._folder is None or checkpoint is None or (checkpoint.step, checkpoint.plan) == self._kept:
            return None
        problem = None
        started = time.perf_counter()
        try:
            self._folder.save(checkpoint, self._spec, boundary=boundary)
        except CheckpointError as error:
            if not self._warned:
                self._warned = True
                problem = Fact("pipeline.checkpoints_stopped", {"cause": error.fact})
                if self._kept:
                    data = {"cause": error.fact, "step": self._kept[0]}
                    problem = Fact("pipeline.checkpoints_stopped_after", data)
        else:
            self._kept = (checkpoint.step, checkpoint.plan)
            self._emit(CheckpointSaved(step=checkpoint.step))
        took = time.perf_counter() - started
        self._spent += took
        self._cost = took
        return problem
