"""LightX2V's transformer from a checkout, which is no package; see `bench.peers`. Tried with f8aee98.

Without a GPU it runs in bfloat16 with PyTorch's attention, not compiled, to try this module.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.peers.case import Case, name_of, say, timed

FP8 = "fp8-torchao"
# What LightX2V imports for images and videos, of which there are none.
_UNUSED = ("imageio", "imageio_ffmpeg", "torchvision", "torchvision.transforms", "torchvision.transforms.functional")


class _StandIn(ModuleType):
    """A package that is not installed and not used: it has any name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", object)


class Config(dict[str, Any]):
    """A configuration with its keys as attributes, as LightX2V expects."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def main() -> None:
    """Measure a pass of each size, in bfloat16 and FP8."""
    case = Case.given()
    _import(Path(case.checkout), case.device)
    attention = _attention(case.device)
    for precision in ("bfloat16", "FP8")[: 1 if case.device == "cpu" else 2]:
        variant = f"LightX2V, {precision}, {attention}"
        with case.trying(variant):
            _measure(case, variant, attention, fp8=precision == "FP8")
        if case.device != "cpu":
            torch.cuda.empty_cache()


def _measure(case: Case, variant: str, attention: str, *, fp8: bool) -> None:
    scheduling: Any = importlib.import_module("lightx2v.models.schedulers.wan.scheduler")
    config = _config(case, attention, fp8=fp8)
    model = _random_model(case, config)
    if case.device == "cpu":
        model.to_cuda()
    for size in case.sizes:
        what = {"variant": variant, "size": name_of(size)}
        with case.trying(**what), torch.no_grad():
            config.update(target_width=size[0], target_height=size[1])
            scheduler = scheduling.WanScheduler(config)
            model.set_scheduler(scheduler)
            scheduler.transformer_infer = model.transformer_infer
            scheduler.prepare(seed=1, latent_shape=list(case.latents(size)))
            scheduler.sample_guide_scale = 4.0
            text = case.inputs(size)[2]
            inputs = {"text_encoder_output": {"context": text, "context_null": text}, "image_encoder_output": {}}
            scheduler.step_pre(step_index=0)
            model.infer(inputs)
            found = timed(lambda: model.infer(inputs), case.device)  # noqa: B023
            assert bool(torch.isfinite(scheduler.noise_pred).all())
            say(**what, **found)


def _import(checkout: Path, device: str) -> None:
    """Let LightX2V's modules be imported, without its `__init__`, which imports all of its programs."""
    sys.path.insert(0, str(checkout))
    package = ModuleType("lightx2v")
    package.__path__ = [str(checkout / "lightx2v")]
    sys.modules["lightx2v"] = package
    missing = {name for name in _UNUSED if not _installed(name.partition(".")[0])}
    sys.modules.update({name: _StandIn(name) for name in missing})
    platform: Any = importlib.import_module("lightx2v_platform.base.global_var")
    if device == "cpu":
        platform.AI_DEVICE = "cpu"
        empty = torch.empty

        def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            del pin_memory
            return empty(*shape, **more)

        vars(torch)["empty"] = unpinned
        vars(torch.cuda)["synchronize"] = lambda *_: None
    else:
        importlib.import_module("lightx2v_platform.set_ai_device")


def _attention(device: str) -> str:
    """Return the fastest exact attention that is installed, by LightX2V's name."""
    packages = {"flash_attn4": "flash_attn.cute", "flash_attn3": "flash_attn_interface", "flash_attn2": "flash_attn"}
    if device == "cpu":
        return "torch_sdpa"
    found = next((name for name, package in packages.items() if _installed(package)), "torch_sdpa")
    if found == "flash_attn4":
        _accept_new_flash_attention()
    return found


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _accept_new_flash_attention() -> None:
    """Let LightX2V call releases of FlashAttention 4 that return the output alone, without its statistics."""
    module: Any = importlib.import_module("lightx2v.common.ops.attn.flash_attn")
    attend = getattr(module, "flash_attn_func_v4", None)
    if attend is None:
        return

    def attended(q: Any, k: Any, v: Any) -> Any:
        found = attend(q, k, v)
        return found if isinstance(found, tuple) else (found, None)

    module.flash_attn_func_v4 = attended


def _config(case: Case, attention: str, *, fp8: bool) -> Config:
    cuda, heads = case.device != "cpu", case.config["num_attention_heads"]
    config = Config(
        model_cls="wan2.2_moe",
        task="t2v",
        dim=heads * case.config["attention_head_dim"],
        ffn_dim=case.config["ffn_dim"],
        num_layers=case.config["num_layers"],
        num_heads=heads,
        freq_dim=case.config["freq_dim"],
        text_dim=case.config["text_dim"],
        text_len=512,
        in_dim=16,
        out_dim=16,
        eps=1e-6,
        model_type="t2v",
        patch_size=(1, 2, 2),
        vae_stride=(4, 8, 8),
        infer_steps=40,
        target_video_length=case.frames,
        sample_shift=12.0,
        sample_guide_scale=[4.0, 3.0],
        boundary=0.875,
        # One pass a step.
        enable_cfg=False,
        cfg_parallel=False,
        seq_parallel=False,
        parallel=False,
        cpu_offload=False,
        feature_caching="NoCaching",
        use_image_encoder=False,
        dummy_model=True,
        self_attn_1_type=attention,
        cross_attn_1_type=attention,
        cross_attn_2_type=attention,
        rope_type="torch_real_rope",
        rms_norm_type="one-pass" if cuda else "torch",
        modulate_type="triton" if cuda else "torch",
        use_compile=cuda,
        lora_configs=None,
        do_mm_calib=False,
        use_prompt_enhancer=False,
    )
    if fp8:
        config.update(dit_quantized=True, dit_quant_scheme=FP8)
    return config


def _random_model(case: Case, config: Config) -> Any:
    """Return LightX2V's transformer with random weights, in FP8 with one scale a row as its converter stores them."""
    networks: Any = importlib.import_module("lightx2v.models.networks.wan.model")

    class Random(networks.WanModel):
        def _load_dummy_ckpt(self, *_: Any) -> dict[str, torch.Tensor]:
            weights: dict[str, torch.Tensor] = {}
            for name, shape in _shapes(config).items():
                norm = "norm" in name and name.endswith("weight")
                weights[name] = torch.empty(shape, dtype=torch.bfloat16, device=case.device).normal_(0, 0.02)
                if norm:
                    weights[name].fill_(1.0)
                if config.get("dit_quantized") and _is_layer(name, shape):
                    weight = weights[name].float()
                    scale = (weight.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
                    weights[name] = (weight / scale).to(torch.float8_e4m3fn)
                    weights[f"{name}_scale"] = scale
            return weights

    return Random("none", config, torch.device(case.device), model_type="wan2.2_moe_high_noise")


def _is_layer(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Wan's weights by their names in the published files."""
    width, wide = config["dim"], config["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (width, 16, 1, 2, 2),
        "patch_embedding.bias": (width,),
    }

    def layer(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    layer("text_embedding.0", width, config["text_dim"])
    layer("text_embedding.2", width, width)
    layer("time_embedding.0", width, config["freq_dim"])
    layer("time_embedding.2", width, width)
    layer("time_projection.1", 6 * width, width)
    layer("head.head", 64, width)
    shapes["head.modulation"] = (1, 2, width)
    for number in range(config["num_layers"]):
        block = f"blocks.{number}"
        shapes[f"{block}.modulation"] = (1, 6, width)
        shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (width,)
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                layer(f"{block}.{attention}.{part}", width, width)
            for norm in ("norm_q", "norm_k"):
                shapes[f"{block}.{attention}.{norm}.weight"] = (width,)
        layer(f"{block}.ffn.0", wide, width)
        layer(f"{block}.ffn.2", width, wide)
    return shapes


if __name__ == "__main__":
    main()
