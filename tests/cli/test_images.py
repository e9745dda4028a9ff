"""`--image` and `--video` on the command line: refusals with exit code 2, and a job that keeps its own copy."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.facts import render
from runtime.models import requested
from runtime.models.images import images_dir
from runtime.models.spec import ModelSpec
from runtime.queue.store import open_store
from runtime.video.mp4 import read_metadata
from tests.cli.refusals import check_refusals, refused
from tests.facts import fact
from tests.hostile_files import HOSTILE
from tests.image_files import bomb, encoded, picture, saved
from tests.tiny_models import ANIMATE
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]
SMALL = ["--frames", "5", "--steps", "1", "--seed", "3"]


@pytest.fixture
def spec(tiny: Tiny, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A tiny model that starts from an image, which requests find by any name."""
    made = tiny("wan2.2-ti2v-5b")
    defaults = replace(made.defaults, width=64, height=32)
    made = replace(made, defaults=defaults)
    for name in ("find", "look_up"):
        monkeypatch.setattr(requested, name, lambda *_: made)
    return made


FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.touch(),
    "cut": lambda path: path.write_bytes(encoded(picture(640, 480))[:1500]),
    "text": lambda path: path.write_text("a boat"),
    "bomb": lambda path: path.write_bytes(bomb(10_000)),
    "pixel": lambda path: path.write_bytes(encoded(picture(1, 1))),
    "strip": lambda path: path.write_bytes(encoded(picture(900, 20))),
    "heic": lambda path: path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100)),
    "gif": lambda path: path.write_bytes(encoded(picture(), "GIF")),
    "fractions": lambda path: path.write_bytes(encoded(picture().convert("F"), "TIFF")),
    "missing": lambda path: None,
    "folder": HOSTILE["folder"],
    "fifo": HOSTILE["fifo"],
    "device": HOSTILE["device"],
    "loop": lambda path: path.symlink_to(path),
}


CODES = {
    "empty": "image.empty",
    "cut": "image.damaged",
    "text": "image.format_unknown",
    "bomb": "image.too_large",
    "pixel": "image.too_small",
    "strip": "image.too_long",
    "heic": "image.format_heic",
    "gif": "image.format_gif",
    "fractions": "image.kind_unknown",
    "missing": "image.unreadable",
    "folder": "image.not_a_file",
    "fifo": "image.not_a_file",
    "device": "image.not_a_file",
    "loop": "image.unreadable",
}


def test_bad_images_are_refused_and_leave_nothing(
    spec: ModelSpec,
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    for kind, code in CODES.items():
        path = tmp_path / kind / "boat.png"
        path.parent.mkdir()
        FILES[kind](path)
        for command in ("plan", "generate") if kind in {"cut", "fifo"} else ("plan",):
            with subtests.test(msg=f"{command} {kind}"):
                found = refused([command, "a boat", "--image", str(path)], capsys)
                assert (found.code, found.data["field"]) == (code, "image")
                assert "boat.png" in found.what
    assert not images_dir(cache_dir).exists()
    assert not open_store(cache_dir).list()


def test_flags_of_images_are_refused_by_the_rules_of_requests_and_models(
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "boat.png")
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--image", ""], "request.image_file", {"field": "image"}),
        (["--image", f"sha256:{'a' * 64}"], "image.copy_missing", {"field": "image", "file": "a" * 8}),
        (["--last-image", "boat.png"], "image.only_last", {"field": "image"}),
        (["--image", "boat.png", "--last-image", "boat.png"], "image.model_without_last", {"field": "last_image"}),
        (["--image", "boat.png", "--width", "100"], "planner.not_a_multiple", {"stride": 32, "able": [96, 128]}),
    ]
    check_refusals(cases, capsys, subtests, ["plan", "a boat"])
    remedy = render(fact("image.only_last")).remedy
    assert "--image" in remedy
    assert refused(["plan", "a boat", "--last-image", "boat.png"], capsys).to_do == f"To do: {remedy}"


def test_a_model_without_images(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requested, "find", lambda *_: replace(spec, image_input=None))
    found = refused(["generate", "a boat", "--image", str(saved(tmp_path / "boat.png"))], capsys)
    assert found.code == "image.model_without"


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command that must succeed; return its JSON."""
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_a_plan_shows_the_image_and_copies_nothing(
    spec: ModelSpec, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boat = saved(tmp_path / "boat.png", 96, 96)
    planned = answered(["plan", "a boat", "--image", str(boat), *SMALL, "--width", "64", "--height", "32"], capsys)
    assert planned["plan"]["images"]["image"]["name"] == "boat.png"
    cut = fact("planner.image_cut", percent=50, image="boat.png", size="64x32", suggested="32x32")
    assert str(cut) in planned["warnings"]
    assert not images_dir(cache_dir).exists()
    assert run(["plan", "a boat", "--image", str(boat), *SMALL]) == 0
    assert "Image: boat.png, 96x96" in capsys.readouterr().out


def test_a_job_keeps_its_image(
    spec: ModelSpec,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "boat.png", 640, 320)
    made = answered(["generate", "a boat", "--image", "boat.png", "--image-position", "20", *SMALL], capsys)
    (copy,) = images_dir(cache_dir).iterdir()
    assert made["request"]["image"] == f"sha256:{copy.name}/boat.png"
    assert (made["request"]["width"], made["request"]["height"]) == (64, 32)
    assert read_metadata(Path(made["video"]))["request"] == made["request"]
    shown = answered(["jobs", "show", made["job"], "--with-prompt"], capsys)["job"]
    assert shown["request"]["image"] == made["request"]["image"] and shown["request"]["image_position"] == 20.0
    # Names of files can be as private as prompts.
    assert "boat.png" not in json.dumps(answered(["jobs", "show", made["job"]], capsys)["job"]["request"])
    os.remove(tmp_path / "boat.png")  # noqa: PTH107 - the current folder
    again = answered(["generate", "a boat", "--image", made["request"]["image"], *SMALL], capsys)
    assert again["plan"]["images"] == made["plan"]["images"]


def test_control_videos_are_refused_planned_and_followed(
    tiny: Tiny,
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clip = make(tmp_path / "clip.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=24:duration=0.5"))
    (tmp_path / "text.mp4").write_text("a boat")
    control, image = ["--control", str(clip)], str(saved(tmp_path / "boat.png"))
    other = {"field": "control", "model": "Diorama"}
    check_refusals([(["--control", "none.mp4"], "control.model_without", other)], capsys, subtests, ["plan", "a boat"])
    made = tiny("wan2.1-vace")
    made = replace(made, defaults=replace(made.defaults, width=64, height=32))
    for name in ("find", "look_up"):
        monkeypatch.setattr(requested, name, lambda *_: tiny(ANIMATE))
    check_refusals(
        [
            (["--image", image, *control], "control.required", {"field": "face"}),
            ([*control, "--face", str(clip)], "image.required", {"field": "image"}),
            ([*control, "--reference", image], "control.other_model", {"field": "references"}),
            (
                [*control, "--face", str(clip), "--mask", str(clip)],
                "control.mask_without_background",
                {"field": "mask"},
            ),
            ([*control, "--face", str(clip), "--background", str(clip)], "control.background_alone", {"field": "mask"}),
        ],
        capsys,
        subtests,
        ["plan", "a boat"],
    )
    for name in ("find", "look_up"):
        monkeypatch.setattr(requested, name, lambda *_: made)
    check_refusals(
        [
            (["--control", str(tmp_path / "text.mp4")], "source.no_video", {"field": "control", "file": "text.mp4"}),
            (["--mask", str(clip)], "control.mask_alone", {"field": "mask"}),
            ([*control, "--mask", str(tmp_path / "text.mp4")], "source.no_video", {"field": "mask"}),
            ([*control, "--mask", "box:90,0,20,10"], "request.boxes", {"field": "mask"}),
            ([*control, "--outpaint", "1,2"], "request.sides", {"field": "outpaint"}),
            (["--outpaint", "10"], "control.outpaint_alone", {"field": "outpaint"}),
            (["--extend", str(clip), "--extend-frames", "13"], "source.extend_frames", {"frames": 12}),
            (["--extend", str(clip), "--frames", "9"], "planner.no_new_frames", {"given": 9, "able": 13}),
            (["--join", str(clip)], "source.join_alone", {"field": "join"}),
            (["--preprocess", "edges"], "control.preprocess_alone", {"field": "preprocess"}),
            ([*control, "--preprocess", "normals"], "request.not_a_choice", {"field": "preprocess"}),
            ([*control, "--control-scale", "1,2,3"], "control.scales", {"field": "control_scale", "blocks": 2}),
            ([*control, "--control-scale", "much"], "request.not_numbers", {"field": "control_scale"}),
            ([*control, "--control-scale", "9"], "request.out_of_range", {"field": "control_scale"}),
            ([*control, "--frames", "25"], "planner.video_too_short", {"field": "frames", "frames": 8, "able": 5}),
            (["--reference", str(clip)], "image.format_unknown", {"field": "references", "file": "clip.mp4"}),
            (["--reference", image] * 9, "request.too_many_images", {"field": "references", "count": 9}),
        ],
        capsys,
        subtests,
        ["plan", "a boat"],
    )
    arguments = ["a boat", *control, "--mask", str(clip), "--reference", image, "--reference", image, *SMALL]
    arguments += ["--control-scale", "1,0.5"]
    planned = answered(["plan", *arguments, "--backend", "transformer=onnxruntime"], capsys)
    assert planned["plan"]["latent_shape"] == [1, 16, 4, 4, 8]
    assert planned["plan"]["components"]["transformer"]["backend"] == "onnxruntime"
    assert [*planned["plan"]["control"]] == ["control", "mask", "references[0]", "references[1]"]
    assert not images_dir(cache_dir).exists()
    saved_video = answered(["generate", *arguments], capsys)
    clip.unlink()
    (job,) = open_store(cache_dir).list()
    assert job.request["references"] == saved_video["request"]["references"]
    assert saved_video["request"]["control_scale"] == [1, 0.5]
    named = ["--control", job.request["control"], "--mask", job.request["mask"]]
    again = answered(["generate", "a boat", *named, *arguments[5:]], capsys)
    assert again["request"] == saved_video["request"] and Path(again["video"]).is_file()
    boxes = ["--control", job.request["control"], "--mask", "box:0,0,50,50+50,50,50,50", "--outpaint", "0,0,50,0"]
    with_boxes = answered(["generate", "a boat", *boxes, "--last-image", image, *SMALL], capsys)
    assert with_boxes["request"]["mask"] == boxes[3] and with_boxes["request"]["outpaint"] == [0, 0, 50, 0]
    extended = ["--extend", with_boxes["video"], "--extend-frames", "3", "--join", again["video"], "--frames", "9"]
    joined = answered(["generate", "a boat", *extended, "--steps", "1", "--guidance", "1"], capsys)
    assert [part["frames"] for part in joined["plan"]["parts"]] == [5, 3, 5]


def test_a_video_is_refused_planned_and_changed(
    spec: ModelSpec, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    clip = make(tmp_path / "clip.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=24:duration=0.5"))
    (tmp_path / "text.mp4").write_text("a boat")
    video, image = ["--video", str(clip)], ["--image", str(saved(tmp_path / "boat.png"))]
    check_refusals(
        [
            (["--video", str(tmp_path / "text.mp4")], "source.no_video", {"field": "video", "file": "text.mp4"}),
            ([*video, *image], "source.with_image", {"field": "video"}),
            ([*video, "--frames", "25"], "planner.video_too_short", {"field": "frames", "frames": 12, "able": 9}),
            ([*video, "--strength", "0"], "request.out_of_range", {"field": "strength"}),
        ],
        capsys,
        subtests,
        ["plan", "a boat"],
    )
    arguments = ["a boat", *video, "--steps", "4", "--strength", "0.5", "--seed", "3"]
    planned = answered(["plan", *arguments], capsys)
    assert (planned["request"]["frames"], planned["plan"]["skipped_steps"]) == (9, 2)
    assert not images_dir(cache_dir).exists()
    saved_video = answered(["generate", *arguments], capsys)
    clip.unlink()
    (job,) = open_store(cache_dir).list()
    assert job.request["video"] == saved_video["request"]["video"]
    again = answered(["generate", *arguments[:1], "--video", job.request["video"], *arguments[3:]], capsys)
    assert again["request"] == saved_video["request"] and Path(again["video"]).is_file()
