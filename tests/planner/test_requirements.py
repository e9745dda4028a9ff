"""Hardware requirements of models: the smallest GPU, and memory on this machine."""

from pathlib import Path

import pytest

from runtime.core.request import GenerationRequest
from runtime.families.wan.known import KNOWN
from runtime.models.catalogue import find
from runtime.planner.requirements import CARDS, needs
from runtime.planner.resolve import resolve
from tests.planner.test_table import CPU_8, H200, here

GIB = 1 << 30


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_the_named_card_suffices_and_a_smaller_one_does_not(known: object) -> None:
    spec = known.spec(Path("none"))  # type: ignore[attr-defined]
    found = needs(spec, H200)
    assert found.runs_here
    assert found.least is not None and found.resident is not None
    assert found.least.gib < found.resident.gib
    request = GenerationRequest(prompt="none", model=spec.name, quantization="none")
    for card, stays in ((found.least, False), (found.resident, True)):
        ram = card.ram_bytes // GIB + 8
        plan = resolve(request, spec, here("card", (8, 9), card.gib, ram=2 * ram), Path("none.mp4"))
        assert plan.memory_bytes <= 0.95 * card.gib * GIB
        assert plan.strategy.keep_loaded or not stays
    smaller = CARDS[CARDS.index(found.resident.gib) - 1]
    assert not resolve(request, spec, here("card", (8, 9), smaller, ram=512), Path("none.mp4")).strategy.keep_loaded


def test_requirements_on_a_machine_without_a_gpu() -> None:
    wide = next(known for known in KNOWN if known.name == "wan2.2-t2v-a14b").spec(Path("none"))
    found = needs(wide, CPU_8)
    assert not found.runs_here
    assert found.peak_bytes == 0
    assert found.here.code == "planner.memory_short"
    assert found.here.data["free"] == pytest.approx(7.6 * GIB, rel=0.01)
    small = needs(find("diorama", Path("none")), CPU_8)
    assert small.runs_here
    assert 0 < small.peak_bytes < GIB
    assert small.to_json()["least"]["gib"] == 6
