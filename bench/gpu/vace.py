"""Measure VACE at full size, by diffusers and by Tandem: forward passes, encoding of what steers a clip, whole clips.

    python bench/gpu/vace.py --passes --encoding --clips [--variants NAME,NAME] [--size 480p|720p]
    python bench/gpu/vace.py --passes --encoding --clips --tiny --device cpu                      a rehearsal

Random weights of VACE 14B: 40 blocks and 8 control blocks. Passes: medians of CUDA events after a warm-up, variants of
`bench/gpu/speed.py` and "diffusers-compiled", whose blocks are compiled; each side has a module of its own, with the
same weights. Errors are ‖out - ref‖ / ‖ref‖ against diffusers in float32 with TF32 off, over the first
`--reference-blocks` blocks and their control blocks.

Encoding: the latents of a control video with a mask, 81 frames, by `WanVACEPipeline` from frames in the GPU's memory
and by Tandem from bytes in RAM; the first call of each warms up. Errors are those of the latents against float32.

Clips: 81 frames, 4 steps with guidance, steered by a control video and a mask, which are files for Tandem and frames in
memory for diffusers. The text encoder has `TEXT_LAYERS` of its 24 layers on both sides. diffusers' seconds end with
frames in memory, Tandem's with a finished MP4. Prints a JSON object per measurement and appends it to $OUT/vace.jsonl.
"""

import argparse
import copy
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanVACEPipeline, WanVACETransformer3DModel
from PIL import Image
from transformers import UMT5Config, UMT5EncoderModel

from bench.gpu import results
from bench.gpu.jobs import HOME, Unjudged, save
from bench.gpu.speed import (
    FP8,
    PEAK,
    TEXT_TOKENS,
    TINY,
    VARIANTS,
    Bench,
    NoTimeError,
    check,
    profile,
    quantize,
    raise_if_degraded,
    random_module,
)
from runtime.core.cancel import Cancel, never
from runtime.core.events import Event, Failed, StepDone, VideoSaved
from runtime.core.plan import EAGER, Speed
from runtime.core.request import GenerationRequest
from runtime.engines.reference import full_float32
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.components import ControlClip
from runtime.execution.residency import Residency
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vace import control_latents
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.machine.probe import probe
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models, read_spec
from runtime.models.requested import with_inputs
from runtime.pipeline import video_output
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from tests import tiny_models
from tests.gpu.errors import relative_error
from tests.published_specs import UMT5
from tests.video.test_reader import H264, make

MODEL = "wan2.1-vace-14b"
TINY_VACE = {"vace_layers": [0, 2]}
COMPILED = "diffusers-compiled"
DEFAULT = f"diffusers,{COMPILED},ours,flash4-eager,flash4,fp8-attention,fp8-flash4,fp8-all-eager,fp8-all"
TEXT_LAYERS, STEPS, SCALE = 4, 4, 5.0
# Name, how it is computed, latent frames of a call.
ENCODERS = (
    ("diffusers", EAGER, 1),
    ("ours", EAGER, 1),
    ("ours", EAGER, 3),
    ("kernels", Speed(vae_kernels=True, channels_last=True), 1),
    ("kernels", Speed(vae_kernels=True, channels_last=True), 3),
)
CLIPS: dict[str, dict[str, Any] | None] = {
    "diffusers": None,
    "tandem": {"quantization": "none"},
    "tandem-fp8": {"quantization": "fp8"},
    "tandem-fp8-all": {"quantization": "fp8", "attention": "fp8"},
    "tandem-fp8-all-compiled": {"quantization": "fp8", "attention": "fp8", "compile": "always"},
}


class VaceBench(Bench):
    """Device, time limit and report of a run, and VACE's transformer with seeded inputs."""

    model: str = MODEL
    tiny: Mapping[str, Any] = TINY_VACE
    transformer: Callable[..., Any] = WanVACETransformer3DModel

    def say(self, **found: Any) -> None:
        """Print a measurement and append it to vace.jsonl."""
        results.say("vace.jsonl", size=self.size, **found)

    @property
    def clip(self) -> tuple[int, int, int]:
        """Frames, height and width in pixels."""
        frames, height, width = self.grid
        return 4 * frames - 3, 8 * height, 8 * width

    @property
    def config(self) -> dict[str, Any]:
        """The transformer's configuration."""
        (published,) = (model.configs["transformer"] for model in published_models("wan") if model.name == self.model)
        return {**published, **({**TINY, **self.tiny} if self.arguments.tiny else {})}

    def complete(self, module: Any) -> None:
        """Compute the buffers of a module whose weights are random."""
        width = self.config["attention_head_dim"]
        module.rope = type(module.rope)(width, (1, 2, 2), 1024).to(self.device)

    def noise(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """Return seeded noise in float32."""
        return torch.randn(shape, device=self.device, generator=generator)

    def given(self) -> tuple[torch.Tensor, ...]:
        """Return seeded latents, a timestep, a text, and the control branch's latents."""
        config, generator = self.config, torch.Generator(self.device).manual_seed(1)
        latents, control = (
            self.noise(generator, 1, config[key], *self.grid) for key in ("in_channels", "vace_in_channels")
        )
        text = self.noise(generator, 1, TEXT_TOKENS, config["text_dim"]).to(self.dtype)
        return latents, torch.tensor(500.0, device=self.device), text, control

    def by_module(self, module: Any, dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        """Return diffusers' forward pass."""
        latents, timestep, text, control = inputs
        predicted: torch.Tensor = module(
            latents.to(dtype),
            timestep.reshape(1),
            text.to(dtype),
            control_hidden_states=control.to(dtype),
            control_hidden_states_scale=torch.ones(len(module.vace_blocks), device=latents.device, dtype=dtype),
            return_dict=False,
        )[0]
        return predicted

    def by_denoiser(self, denoiser: PyTorchDenoiser, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return Tandem's forward pass."""
        latents, timestep, text, control = inputs
        denoiser.steer((1.0,) * len(denoiser._module.vace_blocks))
        return partial(denoiser, torch.cat([latents, control], dim=1), timestep, text)

    @contextmanager
    def first(self, module: Any, count: int) -> Iterator[None]:
        """Leave a transformer its first blocks and their control blocks, while entered."""
        before = module.blocks, module.vace_blocks, list(module.config.vace_layers)
        layers = [layer for layer in before[2] if layer < count]
        try:
            module.blocks, module.vace_blocks = module.blocks[:count], module.vace_blocks[: len(layers)]
            module.register_to_config(vace_layers=layers)
            yield
        finally:
            module.blocks, module.vace_blocks = before[:2]
            module.register_to_config(vace_layers=before[2])

    def more_blocks(self, module: Any) -> list[Any]:
        """Return what is quantized and compiled besides the blocks."""
        return list(module.vace_blocks)


def passes(bench: VaceBench) -> None:
    """Measure one forward pass of each variant."""
    asked = (bench.arguments.variants or DEFAULT).split(",")
    # In this order: blocks of diffusers stay compiled, projections fused, and FP8 once is FP8 for good.
    by_diffusers = [name for name in ("diffusers", COMPILED) if name in asked]
    exact = [name for name, (_, linears) in VARIANTS.items() if name in asked and not linears]
    rounded = [name for name, (_, linears) in VARIANTS.items() if name in asked and linears == FP8]
    make = partial(bench.transformer, **bench.config)
    wanted: torch.Tensor | None = None
    for names in (by_diffusers, exact, rounded):
        if not names:
            continue
        with bench.trying(part="passes", variant=",".join(names)), torch.no_grad():
            module = random_module(bench.device, make, bench.dtype)
            bench.complete(module)
            bench.say(part="weights", parameters=sum(parameter.numel() for parameter in module.parameters()))
            if wanted is None and bench.arguments.reference_blocks:
                wanted = reference(bench, module)
            if names is rounded:
                quantize(module)
                holder = torch.nn.Module()
                holder.blocks = torch.nn.ModuleList(bench.more_blocks(module))
                quantize(holder)
            for name in names:
                with bench.trying(part="passes", variant=name):
                    variant(bench, module, name, wanted)
                discard_compiled_code()
            del module


def reference(bench: VaceBench, module: Any) -> torch.Tensor:
    """Return diffusers' result in float32 over the first blocks."""
    with bench.first(module, bench.arguments.reference_blocks), full_float32(torch.device(bench.device)):
        return bench.by_module(copy.deepcopy(module).float(), torch.float32, *bench.given())


def variant(bench: VaceBench, module: Any, name: str, wanted: torch.Tensor | None) -> None:
    """Measure one variant."""
    inputs = bench.given()
    width = bench.config["attention_head_dim"]

    def again() -> None:
        """Discard the texts' keys and values, which are numbered by block."""

    if name in VARIANTS:
        speed = VARIANTS[name][0]
        check(speed, bench, width)
        denoiser = PyTorchDenoiser(module)
        again = partial(denoiser.compute, speed, raise_if_degraded)
        again()
        run = bench.by_denoiser(denoiser, *inputs)
    else:
        if name == COMPILED:
            for block in (*module.blocks, *bench.more_blocks(module)):
                block.compile(fullgraph=True)
        run = partial(bench.by_module, module, bench.dtype, *inputs)
    started = time.perf_counter()
    run()
    bench.wait()
    first = round(time.perf_counter() - started, 2)
    run()
    found = bench.median(run, 3)
    operations = look_up(bench.model, Path("none")).transformer.forward_flops(bench.tokens, TEXT_TOKENS)
    error = None
    if wanted is not None:
        with bench.first(module, bench.arguments.reference_blocks):
            again()
            error = float(f"{relative_error(run().float(), wanted):.3g}")
        again()
    what = {"part": "passes", "variant": name}
    tera = round(operations / found["seconds"] / 1e12, 1)
    bench.say(**what, first=first, **found, floor=round(operations / PEAK, 3), tera=tera, error=error)
    if bench.arguments.profile:
        profile(bench, f"{bench.model}-{name}", run, what)


def frames_of(bench: VaceBench) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frames that change slowly, and a mask with a box, uint8: (frames, height, width, 3) and without the 3."""
    frames, height, width = bench.clip
    generator = torch.Generator().manual_seed(3)
    small = torch.rand(1, 3, frames // 8 + 2, height // 32, width // 32, generator=generator)
    smooth = torch.nn.functional.interpolate(small, (frames, height, width), mode="trilinear")[0]
    mask = torch.zeros(frames, height, width, dtype=torch.uint8)
    mask[:, height // 4 : -height // 4, width // 4 : -width // 4] = 255
    return (smooth.permute(1, 2, 3, 0) * 255).to(torch.uint8).contiguous(), mask


@torch.inference_mode()
def encoding(bench: VaceBench) -> None:
    """Measure the encoding of a control video with a mask."""
    tiny = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1} if bench.arguments.tiny else {}
    video, mask = frames_of(bench)
    frames, height, width = bench.clip
    spec = look_up(MODEL, Path("none"))
    clips = {"control and mask": mask, "control": None}

    def by_pipeline(pipeline: Any, pixels: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
        latents = pipeline.prepare_video_latents(pixels, changes, [[]], None, bench.device)
        masks = pipeline.prepare_masks(changes, [[]])
        return torch.cat([latents, masks.to(latents)], dim=1).float()

    with torch.device("meta"):
        shape = WanVACETransformer3DModel(**bench.config)
    scheduler = UniPCMultistepScheduler()
    wanted: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, bench.dtype):
        module = random_module(bench.device, lambda: AutoencoderKLWan(**tiny), dtype)
        pipeline = WanVACEPipeline(
            tokenizer=None, text_encoder=None, vae=module, scheduler=scheduler, transformer=shape
        )
        for name, changes in clips.items():
            pixels = (video.to(bench.device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1).contiguous()
            whole = torch.full((frames, height, width), 255, dtype=torch.uint8) if changes is None else changes
            white = (whole.to(bench.device).float() / 255)[None, None].expand(1, 3, -1, -1, -1).contiguous()
            diffusers = partial(by_pipeline, pipeline, pixels, white)
            if dtype == torch.float32:
                with full_float32(pixels.device):
                    wanted[name] = diffusers()
                continue
            clip = ControlClip(frames, height, width, video, changes, ())
            encoder = PyTorchVideoEncoder(module)
            ours = partial(control_latents, encoder, spec, clip, None, never)
            for side, speed, chunk in ENCODERS:
                what = {"part": "encoding", "of": name, "variant": side, "chunk": chunk}
                with bench.trying(**what):
                    encoder.compute(speed, raise_if_degraded)
                    run = diffusers if side == "diffusers" else partial(ours, chunk)
                    error = float(f"{relative_error(run().float(), wanted[name]):.3g}")
                    bench.say(**what, **bench.median(run, 5), error=error)


def folder_of_weights(bench: VaceBench) -> Path:
    """Return a folder of VACE with random weights."""
    folder = HOME / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    tiny_models.build("wan2.1-vace", folder)
    if not bench.arguments.tiny:
        text = UMT5Config(**{**UMT5, "num_layers": TEXT_LAYERS})
        parts: dict[str, Callable[[], Any]] = {
            "text_encoder": partial(UMT5EncoderModel, text),
            "transformer": partial(WanVACETransformer3DModel, **bench.config),
            "vae": AutoencoderKLWan,
        }
        for name, make_ in parts.items():
            save(make_, folder / name, bench.device)
    return folder


def clips(bench: VaceBench) -> None:
    """Measure whole clips."""
    vars(video_output)["Detector"] = Unjudged  # random weights may well show one colour
    with bench.trying(part="clips", variant="folder"), torch.no_grad():
        HOME.mkdir(parents=True, exist_ok=True)
        folder = folder_of_weights(bench)
        frames, height, width = bench.clip
        rate = f"size={width}x{height}:rate=16:duration={frames / 16 + 1}"
        make(HOME / "control.mp4", *H264, inputs=("-f", "lavfi", "-i", f"testsrc={rate}"))
        box = f"255*between(X,{width // 4},{width * 3 // 4})*between(Y,{height // 4},{height * 3 // 4})"
        drawn = f"color=black:{rate},geq=lum='{box}':cb=128:cr=128"
        make(HOME / "mask.mp4", *H264, inputs=("-f", "lavfi", "-i", drawn))
        for name in (bench.arguments.clip_variants or ",".join(CLIPS)).split(","):
            with bench.trying(part="clips", variant=name):
                fields = CLIPS[name]
                if fields is None:
                    clips_by_pipeline(bench, folder)
                else:
                    clips_by_tandem(bench, folder, name, fields)
        shutil.rmtree(folder)


def clips_by_pipeline(bench: VaceBench, folder: Path) -> None:
    """Measure clips of diffusers' pipeline."""
    started = time.perf_counter()
    pipeline: Any = WanVACEPipeline.from_pretrained(folder, dtype=bench.dtype)
    pipeline.to(bench.device)
    pipeline.set_progress_bar_config(disable=True)
    bench.say(part="clips", variant="diffusers", reading=round(time.perf_counter() - started, 2))
    video, mask = frames_of(bench)
    frames, height, width = bench.clip
    for number in range(1, bench.arguments.repeats + 1):
        bench.wait()
        started = time.perf_counter()
        pipeline(
            prompt="a red boat",
            negative_prompt="blue ball",
            video=[Image.fromarray(frame.numpy()) for frame in video],
            mask=[Image.fromarray(frame.numpy()) for frame in mask],
            height=height,
            width=width,
            num_frames=frames,
            num_inference_steps=STEPS,
            guidance_scale=SCALE,
            generator=torch.Generator("cpu").manual_seed(number),
            output_type="np",
        )
        bench.wait()
        bench.say(part="clips", variant="diffusers", clip=number, seconds=round(time.perf_counter() - started, 2))


def clips_by_tandem(bench: VaceBench, folder: Path, name: str, fields: dict[str, Any]) -> None:
    """Measure clips as jobs of one process."""
    plain, machine, cache = read_spec(folder, folder.name), probe(), HOME / f"vace-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    history, (frames, height, width) = HistoryFile(cache, machine), bench.clip
    asked = fields | {"model": str(folder), "frames": frames, "height": height, "width": width, "fps": 16}
    asked |= {"prompt": "a red boat", "negative_prompt": "blue ball", "steps": STEPS, "guidance_scale": SCALE}
    asked |= {"control": str(HOME / "control.mp4"), "mask": str(HOME / "mask.mp4")}
    with Residency() as residency:
        for number in range(1, bench.arguments.repeats + 1):
            request = GenerationRequest.from_mapping(asked | {"seed": number})
            spec = with_inputs(plain, request, HOME, cache)
            plan = resolve(request, spec, PlanningContext(machine, cache / "clip.mp4", history=history.read()))
            events: list[Event] = []
            before, started = (residency.load_seconds, residency.compile_seconds), time.perf_counter()
            run_job(plan, spec, events.append, Cancel(), residency, history=history)
            seconds, end = time.perf_counter() - started, events[-1]
            compiling = residency.compile_seconds - before[1]
            reading = residency.load_seconds - before[0] - compiling
            bench.say(
                part="clips",
                variant=name,
                clip=number,
                seconds=round(seconds, 2),
                reading=round(reading, 2),
                compile=round(compiling, 2),
                without_reading=round(seconds - reading, 2),
                steps=[round(event.seconds, 2) for event in events if isinstance(event, StepDone)],
                stages=dict(end.timings) if isinstance(end, VideoSaved) else None,
                failed=end.what if isinstance(end, Failed) else None,
                forecast={stage: entry["seconds"] for stage, entry in plan.to_json()["forecast"].items()},
                compiled=plan.speed.compiled,
                attention=plan.speed.attention,
                strategy=str(plan.forecast.title),
                peak=end.peak_memory_bytes if isinstance(end, VideoSaved) else None,
            )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--encoding", action="store_true")
    parser.add_argument("--clips", action="store_true")
    parser.add_argument("--size", default="480p", choices=["480p", "720p"])
    parser.add_argument("--variants", default="", help=f"of passes: {DEFAULT}")
    parser.add_argument("--clip-variants", default="", help=f"of clips: {','.join(CLIPS)}")
    parser.add_argument("--reference-blocks", type=int, default=6, help="0 measures no errors")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--repeats", type=int, default=2, help="clips of each variant")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.passes or arguments.encoding or arguments.clips):
        parser.error("nothing to do: give --passes, --encoding or --clips")
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    bench = VaceBench(arguments)
    if bench.cuda:
        torch.cuda.set_device(bench.device)
        bench.say(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    try:
        for wanted, part in ((arguments.passes, passes), (arguments.encoding, encoding), (arguments.clips, clips)):
            if wanted:
                part(bench)
    except NoTimeError as error:
        bench.say(left_out=f"{error} and what follows")


if __name__ == "__main__":
    main()
