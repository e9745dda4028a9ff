"""Runs of hypothesis without a database, deadlines or shrinking limits."""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st


def try_many(
    strategy: st.SearchStrategy[Any], act: Callable[[Any], object], examples: int, seed: int, *, shrink: bool = True
) -> None:
    """Call a function with a number of random values; with `shrink`, look for a simple one that fails."""
    phases = [phase for phase in hypothesis.Phase if shrink or phase is not hypothesis.Phase.shrink]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def one(value: Any) -> None:
        act(value)

    one()
