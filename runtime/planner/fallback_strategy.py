"""The fallback after out-of-memory: the first strategy that takes less of it at that point. Pure.

The forecast said that the plan's strategy fits, and was wrong, or another program took memory since. So free memory
does not count, only that the component that ran out takes less.
"""

from dataclasses import dataclass, replace
from typing import Literal

from runtime.core.estimates import MemoryStrategy, StrategyForecast
from runtime.core.events import OutOfMemory, Stage
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.tiles import times_decoded
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import memory_model
from runtime.planner.execution_options import relieved
from runtime.planner.memory_model import Workload

Memory = Literal["VRAM", "RAM"]


@dataclass(frozen=True)
class FallbackStrategy:
    """A lower-memory strategy.

    Attributes:
        plan: the plan with it.
        forecast: what it takes.
        slowdown: duration of the whole clip, as a multiple of the previous strategy's.
    """

    plan: ExecutionPlan
    forecast: StrategyForecast
    slowdown: float

    @property
    def permitted(self) -> bool:
        """Whether the request allows a job to continue with it."""
        allowed = self.plan.asked.on_out_of_memory
        return allowed == "any" or (allowed == "retry" and self.forecast.strategy.lossless)

    @property
    def changes(self) -> dict[str, str]:
        """The request fields that select it; a strategy without settings of its own is permitted by a field."""
        strategy = self.forecast.strategy
        changes = {"offload": strategy.offload, "quantization": strategy.quantization}
        changes = {name: value for name, value in changes.items() if value != "none"}
        return changes or {"on_out_of_memory": "retry" if strategy.lossless else "any"}

    def event(self, stage: Stage, component: str, memory: Memory, lost_seconds: float) -> OutOfMemory:
        """Return the event that memory ran out: the job continues with this strategy if that is permitted."""
        return OutOfMemory(
            stage=stage,
            component=component,
            memory=memory,
            retried=self.permitted,
            strategy=self.forecast.title,
            changes=self.changes,
            slowdown=round(self.slowdown, 2),
            lossless=self.forecast.strategy.lossless,
            lost_seconds=lost_seconds,
            plan=self.plan if self.permitted else None,
        )


def next_strategy(
    plan: ExecutionPlan, spec: ModelSpec, component: str, memory: Memory, *, lossy: bool
) -> FallbackStrategy | None:
    """Return the first strategy that takes less of `memory` while `component` runs, or `None`.

    Args:
        lossy: also strategies that change the video a little; the others come first all the same.
    """
    workload = Workload.of(plan, spec)
    # Offloaded weights are in system memory: there the device's forecast says nothing.
    offloaded = memory == "RAM" and workload.cuda

    def takes(strategy: MemoryStrategy) -> int:
        if offloaded:
            return memory_model.ram_bytes(workload, strategy)
        stages = memory_model.stages(workload, strategy)
        return next(stage.peak_bytes for stage in stages if stage.component == component)

    current, now = plan.forecast, takes(plan.strategy)
    found = [
        other
        for other in (*plan.strategies, *_smaller_decodes(plan, workload, component))
        if _possible(plan, other) and takes(other.strategy) < now and (other.strategy.lossless or lossy)
    ]
    chosen = min(found, key=lambda other: not other.strategy.lossless, default=None)
    if chosen is None:
        return None
    slowdown = chosen.seconds.likely / current.seconds.likely if current.seconds.likely else 1.0
    return FallbackStrategy(_with(plan, spec, workload, chosen, slowdown), chosen, slowdown)


def _possible(plan: ExecutionPlan, other: StrategyForecast) -> bool:
    on_engines = any(part.engines for name, part in plan.components.items() if is_transformer(name))
    # An engine holds its weights itself; see `strategies`.
    now, then = plan.strategy, other.strategy
    changes_weights = (now.offload, now.quantization) != (then.offload, then.quantization)
    return not other.lacks and other.fits and other.fits_ram and not (on_engines and changes_weights)


def _smaller_decodes(plan: ExecutionPlan, workload: Workload, component: str) -> list[StrategyForecast]:
    """Return the plan's strategy with less decoded at a time: fewer frames, then tiles of them."""
    if component != "vae" or plan.components["vae"].backend != PYTORCH:
        return []
    found = []
    current, strategy = plan.forecast, plan.strategy
    title = current.title
    if title.code in {"strategy.tiles", "strategy.frame_by_frame"}:
        title = title.data["how"]
    if strategy.decode_chunk > 1:
        single = strategy.replace(decode_chunk=1)
        found.append(current.replace(strategy=single, title=Fact("strategy.frame_by_frame", {"how": title})))
    scale = workload.spec.vae.scale_factor_spatial
    for tile in memory_model.tile_sides(workload):
        if strategy.decode_tile is None or tile < strategy.decode_tile:
            tiled = strategy.replace(decode_chunk=1, decode_tile=tile)
            tiled_title = Fact("strategy.tiles", {"how": title, "side": tile * scale})
            found.append(current.replace(strategy=tiled, title=tiled_title))
    return found


def _with(
    plan: ExecutionPlan, spec: ModelSpec, workload: Workload, chosen: StrategyForecast, slowdown: float
) -> ExecutionPlan:
    strategy = chosen.strategy
    dtypes = {name: part.dtype for name, part in plan.components.items()}
    weights = memory_model.weights_bytes(spec, dtypes, strategy.quantization)
    components = {
        name: part.replace(quantization=strategy.quantization, weights_bytes=weights[name])
        if is_transformer(name) and not part.engines
        else part
        for name, part in plan.components.items()
    }
    speed = relieved(plan.speed, strategy.offload, strategy.quantization)
    workload = replace(workload, text_bytes=speed.text_bytes, at_once=memory_model.at_once(speed))
    return plan.replace(
        components=components,
        strategy=strategy,
        # Tiles are decoded by one GPU alone.
        split=plan.split if plan.split is None or strategy.decode_tile is None else plan.split.replace(decode=False),
        speed=speed,
        decode_flops=plan.decode_flops
        * times_decoded(*plan.latent_shape[3:], strategy.decode_tile)
        / times_decoded(*plan.latent_shape[3:], plan.strategy.decode_tile),
        memory=memory_model.stages(workload, strategy),
        seconds={name: seconds if name == "load" else seconds * slowdown for name, seconds in plan.seconds.items()},
        strategies=plan.strategies if chosen in plan.strategies else (chosen, *plan.strategies),
    )
