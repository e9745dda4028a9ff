"""A share link over HTTP, through a stand-in for gradio's tunnel on loopback: who gets in, and what they get."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from runtime.core.facts import Fact, as_text
from runtime.server.api_words import ApiWords
from runtime.video.image_decoder import FORMATS
from tests.app_server import MODEL, ROOT, Server, make_cache, serving
from tests.facts import fact
from tests.fuzz.raw_http import Answer, send
from tests.image_files import saved
from tests.sharing_app import HOST, link_of
from tests.waiting import until

pytestmark = pytest.mark.slow  # starts an app and logs in several times

FLAGS = (
    *("--share", "--share-frames", "9", "--share-size", "192x128", "--share-steps", "400"),
    *("--share-queue", "1", "--share-queue-all", "2", "--share-rate", "4"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_cache(tmp_path_factory.mktemp("shared")), *FLAGS, program=("-m", "tests.sharing_app")) as running:
        yield running
    assert "Traceback" not in (running.cache_dir / "server.txt").read_text(encoding="utf-8")


class Visitor:
    """A visitor who has logged in."""

    def __init__(self, server: Server) -> None:
        self.port, user, password = link_of(server.cache_dir)
        self.client: Any = Client(f"http://127.0.0.1:{self.port}/", auth=(user, password), verbose=False)
        self.cookie = "; ".join(f"{name}={value}" for name, value in self.client.cookies.items())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        fields = {"Cookie": self.cookie, "Content-Type": "application/json"} | headers
        encoded = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}
        return send(
            self.port, method.encode(), path.encode(), encoded, b"" if body is None else json.dumps(body).encode()
        )


@pytest.fixture(scope="module")
def visitor(server: Server) -> Iterator[Visitor]:
    made = Visitor(server)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def other(server: Server) -> Iterator[Visitor]:
    made = Visitor(server)
    yield made
    made.client.close()


def test_the_link_has_a_password_and_the_owners_page_needs_none(server: Server) -> None:
    port, user, password = link_of(server.cache_dir)
    assert user == "visitor"
    assert re.fullmatch(r"[a-z]{6}(-[a-z]{6}){3}", password)
    own = int(server.url.rstrip("/").rpartition(":")[2])
    assert send(own, b"GET", b"/config").status == 200
    assert send(port, b"GET", b"/").status == 200
    for path in (b"/config", b"/gradio_api/info", b"/video/00000000.mp4", b"/gradio_api/queue/data?session_hash=a"):
        assert send(port, b"GET", path).status == 401, path
    uploads = (b"/gradio_api/upload", b"/tandem/images/boat.png")
    for path in (b"/gradio_api/queue/join", b"/gradio_api/call/generate", b"/gradio_api/cancel", *uploads):
        assert send(port, b"POST", path, body=b"{}").status == 401, path
    with pytest.raises(ValueError, match="Could not login"):
        Client(f"http://127.0.0.1:{port}/", auth=(user, "wrong"), verbose=False)


def test_the_visitors_page_answers_only_to_the_links_host_name(visitor: Visitor) -> None:
    assert visitor.get("/config", Host=HOST).status == 200
    link = f"http://{HOST}:{visitor.port}"
    assert visitor.get("/config", Host=f"{HOST}:80", Origin=link).status == 200
    for origin in (f"https://{HOST}:{visitor.port}", f"http://{HOST}:1", f"http://evil.{HOST}:{visitor.port}"):
        assert visitor.get("/config", Host=f"{HOST}:80", Origin=origin).status == 403, origin
    own = json.loads(visitor.get("/config", X_Forwarded_Host=f"{HOST}:{visitor.port}").body)["root"]
    assert own == link
    for name in ("evil.example", f"{HOST}:1", f"{HOST}, evil.example"):
        assert HOST not in json.loads(visitor.get("/config", X_Forwarded_Host=name).body)["root"], name
        assert b"evil.example" not in visitor.get("/config", X_Forwarded_Host=name).body, name
    for host in ("evil.example", f"{HOST}.evil.example", "0.0.0.0"):
        assert visitor.get("/config", Host=host).status == 403, host
    assert visitor.get("/robots.txt").body == b"User-agent: *\nDisallow: /\n"


def test_requests_from_other_sites_are_refused(visitor: Visitor) -> None:
    call = {"data": ["a red boat", *[None] * 10]}
    foreign = ({"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}, {"Origin": "https://evil.example"})
    for headers in (*foreign, {"Origin": "null"}):
        assert visitor.ask("POST", "/gradio_api/call/generate", call, **headers).status == 403, headers
        assert visitor.ask("POST", "/login", {}, **headers).status == 403, headers
        assert visitor.get("/config", **headers).status == 403, headers
    # A link in a letter or on a page opens it all the same.
    assert visitor.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    assert visitor.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors").status == 403


def test_visitors_only_see_their_own_videos(server: Server, visitor: Visitor, other: Visitor) -> None:
    prompt = "a red boat that only its visitor may see"
    final = visitor.client.predict(prompt, seed=3, steps=2, api_name="/generate")
    assert str(server.cache_dir) not in json.dumps(final)
    address = f"/{final['video']}"
    whole = visitor.get(address)
    assert whole.status == 200 and whole.body[4:8] == b"ftyp" and prompt.encode() in whole.body
    part = visitor.get(address, Range="bytes=0-9")
    assert part.status == 206 and part.body == whole.body[:10]
    assert visitor.cookie.encode() not in part.head and b"no-store" in part.head
    assert other.get(address).status == 404
    assert send(visitor.port, b"GET", address.encode()).status == 401
    file = next(path for path in (server.cache_dir / "outputs").glob("*only-its-visitor*.mp4"))
    for path in (f"/gradio_api/file={file}", f"/gradio_api/file/{file}", f"/video/{file.name}", f"/video/{file}"):
        for person in (visitor, other):
            assert person.get(path).status in {403, 404}, path
    job = final["video"].removeprefix("video/").removesuffix(".mp4")
    export = {"clips": [job], "format": "gif", "start": None, "end": None}
    for person, status, file_start in ((visitor, 200, True), (other, 422, False)):
        assert person.get(f"/tandem/export/{job}").status == status
        exported = person.ask("POST", "/tandem/export", export).body
        assert (b"GIF89a" in exported, prompt.encode() in exported) == (file_start, file_start)
        assert (b'"error"' in exported) is not file_start and str(server.cache_dir).encode() not in exported
    # What only the person whose Tandem it is fetches, not even of one's own.
    for path in (
        "now",
        f"poster/{job}.webp",
        f"copy/{job}.mp4",
        f"before/{job}.mp4",
        f"report/{job}.json",
        f"report/whole/{job}.json",
    ):
        assert visitor.get(f"/tandem/{path}").status == 403, path
    # The page's own functions, given the other's job: nothing of it is shown.
    for function in other.client.config["dependencies"]:
        if len(function["inputs"]) != 1 or not function["backend_fn"]:
            continue
        session = f"nosy{function['id']}"
        call = {"fn_index": function["id"], "session_hash": session, "data": [job]}
        assert other.ask("POST", "/gradio_api/queue/join", call).status == 200
        answer = other.get(f"/gradio_api/queue/data?session_hash={session}").body
        assert prompt.encode() not in answer and job.encode() not in answer, function


def test_a_session_belongs_to_the_visitor_who_started_it(visitor: Visitor, other: Visitor) -> None:
    attach = next(one for one in visitor.client.config["dependencies"] if len(one["inputs"]) == 1 and one["backend_fn"])
    call = {"fn_index": attach["id"], "session_hash": "mine", "data": [""]}
    assert visitor.ask("POST", "/gradio_api/queue/join", call).status == 200
    assert other.ask("POST", "/gradio_api/queue/join", call).status == 403
    assert other.get("/gradio_api/queue/data?session_hash=mine").status == 403
    assert other.get("/gradio_api/heartbeat/mine").status == 403
    end = {"session_hash": "mine", "fn_index": attach["id"], "event_id": "0" * 32}
    assert other.ask("POST", "/gradio_api/cancel", end).status == 403
    assert visitor.get("/gradio_api/queue/data?session_hash=mine").status == 200
    assert visitor.get("/gradio_api/queue/data?session_hash=nobodys").status == 404


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"frames": 13}, fact("server.visitor_maximum", field="frames", value=13, maximum=9)),
        ({"steps": 401}, fact("server.visitor_maximum", field="steps", value=401, maximum=400)),
        ({"width": 208}, fact("server.visitor_size", width=208, height=32, maximum="192×128")),
        ({"width": 144, "height": 144}, fact("server.visitor_size", width=144, height=144, maximum="192×128")),
        ({"model": "/etc"}, fact("model.not_offered", models=[MODEL, "diorama"])),
        ({"model": "../weights/tiny"}, fact("model.not_offered", models=[MODEL, "diorama"])),
        ({"prompt": ""}, fact("request.prompt_empty")),
    ],
    ids=str,
)
def test_exceeded_limits_are_described(visitor: Visitor, values: dict[str, Any], reason: Fact) -> None:
    with pytest.raises(AppError) as refused:
        visitor.client.predict(**({"prompt": "a red boat"} | values), api_name="/generate")
    assert str(refused.value) == as_text(reason, ApiWords())


def test_no_local_path_is_sent_to_visitors(server: Server, visitor: Visitor) -> None:
    for path in ("/", "/config", "/gradio_api/info", "/manifest.json", "/theme.css"):
        answer = visitor.get(path)
        assert answer.status == 200, path
        for folder in (server.cache_dir, ROOT, Path.home()):
            assert str(folder).encode() not in answer.head + answer.body, (path, folder)


def test_owner_functions_do_not_exist_for_visitors(visitor: Visitor) -> None:
    page = visitor.get("/config").body.decode()
    for part in ("panel-", "Engines", "field-backend", "acceleration", "Stop sharing", "Offload"):
        assert part not in page, part
    with pytest.raises(TypeError, match="not a valid key-word"):
        visitor.client.predict("a red boat", backends={"all": "inductor"}, api_name="/generate")
    for path in ("run/predict", "api/generate", "component_server", "token", "startup", "call/other"):
        for method in ("GET", "POST"):
            assert visitor.ask(method, f"/gradio_api/{path}", {}).status == 403, path
    assert visitor.get("/logout").status == 403
    call = {"data": ["a red boat"] * 15}
    assert visitor.ask("POST", "/gradio_api/call/generate", call).status == 422
    assert visitor.ask("POST", "/gradio_api/call/generate", {"data": ["x" * 300_000]}).status == 413


def test_visitors_name_their_own_uploads_only(visitor: Visitor, other: Visitor, tmp_path: Path) -> None:
    """The model of this server does not start from images, which it says only of a visitor's own."""
    boat = saved(tmp_path / "boat.png")
    own = f"sha256:{hashlib.sha256(boat.read_bytes()).hexdigest()}/boat.png"
    for image in (handle_file(str(boat)), own):
        with pytest.raises(AppError) as refused:
            visitor.client.predict("a boat", image=image, api_name="/generate")
        assert str(refused.value).startswith(str(fact("image.model_without", model="Tiny", models=[])))
    for image in (own, str(boat), "/etc/passwd"):
        with pytest.raises(AppError) as refused:
            other.client.predict("a boat", image=image, api_name="/generate")
        assert str(refused.value) == as_text(fact("server.visitor_image_unknown", field="image"), ApiWords())
    for name in (own.partition("/")[0].removeprefix("sha256:"), "boat.png"):
        assert visitor.get(f"/tandem/images/{name}").status == 403
    answer = visitor.ask("POST", "/tandem/images/boat.png", "no image")
    reason = as_text(fact("image.format_unknown", file="boat.png", formats=FORMATS))
    assert answer.status == 422 and reason in answer.body.decode()


def test_videos_in_an_hour_are_limited(server: Server) -> None:
    visitor = Visitor(server)
    for seed in range(4):
        visitor.client.predict("a red boat", steps=1, frames=1, seed=seed, api_name="/generate")
    with pytest.raises(AppError) as refused:
        visitor.client.predict("a red boat", steps=1, frames=1, api_name="/generate")
    assert str(refused.value) == as_text(fact("server.visitor_rate", maximum=4, minutes=60))
    visitor.client.close()


def test_the_owners_page_has_no_limits(server: Server) -> None:
    client = Client(server.url, verbose=False)
    final = client.predict("a red boat", steps=1, frames=13, backends={"vae": "pytorch"}, api_name="/generate")
    assert final["request"]["frames"] == 13
    assert Path(final["video"]).read_bytes()[4:8] == b"ftyp"
    client.close()


def test_login_attempts_are_limited(server: Server) -> None:
    port, user, password = link_of(server.cache_dir)

    def attempt(given: str, address: str) -> Answer:
        # What a visitor sends comes first, the addresses of the share server's own proxies last.
        form = {b"Content-Type": b"application/x-www-form-urlencoded"}
        form |= {b"X-Forwarded-For": f"8.8.4.4, {address}, 10.0.0.7".encode()} if address else {}
        return send(port, b"POST", b"/login", form, f"username={user}&password={given}".encode())

    answers = [attempt(f"x{number}", "9.9.9.9") for number in range(12)]
    assert [answer.status for answer in answers] == [400] * 10 + [429] * 2
    assert b"Wait a minute" in answers[-1].body
    assert attempt(password, "9.9.9.9").status == 429
    # Other visitors can still log in, and right attempts do not count.
    assert {attempt(password, "1.1.1.1").status for _ in range(12)} == {200}
    # Last, because it blocks logins for a minute: many addresses reach the overall limit.
    assert {attempt("x", f"1.2.{number}.1").status for number in range(100)} >= {400, 429}
    until(lambda: attempt(password, "1.0.0.1").status == 200)
    assert attempt("x", "1.2.0.1").status == 429
