"""Short runs with a fixed seed. For a long run: `python -m tests.fuzz`."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz import api
from tests.fuzz.attack import Attack, attacking, every_route, round_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Attack, dict[str, Any]]]:
    with attacking(tmp_path_factory.mktemp("fuzz")) as attack:
        yield attack


def test_random_requests_cause_no_errors_or_leaks(attacked: tuple[Attack, dict[str, Any]]) -> None:
    attack, clients = attacked
    round_of(attack, clients, 4, seed=5)
    assert set(attack.statuses) - {0} <= {200, 206, 400, 401, 403, 404, 405, 413, 415, 416, 422, 429}
    # The test proves nothing if all requests are rejected.
    assert attack.statuses[200] > 8


def test_malformed_requests_to_every_route_are_refused(attacked: tuple[Attack, dict[str, Any]]) -> None:
    attack, clients = attacked
    own, visitor = attack.faces["own page"].routes.methods, attack.faces["visitor"].routes.methods
    # The routes were found: Gradio's on both pages, and Tandem's.
    assert {"/", "/config", "/login", "/gradio_api/queue/join", "/gradio_api/upload"} <= own.keys() & visitor.keys()
    assert "/tandem/panels/{name}" in own and "/tandem/panels/{name}" not in visitor
    assert any(path.startswith("/video/") for path in visitor)
    assert not any(path.startswith("/v1") for path in visitor)  # neither videos of keys nor the cluster
    every_route(attack)
    for face in attack.faces.values():
        assert all(attack.sent[f"route {path}"] for path in face.routes.methods)
    for client in clients.values():
        assert client.predict("a red boat", seed=1, steps=1, frames=5, api_name="/generate")["video"]


@pytest.fixture(scope="module")
def api_attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api.ApiAttack]:
    with api.attacking(tmp_path_factory.mktemp("fuzz-api")) as attack:
        yield attack


def test_random_requests_to_the_api_cause_no_errors_or_leaks(api_attacked: api.ApiAttack) -> None:
    api.round_of(api_attacked, 12, seed=5)
    assert set(api_attacked.statuses) - {0} <= {200, 206, 400, 401, 403, 404, 405, 409, 413, 415, 416, 422, 429}
    # The test proves nothing if all requests are rejected.
    assert api_attacked.statuses[200] > 4


def test_malformed_requests_to_every_route_of_the_api_are_refused(api_attacked: api.ApiAttack) -> None:
    paths = {"/v1/videos", "/v1/videos/{video_id}", "/v1/videos/{video_id}/content", "/v1/videos/{video_id}/events"}
    assert {*paths, "/v1/models", "/healthz", "/metrics"} <= api_attacked.routes.methods.keys()
    api.every_route(api_attacked)


def test_odd_framing_causes_no_errors(api_attacked: api.ApiAttack) -> None:
    before = api_attacked.statuses.copy()
    api.odd_framing(api_attacked, 15, seed=5)
    found = api_attacked.statuses - before
    assert found[400] > 4 and set(found) - {0} <= {200, 400, 401, 404, 405, 411, 413, 414, 415, 422, 431, 501}


def test_slow_readers_get_their_video_and_delay_nobody(api_attacked: api.ApiAttack) -> None:
    assert api.slow_readers(api_attacked) < 1.0
