"""From where a job that ended without a video can be resumed."""

from typing import Any

import pytest

from runtime.core.events import CheckpointSaved, Event, OutOfMemory, Planned, Resumed, StepDone
from runtime.core.facts import Fact
from runtime.ui.formatting import sentences
from runtime.ui.job_view import resume_status
from tests.facts import fact
from tests.queue.samples import sample_plan
from tests.ui.page_texts import line

BEGUN = Planned(plan=sample_plan(steps=20))
GROUP = fact("strategy.offload_group")


def steps(last: int, first: int = 1) -> list[Event]:
    return [StepDone(step=n, of=20, seconds=1.0, part="transformer") for n in range(first, last + 1)]


def full(**values: Any) -> OutOfMemory:
    given: dict[str, Any] = {
        "stage": "denoise", "component": "transformer", "memory": "VRAM", "retried": False,
        "strategy": GROUP,
        "changes": {"offload": "group"}, "slowdown": 1.4, "lost_seconds": 65.0,
    }  # fmt: skip
    return OutOfMemory(**given | values)


STOPPED = fact("resume.stopped", step=12, steps=20)


@pytest.mark.parametrize(
    ("events", "step", "facts"),
    [
        ([], None, []),
        ([BEGUN], None, [fact("resume.not_begun")]),
        ([BEGUN], 0, [fact("resume.not_begun")]),
        ([BEGUN, *steps(12), CheckpointSaved(step=12)], 12, [STOPPED, fact("resume.from_there")]),
        ([BEGUN, *steps(12), CheckpointSaved(step=10)], 10, [STOPPED, fact("resume.after_step", step=10)]),
        ([BEGUN, *steps(12), CheckpointSaved(step=0)], 0, [STOPPED, fact("resume.first_step")]),
        # Killed between the checkpoint and the word about it; between a step's checkpoint and the word about the step.
        ([BEGUN, *steps(12), CheckpointSaved(step=0)], 12, [STOPPED, fact("resume.from_there")]),
        ([BEGUN, *steps(11)], 12, [STOPPED, fact("resume.from_there")]),
        ([BEGUN, *steps(12), CheckpointSaved(step=10)], None, [STOPPED, fact("resume.no_checkpoint")]),
        (
            [BEGUN, *steps(20), CheckpointSaved(step=20)],
            20,
            [fact("resume.steps_done", steps=20), fact("resume.decoding")],
        ),
        (
            [Planned(plan=sample_plan(steps=1)), StepDone(step=1, of=1, seconds=1.0, part="transformer")],
            1,
            [fact("resume.step_done"), fact("resume.decoding")],
        ),
        (
            [BEGUN, Resumed(step=8, of=20), *steps(9, 9)],
            8,
            [fact("resume.stopped", step=9, steps=20), fact("resume.after_step", step=8)],
        ),
    ],
)
def test_the_checkpoint_line_says_where_a_job_continues(
    events: list[Event], step: int | None, facts: list[Fact]
) -> None:
    found = resume_status(events, step)
    assert (found.checkpoint, found.step) == (sentences(facts), step)


LOST = fact("resume.work_lost", seconds=65)


@pytest.mark.parametrize(
    ("event", "alternative", "changes", "lost"),
    [
        (full(), GROUP, {"offload": "group"}, [LOST]),
        (full(changes={"quantization": "bnb-4bit"}), GROUP, {"quantization": "bnb-4bit"}, [LOST]),
        (full(changes={"on_out_of_memory": "any"}), GROUP, {"on_out_of_memory": "any"}, [LOST]),
        (full(lost_seconds=0.5), GROUP, {"offload": "group"}, []),
        (full(retried=True), None, {}, []),
        (full(changes={}, strategy=None), None, {}, [LOST]),
    ],
)
def test_out_of_memory_offers_a_lower_memory_strategy(
    event: OutOfMemory, alternative: Fact | None, changes: dict[str, str], lost: list[Fact]
) -> None:
    found = resume_status([BEGUN, *steps(3), event], 3)
    assert (found.alternative, found.changes) == ("" if alternative is None else line(alternative.code), changes)
    assert found.memory == sentences([event.fact, *lost])
