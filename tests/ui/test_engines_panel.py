"""The panel Engines: its actions and its HTML."""

import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.core.facts import Fact, sentence
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import cpp_compiler, probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import UNREADABLE_KEY, ShapeProfile
from runtime.queue.records import BuildProgress, InspectEngine, PruneEngines
from runtime.queue.store import JobStore
from runtime.queue.views import Task
from runtime.ui import form
from runtime.ui.break_even import BreakEven
from runtime.ui.engines_panel import EnginesPanel, Entry, storage_html, supported_sizes, table_html, tasks_html
from runtime.ui.formatting import paragraph
from runtime.ui.panels import Call, respond
from runtime.ui.plan_preview import PlanPreview
from runtime.ui.queue_panel import QueuePanel
from tests.engines.engine_files import key, record
from tests.facts import fact
from tests.thread_queue import RunningQueue
from tests.ui.page_texts import UNKNOWN, line, message
from tests.ui.test_form import GOOD
from tests.ui.test_plan_preview import insert
from tests.waiting import until

VALUES = [GOOD[name] for name in form.NAMES]
PRUNE = PruneEngines(max_bytes=10**9)


@dataclass(frozen=True)
class Tab:
    """The panel over a job queue and an engine library of its own."""

    panel: EnginesPanel
    worker: RunningQueue
    store: EngineStore

    def press(self, action: str, target: str, values: list[Any] = VALUES) -> str:
        """Press a button and return the message."""
        return str(respond(self.panel, Call(action, target, form=values)).get("message", ""))

    def parts(self, values: list[Any] = VALUES, drawn: dict[str, str] | None = None) -> dict[str, str]:
        """Return the parts that differ from those drawn."""
        return dict(respond(self.panel, Call(form=values, drawn=drawn or {}))["parts"])

    def bring(
        self,
        file: object,
        part: object = "auto",
        trusted: object = "on",
        values: list[Any] = VALUES,
        *,
        take: bool = True,
    ) -> str:
        """Import an engine file, or inspect it, and return the message."""
        given = {"file": file, "component": part, "trusted": trusted}
        action = "import" if take else "inspect"
        return str(respond(self.panel, Call(action, values=given, form=values))["message"])

    def settle(self) -> None:
        """Run what is queued, and wait until it has ended."""
        self.worker.start()
        until(lambda: not any(task.open for task in self.worker.tasks()))


@pytest.fixture
def tab(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Tab]:
    store = EngineStore(tmp_path / "engines", 10**9)
    engines = EngineService(store, probe(), tmp_path)
    worker = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, start=False)
    models = {name: tiny(name) for name in ("wan2.2-a14b", "wan2.1")}
    preview = PlanPreview(engines, worker.machine, worker.history)
    yield Tab(EnginesPanel(worker, engines, models, preview), worker, store)
    worker.close()


def test_pin_unpin_delete(tab: Tab) -> None:
    first, second = insert(tab.store, 1), insert(tab.store, 2)
    assert tab.press("pin", first) == "Pinned: transformer."
    assert [one.id for one in tab.store.index() if one.pinned] == [first]
    assert tab.press("unpin", first) == "Unpinned: transformer."
    assert not any(one.pinned for one in tab.store.index())
    assert tab.press("delete", first).startswith(line("task.delete", program="transformer", engine=first))
    tab.settle()
    assert [one.id for one in tab.store.index()] == [second]
    drawn = tab.parts()["table"]
    assert f'data-engine="{second}"' in drawn
    assert first not in drawn


def test_engine_ids_are_complete(tab: Tab, subtests: pytest.Subtests) -> None:
    kept = insert(tab.store, 1)
    # A beginning will do on the command line; here a button names one engine.
    ids = ("", "../../etc", "0", "*", "all", "0" * 15, "0" * 17, "G" * 16, "0" * 15 + "\n", kept[:8])
    for action in ("delete", "verify", "pin", "unpin"):
        for engine in ids:
            with subtests.test(action=action, engine=engine):
                assert tab.press(action, engine) == UNKNOWN
                assert tab.worker.tasks() == []
                assert [(one.id, one.pinned) for one in tab.store.index()] == [(kept, False)]


def test_a_missing_engine_is_named(tab: Tab) -> None:
    assert tab.press("delete", "0" * 16) == message("engine.not_found", engine="0" * 16)


@pytest.mark.parametrize(("act", "of"), [("build", "eyes"), ("cancel", "../x"), ("launch", "all"), ("BUILD", "all")])
def test_unknown_actions_do_nothing(tab: Tab, act: str, of: str) -> None:
    assert tab.press(act, of) == UNKNOWN
    assert tab.worker.tasks() == []


def test_an_invalid_form_builds_nothing(tab: Tab) -> None:
    odd = [GOOD[name] if name != "width" else 65 for name in form.NAMES]
    unfit = message("planner.not_a_multiple", field="width", value=65, model="wan2.2-a14b", stride=16, able=[64, 80])
    assert tab.press("build", "all", odd) == unfit
    assert tab.press("build", "all", []) == message("form.incomplete")
    assert unfit in tab.parts(odd)["components"]
    assert tab.worker.tasks() == []


def test_a_build_is_queued_once_and_cancelled(tab: Tab) -> None:
    hold = tab.worker.add_task(PRUNE, sentence("Hold"))
    chosen = [GOOD[name] if name != "backend_vae" else "onnxruntime" for name in form.NAMES]
    assert tab.press("build", "vae", chosen).endswith(": queued.")
    assert tab.press("build", "vae", chosen) == message("ui.task_exists")
    build = tab.worker.tasks()[-1]
    title = line(
        "task.build",
        **{"model": "wan2.2-a14b", "width": 64, "height": 32, "frames": 9},
        components={"names": ["vae"], "among": ["text_encoder", "transformer", "transformer_2", "vae"]},
    )
    assert build.title == title
    drawn = tab.parts()["tasks"]
    assert f'data-task="{build.id}" data-kind="build" data-state="queued"' in drawn
    assert line("ui.build_waits") in drawn
    # The queue names the task; it is no video with a prompt.
    assert tab.worker.store.get(build.id).prompt == ""
    queue = respond(QueuePanel(tab.worker, {}, Path("outputs")), Call())["parts"]["list"]
    assert f"<bdi>{title}</bdi>" in queue and "none" not in queue
    # Its button waits until it has ended.
    end = time.monotonic() + 60
    while "Looking" in (parts := tab.parts(chosen)["components"]):
        assert time.monotonic() < end
    button = r'aria-label="Build engines for the VAE decoder" aria-disabled="(true|false)"'
    assert re.findall(button, parts) == ["true"]
    assert tab.press("cancel", build.id) == "Cancelled."
    assert build.state == "cancelled"
    assert tab.press("cancel", hold.id) == "Cancelled."
    tab.settle()
    assert tab.store.index() == []


FILES: dict[str, bytes] = {
    "text.plan": b"hello, this is no plan",
    "empty.onnx": b"",
    "zeros.plan": bytes(5000),
    "short.plan": b"ftrt" + bytes(8),
    "cut.plan": struct.pack("<4sIQQ4B", b"ftrt", 0, 1, 10**6, 10, 16, 0, 0) + bytes(400),
    "noise.bin": bytes(range(256)),
}


@pytest.mark.slow
@pytest.mark.parametrize("take", [True, False], ids=["import", "inspect"])
@pytest.mark.parametrize(
    ("file", "code", "data"),
    [
        ("text.plan", "text", {}),
        ("empty.onnx", "empty", {}),
        ("zeros.plan", "not_a_plan", {}),
        ("short.plan", "truncated", {"size": 12}),
        ("cut.plan", "incomplete", {"size": 428, "whole": 1_000_000}),
        ("noise.bin", "unknown_suffix", {}),
        ("link.onnx", "link", {"target": "/etc/passwd"}),
        ("folder.plan", "folder", {}),
        ("none.plan", "unreadable", {"error": "No such file or directory"}),
    ],
)
def test_an_invalid_file_is_rejected_with_a_remedy(
    tab: Tab, tmp_path: Path, file: str, code: str, data: dict[str, Any], take: bool
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.plan").mkdir()
    (tmp_path / "link.onnx").symlink_to("/etc/passwd")
    assert tab.bring(str(tmp_path / file), take=take) == message(f"engine.import_{code}", file=file, **data)
    assert tab.worker.tasks() == []


def test_a_file_of_a_missing_library_is_rejected(tab: Tab, tmp_path: Path) -> None:
    plan = tmp_path / "whole.plan"
    plan.write_bytes(struct.pack("<4sIQQ4B", b"ftrt", 0, 1, 428, 10, 16, 0, 0) + bytes(400))
    if probe().gpus:
        pytest.skip("this machine may run TensorRT")
    no_gpu = fact("machine.no_gpu")
    assert tab.bring(str(plan)) == message("engine.import_no_library", file="whole.plan", cause=no_gpu)
    assert tab.worker.tasks() == []


@pytest.mark.parametrize("take", [True, False], ids=["import", "inspect"])
@pytest.mark.parametrize("trusted", [False, None, 1, "true", True, [], {}])
def test_untrusted_files_are_not_opened(tab: Tab, tmp_path: Path, trusted: object, take: bool) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(bytes(range(256)))
    expected = message("ui.engine_file_untrusted", file="x.onnx")
    assert tab.bring(str(path), "auto", trusted, take=take) == expected
    assert tab.worker.tasks() == []


@pytest.mark.skipif(os.name != "posix", reason="files have no owners here")
def test_a_file_of_another_user_is_not_opened(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(bytes(range(256)))
    if os.getuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr("os.getuid", lambda: path.stat().st_uid + 1)
    assert tab.bring(str(path)) == message("ui.engine_file_of_another_user", file="x.onnx")
    assert tab.worker.tasks() == []


@pytest.mark.parametrize("file", [None, 7, "", "  ", "a\x00b", "a\nb", "/" + "x" * 5000, [], {}], ids=repr)
def test_a_missing_path_is_rejected(tab: Tab, file: object) -> None:
    assert tab.bring(file) == message("ui.engine_file_missing", kinds=".trt, .plan, .engine or .onnx")


@pytest.mark.parametrize("file", ["x.plan", "../x.plan", "~nobody-of-that-name/x.plan"])
def test_a_relative_path_is_rejected(tab: Tab, file: str) -> None:
    example = Path.home() / "transformer.plan"
    assert tab.bring(file) == message("ui.engine_file_relative", path=file, example=example)


@pytest.mark.parametrize("part", [None, 3, "", "eyes", "../x", [], {}])
def test_a_component_belongs_to_the_model(tab: Tab, part: object) -> None:
    missing = {"model": "wan2.2-a14b", "component": "such component"}
    assert tab.bring("/x.onnx", part) == message("ui.no_such_component", **missing)


@pytest.mark.slow
def test_an_import_is_queued_once_and_shown(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "noise.onnx"
    path.write_bytes(bytes(range(256)) * 20)
    tab.worker.add_task(PRUNE, sentence("Hold"))
    # As a file manager gives it.
    assert tab.bring(f' "{path}" ').startswith(line("task.import", file="noise.onnx"))
    assert tab.bring(str(path)) == message("ui.task_exists")
    assert tab.bring(str(path), take=False).startswith(line("task.inspect", file="noise.onnx"))
    drawn = tab.parts()["tasks"]
    assert 'data-kind="import" data-state="queued"' in drawn and 'data-kind="inspect"' in drawn
    assert tab.press("cancel", tab.worker.tasks()[-1].id) == "Cancelled."
    tab.settle()
    taken = tab.worker.tasks()[1]
    assert (taken.kind, taken.state) == ("import", "failed")
    assert taken.result is not None and taken.result.code == "engine.onnx_damaged"
    assert tab.store.index() == []


def test_an_import_only_needs_a_valid_model(tab: Tab) -> None:
    odd = [GOOD[name] if name != "width" else 65 for name in form.NAMES]
    example = Path.home() / "transformer.plan"
    assert tab.bring("x.plan", values=odd) == message("ui.engine_file_relative", path="x.plan", example=example)
    other = [GOOD[name] if name != "model" else "none" for name in form.NAMES]
    assert tab.bring("/x.plan", values=other) == message("model.not_offered", models=["wan2.2-a14b", "wan2.1"])
    assert tab.bring("/x.plan", values=[]) == message("form.incomplete")


def test_findings_are_escaped(tab: Tab, tmp_path: Path) -> None:
    store, work = JobStore(None), InspectEngine(path=Path("x"), model="tiny")
    added = store.add_work("task", sentence("Inspect x"), tmp_path, work.model_dump(mode="json"))
    store.order.claim("00000000.0")
    store.log.append(
        added.id, {"event": "TaskFound", "facts": [sentence("takes <b>x</b> (1, 2)").model_dump(mode="json")]}
    )
    task = Task(added, store)
    task.refresh()
    assert "<li>takes &lt;b&gt;x&lt;/b&gt; (1, 2)</li>" in tasks_html([task], tab.worker)
    other = store.add_work("task", sentence("P"), tmp_path, PRUNE.model_dump(mode="json"))
    assert 'class="found" aria-label="Findings" hidden' in tasks_html([Task(other, store)], tab.worker)


def test_the_number_of_open_tasks_is_limited(tab: Tab) -> None:
    for number in range(40):
        tab.worker.add_task(PRUNE, sentence(f"Hold {number}"))
    assert tab.press("prune", "") == message("ui.too_many_tasks", maximum=20)


def test_unchanged_parts_are_not_sent_again(tab: Tab) -> None:
    insert(tab.store, 1)
    end = time.monotonic() + 60
    while "Looking" in tab.parts()["components"]:
        assert time.monotonic() < end
    drawn = respond(tab.panel, Call(form=VALUES))["digests"]
    assert set(drawn) == {"components", "choices", "tasks", "storage", "table"}
    assert respond(tab.panel, Call(form=VALUES, drawn=drawn))["parts"] == {}
    # A task that proceeds leaves the other parts alone.
    tab.worker.add_task(PRUNE, sentence("Quick"))
    tab.settle()
    reply = respond(tab.panel, Call(form=VALUES, drawn=drawn))
    assert set(reply["parts"]) == {"tasks"} and "Quick" in reply["parts"]["tasks"]
    insert(tab.store, 2)
    assert "table" in tab.parts(drawn=drawn | reply["digests"])


def test_each_component_shows_its_build_time(tab: Tab) -> None:
    chosen = GOOD | {"backend_vae": "pytorch", "backend_transformer": "onnxruntime", "backend_text_encoder": "auto"}
    values = [chosen[name] for name in form.NAMES]
    end = time.monotonic() + 60
    while "Looking" in (parts := tab.parts(values)["components"]):
        assert time.monotonic() < end
    expected = re.findall(r'class="state">([^<]*)<', parts)
    assert [words.split(",")[0] for words in expected] == ["not built yet"] * 3 + ["none needed"]
    assert re.fullmatch(r"not built yet, about \d+ s to build with ONNX Runtime", expected[1])
    # Build tries every backend where the choice is automatic.
    tried = "ONNX Runtime and Inductor" if cpp_compiler() else "ONNX Runtime"
    assert re.fullmatch(rf"not built yet, about \d+ (s|min) to build with {tried}", expected[0])


def test_only_what_is_missing_is_offered_to_build(tab: Tab) -> None:
    chosen = GOOD | {"backend_vae": "pytorch"}
    values = [chosen[name] for name in form.NAMES]
    end = time.monotonic() + 60
    while "Looking" in (parts := tab.parts(values)["components"]):
        assert time.monotonic() < end
    rows = dict(re.findall(r'data-component="([a-z_0-9]+)">(.*?)</li>', parts, re.DOTALL))
    assert 'aria-label="Build engines for the Text encoder"' in rows["text_encoder"]
    assert 'data-target="vae" ' not in rows["vae"].split("<details")[0]
    # A backend that this machine lacks is listed with the reason.
    if not probe().gpus:
        assert re.search(r'aria-disabled="true">Build with TensorRT<small>[^<]*GPU[^<]*</small>', rows["vae"])
    assert 'aria-label="Build all"' in parts and "Building what is missing takes about " in parts
    assert tab.press("build", "vae=onnxruntime", values).endswith(": started.")
    assert tab.worker.tasks()[-1].title.endswith(" with ONNX Runtime")


@pytest.mark.parametrize("target", ["all=inductor", "vae=pytorch", "vae=x", "eyes=inductor", "vae=inductor=x"])
def test_backends_to_build_with_are_known(tab: Tab, target: str) -> None:
    assert tab.press("build", target) == UNKNOWN
    assert tab.worker.tasks() == []


def test_an_import_offers_the_components_of_the_model(tab: Tab) -> None:
    for model, expected in (("wan2.2-a14b", True), ("wan2.1", False)):
        values = [model if name == "model" else GOOD[name] for name in form.NAMES]
        options = tab.parts(values)["choices"]
        assert 'value="auto"' in options and 'value="vae"' in options
        assert ('value="transformer_2"' in options) is expected


def test_every_build_of_a_task_is_shown(tab: Tab, tmp_path: Path) -> None:
    store = JobStore(None)
    added = store.add_work("task", sentence("Build"), tmp_path, PRUNE.model_dump(mode="json"))
    store.order.claim("00000000.0")
    failed = Fact("engine.file_missing", {"file": "x"})
    builds = [
        BuildProgress(program="text_encoder", backend="inductor", expected=30, state="done", took=42, speedup=2.5),
        BuildProgress(program="transformer", backend="inductor", state="failed", took=9, problem=failed),
        BuildProgress(program="vae_first", backend="onnxruntime", expected=30, state="running"),
        BuildProgress(program="vae_next", backend="onnxruntime", expected=80),
    ]
    event = {"event": "TaskBuilds", "builds": [one.model_dump(mode="json") for one in builds]}
    store.log.append(added.id, event)
    task = Task(added, store)
    task.refresh()
    drawn = tasks_html([task], tab.worker)
    for expected in (
        "<span>Text encoder, Inductor</span> <span>built in 42 s, 2.50 times as fast as PyTorch</span>",
        "<span>Transformer, Inductor</span> <span>failed: x is missing.",
        "<span>VAE decoder, first step, ONNX Runtime</span> <span>running for 0.",
        "<span>waiting, about 1 min</span>",
        "2 of 4 engines done, 51 s so far, about 110 s left of about 3 min.",
    ):
        assert expected in drawn, expected
    # Two transformers with engines of their own are told apart; a shared engine is not.
    experts = [
        BuildProgress(program="transformer", backend="onnxruntime", component="transformer"),
        BuildProgress(program="transformer", backend="onnxruntime", component="transformer_2"),
        BuildProgress(program="transformer", backend="inductor", component="transformer"),
    ]
    event = {"event": "TaskBuilds", "builds": [one.model_dump(mode="json") for one in experts]}
    store.log.append(added.id, event)
    task.refresh()
    drawn = tasks_html([task], tab.worker)
    names = re.findall(r"<span>([^<]*), (?:ONNX Runtime|Inductor)</span>", drawn)
    assert names == ["High-noise transformer", "Low-noise transformer", "Transformer"]
    # Of another version.
    store.log.append(added.id, {"event": "TaskBuilds", "builds": [{"x": 1}]})
    task.refresh()
    assert len(task.builds) == 3


@pytest.mark.parametrize("drawn", [{"table": 5}, {"table": None}, {"": []}, {"table": "abc"}], ids=repr)
def test_invalid_digests_are_ignored(tab: Tab, drawn: dict[str, Any]) -> None:
    assert len(tab.parts(drawn=drawn)) == 5


def test_a_row_shows_every_property(tiny: Callable[[str], ModelSpec]) -> None:
    made = record(
        key(profiles=(ShapeProfile.fixed((3, 4, 8)),), backend="tensorrt", precision="float16"),
        model="<b>tiny</b>",
        pinned=True,
        file_bytes=14_500_000,
    )
    spec = tiny("wan2.1")
    html = table_html(
        [
            Entry(
                made,
                spec,
                [Fact("engine.differs_version", {"package": "PyTorch", "found": "2.0", "here": "2.1"})],
                BreakEven(60, 2),
            )
        ]
    )
    for expected in (
        "64 × 32, 9 frames",
        "TensorRT, float16",
        "14.5 MB",
        "3.00 times as fast as PyTorch",
        "1e-06 of 1e-04",
        "in 1 min 0 s",
        "made up for after 30 videos",
        "pinned",
        "Unpin",
        "Stale: It was built with PyTorch 2.0; 2.1 is installed.",
        'data-state="stale"',
        f"<bdi>{spec.title}</bdi>",
    ):
        assert expected in html, expected
    unknown = table_html([Entry(made, None, [], None)])
    assert "&lt;b&gt;tiny" in unknown and "<b>tiny" not in unknown


@pytest.mark.parametrize(
    ("program", "profile", "words"),
    [
        ("text_encoder", ShapeProfile.fixed((1, 1, 1)), "any size"),
        ("vae_next", ShapeProfile.fixed((1, 4, 8)), "64 × 32, any length"),
        ("vae_clip", ShapeProfile.fixed((3, 4, 8)), "64 × 32, 9 frames"),
        ("transformer", ShapeProfile((1, 4, 8), (3, 4, 8), (3, 8, 8)), "64 × 32, 1 frame to 64 × 64, 9 frames"),
    ],
)
def test_sizes_are_in_pixels_and_frames(
    tiny: Callable[[str], ModelSpec], program: str, profile: ShapeProfile, words: str
) -> None:
    made = record(key(program=program, profiles=(profile,)))
    assert supported_sizes(made, tiny("wan2.1")) == words
    if program != "text_encoder":
        assert "latent" in supported_sizes(made, None)


def test_a_decoder_of_sound_has_a_length(tiny: Callable[[str], ModelSpec]) -> None:
    made = record(key(program="vocoder", profiles=(ShapeProfile.fixed((50, 1, 1)),)))
    assert supported_sizes(made, tiny("ltx-2")) == "2.0 s of sound"
    assert supported_sizes(made, None) == "50 latents of sound"


def test_an_imported_engine_is_marked(tiny: Callable[[str], ModelSpec]) -> None:
    made = record(key(builder="imported", program="vae_clip"), build_seconds=0.0)
    html = table_html([Entry(made, tiny("wan2.1"), [], BreakEven(0, 2))])
    for expected in ("VAE decoder, whole clips", "imported<", "saves 2.0 s a video<", "imported again from its file"):
        assert expected in html, expected


def test_a_broken_engine_shows_the_reason() -> None:
    broken = record(key(), problem=Fact("engine.file_changed", {"file": "engine.pt2"}), verified=False)
    unreadable = record(UNREADABLE_KEY, id="0" * 16, problem=Fact("engine.file_missing", {"file": "engine.json"}))
    html = table_html([Entry(one, None, [], None) for one in (broken, unreadable)])
    assert all(paragraph(one.problem) in html for one in (broken, unreadable) if one.problem)
    assert html.count('data-state="broken"') == 2


def test_disk_usage_is_relative_to_the_limit() -> None:
    assert "width:25.0%" in storage_html(250, 1000, 2)
    assert "2 engines, 250 B of at most 1.0 KB" in storage_html(250, 1000, 2)
    assert "width:100.0%" in storage_html(5, 0, 1)
    assert "width:0.0%" in storage_html(0, 0, 0)
