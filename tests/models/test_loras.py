"""LoRAs on tiny real transformers: every spelling adds w · (alpha / rank) · B A, and bad files are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.facts import Fact
from runtime.core.loras import Lora
from runtime.core.plan import ComponentPlan
from runtime.families.wan.lora_names import DISTILLED, NAMES, weight_shape
from runtime.models import lora_fusing, loras
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests import lora_files
from tests.lora_files import LINEAR, RANK, Tensors, factors

Tiny = Callable[[str], ModelSpec]


def part(dtype: str = "float32") -> ComponentPlan:
    return ComponentPlan(backend="pytorch", device="cpu", dtype=dtype, weights_bytes=0, reasons=())


def loaded(spec: ModelSpec, name: str = "transformer", dtype: str = "float32") -> dict[str, torch.Tensor]:
    return load_module(spec, name, part(dtype)).state_dict()


@pytest.fixture(scope="module")
def spec(tiny: Tiny) -> ModelSpec:
    return tiny("wan2.2-a14b")


@pytest.fixture(scope="module")
def plain(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return loaded(spec)


STYLES: dict[str, tuple[Callable[..., Tensors], float]] = {
    "peft": (lora_files.peft, 1.0),
    "peft without a prefix": (
        lambda found: {k.removeprefix("transformer."): v for k, v in lora_files.peft(found).items()},
        1.0,
    ),
    "peft's own": (
        lambda found: {
            k.replace("transformer.", "base_model.model.", 1).replace(".weight", ".default.weight"): v
            for k, v in lora_files.peft(found).items()
        },
        1.0,
    ),
    "wan": (lora_files.wan, 1.0),
    "wan with alpha": (lambda found: lora_files.wan(found, alpha=2.0), 2.0 / RANK),
    "musubi-tuner": (lambda found: lora_files.musubi(found, alpha=8.0), 8.0 / RANK),
    "musubi-tuner with whole alphas": (lambda found: lora_files.musubi(found, alpha=2), 2 / RANK),
}


@pytest.mark.parametrize("style", STYLES)
def test_every_naming_style_adds_the_same_product(
    style: str, spec: ModelSpec, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    named, scale = STYLES[style]
    found = factors(spec.transformer)
    path = lora_files.save(tmp_path / "a.safetensors", named(found))
    changed = loaded(with_loras(spec, [Lora(str(path), 0.5)], tmp_path))
    names = {theirs: ours for theirs, ours, _ in LINEAR}
    for (block, name), (down, up) in found.items():
        weight = f"blocks.{block}.{names[name]}.weight"
        wanted = plain[weight].double() + 0.5 * scale * up.double() @ down.double()
        torch.testing.assert_close(changed[weight].double(), wanted, rtol=1e-5, atol=1e-6)
    touched = {f"blocks.{block}.{names[name]}.weight" for block, name in found}
    assert all(torch.equal(changed[name], plain[name]) for name in plain.keys() - touched)
    assert changed.keys() == plain.keys()


@pytest.mark.parametrize("named", [lora_files.wan, lambda found: lora_files.wan(found, alpha=2.0), lora_files.musubi])
def test_tensor_names_are_read_as_diffusers_reads_them(named: Callable[..., Tensors], spec: ModelSpec) -> None:
    tensors = named(factors(spec.transformer))
    theirs = {name.removeprefix("transformer.") for name in WanLoraLoaderMixin.lora_state_dict(dict(tensors))}
    changes = [NAMES.change_of(name) for name in tensors]
    letters = {"down": "A", "up": "B"}
    found = [(change.layer, change.role) for change in changes if change is not None]
    ours = {f"{layer.title}.lora_{letters[role]}.weight" for layer, role in found if role in letters}
    assert ours == theirs


def test_changes_outside_the_blocks_and_full_weight_differences_are_added(
    spec: ModelSpec, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    wanted: Tensors = {}
    for theirs, ours in (
        ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
        ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
        ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
        ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
        ("time_projection.1", "condition_embedder.time_proj"),
        ("head.head", "proj_out"),
    ):
        out, into = plain[f"{ours}.weight"].shape
        down, up = torch.randn(2, into, generator=random), torch.randn(out, 2, generator=random)
        bias = torch.randn(out, generator=random)
        tensors |= {f"diffusion_model.{theirs}.lora_{end}.weight": t for end, t in (("down", down), ("up", up))}
        tensors[f"diffusion_model.{theirs}.diff_b"] = bias
        wanted |= {f"{ours}.weight": up @ down, f"{ours}.bias": bias}
    for theirs, ours in (
        ("patch_embedding.diff", "patch_embedding.weight"),
        ("patch_embedding.diff_b", "patch_embedding.bias"),
        ("blocks.1.norm3.diff", "blocks.1.norm2.weight"),
        ("blocks.1.norm3.diff_b", "blocks.1.norm2.bias"),
        ("blocks.0.self_attn.norm_q.diff", "blocks.0.attn1.norm_q.weight"),
        ("blocks.0.cross_attn.norm_k.diff", "blocks.0.attn2.norm_k.weight"),
        ("blocks.0.modulation.diff", "blocks.0.scale_shift_table"),
        ("head.modulation.diff", "scale_shift_table"),
    ):
        tensors[f"diffusion_model.{theirs}"] = wanted[ours] = torch.randn(plain[ours].shape, generator=random)
    path = lora_files.save(tmp_path / "a.safetensors", tensors)
    changed = loaded(with_loras(spec, [Lora(str(path), 2.0)], tmp_path))
    for name, delta in wanted.items():
        torch.testing.assert_close(changed[name], plain[name] + 2.0 * delta, rtol=1e-5, atol=1e-5)
    assert {name for name in plain if not torch.equal(changed[name], plain[name])} == wanted.keys()


def test_two_loras_are_added_and_the_sum_is_rounded_once(spec: ModelSpec, tmp_path: Path) -> None:
    first, second = (factors(spec.transformer, rank, seed=rank) for rank in (2, 5))
    paths = [
        lora_files.save(tmp_path / f"{i}.safetensors", lora_files.wan(found)) for i, found in enumerate((first, second))
    ]
    both = with_loras(spec, [Lora(str(paths[0]), 0.3), Lora(str(paths[1]), 0.7)], tmp_path)
    before, after = loaded(spec, dtype="bfloat16"), loaded(both, dtype="bfloat16")
    name = "blocks.1.attn2.to_v.weight"
    (d1, u1), (d2, u2) = first[1, "cross_attn.v"], second[1, "cross_attn.v"]
    assert torch.equal(after[name], (before[name].float() + 0.3 * (u1 @ d1) + 0.7 * (u2 @ d2)).bfloat16())


def test_the_request_or_the_files_name_selects_the_expert(spec: ModelSpec, tmp_path: Path, tiny: Tiny) -> None:
    tensors = lora_files.peft(factors(spec.transformer))
    high = lora_files.save(tmp_path / "x_high_noise_model.safetensors", tensors)
    plain_name = lora_files.save(tmp_path / "x.safetensors", tensors)
    for lora, changes in (
        (Lora(str(high)), ["transformer"]),
        (Lora(str(high), expert="low"), ["transformer_2"]),
        (Lora(str(plain_name)), ["transformer", "transformer_2"]),
        (Lora(str(plain_name), expert="high"), ["transformer"]),
    ):
        given = with_loras(spec, [lora], tmp_path)
        assert [name for name in given.component_names if given.loras_of(name)] == changes
    low = loaded(with_loras(spec, [Lora(str(plain_name), expert="high")], tmp_path), "transformer_2")
    assert all(torch.equal(tensor, low[name]) for name, tensor in loaded(spec, "transformer_2").items())
    one = tiny("wan2.1")
    with pytest.raises(InvalidRequestError) as refused:
        with_loras(one, [Lora(str(high))], tmp_path)
    assert (refused.value.code, refused.value.data["expert"]) == ("lora.no_such_expert", "high")
    assert with_loras(one, [Lora(str(plain_name))], tmp_path).loras_of("transformer")


def test_a_lora_that_changed_since_planning_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    path = lora_files.save(tmp_path / "a.safetensors", lora_files.peft(factors(spec.transformer)))
    given = with_loras(spec, [Lora(str(path))], tmp_path)
    lora_files.save(path, lora_files.peft(factors(spec.transformer, seed=9)))
    with pytest.raises(ModelError) as refused:
        loaded(given)
    assert refused.value.fact == Fact("lora.changed", {"lora": "a"})


@pytest.mark.parametrize("error", [OSError("Input/output error"), SafetensorError("HeaderTooLarge")])
def test_a_lora_that_cannot_be_read_is_an_error(
    error: Exception, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lora_files.save(tmp_path / "a.safetensors", lora_files.peft(factors(spec.transformer)))
    given = with_loras(spec, [Lora(str(path))], tmp_path)

    def unreadable(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(lora_fusing, "safe_open", unreadable)
    with pytest.raises(ModelError) as refused:
        loaded(given)
    assert refused.value.fact == Fact("lora.fusing_failed", {"reason": str(error)})


def test_every_shape_in_the_table_equals_the_transformers(tiny: Tiny) -> None:
    for architecture in ("wan2.1", "wan2.2-ti2v-5b"):
        spec = tiny(architecture)
        checked = 0
        for name, tensor in loaded(spec).items():
            module = name.removesuffix(".weight")
            wanted = weight_shape(spec, module)
            if module == name and not name.endswith("scale_shift_table"):  # a bias
                continue
            assert wanted is not None, name
            assert [want or have for want, have in zip(wanted, tensor.shape, strict=True)] == list(tensor.shape), name
            checked += 1
        assert checked == 2 * (10 + 4 + 1 + 1) + 8


def widened(tensors: Tensors) -> Tensors:
    return {
        name: torch.cat([tensor, tensor], dim=-1) if ".lora_A." in name else tensor for name, tensor in tensors.items()
    }


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


TO_Q = "transformer.blocks.0.attn1.to_q"
DOWN = f"{TO_Q}.lora_A.weight"
MODULE = {"module": "blocks.0.attn1.to_q"}
WIDE = {"module": "blocks.0.attn1.to_k", "shape": "24×48", "expected": "24×24"}
OTHER_NAME = "diffusion_model.blocks.0.self_attn.q.lora_A.weight"


UNKNOWN = (
    "lora_te_text_model.lora_up.weight",
    "transformer.blocks.0.attn3.to_q.lora_A.weight",
    f"{TO_Q}.lora_C.weight",
)


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        (widened, "other_size", WIDE),
        *((with_tensor(name, torch.ones(4, 24)), "unknown_tensor", {"tensor": name}) for name in UNKNOWN),
        (with_tensor(DOWN.replace("0", "7"), torch.ones(4, 24)), "larger_model", {"module": "blocks.7.attn1.to_q"}),
        (without(f"{TO_Q}.lora_B.weight"), "factor_missing", MODULE),
        (with_tensor(f"{TO_Q}.lora_B.weight", torch.ones(24, 3)), "ranks_differ", {**MODULE, "ranks": [4, 3]}),
        (with_tensor(DOWN, torch.ones(4, 24).fill_(float("nan"))), "not_finite", {"tensor": DOWN}),
        (with_tensor(DOWN, torch.ones(4, 24).half().fill_(float("inf"))), "not_finite", {"tensor": DOWN}),
        (with_tensor(DOWN, torch.ones(4, 24).bfloat16() * float("-inf")), "not_finite", {"tensor": DOWN}),
        (with_tensor(DOWN, torch.ones(4, 24, dtype=torch.int8)), "dtype_unsupported", {"dtype": "I8"}),
        (with_tensor(f"{TO_Q}.alpha", torch.ones(3)), "alpha_invalid", MODULE),
        (with_tensor(f"{TO_Q}.alpha", torch.ones(3, dtype=torch.int64)), "alpha_invalid", MODULE),
        (with_tensor(f"{TO_Q}.alpha", torch.ones(1, dtype=torch.uint8)), "dtype_unsupported", {"dtype": "U8"}),
        (with_tensor(f"{TO_Q}.diff", torch.ones(24, 24)), "duplicate_module", MODULE),
        (with_tensor(OTHER_NAME, torch.ones(4, 24)), "duplicate_module", MODULE),
        (with_tensor("transformer.blocks.0.norm2.diff", torch.ones(25)), "other_size", {"shape": "25"}),
        (lambda tensors: {}, "empty", {}),
        (lambda tensors: {f"{TO_Q}.alpha": torch.tensor(1.0)}, "empty", {}),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_loaded(
    change: Callable[[Tensors], Tensors], code: str, data: dict[str, object], spec: ModelSpec, tmp_path: Path
) -> None:
    path = lora_files.save(tmp_path / "an ü.safetensors", lora_files.peft(factors(spec.transformer)), change)
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert refused.value.code == f"lora.{code}"
    assert refused.value.data.items() >= data.items()
    assert str(refused.value.data["lora"]).startswith("an ü")
    assert refused.value.remedy and "\n" not in refused.value.what


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-7],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"more",
        lambda data: b"\x80\x02}q\x00." * 20,
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"F32"', b'"F16"', 1),
        lambda data: data.replace(b"[4,24]", b"[4,-4]", 1),
        lambda data: data.replace(b'"data_offsets"', b'"data_offsetz"', 1),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], spec: ModelSpec, tmp_path: Path) -> None:
    path = lora_files.save(tmp_path / "a.safetensors", lora_files.peft(factors(spec.transformer)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert refused.value.code in {"lora.damaged", "lora.header_invalid", "lora.dtype_unsupported"}
    assert refused.value.data["lora"] == "a.safetensors"


def test_names_resolve_only_inside_the_caches_folder(spec: ModelSpec, tmp_path: Path) -> None:
    tensors = lora_files.peft(factors(spec.transformer))
    folder = tmp_path / "weights" / "loras"
    lora_files.save(folder / "stil für boote.safetensors", tensors)
    lora_files.save(folder / "lightning" / "low_noise_model.safetensors", tensors)
    outside = lora_files.save(tmp_path / "outside.safetensors", tensors)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "circle.safetensors").symlink_to(folder / "circle.safetensors")
    (folder / "pickle.pt").write_bytes(b"\x80\x02")
    for name in ("stil für boote", "lightning/low_noise_model"):
        assert with_loras(spec, [Lora(name)], tmp_path / "weights").loras[0].path.is_relative_to(folder)
    for name in ("link", "circle", "pickle", "nothing", "outside", "x" * 900):
        with pytest.raises(ModelError) as unknown:
            with_loras(spec, [Lora(name)], tmp_path / "weights")
        assert unknown.value.code == "lora.unknown"
    for name in ("../../outside", str(tmp_path / "none.safetensors"), "~nobody/x.safetensors", str(tmp_path)):
        with pytest.raises(ModelError) as missing:
            with_loras(spec, [Lora(name)], tmp_path / "weights")
        assert missing.value.code == "lora.unknown"
    with pytest.raises(ModelError) as pickled:
        with_loras(spec, [Lora(str(folder / "pickle.pt"))], tmp_path / "weights")
    assert pickled.value.fact == Fact("lora.not_safetensors", {"lora": "pickle.pt"})
    # A path that is given is the user's own to follow.
    assert with_loras(spec, [Lora(str(folder / "link.safetensors"))], tmp_path).loras[0].path == outside


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("Wan2.2-T2V-A14B-4steps-lora-250928/high_noise_model", 4),
        ("Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32", 4),
        ("Wan21_CausVid_14B_T2V_lora_rank32", 3),
        ("self_forcing_dmd", 4),
        ("FastWan2.1_T2V_14B_480p_lora_rank_128", 3),
        ("wan2.2_t2v_lightx2v_8steps_lora_v1_low_noise", 8),
        ("Wan2.2-Lightning/low", 4),
        ("footsteps", None),
        ("style_2000steps", None),
        ("boat-epoch-4", None),
    ],
)
def test_the_name_identifies_step_distillation(name: str, steps: int | None) -> None:
    assert DISTILLED.steps(Path("loras") / f"{name}.safetensors") == steps


def test_step_distillation_sets_the_defaults_of_both_experts(spec: ModelSpec, tmp_path: Path) -> None:
    path = lora_files.save(tmp_path / "lightning-4steps.safetensors", lora_files.peft(factors(spec.transformer)))
    spec = replace(spec, defaults=replace(spec.defaults, image_guidance_scale=2.0, image_guidance_scale_2=2.0))
    quick = with_loras(spec, [Lora(str(path))], tmp_path).defaults
    assert quick.steps == 4
    assert [quick.guidance(from_image=given) for given in (False, True)] == [(1.0, 1.0)] * 2
    assert with_loras(spec, [], tmp_path).defaults == spec.defaults


def test_step_distillation_with_new_noise_sets_the_noise_levels(spec: ModelSpec, tmp_path: Path) -> None:
    def save(name: str) -> Lora:
        return Lora(str(lora_files.save(tmp_path / name, lora_files.peft(factors(spec.transformer)))))

    fast, causal = save("FastWan-rank-128.safetensors"), save("causvid.safetensors")
    forcing, lightning = save("Self-Forcing.safetensors"), save("lightning-4steps.safetensors")
    for used_loras, levels, steps in (
        ([fast], (1.0, 0.757, 0.522), 3),
        ([fast, causal], (1.0, 0.757, 0.522), 3),
        ([forcing], (1.0, 0.9375, 0.8333, 0.625), 4),
        ([fast, forcing], (), 4),
        ([fast, lightning], (), 4),
        ([lightning], (), 4),
    ):
        used = with_loras(spec, used_loras, tmp_path)
        assert used.noise.levels == pytest.approx(levels, abs=1e-4)
        assert (used.defaults.steps, used.noise.renewed) == (steps, bool(levels))
        assert (used.noise == spec.noise, used.scheduler == spec.scheduler) == (not levels, not levels)


def test_files_are_read_once_and_again_when_they_change(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lora_files.save(tmp_path / "a.safetensors", lora_files.peft(factors(spec.transformer)))
    first = with_loras(spec, [Lora(str(path))], tmp_path).loras[0]
    json.loads(json.dumps(first.model_dump(mode="json")))
    assert type(first).model_validate(first.model_dump(mode="json")) == first
    tensors = load_file(path)
    lora_files.save(path, {name: tensor * 2 for name, tensor in tensors.items()})
    assert with_loras(spec, [Lora(str(path))], tmp_path).loras[0].digest != first.digest
    assert first.model_copy(update={"weight": 2.0}).identity != first.identity
    assert loras.loras_dir(tmp_path) == tmp_path / "loras"


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        ({"lora_alpha": 2, "r": 4}, 2 / 4),
        ({"transformer.lora_alpha": 2, "transformer.r": 4, "transformer.target_modules": ["to_q"]}, 2 / 4),
        ({"transformer.lora_alpha": 2, "transformer.use_rslora": True}, 2 / 4**0.5),
        *(
            ({"transformer.lora_alpha": 2, "transformer.alpha_pattern": {pattern: 12.0}}, None)
            for pattern in (
                "blocks.0.attn1.to_q",
                "^blocks.0.attn1.to_q",
                r"0\.attn1\.to_[qv]",
                "0.*to_q|to_v",
                "to_q",
                "0.attn1.(to_q|to_v)",
            )
        ),
        ({"lora_alpha": 2, "rank_pattern": {"(a*)*b": 1}}, 2 / 4),
        ({"lora_alpha": 2, "alpha_pattern": {"^attn1.to_q": 12.0, "0.attn1.to_": 12.0}}, 2 / 4),
    ],
)
def test_alpha_in_diffusers_metadata_scales_the_product(
    metadata: dict[str, object], scale: float | None, spec: ModelSpec, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    factors = lora_files.factors(spec.transformer)
    path = tmp_path / "style.safetensors"
    save_file(lora_files.peft(factors), path, metadata={"lora_adapter_metadata": json.dumps(metadata)})
    changed = loaded(with_loras(spec, [Lora(str(path))], tmp_path))
    for block, name in ((0, "to_q"), (1, "to_k")):
        down, up = factors[block, f"self_attn.{name[-1]}"]
        parameter = f"blocks.{block}.attn1.{name}.weight"
        own = scale if scale is not None else {0: 12 / 4, 1: 2 / 4}[block]
        assert torch.allclose(changed[parameter], plain[parameter] + own * up @ down, atol=1e-6)


def test_alpha_of_pefts_configuration_beside_the_file_scales_the_product(
    spec: ModelSpec, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    factors = lora_files.factors(spec.transformer)
    path, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    lora_files.save(path, lora_files.peft(factors))
    down, up = factors[0, "self_attn.q"]
    digests = set()
    for alpha in (2, 12):
        config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": alpha}))
        given = with_loras(spec, [Lora(str(path))], tmp_path)
        changed = loaded(given)["blocks.0.attn1.to_q.weight"]
        assert torch.allclose(changed, plain["blocks.0.attn1.to_q.weight"] + alpha / 4 * up @ down, atol=1e-6)
        digests.add(given.loras[0].digest)
    config.unlink()
    digests.add(with_loras(spec, [Lora(str(path))], tmp_path).loras[0].digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"lora_alpha": "x"}',
        '{"lora_alpha": 1, "use_rslora": "x"}',
        '{"lora_alpha": 1, "alpha_pattern": {"(a*)*b": 1}}',
        '{"lora_alpha": 1, "alpha_pattern": {".*a.*b.*c.*d": 1}}',
        '{"alpha": 1, "peft_type": "LOKR", "rank_pattern": {"*": 1}}',
    ],
)
def test_malformed_metadata_is_refused(text: str, spec: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "style.safetensors"
    save_file(lora_files.peft(lora_files.factors(spec.transformer)), path, metadata={"lora_adapter_metadata": text})
    with pytest.raises(ModelError) as caught:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert caught.value.code == "lora.metadata_invalid"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_factors_in_float8_are_upcast(
    dtype: torch.dtype, spec: ModelSpec, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    factors = lora_files.factors(spec.transformer)
    path = tmp_path / "style.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in lora_files.peft(factors).items()}, path)
    changed = loaded(with_loras(spec, [Lora(str(path))], tmp_path))
    down, up = (factor.to(dtype).float() for factor in factors[0, "self_attn.q"])
    parameter = "blocks.0.attn1.to_q.weight"
    assert torch.allclose(changed[parameter], plain[parameter] + up @ down, atol=1e-6)
    save_file({"transformer.blocks.0.attn1.to_q.diff": torch.full((24, 24), float("nan")).to(dtype)}, path)
    with pytest.raises(ModelError) as caught:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert caught.value.code == "lora.not_finite"
