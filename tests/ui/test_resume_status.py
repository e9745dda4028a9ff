"""From where a job that ended without a video can be resumed."""

from typing import Any

import pytest

from runtime.core.events import CheckpointSaved, Event, OutOfMemory, Planned, Resumed, StepDone
from runtime.core.facts import Fact
from runtime.ui.job_view import resume_status
from tests.queue.samples import sample_plan

BEGUN = Planned(plan=sample_plan(steps=20))


def steps(last: int, first: int = 1) -> list[Event]:
    return [StepDone(step=n, of=20, seconds=1.0, part="transformer") for n in range(first, last + 1)]


def full(**values: Any) -> OutOfMemory:
    given: dict[str, Any] = {
        "stage": "denoise", "component": "transformer", "memory": "VRAM", "retried": False,
        "strategy": Fact("text", {"what": "Weights wait in RAM by block", "remedy": ""}),
        "changes": {"offload": "group"}, "slowdown": 1.4, "lost_seconds": 65.0,
    }  # fmt: skip
    return OutOfMemory(**given | values)


@pytest.mark.parametrize(
    ("events", "step", "words"),
    [
        ([], None, ""),
        ([BEGUN], None, "Denoising had not started."),
        ([BEGUN], 0, "Denoising had not started."),
        ([BEGUN, *steps(12), CheckpointSaved(step=12)], 12, "It stopped at step 12 of 20. It continues from there."),
        ([BEGUN, *steps(12), CheckpointSaved(step=10)], 10, "It stopped at step 12 of 20. It continues after step 10."),
        (
            [BEGUN, *steps(12), CheckpointSaved(step=0)],
            0,
            "It stopped at step 12 of 20. It starts again at the first step.",
        ),
        # Killed between the checkpoint and the word about it; between a step's checkpoint and the word about the step.
        ([BEGUN, *steps(12), CheckpointSaved(step=0)], 12, "It stopped at step 12 of 20. It continues from there."),
        ([BEGUN, *steps(11)], 12, "It stopped at step 12 of 20. It continues from there."),
        (
            [BEGUN, *steps(12), CheckpointSaved(step=10)],
            None,
            "It stopped at step 12 of 20. No checkpoint was kept: it starts over.",
        ),
        ([BEGUN, *steps(20), CheckpointSaved(step=20)], 20, "All 20 steps were done. Only decoding remains."),
        ([BEGUN, Resumed(step=8, of=20), *steps(9, 9)], 8, "It stopped at step 9 of 20. It continues after step 8."),
    ],
)
def test_the_checkpoint_line_says_where_a_job_continues(events: list[Event], step: int | None, words: str) -> None:
    found = resume_status(events, step)
    assert (found.checkpoint, found.step) == (words, step)


@pytest.mark.parametrize(
    ("event", "alternative", "changes", "words"),
    [
        (full(), "Weights wait in RAM by block", {"offload": "group"}, "65 s of work was lost"),
        (
            full(changes={"quantization": "bnb-4bit"}),
            "Weights wait in RAM by block",
            {"quantization": "bnb-4bit"},
            "memory",
        ),
        (
            full(changes={"on_out_of_memory": "any"}),
            "Weights wait in RAM by block",
            {"on_out_of_memory": "any"},
            "memory",
        ),
        (full(retried=True), "", {}, "Out of memory (VRAM)"),
        (full(changes={}, strategy=None), "", {}, "Out of memory (VRAM)"),
    ],
)
def test_out_of_memory_offers_a_lower_memory_strategy(
    event: OutOfMemory, alternative: str, changes: dict[str, str], words: str
) -> None:
    found = resume_status([BEGUN, *steps(3), event], 3)
    assert (found.alternative, found.changes) == (alternative, changes)
    assert words.replace("65 s", "1 min 5 s") in found.memory
