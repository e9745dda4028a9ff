"""The ways to hold a model's weights, fastest first, each with its forecast; and which of them a plan takes.

Pure. A way that quantizes weights is taken unasked only where no other fits. Frames are decoded in tiles where they do
not fit whole though nothing but the VAE lies on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.core.errors import InvalidRequestError, MemoryShortError
from runtime.core.estimates import Seconds, StageMemory, Strategy
from runtime.core.plan import PYTORCH, Speed
from runtime.core.request import AUTO
from runtime.models.spec import is_transformer
from runtime.planner import constraints, estimate, execution_options, memory_model
from runtime.planner.build_limits import no_ram
from runtime.planner.estimate import Case
from runtime.planner.memory_model import Way

_GIB = 1 << 30
_SMALLER = "Ask for a smaller size or fewer frames, or take a smaller model."
_MORE_RAM = "Close other programs, add memory (RAM), or take a smaller model."
# What stays loaded stays for hours: so much of the free memory at most.
_KEEP_SHARE = {"cpu": 0.6, "cuda": 0.9}

_KEEP = ("Everything stays loaded", Way(keep_loaded=True))
_FREE_TEXT = ("Text encoder freed after the prompt", Way(keep_loaded=True, freed=("text_encoder",)))
_ONE = ("One part at a time", Way())
_MODEL = ("Parts wait in RAM", Way(offload="model"))
_GROUP = ("Blocks wait in RAM", Way(offload="group"))
_SEQUENTIAL = ("Layers wait in RAM", Way(offload="sequential"))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way with all that follows from it.

    Attributes:
        chunk: latent frames that the VAE decodes in one call.
        seconds: by stage, their "total", and "load", which the total leaves out.
        tight: whether it fits only if PyTorch's allocator takes nothing on top.
        against: why this machine cannot do it, however much memory is free.
        speed: how PyTorch computes it.
    """

    way: Way
    chunk: int
    memory: tuple[StageMemory, ...]
    seconds: Mapping[str, Seconds]
    strategy: Strategy
    tight: bool
    against: constraints.Conflict | None
    speed: Speed

    @property
    def settings(self) -> tuple[str, str]:
        """What a request says for it."""
        return self.way.offload, self.way.quantization


@dataclass(frozen=True)
class Decision:
    """The option that is taken, the whole ladder, and what there is to say."""

    taken: Option
    strategies: tuple[Strategy, ...]
    warnings: tuple[str, ...]


def options(case: Case) -> list[Option]:
    """Return every way there is on such a device, fastest first; what this machine lacks for one is its rung's."""
    if not case.load.cuda:
        return [_option(case, *named) for named in (_KEEP, _ONE)]
    if case.load.split is not None:
        # Each of several GPUs keeps what it runs.
        plain = [_option(case, *named) for named in (_KEEP, _FREE_TEXT, _ONE)]
        return [*plain, _first_that_fits(_quantized(case, "fp8"))]
    plain = [_option(case, *named) for named in (_KEEP, _FREE_TEXT, _ONE, _MODEL, _GROUP)]
    quantized = [_first_that_fits(_quantized(case, kind)[:3]) for kind in constraints.WEIGHTS_TITLES]
    return [*plain, *quantized, _option(case, *_SEQUENTIAL)]


def decide(case: Case, offload: str, quantization: str, clip: str) -> Decision:
    """Take a way.

    Args:
        offload, quantization: as asked for, or "auto".
        clip: what is to be made, as a sentence's subject.

    Raises:
        InvalidRequestError: if what was asked for excludes itself.
        MemoryShortError: if no such way fits, with the first way that does.
    """
    every = options(case)
    asked = _asked(case, every, offload, quantization)
    taken = _first(asked)
    if taken is None:
        raise _refusal(case, every, asked, clip)
    if taken not in every:
        # After the others of its kind, which are faster.
        place = 1 + max(place for place, option in enumerate(every) if option.way.quantization == quantization)
        every = [*every[:place], taken, *every[place:]]
    warnings = []
    if taken.way.decode_tile is not None:
        side = _tile_pixels(case, taken.way.decode_tile)
        warnings.append(f"Memory is short: frames are decoded in tiles of {side} and differ a little where these meet.")
    if quantization == AUTO and _is_quantized(taken):
        title = constraints.WEIGHTS_TITLES[taken.way.quantization]
        warnings.append(f"Memory is short: the transformers run with {title}, and the video is a little less exact.")
    if taken.tight:
        warnings.append(
            f"Memory is tight: about {_gib(taken.strategy.peak_bytes)} of the {_gib(case.free_bytes)} that are free. "
            "It may run out; a smaller size or fewer frames are safer."
        )
    return Decision(taken, _rungs(case, every, taken), tuple(warnings))


def _first(options: list[Option]) -> Option | None:
    """Return the option to take: quantized only where nothing else fits, a tight fit, the least tight, only then."""
    fitting = sorted(filter(_fits, options), key=_is_quantized)
    roomy = next((option for option in fitting if not option.tight), None)
    return roomy or min(fitting, key=lambda option: _needs(option.memory), default=None)


def _rungs(case: Case, every: list[Option], taken: Option | None) -> tuple[Strategy, ...]:
    """Return the ladder as it is shown: what was taken, and what a request would take by asking for it."""
    strategies = []
    for option in every:
        excluded = _excluded(case, *option.settings)
        first = _first([other for other in every if other.settings == option.settings])
        strategies.append(
            replace(
                option.strategy,
                taken=option == taken,
                offered=option == first and not excluded,
                lacks="" if option == taken else option.strategy.lacks or excluded,
            )
        )
    return tuple(strategies)


def _excluded(case: Case, offload: str, quantization: str) -> str:
    """Return why a way does not go with the backends that were asked for, in a few words; empty where it does."""
    for name, backend in case.asked.items():
        if backend not in {AUTO, PYTORCH} and is_transformer(name):
            asked = constraints.Case(component=name, backend=backend, offload=offload, quantization=quantization)
            against = constraints.conflict(asked, case.machine)
            if against is not None and against.setting:
                return against.badge
    return ""


def _asked(case: Case, every: list[Option], offload: str, quantization: str) -> list[Option]:
    if quantization in {AUTO, "none"}:
        pool = [option for option in every if quantization == AUTO or not _is_quantized(option)]
    else:
        pool = _quantized(case, quantization)
    # An engine holds its weights itself: they are neither brought to it nor quantized unless that was asked for.
    if any(is_transformer(name) for name in case.load.engine_bytes):
        pool = [
            option
            for option in pool
            if option.way.offload in {"none", offload} and option.way.quantization in {"none", quantization}
        ]
    asked = [option for option in pool if offload in {AUTO, option.way.offload}]
    if not asked:
        against = constraints.cannot_wait(_in_pytorch(quantization, offload))
        if against is not None:
            raise against.refusal
        raise InvalidRequestError(
            "offload",
            f"Quantized transformers are not brought in parts: --quantization {quantization} excludes "
            f"--offload {offload}.",
            "Take --offload model or none with it, or leave --quantization out.",
        )
    return asked


def _quantized(case: Case, kind: str) -> list[Option]:
    """Return the ways to hold quantized transformers, the roomiest first."""
    title = f"Transformers with {constraints.WEIGHTS_TITLES[kind]}"
    return [
        _option(case, f"{title}, {name[0].lower()}{name[1:]}", replace(way, quantization=kind))
        for name, way in (_KEEP, _FREE_TEXT, _ONE, _MODEL)[: 4 if case.load.split is None else 3]
        if constraints.cannot_wait(_in_pytorch(kind, way.offload)) is None
    ]


def _in_pytorch(quantization: str, offload: str) -> constraints.Case:
    return constraints.Case(component="transformer", backend=PYTORCH, offload=offload, quantization=quantization)


def _first_that_fits(found: list[Option]) -> Option:
    return next((option for option in found if _has_room(option) and not option.tight), found[-1])


def _is_quantized(option: Option) -> bool:
    return option.way.quantization != "none"


def _has_room(option: Option) -> bool:
    return option.strategy.fits and option.strategy.fits_ram


def _fits(option: Option) -> bool:
    return _has_room(option) and option.against is None


def _option(case: Case, title: str, way: Way) -> Option:
    room = _KEEP_SHARE["cuda" if case.load.cuda else "cpu"] if way.keep_loaded else 1.0
    # Decoding fewer frames in a call costs little time: it comes before any other saving. Tiles cost more than letting
    # go of what does not run, so they come once that is done.
    tiles = [] if way.keep_loaded else memory_model.tile_sides(case.load)
    held = way
    computed, compiling, excluded = execution_options.of_way(
        case.speed, way, case.base, lambda how: estimate.call(case, held, "transformer", how)
    )
    chunk = case.chunk
    memory = estimate.memory(case, way, chunk, computed)
    for fewer, tile in ((1, None), *((1, tile) for tile in tiles)):
        if _needs(memory[-1:]) <= room * case.free_bytes:
            break
        chunk, way = fewer, replace(way, decode_tile=tile)
        memory = estimate.memory(case, way, chunk, computed)
    peak = max(stage.peak_bytes for stage in memory)
    ram = memory_model.ram_bytes(case.load, way) if case.load.cuda else 0
    seconds = estimate.seconds(case, way, computed)
    seconds["load"] += compiling
    roomy = _needs(memory) <= room * case.free_bytes
    # What stays for good leaves room to others: there is no tight way of keeping everything.
    fits = roomy or (not way.keep_loaded and peak <= case.free_bytes)
    flags = [f"--offload {way.offload}"] if way.offload != "none" else []
    flags += [f"--quantization {way.quantization}"] if way.quantization != "none" else []
    if way.decode_tile is not None:
        title = f"{title}, decoding in tiles of {_tile_pixels(case, way.decode_tile)}"
    elif chunk != case.chunk:
        title = f"{title}, decoding frame by frame"
    against = (
        constraints.excluded_by_step_cache(case.step_cache, way.offload, case.machine)
        or constraints.lacking(way.quantization, case.machine)
        or _unloadable(case, way)
        or excluded
    )
    strategy = Strategy(
        title=title,
        flags=" ".join(flags),
        offload=way.offload,
        quantization=way.quantization,
        peak_bytes=peak,
        ram_bytes=ram,
        seconds=seconds["total"],
        fits=fits,
        fits_ram=ram <= case.ram_free_bytes,
        lossless=way.quantization == "none" and way.decode_tile is None,
        decode_tile=way.decode_tile,
        decode_chunk=chunk,
        keep_loaded=way.keep_loaded,
        freed=way.freed,
        lacks=against.badge if against else "",
    )
    return Option(
        way=way,
        chunk=chunk,
        memory=memory,
        seconds=seconds,
        strategy=strategy,
        tight=not roomy,
        against=against,
        speed=computed,
    )


def _unloadable(case: Case, way: Way) -> constraints.Conflict | None:
    # Weights are quantized one by one as they are read.
    quantized = way.quantization != "none"
    whole = {name: size for name, size in case.whole.items() if not (quantized and is_transformer(name))}
    return no_ram(case.load.spec, whole, case.machine)


def _tile_pixels(case: Case, tile: int) -> str:
    side = tile * case.load.spec.vae.scale_factor_spatial
    return f"{side}x{side}"


def _needs(memory: tuple[StageMemory, ...]) -> int:
    return max(stage.peak_bytes + stage.allocator_slack_bytes for stage in memory)


def _refusal(case: Case, every: list[Option], asked: list[Option], clip: str) -> MemoryShortError:
    where = "video memory" if case.load.cuda else "memory"
    other = next((option for option in every if _fits(option)), None)
    remedy = "" if other is None else _instead(every[0], other)
    able = [option for option in asked if option.against is None]
    unable = next((option.against for option in asked if option.against), None)
    if not able and unable is not None:
        return MemoryShortError(unable.what, remedy or unable.remedy, strategies=_rungs(case, every, None), where=where)
    least = min(able, key=lambda option: (not option.strategy.fits_ram, option.strategy.peak_bytes))
    needs, free = f"{_gib(least.strategy.peak_bytes)} of {where}", _gib(case.free_bytes)
    waiting = min((o.strategy for o in able if o.strategy.fits), key=lambda strategy: strategy.ram_bytes, default=None)
    if waiting is not None:
        ram, ram_free = f"{_gib(waiting.ram_bytes)} of system memory (RAM)", _gib(case.ram_free_bytes)
        if least.strategy.fits_ram:
            needs, free = f"{needs}, or {ram} for weights that wait", f"{free} and {ram_free}"
        else:
            needs, free = f"{ram} for weights that wait", ram_free
    what = f"{clip} needs about {needs}; {free} are free."
    remedy = remedy or (_SMALLER if waiting is None else _MORE_RAM)
    return MemoryShortError(what, remedy, strategies=_rungs(case, every, None), where=where)


def _instead(fastest: Option, other: Option) -> str:
    slower = other.strategy.seconds.likely / fastest.strategy.seconds.likely
    flags = other.strategy.flags or "--offload none"
    return f"Take {flags}: {_gib(other.strategy.peak_bytes)}, about {slower:.1f} times as long."


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
