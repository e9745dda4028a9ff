"""The float32 reference equals the program, and takes the memory of one block; the prompt is the model's own."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save
from torch import nn
from torch.overrides import TorchFunctionMode

from runtime.core.errors import ModelError
from runtime.core.loras import Lora
from runtime.engines import reference
from runtime.engines.programs import load_program
from runtime.engines.reference import PROMPT, BlocksOnDevice, ExactConvolutions, encoded_prompt, load_reference
from runtime.engines.verify import cases_of
from runtime.models.catalogue import find
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_stored
from runtime.planner.choice.engine_index import ShapeProfile
from tests import lora_files
from tests.hostile_files import HOSTILE
from tests.planner.test_live_bytes import Counted

BLOCKS = 12
SIZE = (1, 4, 4)


@pytest.fixture(scope="module")
def deep(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Return a model whose transformer has many blocks, stored in bfloat16, except what diffusers keeps in float32."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    torch.manual_seed(0)
    made = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=4800,
        num_layers=BLOCKS,
        rope_max_seq_len=64,
    )
    for name, parameter in made.named_parameters():
        if not {"time_embedder", "scale_shift_table", "norm2"} & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    made.save_pretrained(folder / "transformer")
    return find(str(folder), Path("none"))


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.partition(" ")[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return ".safetensors" in line
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae_first"])
@pytest.mark.parametrize("model", ["wan2.2-ti2v-5b", "diorama"])
def test_the_reference_equals_the_program_in_float32(tiny: Callable[[str], ModelSpec], model: str, name: str) -> None:
    spec = find("diorama", Path("none")) if model == "diorama" else tiny(model)
    component = "vae" if name.startswith("vae") else name
    found = load_reference(spec, component, name, "cpu")
    plain = load_program(spec, component, name, device="cpu", dtype="float32")
    inputs = plain.inputs((1, 4, 6))
    for key, output in found.run(**inputs).items():
        torch.testing.assert_close(output, plain.run(**inputs)[key], rtol=1e-5, atol=1e-6)


def test_blocks_are_converted_one_at_a_time(deep: ModelSpec) -> None:
    program = load_reference(deep, "transformer", "transformer", "cpu")
    blocks = program.module.blocks
    assert isinstance(blocks, BlocksOnDevice)
    assert len(blocks) == BLOCKS
    stored = [tensor for block in blocks._blocks for tensor in (*block.parameters(), *block.buffers())]
    one = 4 * sum(tensor.numel() for tensor in stored) // BLOCKS
    inputs = program.inputs(SIZE)
    program.run(**inputs)
    with Counted([*stored, *program.module.parameters(), *program.module.buffers(), *inputs.values()]) as counted:
        program.run(**inputs)
    # One block, and what is computed with it.
    assert one < counted.peak < 1.5 * one


def test_weights_stay_mapped_from_their_files(deep: ModelSpec) -> None:
    module = load_stored(deep, "transformer")
    weights = dict(module.named_parameters())
    assert weights["blocks.3.ffn.net.2.weight"].dtype == torch.bfloat16
    assert weights["blocks.3.norm2.weight"].dtype == torch.float32
    large = [name for name, one in weights.items() if "ffn" in name]
    assert len(large) == 4 * BLOCKS
    assert all(mapped(weights[name]) for name in large)


def test_weights_stored_more_precisely_than_most_are_not_rounded(deep: ModelSpec, tmp_path: Path) -> None:
    folder = shutil.copytree(deep.directory, tmp_path / "model")
    made = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    value = torch.full_like(made.proj_out.bias.data, 1 + 2**-12, dtype=torch.float32)
    made.proj_out.bias.data = value
    made.save_pretrained(folder / "transformer")
    found = load_stored(find(str(folder), Path("none")), "transformer")
    assert torch.equal(found.get_parameter("proj_out.bias"), value)


def test_loras_are_not_rounded_to_the_stored_dtype(deep: ModelSpec, tmp_path: Path) -> None:
    path = lora_files.save(tmp_path / "a.safetensors", lora_files.peft(lora_files.factors(deep.transformer)))
    spec = with_loras(deep, [Lora(str(path), 0.7)], tmp_path)
    found = load_reference(spec, "transformer", "transformer", "cpu")
    plain = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32")
    inputs = plain.inputs(SIZE)
    expected = plain.run(**inputs)["velocity"]
    torch.testing.assert_close(found.run(**inputs)["velocity"], expected, rtol=1e-5, atol=1e-6)
    without = load_reference(deep, "transformer", "transformer", "cpu").run(**inputs)["velocity"]
    assert (without - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.timeout(60, func_only=True)
def test_the_prompt_is_encoded_once_by_the_models_own_text_encoder(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    found = encoded_prompt(spec, "cpu", tmp_path)
    assert found is not None
    assert found.shape == (1, spec.max_sequence_length, spec.transformer.text_dim)
    words = int(found[0].any(dim=1).sum())
    assert len(PROMPT.split()) <= words < 40
    monkeypatch.setattr(reference, "_encode", None)
    again = encoded_prompt(spec, "cpu", tmp_path)
    assert again is not None
    assert torch.equal(again, found)
    # A damaged file, one with other tensors, and what is no file are not used.
    [path] = (tmp_path / "verification").iterdir()
    data, kept = path.read_bytes(), found[:, :words]
    others = [kept[0], kept[..., 1:], kept.half(), kept.repeat(1, 600, 1), kept.repeat(2, 1, 1), torch.tensor(1.0)]
    damaged = [data[:100], b"", *(save({"embeds": one.contiguous()}) for one in others), save({"a": kept.contiguous()})]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(TypeError):  # it is encoded again
            encoded_prompt(spec, "cpu", tmp_path)
    for put in HOSTILE.values():
        path.unlink()
        put(path)
        with pytest.raises(TypeError):
            encoded_prompt(spec, "cpu", tmp_path)
        if path.is_dir():
            path.rmdir()
            path.touch()


def test_a_model_without_its_text_encoder_has_no_prompt(deep: ModelSpec, tmp_path: Path) -> None:
    folder = shutil.copytree(deep.directory, tmp_path / "model")
    shutil.rmtree(folder / "text_encoder")
    spec = replace(deep, directory=folder)
    with pytest.raises(ModelError):
        load_reference(spec, "text_encoder", "text_encoder", "cpu")
    assert encoded_prompt(spec, "cpu") is None


class Seen(TorchFunctionMode):
    """Records convolutions and whether they may use cuDNN; those without it run out of memory if `full`."""

    def __init__(self, *, full: bool = False) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.full = full

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in {torch.conv2d, torch.conv3d}:
            self.found.append((func.__name__, torch.backends.cudnn.enabled))
            if self.full and not torch.backends.cudnn.enabled:
                raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layer", "full", "expected"),
    [
        (nn.Conv2d, False, [("conv2d", False)]),
        (nn.Conv2d, True, [("conv2d", False), ("conv2d", True)]),
        (nn.Conv3d, False, [("conv3d", True)]),
    ],
)
def test_exact_convolutions_use_cudnn_in_three_dimensions_or_if_memory_runs_out(
    layer: type[nn.Conv2d | nn.Conv3d], full: bool, expected: list[tuple[str, bool]]
) -> None:
    convolution = layer(2, 3, 3, padding=1)
    given = torch.randn(1, 2, *[4] * (convolution.weight.dim() - 2))
    with Seen(full=full) as seen, ExactConvolutions():
        found = convolution(given)
        assert torch.backends.cudnn.enabled
    assert seen.found == expected
    assert torch.equal(found, convolution(given))


def test_decoders_are_verified_with_exact_convolutions(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1"), "vae", "vae_first", device="cpu", dtype="float32")
    with Seen() as seen:
        list(cases_of(program, ShapeProfile.fixed((1, 4, 4))))
    assert set(seen.found) == {("conv2d", False), ("conv3d", True)}
