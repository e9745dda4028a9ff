"""Settings of a file or an earlier video: which of them the form cannot take, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import TandemError
from runtime.core.events import VideoSaved
from runtime.core.facts import Fact, shortened
from runtime.core.request import FIELDS, OFF, GenerationRequest
from runtime.models.catalogue import check_offered
from runtime.models.other_programs import OtherSettings
from runtime.models.spec import ModelSpec
from runtime.ui import fields
from runtime.ui.formatting import page_text

_MOST_NAMES = 100
# Beside the request's fields: the version of the model that made the video, see `ModelSpec`.
VERSION = "model_version"


@dataclass(frozen=True)
class Refused:
    """A value that was not applied, or was but has a remark: the setting's label, the value as text, and the reason as
    a sentence."""

    label: str
    value: str
    reason: str
    applied: bool = False


def settings_of(saved: VideoSaved) -> dict[str, Any]:
    """Return the request of a finished video with the `VERSION` that made it, 1 if its plan is older than versions.

    A request that is older than upscaling states that its video was not upscaled: its model may be by now.
    """
    return {"upscale": OFF, **saved.request, VERSION: saved.plan.get("model_version", 1)}


def usable(stored: Mapping[str, Any], models: Mapping[str, ModelSpec]) -> tuple[dict[str, Any], list[Refused]]:
    """Return the settings that are valid by themselves, and the others. The names and values can be anything.

    A request without a model is for the first one, as in the form. If another `VERSION` of the model made the video,
    the model is valid, and is listed too.
    """
    settings: dict[str, Any] = {} if "model" in stored else {"model": next(iter(models))}
    refused = []
    for name, value in list(stored.items())[:_MOST_NAMES]:
        if name == VERSION:
            continue
        try:
            _check(name, value, models)
            settings[name] = value
        except TandemError as error:
            refused.append(Refused(_label(name), shortened(value), page_text(error.fact).what))
    spec, made = models.get(settings.get("model", "")), stored.get(VERSION)
    if spec is not None and isinstance(made, int) and made != spec.version:
        fact = Fact("form.other_version", {"made": shortened(made), "installed": spec.version})
        refused.append(Refused(_label("model"), spec.title, page_text(fact).what, applied=True))
    return settings, refused


def usable_of(found: OtherSettings | None, models: Mapping[str, ModelSpec]) -> tuple[dict[str, Any], list[Refused]]:
    """Return what is valid of the settings of another program, and what is not or has no counterpart.

    Its model is the nearest one, if that is installed.

    Args:
        found: `None` for a file without settings.
    """
    if found is None:
        return {}, [Refused("File", "", page_text(Fact("form.no_settings")).what)]
    nearest = found.nearest_model or ""
    is_installed = nearest in models
    settings, refused = usable(found.values | ({"model": nearest} if is_installed else {}), models)
    code = (
        "form.nearest_model" if is_installed else "form.nearest_not_installed" if nearest else "form.no_nearest_model"
    )
    about = page_text(Fact(code, {"program": found.program, "model": nearest})).what
    model = Refused(_label("model"), shortened(found.model), about, applied=is_installed)
    no_counterpart = page_text(Fact("form.no_counterpart", {"program": found.program})).what
    others = [Refused(name, value, no_counterpart) for name, value in found.left_out]
    return settings, [model, *refused, *others]


def replaced(stored: Mapping[str, Any], filled: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[Refused]:
    """Return the valid settings that the form shows with another value, for instance because of a visitor's limits.

    Args:
        filled: the properties of the controls, by name.
        names: of the page's controls.
    """
    refusals = []
    for name in names:
        # A length in seconds is shown in frames.
        comparable = name in stored and name in FIELDS and name not in {"model", "seconds"}
        expected = fields.shown(name, stored[name]) if comparable else None
        actual = filled[name].get("value")
        if expected is not None and not _equal(expected, actual):
            reason = (
                Fact("form.value_not_offered")
                if actual is None
                else Fact("form.value_replaced", {"value": shortened(actual)})
            )
            refusals.append(Refused(_label(name), shortened(stored[name]), page_text(reason).what))
    return refusals


def _check(name: str, value: Any, models: Mapping[str, ModelSpec]) -> None:
    """Raise a `TandemError` if there is no such setting, or its value is not valid."""
    fields.check_copies(GenerationRequest.from_mapping({"prompt": "none", name: value}))
    if name == "model":
        check_offered(value, models)
    if name == "loras":
        fields.read("loras", fields.loras_text(value))


def _label(name: str) -> str:
    return FIELDS[name].label if name in FIELDS else shortened(name)


def _equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, float | int):
        return math.isclose(expected, actual)
    return str(expected) == str(actual)
