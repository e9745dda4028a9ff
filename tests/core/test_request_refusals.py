"""Which values of a request are refused: the code and data of each refusal, which all front ends show."""

import math
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.request import BACKENDS, COMPONENTS, MAX_SEED, GenerationRequest

SIDE = {"low": 1, "high": 8192}
STEPS = {"low": 1, "high": 1000}
GUIDANCE = {"low": 0.0, "high": 100.0}
SHIFT = {"low": 0.1, "high": 100.0}
GPUS = {"low": 1, "high": 16}
PRECISIONS = {"choices": ["auto", "float32", "bfloat16", "float16"]}
BUILDS = {"choices": ["auto", "missing", "idle", "never", "always"]}
OFFLOADS = {"choices": ["auto", "none", "model", "group", "sequential"]}
QUANTIZATIONS = {"choices": ["auto", "none", "bnb-8bit", "bnb-4bit", "fp8"]}

REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("prompt", "", "request.prompt_empty", {}),
    ("prompt", " \t\n ", "request.prompt_empty", {}),
    ("prompt", 5, "request.not_text", {}),
    ("prompt", None, "request.not_text", {}),
    ("prompt", "boat " * 20_000, "request.text_too_long", {"characters": 100_000, "most": 5000}),
    ("prompt", "a red\x00boat", "request.control_character", {"character": "U+0000"}),
    ("prompt", "a red\x1b[31mboat", "request.control_character", {"character": "U+001B"}),
    ("prompt", "a red \udcff boat", "request.control_character", {"character": "U+DCFF"}),
    ("negative_prompt", "a\x07b", "request.control_character", {"character": "U+0007"}),
    ("model", "", "request.model_name", {}),
    ("width", 0, "request.out_of_range", {"value": "0", "nearest": 1, **SIDE}),
    ("width", -16, "request.out_of_range", {"value": "-16", "nearest": 1, **SIDE}),
    ("width", 10**9, "request.out_of_range", {"value": "1000000000", "nearest": 8192, **SIDE}),
    ("width", "wide", "request.not_whole", {"value": "'wide'", **SIDE}),
    ("width", math.nan, "request.not_whole", {"value": "nan", **SIDE}),
    ("height", -16, "request.out_of_range", {"value": "-16", "nearest": 1, **SIDE}),
    ("frames", 0, "request.out_of_range", {"value": "0", "nearest": 1, "low": 1, "high": 4001}),
    ("fps", 0, "request.out_of_range", {"value": "0", "nearest": 1, "low": 1, "high": 120}),
    ("fps", math.nan, "request.not_whole", {"value": "nan", "low": 1, "high": 120}),
    ("fps", "fast", "request.not_whole", {"value": "'fast'", "low": 1, "high": 120}),
    ("seconds", "long", "request.not_a_number", {"value": "'long'"}),
    ("steps", 0, "request.out_of_range", {"value": "0", "nearest": 1, **STEPS}),
    ("steps", 99_999_999_999, "request.out_of_range", {"value": "99999999999", "nearest": 1000, **STEPS}),
    ("steps", None, "request.not_whole", {"value": "None", **STEPS}),
    ("steps", "2", "request.not_whole", {"value": "'2'", **STEPS}),
    ("guidance_scale", math.inf, "request.not_a_number", {"value": "inf", **GUIDANCE}),
    ("guidance_scale", math.nan, "request.not_a_number", {"value": "nan", **GUIDANCE}),
    ("guidance_scale", -1, "request.out_of_range", {"value": "-1", "nearest": 0.0, **GUIDANCE}),
    ("guidance_scale", 1e300, "request.out_of_range", {"nearest": 100.0, **GUIDANCE}),
    ("guidance_scale", "strong", "request.not_a_number", {"value": "'strong'", **GUIDANCE}),
    ("guidance_scale", "", "request.not_a_number", {"value": "''", **GUIDANCE}),
    ("seed", -1, "request.out_of_range", {"value": "-1", "nearest": 0, "low": 0, "high": MAX_SEED}),
    ("seed", 2**70, "request.out_of_range", {"value": str(2**70), "nearest": MAX_SEED, "low": 0, "high": MAX_SEED}),
    ("seed", 10**40, "request.out_of_range", {"nearest": MAX_SEED}),
    ("seed", 1.5, "request.not_whole", {"value": "1.5", "low": 0, "high": MAX_SEED}),
    ("shift", 0, "request.out_of_range", {"value": "0", "nearest": 0.1, **SHIFT}),
    ("shift", math.nan, "request.not_a_number", {"value": "nan", **SHIFT}),
    ("shift", 101, "request.out_of_range", {"value": "101", "nearest": 100.0, **SHIFT}),
    ("shift", "far", "request.not_a_number", {"value": "'far'", **SHIFT}),
    ("shift", "", "request.not_a_number", {"value": "''", **SHIFT}),
    ("gpus", 0, "request.out_of_range", {"value": "0", "nearest": 1, **GPUS}),
    ("gpus", "many", "request.not_whole", {"value": "'many'", **GPUS}),
    ("gpus", math.nan, "request.not_whole", {"value": "nan", **GPUS}),
    ("gpus", 10**20 - 1, "request.out_of_range", {"value": "9" * 20, "nearest": 16, **GPUS}),
    ("vae_precision", "float8", "request.not_a_choice", {"value": "'float8'", **PRECISIONS}),
    ("vae_precision", "", "request.not_a_choice", {"value": "''", **PRECISIONS}),
    ("offload", "disk", "request.not_a_choice", {"value": "'disk'", **OFFLOADS}),
    ("offload", None, "request.not_a_choice", {"value": "None", **OFFLOADS}),
    ("quantization", "int3", "request.not_a_choice", {"value": "'int3'", **QUANTIZATIONS}),
    ("quantization", 8, "request.not_a_choice", {"value": "8", **QUANTIZATIONS}),
    ("build", "maybe", "request.not_a_choice", {"value": "'maybe'", **BUILDS}),
    ("build", "", "request.not_a_choice", {"value": "''", **BUILDS}),
    ("step_cache", "teacache", "step_cache.unknown", {"value": "'teacache'"}),
    ("step_cache", "taylorseer:1.5", "step_cache.interval_out_of_range", {"strength": "'1.5'", "most": 8}),
    ("step_cache", "first-block:2", "step_cache.strength_out_of_range", {"strength": "'2'", "most": 1}),
    ("backends", ["vae"], "request.not_a_backend", {"value": "'vae'"}),
    ("backends", [7], "request.not_a_backend", {"value": "7"}),
    ("backends", "vae=pytorch", "request.not_backends", {"value": "'vae=pytorch'"}),
    ("backends", {"vae": "cuda"}, "request.unknown_backend", {"backend": "'cuda'", "choices": list(BACKENDS)}),
    ("backends", {"eyes": "auto"}, "request.unknown_component", {"component": "'eyes'", "components": COMPONENTS}),
    ("backends", ["="], "request.unknown_component", {"component": "''", "components": COMPONENTS}),
    ("backends", ["vae=auto", "vae=pytorch"], "request.backend_repeated", {"component": "'vae'"}),
    ("loras", [""], "lora.bad_name", {"file": "''"}),
    ("loras", ["a\x07b"], "lora.bad_name", {"file": r"'a\x07b'"}),
    ("loras", ["x:nan"], "lora.weight_not_a_number", {"file": "'x'", "weight": "nan", "most": 4.0}),
    ("loras", ["x:-0.5"], "lora.weight_out_of_range", {"file": "'x'", "weight": -0.5, "most": 4.0}),
    ("loras", ["x:1e30"], "lora.weight_out_of_range", {"file": "'x'", "weight": 1e30, "most": 4.0}),
    ("loras", ["x", "x:0.5"], "lora.repeated", {"file": "'x'"}),
    ("loras", list("abcdefghi"), "lora.too_many", {"count": 9, "most": 8}),
    ("image", "", "request.image_file", {"value": "''"}),
    ("image", "a\x07b", "request.image_file", {"value": r"'a\x07b'"}),
    ("image", "x" * 5000, "request.image_file", {}),
    ("image", "sha256:boat", "request.input_reference", {"value": "'sha256:boat'"}),
    ("video", "", "request.video_file", {"value": "''"}),
    ("video", "sha256:boat", "request.input_reference", {"value": "'sha256:boat'"}),
    ("control", "sha256:boat", "request.input_reference", {"value": "'sha256:boat'"}),
    ("mask", 3, "request.mask_file", {"value": "3"}),
    ("references", "boat.png", "request.image_file", {"value": "'boat.png'"}),
    ("references", ["boat.png", ""], "request.image_file", {"value": "''"}),
    ("references", ["boat.png"] * 9, "request.too_many_images", {"count": 9, "most": 8}),
    ("mask", "box:", "request.boxes", {"value": "'box:'", "most": 16}),
    ("mask", "box:1,2,3", "request.boxes", {}),
    ("mask", "box:60,0,50,10", "request.boxes", {}),
    ("mask", "box:0,0,0,10", "request.boxes", {}),
    ("mask", "box:nan,0,1,1", "request.boxes", {}),
    ("mask", "box:" + "+".join(["0,0,1,1"] * 17), "request.boxes", {}),
    ("outpaint", [1, 2], "request.sides", {}),
    ("outpaint", "301", "request.out_of_range", {"nearest": 300}),
    ("extend_frames", 82, "request.out_of_range", {"nearest": 81}),
    ("keyframes", ["boat.png"] * 17, "request.too_many_images", {"count": 17, "most": 16}),
    ("keyframe_seconds", [1.0] * 17, "request.scales", {"most": 16}),
    ("keyframe_seconds", "1,", "request.not_numbers", {"value": "'1,'"}),
    ("keyframe_seconds", 601, "request.out_of_range", {"nearest": 600, "low": 0, "high": 600}),
    ("control_scale", [], "request.scales", {"most": 512}),
    ("control_scale", [1.0] * 513, "request.scales", {}),
    ("control_scale", "", "request.not_numbers", {"value": "''"}),
    ("control_scale", "1,", "request.not_numbers", {"value": "'1,'"}),
    ("control_scale", True, "request.not_numbers", {"value": "True"}),
    ("control_scale", float("nan"), "request.not_numbers", {"value": "nan"}),
    ("control_scale", [1, [1]], "request.not_numbers", {"value": "[1]"}),
    ("control_scale", "0.5,4.1", "request.out_of_range", {"value": "4.1", "nearest": 4, "low": 0, "high": 4}),
    ("strength", 0, "request.out_of_range", {"nearest": 0.01}),
    ("strength", 1.5, "request.out_of_range", {"nearest": 1}),
    ("image_fit", "stretch", "request.not_a_choice", {"value": "'stretch'", "choices": ["crop", "fit"]}),
    ("image_position", 101, "request.out_of_range", {"value": "101", "nearest": 100, "low": 0, "high": 100}),
    ("image_position", "top", "request.not_a_number", {"value": "'top'", "low": 0, "high": 100}),
]


def test_a_refusal_has_code_field_and_limits(subtests: pytest.Subtests) -> None:
    for field, value, code, data in REFUSED:
        with subtests.test(msg=f"{field}={str(value)[:30]!r}"):
            with pytest.raises(InvalidRequestError) as refused:
                GenerationRequest.from_mapping({"prompt": "a red boat", field: value})
            error = refused.value
            assert (error.field, error.code) == (field, code)
            found = {name: error.data[name] for name in data}
            assert found == {name: list(one) if isinstance(one, tuple) else one for name, one in data.items()}
            assert len(error.what) < 150
            assert error.what.splitlines() == [error.what]
            assert error.remedy.splitlines() == [error.remedy]
