"""A page reports that its server is lost, and reconnects once it is back."""

from typing import Any

import pytest

from tests.app_server import Server, make_cache, serving
from tests.browser.conftest import ENDLESS, OpenPage, ask, ready, start, wait_for_state
from tests.browser.relay import Relay
from tests.waiting import until

pytestmark = pytest.mark.browser

NO_ANSWER = "() => document.querySelector('#offline').textContent.includes('does not answer')"
UNTOLD = "() => document.querySelector('#offline') && !document.querySelector('#offline').textContent"


def test_a_lost_server_is_reported(open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(make_cache(tmp_path_factory.mktemp("gone"))) as other:
        page = open_page(url=other.url)
        ask(page, "a red boat", long=True, steps=ENDLESS)
        start(page)
        wait_for_state(page, "running")
    page.wait_for_function(NO_ANSWER)
    assert page.is_hidden("#status .line")
    assert page.input_value("#field-prompt textarea") == "a red boat"
    # Nothing half-made is left either.
    assert list((other.cache_dir / "outputs").iterdir()) == []


def test_a_lost_connection_is_restored(open_page: OpenPage, server: Server) -> None:
    relay = Relay(int(server.url.rstrip("/").rpartition(":")[2]))
    page = open_page(url=f"http://127.0.0.1:{relay.port}/")
    ask(page, "a calm blue sea", long=True)
    start(page)
    wait_for_state(page, "running")
    relay.cut()
    page.wait_for_function(NO_ANSWER)
    relay.mend()
    page.wait_for_function(UNTOLD)
    ready(page)
    wait_for_state(page, "done")
    assert "a calm blue sea" in page.text_content("#details .caption")
    assert page.input_value("#field-prompt textarea") == "a calm blue sea"
    relay.cut()


def test_a_stream_that_ends_early_is_reopened(chromium: Any, server: Server) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    asked: list[str] = []
    answered: list[str] = []
    held: list[Any] = []
    page.on("request", lambda request: asked.append(request.url) if "/queue/join" in request.url else None)
    page.on("requestfinished", lambda request: answered.append(request.url) if "/queue/join" in request.url else None)
    page.route("**/queue/data?**", lambda route: held.append(route), times=1)  # noqa: PLW0108 - it asks for a name
    page.goto(server.url)
    # The page asks all that it asks at first before it hears that there is nothing more to come.
    until(lambda: page.wait_for_timeout(50) or (held and len(asked) > 3 and len(asked) == len(answered)))
    held[0].fulfill(content_type="text/event-stream", body='data: {"msg": "close_stream"}\n\n')
    ready(page)
    context.close()
