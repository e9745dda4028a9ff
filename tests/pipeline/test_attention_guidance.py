"""Normalized attention guidance in tiny jobs: one pass a step, equal videos after a resume, records."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.events import Resumed, VideoSaved
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_guidance_cache import passes_of
from tests.pipeline.test_resume import at_step, run, whole
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]


def test_a_negative_prompt_changes_the_video_in_as_many_passes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, out = tiny("wan2.2-a14b"), tmp_path / "x.mp4"
    passes = passes_of(monkeypatch)
    # The first transformer has guidance, the second one attends to the negative prompt.
    values = {"guidance_scale": 3.0, "guidance_scale_2": 1.0, "steps": 4}
    plan = tiny_plan(spec, out, nag=11, negative_prompt="night", **values)
    first, second = plan.expert_steps["transformer"], plan.expert_steps["transformer_2"]
    for step in (first, first + 1):
        run(plan, spec, tmp_path / "job", stop=at_step(step))
    events = run(plan, spec, tmp_path / "job")
    assert isinstance(events[-1], VideoSaved)
    assert any(isinstance(event, Resumed) for event in events)
    assert len(passes) == 2 * first + second
    frames, facts = frames_of(out), read_metadata(out)
    assert frames == whole(plan, spec)[0]
    assert facts["request"]["nag"] == facts["plan"]["nag"] == 11.0
    changes = ({"nag": 1, "negative_prompt": "night"}, {"nag": 11, "negative_prompt": "sea"})
    others = [tiny_plan(spec, out, **change, **values) for change in changes]
    assert len({frames, *(whole(other, spec)[0] for other in others)}) == 3
    files = stamps(spec)
    assert len({identity(files, one) for one in (plan, plan.replace(nag=1.0), plan.replace(nag=2.0))}) == 3
