"""Tiles cover a frame, overlap, and are counted."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.tiles import spans, times_decoded


@given(st.integers(1, 200), st.integers(4, 80))
def test_tiles_cover_a_side_and_overlap(length: int, tile: int) -> None:
    placed = spans(length, tile)
    assert (placed[0].start, placed[-1].end) == (0, length)
    assert {span.end - span.start for span in placed} == {min(tile, length)}
    for before, after in itertools.pairwise(placed):
        assert before.start < after.start
        assert before.end - after.start >= tile // 4


@pytest.mark.parametrize(
    ("height", "width", "tile", "times"),
    [
        (60, 104, None, 1.0),
        (60, 104, 104, 1.0),
        # 832x480 in tiles of 512, 1 x 2 of them, and of 256, 3 x 4.
        (60, 104, 64, 2 * 60 * 64 / (60 * 104)),
        (60, 104, 32, 12 * 32 * 32 / (60 * 104)),
    ],
)
def test_how_often_a_latent_is_decoded(height: int, width: int, tile: int | None, times: float) -> None:
    assert times_decoded(height, width, tile) == pytest.approx(times)
