"""LTX-2's transformer in single files: recognised, loaded as diffusers converts it, and refused if it is wrong."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from runtime.core.errors import ModelError
from runtime.core.plan import ComponentPlan
from runtime.execution.streams import Streams
from runtime.families.ltx2 import file_names
from runtime.families.ltx2.components import denoiser
from runtime.families.ltx2.spec import FAMILY
from runtime.models.catalogue import find, look_up
from runtime.models.packed_layers import PackedLinear
from runtime.models.registry import published_models
from runtime.models.single_file import reassemble
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_scheduler
from tests.families.conftest import Command
from tests.families.ltx2.published_files import PARTS, PREFIX, own_names, part_names, save_combined
from tests.tiny_models import LTX2_ARCHITECTURES, LTX2_DISTILLED
from tests.transformer_files import State, save_fp8_scaled, save_gguf

Tiny = Callable[[str], ModelSpec]
PUBLISHED = {model.name: model for model in published_models("ltx2")}
FLOAT32 = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())


def diffusers_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return parameters under diffusers' names, by diffusers' converter."""
    return convert_ltx2_transformer_to_diffusers(dict(state))


def state_of(spec: ModelSpec) -> State:
    """Return the transformer's parameters in a folder, with noise in those that are zero or one."""
    random = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=random)
        for name, tensor in load_file(spec.directory / "transformer" / "diffusion_pytorch_model.safetensors").items()
    }


@pytest.fixture
def weights(tmp_path: Path, tiny: Tiny) -> Callable[[str], Path]:
    """Return a function that returns a weights folder with a small model, without its transformer's weights."""

    def made(architecture: str) -> Path:
        folder = tmp_path / "weights"
        shutil.copytree(tiny(architecture).directory, folder / "base")
        return folder

    return made


Weights = Callable[[str], Path]


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_the_transformer_of_a_published_file_is_loaded(
    architecture: str, weights: Weights, tiny: Tiny, subtests: pytest.Subtests
) -> None:
    folder, state = weights(architecture), state_of(tiny(architecture))
    for name, save in (
        ("published", lambda path, state: save_combined(path, tiny(architecture), state)),
        ("diffusers", lambda path, state: save_file(state, path)),
        ("comfyui", lambda path, state: save_file({f"{PREFIX}{k}": v for k, v in own_names(state).items()}, path)),
    ):
        with subtests.test(name=name):
            save(folder / f"{name}.safetensors", state)
            spec = find(name, folder)
            assert (spec.directory, spec.name) == (folder / "base", name)
            assert spec.transformer == tiny(architecture).transformer
            loaded = load_module(spec, "transformer", FLOAT32).state_dict()
            assert loaded.keys() == state.keys()
            assert all(torch.equal(loaded[key], value) for key, value in state.items())
            assert spec.parameters["transformer"] == tiny(architecture).parameters["transformer"]
            configs = {component: spec.files[component].config for component in spec.single_files}
            assert reassemble(spec.single_files, configs, spec.directory) == spec


@pytest.mark.parametrize("title", ["FP8 with scales", "GGUF Q8_0", "GGUF Q4_0"])
def test_quantized_files_compute_what_their_tools_read(title: str, weights: Weights) -> None:
    folder = weights("ltx-2")
    path = folder / "base" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    # Rows of whole blocks; heads as wide as those of all published models.
    wide = {"num_attention_heads": 1, "attention_head_dim": 128, "cross_attention_dim": 128, "in_channels": 16}
    wide |= {f"audio_{name}": value // 2 for name, value in wide.items() if name.endswith("_dim")}
    config |= {**wide, "audio_num_attention_heads": 1}
    torch.manual_seed(0)
    module = LTX2VideoTransformer3DModel.from_config(config)
    state = {name: value + 0.1 * torch.randn(value.shape) for name, value in module.state_dict().items()}
    kind = title.removeprefix("GGUF ")
    if kind == title:
        held = save_fp8_scaled(folder / "model.safetensors", state, named=own_names, back=diffusers_names)
    else:
        held = save_gguf(folder / "model.gguf", state, kind, named=own_names, back=diffusers_names)
    spec = find("model", folder)
    assert spec.title.endswith(title)
    module.load_state_dict({name: tensor.float() for name, tensor in held.items()})
    loaded = load_module(spec, "transformer", FLOAT32)
    packed = [layer for layer in loaded.modules() if isinstance(layer, PackedLinear)]
    assert len(packed) == 2 * (6 * 4 + 2 * 2)
    streams, random = Streams((1, 16, 2, 2, 3), (1, 4, 5, 4), 8.0), torch.Generator().manual_seed(2)
    latents = streams.join(torch.randn(streams.video, generator=random), torch.randn(streams.sound, generator=random))
    results = []
    for one in (loaded, module.eval()):
        transformer = denoiser(one)
        transformer.see(streams, ())
        embeds = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(3))
        results.append(transformer(latents, torch.tensor(500.0), embeds))
    assert results[1].std() > 1e-2
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_architecture_follows_from_shapes(name: str) -> None:
    config = dict(PUBLISHED[name].configs["transformer"])
    with torch.device("meta"):
        module = LTX2VideoTransformer3DModel(**config)
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    read = file_names.config_of(shapes, ())
    assert read is not None
    assert {key: value for key, value in config.items() if read[key] != value} == {}
    assert dict(file_names.parameters(read)) == shapes
    assert sum(1 for _ in file_names.parameters(read)) == len(shapes)


def test_the_name_of_a_file_states_whether_it_is_distilled(weights: Weights, tiny: Tiny) -> None:
    folder, state = weights("ltx-2.3"), state_of(tiny("ltx-2.3"))
    for name in ("ltx-2.3-22b-dev", "ltx-2.3-22b-distilled-fp8"):
        save_combined(folder / f"{name}.safetensors", tiny("ltx-2.3"), state)
    full, distilled = (find(name, folder) for name in ("ltx-2.3-22b-dev", "ltx-2.3-22b-distilled-fp8"))
    assert (full.defaults.steps, distilled.defaults.steps) == (30, 8)
    assert (full.noise.by_size is None, distilled.noise.by_size is None) == (False, True)
    scheduler = load_scheduler(distilled)
    assert not scheduler.config.use_dynamic_shifting
    assert scheduler.config.shift_terminal is None
    assert load_scheduler(full).config.use_dynamic_shifting


def test_a_full_model_is_not_run_with_a_distilled_ones_steps(weights: Weights, tiny: Tiny) -> None:
    folder = weights(LTX2_DISTILLED[1])
    for name in ("ltx-2.3-22b-dev", "ltx-2.3-22b-distilled"):
        save_combined(folder / f"{name}.safetensors", tiny(LTX2_DISTILLED[1]), state_of(tiny(LTX2_DISTILLED[1])))
    with pytest.raises(ModelError) as caught:
        find("ltx-2.3-22b-dev", folder)
    assert caught.value.code == "model.file_unfit"
    spec = find("ltx-2.3-22b-distilled", folder)
    assert spec.refinement is not None
    assert spec.refinement.distilled


def test_published_files_are_named_by_their_models(tmp_path: Path) -> None:
    """Before the other components are there."""
    for name, file in {
        "ltx-2": "ltx-2-19b-dev",
        "ltx-2-distilled": "ltx-2-19b-distilled-1.1",
        "ltx-2.3": "ltx-2.3-22b-dev",
        "ltx-2.3-distilled": "ltx-2.3-22b-distilled",
    }.items():
        configs = PUBLISHED[name].configs
        shapes = dict(file_names.parameters(configs["transformer"]))
        for part in PARTS:
            expected = FAMILY.part_files[part].parameters(configs[part]).items()
            named = part_names(part, {key: torch.empty(shape, device="meta") for key, shape in expected})
            shapes |= {key: tuple(tensor.shape) for key, tensor in named.items()}
        header, start = {}, 0
        for key, shape in shapes.items():
            size = 2 * torch.Size(shape).numel()
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + size]}
            start += size
        text = json.dumps(header).encode()
        path = tmp_path / f"{file}.safetensors"
        with path.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + start)
        spec = look_up(file, tmp_path)
        assert (spec.title, spec.is_downloaded) == (f"{PUBLISHED[name].title}, BF16", False)
        assert spec.transformer == look_up(name, tmp_path).transformer
        assert {part: spec.files[part].config for part in spec.files} == {part: configs[part] for part in spec.files}
        with pytest.raises(ModelError) as caught:
            find(file, tmp_path)
        assert caught.value.code == "model.components_not_downloaded"
        assert caught.value.data["missing"] == ["text_encoder", "tokenizer", "scheduler"]
        path.unlink()


def test_damaged_files_are_refused(weights: Weights, tiny: Tiny, subtests: pytest.Subtests) -> None:
    folder, state = weights("ltx-2.3"), state_of(tiny("ltx-2.3"))
    first = "transformer_blocks.1.attn1.to_q.weight"
    changes: dict[str, tuple[Callable[[State], object], str]] = {
        "missing": (lambda file: file.pop(first), "model.file_tensor_missing"),
        "unknown": (lambda file: file.update(extra=torch.zeros(2)), "model.file_tensor_unknown"),
        "shape": (lambda file: file.update({first: torch.zeros(3, 32)}), "model.file_other_shape"),
        "half": (lambda file: file.pop("audio_proj_in.weight"), "model.file_unknown"),
    }
    for name, (change, code) in changes.items():
        with subtests.test(name=name):
            file = dict(state)
            change(file)
            save_file(file, folder / f"{name}.safetensors")
            with pytest.raises(ModelError) as caught:
                find(name, folder)
            assert caught.value.code == code


def test_a_video_is_made_with_a_single_file(command: Command, tiny: Tiny, weights: Weights, tmp_path: Path) -> None:
    folder = weights("ltx-2.3")
    path = folder / "base" / "ltx-dev.safetensors"
    save_combined(path, tiny("ltx-2.3"), state_of(tiny("ltx-2.3")))
    size = ("--width", "96", "--height", "64", "--frames", "9", "--steps", "2", "--fps", "8", "--guidance", "1")
    code, made = command("generate", "a", "--model", str(path), *size, "--out", str(tmp_path / "x.mp4"))
    assert code == 0, made
    assert Path(made["video"]).is_file()
