"""The parts of the sheet Settings that the server draws."""

from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import segno

from runtime.core.settings import Settings
from runtime.engines.store import EngineStore
from runtime.models.catalogue import find
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.server.visitor_limits import describe_limits, limits_of
from runtime.ui import form
from runtime.ui.panels import Call, respond
from runtime.ui.settings_panel import SettingsPanel, disk_uses
from runtime.ui.sharing import Sharing
from tests.ui.page_texts import UNKNOWN, line

LINK = "https://abc.example"


def panel(cache_dir: Path, sharing: Any = None, **settings: Any) -> SettingsPanel:
    """Return the panel over an empty history."""
    chosen = Settings(cache_dir=cache_dir, **settings)
    worker = cast("JobQueue", SimpleNamespace(store=JobStore(None)))
    models = {"diorama": find("diorama", chosen.weights_dir)}
    return SettingsPanel(worker, EngineStore(chosen.engines_dir, 10**9), models, chosen, sharing)


def link(state: str = "open", **values: Any) -> Sharing:
    """Return a share link in a state, without its processes."""
    sharing = object.__new__(Sharing)
    vars(sharing).update(
        {"state": state, "url": LINK, "problem": "", "generated": True, "user": "visitor", "password": "bado"} | values
    )
    return sharing


def sharing_html(shown: SettingsPanel, *, login: object = False) -> str:
    """Return the part that is drawn whenever the sheet is open."""
    parts = respond(shown, Call(view={"login": login}))["parts"]
    assert list(parts) == ["sharing"]
    return unescape(parts["sharing"])


def modules(text: str) -> str:
    """Return the path of a QR code."""
    return str(segno.make(text, error="m", micro=False).svg_inline(border=4)).partition(' d="')[2].partition('"')[0]


def test_the_qr_code_has_the_password_only_if_it_is_asked_for(tmp_path: Path, subtests: pytest.Subtests) -> None:
    with_login = f"{LINK}#login=visitor:bado"
    for login, text in ((False, LINK), (True, with_login), ("yes", LINK)):
        with subtests.test(login=login):
            html = sharing_html(panel(tmp_path, link()), login=login)
            assert modules(text) in html
            assert ("checked" in html) == (text == with_login)
    # The owner's own password is shown nowhere.
    html = sharing_html(panel(tmp_path, link(generated=False, password="secret"), auth="me:secret"), login=True)
    assert modules(LINK) in html and "secret" not in html and "qr-login" not in html
    # Limits are those of the settings, or of the model.
    html = sharing_html(panel(tmp_path, link(), share_frames=17, model="diorama"))
    spec = find("diorama", tmp_path)
    assert describe_limits(limits_of(Settings(cache_dir=tmp_path, share_frames=17), spec)) in html


def test_sharing_shows_its_state_and_how_it_is_turned_on(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases: tuple[tuple[Any, dict[str, Any], str, str], ...] = (
        (None, {}, 'data-state="off"', "--share"),
        (link("opening", url=""), {}, 'data-state="opening"', ""),
        (link("failed", url="", problem="no way out"), {}, "no way out", "--share"),
        (link("ended", url=""), {}, 'data-state="ended"', "--share"),
        (None, {"host": "10.0.0.1", "auth": "me:x"}, line("settings.share_with_host", host="10.0.0.1"), ""),
    )
    for sharing, settings, expected, command in cases:
        with subtests.test(expected):
            html = sharing_html(panel(tmp_path, sharing, **settings))
            assert expected in html and "<svg" not in html
            assert (" --share</code>" in html) == bool(command)
            assert (" --auth USER:PASSWORD</code>" in html) == ("auth" not in settings)


def test_the_sheet_opens_with_everything_and_does_nothing_else(tmp_path: Path) -> None:
    reply = respond(panel(tmp_path), Call("open"))
    assert set(reply["parts"]) == {"sharing", "defaults", "storage"}
    assert str(tmp_path / "outputs") in reply["parts"]["storage"]
    assert respond(panel(tmp_path), Call("stop"))["message"] == UNKNOWN
    spec = find("diorama", tmp_path)
    html = form.defaults_html({spec.name: spec}, lambda spec: spec.sizes[:1])
    assert html.count("<option") == 2 and "x".join(map(str, spec.sizes[0])) in html


def test_disk_space_is_counted_once(tmp_path: Path) -> None:
    sizes = {"weights/a/b": 100, "latents/x": 7, "quantized/q": 20, "prompts/p": 3, "outputs/v.mp4": 50, "log": 9}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    uses = disk_uses(tmp_path, 40, EngineStore(tmp_path / "engines", 10**9))
    expected = {"Models": 100, "Engines": 0, "History": 40, "Latents": 7, "Caches": 23, "Other": 19}
    assert {use.title: use.size for use in uses} == expected
    assert [use.tab for use in uses if use.tab] == ["Models", "Engines", "History"]
    # A history larger than the folder has videos elsewhere; engines elsewhere take nothing from the rest.
    elsewhere = disk_uses(tmp_path, 900, EngineStore(tmp_path.parent / "engines", 10**9))
    assert {use.title for use in elsewhere} == {"Models", "Engines", "History", "Latents", "Caches"}
