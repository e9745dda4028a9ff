"""Measure the attention kernels on this GPU, once per size class and dtype, in the first job that would benefit.

The job itself keeps its planned kernel, so that it can be resumed bit for bit; the measurements serve later plans.
"""

import logging
from collections.abc import Callable

from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.request import AUTO
from runtime.execution.attention import seconds_of
from runtime.execution.memory import release_cached_memory
from runtime.machine.probe import Machine, gpu_index, seen_from
from runtime.models.spec import ModelSpec, attention_flops
from runtime.pipeline.history import HistoryFile
from runtime.planner.execution_options import exact_attentions
from runtime.planner.history import History, Run, attention_kind, attention_seconds, device_name
from runtime.planner.memory_model import DTYPE_BYTES

logger = logging.getLogger(__name__)

# Returns the seconds of one attention call: kind, tokens, heads, head dimension, dtype, device.
Measure = Callable[[str, int, int, int, str, str], float]


def measure_attention(
    plan: ExecutionPlan, spec: ModelSpec, history: HistoryFile, machine: Machine, measure: Measure = seconds_of
) -> None:
    """Measure the exact attention kernels, unless the history has measurements for such a clip on this GPU."""
    wanted = unmeasured(plan, spec, history.read(), machine)
    if not wanted:
        return
    part, transformer = plan.components["transformer"], spec.transformer
    flops, name = attention_flops(spec, plan.tokens), device_name(machine, part.device)
    found = []
    for kind in wanted:
        try:
            seconds = measure(
                kind,
                plan.tokens,
                transformer.num_attention_heads,
                transformer.attention_head_dim,
                part.dtype,
                part.device,
            )
        except Exception as error:  # each package raises its own errors; a kernel that fails is not used
            logger.info("The attention %s was not measured: %s", kind, type(error).__name__)
            continue
        kind_of_run = attention_kind(name, part.dtype, kind)
        found.append(Run(kind=kind_of_run, flops=flops, seconds=seconds, working_bytes=1, excess_bytes=None))
    release_cached_memory()
    history.add(found)


def unmeasured(plan: ExecutionPlan, spec: ModelSpec, history: History, machine: Machine) -> list[str]:
    """Return the attention kernels to measure before a clip is made."""
    part = plan.components["transformer"]
    full = DTYPE_BYTES[part.dtype] > DTYPE_BYTES["bfloat16"]
    if plan.asked.attention != AUTO or part.backend != PYTORCH or not part.device.startswith("cuda") or full:
        return []
    name, flops = device_name(machine, part.device), attention_flops(spec, plan.tokens)
    if attention_seconds(history, name, part.dtype, flops):
        return []
    return exact_attentions(seen_from(machine, gpu_index(part.device)))
