"""A short run with a fixed seed; the long one is `python -m tests.fuzz`."""

from pathlib import Path

from tests.fuzz.attack import attacking, round_of


def test_nothing_made_up_breaks_the_app_or_gets_out_of_the_outputs(tmp_path: Path) -> None:
    with attacking(tmp_path) as (attack, clients):
        round_of(attack, clients, 4, seed=5)
    assert set(attack.statuses) - {0} <= {200, 206, 400, 401, 403, 404, 405, 413, 416, 422, 429}
    # It is no proof if all is turned away at the door.
    assert attack.statuses[200] > 12
