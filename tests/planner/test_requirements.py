"""Hardware requirements of models: the smallest GPU, and memory on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import MemoryShortError
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import find, known_models, look_up
from runtime.planner import requirements
from runtime.planner.requirements import CARDS, WELL_SECONDS, fit, needs, smallest_card
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact
from tests.planner.test_table import CPU_8, H200, here

GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_the_named_card_suffices_and_a_smaller_one_does_not(known: object) -> None:
    spec = known.spec(Path("none"))  # type: ignore[attr-defined]
    found = needs(spec, H200)
    assert found.fit.runs
    assert found.least is not None and found.resident is not None
    assert found.least.gib < found.resident.gib
    request = GenerationRequest(prompt="none", model=spec.name, quantization="none")
    for card, stays in ((found.least, False), (found.resident, True)):
        ram = card.ram_bytes // GIB + 8
        plan = resolve(request, spec, PlanningContext(here("card", (8, 9), card.gib, ram=2 * ram), Path("none.mp4")))
        assert plan.memory_bytes <= 0.95 * card.gib * GIB
        assert plan.strategy.keep_loaded or not stays
    smaller = CARDS[CARDS.index(found.resident.gib) - 1]
    assert not resolve(
        request, spec, PlanningContext(here("card", (8, 9), smaller, ram=512), Path("none.mp4"))
    ).strategy.keep_loaded


def test_framepack_s_smallest_card_offloads_blocks_and_decodes_in_tiles() -> None:
    spec = look_up("framepack-i2v", Path("none"))
    found = smallest_card(spec)
    assert found is not None and found.gib == 6
    request = GenerationRequest(prompt="none", model=spec.name, width=832, height=480, quantization="none")
    plan = resolve(request, spec, PlanningContext(here("card", (8, 9), 6, ram=128), Path("none.mp4")))
    assert (plan.strategy.offload, plan.strategy.decode_tile) == ("group", 32)


def test_requirements_on_a_machine_without_a_gpu() -> None:
    wide = look_up("wan2.2-t2v-a14b", Path("none"))
    found = needs(wide, CPU_8)
    assert found.fit == fit(wide, CPU_8)
    found_json = found.to_json()
    assert (found_json["class"], found_json["runs_here"], found_json["peak_bytes"]) == ("too_large", False, 0)
    assert found.fit.verdict.data["free"] == pytest.approx(7.6 * GIB, rel=0.01)
    small = needs(find("diorama", Path("none")), CPU_8).to_json()
    assert (small["class"], small["runs_here"], small["least"]["gib"]) == ("well", True, 6)
    assert 0 < small["peak_bytes"] < GIB and 0 < small["seconds"]["seconds"] < WELL_SECONDS


def test_whether_a_model_runs_well_here() -> None:
    specs = {known.name: known.spec(Path("none")) for known in known_models()}
    small = find("diorama", Path("none"))
    assert fit(small, CPU_8).kind == "well"
    # GiB of video memory and RAM, and the kind for each model.
    for vram, ram, wide, medium in (
        (141, 256, "well", "well"),
        (24, 64, "slow", "slow"),
        (8, 64, "slow", "slow"),
    ):
        machine = H200 if vram == 141 else here("card", (8, 9), vram, ram=ram)
        assert fit(specs["wan2.2-t2v-a14b"], machine).kind == wide
        found = fit(specs["wan2.2-ti2v-5b"], machine)
        assert found.kind == medium and found.runs and found.seconds is not None
        assert 0 < found.peak_bytes <= found.free_bytes
        assert (found.kind == "well") == (found.seconds.likely <= WELL_SECONDS)
        assert found.verdict == fact(f"fit.{medium}", seconds=found.seconds.likely)


def test_a_clip_that_takes_longer_than_the_limit_runs_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = look_up("wan2.2-ti2v-5b", Path("none"))
    takes = fit(spec, H200).seconds
    assert takes is not None
    for limit, kind in ((takes.likely, "well"), (takes.likely - 1, "slow")):
        monkeypatch.setattr(requirements, "WELL_SECONDS", limit)
        found = fit(spec, H200)
        assert (found.kind, found.runs) == (kind, True)
        assert found.summary.code == "fit.summary" and found.summary.data["where"] == "video memory"
    too_large, well = fit(look_up("wan2.2-t2v-a14b", Path("none")), CPU_8), fit(find("diorama", Path("none")), CPU_8)
    assert sorted((too_large, found, well), key=lambda fit: fit.rank) == [well, found, too_large]


def test_a_model_that_is_too_large_names_what_is_missing() -> None:
    wide = look_up("wan2.2-t2v-a14b", Path("none"))
    found = fit(wide, CPU_8)
    assert (found.kind, found.runs, found.detail) == ("too_large", False, None)
    assert (found.verdict.code, found.verdict.data["where"]) == ("fit.too_large", "memory")
    assert found.verdict.data["needed"] / GIB == pytest.approx(59.8, abs=0.05)
    assert found.verdict.data["free"] == CPU_8.ram_free_bytes
    on_card = fit(wide, here("card", (8, 9), 12, ram=16))
    assert (on_card.verdict.code, on_card.verdict.data["where"]) == ("fit.too_large", "video memory")
    assert on_card.verdict.data["free"] == int(0.95 * 12 * GIB) < on_card.verdict.data["needed"] < 12 * GIB
    assert on_card.detail == fact("fit.shorter", frames=65)


def test_the_most_frames_that_fit_are_named() -> None:
    spec = look_up("wan2.1-t2v-1.3b", Path("none"))
    least = fit(spec, here(ram=8)).verdict.data["needed"]
    machine = replace(here(ram=64), ram_free_bytes=least - (1 << 20))
    found = fit(spec, machine)
    assert found.kind == "too_large"
    assert found.detail is not None and found.detail.code == "fit.shorter"
    frames = found.detail.data["frames"]
    request = GenerationRequest(prompt="none", model=spec.name)
    resolve(request.replace(frames=frames), spec, PlanningContext(machine, Path("none.mp4")))
    with pytest.raises(MemoryShortError):
        resolve(request.replace(frames=frames + 4), spec, PlanningContext(machine, Path("none.mp4")))
