"""Settings that other programs wrote: the fields that correspond, the names of the others, and hostile texts.

The texts have the formats of the programs' own writers, whose revisions `runtime.models.other_programs` names.
"""

import json
import time
from typing import Any

import pytest

from runtime.core.request import GenerationRequest
from runtime.models.other_programs import _NEAREST, OtherSettings, read_settings
from runtime.models.registry import FAMILIES, published_models

# Of Wan2GP's `save_video_metadata`: compact JSON in the comment, padded with spaces to a reserved size.
WAN2GP = {
    "prompt": "a boat\nat sea",
    "alt_prompt": "",
    "negative_prompt": "blurry",
    "resolution": "1280x720",
    "video_length": 81,
    "batch_size": 1,
    "seed": 1234,
    "force_fps": "",
    "num_inference_steps": 4,
    "guidance_scale": 1,
    "guidance2_scale": 1.5,
    "guidance_phases": 2,
    "switch_threshold": 900,
    "flow_shift": 5,
    "sample_solver": "unipc",
    "activated_loras": [
        "https://huggingface.co/x/resolve/main/light_high.safetensors|sub",
        "wan\\style.safetensors",
        "x",
    ],
    "loras_multipliers": "# of both\n1;0 0.8\n1,0.5",
    "image_prompt_type": "S",
    "RIFLEx_setting": 0,
    "cfg_zero_step": -1,
    "type": "WanGP v11.12 by DeepBeepMeep - Wan2.2 Image2video 14B",
    "settings_version": 2.55,
    "model_type": "i2v_2_2",
}

# Of FramePack-Studio's `create_metadata`.
FRAMEPACK = {
    "app_version": "0.4.1",
    "prompt": "[0s: a man waves] [3s: he sits]",
    "negative_prompt": "",
    "seed": 31337,
    "steps": 25,
    "cfg": 1.0,
    "gs": 10.0,
    "rs": 0.0,
    "latent_type": "Black",
    "timestamp": 1752793162.5,
    "resolutionW": 640,
    "resolutionH": 608,
    "model_type": "F1",
    "generation_type": "F1",
    "has_input_image": True,
    "input_image_path": "/in/man.png",
    "total_second_length": 6,
    "blend_sections": 4,
    "latent_window_size": 9,
    "num_cleaned_frames": 5,
    "end_frame_strength": None,
    "end_frame_used": "False",
    "use_teacache": False,
    "teacache_num_steps": 0,
    "use_magcache": True,
    "magcache_threshold": 0.1,
    "loras": {"dance": 0.7},
}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"inputs": inputs, "class_type": kind, "_meta": {"title": kind}}


def link(number: int, slot: int = 0) -> list[Any]:
    return [str(number), slot]


def sampler(**inputs: Any) -> dict[str, Any]:
    common = {"steps": 20, "sampler_name": "euler", "scheduler": "simple", "positive": link(9), "negative": link(9, 1)}
    return node("KSamplerAdvanced", **{**common, **inputs})


# Two experts, as ComfyUI's template of Wan2.2 I2V: the high-noise model and its LoRA first.
EXPERTS = {
    "1": node("UNETLoader", unet_name="wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", weight_dtype="default"),
    "2": node("UNETLoader", unet_name="wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors", weight_dtype="default"),
    "3": node(
        "LoraLoaderModelOnly", lora_name="wan\\light_high.safetensors", strength_model=1.0000000000000002, model=link(1)
    ),
    "4": node("LoraLoaderModelOnly", lora_name="light_low.safetensors", strength_model=0.5, model=link(2)),
    "5": node("ModelSamplingSD3", shift=5.000000000000001, model=link(3)),
    "6": node("ModelSamplingSD3", shift=5.0, model=link(4)),
    "7": node("CLIPTextEncode", text=link(14), clip=link(20)),
    "8": node("CLIPTextEncode", text="blurry", clip=link(20)),
    "9": node(
        "WanImageToVideo", width=link(15), height=496, length=81, batch_size=1, positive=link(7), negative=link(8)
    ),
    "10": sampler(noise_seed=0, cfg=3.5, add_noise="enable", model=link(5), latent_image=link(9, 2)),
    "11": sampler(noise_seed=7, cfg=3, add_noise="disable", model=link(6), latent_image=link(10)),
    "12": node("VAEDecode", samples=link(11), vae=link(21)),
    "13": node("CreateVideo", fps=16, images=link(12)),
    "14": node("PrimitiveStringMultiline", value="a boat"),
    "15": node("PrimitiveInt", value=800),
    "16": node("SomeSharpener", amount=2, is_changed=[float("nan")], images=link(12)),
}
EXPERT_VALUES = {
    "prompt": "a boat",
    "negative_prompt": "blurry",
    "seed": 0,
    "steps": 20,
    "guidance_scale": 3.5,
    "guidance_scale_2": 3,
    "shift": pytest.approx(5),
    "width": 800,
    "height": 496,
    "frames": 81,
    "fps": 16,
    "loras": [
        {"file": "light_high", "weight": 1, "expert": "high"},
        {"file": "light_low", "weight": 0.5, "expert": "low"},
    ],
}

# A graph of LTX-2's kind: noise, guider and sigmas are nodes of their own.
CUSTOM = {
    "1": node("CheckpointLoaderSimple", ckpt_name="ltx-2-19b-distilled.safetensors"),
    "2": node("CLIPTextEncode", text="a cat", clip=link(1, 1)),
    "3": node("CLIPTextEncode", text="", clip=link(1, 1)),
    "4": node("LTXVConditioning", frame_rate=25.0, positive=link(2), negative=link(3)),
    "5": node("CFGGuider", cfg=4.0, model=link(1), positive=link(4), negative=link(4, 1)),
    "6": node("RandomNoise", noise_seed=99),
    "7": node("LTXVScheduler", steps=30, max_shift=2.05),
    "8": node("EmptyLTXVLatentVideo", width=768, height=512, length=97, batch_size=1),
    "9": node(
        "SamplerCustomAdvanced", noise=link(6), guider=link(5), sampler=link(10), sigmas=link(7), latent_image=link(8)
    ),
    "10": node("KSamplerSelect", sampler_name="euler"),
}
CUSTOM_VALUES = {
    "prompt": "a cat",
    "negative_prompt": "",
    "seed": 99,
    "steps": 30,
    "guidance_scale": 4,
    "width": 768,
    "height": 512,
    "frames": 97,
    "fps": 25,
}

# What the editor shows: values by the order of the widgets. Node 3 is bypassed, node 9 muted.
WORKFLOW: dict[str, Any] = {
    "nodes": [
        {
            "id": 1,
            "type": "UNETLoader",
            "mode": 0,
            "inputs": [],
            "widgets_values": ["wan2.1_t2v_1.3B_fp16.safetensors", "x"],
        },
        {
            "id": 2,
            "type": "LoraLoaderModelOnly",
            "mode": 0,
            "inputs": [{"name": "model", "link": 1}],
            "widgets_values": ["a.safetensors", 0.8],
        },
        {
            "id": 3,
            "type": "LoraLoaderModelOnly",
            "mode": 4,
            "inputs": [{"name": "model", "link": 2}],
            "widgets_values": ["b.safetensors", 1],
        },
        {
            "id": 4,
            "type": "ModelSamplingSD3",
            "mode": 0,
            "inputs": [{"name": "model", "link": 3}],
            "widgets_values": [8],
        },
        {
            "id": 5,
            "type": "CLIPTextEncode",
            "mode": 0,
            "inputs": [{"name": "clip", "link": None}],
            "widgets_values": ["a boat"],
        },
        {"id": 6, "type": "CLIPTextEncode", "mode": 0, "inputs": [], "widgets_values": ["ugly"]},
        {"id": 7, "type": "EmptyHunyuanLatentVideo", "mode": 0, "inputs": [], "widgets_values": [624, 320, 53, 1]},
        {
            "id": 8,
            "type": "KSampler",
            "mode": 0,
            "widgets_values": [5, "fixed", 30, 6, "uni_pc", "simple", 1],
            "inputs": [
                {"name": "model", "link": 4},
                {"name": "positive", "link": 5},
                {"name": "negative", "link": 6},
                {"name": "latent_image", "link": 7},
            ],
        },
        {"id": 9, "type": "KSampler", "mode": 2, "widgets_values": [6, "fixed", 31, 7, "x", "y", 1], "inputs": []},
        {
            "id": 10,
            "type": "VHS_VideoCombine",
            "mode": 0,
            "inputs": [],
            "widgets_values": {"frame_rate": 12, "format": "video/h264-mp4"},
        },
    ],
    "links": [
        [1, 1, 0, 2, 0, "MODEL"],
        [2, 2, 0, 3, 0, "MODEL"],
        [3, 3, 0, 4, 0, "MODEL"],
        [4, 4, 0, 8, 0, "MODEL"],
        [5, 5, 0, 8, 1, "CONDITIONING"],
        [6, 6, 0, 8, 2, "CONDITIONING"],
        [7, 7, 0, 8, 3, "LATENT"],
    ],
}
WORKFLOW_VALUES = {
    "prompt": "a boat",
    "negative_prompt": "ugly",
    "seed": 5,
    "steps": 30,
    "guidance_scale": 6,
    "shift": 8,
    "width": 624,
    "height": 320,
    "frames": 53,
    "fps": 12,
    "loras": [{"file": "a", "weight": 0.8, "expert": "both"}],
}


def read(**tags: Any) -> OtherSettings:
    found = read_settings({name: text if isinstance(text, str) else json.dumps(text) for name, text in tags.items()})
    assert found is not None
    return found


@pytest.mark.parametrize(
    "tags", [{"comment": json.dumps(WAN2GP) + " " * 50_000}, {"json": json.dumps(WAN2GP, indent=4)}]
)
def test_wan2gp(tags: dict[str, str]) -> None:
    found = read(**tags)
    assert (found.program, found.nearest_model) == ("Wan2GP", "wan2.2-i2v-a14b")
    assert found.values == {
        "prompt": "a boat\nat sea",
        "negative_prompt": "blurry",
        "width": 1280,
        "height": 720,
        "frames": 81,
        "seed": 1234,
        "steps": 4,
        "guidance_scale": 1,
        "guidance_scale_2": 1.5,
        "shift": 5,
        "loras": [
            {"file": "light_high", "weight": 1, "expert": "high"},
            {"file": "style", "weight": 0.8, "expert": "both"},
            {"file": "x", "weight": 1, "expert": "both"},
        ],
    }
    assert found.left_out == [
        ("loras_multipliers: x", "1,0.5"),
        ("sample_solver", "unipc"),
        ("image_prompt_type", "S"),
    ]


def test_framepack_studio() -> None:
    values = {
        "prompt": FRAMEPACK["prompt"],
        "seed": 31337,
        "steps": 25,
        "guidance_scale": 10,
        "width": 640,
        "height": 608,
        "seconds": 6,
    }
    found = read(json=FRAMEPACK)
    assert (found.program, found.nearest_model) == ("FramePack-Studio", "framepack-f1-i2v")
    assert found.values == values | {"loras": [{"file": "dance", "weight": 0.7, "expert": "both"}]}
    assert found.left_out == [("input_image_path", "/in/man.png"), ("use_magcache", "True")]
    # Its PNG has one text for each setting that is no list or object.
    found = read(**{name.lower(): str(value) for name, value in FRAMEPACK.items() if not isinstance(value, dict)})
    assert found.values == values and found.nearest_model == "framepack-f1-i2v"


@pytest.mark.parametrize(
    ("tags", "values", "model"),
    [
        ({"prompt": EXPERTS, "workflow": WORKFLOW}, EXPERT_VALUES, "wan2.2-i2v-a14b"),
        ({"comment": {"prompt": json.dumps(EXPERTS), "workflow": WORKFLOW}}, EXPERT_VALUES, "wan2.2-i2v-a14b"),
        ({"json": CUSTOM}, CUSTOM_VALUES, "ltx-2-distilled"),
        ({"json": WORKFLOW}, WORKFLOW_VALUES, "wan2.1-t2v-1.3b"),
    ],
    ids=["experts", "comment", "custom", "workflow"],
)
def test_comfyui(tags: dict[str, Any], values: dict[str, Any], model: str) -> None:
    found = read(**tags)
    assert (found.program, found.values, found.nearest_model) == ("ComfyUI", values, model)
    GenerationRequest.from_mapping(found.values)
    if values is EXPERT_VALUES:
        assert found.left_out == [("sampler_name", "euler"), ("scheduler", "simple"), ("SomeSharpener", "×1")]


def test_the_nearest_models_exist() -> None:
    published = {model.name for family in FAMILIES for model in published_models(family)}
    assert {name for _, name in _NEAREST} <= published
    assert OtherSettings("ComfyUI", model="flux1-dev.safetensors").nearest_model is None


def test_texts_of_others_are_no_settings() -> None:
    texts = [
        "",
        "null",
        "[]",
        "5",
        '"x"',
        "{}",
        '{"prompt": "a boat"}',
        '{"nodes": 5}',
        '{"nodes": [1, {"type": 5}]}',
        '{"1": {"class_type": "KSampler", "inputs": []}}',
        "\ud800",
        '{"type": "WanGP"',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
    ]
    for text in texts:
        for tag in ("comment", "prompt", "json"):
            assert read_settings({tag: text}) is None, text


def test_wrong_types_are_left_out_or_refused_later() -> None:
    wrong: list[Any] = [
        {},
        [],
        [1],
        {"x": 1},
        True,
        "x",
        float("nan"),
        float("inf"),
        1e300,
        10**400,
        -5,
        "9" * 5000,
        None,
    ]
    for value in wrong:
        read(json={**dict.fromkeys(WAN2GP, value), "type": "WanGP"})
        read(json=dict.fromkeys(FRAMEPACK, value))
        for name, original in EXPERTS.items():
            inputs = dict.fromkeys(original["inputs"], value)
            graph = EXPERTS | {name: {**original, "inputs": inputs}}
            read_settings({"prompt": json.dumps(graph)})
        for index, original in enumerate(WORKFLOW["nodes"]):
            for key in original:
                nodes = [*WORKFLOW["nodes"]]
                nodes[index] = {**original, key: value}
                read_settings({"workflow": json.dumps({**WORKFLOW, "nodes": nodes})})
        read_settings({"workflow": json.dumps({**WORKFLOW, "links": value})})
        read_settings({"workflow": json.dumps({**WORKFLOW, "links": [value, [1, value, 0, 8, 0, "x"], [value] * 6]})})


def test_large_and_circular_graphs_end_soon() -> None:
    began = time.process_time()
    circle = {
        str(n): node("KSampler", seed=link(n + 1), steps=link(n + 1), positive=link((n + 1) % 300), model=link(n))
        for n in range(300)
    }
    read_settings({"prompt": json.dumps(circle)})
    wide = {
        str(n): node("KSampler", seed=1, steps=1, **{f"x{k}": link((n * 7 + k) % 400) for k in range(40)})
        for n in range(400)
    }
    read_settings({"prompt": json.dumps(wide)})
    assert read_settings({"comment": " " * (5 << 20)}) is None
    assert read_settings({"comment": '{"type": "WanGP", "x": [' + "1," * 50_000 + "1]}"}) is None
    many = read(json={"type": "WanGP", **{f"name{n}" * 50: "x" * 5000 for n in range(300)}})
    assert len(many.left_out) == 41 and all(len(name) <= 60 and len(value) <= 60 for name, value in many.left_out)
    assert time.process_time() - began < 20
