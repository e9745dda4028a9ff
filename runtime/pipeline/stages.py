"""The stages of a job: encode the prompt, denoise the latents, decode the frames and save the MP4.

Each reads the plan and the progress from the job's `RunContext`, so that it can be called again after out-of-memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL.Image import Image, fromarray

from runtime.core.cancel import never
from runtime.core.errors import BadResultError
from runtime.core.events import FramesDecoded, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.images import VideoUse
from runtime.core.plan import ExecutionPlan
from runtime.core.prompt_weights import read_weights
from runtime.core.request import BY_MODEL, OFF, SOUND_DECODERS
from runtime.core.sound import Sound
from runtime.execution.components import (
    ControlClip,
    ControlDenoiser,
    Denoiser,
    StreamDenoiser,
    VideoEncoder,
    components_of,
)
from runtime.execution.offload import next_files, read_ahead
from runtime.execution.streams import Streams, video_of
from runtime.execution.text_encoder import TextEncoding, joined
from runtime.models.control_frames import still_mask, within_borders
from runtime.models.given_frames import given_frames, images_of
from runtime.models.images import open_image
from runtime.models.made_frames import picture_of
from runtime.models.sections import Segment
from runtime.models.spec import CONNECTORS, IMAGE_ENCODER, LATENT_UPSAMPLER, VAE_ENCODER, ModelSpec
from runtime.models.timed_prompts import section_prompts
from runtime.models.videos import clip_frames
from runtime.pipeline.checkpoint import restore_scheduler
from runtime.pipeline.growing_clip import GrowingClip
from runtime.pipeline.latent_colors import DecodedColors
from runtime.pipeline.previews import Previews
from runtime.pipeline.run_context import RunContext, wants_negative
from runtime.pipeline.sampling import (
    Conditioning,
    GivenFrames,
    Guidance,
    Step,
    decode,
    denoise,
    first_latents,
    get_noise,
    refinable_latents,
    resumable_after,
)
from runtime.pipeline.section_sampling import sections_of
from runtime.pipeline.stream_guidance import StreamSampling
from runtime.pipeline.video_output import VideoOutput
from runtime.video.preprocessing import CHANGED, UNKNOWN, control_frame, within_mask
from runtime.video.reader import COLORS
from runtime.video.recompression import recompressed


def encode_prompt(context: RunContext) -> Conditioning:
    """Return the embeddings of the prompt and, if a pass attends to it, of the negative one; from the prompt cache if
    it can.

    Emits a warning for words that the model does not know and for text that is cut.
    """
    plan = context.plan
    prompts = [plan.prompt]
    if context.spec.section is not None:
        prompts = list(dict.fromkeys(section_prompts(plan.prompt, sections_of(plan, context.spec), plan.fps)))
    texts = [*prompts, plan.negative_prompt] if wants_negative(plan) else prompts
    if CONNECTORS in plan.components:
        encoded = _through_cache(context, CONNECTORS, texts, partial(_connect, context))
    else:
        by_encoder = [_encode_texts(context, name, texts) for name in context.spec.text_encoders]
        encoded = list(map(joined, zip(*by_encoder, strict=True)))
    negative = encoded.pop() if wants_negative(plan) else None
    for encoding in encoded:
        _warn_of_text(context, encoding, "prompt")
    if negative is not None and plan.negative_prompt != context.spec.defaults.negative_prompt:
        _warn_of_text(context, negative, "negative prompt")
    device = context.plan.components["text_encoder"].device
    positive, *rest = (encoding.embeds.to(device) for encoding in encoded)
    return Conditioning(positive, negative.embeds.to(device) if negative else None, others=tuple(rest))


def _encode_texts(context: RunContext, name: str, texts: Sequence[str]) -> list[TextEncoding]:
    """Return what one text encoder makes of each text; from the prompt cache if it can."""
    return _through_cache(context, name, texts, partial(_encode, context, name, whole=len(texts)))


def _through_cache(
    context: RunContext, name: str, texts: Sequence[str], compute: Callable[[Sequence[str]], list[TextEncoding]]
) -> list[TextEncoding]:
    """Return what a component makes of each text: from the prompt cache if it can, else from `compute`."""
    prompts, part = context.residency.prompts, context.plan.components[name]
    # Not with an engine: whether it is damaged is found only when it runs.
    cache = prompts if prompts is not None and not part.on_engine else None
    encoded = {text: None if cache is None else cache.find(context.spec, part, text, name) for text in texts}
    missing = [text for text, encoding in encoded.items() if encoding is None]
    if not missing:
        context.begin_stage("encode", name)
    for text, computed in zip(missing, compute(missing) if missing else (), strict=True):
        encoded[text] = computed
        if cache is not None:
            cache.keep(context.spec, part, text, computed, name)
    return [encoding for text in texts if (encoding := encoded[text]) is not None]


def _encode(context: RunContext, name: str, texts: Sequence[str], *, whole: int) -> list[TextEncoding]:
    """Return what one text encoder makes of each text.

    Args:
        whole: the number of texts with those from the cache: the time of fewer is not that of all calls.
    """
    context.current = ("load", name)
    # Weights need one more call.
    usual = len(texts) == whole and not any(read_weights(text).weights for text in texts)
    measured = context.metrics.encoder(name) if usual else context.metrics.stage("encode")
    with context.residency.text_encoder(context.spec, context, name) as encoder, measured:
        context.begin_stage("encode", name)
        return [encoder.encode(text) for text in texts]


def _connect(context: RunContext, texts: Sequence[str]) -> list[TextEncoding]:
    """Return what the connectors make of each text; the states that they read are too large for the prompt cache."""
    (name,) = context.spec.text_encoders
    encoded = _encode(context, name, texts, whole=len(texts))
    context.current = ("load", CONNECTORS)
    with context.residency.text_connector(context.spec, context) as connect, context.metrics.encoder(CONNECTORS):
        context.begin_stage("encode", CONNECTORS)
        return [replace(encoding, embeds=connect(encoding.embeds)) for encoding in encoded]


def _warn_of_text(context: RunContext, encoding: TextEncoding, field: str) -> None:
    if encoding.unknown_words:
        context.warn(Fact("pipeline.unknown_words", {"words": encoding.unknown_words, "field": field}))
    if encoding.cut:
        context.warn(Fact("pipeline.text_cut", {"field": field}))


def encode_given(context: RunContext, conditioning: Conditioning) -> Conditioning:
    """Return the conditioning with the plan's images, its video, or what steers it, if it has any."""
    if context.spec.control_input is not None:
        return encode_control(context, conditioning)
    if context.plan.images:
        return encode_images(context, conditioning)
    return conditioning if context.plan.video is None else encode_video(context, conditioning)


def encode_images(context: RunContext, conditioning: Conditioning) -> Conditioning:
    """Return the conditioning with the plan's images: their latents and, where the model attends to it, embeddings."""
    plan, spec = context.plan, context.spec
    context.current = ("load", VAE_ENCODER)
    images = [images_of(part, context.cancel.check) for part in plan.by_stage]
    conditioning = _with_embeddings(context, conditioning, images[-1])
    with context.residency.video_encoder(spec, context) as vae, context.metrics.encoder(VAE_ENCODER):
        context.begin_stage("encode", VAE_ENCODER)
        latents = [image_latents(vae, spec, *of_stage) for of_stage in zip(plan.by_stage, images, strict=True)]
    device = context.plan.components["transformer"].device
    *half, given = (GivenFrames.of(spec, encoded.to(device), plan.images) for encoded in latents)
    return replace(conditioning, given=given, given_half=half[0] if half else None)


def _with_embeddings(context: RunContext, conditioning: Conditioning, images: Sequence[Image]) -> Conditioning:
    """Return the conditioning with the embeddings of images, if the model attends to them."""
    if IMAGE_ENCODER not in context.plan.components:
        return conditioning
    with context.residency.image_encoder(context.spec, context) as encoder, context.metrics.encoder(IMAGE_ENCODER):
        context.begin_stage("encode", IMAGE_ENCODER)
        return conditioning.with_tokens(encoder.encode(images))


def image_latents(encoder: VideoEncoder, spec: ModelSpec, plan: ExecutionPlan, images: Sequence[Image]) -> torch.Tensor:
    """Return the latents of a plan's images, see `GivenFrames.of`."""
    assert spec.image_input is not None
    if spec.image_input.crf is not None:
        images = [fromarray(recompressed(np.array(image), spec.image_input.crf)) for image in images]
    pixels = [pixels_of(image) for image in images]
    if spec.image_input.kind == "first_frame":
        return torch.cat([encoder.latents([image], 1, plan.strategy.decode_tile) for image in pixels], dim=2)
    return encoder.latents(pixels, plan.frames, plan.strategy.decode_tile)


def encode_video(context: RunContext, conditioning: Conditioning) -> Conditioning:
    """Return the conditioning with the latents of the plan's video."""
    spec = context.spec
    context.current = ("load", VAE_ENCODER)
    video = video_frames(context.plan, "video", context.cancel.check, context.warn)
    with context.residency.video_encoder(spec, context) as vae, context.metrics.encoder(VAE_ENCODER):
        context.begin_stage("encode", VAE_ENCODER)
        strategy = context.plan.strategy
        latents = vae.video_latents(video, strategy.decode_tile, context.cancel.check, None, strategy.decode_chunk)
    return replace(conditioning, video=latents.to(context.plan.components["transformer"].device))


def encode_control(context: RunContext, conditioning: Conditioning) -> Conditioning:
    """Return the conditioning with the latents of what steers the plan's video."""
    spec = context.spec
    context.current = ("load", VAE_ENCODER)
    segment = _segment_of(context, 0)
    clip = control_clip(context.plan, context.cancel.check, context.warn, segment, made=context.control_frames)
    conditioning = _with_embeddings(context, conditioning, clip.references)
    context.current = ("load", VAE_ENCODER)
    with context.residency.video_encoder(spec, context) as vae, context.metrics.encoder(VAE_ENCODER):
        context.begin_stage("encode", VAE_ENCODER)
        return _with_control(context, conditioning, vae, clip)


def _with_control(
    context: RunContext, conditioning: Conditioning, encoder: VideoEncoder, clip: ControlClip
) -> Conditioning:
    strategy, components = context.plan.strategy, components_of(context.spec)
    latents = components.control_latents(
        encoder, context.spec, clip, strategy.decode_tile, context.cancel.check, strategy.decode_chunk
    )
    device = context.plan.components["transformer"].device
    return replace(conditioning, given=GivenFrames("channels", latents.to(device)))


def encode_segment(context: RunContext, conditioning: Conditioning, number: int, before: torch.Tensor) -> Conditioning:
    """Return the conditioning with the latents of what steers another segment of the plan's video.

    Args:
        before: the frames that it starts with, see `ControlClip`.
    """
    context.cancel.check_pause()
    context.current = ("load", VAE_ENCODER)
    clip = control_clip(context.plan, context.cancel.check, context.warn, _segment_of(context, number), before)
    with context.residency.video_encoder(context.spec, context) as vae, context.metrics.stage("encode"):
        context.begin_stage("encode", VAE_ENCODER)
        return _with_control(context, conditioning, vae, clip)


def begin_segment(context: RunContext, conditioning: Conditioning, number: int) -> None:
    """Begin another segment, from its noise, once the one before is on disk; see `RunContext.record_segment`."""
    assert context.sampling is not None
    scheduler, steps = context.schedule(number)
    latents = _latents_before(context, number, scheduler, steps[0])
    guidance = Guidance.of(context.plan, context.sampling.guidance.left_out)
    context.record_segment(conditioning, latents, scheduler, guidance, number)


def _segment_of(context: RunContext, number: int) -> Segment | None:
    """Return a segment of the plan's video; `None` for models that make all videos whole, or in sections."""
    spec = context.spec
    return None if spec.segment_frames is None else spec.segments_of(context.plan.frames)[number]


def control_clip(
    plan: ExecutionPlan,
    check: Callable[[], None] = never,
    warn: Callable[[Fact], None] | None = None,
    segment: Segment | None = None,
    before: torch.Tensor | None = None,
    made: np.ndarray | None = None,
) -> ControlClip:
    """Read what steers a plan's video, or a segment of it; see `video_frames` and `ControlClip`.

    Args:
        made: what a model made of the frames of its control video, if the plan has one for them.
    """
    numbers = range(plan.frames) if segment is None else segment.sources
    references = [open_image(use, "references", check) for use in plan.references]
    if plan.face is not None:
        references += [open_image(use, field, check) for field, use in plan.images.items()]
    shown, inside = within_borders(plan)
    video, background = (
        None if getattr(plan, field) is None else video_frames(shown, field, check, warn, numbers=numbers)
        for field in ("control", "background")
    )
    mask = None if plan.mask is None else mask_frames(shown, check, warn, numbers)
    clip = ControlClip(len(numbers), shown.height, shown.width, video, mask, references, background, before)
    if warn is not None and clip.changes is not None and background is None:
        _warn_of_mask(clip.changes, plan, warn)
    if plan.preprocess != OFF:
        _preprocess(clip, plan.preprocess, check, None if made is None else (made[number] for number in numbers))
    if any(plan.outpaint):
        clip = _outpainted(clip, inside, plan)
    if plan.face is None and (plan.extend is not None or plan.images):
        clip = _with_given_frames(clip, given_frames(plan, check))
    return clip


def _warn_of_mask(changes: torch.Tensor, plan: ExecutionPlan, warn: Callable[[Fact], None]) -> None:
    """Warn of a mask of one color."""
    if not changes.any() and not any(plan.outpaint):
        warn(Fact("control.mask_black"))
    elif changes.all():
        warn(Fact("control.mask_white"))


def _outpainted(clip: ControlClip, inside: tuple[slice, slice], plan: ExecutionPlan) -> ControlClip:
    """Return a clip with gray borders that change; without a mask, the video within does not.

    Source: `OutpaintingVideoAnnotator` of github.com/ali-vilab/VACE.
    """
    assert clip.video is not None
    sides = plan.height, plan.width
    video = torch.full((clip.frames, *sides, COLORS), UNKNOWN, dtype=torch.uint8)
    video[(slice(None), *inside)] = clip.video
    mask = torch.full((1 if clip.mask is None else clip.frames, *sides), CHANGED, dtype=torch.uint8)
    mask[(slice(None), *inside)] = 0 if clip.mask is None else clip.mask
    return replace(clip, height=plan.height, width=plan.width, video=video, mask=mask.expand(clip.frames, -1, -1))


def _with_given_frames(clip: ControlClip, given: tuple[Sequence[Image], Sequence[Image]]) -> ControlClip:
    """Return a clip that begins and ends with frames that do not change; without a control video, the rest is gray.

    Source: `FrameRefExpandAnnotator` of github.com/ali-vilab/VACE, and the example of diffusers' `WanVACEPipeline`.
    """
    shape = clip.frames, clip.height, clip.width
    video = torch.full((*shape, COLORS), UNKNOWN, dtype=torch.uint8) if clip.video is None else clip.video
    mask = torch.full(shape, CHANGED, dtype=torch.uint8) if clip.mask is None else clip.mask.clone()
    first, last = given
    for number, image in enumerate((*first, *last)):
        place = number if number < len(first) else number - len(first) - len(last)
        video[place] = torch.from_numpy(np.array(image))
        mask[place] = 0
    return replace(clip, video=video, mask=mask)


def _preprocess(
    clip: ControlClip, kind: str, check: Callable[[], None], made: Iterator[np.ndarray] | None = None
) -> None:
    """Replace the frames of a control video by control frames where they change; see `video.preprocessing`.

    Args:
        made: of each frame, what a model made of it; `None` if no model does.
    """
    assert clip.video is not None
    assert (made is not None) == (kind in BY_MODEL)
    for number, pixels in enumerate(clip.video):
        check()
        frame = fromarray(pixels.numpy())
        mask = None if clip.mask is None else fromarray(clip.mask[number].numpy())
        picture = control_frame(frame, kind, mask) if made is None else within_mask(picture_of(next(made)), frame, mask)
        clip.video[number] = torch.from_numpy(np.array(picture))


def video_frames(
    plan: ExecutionPlan,
    field: str = "video",
    check: Callable[[], None] = never,
    warn: Callable[[Fact], None] | None = None,
    *,
    side: int | None = None,
    numbers: Sequence[int] | None = None,
) -> torch.Tensor:
    """Read one of a plan's videos; return its first frames at the plan's rate, of its size.

    Args:
        check: see `models.videos.with_video`.
        field: of the request: "video" or one of `CONTROL_VIDEOS`.
        warn: called if a part of the file is damaged.
        side: width and height of the frames, which show the middle of the video's; `None` for the plan's size.
        numbers: of the frames to return, from 0; `None` for all.

    Returns:
        (frames, height, width, 3), uint8; the brightness of a mask, (frames, height, width).

    Raises:
        InvalidRequestError: if it cannot be read, or has fewer frames by now.
        MachineError: if there is no ffmpeg.
    """
    use: VideoUse | None = getattr(plan, field)
    assert isinstance(use, VideoUse)
    colors, mode = ((), "L") if field == "mask" else ((COLORS,), "RGB")
    width, height = (plan.width, plan.height) if side is None else (side, side)
    numbers = range(plan.frames) if numbers is None else numbers
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    video = torch.empty((len(numbers), height, width, *colors), dtype=torch.uint8)
    first = min(places)
    frames = clip_frames(use, plan, field, check, warn, first=first, end=max(places) + 1, side=side)
    for number, frame in enumerate(frames, first):
        if number in places:
            video[places[number]] = torch.from_numpy(np.array(frame.convert(mode)))
    return video


def mask_frames(
    plan: ExecutionPlan,
    check: Callable[[], None] = never,
    warn: Callable[[Fact], None] | None = None,
    numbers: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the brightness of a plan's mask, (frames, height, width), uint8.

    An image, boxes, and a video with one frame hold for all frames.

    Args, Raises: see `video_frames`.
    """
    if isinstance(plan.mask, VideoUse) and plan.mask.frames > 1:
        return video_frames(plan, "mask", check, warn, numbers=numbers)
    count = plan.frames if numbers is None else len(numbers)
    return torch.from_numpy(np.array(still_mask(plan, check))).expand(count, -1, -1)


def pixels_of(image: Image) -> torch.Tensor:
    """Return an image as (3, height, width), float32 in -1 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def denoise_latents(context: RunContext, previews: Previews) -> None:
    """Run the remaining steps, and save a checkpoint whenever one is due, and after each stage."""
    first = 0 if context.sampling is None else context.sampling.stage
    for stage in range(first, len(context.plan.by_stage)):
        denoise_stage(context, previews, stage)


def denoise_stage(context: RunContext, previews: Previews, stage: int) -> None:
    """Run the remaining steps of a stage: of the only one, of one of two, or of a segment."""
    context.cancel.check_pause()
    context.current = ("denoise", "transformer")
    assert context.conditioning is not None
    scheduler, steps = context.schedule(stage)
    sampling, before = context.sampling, context.steps_before(stage)
    begun = sampling is not None and sampling.stage == stage
    if sampling is None or not begun or (sampling.scheduler is None and sampling.steps - before < len(steps)):
        latents = _latents_before(context, stage, scheduler, steps[0])
        left_out = 0 if sampling is None or begun else sampling.guidance.left_out
        guidance = Guidance.of(context.plan, left_out)
        sampling = context.record_step(before, latents, scheduler, guidance, stage)
    if sampling.scheduler is not None:
        restore_scheduler(scheduler, sampling.scheduler)
    plan, spec = context.plan_of(stage), context.spec.of_stage(stage)
    streams = StreamSampling.of(plan, spec)

    @contextmanager
    def open_expert(first: Step) -> Iterator[Denoiser]:
        name = first.expert
        context.current = ("load", name)
        with context.residency.denoiser(spec.with_ranges(first.ranges), context, name) as denoiser:
            context.begin_stage("denoise", name)
            if streams is not None:
                cast("StreamDenoiser", denoiser).see(streams.streams, streams.guidance.skipping_blocks)
            loaded_parts = {
                part for part in context.plan.components if context.residency.is_loaded(spec, context.plan, part)
            }
            steer(context, denoiser, stage)
            waiting = {"vae", *(step.expert for step in steps)}
            idle = {*context.plan.components} - waiting
            with read_ahead(next_files(spec, context.plan, name, loaded_parts | idle)):
                yield denoiser

    conditioning = context.conditioning
    if context.plan.by_stage[stage + 1 :]:
        conditioning = replace(conditioning, given=conditioning.given_half)
    conditioning = conditioning.suppressing_as(plan)
    with context.metrics.stage("denoise"):
        remaining = denoise(
            sampling.latents,
            steps,
            scheduler,
            conditioning,
            open_expert,
            context.cancel,
            start=sampling.steps - before,
            guidance=sampling.guidance,
            sampling=streams,
        )
        for done in remaining:
            number, resumable = before + done.index + 1, resumable_after(steps, done.index + 1)
            if resumable:
                context.record_step(number, done.latents, scheduler, done.guidance, stage)
            preview = previews.of_latents(clip_latents(plan, done.estimate))
            part, total = done.step.expert, context.plan.total_steps
            context.emit(StepDone(step=number, of=total, seconds=done.seconds, part=part, preview=preview))
            context.checkpoint_step(steps, done.seconds, resumable=resumable)


def steer(context: RunContext, denoiser: Denoiser, stage: int = 0) -> None:
    """Tell a transformer that is steered how much, and show it the face of a character; others stay as they are."""
    control, plan = context.spec.control_input, context.plan
    if control is None:
        return
    face, segment = None, _segment_of(context, stage)
    if plan.face is not None and segment is not None:
        face = video_frames(plan, "face", context.cancel.check, side=control.face_side, numbers=segment.sources)
    cast("ControlDenoiser", denoiser).steer(control.scales(plan.control_scale), face)


def clip_latents(plan: ExecutionPlan, latents: torch.Tensor) -> torch.Tensor:
    """Return the latents of the clip's frames: without those of sound, and of the images before them."""
    return video_of(latents, Streams.of(plan))[:, :, plan.leading_latents :]


def _latents_before(context: RunContext, stage: int, scheduler: Any, first: Step) -> torch.Tensor:
    """Return the latents before the first step of a stage."""
    plan, spec = context.plan, context.spec
    if stage == 0 or plan.refinement is None:
        assert context.conditioning is not None
        generator = torch.Generator("cpu").manual_seed(plan.seed)
        # Each segment has noise of its own.
        *_, noise = (get_noise(context.plan_of(number), generator) for number in range(stage + 1))
        return first_latents(noise, context.conditioning.video, scheduler, first)
    streams = Streams.of(plan.by_stage[stage - 1])
    assert context.sampling is not None
    assert streams is not None
    video, sound = streams.split(context.sampling.latents)
    context.current = ("load", LATENT_UPSAMPLER)
    measured = context.metrics.part("denoise", LATENT_UPSAMPLER)
    with context.residency.latent_upsampler(spec, context) as enlarge, measured:
        context.begin_stage("denoise", LATENT_UPSAMPLER)
        enlarged = enlarge(video)
    if not torch.isfinite(enlarged).all().item():
        raise BadResultError("pipeline.not_finite", step=context.step, of=plan.total_steps)
    context.current = ("denoise", "transformer")
    return refinable_latents(plan, enlarged, sound)


def decode_and_save(
    context: RunContext, previews: Previews, job_id: str | None, on_frames: Callable[[np.ndarray], None] | None
) -> VideoSaved:
    """Decode the frames, encode them while they arrive, and write the MP4.

    Args:
        job_id, on_frames: see `run.run_job`.

    Raises:
        BadResultError: if the clip is degenerate; nothing is written.
    """
    context.cancel.check_pause()
    assert context.sampling is not None
    plan = context.plan
    previews.forget_frames()
    latents = clip_latents(plan, context.sampling.latents)
    decoded = DecodedColors(latents, context.spec.vae.scale_factor_temporal)
    with VideoOutput(context, job_id, on_frames) as output, GrowingClip(context.folder, plan) as clip:
        context.current = ("load", "vae")
        with context.residency.video_decoder(context.spec, context) as decoder, context.metrics.stage("decode"):
            context.begin_stage("decode", "vae")
            written = 0
            chunks = decode(
                decoder,
                latents,
                plan.strategy.decode_chunk,
                context.cancel,
                plan.strategy.decode_tile,
                part=lambda: context.plan.components["vae"],
            )
            for chunk in chunks:
                frames = chunk.numpy()
                decoded.add(frames)
                written += len(frames)
                playable, preview = clip.add(frames), previews.of_frames(frames, last=written == plan.frames)
                context.emit(FramesDecoded(frames=written, of=plan.frames, playable=playable, preview=preview))
                output.write(frames)
        saved = output.finish(decode_sound(context) if plan.sound and plan.sound_shape else None)
    previews.colors.learn(decoded)
    return saved


def decode_sound(context: RunContext) -> Sound:
    """Return the sound of the denoised latents; where they or a spectrogram have NaN or Inf, one sample of NaN."""
    streams, sound = Streams.of(context.plan), context.spec.sound
    assert context.sampling is not None
    assert streams is not None
    assert sound is not None
    _, values = streams.split(context.sampling.latents)
    for name in SOUND_DECODERS:
        if not torch.isfinite(values).all().item():
            # A vocoder limits its samples: Inf would be played at full scale.
            return Sound(np.full((sound.channels, 1), np.nan, np.float32), sound.rate)
        context.cancel.check_pause()
        context.current = ("load", name)
        measured = context.metrics.part("decode", name)
        with context.residency.sound_decoder(context.spec, context, name) as decode_part, measured:
            context.begin_stage("decode", name)
            values = decode_part(values)
    return Sound(values[0].cpu().numpy(), sound.rate)
