"""`POST /v1/prompts/enhance` by a chat model in the worker, with keys, and with a server that has none."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.server.api_keys import ApiKeys, KeyLimits
from tests.app_server import App, make_cache, serving_here
from tests.chat_models import ANSWER, save_chat_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    cache = make_cache(tmp_path_factory.mktemp("enhance"))
    save_chat_model(cache / "weights" / "enhancers" / "chat")
    with serving_here(cache, page=False, enhancer="chat") as running:
        yield running


def ask(app: App, key: str = "", **values: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{app.url}v1/prompts/enhance", json=values, headers=headers, timeout=60)


def code_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_a_prompt_is_enhanced_for_keys_within_their_limits(server: App) -> None:
    answer = ask(server, prompt=" a red boat ", model="tiny", from_image=False)
    assert (answer.status_code, answer.json()) == (
        200,
        {"object": "prompt", "prompt": ANSWER, "original_prompt": "a red boat"},
    )
    for values, expected in (
        ({}, (400, "request.prompt_empty", "prompt")),
        ({"prompt": 7}, (400, "request.not_text", "prompt")),
        ({"prompt": "a\0boat"}, (400, "request.control_character", "prompt")),
        ({"prompt": "a {red|blue} boat"}, (400, "enhancer.template", "prompt")),
        ({"prompt": "a boat", "model": "none"}, (404, "model_not_found", "model")),
        ({"prompt": "a boat", "from_image": "yes"}, (400, "server.api_not_a_switch", "from_image")),
        ({"prompt": "a boat", "enhancer": "mine"}, (400, "request.unknown_field", "enhancer")),
    ):
        assert code_of(ask(server, **values)) == expected, values
    schema = httpx.get(f"{server.url}v1/openapi.json", timeout=60).json()
    assert "/v1/prompts/enhance" in schema["paths"]
    keys = ApiKeys(server.cache_dir)
    secret = keys.add("anna", KeyLimits(videos=2, per_hour=1))
    try:
        assert code_of(ask(server, prompt="a boat"))[:2] == (401, "server.api_key_missing")
        assert ask(server, secret, prompt="a boat").json()["prompt"] == ANSWER
        assert code_of(ask(server, secret, prompt="a boat"))[:2] == (429, "enhancer.rate")
    finally:
        keys.revoke("anna")


def test_without_an_enhancer_it_says_so(api: App) -> None:
    assert code_of(ask(api, prompt="a boat"))[:2] == (503, "enhancer.none")
