"""The block that downloads models, and the thread behind it; its handlers answer raw HTTP too."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from runtime.core.settings import Settings
from runtime.families.wan.known import KNOWN
from runtime.models.catalogue import find, folders
from runtime.models.spec import ModelSpec
from runtime.queue.downloads import Downloads
from runtime.ui.model_downloads import MoreModels
from tests.models.hub import Fault, LoopbackHub, of_folder, served
from tests.waiting import until

NAME, FOLDER = "wan2.1-t2v-1.3b", "Wan2.1-T2V-1.3B-Diffusers"
VAE = "vae/diffusion_pytorch_model.safetensors"
SKIPPED = gr.skip()


@dataclass
class Shown:
    """The block over a thread and a hub of their own."""

    handlers: MoreModels
    downloads: Downloads
    models: dict[str, ModelSpec]
    settings: Settings
    hub: LoopbackHub

    def press(self, act: object, of: object) -> str:
        """Press a button; return the block."""
        return unescape(str(self.handlers.act(json.dumps({"act": act, "of": of}))[0]))

    def settle(self) -> str:
        """Wait until nothing is fetched any more; return the block."""
        until(lambda: not any(task.open for task in filter(None, (self.downloads.of(one.name) for one in KNOWN))))
        return unescape(str(self.handlers.look(None)[0]))


@pytest.fixture
def shown(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Shown]:
    with served(**{FOLDER: of_folder(tiny("wan2.1").directory)}) as hub:
        settings = Settings(cache_dir=tmp_path, hub=hub.address)
        models = {"diorama": find("diorama", settings.weights_dir)}
        downloads = Downloads(settings)
        yield Shown(MoreModels(downloads, models, settings), downloads, models, settings, hub)
        downloads.close()


def test_known_models_are_named_with_what_they_take(shown: Shown) -> None:
    view, choices, mark = shown.handlers.look("")
    for known in KNOWN:
        assert f'data-model="{known.name}" data-state="absent"' in view
        assert known.title in view
    assert "Licence Apache-2.0, about 28.9 GB at most. Needs at least a 6 GB card" in view
    assert "are free on the disk" in view
    assert 'data-confirm="Download Wan2.1 T2V-1.3B? Its licence is Apache-2.0.' in view
    assert choices == SKIPPED
    # A tick costs next to nothing where nothing has changed.
    assert shown.handlers.look(mark)[:2] == (SKIPPED, SKIPPED)
    garbage: tuple[Any, ...] = (None, 5, [], "x", "1 2 3", "a b")
    for sent in garbage:
        assert shown.handlers.look(sent)[0] == view
        assert shown.handlers.begin(sent)[2].startswith("1 ")


def test_a_model_is_fetched_and_can_be_chosen(shown: Shown) -> None:
    before = shown.handlers.look("")[2]
    view = shown.press("download", NAME)
    assert 'data-state="queued"' in view or 'data-state="running"' in view
    view = shown.settle()
    assert "Wan2.1 T2V-1.3B is downloaded and verified" in view
    assert f'data-model="{NAME}"' not in view
    assert FOLDER in shown.models
    _, choices, mark = shown.handlers.look(before)
    assert [name for _, name in choices["choices"]] == ["diorama", FOLDER]
    assert choices["visible"]
    # Once a page knows it, it is not told again; another page is.
    assert shown.handlers.look(mark)[1] == SKIPPED
    assert shown.handlers.look("")[1] != SKIPPED
    view, choices, mark = shown.handlers.begin("")
    assert view == SKIPPED
    assert choices != SKIPPED
    # The block is drawn when it is opened, and the choice is not touched again.
    view, choices, _ = shown.handlers.look(mark)
    assert "downloaded and verified" in view
    assert choices == SKIPPED


def test_progress_is_shown_and_it_can_be_cancelled_and_goes_on(shown: Shown) -> None:
    shown.hub.faults[VAE] = Fault("slow")
    shown.press("download", NAME)
    view = ""

    def under_way() -> bool:
        nonlocal view
        view = shown.press("download", NAME)
        return "valuenow" in view and 'data-state="running"' in view

    until(under_way)
    assert f"{KNOWN[2].title} is being fetched already." in view
    until(lambda: shown.hub.sent[VAE] >= 20_000)
    view = unescape(str(shown.handlers.look(None)[0]))
    assert "10/10 vae/" in view
    assert " of 46" in view
    assert 'data-act="cancel"' in view
    shown.press("cancel", NAME)
    view = shown.settle()
    assert "Cancelled. What came is kept" in view
    assert list(folders(shown.settings.weights_dir)) == ["diorama"]
    shown.press("download", NAME)
    assert "downloaded and verified" in shown.settle()
    assert shown.hub.asked_for(VAE)[-1].startswith("bytes=")


def test_one_after_the_other_and_what_waits_is_cancelled_at_once(shown: Shown) -> None:
    shown.hub.faults["api"] = Fault("stall", times=9)
    shown.press("download", NAME)
    shown.press("download", "wan2.1-t2v-14b")
    waiting = shown.downloads.of("wan2.1-t2v-14b")
    assert waiting is not None and waiting.open and waiting.result is None
    shown.press("cancel", "wan2.1-t2v-14b")
    assert waiting.state == "cancelled"
    began = time.monotonic()
    shown.downloads.close()
    assert time.monotonic() - began < 10
    first = shown.downloads.of(NAME)
    assert first is not None and first.state == "cancelled"


def test_what_fails_says_why(shown: Shown) -> None:
    shown.press("download", "wan2.1-t2v-14b")
    view = shown.settle()
    assert "The hub has no such repository" in view
    assert "HF_TOKEN" in view
    assert 'data-state="failed"' in view


def test_offline_no_button_does_anything(shown: Shown) -> None:
    handlers = MoreModels(Downloads(replace(shown.settings, offline="--offline")), shown.models, shown.settings)
    said = handlers.act(json.dumps({"act": "download", "of": NAME}))[0]
    assert "Downloads are disabled: --offline is set." in said
    offline = replace(shown.settings, offline="--offline")
    view = MoreModels(Downloads(offline), shown.models, offline).look("")[0]
    assert view.count(" disabled>Download") == len(KNOWN)
    assert not shown.hub.asked


@pytest.mark.parametrize(
    "sent",
    [
        None,
        5,
        "",
        "{",
        "[" * 190,
        "{}",
        '{"act": "download"}',
        '{"act": "download", "of": 5}',
        '{"act": "download", "of": "Wan-AI/Other"}',
        '{"act": "download", "of": "../x"}',
        '{"act": "download", "of": "A14B"}',
        '{"act": "cancel", "of": "x"}',
        '{"act": "delete", "of": "wan2.1-t2v-1.3b"}',
        '{"act": "download", "of": "wan2.1-t2v-1.3b", "x": "' + "y" * 300 + '"}',
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_does_nothing(shown: Shown, sent: Any) -> None:
    assert "There is no such action or model. Load the page again." in shown.handlers.act(sent)[0]
    assert not any(shown.downloads.of(one.name) for one in KNOWN)
    assert not shown.hub.asked
