"""Graphs of ComfyUI: what they sample with, read from the nodes before the sampler.

ComfyUI stores two forms: "prompt" is what it computed, with named inputs; "workflow" is what its editor shows, where a
node has a list of values in the order of its widgets, which is known here for common nodes. Values that a node takes
from another one, such as a primitive, are followed. Nodes of extensions are read where they use the usual names.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from runtime.core.loras import MAX_LORAS, SUFFIX

Found = tuple[dict[str, Any], str, list[tuple[str, str]]]

_SIZE = ("width", "height", "length", "batch_size")
# The names of a node's widgets in their order.
_WIDGETS: Mapping[str, Sequence[str]] = {
    "KSampler": ("seed", "control", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    "KSamplerAdvanced": (
        "add_noise", "noise_seed", "control", "steps", "cfg", "sampler_name", "scheduler", "start_at_step",
    ),
    "CLIPTextEncode": ("text",),
    "EmptyHunyuanLatentVideo": _SIZE, "EmptyLTXVLatentVideo": _SIZE, "WanImageToVideo": _SIZE, "WanVaceToVideo": _SIZE,
    "WanFirstLastFrameToVideo": _SIZE, "Wan22ImageToVideoLatent": _SIZE,
    "UNETLoader": ("unet_name",), "UnetLoaderGGUF": ("unet_name",), "CheckpointLoaderSimple": ("ckpt_name",),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"), "LoraLoader": ("lora_name", "strength_model"),
    "ModelSamplingSD3": ("shift",), "FluxGuidance": ("guidance",), "RandomNoise": ("noise_seed", "control"),
    "CFGGuider": ("cfg",), "KSamplerSelect": ("sampler_name",), "BasicScheduler": ("scheduler", "steps", "denoise"),
    "LTXVScheduler": ("steps", "max_shift"), "LTXVConditioning": ("frame_rate",), "CreateVideo": ("fps",),
    "SaveWEBM": ("filename_prefix", "codec", "fps", "crf"), "SaveAnimatedWEBP": ("filename_prefix", "fps"),
    "PrimitiveInt": ("value",), "PrimitiveFloat": ("value",), "PrimitiveString": ("value",),
    "PrimitiveStringMultiline": ("value",), "PrimitiveNode": ("value",),
}  # fmt: skip
# What a node's only value is called.
_VALUES = ("value", "int", "float", "number", "seed", "noise_seed", "text", "string", "prompt")
_FRAMES = ("length", "num_frames", "frames", "video_frames")
_MODELS = ("unet_name", "ckpt_name", "model_name", "gguf_name", "model")
# Nodes without a setting of the request: loaders of other parts, decoders, and what shows and saves.
_PLUMBING = (
    "cliploader", "dualcliploader", "vaeloader", "vaedecode", "vaeencode", "cliptextencode", "clipvision", "save",
    "preview", "note", "reroute", "primitive", "loadimage", "loadvideo", "createvideo", "videocombine",
)  # fmt: skip
_MOST_NODES = 2_000
_LARGEST_NUMBER = 1e300
_EXPERTS = ("high", "low")
# The parts of a link: its number, the node and the slot where it begins, and those where it ends.
_LINK_PARTS = 5
_MUTED, _BYPASSED = 2, 4


@dataclass(frozen=True)
class _Node:
    """A node: the values of its inputs, and the ids of the nodes that its other inputs come from."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


class _Graph:
    """The nodes of a graph by id."""

    def __init__(self, nodes: Mapping[str, _Node]) -> None:
        self.nodes = nodes

    def before(self, start: Iterable[str]) -> Iterator[str]:
        """Yield nodes and all that they depend on, the nearest first."""
        waiting = deque(dict.fromkeys(start))
        seen = set(waiting)
        while waiting:
            current = waiting.popleft()
            if current not in self.nodes:
                continue
            yield current
            for inner in self.nodes[current].links.values():
                if inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)

    def value(self, node: _Node, *names: str) -> Any:
        """Return the first of a node's inputs that has a value, its own or that of the node that it is linked to."""
        for name in names:
            if name in node.values:
                return node.values[name]
            for inner in self.before([node.links[name]] if name in node.links else []):
                for own in _VALUES:
                    if own in self.nodes[inner].values:
                        return self.nodes[inner].values[own]
        return None

    def number(self, node: _Node, *names: str) -> int | float | None:
        """Return a `value` that is a finite number."""
        value = self.value(node, *names)
        return value if _is_number(value) else None

    def first_number(self, start: Iterable[str], *names: str) -> int | float | None:
        """Return the nearest number with one of these names before some nodes."""
        for current in self.before(start):
            number = self.number(self.nodes[current], *(name for name in names if name in self.nodes[current].values))
            if number is not None:
                return number
        return None

    def setting(self, node: _Node, names: Sequence[str], *inputs: str) -> int | float | None:
        """Return a number of a sampler, or of the nodes before one of its inputs."""
        number = self.number(node, *names)
        return self.first_number(_linked(node, *inputs), *names) if number is None else number


def read(content: Any) -> Found | None:
    """Return the fields of a request, the name of the model, and what has no counterpart; `None` if it is no graph.

    Args:
        content: a parsed JSON value, of any kind.
    """
    graph = _Graph(_computed(content) or _edited(content))
    samplers = [name for name, node in graph.nodes.items() if _samples(node)]
    if not samplers:
        return None
    # The last one is before no other one; the first of a chain makes the layout.
    inner = {
        name: [one for one in graph.before(graph.nodes[name].links.values()) if one in samplers] for name in samplers
    }
    last = next((name for name in samplers if not any(name in one for one in inner.values())), samplers[0])
    chain = [*reversed(inner[last]), last][:2]
    nodes = [graph.nodes[name] for name in chain]
    values = _sampled(graph, nodes)
    models = [_model(graph, node) for node in nodes]
    is_pair = len(models) == len(_EXPERTS) and models[0][0] != models[1][0]
    loras: list[dict[str, Any]] = []
    for (_, found), expert in zip(models, _EXPERTS if is_pair else ("both",), strict=False):
        loras += [lora | {"expert": expert} for lora in found]
    if loras:
        values["loras"] = loras[:MAX_LORAS]
    if not is_pair:
        values.pop("guidance_scale_2", None)
    left_out = [("LoRA", str(lora["file"])[:60]) for lora in loras[MAX_LORAS:]]
    return values, " ".join(name for name, _ in models if name)[:400], left_out + _left_out(graph, nodes)


def _computed(content: Any) -> dict[str, _Node]:
    """Return the nodes of a "prompt"; empty if it is something else."""
    nodes: dict[str, _Node] = {}
    for name, entry in list(content.items())[:_MOST_NODES] if isinstance(content, dict) else ():
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("class_type"), str)
            and isinstance(entry.get("inputs"), dict)
        ):
            inputs = entry["inputs"]
            links = {key: str(value[0]) for key, value in inputs.items() if _is_link(value)}
            values = {key: value for key, value in inputs.items() if not isinstance(value, list)}
            nodes[str(name)] = _Node(entry["class_type"], values, links)
    return nodes


def _is_link(value: Any) -> bool:
    match value:
        case [str() | int(), int()]:
            return True
    return False


def _edited(content: Any) -> dict[str, _Node]:
    """Return the nodes of a "workflow"; empty if it is something else."""
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        return {}
    links = content.get("links")
    source = {
        link[0]: str(link[1])
        for link in (links if isinstance(links, list) else ())
        if isinstance(link, list) and len(link) >= _LINK_PARTS and isinstance(link[0], int)
    }
    nodes: dict[str, _Node] = {}
    for entry in content["nodes"][:_MOST_NODES]:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or entry.get("mode") == _MUTED:
            continue
        inputs = entry.get("inputs")
        linked = {
            one["name"]: source[one["link"]]
            for one in (inputs if isinstance(inputs, list) else ())
            if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("link"), int)
            and one["link"] in source
        }  # fmt: skip
        widgets = entry.get("widgets_values")
        values: dict[str, Any] = {}
        if entry.get("mode") == _BYPASSED:
            pass
        elif isinstance(widgets, dict):
            values = widgets
        elif isinstance(widgets, list):
            values = dict(zip(_WIDGETS.get(entry["type"], ()), widgets, strict=False))
        # A widget that was made an input keeps its old value.
        values = {name: value for name, value in values.items() if name not in linked}
        nodes[str(entry.get("id"))] = _Node(entry["type"], values, linked)
    return nodes


def _samples(node: _Node) -> bool:
    names = {*node.values, *node.links}
    return {"noise", "guider", "sigmas"} <= names or ("steps" in names and bool({"seed", "noise_seed"} & names))


def _sampled(graph: _Graph, nodes: Sequence[_Node]) -> dict[str, Any]:
    """Return what the nodes of a chain of samplers sample with."""
    first = nodes[0]
    before = [name for node in nodes for name in node.links.values()]
    values: dict[str, Any] = {
        "seed": graph.setting(first, ("seed", "noise_seed"), "noise"),
        "steps": graph.setting(first, ("steps",), "sigmas"),
        "shift": graph.setting(first, ("shift",), "model", "guider"),
    }
    for name, node in zip(("guidance_scale", "guidance_scale_2"), nodes, strict=False):
        scale = graph.setting(node, ("cfg",), "guider")
        # Models that were distilled for it take the scale as an input.
        embedded = graph.first_number(_linked(node, "positive", "guider"), "guidance")
        values[name] = embedded if embedded is not None and scale in (None, 1) else scale
    for name, role in (("prompt", "positive"), ("negative_prompt", "negative")):
        values[name] = next((text for node in nodes if (text := _text(graph, node, role)) is not None), None)
    for name in graph.before(before):
        node = graph.nodes[name]
        size = [graph.number(node, side) for side in ("width", "height")]
        frames = graph.number(node, *_FRAMES)
        if None not in size and frames is not None:
            values |= {"width": size[0], "height": size[1], "frames": frames}
            break
    rates = (graph.number(node, "frame_rate", "fps") for node in graph.nodes.values())
    values["fps"] = next((rate for rate in rates if rate is not None), None)
    return {name: _whole(value) for name, value in values.items() if value is not None}


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that is neither NaN nor infinite, nor a whole one that no float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _linked(node: _Node, *names: str) -> list[str]:
    return [node.links[name] for name in names if name in node.links]


def _text(graph: _Graph, node: _Node, role: str) -> str | None:
    """Return the text that a sampler reads as `role`, through nodes that pass both texts on."""
    seen: set[int] = set()
    while id(node) not in seen:
        seen.add(id(node))
        own = f"{role}_prompt"
        text = graph.value(node, own) if own in {*node.values, *node.links} else None
        if text is None and not {"positive", "negative"} & node.links.keys():
            text = graph.value(node, "text", "prompt")
        if isinstance(text, str):
            return text
        follow = ("guider", "text_embeds", "conditioning", "conditioning_1", "conditioning_to")
        names = (role, *follow) if role == "positive" else (role, "guider", "text_embeds", "conditioning")
        node = graph.nodes.get(next(iter(_linked(node, *names)), ""), node)
    return None


def _model(graph: _Graph, node: _Node) -> tuple[str, list[dict[str, Any]]]:
    """Return the name of a sampler's model, and its LoRAs, the first that was applied first."""
    name, loras = "", []
    for current in graph.before(_linked(node, "model", "guider")):
        inner = graph.nodes[current]
        file, strength = inner.values.get("lora_name", inner.values.get("lora")), 1.0
        if isinstance(file, str) and file.lower() != "none":
            strength = graph.number(inner, "strength_model", "strength", "lora_strength") or 0.0
            loras.append(_lora(file, strength))
        for entry in inner.values.values():  # rgthree's loader of several
            if isinstance(entry, dict) and isinstance(entry.get("lora"), str) and entry.get("on") is True:
                strength = entry.get("strength", 1.0)
                loras.append(_lora(entry["lora"], strength if _is_number(strength) else 1.0))
        texts = (inner.values.get(key) for key in _MODELS)
        name = name or next((text for text in texts if isinstance(text, str)), "")[:200]
    return name, [lora for lora in reversed(loras) if lora["weight"]]


def _lora(file: str, strength: float) -> dict[str, Any]:
    name = PurePosixPath(file.replace("\\", "/")).name.removesuffix(SUFFIX)[:200]
    return {"file": name, "weight": _whole(round(strength, 6))}


def _left_out(graph: _Graph, samplers: Sequence[_Node]) -> list[tuple[str, str]]:
    """Return the settings of the samplers and the kinds of nodes that have no counterpart."""
    found: list[tuple[str, str]] = []
    for name in ("sampler_name", "scheduler"):
        values = (node.values.get(name) for node in (*samplers, *graph.nodes.values()))
        text = next((value for value in values if isinstance(value, str)), None)
        found += [] if text is None else [(name, text[:60])]
    denoise = graph.number(samplers[0], "denoise")
    found += [("denoise", f"{denoise:g}")] if denoise not in (None, 1) else []
    known = {*_WIDGETS, *(node.kind for node in samplers)}
    kinds = Counter(node.kind for node in graph.nodes.values() if node.kind not in known)
    others = [kind for kind in kinds if not any(word in kind.lower().replace(" ", "") for word in _PLUMBING)]
    return found + [(kind[:60], f"×{kinds[kind]}") for kind in others]
