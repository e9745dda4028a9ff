"""The HTML and the pure functions of the panels Queue and History."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runtime.queue.records import Line
from runtime.queue.storage import DiskUsage, Retention
from runtime.ui.formatting import render, sentences
from runtime.ui.history_panel import (
    FILTERS,
    Card,
    Clip,
    comparison_html,
    differences,
    same_picture,
    similarity,
    timing,
)
from runtime.ui.image_places import UsedImage
from runtime.ui.job_view import ResumeStatus
from runtime.ui.queue_panel import Row, queue_html, resumable_html
from runtime.video.similarity import Similarity
from tests.facts import fact
from tests.ui.page_texts import line

HOSTILE = "<img src=x onerror=hit()> \" ' & “"


def listed(rows: list[Row], workers: int = 1, problem: str = "") -> str:
    """Return the queue that has these rows only."""
    waiting = [row for row in rows if not row.runs]
    videos = [row for row in rows if row.video]
    going = sum(row.video and row.state == "waiting" for row in rows)
    line = Line(len(rows), len(videos), len([row for row in waiting if not row.build]), going)
    return queue_html(rows, line, workers=workers, problem=problem)


def detail(job: Any, text: str = "", request: Any = None) -> str:
    """Return a job's details with `text` in each place."""
    return render(
        "history_detail.html",
        job=job,
        request=request or {"prompt": text},
        settings=request or {"prompt": text},
        rows=[(text, text)],
        images=[UsedImage(text, text, text)],
        card=Card(job, text, text, True, 16, 9, 5, text),
        warning_lines=[text],
        reasons=[(text, text), (text, text)],
        resume_line=text,
        plain=text,
        plain_name=text,
        titles=FILTERS,
        backends={},
    )


def test_only_waiting_jobs_move_within_the_queue() -> None:
    rows = [
        Row(letter * 8, letter, state, True)
        for letter, state in zip("abc", ("running", "waiting", "paused"), strict=True)
    ]
    shown = listed(rows)
    moves = [(act, part.split('data-target="')[1][0], 'aria-disabled="true"' in part.split(">")[0])
             for act in ("up", "down") for part in shown.split(f'data-action="{act}"')[1:]]  # fmt: skip
    assert moves == [("up", "b", True), ("up", "c", False), ("down", "b", False), ("down", "c", True)]
    assert 'data-action="unpause"' in shown and "Pause all" in shown
    assert "Resume all" in listed(rows[2:])
    assert 'data-key="empty"' in listed([]) and 'data-key="empty"' not in shown


def test_the_queue_shows_what_each_job_and_all_of_them_take() -> None:
    rows = [
        Row("a" * 8, "a", "running", True, "Denoising", 40, facts="Seed 1", seconds=50.0),
        Row("b" * 8, "b", "waiting", True, "takes about 2 min", seconds=130.0),
        Row("c" * 8, "c", "paused", True, seconds=1000.0),
    ]
    assert line("ui.queue_total", count="3 videos", seconds=180) in listed(rows)
    assert line("ui.queue_total", count="3 videos", seconds=90) in listed(rows, 2)
    unknown = Row("d" * 8, "d", "waiting", True)
    assert line("ui.queue_total_at_least", count="4 videos", seconds=180) in listed([*rows, unknown])
    task = Row("e" * 8, "Prune", "waiting", False)
    assert line("ui.queue_total", count="4 jobs", seconds=180) in listed([*rows, task])
    # One worker builds engines.
    build = Row("f" * 8, "Build", "waiting", False, build=True, seconds=240.0)
    assert line("ui.queue_total", count="4 jobs", seconds=420) in listed([*rows, build])
    assert line("ui.queue_total", count="4 jobs", seconds=330) in listed([*rows, build], 2)
    assert line("ui.queue_total_at_least", count="4 jobs", seconds=180) in listed([*rows, replace(build, seconds=None)])
    assert "data-grip" not in listed([build])
    assert "Seed 1 · Denoising" in listed(rows)


def test_visitors_jobs_cannot_be_edited_and_builds_cannot_be_paused() -> None:
    shown = listed([Row("a" * 8, "x", "waiting", True, visitor=True), Row("b" * 8, "Build", "waiting", False)])
    assert 'data-action="edit"' not in shown and 'data-action="duplicate"' not in shown
    assert shown.count('data-action="pause"') == 1 and "visitor" in shown


def test_all_text_is_escaped() -> None:
    job: Any = SimpleNamespace(
        id="a" * 8, prompt=HOSTILE, state="failed", failure=None, output=Path(HOSTILE), resumable=True, deleted=None,
        continues=False, ended=0.0, created=0.0, starred=False, request={"prompt": HOSTILE},
    )  # fmt: skip
    status = ResumeStatus(HOSTILE, None, HOSTILE, HOSTILE, {})
    pair = [
        Clip(
            letter * 8,
            "x",
            {"prompt": HOSTILE + letter, "frames": 9, "fps": 8, "width": 1, "height": 1},
            HOSTILE,
            1,
            HOSTILE,
        )
        for letter in "ab"
    ]
    gallery: dict[str, Any] = {"more": False, "filtered": False, "searched": False, "state": "all", "titles": FILTERS}
    card = Card(job, HOSTILE, HOSTILE, True, 16, 9, 5, HOSTILE)
    for shown in (
        listed([Row("a" * 8, HOSTILE, "running", True, HOSTILE, picture=HOSTILE, facts=HOSTILE)], 1, HOSTILE),
        resumable_html([(job, status)]),
        render("history_gallery.html", cards=[card], problem=HOSTILE, **gallery),
        detail(job, HOSTILE),
        comparison_html(*pair),
    ):
        assert "<img src=x" not in shown and "&lt;img" in shown
        assert 'onerror=hit()> "' not in shown


BASE: dict[str, Any] = {"prompt": "x", "frames": 9, "fps": 8, "width": 64, "height": 32, "seed": 1}


def clip(places: str = "CPU", **values: Any) -> Clip:
    """Return a clip with `values` of its request changed."""
    return Clip("a" * 8, "x", BASE | values, "Tiny", 1.0, places)


def test_the_similarity_is_one_sentence() -> None:
    assert similarity(9, Similarity(float("inf"), 1.0)) == line("ui.pixels_equal", frames=9)
    assert similarity(9, Similarity(31.25, 0.9126)) == line("ui.similar", psnr=31.25, ssim=0.9126, frames=9)


def test_only_videos_that_should_be_equal_are_measured() -> None:
    equal: tuple[dict[str, Any], ...] = (
        {"backends": {"vae": "onnxruntime"}}, {"offload": "model"}, {"vae_precision": "float16"}, {"fps": 4},
        {"crf": 0}, {"loras": [], "step_cache": "none", "shift": None},
    )  # fmt: skip
    for same in equal:
        assert same_picture(clip(), clip(**same)), same
    different: tuple[dict[str, Any], ...] = (
        {"prompt": "y"}, {"width": 32}, {"seed": 2}, {"frames": 5}, {"steps": 3}, {"step_cache": "first-block"},
    )  # fmt: skip
    for other in different:
        assert not same_picture(clip(), clip(**other)), other


def test_only_differences_are_shown_in_the_words_of_the_form() -> None:
    first = clip(backends={}, offload="none", negative_prompt="")
    second = clip("GPU", fps=4, frames=5, backends={"vae": "onnxruntime"}, offload="group", negative_prompt="")
    rows, same = differences(first, second)
    assert rows == [
        ("Frames", "9", "5"),
        ("Frames per second", "8", "4"),
        ("Backend", "Automatic", "VAE decoder: ONNX Runtime"),
        ("Offload", "None", "By block"),
        ("Ran on", "CPU", "GPU"),
    ]
    assert same == 5
    rate, shorter = fact("ui.plays_at_other_rate", made=4, plays=8), fact("ui.shorter", video="B")
    assert timing(first, second).endswith(f" {sentences([rate, shorter])}")
    assert timing(second, first).endswith(f" {line('ui.shorter', video='A')}")
    assert line("ui.shorter", video="B") not in timing(first, first)
    assert differences(first, first)[0] == []
    assert "<table" in comparison_html(first, second) and "<table" not in comparison_html(first, first)


def test_loras_and_step_caches_are_shown_as_given() -> None:
    lora = {"file": "<style>", "weight": 0.8, "expert": "high"}
    extras: dict[str, Any] = {
        "loras": [lora, {"file": "b", "weight": 1.0, "expert": "both"}],
        "step_cache": "first-block:0.05",
    }
    # The first was made before there were any.
    assert differences(clip(), clip(**extras))[0] == [
        ("LoRAs", "none", "high=<style>:0.8, b:1"),
        ("Step cache", "None", "first-block:0.05"),
    ]
    assert differences(clip(), clip(shift=5.0))[0] == [("Shift", "the model's default", "5")]
    assert differences(clip(), clip(loras=[], step_cache="none", shift=None))[0] == []
    assert differences(clip(), clip(strength=0.6, video=None, upscaler="auto"))[0] == []
    assert differences(clip(), clip(vae_precision="float16"))[0] == [("VAE precision", "Automatic", "float16")]


def test_storage_offers_only_what_can_be_removed() -> None:
    assert "data-action" not in render("history_storage.html", usage=DiskUsage(), retention=Retention())
    usage = DiskUsage(3, 3_000_000, 500_000, 400_000, 1, 10, {30: (1, 1_000_000)})
    offered = render("history_storage.html", usage=usage, retention=Retention())
    for expected in (
        "3 videos, 3.0 MB",
        "of finished videos 400.0 KB",
        "older than 30 days (1, 1.0 MB)",
        "1 video, 10 B",
        "Delete 1 video older than 30 days (1.0 MB)? It can be restored for 7 days",
        "those that ended early can no longer be continued",
        "This cannot be undone.",
    ):
        assert expected in offered
    assert offered.count("data-action") == 3 and "Retention" not in offered


def test_storage_shows_what_is_deleted_without_being_asked() -> None:
    for retention, limits in (
        (Retention(days=0.5), "after 0.5 days."),
        (Retention(videos=3), "beyond the newest 3."),
        (Retention(days=30.0, bytes=10**9), "after 30 days, beyond 1.0 GB."),
        (Retention(days=30.0, videos=3, bytes=10**9), "after 30 days, beyond the newest 3, beyond 1.0 GB."),
    ):
        assert f"{limits} Starred videos stay." in render(
            "history_storage.html", usage=DiskUsage(), retention=retention
        )


def test_settings_are_complete_on_the_page() -> None:
    job = SimpleNamespace(
        id="a" * 8, prompt="x", state="done", output=Path("x"), resumable=False, deleted=None, starred=False
    )
    shown = detail(job, request={"prompt": 'a "red" <boat>', "seed": 7})
    assert json.loads(unescape(shown.split('data-reuse="')[1].split('"')[0])) == {"prompt": 'a "red" <boat>', "seed": 7}


def test_text_does_not_turn_what_follows_it() -> None:
    turned = "a\u202e red\u2066 boat\u061c"
    shown = listed([Row("a" * 8, turned, "running", True, turned)])
    assert "<bdi>a red boat</bdi>" in shown
    assert not set(shown) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    # The settings that the page restores keep every character.
    reused = detail(SimpleNamespace(
        id="a" * 8, prompt=turned, state="done", output=Path("x"), resumable=False, deleted=None, starred=False,
    ), "x", {"prompt": turned})  # fmt: skip
    assert json.loads(unescape(reused.split('data-reuse="')[1].split('"')[0])) == {"prompt": turned}
