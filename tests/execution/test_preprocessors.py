"""Models that make control frames: results equal those of transformers, points are where heatmaps have their peaks."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from PIL import Image

from runtime.core.errors import ModelError
from runtime.core.request import DEPTH, POSE
from runtime.execution.preprocessors import DepthModel, PoseModel, points_of
from runtime.models.preprocessors import find_preprocessor
from runtime.upstream.libraries import transformers
from tests.preprocessor_files import configured, save_depth, save_pose


def pictures(count: int = 2) -> list[Image.Image]:
    noise = np.random.default_rng(3).integers(0, 255, (count, 48, 64, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in noise]


def test_depth_equals_that_of_transformers(tmp_path: Path) -> None:
    save_depth(tmp_path)
    use = find_preprocessor(DEPTH, tmp_path, None)
    folder = use.folders["depth_estimator"]
    model = transformers.DepthAnythingForDepthEstimation.from_pretrained(folder)
    processor = transformers.DPTImageProcessorPil.from_pretrained(folder)
    reference = transformers.pipeline("depth-estimation", model=model, image_processor=processor)
    wanted = np.stack([result["predicted_depth"].numpy() for result in reference(pictures())])
    made = DepthModel(use, "cpu").depths(pictures())
    assert made.shape == (2, 48, 64) and wanted.std() > 1e-3
    assert np.abs(made - wanted).max() < 1e-4 * wanted.max()


def test_people_are_found_in_their_boxes(tmp_path: Path) -> None:
    save_pose(tmp_path)
    model = PoseModel(find_preprocessor(POSE, tmp_path, None), "cpu")
    people = model.people(pictures())
    assert [len(found) for found in people] == [3, 3]
    assert {person.shape for found in people for person in found} == {(17, 3)}
    save_pose(tmp_path, people=False)
    assert PoseModel(find_preprocessor(POSE, tmp_path, None), "cpu").people(pictures()) == [[], []]


def test_peaks_of_heatmaps_are_points_of_the_frame() -> None:
    # Peaks between pixels of 48×64 that show a region of 100×200 pixels around (70, 150).
    peaks = np.array([(20 + number * 0.31, 30 + number * 0.17) for number in range(17)])
    rows, columns = np.mgrid[:64, :48]
    heatmaps = np.stack([np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 8) for x, y in peaks]).astype(np.float32)
    points = points_of(heatmaps, (70.0, 150.0, 100.0, 200.0))
    wanted = np.stack([70 + (peaks[:, 0] / 47 - 0.5) * 100, 150 + (peaks[:, 1] / 63 - 0.5) * 200], axis=1)
    assert np.abs(points[:, :2] - wanted).max() < 0.1
    assert (points[:, 2] > 0.9).all()
    flat = points_of(np.zeros((17, 64, 48), np.float32), (70.0, 150.0, 100.0, 200.0))
    assert np.isfinite(flat).all() and not flat[:, 2].any()


def test_weights_that_do_not_fit_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    folder = save_depth(tmp_path) / "depth_estimator"
    use = find_preprocessor(DEPTH, tmp_path, None)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    removed = next(name for name in weights if name.endswith("bias"))
    safetensors.torch.save_file(
        {name: tensor for name, tensor in weights.items() if name != removed}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError) as caught:
        DepthModel(use, "cpu")
    assert caught.value.code == "model.component_incomplete"
    configured("config.json", fusion_hidden_size=16)(folder)
    with pytest.raises(ModelError) as caught:
        DepthModel(use, "cpu")
    assert caught.value.code == "model.part_unloadable"
