"""Presets of the web form: what "Fast", "Balanced" and "Best" set for a model on a machine. Pure, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.core.request import AUTO, OFF, GenerationRequest
from runtime.core.step_cache import NONE
from runtime.machine.probe import Machine
from runtime.models.quantization import FP8
from runtime.models.quantization import NONE as UNQUANTIZED
from runtime.models.spec import ModelSpec
from runtime.planner.constraints import attention_conflict, lacking

FAST, BALANCED, BEST = "fast", "balanced", "best"
# With fewer steps the shipped model does not finish the picture; distilled models have as few by default.
_FEWEST_STEPS = 8
# More steps than this change little; the authors of Wan use 50 at most.
_MOST_STEPS = 50
# Eight-bit arithmetic pays off in wide layers only: it was measured in transformers of 14 billion weights.
_LARGE = 1_000_000_000


@dataclass(frozen=True)
class Preset:
    """A named choice between time and quality.

    Attributes:
        name: "fast", "balanced" or "best".
        changes: the request's fields that it sets; all presets set the same.
    """

    name: str
    changes: Mapping[str, Any]

    def matches(self, request: GenerationRequest, spec: ModelSpec) -> bool:
        """Return whether a request has these values."""
        defaults = {"steps": spec.defaults.steps}
        return all(
            value == (defaults.get(name) if (choice := getattr(request, name)) == AUTO and name in defaults else choice)
            for name, value in self.changes.items()
        )


def presets(spec: ModelSpec, machine: Machine) -> tuple[Preset, ...]:
    """Return the presets, the fastest first. "balanced" has the model's defaults, and "best" no approximation.

    There is no "fast" for a model whose defaults are as fast, such as a distilled one.
    """
    steps = spec.defaults.steps
    fewer = max((steps + 1) // 2, min(steps, _FEWEST_STEPS))
    more = max(steps, min(2 * steps, _MOST_STEPS))
    large = spec.transformer.block_parameters >= _LARGE
    quantization = FP8 if large and lacking(FP8, machine) is None else AUTO
    attention = FP8 if large and attention_conflict(FP8, machine) is None else AUTO
    chosen = {"step_cache": NONE, "guidance_cache": OFF, "vae_precision": AUTO}
    balanced = Preset(BALANCED, {**chosen, "steps": steps, "quantization": AUTO, "attention": AUTO})
    fast = Preset(FAST, {**chosen, "steps": fewer, "quantization": quantization, "attention": attention})
    exact = {"quantization": UNQUANTIZED, "attention": AUTO, "vae_precision": "float32"}
    best = Preset(BEST, {**chosen, "steps": more, **exact})
    return (*([fast] if fast.changes != balanced.changes else []), balanced, best)
