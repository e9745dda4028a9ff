"""Folders and files as other programs leave them: variants of weights, Git LFS pointers, byte order marks, float64."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import ModelError
from runtime.core.loras import Lora
from runtime.models.folder import read_config, weight_files, weights_variant
from runtime.models.loras import with_loras
from runtime.models.registry import family_of, read_spec
from runtime.models.spec import VAE_ENCODER, ModelSpec, folder_of
from runtime.models.stored_modules import empty_module, module_class
from runtime.models.tensor_files import read_header
from runtime.models.timesteps import WITH_SHIFT
from runtime.models.weights import load_module, load_scheduler, load_stored
from tests import lora_files
from tests.models.test_loras import loaded, part

Tiny = Callable[[str], ModelSpec]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("wan2.1").directory, tmp_path / "model"))


def refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "model")
    return refused.value


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "40KB"])
@pytest.mark.parametrize("variant", ["fp16", "bf16", "fp32"])
def test_weights_saved_as_a_variant_are_loaded(variant: str, shard: str | None, tiny: Tiny, folder: Path) -> None:
    spec = tiny("wan2.1")
    for name in ("transformer", "text_encoder", "vae"):
        module = module_class(spec, name).from_pretrained(spec.directory / name)
        for path in weight_files(folder / name):
            path.unlink()
        module.save_pretrained(folder / name, variant=variant, **({"max_shard_size": shard} if shard else {}))
    assert weights_variant(folder / "transformer") == variant
    assert (len(weight_files(folder / "transformer")) > 1) == (shard is not None)
    saved = read_spec(folder, "model")
    assert saved.parameters == spec.parameters
    for name in ("transformer", "text_encoder"):
        wanted = load_module(spec, name, part()).state_dict()
        for module in (load_module(saved, name, part()), load_stored(saved, name)):
            found = module.state_dict()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_plain_weights_are_preferred_to_a_variant(folder: Path) -> None:
    transformer = folder / "transformer"
    (plain,) = weight_files(transformer)
    save_file({"other": torch.ones(1)}, transformer / "diffusion_pytorch_model.fp16.safetensors")
    save_file({"other": torch.ones(1)}, transformer / "diffusion_pytorch_model.bf16.safetensors")
    assert (weights_variant(transformer), weight_files(transformer)) == (None, [plain])
    plain.unlink()
    assert weight_files(transformer) == [transformer / "diffusion_pytorch_model.bf16.safetensors"]


def test_a_git_lfs_pointer_is_named(folder: Path, tmp_path: Path, tiny: Tiny, subtests: pytest.Subtests) -> None:
    for name in (
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/config.json",
        "tokenizer/tokenizer.json",
        "model_index.json",
    ):
        with subtests.test(file=name):
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(POINTER)
            assert (refusal(folder).code, refusal(folder).data["file"].endswith(name)) == ("model.lfs_pointer", True)
            (folder / name).write_bytes(content)
    (tmp_path / "style.safetensors").write_bytes(POINTER)
    with pytest.raises(ModelError) as refused:
        with_loras(tiny("wan2.1"), [Lora(str(tmp_path / "style.safetensors"))], tmp_path)
    assert refused.value.data["cause"].code == "model.lfs_pointer"


def test_configurations_with_a_byte_order_mark_are_read(folder: Path, tiny: Tiny) -> None:
    for name in (
        "model_index.json",
        "transformer/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
    ):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    spec = read_spec(folder, "model")
    wanted = loaded(tiny("wan2.1"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded(spec).items())
    assert load_scheduler(spec, 4.0).config["flow_shift"] == 4.0
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # read by a library only
    assert refusal(folder).code == "model.byte_order_mark"


def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(folder: Path) -> None:
    shutil.move(folder / "tokenizer" / "tokenizer.json", folder / "moved.json")
    assert refusal(folder).code == "model.tokenizer_missing"
    shutil.rmtree(folder / "tokenizer")
    assert refusal(folder).code == "model.tokenizer_missing"


def test_weights_in_float64_are_rounded(folder: Path, tiny: Tiny) -> None:
    (path,) = weight_files(folder / "transformer")
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    wanted = loaded(tiny("wan2.1"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded(read_spec(folder, "model")).items())


@pytest.mark.parametrize(("architecture", "value"), [("wan2.2-a14b", 0.875), ("wan2.2-i2v-a14b", 0.9)])
def test_a_missing_boundary_is_named_with_its_value(
    architecture: str, value: float, tiny: Tiny, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny(architecture).directory, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    del index["boundary_ratio"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert (refusal(folder).code, refusal(folder).data["value"]) == ("model.boundary_missing", value)


@pytest.mark.parametrize("scheduler", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_a_shift_of_null_is_refused_before_anything_is_loaded(scheduler: str, folder: Path) -> None:
    config = {"_class_name": scheduler, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    setting = "flow_shift" if scheduler.startswith("Uni") else "shift"
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(config | {setting: None}))
    assert (refusal(folder).code, setting in str(refusal(folder).data["detail"])) == ("model.config_invalid", True)
    path.write_text(json.dumps(config))
    assert read_spec(folder, "model").noise.shift == 1.0


@pytest.mark.slow
def test_headers_with_much_text_are_read(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    path = tmp_path / "style.safetensors"
    workflow = json.dumps({"nodes": [{"id": number, "inputs": [[]]} for number in range(120_000)]})
    assert 2 * len(workflow) > 4 << 20
    save_file(lora_files.peft(lora_files.factors(spec.transformer)), path, metadata={"workflow": workflow * 2})
    assert read_header(path).metadata["workflow"] == workflow * 2
    assert with_loras(spec, [Lora(str(path))], tmp_path).loras


def weights_of(folder: Path, component: str) -> tuple[Path, dict[str, torch.Tensor]]:
    (path,) = weight_files(folder / component)
    return path, load_file(path)


@pytest.mark.parametrize(
    "architecture",
    ["wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b", "wan2.1-i2v", "wan2.2-i2v-a14b", "wan2.1-flf2v", "hunyuan-video"],
)
def test_a_component_that_lacks_a_weight_is_refused_before_it_is_loaded(
    architecture: str, tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Each weight of a module that torch makes has a name and shape that are known without torch."""
    spec = tiny(architecture)
    folder = Path(shutil.copytree(spec.directory, tmp_path / "model"))
    family = family_of(spec.family)
    for component in spec.component_names:
        config = read_config(folder / folder_of(component) / "config.json")
        expected = family.weights(component, config)
        path, weights = weights_of(folder, folder_of(component))
        if expected is not None:
            module = empty_module(spec, component)
            shapes = {name: tuple(one.shape) for name, one in module.named_parameters(remove_duplicate=True)}
            assert {name: shape for name, shape in shapes.items() if expected.get(name) != shape} == {}
            if component != VAE_ENCODER and folder_of(component) != "vae":
                assert expected == shapes
        with subtests.test(component=component):
            whole = path.read_bytes()
            # Of a component without such a list, a layer of a list, or a weight with a bias.
            biased = [one for one in weights if one.replace(".weight", ".bias") in {*weights} - {one}]
            in_layers = [one for one in weights if ".layers.0." in one or one.startswith("layers.0.")]
            name = (biased + in_layers if expected is None else list(weights))[0]
            save_file({one: tensor for one, tensor in weights.items() if one != name}, path)
            assert (refusal(folder).code, refusal(folder).data["missing"]) == ("model.component_incomplete", 1)
            path.write_bytes(whole)
            if expected is not None:
                save_file(weights | {name: weights[name].reshape(1, *weights[name].shape).contiguous()}, path)
                assert refusal(folder).code == "model.component_incomplete"
                path.write_bytes(whole)
    read_spec(folder, "model")


def test_a_scheduler_of_another_library_is_refused_before_anything_is_loaded(folder: Path) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    for name in ("FlowUniPCMultistepScheduler", "SchedulerMixin", "UMT5EncoderModel", "WanPipeline", ""):
        path.write_text(json.dumps({"_class_name": name, "use_flow_sigmas": True}))
        assert (refusal(folder).code, refusal(folder).data["scheduler"]) == ("model.scheduler_unknown", name)


def test_a_scheduler_without_flow_matching_is_refused_before_anything_is_loaded(
    folder: Path, subtests: pytest.Subtests
) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    for config in (
        {"_class_name": "DDIMScheduler"},
        {"_class_name": "PNDMScheduler", **flow},
        {"_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon"},
        {"_class_name": "LTXEulerAncestralRFScheduler"},
        {"_class_name": "UniPCMultistepScheduler"},
        {"_class_name": "UniPCMultistepScheduler", **flow, "use_flow_sigmas": False},
        {"_class_name": "DPMSolverMultistepScheduler", **flow, "prediction_type": "epsilon"},
        {"_class_name": "SASolverScheduler", "use_flow_sigmas": True, "use_karras_sigmas": True},
    ):
        with subtests.test(config=config):
            path.write_text(json.dumps(config))
            refused = refusal(folder)
            assert (refused.code, refused.data["scheduler"]) == ("model.scheduler_other", config["_class_name"])
    for name in WITH_SHIFT:
        path.write_text(json.dumps({"_class_name": name, **flow}))
        assert read_spec(folder, "model").scheduler == name


def test_a_damaged_tokenizer_is_refused_before_anything_is_loaded(folder: Path, subtests: pytest.Subtests) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    whole = path.read_bytes()
    # Larger than what is parsed for a plan.
    large = whole.rstrip()[:-1] + b" " * (5 << 20) + b"}"
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "large and cut": large[:-1],
        "other version": b'{"version": "9"}',
        "list": b"[]",
        "noise": bytes(range(256)) * 100,
        "empty": b"",
    }.items():
        with subtests.test(name):
            path.write_bytes(content)
            assert refusal(folder).code == "model.part_unloadable"
    path.write_bytes(large)
    read_spec(folder, "model")
    path.unlink()
    (folder / "tokenizer" / "spiece.model").write_bytes(b"")
    assert refusal(folder).code == "model.part_unloadable"


def test_a_tensor_that_only_the_index_names_is_missing(tiny: Tiny, folder: Path) -> None:
    path, weights = weights_of(folder, "text_encoder")
    save_file(weights, path.with_name("model-00001-of-00001.safetensors"))
    path.unlink()
    names = dict.fromkeys([*weights, "other"], "model-00001-of-00001.safetensors")
    path.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert (refusal(folder).code, refusal(folder).data["tensor"]) == ("model.file_tensor_missing", "other")
