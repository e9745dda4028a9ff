"""Check a clip's size, length, shift and steps against the model's limits, and warn about unusual values.

Called by `planner.resolve`. Pure.
"""

import math
from collections.abc import Mapping, Sequence

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import Fact, shortened
from runtime.core.images import CROP, InputFile, VideoUse, with_borders
from runtime.core.keyframes import latent_at
from runtime.core.loras import LoraUse, loads_of_ranges
from runtime.core.prompt_weights import MOST_WEIGHT, read_weights
from runtime.core.request import AUTO, LOSSLESS, MAX_FRAMES, MAX_SIDE, NO_NAG, OFF, GenerationRequest
from runtime.core.step_cache import NONE
from runtime.models.catalogue import published
from runtime.models.registry import family_of
from runtime.models.spec import ModelSpec
from runtime.models.timed_prompts import TimedPrompt, has_times, section_prompts, timed_prompts, unreadable_times

# Proportions and numbers of pixels that differ by at most this share count as equal.
_SIMILAR = 0.05


def size_for(request: GenerationRequest, spec: ModelSpec) -> tuple[int, int]:
    """Return a clip's width and height in pixels.

    They are those asked for, else from the proportions of the image or the video, or the model's. A continuation has
    the size of its video.

    Raises:
        InvalidRequestError: if another one is asked for.
    """
    if spec.extend is not None:
        return _as_before(request, spec.extend, "width"), _as_before(request, spec.extend, "height")
    usual = spec.defaults.width, spec.defaults.height
    sides, first = (request.width, request.height), _first_input(spec)
    if first is None or AUTO not in sides:
        width, height = (default if side == AUTO else int(side) for side, default in zip(sides, usual, strict=True))
        return width, height
    ratio = first.width / first.height
    if request.width != AUTO:
        return int(request.width), _multiple(int(request.width) / ratio, spec, "height")
    if request.height != AUTO:
        return _multiple(int(request.height) * ratio, spec, "width"), int(request.height)
    return like_image(spec, first, usual[0] * usual[1])


def fps_for(request: GenerationRequest, spec: ModelSpec) -> int:
    """Return the frames per second asked for, else the model's; a continuation has those of its video.

    Raises:
        InvalidRequestError: if others are asked for.
    """
    if spec.extend is not None:
        return _as_before(request, spec.extend, "fps")
    return spec.defaults.fps if request.fps == AUTO else int(request.fps)


def _as_before(request: GenerationRequest, video: VideoUse, field: str) -> int:
    able, value = int(getattr(video, field)), getattr(request, field)
    if value not in {AUTO, able}:
        raise InvalidRequestError(field, "source.other_size", value=value, video=video.name, able=able)
    return able


def _first_input(spec: ModelSpec) -> InputFile | None:
    """Return what the size follows from, if it is not text alone."""
    return next(iter((*spec.followed_videos, *spec.images)), None) if spec.control is None else _with_borders(spec)


def _with_borders(spec: ModelSpec) -> InputFile | None:
    """Return the control video with the proportions that it has with its borders."""
    if spec.control is None:
        return None
    width, height = map(round, with_borders(spec.control.width, spec.control.height, spec.outpaint))
    return spec.control.replace(width=width, height=height)


def frames_for(request: GenerationRequest, spec: ModelSpec, fps: int) -> int:
    """Return the number of frames asked for, else the model's; for a length in seconds, the nearest that it makes.

    A video from others, such as a control video with its mask, is at most as long as the shortest: without a length,
    the first frames that the model makes.

    Raises:
        InvalidRequestError: if both are asked for, or the length is too long.
    """
    frames = _asked_frames(request, spec, fps)
    video = min(spec.followed_videos, key=lambda use: use.frames, default=None)
    if video is None or frames <= video.frames:
        return frames
    stride = spec.frame_stride
    longest = (video.frames - 1) // stride * stride + 1
    whole = request.seconds != AUTO and round(float(request.seconds) * fps) <= video.frames
    if request.frames != AUTO or (request.seconds != AUTO and not whole):
        field = "frames" if request.seconds == AUTO else "seconds"
        data = {"video": video.name, "frames": video.frames, "fps": fps, "able": longest}
        raise InvalidRequestError(field, "planner.video_too_short", value=getattr(request, field), **data)
    return longest


def _asked_frames(request: GenerationRequest, spec: ModelSpec, fps: int) -> int:
    if request.seconds == AUTO:
        return spec.defaults.frames if request.frames == AUTO else int(request.frames)
    if request.frames != AUTO:
        raise InvalidRequestError("seconds", "planner.seconds_and_frames")
    stride = spec.frame_stride
    most = (min(MAX_FRAMES, _most_positions(spec)["frames"]) - 1) // stride * stride + 1
    frames = max(round(float(request.seconds) * fps / stride) * stride + 1, spec.least_frames)
    if frames > most:
        able = f"{most / fps:.4g}"
        raise InvalidRequestError(
            "seconds", "planner.too_long", value=request.seconds, model=spec.title, fps=fps, able=able
        )
    return frames


def count_prompts(request: GenerationRequest, spec: ModelSpec, frames: int, fps: int) -> int:
    """Return how many different prompts a clip's sections have; 1 for a clip that is made whole.

    Raises:
        InvalidRequestError: if the prompt has times and the model makes no sections, or if times cannot be read, are
            not in order, start after the end of the clip, or have no text.
    """
    prompt = request.prompt
    if spec.section is None:
        if has_times(prompt):
            raise InvalidRequestError("prompt", "planner.prompt_without_sections", model=spec.title)
        return 1
    unread = unreadable_times(prompt)
    if unread:
        raise InvalidRequestError("prompt", "planner.prompt_times", part=shortened(unread[0]))
    if has_times(prompt):
        _check_times(timed_prompts(prompt), frames / fps)
    return len(set(section_prompts(prompt, spec.sections_of(frames), fps)))


def check_weights(request: GenerationRequest, spec: ModelSpec) -> None:
    """Check the weights of a request's words.

    Raises:
        InvalidRequestError: if the model's text encoders take none, or one is negative or too large.
    """
    for field, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")):
        weights = read_weights(text).weights
        if weights and not spec.takes_weights:
            raise InvalidRequestError(field, "planner.prompt_weights", model=spec.title)
        refused = next((weight for weight in weights if not 0 <= weight <= MOST_WEIGHT), None)
        if refused is not None:
            raise InvalidRequestError(field, "planner.prompt_weight", weight=refused, most=MOST_WEIGHT)


def _check_times(prompts: Sequence[TimedPrompt], length: float) -> None:
    before = 0.0
    for prompt in prompts:
        data = {"start": f"{prompt.start:g}"}
        if not prompt.text:
            raise InvalidRequestError("prompt", "planner.prompt_of_time_empty", **data)
        if prompt.start < before:
            raise InvalidRequestError("prompt", "planner.prompt_order", before=f"{before:g}", **data)
        if prompt.start >= length:
            raise InvalidRequestError("prompt", "planner.prompt_too_late", length=f"{length:.4g}", **data)
        before = prompt.start


def like_image(spec: ModelSpec, image: InputFile, pixels: int) -> tuple[int, int]:
    """Return a size with about the proportions of an image or a video and about so many pixels.

    It is one of the model's own sizes if one is close: the model was trained with it, and engines exist for it.
    """
    ratio = image.width / image.height
    sizes = [size for size in spec.sizes if abs(size[0] * size[1] / pixels - 1) <= _SIMILAR]
    closest = min(sizes, key=lambda size: _cut(image, *size), default=None)
    if closest is not None and _cut(image, *closest) <= _SIMILAR:
        return closest
    width, height = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    shrink = min(1.0, _most(spec, "width") / width, _most(spec, "height") / height)
    return _multiple(shrink * width, spec, "width"), _multiple(shrink * height, spec, "height")


def _multiple(value: float, spec: ModelSpec, field: str) -> int:
    """Return the nearest multiple of a side's stride that the model can make."""
    stride = spec.strides[0 if field == "width" else 1]
    least = spec.least_size[0 if field == "width" else 1]
    return max(least, min(round(value / stride), _most(spec, field) // stride) * stride)


def _most(spec: ModelSpec, field: str) -> int:
    return min(MAX_SIDE, _most_positions(spec)[field])


def _cut(image: InputFile, width: int, height: int) -> float:
    """Return the share of an image that a frame of this size does not show if it is cropped."""
    ratio, frame_ratio = image.width / image.height, width / height
    return 1 - min(ratio / frame_ratio, frame_ratio / ratio)


def check_size(spec: ModelSpec, width: int, height: int, frames: int) -> None:
    """Check that a model supports a size and length.

    Raises:
        InvalidRequestError: if it does not, with the nearest supported values.
    """
    _check_positions(spec, {"frames": frames, "height": height, "width": width})
    strides = dict(zip(("width", "height"), spec.strides, strict=True))
    values = {"width": width, "height": height}
    smallest = dict(zip(strides, spec.least_size, strict=True))
    able = {
        field: nearest(values[field], stride, 0, smallest[field], MAX_SIDE)
        for field, stride in strides.items()
        if values[field] % stride
    }
    if len(able) == len(strides):
        facts = {"width": width, "height": height, "widths": able["width"], "heights": able["height"]}
        raise InvalidRequestError("width", "planner.no_multiples", model=spec.title, stride=spec.strides[0], **facts)
    for field, supported in able.items():
        raise InvalidRequestError(
            field,
            "planner.not_a_multiple",
            field=field,
            value=values[field],
            model=spec.title,
            stride=strides[field],
            able=supported,
        )
    for field, value in values.items():
        if value < smallest[field]:
            raise InvalidRequestError(
                field,
                "planner.side_too_short",
                field=field,
                value=value,
                model=spec.title,
                width=smallest["width"],
                height=smallest["height"],
            )
    stride, least = spec.frame_stride, spec.least_frames
    if frames % stride != 1 or frames < least:
        supported = nearest(frames, stride, 1, least, MAX_FRAMES)
        raise InvalidRequestError(
            "frames", "planner.frame_count", value=frames, model=spec.title, stride=stride, able=supported
        )
    given = sum(spec.given_frames)
    if frames <= given:
        more = (given - 1) // stride * stride + 1 + stride
        raise InvalidRequestError("frames", "planner.no_new_frames", value=frames, given=given, able=more)
    if spec.keyframe_count and frames <= stride:
        raise InvalidRequestError(
            "frames", "planner.too_short_for_last_image", value=frames, model=spec.title, able=stride + 1
        )


def check_keyframes(request: GenerationRequest, spec: ModelSpec, frames: int, fps: int) -> None:
    """Check that each keyframe lies in a latent frame of its own, which is not the first one.

    Raises:
        InvalidRequestError: if one is at the start or after the end, or two are in one latent frame.
    """
    stride, latents = spec.vae.scale_factor_temporal, (frames - 1) // spec.vae.scale_factor_temporal + 1
    last = (frames - 1) / fps
    taken = {} if spec.last_image is None else {latents - 1: last}
    for seconds in request.keyframe_seconds:
        frame, data = round(seconds * fps), {"seconds": seconds}
        if frame == 0:
            raise InvalidRequestError("keyframe_seconds", "planner.keyframe_first", **data)
        if frame > frames:
            raise InvalidRequestError("keyframe_seconds", "planner.keyframe_outside", **data, last=last)
        latent = latent_at(seconds, fps, stride, latents)
        if latent in taken:
            data |= {"other": taken[latent], "apart": stride / fps}
            raise InvalidRequestError("keyframe_seconds", "planner.keyframes_too_close", **data)
        taken[latent] = seconds


def nearest(value: int, stride: int, offset: int, low: int, high: int) -> list[int]:
    """Return the one or two numbers of the form stride·k + offset, within low..high, nearest to `value`."""
    below = (min(max(value, low), high) - offset) // stride * stride + offset
    return [n for n in (below, below + stride) if low <= n <= high and n > 0]


def _check_positions(spec: ModelSpec, requested: Mapping[str, int]) -> None:
    """Check that the transformer has position embeddings for the requested "frames", "height" and "width"."""
    most = _most_positions(spec)
    for field, value in requested.items():
        if value > most[field]:
            raise InvalidRequestError(
                field, "planner.too_large", field=field, value=value, model=spec.title, most=most[field]
            )


def _most_positions(spec: ModelSpec) -> Mapping[str, int]:
    """Return the most frames and pixels that the transformer has position embeddings for."""
    positions = [spec.transformer.rope_max_seq_len * patch for patch in spec.transformer.patch_size]
    scale = spec.vae.scale_factor_spatial
    frames = (positions[0] - 1) * spec.vae.scale_factor_temporal + 1
    return {
        # The positions of a section, or a segment, do not depend on how many there are.
        "frames": frames if spec.section is None and spec.segment_frames is None else MAX_FRAMES,
        "height": positions[1] * scale,
        "width": positions[2] * scale,
    }


def size_warnings(request: GenerationRequest, spec: ModelSpec, width: int, height: int, frames: int) -> list[Fact]:
    """Return the warnings about a supported size and length; not about a size that follows from an image or a video."""
    facts = [] if spec.is_downloaded else [Fact("planner.weights_not_downloaded", {"model": spec.title})]
    of_input = bool(spec.inputs) and {request.width, request.height} == {AUTO}
    if (width, height) not in spec.sizes and not of_input:
        sizes = [f"{w}x{h}" for w, h in spec.sizes]
        facts.append(Fact("planner.unusual_size", {"model": spec.title, "size": f"{width}x{height}", "sizes": sizes}))
    if frames > max(spec.frame_counts) and spec.segment_frames is None:
        data = {"model": spec.title, "most": max(spec.frame_counts), "frames": frames}
        facts.append(Fact("planner.unusual_length", data))
    return facts


def image_warnings(request: GenerationRequest, spec: ModelSpec, width: int, height: int) -> list[Fact]:
    """Return the warnings about images and videos of which cropping cuts a visible part."""
    images: list[tuple[str, InputFile | None]] = [("planner.last_image_cut", spec.last_image)]
    images = [*(("planner.keyframe_cut", image) for image in spec.keyframes), *images]
    if AUTO not in {request.width, request.height}:
        start = spec.image if spec.starts_from_images else None
        first = ("planner.image_cut", start), ("planner.video_cut", spec.video or _with_borders(spec))
        images = [*first, *images]
    facts = []
    for code, image in images:
        if image is not None and request.image_fit == CROP and (cut := _cut(image, width, height)) > _SIMILAR:
            suggested = like_image(spec, image, width * height)
            data = {"image": image.name, "percent": round(100 * cut), "size": f"{width}x{height}"}
            facts.append(Fact(code, data | {"suggested": f"{suggested[0]}x{suggested[1]}"}))
    return facts


def video_warnings(request: GenerationRequest, spec: ModelSpec, frames: int, fps: int) -> list[Fact]:
    """Return a warning if a video without a requested length is longer than the clip, or ends before it should."""
    video = min(spec.followed_videos, key=lambda use: use.frames, default=None)
    if video is None or {request.frames, request.seconds} != {AUTO}:
        return []
    if video.seconds is None or round(video.seconds * fps) < frames + spec.frame_stride:
        return []
    code = "planner.video_first_part"
    if video.frames < min(spec.defaults.frames, round(video.seconds * fps) - spec.frame_stride):
        code = "planner.video_incomplete"
    return [Fact(code, {"video": video.name, "seconds": frames / fps, "whole": video.seconds})]


def check_steps(spec: ModelSpec, steps: int) -> None:
    """Check that a model's scheduler can place so many steps.

    Raises:
        InvalidRequestError: if it cannot.
    """
    least = spec.noise.least_steps
    if steps < least:
        raise InvalidRequestError("steps", "planner.too_few_steps", value=steps, model=spec.title, able=least)


def check_strength(steps: int, skipped: int, strength: float) -> None:
    """Check that a strength leaves steps to run.

    Raises:
        InvalidRequestError: if it does not.
    """
    if skipped == steps:
        raise InvalidRequestError(
            "strength",
            "planner.strength_without_steps",
            strength=strength,
            steps=steps,
            able=math.ceil(100 / steps) / 100,
        )


def without_first(steps_by_expert: Mapping[str, int], skipped: int) -> dict[str, int]:
    """Return the steps of each transformer that run if the first ones do not.

    Args:
        steps_by_expert: from `expert_steps`, in the order they run.
    """
    counts = {}
    for name, steps in steps_by_expert.items():
        fewer = min(steps, skipped)
        counts[name], skipped = steps - fewer, skipped - fewer
    return counts


def check_shift(request: GenerationRequest, spec: ModelSpec) -> None:
    """Check that the model's scheduler supports a requested shift.

    Raises:
        InvalidRequestError: if it does not.
    """
    if request.shift is not None and spec.noise.setting is None:
        raise InvalidRequestError(
            "shift", "scheduler.shift_fixed", model=spec.title, scheduler=spec.scheduler, cause=spec.noise.fixed
        )


def shift_override(request: GenerationRequest, spec: ModelSpec) -> float | None:
    """Return the requested shift, or that of a variant's LoRAs; `None` if the model's own applies."""
    shift = _variant_shift(spec) if request.shift is None else request.shift
    return None if shift == spec.noise.shift else shift


def _variant_shift(spec: ModelSpec) -> float | None:
    """Return the shift of a variant, if its scheduler has one."""
    return spec.variant.flow_shift if spec.variant is not None and spec.noise.setting else None


def shift_reason(shift: float | None, spec: ModelSpec) -> Fact | None:
    """Return the reason for a shift from `shift_override`; `None` for the model's own shift."""
    if shift is None:
        return None
    model = published(spec)
    if shift == _variant_shift(spec):
        return Fact("planner.shift_of_variant", {"shift": shift})
    alternatives = [Fact("planner.shift_of_scheduler", {"shift": spec.noise.shift})] if spec.is_downloaded else []
    if model is not None and model.flow_shift not in {shift, spec.noise.shift}:
        alternatives.append(Fact("planner.shift_published", {"shift": model.flow_shift}))
    return Fact("planner.shift_asked", {"shift": shift, "others": alternatives})


def check_nag(spec: ModelSpec, nag: float, guidance: float) -> None:
    """Check that there are steps without guidance, if attention is to be guided there.

    Args:
        nag: the scale of normalized attention guidance.
        guidance: the smallest guidance scale of the transformers.

    Raises:
        InvalidRequestError: if all steps have guidance.
    """
    if nag > NO_NAG and guidance > 1:
        raise InvalidRequestError("nag", "planner.nag_with_guidance", model=spec.title, guidance=guidance)


def unused_warnings(request: GenerationRequest, spec: ModelSpec, guidance: float) -> list[Fact]:
    """Return the warnings about settings that have no effect; `guidance` is the largest scale."""
    warnings = []
    if request.negative_prompt and guidance <= 1 and request.nag in {AUTO, NO_NAG}:
        warnings.append(Fact("planner.negative_unused" if "nag" in spec.unsupported else "planner.negative_needs_nag"))
    if request.sound == LOSSLESS and spec.sound is None and spec.extend is None:
        warnings.append(Fact("planner.sound_unused", {"model": spec.title}))
    if spec.upscaler is None and request.upscaler != AUTO:
        return [*warnings, Fact("planner.upscaler_unused")]
    if spec.upscaler is None and request.upscale == AUTO and spec.defaults.upscale != OFF:
        return [*warnings, Fact("planner.not_upscaled", {"scale": spec.defaults.upscale})]
    return warnings


def guidance_reason(request: GenerationRequest, spec: ModelSpec) -> Fact | None:
    """Return the reason for guidance scales that the model has for videos from images only; `None` for others."""
    defaults = spec.defaults
    scales, usual = (defaults.guidance(from_image=from_image) for from_image in (spec.image is not None, False))
    if request.guidance_scale != AUTO or scales == usual:
        return None
    texts = [[f"{scale:g}" for scale in pair if scale is not None] for pair in (scales, usual)]
    return Fact("planner.guidance_of_images", {"scales": texts[0], "usual": texts[1]})


def expert_steps(spec: ModelSpec, steps: int, shift: float | None) -> dict[str, int]:
    """Return the number of steps of each transformer; empty if unknown.

    Args:
        shift: from `shift_override`. The two transformers switch at a fixed timestep, so the shift determines how many
            steps each one runs.
    """
    if spec.boundary_ratio is None or spec.experts == 1:
        return {"transformer": steps}
    timesteps = spec.noise.timesteps(steps, shift)
    if timesteps is None:
        return {}
    boundary = spec.boundary_ratio * spec.noise.training_steps
    low = sum(timestep < boundary for timestep in timesteps)
    return {"transformer": len(timesteps) - low, "transformer_2": low}


def shift_warnings(spec: ModelSpec, steps: int, shift: float | None, steps_by_expert: Mapping[str, int]) -> list[Fact]:
    """Return the warnings about the shift: LoRAs distilled with another one, or a transformer without steps.

    Args:
        shift: from `shift_override`.
        steps_by_expert: from `expert_steps`.
    """
    effective = spec.noise.shift if shift is None else shift
    facts = []
    if spec.is_downloaded and spec.noise.setting:
        warnings = (_lora_shift_warning(spec, use, effective) for use in spec.loras)
        facts = [fact for fact in warnings if fact is not None]
    if shift is not None and not all(steps_by_expert.values()):
        unused = "transformer_2" if steps_by_expert["transformer"] else "transformer"
        facts.append(Fact("planner.expert_without_steps", {"steps": steps, "shift": shift, "component": unused}))
    return facts


def _lora_shift_warning(spec: ModelSpec, use: LoraUse, shift: float) -> Fact | None:
    lora_shift = None if use.steps is None else family_of(spec.family).distilled_shift(use.path)
    if lora_shift in {None, shift}:
        return None
    return Fact("planner.lora_shift", {"lora": use.name, "wanted": lora_shift, "shift": shift})


def lora_loads(spec: ModelSpec, expert_steps: Mapping[str, int], sections: int, step_cache: str) -> dict[str, int]:
    """Return how often each transformer is loaded while its steps run, if its LoRAs change between them.

    Args:
        expert_steps: the steps of each transformer that run, in order, for each of the sections.
        step_cache: of the plan.

    Raises:
        InvalidRequestError: if a LoRA has a range without a step, or one that other settings exclude.
    """
    ranged = [use for use in spec.loras if use.has_range]
    if not ranged:
        return {}
    if spec.stages > 1 or spec.section is not None:
        raise InvalidRequestError("loras", "planner.lora_range_in_parts", lora=ranged[0].name)
    if step_cache != NONE:
        raise InvalidRequestError("step_cache", "planner.lora_range_cached", lora=ranged[0].name)
    for use in ranged:
        if not loads_of_ranges([use], expert_steps):
            data = {"lora": use.name, "start": use.start, "end": use.end, "steps": sum(expert_steps.values())}
            raise InvalidRequestError("loras", "planner.lora_range_empty", **data)
    return {name: loads * sections for name, loads in loads_of_ranges(ranged, expert_steps).items()}


def lora_warnings(request: GenerationRequest, spec: ModelSpec, steps: int, guidance: float) -> list[Fact]:
    """Return the warnings about LoRAs with layers without effect, and LoRAs or models distilled for few steps."""
    facts = []
    for use in spec.loras:
        if use.without_effect:
            layers = list(use.without_effect)
            facts.append(Fact("planner.lora_without_effect", {"lora": use.name, "model": spec.title, "layers": layers}))
    distilled = [(use.name, use.steps) for use in spec.loras]
    for name, wanted in ((spec.title, spec.distilled_steps), *distilled):
        if wanted is None:
            continue
        data = {"name": name, "wanted": wanted, "steps": steps, "guidance": guidance}
        if steps > wanted or guidance > 1:
            other = "planner.distilled_other_guidance" if guidance > 1 else "planner.distilled_other_steps"
            facts.append(Fact(other, data))
        elif AUTO in {request.steps, request.guidance_scale}:
            facts.append(Fact("planner.distilled_used", data))
    return facts
