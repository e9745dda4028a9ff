"""Tables of a result: every configuration, with its values in the right columns."""

import pytest

from runtime.bench import render
from tests.bench.made import alike, configuration, failed, result


def test_timing_rows_have_medians_with_their_range() -> None:
    found = render.timing_rows(result(configuration("a", 4.0), failed("b"), configuration("c", 40.0)))
    assert [row[0] for row in found] == ["a", "c"]
    assert all(len(row) == len(render.TIMING_HEADINGS) for row in found)
    assert found[0][1] == "4.00 (3.80–4.20)"
    assert found[0][7:9] == ("9.00 s", "0.50 s")
    assert found[1][1] == "40.0 (38.0–42.0)"


def test_builds_of_this_benchmark_and_earlier_ones_differ() -> None:
    engine = {"id": "e", "program": "vae_next", "build_seconds": 30.0, "built_now": False}
    now = configuration("now", build_seconds=12.0, engines=[engine])
    earlier = configuration("earlier", engines=[engine])
    assert [row[-1] for row in render.timing_rows(result(now, earlier))] == ["12.0 s", "30.0 s, earlier"]


def test_quality_rows_have_the_peaks_and_the_similarity() -> None:
    memory = {"vram": {"denoise": 3 << 30}, "gpu": {"decode": 4 << 30}, "ram": {}}
    other = configuration("b", quality=alike(44.44), memory=memory)
    unlike = configuration("c", not_compared="another size", repeats=False)
    same = configuration("d", quality=alike(0) | {"same": True, "psnr": None})
    found = render.quality_rows(result(configuration("a"), other, unlike, same, failed("e")))
    assert all(len(row) == len(render.QUALITY_HEADINGS) for row in found)
    assert found[0][:5] == ("a", "", "", "1.0 GB (decode)", "the reference")
    assert found[1] == ("b", "3.0 GB (denoise)", "4.0 GB (decode)", "", "44.4 dB", "0.9900", "yes")
    assert found[2][4:] == ("another size", "", "no")
    assert found[3][4] == "same frames"


def test_unmeasured_configurations_are_listed_with_remedies() -> None:
    lines = render.outcomes(result(configuration("a"), failed("b"), failed("c", "fell back"), failed("d", "same")))
    assert lines == [
        "b: failed: It broke. Fix it.",
        "c: fell back: It broke. Fix it.",
        "d: It broke. Fix it.",
    ]


@pytest.mark.parametrize(
    ("floor", "says"),
    [
        (None, "no noise floor"),
        (alike(52.0), "differ by 52.0 dB"),
        (alike(0) | {"same": True, "psnr": None}, "bit for bit"),
    ],
)
def test_the_noise_floor_is_stated(floor: object, says: str) -> None:
    assert says in " ".join(render.notes(result(configuration("a"), noise_floor=floor)))


def test_cancellation_is_stated() -> None:
    assert render.notes(result(configuration("a"), cancelled=True))[0].startswith("Cancelled")


def test_one_run_is_not_plural() -> None:
    found = " ".join(render.notes(result(configuration("a"), runs=1, warmup=1)))
    assert "of 1 run after 1 warm-up run, in turn" in found
    assert "of 3 runs after 2 warm-up runs, in turn" in " ".join(
        render.notes(result(configuration("a"), runs=3, warmup=2))
    )
