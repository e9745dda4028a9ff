"""The panel Models, and the thread behind it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from runtime.core.settings import Settings
from runtime.families.wan.known import KNOWN
from runtime.models.catalogue import find, folders
from runtime.models.spec import ModelSpec
from runtime.queue.downloads import Downloads
from runtime.ui.models_panel import ModelsPanel
from runtime.ui.panels import Call, respond
from tests.models.hub import Fault, LoopbackHub, of_folder, served
from tests.waiting import until

NAME, FOLDER = "wan2.1-t2v-1.3b", "Wan2.1-T2V-1.3B-Diffusers"
VAE = "vae/diffusion_pytorch_model.safetensors"
UNKNOWN = "There is no such action or item. Reload the page."


@dataclass
class Shown:
    """The block over a thread and a hub of their own."""

    panel: ModelsPanel
    downloads: Downloads
    models: dict[str, ModelSpec]
    settings: Settings
    hub: LoopbackHub

    def press(self, action: str = "refresh", target: str = "", drawn: dict[str, str] | None = None) -> dict[str, Any]:
        """Press a button; return the reply."""
        return respond(self.panel, Call(action, target, drawn=drawn or {}))

    def view(self, action: str = "refresh", target: str = "") -> str:
        """Press a button; return the panel, with its message."""
        reply = self.press(action, target)
        return unescape(f"{reply['parts']['list']} {reply.get('message', '')}")

    def settle(self) -> str:
        """Wait until no download is open; return the panel."""
        until(lambda: not any(task.open for task in filter(None, (self.downloads.of(one.name) for one in KNOWN))))
        return self.view()


@pytest.fixture
def shown(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Shown]:
    with served(**{FOLDER: of_folder(tiny("wan2.1").directory)}) as hub:
        settings = Settings(cache_dir=tmp_path, hub=hub.address)
        models = {"diorama": find("diorama", settings.weights_dir)}
        downloads = Downloads(settings)
        yield Shown(ModelsPanel(downloads, models, settings), downloads, models, settings, hub)
        downloads.close()


def test_known_models_show_license_size_and_hardware(shown: Shown) -> None:
    reply = shown.press()
    view = unescape(reply["parts"]["list"])
    for known in KNOWN:
        assert f'data-model="{known.name}" data-state="absent"' in view
        assert known.title in view
    assert "License: Apache-2.0. Download: up to 28.9 GB. Minimum hardware: 6 GB card" in view
    assert "Free disk space: " in view
    assert 'data-confirm="Download Wan2.1 T2V-1.3B? License: Apache-2.0.' in view
    assert reply["models"] == 1
    # What the page shows already is not sent again.
    assert shown.press(drawn=reply["digests"])["parts"] == {}


def test_a_model_is_downloaded_and_can_be_chosen(shown: Shown) -> None:
    view = shown.view("download", NAME)
    assert 'data-state="queued"' in view or 'data-state="running"' in view
    view = shown.settle()
    assert "Wan2.1 T2V-1.3B is downloaded and verified" in view
    assert f'data-model="{NAME}"' not in view
    assert list(shown.models) == ["diorama", FOLDER]
    assert shown.press()["models"] == 2


def test_progress_is_shown_and_a_cancelled_download_resumes(shown: Shown) -> None:
    shown.hub.faults[VAE] = Fault("slow")
    shown.press("download", NAME)
    view = ""

    def under_way() -> bool:
        nonlocal view
        view = shown.view("download", NAME)
        return "valuenow" in view and 'data-state="running"' in view

    until(under_way)
    assert f"{KNOWN[2].title} is already being downloaded." in view
    until(lambda: shown.hub.sent[VAE] >= 20_000)
    view = shown.view()
    assert "10/10 vae/" in view
    assert " of 46" in view
    assert 'data-action="cancel"' in view
    shown.press("cancel", NAME)
    view = shown.settle()
    assert "Cancelled. Received data is kept" in view
    assert list(folders(shown.settings.weights_dir)) == ["diorama"]
    shown.press("download", NAME)
    assert "downloaded and verified" in shown.settle()
    assert shown.hub.ranges_of(VAE)[-1].startswith("bytes=")


def test_downloads_run_in_turn_and_queued_ones_are_cancelled_at_once(shown: Shown) -> None:
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


def test_a_failed_download_shows_the_reason(shown: Shown) -> None:
    shown.press("download", "wan2.1-t2v-14b")
    view = shown.settle()
    assert "The hub has no such repository" in view
    assert "HF_TOKEN" in view
    assert 'data-state="failed"' in view


def test_offline_downloads_are_refused(shown: Shown) -> None:
    panel = ModelsPanel(Downloads(shown.settings.replace(offline="--offline")), shown.models, shown.settings)
    reply = respond(panel, Call("download", NAME))
    assert reply["error"] and "Downloads are disabled: --offline is set." in reply["message"]
    offline = shown.settings.replace(offline="--offline")
    view = respond(ModelsPanel(Downloads(offline), shown.models, offline), Call())["parts"]["list"]
    assert view.count('aria-disabled="true">Download') == len(KNOWN)
    assert not shown.hub.requests


@pytest.mark.parametrize(
    ("action", "target"),
    [
        ("", ""),
        ("download", ""),
        ("download", "Wan-AI/Other"),
        ("download", "../x"),
        ("download", "A14B"),
        ("cancel", "x"),
        ("delete", NAME),
        ("DOWNLOAD", NAME),
    ],
)
def test_invalid_requests_do_nothing(shown: Shown, action: str, target: str) -> None:
    reply = shown.press(action, target)
    assert reply["error"] and reply["message"] == UNKNOWN
    assert not any(shown.downloads.of(one.name) for one in KNOWN)
    assert not shown.hub.requests
