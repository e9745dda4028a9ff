"""Measure LTX-2's transformer and whole clips with sound at full size, by diffusers and by Tandem.

    python bench/gpu/ltx2.py --passes [--sizes 768x512x121,1216x704x121] [--variants NAME,NAME] [--config ltx-2.3]
    python bench/gpu/ltx2.py --parts                                          attention kernels and the feed-forward
    python bench/gpu/ltx2.py --clips [--variants NAME,NAME]                   the folder is made in `TANDEM_CHECKS`
    python bench/gpu/ltx2.py --parts --passes --clips --tiny --device cpu     a rehearsal

Random weights. Passes: one forward pass of `LTX2VideoTransformer3DModel()`, or of a published configuration, with 126
latents of sound and 256 tokens of text; medians of CUDA events after a warm-up. Variants are `PASSES`; each side has a
module of its own, with the same weights. Errors are ‖out - ref‖ / ‖ref‖ of the video and of the sound against diffusers
in float32 with TF32 off, over the first `--reference-blocks` blocks.

Clips: text to video with sound, 121 frames of 768x512, 30 steps with guidance (four passes a step) and 8 steps without,
as of a distilled model. Gemma has `GEMMA_LAYERS` of its 48 layers on both sides. Variants are `CLIPS`, which each make
`--repeats` clips of both kinds. `VARIANT:GIB` makes one clip of 8 steps on a card of so many GiB. diffusers' seconds
end with frames and samples in memory, Tandem's with a finished MP4.

Prints a JSON object per measurement and appends it to $OUT/ltx2.jsonl; profiles go to $OUT/profile-*.txt. No
measurement starts after `--seconds`.
"""

import argparse
import copy
import gc
import itertools
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline, LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from bench.gpu import results
from bench.gpu.jobs import HOME, Unjudged, on_card
from bench.gpu.speed import (
    FP8,
    PEAK,
    Bench,
    NoTimeError,
    check,
    first_blocks,
    profile,
    raise_if_degraded,
    random_module,
)
from runtime.core.cancel import Cancel
from runtime.core.events import Event, Failed, StepDone, VideoSaved
from runtime.core.plan import EAGER, Speed
from runtime.core.request import GenerationRequest
from runtime.engines.reference import full_float32
from runtime.execution.attention import attention, problem
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.residency import Residency
from runtime.execution.streams import Streams
from runtime.families.ltx2.components import Vocoder
from runtime.families.ltx2.spec import MAX_SEQUENCE_LENGTH
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.machine.probe import probe
from runtime.models import quantization
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models, read_spec
from runtime.pipeline import video_output
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from tests import tiny_models
from tests.families.ltx2.test_transformer import Inputs, by_diffusers
from tests.gpu.errors import relative_error

# By name, how a pass is computed and how the linear layers are: `None` by diffusers, and its blocks compiled. "best" is
# the fastest exact attention kernel that runs.
COMPILED = "compiled"
PASSES: dict[str, tuple[Speed | str | None, str]] = {
    "diffusers": (None, ""),
    "diffusers-compiled": (COMPILED, ""),
    "plain": (EAGER, ""),
    # Fused projections stay fused.
    "unfused": (Speed(attention="best", text_kept=True), ""),
    "graphed-unfused": (Speed(attention="best", text_kept=True, graphed=True), ""),
    "uncompiled": (Speed(attention="best", fused=True, text_kept=True), ""),
    "graphed": (Speed(attention="best", fused=True, text_kept=True, graphed=True), ""),
    "native": (Speed(compiled=True, fused=True, text_kept=True), ""),
    "cudnn": (Speed(attention="cudnn", compiled=True, fused=True, text_kept=True), ""),
    "compiled": (Speed(attention="best", compiled=True, fused=True, text_kept=True), ""),
    "fp8-uncompiled": (Speed(attention="best", text_kept=True), FP8),
    "fp8-graphed": (Speed(attention="best", text_kept=True, graphed=True), FP8),
    "fp8": (Speed(attention="best", compiled=True, text_kept=True), FP8),
    "fp8-all-uncompiled": (Speed(attention="fp8", text_kept=True), FP8),
    "fp8-all-graphed": (Speed(attention="fp8", text_kept=True, graphed=True), FP8),
    "fp8-all": (Speed(attention="fp8", compiled=True, text_kept=True), FP8),
}
DEFAULT = "diffusers,diffusers-compiled,uncompiled,graphed,compiled,fp8-uncompiled,fp8-graphed,fp8,fp8-all"
# Fields of a request; `None` is diffusers' pipeline.
CLIPS: dict[str, dict[str, Any] | None] = {
    "diffusers": None,
    "tandem": {"quantization": "none"},
    "tandem-auto": {},
    "tandem-fp8": {"quantization": "fp8"},
    "tandem-fp8-all": {"quantization": "fp8", "attention": "fp8"},
}
DEFAULT_CLIPS = "diffusers,tandem,tandem-fp8"
# Steps and guidance scales.
DISTILLED = "distilled"
CLIP_KINDS = {"guided": (30, 3.0), DISTILLED: (8, 1.0)}
GEMMA_LAYERS, VOCABULARY = 4, 1024
TEXT_TOKENS, SOUND, FPS = 256, (1, 8, 126, 16), 24.0
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 3,
    "caption_channels": 32,
}
_FOLDER = "ltx-2-random"
# The last layers of what a block adds to its input.
_ADDED = ("to_out.0.weight", "ff.net.2.weight")
_ADDED_SHARE = 0.3

Run = Callable[[], torch.Tensor]


class LtxBench(Bench):
    """Device, time limit and report of a run."""

    def say(self, **found: Any) -> None:
        """Print a measurement and append it to ltx2.jsonl."""
        results.say("ltx2.jsonl", **found)


def spread(name: str, parameter: torch.Tensor) -> float:
    """Return the standard deviation of a random weight: layers keep the size of their input, blocks add a fraction."""
    if parameter.dim() < 2:
        return 0.02
    return float((_ADDED_SHARE if name.endswith(_ADDED) else 1.0) * parameter[0].numel() ** -0.5)


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the transformer's configuration; empty for diffusers' default one."""
    published = {model.name: model.configs["transformer"] for model in published_models("ltx2")}
    return dict(published.get(arguments.config, {})) | (TINY if arguments.tiny else {})


def case(device: str, dtype: torch.dtype, config: Any, size: str) -> tuple[Streams, Inputs]:
    """Return seeded inputs of a size, "width x height x frames"."""
    width, height, frames = map(int, size.split("x"))
    streams = Streams((1, config.in_channels, (frames - 1) // 8 + 1, height // 32, width // 32), SOUND, FPS)
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    widths = (config.cross_attention_dim, config.audio_cross_attention_dim)
    text = 2 * config.caption_channels if config.use_prompt_embeddings else sum(widths)
    joined = streams.join(noise(*streams.video), noise(*streams.sound))
    return streams, Inputs(joined, noise(1, TEXT_TOKENS, text).to(dtype))


def operations_of(tokens: int) -> float:
    """Return the operations of a pass at full size."""
    return look_up("ltx-2", Path("none")).transformer.forward_flops(tokens, TEXT_TOKENS)


def usable(bench: LtxBench, speed: Speed, width: int) -> Speed:
    """Return the options with "best" replaced by the fastest exact kernel that runs; others that cannot run raise.

    Without CUDA, nothing is recorded.
    """
    speed = speed.replace(graphed=speed.graphed and bench.cuda)
    if speed.attention == "best":
        kinds = ("flash4", "cudnn") if bench.cuda else ()
        able = [kind for kind in kinds if problem(kind, bench.device, bench.dtype, width) is None]
        speed = speed.replace(attention=able[0] if able else "native")
    check(speed, bench, width)
    return speed


def made(bench: LtxBench) -> Any:
    """Return a transformer with random weights on the device, always the same."""
    config = configuration(bench.arguments)
    return random_module(bench.device, partial(LTX2VideoTransformer3DModel, **config), bench.dtype, spread)


def quantize(module: Any) -> None:
    """Quantize the blocks' linear layers as a job does: FP8, a scale per row."""
    from torchao.quantization import quantize_

    config = quantization.diffusers_config(quantization.FP8, torch.bfloat16).get_apply_tensor_subclass()
    quantize_(module.transformer_blocks, config)
    quantization.install_fp8_linear(module)


def passes(bench: LtxBench) -> None:
    """Measure one forward pass of each variant and size."""
    arguments = bench.arguments
    asked, sizes = (arguments.variants or DEFAULT).split(","), arguments.sizes.split(",")
    # In this order: blocks of diffusers stay compiled, projections fused, and FP8 once is FP8 for good.
    chosen = [name for name in PASSES if name in asked]
    wanted: dict[str, torch.Tensor] = {}
    groups: dict[tuple[bool, str], list[str]] = {}
    for name in chosen:
        speed, linears = PASSES[name]
        groups.setdefault((isinstance(speed, Speed), linears), []).append(name)
    for (_, linears), names in groups.items():
        with bench.trying(part="passes", variant=",".join(names)), torch.no_grad():
            started = time.perf_counter()
            module = made(bench)
            bench.wait()
            bench.say(
                part="weights",
                seconds=round(time.perf_counter() - started, 1),
                parameters=sum(parameter.numel() for parameter in module.parameters()),
            )
            if not wanted and arguments.reference_blocks:
                wanted |= references(bench, module, sizes)
            if linears:
                quantize(module)
            for name in names:
                for size in sizes:
                    with bench.trying(part="passes", variant=name, clip=size):
                        variant(bench, module, name, size, wanted.get(size))
                discard_compiled_code()
            del module


def references(bench: LtxBench, module: Any, sizes: list[str]) -> dict[str, torch.Tensor]:
    """Return diffusers' results in float32 over the first blocks, by size."""
    deep, found = bench.arguments.reference_blocks, {}
    with first_blocks(module, deep), full_float32(torch.device(bench.device)):
        wide = copy.deepcopy(module).float()
        for size in sizes:
            streams, given = case(bench.device, bench.dtype, module.config, size)
            found[size] = by_diffusers(wide, given, torch.tensor(500.0, device=bench.device), streams=streams)
    return found


def variant(bench: LtxBench, module: Any, name: str, size: str, wanted: torch.Tensor | None) -> None:
    """Measure one variant of one size."""
    speed, _ = PASSES[name]
    streams, given = case(bench.device, bench.dtype, module.config, size)
    times = torch.tensor(500.0, device=bench.device)
    kernel, recording = None, None

    def again() -> None:
        """Discard a recorded pass, which has the blocks and the kernels of its recording."""

    if isinstance(speed, Speed):
        speed = usable(bench, speed, module.config.attention_head_dim)
        kernel = speed.attention
        denoiser = PyTorchStreamDenoiser(module)
        denoiser.compute(speed, raise_if_degraded)
        denoiser.see(streams, ())
        if speed.graphed:
            again = partial(denoiser.compute, speed, raise_if_degraded)
        run: Run = partial(denoiser, given.latents, times, given.text)
    else:
        if speed == COMPILED:
            module.compile_repeated_blocks(fullgraph=True)
        run = partial(by_diffusers, module, given, times, streams=streams)
    started = time.perf_counter()
    run()
    bench.wait()
    first = time.perf_counter() - started
    if isinstance(speed, Speed) and speed.graphed:
        again()
        started = time.perf_counter()
        run()
        bench.wait()
        recording = round(time.perf_counter() - started, 2)
    run()
    found = bench.median(run)
    tokens = math.prod(streams.video[2:])
    operations = operations_of(tokens)
    errors = None
    if wanted is not None:
        with first_blocks(module, bench.arguments.reference_blocks):
            again()
            run()
            pairs = zip(streams.split(run().float()), streams.split(wanted.float()), strict=True)
            errors = [float(f"{relative_error(got, exact):.3g}") for got, exact in pairs]
        again()
    what: dict[str, Any] = {"part": "passes", "variant": name, "clip": size}
    bench.say(
        **what,
        tokens=tokens,
        attention=kernel,
        first=round(first, 2),
        recording=recording,
        **found,
        floor=round(operations / PEAK, 3),
        tera=round(operations / found["seconds"] / 1e12, 1),
        errors=errors,
    )
    if bench.arguments.profile:
        run()
        profile(bench, f"{name}-{size}", run, what)


def parts(bench: LtxBench) -> None:
    """Measure a block's attention with each kernel, and the first layer of its feed-forward with the activation."""
    heads, head_width = (2, 16) if bench.arguments.tiny else (32, 128)
    width = heads * head_width
    generator = torch.Generator(bench.device).manual_seed(2)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device, generator=generator).to(bench.dtype)

    for size in bench.arguments.sizes.split(","):
        frames = (int(size.split("x")[2]) - 1) // 8 + 1
        tokens = frames * math.prod(int(side) // 32 for side in size.split("x")[:2])
        q, k, v = (noise(1, tokens, heads, head_width) for _ in range(3))
        for kind in ("native", "cudnn", "flash4", "fp8") if bench.cuda else ("native",):
            for keys in (tokens, TEXT_TOKENS, MAX_SEQUENCE_LENGTH):
                what = {"part": "attention", "kind": kind, "tokens": tokens, "keys": keys}
                few = (part[:, :keys].contiguous() for part in (k, v))
                with bench.trying(**what), torch.no_grad():
                    bench.say(**what, **bench.median(warm(partial(attention(kind), q, *few))))
        x, weight, bias = noise(tokens, width), noise(4 * width, width) / width**0.5, noise(4 * width)

        def apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")

        def at_once(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
            return out

        for name, function in {"apart": apart, "at once": at_once, "compiled": torch.compile(apart)}.items():
            what = {"part": "feed-forward", "kind": name, "tokens": tokens}
            with bench.trying(**what), torch.no_grad():
                run = warm(partial(function, x, weight, bias))
                bench.say(
                    **what, **bench.median(run), error=relative_error(run().float(), apart(x, weight, bias).float())
                )


def warm(run: Run) -> Run:
    """Return the call, after two of it."""
    for _ in range(2):
        run()
    return run


def save(module: Any, folder: Path) -> None:
    """Save a component in place of a tiny one."""
    shutil.rmtree(folder)
    module.save_pretrained(folder)
    del module
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def folder_of_weights(bench: LtxBench) -> Path:
    """Return a folder of LTX-2 with random weights."""
    folder = HOME / _FOLDER
    complete = folder / "complete"
    if bench.arguments.keep and complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    tiny_models.build("ltx-2", folder)
    if bench.arguments.tiny:
        return folder
    (configs,) = (model.configs for model in published_models("ltx2") if model.name == "ltx-2")
    sizes = {"num_hidden_layers": GEMMA_LAYERS, "vocab_size": VOCABULARY}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    gemma = Gemma3Config(
        text_config={**configs["text_encoder"]["text_config"], **sizes, **ids},
        vision_config={"num_hidden_layers": 1, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=31,
    )
    connectors = {**configs["connectors"], "text_proj_in_factor": GEMMA_LAYERS + 1}
    parts: dict[str, Callable[[], Any]] = {
        "text_encoder": partial(Gemma3ForConditionalGeneration, gemma),
        "connectors": partial(LTX2TextConnectors, **connectors),
        "transformer": partial(LTX2VideoTransformer3DModel, **configs["transformer"]),
        "vae": partial(AutoencoderKLLTX2Video, **configs["vae"]),
        "audio_vae": partial(AutoencoderKLLTX2Audio, **configs["audio_vae"]),
        "vocoder": partial(Vocoder.from_config, configs["vocoder"]),
    }
    for name, make in parts.items():
        started = time.perf_counter()
        module = random_module(bench.device, make, bench.dtype, spread)
        for key, buffer in module.named_buffers():
            # Means are 0, deviations and scales 1.
            if buffer.is_floating_point():
                torch.nn.init.constant_(buffer, float("mean" not in key))
        save(module, folder / name)
        bench.say(part="saved", component=name, seconds=round(time.perf_counter() - started, 1))
        del module
    complete.touch()
    return folder


def clips(bench: LtxBench) -> None:
    """Measure whole clips with sound."""
    vars(video_output)["Detector"] = Unjudged  # random weights may well show one colour
    with bench.trying(part="clips", variant="folder"), torch.no_grad():
        HOME.mkdir(parents=True, exist_ok=True)
        folder = folder_of_weights(bench)
        for name in (bench.arguments.variants or DEFAULT_CLIPS).split(","):
            with bench.trying(part="clips", variant=name):
                way, _, card = name.partition(":")
                fields = CLIPS[way]
                if fields is None:
                    by_pipeline(bench, folder)
                elif card:
                    by_tandem(bench, folder, name, fields, float(card))
                else:
                    by_tandem(bench, folder, name, fields)
    if not bench.arguments.keep:
        shutil.rmtree(HOME / _FOLDER, ignore_errors=True)


def clip_size(bench: LtxBench) -> dict[str, int]:
    """Return width, height and frames."""
    width, height, frames = (96, 64, 9) if bench.arguments.tiny else (768, 512, 121)
    return {"width": width, "height": height, "frames": frames}


def kinds_of(bench: LtxBench) -> dict[str, tuple[int, float]]:
    """Return steps and guidance scales of the kinds of clips that were asked for."""
    return {kind: CLIP_KINDS[kind] for kind in bench.arguments.kinds.split(",")}


def by_tandem(bench: LtxBench, folder: Path, name: str, fields: dict[str, Any], card: float | None = None) -> None:
    """Measure clips as jobs of one process; on a smaller card one clip without guidance.

    Args:
        card: GiB of the card.
    """
    spec, machine = read_spec(folder, folder.name), on_card(probe(), card)
    kinds, repeats = (
        (kinds_of(bench), bench.arguments.repeats) if card is None else ({DISTILLED: CLIP_KINDS[DISTILLED]}, 1)
    )
    cache = HOME / f"ltx-2-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    history = HistoryFile(cache, machine)
    with Residency() as residency:
        for kind, (steps, scale) in kinds.items():
            for number in range(1, repeats + 1):
                asked = fields | clip_size(bench) | {"prompt": "a red boat", "seed": number, "steps": steps}
                asked |= {"model": str(folder), "guidance_scale": scale, "negative_prompt": "blue ball"}
                context = PlanningContext(machine, cache / "clip.mp4", history=history.read())
                plan = resolve(GenerationRequest.from_mapping(asked), spec, context)
                events: list[Event] = []
                before, started = (residency.load_seconds, residency.compile_seconds), time.perf_counter()
                run_job(plan, spec, events.append, Cancel(), residency, history=history)
                seconds, end = time.perf_counter() - started, events[-1]
                compiling = residency.compile_seconds - before[1]
                reading = residency.load_seconds - before[0] - compiling
                forecast = {stage: entry["seconds"] for stage, entry in plan.to_json()["forecast"].items()}
                bench.say(
                    part="clips",
                    variant=name,
                    kind=kind,
                    clip=number,
                    seconds=round(seconds, 2),
                    reading=round(reading, 2),
                    compile=round(compiling, 2),
                    without_reading=round(seconds - reading, 2),
                    step=round(statistics.median(event.seconds for event in events if isinstance(event, StepDone)), 3),
                    stages=dict(end.timings) if isinstance(end, VideoSaved) else None,
                    failed=end.what if isinstance(end, Failed) else None,
                    forecast=forecast,
                    compiled=plan.speed.compiled,
                    graphed=plan.speed.graphed,
                    attention=plan.speed.attention,
                    strategy=str(plan.forecast.title),
                    peak=end.peak_memory_bytes if isinstance(end, VideoSaved) else None,
                    ram=plan.forecast.ram_bytes,
                )


def stamp(bench: LtxBench, stamps: list[float], _: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Append the time at which a step of diffusers' pipeline ended; its callback at the end of a step."""
    bench.wait()
    stamps.append(time.perf_counter())
    return values


def by_pipeline(bench: LtxBench, folder: Path) -> None:
    """Measure clips of diffusers' pipeline."""
    started = time.perf_counter()
    pipeline: Any = LTX2Pipeline.from_pretrained(folder, dtype=bench.dtype)
    pipeline.to(bench.device)
    pipeline.set_progress_bar_config(disable=True)
    bench.say(part="clips", variant="diffusers", reading=round(time.perf_counter() - started, 2))
    for block in pipeline.transformer.transformer_blocks:
        block.perturbed_attn = True
        for attn in (block.attn1, block.audio_attn1):
            attn.set_processor(LTX2PerturbedAttnProcessor())
    spec, size = read_spec(folder, folder.name), clip_size(bench)
    assert spec.sound_latents is not None
    guidance = spec.sound_latents.guidance
    for kind, (steps, scale) in kinds_of(bench).items():
        # As in Tandem, a scale of 1 turns all guidance off.
        off = {"stg_scale": 0.0, "modality_scale": 1.0}
        extra: dict[str, Any] = off | {f"audio_{name}": value for name, value in off.items()}
        extra["audio_guidance_scale"] = 1.0
        if scale > 1:
            (skipped, _), (isolated, _), (rescaled, _) = guidance.skipped, guidance.isolated, guidance.rescaled
            extra = {
                "audio_guidance_scale": guidance.sound_scale,
                "stg_scale": skipped,
                "modality_scale": isolated,
                "guidance_rescale": rescaled,
                "spatio_temporal_guidance_blocks": list(guidance.skipping_blocks),
            }
        for number in range(1, bench.arguments.repeats + 1):
            stamps: list[float] = []
            bench.wait()
            started = time.perf_counter()
            pipeline(
                prompt="a red boat",
                negative_prompt="blue ball",
                width=size["width"],
                height=size["height"],
                num_frames=size["frames"],
                frame_rate=FPS,
                num_inference_steps=steps,
                guidance_scale=scale,
                generator=torch.Generator("cpu").manual_seed(number),
                output_type="np",
                callback_on_step_end=partial(stamp, bench, stamps),
                **extra,
            )
            bench.wait()
            seconds = time.perf_counter() - started
            between = [after - before for before, after in itertools.pairwise(stamps)]
            step = round(statistics.median(between), 3)
            bench.say(part="clips", variant="diffusers", kind=kind, clip=number, seconds=round(seconds, 2), step=step)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--clips", action="store_true")
    parser.add_argument("--sizes", default="768x512x121,1216x704x121", help="of parts and passes")
    parser.add_argument("--variants", default="", help=f"passes: {DEFAULT}; clips: {DEFAULT_CLIPS}")
    parser.add_argument("--config", default="default", help="of passes: default, ltx-2 or ltx-2.3")
    parser.add_argument("--reference-blocks", type=int, default=4, help="0 measures no errors")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--profile", action="store_true", help="of each pass, about 5 s more")
    parser.add_argument("--repeats", type=int, default=2, help="clips of each kind")
    parser.add_argument("--kinds", default=",".join(CLIP_KINDS), help="of clips")
    parser.add_argument("--keep", action="store_true", help="keep the folder of clips, or use one that was kept")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.size = "480p"  # of `Bench`; sizes of passes are clips
    if not (arguments.parts or arguments.passes or arguments.clips):
        parser.error("nothing to do: give --parts, --passes or --clips")
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    bench = LtxBench(arguments)
    if bench.cuda:
        torch.cuda.set_device(bench.device)
        bench.say(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    try:
        if arguments.parts:
            parts(bench)
        if arguments.passes:
            passes(bench)
        if arguments.clips:
            clips(bench)
    except NoTimeError as error:
        bench.say(left_out=f"{error} and what follows")


if __name__ == "__main__":
    main()
