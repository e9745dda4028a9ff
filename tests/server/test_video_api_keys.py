"""API keys: their file, command, limits, and who sees which video; and the API beside the web app."""

import json
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.cli.main import run
from runtime.core.errors import SettingsError
from runtime.queue import recovery
from runtime.queue.instances import Instance
from runtime.queue.store import JobStore
from runtime.server.api_keys import NAME, ApiKeys, KeyLimits
from runtime.server.serve import resume_interrupted
from tests.app_server import App
from tests.cli.refusals import refused
from tests.queue.samples import add_job, sample_plan, sample_request
from tests.umask import users_umask
from tests.waiting import until

SMALL = {"prompt": "a red boat", "steps": 1, "seed": 5}


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `serve` with some words; return the exit code and what it printed."""
    code = run(["serve", *words])
    out, err = capsys.readouterr()
    return code, out, err


def with_key(server: App, key: str) -> httpx.Client:
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


def test_the_command_adds_lists_and_revokes_keys(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with users_umask(0o022):
        code, out, err = command(capsys, "keys", "add", "anna", "--videos", "3", "--size", "64x32", "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["limits"] == {"videos": 3, "per_hour": 100, "frames": None, "steps": None, "pixels": 2048}
    assert ApiKeys(cache_dir).find(found["key"]) is not None
    assert stat.S_IMODE((cache_dir / NAME).stat().st_mode) == 0o600
    _, out, err = command(capsys, "keys", "list", "--json")
    (row,) = json.loads(out.splitlines()[-1])["keys"]
    assert row["name"] == "anna" and "digest" not in row and found["key"] not in out + err
    for words, refusal in (
        (["add", "anna"], "server.api_key_exists"),
        (["add", "../x"], "server.api_key_name"),
        (["add", "ben", "--size", "big"], "settings.not_a_size"),
        (["add", "ben", "--videos", "0"], "cli.usage"),
        (["revoke", "ben"], "server.api_key_unknown"),
    ):
        assert refused(["serve", "keys", *words], capsys).code == refusal
    assert command(capsys, "keys", "revoke", "anna")[0] == 0
    assert ApiKeys(cache_dir).keys() == ()


def test_another_host_needs_a_key(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(["serve", "--host", "0.0.0.0"], capsys)
    assert found.code == "server.api_host_without_key"
    (cache_dir / NAME).write_text("{", encoding="utf-8")
    damaged = refused(["serve"], capsys)
    assert (damaged.code, damaged.data["file"]) == ("server.api_keys_unreadable", str(cache_dir / NAME))


@pytest.fixture(scope="module")
def keyed(api: App) -> Iterator[tuple[App, dict[str, str]]]:
    keys = ApiKeys(api.cache_dir)
    limits = {
        "anna": KeyLimits(),
        "ben": KeyLimits(),
        "few": KeyLimits(videos=2),
        "hourly": KeyLimits(per_hour=2),
        "small": KeyLimits(frames=5, steps=2, pixels=64 * 32),
    }
    secrets = {name: keys.add(name, one) for name, one in limits.items()}
    yield api, secrets
    (api.cache_dir / NAME).unlink()


def test_every_route_but_health_needs_a_key(keyed: tuple[App, dict[str, str]]) -> None:
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


def test_a_key_sees_only_its_own_videos(keyed: tuple[App, dict[str, str]]) -> None:
    server, secrets = keyed
    with with_key(server, secrets["anna"]) as anna, with_key(server, secrets["ben"]) as ben:
        key = {"Idempotency-Key": "same"}
        made = anna.post("v1/videos", json=SMALL, headers=key).json()["id"]
        other = ben.post("v1/videos", json=SMALL, headers=key).json()["id"]
        assert made != other
        until(lambda: anna.get(f"v1/videos/{made}").json()["status"] == "completed", pause=0.1)
        assert anna.get(f"v1/videos/{made}/content").status_code == 200
        batch = anna.post("v1/videos/batch", json={**SMALL, "grid": {"seed": [1, 2]}}).json()["id"]
        assert anna.get(f"v1/videos/batch/{batch}").status_code == 200
        assert [ben.get(f"v1/videos/batch/{batch}{path}").status_code for path in ("", "/sheet")] == [404, 404]
        for path in ("", "/content", "/content?variant=thumbnail", "/events"):
            assert ben.get(f"v1/videos/{made}{path}").status_code == 404
        assert ben.delete(f"v1/videos/{made}").status_code == 404
        assert ben.get("v1/videos", params={"after": made}).status_code == 404
        assert made not in ben.get("v1/videos").text and other not in anna.get("v1/videos").text
        assert anna.get(f"v1/videos/{made}").status_code == 200
        failure = anna.post("v1/videos", json={**SMALL, "loras": ["missing"]})
        assert failure.status_code in {400, 422} and str(server.cache_dir) not in failure.text


@pytest.mark.slow
def test_limits_of_a_key_are_kept(keyed: tuple[App, dict[str, str]]) -> None:
    server, secrets = keyed
    with with_key(server, secrets["few"]) as few:
        made = [few.post("v1/videos", json={**SMALL, "steps": 300}).json()["id"] for _ in range(2)]
        assert code_of(few.post("v1/videos", json=SMALL)) == (429, "server.api_queue_full")
        batch = {**SMALL, "grid": {"seed": [1, 2, 3]}}
        assert code_of(few.post("v1/videos/batch", json=batch)) == (429, "server.api_queue_full")
        assert few.delete(f"v1/videos/{made[0]}").status_code == 200
        assert few.post("v1/videos", json=SMALL).status_code == 200
        few.delete(f"v1/videos/{made[1]}")
    with with_key(server, secrets["hourly"]) as hourly:
        assert code_of(hourly.post("v1/videos/batch", json=batch)) == (429, "server.api_rate")
        for _ in range(2):
            video = hourly.post("v1/videos", json=SMALL, headers={"Idempotency-Key": str(time.time())}).json()["id"]
            assert hourly.delete(f"v1/videos/{video}").status_code == 200
        refused = hourly.post("v1/videos", json=SMALL)
        assert code_of(refused) == (429, "server.api_rate")
        assert 0 < int(refused.headers["retry-after"]) <= 3600
    with with_key(server, secrets["small"]) as small:
        beyond = {**SMALL, "frames": 5, "grid": {"steps": [2, 3]}}
        assert small.post("v1/videos/batch", json=beyond).json()["error"]["param"] == "steps"
        assert small.post("v1/videos", json={**SMALL, "frames": 5}).status_code == 200
        for values, param in (
            ({}, "frames"),
            ({"frames": 5, "steps": 3}, "steps"),
            ({"frames": 5, "size": "64x48"}, "size"),
            ({"frames": 5, "interpolate": 2}, "interpolate"),
        ):
            answer = small.post("v1/videos", json={**SMALL, **values})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_revoked_and_new_keys_take_effect_at_once(keyed: tuple[App, dict[str, str]]) -> None:
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


def test_a_revoked_keys_event_stream_ends(keyed: tuple[App, dict[str, str]]) -> None:
    server, _ = keyed
    keys = ApiKeys(server.cache_dir)
    with with_key(server, keys.add("revoked", KeyLimits())) as http:
        made = http.post("v1/videos", json={**SMALL, "steps": 900}).json()["id"]
        with http.stream("GET", f"v1/videos/{made}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("event: ")
            keys.revoke("revoked")
            last = [line for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server.api_key_wrong"
    # The next key of that name does not revive a stream, but may delete the video.
    with with_key(server, keys.add("revoked", KeyLimits())) as http:
        assert http.delete(f"v1/videos/{made}").status_code == 200


def test_the_web_app_serves_the_api_beside_its_page(web_app: App) -> None:
    with httpx.Client(base_url=web_app.url, timeout=60) as http:
        assert "<html" in http.get("").text
        made: dict[str, Any] = http.post("v1/videos", json=SMALL).json()
        until(lambda: http.get(f"v1/videos/{made['id']}").json()["status"] == "completed", pause=0.1)
        assert http.get(f"v1/videos/{made['id']}/content", headers={"Range": "bytes=4-7"}).content == b"ftyp"
        assert http.get("metrics").status_code == http.get("healthz").status_code == 200
        assert code_of(http.get("v1/nothing")) == (404, "server.api_no_route")
        ApiKeys(web_app.cache_dir).add("anna", KeyLimits())
        try:
            assert http.get("v1/videos").status_code == 401
            assert http.get("").status_code == 200
        finally:
            (web_app.cache_dir / NAME).unlink()


def test_videos_of_keys_whose_process_was_killed_are_queued_again(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path / "jobs.sqlite")) as store, Instance(store.path) as own:
        mine = add_job(store, instance="dead").id
        theirs = store.add(sample_request(), sample_plan(), owner="key:anna", instance="dead").id

        def after_a_start(*, everyone: bool = False) -> tuple[str, str]:
            recovery.recover(store, own.id)
            resume_interrupted(store, everyone=everyone)
            return store.get(mine).state, store.get(theirs).state

        assert after_a_start() == ("interrupted", "queued")
        # A video that was interrupted three times may be the cause.
        for state in ("queued", "interrupted"):
            store.start(theirs, "dead")
            assert after_a_start() == ("interrupted", state)
        # In a cluster, other machines make them.
        assert after_a_start(everyone=True) == ("queued", "queued")
