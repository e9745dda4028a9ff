"""Engines of decoders and upscalers of single frames: their keys, those that are built already, and building one.

They take batches. A TensorRT plan has two optimization profiles: full batches, a size for which TensorRT chooses its
kernels, and any smaller number of frames. Other engines take full batches only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from runtime.core.cancel import Cancel
from runtime.core.errors import MachineError
from runtime.core.plan import EngineRef
from runtime.engines.build import build_engine
from runtime.engines.builders import Builder, builders_for, builders_of
from runtime.engines.child import Report
from runtime.engines.offers import frame_precision, frame_profiles
from runtime.engines.service import EngineService
from runtime.models.spec import FRAME_BATCH, FRAME_DECODER, ModelSpec
from runtime.planner.choice.engine_index import EngineKey, EngineRecord


@dataclass(frozen=True)
class FrameEngine:
    """An engine of a decoder of single frames, built or not.

    Attributes:
        key: of the engine.
        device: the torch device that it is for.
        record: of the engine in the library, usable or not; `None` if it is not built.
    """

    key: EngineKey
    device: str
    record: EngineRecord | None

    @property
    def use(self) -> EngineRef:
        """The engine as `service.open_engines` takes it."""
        low, high = self.key.profiles[-1].min, self.key.profiles[0].max
        return EngineRef(
            id=self.key.digest(),
            program=self.key.program,
            builder=self.key.builder,
            precision=self.key.precision,
            profile=(low, high, high),
            build=self.record is None,
        )

    @property
    def takes_any(self) -> bool:
        """Whether it takes fewer frames than a full batch."""
        return self.key.profiles[-1].min[0] < self.key.profiles[0].max[0]


def frame_component(spec: ModelSpec) -> str:
    """Return the only component of a model of single frames, which has the name of its program."""
    (component,) = spec.component_names
    return component


def frame_engine(
    engines: EngineService,
    spec: ModelSpec,
    builder: Builder,
    latent: tuple[int, int],
    device: str,
    *,
    batch: int = FRAME_BATCH,
    precision: str = "",
) -> FrameEngine:
    """Return the engine that a builder would build now.

    Args:
        latent: (height, width) of the latents.
        batch: frames of a full batch.
        precision: of the arithmetic; by default `offers.frame_precision`.

    Raises:
        ModelError: if the weights cannot be read.
        EngineError: if the device does not exist.
    """
    program = frame_component(spec)
    key = builder.key(
        spec,
        program,
        program,
        frame_profiles(builder.name, (batch, *latent)),
        precision=precision or frame_precision(builder, spec, program, engines.machine, device),
        machine=engines.machine,
        device=device,
        cache_dir=engines.cache_dir,
    )
    return FrameEngine(key, device, engines.store.get(key))


def builder_of(engines: EngineService, backend: str, device: str, component: str = FRAME_DECODER) -> Builder:
    """Return the builder of a backend's engines of decoders, or upscalers, of single frames.

    Raises:
        MachineError: if this machine cannot build or run them.
    """
    names = {builder.name for builder in builders_for(device)}
    candidates = [builder for builder in builders_of(backend) if builder.kind == "component" and builder.name in names]
    if not candidates:
        raise MachineError("pipeline.backend_unsupported", backend=backend, component=component, device=device)
    problems = [builder.unavailable(engines.machine) for builder in candidates]
    able = [builder for builder, problem in zip(candidates, problems, strict=True) if problem is None]
    if not able:
        raise MachineError("pipeline.not_buildable", backend=backend, cause=problems[0])
    return able[0]


def usable_engines(
    engines: EngineService, spec: ModelSpec, latent: tuple[int, int], device: str, *, batch: int = FRAME_BATCH
) -> list[FrameEngine]:
    """Return the engines in the library that were faster than PyTorch, the fastest first."""
    ranking = []
    for builder in _component_builders(engines, device):
        engine = frame_engine(engines, spec, builder, latent, device, batch=batch)
        record = engine.record
        if record is not None and record.usable and record.seconds_per_call < record.pytorch_seconds:
            ranking.append((record.seconds_per_call, engine))
    return [engine for _, engine in sorted(ranking, key=lambda pair: pair[0])]


def buildable_engines(
    engines: EngineService, spec: ModelSpec, latent: tuple[int, int], device: str, *, batch: int = FRAME_BATCH
) -> list[FrameEngine]:
    """Return an engine of each backend that this machine can build, the usually fastest first."""
    first: dict[str, Builder] = {}
    for builder in _component_builders(engines, device):
        first.setdefault(builder.backend, builder)
    return [frame_engine(engines, spec, builder, latent, device, batch=batch) for builder in first.values()]


def _component_builders(engines: EngineService, device: str) -> Iterator[Builder]:
    for builder in builders_for(device):
        if builder.kind == "component" and builder.unavailable(engines.machine) is None:
            yield builder


def build_frame_engine(
    engines: EngineService, spec: ModelSpec, engine: FrameEngine, report: Report, cancel: Cancel, *, again: bool = False
) -> FrameEngine:
    """Build an engine, or return it if it exists.

    Raises:
        EngineError, CancelledError: see `build.build_engine`.
    """
    request = engines.request(spec, frame_component(spec), engine.key, engine.device, None)
    return replace(engine, record=build_engine(replace(request, again=again), engines.store, report, cancel))
