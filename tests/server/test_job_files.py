"""Tandem's own routes serve the owner's jobs by their complete ids, and nothing without a login."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from starlette.applications import Starlette

from runtime.core.errors import OutputError
from runtime.core.settings import Settings
from runtime.pipeline.files import CLIP, clip_name
from runtime.queue import storage
from runtime.queue.store import NAME, JobStore
from runtime.server.gradio_requests import FILE, access
from runtime.server.job_files import routes
from runtime.video.mp4 import read_metadata
from tests.app_server import App
from tests.plans import no_engines
from tests.queue.samples import add_job, sample_plan, sample_request
from tests.queue.test_retention import made as made_video
from tests.thread_queue import RunningQueue


@pytest.fixture(scope="module")
def made(web_app: App, tmp_path_factory: pytest.TempPathFactory) -> tuple[App, str]:
    """Return a server and the job of a video that it made."""
    client = Client(web_app.url, download_files=tmp_path_factory.mktemp("got"), verbose=False)
    job = client.predict("a red boat at night", seed=5, api_name="/generate")["job"]
    client.close()
    return web_app, job


def get(server: App, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


@pytest.mark.slow
def test_now_returns_states(made: tuple[App, str]) -> None:
    server, job = made
    status, body, _ = get(server, "tandem/now")
    now = json.loads(body)
    assert status == 200 and {"queue": 0, "percent": None}.items() <= now.items()
    assert now["jobs"][job] == "done"
    # With another version than the current one, the answer comes at once; with the current one, at the next change.
    assert json.loads(get(server, f"tandem/now/{now['version'] + 1}")[1])["jobs"] == now["jobs"]
    with ThreadPoolExecutor() as pool, closing(JobStore(server.cache_dir / NAME)) as store:
        waiting = pool.submit(get, server, f"tandem/now/{now['version']}")
        store.star([job], True)
        later = json.loads(waiting.result()[1])
        store.star([job], False)
    assert later["version"] > now["version"] and later["app"] == now["app"]


@pytest.mark.slow
def test_a_poster_is_a_still(made: tuple[App, str]) -> None:
    server, job = made
    status, body, headers = get(server, f"tandem/poster/{job}.webp")
    assert (status, headers["content-type"]) == (200, "image/webp") and body[8:12] == b"WEBP"
    assert b"ANIM" not in body


@pytest.mark.slow
def test_a_copy_has_no_metadata_and_is_removed(made: tuple[App, str], tmp_path: Path) -> None:
    server, job = made
    status, body, headers = get(server, f"tandem/copy/{job}.mp4")
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(body)
    assert status == 200 and f"tandem-{job}.mp4" in headers["content-disposition"]
    assert b"night" not in body and int(headers["content-length"]) == len(body)
    with pytest.raises(OutputError):
        read_metadata(copy)
    assert {path.suffix for path in (server.cache_dir / "outputs").iterdir()} == {".mp4"}


def test_a_report_has_the_prompt_only_on_demand(made: tuple[App, str]) -> None:
    server, job = made
    status, body, _ = get(server, f"tandem/report/{job}.json")
    assert status == 200 and json.loads(body)["id"] == job
    assert b"night" not in body and str(server.cache_dir).encode() not in body
    assert b"a red boat at night" in get(server, f"tandem/report/whole/{job}.json")[1]


def test_unknown_files_are_not_found(made: tuple[App, str], subtests: pytest.Subtests) -> None:
    for path in (
        "poster/{}.webp",
        "copy/{}.mp4",
        "before/{}.mp4",
        "clip/{}/1.mp4",
        "report/{}.json",
        "report/whole/{}.json",
    ):
        for name in ("01234567", "..%2Fjobs", "%2e%2e", "x" * 300, "0123456g", "%00", ""):
            with subtests.test(msg=f"{path} {name[:20]}"):
                assert get(made[0], f"tandem/{path.format(name)}")[0] in {403, 404}


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", "/tandem/now", "login"),
        ("GET", "/tandem/now/12", "login"),
        ("GET", "/tandem/now/-1", None),
        ("HEAD", "/tandem/copy/0123abcd.mp4", "login"),
        ("GET", "/tandem/report/whole/0123abcd.json", "login"),
        ("POST", "/tandem/now", None),
        ("GET", "/tandem/", None),
        ("GET", "/tandem/poster/0123abcd.mp4", None),
        ("GET", "/tandem/copy/0123ABCD.mp4", None),
        ("GET", "/tandem/copy/0123abcd.mp4/", None),
        ("GET", "/tandem/clip/0123abcd/12.mp4", "login"),
        ("GET", "/tandem/clip/0123abcd/-1.mp4", None),
        ("GET", "/tandem/clip/0123abcd/../1.mp4", None),
        ("GET", "/tandem/clip/0123abcd/checkpoint.safetensors", None),
    ],
)
def test_only_these_routes_are_open(method: str, path: str, needed: str | None) -> None:
    assert access(method, path) == needed


def test_a_video_does_not_expire_while_the_page_sends_it(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    settings.outputs_dir.mkdir()
    queue = RunningQueue(tmp_path, settings.outputs_dir, no_engines(tmp_path), start=False)
    video = settings.outputs_dir / f"{made_video(queue.store, settings.outputs_dir, None)}.mp4"
    content = b"frames" * 100_000
    video.write_bytes(content)
    removed: list[int] = []
    sent = bytearray()

    def expire() -> int:
        limit = storage.Retention(days=1)
        return storage.expire(queue.store, limit, settings.outputs_dir, set(queue.sending), now=2 * time.time())

    async def send(message: Any) -> None:
        removed.append(expire())
        sent.extend(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    path = f"{FILE}{video}"
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "headers": [],
        "query_string": b"",
    }
    asyncio.run(Starlette(routes=routes(queue, settings))(scope, receive, send))
    assert bytes(sent) == content and len(removed) > 2 and not any(removed)
    assert (len(queue.sending), expire(), video.exists()) == (0, 1, False)
    queue.close()


def test_files_outside_the_folder_and_of_visitors_are_not_served(made: tuple[App, str]) -> None:
    server, _ = made
    store = JobStore(server.cache_dir / "jobs.sqlite")
    try:
        outside = add_job(store)
        theirs = store.add(sample_request(prompt="a secret"), sample_plan(), owner="visitor").id
        store.request_cancel([outside.id, theirs])
        for job, content in ((outside.id, b"finished sections"), (theirs, b"another's")):
            folder = store.folder(job)
            assert folder is not None
            (folder / CLIP).mkdir(parents=True)
            (folder / CLIP / clip_name(2)).write_bytes(content)
            (folder / CLIP / "0001.h264").write_bytes(content)
    finally:
        store.close()
    assert get(server, f"tandem/copy/{outside.id}.mp4")[0] == 404
    assert get(server, f"tandem/poster/{outside.id}.webp")[0] == 404
    assert get(server, f"tandem/report/{theirs}.json")[0] == 404
    # A clip of finished sections belongs to the job; of its folder, nothing else is served.
    status, body, headers = get(server, f"tandem/clip/{outside.id}/2.mp4")
    assert (status, body, headers["content-type"]) == (200, b"finished sections", "video/mp4")
    status, body, _ = get(server, f"tandem/clip/{outside.id}/2.mp4", Range="bytes=9-")
    assert (status, body) == (206, b"sections")
    assert get(server, f"tandem/clip/{outside.id}/1.mp4")[0] == 404
    assert get(server, f"tandem/clip/{theirs}/2.mp4")[0] == 404
    assert theirs not in json.loads(get(server, "tandem/now")[1])["jobs"]
