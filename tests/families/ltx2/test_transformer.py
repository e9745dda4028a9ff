"""LTX-2's transformer equals diffusers' in each version and each kind of pass, however it is computed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor
from torch._dynamo.testing import CompileCounterWithBackend

from runtime.core.plan import EAGER, Speed
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, UNPROMPTED
from runtime.execution.streams import Streams
from runtime.families.ltx2 import transformer
from runtime.families.ltx2.spec import TransformerSpec
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser, fuse, install
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models
from runtime.models.row_operations import add_norms
from runtime.models.spec import ModelSpec
from runtime.planner import memory_model
from tests.planner.test_live_bytes import Counted
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
TEXT_TOKENS = 7
SKIPPED = (1,)
PASSES = (PROMPTED, SKIPPING, ISOLATED)
STREAMS = Streams((1, 16, 3, 4, 6), (1, 4, 9, 4), 24.0)
# A scalar, or the timestep of a given first frame and that of all else.
TIMES = {"text": torch.tensor(700.0), "image": torch.tensor([0.0, 700.0])}
SPEEDS = {
    "plain": EAGER,
    "fused": Speed(fused=True),
    "text kept": Speed(text_kept=True),
    "all": Speed(fused=True, text_kept=True),
}


def load(spec: ModelSpec) -> Any:
    """Return the transformer in float32; its blocks can skip self-attention."""
    module = LTX2VideoTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer").eval()
    for block in module.transformer_blocks:
        block.perturbed_attn = True
        for attention in (block.attn1, block.audio_attn1):
            attention.set_processor(LTX2PerturbedAttnProcessor())
    return module.requires_grad_(False)


class Inputs(NamedTuple):
    """Joined latents, and a text for the video and for the sound in each token."""

    latents: torch.Tensor
    text: torch.Tensor


def inputs(module: Any, streams: Streams = STREAMS, seed: int = 1) -> Inputs:
    """Return seeded inputs."""
    generator, config = torch.Generator().manual_seed(seed), module.config
    widths = (config.cross_attention_dim, config.audio_cross_attention_dim)
    width = 2 * config.caption_channels if config.use_prompt_embeddings else sum(widths)
    joined = streams.join(*(torch.randn(shape, generator=generator) for shape in (streams.video, streams.sound)))
    return Inputs(joined, torch.randn(1, TEXT_TOKENS, width, generator=generator))


@torch.no_grad()
def by_diffusers(
    module: Any,
    given: Inputs,
    times: torch.Tensor,
    which: str = PROMPTED,
    streams: Streams = STREAMS,
    keyframe: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what diffusers' module predicts; with two timesteps, each of the video's tokens has its own.

    Args:
        keyframe: of `streams`, (1, channels, 1, height, width); it follows the clip, and in the result precedes it.
    """
    config, dtype = module.config, module.proj_in.weight.dtype
    video, sound = streams.split(given.latents.to(dtype))
    _, _, frames, height, width = video.shape
    places = module.rope.prepare_video_coords(1, frames, height, width, video.device, fps=streams.fps)
    if keyframe is not None:
        video = torch.cat([video, keyframe], dim=2)
        (number,), last = streams.keyframes, places[:, :, : height * width].clone()
        last[:, 0] = torch.tensor([number, number + 1]) / streams.fps
        places = torch.cat([places, last], dim=2)
    half = config.caption_channels if config.use_prompt_embeddings else config.cross_attention_dim
    text, sound_text = given.text[..., :half], given.text[..., half:]
    *first, time = times.reshape(-1, 1)
    video_times = time
    if first:
        video_times = time.expand(math.prod(video.shape[2:])).clone()[None]
        clean = streams.given if keyframe is None else streams.given - 1
        video_times[:, : clean * height * width] = first[0]
        video_times[:, frames * height * width :] = first[0]
    predicted, predicted_sound = module(
        hidden_states=video.flatten(2).transpose(1, 2),
        audio_hidden_states=sound.transpose(1, 2).flatten(2),
        encoder_hidden_states=text.to(dtype),
        audio_encoder_hidden_states=sound_text.to(dtype),
        timestep=video_times,
        audio_timestep=time,
        sigma=time,
        num_frames=frames,
        height=height,
        width=width,
        fps=streams.fps,
        audio_num_frames=sound.shape[2],
        video_coords=places,
        isolate_modalities=which == ISOLATED,
        spatio_temporal_guidance_blocks=list(SKIPPED) if which == SKIPPING else None,
        use_cross_timestep=bool(config.cross_attn_mod),
        return_dict=False,
    )
    sound_shape = (sound.shape[1], sound.shape[3])
    predicted = predicted.roll(0 if keyframe is None else height * width, dims=1)
    return streams.join(predicted.transpose(1, 2), predicted_sound.unflatten(2, sound_shape).transpose(1, 2))


def made(module: Any, speed: Speed = EAGER, streams: Streams = STREAMS) -> PyTorchStreamDenoiser:
    """Return a denoiser that has seen a clip."""
    denoiser = PyTorchStreamDenoiser(module, speed)
    denoiser.see(streams, SKIPPED)
    return denoiser


def error_of(got: torch.Tensor, wanted: torch.Tensor, streams: Streams = STREAMS) -> float:
    """Return the larger of both streams' relative errors."""
    pairs = zip(streams.split(got.float()), streams.split(wanted.float()), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def kernel_of(plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return what the kernel of an operation is compiled for."""
    if plain is add_norms:
        arguments = [*arguments[:4], arguments[5]]  # without the number of the first tokens

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            apart = value.stride(-2) if value.ndim > 1 and value.shape[-2] > 1 else 0
            return value.dtype, value.shape[-1], apart
        return tuple(map(kind, value)) if isinstance(value, tuple | list) else value

    return plain.__name__, *map(kind, arguments)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_kernels_compiled_ahead_are_those_of_all_passes(
    architecture: str, fused: bool, times: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, called = tiny(architecture), set()
    sizes, module = spec.transformer, load(spec).to(torch.bfloat16)
    assert isinstance(sizes, TransformerSpec)
    denoiser, given = made(module, Speed(fused=fused)), inputs(module)

    def recorded(plain: Callable[..., Any], *arguments: Any, fewest: int | None = None) -> Any:
        # The sound's last norm has too few values for a kernel.
        if fewest == 0 or arguments[0].shape[-1] == sizes.width:
            called.add(kernel_of(plain, arguments))
        return plain(*arguments)

    monkeypatch.setattr(transformer, "computed", recorded)
    for which in PASSES:
        denoiser(given.latents, TIMES[times], given.text, which)
    timesteps = TIMES[times].numel()
    ahead = transformer.row_calls(sizes, torch.bfloat16, "cpu", timesteps=timesteps, fused=fused, rounded=False)
    assert called == {kernel_of(*call) for call in ahead}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_predictions_equal_diffusers(architecture: str, speed: str, times: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    reference, denoiser = load(spec), made(load(spec), SPEEDS[speed])
    given, results = inputs(reference), []
    for which in (*PASSES, PROMPTED):
        results.append(by_diffusers(reference, given, TIMES[times], which))
        assert error_of(denoiser(given.latents, TIMES[times], given.text, which), results[-1]) < 5e-6, which
    assert min(error_of(one, results[0]) for one in results[1:3]) > 1e-3


@pytest.mark.parametrize("speed", ["plain", "all"])
@pytest.mark.parametrize("given_frames", [2, 1])
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_predictions_with_keyframes_equal_diffusers(
    architecture: str, given_frames: int, speed: str, tiny: Tiny
) -> None:
    spec, keyframe = tiny(architecture), torch.randn(1, 16, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    streams = replace(STREAMS, keyframes=(9,), given=given_frames)
    reference, denoiser = load(spec), made(load(spec), SPEEDS[speed], streams)
    given = inputs(reference)
    latents = streams.with_keyframes(given.latents, keyframe)
    assert torch.equal(streams.without_keyframes(latents), given.latents)
    for which in PASSES:
        wanted = by_diffusers(reference, given, TIMES["image"], which, streams, keyframe)
        # Both predict the keyframe too, which guidance rescales with the others.
        assert error_of(denoiser(latents, TIMES["image"], given.text, which), wanted) < 5e-6, which


def test_passes_that_cannot_be_recorded_run_directly(tiny: Tiny) -> None:
    spec, reasons = tiny("ltx-2"), list[tuple[str, str]]()
    reference, denoiser = load(spec), made(load(spec))
    denoiser.compute(Speed(graphed=True, text_kept=True), lambda field, reason: reasons.append((field, reason.code)))
    given = inputs(reference)
    for times in TIMES.values():
        for which in PASSES:
            wanted = by_diffusers(reference, given, times, which)
            assert error_of(denoiser(given.latents, times, given.text, which), wanted) < 5e-6, which
    assert reasons == [("graphed", "execution.graph_capture_failed")]


@pytest.mark.parametrize("rope_type", ["interleaved", "split"])
@pytest.mark.parametrize("heads", [2, 3])
def test_rotations_are_diffusers(rope_type: str, heads: int) -> None:
    torch.manual_seed(3)
    module = random_module(rope_type=rope_type, num_attention_heads=heads, cross_attention_dim=16 * heads)
    given, denoiser = inputs(module), None
    wanted = by_diffusers(module, given, TIMES["text"])
    denoiser = made(module)
    assert error_of(denoiser(given.latents, TIMES["text"], given.text), wanted) < 5e-6
    # Tables follow the size and the rate of frames.
    for streams in (Streams((1, 16, 2, 6, 4), (1, 4, 5, 4), 24.0), Streams((1, 16, 3, 4, 6), (1, 4, 9, 4), 30.0)):
        other = inputs(module, streams)
        denoiser.see(streams, ())
        copy = random_module(rope_type=rope_type, num_attention_heads=heads, cross_attention_dim=16 * heads)
        copy.load_state_dict(module.state_dict())
        got = denoiser(other.latents, TIMES["text"], other.text)
        assert error_of(got, by_diffusers(copy, other, TIMES["text"], streams=streams), streams) < 5e-6


def random_module(**changed: Any) -> Any:
    """Return a tiny transformer with random weights; `changed` are values of its configuration."""
    config: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_in_channels": 16,
        "audio_out_channels": 16,
        "audio_num_attention_heads": changed.get("num_attention_heads", 2),
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 8 * changed.get("num_attention_heads", 2),
        "num_layers": 2,
        "caption_channels": 24,
    }
    return LTX2VideoTransformer3DModel(**config | changed).eval().requires_grad_(False)


def test_text_that_no_timestep_modulates_is_kept() -> None:
    """As in checkpoints with `use_prompt_adaln_single` false."""
    torch.manual_seed(4)
    changed = {"cross_attn_mod": True, "audio_cross_attn_mod": True, "use_prompt_adaln_single": False}
    module = random_module(**changed)
    reference = random_module(**changed)
    reference.load_state_dict(module.state_dict())
    given, denoiser, calls = inputs(module), made(module, Speed(text_kept=True)), []
    for block in module.transformer_blocks:
        block.attn2.to_k.register_forward_hook(lambda *_: calls.append(1))
    for time in (900.0, 300.0):
        times = torch.tensor(time)
        assert error_of(denoiser(given.latents, times, given.text), by_diffusers(reference, given, times)) < 5e-6
    assert len(calls) == len(module.transformer_blocks)


def test_texts_are_distinguished_and_freed(tiny: Tiny) -> None:
    spec = tiny("ltx-2")
    reference, denoiser = load(spec), made(load(spec), Speed(text_kept=True))
    given = inputs(reference)
    texts = [given.text, -given.text, 2 * given.text, given.text]
    for text in texts:
        wanted = by_diffusers(reference, given._replace(text=text), TIMES["text"])
        assert error_of(denoiser(given.latents, TIMES["text"], text), wanted) < 5e-6
    assert len(denoiser._texts) == 2
    denoiser.forget()
    assert not len(denoiser._texts)


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_bfloat16_is_as_close_to_float32_as_diffusers(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    reference, low = load(spec), load(spec).to(torch.bfloat16)
    given = inputs(reference)
    for times in TIMES.values():
        wanted = by_diffusers(reference, given, times)
        theirs = error_of(by_diffusers(load(spec).to(torch.bfloat16), given, times), wanted)
        ours = error_of(made(low)(given.latents, times, given.text), wanted)
        assert ours < min(0.03, 1.2 * theirs)


def test_fused_parts_are_views_and_adapters_are_not_fused(tiny: Tiny) -> None:
    spec = tiny("ltx-2.3")
    module, reference = load(spec), load(spec)
    adapted = module.transformer_blocks[1].attn1
    adapted.to_q = torch.nn.Sequential(adapted.to_q)
    denoiser, given = made(module, Speed(fused=True)), inputs(reference)
    assert not fuse(module)
    block = module.transformer_blocks[0]
    for fused, last in (
        (block.attn1.to_qkv, block.attn1.to_v),
        (block.audio_attn1.to_qkv, block.audio_attn1.to_v),
        (block.audio_to_video_attn.to_kv, block.audio_to_video_attn.to_v),
        (block.video_to_audio_attn.to_kv, block.video_to_audio_attn.to_v),
    ):
        assert last.weight.untyped_storage().data_ptr() == fused.weight.untyped_storage().data_ptr()
        # The pass reads the fused matrix only: without it, the projections' values are lost.
        fused.weight.data = fused.weight.data.clone()
        last.weight.data.zero_()
    assert not hasattr(adapted, "to_qkv")
    wanted = by_diffusers(reference, given, TIMES["text"])
    assert error_of(denoiser(given.latents, TIMES["text"], given.text), wanted) < 5e-6
    # Matrices that the projections are no longer views of are dropped.
    install(module)
    assert not hasattr(block.attn1, "to_qkv")
    assert not hasattr(block.video_to_audio_attn, "to_kv")
    assert error_of(denoiser(given.latents, TIMES["text"], given.text), wanted) > 1e-3


def test_step_caches_reuse_residuals_of_both_streams(tiny: Tiny) -> None:
    spec = tiny("ltx-2")
    denoiser = made(load(spec))
    given = inputs(load(spec))
    other = inputs(load(spec), seed=2)
    run = partial(denoiser, timestep=TIMES["text"], text_embeds=given.text)
    exact = run(given.latents)
    calls: list[int] = []
    denoiser._module.transformer_blocks[1].ff.net[2].register_forward_hook(lambda *_: calls.append(1))

    def latents(which: int) -> torch.Tensor:
        """Return latents of which one stream differs from `given`."""
        parts = [list(STREAMS.split(one.latents)) for one in (given, other)]
        parts[0][which] = parts[1][which]
        return STREAMS.join(*parts[0])

    with denoiser.caching("first-block:0.1"):
        denoiser.begin_step(fresh=True, exact=True)
        assert error_of(run(given.latents), exact) < 5e-6
        assert error_of(run(given.latents), exact) < 5e-6
        assert len(calls) == 1, "nothing changed"
        run(given.latents, which=UNPROMPTED)
        assert len(calls) == 2, "each pass has its own cache"
        for which in (0, 1):
            denoiser.begin_step(fresh=True, exact=True)
            run(given.latents)
            count = len(calls)
            assert error_of(run(latents(which)), made(load(spec))(latents(which), TIMES["text"], given.text)) < 5e-6
            assert len(calls) == count + 1, "one stream changed"
    with denoiser.caching("taylorseer:2"):
        denoiser.begin_step(fresh=True, exact=True)
        results = [run(given.latents * scale) for scale in (1.0, 1.0, 1.0)]
        assert all(error_of(one, exact) < 5e-6 for one in results)
        count = len(calls)
        run(given.latents)
        assert len(calls) == count + 1
    assert error_of(run(given.latents), exact) < 5e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
def test_live_bytes_of_a_pass_are_within_the_forecast(
    name: str, fused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With two blocks at full size, and with Triton's kernels, which allocate their results only."""

    def by_kernels(plain: Any, x: torch.Tensor, *arguments: Any, fewest: int | None = None) -> Any:
        del fewest

        def result() -> torch.Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)

        if plain is not add_norms:
            return result()
        y, _, modulations, *_ = arguments
        return x if y is None else result(), *(result() for _ in modulations)

    monkeypatch.setattr(transformer, "computed", by_kernels)
    for name_of_kernels in ("attention", "exact_attention"):
        monkeypatch.setattr(transformer, name_of_kernels, lambda _: lambda q, k, v: torch.empty_like(q))
    spec = look_up(name, tmp_path)
    frames, height, width = 121, 704, 1216
    assert spec.sound_latents is not None
    streams = Streams(spec.latent_shape(frames, height, width), spec.sound_latents.shape(frames, 24), 24.0)
    (config,) = (model.configs["transformer"] for model in published_models("ltx2") if model.name == name)
    with torch.device("meta"):
        module = LTX2VideoTransformer3DModel(**{**config, "num_layers": 2}).to(torch.bfloat16).requires_grad_(False)
        times = torch.empty(1)
    given = Inputs(*(tensor.to("meta") for tensor in inputs(module, streams)))
    denoiser = made(module, Speed(fused=fused), streams)
    for block in module.transformer_blocks:
        block.attend = block.attend_other
    with Counted([*module.parameters(), *module.buffers(), *given, times]) as counted:
        denoiser(given.latents, times, given.text)
    forecast = memory_model.denoise_bytes(spec, spec.tokens(frames, height, width), "bfloat16")
    assert 0.85 * forecast <= counted.peak <= 1.01 * forecast


# Inductor's C++ for such blocks is that of Wan's, which tests/execution and tests/pipeline compile.
@pytest.mark.slow
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_traced_blocks_equal_diffusers_and_are_traced_once_for_each_kind_of_pass(
    architecture: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, counter, compiler = tiny(architecture), CompileCounterWithBackend("aot_eager"), torch.compile
    reference, module = load(spec), load(spec)
    assert len(module.transformer_blocks) > 1

    def compile_with_counter(function: Any, *, options: Any, **settings: Any) -> Any:
        del options  # Inductor's
        return compiler(function, backend=counter, **settings)

    monkeypatch.setattr(torch, "compile", compile_with_counter)
    given, degraded, denoiser = inputs(module), [], made(module)
    denoiser.compute(Speed(compiled=True, fused=True, text_kept=True), lambda *what: degraded.append(what))
    discard_compiled_code()

    def compare(times: torch.Tensor, which: str) -> None:
        wanted = by_diffusers(reference, given, times, which)
        assert error_of(denoiser(given.latents, times, given.text, which), wanted) < 5e-6, which

    # The last block but one skips its self-attention in one of the kinds.
    for count, which in enumerate(PASSES, 1):
        compare(TIMES["text"], which)
        assert counter.frame_count == count
    seconds = denoiser.compile_seconds
    for times in (TIMES["text"], torch.tensor(100.0)):
        for which in (*PASSES, UNPROMPTED):
            compare(times, which)
    assert (counter.frame_count, degraded) == (len(PASSES), [])
    assert 0 < denoiser.compile_seconds <= seconds
    # So is a first frame with a timestep of its own.
    for _ in range(2):
        compare(TIMES["image"], PROMPTED)
    assert (counter.frame_count, degraded) == (len(PASSES) + 1, [])
    discard_compiled_code()
