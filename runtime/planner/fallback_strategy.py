"""What comes next where memory ran out: the first way on the ladder that takes less of it at that point. Pure.

A forecast said that the way taken fits, and was wrong, or another program took memory since. So what counts is not
what is free but that the part which ran out takes less.
"""

from dataclasses import dataclass, replace
from typing import Literal

from runtime.core.estimates import Strategy
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.tiles import times_decoded
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import memory_model
from runtime.planner.execution_options import relieved
from runtime.planner.memory_model import Load, Way

Memory = Literal["VRAM", "RAM"]


@dataclass(frozen=True)
class FallbackStrategy:
    """A more frugal way.

    Attributes:
        plan: that takes it.
        rung: as the ladder has it.
        times_as_long: the whole clip, beside the way that ran out.
    """

    plan: ExecutionPlan
    strategy: Strategy
    slowdown: float


def next_way(
    plan: ExecutionPlan, spec: ModelSpec, component: str, memory: Memory, *, lossy: bool
) -> FallbackStrategy | None:
    """Return the first way that takes less of `memory` while `component` runs, or `None`.

    Args:
        lossy: also ways that change the video a little; those that do not come first all the same.
    """
    taken = next((strategy for strategy in plan.strategies if strategy.taken), None)
    if taken is None:
        return None
    load = Load.of(plan, spec)
    # Weights that wait lie in system memory: there the device's forecast says nothing.
    waiting = memory == "RAM" and load.cuda

    def takes(strategy: Strategy) -> int:
        if waiting:
            return memory_model.ram_bytes(load, _way(strategy))
        stages = memory_model.stages(load, _way(strategy), strategy.decode_chunk)
        return next(stage.peak_bytes for stage in stages if stage.component == component)

    now = takes(taken)
    found = [
        strategy
        for strategy in (*plan.strategies, *_smaller_decodes(plan, load, taken, component))
        if not strategy.taken
    ]
    found = [
        strategy
        for strategy in found
        if _possible(plan, strategy) and takes(strategy) < now and (strategy.lossless or lossy)
    ]
    chosen = min(found, key=lambda strategy: not strategy.lossless, default=None)
    if chosen is None:
        return None
    slower = chosen.seconds.likely / taken.seconds.likely if taken.seconds.likely else 1.0
    return FallbackStrategy(_taking(plan, spec, load, chosen, slower), chosen, slower)


def _possible(plan: ExecutionPlan, strategy: Strategy) -> bool:
    on_engines = any(part.engines for name, part in plan.components.items() if is_transformer(name))
    # An engine holds its weights itself; see `ladder`.
    changes_weights = (strategy.offload, strategy.quantization) != (plan.offload, plan.quantization)
    return not strategy.lacks and strategy.fits and strategy.fits_ram and not (on_engines and changes_weights)


def _smaller_decodes(plan: ExecutionPlan, load: Load, taken: Strategy, component: str) -> list[Strategy]:
    """Return the way taken with less decoded at a time: fewer frames, then tiles of them."""
    if component != "vae" or plan.components["vae"].backend != PYTORCH:
        return []
    found = []
    way, _, _ = taken.title.partition(", decoding")
    if taken.decode_chunk > 1:
        found.append(replace(taken, taken=False, decode_chunk=1, title=f"{way}, decoding frame by frame"))
    scale = load.spec.vae.scale_factor_spatial
    for tile in memory_model.tile_sides(load):
        if taken.decode_tile is None or tile < taken.decode_tile:
            title = f"{way}, decoding in tiles of {tile * scale}x{tile * scale}"
            found.append(replace(taken, taken=False, decode_chunk=1, decode_tile=tile, lossless=False, title=title))
    return found


def _taking(plan: ExecutionPlan, spec: ModelSpec, load: Load, strategy: Strategy, slower: float) -> ExecutionPlan:
    dtypes = {name: part.dtype for name, part in plan.components.items()}
    weights = memory_model.weights_bytes(spec, dtypes, strategy.quantization)
    components = {
        name: replace(part, quantization=strategy.quantization, weights_bytes=weights[name])
        if is_transformer(name) and not part.engines
        else part
        for name, part in plan.components.items()
    }
    strategies = tuple(replace(other, taken=other == strategy) for other in plan.strategies)
    speed = relieved(plan.speed, strategy.offload, strategy.quantization)
    load = replace(load, text_bytes=speed.text_bytes, at_once=memory_model.at_once(speed))
    memory = memory_model.stages(load, _way(strategy), strategy.decode_chunk)
    return replace(
        plan,
        components=components,
        offload=strategy.offload,
        quantization=strategy.quantization,
        decode_chunk=strategy.decode_chunk,
        decode_tile=strategy.decode_tile,
        # Tiles are decoded by one GPU alone.
        split=plan.split if plan.split is None or strategy.decode_tile is None else replace(plan.split, decode=False),
        keep_loaded=strategy.keep_loaded,
        freed=strategy.freed,
        speed=speed,
        decode_flops=plan.decode_flops
        * times_decoded(*plan.latent_shape[3:], strategy.decode_tile)
        / times_decoded(*plan.latent_shape[3:], plan.decode_tile),
        memory=memory,
        memory_bytes=max(stage.peak_bytes for stage in memory),
        seconds={name: seconds if name == "load" else seconds * slower for name, seconds in plan.seconds.items()},
        strategies=strategies if strategy in plan.strategies else (replace(strategy, taken=True), *strategies),
    )


def _way(strategy: Strategy) -> Way:
    return Way(
        offload=strategy.offload,
        quantization=strategy.quantization,
        keep_loaded=strategy.keep_loaded,
        freed=strategy.freed,
        decode_tile=strategy.decode_tile,
    )
