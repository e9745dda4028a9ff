"""How networks of single frames (upscalers, the interpolator) are called, and how long they take. Pure.

They are components that belong to models of their own. They run while the VAE decodes, on the same device, and take
what memory is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from runtime.core.estimates import BackendSeconds, Seconds, StageMemory
from runtime.core.events import Stage
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan, ExecutionPlan, LatentSize
from runtime.core.request import FINISHERS
from runtime.core.tiles import call_size, spans
from runtime.machine.compatibility import cuda_problem
from runtime.machine.probe import Machine
from runtime.models.spec import FRAME_BATCH, ModelSpec
from runtime.planner import forecast
from runtime.planner.choice.component_choice import Choice, choose
from runtime.planner.choice.engine_offers import EAGER_PATH, EngineOffer, Offers
from runtime.planner.history import History, Kind, Run, architecture, device_name, seconds_per_call, whole_tag
from runtime.planner.memory_model import DTYPE_BYTES

# Share of free memory that a call may take; the weights, the allocator and ffmpeg need the rest.
_SHARE = 0.5
# Sides of tiles in pixels of the source, the largest first.
_TILES = (512, 384, 256, 192)
# Tiles overlap by a quarter, and are cut in the middle of it.
_MARGIN = 8
# The capability from which GPUs are fast in float16.
_FLOAT16_CAPABILITY = (7, 0)
# `Kind.speed` of a stage of a job: without reading and encoding, which files take.
_STAGE = "stage"


def frame_dtype(machine: Machine, device: str) -> str:
    """Return the dtype in which PyTorch runs these networks: the fastest that changes no 8-bit colors."""
    if device == "cpu":
        return "bfloat16" if machine.cpu_has_bfloat16 else "float32"
    return "float16" if machine.gpu_of(device).capability >= _FLOAT16_CAPABILITY else "float32"


@dataclass(frozen=True)
class FrameCalls:
    """How a network of single frames is called for frames of one size: an upscaler, or the one that interpolates.

    Attributes:
        spec: the network, a model of a single component.
        frame_height, frame_width: of the frames that it takes, in pixels.
        device: a torch device.
        dtype: that PyTorch computes in.
        tile: side of square tiles in pixels of the source; `None` for whole frames.
        batch: frames, or tiles, of one call.
    """

    spec: ModelSpec
    frame_height: int
    frame_width: int
    device: str
    dtype: str
    tile: int | None
    batch: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        height: int,
        width: int,
        device: str,
        machine: Machine,
        used_bytes: int = 0,
        batch: int = FRAME_BATCH,
    ) -> "FrameCalls":
        """Return the largest calls that fit into memory.

        Args:
            height, width: of the frames.
            used_bytes: of free memory that others use meanwhile.
            batch: frames of one call of a GPU, if they fit.
        """
        gpu = None if device == "cpu" else machine.gpu_of(device)
        free = machine.ram_free_bytes if gpu is None else gpu.free_bytes
        calls = cls(spec, height, width, device, frame_dtype(machine, device), None, 1 if gpu is None else batch)
        smaller = calls.smaller()
        while smaller is not None and not calls._fits(free - used_bytes):
            calls, smaller = smaller, smaller.smaller()
        return calls

    @property
    def component(self) -> str:
        """The component of a plan that is called."""
        (component,) = self.spec.component_names
        return component

    @property
    def architecture(self) -> Any:
        """The architecture of the network."""
        return self.spec.vae

    @property
    def height(self) -> int:
        """Pixels of the result; H.264 needs an even number, so an odd one loses a row."""
        return int(self.frame_height * self.architecture.output_scale) // 2 * 2

    @property
    def width(self) -> int:
        """Pixels of the result, an even number."""
        return int(self.frame_width * self.architecture.output_scale) // 2 * 2

    @property
    def call_size(self) -> tuple[int, int]:
        """(height, width) of the frames or tiles of a call."""
        return call_size(self.frame_height, self.frame_width, self.tile)

    @property
    def tiles(self) -> int:
        """The tiles of a frame; 1 if it is not cut."""
        if self.tile is None:
            return 1
        return len(spans(self.frame_height, self.tile)) * len(spans(self.frame_width, self.tile))

    @property
    def call_bytes(self) -> int:
        """The memory of one call in PyTorch, weights excluded."""
        size = self.architecture.frame_size(*self.call_size)
        element = DTYPE_BYTES[self.dtype]
        return int(self.architecture.decode_bytes(self.batch, *size, element, cpu=self.device == "cpu"))

    def smaller(self) -> "FrameCalls | None":
        """Return the calls that need the next less memory; `None` if there are none."""
        if self.batch > 1:
            return replace(self, batch=self.batch // 2)
        longest = max(self.frame_height, self.frame_width) if self.tile is None else self.tile
        tiles = [side for side in _TILES if side < longest and side >= _MARGIN * self.architecture.context]
        return replace(self, tile=tiles[0]) if tiles else None

    def _fits(self, free_bytes: int) -> bool:
        return self.call_bytes <= _SHARE * free_bytes

    def flops(self, frames: int) -> float:
        """Return the operations of so many frames, as they are before."""
        height, width = self.architecture.frame_size(*self.call_size)
        return float(self.architecture.decode_flops(frames * self.tiles, height, width))

    def kind(self, machine: Machine, backend: str, speed: str = "") -> Kind:
        """Return the kind under which the history has frames like these.

        Args:
            backend: the requested one, or in the plan of a video the one that runs.
            speed: see `history.Kind`.
        """
        return Kind(
            device=device_name(machine, self.device),
            model=architecture(self.spec),
            component=self.component,
            backend=backend,
            dtype=self.dtype,
            quantization="none",
            offload="none",
            speed=speed,
        )

    def seconds(self, frames: int, kind: Kind, machine: Machine, history: History) -> Seconds:
        """Return how long so many frames take: as measured, else estimated for PyTorch."""
        flops = self.flops(frames)
        measured = seconds_per_call(history, kind, flops)
        return measured or forecast.decode_seconds(self.spec, flops, self.dtype, self.device, machine)

    def run(self, kind: Kind, seconds: float, frames: int, *, loaded: bool) -> Run:
        """Return the run that records, for later forecasts, how long so many frames took."""
        return Run(
            kind=kind,
            flops=self.flops(frames),
            seconds=seconds,
            working_bytes=1,
            excess_bytes=None,
            loaded=loaded and self.device == "cpu",
        )


def speed_of(part: ComponentPlan | Choice) -> str:
    """Return `Kind.speed` of a component that is a stage of a job."""
    return f"{_STAGE} {whole_tag(part.engines)}" if part.engines else _STAGE


def with_frame_network(
    plan: ExecutionPlan,
    calls: FrameCalls,
    frames: int,
    stage: Stage,
    machine: Machine,
    offers: Offers,
    history: History,
) -> ExecutionPlan:
    """Return a plan with a network as its next component, and with the network's memory and seconds.

    Args:
        frames: that the network computes.
        stage: the name of its stage.
    """
    name, request, device = calls.component, plan.request, calls.device
    on_gpu = device != "cpu"
    size: LatentSize = (calls.batch, *calls.call_size)
    requested = request.backend(name)
    offered = () if requested == PYTORCH else offers(name, size, device)
    problem = cuda_problem(machine)
    in_pytorch = Fact("planner.on_cpu", {"cause": problem})
    if problem is None:
        in_pytorch = Fact("planner.frames_on_gpu", {"gpu": machine.gpu_of(device).name, "dtype": calls.dtype})
    choice = choose(requested, request.build, offered, in_pytorch)
    compared = _compared(calls, frames, offered)
    kind = calls.kind(machine, choice.backend, speed_of(choice))
    seconds = calls.seconds(frames, kind, machine, history)
    if not seconds.known:
        if choice.engines:
            plain = calls.seconds(frames, calls.kind(machine, PYTORCH, _STAGE), machine, history)
            seconds = forecast.unmeasured_engine(plain, "cuda" if on_gpu else "cpu")
        seconds = next((entry.seconds for entry in compared if entry.backend == choice.backend), seconds)
    weights = calls.spec.total_parameters * DTYPE_BYTES[calls.dtype]
    weights = max(weights, choice.offer.file_bytes) if choice.offer is not None else weights
    part = ComponentPlan(
        backend=choice.backend,
        device=device,
        dtype=calls.dtype,
        weights_bytes=weights,
        reasons=choice.reasons,
        engines=choice.engines,
        badge=choice.badge,
        seconds=seconds,
        compared=compared,
    )
    decoding = decoding_memory(plan)
    memory = StageMemory(
        stage=stage,
        component=name,
        weights_bytes=decoding.weights_bytes + part.weights_bytes,
        working_bytes=decoding.working_bytes + calls.call_bytes,
        overhead_bytes=decoding.overhead_bytes,
        allocator_slack_bytes=decoding.allocator_slack_bytes,
    )
    plan = plan.replace(
        components={**plan.components, name: part},
        memory=(*plan.memory, memory),
        seconds={**plan.seconds, "load": plan.seconds["load"] + forecast.read_seconds(part.weights_bytes)},
    )
    return with_stage(plan, stage, seconds)


def with_stage(plan: ExecutionPlan, stage: Stage, seconds: Seconds) -> ExecutionPlan:
    """Return a plan with another stage after decoding, which adds its seconds."""
    return plan.replace(
        seconds={
            **plan.seconds,
            **{name: total + seconds for name, total in plan.seconds.items() if name in {"total", "later"}},
            stage: seconds,
        },
        strategies=tuple(entry.replace(seconds=entry.seconds + seconds) for entry in plan.strategies),
    )


def decoding_memory(plan: ExecutionPlan) -> StageMemory:
    """Return the memory of a plan's stage that the networks run beside: decoding, and networks that come before."""
    return [stage for stage in plan.memory if stage.component in {"vae", *FINISHERS}][-1]


def _compared(calls: FrameCalls, frames: int, offers: Sequence[EngineOffer]) -> tuple[BackendSeconds, ...]:
    """Return the seconds of all frames in PyTorch and on measured engines; see `ComponentPlan.compared`."""
    times = ceil(frames * calls.tiles / calls.batch)
    entries: dict[str, BackendSeconds] = {}
    for offer in offers:
        comparison = offer.compared(EAGER_PATH)
        figures = ((offer.backend, offer.builder, comparison.engine), (PYTORCH, "", comparison.pytorch))
        for backend, builder, call in figures:
            if comparison.speedup:
                seconds = forecast.measured_alone(call) * times
                entries.setdefault(builder, BackendSeconds(backend=backend, builder=builder, seconds=seconds))
    return tuple(sorted(entries.values(), key=lambda entry: entry.seconds.likely))
