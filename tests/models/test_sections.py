"""The division of FramePack's videos into sections, and of a character's into segments, as diffusers divides them."""

import pytest

from runtime.models.sections import (
    HISTORY,
    SamplingType,
    Section,
    Sections,
    Segments,
    frames_in,
    paddings,
    section_count,
)

INVERTED, VANILLA = SamplingType.INVERTED_ANTI_DRIFTING, SamplingType.VANILLA


@pytest.mark.parametrize(
    ("seconds", "fps", "frames", "count"),
    [(0.1, 30, 37, 1), (1, 30, 37, 1), (2, 30, 73, 2), (3.6, 30, 109, 3), (60, 30, 1801, 50)],
)
def test_length(seconds: float, fps: int, frames: int, count: int) -> None:
    assert frames_in(seconds, fps) == frames
    assert section_count(frames) == count
    assert Sections(count, INVERTED).frames == Sections(count, VANILLA).frames == frames


def test_one_frame_more_than_sections_have_takes_another_section() -> None:
    assert section_count(1) == 1
    assert section_count(110) == 4


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (3, [2, 1, 0]), (4, [3, 2, 1, 0]), (5, [3, 2, 2, 1, 0]), (50, [3, *[2] * 47, 1, 0])],
)
def test_paddings(count: int, expected: list[int]) -> None:
    assert paddings(count) == expected


@pytest.mark.parametrize(
    ("sampling_type", "count", "index", "latents", "history_1x", "history_2x", "history_4x"),
    [
        (INVERTED, 1, 0, range(1, 10), range(10, 11), range(11, 13), range(13, 29)),
        (INVERTED, 3, 0, range(19, 28), range(28, 29), range(29, 31), range(31, 47)),
        (INVERTED, 3, 2, range(1, 10), range(10, 11), range(11, 13), range(13, 29)),
        (INVERTED, 50, 0, range(28, 37), range(37, 38), range(38, 40), range(40, 56)),
        (INVERTED, 50, 25, range(19, 28), range(28, 29), range(29, 31), range(31, 47)),
        (VANILLA, 1, 0, range(20, 29), range(19, 20), range(17, 19), range(1, 17)),
        (VANILLA, 50, 49, range(20, 29), range(19, 20), range(17, 19), range(1, 17)),
    ],
)
def test_positions(
    sampling_type: SamplingType,
    count: int,
    index: int,
    latents: range,
    history_1x: range,
    history_2x: range,
    history_4x: range,
) -> None:
    section = Sections(count, sampling_type)[index]
    assert (section.latents, section.history_1x) == (latents, history_1x)
    assert (section.history_2x, section.history_4x) == (history_2x, history_4x)
    assert section.clean == (0, history_1x.start)
    assert section.padding == (latents.start - 1 if sampling_type is INVERTED else 0)


@pytest.mark.parametrize(
    ("sampling_type", "count", "decoded", "windows", "frames", "pending"),
    [
        (INVERTED, 1, [10], [(0, 37)], [(0, 37)], [(0, 0)]),
        (
            INVERTED,
            3,
            [9, 18, 19],
            [(76, 109), (40, 109), (0, 73)],
            [(109, 109), (73, 109), (0, 73)],
            [(76, 109), (40, 73), (0, 0)],
        ),
        (VANILLA, 1, [10], [(0, 37)], [(0, 37)], [(0, 0)]),
        (
            VANILLA,
            3,
            [10, 18, 18],
            [(0, 37), (4, 73), (40, 109)],
            [(0, 4), (4, 40), (40, 109)],
            [(4, 37), (40, 73), (0, 0)],
        ),
    ],
)
def test_frames(
    sampling_type: SamplingType,
    count: int,
    decoded: list[int],
    windows: list[tuple[int, int]],
    frames: list[tuple[int, int]],
    pending: list[tuple[int, int]],
) -> None:
    sections = Sections(count, sampling_type)
    assert [section.decoded for section in sections] == decoded
    assert [section.window for section in sections] == [range(*one) for one in windows]
    assert [section.frames for section in sections] == [range(*one) for one in frames]
    assert [section.pending for section in sections] == [range(*one) for one in pending]
    assert [section.blended for section in sections] == [range(0), *(section.pending for section in sections)][:count]


def order_of(sections: Sections) -> list[Section]:
    """Return sections in the order of the video."""
    return list(sections) if sections.sampling_type is VANILLA else list(sections)[::-1]


@pytest.mark.parametrize("sampling_type", SamplingType)
@pytest.mark.parametrize("count", [1, 2, 3, 50])
@pytest.mark.parametrize("window", [1, 3, 9, 12])
def test_each_frame_is_final_once_and_memory_is_bounded(sampling_type: SamplingType, count: int, window: int) -> None:
    sections = Sections(count, sampling_type, window)
    assert [frame for section in order_of(sections) for frame in section.frames] == list(range(sections.frames))
    assert [frame for section in order_of(sections) for frame in section.span] == list(range(1, sections.frames))
    for section in sections:
        assert section.last == (section.index == count - 1)
        assert not section.frames or section.window.start <= section.frames.start
        assert not section.frames or section.frames.stop <= section.window.stop
        assert len(section.window) == (section.decoded - 1) * 4 + 1
        assert section.decoded <= sections.history
    assert sections.history == max(HISTORY, 2 * window + 1)


@pytest.mark.parametrize(
    ("frames", "overlap", "spans"),
    [
        (1, 1, [(0, 1)]),
        (77, 1, [(0, 77)]),
        (77, 5, [(0, 77)]),
        (81, 1, [(0, 77), (77, 81)]),
        (153, 1, [(0, 77), (77, 153)]),
        (157, 1, [(0, 77), (77, 153), (153, 157)]),
        (149, 5, [(0, 77), (77, 149)]),
        (153, 5, [(0, 77), (77, 149), (149, 153)]),
    ],
)
def test_segments(frames: int, overlap: int, spans: list[tuple[int, int]]) -> None:
    segments = Segments(frames, 77, overlap)
    parts = [segments[number] for number in range(segments.count)]
    assert [(part.frames.start, part.frames.stop) for part in parts] == spans
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.given for part in parts] == [0] + [overlap] * (len(parts) - 1)
    lengths = {len(part.sources) for part in parts}
    assert lengths == {frames if segments.count == 1 else 77}
    # As `WanAnimatePipeline.pad_video_frames` extends the videos.
    padded, number, step = list[int](), 0, 1
    while len(padded) < segments.count * (77 - overlap) + overlap:
        padded.append(number)
        step = -step if number + step in {-1, frames} and frames > 1 else step
        number = number + step if frames > 1 else 0
    for part in parts:
        start = part.index * (77 - overlap)
        assert list(part.sources) == padded[start : start + len(part.sources)]
