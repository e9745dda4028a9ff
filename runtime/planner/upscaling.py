"""How an upscaler enlarges frames, how long that takes, and the upscaler as a component of a video's plan. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import BackendSeconds, Seconds, StageMemory
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan, ExecutionPlan, LatentSize, Upscaling, default_crf
from runtime.core.request import AUTO, MAX_SIDE, UPSCALER
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
# `Kind.speed` of upscaling as a stage of a job: without reading and encoding, which files take.
_STAGE = "stage"


@dataclass(frozen=True)
class UpscalerCalls:
    """How an upscaler is called for frames of one size.

    Attributes:
        spec: the upscaler.
        frame_height, frame_width: of the frames that it enlarges, in pixels.
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
        cls, spec: ModelSpec, height: int, width: int, device: str, machine: Machine, used_bytes: int = 0
    ) -> "UpscalerCalls":
        """Return the largest calls that fit into memory.

        Args:
            height, width: of the frames.
            used_bytes: of free memory that others use meanwhile.
        """
        gpu = None if device == "cpu" else machine.gpu_of(device)
        free = machine.ram_free_bytes if gpu is None else gpu.free_bytes
        if gpu is None:
            dtype = "bfloat16" if machine.cpu_has_bfloat16 else "float32"
        else:
            dtype = "float16" if gpu.capability >= _FLOAT16_CAPABILITY else "float32"
        calls = cls(spec, height, width, device, dtype, None, 1 if gpu is None else FRAME_BATCH)
        smaller = calls.smaller()
        while smaller is not None and not calls._fits(free - used_bytes):
            calls, smaller = smaller, smaller.smaller()
        return calls

    @property
    def architecture(self) -> Any:
        """The architecture of the upscaler."""
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

    def smaller(self) -> "UpscalerCalls | None":
        """Return the calls that need the next less memory; `None` if there are none."""
        if self.batch > 1:
            return replace(self, batch=self.batch // 2)
        longest = max(self.frame_height, self.frame_width) if self.tile is None else self.tile
        tiles = [side for side in _TILES if side < longest and side >= _MARGIN * self.architecture.context]
        return replace(self, tile=tiles[0]) if tiles else None

    def _fits(self, free_bytes: int) -> bool:
        return self.call_bytes <= _SHARE * free_bytes

    def flops(self, frames: int) -> float:
        """Return the operations of so many frames."""
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
            component=UPSCALER,
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


def check_size(width: int, height: int, scale: int, field: str) -> None:
    """Check that an upscaled video can be saved.

    Raises:
        InvalidRequestError: if it would be too large; names `field`.
    """
    if scale * max(width, height) > MAX_SIDE:
        raise InvalidRequestError(field, "upscale.too_large", width=width, height=height, scale=scale, most=MAX_SIDE)


def calls_of(plan: ExecutionPlan, spec: ModelSpec) -> UpscalerCalls:
    """Return how the upscaler of a plan is called; `spec` is its model's."""
    assert plan.upscaling is not None
    assert spec.upscaler is not None
    part, upscaling = plan.components[UPSCALER], plan.upscaling
    return UpscalerCalls(
        spec.upscaler, plan.height, plan.width, part.device, part.dtype, upscaling.tile, upscaling.batch
    )


def run_of(plan: ExecutionPlan, spec: ModelSpec, machine: Machine, seconds: float, *, loaded: bool) -> Run:
    """Return the run that records how long the upscaler of a finished job took; see `UpscalerCalls.run`."""
    calls, part = calls_of(plan, spec), plan.components[UPSCALER]
    return calls.run(calls.kind(machine, part.backend, _speed_of(part)), seconds, plan.video_frames, loaded=loaded)


def _speed_of(part: ComponentPlan | Choice) -> str:
    return f"{_STAGE} {whole_tag(part.engines)}" if part.engines else _STAGE


def with_upscaler(
    plan: ExecutionPlan, spec: ModelSpec, machine: Machine, offers: Offers, history: History
) -> ExecutionPlan:
    """Return a plan with the upscaler as its last component; without one, the plan unchanged.

    The upscaler runs while the VAE decodes, on the same device. It takes what memory is left, in tiles if necessary.

    Raises:
        InvalidRequestError: if the video would be too large.
    """
    upscaler, request = spec.upscaler, plan.request
    if upscaler is None:
        return plan
    scale = upscaler.vae.scale_factor_spatial
    check_size(plan.width, plan.height, scale, "upscale")
    device = plan.components["vae"].device
    decoding = next(stage for stage in plan.memory if stage.component == "vae")
    on_gpu = device != "cpu"
    calls = UpscalerCalls.of(
        upscaler, plan.height, plan.width, device, machine, decoding.peak_bytes if on_gpu else decoding.working_bytes
    )
    size: LatentSize = (calls.batch, *calls.call_size)
    requested = request.backend(UPSCALER)
    offered = () if requested == PYTORCH else offers(UPSCALER, size, device)
    problem = cuda_problem(machine)
    in_pytorch = Fact("planner.on_cpu", {"cause": problem})
    if problem is None:
        in_pytorch = Fact("planner.upscaled_on_gpu", {"gpu": machine.gpu_of(device).name, "dtype": calls.dtype})
    choice = choose(requested, request.build, offered, in_pytorch)
    compared = _compared(calls, plan.video_frames, offered)
    kind = calls.kind(machine, choice.backend, _speed_of(choice))
    seconds = calls.seconds(plan.video_frames, kind, machine, history)
    if not seconds.known:
        if choice.engines:
            plain = calls.seconds(plan.video_frames, calls.kind(machine, PYTORCH, _STAGE), machine, history)
            seconds = forecast.unmeasured_engine(plain, "cuda" if on_gpu else "cpu")
        seconds = next((entry.seconds for entry in compared if entry.backend == choice.backend), seconds)
    weights = upscaler.total_parameters * DTYPE_BYTES[calls.dtype]
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
    return _added(plan, calls, part, upscaler.name.removesuffix(f" {scale}x"), decoding)


def _added(
    plan: ExecutionPlan, calls: UpscalerCalls, part: ComponentPlan, name: str, decoding: StageMemory
) -> ExecutionPlan:
    """Return a plan with the upscaler `name`, which takes its memory and its seconds beside those of decoding."""
    seconds = part.seconds
    assert seconds is not None
    memory = StageMemory(
        stage="upscale",
        component=UPSCALER,
        weights_bytes=decoding.weights_bytes + part.weights_bytes,
        working_bytes=decoding.working_bytes + calls.call_bytes,
        overhead_bytes=decoding.overhead_bytes,
        allocator_slack_bytes=decoding.allocator_slack_bytes,
    )
    return plan.replace(
        upscale=str(calls.architecture.output_scale),
        upscaler=name,
        upscaling=Upscaling(width=calls.width, height=calls.height, tile=calls.tile, batch=calls.batch),
        crf=default_crf(calls.width, calls.height) if plan.request.crf == AUTO else plan.crf,
        components={**plan.components, UPSCALER: part},
        memory=(*plan.memory, memory),
        seconds={
            **plan.seconds,
            **{name: total + seconds for name, total in plan.seconds.items() if name in {"total", "later"}},
            "upscale": seconds,
            "load": plan.seconds["load"] + forecast.read_seconds(part.weights_bytes),
        },
        strategies=tuple(entry.replace(seconds=entry.seconds + seconds) for entry in plan.strategies),
    )


def _compared(calls: UpscalerCalls, frames: int, offers: Sequence[EngineOffer]) -> tuple[BackendSeconds, ...]:
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
