"""What comes next where memory ran out: the first way on the ladder that takes less of it at that point. Pure.

A forecast said that the way taken fits, and was wrong, or another program took memory since. So what counts is not
what is free but that the part which ran out takes less.
"""

from dataclasses import dataclass, replace
from typing import Literal

from runtime.core.forecast import Rung
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.tiles import times_decoded
from runtime.manager import vram
from runtime.manager.speed import relieved
from runtime.manager.vram import Load, Way
from runtime.models.spec import ModelSpec, is_transformer

Memory = Literal["VRAM", "RAM"]


@dataclass(frozen=True)
class Relief:
    """A more frugal way.

    Attributes:
        plan: that takes it.
        rung: as the ladder has it.
        times_as_long: the whole clip, beside the way that ran out.
    """

    plan: ExecutionPlan
    rung: Rung
    times_as_long: float


def next_way(plan: ExecutionPlan, spec: ModelSpec, component: str, memory: Memory, *, lossy: bool) -> Relief | None:
    """Return the first way that takes less of `memory` while `component` runs, or `None`.

    Args:
        lossy: also ways that change the video a little; those that do not come first all the same.
    """
    taken = next((rung for rung in plan.ladder if rung.taken), None)
    if taken is None:
        return None
    load = Load.of(plan, spec)
    # Weights that wait lie in system memory: there the device's forecast says nothing.
    waiting = memory == "RAM" and load.cuda

    def takes(rung: Rung) -> int:
        if waiting:
            return vram.ram_bytes(load, _way(rung))
        stages = vram.stages(load, _way(rung), rung.decode_chunk)
        return next(stage.peak_bytes for stage in stages if stage.component == component)

    now = takes(taken)
    found = [rung for rung in (*plan.ladder, *_smaller_decodes(plan, load, taken, component)) if not rung.taken]
    found = [rung for rung in found if _possible(plan, rung) and takes(rung) < now and (rung.lossless or lossy)]
    chosen = min(found, key=lambda rung: not rung.lossless, default=None)
    if chosen is None:
        return None
    slower = chosen.seconds.likely / taken.seconds.likely if taken.seconds.likely else 1.0
    return Relief(_taking(plan, spec, load, chosen, slower), chosen, slower)


def _possible(plan: ExecutionPlan, rung: Rung) -> bool:
    on_engines = any(part.engines for name, part in plan.components.items() if is_transformer(name))
    # An engine holds its weights itself; see `ladder`.
    changes_weights = (rung.offload, rung.quantization) != (plan.offload, plan.quantization)
    return not rung.lacks and rung.fits and rung.fits_ram and not (on_engines and changes_weights)


def _smaller_decodes(plan: ExecutionPlan, load: Load, taken: Rung, component: str) -> list[Rung]:
    """Return the way taken with less decoded at a time: fewer frames, then tiles of them."""
    if component != "vae" or plan.components["vae"].backend != PYTORCH:
        return []
    found = []
    way, _, _ = taken.title.partition(", decoding")
    if taken.decode_chunk > 1:
        found.append(replace(taken, taken=False, decode_chunk=1, title=f"{way}, decoding frame by frame"))
    scale = load.spec.vae.scale_factor_spatial
    for tile in vram.tile_sides(load):
        if taken.decode_tile is None or tile < taken.decode_tile:
            title = f"{way}, decoding in tiles of {tile * scale}x{tile * scale}"
            found.append(replace(taken, taken=False, decode_chunk=1, decode_tile=tile, lossless=False, title=title))
    return found


def _taking(plan: ExecutionPlan, spec: ModelSpec, load: Load, rung: Rung, slower: float) -> ExecutionPlan:
    dtypes = {name: part.dtype for name, part in plan.components.items()}
    weights = vram.weights_bytes(spec, dtypes, rung.quantization)
    components = {
        name: replace(part, quantization=rung.quantization, weights_bytes=weights[name])
        if is_transformer(name) and not part.engines
        else part
        for name, part in plan.components.items()
    }
    ladder = tuple(replace(other, taken=other == rung) for other in plan.ladder)
    speed = relieved(plan.speed, rung.offload, rung.quantization)
    load = replace(load, text_bytes=speed.text_bytes, at_once=vram.at_once(speed))
    memory = vram.stages(load, _way(rung), rung.decode_chunk)
    return replace(
        plan,
        components=components,
        offload=rung.offload,
        quantization=rung.quantization,
        decode_chunk=rung.decode_chunk,
        decode_tile=rung.decode_tile,
        # Tiles are decoded by one GPU alone.
        split=plan.split if plan.split is None or rung.decode_tile is None else replace(plan.split, decode=False),
        keep_loaded=rung.keep_loaded,
        freed=rung.freed,
        speed=speed,
        decode_flops=plan.decode_flops
        * times_decoded(*plan.latent_shape[3:], rung.decode_tile)
        / times_decoded(*plan.latent_shape[3:], plan.decode_tile),
        memory=memory,
        memory_bytes=max(stage.peak_bytes for stage in memory),
        seconds={name: seconds if name == "load" else seconds * slower for name, seconds in plan.seconds.items()},
        ladder=ladder if rung in plan.ladder else (replace(rung, taken=True), *ladder),
    )


def _way(rung: Rung) -> Way:
    return Way(
        offload=rung.offload,
        quantization=rung.quantization,
        keep_loaded=rung.keep_loaded,
        freed=rung.freed,
        decode_tile=rung.decode_tile,
    )
