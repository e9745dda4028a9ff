"""Cancelling and pausing take effect at the next check; cancelling takes precedence."""

import pytest

from runtime.core.cancel import Cancel, CancelledError, PausedError


def test_a_new_token_requests_nothing() -> None:
    cancel = Cancel()
    cancel.check()
    cancel.check_pause()
    assert not cancel.requested
    assert not cancel.pausing


def test_a_pause_is_raised_by_check_pause_only() -> None:
    cancel = Cancel()
    cancel.pause()
    cancel.check()
    assert cancel.pausing and not cancel.requested
    with pytest.raises(PausedError):
        cancel.check_pause()


def test_cancelling_takes_precedence_over_pausing() -> None:
    cancel = Cancel()
    cancel.pause()
    cancel.request()
    for check in (cancel.check, cancel.check_pause):
        with pytest.raises(CancelledError):
            check()
