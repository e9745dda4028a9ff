"""The Engines tab's handlers, which answer raw HTTP too, and what the tab shows."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.jobs.chores import Chore
from runtime.jobs.worker import Worker
from runtime.manager.engine_index import UNREADABLE_KEY
from runtime.manager.machine import probe
from runtime.manager.shapes import ShapeProfile
from runtime.models.spec import ModelSpec
from runtime.ui import form, shelf
from runtime.ui.foresight import Foresight
from runtime.ui.library import Library
from runtime.ui.payoff import Payoff
from tests.engines.made import key
from tests.ui.records import record
from tests.ui.test_foresight import insert
from tests.ui.test_form import GOOD

VALUES = [GOOD[name] for name in form.NAMES]
NOWHERE = "There is no such action or engine. Load the page again."


@dataclass(frozen=True)
class Tab:
    """The tab over a worker and a library of their own."""

    library: Library
    worker: Worker
    store: EngineStore

    def press(self, act: object, of: object, values: list[Any] = VALUES) -> str:
        """Press a button and return what is said."""
        return self.raw(json.dumps({"act": act, "of": of}), values)

    def raw(self, sent: object, values: list[Any] = VALUES) -> str:
        """Send anything and return what is said."""
        said = str(self.library.act(sent, *values)[4])
        return said.partition(">")[2].removesuffix("</p>")

    def settle(self) -> None:
        """Wait until nothing waits or runs."""
        end = time.monotonic() + 60
        while any(chore.open for chore in self.worker.chores()):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def tab(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Tab]:
    store = EngineStore(tmp_path / "engines", 10**9)
    engines = EngineService(store, probe(), tmp_path)
    worker = Worker(tmp_path / "weights", tmp_path / "outputs", engines)
    models = {name: tiny(name) for name in ("wan2.2-a14b", "wan2.1")}
    yield Tab(Library(worker, engines, models, Foresight(engines, worker.machine, worker.history)), worker, store)
    worker.close()


def test_pin_unpin_delete(tab: Tab) -> None:
    first, second = insert(tab.store, 1), insert(tab.store, 2)
    assert tab.press("pin", first) == "Pinned: transformer."
    assert [one.id for one in tab.store.index() if one.pinned] == [first]
    assert tab.press("unpin", first) == "Unpinned: transformer."
    assert not any(one.pinned for one in tab.store.index())
    assert tab.press("delete", first).startswith(f"Delete transformer {first}: ")
    tab.settle()
    assert [one.id for one in tab.store.index()] == [second]
    drawn = tab.library.look("", *VALUES)
    assert f'data-engine="{second}"' in drawn[3]
    assert first not in drawn[3]


@pytest.mark.parametrize(
    "sent",
    [None, 5, "", "{", "null", "[]", "[" * 900, "{}", '{"act": "delete"}', '{"act": 1, "of": 2}', "9" * 10_000],
    ids=lambda value: str(value)[:20],
)
def test_what_makes_no_sense_does_nothing(tab: Tab, sent: object) -> None:
    kept = insert(tab.store, 1)
    assert tab.raw(sent) == NOWHERE
    assert [one.id for one in tab.store.index()] == [kept]


@pytest.mark.parametrize("act", ["delete", "verify", "pin", "unpin"])
@pytest.mark.parametrize("of", ["", "../../etc", "0", "*", "all", "0" * 15, "0" * 17, "G" * 16, "0" * 15 + "\n"])
def test_only_whole_ids_are_taken(tab: Tab, act: str, of: str) -> None:
    kept = insert(tab.store, 1)
    assert tab.press(act, of) == NOWHERE
    # A beginning will do on the command line; here a button names one engine.
    assert tab.press(act, kept[:8]) == NOWHERE
    assert tab.worker.chores() == []
    assert [(one.id, one.pinned) for one in tab.store.index()] == [(kept, False)]


def test_an_engine_that_is_gone_is_named(tab: Tab) -> None:
    assert tab.press("delete", "0" * 16).startswith("There is no engine &#x27;0000000000000000&#x27;.")


@pytest.mark.parametrize(("act", "of"), [("build", "eyes"), ("cancel", "../x"), ("launch", "all"), ("BUILD", "all")])
def test_unknown_actions_do_nothing(tab: Tab, act: str, of: str) -> None:
    assert tab.press(act, of) == NOWHERE
    assert tab.worker.chores() == []


def test_a_form_that_cannot_be_builds_nothing(tab: Tab) -> None:
    odd = [GOOD[name] if name != "width" else 65 for name in form.NAMES]
    assert "multiples of 16. Take 64 or 80." in tab.press("build", "all", odd)
    assert tab.raw(json.dumps({"act": "build", "of": "all"}), []) == "The form is not whole. Load the page again."
    assert "multiples of 16" in tab.library.look("", *odd)[0]
    assert tab.worker.chores() == []


def test_a_build_is_shown_and_cancelled_and_not_asked_for_twice(tab: Tab) -> None:
    hold = Chore("prune", "Hold", lambda chore, _free: wait_for_cancel(chore))
    tab.worker.add_chore(hold)
    chosen = [GOOD[name] if name != "backend_vae" else "onnxruntime" for name in form.NAMES]
    assert tab.press("build", "vae", chosen).endswith(": waiting for its turn.")
    assert tab.press("build", "vae", chosen) == "That is waiting or running already. See Work."
    build = tab.worker.chores()[-1]
    assert build.title.startswith("Build engines for VAE decoder of ")
    drawn = tab.library.look("", *VALUES)[1]
    assert f'data-chore="{build.id}" data-kind="build" data-state="queued"' in drawn
    assert "1 ahead in the queue." in drawn
    assert tab.press("cancel", build.id) == "Cancelled."
    assert build.state == "cancelled"
    assert tab.press("cancel", hold.id) == "Cancelled."
    tab.settle()
    assert tab.store.index() == []


def wait_for_cancel(chore: Chore) -> str:
    """Take as long as nobody cancels."""
    while True:
        chore.cancel.check()
        time.sleep(0.005)


def test_the_line_does_not_grow_without_end(tab: Tab) -> None:
    for number in range(40):
        tab.worker.add_chore(Chore("prune", f"Hold {number}", lambda chore, _free: wait_for_cancel(chore)))
    assert tab.press("prune", "") == "Too much work is waiting. Let some of it end, or cancel some."


def test_a_look_at_what_is_shown_already_draws_nothing(tab: Tab) -> None:
    insert(tab.store, 1)
    end = time.monotonic() + 60
    shown = tab.library.look("", *VALUES)[5]
    while (drawn := tab.library.look(shown, *VALUES))[5] != gr.skip():
        assert time.monotonic() < end
        shown = drawn[5]
    assert drawn == (gr.skip(),) * 6
    # Work that moves on leaves the table alone.
    tab.worker.add_chore(Chore("prune", "Quick", lambda *_: "Done."))
    tab.settle()
    parts, work, disk, table, _, shown_now = tab.library.look(shown, *VALUES)
    assert (parts, disk, table) == (gr.skip(),) * 3
    assert "Quick" in work
    insert(tab.store, 2)
    assert tab.library.look(shown_now, *VALUES)[3] != gr.skip()


def test_each_part_says_what_building_would_take(tab: Tab) -> None:
    chosen = GOOD | {"backend_vae": "pytorch", "backend_transformer": "onnxruntime"}
    values = [chosen[name] for name in form.NAMES]
    end = time.monotonic() + 60
    while "Looking" in (parts := tab.library.look("", *values)[0]):
        assert time.monotonic() < end
    said = re.findall(r'data-label="Engines">([^<]*)<', parts)
    assert [words.split(",")[0] for words in said] == ["not built yet"] * 3 + ["none needed"]
    assert re.fullmatch(r"not built yet, about \d+ s to build on ONNX Runtime", said[1])


@pytest.mark.parametrize("shown", [None, 7, "", "a", "a b c d e f", [], {}])
def test_what_is_said_to_be_shown_is_not_trusted(tab: Tab, shown: object) -> None:
    assert all(part != gr.skip() for part in tab.library.look(shown, *VALUES)[:4])


def test_a_row_says_it_all(tiny: Callable[[str], ModelSpec]) -> None:
    made = record(
        key(profiles=(ShapeProfile.fixed((3, 4, 8)),), backend="tensorrt", precision="float16"),
        model="<b>tiny</b>",
        pinned=True,
        file_bytes=14_500_000,
    )
    html = shelf.table([shelf.Entry(made, tiny("wan2.1"), ["built with PyTorch 2.0, here 2.1"], Payoff(60, 2))])
    for expected in (
        "64 × 32, 9 frames",
        "TensorRT, float16",
        "14.5 MB",
        "3.0 times PyTorch",
        "1e-06 of 1e-04",
        "in 1 min 0 s",
        "after 30 videos",
        "pinned",
        "Unpin",
        "Stale: built with PyTorch 2.0, here 2.1.",
        'data-state="stale"',
        "&lt;b&gt;tiny",
    ):
        assert expected in html, expected
    assert "<b>tiny" not in html


@pytest.mark.parametrize(
    ("program", "profile", "words"),
    [
        ("text_encoder", ShapeProfile.fixed((1, 1, 1)), "any size"),
        ("vae_next", ShapeProfile.fixed((1, 4, 8)), "64 × 32, any length"),
        ("transformer", ShapeProfile((1, 4, 8), (3, 4, 8), (3, 8, 8)), "64 × 32, 1 frame to 64 × 64, 9 frames"),
    ],
)
def test_sizes_are_in_pixels_and_frames(
    tiny: Callable[[str], ModelSpec], program: str, profile: ShapeProfile, words: str
) -> None:
    made = record(key(program=program, profiles=(profile,)))
    assert shelf.serves(made, tiny("wan2.1")) == words
    if program != "text_encoder":
        assert "latent" in shelf.serves(made, None)


def test_a_broken_engine_says_why() -> None:
    broken = record(key(), problem="engine.pt2 is cut short", verified=False)
    unreadable = record(UNREADABLE_KEY, id="0" * 16, problem="engine.json is missing")
    html = shelf.table([shelf.Entry(one, None, [], None) for one in (broken, unreadable)])
    assert "Not used: engine.pt2 is cut short." in html
    assert "Unreadable" in html and "Not used: engine.json is missing." in html


def test_disk_use_is_a_share_of_the_cap() -> None:
    assert "width:25.0%" in shelf.disk(250, 1000, 2)
    assert "2 engines, 250 B of at most 1.0 KB" in shelf.disk(250, 1000, 2)
    assert "width:100.0%" in shelf.disk(5, 0, 1)
    assert "width:0.0%" in shelf.disk(0, 0, 0)
