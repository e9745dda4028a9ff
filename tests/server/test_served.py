"""The web app over HTTP: the endpoint for programs, which files are served, and what is shut."""

import asyncio
import contextlib
import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import as_text, render
from runtime.core.request import FIELDS, GenerationRequest
from runtime.queue.store import JobStore
from runtime.server import security
from runtime.server.api_keys import ApiKeys, KeyLimits
from runtime.server.api_words import ApiWords
from runtime.video.image_decoder import FORMATS
from tests.app_server import DEFAULTS, MODEL, ROOT, App, make_cache, serving_here
from tests.facts import fact
from tests.fuzz.raw_http import send
from tests.image_files import saved
from tests.queue.samples import add_job
from tests.waiting import until


@pytest.fixture(scope="module")
def server(web_app: App) -> App:
    return web_app


@pytest.fixture(scope="module")
def client(server: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    connected = Client(server.url, download_files=tmp_path_factory.mktemp("got"), verbose=False)
    yield connected
    connected.close()


def status(server: App, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> int:
    request = urllib.request.Request(server.url + path, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def refusal_of(**values: Any) -> str:
    """Return the text with which a request with these values is refused."""
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest.from_mapping({"prompt": "a red boat", **values})
    return as_text(refused.value.fact, ApiWords())


def test_generate_streams_events_and_gives_the_video(server: App, client: Any) -> None:
    events = list(client.submit("a red boat", seed=5, api_name="/generate"))
    names = [event["event"] for event in events]
    assert names[0] == "Planned" and names[-1] == "VideoSaved"
    assert [event["step"] for event in events if event["event"] == "StepDone"] == [1, 2, 3, 4]
    final = events[-1]
    assert Path(final["video"]).read_bytes()[4:8] == b"ftyp"
    assert final["seed"] == 5
    assert final["request"] | DEFAULTS == final["request"]
    assert set(final["plan"]["components"]) == {"text_encoder", "transformer", "transformer_2", "vae"}
    assert set(final["timings"]) == {"encode", "denoise", "decode", "mux", "total"}


@pytest.mark.slow
def test_the_documented_example_prints_the_video_and_raises_a_refusal(
    server: App, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    text = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = next(one for one in examples if "gradio_client" in one).replace("http://127.0.0.1:7860", server.url)
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    assert "VideoSaved" in printed
    assert Path(printed[-1]).read_bytes()[4:8] == b"ftyp"
    with pytest.raises(AppError) as refused:
        exec(example.replace("seed=7", "steps=0"), {})
    assert str(refused.value) == refusal_of(steps=0)


def test_predict_returns_the_last_event(client: Any) -> None:
    first = client.predict("a red boat", seed=5, steps=2, api_name="/generate")
    again = client.predict("a red boat", seed=5, steps=2, shift=7.5, vae_precision="float32", api_name="/generate")
    assert (first["request"]["shift"], again["request"]["shift"]) == (None, 7.5)
    assert (first["request"]["vae_precision"], again["request"]["vae_precision"]) == ("auto", "float32")
    assert Path(first["video"]).is_file()
    assert first["seed"] == again["seed"] == 5


@pytest.mark.parametrize("backends", [{"vae": "pytorch"}, ["vae=pytorch"]])
def test_programs_select_backends(client: Any, backends: object) -> None:
    chosen = {"backends": backends, "build": "never", "offload": "none", "quantization": "none"}
    final = client.predict("a red boat", steps=1, **chosen, api_name="/generate")
    assert final["request"]["backends"] == {"vae": "pytorch"}
    assert final["request"] | {name: chosen[name] for name in ("build", "offload", "quantization")} == final["request"]
    assert final["plan"]["components"]["vae"]["reason"].endswith(str(fact("planner.as_asked")))


def test_a_closed_stream_does_not_end_the_job(server: App, client: Any) -> None:
    videos = server.cache_dir / "outputs"
    before = set(videos.glob("*"))
    job = client.submit("a red boat", steps=60, api_name="/generate")
    next(iter(job))
    job.cancel()
    until(lambda: set(videos.glob("*.mp4")) - before)


@pytest.mark.slow
def test_a_refusal_arrives_with_what_is_wrong_and_the_remedy(
    server: App, client: Any, subtests: pytest.Subtests
) -> None:
    """One value of each kind; the rules are tested in core, planner and `tests.ui.test_form`."""
    for values in (
        {"prompt": ""},
        {"prompt": "a\x00b"},
        {"steps": 0},
        {"fps": "fast"},
        {"seed": 1.5},
        {"backends": {"vae": "cuda"}},
        {"backends": ["vae=pytorch", "vae=inductor"]},
        {"backends": [7]},
        {"backends": "vae=pytorch"},
    ):
        with subtests.test(msg=str(values)), pytest.raises(AppError) as refused:
            client.predict(**({"prompt": "a red boat"} | values), api_name="/generate")
        assert str(refused.value) == refusal_of(**values)
    for planned, reason in (
        (
            {"width": 190},
            fact("planner.not_a_multiple", field="width", value=190, model="Tiny", stride=16, able=[176, 192]),
        ),
        ({"model": "/etc"}, fact("model.not_offered", models=[MODEL, "diorama"])),
        ({"vae_precision": "float16"}, fact("planner.vae_16bit_on_cpu", precision="float16")),
    ):
        with subtests.test(msg=str(planned)), pytest.raises(AppError) as refused:
            client.predict(**({"prompt": "a red boat"} | planned), api_name="/generate")
        assert str(refused.value) == as_text(reason, ApiWords())
    assert "Traceback" not in server.printed()


def test_nan_over_http_is_rejected(server: App) -> None:
    # The rest is left to their defaults.
    body = b'{"data": ["a red boat", null, "tiny", NaN, 32]}'
    request = urllib.request.Request(
        server.url + "gradio_api/call/generate", data=body, headers={"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value as answer:
        assert answer.code == 422 and refusal_of(width=math.nan) in answer.read().decode()
    assert "Traceback" not in server.printed()


def test_other_sites_cannot_call_the_engine_panel(server: App) -> None:
    for path in ("gradio_api/queue/join", "gradio_api/run/predict"):
        assert status(server, path, method="POST", headers={"Origin": "https://evil.example"}) == 403
        # Nor a page that another program of this machine serves.
        for site in ("cross-site", "same-site"):
            assert status(server, path, method="POST", headers={"Sec-Fetch-Site": site}) == 403
        assert status(server, path, method="POST", headers={"Sec-Fetch-Site": "same-origin"}) == 422
    for header in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert status(server, "tandem/panels/queue", method="POST", headers=header) == 403
    # A form of another page can only send other content types.
    assert status(server, "tandem/panels/queue", method="POST") == 415
    json_type = {"Content-Type": "application/json"}
    assert status(server, "tandem/panels/queue", method="POST", headers=json_type) == 422
    assert status(server, "tandem/panels/none", method="POST", headers=json_type) == 404
    assert status(server, "", headers={"Sec-Fetch-Site": "cross-site"}) == 200


def test_only_generate_is_public(client: Any) -> None:
    described = client.view_api(return_format="dict", print_info=False)
    assert set(described["named_endpoints"]) == {"/generate"}
    assert described["unnamed_endpoints"] == {}


def test_the_events_of_the_page_have_no_component_show_their_progress(client: Any) -> None:
    private = [one for one in client.config["dependencies"] if one["api_visibility"] == "private"]
    assert len(private) > 60
    assert [one for one in private if one["show_progress_on"] != []] == []
    # One event reads all fields when one of them has changed; see `tandem.changed` in page.js.
    changes = [one for one in private if any(event == "change" for _, event in one["targets"])]
    assert max(len(one["inputs"]) for one in changes) <= 1 < len(changes)


def test_only_outputs_are_served(server: App, client: Any) -> None:
    client.predict("a red boat", steps=1, api_name="/generate")
    outputs = server.cache_dir / "outputs"
    video = next(outputs.glob("*.mp4"))
    (server.cache_dir / "settings.json").write_text("{}", encoding="utf-8")
    (server.cache_dir / "logs").mkdir(exist_ok=True)
    (server.cache_dir / "logs" / "tandem.log").touch()
    assert status(server, f"gradio_api/file={quote(str(video))}") == 200
    assert status(server, f"gradio_api/file={quote(str(video))}", headers={"Range": "bytes=0-9"}) == 206
    for path in (
        ROOT / "app.py",
        ROOT / "README.md",
        server.cache_dir / "settings.json",
        server.cache_dir / "logs" / "tandem.log",
        server.cache_dir / "weights" / MODEL / "model_index.json",
        outputs,
        Path("/etc/passwd"),
    ):
        assert status(server, f"gradio_api/file={quote(str(path))}") in {403, 404}, path
    for trick in (
        f"{outputs}/../settings.json",
        f"{outputs}/%2e%2e/settings.json",
        f"{outputs}/..%2fsettings.json",
        "app.py",
        "./app.py",
        "runtime/cli/main.py",
    ):
        assert status(server, f"gradio_api/file={trick}") in {403, 404}, trick
        assert status(server, f"gradio_api/file/{trick}") in {403, 404}, trick


def test_a_refused_call_of_the_page_has_what_the_page_shows(server: App) -> None:
    """Gradio's page shows "detail" of JSON; of text, it shows that it cannot parse it."""
    for body, status in ((b'{"data": ["' + b"x" * 200_000 + b'"]}', 413), (b"{", 422)):
        answer = send(server.port, b"POST", b"/gradio_api/queue/join", {b"Content-Type": b"application/json"}, body)
        assert answer.status == status and json.loads(answer.body)["detail"].endswith(".")
        for path in (b"/login", b"/gradio_api/upload"):
            kind = {b"Content-Type": b"multipart/form-data; boundary=x; charset=idna"}
            assert send(server.port, b"POST", path, kind, b"--x--").status == 415


def test_null_is_the_default_of_every_parameter_of_generate(server: App, client: Any) -> None:
    values = dict.fromkeys(name for name in FIELDS if name not in {"prompt", "steps", "seed"})
    done = client.predict("a red boat", **values, steps="1", seed="5", api_name="/generate")
    assert (done["request"]["seed"], done["request"]["steps"]) == (5, 1)
    assert done["event"] == "VideoSaved"


def test_the_manifest_of_the_page_is_served(server: App) -> None:
    with urllib.request.urlopen(f"{server.url}manifest.json", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("application/manifest+json")
        icon = json.load(answer)["icons"][0]["src"]
    with urllib.request.urlopen(f"{server.url}{icon}", timeout=30) as found:
        assert found.headers["content-type"] == "image/svg+xml"


def test_unused_routes_are_closed(server: App) -> None:
    for path in ("upload", "proxy=https://example.com/", "api/generate", "component_server", "token", "stream/a/b/1/c"):
        assert status(server, f"gradio_api/{path}") == 403, path
    for path in ("file=https://example.com/", "file=http:/example.com", "file/https://example.com/"):
        assert status(server, f"gradio_api/{path}") in {403, 404}, path
    assert status(server, "gradio_api/upload", method="POST") == 422
    assert status(server, "monitoring") == 403


def test_a_program_uploads_an_image(server: App, client: Any, tmp_path: Path) -> None:
    """The model of this server does not start from images, which it says only once the image was read."""
    boat, reason = saved(tmp_path / "my boat.png"), str(fact("image.model_without", model="Tiny", models=[]))
    is_path = render(fact("form.image_is_path", file="")).remedy
    for image, expected in ((handle_file(str(boat)), reason), (str(boat), is_path)):
        with pytest.raises(AppError) as without_images:
            client.predict("a boat", image=image, api_name="/generate")
        assert expected in str(without_images.value)
    (copy,) = (path for path in (server.cache_dir / "images").iterdir() if len(path.name) == 64)
    assert copy.read_bytes() == boat.read_bytes()
    address = f"{server.url}tandem/images/my%20boat.png"
    with urllib.request.urlopen(urllib.request.Request(address, boat.read_bytes()), timeout=10) as answer:
        kept = json.loads(answer.read())
    assert kept == {"image": f"sha256:{copy.name}/my boat.png", "width": 64, "height": 48}
    with pytest.raises(AppError) as without_images:
        client.predict("a boat", image=kept["image"], api_name="/generate")
    assert str(without_images.value).startswith(reason)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, b"no image"), timeout=10)
    with refused.value as answer:
        assert answer.code == 422
        assert as_text(fact("image.format_unknown", file="my boat.png", formats=FORMATS)) in answer.read().decode()
    # Nothing sends an image, by whatever name.
    for path in (f"tandem/images/{copy.name}", f"gradio_api/file={quote(str(copy))}", "tandem/images/my%20boat.png"):
        assert status(server, path) in {403, 404}, path
    for header in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert status(server, "tandem/images/boat.png", method="POST", headers=header) == 403
    assert "Traceback" not in server.printed()


def test_other_host_names_are_refused(server: App) -> None:
    assert status(server, "", headers={"Host": "evil.example:80"}) == 403
    assert status(server, "", headers={"Host": "localhost"}) == 200
    assert status(server, "gradio_api/queue/join", method="POST", headers={"Origin": "https://evil.example"}) == 403
    assert status(server, "gradio_api/queue/join", method="POST", headers={"Origin": "null"}) == 403


def test_the_origin_is_compared_with_scheme_and_port(server: App) -> None:
    own = server.url.rstrip("/")
    port = int(own.rpartition(":")[2])
    host = own.removeprefix("http://")
    assert status(server, "gradio_api/queue/join", method="POST", headers={"Origin": own, "Host": host}) == 422
    for origin in (
        f"http://127.0.0.1:{port + 1}",
        "http://127.0.0.1",
        f"https://127.0.0.1:{port}",
        "http://[",
        own + "0",
    ):
        for site in ({}, {"Sec-Fetch-Site": "same-origin"}):
            headers = {"Origin": origin, "Host": host, **site}
            assert status(server, "gradio_api/queue/join", method="POST", headers=headers) == 403, origin


def test_forwarding_headers_do_not_change_the_addresses_of_the_page(server: App) -> None:
    headers = {
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-Proto": "https",
        "X-Gradio-Server": "http://evil.example",
    }
    for path in ("", "config"):
        request = urllib.request.Request(server.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        assert "evil.example" not in text


def test_the_content_security_policy_allows_only_this_server(server: App) -> None:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy


def test_the_page_is_styled_before_its_script_runs(server: App) -> None:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        page = answer.read().decode()
    before_body = page.partition("<body")[0]
    assert "<title>Tandem</title>" in before_body
    assert 'html[data-theme="dark"] body { background' in before_body


@pytest.mark.slow
def test_a_password_guards_page_endpoint_files_and_api(tmp_path: Path) -> None:
    with serving_here(make_cache(tmp_path / "cache"), auth=("me", "secret")) as guarded:
        with contextlib.closing(JobStore(guarded.cache_dir / "jobs.sqlite")) as store:
            job = add_job(store)
            store.request_cancel([job.id])
        report = f"tandem/report/{job.id}.json"
        assert status(guarded, "config") == 401
        assert status(guarded, "gradio_api/info") == 401
        assert status(guarded, f"gradio_api/file={ROOT}/app.py") == 401
        assert status(guarded, "tandem/now") == 401
        assert status(guarded, report) in {401, 404}
        # The API needs a key instead, and only the check of health needs nothing.
        assert status(guarded, "v1/videos") == status(guarded, "v1/videos", method="POST") == 401
        assert status(guarded, "healthz") == 200
        key = ApiKeys(guarded.cache_dir).add("anna", KeyLimits())
        assert status(guarded, "v1/videos", headers={"Authorization": f"Bearer {key}"}) == 200
        user: Any = Client(guarded.url, auth=("me", "secret"), download_files=tmp_path, verbose=False)
        assert user.predict("a red boat", steps=1, api_name="/generate")["event"] == "VideoSaved"
        cookie = "; ".join(f"{name}={value}" for name, value in user.cookies.items())
        user.close()
        assert status(guarded, report, headers={"Cookie": cookie}) == 200
        assert status(guarded, report, headers={"Cookie": cookie.replace("=", "=x")}) in {401, 404}
        with pytest.raises(ValueError, match="Could not login"):
            Client(guarded.url, auth=("me", "wrong"), verbose=False)


def test_a_port_in_use_is_refused_before_anything_is_made(server: App, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as refused, serving_here(tmp_path, port=server.port):
        pass
    assert (refused.value.code, refused.value.data["port"]) == ("ui.port_taken", server.port)
    assert not (tmp_path / "jobs.sqlite").exists()


@pytest.mark.parametrize(
    ("host", "code"), [("no-such-host.invalid", "ui.host_unknown"), ("203.0.113.7", "ui.host_not_local")]
)
def test_a_host_of_another_machine_is_rejected(host: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as refused, serving_here(tmp_path, host=host):
        pass
    assert (refused.value.code, refused.value.data["host"]) == (code, host)
    assert "127.0.0.1" in refused.value.remedy


def test_a_stream_that_breaks_off_with_an_http_error_ends_quietly() -> None:
    async def events() -> AsyncIterator[str]:
        yield "data: the session does not exist\n\n"
        raise HTTPException(404)

    async def fails(_request: Request) -> StreamingResponse:
        raise RuntimeError("another error")

    routes = [Route("/ends", lambda _request: StreamingResponse(events())), Route("/fails", fails)]
    client = TestClient(Starlette(routes=routes, middleware=[Middleware(security.EndedStreamMiddleware)]))
    assert client.get("/ends").text == "data: the session does not exist\n\n"
    with pytest.raises(RuntimeError, match="another error"):
        client.get("/fails")


@pytest.mark.parametrize("gone", [True, False])
def test_a_stream_whose_session_is_gone_ends_quietly_with_its_client(gone: bool) -> None:
    async def events() -> AsyncIterator[str]:
        try:
            yield "data: begun\n\n"
            await asyncio.sleep(60 if gone else 0)
        finally:
            raise KeyError("session")

    async def request() -> None:
        sent: list[Message] = []

        async def receive() -> Message:
            while not sent:
                await asyncio.sleep(0)
            await asyncio.sleep(0 if gone else 60)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        app = security.EndedStreamMiddleware(StreamingResponse(events()))
        await app({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)

    with contextlib.nullcontext() if gone else pytest.raises(KeyError):
        asyncio.run(request())
