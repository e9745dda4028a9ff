"""Settings that other programs have written: the fields of a request that correspond, and what has no counterpart.

No file is opened here: the texts come from a file's metadata or a JSON file, and can be anything.
Formats: Wan2GP `shared/utils/video_metadata.py`, `shared/utils/audio_video.py` and `wgp.py` (revision 8681e9f);
FramePack-Studio `modules/pipelines/metadata_utils.py` (f4369da); ComfyUI `comfy_extras/nodes_video.py` (0413db9) and
`comfy_api/latest/_input_impl/video_types.py` (04dfab9); ComfyUI-VideoHelperSuite `videohelpersuite/nodes.py` (4ee72c0).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.loras import MAX_LORAS, SUFFIX
from runtime.core.request import GenerationRequest
from runtime.core.untrusted_files import BYTE_ORDER_MARK, MAX_JSON_BYTES, parse_json
from runtime.models import comfyui_graphs

# The text of a JSON file, beside the tags of a video or an image.
JSON_FILE = "json"
# The tags that are read.
TAGS = frozenset({JSON_FILE, "comment", "prompt", "workflow"})
# Names of settings without a counterpart that are listed.
_MOST_NAMES = 40
_LONGEST_TEXT = 20_000
_LONGEST_NUMBER = 40
_LARGEST_NUMBER = 1e18
_EXPERTS = ("high", "low")

# The published model that is nearest to a name of theirs in lower case; the first pattern that occurs counts.
_NEAREST = (
    (r"(?=.*ltx)(?=.*(2[._]3|22b)).*distill", "ltx-2.3-distilled"),
    (r"(?=.*ltx).*(2[._]3|22b)", "ltx-2.3"),
    (r"ltxv?.?2.*distill", "ltx-2-distilled"),
    (r"ltxv?.?2", "ltx-2"),
    (r"framepack.*f1", "framepack-f1-i2v"),
    (r"framepack", "framepack-i2v"),
    (r"hunyuan", "hunyuan-video"),
    (r"animate", "wan2.2-animate-14b"),
    (r"vace.*1[._]3b", "wan2.1-vace-1.3b"),
    (r"vace", "wan2.1-vace-14b"),
    (r"ti2v|textimage2video", "wan2.2-ti2v-5b"),
    (r"(?=.*2[._]2).*(i2v|image.?(2|to).?video)", "wan2.2-i2v-a14b"),
    (r"2[._]2", "wan2.2-t2v-a14b"),
    (r"flf2v|fun_inp", "wan2.1-flf2v-14b"),
    (r"(?=.*720).*(i2v|image.?(2|to).?video)", "wan2.1-i2v-14b-720p"),
    (r"i2v|image.?(2|to).?video", "wan2.1-i2v-14b-480p"),
    (r"(wan|t2v).*1[._]3b", "wan2.1-t2v-1.3b"),
    (r"wan|t2v", "wan2.1-t2v-14b"),
)
_WAN2GP_RECORD = re.compile(r"^WanGP v\S* by DeepBeepMeep - ")

# Settings of Wan2GP that say nothing about the video, or what the file is.
_WAN2GP_IGNORED = frozenset(
    {
        "type", "settings_version", "base_model_type", "model_type", "model_filename", "client_id", "image_mode",
        "creation_date", "creation_timestamp", "generation_time", "batch_size", "repeat_generation", "mode",
        "output_filename", "multi_prompts_gen_type", "multi_images_gen_type", "override_profile", "override_attention",
        "guidance_phases", "switch_threshold", "queue_id", "video_quality", "comments",
    }
)  # fmt: skip
_FRAMEPACK_IGNORED = frozenset(
    {"app_version", "timestamp", "model_type", "generation_type", "has_input_image", "end_frame_used", "latent_type"}
)


@dataclass(frozen=True)
class OtherSettings:
    """What a file of another program says.

    Attributes:
        program: its name.
        values: fields of a request; they may be invalid.
        model: what it calls its model; empty if it does not say.
        left_out: names and values of settings without a counterpart, as texts.
    """

    program: str
    values: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @property
    def nearest_model(self) -> str | None:
        """The published model that is nearest to its model; `None` if none is known."""
        name = self.model.lower()
        return next((ours for pattern, ours in _NEAREST if re.search(pattern, name)), None)

    def checked(self) -> "OtherSettings":
        """Return only the values that are valid by themselves; the others are left out."""
        values: dict[str, Any] = {}
        left_out = [*self.left_out]
        for name, value in self.values.items():
            try:
                GenerationRequest.from_mapping({"prompt": "none", name: value})
                values[name] = value
            except InvalidRequestError:
                left_out.append((shortened(name), _shown(value)))
        return replace(self, values=values, left_out=left_out)


def read_settings(tags: Mapping[str, Any]) -> OtherSettings | None:
    """Return the settings in the texts of a file; `None` if no known program wrote them.

    Args:
        tags: by the names of tags, such as "comment", or by `JSON_FILE`: texts, or the values of JSON in them.
    """
    if {"latent_window_size", "total_second_length"} <= tags.keys():  # FramePack-Studio has one tag for each
        return _framepack({name: _parsed_tag(text) for name, text in tags.items()})
    parsed = {name: _parse(tags[name]) for name in sorted(TAGS & tags.keys())}
    for content in parsed.values():
        if isinstance(content, dict) and _is_wan2gp(content):
            return _wan2gp(content)
        if isinstance(content, dict) and {"latent_window_size", "total_second_length"} <= content.keys():
            return _framepack(content)
    for content in _graphs(parsed):
        graph = comfyui_graphs.read(content)
        if graph is not None:
            values, model, left_out = graph
            return _limited(OtherSettings("ComfyUI", values, model, left_out))
    return None


def _graphs(parsed: Mapping[str, Any]) -> Iterable[Any]:
    """Yield what may be a graph of ComfyUI, what it computed before what its editor shows."""
    # The comment of an earlier VideoHelperSuite, and a JSON file, may have both.
    inner = [content for content in (parsed.get("comment"), parsed.get(JSON_FILE)) if isinstance(content, dict)]
    for name in ("prompt", "workflow"):
        yield parsed.get(name)
        for content in inner:
            yield _parse(content.get(name))
    yield from inner


def _parse(text: Any) -> Any:
    """Return the value of JSON, in which programs write NaN; `None` if it cannot be read within limits."""
    if not isinstance(text, str):
        return text
    try:
        if len(text) > MAX_JSON_BYTES:
            return None
        return parse_json(text.encode().removeprefix(BYTE_ORDER_MARK), infinite=True)
    except ValueError:  # also text that is no UTF-8
        return None


def _parsed_tag(text: Any) -> Any:
    """Return a value that Python wrote as text."""
    if not isinstance(text, str):
        return text
    number = _number(text)
    return {"None": None, "True": True, "False": False}.get(text, text if number is None else number)


def _number(value: Any) -> int | float | None:
    """Return a finite number, whole where it is; `None` for anything else."""
    if isinstance(value, str):
        try:
            value = float(value) if len(value) < _LONGEST_NUMBER else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) <= _LARGEST_NUMBER:  # also NaN
        return None
    return int(value) if value == int(value) else value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= _LONGEST_TEXT else None


def _take(
    values: dict[str, Any], content: Mapping[str, Any], names: Mapping[str, str], left_out: list[tuple[str, str]]
) -> None:
    """Take numbers and texts under our names; those of another type are left out."""
    for theirs, ours in names.items():
        if theirs in content and content[theirs] not in (None, ""):
            is_text = ours in {"prompt", "negative_prompt"}
            value = _text(content[theirs]) if is_text else _number(content[theirs])
            if value is None:
                left_out.append((theirs, _shown(content[theirs])))
            else:
                values[ours] = value


def _shown(value: Any) -> str:
    text = (
        value if isinstance(value, str) else f"{type(value).__name__}" if isinstance(value, dict | list) else str(value)
    )
    return text[:60]


def _limited(found: OtherSettings) -> OtherSettings:
    """Keep a list of what is left out that a person can read."""
    more = len(found.left_out) - _MOST_NAMES
    if more > 0:
        del found.left_out[_MOST_NAMES:]
        found.left_out.append(("…", f"+{more}"))
    return found


def _lora(name: Any) -> str:
    """Return the name of a LoRA in our folder for the path or address of theirs."""
    file = PurePosixPath(str(name).split("|")[0].replace("\\", "/")).name
    return file.removesuffix(SUFFIX)


def _is_wan2gp(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("type"), str) and "WanGP" in content["type"]


def _wan2gp(content: Mapping[str, Any]) -> OtherSettings:
    values: dict[str, Any] = {}
    left_out: list[tuple[str, str]] = []
    names = {
        "prompt": "prompt", "negative_prompt": "negative_prompt", "video_length": "frames", "force_fps": "fps",
        "num_inference_steps": "steps", "guidance_scale": "guidance_scale", "flow_shift": "shift",
    }  # fmt: skip
    _take(values, content, names, left_out)
    seed = _number(content.get("seed"))
    if seed is not None and seed >= 0:  # -1 is a random one
        values["seed"] = seed
    elif seed is None and content.get("seed") is not None:
        left_out.append(("seed", _shown(content["seed"])))
    phases = _number(content.get("guidance_phases"))
    if (
        phases is not None
        and phases >= len(_EXPERTS)
        and (second := _number(content.get("guidance2_scale"))) is not None
    ):
        values["guidance_scale_2"] = second
    size = re.fullmatch(r"(\d{1,5})x(\d{1,5})", str(content.get("resolution", "")).strip())
    if size:
        values["width"], values["height"] = int(size[1]), int(size[2])
    loras = content.get("activated_loras")
    loras = loras if isinstance(loras, list) else []
    values |= _with_loras(_wan2gp_loras(loras, content.get("loras_multipliers"), left_out), left_out)
    taken = {*names, "seed", "guidance2_scale", "resolution", "activated_loras", "loras_multipliers"}
    left_out += _others(content, taken | _WAN2GP_IGNORED)
    model = _WAN2GP_RECORD.sub("", " ".join(str(content.get(name, ""))[:200] for name in ("type", "model_type")))
    return _limited(OtherSettings("Wan2GP", values, model, left_out))


def _wan2gp_loras(loras: Sequence[Any], multipliers: Any, left_out: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the LoRAs with their weights: "1", or "1;0.5" for the two experts. Weights that change by step are not."""
    lines = multipliers.replace("\r", "").split("\n") if isinstance(multipliers, str) else []
    words = " ".join(line for line in lines if not line.startswith("#")).replace("|", " ").split()
    found: list[dict[str, Any]] = []
    for index, lora in enumerate(loras[: 2 * MAX_LORAS]):
        word = words[index] if index < len(words) else "1"
        weights = [_number(part) for part in word.split(";")]
        if None in weights or len(weights) > len(_EXPERTS):
            left_out.append((f"loras_multipliers: {_lora(lora)[:60]}", word[:60]))
            weights = [1]
        experts = ("both",) if len(weights) == 1 else _EXPERTS
        found += [
            {"file": _lora(lora), "weight": weight, "expert": expert}
            for weight, expert in zip(weights, experts, strict=True)
            if weight or len(weights) == 1
        ]
    return found


def _with_loras(loras: list[dict[str, Any]], left_out: list[tuple[str, str]]) -> dict[str, Any]:
    left_out += [("LoRA", _shown(lora["file"])) for lora in loras[MAX_LORAS:]]
    return {"loras": loras[:MAX_LORAS]} if loras else {}


def _others(content: Mapping[str, Any], known: Iterable[str]) -> list[tuple[str, str]]:
    """Return the settings that are not known and not off."""
    off = (None, "", 0, -1, False)
    return [
        (str(name)[:60], _shown(value))
        for name, value in content.items()
        if name not in known and not (value in off if not isinstance(value, dict | list) else not value)
    ]


def _framepack(content: Mapping[str, Any]) -> OtherSettings:
    content = {name.lower(): value for name, value in content.items()}  # names of tags are in lower case
    values: dict[str, Any] = {}
    left_out: list[tuple[str, str]] = []
    names = {
        "prompt": "prompt", "negative_prompt": "negative_prompt", "seed": "seed", "steps": "steps",
        "gs": "guidance_scale", "resolutionw": "width", "resolutionh": "height", "total_second_length": "seconds",
    }  # fmt: skip
    _take(values, content, names, left_out)
    loras = content.get("loras")
    if isinstance(loras, dict):
        found = [{"file": _lora(name), "weight": _number(weight), "expert": "both"} for name, weight in loras.items()]
        values |= _with_loras([lora for lora in found if lora["weight"] is not None], left_out)
    known = {*names, "loras", *_FRAMEPACK_IGNORED}
    # The defaults of a cache that is off, and sizes that the model fixes, say nothing.
    known |= {name for name in content if name.startswith(("teacache_", "magcache_"))}
    fixed = {"latent_window_size": 9, "cfg": 1, "rs": 0, "blend_sections": 4, "num_cleaned_frames": 5}
    known |= {name for name, value in fixed.items() if content.get(name) == value}
    left_out += _others(content, known)
    model = f"FramePack {str(content.get('model_type', ''))[:100]}"
    return _limited(OtherSettings("FramePack-Studio", values, model, left_out))
