"""How numbers read on the page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.events import FellBack, OutOfMemory
from runtime.core.facts import Fact, Words, lowered, render
from runtime.models.spec import ModelSpec
from runtime.ui import formatting
from runtime.ui.plan_panel import PlanSummary, components_html
from tests.plans import machine, tiny_plan


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (0.42, "0.4 s"), (9.94, "9.9 s"), (12.4, "12 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"),
     (3900, "1 h 5 min")],
)  # fmt: skip
def test_duration(seconds: float, expected: str) -> None:
    assert formatting.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, ""), (0.2, "almost done"), (7.6, "about 8 s left"), (43, "about 45 s left"), (119, "about 120 s left"),
     (170, "about 3 min left"), (9000, "about 2.5 h left")],
)  # fmt: skip
def test_time_left_is_rounded(seconds: float | None, expected: str) -> None:
    assert formatting.time_left(seconds) == expected


def test_sizes_and_lengths() -> None:
    assert formatting.size(192, 112) == "192 × 112"
    assert formatting.length(33, 16) == "33 frames · 2.1 s at 16 fps"
    assert formatting.length(1, 16) == "1 frame · 0.1 s at 16 fps"


@pytest.mark.parametrize(
    ("model", "titles"),
    [
        ("wan2.1", ["Text encoder", "Transformer", "VAE decoder"]),
        ("wan2.2-a14b", ["Text encoder", "High-noise transformer", "Low-noise transformer", "VAE decoder"]),
    ],
)
def test_components_have_the_same_titles_everywhere(
    model: str, titles: list[str], tiny: Callable[[str], ModelSpec]
) -> None:
    spec = tiny(model)
    plan = tiny_plan(spec, Path("x.mp4"))
    table = components_html(spec, PlanSummary(""), None, machine())
    for name, title in zip(plan.components, titles, strict=True):
        assert plan.title(name) == title
        assert f'id="part-{name}"><th scope="row">{title}</th>' in table
        fell_back = FellBack(
            component=name, backend="inductor", reason=Fact("text", {"what": "It failed.", "remedy": ""})
        )
        memory = OutOfMemory(stage="denoise", component=name, memory="RAM", retried=False, lost_seconds=0.0)
        on_command_line = render(fell_back.fact, Words(plan.components)).what
        assert on_command_line == f"{title}: PyTorch instead of Inductor. It failed."
        assert formatting.page_text(fell_back.fact, plan.components).what == on_command_line
        named = f"({lowered(title)})"
        assert named in render(memory.fact, Words(plan.components)).what
        assert named in formatting.page_text(memory.fact, plan.components).what
    # Without a model, only the second of two transformers is known to be one of two.
    assert (
        str(Fact("engine.loading_weights", {"component": "transformer"})) == "Loading the weights of the transformer."
    )
    assert "low-noise transformer" in str(Fact("engine.loading_weights", {"component": "transformer_2"}))
    both = Fact(
        "engine.import_could_serve", {"components": ["transformer", "transformer_2"], "model": "x", "sizes": "y"}
    )
    assert "the high-noise transformer or low-noise transformer of x" in str(both)
