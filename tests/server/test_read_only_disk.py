"""The HTTP API on a disk that becomes read-only while a video is made: it refuses, plays what is there, and ends."""

import time
from pathlib import Path

import httpx
import pytest

from tests.app_server import make_cache, serving_here
from tests.full_disk import fail, failing
from tests.waiting import until


@pytest.mark.slow
def test_the_api_on_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    # Sparse, and large enough to queue videos.
    with failing(cache, tmp_path / "image", 6 << 30) as possible:
        if not possible:
            pytest.skip("needs root, ext4 and loop devices")
        make_cache(cache)
        with serving_here(cache, page=False) as app, httpx.Client(base_url=app.url, timeout=60) as http:
            small = {"prompt": "a red boat", "model": "tiny"}

            def post(steps: int) -> httpx.Response:
                return http.post("v1/videos", json={**small, "steps": steps})

            def state(video: str) -> tuple[str, int]:
                found = http.get(f"v1/videos/{video}").json()
                return found["status"], found["progress"]

            done = post(1).json()["id"]
            until(lambda: state(done)[0] == "completed", pause=0.1)
            running, queued = post(200).json()["id"], post(200).json()["id"]
            until(lambda: state(running)[1] > 0, pause=0.1)
            assert http.get("healthz").status_code == 200
            fail(cache)
            health = http.get("healthz")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "queue.store_read_only")
            # What is there is listed and played.
            assert {one["id"] for one in http.get("v1/videos").json()["data"]} == {done, running, queued}
            part = http.get(f"v1/videos/{done}/content", headers={"Range": "bytes=4-7"})
            assert (part.status_code, part.content) == (206, b"ftyp")
            # Nothing is accepted or changed, and each refusal tells why.
            refused = post(1)
            assert (refused.status_code, refused.json()["error"]["type"]) == (507, "server_error")
            for video in (queued, running):
                began = time.monotonic()
                refused = http.delete(f"v1/videos/{video}")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue.store_read_only")
                assert time.monotonic() - began < 10
            assert state(queued)[0] == "queued" and state(running)[0] == "in_progress"
            ending = time.monotonic()
        assert time.monotonic() - ending < 20
        assert "Traceback" not in app.printed()
