"""Memory and time of the model that makes a plan's control frames. Pure.

It runs before all components, and is freed before they are loaded; those of an earlier job may be loaded meanwhile.
"""

from runtime.core.estimates import Seconds, StageMemory
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.preprocessors import DEPTH_ESTIMATOR, PERSON_DETECTOR, POSE_ESTIMATOR, PREPROCESSOR, PreprocessorUse
from runtime.machine.probe import Machine
from runtime.planner import forecast
from runtime.planner.history import History, Kind, Run, device_name, seconds_per_call

# Frames of one call on a GPU, and the share of its free memory that a call may take.
_BATCH, _SHARE = 8, 0.25
# Positions at which the weights of a part are applied to a frame: 37×37 patches of 14 pixels, of which the head of the
# depth estimator computes as much again; a detector's 640×640 pixels in steps of 16; 16×12 patches of one person.
_POSITIONS = {DEPTH_ESTIMATOR: 2 * 37 * 37, PERSON_DETECTOR: 40 * 40, POSE_ESTIMATOR: 16 * 12}
# Bytes of activations for each pixel that a part sees: of 64 channels in float32, twice.
_PIXEL_BYTES = 2 * 64 * 4
# The pixels of a frame that a part sees at most: the longer side of a wide frame has twice the shorter one's.
_PIXELS = {DEPTH_ESTIMATOR: 2 * 518 * 518, PERSON_DETECTOR: 640 * 640, POSE_ESTIMATOR: 256 * 192}


def with_preprocessor(plan: ExecutionPlan, machine: Machine, history: History) -> ExecutionPlan:
    """Return a plan with the memory, the frames of one call, and the seconds of the model that makes control frames."""
    use = plan.preprocessor
    assert use is not None
    device = plan.components["transformer"].device
    frame_bytes = max(_PIXELS[part] for part in use.folders) * _PIXEL_BYTES
    batch = 1 if device == "cpu" else _BATCH
    free = machine.ram_free_bytes if device == "cpu" else machine.gpu_of(device).free_bytes
    while batch > 1 and batch * frame_bytes > _SHARE * free:
        batch //= 2
    use = use.replace(batch=batch)
    kept = max(stage.weights_bytes for stage in plan.memory) if plan.strategy.keep_loaded else 0
    memory = StageMemory(
        stage="encode",
        component=PREPROCESSOR,
        weights_bytes=use.weights_bytes + kept,
        working_bytes=batch * frame_bytes,
        overhead_bytes=plan.memory[0].overhead_bytes,
        allocator_slack_bytes=plan.memory[0].allocator_slack_bytes,
    )
    seconds = _seconds(use, plan.frames, device, machine, history)
    added = {"encode", "total", "later"}
    times = {name: total + seconds if name in added else total for name, total in plan.seconds.items()}
    return plan.replace(
        preprocessor=use,
        memory=(memory, *plan.memory),
        seconds={**times, "load": plan.seconds["load"] + forecast.read_seconds(use.weights_bytes, len(use.folders))},
        strategies=tuple(entry.replace(seconds=entry.seconds + seconds) for entry in plan.strategies),
    )


def _operations(use: PreprocessorUse, frames: int) -> float:
    """Return the operations (two per multiply-add) of so many frames, with one person in each."""
    return 2.0 * frames * sum(count * _POSITIONS[part] for part, count in use.parameters.items())


def _seconds(use: PreprocessorUse, frames: int, device: str, machine: Machine, history: History) -> Seconds:
    operations = _operations(use, frames)
    measured = seconds_per_call(history, _kind(use, device, machine), operations)
    return measured or forecast.network_seconds(operations, device, machine)


def _kind(use: PreprocessorUse, device: str, machine: Machine) -> Kind:
    return Kind(
        device=device_name(machine, device),
        model=use.digest[:16],
        component=PREPROCESSOR,
        backend=PYTORCH,
        dtype="float32",
        quantization="none",
        offload="none",
    )


def run_of(plan: ExecutionPlan, machine: Machine, seconds: float, *, loaded: bool) -> Run:
    """Return the run that records how long the control frames of a finished job took.

    Args:
        loaded: see `history.Run`.
    """
    use, device = plan.preprocessor, plan.components["transformer"].device
    assert use is not None
    return Run(
        kind=_kind(use, device, machine),
        flops=_operations(use, plan.frames),
        seconds=seconds,
        working_bytes=1,
        excess_bytes=None,
        loaded=loaded and device == "cpu",
    )
