"""The history file: measured time and memory of jobs and attention kernels on this machine, for later plans.

A missing or damaged file counts as an empty history. If the file cannot be written, a warning is logged. A lock
serializes writers. Reading imports no torch.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from runtime.core.disk_caches import COMPILED
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.frozen import FrozenModel
from runtime.core.locks import held
from runtime.core.plan import ExecutionPlan
from runtime.core.request import AUTO
from runtime.core.untrusted_files import read_json
from runtime.machine.probe import Machine, gpu_index, seen_from
from runtime.models.spec import ModelSpec, attention_flops
from runtime.planner.execution_options import exact_attentions
from runtime.planner.history import (
    History,
    Run,
    attention_kind,
    attention_seconds,
    compilation_runs,
    device_name,
    newer,
    runs_of,
)
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.upstream.torch import CompiledGraphs

_VERSION: Literal[1] = 1
# Only the newest runs are kept, a few hundred bytes each.
_MAX_RUNS = 400
_LOCK_SECONDS = 5.0
# In the folder of compiled code: an empty file for each kind of clip whose code is there.
_CLIPS = "clips"

logger = logging.getLogger(__name__)

# Returns the seconds of one attention call, given kernel, tokens, heads, head dimension, dtype and device.
Measure = Callable[[str, int, int, int, str, str], float]


class _Document(FrozenModel):
    """The contents of the file."""

    version: Literal[1]
    runs: tuple[Run, ...]


class HistoryFile:
    """The history of jobs on a machine.

    Args:
        folder: holds `history.json`.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._path = folder / "history.json"
        self.machine = machine
        self._first_job = True
        self._cached: tuple[tuple[int, int, int], History] | None = None

    def read(self) -> History:
        """Return all runs, the newest last, without those of compiled code that is no longer in the cache.

        The file is parsed again only if it has changed.
        """
        runs = self._runs()
        gone = [run for run in runs if run.cached_code and not self._code(run).exists()]
        return tuple(run for run in runs if run not in gone) if gone else runs

    def _code(self, run: Run) -> Path:
        """Return the file that stands for compiled code, in the folder of the code: they are deleted together."""
        return self._path.with_name(COMPILED.name) / _CLIPS / run.cached_code

    def _runs(self) -> History:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        # Every write creates a new inode, so even two writes within one clock tick differ.
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        cached = self._cached
        if cached is None or cached[0] != stamp:
            cached = self._cached = (stamp, self._parse())
        return cached[1]

    def _parse(self) -> History:
        try:
            return _Document.model_validate(read_json(self._path)).runs
        except (OSError, ValueError):
            return ()

    def add(self, new: Iterable[Run]) -> None:
        """Add runs. Each replaces the run of the same kind and size, see `planner.history.newer`."""
        runs = {(run.kind, run.flops): run for run in new}
        if not runs:
            return
        target = self._path
        try:
            with held(target.with_suffix(".lock"), seconds=_LOCK_SECONDS):
                before = {(run.kind, run.flops): run for run in self._runs()}
                rest = [run for key, run in before.items() if key not in runs]
                now = [newer(before.get(key), run) for key, run in runs.items()]
                document = _Document(version=_VERSION, runs=(*rest, *now)[-_MAX_RUNS:])
                remove_partial_files(target.parent)
                replace_file(target, document.model_dump_json().encode())
        except OSError as error:  # includes a timeout of the lock
            logger.warning("%s could not be written: %s", target.name, error.strerror or error)

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
        *,
        loaded: bool = False,
    ) -> None:
        """Add a job that succeeded; see `planner.history.runs_of` for the arguments.

        Memory is added only for the first job of a process: later jobs start with memory in use or cached.
        """
        used = peaks if self._first_job else {}
        self.add(runs_of(planned, ran, spec, self.machine, timings, used, loaded=loaded))
        self._first_job = False

    def add_compilation(self, plan: ExecutionPlan, spec: ModelSpec, seconds: float, graphs: CompiledGraphs) -> None:
        """Add the compilation time of a job.

        Args:
            seconds: 0 if the code was in memory already, where an earlier run of this process has left it; then only
                that it is in the cache is added.
            graphs: those of the job. Without any, as with the VAE's Triton kernels alone, the code came from the cache
                if an earlier job has left it there.
        """
        *_, found = compilation_runs(plan, spec, self.machine, seconds, cached=True)
        code = self._code(found)
        cached = code.exists() if graphs == CompiledGraphs() else not graphs.compiled
        with contextlib.suppress(OSError):
            code.parent.mkdir(parents=True, exist_ok=True)
            code.touch()
        fresh = seconds and not cached
        self.add(compilation_runs(plan, spec, self.machine, seconds, cached=False) if fresh else [found])


def measure_attention(
    plan: ExecutionPlan, spec: ModelSpec, history: HistoryFile, measure: Measure | None = None
) -> None:
    """Measure the exact attention kernels on this GPU, once per size class and dtype, for later plans.

    The job itself keeps its planned kernel, so that a resumed job gives the same video bit by bit.

    Args:
        measure: by default `execution.attention.seconds_of`.
    """
    kernels = unmeasured(plan, spec, history.read(), history.machine)
    if not kernels:
        return
    from runtime.execution.attention import seconds_of
    from runtime.execution.memory import release_cached_memory

    measure = measure or seconds_of
    part, transformer = plan.components["transformer"], spec.transformer
    flops, name = attention_flops(spec, plan.tokens), device_name(history.machine, part.device)
    runs = []
    for kernel in kernels:
        try:
            seconds = measure(
                kernel,
                plan.tokens,
                transformer.num_attention_heads,
                transformer.attention_head_dim,
                part.dtype,
                part.device,
            )
        except Exception as error:  # each package raises its own errors; a kernel that fails is not used
            logger.info("Attention kernel %s could not be measured: %s", kernel, type(error).__name__)
            continue
        kind = attention_kind(name, part.dtype, kernel)
        runs.append(Run(kind=kind, flops=flops, seconds=seconds, working_bytes=1, excess_bytes=None))
    release_cached_memory()
    history.add(runs)


def unmeasured(plan: ExecutionPlan, spec: ModelSpec, history: History, machine: Machine) -> list[str]:
    """Return the attention kernels to measure for a plan; none if one was requested or there is no choice."""
    part = plan.components["transformer"]
    float32 = DTYPE_BYTES[part.dtype] > DTYPE_BYTES["bfloat16"]  # fast kernels need 16 bits
    if plan.request.attention != AUTO or part.on_engine or not part.device.startswith("cuda") or float32:
        return []
    if "attention" in spec.lacks:
        return []
    name, flops = device_name(machine, part.device), attention_flops(spec, plan.tokens)
    if attention_seconds(history, name, part.dtype, flops):
        return []
    return exact_attentions(seen_from(machine, gpu_index(part.device)))
