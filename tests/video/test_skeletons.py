"""Pictures of poses: which color is where, for people whose points are known."""

import numpy as np
import pytest

from runtime.video.skeletons import POINTS, skeletons

# A person who stands and is seen from the front, 120×200 pixels, so that the right side is on the left.
STANDING = np.array(
    [
        *((60, 20), (66, 14), (54, 14), (74, 18), (46, 18)),
        *((84, 50), (36, 50), (96, 80), (24, 80), (104, 110), (16, 110)),
        *((76, 110), (44, 110), (78, 150), (42, 150), (80, 188), (40, 188)),
    ],
    dtype=np.float32,
)
PERSON = np.concatenate([STANDING, np.ones((POINTS, 1), np.float32)], axis=1)
WIDTH, HEIGHT = 120, 200
NECK = (60, 50)
# Colors of OpenPose's pictures: of points as they are, of limbs in the middle between two points darker.
JOINTS = {
    (60, 20): (255, 0, 0), NECK: (255, 85, 0), (36, 50): (255, 170, 0), (84, 50): (85, 255, 0),
    (16, 110): (170, 255, 0), (104, 110): (0, 255, 85), (44, 110): (0, 255, 170), (40, 188): (0, 170, 255),
    (80, 188): (85, 0, 255), (54, 14): (170, 0, 255), (66, 14): (255, 0, 255), (46, 18): (255, 0, 170),
    (74, 18): (255, 0, 85), (76, 110): (0, 85, 255),
}  # fmt: skip
LIMBS = {
    (48, 50): (153, 0, 0), (72, 50): (153, 51, 0), (30, 65): (153, 102, 0), (20, 95): (153, 153, 0),
    (90, 65): (102, 153, 0), (100, 95): (51, 153, 0), (52, 80): (0, 153, 0), (43, 130): (0, 153, 51),
    (41, 169): (0, 153, 102), (68, 80): (0, 153, 153), (77, 130): (0, 102, 153), (79, 169): (0, 51, 153),
    (60, 35): (0, 0, 153),
}  # fmt: skip


def drawn(*people: np.ndarray) -> np.ndarray:
    return np.asarray(skeletons(people, WIDTH, HEIGHT))


@pytest.mark.parametrize("colors", [JOINTS, LIMBS], ids=["points", "limbs"])
def test_points_and_limbs_have_the_colors_of_openpose(colors: dict[tuple[int, int], tuple[int, int, int]]) -> None:
    picture = drawn(PERSON)
    assert picture.shape == (HEIGHT, WIDTH, 3)
    assert {place: tuple(picture[place[1], place[0]].tolist()) for place in colors} == colors


def test_limbs_are_eight_pixels_wide_and_points_nine() -> None:
    picture = drawn(PERSON)
    thigh, ankle = picture[130].any(-1), picture[188].any(-1)
    assert 7 <= thigh[30:60].sum() <= 9 and ankle[30:60].sum() == 9


def test_points_that_are_not_seen_and_their_limbs_are_not_drawn() -> None:
    unseen = PERSON.copy()
    unseen[[5, 15], 2] = 0.29  # left shoulder, left ankle
    picture = drawn(unseen)
    # Without a shoulder there is no neck.
    for x, y in ((84, 50), (90, 65), NECK, (68, 80), (60, 35), (79, 175), (80, 188)):
        assert not picture[y, x].any(), (x, y)
    assert picture[130, 43].any() and picture[110, 104].any()
    unseen[:, 2] = 0
    assert not drawn(unseen).any() and not drawn().any()


def test_several_people_and_people_at_the_edge_are_drawn() -> None:
    moved = PERSON.copy()
    moved[:, 0] -= 80
    picture, alone = drawn(PERSON, moved), drawn(PERSON)
    assert picture[188, 0].any() and not alone[188, 0].any()
    # Equal points of one person are a dot.
    assert drawn(np.full((POINTS, 3), 50, np.float32)).any()
