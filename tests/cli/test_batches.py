"""`generate` with lists and grids, and what resumes or shows a batch."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from runtime.cli.batches import requests_of
from runtime.cli.main import run
from runtime.core.settings import load
from runtime.models.spec import ModelSpec
from runtime.queue.store import open_store
from tests.cli.refusals import refused

Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def command(tiny: Tiny, cache_dir: Path) -> list[str]:
    """The arguments of small clips without a prompt."""
    assert cache_dir
    size = ["--width", "32", "--height", "32", "--frames", "5", "--fps", "8", "--steps", "1", "--guidance", "1"]
    return ["generate", "--model", str(tiny("wan2.1").directory), *size]


def test_a_grid_makes_videos_a_sheet_and_a_page_and_goes_on_where_it_was(
    command: list[str], cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "a {red|blue} boat", "--grid", "seed=1..2", "--grid", "steps=1,2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    made = [(video["request"]["seed"], video["request"]["steps"]) for video in result["videos"]]
    assert made == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {video["request"]["template"] for video in result["videos"]} == {"a {red|blue} boat"}
    with Image.open(result["sheet"]) as sheet:
        assert sheet.width > 2 * 320 and len(sheet.convert("RGB").getcolors(1 << 24) or ()) > 10
    page = Path(result["page"]).read_text(encoding="utf-8")
    assert all(Path(video["video"]).name in page for video in result["videos"])
    assert "Steps: 1 · Seed: 2" in page
    # A batch whose videos wait or were interrupted.
    store = open_store(load().cache_dir)
    first, *others = store.list(oldest_first=True)
    assert first.batch == result["batch"]
    for job in others[:2]:
        with store.database.writing() as connection:
            connection.execute("UPDATE jobs SET state = 'queued', held = 1, result = NULL WHERE id = ?", (job.id,))
    assert run(["jobs", "sheet", first.id, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["made"] == 2
    assert run(["jobs", "resume", first.id, "--all", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [video["job"] for video in result["videos"]] == [job.id for job in others[:2]]
    assert {job.state for job in store.list()} == {"done"}
    assert refused(["jobs", "resume", first.id, "--all"], capfd).code == "queue.batch_done"


# Waits until both videos are made, then fails for the second one.
WAITS_FOR_BOTH = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / os.environ["TANDEM_JOB"]).touch()
end = time.monotonic() + 60
while len(list(folder.iterdir())) < 2:
    time.sleep(0.02)
    if time.monotonic() > end:
        sys.exit(4)
sys.exit(3 if os.environ["TANDEM_PROMPT"] == "a blue ball" else 0)
"""


def test_lists_of_prompts_are_batches_whose_videos_wait_for_no_command(
    command: list[str], cache_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on_done = [sys.executable, "-c", WAITS_FOR_BOTH, str(tmp_path / "ended")]
    cache_dir.mkdir(exist_ok=True)
    (cache_dir / "settings.json").write_text(json.dumps({"on_done": on_done}))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red boat\n\n a blue ball \n", encoding="utf-8")
    assert run([*command, "--prompts", str(prompts), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [video["request"]["prompt"] for video in result["videos"]] == ["a red boat", "a blue ball"]
    assert len({video["seed"] for video in result["videos"]}) == 2
    first, second = (" ".join(video["warnings"]) for video in result["videos"])
    assert "exit code" not in first and "exit code 3" in second


def test_each_image_of_a_folder_is_combined_with_the_grid(cache_dir: Path, tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "notes.txt", "c"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "d.png").mkdir()
    made = requests_of({"prompt": "a boat"}, None, str(tmp_path), ["steps=1,2"], None)
    assert made is not None
    assert [(Path(str(request.image)).name, request.steps) for request in made] == [
        ("a.jpg", 1), ("a.jpg", 2), ("b.PNG", 1), ("b.PNG", 2),
    ]  # fmt: skip
    assert requests_of({"prompt": "a boat"}, None, None, [], None) is None


def test_batches_are_refused_before_anything_runs(
    command: list[str], cache_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    empty, folder = tmp_path / "empty.txt", tmp_path / "folder"
    empty.write_text("\n \n")
    folder.mkdir()
    lines = tmp_path / "lines.txt"
    lines.write_text("a boat\n" * 1_001)
    for flags, code, field in (
        ([], "cli.usage", "prompt"),
        (["a boat", "--prompts", str(empty)], "cli.prompt_and_list", "prompt"),
        (["--prompts", str(empty)], "cli.list_empty", "prompts"),
        (["--prompts", str(folder)], "cli.list_unreadable", "prompts"),
        (["--prompts", str(tmp_path / "none")], "cli.list_unreadable", "prompts"),
        (["--prompts", ""], "cli.list_unreadable", "prompts"),
        (["--prompts", str(lines)], "queue.batch_too_large", "grid"),
        (["a boat", "--images-of", str(folder)], "cli.no_images", "images_of"),
        (["a boat", "--images-of", str(empty)], "cli.images_unreadable", "images_of"),
        (["a boat", "--image", "x.png", "--images-of", str(folder)], "cli.image_and_folder", "image"),
        (["a boat", "--grid", "steps=1,2", "--out", "x.mp4"], "cli.out_of_several", "out"),
        (["a boat", "--grid", "stepz=1"], "request.grid_field", "grid"),
        (["a boat", "--grid", "steps=1,0"], "request.out_of_range", "steps"),
        (["a boat", "--grid", "width=32,33"], "planner.not_a_multiple", "width"),
        (["a boat", "--grid", "prompt=a|__none__"], "request.list_missing", "prompt"),
    ):
        with subtests.test(msg=str(flags)):
            error = refused([*command, *flags], capfd)
            assert (error.code, error.data.get("field", field)) == (code, field)
    assert open_store(load().cache_dir).list() == []
