"""What the panel says of a plan: chips, sum, memory, time; from real plans and offers with figures of our own."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import MachineError, TandemError
from runtime.core.facts import Fact, short
from runtime.core.plan import EngineRef, LatentSize
from runtime.core.request import SOUNDS, GenerationRequest
from runtime.core.units import latency
from runtime.machine.probe import Machine
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec, SoundSpec
from runtime.planner.choice.engine_offers import EngineOffer, Offers, no_offers
from runtime.planner.presets import presets
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.job_planning import seconds_gained
from runtime.ui.break_even import BreakEven, break_even_of_part, break_even_of_record
from runtime.ui.formatting import WORDS
from runtime.ui.plan_panel import (
    PlanSummary,
    cells,
    clip_line,
    components_html,
    finishing_html,
    options_html,
    part_lines,
    preset_tile,
    presets_html,
    summarize,
    summary_html,
)
from runtime.ui.plan_preview import Preview
from tests.engines.engine_files import key, record
from tests.facts import fact
from tests.plans import GIB, GPU_PACKAGES, gpu, machine, why
from tests.ui.page_texts import line

NO_GPU = short(fact("machine.no_gpu"))
GPU = machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES)


def test_the_choice_of_sound_says_that_a_model_is_silent(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    silent = tiny("wan2.1")
    loud = replace(silent, sound=SoundSpec(rate=24_000, channels=1))
    reason = line("planner.makes_no_sound", model=silent.title)
    for spec in (silent, loud):
        html = finishing_html({"sound": "on"}, spec, ["x"], tmp_path, None)
        (choice,) = re.findall(r'data-key="sound".*?</div>', html, re.DOTALL)
        assert [value for value in SOUNDS if f'value="{value}"' in choice] == [*SOUNDS]
        assert (escape(reason) in choice, " disabled" in choice) == (spec is silent, spec is silent)


def offer(component: str, backend: str = "tensorrt", **values: Any) -> EngineOffer:
    """Return an offer whose engine is there: PyTorch takes 3 s a call, it takes 1 s."""
    size = (1, 1, 1)
    build = values.pop("build", False)
    use = EngineRef(
        id=f"{component}-{backend}",
        program=component,
        builder=backend,
        precision="float16",
        profile=(size, size, size),
        build=build,
    )
    given = {"missing": "there is none yet" if build else "", "seconds": 1.0, "baselines": {"eager": 3.0}} | values
    return EngineOffer(backend=backend, builder=backend, engines=(use,), **given)


def offering(*offers: EngineOffer) -> Offers:
    """Offer each where its program is a component's name."""

    def of(component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
        return [one for one in offers if one.engines[0].program == component]

    return of


def preview(
    spec: ModelSpec, here: Machine = GPU, offers: Offers = no_offers, *, complete: bool = True, **values: Any
) -> Preview:
    """Foresee a tiny clip."""
    wanted = {"prompt": "x", "width": 64, "height": 32, "frames": 9, "steps": 10, "guidance_scale": 4.0} | values
    try:
        plan = resolve(
            GenerationRequest.from_mapping(wanted),
            spec,
            PlanningContext(here, Path("x.mp4"), offers, compares=True),
            builds_later=True,
        )
    except TandemError as error:
        return Preview(None, error, offers, (), complete, spec)
    return Preview(plan, None, offers, (), complete, spec)


def summary_of(spec: ModelSpec, **values: Any) -> PlanSummary:
    """Return what the panel says."""
    return summarize(preview(spec, **values), spec.component_names)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    return tiny("wan2.2-a14b")


@pytest.mark.parametrize(
    ("values", "backend", "state", "kind"),
    [
        ({}, "PyTorch", fact("planner.badge_no_engine"), "plain"),
        ({"here": machine()}, "PyTorch", fact("planner.badge_no_engine"), "plain"),
        ({"backends": {"vae": "pytorch"}}, "PyTorch", fact("planner.as_asked"), "plain"),
        ({"offers": offering(offer("vae"))}, "TensorRT", fact("planner.badge_ready"), "ready"),
        (
            {"offers": offering(offer("vae", build=True, build_seconds=240.0)), "backends": {"vae": "tensorrt"}},
            "PyTorch",
            fact("planner.built_later", backend="tensorrt"),
            "build",
        ),
        (
            {"offers": offering(offer("vae", build=True)), "backends": {"vae": "tensorrt"}, "build": "never"},
            "PyTorch",
            fact("planner.asked_not_built", backend="tensorrt"),
            "instead",
        ),
        (
            {
                "offers": offering(
                    offer("vae", problem=Fact("machine.gpu_package_missing", {"package": "TensorRT"}), build=True)
                )
            }
            | {"backends": {"vae": "tensorrt"}},
            "PyTorch",
            fact("machine.gpu_package_missing", package="TensorRT"),
            "instead",
        ),
    ],
)
def test_a_badge_shows_backend_and_reason(
    spec: ModelSpec, values: dict[str, Any], backend: str, state: Fact, kind: str
) -> None:
    seen = summary_of(spec, **values)
    badge = seen.badges["vae"]
    assert (badge.text, badge.kind) == (f"{backend}: {short(state, WORDS)}", kind)
    assert badge.lacks_engine == (state.code == "planner.badge_no_engine")
    plan = preview(spec, **values).plan
    assert plan is not None
    assert badge.reason == why(plan.components["vae"])


def test_the_summary_has_shares_builds_and_time(spec: ModelSpec) -> None:
    every = [offer(name) for name in spec.component_names]
    assert summary_of(spec).line == "Auto: PyTorch, about 0.1 s"
    # The text encoder twice, each expert 5 steps of two calls, the VAE once, a second each.
    assert summary_of(spec, offers=offering(*every)).line == "Auto: TensorRT for 4 of 4 components, about 23 s"
    half = summary_of(spec, offers=offering(*every), backends={"vae": "pytorch", "text_encoder": "pytorch"})
    # PyTorch takes three seconds a call, as was measured beside the engines that are not used.
    assert half.line == "As chosen: TensorRT for 2 of 4 components, about 29 s"
    mixed = offering(*every[:3], offer("vae", "inductor", build=True, seconds=0.0))
    wanted = summary_of(spec, offers=mixed, backends={"vae": "inductor"})
    assert wanted.line.startswith("As chosen: TensorRT for 3 of 4 components, about ")
    assert wanted.line.endswith(f"; {line('ui.builds_later', engines=1)}")


def test_the_time_has_bounds_and_its_source(spec: ModelSpec) -> None:
    every = offering(*(offer(name) for name in spec.component_names))
    plan = preview(spec, offers=every).plan
    assert plan is not None
    total = plan.seconds["total"]
    # Calls were measured when the engines were built, but no video ran.
    inferred = summary_of(spec, offers=every).time
    assert inferred.startswith(
        f"about 23 s, {total.low:.0f} s to {total.high:.0f} s ({short(fact('planner.inferred'))}). Loading before"
    )
    assert "(estimated)" in summary_of(spec).time
    assert summary_of(spec, offers=every, guidance_scale=1.0, guidance_scale_2=1.0).time.startswith("about 12 s")


def test_memory_is_that_of_the_largest_stage(spec: ModelSpec) -> None:
    seen, plan = summary_of(spec).memory, preview(spec).plan
    assert seen is not None and plan is not None
    assert seen.weights + seen.working == plan.memory_bytes
    assert seen.weights == max(plan.memory, key=lambda stage: stage.peak_bytes).weights_bytes
    assert (seen.where, seen.free) == ("video memory", GPU.gpus[0].free_bytes)
    on_cpu = summary_of(spec, here=machine()).memory
    assert on_cpu is not None
    assert (on_cpu.where, on_cpu.free) == ("memory", machine().ram_free_bytes)


def title_of_strategies(html: str) -> str:
    """Return the heading of a summary's strategies."""
    found = re.search(r'id="strategies-title"><strong>(.+?)</strong>', html)
    assert found is not None
    return found[1]


def test_strategies_are_listed_if_memory_is_short() -> None:
    a14b = look_up("wan2.2-t2v-a14b", Path("none"))
    size = {"width": 832, "height": 480, "frames": 81}

    def on(free_gib: float, **values: Any) -> PlanSummary:
        here = replace(GPU, gpus=(gpu(free_gib=free_gib),), ram_bytes=256 * GIB, ram_free_bytes=256 * GIB)
        return summary_of(a14b, here=here, **size, **values)

    lacking = on(48)
    one_at_a_time = line("strategy.one_at_a_time").rstrip(".")
    too_little = line("strategy.too_little", memory="video memory")
    assert [way.title for way in lacking.strategies if way.in_use] == [one_at_a_time]
    assert lacking.strategies[0].verdict == too_little
    assert lacking.strategies[-1].verdict == line("strategy.fits")
    assert re.search(r", \d+\.\d times ", lacking.strategies[-1].needs)
    html = summary_html(lacking)
    heading = title_of_strategies(html)
    assert html.count('aria-pressed="true"') == 1
    assert f'data-offload="none" data-quantization="none"><span>{one_at_a_time}</span>' in html
    assert html.count(" disabled>") == sum(not way.offered for way in lacking.strategies) == 5
    assert '<button type="button" class="button" data-offload="auto" data-quantization="auto">' in html
    assert on(120).strategies == ()
    # A slower strategy was requested although memory suffices for a faster one.
    assert on(120, offload="model").strategies == ()
    assert on(48, offload="group").strategies[4].in_use
    refused = on(2)
    assert refused.line == line("ui.does_not_fit")
    assert "video memory; 2.0 GB are free" in refused.problem
    assert len(refused.strategies) == len(lacking.strategies)
    assert not any(way.in_use or way.offered for way in refused.strategies)
    assert too_little in refused.strategies[-1].verdict
    html = summary_html(refused)
    assert heading != title_of_strategies(html) and html.count(" disabled>") == len(refused.strategies)
    # What was asked for does not fit; something else does, and can be chosen.
    other = on(24, offload="model")
    assert other.line == line("ui.does_not_fit")
    assert title_of_strategies(summary_html(other)) == heading
    assert [way.offload for way in other.strategies if way.offered] == ["group", "sequential"]


def test_warnings_of_a_plan_are_shown(spec: ModelSpec) -> None:
    seen = summary_of(spec, here=machine(), offload="group")
    no_gpu = fact("machine.no_gpu")
    assert line("planner.offload_on_cpu", chosen={"offload": "group"}, cause=no_gpu) in seen.notes
    assert "“Offload: By block”" in seen.notes
    assert escape(seen.notes) in summary_html(seen)


def test_an_invalid_value_is_reported_once_and_marks_no_component(spec: ModelSpec) -> None:
    seen = summary_of(spec, width=65)
    assert seen.field == "width"
    assert {badge.kind for badge in seen.badges.values()} == {"plain"}
    assert "multiples of 16" in seen.problem and seen.problem.endswith("Use 64 or 80.")
    assert seen.memory is None


def test_a_conflict_marks_the_component_that_has_it(spec: ModelSpec) -> None:
    seen = summary_of(spec, offload="group", backends={"transformer": "tensorrt"})
    assert seen.line == line("ui.invalid_setting")
    marked = {name for name, badge in seen.badges.items() if badge.kind == "stopped"}
    assert marked == {"transformer"}
    html = summary_html(seen) + components_html(spec, seen, None, GPU)
    assert "“Offload: None”" in html and "--offload" not in html


def test_too_little_memory_concerns_all_components(spec: ModelSpec) -> None:
    full = summary_of(spec, here=machine(ram_free_gib=0.1))
    assert isinstance(preview(spec, here=machine(ram_free_gib=0.1)).error, MachineError)
    assert full.line == line("ui.does_not_fit")
    assert {badge.kind for badge in full.badges.values()} == {"stopped"}


def test_a_backend_that_cannot_run_is_disabled_with_the_reason(spec: ModelSpec) -> None:
    here = machine()
    by_backend = {cell.backend: cell for cell in cells("vae", None, here)}
    assert not by_backend["tensorrt"].usable and by_backend["tensorrt"].state == NO_GPU
    assert by_backend["onnxruntime"].usable and by_backend["auto"].usable and by_backend["pytorch"].usable
    html = components_html(spec, summary_of(spec, here=here), preview(spec, here=here), here)
    assert html.count(" disabled>") == len(spec.component_names) * sum(not cell.usable for cell in by_backend.values())
    ready = {cell.backend: cell for cell in cells("vae", preview(spec, offers=offering(offer("vae"))), GPU)}
    assert ready["tensorrt"].state == "engine ready: 1.0 s, 3.0× as fast"
    assert ready["pytorch"].state == "always possible: 3.0 s"
    missing = preview(spec, offers=offering(offer("vae", build=True, build_seconds=60.0)))
    state = {cell.backend: cell.state for cell in cells("vae", missing, GPU)}["tensorrt"]
    assert state == "no engine for 64×32 yet, about 1 min to build"
    old = offer("vae", build=True, misfit=Fact("engine.misfit_export"))
    stale = {cell.backend: cell for cell in cells("vae", preview(spec, offers=offering(old)), GPU)}
    assert stale["tensorrt"].state == "outdated engine (other Tandem version)"


def test_choices_that_the_machine_lacks_are_disabled_with_the_reason(spec: ModelSpec) -> None:
    html = options_html({"step_cache": "first-block:0.17"}, machine(), spec)
    assert f'<option value="fp8" disabled>FP8: {NO_GPU}</option>' in html
    assert f'<option value="group" disabled>By block: {NO_GPU}</option>' in html
    assert '<option value="auto">Automatic</option>' in html
    # A strength that another page or a video has is not lost.
    assert '<option value="first-block:0.17">' in html
    # MagCache needs ratios, TaylorSeer does not.
    assert '<option value="taylorseer:3">TaylorSeer, 3</option>' in html
    assert '<option value="magcache" disabled>MagCache: ' in html
    measured = replace(spec, mag_ratios={"transformer": (1.0,), "transformer_2": (1.0,)})
    assert '<option value="magcache">MagCache</option>' in options_html({}, machine(), measured)
    assert 'value="group">By block</option>' in options_html({}, GPU, spec)
    assert f'<option value="sol:0.5" disabled>Sol-Attn, sparse, 0.5: {NO_GPU}</option>' in html
    kitchen = replace(GPU, packages=(*GPU.packages, ("comfy-kitchen", "0.2.40")))
    for value, title in (("sol", "Sol-Attn, sparse"), ("sol:1.5", "Sol-Attn, sparse, 1.5"), ("sol:1.25", "sol:1.25")):
        assert f'<option value="{value}">{title}</option>' in options_html({"attention": "sol:1.25"}, kitchen, spec)
    assert "`" not in html


def test_choices_that_the_model_lacks_are_left_out(spec: ModelSpec) -> None:
    two, names = replace(GPU, gpus=2 * GPU.gpus), ("gpus", "step_cache")
    for lacking in (frozenset[str](), frozenset(names)):
        html = options_html({}, two, replace(spec, unsupported=lacking))
        assert 'data-field="offload"' in html
        assert {name for name in names if f'data-field="{name}"' not in html} == lacking
    assert 'data-field="compile"' in options_html({}, two, spec)
    assert 'data-field="compile"' not in options_html({}, two, replace(spec, lacks=frozenset({"compiled"})))


def test_a_preset_that_does_not_fit_is_disabled_with_the_reason(spec: ModelSpec) -> None:
    fast, balanced, best = presets(spec, GPU)
    tile = preset_tile(balanced, preview(spec, here=machine(ram_free_gib=0.1)))
    assert re.fullmatch(r"Needs \d\.\d GB, \d\.\d GB free\.", tile.problem)
    assert " disabled>" in presets_html([tile], "balanced")
    # An invalid width is no fault of a preset's.
    assert preset_tile(fast, preview(spec, width=65)).problem == ""
    shown = preset_tile(best, preview(spec, **best.changes))
    assert shown.cost and shown.means.endswith("full precision")
    html = presets_html([shown], "")
    assert ">Custom</span>" in html and " disabled>" not in html
    assert ">Custom</span>" not in presets_html([shown], "best")


@pytest.mark.parametrize("built", [False, True])
def test_building_is_offered_where_no_engine_exists(spec: ModelSpec, built: bool) -> None:
    missing = offer("vae", "inductor", build=not built, seconds=1.0 if built else 0.0, build_seconds=240.0)
    seen = preview(spec, offers=offering(missing), build="never", compile="never")
    # One rule for this button, for the panel Engines and for the forecast of the task.
    assert seen.plan is not None
    assert seen.build_seconds(seen.plan.components) == (None if built else 240.0)
    html = components_html(spec, summarize(seen, spec.component_names), seen, GPU)
    button = re.search(r'<button[^>]*data-action="build" data-target="all"[^>]*>([^<]*)<', html)
    assert (button is None) == built
    assert button is None or button[1].endswith("about 4 min")


def test_badges_wait_until_engines_are_known(spec: ModelSpec) -> None:
    seen = summary_of(spec, complete=False)
    assert not seen.complete
    assert {badge.text for badge in seen.badges.values()} == {line("ui.looking_for_engines")}


def test_every_summary_has_the_same_elements(spec: ModelSpec) -> None:
    """Nothing moves and live regions stay only if the elements are the same."""

    def tags(html: str) -> list[str]:
        return [part.split(">")[0].split(" ")[0] for part in html.split("<")[1:]]

    views = [PlanSummary(""), summary_of(spec), summary_of(spec, width=65)]
    assert len({tuple(tags(summary_html(view))) for view in views}) == 1


def test_reasons_are_shown_as_text(spec: ModelSpec) -> None:
    hostile = machine(gpu=replace(gpu(), name='<img src=x onerror="hit()">'), torch_cuda="13.0")
    seen = summary_of(spec, here=hostile)
    html = summary_html(seen) + components_html(spec, seen, preview(spec, here=hostile), hostile)
    assert "<img" not in html
    assert "&lt;img" in html


@pytest.mark.parametrize(
    ("build", "saved", "words"),
    [
        (1080.0, 40.0, "saves 40 s a video; building took 18 min 0 s, made up for after 27 videos"),
        (8.0, 20.0, "saves 20 s a video; building took 8.0 s, made up for after 1 video"),
        (74.0, 0.011, "saves 11 ms a video; building took 1 min 14 s, made up for after 6,728 videos"),
        (8.0, 0.0001, "saves less than 1 ms a video; building took 8.0 s, made up for after 80,000 videos"),
        (8.0, -1.0, "saves no time; building took 8.0 s"),
        # Imported.
        (0.0, 2.0, "saves 2.0 s a video"),
        (0.0, -2.0, "saves no time"),
    ],
)
def test_break_even_is_described(build: float, saved: float, words: str) -> None:
    assert str(BreakEven(build, saved)) == words


def test_the_break_even_of_a_block_engine_counts_its_calls(spec: ModelSpec) -> None:
    tiny = preview(spec).plan
    assert tiny is not None
    calls = tiny.tokens / 16 * spec.transformer.num_layers
    offered = offer("block_qkv", in_blocks=True, seconds=0.1 * calls, baselines={"eager": 0.3 * calls})
    blocks = replace(offered, engines=(offered.engines[0].replace(tokens=16),))

    def of(component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
        return [blocks] if component.startswith("transformer") else []

    seen = preview(spec, offers=of)
    assert seen.plan is not None
    made = replace(
        record(key(program="block_qkv")), id=blocks.engines[0].id, seconds_per_call=0.1, baselines={"eager": 0.3}
    )
    saved = break_even_of_record(made, seen)
    passes = 2 * seen.plan.steps
    assert saved is not None
    assert saved.build_seconds == 60.0
    assert saved.saved_seconds == pytest.approx(0.2 * passes * calls)


# Seconds of a call on TensorRT, in PyTorch when that engine was built, on Inductor, in PyTorch then.
@pytest.mark.parametrize(
    ("tensorrt", "beside_tensorrt", "inductor", "beside_inductor"),
    [
        (1.0, 2.0, 1.5, 2.0),
        (1.5, 2.0, 1.0, 2.0),
        # Inductor's engine was built while the machine was slower: what both gain over PyTorch counts.
        (1.0, 2.0, 1.4, 5.0),
        (1.0, 5.0, 0.9, 2.0),
        # No engine is faster.
        (2.5, 2.0, 2.2, 2.0),
    ],
)
def test_every_place_shows_the_seconds_of_the_choice(
    spec: ModelSpec, tensorrt: float, beside_tensorrt: float, inductor: float, beside_inductor: float
) -> None:
    offers = [
        offer("vae", "tensorrt", seconds=tensorrt, baselines={"eager": beside_tensorrt}),
        offer("vae", "inductor", seconds=inductor, baselines={"eager": beside_inductor}),
    ]
    seen = preview(spec, offers=offering(*offers), compile="never")
    assert seen.plan is not None
    part = seen.plan.components["vae"]
    assert part.seconds is not None
    fastest = part.compared[0]
    assert part.backend == fastest.backend
    assert part.seconds.likely == pytest.approx(fastest.seconds.likely)
    figures = {cell.backend: re.search(r": ([\d.]+) (m?s)", cell.state) for cell in cells("vae", seen, GPU)}
    shown = {
        backend: float(match[1]) / (1000 if match[2] == "ms" else 1) for backend, match in figures.items() if match
    }
    assert set(shown) == {"pytorch", "tensorrt", "inductor"}
    assert min(shown, key=lambda backend: shown[backend]) == part.backend
    # The Engines tab names the backend that it speaks of, which is the plan's.
    records = [replace(record(key()), id=each.engines[0].id, build_seconds=10.0 + len(each.backend)) for each in offers]
    break_even = break_even_of_part(part, offers, records)
    assert break_even is not None
    backend, gain = break_even
    assert backend == (part.backend if part.engines else "inductor")
    assert gain.build_seconds == 10.0 + len(backend)
    on = next(entry for entry in part.compared if entry.backend == backend)
    pytorch = part.on("pytorch")
    assert pytorch is not None
    assert gain.saved_seconds == pytest.approx(pytorch.likely - on.seconds.likely)
    # So do the bars of the parts, and the line of the clip: what engines save is PyTorch's seconds without theirs.
    lines = {each.name: each for each in part_lines(seen.plan)}
    assert set(lines) == set(seen.plan.components)
    assert lines["vae"].time.split(" instead")[0] == latency(part.seconds.likely)
    assert lines["vae"].percent + lines["vae"].saved == pytest.approx(100.0, abs=0.2)
    assert (" instead of " in clip_line(seen.plan)) == (" instead of " in lines["vae"].time) == bool(part.engines)
    # After these engines were built, the clip takes less by what they save.
    now, before = seconds_gained(seen.plan, offering(*offers), {each.engines[0].id for each in offers})
    assert before - now == pytest.approx(pytorch.likely - part.seconds.likely)
    # Of the fastest alone, compared with the other one.
    now, before = seconds_gained(seen.plan, offering(*offers), {f"vae-{part.backend}"})
    second = part.compared[1].seconds.likely if part.engines else part.seconds.likely
    assert before - now == pytest.approx(second - part.seconds.likely)
    # A slower choice never lowers the forecast.
    for other in ("pytorch", "tensorrt", "inductor"):
        asked = preview(spec, offers=offering(*offers), compile="never", backends={"vae": other}).plan
        assert asked is not None
        assert asked.seconds["total"].likely >= seen.plan.seconds["total"].likely - 1e-9
        assert [entry.seconds for entry in asked.components["vae"].compared] == [
            entry.seconds for entry in part.compared
        ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("offload", "group"), "“Offload: By block”"),
        (("quantization", "bnb-8bit"), "“Quantization: 8 bit”"),
        (("quantization",), "“Quantization”"),
        (("vae_precision", "float32"), "“VAE precision: float32”"),
        (("gpus", "2"), "“GPUs for one video: 2”"),
        (("step_cache", "first-block"), "“Step cache: First block”"),
        (("backend", "transformer_2=pytorch"), "“PyTorch” for the low-noise transformer"),
        (("backends", "vae=onnxruntime"), "“ONNX Runtime” for the VAE decoder"),
    ],
    ids=str,
)
def test_facts_name_settings_by_their_labels(setting: tuple[str, ...], words: str) -> None:
    assert WORDS.setting(*setting) == words
