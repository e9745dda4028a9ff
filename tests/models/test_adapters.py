"""Adapters as programs write them: names are read by structure; LoKr, LoHa and DoRA equal their formulas.

The libraries' own files and results: see test_adapters_of_libraries.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.loras import BOTH, Lora
from runtime.core.request import GenerationRequest
from runtime.families.framepack import lora_names as framepack
from runtime.families.hunyuan_video import lora_names as hunyuan_video
from runtime.families.wan import lora_names as wan
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests import lora_files
from tests.lora_files import RANK, Tensors, factors
from tests.models.test_loras import loaded
from tests.plans import machine

Tiny = Callable[[str], ModelSpec]

# Names of the same tensor by different programs: Wan's own code, then HunyuanVideo's in FramePack's tables too.
WAN = [
    "blocks.3.self_attn.q.lora_A.weight",
    "diffusion_model.blocks.3.self_attn.q.lora_down.weight",
    "model.diffusion_model.blocks.3.self_attn.q.lora_down.weight",
    "transformer.blocks.3.attn1.to_q.lora_A.weight",
    "base_model.model.blocks.3.attn1.to_q.lora_A.default.weight",
    "base_model.model.transformer.blocks.3.attn1.to_q.lora_A.style.weight",
    "blocks.3.attn1.to_q.lora_A.style",
    "module._orig_mod.blocks.3.self_attn.q.lora_A.weight",
    "_orig_mod.module.blocks.3._orig_mod.self_attn.q.lora_A.weight",
    "model.blocks.3.self_attn.q.lora_A.weight",
    "dit.blocks.3.self_attn.q.lora_A.weight",
    "unet.blocks.3.attn1.to_q.lora_A.weight",
    "pipe.dit.blocks.3.self_attn.q.lora_A.weight",
    "lora_unet_blocks_3_self_attn_q.lora_down.weight",
    "lora_unet__blocks_3_self_attn_q.lora_down.weight",
    "lora_transformer_blocks_3_attn1_to_q.lora_down.weight",
    "lora_blocks_3_self_attn_q.lora_down.weight",
    "lycoris_blocks_3_attn1_to_q.lora_down.weight",
]
HUNYUAN = [
    "transformer_blocks.3.attn.to_out.0.lora_A.weight",
    "transformer.transformer_blocks.3.attn.to_out.0.lora_A.weight",
    "diffusion_model.double_blocks.3.img_attn.proj.lora_A.weight",
    "lora_unet__double_blocks_3_img_attn_proj.lora_down.weight",
    "lora_transformer_transformer_blocks_3_attn_to_out_0.lora_down.weight",
    "lycoris_transformer_blocks_3_attn_to_out_0.lora_down.weight",
    "base_model.model.module.transformer_blocks.3.attn.to_out.0.lora_A.a.weight",
]


def test_names_of_all_programs_are_read_by_structure(subtests: pytest.Subtests) -> None:
    for names, table, module in (
        (WAN, wan.NAMES, "blocks.3.attn1.to_q"),
        (HUNYUAN, hunyuan_video.NAMES, "transformer_blocks.3.attn.to_out.0"),
        (HUNYUAN, framepack.NAMES, "transformer_blocks.3.attn.to_out.0"),
    ):
        for name in names:
            with subtests.test(name=name):
                change = table.change_of(name)
                assert change is not None
                assert (change.layer.modules, change.role, change.expert) == ((module,), "down", BOTH)


def test_names_of_other_models_are_of_no_layer(subtests: pytest.Subtests) -> None:
    for name in (
        "transformer.transformer_blocks.3.attn1.to_q.lora_A.weight",  # LTX
        "lora_transformer_transformer_blocks_3_attn1_to_q.lora_down.weight",
        "lora_te1_blocks_3_self_attn_q.lora_down.weight",
        "text_encoder.blocks.3.self_attn.q.lora_A.weight",
        "blocks.3.self_attn.q.lora_A.bias",
        "blocks.3.self_attn.q.lora_C.weight",
        "blocks.3.self_attn.lora_A.weight",
        "blocks.99999.self_attn.q.lora_A.weight",
    ):
        with subtests.test(name=name):
            assert wan.NAMES.change_of(name) is None


def save(path: Path, tensors: Tensors) -> Lora:
    return Lora(str(lora_files.save(path, tensors)))


@pytest.mark.parametrize("architecture", ["wan2.1-i2v", "wan2.1-flf2v"])
def test_a_lora_changes_the_image_branch(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    """Every parameter of the transformer can be changed, by Wan's own name and by diffusers'."""
    spec = tiny(architecture)
    plain = loaded(spec)
    random = torch.Generator().manual_seed(0)
    changes = {name: torch.randn(tensor.shape, generator=random) for name, tensor in plain.items()}
    original = {ours: theirs for theirs, ours in {**wan.IN_BLOCKS, **wan.OUTSIDE}.items()}
    theirs, ours = {}, {}
    for name, tensor in changes.items():
        module = name.removesuffix(".weight").removesuffix(".bias")
        role = "diff_b" if name.endswith(".bias") else "diff"
        block, layer = (module[:9], module[9:]) if module.startswith("blocks.") else ("", module)
        if layer == "scale_shift_table":
            theirs[f"diffusion_model.{block or 'head.'}diff_m"] = tensor
        else:
            theirs[f"diffusion_model.{block}{original[layer]}.{role}"] = tensor
        ours[f"transformer.{module}.{role}"] = tensor
    for number, tensors in enumerate((theirs, ours)):
        changed = loaded(with_loras(spec, [save(tmp_path / f"{number}.safetensors", tensors)], tmp_path))
        for name, tensor in plain.items():
            torch.testing.assert_close(changed[name], tensor + changes[name], rtol=1e-5, atol=1e-5, msg=name)


def test_layers_of_an_absent_part_are_left_out_with_a_warning(tiny: Tiny, tmp_path: Path) -> None:
    spec, other = tiny("wan2.2-i2v-a14b"), tiny("wan2.1-i2v")
    width, image = other.transformer.width, 24
    there = lora_files.wan(factors(spec.transformer))
    absent = {
        "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight": torch.ones(RANK, width),
        "diffusion_model.blocks.0.cross_attn.k_img.lora_up.weight": torch.ones(width, RANK),
        "diffusion_model.blocks.1.cross_attn.k_img.diff_b": torch.ones(width),
        "diffusion_model.blocks.0.cross_attn.norm_k_img.diff": torch.ones(width),
        "diffusion_model.img_emb.proj.1.diff": torch.ones(image, image),
    }
    plain = with_loras(spec, [save(tmp_path / "plain.safetensors", there)], tmp_path)
    both = with_loras(spec, [save(tmp_path / "both.safetensors", there | absent)], tmp_path)
    assert plain.loras[0].without_effect == ()
    names = (
        "blocks.*.attn2.add_k_proj",
        "blocks.*.attn2.norm_added_k",
        "condition_embedder.image_embedder.ff.net.0.proj",
    )
    assert both.loras[0].without_effect == names
    wanted, changed = loaded(plain), loaded(both)
    assert all(torch.equal(changed[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [save(tmp_path / "absent.safetensors", absent)], tmp_path)
    assert refused.value.code == "lora.unknown_tensor"
    # A block that the model does not have is no part of other models.
    larger = {"diffusion_model.blocks.7.cross_attn.k_img.diff_b": torch.ones(width)}
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [save(tmp_path / "larger.safetensors", there | larger)], tmp_path)
    assert refused.value.code == "lora.larger_model"


def test_the_plan_names_layers_without_effect_once(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    tensors = lora_files.peft(factors(spec.transformer))
    tensors |= {f"transformer.blocks.{block}.attn2.add_k_proj.diff_b": torch.ones(24) for block in range(2)}
    lora = save(tmp_path / "style.safetensors", tensors)
    size = {"width": 32, "height": 32, "frames": 5, "steps": 2}
    request = GenerationRequest.from_mapping({"prompt": "a boat", "loras": [lora], **size})
    warnings = resolve(request, with_loras(spec, [lora], tmp_path), PlanningContext(machine(), tmp_path)).warnings
    (fact,) = (fact for fact in warnings if fact.code == "planner.lora_without_effect")
    assert (fact.data["lora"], fact.data["layers"]) == ("style", ["blocks.*.attn2.add_k_proj"])


def test_one_file_changes_both_experts_each_by_its_own(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    high = lora_files.peft(factors(spec.transformer))
    low = {
        name.replace("transformer.", "transformer_2.", 1): tensor
        for name, tensor in lora_files.peft(factors(spec.transformer, seed=5)).items()
    }
    alone = {
        "transformer": loaded(with_loras(spec, [save(tmp_path / "high.safetensors", high)], tmp_path)),
        "transformer_2": loaded(with_loras(spec, [save(tmp_path / "low.safetensors", low)], tmp_path), "transformer_2"),
    }
    given = with_loras(spec, [save(tmp_path / "both.safetensors", high | low)], tmp_path)
    assert given.loras[0].expert == BOTH
    for component, wanted in alone.items():
        changed = loaded(given, component)
        assert all(torch.equal(changed[name], tensor) for name, tensor in wanted.items()), component
    only = with_loras(spec, [save(tmp_path / "second.safetensors", low)], tmp_path)
    assert [name for name in spec.component_names if only.loras_of(name)] == ["transformer_2"]
    half = with_loras(spec, [Lora(str(tmp_path / "both.safetensors"), expert="low")], tmp_path)
    assert not half.loras_of("transformer")
    assert torch.equal(
        loaded(half, "transformer_2")["blocks.0.attn1.to_q.weight"],
        alone["transformer_2"]["blocks.0.attn1.to_q.weight"],
    )
    with pytest.raises(InvalidRequestError) as refused:
        with_loras(tiny("wan2.1"), [Lora(str(tmp_path / "both.safetensors"))], tmp_path)
    assert refused.value.code == "lora.no_such_expert"


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


LAYER, WEIGHT, FFN = "blocks.0.self_attn.q", "blocks.0.attn1.to_q.weight", "blocks.0.ffn.0"


def changed_by(
    tensors: Tensors, spec: ModelSpec, folder: Path, *, weight: float = 0.5, name: str = WEIGHT
) -> torch.Tensor:
    path = lora_files.save(
        folder / "adapter.safetensors", {f"diffusion_model.{key}": own for key, own in tensors.items()}
    )
    return loaded(with_loras(spec, [Lora(str(path), weight)], folder))[name].double()


def test_loha_is_the_scaled_product_of_two_products(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    before = loaded(spec)[WEIGHT].double()
    pair = {"a": (24, RANK), "b": (RANK, 24)}
    own = random_tensors({f"hada_w{i}_{end}": shape for i in (1, 2) for end, shape in pair.items()})
    doubled = {name: tensor.double() for name, tensor in own.items()}
    product = (doubled["hada_w1_a"] @ doubled["hada_w1_b"]) * (doubled["hada_w2_a"] @ doubled["hada_w2_b"])
    named = {f"{LAYER}.{name}": tensor for name, tensor in own.items()}
    torch.testing.assert_close(changed_by(named, spec, tmp_path), before + 0.5 * product, rtol=1e-5, atol=1e-6)
    named[f"{LAYER}.alpha"] = torch.tensor(2.0)
    torch.testing.assert_close(
        changed_by(named, spec, tmp_path), before + 0.5 * 2 / RANK * product, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("shapes", "scaled"),
    [
        ({"w1": (4, 4), "w2": (6, 6)}, False),
        ({"w1": (4, 4), "w2_a": (6, RANK), "w2_b": (RANK, 6)}, True),
        ({"w1_a": (4, RANK), "w1_b": (RANK, 4), "w2_a": (6, RANK), "w2_b": (RANK, 6)}, True),
        ({"w1": (2, 12), "w2": (12, 2)}, False),
    ],
)
def test_lokr_is_a_kronecker_product(
    shapes: dict[str, tuple[int, ...]], scaled: bool, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.1")
    before = loaded(spec)[WEIGHT].double()
    own = random_tensors({f"lokr_{name}": shape for name, shape in shapes.items()})
    doubled = {name: tensor.double() for name, tensor in own.items()}
    first, second = (
        doubled[f"lokr_{name}"] if name in shapes else doubled[f"lokr_{name}_a"] @ doubled[f"lokr_{name}_b"]
        for name in ("w1", "w2")
    )
    named = {f"{LAYER}.{name}": tensor for name, tensor in own.items()} | {f"{LAYER}.alpha": torch.tensor(2.0)}
    scale = 2 / RANK if scaled else 1.0
    wanted = before + 0.5 * scale * torch.kron(first, second)
    torch.testing.assert_close(changed_by(named, spec, tmp_path), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("magnitude", ["lora_magnitude_vector.weight", "lora_magnitude_vector", "dora_scale"])
def test_dora_sets_the_norm_of_each_output(magnitude: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    before = loaded(spec)["blocks.0.ffn.net.0.proj.weight"].double()
    rows, columns = before.shape
    own = random_tensors({"lora_down.weight": (RANK, columns), "lora_up.weight": (rows, RANK)})
    norms = torch.rand(rows, generator=torch.Generator().manual_seed(1)) + 0.5
    named = {f"{FFN}.{name}": tensor for name, tensor in own.items()}
    named[f"{FFN}.{magnitude}"] = norms.reshape(-1, 1) if magnitude == "dora_scale" else norms
    changed = before + own["lora_up.weight"].double() @ own["lora_down.weight"].double()
    wanted = norms.double()[:, None] * changed / changed.norm(dim=1, keepdim=True)
    name = "blocks.0.ffn.net.0.proj.weight"
    torch.testing.assert_close(changed_by(named, spec, tmp_path, weight=1.0, name=name), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        changed_by(named, spec, tmp_path, weight=0.25, name=name),
        before + 0.25 * (wanted - before),
        rtol=1e-5,
        atol=1e-6,
    )


def test_dora_by_inputs_sets_the_norm_of_each_input(tiny: Tiny, tmp_path: Path) -> None:
    spec, name = tiny("wan2.1"), "blocks.0.ffn.net.0.proj.weight"
    before = loaded(spec)[name].double()
    rows, columns = before.shape
    own = random_tensors({"lora_down.weight": (RANK, columns), "lora_up.weight": (rows, RANK)})
    norms = torch.rand(1, columns, generator=torch.Generator().manual_seed(1)) + 0.5
    named = {f"{FFN}.{role}": tensor for role, tensor in (own | {"dora_scale": norms}).items()}
    changed = before + own["lora_up.weight"].double() @ own["lora_down.weight"].double()
    wanted = norms.double() * changed / changed.norm(dim=0, keepdim=True)
    torch.testing.assert_close(changed_by(named, spec, tmp_path, weight=1.0, name=name), wanted, rtol=1e-5, atol=1e-6)


def test_kinds_that_are_not_supported_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    spec = tiny("wan2.1")
    for role, kind in (
        ("oft_blocks", "OFT"),
        ("boft_R", "OFT"),
        ("ia3_l", "IA3"),
        ("vera_lambda_b", "VeRA"),
        ("a1.weight", "GLoRA"),
        ("lora_mid.weight", "Tucker"),
        ("hada_t1", "Tucker"),
    ):
        with subtests.test(role=role):
            lora = save(tmp_path / f"{role}.safetensors", {f"{LAYER}.{role}": torch.ones(4, 4)})
            with pytest.raises(ModelError) as refused:
                with_loras(spec, [lora], tmp_path)
            assert (refused.value.code, refused.value.data["kind"]) == ("lora.kind_unsupported", kind)


def test_incomplete_or_misshapen_factors_are_refused(tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests) -> None:
    spec = tiny("wan2.1")
    cases: list[tuple[dict[str, tuple[int, ...]], str]] = [
        ({"lokr_w1": (4, 4)}, "factor_missing"),
        ({"lokr_w1": (4, 4), "lokr_w2_a": (6, 2)}, "factor_missing"),
        ({"lokr_w1": (4, 4), "lokr_w2": (6, 6), "lokr_w2_a": (6, 2), "lokr_w2_b": (2, 6)}, "duplicate_module"),
        ({"lokr_w1": (4, 4), "lokr_w2": (6, 5)}, "other_size"),
        ({"lokr_w1": (4,), "lokr_w2": (6, 6)}, "not_matrices"),
        ({"lokr_w1": (4, 4), "lokr_w2_a": (6, 2), "lokr_w2_b": (3, 6)}, "ranks_differ"),
        ({"hada_w1_a": (24, 2), "hada_w1_b": (2, 24), "hada_w2_a": (24, 2)}, "factor_missing"),
        ({"hada_w1_a": (24, 2), "hada_w1_b": (2, 24), "hada_w2_a": (23, 2), "hada_w2_b": (2, 24)}, "ranks_differ"),
        ({"dora_scale": (24, 1)}, "magnitude_invalid"),
        ({"dora_scale": (1, 23), "lora_down.weight": (2, 24), "lora_up.weight": (24, 2)}, "magnitude_invalid"),
        ({"dora_scale": (24, 1), "diff": (24, 24)}, "magnitude_invalid"),
        ({"dora_scale": (23, 1), "lora_down.weight": (2, 24), "lora_up.weight": (24, 2)}, "magnitude_invalid"),
        ({"lokr_w1": (4, 4), "lokr_w2": (6, 6), "diff": (24, 24)}, "duplicate_module"),
    ]
    for number, (shapes, code) in enumerate(cases):
        with subtests.test(shapes=shapes):
            named = {f"{LAYER}.{name}": tensor for name, tensor in random_tensors(shapes).items()}
            with pytest.raises(ModelError) as refused:
                with_loras(spec, [save(tmp_path / f"{number}.safetensors", named)], tmp_path)
            assert refused.value.code == f"lora.{code}"


def test_the_bias_of_a_factor_is_scaled_like_the_product(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    before = loaded(spec)["blocks.0.attn1.to_q.bias"].double()
    own = random_tensors({"lora_A.weight": (RANK, 24), "lora_B.weight": (24, RANK), "lora_B.bias": (24,)})
    named = {f"{LAYER}.{name}": tensor for name, tensor in own.items()} | {f"{LAYER}.alpha": torch.tensor(2.0)}
    wanted = before + 0.5 * 2 / RANK * own["lora_B.bias"].double()
    changed = changed_by(named, spec, tmp_path, name="blocks.0.attn1.to_q.bias")
    torch.testing.assert_close(changed, wanted, rtol=1e-5, atol=1e-6)
