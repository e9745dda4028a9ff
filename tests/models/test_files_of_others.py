"""Single files of components that Tandem reads from folders only, by the names that other programs give them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, Qwen2Config, Qwen2Model

from runtime.core.errors import ModelError
from runtime.models.catalogue import find, unusable
from runtime.models.spec import ModelSpec
from tests.families import framepack_models

Tiny = Callable[[str], ModelSpec]
State = dict[str, torch.Tensor]
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 32}
HUNYUAN, FRAMEPACK = "hunyuan-video", "framepack-i2v"


def of_names(names: Iterable[str]) -> State:
    return {name: torch.ones(2, 2) for name in names}


def prefixed(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def clip(layers: int) -> State:
    """Return CLIP's text encoder, named as in ComfyUI's clip_l.safetensors."""
    model = CLIPTextModel(CLIPTextConfig(num_hidden_layers=layers, **SMALL))
    file = {f"text_model.{name.removeprefix('text_model.')}": own for name, own in model.state_dict().items()}
    return file | {"text_model.embeddings.position_ids": torch.arange(77)[None]}


def refusal(path: Path) -> tuple[str, object, object]:
    with pytest.raises(ModelError) as refused:
        find(str(path), path.parent)
    assert refused.value.remedy
    data = refused.value.data
    return refused.value.code, data.get("component"), data.get("model")


def test_components_that_are_read_from_folders_are_named(tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """The names are those of the published files; the sizes are tiny."""
    pipeline = framepack_models.pipeline()
    folder = tiny("hunyuan-video").directory
    transformer, vae = (load_file(next((folder / part).glob("*.safetensors"))) for part in ("transformer", "vae"))
    llama = dict(pipeline.text_encoder.state_dict())
    siglip = dict(pipeline.image_encoder.state_dict())
    for name, state, component, model in (
        # diffusers, the authors and city96's GGUF, ComfyUI, Kijai.
        ("diffusers", transformer, "transformer", HUNYUAN),
        (
            "original",
            of_names(
                (
                    "txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",
                    "double_blocks.0.img_attn_qkv.weight",
                    "single_blocks.0.linear1.weight",
                )
            ),
            "transformer",
            HUNYUAN,
        ),
        (
            "comfyui",
            of_names(
                (
                    "model.model.txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight",
                    "model.model.double_blocks.0.img_attn.qkv.weight",
                )
            ),
            "transformer",
            HUNYUAN,
        ),
        ("FramePackI2V_HY_fp8_e4m3fn", dict(pipeline.transformer.state_dict()), "transformer", FRAMEPACK),
        ("hunyuan_video_vae", vae, "vae", HUNYUAN),
        (
            "hunyuan_video_vae_comfyui",
            of_names(("decoder.conv_in.conv.weight", "decoder.mid.attn_1.k.weight", "encoder.conv_in.conv.weight")),
            "vae",
            HUNYUAN,
        ),
        (
            "llava_llama3_fp8_scaled",
            prefixed("model.", llama) | {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)},
            "text_encoder",
            HUNYUAN,
        ),
        ("clip_l", clip(12), "text_encoder_2", HUNYUAN),
        (
            "sigclip_vision_patch14_384",
            {f"vision_model.{one.removeprefix('vision_model.')}": own for one, own in siglip.items()},
            "image_encoder",
            FRAMEPACK,
        ),
        (
            "open-clip_visual",
            of_names(("visual.cls_embedding", "visual.transformer.0.attn.to_qkv.weight")),
            "image_encoder",
            None,
        ),
    ):
        with subtests.test(msg=name):
            path = tmp_path / f"{name}.safetensors"
            save_file({one: tensor.contiguous() for one, tensor in state.items()}, path)
            code, found, title = refusal(path)
            assert (code, found) == ("model.file_needs_folder", component)
            assert model in {title, None}
    # Only transformers are models that cannot be used; other programs keep the rest in the same folder.
    names = {"diffusers", "original", "comfyui", "FramePackI2V_HY_fp8_e4m3fn"}
    assert set(unusable(tmp_path, ())) == names


def test_components_of_other_models_are_unknown(tmp_path: Path, subtests: pytest.Subtests) -> None:
    qwen = Qwen2Model(Qwen2Config(num_hidden_layers=1, num_key_value_heads=2, **SMALL))
    for name, state in (
        ("qwen", prefixed("model.", dict(qwen.state_dict()))),
        ("clip_h", clip(13)),
        ("ltx_vae", of_names(("decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.conv1.conv.weight"))),
        ("flux", of_names(("double_blocks.0.img_attn.qkv.weight", "txt_in.weight"))),
    ):
        with subtests.test(msg=name):
            path = tmp_path / f"{name}.safetensors"
            save_file({one: tensor.contiguous() for one, tensor in state.items()}, path)
            assert refusal(path)[0] == "model.file_unknown"


def test_a_text_encoder_in_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llava-llama-3-8b-v1_1-Q4_K_M.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("token_embd", "blk.0.attn_q", "blk.0.ffn_gate"):
        writer.add_tensor(f"{name}.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refusal(path) == ("model.file_needs_folder", "text_encoder", HUNYUAN)
