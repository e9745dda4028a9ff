"""Folders of tiny models that make control frames, with random weights, of the classes of published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.core.preprocessors import DEPTH_ESTIMATOR, PERSON_DETECTOR, POSE_ESTIMATOR
from runtime.models.preprocessors import PUBLISHED, folder_of_preprocessor
from runtime.upstream.libraries import transformers

_SCALED = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 3}
_NORMALIZED = {"do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
POINTS = 17


def _save(model: Any, folder: Path, processor: dict[str, Any]) -> None:
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def save_depth(weights_dir: Path, name: str = PUBLISHED[0].name) -> Path:
    """Write a depth estimator into the weights folder; return its folder."""
    torch.manual_seed(1)
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(
            **{"hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28, "patch_size": 7},
            **{"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, "apply_layernorm": True},
            initializer_range=0.3,
        ),
        **{"patch_size": 7, "reassemble_hidden_size": 12, "neck_hidden_sizes": [4, 4, 8, 8]},
        **{"fusion_hidden_size": 8, "head_hidden_size": 4, "initializer_range": 0.3},
    )
    model = transformers.DepthAnythingForDepthEstimation(config)
    model.head.conv3.weight.data.abs_()  # negative results would be cut to 0
    folder = folder_of_preprocessor(name, weights_dir)
    size = {"size": {"height": 28, "width": 28}, "keep_aspect_ratio": True, "ensure_multiple_of": 7}
    processor = {**_SCALED, **_NORMALIZED, **size, "image_processor_type": "DPTImageProcessor"}
    _save(model, folder / DEPTH_ESTIMATOR, processor)
    return folder


def save_pose(weights_dir: Path, *, people: bool = True) -> Path:
    """Write a person detector and a pose estimator into the weights folder; return their folder.

    Args:
        people: whether the detector finds people in every frame, or in none.
    """
    torch.manual_seed(2)
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "encoder_hidden_dim": 16}
    config = transformers.RTDetrConfig(
        backbone_config=transformers.RTDetrResNetConfig(
            **{"embedding_size": 4, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
            **{"layer_type": "bottleneck", "out_features": ["stage2", "stage3", "stage4"]},
        ),
        **sizes,
        **{"encoder_in_channels": [12, 16, 20], "decoder_in_channels": [16, 16, 16], "num_queries": 3},
        **{"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"id2label": {0: "person", 1: "boat"}, "label2id": {"person": 0, "boat": 1}},
    )
    detector = transformers.RTDetrForObjectDetection(config)
    for name, parameter in detector.named_parameters():
        if "class_embed" in name and name.endswith("bias"):  # scores of all boxes
            parameter.data.copy_(torch.tensor([8.0, -8.0] if people else [-8.0, 8.0]))
    pose = transformers.VitPoseForPoseEstimation(
        transformers.VitPoseConfig(
            backbone_config=transformers.VitPoseBackboneConfig(
                **{"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": [32, 24]},
                **{"patch_size": [8, 8], "out_indices": [1], "part_features": 0},
            ),
            **{"use_simple_decoder": True, "id2label": {number: str(number) for number in range(POINTS)}},
        )
    )
    with torch.no_grad():
        pose.head.conv.bias.fill_(0.8)
    folder = folder_of_preprocessor(PUBLISHED[1].name, weights_dir)
    square = {**_SCALED, "do_normalize": False, "size": {"height": 64, "width": 64}}
    _save(detector, folder / PERSON_DETECTOR, {**square, "image_processor_type": "RTDetrImageProcessor"})
    of_pose = {**_NORMALIZED, "size": {"height": 32, "width": 24}, "image_processor_type": "VitPoseImageProcessor"}
    _save(pose, folder / POSE_ESTIMATOR, of_pose)
    return folder


def pickle_weights(folder: Path) -> None:
    """Replace the weights in a folder by pickled ones."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def truncate_weights(folder: Path) -> None:
    """Remove the last bytes of the weights in a folder."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def configured(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a function that changes values of a configuration in a folder."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change
