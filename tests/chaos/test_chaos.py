"""A short chaos run; `python -m tests.chaos` runs for 15 minutes."""

import sys
from pathlib import Path

import pytest

from tests.chaos.run import problems, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts file descriptors and stops processes as on Linux"),
    pytest.mark.timeout(900),
]

# Other tests run at the same time.
PAGE_SECONDS = 10.0


def test_the_app_survives_attacks_and_faults_in_random_order(tmp_path: Path) -> None:
    found = run(tmp_path, minutes=0.25, seed=3, most_open=20)
    assert not problems(found, PAGE_SECONDS), found
