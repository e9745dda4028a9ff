"""Transformers in single files: recognised, loaded as their formats' own tools read them, refused if they are wrong."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanAnimateTransformer3DModel, WanTransformer3DModel, WanVACETransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runtime.cli.main import run
from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.loras import Lora
from runtime.core.plan import ComponentPlan
from runtime.core.request import GenerationRequest
from runtime.engines.programs import load_program
from runtime.execution.block_engines import _parameter
from runtime.families.wan import file_names
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.transformer_spec import AnimateTransformerSpec
from runtime.models import catalogue, gguf_files, single_file
from runtime.models.catalogue import find, look_up, unusable
from runtime.models.loras import with_loras
from runtime.models.packed_layers import PackedLinear, read_plain
from runtime.models.registry import published_models
from runtime.models.requested import with_inputs
from runtime.models.single_file import expert_of, model_name, other_expert, reassemble
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import file_tensors, stored_weights
from runtime.models.tensor_stream import MappedFiles
from runtime.models.weights import load_module, load_stored
from runtime.planner.memory_model import weights_bytes
from runtime.planner.resolve import PlanningContext, resolve
from tests import lora_files, transformer_files
from tests.plans import machine
from tests.tiny_models import ANIMATE
from tests.transformer_files import (
    FOLDERS,
    FORMATS,
    State,
    quantized_folder,
    save_fp8_scaled,
    save_gguf,
    save_plain,
    suffix_of,
    wan_names,
    wide_transformer,
)

# Of a control branch: one block for every second one.
CONTROL: dict[str, Any] = {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 2 * 16 + 8**2}
# Of a face: encoders and attentions, with sizes that do not repeat each other; levels have diffusers' sides.
FACE: dict[str, Any] = {
    "num_layers": 4,
    "in_channels": 36,
    "latent_channels": 16,
    "image_dim": 24,
    "added_kv_proj_dim": 256,
    "motion_encoder_channel_sizes": {str(1 << power): power for power in range(2, 10)},
    "motion_style_dim": 6,
    "motion_dim": 3,
    "motion_encoder_dim": 7,
    "face_encoder_hidden_dim": 5,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
KINDS: tuple[Any, ...] = (WanTransformer3DModel, WanVACETransformer3DModel, WanAnimateTransformer3DModel)
Tiny = Callable[[str], ModelSpec]
FLOAT32 = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())


@pytest.fixture(scope="module")
def state() -> State:
    """Parameters of a transformer, none of them zero or one."""
    model = wide_transformer()
    random = torch.Generator().manual_seed(1)
    return {
        name: (parameter + 0.1 * torch.randn(parameter.shape, generator=random)).detach()
        for name, parameter in model.named_parameters()
    }


@pytest.fixture
def weights(tiny: Tiny, tmp_path: Path) -> Path:
    """A weights folder with a small model, whose text encoder and VAE the files can use."""
    folder = tmp_path / "weights"
    shutil.copytree(tiny("wan2.1").directory, folder / "base")
    return folder


def predict(module: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 2, 4, 4, generator=random), torch.randn(1, 8, 32, generator=random)
    with torch.no_grad():
        output: torch.Tensor = module(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    return output


def module_of(state: Mapping[str, torch.Tensor]) -> Any:
    module = wide_transformer()
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return module


def refused(name: str, weights: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        find(name, weights)
    return caught.value


@pytest.mark.parametrize(("channels", "boundary"), [(16, 0.875), (36, 0.9)])
@pytest.mark.parametrize("stated", [None, 0.5])
def test_the_boundary_of_two_experts_is_that_of_their_kind(
    channels: int, boundary: float, stated: float | None, weights: Path
) -> None:
    """The folder with the other components states that of its own model, which may be of another kind."""
    index = weights / "base" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "boundary_ratio": stated}))
    state = dict(wide_transformer(in_channels=channels).state_dict())
    for expert in ("high", "low"):
        save_plain(weights / f"wan_{expert}_noise.safetensors", state, torch.bfloat16)
    spec = find("wan", weights)
    assert (spec.experts, spec.boundary_ratio) == (2, stated if stated and channels == 16 else boundary)


@pytest.mark.slow
@pytest.mark.parametrize("title", FORMATS)
def test_each_format_computes_what_its_own_tools_read(title: str, state: State, weights: Path) -> None:
    held = FORMATS[title](weights / f"model{suffix_of(title)}", state)
    spec = find("model", weights)
    assert spec.title.endswith(title)
    assert spec.directory == weights / "base"
    module = load_module(spec, "transformer", FLOAT32)
    expected = predict(module_of(held))
    assert torch.allclose(predict(module), expected, rtol=0, atol=1e-5)
    # The blocks' matrices stay as they are stored, and the planner knows.
    packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    assert len(packed) == (0 if title in {"BF16", "F16"} else 2 * 10)
    assert all(layer.weight.dtype in {torch.uint8, torch.int8, torch.float8_e4m3fn} for layer in packed)
    held_in_memory = (*module.named_parameters(), *module.named_buffers())
    actual = sum(tensor.nbytes for name, tensor in held_in_memory if not name.startswith("rope"))
    predicted = weights_bytes(spec, dict.fromkeys(spec.component_names, "float32"))["transformer"]
    assert actual == pytest.approx(predicted, rel=0.01)
    # Engines are verified against this module, and built of plain layers.
    assert torch.allclose(predict(load_stored(spec, "transformer")), expected, rtol=0, atol=1e-5)
    plain = load_module(spec, "transformer", FLOAT32, dequantize=True)
    assert not any(isinstance(layer, PackedLinear) for layer in plain.modules())
    assert torch.allclose(predict(plain), expected, rtol=0, atol=1e-5)
    assert load_program(spec, "transformer", "transformer", device="cpu", dtype="float32").name == "transformer"
    again = reassemble(spec.single_files, {"transformer": spec.files["transformer"].config}, spec.directory)
    assert again == spec


@pytest.mark.slow
@pytest.mark.parametrize("title", ["BF16", "FP8 with scales", "GGUF Q4_K"])
def test_files_of_vace_compute_what_their_own_tools_read(title: str, weights: Path) -> None:
    module = wide_transformer(seed=3, **CONTROL)
    held = FORMATS[title](weights / f"wan2.1_vace_14B{suffix_of(title)}", dict(module.state_dict()))
    spec = find("wan2.1_vace_14B", weights)
    assert spec.title.endswith(title) and spec.control_input is not None and spec.control_input.blocks == 2
    module.load_state_dict({name: tensor.float() for name, tensor in held.items()})
    random = torch.Generator().manual_seed(0)
    latents, control = (torch.randn(1, count, 2, 4, 4, generator=random) for count in (16, 96))
    text, scales = torch.randn(1, 8, 32, generator=random), (0.5, 1.5)
    with torch.no_grad():
        wanted = module(latents, torch.tensor([500.0]), text, None, control, torch.tensor(scales), return_dict=False)[0]
    loaded: Any = load_module(spec, "transformer", FLOAT32)
    packed = [layer for layer in loaded.vace_blocks.modules() if isinstance(layer, PackedLinear)]
    # The projections before and after control blocks keep their precision.
    assert len(packed) == (0 if title == "BF16" else 2 * 10 + 1)
    denoiser = PyTorchDenoiser(loaded)
    denoiser.steer(scales)
    got = denoiser(torch.cat([latents, control], dim=1), torch.tensor(500.0), text)
    assert wanted.std() > 0.1
    assert torch.allclose(got, wanted, rtol=0, atol=1e-5)


def save_bf16(path: Path, state: State, named: transformer_files.Renamed, prefix: str = "") -> State:
    """Save in bfloat16, under names of a kind; return what the file holds."""
    held = {name: tensor.bfloat16() for name, tensor in state.items()}
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in named(held).items()}, path)
    return held


ANIMATE_NAMES: dict[str, Any] = {
    "named": transformer_files.animate_names,
    "back": transformer_files.animate_names_back,
}
ANIMATE_FILES: dict[str, Callable[[Path, State], State]] = {
    "Wan2.2_animate_14B_bf16.safetensors": lambda path, state: save_bf16(
        path, state, transformer_files.animate_names, "model.diffusion_model."
    ),
    "diffusers.safetensors": lambda path, state: save_bf16(path, state, dict),
    "Wan2_2-Animate-14B_fp8_e4m3fn_scaled_KJ.safetensors": lambda path, state: save_fp8_scaled(
        path, state, **ANIMATE_NAMES
    ),
    "Wan2.2-Animate-14B-Q4_K_M.gguf": lambda path, state: save_gguf(path, state, "Q4_K", **ANIMATE_NAMES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANIMATE_FILES)
def test_files_of_animate_hold_the_same_weights(name: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny(ANIMATE).directory, tmp_path / "base")
    module = wide_transformer(seed=3, **FACE)
    state = dict(module.state_dict())
    held = ANIMATE_FILES[name](tmp_path / name, state)
    spec = find(Path(name).stem, tmp_path)
    assert isinstance(spec.transformer, AnimateTransformerSpec) and spec.transformer.face_blocks == 2
    assert spec.control_input is not None and spec.control_input.required == ("control", "face")
    assert spec.parameters["transformer"] == sum(tensor.numel() for tensor in state.values())
    config = spec.files["transformer"].config
    assert {key: config[key] for key in FACE} == FACE and config["motion_encoder_size"] == 512
    loaded: Any = load_module(spec, "transformer", FLOAT32, dequantize=True)
    assert isinstance(loaded, WanAnimateTransformer3DModel)
    assert set(held) == set(state) == set(loaded.state_dict())
    # Quantized in blocks and attentions to the face only; values of some formats are rounded once more.
    for key, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, held[key].float(), rtol=0, atol=1e-5 if "Q4_K" in name else 0, msg=key)
    packed = [
        key
        for key, layer in load_module(spec, "transformer", FLOAT32).named_modules()
        if isinstance(layer, PackedLinear)
    ]
    assert sum(key.startswith("face_adapter.") for key in packed) == (2 * 4 if "_fp8" in name or "Q4" in name else 0)
    assert not any(key.startswith(("motion_", "face_encoder")) for key in packed)
    again = reassemble(spec.single_files, {"transformer": config}, spec.directory)
    assert again == spec


def test_files_of_other_kinds_take_no_face(weights: Path, tiny: Tiny, tmp_path: Path) -> None:
    """A file is what its tensors are, whatever its name and the folder beside it."""
    shutil.copytree(tiny(ANIMATE).directory, tmp_path / "base")
    shutil.copytree(tiny("wan2.1").directory, weights / "other")
    request = {"prompt": "a boat", "model": "Wan2.2-Animate-14B", "face": "face.mp4", "control": "control.mp4"}
    for more in ({}, CONTROL):
        save_plain(tmp_path / "Wan2.2-Animate-14B.safetensors", module_state(**more), torch.bfloat16)
        spec = find("Wan2.2-Animate-14B", tmp_path)
        assert "nimate" not in spec.title
        with pytest.raises(InvalidRequestError) as caught:
            with_inputs(spec, GenerationRequest.from_mapping(request), tmp_path, tmp_path)
        expected = ("face", "control.other_model") if more else ("control", "control.model_without")
        assert (caught.value.field, caught.value.code) == expected
    # Of Animate, without the components that it needs.
    save_bf16(weights / "animate.safetensors", module_state(**FACE), transformer_files.animate_names)
    assert refused("animate", weights).code == "model.file_unfit"
    for missing, code in (
        ("face_adapter.fuser_blocks.1.linear2.weight", "model.file_tensor_missing"),
        ("motion_encoder.enc.fc.4.bias", "model.file_tensor_missing"),
        ("img_emb.proj.0.weight", "model.file_unknown"),
    ):
        state = transformer_files.animate_names(module_state(**FACE))
        save_file(without(missing)(state), weights / "animate.safetensors")
        assert refused("animate", weights).code == code, missing


def test_a_file_of_vace_is_the_published_model() -> None:
    """Shapes alone fit plain models as well: all their tensors are in VACE's."""
    for known in published_models("wan"):
        config = {"num_attention_heads": 1, "attention_head_dim": 1, **known.configs["transformer"]}
        found = single_file._known(published_models("wan"), config, known.experts, Path(f"{known.name}.safetensors"))
        assert found is not None
        kind = "_class_name"
        assert found.configs["transformer"].get(kind) == known.configs["transformer"].get(kind)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_control_blocks_alone_are_refused(prefix: str, weights: Path) -> None:
    state = wan_names(wide_transformer(**CONTROL).state_dict())
    alone = {f"{prefix}{name}": tensor for name, tensor in state.items() if name.startswith("vace_")}
    save_file(alone, weights / "Wan2_1-VACE_module_14B_bf16.safetensors")
    assert refused("Wan2_1-VACE_module_14B_bf16", weights).code == "model.file_has_control_blocks_only"


@pytest.mark.parametrize("title", ["BF16", "FP8", "FP8 with scales", "GGUF Q4_K", "INT8"])
def test_a_lora_is_added_to_a_weight_of_a_file(title: str, state: State, weights: Path, tmp_path: Path) -> None:
    held = FORMATS[title](weights / f"model{suffix_of(title)}", state)
    spec = find("model", weights)
    factors = lora_files.factors(spec.transformer)
    tensors = lora_files.wan(factors)
    # Lightning's files store alpha as a whole number.
    tensors |= {f"diffusion_model.blocks.{block}.{name}.alpha": torch.tensor(8) for block, name in factors}
    # One change is no product of two matrices.
    whole = "diffusion_model.blocks.0.ffn.0."
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(whole)}
    down, up = factors[0, "ffn.0"]
    tensors[f"{whole}diff"] = 8 / lora_files.RANK * up @ down
    save_file(tensors, tmp_path / "style.safetensors")
    use = Lora(str(tmp_path / "style.safetensors"), 0.5)
    names = {wan: diffusers for wan, diffusers, _ in lora_files.LINEAR}
    for (block, name), (down, up) in factors.items():
        parameter = f"blocks.{block}.{names[name]}.weight"
        held[parameter] = held[parameter].float() + 0.5 * 8 / lora_files.RANK * up @ down
    changed = with_loras(spec, [use], weights)
    module = load_module(changed, "transformer", FLOAT32)
    assert torch.allclose(predict(module), predict(module_of(held)), rtol=0, atol=1e-4)
    if spec.is_packed:
        of_file = (tmp_path / "style.safetensors").stat().st_size
        assert changed.files["transformer"].packed_bytes == spec.files["transformer"].packed_bytes + of_file
        packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
        assert sum(len(layer._products) for layer in packed) == len(factors) - 1
        assert sum(len(layer._added) for layer in packed) == 1


def test_block_engines_get_a_weight_dequantized(state: State, weights: Path) -> None:
    held = save_gguf(weights / "model.gguf", state, "Q4_K")
    block: Any = load_module(find("model", weights), "transformer", FLOAT32).get_submodule("blocks.0")
    got = _parameter(block, "attn1.to_q.weight", torch.bfloat16)
    # GGUF is dequantized in float16 here.
    assert torch.allclose(got.float(), held["blocks.0.attn1.to_q.weight"], rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("style", ["scale_weight", "weight_scale"])
def test_both_of_comfyuis_scales_are_read(style: str, state: State, weights: Path) -> None:
    held = save_fp8_scaled(weights / "model.safetensors", state, style)
    module = load_module(find("model", weights), "transformer", FLOAT32)
    assert torch.allclose(predict(module), predict(module_of(held)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("known", published_models("wan"), ids=lambda known: known.name)
def test_published_architectures_are_recognised_by_names_and_shapes(known: Any) -> None:
    named_kind = known.configs["transformer"].get("_class_name", "WanTransformer3DModel")
    kind = {kind.__name__: kind for kind in KINDS}[named_kind]
    with init_empty_weights():
        module: Any = kind.from_config(known.configs["transformer"])
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    config = file_names.config_of(shapes, [])
    assert config is not None
    assert dict(file_names.parameters(config)) == shapes
    assert {name: config[name] for name in known.configs["transformer"] if name in config} == {
        name: value for name, value in known.configs["transformer"].items() if name in config
    }
    position = "condition_embedder.image_embedder.pos_embed"
    own = {name: parameter for name, parameter in module.named_parameters() if name != position}
    # The two names that diffusers' converter does not have.
    of_face = "face_adapter.0.to_q.weight" in shapes
    renamed = transformer_files.animate_names if of_face else transformer_files.wan_names
    named = [*renamed(own), *(["img_emb.emb_pos"] if position in shapes else [])]
    found = file_names.diffusers_names(named).values()
    assert {name for names in found for name in ((names,) if isinstance(names, str) else names)} == set(shapes)


def test_types_of_gguf() -> None:
    for number, kind in gguf_files.TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.nbytes)


@pytest.mark.parametrize(
    ("high", "low", "name"),
    [
        ("wan2.2_t2v_high_noise_14B_fp8_scaled", "wan2.2_t2v_low_noise_14B_fp8_scaled", "wan2.2_t2v_14B_fp8_scaled"),
        ("HighNoise/Wan2.2-T2V-HighNoise-Q4_K_M", "LowNoise/Wan2.2-T2V-LowNoise-Q4_K_M", "Wan2.2-T2V-Q4_K_M"),
        ("wan22-HIGH-v2", "wan22-LOW-v2", "wan22-v2"),
    ],
)
def test_names_of_experts(high: str, low: str, name: str) -> None:
    pair = [Path("/models", f"{one}.gguf") for one in (high, low)]
    assert [expert_of(path) for path in pair] == ["high", "low"]
    assert [model_name(path) for path in pair] == [name, name]
    assert pair[1] in other_expert(pair[0])
    assert pair[0] in other_expert(pair[1])
    assert expert_of(Path("highres-slow.gguf")) is None


def test_two_experts_are_one_model(state: State, weights: Path) -> None:
    save_gguf(weights / "wan_high_noise_x.gguf", state, "Q8_0")
    error = refused(str(weights / "wan_high_noise_x.gguf"), weights)
    assert error.code == "model.file_expert_missing"
    assert error.fact.data["path"] == str(weights / "wan_low_noise_x.gguf")
    assert unusable(weights, {"base"})["wan_x"].code == "model.file_expert_missing"
    other = {name: 2 * tensor for name, tensor in state.items()}
    save_gguf(weights / "wan_low_noise_x.gguf", other, "Q8_0")
    assert list(catalogue.transformer_files(weights)) == ["wan_x"]
    for name in ("wan_x", "WAN_X", "wan_low_noise_x.gguf", str(weights / "wan_high_noise_x.gguf")):
        spec = find(name, weights)
        assert spec.experts == 2
        assert [spec.single_files[part].name for part in ("transformer", "transformer_2")] == [
            "wan_high_noise_x.gguf",
            "wan_low_noise_x.gguf",
        ]
    first, second = (dict(load_module(spec, name, FLOAT32).named_parameters()) for name in spec.files)
    assert torch.allclose(2 * first["proj_out.weight"], second["proj_out.weight"], atol=1e-3)
    save_plain(weights / "wan_low_noise_x.gguf", module_state(num_layers=1), torch.float16)
    assert refused("wan_x", weights).code == "model.experts_differ"


def module_state(**more: Any) -> State:
    return dict(wide_transformer(**more).state_dict())


def test_what_is_missing_is_stated(state: State, weights: Path, tmp_path: Path) -> None:
    # Shapes of Wan2.2-I2V-A14B: one of two experts, and the name does not say which.
    save_plain(weights / "image.safetensors", module_state(in_channels=36), torch.float16)
    assert refused("image", weights).code == "model.file_expert_unknown"
    alone = tmp_path / "alone"
    alone.mkdir()
    save_plain(alone / "model.safetensors", state, torch.float16)
    assert refused("model", alone).code == "model.file_alone"
    # Beside the file, without a transformer or a pipeline's configuration.
    for part in ("text_encoder", "tokenizer", "vae", "scheduler"):
        shutil.copytree(weights / "base" / part, alone / part)
    assert find("model", alone).directory == alone
    assert look_up("model.safetensors", alone).is_downloaded


def corrupted(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def gguf_header(*, version: int = 3, tensors: int = 0, metadata: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata) + rest


def gguf_tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    name = struct.pack("<Q", 1) + b"x"
    return name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE = {
    "nothing": (b"", "model.file_damaged"),
    "text": (b"a text of a few words", "model.file_no_format"),
    "pickle": (pickle.dumps({"a": 1}), "model.pickled"),
    "torch.save": (b"PK\x03\x04" + bytes(100), "model.pickled"),
    "no header": (b"GGUF", "model.file_damaged"),
    "version": (gguf_header(version=9), "model.gguf_invalid"),
    "tensors": (gguf_header(tensors=1 << 60), "model.gguf_invalid"),
    "metadata": (gguf_header(metadata=1 << 60), "model.gguf_invalid"),
    "key": (gguf_header(metadata=1, rest=struct.pack("<Q", 1 << 60)), "model.gguf_invalid"),
    "strings": (
        gguf_header(metadata=1, rest=struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 1 << 20)),
        "model.file_damaged",
    ),
    "nested": (gguf_header(metadata=1, rest=struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1)), "model.gguf_invalid"),
    "array": (gguf_header(metadata=1, rest=struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 1 << 62)), "model.file_damaged"),
    "axes": (gguf_header(tensors=1, rest=gguf_tensor(*[1] * 6)), "model.gguf_invalid"),
    "shape": (gguf_header(tensors=1, rest=gguf_tensor(1 << 62, 1 << 62)), "model.file_damaged"),
    "type": (gguf_header(tensors=1, rest=gguf_tensor(32, kind=99)), "model.gguf_invalid"),
    "offset": (gguf_header(tensors=1, rest=gguf_tensor(1, offset=1 << 62)), "model.file_damaged"),
    "end": (gguf_header(tensors=1, rest=gguf_tensor(2)), "model.file_damaged"),
    "row": (gguf_header(tensors=1, rest=gguf_tensor(31, kind=8) + bytes(99)), "model.gguf_invalid"),
    "overlap": (
        gguf_header(tensors=2, rest=gguf_tensor(16) + gguf_tensor(16).replace(b"x", b"y") + bytes(200)),
        "model.gguf_invalid",
    ),
    "other family": (gguf_header(tensors=1, rest=gguf_tensor(1) + bytes(64)), "model.file_unknown"),
}


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_a_hostile_file_is_refused(suffix: str, weights: Path, subtests: pytest.Subtests) -> None:
    for number, (case, (content, code)) in enumerate(HOSTILE.items()):
        with subtests.test(case=case):
            path = weights / f"bad{number}{suffix}"
            path.write_bytes(content)
            error = refused(path.stem, weights)
            assert error.code == code
            assert error.remedy
            assert unusable(weights, {"base"})[path.stem].code == code
            path.unlink()


@pytest.mark.parametrize("title", ["F16", "FP8 with scales", "GGUF Q8_0"])
def test_a_damaged_file_is_refused(title: str, state: State, weights: Path) -> None:
    path = weights / f"model{suffix_of(title)}"
    FORMATS[title](path, state)
    spec = find("model", weights)
    whole = path.read_bytes()
    for size in (len(whole) - 1, 1000, 30):
        path.write_bytes(whole[:size])
        assert refused("model", weights).code in {"model.file_damaged", "model.file_no_format"}
        if size > 1000:  # the last byte may be that of a scale of inputs, which is not read
            continue
        # Cut after it was planned with.
        with pytest.raises(TandemError):
            load_module(spec, "transformer", FLOAT32)


def without(name: str) -> Callable[[State], State]:
    return lambda state: {other: tensor for other, tensor in state.items() if other != name}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without("blocks.1.self_attn.q.weight"), "model.file_tensor_missing"),
        (lambda state: state | {"blocks.1.ffn.0.weight": torch.zeros(256, 255)}, "model.file_other_shape"),
        (lambda state: state | {"vace_blocks.0.before_proj.weight": torch.zeros(2)}, "model.file_tensor_unknown"),
        (
            lambda state: state | {"vace_patch_embedding.weight": torch.zeros(9, 9, 1, 1, 1)},
            "model.file_tensor_unknown",
        ),
        (lambda state: state | {"blocks.0.ffn.0.weight": torch.zeros(256, 256).int()}, "model.format_unknown"),
        (lambda state: state | {"blocks.0.ffn.0.scale_weight": torch.ones(1)}, "model.format_unknown"),
        (lambda state: state | {"blocks.7.ffn.0.scale_weight": torch.ones(1)}, "model.format_unknown"),
        (lambda _: {"double_blocks.0.img_attn_qkv.weight": torch.ones(3, 3)}, "model.file_unknown"),
        (lambda _: {"blocks.0.self_attn.q.lora_up.weight": torch.ones(3, 3)}, "model.file_unknown"),
        (lambda state: state | {"patch_embedding.weight": torch.zeros(0, 16, 1, 2, 2)}, "model.file_unknown"),
    ],
)
def test_another_model_is_refused(change: Callable[[State], State], code: str, state: State, weights: Path) -> None:
    save_file(change(transformer_files.wan_names(state)), weights / "model.safetensors")
    error = refused("model", weights)
    assert error.code == code
    assert error.remedy


def test_bitsandbytes_is_refused(state: State, weights: Path) -> None:
    save_plain(weights / "model.safetensors", state, torch.float16)
    request = GenerationRequest(prompt="a boat", model="model", quantization="bnb-4bit")
    with pytest.raises(TandemError) as caught:
        resolve(request, find("model", weights), PlanningContext(machine(), Path("x.mp4")))
    assert caught.value.code in {"planner.quantization_of_files", "planner.quantization_needs_gpu"}


@pytest.mark.parametrize("kind", FOLDERS)
def test_quantized_folders_of_diffusers(kind: str, weights: Path) -> None:
    wide_transformer().save_pretrained(weights / "base" / "transformer")
    parameters = find("base", weights).parameters
    held = quantized_folder(weights / "base", kind)
    spec = find("base", weights)
    assert spec.parameters == parameters
    assert spec.files["transformer"].title == {"nvfp4": "NVFP4"}.get(kind, "FP8 with scales")
    assert spec.single_files == {}
    module = load_module(spec, "transformer", FLOAT32)
    assert torch.allclose(predict(module), predict(module_of(held)), rtol=0, atol=1e-5)
    predicted = weights_bytes(spec, dict.fromkeys(spec.component_names, "bfloat16"))["transformer"]
    assert predicted == pytest.approx(
        (weights / "base" / "transformer").joinpath("diffusion_pytorch_model.safetensors").stat().st_size, rel=0.05
    )


@pytest.mark.slow
def test_the_command_line_states_one_line_and_exits_with_2(
    state: State,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_plain(weights / "good.safetensors", state, torch.float16)
    bad = weights / "bad.gguf"
    bad.write_bytes(HOSTILE["torch.save"][0])
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert run(["plan", "a boat", "--model", str(bad)]) == 2
    errors = capsys.readouterr().err
    assert "bad.gguf" in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) <= 3
    assert run(["models", "list"]) == 0
    listed = capsys.readouterr().out
    assert "good " in listed and "bad" in listed
    assert run(["models", "show", "good"]) == 0
    assert "good.safetensors (" in capsys.readouterr().out
    assert run(["models", "list", "--json"]) == 0
    (good,) = [model for model in json.loads(capsys.readouterr().out)["models"] if model["name"] == "good"]
    assert [file["expert"] for file in good["files"].values()] == [None]


LAYER = "blocks.0.ffn.0"
Change = Callable[[State], State]


def scaled(scale: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Change:
    """Return a change of the scale of one layer's weight, from the weight and the scale."""

    def change(state: State) -> State:
        name = next(one for one in state if one.endswith(("scale_weight", "weight_scale")) and "ffn" in one)
        weight = state[name.replace("._weight_scale", "._weight_qdata").rpartition(".")[0] + ".weight"]
        found = scale(weight, state[name])
        return {one: tensor for one, tensor in state.items() if one != name} | ({} if found is None else {name: found})

    return change


def reshaped(axes: Callable[[torch.Tensor], tuple[int, ...]]) -> Change:
    """Return a change of the number of axes of one layer's weight in FP8."""

    def change(state: State) -> State:
        stored = {one: tensor for one, tensor in state.items() if tensor.dtype == transformer_files.E4M3}
        name = next(one for one, tensor in stored.items() if tensor.ndim == 2)
        return state | {name: state[name].reshape(axes(state[name])).contiguous()}

    return change


WRONG: dict[str, tuple[Change, str]] = {
    "three axes": (reshaped(lambda one: (1, *one.shape)), ""),
    "one axis": (reshaped(lambda one: (one.numel(),)), ""),
    "other sizes": (reshaped(lambda one: (2 * one.shape[0], one.shape[1] // 2)), ""),
    "a scale for each column": (scaled(lambda weight, _: torch.ones(1, weight.shape[1])), "model.format_unknown"),
    "a scale for each value": (scaled(lambda weight, _: torch.ones(weight.shape)), "model.format_unknown"),
    "a scale for half of the rows": (scaled(lambda weight, _: torch.ones(len(weight) // 2)), "model.format_unknown"),
    "a scale in whole numbers": (scaled(lambda *_: torch.ones(1, dtype=torch.int32)), "model.format_unknown"),
    "no scale": (scaled(lambda *_: None), "model.scale_missing"),
    "NaN": (scaled(lambda weight, _: torch.full((len(weight), 1), torch.nan)), "model.scale_not_finite"),
    "infinite": (scaled(lambda *_: torch.tensor(torch.inf)), "model.scale_not_finite"),
    "NaN in BF16": (scaled(lambda *_: torch.tensor(torch.nan).bfloat16()), "model.scale_not_finite"),
    "NaN in FP8": (scaled(lambda *_: torch.tensor(torch.nan).to(torch.float8_e4m3fn)), "model.scale_not_finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_weights_in_fp8_that_do_not_fit_are_refused_when_they_are_recognised(
    name: str, state: State, weights: Path, subtests: pytest.Subtests
) -> None:
    change, code = WRONG[name]
    save_fp8_scaled(weights / "model.safetensors", state)
    file = load_file(weights / "model.safetensors")
    find("model", weights)
    save_file(change(file), weights / "model.safetensors")
    with subtests.test("single file"):
        assert refused("model", weights).code in ({code} if code else {"model.file_other_shape", "model.file_unknown"})
    wide_transformer().save_pretrained(weights / "base" / "transformer")
    quantized_folder(weights / "base", "fp8")
    find("base", weights)
    path = weights / "base" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(change(load_file(path)), path)
    with subtests.test("folder"):
        assert refused("base", weights).code == (code or "model.component_incomplete")


def test_formats_of_comfyui_in_all_their_forms(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One scale, scales as bytes, no table, smoothed columns, and rows that do not fill a tile."""
    from comfy_kitchen.tensor import QuantizedTensor

    torch.manual_seed(0)
    weight, columns = torch.randn(160, 256), torch.rand(256) + 0.5
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("TensorWiseINT8Layout", "int8_tensorwise", {}, {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True}, {}),
        (
            "AsymW4A8Int8Layout",
            "asym_w4a8_int8",
            {"codebook": False, "convrot_groupsize": 64},
            {"convrot_groupsize": 64},
        ),
        ("AsymW4A8Int8Layout", "asym_w4a8_int8", {"group_size": 32}, {"params": {"group_size": 32}}),
        ("TensorCoreMXFP8Layout", "mxfp8", {}, {}),
        ("TensorCoreNVFP4Layout", "nvfp4", {}, {}),
    ]
    for layout, name, how, stated in cases:
        with subtests.test(layout, **how):
            quantized = QuantizedTensor.from_float(weight, layout, **how)
            file = quantized.state_dict("layer.weight")
            blob = json.dumps({"format": name, **stated}).encode()
            # Floats of one byte may be stored as bytes.
            scales = {one: tensor for one, tensor in file.items() if one != "layer.weight" and tensor.itemsize == 1}
            file |= {one: tensor.view(torch.uint8) for one, tensor in scales.items()}
            file |= {"layer.comfy_quant": torch.tensor(list(blob), dtype=torch.uint8)}
            expected = quantized.dequantize()
            if name == "nvfp4":
                file["layer.pre_quant_scale"] = columns
                expected = expected * columns
            save_file(file, tmp_path / "one.safetensors")
            ((_, stored),) = stored_weights(file_tensors(tmp_path / "one.safetensors")).items()
            assert torch.equal(read_plain(stored, MappedFiles(), torch.float32), expected)


@pytest.mark.parametrize(
    ("name", "steps", "new_noise"),
    [
        ("FastWan2.2-TI2V-5B-FullAttn-Diffusers", 3, True),
        ("Wan2.1-T2V-14B-StepDistill-CfgDistill", 4, False),
        ("Wan2.1-T2V-14B-8steps", 8, False),
        # Guidance alone is distilled, or the name is of those who packed it.
        ("Wan2.1-T2V-14B-CfgDistill-lightx2v", None, False),
    ],
)
def test_the_name_of_a_folder_or_file_states_its_distillation(
    name: str, steps: int | None, new_noise: bool, weights: Path, state: State
) -> None:
    plain = find("base", weights)
    shutil.copytree(weights / "base", weights / name)
    save_plain(weights / f"{name}-fp16.safetensors", state, torch.float16)
    for spec in (find(name, weights), find(f"{name}-fp16", weights)):
        assert (spec.distilled_steps, spec.noise.renewed) == (steps, new_noise)
        quick = (steps, 1.0) if steps else (plain.defaults.steps, plain.defaults.guidance_scale)
        assert (spec.defaults.steps, spec.defaults.guidance_scale) == quick
        request = GenerationRequest(prompt="a boat", frames=5, width=64, height=64)
        facts = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"))).warnings
        assert ("planner.distilled_used" in [fact.code for fact in facts]) == bool(steps)


def stating(values: object) -> Change:
    """Return a change of what one layer states as its format."""
    return setting("comfy_quant", torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8))


def setting(name: str, tensor: torch.Tensor) -> Change:
    """Return a change of one tensor of a layer."""
    return lambda state: state | {f"blocks.0.ffn.0.{name}": tensor}


ROTATED = {"format": "int8_tensorwise", "convrot": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "change", "code"),
    [
        ("INT8", setting("comfy_quant", torch.zeros(3, dtype=torch.uint8)), "model.format_not_stated"),
        ("INT8", stating([]), "model.format_not_stated"),
        ("INT8", stating({"format": 8}), "model.format_not_stated"),
        ("INT8", stating({**ROTATED, "convrot_groupsize": 32}), "model.format_not_stated"),
        ("INT8", stating({**ROTATED, "convrot_groupsize": 1024}), "model.format_unknown"),
        ("INT8", stating({"format": "convrot_w4a4"}), "model.format_unknown"),
        ("INT8", stating({"format": "nvfp4"}), "model.format_unknown"),
        ("INT8", without("blocks.0.ffn.0.comfy_quant"), "model.format_unknown"),
        ("INT8", without("blocks.0.ffn.0.weight_scale"), "model.format_unknown"),
        ("INT8", setting("weight_scale", torch.full((256, 1), torch.nan)), "model.scale_not_finite"),
        ("MXFP8", setting("weight_scale", torch.zeros(256, 7, dtype=torch.uint8)), "model.format_unknown"),
        ("MXFP8", setting("weight_scale", torch.full((256, 8), 255, dtype=torch.uint8)), "model.scale_not_finite"),
        ("NVFP4", without("blocks.0.ffn.0.weight_scale_2"), "model.format_unknown"),
        ("W4A8", without("blocks.0.ffn.0.weight_s_channel"), "model.format_unknown"),
        ("W4A8", setting("weight_codebook", torch.ones(8)), "model.format_unknown"),
    ],
)
def test_damaged_files_of_comfyui_are_refused(
    title: str, change: Change, code: str, state: State, weights: Path
) -> None:
    path = weights / "model.safetensors"
    FORMATS[title](path, state)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(change(load_file(path)), path, metadata)
    error = refused("model", weights)
    assert error.code == code
    assert error.remedy
