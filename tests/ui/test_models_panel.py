"""The panel Models, and the thread behind it."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from runtime.core.preprocessors import DEPTH_ESTIMATOR
from runtime.core.request import DEPTH, GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import find, folders, known_as, known_models, known_variant
from runtime.models.enhancers import PUBLISHED as ENHANCERS
from runtime.models.enhancers import enhancer_of
from runtime.models.helpers import PUBLISHED as HELPERS
from runtime.models.hub.download import partial_bytes
from runtime.models.preprocessors import PUBLISHED, find_preprocessor, missing_model
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import fit
from runtime.planner.variants import candidates, offer
from runtime.queue.model_tasks import ModelTasks
from runtime.ui import form
from runtime.ui.formatting import page_text, paragraph
from runtime.ui.models_panel import ModelsPanel, _weights
from runtime.ui.panels import Call, respond
from runtime.ui.plan_preview import PlanPreview
from tests import variant_files
from tests.chat_models import save_chat_model
from tests.facts import fact
from tests.models.hub import Fault, LoopbackHub, of_folder, served
from tests.planner.test_table import H200, here
from tests.preprocessor_files import save_depth
from tests.thread_queue import RunningQueue
from tests.ui.page_texts import UNKNOWN, line, message
from tests.waiting import until

MACHINE = here("card", vram=24, ram=64)
OTHER = "someone/Style-Diffusers"
NAME, FOLDER = "wan2.1-t2v-1.3b", "Wan2.1-T2V-1.3B-Diffusers"
VAE = "vae/diffusion_pytorch_model.safetensors"


@dataclass
class Shown:
    """The panel over tasks, a queue and a hub of their own."""

    panel: ModelsPanel
    tasks: ModelTasks
    models: dict[str, ModelSpec]
    settings: Settings
    hub: LoopbackHub
    worker: RunningQueue

    @property
    def weights(self) -> Path:
        """The folder of models."""
        return self.settings.weights_dir

    def on(self, machine: Machine) -> ModelsPanel:
        """Return the panel on another machine."""
        return panel_of(self.settings, self.tasks, self.models, self.worker, machine)

    def press(
        self, action: str = "refresh", target: str = "", drawn: dict[str, str] | None = None, **values: Any
    ) -> dict[str, Any]:
        """Press a button; return the reply."""
        return respond(self.panel, Call(action, target, values=values, drawn=drawn or {}))

    def view(self, action: str = "refresh", target: str = "") -> str:
        """Press a button; return the panel, with its message."""
        reply = self.press(action, target)
        return unescape(f"{' '.join(reply['parts'].values())} {reply.get('message', '')}")

    def card(self, key: str) -> str:
        """Return the HTML of one card."""
        cards = re.split(r"(?=<li )", self.view())
        return next(card for card in cards if f'data-model="{key}"' in card)

    def settle(self) -> str:
        """Wait until no task is open; return the panel."""
        until(lambda: not any(task.open for task in self.tasks.all()))
        return self.view()

    def result(self, folder: str, code: str) -> str:
        """Return the text of a task's result, which has this code."""
        task = self.tasks.of(folder)
        assert task is not None and task.result is not None and task.result.code == code
        return paragraph(task.result)


def spec_of(name: str) -> ModelSpec:
    """Return a published model."""
    known = known_as(name)
    assert known is not None
    return known.spec(Path("none"))


def panel_of(
    settings: Settings,
    tasks: ModelTasks,
    models: dict[str, ModelSpec],
    worker: RunningQueue,
    machine: Machine = MACHINE,
) -> ModelsPanel:
    engines = EngineService(EngineStore(settings.engines_dir, 10**9), probe(), settings.cache_dir)
    preview = PlanPreview(engines, lambda: machine, worker.history, settings.weights_dir)
    return ModelsPanel(tasks, models, settings, preview, worker)


@pytest.fixture
def shown(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Shown]:
    with served(**{FOLDER: of_folder(tiny("wan2.1").directory)}) as hub:
        hub.repositories[OTHER] = of_folder(tiny("wan2.1").directory)
        settings = Settings(cache_dir=tmp_path, hub=hub.address)
        models = {"diorama": find("diorama", settings.weights_dir)}
        tasks = ModelTasks(settings)
        engines = EngineService(EngineStore(settings.engines_dir, 10**9), probe(), tmp_path)
        worker = RunningQueue(settings.weights_dir, settings.outputs_dir, engines, start=False)
        yield Shown(panel_of(settings, tasks, models, worker), tasks, models, settings, hub, worker)
        tasks.close()
        worker.close()


def test_known_models_show_license_size_and_hardware(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other processes write to the disk meanwhile.
    monkeypatch.setattr("runtime.ui.models_panel.free_disk_bytes", lambda _: 10**12)
    reply = shown.press()
    view = unescape(reply["parts"]["available"])
    for known in known_models():
        assert f'data-model="{known.name}" data-state="absent"' in view
        assert known.title in view and known.about in view
    card = shown.card(NAME)
    for expected in (
        "<dd>Apache-2.0</dd>",
        "<dd>28.9 GB</dd>",
        "<dd>6 GB card and",
        "832 × 480, 5.1 s",
    ):
        assert expected in card, expected
    assert "Free disk space: " in view
    assert 'data-confirm="Download Wan2.1 T2V-1.3B? License: Apache-2.0.' in view
    assert reply["models"] == 1
    # What the page shows already is not sent again.
    assert shown.press(drawn=reply["digests"])["parts"] == {}


def test_each_card_says_whether_the_model_runs_well_here(shown: Shown) -> None:
    small = shown.card("diorama")
    assert 'data-fit="well"' in small and "<strong>Runs well here</strong>" in small and "Selected" not in small
    slow = shown.card("wan2.1-t2v-14b")
    assert 'data-fit="slow"' in slow and "<span>Blocks offloaded to RAM" in slow
    assert re.search(r"<strong>Runs slowly: about \d+ h for a clip</strong>", slow)
    big = shown.card("wan2.2-t2v-a14b")
    assert 'data-fit="slow"' in big and "Transformers with 8-bit weights" in big
    assert re.search(r"<dd>about \d+ (min|h) .*\(estimated\)</dd>", big)
    assert "GB of 22.8 GB free</dd>" in big


@pytest.mark.parametrize(
    ("count", "expected"),
    [(28_535_500_000, "28.5 billion"), (11_900_000, "11.9 million"), (132_847, "132,847")],
)
def test_a_card_has_the_number_of_weights_in_a_fitting_unit(count: int, expected: str) -> None:
    assert _weights(count) == f"{expected} weights."


def test_models_that_run_better_come_first_then_small_ones(shown: Shown) -> None:
    machine = here("card", (8, 9), 8, ram=64)
    available = respond(shown.on(machine), Call())["parts"]["available"]
    names = re.findall(r'data-model="([^"]+)"', available)
    assert names[-len(HELPERS) :] == [model.name for model in HELPERS]
    del names[-len(HELPERS) :]
    specs = [spec_of(name) for name in names]
    places = [(fit(spec, machine).rank, spec.total_parameters) for spec in specs]
    assert places == sorted(places) and len(places) == len(known_models())
    assert {rank for rank, _ in places} == {0, 1, 2}
    assert [spec.name for spec in specs][:3] == ["ltx-2-distilled", NAME, "wan2.1-vace-1.3b"]


def test_a_download_is_recommended_if_it_runs_well_and_the_disk_has_the_space(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10**12
    monkeypatch.setattr("runtime.ui.models_panel.free_disk_bytes", lambda _: free)
    panel = shown.on(H200)

    def button(name: str, panel: ModelsPanel = panel) -> tuple[str, bool]:
        """Return a model's card, and whether its button is a primary one."""
        cards = unescape(respond(panel, Call())["parts"]["available"]).split("<li ")
        card = next(card for card in cards if f'data-model="{name}"' in card)
        match = re.search(r'<button [^>]*class="button( strong)?" data-action="download"', card)
        assert match is not None
        return card, bool(match[1])

    assert not button(NAME, shown.panel)[1], "it runs slowly"
    card, is_primary = button(NAME)
    assert is_primary and "free in" not in card
    free = 10**10
    card, is_primary = button(NAME)
    short = fact("hub.disk_full", needed=28_900_000_000, free=free, folder=shown.weights)
    assert not is_primary and card.count(page_text(short).what) == 2, "on the card, and in the question"
    assert page_text(short).remedy in card
    # Of this one, only the most that it may be is known.
    spec = spec_of("wan2.1-flf2v-14b")
    card, is_primary = button(spec.name)
    bound = fact("hub.disk_may_be_full", needed=4 * spec.total_parameters, free=free, folder=shown.weights)
    assert not is_primary and paragraph(bound) in card and "<dd>up to 91.3 GB</dd>" in card


def test_a_card_offers_the_variant_for_this_machine(
    shown: Shown, tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10**13
    monkeypatch.setattr("runtime.ui.models_panel.free_disk_bytes", lambda _: free)
    card = shown.card(variant_files.BASE)
    best, *others = re.findall(r'data-action="download" data-target="([^"]+)"[^>]*>([^<]+)<', card)
    assert best == (variant_files.NAME, "Get the variant for this machine (43.0 GB)")
    assert [target for target, _ in others] == [variant_files.BASE, "wan2.2-t2v-a14b-q4"]
    offered = offer(candidates(known_variant(variant_files.NAME).model, MACHINE), free)  # type: ignore[union-attr]
    assert page_text(offered.reason).what in card and "License: Apache-2.0. Size: 43.0 GB." in card
    # A model without variants, and one of which none fits.
    assert "Get the variant" not in shown.card(NAME)
    free = 10**9
    card = shown.card(variant_files.BASE)
    assert "Get the variant" not in card and f'data-target="{variant_files.BASE}"' in card

    free = 10**13
    variant_files.publish(shown.hub, tiny("wan2.2-a14b").directory, tmp_path)
    shown.hub.faults[variant_files.HIGH] = Fault("stall", after=1000, times=9)
    shown.press("download", variant_files.NAME)
    until(lambda: partial_bytes(shown.weights, variant_files.NAME) > 0)
    card = shown.card(variant_files.NAME)
    assert "Wan2.2 T2V-A14B, FP8, 4 steps" in card and 'data-action="pause"' in card
    shown.press("pause", variant_files.NAME)
    shown.settle()
    assert "Resume</button>" in shown.card(variant_files.NAME)
    assert f'data-target="{variant_files.NAME}"' not in shown.card(variant_files.BASE)
    shown.hub.faults.clear()
    shown.press("download", variant_files.NAME)
    shown.settle()
    assert 'data-state="installed"' in shown.card(variant_files.NAME)
    assert shown.models[variant_files.NAME].defaults.steps == 4
    shown.press("verify", variant_files.NAME)
    assert shown.settle() and shown.result(variant_files.NAME, "download.verified")
    shown.press("delete", variant_files.NAME)
    assert variant_files.NAME not in shown.models


def test_the_selected_model_says_so_and_has_no_use_button(shown: Shown) -> None:
    use = 'data-action="use"'
    assert use in shown.card("diorama")
    values = ["diorama" if name == "model" else None for name in form.NAMES]
    card = respond(shown.panel, Call(form=values))["parts"]["installed"]
    assert ">Selected</span>" in card and use not in card


@pytest.mark.slow
def test_a_model_is_downloaded_and_can_be_chosen(shown: Shown) -> None:
    # Else it may be complete before the panel is drawn.
    shown.hub.faults[VAE] = Fault("slow")
    view = shown.view("download", NAME)
    assert 'data-state="queued"' in view or 'data-state="running"' in view
    view = shown.settle()
    assert shown.result(FOLDER, "download.done") in view
    assert f'data-model="{NAME}"' not in view
    assert 'data-state="installed"' in shown.card(FOLDER)
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
    known = known_as(NAME)
    assert known is not None and line("download.already_queued", model=known.title) in view
    until(lambda: shown.hub.sent[VAE] >= 20_000)
    view = shown.view()
    assert "10/10 vae/" in view
    assert " of 46" in view
    assert 'data-action="pause"' in shown.card(NAME)
    shown.press("pause", NAME)
    view = shown.settle()
    assert line("download.cancelled") in view
    assert "Resume</button>" in shown.card(NAME) and "<dt>Received</dt>" in shown.card(NAME)
    assert list(folders(shown.settings.weights_dir)) == ["diorama"]
    shown.press("download", NAME)
    view = shown.settle()
    assert shown.result(FOLDER, "download.done") in view
    assert shown.hub.ranges_of(VAE)[-1].startswith("bytes=")


def test_downloads_run_in_turn_and_queued_ones_are_cancelled_at_once(shown: Shown) -> None:
    shown.hub.faults["api"] = Fault("stall", times=9)
    shown.press("download", NAME)
    shown.press("download", "wan2.1-t2v-14b")
    waiting = shown.tasks.of("Wan2.1-T2V-14B-Diffusers")
    assert waiting is not None and waiting.open and waiting.result is None
    shown.press("cancel", "wan2.1-t2v-14b")
    assert waiting.state == "cancelled"
    began = time.monotonic()
    shown.tasks.close()
    assert time.monotonic() - began < 10
    first = shown.tasks.of(FOLDER)
    assert first is not None and first.state == "cancelled"


def test_a_failed_download_shows_the_reason(shown: Shown) -> None:
    shown.press("download", "wan2.1-t2v-14b")
    view = shown.settle()
    assert message("hub.no_repository", repository="Wan-AI/Wan2.1-T2V-14B-Diffusers") in view
    assert 'data-state="failed"' in view


def test_offline_downloads_are_refused(shown: Shown) -> None:
    offline = shown.settings.replace(offline="--offline")
    panel = panel_of(offline, ModelTasks(offline), shown.models, shown.worker)
    for call in (Call("download", NAME), Call("look", values={"repository": OTHER})):
        reply = respond(panel, call)
        assert reply["error"] and reply["message"] == message("hub.offline", by="--offline")
    view = respond(panel, Call())["parts"]["available"]
    # Each card has a button for the model, or for its variant for this machine.
    disabled = re.findall(r'aria-disabled="true">(Download|Get the variant)', view)
    assert len(disabled) == len(known_models()) + len(HELPERS)
    assert 'aria-disabled="false">Get the variant' not in view
    assert "Downloads are disabled" in view and "Installed models work." in view
    assert not shown.hub.requests


def test_a_repository_is_looked_up_before_it_is_downloaded(shown: Shown) -> None:
    missing = message("ui.repository_missing", example="Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert shown.press("look", repository=" ")["message"] == missing
    assert shown.press("look", repository="../x")["message"] == message("hub.name_invalid", name="../x")
    shown.press("look", repository=f"https://huggingface.co/{OTHER}/")
    shown.settle()
    card = shown.card("Style-Diffusers")
    assert OTHER in card and "<dd>apache-2.0</dd>" in card and "<dt>Download</dt>" in card
    assert not any(path.endswith(".safetensors") for path in shown.hub.sent)
    shown.press("download", "Style-Diffusers")
    shown.settle()
    assert 'data-state="installed"' in shown.card("Style-Diffusers")
    shown.press("look", repository="nobody/Nothing")
    shown.settle()
    card = shown.card("Nothing")
    assert message("hub.no_repository", repository="nobody/Nothing") in card and 'data-action="download"' not in card
    shown.press("discard", "Nothing")
    assert 'data-model="Nothing"' not in shown.view()


def test_an_interrupted_download_is_offered_after_a_restart(shown: Shown) -> None:
    shown.hub.faults[VAE] = Fault("stall", after=30_000)
    shown.press("look", repository=OTHER)
    shown.settle()
    shown.press("download", "Style-Diffusers")
    until(lambda: partial_bytes(shown.weights, "Style-Diffusers") > 30_000)
    shown.press("pause", "Style-Diffusers")
    shown.settle()
    after = panel_of(shown.settings, ModelTasks(shown.settings), shown.models, shown.worker)
    view = unescape(respond(after, Call())["parts"]["available"])
    assert f"<bdi>{OTHER}</bdi>" in view and f'aria-label="Resume {OTHER}"' in view
    reply = respond(after, Call("discard", "Style-Diffusers"))
    assert "freed" in reply["message"] and OTHER not in reply["parts"]["available"]
    assert partial_bytes(shown.weights, "Style-Diffusers") == 0


def test_files_are_verified_and_wrong_ones_downloaded_again(shown: Shown) -> None:
    shown.press("download", NAME)
    shown.settle()
    shown.press("verify", FOLDER)
    shown.settle()
    assert "Verified: 10 files" in shown.card(FOLDER)
    path = shown.weights / FOLDER / VAE
    path.write_bytes(bytes(path.stat().st_size))
    shown.press("verify", FOLDER)
    shown.settle()
    card = shown.card(FOLDER)
    cause = fact("hub.file_hash", file=VAE)
    assert line("download.wrong_files", wrong=1, files=10, cause=cause) in card
    shown.press("download", FOLDER)
    shown.settle()
    shown.press("verify", FOLDER)
    shown.settle()
    assert "Verified: 10 files" in shown.card(FOLDER)


def test_a_model_is_deleted_unless_a_job_uses_it(shown: Shown, tiny: Callable[[str], ModelSpec]) -> None:
    shutil.copytree(tiny("wan2.1").directory, shown.weights / "mine")
    card = shown.card("mine")
    assert "Delete mine? This frees " in card
    # Verification needs hashes.
    assert "Tandem did not download it and has no hashes." in card
    assert shown.press("verify", "mine")["message"] == UNKNOWN
    job = shown.worker.submit(GenerationRequest(prompt="x", model="mine", width=64, height=32, frames=9, steps=1))
    assert shown.press("delete", "mine")["message"] == message("model.in_use", model="mine", jobs=1)
    job.request_cancel()
    until(lambda: not shown.worker.store.order.jobs())
    reply = shown.press("delete", "mine")
    assert reply["message"].startswith("Deleted: mine. ") and (reply["gone"], reply["first"]) == ("mine", "diorama")
    assert list(shown.models) == ["diorama"] and not (shown.weights / "mine").exists()


def test_a_link_is_deleted_without_the_folder_behind_it(shown: Shown, tiny: Callable[[str], ModelSpec]) -> None:
    behind = tiny("wan2.1").directory
    shown.weights.mkdir(parents=True)
    (shown.weights / "linked").symlink_to(behind)
    assert "This frees only the link." in shown.card("linked")
    shown.press("delete", "linked")
    assert (behind / "model_index.json").exists() and "linked" not in shown.models


def test_an_unusable_folder_is_listed_with_its_reason(shown: Shown) -> None:
    for name, index in (("flux", '{"_class_name": "FluxPipeline"}'), ("original", None), ("loras", None)):
        (shown.weights / name).mkdir(parents=True)
        if index:
            (shown.weights / name / "model_index.json").write_text(index, encoding="utf-8")
    assert line("model.family_unknown", model="flux", pipeline="FluxPipeline", supported=[]) in shown.card("flux")
    assert line("model.file_missing", file="original/model_index.json") in shown.card("original")
    assert 'data-model="loras"' not in shown.view()
    shown.press("delete", "original")
    assert not (shown.weights / "original").exists()


def test_invalid_requests_do_nothing(shown: Shown, subtests: pytest.Subtests) -> None:
    (shown.weights / "loras").mkdir(parents=True)
    for action, target in (
        ("", ""),
        ("download", ""),
        ("download", "Wan-AI/Other"),
        ("download", "../x"),
        ("download", "A14B"),
        ("pause", "x"),
        ("discard", "../.."),
        ("verify", "diorama"),
        ("verify", "../x"),
        ("delete", NAME),
        ("delete", "../weights"),
        ("delete", ".."),
        ("delete", "loras"),
        ("DOWNLOAD", NAME),
    ):
        with subtests.test(action=action, target=target):
            reply = shown.press(action, target)
            assert reply["error"] and reply["message"] == UNKNOWN
            assert not shown.tasks.all()
            assert not shown.hub.requests
            assert (shown.weights / "loras").is_dir()


def test_the_shipped_model_cannot_be_deleted(shown: Shown) -> None:
    assert "More actions: Diorama" not in shown.view()
    assert "not in the models folder" in shown.press("delete", "diorama")["message"]
    assert find("diorama", shown.weights).is_downloaded


def test_chat_models_are_downloaded_and_deleted(shown: Shown, tmp_path: Path) -> None:
    model = ENHANCERS[0]
    shown.hub.repositories[model.repository] = of_folder(save_chat_model(tmp_path / "published"))
    absent = shown.card(model.name)
    assert 'data-state="absent"' in absent and "License: Apache-2.0. Size: 3.1 GB." in absent
    shown.press("download", model.name)
    shown.settle()
    assert enhancer_of(Settings(cache_dir=shown.weights.parent, enhancer=model.name)).title == model.title
    assert 'data-state="installed"' in shown.card(model.name)
    shown.press("delete", model.name)
    assert 'data-state="absent"' in shown.card(model.name) and not (shown.weights / "enhancers" / model.name).exists()


def test_models_of_control_frames_are_downloaded_and_deleted(shown: Shown, tmp_path: Path) -> None:
    model = PUBLISHED[0]
    files = save_depth(tmp_path / "published") / DEPTH_ESTIMATOR
    shown.hub.repositories[model.parts[0].repository] = of_folder(files)
    absent = shown.card(model.name)
    assert 'data-state="absent"' in absent and "<dd>Apache-2.0</dd>" in absent and "License: Apache-2.0." in absent
    shown.press("download", model.name)
    shown.settle()
    assert find_preprocessor(DEPTH, shown.weights, None).license == "Apache-2.0"
    card = shown.card(model.name)
    assert 'data-state="installed"' in card and shown.view().count(f'data-model="{model.name}"') == 1
    assert model.name in shown.view("delete", model.name)
    assert missing_model(DEPTH, shown.weights) is not None and 'data-state="absent"' in shown.card(model.name)
    assert UNKNOWN in shown.view("delete", model.name)
