"""One server, one Chromium and few contexts for all browser tests; one test runs by default, the others are `slow`.

A context keeps the page's scripts, of which loading takes seconds of processor time: it is used again by later tests,
without what the page has stored. Its first page stays empty and open, and with it the process of its pages.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runtime.queue.store import NAME, JobStore
from tests.app_server import Server, make_cache, serving
from tests.chat_models import save_chat_model
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.models.hub import LoopbackHub, served

# The headless shell, which draws no window of its own, needs the least CPU time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Pages of a context run in one process, which keeps the compiled scripts: that saves a fifth of the processor time.
    "--renderer-process-limit=1",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
SMALL = {"width": 320, "height": 568}

# The test that runs without `--all`: from a prompt to a video that plays.
FIRST = "test_a_prompt_becomes_a_playing_video"

# By which chip a field, a row of choices, or a part of the form is opened.
CHIPS = {
    "model": "model", "seed": "seed", "width": "size", "height": "size", "frames": "length", "fps": "length",
    "size": "size", "length": "length", "presets": "quality",
}  # fmt: skip

OpenPage = Callable[..., Any]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all browser tests but the first one as slow."""
    for item in items:
        if item.get_closest_marker("browser") and item.name != FIRST:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def hub() -> Iterator[LoopbackHub]:
    """Return the hub of the web app's models; no download completes, so that none is offered."""
    with served() as hub:
        yield hub


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, hub: LoopbackHub) -> Iterator[Server]:
    """Return the web app that all tests share."""
    cache = make_cache(tmp_path_factory.mktemp("browser"))
    save_chat_model(cache / "weights" / "enhancers" / "chat")
    (cache / "settings.json").write_text(json.dumps({"hub": hub.address, "enhancer": "chat"}), encoding="utf-8")
    save_safetensors(cache / "weights" / "upscalers" / "small.safetensors", COMPACT_CONFIG)
    with serving(cache) as running:
        yield running
    assert "Traceback" not in (running.cache_dir / "server.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """Return the browser; it is closed with this package, because its event loop disturbs those of other tests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Contexts:
    """Browser contexts that tests use one after the other."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._free: list[Any] = []
        self._taken: list[Any] = []

    def take(self) -> Any:
        """Return a context in which only an empty page is open and nothing is stored."""
        if self._free:
            context = self._free.pop(0)
        else:
            context = self._browser.new_context()
            context.new_page()
        self._taken.append(context)
        return context

    def give_back(self) -> None:
        """Close the pages of all contexts that were taken, and remove what they have stored."""
        while self._taken:
            context = self._taken.pop()
            try:
                _clear(context)
            except Exception:
                context.close()
                raise
            self._free.insert(0, context)


def _clear(context: Any) -> None:
    """Close all pages but the first one and remove what they have stored, except for copies of the server's files."""
    context.clear_permissions()
    context.clear_cookies()
    empty, *pages = context.pages
    origins = {"/".join(page.url.split("/")[:3]) for page in pages if page.url.startswith("http")}
    for page in pages:
        page.close()
    session = context.new_cdp_session(empty)
    for origin in origins:
        session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "local_storage,indexeddb"})
    session.detach()


@pytest.fixture(scope="package")
def contexts(chromium: Any) -> Contexts:
    """Return the contexts that all tests share."""
    return Contexts(chromium)


@pytest.fixture
def open_page(contexts: Contexts, server: Server) -> Iterator[OpenPage]:
    """Return a function that opens the page in a context of its own and waits until it can be used."""

    def opened(
        viewport: dict[str, int] = DESKTOP, url: str = server.url, permissions: Sequence[str] = (), **media: str
    ) -> Any:
        context = contexts.take()
        context.grant_permissions(list(permissions))
        page = context.new_page()
        page.set_viewport_size(viewport)
        page.emulate_media(**media)
        page.set_default_timeout(120_000)
        page.requests, page.complaints = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("pageerror", lambda error: page.complaints.extend(complaint_of(error)))
        page.on("console", lambda message: page.complaints.extend(complaint(message)))
        page.goto(url)
        ready(page)
        with closing(JobStore(server.cache_dir / NAME)) as store:
            if url == server.url and store.list(owner=None, limit=1):
                # The page shows the last job, which must not be mistaken for one that the test starts.
                page.wait_for_selector('#status .status:not([data-job=""])')
        return page

    yield opened
    contexts.give_back()


def complaint_of(error: Any) -> list[str]:
    """Return an error that no code of the page handles; none if Gradio ended a request because the page was left."""
    text = str(error)
    return [] if text.startswith("AbortError: signal is aborted") else [text]


def complaint(message: Any) -> list[str]:
    """Return an error in the console with its address; none if a clip that a page still played was replaced."""
    address = message.location["url"]
    if message.type != "error" or ("/tandem/clip/" in address and "404" in message.text):
        return []
    return [f"{message.text} {address}".strip()]


def ready(page: Any) -> None:
    """Wait until the page is loaded and the form is restored."""
    page.wait_for_selector("#generate, #cancel")
    page.wait_for_function("window.tandem && window.tandem.restored")


def state(page: Any) -> str:
    """Return the state of the status line: idle, queued, running, stopping, done, failed or cancelled."""
    return str(page.get_attribute("#status .status", "data-state"))


def wait_for_state(page: Any, *states: str, timeout: float = 180_000) -> None:
    """Wait until the status line is in one of `states`."""
    wanted = ",".join(f'#status .status[data-state="{name}"]' for name in states)
    page.wait_for_selector(wanted, timeout=timeout)


# Steps of a job that is still running when a test cancels it.
ENDLESS = 1000


def ask(page: Any, prompt: str = "a red boat on the sea", *, long: bool = False, steps: int = 100) -> None:
    """Fill the form; a long job has many steps of a larger clip, seconds of work."""
    page.fill("#field-prompt textarea", prompt)
    if long:
        customize(page, width="192", height="192")
        advance(page)
        page.fill("#field-steps input", str(steps))
        page.press("#field-steps input", "Tab")


def open_chip(page: Any, name: str) -> None:
    """Open what a chip below the prompt opens: model, images, size, length, quality or seed."""
    if not page.is_visible(f"#pop-{name}"):
        page.click(f"[data-chip={name}]")
    page.wait_for_selector(f"#pop-{name}", state="visible")


def fill_field(page: Any, name: str, value: str) -> None:
    """Fill in a field that a chip opens, and close what it opened."""
    open_chip(page, CHIPS[name])
    page.fill(f"#field-{name} :is(input, textarea)", value)
    page.keyboard.press("Escape")


def tick(page: Any, selector: str) -> None:
    """Choose a size, length or preset, and close what its chip opened."""
    open_chip(page, CHIPS[selector[1:].partition(" ")[0]])
    page.check(selector)
    page.keyboard.press("Escape")


def customize(page: Any, **sides: str) -> None:
    """Choose a custom size or length, and fill in its fields."""
    tick(page, f"#{'length' if 'frames' in sides else 'size'} input[value=custom]")
    for name, value in sides.items():
        fill_field(page, name, value)


def advance(page: Any) -> None:
    """Open the panel Advanced."""
    if page.get_attribute("#advanced", "aria-expanded") == "false":
        page.click("#advanced")
    page.wait_for_selector("#field-steps", state="visible")


def start(page: Any) -> None:
    """Press Generate and wait until the page shows the new job, not the last one."""
    before = page.get_attribute("#status .status", "data-job")
    page.click("#generate")
    await_job_after(page, before)


def await_job_after(page: Any, before: str | None) -> None:
    """Wait until the page shows another job than `before`."""
    page.wait_for_function(
        """(before) => {
          const job = document.querySelector('#status .status').dataset.job;
          return job && job !== before;
        }""",
        arg=before,
    )


def saved_videos(server: Server) -> set[Path]:
    """Return the videos on disk."""
    return set((server.cache_dir / "outputs").glob("*"))
