"""The list of LoRA files in Make."""

from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from runtime.models.loras import checked, listed
from runtime.models.spec import ModelSpec
from runtime.ui import form
from runtime.ui.loras_panel import MOST_LISTED, LorasPanel
from runtime.ui.panels import Call, respond
from tests.lora_files import factors, peft, save
from tests.ui.test_form import GOOD

VALUES = [GOOD[name] for name in form.NAMES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loras" / "styles").mkdir(parents=True)
    return tmp_path / "loras"


def html(panel: LorasPanel, **changes: str) -> str:
    """Return the list for a form's values."""
    values = [changes.get(name, value) for name, value in zip(form.NAMES, VALUES, strict=True)]
    return unescape(respond(panel, Call(form=values))["parts"]["list"])


def test_files_are_listed_with_what_does_not_fit(tiny: Callable[[str], ModelSpec], folder: Path) -> None:
    spec, other = tiny("wan2.2-a14b"), tiny("wan2.1")
    fitting = peft(factors(spec.transformer))
    for name in ("styles/ink", "boat_high_noise", "lightning_4steps"):
        save(folder / f"{name}.safetensors", fitting)
    (folder / "broken.safetensors").write_bytes(b"x" * 100)
    (folder / "notes.txt").write_text("x", encoding="utf-8")
    (folder / "out.safetensors").symlink_to(Path("/etc/hostname"))
    models = {one.name: one for one in (spec, other)}
    panel = LorasPanel({"wan2.2-a14b": spec, "wan2.1": other}, folder.parent)
    assert [one.name for one in listed(folder.parent)] == [
        "boat_high_noise",
        "broken",
        "lightning_4steps",
        "styles/ink",
    ]
    view = html(panel)
    assert view.count(" data-problem>") == 1 and view.count("broken.safetensors") == 1 and "cannot be used" in view
    assert "high-noise expert" in view and "4 steps" in view and str(folder) in view
    assert "notes" not in view and "lora-search" not in view
    # One transformer has no high-noise expert.
    view = html(panel, model="wan2.1")
    assert "is for the high-noise expert, and" in view and models
    assert respond(panel, Call("delete", "styles/ink", form=VALUES))["error"]


def test_a_changed_file_is_checked_again(tiny: Callable[[str], ModelSpec], folder: Path) -> None:
    spec = tiny("wan2.2-a14b")
    panel = LorasPanel({"wan2.2-a14b": spec}, folder.parent)
    path = folder / "a.safetensors"
    path.write_bytes(b"x" * 100)
    assert " data-problem>" in html(panel)
    save(path, peft(factors(spec.transformer)))
    assert " data-problem>" not in html(panel)
    (one,) = listed(folder.parent)
    assert checked(one, spec).problem is None


def test_an_empty_or_missing_folder_says_where_files_belong(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    panel = LorasPanel({"wan2.2-a14b": tiny("wan2.2-a14b")}, tmp_path / "none")
    assert f"Put .safetensors files into <code>{tmp_path / 'none' / 'loras'}</code>" in html(panel)


def test_names_are_escaped_and_long_lists_are_cut(tiny: Callable[[str], ModelSpec], folder: Path) -> None:
    for number in range(MOST_LISTED + 3):
        (folder / f"{number:03}.safetensors").write_bytes(b"")
    (folder / "0<b>.safetensors").write_bytes(b"")
    panel = LorasPanel({"wan2.2-a14b": tiny("wan2.2-a14b")}, folder.parent)
    raw = respond(panel, Call(form=VALUES))["parts"]["list"]
    assert "0&lt;b&gt;" in raw and "0<b>" not in raw
    assert "4 more files in the folder" in raw and "lora-search" in raw
