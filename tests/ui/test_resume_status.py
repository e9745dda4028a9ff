"""What is said of a job that ended without a video, and the tabs' pieces of HTML: pure functions."""

import json
from html import unescape
from typing import Any

import pytest

from runtime.core.events import CheckpointSaved, Event, OutOfMemory, Planned, Resumed, StepDone
from runtime.core.facts import Fact
from runtime.queue.disk_usage import DiskUsage
from runtime.ui import compare, history_view, queue_view
from runtime.ui.queue_view import Ended, Row
from runtime.ui.resume_status import standing
from runtime.video.similarity import Similarity
from tests.queue.made import planned

BEGUN = Planned(plan=planned(steps=20))
HOSTILE = "<img src=x onerror=hit()> \" ' & “"


def steps(last: int, first: int = 1) -> list[Event]:
    return [StepDone(step=n, of=20, seconds=1.0, part="transformer") for n in range(first, last + 1)]


def full(**values: Any) -> OutOfMemory:
    given: dict[str, Any] = {
        "stage": "denoise", "component": "transformer", "memory": "VRAM", "retried": False,
        "strategy": Fact("text", {"what": "Weights wait in RAM by block", "remedy": ""}),
        "changes": {"offload": "group"}, "slowdown": 1.4, "lost_seconds": 65.0,
    }  # fmt: skip
    return OutOfMemory(**given | values)


@pytest.mark.parametrize(
    ("events", "step", "said"),
    [
        ([], None, ""),
        ([BEGUN], None, "It had not begun to denoise."),
        ([BEGUN], 0, "It had not begun to denoise."),
        ([BEGUN, *steps(12), CheckpointSaved(step=12)], 12, "It stopped at step 12 of 20. It goes on from there."),
        ([BEGUN, *steps(12), CheckpointSaved(step=10)], 10, "It stopped at step 12 of 20. It goes on after step 10."),
        ([BEGUN, *steps(12), CheckpointSaved(step=0)], 0, "It stopped at step 12 of 20. The steps are done again."),
        # Killed between the checkpoint and the word about it; between a step's checkpoint and the word about the step.
        ([BEGUN, *steps(12), CheckpointSaved(step=0)], 12, "It stopped at step 12 of 20. It goes on from there."),
        ([BEGUN, *steps(11)], 12, "It stopped at step 12 of 20. It goes on from there."),
        (
            [BEGUN, *steps(12), CheckpointSaved(step=10)],
            None,
            "It stopped at step 12 of 20. Nothing of that is kept: it begins anew.",
        ),
        ([BEGUN, *steps(20), CheckpointSaved(step=20)], 20, "All 20 steps were done. Only decoding is left."),
        ([BEGUN, Resumed(step=8, of=20), *steps(9, 9)], 8, "It stopped at step 9 of 20. It goes on after step 8."),
    ],
)
def test_it_says_where_it_stopped_and_from_where_it_goes_on(events: list[Event], step: int | None, said: str) -> None:
    found = standing(events, step)
    assert (found.kept, found.step) == (said, step)


@pytest.mark.parametrize(
    ("event", "way", "changes", "said"),
    [
        (full(), "Weights wait in RAM by block", {"offload": "group"}, "65 s of work were lost"),
        (
            full(changes={"quantization": "bnb-4bit"}),
            "Weights wait in RAM by block",
            {"quantization": "bnb-4bit"},
            "memory",
        ),
        (
            full(changes={"on_out_of_memory": "any"}),
            "Weights wait in RAM by block",
            {"on_out_of_memory": "any"},
            "memory",
        ),
        (full(retried=True), "", {}, "Out of memory (VRAM)"),
        (full(changes={}, strategy=None), "", {}, "Out of memory (VRAM)"),
    ],
)
def test_where_memory_ran_out_it_offers_the_other_way(
    event: OutOfMemory, way: str, changes: dict[str, str], said: str
) -> None:
    found = standing([BEGUN, *steps(3), event], 3)
    assert (found.way, found.changes) == (way, changes)
    assert said.replace("65 s", "1 min 5 s") in found.memory


def test_only_what_waits_moves_and_only_as_far_as_it_can() -> None:
    rows = [
        Row(letter * 8, letter, state, True)
        for letter, state in zip("abc", ("running", "waiting", "paused"), strict=True)
    ]
    shown = queue_view.line(rows)
    moves = [(act, part.split('data-of="')[1][0], 'aria-disabled="true"' in part.split(">")[0])
             for act in ("up", "down") for part in shown.split(f'data-act="{act}"')[1:]]  # fmt: skip
    assert moves == [("up", "b", True), ("up", "c", False), ("down", "b", False), ("down", "c", True)]
    assert 'data-act="go-on"' in shown and "Pause all" in shown
    assert "Go on with all" in queue_view.line(rows[2:])
    assert "Nothing waits or runs." in queue_view.line([])


def test_a_visitors_job_is_not_edited_and_a_build_not_paused() -> None:
    shown = queue_view.line([Row("a" * 8, "x", "waiting", True, visitor=True), Row("b" * 8, "Build", "waiting", False)])
    assert 'data-act="edit"' not in shown and shown.count('data-act="pause"') == 1 and "visitor" in shown


def test_no_text_becomes_markup() -> None:
    detail = history_view.Detail(
        id="a" * 8,
        prompt=HOSTILE,
        state="failed",
        request={"prompt": HOSTILE},
        told=[(HOSTILE, HOSTILE)],
        video="x",
        name=HOSTILE,
        warnings=[HOSTILE],
        why=HOSTILE,
        what=HOSTILE,
        kept=HOSTILE,
        resumable=True,
    )
    pair = [compare.Clip("a" * 8, "x", {"prompt": HOSTILE, "frames": 9, "fps": 8, "width": 1, "height": 1}, 1, HOSTILE)]
    for shown in (
        queue_view.line([Row("a" * 8, HOSTILE, "running", True, HOSTILE)], HOSTILE),
        queue_view.ended([Ended("a" * 8, HOSTILE, "failed", HOSTILE, HOSTILE, HOSTILE, HOSTILE)]),
        history_view.gallery([history_view.Card("a" * 8, HOSTILE, "done", HOSTILE, "", HOSTILE)], 0, False, False),
        history_view.detail(detail),
        compare.comparison(*pair * 2) + compare.table(*pair * 2),
    ):
        assert "<img src=x" not in shown and "&lt;img" in shown
        assert 'onerror=hit()> "' not in shown


@pytest.mark.parametrize(
    ("one", "other", "found", "said"),
    [
        ({}, {"width": 32}, None, "64 × 32 and 32 × 32: clips of different sizes are not measured."),
        ({}, {}, Similarity(float("inf"), 1.0), "Not a pixel differs, over 9 frames."),
        ({}, {"frames": 5}, Similarity(31.25, 0.9126), "PSNR 31.2 dB, SSIM 0.913, over the first 5 frames."),
    ],
)
def test_likeness_is_said_with_how_much_it_counts(
    one: dict[str, Any], other: dict[str, Any], found: Similarity | None, said: str
) -> None:
    base = {"prompt": "x", "frames": 9, "fps": 8, "width": 64, "height": 32}
    clips = [compare.Clip("a" * 8, "x", base | values, 1.0, "here") for values in (one, other)]
    assert said in compare.numbers(clips[0], clips[1], found)


def test_differing_settings_come_first_and_pace_is_said() -> None:
    base: dict[str, Any] = {"prompt": "x", "frames": 9, "fps": 8, "backends": {}, "negative_prompt": ""}
    one, other = (compare.Clip("a" * 8, "x", base | values, 1.0, "CPU") for values in ({}, {"fps": 4, "frames": 5}))
    rows = compare.settings(one, other)
    assert [row[0] for row in rows[:2]] == ["Frames", "Fps"] and rows[2][1] == rows[2][2]
    assert compare.pace(one, other).endswith(
        "B is made for 4 fps and plays at A's 8. B is shorter and waits on its last frame."
    )
    assert "shorter" not in compare.pace(one, one)


def test_loras_and_step_caches_are_told_as_they_are_given() -> None:
    base: dict[str, Any] = {"prompt": "x", "frames": 9, "fps": 8}
    lora = {"file": "<style>", "weight": 0.8, "expert": "high"}
    extras = {"loras": [lora, {"file": "b", "weight": 1.0, "expert": "both"}], "step_cache": "first-block:0.05"}
    # The first was made before there were any.
    one, other = (compare.Clip("a" * 8, "x", base | values, 1.0, "CPU") for values in ({}, extras))
    assert compare.settings(one, other)[:2] == [
        ("Loras", "none", "high=<style>:0.8, b:1"),
        ("Step cache", "none", "first-block:0.05"),
    ]
    plain = compare.Clip("a" * 8, "x", base | {"loras": [], "step_cache": "none", "shift": None}, 1.0, "CPU")
    moved = compare.Clip("a" * 8, "x", base | {"shift": 5.0}, 1.0, "CPU")
    assert compare.settings(one, moved)[0] == ("Shift", "the model's own", "5")
    assert all(a == b for _, a, b in compare.settings(one, plain))
    rounded = compare.Clip("a" * 8, "x", base | {"vae_precision": "float16"}, 1.0, "CPU")
    assert compare.settings(one, rounded)[0] == ("Vae precision", "auto", "float16")


def test_cleaning_is_offered_only_where_there_is_something() -> None:
    nothing = history_view.room(DiskUsage(0, 0, 0, 0, 0, 0), {})
    assert "data-act" not in nothing
    offered = history_view.room(DiskUsage(3, 3_000_000, 500_000, 400_000, 1, 10), {30: (1, 1_000_000)})
    for said in ("3 videos, 3.0 MB", "finished videos: 400.0 KB", "1 job older than 30 days: 1.0 MB", "1 deleted job"):
        assert said in offered
    assert offered.count('data-confirm=""') == 0


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"guidance_scale_2": "2", "fps": "8", "backend": "auto"}, {}),
        ({"guidance_scale_2": "7.5", "fps": "12", "backend": "pytorch"},
         {"guidance_scale_2": 7.5, "fps": 12, "backends": {"transformer_2": "pytorch"}}),
        ({"guidance_scale_2": "much", "fps": "", "backend": "auto"}, {"guidance_scale_2": "much", "fps": ""}),
        ({}, {"guidance_scale_2": None, "fps": None}),
    ],
)  # fmt: skip
def test_a_second_half_changes_what_differs(given: dict[str, Any], changes: dict[str, Any]) -> None:
    made = {"guidance_scale_2": 2.0, "fps": 8, "backend": "auto"}
    assert history_view.redo_changes(given, made) == changes
    assert history_view.redo_changes(given, {}) == {}


def test_settings_go_to_the_page_whole() -> None:
    shown = history_view.detail(history_view.Detail("a" * 8, "x", "done", {"prompt": 'a "red" <boat>', "seed": 7}, []))
    assert json.loads(unescape(shown.split('data-reuse="')[1].split('"')[0])) == {"prompt": 'a "red" <boat>', "seed": 7}
