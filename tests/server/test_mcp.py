"""The MCP server over HTTP and as a program, with the official client."""

import asyncio
import base64
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TextIO

import httpx
import httpx2
import pytest

from runtime.core.request import FIELDS, MAX_REFERENCES
from runtime.queue.store import NAME, JobStore
from runtime.server.api_keys import NAME as KEYS
from runtime.server.api_keys import ApiKeys, KeyLimits
from runtime.server.video_requests import ENHANCE, MAX_JSON_BYTES
from runtime.video.mp4 import read_metadata
from tests.app_server import MODEL, ROOT, App, environment, free_port, make_cache, serving, serving_here
from tests.chat_models import ChatServer, chat_server
from tests.cli.refusals import refused
from tests.image_files import saved
from tests.tiny_models import build
from tests.waiting import until

pytest.importorskip("mcp_types", reason="needs version 2 of the package mcp")
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from runtime.server.mcp.schemas import WAIT_FIELD
from runtime.server.mcp.tools import McpTools

SMALL = {"prompt": "a red boat", "steps": 2, "seed": 5}
LONG = {**SMALL, "steps": 900}
WAIT = {**SMALL, WAIT_FIELD: 120}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    cache = make_cache(tmp_path_factory.mktemp("mcp"))
    with (
        chat_server() as chat,
        serving_here(cache, page=False, mcp=True, enhancer=chat.address, enhancer_model="any") as running,
    ):
        yield running


def talk(server: App, use: Callable[[Client], Awaitable[Any]], *, key: str = "", mode: str = "auto") -> Any:
    """Connect a client over HTTP, use it, and return what that returns."""

    async def connected() -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            transport = streamable_http_client(f"{server.url}mcp", http_client=http)
            async with Client(transport, mode=mode) as client:
                return await use(client)

    return asyncio.run(connected())


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return what a tool returns."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    found: dict[str, Any] = result.structured_content
    return found


async def refusal(client: Client, tool: str, **arguments: Any) -> tuple[str, str | None]:
    """Return the code and the parameter of a refused call, whose text is one line."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.content
    error = result.structured_content["error"]
    (text,) = list[Any](result.content)
    assert text.text == error["message"] and "\n" not in text.text and "Traceback" not in text.text
    return error["code"], error.get("param")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_makes_follows_and_gets_a_video(server: App, mode: str) -> None:
    reported: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        assert total == 100
        reported.append((progress, message))

    async def use(client: Client) -> None:
        plan = await call(client, "plan_video", **SMALL)
        result = await client.call_tool("make_video", WAIT, progress_callback=note)
        video = result.structured_content
        assert video["status"] == "completed" and video["seed"] == 5
        assert {name: plan[name] for name in ("size", "frames", "steps", "model")} == {
            name: video[name] for name in ("size", "frames", "steps", "model")
        }
        assert plan["shortest"] <= plan["duration"] <= plan["longest"] and plan["memory_bytes"] > 0
        numbers = [number for number, _ in reported]
        assert numbers == sorted(set(numbers)) and all(message for _, message in reported)
        shown = await client.call_tool("get_video", {"id": video["id"]})
        _, link, still = list[Any](shown.content)
        assert (link.type, still.type, still.mime_type) == ("resource_link", "image", "image/webp")
        assert base64.b64decode(still.data)[8:12] == b"WEBP"
        # Answers over HTTP have no path, not even those to the owner.
        assert "path" not in shown.structured_content
        sent = httpx.get(shown.structured_content["url"])
        assert sent.headers["content-type"] == "video/mp4"
        (resource,) = list[Any]((await client.read_resource(link.uri)).contents)
        assert base64.b64decode(resource.blob) == sent.content
        assert str(link.uri) in [str(entry.uri) for entry in (await client.list_resources()).resources]
        assert (await call(client, "list_videos", limit=1))["data"][0]["id"] == video["id"]
        assert MODEL in [model["id"] for model in (await call(client, "list_models"))["data"]]
        assert (await call(client, "delete_video", id=video["id"]))["deleted"]
        assert (await refusal(client, "get_video", id=video["id"]))[0] == "server.api_no_video"

    talk(server, use, mode=mode)


def test_a_prompt_is_enhanced(server: App) -> None:
    async def use(client: Client) -> None:
        enhanced = await call(client, "enhance_prompt", prompt="a red boat")
        assert (enhanced["prompt"], enhanced["original_prompt"]) == (ChatServer.text, "a red boat")
        video = await call(client, "make_video", **SMALL, enhance=True)
        assert (video["prompt"], video["original_prompt"]) == (ChatServer.text, "a red boat")
        assert await refusal(client, "enhance_prompt", prompt="a {red|blue} boat") == ("enhancer.template", "prompt")
        assert await refusal(client, "enhance_prompt", prompt="a", mood="x") == ("request.unknown_field", "mood")

    talk(server, use)


def test_every_field_of_a_request_is_an_argument(server: App) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator

    async def use(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert WAIT_FIELD not in FIELDS
        for name, more in (("make_video", {"size", ENHANCE, WAIT_FIELD}), ("plan_video", {"size", ENHANCE})):
            schema = tools[name].input_schema
            assert set(schema["properties"]) == {*FIELDS, *more}
            assert all(described.get("description") for described in schema["properties"].values())
            assert validator(schema).is_valid(SMALL) and not validator(schema).is_valid({"steps": 2})
        for tool in tools.values():
            validator.check_schema(tool.input_schema)
        hints = {name: tool.annotations for name, tool in tools.items()}
        assert [name for name, hint in hints.items() if hint and hint.destructive_hint] == ["delete_video"]

    talk(server, use)


def test_bad_input_is_refused_in_one_line(server: App, subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, dict[str, Any], str, str | None]] = [
        ("make_video", {**SMALL, "sise": 1}, "request.unknown_field", "sise"),
        ("make_video", {**SMALL, "steps": "many"}, "request.not_whole", "steps"),
        ("make_video", {}, "request.prompt_empty", "prompt"),
        ("make_video", {**SMALL, WAIT_FIELD: -1}, "server.mcp_argument", WAIT_FIELD),
        ("make_video", {**SMALL, WAIT_FIELD: 1e9}, "server.mcp_argument", WAIT_FIELD),
        ("make_video", {**SMALL, "model": "../x"}, "model_not_found", "model"),
        ("plan_video", {**SMALL, "frames": 10**9}, "request.out_of_range", "frames"),
        ("plan_video", {**SMALL, "image": "/etc/passwd"}, "server.mcp_no_paths", "image"),
        ("plan_video", {**SMALL, "image": "data:image/png;base64,AAAA"}, "image.model_without", "image"),
        ("plan_video", {**SMALL, "image": 3}, "server.api_image", "image"),
        ("plan_video", {**SMALL, "loras": ["/etc/passwd"]}, "form.lora_is_path", "loras"),
        ("wait_for_video", {"id": "00000000"}, "server.api_no_video", "video_id"),
        ("wait_for_video", {}, "server.mcp_argument", "id"),
        ("get_video", {"id": "../models"}, "server.api_no_video", "video_id"),
        ("get_video", {"id": "00000000/content"}, "server.api_no_video", "video_id"),
        ("get_video", {"id": ".."}, "server.api_no_video", "video_id"),
        ("get_video", {"id": ""}, "server.api_no_video", "video_id"),
        ("get_video", {"id": "x" * 200}, "server.mcp_argument", "id"),
        ("delete_video", {"id": "?"}, "server.api_no_video", "video_id"),
        ("list_videos", {"limit": 0}, "server.mcp_argument", "limit"),
        ("list_models", {"x": 1}, "server.mcp_argument", "x"),
        ("make_coffee", {}, "server.mcp_tool", "name"),
    ]

    async def use(client: Client) -> None:
        for tool, arguments, code, param in cases:
            with subtests.test(tool=tool, arguments=str(arguments)[:60]):
                assert await refusal(client, tool, **arguments) == (code, param)
        for uri in ("tandem://videos/00000000", "file:///etc/passwd"):
            with pytest.raises(MCPError):
                await client.read_resource(uri)

    talk(server, use)


def test_files_are_sent_by_path_or_as_data_urls(server: App, tmp_path: Path, subtests: pytest.Subtests) -> None:
    build("wan2.1-vace", server.cache_dir / "weights" / "steered")
    image = saved(tmp_path / "boat.png")
    url = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    steered = {**SMALL, "model": "steered", "width": 64, "height": 64, "frames": 5}
    scales = {"control_scale": [1, 0.5], "backends": {"vae": "pytorch"}}
    mixed = {"references": [str(image), url]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": str(image)}, "image.model_without"),
        ({"image": image.name}, "server.mcp_relative_path"),
        ({"image": str(tmp_path)}, "server.mcp_file"),
        ({"image": str(tmp_path / "none.png")}, "server.mcp_file"),
        ({"image": str(Path(__file__))}, "image.model_without"),
        ({"image": "a\0b"}, "server.mcp_relative_path"),
        ({"image": "/a\0b"}, "server.mcp_file"),
        ({"references": [str(image)] * (MAX_REFERENCES + 1)}, "request.too_many_images"),
        ({**mixed, "model": "steered"}, "server.mcp_mixed_files"),
    ]

    async def use() -> None:
        local = McpTools(server.url, find_file=lambda _: None)
        async with Client(local.server()) as client:
            for references in ([str(image)] * 2, [url] * 2):
                await call(client, "plan_video", **steered, **scales, references=references)
            for arguments, code in cases:
                with subtests.test(arguments=str(arguments)[:60]):
                    (field, *_) = arguments
                    assert await refusal(client, "plan_video", **{**SMALL, **arguments}) == (code, field)
        async with Client(McpTools(server.url).server()) as client:
            await call(client, "plan_video", **steered, references=[url])
            assert await refusal(client, "plan_video", **SMALL, **mixed) == ("server.mcp_no_paths", "references")

    asyncio.run(use())


def test_a_server_that_has_ended_is_reported() -> None:
    async def use() -> None:
        async with Client(McpTools(f"http://127.0.0.1:{free_port()}/").server()) as client:
            assert (await refusal(client, "list_models"))[0] == "server.mcp_unreachable"
            assert (await refusal(client, "wait_for_video", id="00000000"))[0] == "server.mcp_unreachable"

    asyncio.run(use())


def test_a_deleted_video_ends_the_wait_of_another_client(server: App) -> None:
    async def use(first: Client) -> None:
        async with Client(f"{server.url}mcp") as second:
            video = (await call(first, "make_video", **LONG))["id"]
            short = await call(second, "wait_for_video", id=video, seconds=0.5)
            assert short["status"] in {"queued", "in_progress"}
            waiting = asyncio.create_task(second.call_tool("wait_for_video", {"id": video, "seconds": 120}))
            await asyncio.sleep(0.2)
            await call(first, "delete_video", id=video)
            # Cancelled, unless it was gone before that was seen.
            found = (await waiting).structured_content
            assert found["error"]["code"] in {"server.api_cancelled", "server.api_no_video"}

    talk(server, use)


def test_keys_and_their_limits_hold(server: App) -> None:
    keys = ApiKeys(server.cache_dir)
    try:
        anna, ben = (keys.add(name, KeyLimits(steps=4)) for name in ("anna", "ben"))
        for wrong in ("none", "tandem_wrong"):
            answer = httpx.post(f"{server.url}mcp", json={}, headers={"Authorization": f"Bearer {wrong}"})
            assert answer.status_code == 401 and answer.json()["error"]["code"].startswith("server.api_key_")
            with pytest.raises(Exception):  # noqa: B017 - the client has many kinds, also groups
                talk(server, lambda client: client.list_tools(), key=wrong)

        async def make(client: Client) -> str:
            assert await refusal(client, "make_video", **LONG) == ("server.api_maximum", "steps")
            assert await refusal(client, "plan_video", **LONG) == ("server.api_maximum", "steps")
            return str((await call(client, "make_video", **WAIT))["id"])

        video = talk(server, make, key=anna)

        async def look(client: Client) -> None:
            assert (await call(client, "list_videos"))["data"] == []
            for tool in ("get_video", "wait_for_video", "delete_video"):
                assert (await refusal(client, tool, id=video))[0] == "server.api_no_video"
            with pytest.raises(MCPError):
                await client.read_resource(f"tandem://videos/{video}")

        talk(server, look, key=ben)
    finally:
        (server.cache_dir / KEYS).unlink()


def test_other_sites_methods_and_bodies_are_refused(server: App, web_app: App) -> None:
    address = f"{server.url}mcp"
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accept = {"Accept": "application/json, text/event-stream"}
    assert httpx.post(address, json=ping, headers=accept).status_code == 200
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert httpx.post(address, json=ping, headers={**accept, **headers}).status_code == 403, headers
    for method in ("GET", "DELETE", "PUT"):
        assert httpx.request(method, address, headers=accept).status_code == 405
    for body, status in (
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b" " * (MAX_JSON_BYTES + 1), 413),
    ):
        answer = httpx.post(address, content=body, headers={**accept, "Content-Type": "application/json"})
        assert answer.status_code == status and "Traceback" not in answer.text
    # The page, and so a share link, has none.
    assert httpx.post(f"{web_app.url}mcp", json=ping, headers=accept).status_code in {403, 404}
    assert "Traceback" not in server.printed()


def program(cache: Path, port: int, **variables: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["app.py", "mcp", "--port", str(port), "--model", MODEL],
        env={**environment(), "TANDEM_CACHE_DIR": str(cache), **variables},
        cwd=str(ROOT),
    )


@pytest.mark.slow
def test_a_client_starts_the_program(tmp_path: Path) -> None:
    """It uses a server that runs, serves when that ends, and pauses its videos when the client closes its end."""
    cache = make_cache(tmp_path / "cache")

    async def use(stack: ExitStack, errors: TextIO) -> str:
        running = stack.enter_context(serving(cache, program=("app.py", "serve")))
        async with Client(stdio_client(program(cache, running.port), errlog=errors)) as client:
            video = await call(client, "make_video", **WAIT)
            shown = await call(client, "get_video", id=video["id"])
            assert read_metadata(Path(shown["path"]))["request"]["prompt"] == SMALL["prompt"]
            long = (await call(client, "make_video", **{**LONG, "frames": 33, "width": 256, "height": 256}))["id"]
            await asyncio.to_thread(until, lambda: state(cache, long) == "running")
            await asyncio.to_thread(stack.close)
            assert state(cache, long) == "queued"
            assert (await call(client, "get_video", id=video["id"]))["path"] == shown["path"]
            await asyncio.to_thread(until, lambda: state(cache, long) == "running")
            async with Client(stdio_client(program(cache, running.port), errlog=errors)) as other:
                assert [entry["id"] for entry in (await call(other, "list_videos"))["data"]] == [long, video["id"]]
            assert state(cache, long) == "running"
        return str(long)

    with (tmp_path / "errors.txt").open("w", encoding="utf-8") as errors, ExitStack() as stack:
        long = asyncio.run(use(stack, errors))
    assert state(cache, long) == "queued"
    assert "Traceback" not in (tmp_path / "errors.txt").read_text(encoding="utf-8")


def test_the_program_refuses_what_it_cannot_use(
    server: App,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert refused(["mcp", "--port", str(taken.getsockname()[1])], capfd).code == "ui.port_taken"
    assert refused(["mcp", "--port", "none"], capfd).code == "settings.not_a_count"
    keys = ApiKeys(server.cache_dir)
    keys.add("anna", KeyLimits())
    try:
        assert refused(["mcp", "--port", str(server.port)], capfd).code == "server.mcp_key"
        monkeypatch.setenv("TANDEM_API_KEY", "tandem_wrong")
        assert refused(["mcp", "--port", str(server.port)], capfd).code == "server.mcp_key"
    finally:
        (server.cache_dir / KEYS).unlink()
    monkeypatch.setitem(sys.modules, "mcp_types", None)  # as if it were not installed
    for command in (["mcp"], ["serve", "--mcp"]):
        assert refused(command, capfd).code == "server.mcp_not_installed"


def state(cache: Path, video: str) -> str:
    with closing(JobStore(cache / NAME)) as store:
        return store.get(video).state
