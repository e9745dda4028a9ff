"""Errors of engines: those that PyTorch replaces, and those that end the job."""

import pytest

from runtime.core.cancel import CancelledError, PausedError
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.execution.engine_failures import failure_of_engine


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            EngineError("engine.provider_missing", provider="cuda"),
            Fact("engine.provider_missing", {"provider": "cuda"}),
        ),
        (MemoryError(), Fact("full")),
        (RuntimeError("no kernel\nand more"), Fact("execution.engine_failed", {"error": "no kernel"})),
        (CancelledError(), None),
        (PausedError(), None),
    ],
)
def test_a_failed_engine_is_replaced_unless_the_job_is_to_end(error: Exception, reason: Fact | None) -> None:
    if reason is not None:
        assert failure_of_engine(error, "cpu", "full") == reason
        return
    with pytest.raises(type(error)):
        failure_of_engine(error, "cpu", "full")
