"""Jobs killed with signal 9 leave no partial video, and resume in a new process to the same video.

`tests/queue/killing.py` does the same at any number of random moments.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.models.spec import ModelSpec
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_resume import stream_of
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan
from tests.queue.killing import Bench, Moment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals, and a server that forks"),
]


@pytest.fixture(scope="module")
def undisturbed(
    tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], bytes, str]:
    """Return the names of an uninterrupted job's events, its frames and its stream."""
    folder = tmp_path_factory.mktemp("undisturbed")
    out = folder / "x.mp4"
    events = Bench(tiny("wan2.2-a14b"), tiny_plan(tiny("wan2.2-a14b"), out), folder).run().events
    return [event["event"] for event in events], frames_of(out), stream_of(out)


def moments(names: list[str]) -> list[Moment]:
    """Return moments in every stage of a job with these events."""

    def nth(name: str, n: int = 1) -> int:
        return [index for index, other in enumerate(names, 1) if other == name][n - 1]

    return [
        Moment(call="os.rename", count=1),
        Moment(call="os.link"),
        Moment(event=nth("StepDone", 3), delay=0.003),
        Moment(event=nth("FramesDecoded"), delay=0.002),
        Moment(event=nth("VideoSaved") - 1, delay=0.03),
    ]


def test_a_job_killed_at_any_moment_resumes_to_the_same_video(
    undisturbed: tuple[list[str], bytes, str], tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    names, frames, stream = undisturbed
    spec = tiny("wan2.2-a14b")
    killed = 0
    for number, moment in enumerate(moments(names)):
        out = tmp_path / str(number) / "out" / "x.mp4"
        out.parent.mkdir(parents=True)
        bench = Bench(spec, tiny_plan(spec, out), tmp_path / str(number))
        first = bench.run(moment)
        killed += first.code == -9
        assert not out.exists() or stream_of(out) == stream, moment
        second = bench.run()
        assert [event["event"] for event in second.events][-1] == "VideoSaved", (moment, second.events[-1])
        assert frames_of(out) == frames, moment
        assert stream_of(out) == stream, moment
        assert read_metadata(out)["job"] == "0badcafe"
        assert os.listdir(out.parent) == ["x.mp4"], moment  # noqa: PTH208 - names, hidden ones too
        assert {path.name for path in bench.job.iterdir()} == {"checkpoint.safetensors"}
        if any(event["event"] == "CheckpointSaved" for event in first.events):
            assert "Resumed" in [event["event"] for event in second.events], moment
    assert killed >= len(moments(names)) - 1  # the last one may have been done in time
