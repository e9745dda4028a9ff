"""LTX-2's transformer on a GPU equals diffusers': with Triton's kernels, compiled, and with FP8 weights."""

import copy
import itertools
from typing import Any

import pytest
import torch

from runtime.core.plan import EAGER, Speed
from runtime.engines.reference import full_float32
from runtime.execution.attention import problem
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.streams import Streams
from runtime.families.ltx2.spec import TransformerSpec
from runtime.families.ltx2.transformer import row_calls
from runtime.models import row_operations
from runtime.models.quantization import FP8, diffusers_config, install_fp8_linear, is_quantized
from tests.families.ltx2.test_transformer import PASSES, SKIPPED, TIMES, Inputs, by_diffusers, error_of, inputs, made
from tests.families.ltx2.test_transformer import random_module as tiny_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
DEVICE = torch.device("cuda:0")
# 2,240 tokens, so that attention in FP8 is used.
STREAMS = Streams((1, 16, 5, 16, 28), (1, 4, 30, 4), 24.0)
LATER = {"cross_attn_mod": True, "audio_cross_attn_mod": True, "gated_attn": True, "audio_gated_attn": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "interleaved": {"rope_type": "interleaved"},
    "split": {"rope_type": "split"},
    "later": {"rope_type": "split", "use_prompt_embeddings": False, **LATER},
}
SPEEDS = {
    "plain": EAGER,
    "fused": Speed(fused=True, text_kept=True),
    "compiled": Speed(compiled=True, fused=True, text_kept=True),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails is an error."""

    class Failed(list[str]):
        def append(self, item: str) -> None:
            raise AssertionError(item)

    monkeypatch.setattr(row_operations, "_FAILED", Failed())


def module_of(name: str) -> Any:
    """Return a small random transformer on the GPU, with heads of 128 and 64 channels as the published models'."""
    torch.manual_seed(1)
    sizes = {
        "attention_head_dim": 128,
        "cross_attention_dim": 256,
        "audio_attention_head_dim": 64,
        "audio_cross_attention_dim": 128,
        "perturbed_attn": True,
    }
    return tiny_module(**sizes, **CONFIGS[name]).to(DEVICE)


def given_to(module: Any, seed: int = 1, streams: Streams = STREAMS) -> Inputs:
    return Inputs(*(tensor.to(DEVICE) for tensor in inputs(module, streams, seed)))


def rounded(module: Any) -> Any:
    """Return a module in bfloat16 with the blocks' weights in FP8, as a job quantizes them."""
    quantize = pytest.importorskip("torchao.quantization").quantize_
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that computes in FP8")
    low = module.to(torch.bfloat16)
    quantize(low.transformer_blocks, diffusers_config(FP8, torch.bfloat16).get_apply_tensor_subclass())
    install_fp8_linear(low)
    assert is_quantized(low.transformer_blocks[0].attn1.to_q.weight)
    return low


def skip_without(attention: str) -> None:
    why = problem(attention, "cuda:0", torch.bfloat16, 128)
    if why is not None:
        pytest.skip(str(why))


def raise_if_degraded(field: str, reason: object) -> None:
    raise AssertionError(field, reason)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_passes_equal_diffusers(name: str, speed: str) -> None:
    module = module_of(name)
    reference, low = copy.deepcopy(module), copy.deepcopy(module).to(torch.bfloat16)
    given = given_to(module)
    with full_float32(DEVICE):
        for case, times in TIMES.items():
            for which in PASSES:
                wanted = by_diffusers(reference, given, times.to(DEVICE), which, STREAMS)
                for one, most in ((module, 2e-5), (low, 0.02)):
                    denoiser = made(one, EAGER, STREAMS)
                    denoiser.compute(SPEEDS[speed], raise_if_degraded)
                    got = denoiser(given.latents, times.to(DEVICE), given.text, which)
                    assert error_of(got, wanted, STREAMS) < most, (case, which, one.dtype)


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["split", "later"])
def test_kernels_compiled_ahead_are_those_of_all_passes(name: str, times: str, weights: str) -> None:
    from runtime.models import row_kernels  # needs Triton

    module = module_of(name)
    module, config = rounded(module) if weights == "fp8" else module.to(torch.bfloat16), module.config
    names = ("num_layers", "num_attention_heads", "attention_head_dim", "in_channels")
    sizes = TransformerSpec(
        **{name: config[name] for name in names},
        text_dim=config.caption_channels,
        sound_heads=config.audio_num_attention_heads,
        sound_head_dim=config.audio_attention_head_dim,
        sound_channels=config.audio_in_channels,
        sound_text_dim=config.caption_channels,
        modulated_text=config.cross_attn_mod,
        keeps_text=not config.cross_attn_mod,
        gated=config.gated_attn,
        splits_heads=True,
        projects_text=config.use_prompt_embeddings,
    )
    kinds = ("add_norms", "norm_rotate", "quantize")
    kernels = [getattr(row_kernels, f"_{kind}_kernel") for kind in kinds]

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    timesteps, is_rounded = TIMES[times].numel(), weights == "fp8"
    calls = row_calls(sizes, torch.bfloat16, "cuda:0", timesteps=timesteps, fused=True, rounded=is_rounded)
    row_operations.compile_kernels(calls, "cuda:0")
    denoiser, given, before = made(module, EAGER, STREAMS), given_to(module), compiled()
    denoiser.compute(Speed(fused=True), raise_if_degraded)
    for which in PASSES:
        denoiser(given.latents, TIMES[times].to(DEVICE), given.text, which)
    assert min(before) > 0 or not is_rounded
    assert compiled() == before


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["native", "fp8"])
def test_passes_in_fp8_are_near_diffusers(attention: str, *, compiled: bool) -> None:
    skip_without(attention)
    module = module_of("split")
    given, times = given_to(module), TIMES["text"].to(DEVICE)
    with full_float32(DEVICE):
        wanted = by_diffusers(module, given, times, streams=STREAMS)
    low = rounded(module)
    denoiser = made(low, EAGER, STREAMS)
    denoiser.compute(Speed(attention=attention, compiled=compiled, text_kept=True), raise_if_degraded)
    for _ in range(2):
        got = denoiser(given.latents, times, given.text)
        assert 1e-3 < error_of(got, wanted, STREAMS) < 0.1


@pytest.mark.parametrize(
    ("config", "weights", "attention"),
    [
        ("split", "bfloat16", "native"),
        ("later", "bfloat16", "flash4"),
        ("split", "fp8", "flash4"),
        ("later", "fp8", "native"),
        ("split", "fp8", "fp8"),
    ],
)
def test_graphs_equal_the_passes_that_they_record(config: str, weights: str, attention: str) -> None:
    skip_without(attention)
    module = module_of(config)
    # Two prompts and a negative prompt, latents of several steps, and another size.
    texts = [given_to(module, seed).text for seed in (1, 2, 3)]
    smaller = Streams((1, 16, 5, 16, 26), (1, 4, 30, 4), 24.0)
    latents = {
        streams: [given_to(module, seed, streams).latents for seed in (4, 5, 6)] for streams in (STREAMS, smaller)
    }
    module = rounded(module) if weights == "fp8" else module.to(torch.bfloat16)
    fused = weights == "bfloat16"
    calls = [
        (streams, step, times + 10 * number, texts[2 if which == UNPROMPTED else prompt], which)
        for streams, prompt, times in (
            (STREAMS, 0, TIMES["text"]),
            (STREAMS, 1, TIMES["text"]),
            (smaller, 1, TIMES["text"]),
            (STREAMS, 0, TIMES["image"]),
        )
        for number, step in enumerate(latents[streams])
        for which in (PROMPTED, UNPROMPTED, *PASSES[1:])
    ]
    results = []
    for graphed in (False, True):
        denoiser = made(module, EAGER, STREAMS)
        speed = Speed(attention=attention, fused=fused, text_kept=config != "later", graphed=graphed)
        denoiser.compute(speed, raise_if_degraded)
        predictions = []
        for streams, step, times, text, which in calls:
            denoiser.see(streams, SKIPPED)
            predictions.append(denoiser(step, times.to(DEVICE), text, which))
        # Only now, so that no result may be overwritten by a later pass.
        results.append([prediction.float().cpu() for prediction in predictions])
    for (streams, *_, which), wanted, got in zip(calls, *results, strict=True):
        assert error_of(got, wanted, streams) < 0.02, which
    for one, other in itertools.pairwise(results[0][:8]):
        assert error_of(one, other, STREAMS) > 0.05
