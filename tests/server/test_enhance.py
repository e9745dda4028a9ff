"""`POST /v1/prompts/enhance`, and `enhance` of `POST /v1/videos`, with a chat model in the worker and without one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.server.api_keys import ApiKeys, KeyLimits
from runtime.video.mp4 import read_metadata
from tests.app_server import App, make_cache, serving_here
from tests.chat_models import ANSWER, save_chat_model
from tests.waiting import until


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


def test_a_video_gets_the_enhanced_prompt(server: App, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {ApiKeys(server.cache_dir).add('bert', KeyLimits(videos=9, per_hour=9))}"}
    with httpx.Client(base_url=f"{server.url}v1/", headers=headers, timeout=60) as http:
        values = {"prompt": "a {red|red} boat", "steps": 2, "seed": 5, "enhance": True}
        key = {"Idempotency-Key": "once"}
        video = http.post("videos", json=values, headers=key).json()
        assert (video["prompt"], video["original_prompt"]) == (ANSWER, "a red boat")
        # It is not enhanced again.
        assert http.post("videos", json=values, headers=key).json()["id"] == video["id"]
        assert code_of(http.post("videos", json={**values, "enhance": False}, headers=key))[0] == 409
        until(lambda: http.get(f"videos/{video['id']}").json()["status"] == "completed")
        file = tmp_path / "x.mp4"
        file.write_bytes(http.get(f"videos/{video['id']}/content").content)
        request = read_metadata(file)["request"]
        written = {name: request[name] for name in ("prompt", "template", "original_prompt")}
        assert written == {"prompt": ANSWER, "template": values["prompt"], "original_prompt": "a red boat"}
        fields = {"prompt": "a boat", "steps": "2", "enhance": "false"}
        plain = http.post("videos", files={name: (None, value) for name, value in fields.items()}).json()
        assert (plain["prompt"], plain["original_prompt"]) == ("a boat", None)
        assert http.post("videos/plan", json=values).json()["steps"] == 2
        for route, more, expected in (
            ("videos", {"enhance": "yes"}, (400, "server.api_not_a_switch", "enhance")),
            ("videos/plan", {"enhance": [1]}, (400, "server.api_not_a_switch", "enhance")),
            ("videos", {"frames": 0}, (400, "request.out_of_range", "frames")),
            (
                "videos",
                {"control": {"video_url": "data:video/mp4;base64,AAAA"}},
                (400, "control.model_without", "control"),
            ),
            ("videos/batch", {"grid": {"steps": [1, 2]}}, (400, "enhancer.batch", "enhance")),
        ):
            assert code_of(http.post(route, json={**values, **more})) == expected


def test_without_an_enhancer_it_says_so(api: App) -> None:
    assert code_of(ask(api, prompt="a boat"))[:2] == (503, "enhancer.none")
    refused = httpx.post(f"{api.url}v1/videos", json={"prompt": "a boat", "enhance": True}, timeout=60)
    assert code_of(refused)[:2] == (503, "enhancer.none")
