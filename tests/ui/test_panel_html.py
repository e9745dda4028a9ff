"""The HTML and the pure functions of the panels Queue and History."""

import json
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.queue.storage import DiskUsage
from runtime.ui.formatting import render
from runtime.ui.history_panel import (
    FILTERS,
    Clip,
    compared_settings,
    comparison_html,
    rerun_changes,
    similarity,
    timing,
)
from runtime.ui.job_view import ResumeStatus
from runtime.ui.queue_panel import Row, queue_html, resumable_html
from runtime.video.similarity import Similarity

HOSTILE = "<img src=x onerror=hit()> \" ' & “"


def detail(job: Any, text: str = "", request: Any = None) -> str:
    """Return a job's details with `text` in each place."""
    return render(
        "history_detail.html",
        job=job,
        request=request or {"prompt": text},
        rows=[(text, text)],
        video=text,
        warning_lines=[text],
        reasons=text,
        problem=text,
        resume_line=text,
        rerun={},
        titles=FILTERS,
        backends={},
    )


def test_only_waiting_jobs_move_within_the_queue() -> None:
    rows = [
        Row(letter * 8, letter, state, True)
        for letter, state in zip("abc", ("running", "waiting", "paused"), strict=True)
    ]
    shown = queue_html(rows)
    moves = [(act, part.split('data-target="')[1][0], 'aria-disabled="true"' in part.split(">")[0])
             for act in ("up", "down") for part in shown.split(f'data-action="{act}"')[1:]]  # fmt: skip
    assert moves == [("up", "b", True), ("up", "c", False), ("down", "b", False), ("down", "c", True)]
    assert 'data-action="unpause"' in shown and "Pause all" in shown
    assert "Resume all" in queue_html(rows[2:])
    assert "The queue is empty." in queue_html([])


def test_visitors_jobs_cannot_be_edited_and_builds_cannot_be_paused() -> None:
    shown = queue_html([Row("a" * 8, "x", "waiting", True, visitor=True), Row("b" * 8, "Build", "waiting", False)])
    assert 'data-action="edit"' not in shown and shown.count('data-action="pause"') == 1 and "visitor" in shown


def test_all_text_is_escaped() -> None:
    job: Any = SimpleNamespace(
        id="a" * 8, prompt=HOSTILE, state="failed", failure=None, output=Path(HOSTILE), resumable=True, deleted=None,
        ended=0.0, created=0.0,
    )  # fmt: skip
    status = ResumeStatus(HOSTILE, None, HOSTILE, HOSTILE, {})
    pair = [Clip("a" * 8, "x", {"prompt": HOSTILE, "frames": 9, "fps": 8, "width": 1, "height": 1}, 1, HOSTILE)]
    gallery: dict[str, Any] = {"page": 0, "more": False, "filtered": False, "titles": FILTERS}
    for shown in (
        queue_html([Row("a" * 8, HOSTILE, "running", True, HOSTILE)], HOSTILE),
        resumable_html([(job, status)]),
        render("history_gallery.html", cards=[(job, HOSTILE, 5)], problem=HOSTILE, **gallery),
        detail(job, HOSTILE),
        "".join(comparison_html(f"history_{part}.html", *pair * 2) for part in ("comparison", "settings")),
    ):
        assert "<img src=x" not in shown and "&lt;img" in shown
        assert 'onerror=hit()> "' not in shown


@pytest.mark.parametrize(
    ("one", "other", "found", "expected"),
    [
        ({}, {"width": 32}, None, "64 × 32 and 32 × 32: videos of different sizes cannot be measured."),
        ({}, {}, Similarity(float("inf"), 1.0), "All pixels are equal, over 9 frames."),
        ({}, {"frames": 5}, Similarity(31.25, 0.9126), "PSNR 31.2 dB, SSIM 0.913, over the first 5 frames."),
    ],
)
def test_similarity_names_the_compared_frames(
    one: dict[str, Any], other: dict[str, Any], found: Similarity | None, expected: str
) -> None:
    base = {"prompt": "x", "frames": 9, "fps": 8, "width": 64, "height": 32}
    clips = [Clip("a" * 8, "x", base | values, 1.0, "here") for values in (one, other)]
    assert expected in similarity(clips[0], clips[1], found)


def test_differing_settings_come_first() -> None:
    base: dict[str, Any] = {"prompt": "x", "frames": 9, "fps": 8, "backends": {}, "negative_prompt": ""}
    one, other = (Clip("a" * 8, "x", base | values, 1.0, "CPU") for values in ({}, {"fps": 4, "frames": 5}))
    rows = compared_settings(one, other)
    assert [row[0] for row in rows[:2]] == ["Frames", "Frames per second"] and rows[2][1] == rows[2][2]
    assert timing(one, other).endswith(
        "B was made for 4 fps and plays at A's 8 fps. B is shorter and stops on its last frame."
    )
    assert "shorter" not in timing(one, one)


def test_loras_and_step_caches_are_shown_as_given() -> None:
    base: dict[str, Any] = {"prompt": "x", "frames": 9, "fps": 8}
    lora = {"file": "<style>", "weight": 0.8, "expert": "high"}
    extras = {"loras": [lora, {"file": "b", "weight": 1.0, "expert": "both"}], "step_cache": "first-block:0.05"}
    # The first was made before there were any.
    one, other = (Clip("a" * 8, "x", base | values, 1.0, "CPU") for values in ({}, extras))
    assert compared_settings(one, other)[:2] == [
        ("LoRAs", "none", "high=<style>:0.8, b:1"),
        ("Step cache", "None", "first-block:0.05"),
    ]
    plain = Clip("a" * 8, "x", base | {"loras": [], "step_cache": "none", "shift": None}, 1.0, "CPU")
    moved = Clip("a" * 8, "x", base | {"shift": 5.0}, 1.0, "CPU")
    assert compared_settings(one, moved)[0] == ("Shift", "the model's default", "5")
    assert all(a == b for _, a, b in compared_settings(one, plain))
    rounded = Clip("a" * 8, "x", base | {"vae_precision": "float16"}, 1.0, "CPU")
    assert compared_settings(one, rounded)[0] == ("VAE precision", "Automatic", "float16")


def test_storage_offers_only_what_can_be_removed() -> None:
    nothing = render("history_storage.html", usage=DiskUsage(0, 0, 0, 0, 0, 0), old=[])
    assert "data-action" not in nothing
    offered = render(
        "history_storage.html", usage=DiskUsage(3, 3_000_000, 500_000, 400_000, 1, 10), old=[(30, 1, 1_000_000)]
    )
    for expected in (
        "3 videos, 3.0 MB",
        "finished videos: 400.0 KB",
        "1 job older than 30 days: 1.0 MB",
        "1 deleted job",
    ):
        assert expected in offered
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
def test_a_rerun_changes_what_differs(given: dict[str, Any], changes: dict[str, Any]) -> None:
    made = {"guidance_scale_2": 2.0, "fps": 8, "backend": "auto"}
    assert rerun_changes(given, made) == changes
    assert rerun_changes(given, {}) == {}


def test_settings_are_complete_on_the_page() -> None:
    job = SimpleNamespace(id="a" * 8, prompt="x", state="done", output=Path("x"), resumable=False, deleted=None)
    shown = detail(job, request={"prompt": 'a "red" <boat>', "seed": 7})
    assert json.loads(unescape(shown.split('data-reuse="')[1].split('"')[0])) == {"prompt": 'a "red" <boat>', "seed": 7}


def test_text_does_not_turn_what_follows_it() -> None:
    turned = "a\u202e red\u2066 boat\u061c"
    shown = queue_html([Row("a" * 8, turned, "running", True, turned)])
    assert "<bdi>a red boat</bdi>" in shown
    assert not set(shown) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    # The settings that the page restores keep every character.
    reused = detail(SimpleNamespace(
        id="a" * 8, prompt=turned, state="done", output=Path("x"), resumable=False, deleted=None,
    ), "x", {"prompt": turned})  # fmt: skip
    assert json.loads(unescape(reused.split('data-reuse="')[1].split('"')[0])) == {"prompt": turned}
