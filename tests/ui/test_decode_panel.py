"""The panel that decodes latents: its task in a worker, its player, and what it refuses."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import decoders as frame_decoders
from runtime.models.spec import ModelSpec
from runtime.ui.decode_panel import DecodePanel
from runtime.ui.panels import Call
from tests.families.dcae import decoders
from tests.thread_queue import RunningQueue
from tests.waiting import until


@pytest.fixture
def panel(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DecodePanel, RunningQueue]]:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    decoders.save_autoencoder(tmp_path / "weights" / "tiny")
    engines = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)
    worker = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines)
    models = {"wan": tiny("wan2.1")}
    yield DecodePanel(worker, models, lambda: frame_decoders(tmp_path / "weights"), settings.load()), worker
    worker.close()


def call(**values: Any) -> Call:
    """Return the request of the button."""
    return Call(action="decode", values={"model": "tiny", "channels": "rgb"} | values)


def test_a_file_is_decoded_and_played(panel: tuple[DecodePanel, RunningQueue], tmp_path: Path) -> None:
    page, worker = panel
    np.save(tmp_path / "world.npy", np.zeros((20, 8, 3, 4), "float32"))
    parts = page.draw(Call(), {})
    assert '<option value="tiny">tiny</option>' in parts["choices"]
    assert 'value="wan"' in parts["choices"]
    assert "<video" not in parts["clips"]
    assert "Decode world.npy" in page.act(call(file=str(tmp_path / "world.npy"), channels="rgb,0"))["message"]
    until(lambda: not worker.tasks()[-1].open)
    (task,) = worker.tasks()
    assert task.state == "done", task.result
    assert task.seconds is not None and task.seconds > 0
    parts = page.draw(Call(), {})
    (video,) = (tmp_path / "outputs").glob("*.mp4")
    assert video.name in parts["clips"] and "20 frames" in parts["clips"]
    assert task.id not in parts["tasks"]
    # It is listed as long as its file exists, also by another process, which opens no folders on another machine.
    again = DecodePanel(worker, {}, list, settings.load())
    assert video.name in again.draw(Call(), {})["clips"]
    with pytest.raises(TandemError):
        again.act(Call(action="reveal", target=task.id))
    video.unlink()
    assert "<video" not in page.draw(Call(), {})["clips"]


def test_files_in_the_folder_of_latents_are_chosen_by_name(
    panel: tuple[DecodePanel, RunningQueue], tmp_path: Path
) -> None:
    page, worker = panel
    assert page.draw(Call(), {})["files"].count("<option") == 1  # a file elsewhere
    folder = tmp_path / "latents"
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "more.npy").mkdir()
    np.save(folder / "a & b.npy", np.zeros((4, 8, 3, 4), "float32"))
    assert '<option value="a &amp; b.npy"' in page.draw(Call(), {})["files"]
    older = folder / "older.npy"
    older.write_bytes(b"")
    os.utime(older, (1, 1))
    assert page.draw(Call(), {})["files"].index("a &amp; b.npy") < page.draw(Call(), {})["files"].index("older.npy")
    for name in ("notes.txt", "more.npy", "../latents/a & b.npy", "b.npy"):
        with pytest.raises(TandemError) as refusal:
            page.act(call(file=name))
        assert (refusal.value.code, refusal.value.data["folder"]) == ("ui.latents_not_listed", str(folder))
    page.act(call(file="a & b.npy"))
    until(lambda: not worker.tasks()[-1].open)
    assert worker.tasks()[-1].state == "done", worker.tasks()[-1].result


def test_bad_latents_fail_with_a_reason(panel: tuple[DecodePanel, RunningQueue], tmp_path: Path) -> None:
    page, worker = panel
    np.save(tmp_path / "bad.npy", np.zeros((20, 9, 3, 4), "float32"))
    for name, code in (("bad.npy", "latents.channels"), ("missing.npy", "latents.unreadable")):
        with pytest.raises(TandemError) as refusal:
            page.act(call(file=str(tmp_path / name)))
        assert refusal.value.code == code
    assert worker.tasks() == []
    np.save(tmp_path / "nan.npy", np.full((20, 8, 3, 4), np.nan, "float32"))
    page.act(call(file=str(tmp_path / "nan.npy")))
    until(lambda: not worker.tasks()[-1].open)
    assert worker.tasks()[-1].state == "failed"
    parts = page.draw(Call(), {})
    assert "nan.npy" in parts["tasks"]
    assert "<video" not in parts["clips"]
    assert not list((tmp_path / "outputs").glob("*"))


@pytest.mark.parametrize(
    "values",
    [
        {"file": "world.npy"},
        {"file": ""},
        {"file": 3},
        {"file": "/a\n.npy"},
        {"file": "/" + "a" * 5000},
        {"file": "/a.npy", "model": "none"},
        {"file": "/a.npy", "model": ["tiny"]},
        {"file": "/a.npy", "channels": "depth"},
        {"file": "/a.npy", "channels": None},
        {"file": "", "elsewhere": "world.npy"},
        {"file": "", "elsewhere": 3},
    ],
)
def test_other_values_are_refused(panel: tuple[DecodePanel, RunningQueue], values: dict[str, Any]) -> None:
    page, worker = panel
    with pytest.raises(TandemError):
        page.act(call(**values))
    for action in ("cancel", "delete"):
        with pytest.raises(TandemError):
            page.act(Call(action=action, target="../x"))
    assert worker.tasks() == []
