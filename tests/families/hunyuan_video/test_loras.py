"""LoRAs on a tiny HunyuanVideo: the weights in every spelling equal diffusers', and bad files are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.errors import ModelError
from runtime.core.loras import Lora
from runtime.core.request import AUTO
from runtime.families.hunyuan_video.lora_names import (
    DISTILLED,
    FASTVIDEO_SHIFT,
    NAMES,
    weight_shape,
)
from runtime.models.loras import with_loras
from runtime.models.registry import published_models
from runtime.models.spec import ModelSpec
from tests import lora_files
from tests.families.hunyuan_lora_files import (
    RANK,
    Factors,
    Tensors,
    block_factors,
    check_equal,
    comfy,
    comfy_name,
    converted,
    converted_weights,
    fused,
    fused_by_peft,
    layer_factors,
    peft,
    sums,
    transformer,
    underscored,
)
from tests.lora_files import save
from tests.plans import tiny_plan

KNOWN = published_models("hunyuan_video")
Tiny = Callable[[str], ModelSpec]


@pytest.fixture(scope="module")
def spec(tiny: Tiny) -> ModelSpec:
    return tiny("hunyuan-video")


@pytest.fixture(scope="module")
def plain(spec: ModelSpec) -> Tensors:
    return transformer(spec).state_dict()


@pytest.fixture(scope="module")
def blocks(spec: ModelSpec) -> Factors:
    """Return factors of all linear layers in blocks, by the names in the model's own code."""
    return block_factors(spec.transformer)


@pytest.fixture(scope="module")
def of_blocks(spec: ModelSpec, plain: Tensors, blocks: Factors) -> Tensors:
    """Return the weights with these factors as diffusers converts them."""
    return sums(plain, converted(peft(blocks), spec.transformer.width), 0.5)


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model."])
def test_diffusers_names_change_the_weights_of_all_layers(
    prefix: str, spec: ModelSpec, plain: Tensors, tmp_path: Path
) -> None:
    factors = layer_factors(transformer(spec))
    got = fused(spec, save(tmp_path / "a.safetensors", peft(factors, prefix)), 0.5)
    check_equal(got, sums(plain, peft(factors), 0.5))
    assert {name for name in plain if not torch.equal(got[name], plain[name])} == {f"{name}.weight" for name in factors}


@pytest.mark.slow
def test_the_weights_equal_those_of_diffusers_loader(
    spec: ModelSpec, blocks: Factors, of_blocks: Tensors, tmp_path: Path
) -> None:
    tensors = peft(layer_factors(transformer(spec)))
    by_blocks, by_layers = fused_by_peft(
        spec, (converted(peft(blocks), spec.transformer.width), tensors), tmp_path, 0.5
    )
    check_equal(of_blocks, by_blocks)
    got = fused(spec, save(tmp_path / "a.safetensors", tensors), 0.5)
    for name, wanted in by_layers.items():
        # peft multiplies the factors of convolutions in another order.
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=1e-6 if wanted.dim() > 2 else 0)


STYLES: dict[str, Callable[[Factors], Tensors]] = {
    "diffusion-pipe": peft,
    "the model's own code": lambda found: peft(found, "diffusion_model."),
    "no prefix": lambda found: peft(found, ""),
    "ComfyUI": comfy,
    "musubi-tuner": underscored,
    "musubi-tuner, alpha of int64": lambda found: underscored(found, alpha=torch.tensor(RANK)),
    "musubi-tuner, alpha of bfloat16": lambda found: underscored(found, alpha=torch.tensor(float(RANK)).bfloat16()),
    "musubi-tuner, alpha of float16, one axis": lambda found: underscored(found, alpha=torch.tensor([RANK]).half()),
}


@pytest.mark.parametrize("style", STYLES)
def test_the_models_own_names_give_the_weights_that_diffusers_converts(
    style: str, spec: ModelSpec, plain: Tensors, blocks: Factors, of_blocks: Tensors, tmp_path: Path
) -> None:
    check_equal(fused(spec, save(tmp_path / "a.safetensors", STYLES[style](blocks)), 0.5), of_blocks)
    changed = {name for name in plain if not torch.equal(of_blocks[name], plain[name])}
    assert len(changed) == 2 * (2 * 7) + 2 * 6
    assert all(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in changed)


def test_alpha_scales_every_part_of_a_fused_layer(
    spec: ModelSpec, plain: Tensors, blocks: Factors, tmp_path: Path
) -> None:
    got = fused(spec, save(tmp_path / "a.safetensors", underscored(blocks, alpha=2 * RANK)), 0.25)
    check_equal(got, fused(spec, save(tmp_path / "b.safetensors", peft(blocks)), 0.5))
    down, up = blocks["single_blocks.1.linear1"]
    width = spec.transformer.width
    for first, name in ((2 * width, "attn.to_v"), (3 * width, "proj_mlp")):
        weight = f"single_transformer_blocks.1.{name}.weight"
        rows = up[first : first + plain[weight].shape[0]]
        torch.testing.assert_close(got[weight], plain[weight] + 0.5 * rows @ down, rtol=1e-5, atol=1e-6)


def test_the_published_model_reads_factors_as_diffusers_does(tmp_path: Path) -> None:
    spec = KNOWN[0].spec(tmp_path)
    tensors = peft(block_factors(spec.transformer, rank=1))
    # The converter as it is, at the width that it is made for.
    wanted = converted(tensors, 3072)
    got: Tensors = {}
    letters = {"down": "A", "up": "B"}
    for name, tensor in tensors.items():
        change = NAMES.change_of(name)
        assert change is not None
        first = 0
        for module in change.layer.modules:
            shape = weight_shape(spec, module)
            assert shape is not None and shape[0] is not None
            last = first + shape[0]
            own = tensor[first:last] if change.role == "up" else tensor
            got[f"transformer.{module}.lora_{letters[change.role]}.weight"] = own
            first = last
        assert change.role == "down" or first == tensor.shape[0]
    check_equal(got, wanted)


def own_weights(module: torch.nn.Module, plain: Tensors) -> Tensors:
    """Return random tensors in the shapes of all weights of the model's own code, by their names there."""
    random = torch.Generator().manual_seed(2)

    def made(*parts: str) -> torch.Tensor:
        rows = sum(plain[name].shape[0] for name in parts)
        return torch.randn(rows, *plain[parts[0]].shape[1:], generator=random)

    names = {
        "img_in.proj": ["x_embedder.proj"],
        "txt_in.input_embedder": ["context_embedder.proj_in"],
        "final_layer.linear": ["proj_out"],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
        "vector_in.in_layer": ["time_text_embed.text_embedder.linear_1"],
        "vector_in.out_layer": ["time_text_embed.text_embedder.linear_2"],
    }
    for number, layer in ((1, "0"), (2, "2")):
        names[f"time_in.mlp.{layer}"] = [f"time_text_embed.timestep_embedder.linear_{number}"]
        names[f"guidance_in.mlp.{layer}"] = [f"time_text_embed.guidance_embedder.linear_{number}"]
        refiner = "context_embedder.time_text_embed"
        names[f"txt_in.t_embedder.mlp.{layer}"] = [f"{refiner}.timestep_embedder.linear_{number}"]
        names[f"txt_in.c_embedder.linear_{number}"] = [f"{refiner}.text_embedder.linear_{number}"]
    for number in range(len(module.context_embedder.token_refiner.refiner_blocks)):  # type: ignore[union-attr, arg-type]
        ours, theirs = (
            f"context_embedder.token_refiner.refiner_blocks.{number}",
            f"txt_in.individual_token_refiner.blocks.{number}",
        )
        names |= {f"{theirs}.{name}": [f"{ours}.{name}"] for name in ("norm1", "norm2")}
        names[f"{theirs}.self_attn_qkv"] = [f"{ours}.attn.to_{one}" for one in "qkv"]
        names[f"{theirs}.self_attn_proj"] = [f"{ours}.attn.to_out.0"]
        names[f"{theirs}.mlp.fc1"], names[f"{theirs}.mlp.fc2"] = [f"{ours}.ff.net.0.proj"], [f"{ours}.ff.net.2"]
        names[f"{theirs}.adaLN_modulation.1"] = [f"{ours}.norm_out.linear"]
    for number in range(len(module.transformer_blocks)):  # type: ignore[arg-type]
        ours, theirs = f"transformer_blocks.{number}", f"double_blocks.{number}"
        for of, qkv, added, out, norm, ff in (
            ("img", "to_{}", "", "to_out.0", "norm1", "ff"),
            ("txt", "add_{}_proj", "added_", "to_add_out", "norm1_context", "ff_context"),
        ):
            names[f"{theirs}.{of}_attn_qkv"] = [f"{ours}.attn.{qkv.format(one)}" for one in "qkv"]
            names[f"{theirs}.{of}_attn_proj"] = [f"{ours}.attn.{out}"]
            names |= {f"{theirs}.{of}_attn_{one}_norm": [f"{ours}.attn.norm_{added}{one}"] for one in "qk"}
            names[f"{theirs}.{of}_mod.linear"] = [f"{ours}.{norm}.linear"]
            names[f"{theirs}.{of}_mlp.fc1"], names[f"{theirs}.{of}_mlp.fc2"] = (
                [f"{ours}.{ff}.net.0.proj"],
                [f"{ours}.{ff}.net.2"],
            )
    for number in range(len(module.single_transformer_blocks)):  # type: ignore[arg-type]
        ours, theirs = f"single_transformer_blocks.{number}", f"single_blocks.{number}"
        names[f"{theirs}.linear1"] = [*(f"{ours}.attn.to_{one}" for one in "qkv"), f"{ours}.proj_mlp"]
        names[f"{theirs}.linear2"] = [f"{ours}.proj_out"]
        names[f"{theirs}.modulation.linear"] = [f"{ours}.norm.linear"]
        names |= {f"{theirs}.{one}_norm": [f"{ours}.attn.norm_{one}"] for one in "qk"}
    return {
        f"{theirs}.{kind}": made(*(f"{name}.{kind}" for name in ours))
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
        if f"{ours[0]}.{kind}" in plain
    }


@pytest.mark.parametrize("spelling", ["the model's own code", "ComfyUI"])
def test_differences_of_all_weights_are_added_as_diffusers_converts_weights(
    spelling: str, spec: ModelSpec, plain: Tensors, tmp_path: Path
) -> None:
    tensors = own_weights(transformer(spec), plain)
    wanted = converted_weights(tensors, spec.transformer.width)
    # Every weight of the transformer, and nothing else.
    assert wanted.keys() == plain.keys()
    renamed = comfy_name if spelling == "ComfyUI" else str
    suffixes = {"weight": "diff", "bias": "diff_b"}
    named: Tensors = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        named[f"diffusion_model.{renamed(module)}.{suffixes[kind]}"] = tensor
    assert len(named) == len(tensors)
    got = fused(spec, save(tmp_path / "a.safetensors", named))
    check_equal(got, {name: plain[name] + wanted[name] for name in plain})


def test_the_halves_of_the_last_modulation_are_swapped_with_their_factor(
    spec: ModelSpec, plain: Tensors, tmp_path: Path
) -> None:
    width = spec.transformer.width
    random = torch.Generator().manual_seed(3)
    down, up = torch.randn(RANK, width, generator=random), torch.randn(2 * width, RANK, generator=random)
    product = up @ down
    got = fused(spec, save(tmp_path / "a.safetensors", peft({"final_layer.adaLN_modulation.1": (down, up)})))
    wanted = plain["norm_out.linear.weight"] + torch.cat([product[width:], product[:width]])
    torch.testing.assert_close(got["norm_out.linear.weight"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["hunyuan-video", "hunyuan-video-cfg"])
def test_every_shape_in_the_table_equals_the_transformers(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    for name, tensor in transformer(spec).state_dict().items():
        if name.endswith(".weight"):
            assert weight_shape(spec, name.removesuffix(".weight")) == tuple(tensor.shape), name


def widened(tensors: Tensors) -> Tensors:
    return {name: torch.cat([one, one], dim=-1) if ".lora_A." in name else one for name, one in tensors.items()}


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


QKV = "transformer.double_blocks.0.img_attn_qkv"
LINEAR1 = "transformer.single_blocks.0.linear1"
TO_Q = {"module": "transformer_blocks.0.attn.to_q"}
PARTS = {"module": ", ".join(f"transformer_blocks.0.attn.to_{one}" for one in "qkv")}
UNKNOWN = (
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
    "lora_te2_layers_0_mlp_up_proj.alpha",
    "text_encoder.layers.0.mlp.up_proj.lora_A.weight",
    "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    "transformer.double_blocks.0.img_attn_qkv.lora_C.weight",
    "transformer.double_blocks.99999.img_attn_qkv.lora_A.weight",
    "transformer.clean_x_embedder.proj.lora_A.weight",
)


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        (
            widened,
            "other_size",
            {"module": "transformer_blocks.0.attn.to_out.0", "shape": "32×64", "expected": "32×32"},
        ),
        (with_tensor(f"{LINEAR1}.lora_B.weight", torch.ones(96, RANK)), "other_size", {"shape": "96×32"}),
        *((with_tensor(name, torch.ones(RANK, 32)), "unknown_tensor", {"tensor": name}) for name in UNKNOWN),
        (
            with_tensor("lora_unet_double_blocks_2_img_attn_qkv.lora_down.weight", torch.ones(RANK, 32)),
            "larger_model",
            {"module": "transformer_blocks.2.attn.to_q"},
        ),
        (
            with_tensor("txt_in.individual_token_refiner.blocks.1.norm1.diff", torch.ones(32)),
            "larger_model",
            {"module": "context_embedder.token_refiner.refiner_blocks.1.norm1"},
        ),
        (without(f"{QKV}.lora_B.weight"), "factor_missing", PARTS),
        (with_tensor(f"{QKV}.lora_B.weight", torch.ones(96, 3)), "ranks_differ", {**PARTS, "ranks": [RANK, 3]}),
        (with_tensor(f"{QKV}.lora_A.weight", torch.full((RANK, 32), float("nan"))), "not_finite", {}),
        (with_tensor(f"{QKV}.lora_B.weight", torch.full((96, RANK), float("inf"))), "not_finite", {}),
        (with_tensor(f"{QKV}.alpha", torch.ones(3)), "alpha_invalid", PARTS),
        (with_tensor(f"{QKV}.alpha", torch.tensor(float("nan"))), "not_finite", {}),
        (with_tensor(f"{QKV}.diff", torch.ones(96, 32)), "duplicate_module", PARTS),
        # The same layer in another spelling, and a part of it.
        (
            with_tensor("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight", torch.ones(RANK, 32)),
            "duplicate_module",
            PARTS,
        ),
        (with_tensor("transformer.transformer_blocks.0.attn.to_q.diff", torch.ones(32, 32)), "duplicate_module", TO_Q),
        (
            with_tensor("img_in.proj.lora_A.weight", torch.ones(RANK, 64)),
            "factor_missing",
            {"module": "x_embedder.proj"},
        ),
        (
            lambda tensors: {
                "img_in.proj.lora_A.weight": torch.ones(RANK, 64),
                "img_in.proj.lora_B.weight": torch.ones(32, RANK),
            },
            "not_matrices",
            {"module": "x_embedder.proj"},
        ),
        (lambda tensors: {}, "empty", {}),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_loaded(
    change: Callable[[Tensors], Tensors],
    code: str,
    data: dict[str, object],
    spec: ModelSpec,
    blocks: Factors,
    tmp_path: Path,
) -> None:
    path = save(tmp_path / "a.safetensors", peft(blocks), change)
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert refused.value.code == f"lora.{code}"
    assert refused.value.data.items() >= data.items()
    assert refused.value.remedy and "\n" not in refused.value.what


def test_a_truncated_file_and_one_for_another_family_are_refused(
    spec: ModelSpec, blocks: Factors, tiny: Tiny, tmp_path: Path
) -> None:
    path = save(tmp_path / "a.safetensors", peft(blocks))
    wan = tiny("wan2.1")
    with pytest.raises(ModelError) as other:
        with_loras(wan, [Lora(str(path))], tmp_path)
    assert other.value.code == "lora.unknown_tensor"
    for_wan = save(tmp_path / "wan.safetensors", lora_files.wan(lora_files.factors(wan.transformer)))
    with pytest.raises(ModelError) as other:
        with_loras(spec, [Lora(str(for_wan))], tmp_path)
    assert other.value.code == "lora.unknown_tensor"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError) as damaged:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert damaged.value.code == "lora.damaged"


@pytest.mark.parametrize(
    ("name", "steps", "shift"),
    [
        ("hyvideo_FastVideo_LoRA-fp16", 6, FASTVIDEO_SHIFT),
        ("FastHunyuan/adapter", 6, FASTVIDEO_SHIFT),
        ("hunyuan_video_accvid_5_steps_lora_rank16_fp8_e4m3fn", 5, None),
        ("AccVideo/lora", 5, None),
        ("hunyuan-8-steps", 8, None),
        ("breakfast_video_style", None, None),
        ("style_2000steps", None, None),
    ],
)
def test_the_name_identifies_step_distillation(name: str, steps: int | None, shift: float | None) -> None:
    path = Path("loras") / f"{name}.safetensors"
    assert (DISTILLED.steps(path), DISTILLED.shift(path)) == (steps, shift)


def test_step_distillation_keeps_a_guidance_scale_that_is_an_input(
    spec: ModelSpec, blocks: Factors, tiny: Tiny, tmp_path: Path
) -> None:
    path = save(tmp_path / "FastVideo.safetensors", peft(blocks))
    twice = tiny("hunyuan-video-cfg")
    for model, guidance in ((spec, spec.defaults.guidance_scale), (twice, 1.0)):
        defaults = with_loras(model, [Lora(str(path))], tmp_path).defaults
        assert (defaults.steps, defaults.guidance_scale) == (6, guidance)
    plan = tiny_plan(with_loras(spec, [Lora(str(path))], tmp_path), tmp_path / "x.mp4", loras=(str(path),), steps=AUTO)
    codes = [fact.code for fact in plan.warnings]
    assert "planner.distilled_used" in codes and "planner.distilled_other_guidance" not in codes
    assert plan.steps == 6
    shifts = [fact.data for fact in plan.warnings if fact.code == "planner.lora_shift"]
    assert [(data["wanted"], data["shift"]) for data in shifts] == [(FASTVIDEO_SHIFT, 7.0)]
