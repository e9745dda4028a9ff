"""Which variant of a published model a machine is offered, before anything is downloaded."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.machine.probe import Machine
from runtime.models.catalogue import KnownVariant, known_as, known_models
from runtime.models.registry import KnownModel
from runtime.planner.variants import ORIGINAL, candidates, offer, variant_bytes, variant_spec
from tests.planner.test_table import CPU_8, H200, here

GIB = 1 << 30
PLENTY = 10**13
# GiB of video memory of a card of the generation Ada, with 64 GiB of RAM.
CARDS = (6, 8, 12, 16, 24, 48, 80, 140)


def known(name: str) -> KnownModel:
    model = known_as(name)
    assert model is not None
    return model


def chosen(name: str, machine: Machine, free: int = PLENTY) -> str:
    best = offer(candidates(known(name), machine), free).best
    return "none" if best is None else best.name


@pytest.mark.parametrize(
    ("name", "variants", "without_gpu"),
    [
        ("wan2.2-t2v-a14b", ("q4", "q4", "q4", "q4", "fp8", "fp8", "fp8", "fp8"), "none"),
        ("wan2.2-i2v-a14b", ("q4", "q4", "q4", "q4", "fp8", "fp8", "fp8", "fp8"), "none"),
        ("wan2.2-ti2v-5b", ("none", "q4", "q4", "q8", "q8", "q8", "q8", "q8"), "none"),
        ("wan2.1-t2v-14b", ("q4", "q4", "q4", "q4", "fp8", "fp8", "fp8", "fp8"), "none"),
        ("wan2.1-i2v-14b-480p", ("q4", "q4", "q4", "q4", "q4", "fp8", "fp8", "fp8"), "none"),
        ("wan2.1-i2v-14b-720p", ("none", "none", "fp8", "fp8", "fp8", *[ORIGINAL] * 3), "none"),
        ("wan2.1-vace-14b", (ORIGINAL, "q4", "q4", "q4", "q4", "q8", "q8", "q8"), "none"),
        ("ltx-2-distilled", ("fp8", "fp8", "fp8", "fp8", "fp8", *[ORIGINAL] * 3), "none"),
    ],
)
def test_the_variant_for_each_card(name: str, variants: Sequence[str], without_gpu: str) -> None:
    assert [chosen(name, here("card", (8, 9), gib, ram=64)) for gib in CARDS] == list(variants)
    assert chosen(name, CPU_8) == without_gpu


def test_a_fast_card_takes_the_original() -> None:
    offered = offer(candidates(known("wan2.2-t2v-a14b"), H200), PLENTY)
    assert [candidate.fit.kind for candidate in offered.candidates] == ["well"] * 3
    assert offered.best is not None and offered.best.name == ORIGINAL
    assert offered.reason.code == "variant.because"


def test_ram_and_disk_limit_the_choice(subtests: pytest.Subtests) -> None:
    name = "wan2.2-t2v-a14b"
    with subtests.test("RAM"):
        card, smaller = (here("card", (8, 9), gib, ram=24) for gib in (16, 12))
        assert (chosen(name, card), chosen(name, smaller)) == ("q4", "none")
        none = offer(candidates(known(name), smaller), PLENTY).reason
        assert (none.code, none.data["title"]) == ("variant.smallest", "GGUF Q4_K_M, 4 steps")
        assert offer(candidates(known(name), card), PLENTY).reason.code == "variant.because_smaller"
    with subtests.test("disk"):
        sizes = {
            candidate.name: candidate.bytes for candidate in offer(candidates(known(name), H200), PLENTY).candidates
        }
        assert sizes["q4"] < sizes["fp8"] < sizes[ORIGINAL]
        for free, variant, code in (
            (sizes[ORIGINAL], "fp8", "variant.because_of_space"),
            (sizes["fp8"], "q4", "variant.because_of_space"),
            (sizes["q4"], "none", "variant.no_space"),
        ):
            offered = offer(candidates(known(name), H200), free)
            assert (chosen(name, H200, free), offered.reason.code) == (variant, code)


def test_the_reason_if_the_original_runs_as_well() -> None:
    for gib, whole, code in (
        (24, [False, False], "variant.because_less"),
        (32, [False, True], "variant.because_whole"),
        (80, [True, True], "variant.because"),
    ):
        offered = offer(candidates(known("wan2.1-i2v-14b-720p"), here("card", (8, 9), gib, ram=64)), PLENTY)
        assert [candidate.fit.kind for candidate in offered.candidates] == ["slow", "slow"]
        assert [candidate.fit.whole for candidate in offered.candidates] == whole
        assert offered.reason.code == code


def test_the_forecast_counts_the_bytes_of_files_and_loras() -> None:
    for model in known_models():
        for variant in model.variants:
            each = KnownVariant(model, variant)
            spec, (size, _) = variant_spec(each, Path("none")), variant_bytes(each)
            assert variant.bytes < size
            loras = sum(lora.file.bytes for lora in variant.loras)
            for component, file in variant.transformers.items():
                files = spec.files[component]
                contained = sum(spec.parameters[part] for part in (component, *variant.contains))
                others = 2 * (contained - files.packed_weights)
                factors = loras if len(variant.transformers) == 1 else loras // 2
                assert files.packed_bytes == file.bytes - others + factors
                # A weight of a file has between 4 and 10 bits.
                assert 0.5 < files.packed_bytes / files.packed_weights < 1.25
