"""The copies of Gradio's page that the server keeps: what they depend on, and that others are not rendered again."""

from collections.abc import Mapping
from typing import Any

import gradio as gr
import pytest
from gradio import routes
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.ui import server

HEAD = "<style>p {}</style>"


class Counting:
    """ASGI middleware that counts the requests that reach Gradio."""

    count = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Counting.count += scope["type"] == "http"
        await self._app(scope, receive, send)


def app_of(*middleware: Middleware, auth: bool = False) -> routes.App:
    with gr.Blocks(title="Tandem") as page:
        text = gr.Textbox("hello")
        picture = gr.Image(None)
        gr.Button().click(lambda one: one, text, text, api_name="echo")
        page.load(lambda: None, None, picture)
    page.auth = (lambda user, password: password == f"of {user}") if auth else None
    page.auth_message = "Log in"
    page.theme = gr.themes.Default()  # as `launch` does
    page.config = page.get_config_file()
    return routes.App.create_app(page, app_kwargs={"middleware": [*middleware, Middleware(Counting)]})


def kept(*, auth: bool = False) -> routes.App:
    return app_of(Middleware(server.PageMiddleware, head=HEAD), auth=auth)


def logged_in(app: routes.App, user: str) -> dict[str, str]:
    answer = TestClient(app).post("/login", data={"username": user, "password": f"of {user}"})
    assert answer.status_code == 200, answer.text
    return {"cookie": "; ".join(f"{name}={value}" for name, value in answer.cookies.items())}


def load(app: routes.App, headers: Mapping[str, str], base: str = "http://here") -> tuple[int, str]:
    """Return how many requests reached Gradio, and the page."""
    Counting.count = 0
    answer = TestClient(app, base_url=base).get("/", headers=dict(headers))
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-type"].startswith("text/html")
    return Counting.count, answer.text


ADDRESSES: list[tuple[str, dict[str, str]]] = [
    ("http://here", {}),
    ("http://here:7860", {}),
    ("https://here", {}),
    ("http://[::1]:7860", {}),
    ("http://here", {"x-forwarded-host": "shared.example"}),
    ("http://here", {"x-forwarded-host": "shared.example", "x-forwarded-proto": "https"}),
    ("http://here", {"x-gradio-server": "http://elsewhere/"}),
]


def test_each_address_and_user_has_its_own_page() -> None:
    app = kept(auth=True)
    users: list[dict[str, str]] = [{}, logged_in(app, "ann"), logged_in(app, "bob")]
    fresh, first = [], []
    for base, address in ADDRESSES:
        for user in users:
            headers = {**address, **user}
            renders, page = load(app, headers, base)
            fresh.append(renders)
            first.append(page)
    assert fresh == [1] * len(first)
    assert len({*first}) == len(first)
    again = [load(app, {**ADDRESSES[-1][1], **user}, ADDRESSES[-1][0]) for user in users]
    assert [count for count, _ in again] == [0, 0, 0]
    assert [page for _, page in again] == first[-3:]
    assert ["auth_required" in page for page in first[:3]] == [True, False, False]
    assert '"username":"ann"' in first[1] and '"username":"bob"' in first[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {"accept-language": "de"},
        {"user-agent": "another"},
        {"accept": "text/html"},
        {"cookie": "theme=dark"},
        {"referer": "http://here/other"},
        {"sec-ch-prefers-color-scheme": "dark"},
    ],
)
def test_gradios_page_does_not_depend_on_other_headers(headers: dict[str, str]) -> None:
    """Else copies could not be kept: a release of Gradio may change that."""
    app = app_of()
    assert load(app, headers) == load(app, {}) == load(app, {})
    copies = kept()
    assert (load(copies, {})[0], load(copies, headers)[0]) == (1, 0)


def test_the_copy_is_gradios_page_with_the_head() -> None:
    app = kept()
    first, second = load(app, {}), load(app, {})
    assert (first[0], second[0], first[1]) == (1, 0, second[1])
    assert second[1] == TestClient(app, base_url="http://here").get("/?not=kept").text
    assert second[1].index(HEAD) < second[1].index("</head>")


def test_a_login_that_ended_shows_no_page() -> None:
    app = kept(auth=True)
    ann = logged_in(app, "ann")
    assert '"username":"ann"' in load(app, ann)[1]
    app.tokens.clear()
    assert "auth_required" in load(app, ann)[1]


def test_a_changed_page_is_rendered_again() -> None:
    app = kept()
    before = load(app, {})[1]
    blocks = app.get_blocks()
    blocks.title = "Changed"
    blocks.config = blocks.get_config_file()
    count, after = load(app, {})
    assert count == 1 and after != before and "Changed" in after


def test_the_number_of_copies_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_PAGES", 2)
    app = kept()
    assert [load(app, {}, f"http://{name}")[0] for name in ("a", "b", "a", "c", "a", "b")] == [1, 1, 0, 1, 0, 1]


def test_requests_with_a_query_and_other_routes_are_not_kept() -> None:
    app = kept()
    client: Any = TestClient(app)
    for path in ("/?deep_link=one", "/config"):
        Counting.count = 0
        client.get(path)
        client.get(path)
        assert Counting.count == 2
