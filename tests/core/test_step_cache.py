"""Which steps a step cache computes, by their numbers alone."""

import pytest
import torch
from diffusers.hooks.mag_cache import nearest_interp

from runtime.core.step_cache import computed_steps, interpolated, most_reused, uses
from runtime.models.registry import published_models

KNOWN = published_models("wan")
EXPERTS = ["transformer"] * 20 + ["transformer_2"] * 5
EVEN = {"transformer": [1.0] * 20, "transformer_2": [1.0, 0.5, 0.5, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("step_cache", "computed", "fresh"),
    [
        ("none", "x" * 25, "x" * 25),
        ("first-block:0.1", "x" * 25, "x.......x.......x...x...x"),
        ("magcache:0.06", "xxxx..x..x..x..x..x.xxxxx", "xxxx..x..x..x..x..x.xxxxx"),
        ("magcache:0.24", "xxxx......x......x..xxxxx", "xxxx......x......x..xxxxx"),
        ("taylorseer:2", "xx.x.x.x.x.x.x.xxx.xxx.x.", "x...............x...x...."),
        ("taylorseer:4", "xx...x...x...x..xx..xx...", "x...............x...x...."),
    ],
)
def test_which_steps_are_computed(step_cache: str, computed: str, fresh: str) -> None:
    found = uses(step_cache, EXPERTS, EVEN)
    assert "".join("x" if use.computed else "." for use in found) == computed
    assert "".join("x" if use.fresh else "." for use in found) == fresh


def test_the_error_that_ratios_predict_ends_the_reuse() -> None:
    # Of products 0.98, 0.96, 0.94: errors 0.02, 0.06, 0.12.
    for strength, reused in ((0.019, 0), (0.03, 1), (0.07, 2), (0.13, 3)):
        found = uses(f"magcache:{strength}", ["transformer"] * 10, {"transformer": [0.98] * 10})
        pattern = "".join("x" if use.computed else "." for use in found)
        assert pattern == ("xx" + ("." * reused + "x") * 10)[:10], strength


@pytest.mark.parametrize("steps", [1, 2, 7, 20, 40, 77])
def test_ratios_are_interpolated_as_by_diffusers(steps: int) -> None:
    ratios = [1.0 + 0.01 * number for number in range(40)]
    assert interpolated(ratios, steps) == pytest.approx(nearest_interp(torch.tensor(ratios), steps).tolist())


def test_published_strengths_and_ratios() -> None:
    assert [most_reused(strength) for strength in (0.001, 0.06, 0.12, 0.24)] == [1, 2, 4, 6]
    known = {model.name: model for model in KNOWN if model.mag_ratios}
    assert len(known) == 7
    for model in known.values():
        assert len(model.mag_ratios) == model.experts
        assert sum(map(len, model.mag_ratios.values())) in {40, 50}
        assert all(ratios[0] == 1.0 for ratios in model.mag_ratios.values())
    a14b = known["wan2.2-t2v-a14b"].mag_ratios
    assert computed_steps("magcache:0.12", {name: len(own) for name, own in a14b.items()}, a14b) == {
        "transformer": 9,
        "transformer_2": 7,
    }
