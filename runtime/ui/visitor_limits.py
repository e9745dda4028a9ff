"""What visitors of a share link may do: limits, and whether a wish keeps to them. Pure functions.

Knows nothing about pages, connections or the worker; `lobby` asks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.core.errors import InvalidRequestError, LimitError
from runtime.core.request import AUTO, RETRY, GenerationRequest
from runtime.core.settings import Settings
from runtime.core.step_cache import NONE
from runtime.models.spec import ModelSpec

HOUR = 3600.0
_MINUTE = 60
# Visitors leave the disk so much, for the videos of the person whose Tandem it is.
_SPARE_BYTES = 1 << 29


@dataclass(frozen=True)
class Limits:
    """What one video of a visitor may be, and how many they may ask for.

    Attributes:
        frames, steps: the most of them.
        sizes: the largest ones, (width, height); any other must fit into one of them, turned either way.
        waiting: how many videos of one visitor may wait or run.
        waiting_all: the same for all visitors together.
        an_hour: how many one visitor may ask for in an hour.
    """

    frames: int
    steps: int
    sizes: tuple[tuple[int, int], ...]
    waiting: int
    waiting_all: int
    an_hour: int


def limits_of(settings: Settings, spec: ModelSpec) -> Limits:
    """Return the limits for one model: what the settings say, else what the model itself takes where nobody says."""
    own = (spec.defaults.width, spec.defaults.height)
    return Limits(
        frames=settings.share_frames or spec.defaults.frames,
        steps=settings.share_steps or spec.defaults.steps,
        sizes=(settings.share_size,) if settings.share_size else tuple(dict.fromkeys((*spec.sizes, own))),
        waiting=settings.share_queue,
        waiting_all=settings.share_queue_all,
        an_hour=settings.share_rate,
    )


def defaults_within(spec: ModelSpec, limits: Limits) -> dict[str, int]:
    """Return what a visitor's video has where nobody says: the model's own width, height, frames and steps, or less."""
    wanted = (spec.defaults.width, spec.defaults.height)
    sizes = [size for size in (wanted, *spec.sizes) if may_have(size, limits)]
    width, height = sizes[0] if sizes else _down(limits.sizes[0], spec.strides)
    return {
        "width": width,
        "height": height,
        "frames": min(spec.defaults.frames, most_frames(spec, limits)),
        "steps": min(spec.defaults.steps, limits.steps),
    }


def most_frames(spec: ModelSpec, limits: Limits) -> int:
    """Return the most frames that the limits allow and the model can make."""
    stride = spec.vae.scale_factor_temporal
    return (limits.frames - 1) // stride * stride + 1


def may_have(size: tuple[int, int], limits: Limits) -> bool:
    """Return whether a visitor's video may be of this size."""
    return any(_fits(size, largest) for largest in limits.sizes)


def filled_in(request: GenerationRequest, spec: ModelSpec, limits: Limits) -> GenerationRequest:
    """Return the request with its size, length and steps said, and with nothing that is not a visitor's to choose."""
    own = defaults_within(spec, limits)
    said = {name: value for name, value in own.items() if getattr(request, name) == AUTO}
    return replace(
        request,
        **said,  # type: ignore[arg-type]  # by their names
        backends={},
        build="never",
        offload=AUTO,
        quantization=AUTO,
        on_out_of_memory=RETRY,
        gpus=1,
        loras=(),
        step_cache=NONE,
        attention=AUTO,
        compile=AUTO,
        vae_precision=AUTO,
    )


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Refuse a video that is larger than visitors' may be.

    Args:
        request: as `filled_in` returns it.

    Raises:
        InvalidRequestError: naming the field.
    """
    for name, most in (("frames", limits.frames), ("steps", limits.steps)):
        asked = getattr(request, name)
        if asked > most:
            raise InvalidRequestError(
                name, f"{asked} {name} are more than visitors may ask for.", f"Take at most {most}."
            )
    width, height = int(request.width), int(request.height)
    if not may_have((width, height), limits):
        raise InvalidRequestError(
            "width", f"{width}×{height} is larger than visitors may ask for.", f"Take at most {_largest(limits)}."
        )


def check_turn(limits: Limits, own_waiting: int, all_waiting: int, asked_before: Sequence[float], now: float) -> None:
    """Refuse a video that comes too soon.

    Args:
        asked_before: when this visitor asked before, in the clock of `now`, seconds, in order.

    Raises:
        LimitError: with when to try again.
    """
    if own_waiting >= limits.waiting:
        one = limits.waiting == 1
        said = "One video of yours waits or runs" if one else f"{limits.waiting} videos of yours wait or run"
        raise LimitError(f"{said} already.", "Let it end, or cancel it." if one else "Let one end, or cancel one.")
    if all_waiting >= limits.waiting_all:
        raise LimitError("The line is full: others are waiting too.", "Try again in some minutes.")
    recent = [at for at in asked_before if now - at < HOUR]
    if len(recent) >= limits.an_hour:
        minutes = max(1, round((recent[-limits.an_hour] + HOUR - now) / _MINUTE))
        times = "One video" if limits.an_hour == 1 else f"{limits.an_hour} videos"
        raise LimitError(
            f"{times} an hour is what a visitor may ask for.",
            f"Try again in {minutes} minute{'' if minutes == 1 else 's'}.",
        )


def check_room(free_bytes: int) -> None:
    """Refuse a video where the disk of the outputs is nearly full.

    Raises:
        LimitError: saying so.
    """
    if free_bytes < _SPARE_BYTES:
        raise LimitError("The disk here is nearly full.", "Ask who shared this to make room.")


def told(limits: Limits) -> str:
    """Return the limits in a sentence, as the page says them."""
    each = "one video" if limits.waiting == 1 else f"{limits.waiting} videos"
    return (
        f"At most {limits.frames} frames, {_largest(limits)} and {limits.steps} steps; "
        f"{each} at a time, {limits.an_hour} an hour."
    )


def visitors_models(models: Mapping[str, ModelSpec], folders: Mapping[str, Path]) -> dict[str, ModelSpec]:
    """Return the models that visitors may use: those of the catalogue, by their names; never a folder by its path."""
    return {spec.name: spec for spec in tuple(models.values()) if folders.get(spec.name) == spec.directory}


def without_paths(message: str, folders: Mapping[str, Path]) -> str:
    """Return a message without the places of folders on this machine: each is called by its name in `folders`."""
    for name, folder in sorted(folders.items(), key=lambda item: -len(str(item[1]))):
        message = message.replace(str(folder), name)
    return message


def _down(size: tuple[int, int], strides: tuple[int, int]) -> tuple[int, int]:
    """Return the nearest size below that the model can make."""
    width, height = (max(side // stride, 1) * stride for side, stride in zip(size, strides, strict=True))
    return width, height


def _fits(size: tuple[int, int], largest: tuple[int, int]) -> bool:
    return max(size) <= max(largest) and min(size) <= min(largest)


def _largest(limits: Limits) -> str:
    """Return the sizes into which no other fits."""
    sizes = [
        size
        for place, size in enumerate(limits.sizes)
        if not any(
            _fits(size, other) and (not _fits(other, size) or before < place)
            for before, other in enumerate(limits.sizes)
            if other != size
        )
    ]
    return " or ".join(f"{width}×{height}" for width, height in sizes)
