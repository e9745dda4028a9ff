"""Reading LTX-2's folders and its published models: sizes, weights, operations and refusals."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from diffusers.quantizers.torchao.torchao_quantizer import TorchAoHfQuantizer
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3Config

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.estimates import MemoryStrategy
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.streams import Streams
from runtime.families.ltx2.components import Vocoder
from runtime.families.ltx2.conditioning import GemmaStates
from runtime.families.ltx2.spec import DISTILLED_LEVELS
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.models.catalogue import look_up
from runtime.models.images import find_image
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import ModelSpec, attention_flops
from runtime.models.timesteps import NoiseLevels
from runtime.planner import memory_model
from runtime.planner.clip import like_image
from runtime.planner.resolve import PlanningContext, resolve
from tests.image_files import saved
from tests.planner.test_execution_options import FLASH4, gpu_machine, plan
from tests.planner.test_memory_model import workload
from tests.plans import GPU_PACKAGES, gpu, machine
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
LARGE = {"width": 1216, "height": 704, "frames": 241}
KERNELS = (("nvidia-cudnn-frontend", "1.0"), ("comfy-kitchen", "0.2"))
PUBLISHED = {model.name: model for model in published_models("ltx2")}


def test_a_folder_is_read(tiny: Tiny) -> None:
    spec = tiny("ltx-2.3")
    assert spec.strides == (16, 16)
    assert tiny("ltx-2").strides == (32, 32)
    assert spec.latent_shape(17, 64, 96) == (1, 16, 3, 4, 6)
    assert spec.sound is not None
    assert spec.sound.latents is not None
    assert spec.sound.latents.shape(121, 24) == (1, 4, 126, 4)
    assert (spec.sound.rate, spec.sound.channels, tiny("ltx-2").sound.rate) == (48_000, 2, 24_000)  # type: ignore[union-attr]
    assert (spec.guidance_passes, spec.defaults.steps, tiny("ltx-2").defaults.steps) == (4, 30, 40)


def test_a_frame_that_is_reflected_has_two_latents_a_side(tiny: Tiny, tmp_path: Path) -> None:
    least = {name: look_up(name, tmp_path).least_size for name in ("ltx-2", "ltx-2.3")}
    assert least == {"ltx-2": (64, 64), "ltx-2.3": (32, 32)}
    spec = tiny("ltx-2")
    image = find_image(str(saved(tmp_path / "image.png", 640, 80)), "image", None, keep=False)
    assert spec.least_size == (64, 64)
    assert like_image(spec, image, 4_096) == (192, 64)


def test_the_shift_follows_from_the_number_of_tokens(tiny: Tiny) -> None:
    by_size = tiny("ltx-2").noise.by_size
    assert by_size is not None
    for tokens in (1, 1024, 6144, 40_000):
        assert by_size.logarithm(tokens) == pytest.approx(calculate_shift(tokens, 1024, 4096, 0.95, 2.05))


def test_other_numbers_of_steps_than_a_model_was_distilled_for_are_between_its_levels() -> None:
    noise = NoiseLevels(levels=DISTILLED_LEVELS, spread="linear")
    assert noise.sigmas(8) == pytest.approx(DISTILLED_LEVELS)
    for steps in (1, 3, 4, 13):
        sigmas = noise.sigmas(steps)
        assert sigmas is not None
        assert sigmas[0] == 1.0
        assert len(sigmas) == steps
        assert all(before > after > 0 for before, after in zip(sigmas, [*sigmas[1:], 1e-9], strict=True))
    assert noise.sigmas(4) == pytest.approx(DISTILLED_LEVELS[::2])


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_operations_are_those_of_the_modules(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    sound = spec.sound_latents
    assert sound is not None

    def counted(call: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        return counter.get_total_flops()

    def loaded(kind: Any, folder: str) -> Any:
        return kind.from_pretrained(spec.directory, subfolder=folder).eval()

    vae = loaded(AutoencoderKLLTX2Video, "vae")
    frames, height, width = 17, 4 * spec.strides[1], 6 * spec.strides[0]
    latents = torch.randn(spec.latent_shape(frames, height, width))
    assert counted(lambda: vae.decoder(latents)) == pytest.approx(spec.vae.decode_flops(frames, height, width), rel=0.1)
    image = torch.randn(1, 3, 1, height, width)
    assert spec.image_input is not None
    assert counted(lambda: vae.encoder(image)) == pytest.approx(
        spec.image_input.vae.encode_flops(1, height, width), rel=0.1
    )
    audio_vae = loaded(AutoencoderKLLTX2Audio, "audio_vae")
    count = 40
    values = torch.randn(1, sound.channels, count, sound.bins)
    assert counted(lambda: audio_vae.decoder(values)) == pytest.approx(count * sound.parts["audio_vae"].flops, rel=0.2)
    vocoder = Vocoder.from_config(json.loads((spec.directory / "vocoder" / "config.json").read_text())).eval()
    spectrum = torch.randn(1, 2, 4 * count, 4 * sound.bins)
    assert counted(lambda: vocoder(spectrum)) == pytest.approx(count * sound.parts["vocoder"].flops, rel=0.35)
    denoiser = PyTorchStreamDenoiser(loaded(LTX2VideoTransformer3DModel, "transformer"))
    streams = Streams((1, 16, 8, 12, 12), (1, 4, 8, 4), 24.0)
    denoiser.see(streams, ())
    transformer, text = spec.transformer, 64
    embeds = torch.randn(1, text, transformer.text_dim + transformer.sound_text_dim)  # type: ignore[attr-defined]
    joined = streams.join(torch.randn(streams.video), torch.randn(streams.sound))
    tokens = math.prod(streams.video[2:])
    # PyTorch does not count attention on a CPU.
    attended = transformer.num_layers * (attention_flops(spec, tokens) + 4 * tokens * text * transformer.width)
    assert counted(lambda: denoiser(joined, torch.tensor(500.0), embeds)) == pytest.approx(
        transformer.forward_flops(tokens, text) - attended, rel=0.15
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_those_of_the_architectures(name: str) -> None:
    configs = PUBLISHED[name].configs
    with torch.device("meta"):
        modules = {
            "text_encoder": GemmaStates(
                Gemma3Config(text_config=configs["text_encoder"]["text_config"], vision_config={"num_hidden_layers": 1})
            ),
            "connectors": LTX2TextConnectors(**configs["connectors"]),
            "vae_encoder": AutoencoderKLLTX2Video(**configs["vae"]),
            "transformer": LTX2VideoTransformer3DModel(**configs["transformer"]),
            "vae": AutoencoderKLLTX2Video(**configs["vae"]),
            "audio_vae": AutoencoderKLLTX2Audio(**configs["audio_vae"]),
            "vocoder": Vocoder.from_config(configs["vocoder"]),
        }
        if "latent_upsampler" in configs:
            modules["latent_upsampler"] = LTX2LatentUpsamplerModel(**configs["latent_upsampler"])
    counted = {part: sum(value.numel() for value in module.state_dict().values()) for part, module in modules.items()}
    assert counted == PUBLISHED[name].parameters


def test_published_models_are_planned_with_before_their_weights_are_here() -> None:
    for name, model in PUBLISHED.items():
        spec = look_up(name, Path("none"))
        assert (spec.is_downloaded, spec.license) == (False, "ltx-2-community-license-agreement")
        assert model.describes(spec)
        distilled = name.endswith("distilled")
        assert (spec.defaults.steps == 8, spec.defaults.guidance_scale == 1.0) == (distilled, distilled)
        assert (spec.noise.by_size is None) == distilled
        assert spec.noise.least_steps == (1 if distilled else 2)
        # Its repository has no upsampler.
        assert (spec.refinement is None) == (name == "ltx-2.3")
        assert spec.refinement is None or spec.refinement.distilled == distilled
    assert look_up("Lightricks/LTX-2.3", Path("none")).name == "ltx-2.3"


@pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
def test_the_blocks_linear_layers_are_quantized_and_no_others(name: str) -> None:
    spec = look_up(name, Path("none"))
    with torch.device("meta"):
        module = LTX2VideoTransformer3DModel(**PUBLISHED[name].configs["transformer"])
    quantizer = SimpleNamespace(modules_to_not_convert=spec.unquantized, offload=False)
    quantized = [
        (key, weight.numel())
        for key, weight in module.named_parameters()
        if TorchAoHfQuantizer.check_if_quantized_param(quantizer, module, weight, key, {}, param_device="cuda")
    ]
    assert all(key.startswith("transformer_blocks.") for key, _ in quantized)
    assert sum(count for _, count in quantized) == pytest.approx(spec.transformer.block_parameters, rel=0.002)


def test_offloaded_parts_need_their_own_largest_layers() -> None:
    spec = look_up("ltx-2.3", Path("none")).for_text()
    held = workload(spec, (768, 512, 121), dict.fromkeys(spec.component_names, "bfloat16"))
    stages = {stage.component: stage for stage in memory_model.stages(held, MemoryStrategy(offload="group"))}
    # Gemma's embedding.
    assert stages["text_encoder"].weights_bytes == 2 * 262_208 * 3840
    blocks = 2 * 2 * spec.transformer.largest_block_parameters
    rest = 2 * (spec.parameters["transformer"] - spec.transformer.block_parameters)
    assert stages["transformer"].weights_bytes == pytest.approx(blocks + rest, rel=0.01)
    assert stages["connectors"].weights_bytes == 2 * spec.parameters["connectors"]
    assert [stages[name].stage for name in ("connectors", "audio_vae", "vocoder")] == ["encode", "decode", "decode"]


def planned(name: str, gib: float, ram_gib: float = 100, **fields: object) -> ExecutionPlan:
    """Return the plan of a published model's default clip on a GPU with so much free memory."""
    here = machine(ram_free_gib=ram_gib, gpu=gpu(free_gib=gib), torch_cuda="13.0", packages=GPU_PACKAGES)
    spec = look_up(name, Path("none")).for_text()
    request = GenerationRequest.from_mapping({"prompt": "a boat", "model": name, **fields})
    return resolve(request, spec, PlanningContext(here, Path("x.mp4")))


def test_a_clip_is_decoded_in_one_call_on_any_gpu() -> None:
    for gib in (9, 24, 80):
        plan = planned("ltx-2.3", gib)
        assert plan.strategy.decode_chunk == 16
        assert all(forecast.strategy.decode_chunk == 16 for forecast in plan.strategies)
    # Where it does not fit whole, in tiles.
    assert planned("ltx-2.3", 80).strategy.decode_tile is None
    assert planned("ltx-2.3", 9, width=1536, height=1024).strategy.decode_tile is not None


def test_with_64_gb_of_ram_gemma_is_freed_before_the_transformer_is_loaded() -> None:
    roomy, short = (planned("ltx-2.3", 22, ram_gib) for ram_gib in (100, 58))
    assert (roomy.strategy.offload, roomy.strategy.freed) == ("group", ())
    assert (short.strategy.offload, short.strategy.freed) == ("group", ("text_encoder", "connectors"))
    assert short.memory_bytes == roomy.memory_bytes
    freed = sum(roomy.components[name].weights_bytes for name in short.strategy.freed)
    assert roomy.forecast.ram_bytes - short.forecast.ram_bytes == freed


def test_a_plan_has_what_the_family_implements() -> None:
    plan = planned("ltx-2.3", 80)
    speed = plan.speed
    # The text of LTX-2.3 is modulated by the timestep, that of LTX-2 is not.
    assert (speed.text_kept, speed.paired, speed.graphed, speed.fused) == (False, False, True, True)
    kept = planned("ltx-2", 200).speed
    assert kept.text_kept
    values = 2 * 48 * 1024 * (4096 + 2048)
    assert kept.text_bytes == 2 * 2 * values
    assert {name: part.dtype for name, part in plan.components.items()} == {
        **dict.fromkeys(("text_encoder", "connectors", "transformer", "vae"), "bfloat16"),
        **dict.fromkeys(("audio_vae", "vocoder"), "float32"),
    }
    assert {name: part.backend for name, part in plan.components.items()} == dict.fromkeys(plan.components, "pytorch")
    assert (plan.sound_shape, plan.guidance_passes) == ((1, 8, 126, 16), 4)
    # Each step has four passes, and those of a distilled model one.
    passes = {name: planned(name, 80) for name in ("ltx-2.3", "ltx-2.3-distilled")}
    seconds = {name: plan.seconds["denoise"].likely for name, plan in passes.items()}
    assert seconds["ltx-2.3"] == pytest.approx(30 * 4 / 8 * seconds["ltx-2.3-distilled"])
    assert passes["ltx-2.3"].step_flops == pytest.approx(4 * passes["ltx-2.3-distilled"].step_flops)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"attention": "flash4", "fused": True}),
        (LARGE, {"attention": "flash4", "compiled": False}),
        ({"compile": "always", "attention": "cudnn"}, {"attention": "cudnn", "compiled": True}),
        ({"attention": "fp8", "quantization": "fp8"}, {"attention": "fp8", "fused": False}),
        (LARGE | {"attention": "sol"}, {"attention": "flash4", "sparse_tau": 1.0}),
        ({"compile": "always", "quantization": "fp8"}, {"compiled": True, "fused": False}),
        ({"step_cache": "first-block"}, {"fused": True}),
    ],
)
def test_options_are_planned_as_for_other_families(fields: dict[str, object], expected: dict[str, object]) -> None:
    spec, on = look_up("ltx-2.3", Path("none")).for_text(), gpu_machine(packages=(*FLASH4, *KERNELS))
    made = plan(spec, on, **fields)
    assert {name: getattr(made.speed, name) for name in expected} == expected
    slower = plan(spec, on, **fields | {"attention": "native", "compile": "never", "quantization": "none"})
    assert made.seconds["denoise"].likely < slower.seconds["denoise"].likely


@pytest.mark.parametrize(
    ("fields", "graphed"),
    [
        ({}, True),
        ({"quantization": "fp8"}, True),
        ({"attention": "fp8", "quantization": "fp8"}, True),
        ({"width": 1216, "height": 704, "frames": 121}, True),
        ({"guidance_scale": 1.0}, True),
        ({"compile": "never"}, True),
        (LARGE, False),
        ({"compile": "always"}, False),
        ({"quantization": "bnb-8bit"}, False),
        ({"step_cache": "first-block"}, False),
        ({"offload": "model"}, False),
        ({"offload": "group"}, False),
    ],
)
def test_passes_are_graphs_instead_of_compiled(fields: dict[str, object], *, graphed: bool) -> None:
    packages = (*FLASH4, *KERNELS, ("bitsandbytes", "1"))
    spec, on = look_up("ltx-2.3", Path("none")).for_text(), gpu_machine(packages=packages)
    speed = plan(spec, on, **fields).speed
    assert speed.graphed == graphed
    assert not (speed.graphed and (speed.compiled or speed.compiled_later))
    if graphed:
        reason = "planner.not_compiled_asked" if "compile" in fields else "planner.not_compiled_graphed"
        assert {fact.code for fact in speed.reasons} >= {"planner.graphed", reason}


def test_a_graph_takes_another_working_set() -> None:
    spec, on = look_up("ltx-2.3", Path("none")).for_text(), gpu_machine(packages=(*FLASH4, *KERNELS))
    plans = [plan(spec, on, compile=mode) for mode in ("never", "always")]
    assert [made.speed.graphed for made in plans] == [True, False]
    working = [next(stage.working_bytes for stage in made.memory if stage.component == "transformer") for made in plans]
    # The text of LTX-2.3 is not kept.
    assert working[0] == 2 * working[1]
    # A guidance cache leaves out whole passes, a step cache parts of them.
    cached: list[dict[str, Any]] = [{"guidance_cache": "0.1"}, {"step_cache": "first-block"}]
    assert [plan(spec, on, compile="never", **fields).speed.graphed for fields in cached] == [True, False]
    # Where there is no memory for it, the plan is the same without a graph.
    tight = plan(spec, gpu_machine(gib=41, packages=(*FLASH4, *KERNELS)), quantization="none")
    assert (tight.speed.graphed, tight.strategy.offload) == (False, "none")


@pytest.mark.parametrize(("step_cache", "tensors"), [("first-block:0.1", 3), ("taylorseer:2", 4)])
def test_step_caches_store_tensors_for_each_pass(step_cache: str, tensors: int) -> None:
    spec = look_up("ltx-2.3", Path("none"))
    assert memory_model.cached_tensors(spec, step_cache, 3.0, None) == (4, tensors)
    assert memory_model.cached_tensors(spec, step_cache, 1.0, None) == (1, tensors)


def test_options_that_are_not_there_yet_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        planned("ltx-2.3", 130, step_cache="magcache")
    assert caught.value.code == "planner.no_mag_ratios"


def test_a_guidance_cache_can_leave_out_three_of_four_passes_in_every_other_step() -> None:
    plain, cached = (planned("ltx-2.3", 130, guidance_cache=cache) for cache in ("off", "0.1"))
    before, after = plain.seconds["denoise"], cached.seconds["denoise"]
    assert (after.low, after.high) == pytest.approx((0.625 * before.low, before.high))
    assert 0.75 * before.likely < after.likely < 0.85 * before.likely
    assert "planner.guidance_cached" in {fact.code for fact in cached.components["transformer"].reasons}


def test_a_first_frame_takes_no_more_memory_although_it_has_a_timestep_of_its_own(tmp_path: Path) -> None:
    spec = look_up("ltx-2.3", Path("none"))
    image = find_image(str(saved(tmp_path / "image.png")), "image", None, keep=False)
    plain = memory_model.denoise_bytes(spec.for_text(), 6144, "bfloat16")
    assert memory_model.denoise_bytes(replace(spec, image=image), 6144, "bfloat16") == plain


@pytest.mark.parametrize(
    ("component", "name", "value"),
    [
        ("transformer", "num_layers", 10_000),
        ("transformer", "num_layers", None),
        ("transformer", "patch_size", 2),
        ("transformer", "norm_elementwise_affine", True),
        ("transformer", "cross_attention_dim", 48),
        ("transformer", "in_channels", 8),
        ("transformer", "audio_in_channels", 8),
        ("connectors", "video_connector_num_learnable_registers", None),
        ("connectors", "audio_connector_num_learnable_registers", 100),
        ("connectors", "video_connector_attention_head_dim", 8),
        ("connectors", "text_proj_in_factor", 3),
        ("vae", "timestep_conditioning", True),
        ("vae", "patch_size_t", 2),
        ("vae", "upsample_type", ["spiral"] * 4),
        ("audio_vae", "mel_bins", 32),
        ("vocoder", "in_channels", 16),
        ("vocoder", "_class_name", "LTX3Vocoder"),
        ("text_encoder", "text_config", {}),
        ("text_encoder", "model_type", "gemma4_unified"),
        ("scheduler", "_class_name", "UniPCMultistepScheduler"),
        ("scheduler", "max_image_seq_len", 1024),
        ("scheduler", "base_shift", "much"),
    ],
)
def test_a_wrong_configuration_is_refused(component: str, name: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("ltx-2.3").directory, folder)
    read_spec(folder, "model")
    path = folder / component / ("scheduler_config.json" if component == "scheduler" else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ModelError) as caught:
        read_spec(folder, "model")
    code = "model.text_encoder_unknown" if name == "model_type" else "model.config_invalid"
    assert caught.value.code in {code, "model.channels_differ"}


@pytest.mark.parametrize(
    "component", ["text_encoder", "tokenizer", "connectors", "transformer", "vae", "audio_vae", "vocoder"]
)
def test_a_missing_component_is_refused(component: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("ltx-2").directory, folder)
    shutil.rmtree(folder / component)
    with pytest.raises(ModelError):
        read_spec(folder, "model")


def test_a_configuration_without_kinds_of_enlargement_is_ltx_2s(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("ltx-2").directory, folder)
    path = folder / "vae" / "config.json"
    config = json.loads(path.read_text())
    del config["upsample_type"]
    path.write_text(json.dumps(config))
    assert read_spec(folder, "model").vae == tiny("ltx-2").vae
