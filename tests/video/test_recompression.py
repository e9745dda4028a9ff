"""Pictures after H.264: the same size and about the same colors, with what compression takes."""

import numpy as np

from runtime.video.recompression import recompressed
from tests.image_files import picture


def test_a_picture_is_compressed() -> None:
    smooth = np.array(picture(96, 64))
    # Gray, so that the halved resolution of colors changes nothing.
    noise = np.random.default_rng(1).integers(0, 256, (64, 96, 1), dtype=np.uint8)
    noisy = np.repeat(noise, 3, axis=2)
    for crf in (1, 33):
        after = recompressed(smooth, crf)
        assert after.shape == smooth.shape
        assert after.dtype == np.uint8
        # Colors have half the resolution, and limited range.
        assert np.abs(after.astype(int) - smooth).mean() < 4
    fine, coarse = (recompressed(noisy, crf).astype(int) for crf in (1, 33))
    lost = [np.abs(each - noisy).mean() for each in (fine, coarse)]
    assert lost[1] > 4 * lost[0]
    assert np.array_equal(recompressed(noisy, 33), coarse)
