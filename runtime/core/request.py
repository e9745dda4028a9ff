"""Declaration of every request field.

A `GenerationRequest` is frozen and valid by itself: every value has the right type and is within limits that hold for
any model. `planner.resolve` checks what depends on the model, such as strides and frame counts. To add a field, declare
it here; the command line, the web form, the HTTP API and the docs follow.
"""

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from runtime.core import facts
from runtime.core.errors import InvalidRequestError
from runtime.core.frozen import FrozenModel
from runtime.core.images import CROP, FIT, MIDDLE, NO_BORDERS, parse_boxes
from runtime.core.loras import Lora
from runtime.core.request_fields import (
    ALL,
    AUTO,
    AttentionKernel,
    Auto,
    Backends,
    Choice,
    ImageFile,
    ImageFiles,
    Loras,
    MaskFile,
    Name,
    Number,
    Prompt,
    RequestField,
    Scales,
    Sides,
    StepCache,
    UpscalerName,
    VideoFile,
)
from runtime.core.sparse_attention import SOL, TAU
from runtime.core.step_cache import FIRST_BLOCK, MAGCACHE, NONE, STRENGTHS, TAYLORSEER

__all__ = ["ALL", "AUTO", "Auto", "GenerationRequest"]  # the values of requests are exported with them

# The components that compute frames between decoded ones, and enlarge finished frames; they belong to no model.
INTERPOLATOR, UPSCALER = "interpolator", "upscaler"
FINISHERS = frozenset({INTERPOLATOR, UPSCALER})
# The components that decode sound, in the order they run; each is also the name of its only program.
SOUND_DECODERS = ("audio_vae", "vocoder")
COMPONENTS = (
    "text_encoder", "text_encoder_2", "connectors", "image_encoder", "vae_encoder", "transformer", "transformer_2",
    "latent_upsampler", "vae", "audio_vae", "vocoder", INTERPOLATOR, UPSCALER,
)  # fmt: skip
# The choices of each field: the value in JSON and flags, and its title in the web form. The default comes first.
BACKENDS: Final = {AUTO: "Automatic", **facts.BACKEND_TITLES}
IDLE = "idle"
BUILDS: Final = {
    AUTO: "Automatic",
    "missing": "Missing ones",
    IDLE: "Missing ones, when no video waits",
    "never": "Never",
    "always": "Rebuild all",
}
OFFLOADS: Final = {
    AUTO: "Automatic",
    "none": "None",
    "model": "By component",
    "group": "By block",
    "sequential": "By layer",
}
QUANTIZATIONS: Final = {AUTO: "Automatic", "none": "None", "bnb-8bit": "8 bit", "bnb-4bit": "4 bit", "fp8": "FP8"}
RETRY = "retry"
ON_OUT_OF_MEMORY: Final = {
    RETRY: "Retry, same video",
    "any": "Retry, even if less exact",
    "ask": "Stop and suggest",
}
ATTENTIONS: Final = {
    AUTO: "Automatic",
    "native": "PyTorch's own",
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "flash3": "FlashAttention 3",
    "flash4": "FlashAttention 4",
    "sage": "SageAttention, 8 bit",
    "fp8": "cuDNN, FP8",
    SOL: "Sol-Attn, sparse",
}
COMPILES: Final = {AUTO: "When it pays off", "never": "Never", "always": "Always"}
VAE_PRECISIONS: Final = {AUTO: "Automatic", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
STEP_CACHES: Final = {NONE: "None", FIRST_BLOCK: "First block", MAGCACHE: "MagCache", TAYLORSEER: "TaylorSeer"}
OFF = "off"
# How far apart both guidance passes may be, see `plan.ResolvedRequest`; bench/step_cache.md has the effect of each.
GUIDANCE_CACHES: Final = {OFF: "Off", "0.05": "Passes up to 5 % apart", "0.1": "Up to 10 %", "0.2": "Up to 20 %"}
# Scales of normalized attention guidance: without it, and the largest, that of ComfyUI-NAG.
NO_NAG, MAX_NAG = 1.0, 100.0
INTERPOLATIONS: Final = {OFF: "Off", "2": "2 times", "4": "4 times"}
UPSCALES: Final = {AUTO: "Automatic", OFF: "Off", "2": "2 times", "3": "3 times", "4": "4 times"}
LOOP = "on"
LOOPS: Final = {OFF: "Off", LOOP: "On"}
LOSSLESS = "lossless"
SOUNDS: Final = {"on": "On", LOSSLESS: "Lossless, FLAC", OFF: "Off"}
STAGES: Final = {"1": "One", "2": "Two, the first at half size"}
IMAGE_FITS: Final = {CROP: "Crop", FIT: "Fit, with borders"}

MAX_PROMPT_CHARACTERS = 5_000
# The fields that tell what a prompt was made of: a template, then a text that was enhanced.
PROMPT_SOURCES = ("template", "original_prompt")
MAX_SIDE = 8_192
MAX_FRAMES = 4_001
MAX_SECONDS = 600.0
MAX_FPS = 120
# Of a video with new frames between those of the model, and of files.
MAX_VIDEO_FPS = 240
MAX_STEPS = 1_000
MAX_GUIDANCE = 100.0
MAX_GPUS = 16
# Outside these, with the most steps, neighbouring timesteps of diffusers' schedulers become equal.
MIN_SHIFT, MAX_SHIFT = 0.1, 100.0
# How much of a video changes by default, and the least that may be requested.
STRENGTH, LEAST_STRENGTH = 0.6, 0.01
# The weight of a control video in all blocks that read one, the largest one, and how many of these blocks there can be.
CONTROL_SCALE, MAX_CONTROL_SCALE, MAX_CONTROL_BLOCKS = (1.0,), 4.0, 512
MAX_REFERENCES = 8
# The most that is added on a side of a control video, in percent of its width or height.
MAX_BORDER = 300.0
# The frames that a video and its continuation have in common, where a model can use several, and the most.
EXTEND_FRAMES, MAX_EXTEND_FRAMES = 9, 81
# The latest second of a control video at which it can begin to be used.
MAX_CONTROL_START = 3_600.0
MAX_KEYFRAMES = 16
# The fields of files that steer a video.
CONTROL_FIELDS = ("control", "face", "background", "mask", "references")
CONTROL_VIDEOS = ("control", "face", "background", "mask")
# What else is asked for with them.
CONTROL_OPTIONS = ("control_scale", "preprocess", "control_start", "outpaint", "overlap")
# What frames of a control video are made of those of its file; the last two by a model that is downloaded for them.
DEPTH, POSE = "depth", "pose"
PREPROCESSING: Final = {
    OFF: "As it is",
    "edges": "Edges",
    "scribble": "Scribble",
    "gray": "Gray",
    "blur": "Blurred",
    DEPTH: "Depth",
    POSE: "Poses",
}
BY_MODEL: Final = (DEPTH, POSE)
# Frames that a segment of a clip shares with the one before.
OVERLAP, OVERLAPS = "1", {"1": "1 frame", "5": "5 frames"}
# JSON and browsers keep integers exact up to here.
MAX_SEED = 2**53 - 1


def random_seed() -> int:
    """Return a new seed."""
    return secrets.randbelow(1 << 32)


def _named(component: str) -> tuple[str, ...]:
    """Return the names in `backends` that concern a component, the most specific one first."""
    return (component, "vae", ALL) if component == "vae_encoder" else (component, ALL)


class GenerationRequest(FrozenModel):
    """One video, as asked for. "auto" leaves a value to the model's defaults or to the planner.

    Raises:
        InvalidRequestError: for a value that is not valid, with the field's name and the nearest valid value.
    """

    prompt: Annotated[
        str,
        Prompt(
            label="Prompt",
            help="Describe the video in a sentence: who or what, how it moves, where, when.",
            group="prompt",
            metavar="PROMPT",
            unset="",
            longest=MAX_PROMPT_CHARACTERS,
        ),
    ]
    negative_prompt: Annotated[
        str | None,
        Prompt(
            label="Negative prompt",
            help="What the video should not show. May be empty.",
            group="more",
            flag="--negative-prompt",
            metavar="TEXT",
            longest=MAX_PROMPT_CHARACTERS,
            optional=True,
        ),
    ] = None
    model: Annotated[
        str,
        Name(
            label="Model",
            help="A name from `models list`, or a folder in diffusers' format.",
            group="video",
            flag="--model",
            metavar="NAME|DIR",
            unset="`TANDEM_MODEL`, else diorama",
            docs="models.md",
        ),
    ] = "diorama"
    width: Annotated[
        int | Auto,
        Number(
            label="Width",
            help="Width in pixels, a multiple of the model's stride.",
            group="video",
            flag="--width",
            low=1,
            high=MAX_SIDE,
        ),
    ] = AUTO
    height: Annotated[
        int | Auto,
        Number(
            label="Height",
            help="Height in pixels, a multiple of the model's stride.",
            group="video",
            flag="--height",
            low=1,
            high=MAX_SIDE,
        ),
    ] = AUTO
    frames: Annotated[
        int | Auto,
        Number(
            label="Frames",
            help="Number of frames, a multiple of the model's temporal stride plus 1. More frames take more time and "
            "memory.",
            group="video",
            flag="--frames",
            low=1,
            high=MAX_FRAMES,
        ),
    ] = AUTO
    fps: Annotated[
        int | Auto,
        Number(
            label="Frames per second",
            help="Playback speed of the video; does not change the frames.",
            group="video",
            flag="--fps",
            low=1,
            high=MAX_FPS,
            step=1,
        ),
    ] = AUTO
    steps: Annotated[
        int | Auto,
        Number(
            label="Steps",
            help="Denoising steps. More steps give finer detail and take proportionally longer.",
            group="more",
            flag="--steps",
            low=1,
            high=MAX_STEPS,
            step=1,
        ),
    ] = AUTO
    guidance_scale: Annotated[
        float | Auto,
        Number(
            label="Guidance",
            help="Classifier-free guidance scale: how closely the video follows the prompt. 1 turns it off and halves "
            "the time. Models with two transformers take two values, for high and low noise.",
            group="more",
            flag="--guidance",
            metavar="SCALE[,SCALE]",
            low=0.0,
            high=MAX_GUIDANCE,
            whole=False,
            step=0.5,
        ),
    ] = AUTO
    guidance_scale_2: Annotated[
        float | Auto,
        Number(
            label="Low-noise guidance",
            help="Guidance scale of the low-noise transformer, where the model has one.",
            group="more",
            low=0.0,
            high=MAX_GUIDANCE,
            whole=False,
            step=0.5,
        ),
    ] = AUTO
    nag: Annotated[
        float | Auto,
        Number(
            label="Negative attention",
            help="How much the negative prompt counts where guidance is 1, by normalized attention guidance (NAG); its "
            "authors use 11 for videos. 1 turns it off. Only some models can.",
            group="more",
            flag="--nag",
            metavar="SCALE",
            unset="1",
            docs="models.md#negative-prompts-without-guidance",
            low=NO_NAG,
            high=MAX_NAG,
            whole=False,
            step=1,
        ),
    ] = NO_NAG
    seed: Annotated[
        int | Auto,
        Number(
            label="Seed",
            help="Seed of the initial noise. The same seed and settings give the same video.",
            group="video",
            flag="--seed",
            unset="random",
            placeholder="random",
            low=0,
            high=MAX_SEED,
        ),
    ] = AUTO
    crf: Annotated[
        int | Auto,
        Number(
            label="Video quality",
            help="H.264 constant rate factor: lower values give better quality and larger files; 0 is lossless.",
            group="more",
            flag="--crf",
            unset="17; 10 for small videos",
            placeholder=AUTO,
            low=0,
            high=51,
        ),
    ] = AUTO
    backends: Annotated[
        Mapping[str, str],
        Backends(
            label="Backend",
            help=f"The backend that runs a component ({', '.join(COMPONENTS)}, or {ALL} for every one; vae is for both "
            f"parts of the VAE if vae_encoder is not named): {', '.join(BACKENDS)}.",
            group="acceleration",
            flag="--backend",
            metavar="COMPONENT=BACKEND",
            unset=f"{ALL}={AUTO}",
            docs="engines.md",
            components=COMPONENTS,
            choices=BACKENDS,
        ),
    ] = Field(default_factory=dict)
    build: Annotated[
        str,
        Choice(
            label="Build engines",
            help="Which engines are built. The web app and the HTTP API start the video in PyTorch and build engines "
            "when no video waits. The command line builds them first, except when idle is chosen.",
            group="acceleration",
            flag="--build",
            unset="missing engines of the backends that were selected by name; in the web app and the HTTP API on a "
            "CPU, all missing engines of a small model",
            docs="engines.md",
            choices=BUILDS,
        ),
    ] = AUTO
    offload: Annotated[
        str,
        Choice(
            label="Offload",
            help="Keep weights in RAM while they are not used, by component, block or layer: less video memory, but "
            "slower. Excludes engines of whole transformers.",
            group="acceleration",
            flag="--offload",
            unset="what fits",
            docs="memory.md",
            choices=OFFLOADS,
        ),
    ] = AUTO
    quantization: Annotated[
        str,
        Choice(
            label="Quantization",
            help="Smaller transformer weights in PyTorch, slightly less exact. Excludes engines for the transformers, "
            "except FP8 engines.",
            group="acceleration",
            flag="--quantization",
            unset="none if that fits",
            docs="memory.md",
            choices=QUANTIZATIONS,
        ),
    ] = AUTO
    on_out_of_memory: Annotated[
        str,
        Choice(
            label="If memory runs out",
            help="Retry with the next lower-memory strategy that gives the same video, with any strategy, or stop and "
            "suggest one.",
            group="acceleration",
            flag="--on-out-of-memory",
            unset=RETRY,
            docs="jobs.md#out-of-memory",
            choices=ON_OUT_OF_MEMORY,
        ),
    ] = RETRY
    gpus: Annotated[
        int | Auto,
        Number(
            label="GPUs for one video",
            help=f"How many GPUs share the job; {AUTO} uses all identical GPUs where that is faster. Excludes offload, "
            "and engines of whole transformers.",
            group="acceleration",
            flag="--gpus",
            metavar=f"N|{AUTO}",
            unset="1",
            docs="speed.md#several-gpus",
            low=1,
            high=MAX_GPUS,
        ),
    ] = 1
    loras: Annotated[
        tuple[Lora, ...],
        Loras(
            label="LoRAs",
            help="LoRAs to add to the transformers, or with high= or low= to one expert, or to the first or second of "
            "two stages: .safetensors files, or names in weights/loras in the cache folder, each with a weight and the "
            "part of the steps in which it is active.",
            group="loras",
            flag="--lora",
            metavar="[high=|low=]FILE[:WEIGHT][@START-END]",
            unset="none; weight 1, in all steps",
            docs="models.md#lora",
        ),
    ] = ()
    step_cache: Annotated[
        str,
        StepCache(
            label="Step cache",
            help="Reuse the output of the transformers' blocks across steps: faster, but not exactly the "
            f"same video. A higher strength, as in {FIRST_BLOCK}:0.15, {MAGCACHE}:0.12 or {TAYLORSEER}:3, is faster. "
            "Excludes engines of whole transformers.",
            group="acceleration",
            flag="--step-cache",
            metavar="|".join((NONE, *(f"{kind}[:STRENGTH]" for kind in STRENGTHS))),
            unset=f"{NONE}; strength " + ", ".join(f"{strengths.default:g}" for strengths in STRENGTHS.values()),
            docs="speed.md#step-cache",
            choices=STEP_CACHES,
        ),
    ] = NONE
    guidance_cache: Annotated[
        str,
        Choice(
            label="Guidance cache",
            help="Leave out a guidance pass in every other step in which it differs from the pass with the prompt by "
            "at most this share: faster with guidance, but not exactly the same video.",
            group="acceleration",
            flag="--guidance-cache",
            unset=OFF,
            docs="speed.md#guidance-cache",
            choices=GUIDANCE_CACHES,
        ),
    ] = OFF
    attention: Annotated[
        str,
        AttentionKernel(
            label="Attention",
            help="The attention kernel of the transformers in PyTorch. The 8-bit kernels sage and fp8 and the sparse "
            f"kernel {SOL} are faster, less exact, and never selected automatically. A higher threshold, as in "
            f"{SOL}:1.5, is faster.",
            group="acceleration",
            flag="--attention",
            metavar="|".join((*list(ATTENTIONS)[1:-1], f"{SOL}[:TAU]")),
            unset=f"the fastest exact one; TAU {TAU:g}",
            docs="speed.md",
            choices=ATTENTIONS,
        ),
    ] = AUTO
    compile: Annotated[
        str,
        Choice(
            label="Compile",
            help="Compile the transformers' blocks in PyTorch: takes half a minute, then each step is faster.",
            group="acceleration",
            flag="--compile",
            unset="where it pays off",
            docs="speed.md",
            choices=COMPILES,
        ),
    ] = AUTO
    shift: Annotated[
        float | None,
        Number(
            label="Shift",
            help="Shift of the noise schedule. Higher values spend more steps on layout and motion, lower values on "
            "detail.",
            group="more",
            flag="--shift",
            docs="models.md#shift",
            placeholder=AUTO,
            low=MIN_SHIFT,
            high=MAX_SHIFT,
            whole=False,
            open=None,
        ),
    ] = None
    stages: Annotated[
        str,
        Choice(
            label="Stages",
            help="Make the video at half the width and height first, then enlarge its latents and refine them in a few "
            "steps at full size. Only some models can.",
            group="more",
            flag="--stages",
            metavar="1|2",
            unset="1",
            docs="models.md#two-stages",
            choices=STAGES,
        ),
    ] = "1"
    vae_precision: Annotated[
        str,
        Choice(
            label="VAE precision",
            help="Precision of VAE decoding in PyTorch. 16 bits take half the memory.",
            group="acceleration",
            flag="--vae-precision",
            unset="bfloat16 where the transformers use it, else float32",
            docs="speed.md",
            choices=VAE_PRECISIONS,
        ),
    ] = AUTO
    image: Annotated[
        str | None,
        ImageFile(
            label="Image",
            help="Start the video from this PNG, JPEG, WebP, AVIF, BMP or TIFF file. Only some models can.",
            group="image",
            flag="--image",
            metavar="FILE",
            unset="none",
            docs="models.md#start-from-an-image",
        ),
    ] = None
    last_image: Annotated[
        str | None,
        ImageFile(
            label="Last image",
            help="End the video with this image.",
            group="image",
            flag="--last-image",
            metavar="FILE",
            unset="none",
            docs="models.md#start-from-an-image",
        ),
    ] = None
    keyframes: Annotated[
        tuple[str, ...],
        ImageFiles(
            label="Keyframes",
            help="Guide the video towards this image at this time. Only some models can.",
            group="image",
            flag="--keyframe",
            metavar="FILE@SECONDS",
            unset="none",
            docs="models.md#keyframes",
            most=MAX_KEYFRAMES,
        ),
    ] = ()
    keyframe_seconds: Annotated[
        tuple[float, ...],
        Scales(
            label="Keyframe times",
            help="When the keyframes are reached, in seconds from the start of the video: one number for each, with "
            "commas between them.",
            group="image",
            unset="none",
            docs="models.md#keyframes",
            low=0,
            high=MAX_SECONDS,
            most=MAX_KEYFRAMES,
            least=0,
        ),
    ] = ()
    image_fit: Annotated[
        str,
        Choice(
            label="Image fit",
            help="How an image of other proportions becomes a frame: cut off what does not fit, or show all of it with "
            "black borders.",
            group="image",
            flag="--image-fit",
            unset=CROP,
            docs="models.md#start-from-an-image",
            choices=IMAGE_FITS,
        ),
    ] = CROP
    image_position: Annotated[
        float | Auto,
        Number(
            label="Image position",
            help="Which part of a cropped image stays: 0 is the top or the left, 100 the bottom or the right.",
            group="image",
            flag="--image-position",
            metavar="PERCENT",
            unset=f"{MIDDLE:g}, the middle",
            docs="models.md#start-from-an-image",
            low=0,
            high=100,
            whole=False,
            step=1,
        ),
    ] = MIDDLE
    seconds: Annotated[
        float | Auto,
        Number(
            label="Seconds",
            help="Length of the video instead of its number of frames; the nearest length that the model can make.",
            group="video",
            flag="--seconds",
            unset="by frames",
            placeholder=AUTO,
            low=0.0,
            high=MAX_SECONDS,
            whole=False,
        ),
    ] = AUTO

    interpolate: Annotated[
        str,
        Choice(
            label="Interpolate",
            help="Compute 1 or 3 new frames between neighboring ones, for smoother motion at the same length. The "
            "video without them is kept too.",
            group="finishing",
            flag="--interpolate",
            metavar="2|4",
            unset=OFF,
            docs="interpolate.md",
            choices=INTERPOLATIONS,
        ),
    ] = OFF
    loop: Annotated[
        str,
        Choice(
            label="Loop",
            help="Make a video that can be repeated without a jump: it ends on its first image where the model can, "
            "else it is played backwards after its end.",
            group="finishing",
            flag="--loop",
            metavar=f"{LOOP}|{OFF}",
            unset=OFF,
            docs="extend.md#loops",
            choices=LOOPS,
        ),
    ] = OFF
    upscale: Annotated[
        str,
        Choice(
            label="Upscale",
            help="Enlarge the finished frames with a neural network, to 2, 3 or 4 times the width and height. The "
            "video in its own size is kept too.",
            group="finishing",
            flag="--upscale",
            metavar=f"{OFF}|2|3|4",
            unset=f"the model's: 4 for the shipped one, else {OFF}",
            docs="upscale.md",
            choices=UPSCALES,
        ),
    ] = AUTO
    upscaler: Annotated[
        str,
        UpscalerName(
            label="Upscaler",
            help="The network that enlarges the frames. Some are made for drawn pictures, others for photographs.",
            group="finishing",
            flag="--upscaler",
            metavar="NAME",
            unset="the one for animated videos",
            docs="upscale.md",
        ),
    ] = AUTO
    extend: Annotated[
        str | None,
        VideoFile(
            label="Extend",
            help="Continue this video: its last frame starts the new part, and the result has both. It keeps the size "
            "and frame rate. Only models that start from an image can.",
            group="image",
            flag="--extend",
            metavar="FILE",
            unset="none",
            docs="extend.md",
        ),
    ] = None
    extend_frames: Annotated[
        int | Auto,
        Number(
            label="Frames to extend from",
            help="From how many of the last frames of the extended video the new part starts. More continue its motion "
            "better. Only models that are steered by control videos can use more than one.",
            group="image",
            flag="--extend-frames",
            unset=f"{EXTEND_FRAMES} where the model can, else 1",
            docs="extend.md#several-frames",
            placeholder="auto",
            low=1,
            high=MAX_EXTEND_FRAMES,
        ),
    ] = AUTO
    join: Annotated[
        str | None,
        VideoFile(
            label="Join",
            help="Lead from the extended video to this one: the result has both, and the new frames between them. Only "
            "models that are steered by control videos can.",
            group="image",
            flag="--join",
            metavar="FILE",
            unset="none",
            docs="extend.md#several-frames",
        ),
    ] = None
    video: Annotated[
        str | None,
        VideoFile(
            label="Video",
            help="Change this video as the prompt says. The lower the strength, the more of its layout and motion "
            "stays. Only some models can.",
            group="image",
            flag="--video",
            metavar="FILE",
            unset="none",
            docs="models.md#start-from-a-video",
        ),
    ] = None
    strength: Annotated[
        float | Auto,
        Number(
            label="Strength",
            help="How much of the video changes: a low strength keeps its layout and colors, 1 keeps almost nothing. "
            "That share of the steps runs.",
            group="image",
            flag="--strength",
            unset=f"{STRENGTH:g}",
            docs="models.md#start-from-a-video",
            low=LEAST_STRENGTH,
            high=1,
            whole=False,
            step=0.05,
        ),
    ] = STRENGTH

    control: Annotated[
        str | None,
        VideoFile(
            label="Control video",
            help="Steer the video with this one: depth, poses, edges, or the video that a mask changes. Only some "
            "models can.",
            group="image",
            flag="--control",
            metavar="FILE",
            unset="none",
            docs="models.md#control-videos",
        ),
    ] = None
    face: Annotated[
        str | None,
        VideoFile(
            label="Face video",
            help="Give the character in the image the expressions of the face in this video, which goes with the poses "
            "in the control video. Only some models can.",
            group="image",
            flag="--face",
            metavar="FILE",
            unset="none",
            docs="models.md#characters",
        ),
    ] = None
    background: Annotated[
        str | None,
        VideoFile(
            label="Background video",
            help="Put the character into this video, where the mask is white. Only some models can.",
            group="image",
            flag="--background",
            metavar="FILE",
            unset="that of the image",
            docs="models.md#characters",
        ),
    ] = None
    mask: Annotated[
        str | None,
        MaskFile(
            label="Mask",
            help="Change the control video, or the background video, where this video or image is white, and keep it "
            "where it is black; or change boxes, such as box:10,20,30,40: left, top, width and height in percent.",
            group="image",
            flag="--mask",
            metavar="FILE|box:X,Y,W,H",
            unset="all of it changes",
            docs="models.md#control-videos",
        ),
    ] = None
    outpaint: Annotated[
        tuple[float, ...],
        Sides(
            label="Outpaint",
            help="Show the control video smaller and fill what is around it: how much is added on its left, top, right "
            "and bottom, in percent of its width and height, or one number for all sides.",
            group="image",
            flag="--outpaint",
            metavar="N[,N,N,N]",
            unset="nothing is added",
            docs="models.md#control-videos",
            low=0,
            high=MAX_BORDER,
            most=4,
        ),
    ] = NO_BORDERS
    control_start: Annotated[
        float | Auto,
        Number(
            label="Control starts at",
            help="The second of the control video, and of a mask video, at which the clip begins. What is "
            "before is not used.",
            group="image",
            flag="--control-start",
            metavar="SECONDS",
            unset="0",
            docs="models.md#control-videos",
            low=0,
            high=MAX_CONTROL_START,
            whole=False,
            step=0.1,
        ),
    ] = 0.0
    references: Annotated[
        tuple[str, ...],
        ImageFiles(
            label="Reference images",
            help="Show what is in these images, such as a person, a thing or a background. Only some models can.",
            group="image",
            flag="--reference",
            metavar="FILE",
            unset="none",
            docs="models.md#control-videos",
            most=MAX_REFERENCES,
        ),
    ] = ()
    control_scale: Annotated[
        tuple[float, ...],
        Scales(
            label="Control scale",
            help="How much the video follows the control video and the reference images: one number, or one for each "
            "block of the model that reads them, with commas between them.",
            group="image",
            flag="--control-scale",
            metavar="N[,N…]",
            unset=f"{CONTROL_SCALE[0]:g}",
            docs="models.md#control-videos",
            low=0,
            high=MAX_CONTROL_SCALE,
            most=MAX_CONTROL_BLOCKS,
        ),
    ] = CONTROL_SCALE
    preprocess: Annotated[
        str,
        Choice(
            label="Control from it",
            help="Steer the video with what is made of the control video: its edges, a scribble of it, its frames in "
            "gray or blurred, or, with a model that is downloaded for it, its depth or the poses of people. With a "
            "mask, where it is white.",
            group="image",
            flag="--preprocess",
            unset=OFF,
            docs="models.md#control-videos",
            choices=PREPROCESSING,
        ),
    ] = OFF
    overlap: Annotated[
        str,
        Choice(
            label="Overlap",
            help="Of a long clip of a character, which is made in segments: start each with so many frames of the one "
            "before. With 5, movements go on more smoothly, and a segment adds fewer frames.",
            group="image",
            flag="--overlap",
            unset="1",
            docs="models.md#characters",
            choices=OVERLAPS,
        ),
    ] = OVERLAP

    sound: Annotated[
        str,
        Choice(
            label="Sound",
            help="Make sound with the video where the model can, as AAC or without loss as FLAC.",
            group="finishing",
            flag="--sound",
            unset="on; nothing if the model makes no sound",
            docs="models.md#sound",
            choices=SOUNDS,
            off_flag="--no-sound",
        ),
    ] = "on"
    template: Annotated[
        str | None,
        Prompt(
            label="Prompt template",
            help="The template that the seed made the prompt of. A request that has one keeps its prompt as it is.",
            group="prompt",
            docs="prompts.md#wildcards",
            longest=MAX_PROMPT_CHARACTERS,
            optional=True,
        ),
    ] = None
    original_prompt: Annotated[
        str | None,
        Prompt(
            label="Prompt before it was enhanced",
            help="The text that a chat model has made the prompt of; it is stored with the video and changes nothing.",
            group="prompt",
            docs="prompts.md#enhance-a-prompt",
            longest=MAX_PROMPT_CHARACTERS,
            optional=True,
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise InvalidRequestError("prompt", "request.not_an_object")
        for name in values:
            if name not in cls.model_fields:
                unknown = facts.shortened(name)
                raise InvalidRequestError(unknown, "request.unknown_field", name=unknown, known=list(cls.model_fields))
        if "prompt" not in values:
            raise InvalidRequestError("prompt", "request.prompt_empty")
        return values

    def backend(self, component: str) -> str:
        """Return the requested backend of one component."""
        return next((self.backends[name] for name in _named(component) if name in self.backends), AUTO)

    def has_backend(self, component: str) -> bool:
        """Return whether the request names a backend for a component."""
        return any(name in self.backends for name in _named(component))

    @property
    def files(self) -> list[tuple[str, str]]:
        """The field and the name of each image and video."""
        named = [(name, getattr(self, name)) for name, declared in FIELDS.items() if isinstance(declared, ImageFile)]
        return [
            (name, file)
            for name, value in named
            for file in (value if isinstance(value, tuple) else () if value is None else (value,))
            if parse_boxes(file) is None
        ]

    @property
    def control_second(self) -> float:
        """The second of the control video at which the clip begins."""
        return 0.0 if self.control_start == AUTO else float(self.control_start)

    def replace(self, **changes: Any) -> "GenerationRequest":
        """Return a copy with some fields changed, validated again."""
        return GenerationRequest(**{**dict(self), **changes})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "GenerationRequest":
        """Return the request that a mapping such as JSON describes; unknown keys are an error."""
        return cls.model_validate(values)

    def to_json(self) -> dict[str, Any]:
        """Return every field by name, as JSON values."""
        return self.model_dump(mode="json")


def _declarations() -> dict[str, RequestField]:
    declarations = {}
    for name, info in GenerationRequest.model_fields.items():
        (declarations[name],) = (item for item in info.metadata if isinstance(item, RequestField))
    return declarations


FIELDS: Mapping[str, RequestField] = MappingProxyType(_declarations())
facts.OPTIONS.update({name: declared.flag for name, declared in FIELDS.items() if declared.flag})
facts.OPTIONS["prompt"] = "PROMPT"
facts.OPTIONS["guidance_scale_2"] = FIELDS["guidance_scale"].flag
facts.OPTIONS["keyframe_seconds"] = FIELDS["keyframes"].flag
