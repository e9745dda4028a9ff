"""Measure the speed of Wan's components at full size, each optimization compared with diffusers.

    python bench/gpu/speed.py PART … [--size 480p|720p] [--variants NAME,NAME] [--seconds N]

PART is of attention, transformer, vae, vae-encoder, small, hunyuan-video and framepack. The variants of the last two
are `HUNYUAN_VARIANTS`; their sizes are 129 frames of 960x544 (`--size 480p`) or 1280x720 (720p), and sections of
480x832 and of 640x640. Random weights: speed does not depend on their values, except with sparse attention ("sol" and
"fp8-sol", a pass that is not exact) on how scores are distributed; norms are near one, so that attention is neither
flat nor sharp. Prints a JSON object per measurement and appends it to $OUT/speed.jsonl; the last variant's
profile goes to $OUT/profile-*.txt. A failure is reported and the next variant runs; none starts after `--seconds`.
`--device cpu --tiny` tries the script itself.

Errors are ‖out - ref‖ / ‖ref‖ against float32 with TF32 off, of the same weights; the transformer's over
`--reference-blocks` of its 40 blocks, since float32 takes a minute for all of them at 480p and five at 720p;
HunyuanVideo's and FramePack's over as many of each kind.
"""

import argparse
import contextlib
import copy
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch._inductor.config as inductor_config
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from bench.gpu import hunyuan_cases as cases
from bench.gpu.timing import call_seconds
from runtime.core.cancel import Cancel
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.engines.reference import full_float32
from runtime.execution.attention import attention, problem, with_usable_attention
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.residency import Residency
from runtime.families.wan.spec import vae_spec
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.models import quantization
from runtime.models.catalogue import find
from runtime.pipeline.sampling import decode
from tests.gpu.errors import relative_error
from tests.plans import Alone, tiny_plan

# Latent frames, height, width.
SIZES = {"480p": (21, 60, 104), "720p": (21, 90, 160), "tiny": (3, 6, 8)}
A14B: dict[str, Any] = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 64,
    "num_layers": 3,
    "text_dim": 64,
    "freq_dim": 32,
}
TEXT_TOKENS = 512
PEAK = 790e12
STEPS, PASSES = 40, 2
FP8 = "fp8 linears"
HAND = "fp8 linears without torchao"

# Name: how it is computed, and how the linear layers are: "", `FP8` or `HAND`.
CUDNN = Speed(attention="cudnn")
VARIANTS: dict[str, tuple[Speed, str]] = {
    "ours": (EAGER, ""),
    "text": (Speed(text_kept=True), ""),
    "flash4-eager": (Speed(attention="flash4", text_kept=True, fused=True), ""),
    "compiled": (Speed(compiled=True), ""),
    "compiled-text": (Speed(compiled=True, text_kept=True), ""),
    "compiled-fused": (Speed(compiled=True, text_kept=True, fused=True), ""),
    "cudnn": (CUDNN.replace(compiled=True, text_kept=True, fused=True), ""),
    "flash": (Speed(attention="flash", compiled=True, text_kept=True, fused=True), ""),
    "flash3": (Speed(attention="flash3", compiled=True, text_kept=True, fused=True), ""),
    "flash4": (Speed(attention="flash4", compiled=True, text_kept=True, fused=True), ""),
    "sage": (Speed(attention="sage", compiled=True, text_kept=True, fused=True), ""),
    "fp8-attention": (Speed(attention="fp8", compiled=True, text_kept=True, fused=True), ""),
    "sol": (Speed(attention="cudnn", sparse_tau=1.0, compiled=True, text_kept=True, fused=True), ""),
    "tuned": (Speed(compiled=True, text_kept=True, fused=True), ""),
    "fp8-eager": (Speed(text_kept=True), FP8),
    "fp8-all-eager": (Speed(attention="fp8", text_kept=True), FP8),
    "fp8": (Speed(compiled=True, text_kept=True), FP8),
    "fp8-flash4": (Speed(attention="flash4", compiled=True, text_kept=True), FP8),
    "fp8-all": (Speed(attention="fp8", compiled=True, text_kept=True), FP8),
    "fp8-sol": (Speed(attention="cudnn", sparse_tau=1.0, compiled=True, text_kept=True), FP8),
    "fp8-hand": (Speed(compiled=True, text_kept=True), HAND),
    "fp8-hand-all": (Speed(attention="fp8", compiled=True, text_kept=True), HAND),
}
# Name, how it is computed, latent frames a call.
VAE_VARIANTS: tuple[tuple[str, Speed | None, int], ...] = (
    ("diffusers", None, 1),
    ("ours", EAGER, 4),
    ("channels last", Speed(channels_last=True), 1),
    ("channels last", Speed(channels_last=True), 4),
    ("kernels", Speed(channels_last=True, vae_kernels=True), 1),
    ("kernels", Speed(channels_last=True, vae_kernels=True), 4),
)
# Of HunyuanVideo and FramePack. Name: how it is computed, `None` by diffusers, and how the linear layers are: "" or
# `FP8`.
HUNYUAN_VARIANTS: dict[str, tuple[Speed | None, str]] = {
    "diffusers": (None, ""),
    "ours": (EAGER, ""),
    "fused": (Speed(fused=True), ""),
    "compiled": (Speed(compiled=True), ""),
    "cudnn": (Speed(attention="cudnn", compiled=True), ""),
    "cudnn-fused": (Speed(attention="cudnn", compiled=True, fused=True), ""),
    "flash4": (Speed(attention="flash4", compiled=True, fused=True), ""),
    "flash4-graphed": (Speed(attention="flash4", compiled=True, fused=True, graphed=True), ""),
    "fp8-attention": (Speed(attention="fp8", compiled=True, fused=True), ""),
    "sol": (Speed(attention="cudnn", sparse_tau=1.0, compiled=True, fused=True), ""),
    "fp8": (Speed(attention="cudnn", compiled=True), FP8),
    "fp8-flash4": (Speed(attention="flash4", compiled=True), FP8),
    "fp8-all": (Speed(attention="fp8", compiled=True), FP8),
    "fp8-sol": (Speed(attention="cudnn", sparse_tau=1.0, compiled=True), FP8),
    "fp8-all-graphed": (Speed(attention="fp8", compiled=True, graphed=True), FP8),
}
HUNYUAN_DEFAULT = {
    "hunyuan-video": ("diffusers", "cudnn", "cudnn-fused", "flash4", "fp8-attention", "fp8-flash4", "fp8-all"),
    "framepack": ("diffusers", "cudnn-fused", "flash4", "flash4-graphed", "fp8-attention", "fp8-flash4", "fp8-all"),
}
# Seconds to spend on the timed calls of a variant of HunyuanVideo or FramePack, one to three calls.
HUNYUAN_SECONDS = 40.0
DEFAULT = ("diffusers", "ours", "compiled-fused", "flash4", "fp8-attention", "fp8", "fp8-all")


class NoTimeError(Exception):
    """No time is left of `--seconds`."""


class Bench:
    """Device, time limit and report of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device: str = arguments.device
        self.cuda = self.device.startswith("cuda")
        self.dtype = torch.bfloat16
        self.out = Path(os.environ.get("OUT", "."))
        self._ends = time.monotonic() + arguments.seconds
        self._size: str = "tiny" if arguments.tiny else arguments.size

    @property
    def size(self) -> str:
        """Name of the resolution."""
        return self._size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent frames, height, width."""
        return SIZES[self._size]

    @property
    def tokens(self) -> int:
        """Of the transformer's sequence."""
        frames, height, width = self.grid
        return frames * (height // 2) * (width // 2)

    def say(self, **found: Any) -> None:
        """Print a measurement and append it to speed.jsonl."""
        line = json.dumps({"size": self._size, **found})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with (self.out / "speed.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def trying(self, **what: Any) -> Iterator[None]:
        """Report a failure and continue with the next variant.

        Raises:
            NoTimeError: if no time is left.
        """
        if time.monotonic() > self._ends:
            raise NoTimeError(str(what))
        try:
            yield
        except NoTimeError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.say(**what, failed=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> dict[str, Any]:
        """Return the median seconds of a call, their spread, and the bytes that it allocates."""
        times = []
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() - before if self.cuda else 0
        spread = [round(min(times), 5), round(max(times), 5)]
        return {"seconds": round(statistics.median(times), 5), "spread": spread, "working": peak}

    def median(self, run: Callable[[], object], repeats: int = 5) -> dict[str, Any]:
        """Return the median seconds of a call by CUDA events, their spread, and the bytes at its peak."""
        if not self.cuda:
            return self.seconds(run, 2)
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        times = [call_seconds(run, cuda=True) for _ in range(repeats)]
        spread = [round(min(times), 5), round(max(times), 5)]
        return {
            "seconds": round(statistics.median(times), 5),
            "spread": spread,
            "peak": torch.cuda.max_memory_allocated(),
            "weights": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()


def operations_of(config: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Return the operations of one forward pass, and those of its attention among tokens."""
    heads, blocks = config["num_attention_heads"], config["num_layers"]
    width = heads * config.get("attention_head_dim", 128)
    attends = 4 * tokens**2 * width
    linear = 12 * tokens * width**2 + 4 * tokens * width * config["ffn_dim"]
    return float(blocks * (attends + linear + 4 * tokens * TEXT_TOKENS * width)), float(blocks * attends)


def random_module(
    device: str,
    make: Callable[[], Any],
    dtype: torch.dtype,
    spread_of: Callable[[str, torch.Tensor], float] | None = None,
) -> Any:
    """Return a module with random weights on the device; those that diffusers keeps in float32 stay float32.

    Args:
        spread_of: returns the standard deviation of a weight, by its name.
    """
    with torch.device("meta"):
        made = make()
    made = made.to_empty(device=device).eval().requires_grad_(False)
    float32_names = set(getattr(made, "_keep_in_fp32_modules", ()) or ())
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in made.named_parameters():
        parts = name.split(".")
        # The same values in any dtype. Random convolutions grow: theirs are such that values stay near one.
        spread = parameter[0].numel() ** -0.5 if parameter.dim() > 3 else 0.02
        if spread_of is not None:
            spread = spread_of(name, parameter)
        values = torch.empty_like(parameter, dtype=torch.float32).normal_(0, spread, generator=generator)
        if parts[-1] == "gamma" or (parts[-1] == "weight" and "norm" in name.split(".")[-2:][0]):
            values.add_(1.0)
        parameter.data = values.to(torch.float32 if float32_names & set(parts) else dtype)
    return made


def transformer(bench: Bench) -> None:
    """Measure one forward pass of one expert of Wan2.2-A14B, in bfloat16 and FP8; with --images of I2V-A14B too."""
    kinds: dict[str, dict[str, Any]] = {"t2v": {}}
    if bench.arguments.images:
        kinds |= {"i2v": {"in_channels": 36, "out_channels": 16}}
    for kind, channels in kinds.items():
        _transformer(bench, kind, (TINY if bench.arguments.tiny else A14B) | channels)
        discard_compiled_code()


def _transformer(bench: Bench, kind: str, config: dict[str, Any]) -> None:
    operations, attends = operations_of(config, bench.tokens)
    say: dict[str, Any] = {"part": "transformer", "kind": kind, "floor": round(operations / PEAK, 3)}
    bench.say(**say, attention_flops=attends, all_flops=operations)
    module = random_module(bench.device, lambda: WanTransformer3DModel(**config), bench.dtype)
    width = config.get("attention_head_dim", 128)
    module.rope = type(module.rope)(width, (1, 2, 2), 1024).to(bench.device)
    generator = torch.Generator(bench.device).manual_seed(1)
    latents = torch.randn(1, config.get("in_channels", 16), *bench.grid, device=bench.device, generator=generator)
    shape = (1, TEXT_TOKENS, config.get("text_dim", 4096))
    text = torch.randn(shape, device=bench.device, generator=generator).to(bench.dtype)
    given = (latents, torch.tensor(500.0, device=bench.device), text)
    blocks = module.blocks
    deep = min(bench.arguments.reference_blocks, len(blocks))
    wanted = None
    if deep:
        with bench.trying(**say, variant="reference"), torch.no_grad():
            started = time.perf_counter()
            wanted = reference(module, *given, deep)
            bench.say(**say, variant="reference", blocks=deep, seconds=round(time.perf_counter() - started, 1))

    def error(run: Callable[[], torch.Tensor]) -> float | None:
        if wanted is None:
            return None
        try:
            module.blocks = blocks[:deep]
            return float(f"{relative_error(run().float(), wanted):.3g}")
        finally:
            module.blocks = blocks

    ready: Callable[[], torch.Tensor] | None = None
    chosen = bench.arguments.variants.split(",") if bench.arguments.variants else list(DEFAULT)
    for name in chosen:
        with bench.trying(**say, variant=name), torch.no_grad():
            run = ready_for(bench, name, module, width, given)
            started = time.perf_counter()
            run()
            bench.wait()
            first = time.perf_counter() - started
            found = bench.seconds(run, 2 if bench.size == "720p" else 3)
            tera = round(operations / found["seconds"] / 1e12, 1)
            clip = round(STEPS * PASSES * found["seconds"], 1)
            bench.say(
                **say,
                variant=name,
                first=round(first, 2),
                **found,
                error=error(run),
                error_blocks=deep,
                tera=tera,
                steps_of_a_clip=clip,
            )
            ready = run
    if ready is not None and not bench.arguments.no_profile:
        with bench.trying(**say, profile=chosen[-1]), torch.no_grad():
            profile(bench, f"transformer-{bench.size}-{chosen[-1]}", ready, {**say, "variant": chosen[-1]})


def ready_for(
    bench: Bench, name: str, module: Any, width: int, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Make a module ready for a variant; return its forward pass."""
    latents, timestep, text = given
    if name == "diffusers":
        as_diffusers(module)
        return lambda: module(latents.to(bench.dtype), timestep.reshape(1), text, return_dict=False)[0]
    speed, wants = VARIANTS[name]
    layer = module.blocks[0].attn1.to_q
    linears = HAND if isinstance(layer, HandLinear) else "" if type(layer.weight) is nn.Parameter else FP8
    if wants != linears:
        if linears:
            raise RuntimeError("FP8 once is FP8 for good: name its variants last, and one kind of them a run")
        part(module)
        (quantize if wants == FP8 else quantize_by_hand)(module)
    # PyTorch's compiler forgets what was tuned otherwise.
    inductor_config.coordinate_descent_tuning = name == "tuned"
    if name == "tuned":
        discard_compiled_code()
    check(speed, bench, width)
    return ours(module, speed, latents, timestep, text)


def check(speed: Speed, bench: Bench, width: int) -> None:
    """Raise if an attention kernel cannot be used for heads of a width."""
    _, problems = with_usable_attention(speed, bench.device, bench.dtype, width)
    if problems:
        raise RuntimeError("; ".join(map(str, problems.values())))


def ours(
    module: Any, speed: Speed, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return the forward pass that a job runs; options that cannot be used raise."""
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(speed, raise_if_degraded)
    return lambda: denoiser(latents, timestep, text)


def as_diffusers(module: Any) -> None:
    """Restore diffusers' classes of a module and its blocks."""
    module.__class__ = WanTransformer3DModel
    for block in module.blocks:
        block.__class__ = WanTransformerBlock


def quantize(module: Any) -> None:
    """Quantize the blocks' linear layers as a job does: FP8, a scale per row."""
    from torchao.quantization import quantize_

    quantize_(
        module.blocks, quantization.diffusers_config(quantization.FP8, torch.bfloat16).get_apply_tensor_subclass()
    )
    quantization.install_fp8_linear(module)


def hunyuan_video(bench: Bench) -> None:
    """Measure one forward pass of HunyuanVideo's transformer, in bfloat16 and FP8."""
    hunyuan(bench, "hunyuan-video", [bench.size])


def framepack(bench: Bench) -> None:
    """Measure one forward pass of FramePack's transformer, of a section with all its history, in bfloat16 and FP8."""
    hunyuan(bench, "framepack", ["tiny"] if bench.arguments.tiny else ["480x832", "640x640"])


def hunyuan(bench: Bench, model: str, sizes: list[str]) -> None:
    """Measure one forward pass of each size.

    diffusers masks the text's padding, as its pipelines do; Tandem leaves it out.
    """
    tiny, deep = bench.arguments.tiny, bench.arguments.reference_blocks
    module = random_module(bench.device, partial(cases.make, model, tiny=tiny), bench.dtype, cases.spread)
    found = [cases.case(model, size, module.config, bench.device, tiny=tiny) for size in sizes]
    wanted: dict[str, torch.Tensor] = {}
    for case in found:
        what = {"part": model, "case": case.size, "variant": "reference"}
        with (
            bench.trying(**what),
            torch.no_grad(),
            first_blocks(module, deep),
            full_float32(torch.device(bench.device)),
        ):
            if deep:
                started = time.perf_counter()
                wanted[case.size] = case.by_diffusers(copy.deepcopy(module).float())
                bench.say(**what, blocks=deep, seconds=round(time.perf_counter() - started, 1))
    chosen = bench.arguments.variants.split(",") if bench.arguments.variants else list(HUNYUAN_DEFAULT[model])
    for name in chosen:
        for case in found:
            with bench.trying(part=model, case=case.size, variant=name), torch.no_grad():
                if HUNYUAN_VARIANTS[name][1] and not quantized(module):
                    hunyuan_quantize(module)
                profiled = name == chosen[-1] and case is found[-1] and not bench.arguments.no_profile
                hunyuan_variant(bench, model, module, case, name, wanted.get(case.size), profiled=profiled)


def hunyuan_variant(
    bench: Bench,
    model: str,
    module: Any,
    case: cases.Case,
    name: str,
    wanted: torch.Tensor | None,
    *,
    profiled: bool,
) -> None:
    """Measure one variant of one size."""
    speed, linears = HUNYUAN_VARIANTS[name]
    if quantized(module) and not linears:
        raise RuntimeError("FP8 once is FP8 for good: name its variants last")

    def ready() -> Callable[[], torch.Tensor]:
        if speed is None:
            return lambda: case.by_diffusers(module)
        check(speed, bench, module.config.attention_head_dim)
        denoiser = cases.denoiser_of(model, module)
        denoiser.compute(speed, raise_if_degraded)
        return case.by_tandem(denoiser)

    run, started = ready(), time.perf_counter()
    run()
    bench.wait()
    first = time.perf_counter() - started
    found = bench.seconds(run, 1)
    more = min(int(HUNYUAN_SECONDS / found["seconds"]), 3)
    if more > 1:
        found = bench.seconds(run, more)
    say: dict[str, Any] = {"part": model, "case": case.size, "grid": list(case.grid), "variant": name}
    error = None
    if wanted is not None:
        with first_blocks(module, bench.arguments.reference_blocks):
            # What was recorded has all blocks.
            output = (ready() if speed is not None and speed.graphed else run)()
            error = float(f"{relative_error(output.float(), wanted):.3g}")
    bench.say(
        **say,
        floor=round(case.operations / PEAK, 3),
        first=round(first, 2),
        **found,
        calls=max(more, 1),
        error=error,
        error_blocks=bench.arguments.reference_blocks,
        tera=round(case.operations / found["seconds"] / 1e12, 1),
    )
    if profiled:
        profile(bench, f"{model}-{case.size}-{name}", run, say)


@contextmanager
def first_blocks(module: Any, count: int) -> Iterator[None]:
    """Leave a transformer its first blocks of each kind, while entered."""
    names = ("transformer_blocks", "single_transformer_blocks")
    kinds = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, blocks in kinds.items():
        setattr(module, name, blocks[:count])
    try:
        yield
    finally:
        for name, blocks in kinds.items():
            setattr(module, name, blocks)


def quantized(module: Any) -> bool:
    """Return whether `hunyuan_quantize` was called."""
    return quantization.is_quantized(module.single_transformer_blocks[0].proj_mlp.weight)


def hunyuan_quantize(module: Any) -> None:
    """Quantize the blocks' linear layers as a job does: FP8, a scale per row."""
    from torchao.quantization import quantize_

    config = quantization.diffusers_config(quantization.FP8, torch.bfloat16).get_apply_tensor_subclass()
    unfuse(module)
    for blocks in (module.transformer_blocks, module.single_transformer_blocks):
        quantize_(blocks, config)
    quantization.install_fp8_linear(module)


def unfuse(module: Any) -> None:
    """Split fused matrices, so that each layer is quantized separately and the matrix's memory is freed."""
    for block in (*module.transformer_blocks, *module.single_transformer_blocks):
        attn = block.attn
        layers = [attn.to_q, attn.to_k, attn.to_v, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        for name in ("to_qkv", "to_added_qkv"):
            if hasattr(attn, name):
                delattr(attn, name)
        for layer in layers:
            if layer is not None:
                layer.weight.data, layer.bias.data = layer.weight.data.clone(), layer.bias.data.clone()


def part(module: Any) -> None:
    """Split fused matrices, so that each layer is quantized separately."""
    for block in module.blocks:
        attn = block.attn1
        if hasattr(attn, "to_qkv"):
            del attn.to_qkv
            for layer in (attn.to_q, attn.to_k, attn.to_v):
                layer.weight.data, layer.bias.data = layer.weight.data.clone(), layer.bias.data.clone()


class HandLinear(nn.Module):
    """A linear layer in FP8 with a scale per row, without torchao, to measure torchao's overhead."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 448.0
        self.weight8 = (layer.weight.float() / scale).to(torch.float8_e4m3fn)
        self.scale = scale.t().contiguous()
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        rows = x.flatten(0, -2)
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 448.0
        given = (rows.float() / scale).to(torch.float8_e4m3fn)
        out: torch.Tensor = torch._scaled_mm(
            given,
            self.weight8.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out.unflatten(0, x.shape[:-1])


def quantize_by_hand(module: Any) -> None:
    """Replace the blocks' linear layers by `HandLinear`."""
    for parent in list(module.blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, HandLinear(child))


def reference(
    module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, deep: int
) -> torch.Tensor:
    """Return diffusers' forward pass in float32 over the first blocks, copied one at a time."""
    config = module.config
    with full_float32(latents.device):
        rotation = module.rope(latents)
        edges = {
            name: copy.deepcopy(getattr(module, name)).float() for name in ("patch_embedding", "condition_embedder")
        }
        x = edges["patch_embedding"](latents).flatten(2).transpose(1, 2).contiguous()
        time_, modulation, words, _ = edges["condition_embedder"](timestep.reshape(1), text.float(), None)
        modulation = modulation.unflatten(1, (6, -1))
        for block in module.blocks[:deep]:
            wide = copy.deepcopy(block).float()
            x = WanTransformerBlock.forward(wide, x, words, modulation, rotation)
        shift, scale = (module.scale_shift_table + time_.unsqueeze(1)).chunk(2, dim=1)
        x = copy.deepcopy(module.proj_out).float()(module.norm_out(x) * (1 + scale) + shift)
        (pt, ph, pw), (_, _, frames, height, width) = config.patch_size, latents.shape
        x = x.reshape(1, frames // pt, height // ph, width // pw, pt, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def attentions(bench: Bench) -> None:
    """Measure attention of 40 heads with every available kernel, with its error on Gaussian inputs."""
    heads, width = (2, 16) if bench.arguments.tiny else (40, 128)
    tokens = 2304 if bench.arguments.tiny else bench.tokens
    generator = torch.Generator(bench.device).manual_seed(2)
    shape = (3, 1, tokens, heads, width)
    q, k, v = torch.randn(shape, device=bench.device, generator=generator).to(bench.dtype)
    few = slice(0, 1)
    wide = [x[:, :, few].double().transpose(1, 2) for x in (q, k, v)]
    # A few queries against all keys, in float64.
    picked = wide[0][:, :, :256]
    wanted = (picked @ wide[1].transpose(-1, -2) / width**0.5).softmax(-1) @ wide[2]
    for kind in ("native", "cudnn", "flash", "flash3", "flash4", "sage", "fp8"):
        with bench.trying(part="attention", kind=kind), torch.no_grad():
            why = problem(kind, bench.device, bench.dtype, width)
            if why is not None:
                raise RuntimeError(str(why))
            attend = attention(kind)
            if kind == "fp8":
                # As a block has it: what is around the kernel is one kernel too.
                attend = torch.compile(attend, fullgraph=True)
            got = attend(q, k, v)[:, :256, few].transpose(1, 2)
            found = bench.seconds(lambda: attend(q, k, v), 5)  # noqa: B023 - called at once
            tera = 4 * tokens**2 * heads * width / found["seconds"] / 1e12
            bench.say(
                part="attention",
                kind=kind,
                **found,
                error=float(f"{relative_error(got, wanted):.3g}"),
                tera=round(tera, 1),
            )


def vae(bench: Bench) -> None:
    """Measure decoding of 81 frames, by diffusers and by Tandem."""
    latents = torch.randn(
        1, 16, *bench.grid, device=bench.device, generator=torch.Generator(bench.device).manual_seed(3)
    )
    wanted: torch.Tensor | None = None
    for name in bench.arguments.dtypes.split(","):
        if wanted is None and name != "float32":
            wanted = vae_in(bench, torch.float32, latents, None, measured=False)
        wanted = vae_in(bench, getattr(torch, name), latents, wanted)


def vae_in(
    bench: Bench, dtype: torch.dtype, latents: torch.Tensor, wanted: torch.Tensor | None, *, measured: bool = True
) -> torch.Tensor | None:
    """Measure decoding in one precision; return the reference, which the first call computes."""
    tiny = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1} if bench.arguments.tiny else {}
    module = random_module(bench.device, lambda: AutoencoderKLWan(**tiny), dtype)
    module.encoder = None
    decoder = PyTorchVideoDecoder(module)
    name = str(dtype).removeprefix("torch.")
    if wanted is None:
        with bench.trying(part="vae", dtype=name, variant="reference"), full_float32(latents.device):
            wanted = torch.cat(decoded(decoder, latents, 1)).float()
            spread = [wanted.min().item(), wanted.max().item()]
            bench.say(part="vae", dtype=name, variant="reference", spread=spread)
    if not measured:
        return wanted
    named = set(bench.arguments.variants.split(",")) & {variant for variant, _, _ in VAE_VARIANTS}
    for variant, speed, chunk in VAE_VARIANTS:
        if named and variant not in named:
            continue
        what = {"part": "vae", "dtype": name, "variant": variant, "chunk": chunk}
        with bench.trying(**what):
            if speed is None:
                run = partial(by_diffusers, module, latents)
            else:
                decoder.compute(speed, raise_if_degraded)
                run = partial(decoded, decoder, latents, chunk)
            started = time.perf_counter()
            got = run()
            first = time.perf_counter() - started
            error = None if wanted is None else float(f"{relative_error(torch.cat(got), wanted):.3g}")
            del got
            bench.say(**what, first=round(first, 2), **bench.seconds(run, 3), error=error)
    if dtype == torch.bfloat16 and not bench.arguments.no_profile:
        with bench.trying(part="vae", profile=name):
            profile(bench, f"vae-{bench.size}", partial(decoded, decoder, latents, 4), {"part": "vae"})
    discard_compiled_code()
    return wanted


@torch.inference_mode()
def vae_encoder(bench: Bench) -> None:
    """Measure encoding of an image and 80 gray frames, and of two images, by diffusers and by Tandem."""
    tiny = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1} if bench.arguments.tiny else {}
    frames, height, width = bench.grid
    count = 4 * frames - 3
    generator = torch.Generator(bench.device).manual_seed(5)
    both = torch.rand(2, 3, 8 * height, 8 * width, device=bench.device, generator=generator) * 2 - 1
    for images in (1, 2):
        clip = torch.zeros(1, 3, count, 8 * height, 8 * width, device=bench.device)
        clip[0, :, 0] = both[0]
        if images > 1:
            clip[0, :, -1] = both[1]
        exact = random_module(bench.device, lambda: AutoencoderKLWan(**tiny), torch.float32)
        encoder = PyTorchVideoEncoder(exact)

        def encoded(module: Any, encoder: Any = encoder, clip: torch.Tensor = clip) -> torch.Tensor:
            mean = module.encode(clip.to(module.dtype)).latent_dist.mode().float()
            normalised: torch.Tensor = (mean - encoder._mean) / encoder._std
            return normalised

        with full_float32(clip.device):
            wanted = encoded(exact)
        del exact
        module = random_module(bench.device, lambda: AutoencoderKLWan(**tiny), bench.dtype)
        encoder = PyTorchVideoEncoder(module)
        forecast = vae_spec(module.config).encode_bytes(count, 8 * height, 8 * width, 2)
        for variant, run in (
            ("diffusers", partial(encoded, module)),
            ("ours", partial(encoder.latents, list(both[:images]), count)),
        ):
            what = {"part": "vae-encoder", "images": images, "variant": variant}
            with bench.trying(**what):
                started = time.perf_counter()
                error = float(f"{relative_error(run(), wanted):.3g}")
                bench.wait()
                first = round(time.perf_counter() - started, 2)
                bench.say(**what, first=first, **bench.seconds(run, 5), forecast=forecast, error=error)


def raise_if_degraded(field: str, reason: Fact) -> None:
    """Raise if an option cannot be used."""
    raise RuntimeError(f"{field}: {reason}")


@torch.inference_mode()
def by_diffusers(module: Any, latents: torch.Tensor) -> list[torch.Tensor]:
    """Decode as `WanPipeline` does; frames are copied from the device as bytes."""
    frames = module.decode(latents.to(module.dtype), return_dict=False)[0][0].permute(1, 2, 3, 0).float()
    return [((frames + 1) * 127.5).round().to(torch.uint8).cpu()]


def decoded(decoder: PyTorchVideoDecoder, latents: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """Decode as a job does; frames are copied from the device as bytes."""
    raw = (latents - decoder._mean) / decoder._std
    return list(decode(decoder, raw, chunk, Cancel()))


def small(bench: Bench) -> None:
    """Measure a call of the shipped model: kernel launches, CUDA graphs, paired passes, compilation."""
    spec = find("diorama", Path("none"))
    plan = tiny_plan(spec, Path("x.mp4"), width=192, height=112, frames=33)
    plan = plan.replace(components={n: p.replace(device=bench.device) for n, p in plan.components.items()})
    generator = torch.Generator(bench.device).manual_seed(4)
    latents = torch.randn(plan.latent_shape, device=bench.device, generator=generator)
    shape = (2, 1, TEXT_TOKENS, spec.transformer.text_dim)
    # The object caches text projections, as in a job.
    texts = list(torch.randn(shape, device=bench.device, generator=generator))
    timestep = torch.tensor(500.0, device=bench.device)
    variants = {
        "eager": EAGER,
        "text": Speed(text_kept=True),
        "paired": Speed(text_kept=True, paired=True),
        "graphed": Speed(text_kept=True, graphed=True),
        "graphed-paired": Speed(text_kept=True, graphed=True, paired=True),
        "compiled": Speed(text_kept=True, compiled=True),
        "compiled-graphed-paired": Speed(text_kept=True, compiled=True, graphed=True, paired=True, fused=True),
    }
    wanted = None
    for name, speed in variants.items():
        if not bench.cuda and speed.graphed:
            continue
        with bench.trying(part="small", variant=name), Residency() as residency:
            job = Alone(plan.replace(speed=speed))
            with residency.denoiser(spec, job, "transformer") as denoiser, full_float32(latents.device):

                def run() -> torch.Tensor:
                    if denoiser.pairs:
                        given = dict(zip((PROMPTED, UNPROMPTED), texts, strict=True))
                        return torch.cat(tuple(denoiser.together(latents, timestep, given)))
                    # A graph's result is written over by the next call of the same text.
                    return torch.cat([denoiser(latents, timestep, text).clone() for text in texts])

                for _ in range(3):
                    got = run()
                if job.fallen:
                    raise RuntimeError(str(job.fallen))
                wanted = got if wanted is None else wanted
                found = bench.seconds(run, 20)
                bench.say(part="small", variant=name, **found, error=relative_error(got, wanted))


def profile(bench: Bench, name: str, run: Callable[[], object], say: dict[str, Any]) -> None:
    """Profile one call: write the table to a file and report seconds by kind of kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        run()
        bench.wait()
    averages = found.key_averages()
    key = "self_cuda_time_total" if bench.cuda else "self_cpu_time_total"
    with contextlib.suppress(Exception):
        table = averages.table(sort_by=key.replace("cuda", "device") if bench.cuda else key, row_limit=40)
        (bench.out / f"profile-{name}.txt").write_text(table, encoding="utf-8")
    kinds: dict[str, float] = {}
    top: list[tuple[str, float, int]] = []
    for entry in averages:
        seconds = getattr(entry, "self_device_time_total", 0.0) if bench.cuda else entry.self_cpu_time_total
        kernel = not bench.cuda or str(getattr(entry, "device_type", "")).endswith("CUDA")
        if not seconds or not kernel:
            continue
        kinds[kind_of(entry.key)] = kinds.get(kind_of(entry.key), 0.0) + seconds / 1e6
        top.append((entry.key[:90], round(seconds / 1e6, 4), entry.count))
    top.sort(key=lambda one: -one[1])
    bench.say(**say, profile=name, kinds={k: round(s, 4) for k, s in kinds.items()}, top=top[:15])


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    low = kernel.lower()
    # Named after all that they were made of, products and attention before and after them too.
    if low.startswith(("triton_poi", "triton_red", "triton_per")):
        return "fused by Inductor"
    if any(word in low for word in ("sdpa", "flash", "fmha", "attention", "mha")):
        return "attention"
    if any(word in low for word in ("conv", "implicit", "fprop")):
        return "convolutions"
    if any(word in low for word in ("gemm", "nvjet", "cutlass", "matmul", "_mm", "addmm", "cublas")):
        return "products"
    return "fused by Inductor" if "triton" in low else "other"


PARTS: dict[str, Callable[[Bench], None]] = {
    "attention": attentions,
    "transformer": transformer,
    "vae": vae,
    "vae-encoder": vae_encoder,
    "small": small,
    "hunyuan-video": hunyuan_video,
    "framepack": framepack,
}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--size", default="480p", choices=["480p", "720p"])
    parser.add_argument("--variants", default="", help=f"of diffusers, {', '.join(VARIANTS)}")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--reference-blocks", type=int, default=4, help="0 measures no errors")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the VAE: bfloat16, float16, float32")
    parser.add_argument("--images", action="store_true", help="also the transformer of I2V-A14B")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    bench = Bench(parser.parse_args())
    if bench.cuda:
        torch.cuda.set_device(bench.device)
        bench.say(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    try:
        for name in bench.arguments.parts:
            with bench.trying(part=name):
                PARTS[name](bench)
    except NoTimeError as error:
        bench.say(left_out=f"{error} and what follows")


if __name__ == "__main__":
    main()
