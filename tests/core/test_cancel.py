"""Stopping: what is asked for is heard at the next check, and cancelling counts more than pausing."""

import pytest

from runtime.core.cancel import Cancel, CancelledError, PausedError


def test_nothing_is_asked_at_first() -> None:
    cancel = Cancel()
    cancel.check()
    cancel.check_pause()
    assert not cancel.requested
    assert not cancel.pausing


def test_a_pause_is_heard_where_nothing_is_lost_by_it_only() -> None:
    cancel = Cancel()
    cancel.pause()
    cancel.check()
    assert cancel.pausing and not cancel.requested
    with pytest.raises(PausedError):
        cancel.check_pause()


def test_cancelling_counts_more() -> None:
    cancel = Cancel()
    cancel.pause()
    cancel.request()
    for check in (cancel.check, cancel.check_pause):
        with pytest.raises(CancelledError):
            check()
