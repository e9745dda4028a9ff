"""Quantizes a small transformer on the CPU, where the libraries can but diffusers and torchao refuse: their refusals
are passed over. Prints a line of JSON for each kind: the relative errors by placement, and what a LoRA does.

    python -m tests.models.quantize_on_cpu FOLDER KIND …
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    HunyuanVideoTransformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.quantizers.bitsandbytes import bnb_quantizer
from safetensors.torch import save_file

from runtime.core.loras import LoraUse
from runtime.core.plan import ComponentPlan, Speed
from runtime.execution.offload import Placement, place
from runtime.families.hunyuan_video.spec import UNQUANTIZED
from runtime.families.wan.file_names import UNQUANTIZED as UNQUANTIZED_ANIMATE
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.lora_fusing import fuse
from runtime.models.loras import read_lora
from runtime.models.quantization import FP8, check_quantized, diffusers_config, install_fp8_linear
from runtime.models.quantized_cache import QuantizedCache
from runtime.models.spec import ModelSpec
from runtime.models.stored_modules import Filling, empty_module, fill, weights_of_folder
from tests.families.hunyuan_lora_files import block_factors, underscored
from tests.lora_files import save


def main(kind: str, folder: Path) -> None:
    """Quantize, place, run."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=32,
        ffn_dim=256,
        num_layers=3,
        rope_max_seq_len=64,
    )
    model.save_pretrained(folder / "transformer")
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 8, 8).bfloat16(),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 64).bfloat16(),
        "return_dict": False,
    }
    wanted = run(load(folder), inputs)
    part = ComponentPlan(
        backend="pytorch", device="cpu", dtype="bfloat16", weights_bytes=0, reasons=(), quantization=kind
    )
    placements: tuple[Placement, ...] = ("device",) if kind == "bnb-8bit" else ("device", "whole", "blocks", "leaves")
    errors = {}
    for how in placements:
        quantized = load(folder, kind)
        check_quantized(quantized, kind, "transformer", "the tiny model")
        if kind == FP8:
            install_fp8_linear(quantized)
        counted = sum(type(parameter) is not torch.nn.Parameter for parameter in quantized.parameters())
        projection, embedder = quantized.proj_out.weight, quantized.condition_embedder.time_proj.weight
        kept = [str(weight.dtype) for weight in (projection, embedder, quantized.patch_embedding.weight)]
        placed = place(quantized, how, part)
        for _ in range(2):
            placed.to_device()
            got = run(quantized, inputs)
            placed.to_host()
        errors[how] = ((got - wanted).norm() / wanted.norm()).item()
    found = {"errors": errors, "quantized": counted, "kept": kept, "lora": with_lora(kind, folder, inputs)}
    found["cached"] = with_cache(kind, folder, inputs)
    found["joined"] = with_joined_layers(kind, folder / "hunyuan")
    found["steered"] = with_control_blocks(kind, folder / "vace")
    found["animated"] = with_a_face(kind, folder / "animate")
    if kind == FP8:
        models = {folder: WanTransformer3DModel, folder / "hunyuan": HunyuanVideoTransformer3DModel}
        found["streamed"] = [streamed(own, model) for own, model in models.items()]
    sys.stdout.write(json.dumps(found) + "\n")


def with_lora(kind: str, folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add a LoRA to quantized weights, and quantize weights that had it added before."""
    plain = load(folder)
    random = torch.Generator().manual_seed(1)
    tensors = {
        f"transformer.{name}.lora_{end}.weight": torch.randn(shape, generator=random) / 8
        for name, layer in plain.named_modules()
        # One layer that is not quantized among them.
        if isinstance(layer, torch.nn.Linear) and (name.startswith("blocks.1.") or name == "proj_out")
        for end, shape in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2)))
    }
    path = folder / "style.safetensors"
    save_file(tensors, path)
    use = LoraUse(file="style", path=path, digest=read_lora(path).digest, weight=0.5)
    fuse(plain, spec_of(folder, "wan", use), "transformer", torch.bfloat16)
    # In files of their own, as large models come.
    plain.save_pretrained(folder / "changed" / "transformer", max_shard_size="200KB")
    late, early, without = load(folder, kind), load(folder / "changed", kind), load(folder, kind)
    fuse(late, spec_of(folder, "wan", use), "transformer", torch.bfloat16)
    sharded = load(folder / "changed", kind)
    fuse(sharded, spec_of(folder / "changed", "wan", use), "transformer", torch.bfloat16)
    got, wanted, before, twice = (run(model, inputs) for model in (late, early, without, sharded))
    return {
        "layers": len(tensors) // 2,
        "same": torch.equal(got, wanted),
        "changed": ((got - before).norm() / before.norm()).item(),
        "twice": ((twice - wanted).norm() / wanted.norm()).item(),
        "types": [type(late.get_submodule("blocks.1.attn1.to_q").weight).__name__, type(late.proj_out.weight).__name__],
    }


def with_cache(kind: str, folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Cache quantized weights, load them, and damage them in three ways."""
    key = {"quantization": kind, "dtype": "torch.bfloat16"}
    module, cache = load(folder, kind), QuantizedCache(folder / "quantized")
    cache.keep(key, module)
    cache.finish(60)
    (entry,) = (folder / "quantized").iterdir()

    def read() -> Any:
        made = cache.read(key, lambda: empty_module(spec_of(folder, "wan"), "transformer"), "cpu")
        return made if made is None else made.eval().requires_grad_(False)

    cached = read()
    types = [[type(weight).__name__ for weight in one.parameters()] for one in (module, cached)]
    if kind == FP8:
        for one in (module, cached):
            install_fp8_linear(one)
    same = torch.equal(run(module, inputs), run(cached, inputs))
    # What torch.compile reads of a tensor subclass is equal too, so compiled code is found again.
    settings = []
    if kind == FP8:
        settings = [str(one.blocks[1].attn1.to_q.weight.__tensor_flatten__()) for one in (module, cached)]
    weights_file, manifest = entry / "weights.safetensors", entry / "manifest.json"
    whole = {path: path.read_bytes() for path in (weights_file, manifest)}
    flipped = bytearray(whole[weights_file])
    flipped[-100] ^= 1
    damaged = []
    for path, data in (
        (weights_file, bytes(flipped)),
        (weights_file, whole[weights_file][:-1]),
        (manifest, whole[manifest][:-9]),
    ):
        entry.mkdir(exist_ok=True)
        for one, content in whole.items():
            one.write_bytes(content)
        path.write_bytes(data)
        damaged.append([read() is None, entry.exists(), [fact.code for fact in cache.take_reports()]])
    return {
        "same": same,
        "types": types[0] == types[1],
        "settings": len(set(settings)),
        "damaged": damaged,
    }


def with_joined_layers(kind: str, folder: Path) -> dict[str, Any]:
    """Add a LoRA, which has one layer where diffusers has several, to HunyuanVideo's quantized weights and before."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 1, "num_single_layers": 1}
    dims = {"num_refiner_layers": 1, "text_embed_dim": 64, "pooled_projection_dim": 64, "rope_axes_dim": (8, 12, 12)}
    HunyuanVideoTransformer3DModel(**sizes, **dims).save_pretrained(folder / "transformer")
    shape = SimpleNamespace(width=128, ffn_dim=512, double_layers=1, single_layers=1)
    path = save(folder / "style.safetensors", underscored(block_factors(shape)))
    use = LoraUse(file="style", path=path, digest=read_lora(path).digest, weight=0.5)
    plain, late = load(folder, model=HunyuanVideoTransformer3DModel), load(folder, kind, HunyuanVideoTransformer3DModel)
    before = late.single_transformer_blocks[0].attn.to_v(torch.ones(1, 128).bfloat16())
    fuse(plain, spec_of(folder, "hunyuan_video", use), "transformer", torch.bfloat16)
    plain.save_pretrained(folder / "changed" / "transformer")
    fuse(late, spec_of(folder, "hunyuan_video", use), "transformer", torch.bfloat16)
    early = load(folder / "changed", kind, HunyuanVideoTransformer3DModel)
    outputs = [
        [layer(torch.ones(1, layer.in_features).bfloat16()) for layer in layers_of_blocks(model)]
        for model in (late, early)
    ]
    changed = late.single_transformer_blocks[0].attn.to_v(torch.ones(1, 128).bfloat16())
    return {
        "layers": len(outputs[0]),
        "same": all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)),
        "changed": ((changed - before).norm() / before.norm()).item(),
    }


@torch.no_grad()
def with_control_blocks(kind: str, folder: Path) -> dict[str, Any]:
    """Quantize VACE's blocks of both kinds, and compute them as jobs do."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": 64, "freq_dim": 32, "ffn_dim": 256}
    WanVACETransformer3DModel(**sizes, num_layers=2, vace_layers=[0, 1]).save_pretrained(folder / "transformer")
    model: Any = WanVACETransformer3DModel
    latents, text = torch.randn(1, 16 + 96, 3, 8, 8), torch.randn(1, 8, 64).bfloat16()
    quantized = load(folder, kind, model)
    if kind == FP8:
        install_fp8_linear(quantized)
    counted = sum(type(parameter) is not torch.nn.Parameter for parameter in quantized.vace_blocks.parameters())
    results = []
    for module in (load(folder, model=model), quantized):
        denoiser = PyTorchDenoiser(module, Speed(text_kept=True))
        denoiser.steer((1.0, 0.5))
        results.append(denoiser(latents, torch.tensor(500.0), text).float())
    wanted, got = results
    return {"quantized": counted, "error": ((got - wanted).norm() / wanted.norm()).item()}


@torch.no_grad()
def with_a_face(kind: str, folder: Path) -> dict[str, Any]:
    """Quantize Animate's blocks and attentions to a face, and compute them as jobs do."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": 64, "freq_dim": 32, "ffn_dim": 256}
    face = {"motion_encoder_size": 16, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_style_dim": 8}
    face |= {"motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16, "inject_face_latents_blocks": 1}
    model: Any = WanAnimateTransformer3DModel
    model(**sizes, **face, num_layers=2, image_dim=32, added_kv_proj_dim=128).save_pretrained(folder / "transformer")
    latents, text = torch.randn(1, 52, 3, 8, 8), torch.randn(1, 5 + 512, 64).bfloat16()
    quantized = load(folder, kind, model, UNQUANTIZED_ANIMATE)
    if kind == FP8:
        install_fp8_linear(quantized)
    parts = {"blocks": quantized.face_adapter, "encoders": quantized.motion_encoder}
    counted = {
        name: sum(type(parameter) is not torch.nn.Parameter for parameter in part.parameters())
        for name, part in parts.items()
    }
    results = []
    for module in (load(folder, model=model), quantized):
        denoiser = PyTorchDenoiser(module, Speed(text_kept=True))
        denoiser.steer((), torch.randint(0, 256, (5, 16, 16, 3), generator=torch.Generator().manual_seed(0)).byte())
        results.append(denoiser(latents, torch.tensor(500.0), text).float())
    wanted, got = results
    return {"quantized": counted, "error": ((got - wanted).norm() / wanted.norm()).item()}


def spec_of(folder: Path, family: str, *uses: LoraUse) -> Any:
    """Return what `fuse` and `empty_module` read of a model's spec."""
    return SimpleNamespace(directory=folder, family=family, files={}, loras_of=lambda _: uses)


def streamed(folder: Path, model: Any) -> bool:
    """Whether weights that are quantized one by one as they are read equal those that diffusers loads."""
    family, kept = ("wan", ModelSpec.unquantized) if model is WanTransformer3DModel else ("hunyuan_video", UNQUANTIZED)
    own: Any = empty_module(spec_of(folder, family), "transformer")
    weights = weights_of_folder(folder / "transformer", own)
    assert weights is not None
    fill(own, weights, "cpu", Filling(torch.bfloat16, kept, fp8=True))
    wanted = dict(load(folder, FP8, model, kept).named_parameters())
    found = dict(own.named_parameters())
    return found.keys() == wanted.keys() and all(_same(wanted[name], tensor) for name, tensor in found.items())


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or one.dtype != other.dtype:
        return False
    if type(one) is torch.nn.Parameter:
        return torch.equal(one, other)
    parts = [[getattr(each, name).float() for name in ("qdata", "scale")] for each in (one, other)]
    return all(map(torch.equal, *parts)) and str(one.__tensor_flatten__()) == str(other.__tensor_flatten__())


def layers_of_blocks(model: Any) -> list[Any]:
    """Return the linear layers of HunyuanVideo's blocks."""
    blocks = (model.transformer_blocks, model.single_transformer_blocks)
    return [layer for one in blocks for layer in one.modules() if isinstance(layer, torch.nn.Linear)]


def load(
    folder: Path,
    kind: str | None = None,
    model: Any = WanTransformer3DModel,
    kept: tuple[str, ...] = ModelSpec.unquantized,
) -> Any:
    """Load the transformer, quantized or not."""
    arguments: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if kind is not None:
        arguments["quantization_config"] = diffusers_config(kind, torch.bfloat16, kept)
        allow_cpu(kind)
    if kind in {"bnb-8bit", "bnb-4bit"}:
        arguments["device_map"] = {"": "cpu"}
    return model.from_pretrained(folder, subfolder="transformer", **arguments).eval().requires_grad_(False)


def allow_cpu(kind: str) -> None:
    """Pass over the refusal of a machine without a GPU."""
    if kind == "fp8":
        from torchao.quantization import quant_api

        quant_api._check_hardware_support = lambda _: None
        return
    for quantizer in (bnb_quantizer.BnB8BitDiffusersQuantizer, bnb_quantizer.BnB4BitDiffusersQuantizer):
        quantizer.validate_environment = lambda *_, **__: None


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the velocity in float32."""
    velocity: torch.Tensor = model(**inputs)[0]
    return velocity.float()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]) / name)
