"""The panel of the plan in Make: the forecast, the presets, and the table and choices of Advanced.

Parts of the page in several places are drawn by this one panel, since all of them follow the form.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError, TandemError
from runtime.core.estimates import MemoryStrategy, StrategyForecast
from runtime.core.facts import Fact, capitalized, short
from runtime.core.messages.components import title_of
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.request import (
    BACKENDS,
    COMPONENTS,
    FIELDS,
    INTERPOLATIONS,
    LOOPS,
    LOSSLESS,
    OFF,
    SOUNDS,
    UPSCALES,
    GenerationRequest,
)
from runtime.core.request_fields import AUTO, AttentionKernel, Choice, StepCache
from runtime.core.sparse_attention import SOL
from runtime.core.step_cache import FIRST_BLOCK, MAGCACHE, TAYLORSEER, kind_of
from runtime.core.units import about, counted, latency, memory_size, significant
from runtime.engines.builders import builders_of
from runtime.families.esrgan.upscalers import PACKAGE, upscaler_paths
from runtime.machine.probe import Machine
from runtime.models.quantization import FP8
from runtime.models.single_file import UPSCALERS
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.constraints import choice_conflict
from runtime.planner.interpolation import check_rate
from runtime.planner.placement import VAE_PSNR, usable_gpus
from runtime.planner.presets import BEST, Preset, presets
from runtime.queue.store import JobStore
from runtime.ui import control_preview, fields, form, formatting
from runtime.ui.formatting import WORDS, page_text, paragraph, render, sentences
from runtime.ui.jobs_panel import example_of
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.plan_preview import PlanPreview, Preview, to_build

_SEARCHING = page_text(Fact("ui.looking_for_engines")).what
# Estimates are shown in tenths of a second.
_FINEST_SECONDS = 0.1
_VAE_EFFECT = f"PSNR to float32: {VAE_PSNR['bfloat16']} dB with bfloat16, {VAE_PSNR['float16']} dB with float16."
# Strengths of step caches that can be chosen; the effect of each was measured (bench/step_cache.md).
_STRENGTHS = {FIRST_BLOCK: (0.05, 0.1, 0.2), MAGCACHE: (0.03, 0.12, 0.24), TAYLORSEER: (3, 4)}
# Thresholds of sparse attention that can be chosen, besides the default.
_TAUS = (0.5, 1.5)
# Strategies whose times differ less count as equally fast.
_SLOWER = 1.05


@dataclass(frozen=True)
class Badge:
    """What will run one component, and why.

    Attributes:
        backend: its title, or what there is instead of a plan.
        kind: "ready" (an engine that exists), "build" (an engine that is built when no video waits), "plain" (PyTorch),
            "instead" (PyTorch although another backend was requested) or "stopped" (the form cannot be carried out).
        status: of the backend, such as "engine ready".
        lacks_engine: whether the status is that there is no engine yet.
    """

    backend: str
    reason: str
    kind: str
    status: str = ""
    lacks_engine: bool = False

    @property
    def text(self) -> str:
        """Backend and status."""
        return f"{self.backend}: {self.status}" if self.status else self.backend


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak: weights, working set, and free memory before; `where` is "video memory" or "memory"."""

    weights: int
    working: int
    free: int
    where: str


@dataclass(frozen=True)
class StrategyRow:
    """One memory strategy.

    Attributes:
        needs: memory, and time compared to the fastest strategy.
        verdict: whether it fits, or why it cannot be used.
        offered: whether it can be selected, by the form's values `offload` and `quantization`.
    """

    title: str
    needs: str
    verdict: str
    in_use: bool
    offered: bool
    offload: str
    quantization: str


@dataclass(frozen=True)
class PlanSummary:
    """What the form asks for, as far as it is known.

    Attributes:
        line: the backends and the time in a few words.
        badges: by component.
        memory: `None` if there is no plan.
        duration: the most likely time.
        time: the estimate with its limits.
        strategies: fastest first, if the fastest does not fit into memory.
        notes: warnings, and the reason for the shift.
        problem: why the form cannot be carried out, and what to do about it.
        field: whose value is the problem.
        complete: whether engines are known; if not, the page asks again.
    """

    line: str
    badges: Mapping[str, Badge] = field(default_factory=dict)
    memory: Memory | None = None
    duration: str = ""
    time: str = ""
    strategies: tuple[StrategyRow, ...] = ()
    notes: str = ""
    problem: str = ""
    field: str = ""
    complete: bool = True


@dataclass(frozen=True)
class Cell:
    """One backend for one component: its state in a few words, and why it is so or cannot be chosen."""

    backend: str
    title: str
    state: str
    reason: str = ""
    usable: bool = True


@dataclass(frozen=True)
class Option:
    """One value of a choice; `problem` says why this machine does not support it, in a few words."""

    value: str
    title: str
    problem: str = ""


def summarize(preview: Preview, components: tuple[str, ...]) -> PlanSummary:
    """Return the summary of a plan preview for a model with these components."""
    plan = preview.plan
    if plan is None:
        error = preview.error
        assert error is not None, "neither a plan nor an error"
        return stopped(error, components)
    memory = _memory(plan)
    strategies = _strategies(plan.strategies, memory.where, plan.strategy)
    remarks = (plan.guidance_reason, plan.shift_reason, *plan.warnings)
    notes = " ".join(paragraph(note, plan.components) for note in remarks if note)
    if not preview.complete:
        badge = Badge(_SEARCHING, "Engines are known once the model's files have been read.", "plain")
        return PlanSummary(
            _SEARCHING, dict.fromkeys(plan.components, badge), memory, "", "", strategies, notes, complete=False
        )
    badges = {name: _badge(plan, name) for name in plan.components}
    duration = _duration(plan.seconds["total"].likely)
    return PlanSummary(_summary_line(plan), badges, memory, duration, _time(plan), strategies, notes)


def stopped(error: TandemError, components: tuple[str, ...]) -> PlanSummary:
    """Return the summary for a form that cannot be carried out."""
    problem = capitalized(paragraph(error.fact))
    headline = Fact("ui.does_not_fit" if isinstance(error, MachineError) else "ui.cannot_generate")
    if isinstance(error, InvalidRequestError):
        headline = Fact("ui.invalid_setting")
    title = page_text(headline).what
    # A component is marked only if it is the one that is wrong, or if all are too large together.
    named = error.fact.data.get("component")
    concerned = components if isinstance(error, MemoryShortError) else [named]
    badges = {
        name: Badge(title, problem, "stopped") if name in concerned else Badge("No plan", "", "plain")
        for name in components
    }
    strategies = _strategies(error.strategies, error.where) if isinstance(error, MemoryShortError) else ()
    wrong = error.field if isinstance(error, InvalidRequestError) else ""
    return PlanSummary(title, badges, strategies=strategies, problem=problem, field=wrong)


def summary_html(summary: PlanSummary) -> str:
    """Return memory, time, problem, strategies and notes."""
    # Without a plan the bar is hidden; its elements stay the same for screen readers.
    memory = summary.memory or Memory(0, 0, 0, "memory")
    rest = max(memory.free - memory.weights - memory.working, 0)
    total = max(memory.weights + memory.working + rest, 1)
    sizes = (
        ("weights", "Weights", memory.weights),
        ("working", "Working set", memory.working),
        ("free", "Free", rest),
    )
    shares = [(name, title, size, f"{100 * size / total:.1f}") for name, title, size in sizes]
    return render("plan_summary.html", summary=summary, where=memory.where, shares=shares)


def components_html(spec: ModelSpec, summary: PlanSummary, preview: Preview | None, machine: Machine) -> str:
    """Return the table of components and backends: what can run each, what will, and why."""
    plan = None if preview is None else preview.plan
    rows = [
        (
            name,
            title_of(name, spec.component_names),
            cells(name, preview, machine),
            summary.badges.get(name, Badge("", "", "plain")),
        )
        for name in (spec.component_names if plan is None else plan.components)
    ]
    complete = plan is not None and preview is not None and preview.complete
    return render(
        "plan_components.html",
        rows=rows,
        backends=list(BACKENDS.values()),
        prefix=fields.BACKEND,
        clip=clip_line(plan) if plan is not None and complete else "",
        speed_up=speed_up(preview) if preview is not None else "",
        parts=part_lines(plan) if plan is not None and complete else [],
    )


@dataclass(frozen=True)
class PartLine:
    """One component: the seconds that it takes of this clip, as a share of the clip's longest, and in PyTorch.

    Attributes:
        percent, saved: of the longest bar: what it takes, and what its engines save of PyTorch's.
    """

    name: str
    title: str
    backend: str
    time: str
    percent: float
    saved: float


def part_lines(plan: ExecutionPlan) -> list[PartLine]:
    """Return a line for each component that takes time, with figures of the plan."""
    taken = {name: part.seconds.likely for name, part in plan.components.items() if part.seconds is not None}
    in_pytorch = {name: plan.components[name].on(PYTORCH) for name in taken}
    plain = {name: taken[name] if seconds is None else seconds.likely for name, seconds in in_pytorch.items()}
    longest = max((*taken.values(), *plain.values()), default=0.0) or 1.0
    return [
        PartLine(
            name=name,
            title=plan.title(name),
            backend=BACKEND_TITLES[plan.components[name].backend],
            time=_instead_of(seconds, plain[name]),
            percent=round(100 * seconds / longest, 1),
            saved=round(100 * max(plain[name] - seconds, 0.0) / longest, 1),
        )
        for name, seconds in taken.items()
    ]


def clip_line(plan: ExecutionPlan) -> str:
    """Return the seconds of this clip, and those without engines if it is faster with them: both from the plan."""
    total = plan.seconds["total"].likely
    saved = 0.0
    for part in plan.components.values():
        pytorch = part.on(PYTORCH)
        if part.engines and part.seconds is not None and pytorch is not None:
            saved += pytorch.likely - part.seconds.likely
    return f"This clip: {_instead_of(total, total + saved)}, {short(plan.seconds['total'].basis)}."


def _instead_of(seconds: float, slower: float) -> str:
    """Return a duration and the longer one that it replaces; the latter only if it reads differently."""
    text, slower_text = latency(seconds), latency(slower)
    return f"{text} instead of {slower_text}" if slower > seconds and slower_text != text else text


def speed_up(preview: Preview) -> str:
    """Return how long Build takes if a component without any engine gets one; empty if none does."""
    plan = preview.plan
    if plan is None or not preview.complete:
        return ""

    def lacks_engine(name: str) -> bool:
        offered = preview.offers_for(name)
        return bool(to_build(plan.request.backend(name), offered)) and not any(offer.ready for offer in offered)

    seconds = preview.build_seconds(plan.components) if any(map(lacks_engine, plan.components)) else None
    return f"Speed up: build engines, {about(seconds)}" if seconds else ""


def cells(component: str, preview: Preview | None, machine: Machine) -> list[Cell]:
    """Return a component's cell for each backend.

    Args:
        preview: `None` if the form is invalid; then only the machine counts.
    """
    plan = None if preview is None else preview.plan
    part = None if plan is None else plan.components[component]
    offers: Sequence[EngineOffer] = ()
    if preview is not None and plan is not None:
        offers = preview.offers_for(component)
    row = []
    for backend, title in BACKENDS.items():
        backend_offers = [offer for offer in offers if offer.backend == backend]
        problem = None if any(offer.ready for offer in backend_offers) else _problem(backend, backend_offers, machine)
        if backend == AUTO:
            row.append(Cell(backend, title, "fastest measured"))
        elif backend == PYTORCH:
            row.append(Cell(backend, title, _with_seconds("always possible", part, PYTORCH)))
        elif problem is not None:
            row.append(Cell(backend, title, short(problem, WORDS), paragraph(problem), usable=False))
        else:
            row.append(Cell(backend, title, _engine_state(backend_offers, plan, part, backend)))
    return row


def _problem(backend: str, offers: Sequence[EngineOffer], machine: Machine) -> Fact | None:
    """Return why a backend can neither run nor build an engine, `None` if it can."""
    problems = [builder.unavailable(machine) for builder in builders_of(backend)]
    if problems and None not in problems:
        return problems[0]
    problems = [offer.problem for offer in offers]
    return problems[0] if problems and None not in problems else None


def _engine_state(
    offers: Sequence[EngineOffer], plan: ExecutionPlan | None, part: ComponentPlan | None, backend: str
) -> str:
    """Return a backend's engines for a component in a few words; figures are those of the plan."""
    if not offers or plan is None:
        return ""
    if any(offer.ready for offer in offers):
        return _with_seconds("engine ready", part, backend)
    offer = next((offer for offer in offers if offer.problem is None), offers[0])
    size = {"width": plan.width, "height": plan.height, "seconds": offer.build_seconds}
    if offer.misfit is not None and offer.misfit.code != "engine.misfit_sizes":
        lacks = short(offer.misfit, WORDS)
        return f"{lacks}, {about(offer.build_seconds)} to build" if offer.build_seconds else lacks
    return short(Fact("ui.no_engine_for_size" if offer.build_seconds else "planner.badge_no_engine", size), WORDS)


def _with_seconds(state: str, part: ComponentPlan | None, backend: str) -> str:
    """Return a state with the seconds of this clip on a backend, and how many times as fast as PyTorch that is."""
    on, pytorch = (None, None) if part is None else (part.on(backend), part.on(PYTORCH))
    if on is None:
        return state
    faster = pytorch is not None and backend != PYTORCH and on.known and pytorch.known and on.likely
    times = f", {significant(pytorch.likely / on.likely)}× as fast" if faster and pytorch is not None else ""
    return f"{state}: {latency(on.likely)}{times}"


def finishing_html(
    values: Mapping[str, Any], spec: ModelSpec, upscalers: Sequence[str], weights_dir: Path, plan: ExecutionPlan | None
) -> str:
    """Return the choices of loop, sound, interpolation and upscaling; impossible ones are disabled, with the reason.

    Args:
        values: of the form's controls, by name.
        upscalers: names of those that are installed.
        weights_dir: where more of them can be put.
        plan: of the form; `None` if it is invalid.
    """
    missing = Fact("upscaler.none", {"package": PACKAGE, "folder": weights_dir / UPSCALERS})
    problem = "" if upscalers else short(missing, WORDS)
    about = {name: declared.help for name, declared in FIELDS.items() if declared.group == "finishing"}
    if not upscalers:
        about["upscale"] = paragraph(missing)
    silent = Fact("planner.makes_no_sound", {"model": spec.title}) if spec.sound is None else None
    if silent is not None:
        about["sound"] = paragraph(silent)
    rates = dict(INTERPOLATIONS)
    titles = dict(UPSCALES) | {AUTO: f"The model's: {UPSCALES[spec.defaults.upscale].lower()}"}
    if plan is not None:
        for value in rates.keys() - {OFF}:
            rates[value] = f"{rates[value]}, {plan.fps} to {plan.fps * int(value)} fps"
        for value in titles.keys() - {AUTO, OFF}:
            size = formatting.size(plan.width * int(value), plan.height * int(value))
            titles[value] = f"{titles[value]}, {size}"
    factors = [Option(value, title, "" if value in {AUTO, OFF} else problem) for value, title in titles.items()]
    names = {AUTO: "Automatic"} | {name: name for name in upscalers}
    chosen = values.get("upscaler")
    if isinstance(chosen, str):
        names.setdefault(chosen, chosen)
    listed = {
        "loop": [Option(value, title, "") for value, title in LOOPS.items()],
        "sound": [
            Option(value, title, "" if silent is None or value != LOSSLESS else short(silent, WORDS))
            for value, title in SOUNDS.items()
        ],
        "interpolate": [Option(value, title, _too_fast(value, plan)) for value, title in rates.items()],
        "upscale": factors,
        "upscaler": [Option(name, title, "") for name, title in names.items()],
    }
    rows = [(name, FIELDS[name].label, about[name], options, values.get(name)) for name, options in listed.items()]
    return render("plan_options.html", rows=rows)


def _too_fast(value: str, plan: ExecutionPlan | None) -> str:
    """Return why a video cannot be interpolated so often; empty if it can."""
    try:
        if plan is not None and value != OFF:
            check_rate(plan.fps, int(value), "interpolate", ["interpolate", OFF])
    except InvalidRequestError as error:
        return short(error.fact, WORDS)
    return ""


def options_html(values: Mapping[str, Any], machine: Machine, spec: ModelSpec) -> str:
    """Return a model's choices of acceleration; those that this machine does not support are disabled, with the reason.

    Args:
        values: of the form's controls, by name.
    """
    rows = []
    for name, declared in FIELDS.items():
        if declared.group != "acceleration" or name == "backends" or name in form.lacks(spec):
            continue
        titles = _titles(name, machine)
        chosen = values.get(name)
        if isinstance(chosen, str) and chosen not in titles:
            titles[chosen] = chosen
        if len(titles) > 1:
            help_text = declared.help
            if name == "vae_precision":
                help_text += (
                    f" PSNR to float32: {VAE_PSNR['bfloat16']} dB with bfloat16, {VAE_PSNR['float16']} dB with float16."
                )
            listed = [Option(value, title, _lack(name, value, machine, spec)) for value, title in titles.items()]
            rows.append((name, declared.label, help_text, listed, chosen))
    return render("plan_options.html", rows=rows)


def _titles(name: str, machine: Machine) -> dict[str, str]:
    """Return the values of a choice with their titles."""
    declared = FIELDS[name]
    if isinstance(declared, StepCache):
        titles = dict(declared.choices)
        for kind, strengths in _STRENGTHS.items():
            titles |= {f"{kind}:{strength:g}": f"{declared.choices[kind]}, {strength:g}" for strength in strengths}
        return titles
    if isinstance(declared, AttentionKernel):
        return dict(declared.choices) | {f"{SOL}:{tau:g}": f"{declared.choices[SOL]}, {tau:g}" for tau in _TAUS}
    if isinstance(declared, Choice):
        return dict(declared.choices)
    count = len(usable_gpus(machine))
    return {"1": "One"} | (
        {AUTO: "All identical GPUs"} | {str(n): str(n) for n in range(2, count + 1)} if count > 1 else {}
    )


def _lack(name: str, value: str, machine: Machine, spec: ModelSpec) -> str:
    if name == "step_cache" and kind_of(value) == MAGCACHE and not spec.mag_ratios:
        return short(Fact("planner.no_mag_ratios", {"model": spec.title, "name": spec.name}), WORDS)
    against = choice_conflict(name, value, machine)
    return "" if against is None else short(against.fact, WORDS)


@dataclass(frozen=True)
class PresetTile:
    """A preset: what it sets, what it costs, and why it cannot be used, if it cannot."""

    name: str
    title: str
    changes: Mapping[str, Any]
    means: str
    cost: str
    problem: str = ""


def preset_tile(preset: Preset, preview: Preview) -> PresetTile:
    """Return a preset with the cost of its plan."""
    means = counted(int(preset.changes["steps"]), "step")
    if FP8 in preset.changes.values():
        means += ", FP8"
    if preset.name == BEST:
        means += ", full precision"
    plan, error = preview.plan, preview.error
    # An invalid value elsewhere in the form is no fault of the preset's.
    wrong = error is not None and not (isinstance(error, InvalidRequestError) and error.field not in preset.changes)
    return PresetTile(
        preset.name,
        preset.name.capitalize(),
        preset.changes,
        means,
        "" if plan is None or not preview.complete else _cost(plan),
        _in_short(error.fact) if error is not None and wrong else "",
    )


def _in_short(fact: Fact) -> str:
    """Return why something does not run in few words; the bar has the whole sentence and the remedy."""
    return f"{capitalized(short(fact, WORDS))}."


def presets_html(tiles: Sequence[PresetTile], chosen: str) -> str:
    """Return the presets.

    Args:
        chosen: the name of the preset that the form has; empty if it has another combination.
    """
    return render("plan_presets.html", tiles=tiles, chosen=chosen)


def forecast_html(summary: PlanSummary) -> str:
    """Return what the video will take, or why it cannot be made."""
    return render("plan_forecast.html", summary=summary)


def cost_html(preview: Preview) -> str:
    """Return what the default clip of a model takes here."""
    plan = preview.plan
    if plan is None:
        return render(
            "plan_cost.html", seconds="", cost="", problem=_in_short(preview.error.fact) if preview.error else ""
        )
    cost = _cost(plan) if preview.complete else ""
    return render("plan_cost.html", seconds=f"{plan.frames / plan.fps:.1f} s", cost=cost, problem="")


def _cost(plan: ExecutionPlan) -> str:
    return f"{_duration(plan.seconds['total'].likely)}, {memory_size(plan.memory_bytes)}"


def _why(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    # On a CPU there is nothing to choose, so the reasons are left out.
    speed = sentences(plan.speed.reasons) if part.device.startswith("cuda") or plan.request.compile == "always" else ""
    reason = sentences(part.reasons)
    return f"{reason} {speed}".strip() if not part.on_engine and is_transformer(name) else reason


def _badge(plan: ExecutionPlan, name: str) -> Badge:
    part = plan.components[name]
    status = "" if part.badge is None else short(part.badge, WORDS)
    # Building one may help.
    lack = part.badge and part.badge.data.get("lack", part.badge)
    lacks_engine = isinstance(lack, Fact) and lack.code == "planner.badge_no_engine"
    return Badge(BACKEND_TITLES[part.backend], _why(plan, name, part), _kind(plan, name, part), status, lacks_engine)


def _kind(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    if part.later:
        return "build"
    if part.backend == PYTORCH:
        return "instead" if plan.fell_back(name) else "plain"
    return "ready"


def _summary_line(plan: ExecutionPlan) -> str:
    parts = plan.components
    backends = Counter(BACKEND_TITLES[part.backend] for part in parts.values() if part.backend != PYTORCH)
    how = "Auto" if all(plan.request.backend(name) == "auto" for name in parts) else "As chosen"
    if backends:
        shares = " and ".join(f"{title} for {count}" for title, count in backends.most_common())
        line = f"{how}: {shares} of {len(parts)} components"
    else:
        line = f"{how}: PyTorch"
    if plan.gpus > 1:
        line = f"{line} on {plan.gpus} GPUs"
    # Both experts use the same block engines.
    builds = len({use.id for part in parts.values() for use in part.later})
    later = f"; {page_text(Fact('ui.builds_later', {'engines': builds})).what}" if builds else ""
    return f"{line}, about {_duration(plan.seconds['total'].likely)}{later}"


def _time(plan: ExecutionPlan) -> str:
    total, load = plan.seconds["total"], plan.seconds["load"]
    how = short(total.basis)
    compile_seconds = plan.seconds.get("compile")
    compiling = "" if compile_seconds is None else f", {_duration(compile_seconds.likely)} of it compiling"
    sections = ""
    if plan.sections > 1:
        section_seconds = (plan.seconds["denoise"].likely + plan.seconds["decode"].likely) / plan.sections
        sections = f"{plan.sections} sections of about {_duration(section_seconds)}: "
    if plan.refinement is not None:
        sizes = (formatting.size(stage.width, stage.height) for stage in plan.by_stage)
        sections = f"Two stages, {' and then '.join(sizes)}: "
    later = plan.second_seconds
    second = f"about {_duration(later.likely)}"
    if plan.builds:
        second = f"{_duration(later.low)} to {_duration(later.high)}, on engines that are built when no video waits"
    elif plan.speed.compiled_later:
        second = f"{second}, with code that is compiled when no video waits"
    return (
        f"{sections}about {_duration(total.likely)}, {_duration(total.low)} to {_duration(total.high)} ({how}). "
        f"Loading before the first: about {_duration(load.likely)}{compiling}. "
        f"A second clip: {second}."
    )


def _duration(seconds: float) -> str:
    return formatting.duration(max(seconds, _FINEST_SECONDS))


def _memory(plan: ExecutionPlan) -> Memory:
    peak = max(plan.memory, key=lambda stage: stage.peak_bytes)
    # What makes control frames is no component, and runs where the transformer does.
    on_gpu = plan.components.get(peak.component, plan.components["transformer"]).device.startswith("cuda")
    working = peak.working_bytes + peak.overhead_bytes
    return Memory(peak.weights_bytes, working, plan.free_bytes, "video memory" if on_gpu else "memory")


def _strategies(
    strategies: Sequence[StrategyForecast], where: str, in_use: MemoryStrategy | None = None
) -> tuple[StrategyRow, ...]:
    """Return all strategies if the fastest does not fit."""
    fastest = strategies[0]
    if fastest.strategy == in_use or (fastest.fits and fastest.fits_ram and not fastest.lacks):
        return ()
    return tuple(
        StrategyRow(
            title=page_text(forecast.title).what.rstrip("."),
            needs=_needs(forecast, fastest),
            verdict=paragraph(forecast.verdict(where, taken=forecast.strategy == in_use)),
            in_use=forecast.strategy == in_use,
            offered=forecast.offered,
            offload=forecast.strategy.offload,
            quantization=forecast.strategy.quantization,
        )
        for forecast in strategies
    )


def _needs(forecast: StrategyForecast, fastest: StrategyForecast) -> str:
    slower = forecast.seconds.likely / fastest.seconds.likely
    times = f", {slower:.1f} times as long" if slower >= _SLOWER else ""
    ram = f" + {memory_size(forecast.ram_bytes)} RAM" if forecast.strategy.offload != "none" else ""
    return f"{memory_size(forecast.peak_bytes)}{ram}{times}"


class PreviewPanel:
    """The panel; see `panels.Panel`. Its parts are the forecast, the presets, the model's cost, and Advanced."""

    def __init__(self, preview: PlanPreview, models: dict[str, ModelSpec], store: JobStore, weights_dir: Path) -> None:
        self._preview = preview
        self._models = models
        self._store = store
        self._weights_dir = weights_dir

    def act(self, call: Call) -> Reply:
        """Plan what the form asks for; the reply says whether the model's engines are known, and what is wrong."""
        if call.action != "refresh":
            raise unknown_action()
        preview: Preview | None = None
        spec: ModelSpec | None = None
        request: GenerationRequest | None = None
        try:
            spec = form.read_model(call.form, self._models)
            request = form.read_settings(call.form, self._models)
            preview = self._preview.preview(request, spec)
            summary = summarize(preview, spec.component_names)
        except TandemError as error:  # an invalid form has a summary too
            summary = stopped(error, COMPONENTS if spec is None else spec.component_names)
        state = {"spec": spec, "request": request, "preview": preview, "summary": summary}
        plan = None if preview is None else preview.plan
        return {
            "complete": summary.complete,
            "field": summary.field,
            "problem": summary.problem,
            "size": None if plan is None else [plan.width, plan.height],
            "control": None if plan is None or spec is None else control_preview.seen(plan, spec, self._preview),
            "state": state,
        }

    def draw(self, call: Call, reply: Reply) -> dict[str, str]:
        """Return all parts."""
        state: dict[str, Any] | None = reply.pop("state", None)
        if state is None:  # an error that `act` has reported
            return {}
        summary, spec, machine = state["summary"], state["spec"], self._preview.machine()
        parts = {"forecast": lambda: forecast_html(summary), "summary": lambda: summary_html(summary)}
        if spec is not None:
            values = form.by_name(call.form)
            parts |= {
                "components": lambda: components_html(spec, summary, state["preview"], machine),
                "options": lambda: options_html(values, machine, spec),
                "finishing": lambda: self._finishing(values, spec, state["preview"]),
                "presets": lambda: self._presets(spec, state["request"], machine),
                "cost": lambda: self._cost(spec),
                "picture": lambda: render("plan_picture.html", picture=example_of(self._store, spec), spec=spec),
            }
        return drawn(parts)

    def _finishing(self, values: Mapping[str, Any], spec: ModelSpec, preview: Preview | None) -> str:
        plan = None if preview is None else preview.plan
        return finishing_html(values, spec, list(upscaler_paths(self._weights_dir)), self._weights_dir, plan)

    def _cost(self, spec: ModelSpec) -> str:
        return cost_html(self._preview.preview(GenerationRequest(prompt="none", model=spec.name), spec))

    def _presets(self, spec: ModelSpec, request: GenerationRequest | None, machine: Machine) -> str:
        """Return the presets for the rest of the form, or for the model's defaults if the form is invalid."""
        base = request or GenerationRequest(prompt="none", model=spec.name)
        offered = presets(spec, machine)
        tiles = [preset_tile(preset, self._preview.preview(base.replace(**preset.changes), spec)) for preset in offered]
        chosen = next((preset.name for preset in offered if request is not None and preset.matches(request, spec)), "")
        return presets_html(tiles, chosen)
