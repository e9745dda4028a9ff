"""API keys: their file, command, limits, and who sees which video; and the API beside the web app."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.core.errors import SettingsError
from runtime.server.api_keys import NAME, ApiKeys, KeyLimits
from tests.app_server import ROOT, Server, environment, make_cache, serving
from tests.waiting import until

SMALL = {"prompt": "a red boat", "steps": 1, "seed": 5}
SERVE = ("app.py", "serve")


def command(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "app.py", "serve", *words],
        cwd=ROOT,
        env=environment() | {"TANDEM_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def with_key(server: Server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_keys_are_hashed_private_and_unique(tmp_path: Path) -> None:
    keys = ApiKeys(tmp_path)
    assert keys.keys() is None
    secret = keys.add("anna", KeyLimits(videos=2, frames=9))
    assert len(secret) > 40
    assert secret not in (tmp_path / NAME).read_text(encoding="utf-8")
    found = ApiKeys(tmp_path).find(secret)
    assert found is not None
    assert (found.name, found.owner, found.limits.videos, found.limits.frames) == ("anna", "key:anna", 2, 9)
    assert keys.find(secret[:-1]) is None and keys.find("") is None and keys.find(found.digest) is None
    with pytest.raises(SettingsError) as refused:
        keys.add("anna", KeyLimits())
    assert refused.value.code == "server.api_key_exists"
    # Another process sees a revoked key at once; the file stays, so that every request needs a key.
    other = ApiKeys(tmp_path)
    assert other.find(secret) is not None
    keys.revoke("anna")
    assert other.find(secret) is None and other.keys() == ()
    with pytest.raises(SettingsError) as refused:
        keys.revoke("anna")
    assert refused.value.code == "server.api_key_unknown"


@pytest.mark.parametrize("name", ["", "a b", "../a", "a" * 41, "-a", "a\n", "ä"])
def test_names_that_cannot_be_used_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        ApiKeys(tmp_path).add(name, KeyLimits())
    assert refused.value.code == "server.api_key_name"
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", '[{"name": "a"}]', '[{"name": "a", "digest": "b", "created": 1}]']
)
def test_a_damaged_file_refuses_every_request(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text, encoding="utf-8")
    for use in (ApiKeys(tmp_path).keys, lambda: ApiKeys(tmp_path).find("x"), lambda: ApiKeys(tmp_path).revoke("a")):
        with pytest.raises(SettingsError) as refused:
            use()
        assert refused.value.code == "server.api_keys_unreadable"


def test_the_command_adds_lists_and_revokes_keys(tmp_path: Path) -> None:
    made = command(tmp_path, "keys", "add", "anna", "--videos", "3", "--size", "64x32", "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["limits"] == {"videos": 3, "per_hour": 100, "frames": None, "steps": None, "pixels": 2048}
    assert ApiKeys(tmp_path).find(found["key"]) is not None
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    listed = command(tmp_path, "keys", "list", "--json")
    (row,) = json.loads(listed.stdout.splitlines()[-1])["keys"]
    assert row["name"] == "anna" and "digest" not in row and found["key"] not in listed.stdout + listed.stderr
    for words in (["add", "anna"], ["add", "../x"], ["add", "ben", "--size", "big"], ["add", "ben", "--videos", "0"],
                  ["revoke", "ben"]):  # fmt: skip
        refused = command(tmp_path, "keys", *words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 2, refused.stderr
    assert command(tmp_path, "keys", "revoke", "anna").returncode == 0
    assert ApiKeys(tmp_path).keys() == ()


def test_another_host_needs_a_key(tmp_path: Path) -> None:
    refused = command(tmp_path, "--host", "0.0.0.0")
    assert refused.returncode == 2 and "serve keys add" in refused.stderr
    (tmp_path / NAME).write_text("{", encoding="utf-8")
    damaged = command(tmp_path)
    assert damaged.returncode == 2 and NAME in damaged.stderr and "Traceback" not in damaged.stderr


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    cache = make_cache(tmp_path_factory.mktemp("keyed"))
    keys = ApiKeys(cache)
    limits = {
        "anna": KeyLimits(),
        "ben": KeyLimits(),
        "few": KeyLimits(videos=2),
        "hourly": KeyLimits(per_hour=2),
        "small": KeyLimits(frames=5, steps=2, pixels=64 * 32),
    }
    secrets = {name: keys.add(name, one) for name, one in limits.items()}
    with serving(cache, program=SERVE) as server:
        yield server, secrets


def test_every_route_but_health_needs_a_key(keyed: tuple[Server, dict[str, str]]) -> None:
    server, secrets = keyed
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for method, path in (
            ("GET", "v1/videos"), ("POST", "v1/videos"), ("GET", "v1/videos/00000000"), ("GET", "v1/models"),
            ("GET", "v1/videos/00000000/content"), ("GET", "v1/videos/00000000/events"), ("GET", "v1/nothing"),
            ("DELETE", "v1/videos/00000000"), ("GET", "metrics"), ("GET", "v1/openapi.json"), ("GET", ""),
        ):  # fmt: skip
            answer = http.request(method, path)
            assert code_of(answer) == (401, "server.api_key_missing"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        for value in ("Bearer", "Basic eA==", "bearer x y", f"Bearer {secrets['anna'][:-1]}", "\xff"):
            answer = http.get("v1/videos", headers=[(b"Authorization", value.encode("latin-1"))])
            assert answer.status_code == 401, value
        twice = [("Authorization", f"Bearer {secrets['anna']}")] * 2
        assert http.get("v1/videos", headers=twice).status_code == 401
        assert http.get("healthz").status_code == 200
        assert http.get("v1/videos", headers={"Authorization": f"bearer {secrets['anna']}"}).status_code == 200


def test_a_key_sees_only_its_own_videos(keyed: tuple[Server, dict[str, str]]) -> None:
    server, secrets = keyed
    with with_key(server, secrets["anna"]) as anna, with_key(server, secrets["ben"]) as ben:
        key = {"Idempotency-Key": "same"}
        made = anna.post("v1/videos", json=SMALL, headers=key).json()["id"]
        other = ben.post("v1/videos", json=SMALL, headers=key).json()["id"]
        assert made != other
        until(lambda: anna.get(f"v1/videos/{made}").json()["status"] == "completed", pause=0.1)
        assert anna.get(f"v1/videos/{made}/content").status_code == 200
        for path in ("", "/content", "/content?variant=thumbnail", "/events"):
            assert ben.get(f"v1/videos/{made}{path}").status_code == 404
        assert ben.delete(f"v1/videos/{made}").status_code == 404
        assert ben.get("v1/videos", params={"after": made}).status_code == 404
        assert made not in ben.get("v1/videos").text and other not in anna.get("v1/videos").text
        assert anna.get(f"v1/videos/{made}").status_code == 200
        failure = anna.post("v1/videos", json={**SMALL, "loras": ["missing"]})
        assert failure.status_code in {400, 422} and str(server.cache_dir) not in failure.text


def test_limits_of_a_key_are_kept(keyed: tuple[Server, dict[str, str]]) -> None:
    server, secrets = keyed
    with with_key(server, secrets["few"]) as few:
        made = [few.post("v1/videos", json={**SMALL, "steps": 300}).json()["id"] for _ in range(2)]
        assert code_of(few.post("v1/videos", json=SMALL)) == (429, "server.api_queue_full")
        assert few.delete(f"v1/videos/{made[0]}").status_code == 200
        assert few.post("v1/videos", json=SMALL).status_code == 200
        few.delete(f"v1/videos/{made[1]}")
    with with_key(server, secrets["hourly"]) as hourly:
        for _ in range(2):
            video = hourly.post("v1/videos", json=SMALL, headers={"Idempotency-Key": str(time.time())}).json()["id"]
            assert hourly.delete(f"v1/videos/{video}").status_code == 200
        refused = hourly.post("v1/videos", json=SMALL)
        assert code_of(refused) == (429, "server.api_rate")
        assert 0 < int(refused.headers["retry-after"]) <= 3600
    with with_key(server, secrets["small"]) as small:
        assert small.post("v1/videos", json={**SMALL, "frames": 5}).status_code == 200
        for values, param in (
            ({}, "frames"),
            ({"frames": 5, "steps": 3}, "steps"),
            ({"frames": 5, "size": "64x48"}, "size"),
        ):
            answer = small.post("v1/videos", json={**SMALL, **values})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_revoked_and_new_keys_take_effect_at_once(keyed: tuple[Server, dict[str, str]]) -> None:
    server, _ = keyed
    keys = ApiKeys(server.cache_dir)
    first = keys.add("short", KeyLimits())
    with with_key(server, first) as http:
        made = http.post("v1/videos", json=SMALL).json()["id"]
        keys.revoke("short")
        assert code_of(http.get("v1/videos")) == (401, "server.api_key_wrong")
    # The name's videos belong to the next key of that name.
    with with_key(server, keys.add("short", KeyLimits())) as http:
        assert http.get(f"v1/videos/{made}").status_code == 200


def test_a_job_of_a_key_resumes_after_the_server_was_killed(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    key = ApiKeys(cache).add("anna", KeyLimits())
    with serving(cache, program=SERVE) as first, with_key(first, key) as http:
        videos = [http.post("v1/videos", json={**SMALL, "steps": 150}).json()["id"] for _ in range(2)]
        until(lambda: http.get(f"v1/videos/{videos[0]}").json()["progress"] > 2, pause=0.05)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    with serving(cache, program=SERVE) as second, with_key(second, key) as http:
        until(lambda: {http.get(f"v1/videos/{video}").json()["status"] for video in videos} == {"completed"}, pause=0.2)


def test_the_web_app_serves_the_api_beside_its_page(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    with serving(cache) as app, httpx.Client(base_url=app.url, timeout=60) as http:
        assert "<html" in http.get("").text
        made: dict[str, Any] = http.post("v1/videos", json=SMALL).json()
        until(lambda: http.get(f"v1/videos/{made['id']}").json()["status"] == "completed", pause=0.1)
        assert http.get(f"v1/videos/{made['id']}/content", headers={"Range": "bytes=4-7"}).content == b"ftyp"
        assert http.get("metrics").status_code == http.get("healthz").status_code == 200
        assert code_of(http.get("v1/nothing")) == (404, "server.api_no_route")
        ApiKeys(cache).add("anna", KeyLimits())
        assert http.get("v1/videos").status_code == 401
        assert http.get("").status_code == 200


def test_the_password_of_the_web_app_closes_the_api_without_a_key(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    with serving(cache, "--auth", "me:secret") as app, httpx.Client(base_url=app.url, timeout=60) as http:
        assert http.get("v1/videos").status_code == http.post("v1/videos", json=SMALL).status_code == 401
        assert http.get("healthz").status_code == 200
        with with_key(app, ApiKeys(cache).add("anna", KeyLimits())) as anna:
            assert anna.get("v1/videos").status_code == 200
