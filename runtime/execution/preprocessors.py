"""Models that make control frames, in PyTorch: depth of frames, and the poses of people in them.

They are models of transformers, loaded from folders with safetensors, that compute in float32. What comes before and
after ViTPose is written here: transformers' own needs SciPy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from runtime.core.errors import ModelError
from runtime.core.preprocessors import DEPTH_ESTIMATOR, PERSON_DETECTOR, POSE_ESTIMATOR, PreprocessorUse
from runtime.models.folder import check_files, read_config, tensor_shapes
from runtime.models.preprocessors import CLASSES
from runtime.upstream.libraries import transformers
from runtime.video.skeletons import POINTS

# The least score of a person, and the most people of a frame: those with the highest scores.
_LEAST_SCORE, _MOST_PEOPLE = 0.3, 16
# A person's picture shows more than the box around them, by this factor. Source: ViTPose's `box2cs`.
_PADDING = 1.25
# Of the blur of a heatmap before its peak is refined, in its pixels: see `_refined`.
_SIGMA, _REACH = 0.8, 5
# Colors of pictures on which ViTPose was trained: ImageNet's.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class DepthModel:
    """Estimates the depth of frames.

    Raises:
        ModelError: if the model cannot be loaded.
    """

    def __init__(self, use: PreprocessorUse, device: str) -> None:
        folder = use.folders[DEPTH_ESTIMATOR]
        self._device = device
        self._model = _load(DEPTH_ESTIMATOR, folder, device)
        self._processor = _processor("DPTImageProcessorPil", folder)

    @torch.inference_mode()
    def depths(self, frames: Sequence[Image.Image]) -> np.ndarray:
        """Return how near each pixel is, (frames, height, width) float32, with an unknown scale and offset.

        Args:
            frames: RGB, all of one size.
        """
        pixels = self._processor(images=list(frames), return_tensors="pt").pixel_values
        outputs = self._model(pixels.to(self._device))
        sizes = [(frame.height, frame.width) for frame in frames]
        results = self._processor.post_process_depth_estimation(outputs, sizes)
        return torch.stack([result["predicted_depth"] for result in results]).float().cpu().numpy()


class PoseModel:
    """Finds people in frames, and the points of each.

    Raises:
        ModelError: if one of both models cannot be loaded.
    """

    def __init__(self, use: PreprocessorUse, device: str) -> None:
        detector, estimator = use.folders[PERSON_DETECTOR], use.folders[POSE_ESTIMATOR]
        self._device = device
        self._detector = _load(PERSON_DETECTOR, detector, device)
        self._processor = _processor("RTDetrImageProcessorPil", detector)
        self._estimator = _load(POSE_ESTIMATOR, estimator, device)
        names = read_config(detector / "config.json")["id2label"]
        self._person = next(int(label) for label, name in names.items() if name == "person")
        config = read_config(estimator / "preprocessor_config.json")
        height, width = self._estimator.config.backbone_config.image_size
        self._height, self._width = int(height), int(width)
        mean, std = config.get("image_mean", _MEAN), config.get("image_std", _STD)
        self._mean, self._std = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (mean, std))

    @torch.inference_mode()
    def people(self, frames: Sequence[Image.Image]) -> list[list[np.ndarray]]:
        """Return the people in each frame: of each, (17, 3) float32 as `video.skeletons.skeletons` takes it.

        Args:
            frames: RGB.
        """
        pixels = self._processor(images=list(frames), return_tensors="pt").pixel_values
        outputs = self._detector(pixels.to(self._device))
        sizes = [(frame.height, frame.width) for frame in frames]
        found = self._processor.post_process_object_detection(outputs, _LEAST_SCORE, sizes)
        return [self._in_boxes(frame, self._boxes(result)) for frame, result in zip(frames, found, strict=True)]

    def _boxes(self, result: Any) -> np.ndarray:
        """Return the boxes of people, (n, 4): left, top, right and bottom in pixels; those found best come first."""
        people = result["labels"] == self._person
        best = result["scores"][people].argsort(descending=True)[:_MOST_PEOPLE]
        boxes: np.ndarray = result["boxes"][people][best].float().cpu().numpy()
        return boxes

    def _in_boxes(self, frame: Image.Image, boxes: np.ndarray) -> list[np.ndarray]:
        """Return the points of the people in boxes."""
        regions = [self._region(box) for box in boxes]
        people = []
        for region in regions:
            heatmaps = self._estimator(self._seen(frame, region)[None].to(self._device), **self._expert()).heatmaps
            people.append(points_of(heatmaps[0].float().cpu().numpy(), region))
        return people

    def _expert(self) -> dict[str, torch.Tensor]:
        """Return the inputs of a model with several experts, by what it was trained on: COCO comes first."""
        several = getattr(self._estimator.config.backbone_config, "num_experts", 1) > 1
        return {"dataset_index": torch.zeros(1, dtype=torch.int64, device=self._device)} if several else {}

    def _region(self, box: np.ndarray) -> tuple[float, float, float, float]:
        """Return center, width and height of what the model sees of a person, in its aspect ratio."""
        left, top, right, bottom = box.tolist()
        width, height = max(right - left, 1.0), max(bottom - top, 1.0)
        aspect = self._width / self._height
        width, height = max(width, height * aspect), max(height, width / aspect)
        return (left + right) / 2, (top + bottom) / 2, width * _PADDING, height * _PADDING

    def _seen(self, frame: Image.Image, region: tuple[float, float, float, float]) -> torch.Tensor:
        """Return a region of a frame as the model takes it, (3, height, width) float32; black outside of the frame.

        Its corners are at the centers of the corner pixels. Source: Huang et al., The Devil is in the Details:
        Delving into Unbiased Data Processing for Human Pose Estimation, CVPR 2020.
        """
        x, y, width, height = region
        across, down = width / (self._width - 1), height / (self._height - 1)
        # Pillow counts from the corners of pixels.
        left, top = x - width / 2 + 0.5 - across / 2, y - height / 2 + 0.5 - down / 2
        size = self._width, self._height
        picture = frame.transform(
            size, Image.Transform.AFFINE, (across, 0, left, 0, down, top), Image.Resampling.BILINEAR
        )
        colors = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (colors - self._mean) / self._std


def points_of(heatmaps: np.ndarray, region: tuple[float, float, float, float]) -> np.ndarray:
    """Return the points of a person, (17, 3) float32: x and y in pixels of the frame, and score.

    Args:
        heatmaps: (17, height, width) float32.
        region: what they show of the frame, see `PoseModel._region`.
    """
    count, height, width = heatmaps.shape
    assert count == POINTS
    flat = heatmaps.reshape(count, -1)
    rows, columns = np.divmod(flat.argmax(1), width)
    blurred = np.log(np.clip(_blurred(heatmaps), 1e-3, 50.0))
    points = np.empty((count, 3), dtype=np.float32)
    x, y, region_width, region_height = region
    for number, (row, column) in enumerate(zip(rows, columns, strict=True)):
        right, down = _refined(blurred[number], int(row), int(column))
        points[number] = (
            x + ((column + right) / (width - 1) - 0.5) * region_width,
            y + ((row + down) / (height - 1) - 0.5) * region_height,
            flat[number].max(),
        )
    return points


def _blurred(heatmaps: np.ndarray) -> np.ndarray:
    """Return heatmaps after a Gaussian blur."""
    steps = np.arange(-_REACH, _REACH + 1)
    kernel = np.exp(-(steps**2) / (2 * _SIGMA**2))
    kernel /= kernel.sum()
    for axis in (1, 2):
        padding = [(0, 0), (0, 0), (0, 0)]
        padding[axis] = (_REACH, _REACH)
        padded = np.pad(heatmaps, padding, mode="symmetric")
        size = heatmaps.shape[axis]
        parts = [weight * np.take(padded, np.arange(first, first + size), axis) for first, weight in enumerate(kernel)]
        heatmaps = np.sum(parts, axis=0)
    return heatmaps


def _refined(logarithm: np.ndarray, row: int, column: int) -> tuple[float, float]:
    """Return how far the peak of a heatmap is right of and below its largest pixel, at most a pixel.

    The peak is that of the parabola through the pixels around, in the logarithm. Source: Zhang et al.,
    Distribution-Aware Coordinate Representation for Human Pose Estimation, CVPR 2020.
    """
    around = np.pad(logarithm, 1, mode="edge")[row : row + 3, column : column + 3]
    slope = np.array([around[1, 2] - around[1, 0], around[2, 1] - around[0, 1]]) / 2
    across = around[1, 2] - 2 * around[1, 1] + around[1, 0]
    down = around[2, 1] - 2 * around[1, 1] + around[0, 1]
    both = (around[2, 2] - around[2, 0] - around[0, 2] + around[0, 0]) / 4
    bend = np.array([[across, both], [both, down]])
    if np.linalg.det(bend) <= 0 or across >= 0:  # no peak
        return 0.0, 0.0
    right, below = np.clip(-np.linalg.solve(bend, slope), -1, 1)
    return float(right), float(below)


def _load(part: str, folder: Path, device: str) -> Any:
    """Load a part in float32.

    Raises:
        ModelError: if it has pickled weights, or is incomplete or damaged.
    """
    check_files(folder)
    tensor_shapes(folder)  # names a truncated file
    try:
        model, loading = getattr(transformers, CLASSES[part]).from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # of any type
        raise ModelError("model.part_unloadable", part=part.replace("_", " "), model=folder.name) from error
    if loading["missing_keys"]:
        missing = len(loading["missing_keys"])
        raise ModelError("model.component_incomplete", component=part, model=folder.name, missing=missing)
    return model.eval().requires_grad_(requires_grad=False).to(device)


def _processor(name: str, folder: Path) -> Any:
    """Load what makes pictures of frames for a part.

    Raises:
        ModelError: if its configuration is damaged.
    """
    try:
        return getattr(transformers, name).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of any type
        raise ModelError("model.part_unloadable", part="image processor", model=folder.name) from error
