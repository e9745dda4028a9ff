"""Other programs' share of the processor."""

import time

import pytest

from runtime.machine.load import LoadMeter, ProcessorTimes, share_of_others


@pytest.mark.parametrize(
    ("total", "busy", "own", "share"),
    [(8.0, 4.0, 4.0, 0.0), (8.0, 8.0, 4.0, 0.5), (8.0, 1.0, 1.5, 0.0), (8.0, 2.0, 0.0, 0.25), (0.0, 0.0, 0.0, 0.0)],
)
def test_the_share_of_others_is_what_is_busy_without_this_process(
    total: float, busy: float, own: float, share: float
) -> None:
    before = ProcessorTimes(100.0, 40.0, 10.0)
    after = ProcessorTimes(100.0 + total, 40.0 + busy, 10.0 + own)
    assert share_of_others(before, after) == pytest.approx(share)


def test_readings_are_of_this_machine() -> None:
    meter = LoadMeter()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    before, after = meter._start, meter._times()
    assert after.own - before.own >= 0.02
    assert after.total >= after.busy > 0
