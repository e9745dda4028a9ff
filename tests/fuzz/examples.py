"""Runs of hypothesis without a database, deadlines or shrinking limits."""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st


def try_many(strategy: st.SearchStrategy[Any], act: Callable[[Any], object], examples: int, seed: int) -> None:
    """Call a function with a number of random values."""

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def one(value: Any) -> None:
        act(value)

    one()
