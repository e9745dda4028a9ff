"""The panel Cluster over a real job queue: what it shows, the key, bad input; and the start of the web app with it."""

import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from runtime.cli.main import run
from runtime.core.errors import StoreError
from runtime.core.facts import Fact, render
from runtime.core.settings import Settings
from runtime.queue.instances import Instance
from runtime.queue.job_queue import JobQueue
from runtime.server.cluster.cluster_key import make_key
from runtime.server.cluster.problems import Problem, Problems, problems_of
from runtime.server.cluster.views import ClusterView, RayNode, VideoQueue, cluster_view
from runtime.ui.cluster_panel import ClusterPanel
from runtime.ui.formatting import paragraph
from runtime.ui.panels import Call, respond
from tests.cluster_views import queue_in, sample_view
from tests.facts import fact
from tests.ui.page_texts import UNKNOWN, line

HOSTILE = "<img src=x onerror=hit()> \" ' & “"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    with queue_in(tmp_path) as made:
        yield made


def parts(queue: JobQueue, view: ClusterView, settings: Settings, **state: Any) -> dict[str, str]:
    """Return the HTML of the panel's parts."""
    panel = ClusterPanel(lambda: view, queue, settings)
    return dict(respond(panel, Call(view=state))["parts"])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, host="192.168.1.5", port=7861)


def test_machines_and_queue_are_shown(queue: JobQueue, settings: Settings) -> None:
    shown = parts(queue, sample_view(queue), settings)
    machines = shown["machines"]
    assert "1 video running on 3 workers" in machines
    assert "2 × NVIDIA H100 80GB HBM3, 80.0 GB each" in machines and "NVIDIA GeForce RTX 4090, 24.0 GB" in machines
    assert "a red boat at sunset, number 1" in machines and "Denoising, 3 of 4 steps" in machines
    assert "Idle, Diorama is loaded" in machines
    assert line("engine.differs_version", package="torch", found="2.11.0", here="2.13.0") in machines
    assert "Starting…" in machines and "Disconnected" in machines and "Has no GPU" in machines
    queued = shown["queue"]
    assert "<bdi>alpha</bdi>, now" in queued and "more video" in queued
    for place, data in (
        ("loaded", {"model": "Diorama", "host": "alpha"}),
        ("sent", {"model": "Diorama", "host": "beta"}),
        ("gpus", {"gpus": 2, "most": 1}),
        ("memory", {"needed": 100 << 30, "most": 80 << 30}),
        ("held", {}),
    ):
        assert line(f"server.cluster_place_{place}", **data) in queued


def test_machines_that_run_nothing_say_why(queue: JobQueue, settings: Settings) -> None:
    refused = Fact("server.cluster_refused", {"found": "Tandem <1>", "wanted": "Tandem 2"})
    failed = RayNode("b" * 12, "beta", True, Fact("server.cluster_start_failed", {"reason": "No module named 'x'"}))
    view = cluster_view(queue, VideoQueue(), [failed], refused=[Problem(host="<gamma>", fact=refused)])
    machines = parts(queue, view, settings)["machines"]
    assert failed.problem is not None and escape(paragraph(failed.problem)) in machines
    assert "&lt;gamma&gt;" in machines and '<span class="tag">Refused</span>' in machines
    assert escape(paragraph(refused)) in machines


def test_problems_are_stored_for_the_head_that_runs(tmp_path: Path) -> None:
    store = tmp_path / "jobs.sqlite"
    found = (Problem(host="beta", fact=Fact("server.cluster_start_died")),)
    with Instance(store) as head:
        assert problems_of(tmp_path, store) == ()
        Problems(head=head.id, machines=found).write(tmp_path)
        assert problems_of(tmp_path, store) == found
        assert problems_of(tmp_path, None) == ()
    assert problems_of(tmp_path, store) == ()  # the head ended
    with Instance(store) as head:
        Problems(head=head.id, machines=found).write(tmp_path)
        Problems(head=head.id).write(tmp_path)
        assert problems_of(tmp_path, store) == () and list((tmp_path / "cluster").iterdir()) == []
        for damaged in (b"", b"{", b'{"head": 5}', b"\xff", b"[" * 10_000):
            (tmp_path / "cluster" / "problems.json").write_bytes(damaged)
            assert problems_of(tmp_path, store) == ()


def test_prompts_and_names_are_escaped(queue: JobQueue, settings: Settings) -> None:
    view = sample_view(queue, HOSTILE)
    nodes = tuple(node.model_copy(update={"name": HOSTILE}) for node in view.nodes)
    going = tuple(one.model_copy(update={"name": HOSTILE}) for one in view.queue)
    view = view.model_copy(update={"nodes": nodes, "queue": going})
    for html in parts(queue, view, settings).values():
        assert "<img" not in html
    assert "<img src=x" in unescape(parts(queue, view, settings)["machines"])


def test_the_key_is_in_the_page_only_when_it_is_asked_for(queue: JobQueue, settings: Settings) -> None:
    view, key = sample_view(queue), make_key(settings.cache_dir)
    hidden = parts(queue, view, settings)
    assert not any(key in html for html in hidden.values())
    assert "worker --join 192.168.1.5:7861</code>" in hidden["join"] and str(settings.cache_dir) in hidden["join"]
    shown = parts(queue, view, settings, key=True)
    assert f"TANDEM_CLUSTER_KEY={key} " in shown["join"] and key not in shown["machines"] + shown["queue"]
    # Anything else that a program sends shows nothing.
    for value in ("yes", 1, [True], {"key": True}, None):
        assert key not in parts(queue, view, settings, key=value)["join"]


@pytest.mark.parametrize(
    ("host", "address", "warns"),
    [("127.0.0.1", "127.0.0.1:7861", True), ("fd00::5", "[fd00::5]:7861", False), ("0.0.0.0", ":7861", False)],
)
def test_the_command_has_an_address_that_can_be_reached(
    queue: JobQueue, settings: Settings, host: str, address: str, warns: bool
) -> None:
    html = parts(queue, sample_view(queue), settings.model_copy(update={"host": host}))["join"]
    assert f"{address}</code>" in html and "0.0.0.0" not in html
    assert ("hidden" not in html.partition("Only this machine can join")[0].rpartition("<p")[2]) is warns


def test_a_damaged_key_and_a_store_that_fails_are_reported(queue: JobQueue, settings: Settings) -> None:
    (settings.cache_dir / "cluster.key").write_text("short", encoding="ascii")

    def fails() -> ClusterView:
        raise StoreError("queue.store_locked", file="jobs.sqlite")

    shown = respond(ClusterPanel(fails, queue, settings), Call(view={"key": True}))["parts"]
    assert line("server.cluster_key_invalid", source=settings.cache_dir / "cluster.key") in shown["join"]
    assert "class=" in shown["machines"] and "queue" not in shown


@pytest.mark.parametrize("action", ["cancel", "key", "", "../refresh"])
def test_unknown_actions_are_refused(queue: JobQueue, settings: Settings, action: str) -> None:
    reply = respond(ClusterPanel(lambda: sample_view(queue), queue, settings), Call(action=action))
    assert reply["error"] is True and reply["message"] == UNKNOWN


def test_without_ray_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert run(["--cluster", "--no-browser"]) == 2
    expected = render(fact("server.cluster_no_ray"))
    assert capsys.readouterr().err == f"Error: {expected.what}\nTo do: {expected.remedy}\n"
