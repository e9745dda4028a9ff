"""Settings of a file or an earlier video: those that the form does not take are named with value and reason."""

import json
from typing import Any

import pytest

from runtime.models.catalogue import EMBEDDED
from runtime.models.other_programs import read_settings
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.ui import form
from runtime.ui.formatting import render
from runtime.ui.restored import Refused, replaced, usable, usable_of
from tests.models.test_other_programs import EXPERTS, WAN2GP
from tests.ui.page_texts import line

GOOD = {"prompt": "a red boat", "model": "diorama", "width": 192, "height": 112, "frames": 33, "seed": 5, "fps": 16}


@pytest.fixture
def models() -> dict[str, ModelSpec]:
    return {"diorama": read_spec(EMBEDDED / "diorama", "diorama")}


def refused(models: dict[str, ModelSpec], **values: Any) -> list[Refused]:
    """Return what the form does not take of good settings with some others."""
    found, wrong = usable(GOOD | values, models)
    return wrong + replaced(found, form.filled(found, models), form.NAMES)


def test_good_settings_are_taken(models: dict[str, ModelSpec]) -> None:
    others: dict[str, Any] = {
        "negative_prompt": None, "shift": None, "crf": "auto", "loras": [], "step_cache": "first-block:0.1",
        "guidance_scale": 3, "gpus": 1, "backends": {"vae": "onnxruntime"},
    }  # fmt: skip
    assert refused(models, **others) == []
    loras = [{"file": "paper", "weight": 0.8, "expert": "both"}]
    assert refused(models, loras=loras) == []


def test_a_template_is_restored_as_it_was_typed(models: dict[str, ModelSpec]) -> None:
    stored = form.as_typed(GOOD | {"template": "a {red|blue} boat"})
    found, wrong = usable(stored, models)
    filled = form.filled(found, models)
    assert wrong + replaced(found, filled, form.NAMES) == []
    assert filled["prompt"]["value"] == "a {red|blue} boat"
    for other in (None, "", 5):
        assert form.as_typed(GOOD | {"template": other}) == GOOD


def test_an_enhanced_prompt_is_restored_with_what_was_written(models: dict[str, ModelSpec]) -> None:
    made = GOOD | {"original_prompt": "a boat"}
    for stored, prompt in (
        (made, GOOD["prompt"]),
        (made | {"template": "a {boat|kite}"}, GOOD["prompt"]),
        (made | {"prompt": "__a__ {b|c}", "template": "\\__a\\__ \\{b|c\\}"}, "\\__a\\__ \\{b|c\\}"),
    ):
        filled = form.filled(form.as_typed(stored), models)
        assert (filled["prompt"]["value"], filled["original_prompt"]["value"]) == (prompt, "a boat")
    # Those of the form before are not kept.
    assert form.filled(form.as_typed({**GOOD, "original_prompt": None}), models)["original_prompt"]["value"] == ""


def test_a_request_without_a_model_is_for_the_first_one(models: dict[str, ModelSpec]) -> None:
    stored = {"prompt": "a red boat", "steps": 12}
    found, wrong = usable(stored, models)
    filled = form.filled(found, models)
    assert wrong + replaced(stored, filled, form.NAMES) == []
    assert filled["steps"]["value"] == 12


@pytest.mark.parametrize(("version", "labels"), [(1, ["Model"]), (2, []), (None, []), ("x", []), (10**400, ["Model"])])
def test_another_version_of_the_model_is_named(models: dict[str, ModelSpec], version: Any, labels: list[str]) -> None:
    wrong = refused(models, model_version=version, steps=20)
    assert [(one.label, one.applied) for one in wrong] == [(label, True) for label in labels]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", "NaN"), ("width", float("nan")), ("height", 1e400), ("frames", -5), ("frames", True),
        ("fps", [16]), ("seed", 2**60), ("steps", "20"), ("guidance_scale", -1), ("prompt", 5),
        ("offload", "everything"), ("backends", {"vae": "magic"}), ("backends", "all"), ("shift", {"x": 1}),
        ("loras", [{"file": "../../etc/passwd", "weight": 1.0, "expert": "both"}]), ("loras", "../x"),
        ("step_cache", "first-block:9"), ("gpus", 8), ("<img src=x onerror=hit()>", "<script>hit()</script>"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_named(models: dict[str, ModelSpec], name: str, value: Any) -> None:
    wrong = refused(models, **{name: value})
    assert len(wrong) == 1, wrong
    assert wrong[0].value == repr(value)[: len(wrong[0].value)] or wrong[0].value.endswith("…")
    assert wrong[0].reason.endswith(".")
    shown = render("restored.html", refused=wrong, at=0)
    assert 'class="trouble"' in shown and "<img" not in shown and "<script" not in shown


def test_another_model_is_named_with_the_values_that_depend_on_it(models: dict[str, ModelSpec]) -> None:
    wrong = refused(models, model="../../etc/passwd", width=832)
    assert wrong[0].label == "Model" and wrong[0].value == "'../../etc/passwd'"
    assert Refused("Width", "832", line("form.value_replaced", value="192")) in wrong


def test_values_that_cannot_be_read_at_all(models: dict[str, ModelSpec]) -> None:
    many = {f"x{number}": number for number in range(5000)}
    assert len(refused(models, **many)) < 101
    nested: Any = json.loads("[" * 50 + "]" * 50)
    assert len(refused(models, width=nested)[0].value) < 60


def test_the_model_of_another_program_is_the_nearest_one_that_is_installed(models: dict[str, ModelSpec]) -> None:
    found = read_settings({"comment": json.dumps(WAN2GP | {"seed": 2**60})})
    installed = models | {"wan2.2-i2v-a14b": models["diorama"]}
    for offered, model, applied in ((models, "diorama", False), (installed, "wan2.2-i2v-a14b", True)):
        settings, refused = usable_of(found, offered)
        assert (settings["model"], settings["width"], "seed" in settings) == (model, 1280, False)
        assert [(one.label, one.applied) for one in refused[:2]] == [("Model", applied), ("seed", False)]
        assert Refused("sample_solver", "unipc", line("form.no_counterpart", program="Wan2GP")) in refused
    flux = EXPERTS | {name: {**EXPERTS[name], "inputs": {"unet_name": "flux1-dev.safetensors"}} for name in ("1", "2")}
    _, refused = usable_of(read_settings({"prompt": json.dumps(flux)}), models)
    assert refused[0].reason == line("form.no_nearest_model", program="ComfyUI")
    assert usable_of(None, models) == ({}, [Refused("File", "", line("form.no_settings"))])
