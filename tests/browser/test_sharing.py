"""A share link in a browser: the visitors' page, and how the owner ends sharing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.app_server import Server, make_cache, serving
from tests.browser.conftest import (
    DESKTOP,
    PHONE,
    Contexts,
    advance,
    complaint_of,
    customize,
    ready,
    start,
    state,
    wait_for_state,
)
from tests.browser.conftest import ask as fill_form
from tests.browser.test_page import PLAYING, UNNAMED_INPUTS
from tests.sharing_app import HOST, link_of

pytestmark = pytest.mark.browser

FLAGS = ("--share", "--share-frames", "9", "--share-size", "192x192", "--share-steps", "999", "--share-queue", "1")

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_cache(tmp_path_factory.mktemp("link")), *FLAGS, program=("-m", "tests.sharing_app")) as running:
        yield running
    assert "Traceback" not in (running.cache_dir / "server.txt").read_text(encoding="utf-8")


@pytest.fixture
def visit(contexts: Contexts, shared: Server) -> Iterator[Visit]:
    """Return a function that opens the link in a browser context of its own, and logs in by default."""
    port, user, password = link_of(shared.cache_dir)

    def opened(viewport: dict[str, int] = DESKTOP, *, log_in: bool = True) -> Any:
        page = contexts.take().new_page()
        page.set_viewport_size(viewport)
        page.set_default_timeout(30_000)
        page.complaints, page.requests = [], []
        page.on("pageerror", lambda error: page.complaints.extend(complaint_of(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(f"http://{HOST}:{port}/")
        page.wait_for_selector("input[type=password]")
        if log_in:
            page.fill("input:not([type=password])", user)
            page.fill("input[type=password]", password)
            page.keyboard.press("Enter")
            ready(page)
        return page

    yield opened
    contexts.give_back()


def ask(page: Any, prompt: str, *, long: bool = False) -> None:
    """Ask for a video, and wait until the page shows it."""
    fill_form(page, prompt, long=long, steps=999)
    start(page)


def test_without_the_password_only_the_login_is_shown(visit: Visit, shared: Server) -> None:
    page = visit(log_in=False)
    assert "came with the link" in page.inner_text("body")
    page.fill("input:not([type=password])", "visitor")
    page.fill("input[type=password]", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]:has-text('Wrong username or password.')")
    assert page.inner_text("h2") == "Log in to Tandem"
    # The user stays, also after another attempt.
    for _ in range(2):
        page.wait_for_function(
            """() => {
              const [user, password] = document.querySelectorAll('input');
              return user.value === 'visitor' && !password.value && document.activeElement === password;
            }"""
        )
        page.keyboard.type("wrong again")
        with page.expect_response("**/login"):
            page.keyboard.press("Enter")
    assert page.query_selector("#generate") is None
    assert page.evaluate("async () => (await fetch('/config')).status") == 401
    # The QR code may have the login: it is filled in, and the address no longer has it.
    _, user, password = link_of(shared.cache_dir)
    page.goto(f"{page.url}#login={user}:{password}")
    page.reload()
    page.wait_for_function("() => document.querySelector('input[type=password]')?.value")
    assert "#" not in page.url
    page.press("input[type=password]", "Enter")
    ready(page)


def test_a_visitor_generates_a_video_within_the_shown_limits(visit: Visit) -> None:
    page = visit()
    text = page.inner_text("#limits")
    for word in ("visitor", "At most 9 frames, 192×192 and 999 steps", "one video at a time, 20 an hour"):
        assert word in text
    for absent in ("#tab-engines", "#presets", "#sharing", "#plan-summary", "#get-models", "#enhance", "[data-action]"):
        assert page.query_selector(absent) is None, absent
    for viewport in (PHONE, DESKTOP):
        page.set_viewport_size(viewport)
        row, button = (page.locator(one).bounding_box() for one in ("#actions", "#generate"))
        assert button["width"] == row["width"]
    assert "Engines" not in page.inner_text("body")
    advance(page)
    assert page.is_visible("#actions-more label:has-text('Settings from a video')")
    page.click("[data-close-advanced]")
    assert page.text_content("#field-frames .info-text").endswith("At most 9.")
    ask(page, "a red boat")
    wait_for_state(page, "done")
    page.wait_for_function(PLAYING)
    assert page.get_attribute("#picture video", "src").startswith("video/")
    for viewport in (PHONE, DESKTOP):
        page.set_viewport_size(viewport)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(UNNAMED_INPUTS) == []
    # Of Settings, visitors have what their browser stores.
    page.keyboard.press("Control+,")
    page.select_option("#default-model", "tiny")
    assert page.locator("#settings-sheet h3").count() == 2
    assert page.locator("#settings-sheet [data-part], #sound").count() == 0
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.click("#facts a[download]")
    assert download.value.path().read_bytes()[4:8] == b"ftyp"
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {page.url.split("/")[2]}
    assert page.complaints == []


def test_visitors_cancel_their_own_video_and_see_no_others(visit: Visit) -> None:
    page, other = visit(), visit(PHONE)
    ask(page, "a red boat that only one may see", long=True)
    wait_for_state(page, "running")
    assert page.is_visible("#cancel") and not page.is_visible("#generate")
    # Another visitor's page, reloaded with this job's id in its memory, shows nothing of it.
    job = page.get_attribute("#status .status", "data-job")
    other.evaluate("(id) => sessionStorage.setItem('tandem.job', id)", job)
    other.reload()
    ready(other)
    other.wait_for_timeout(1500)
    assert state(other) == "idle" and "only one may see" not in other.content()
    # A reload finds the own one again.
    page.reload()
    ready(page)
    wait_for_state(page, "running")
    page.click("#cancel")
    wait_for_state(page, "cancelled")
    page.wait_for_selector("#generate", state="visible")


def test_videos_of_other_visitors_and_too_large_ones_are_refused(visit: Visit) -> None:
    page, other = visit(), visit()
    ask(page, "a blue boat")
    wait_for_state(page, "done")
    address = page.get_attribute("#picture video", "src")
    status = "async (address) => (await fetch(address)).status"
    assert page.evaluate(status, address) == 200
    assert other.evaluate(status, address) == 404
    # An exceeded limit is shown next to the picture.
    page.fill("#field-prompt textarea", "a red boat")
    customize(page, width="208")
    page.click("#generate")
    page.wait_for_selector('#status .status[data-state="failed"]')
    assert "208×32 is larger than visitors may use. Choose at most 192×192." in page.inner_text(
        "#status .alert"
    ).replace("\n", " ")
    # The chip Size opens, with the field.
    page.wait_for_selector("#pop-size #field-width input[aria-invalid=true]")


def test_the_owner_stops_visitors_videos_and_sharing(visit: Visit, contexts: Contexts, shared: Server) -> None:
    page = visit()
    context = contexts.take()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    own = context.new_page()
    own.set_viewport_size(DESKTOP)
    own.goto(shared.url)
    ready(own)
    port, user, password = link_of(shared.cache_dir)
    own.wait_for_selector("#sharing [data-copy]")
    text = own.inner_text("#sharing")
    assert f"http://{HOST}:{port}" in text and user in text and password in text
    own.click("#sharing [data-copy]")
    own.wait_for_selector("text=Copied.")
    copied = own.evaluate("() => navigator.clipboard.readText()")
    assert copied == f"{own.get_attribute('#sharing a', 'href')} user {user} password {password}"
    own.keyboard.press("Control+,")
    own.wait_for_selector("#settings-sheet .qr svg")
    code = own.get_attribute("#settings-sheet .qr path", "d")
    own.check("#qr-login")
    own.wait_for_function("(code) => document.querySelector('.qr path').getAttribute('d') !== code", arg=code)
    own.keyboard.press("Escape")
    assert own.query_selector("#tab-engines") is not None or "Engines" in own.inner_text("body")
    ask(page, "a red boat", long=True)
    wait_for_state(page, "running")
    own.wait_for_selector("text=1 video queued or running")
    # It is theirs: the own page does not show it as its own.
    assert state(own) == "idle"
    own.click("#stop-visitors")
    wait_for_state(page, "cancelled")
    own.click("#stop-sharing")
    own.wait_for_selector("text=Sharing has ended.")
    assert not own.is_visible("#stop-sharing")
    page.wait_for_function("() => document.querySelector('#offline').textContent !== ''")
    # The owner's page still works.
    own.fill("#field-prompt textarea", "a boat of my own")
    own.click("#generate")
    wait_for_state(own, "done")
