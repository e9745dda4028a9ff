"""Models that make control frames or enhance prompts give the same results on a GPU as on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.core.request import DEPTH, POSE
from runtime.execution.chat_model import loaded
from runtime.execution.preprocessors import DepthModel, PoseModel
from runtime.models.enhancers import LocalEnhancer, check_chat_model
from runtime.models.preprocessors import find_preprocessor
from tests.chat_models import ANSWER, save_chat_model
from tests.execution.test_preprocessors import pictures
from tests.preprocessor_files import save_depth, save_pose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]


def test_depths_equal_those_of_the_cpu(tmp_path: Path) -> None:
    save_depth(tmp_path)
    use = find_preprocessor(DEPTH, tmp_path, None)
    wanted, got = (DepthModel(use, device).depths(pictures()) for device in ("cpu", "cuda:0"))
    assert np.abs(got - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_points_of_people_equal_those_of_the_cpu(tmp_path: Path) -> None:
    save_pose(tmp_path)
    use = find_preprocessor(POSE, tmp_path, None)
    wanted, got = (PoseModel(use, device) for device in ("cpu", "cuda:0"))
    # The tiny detector has the same score for all boxes, so that any of them may come first.
    assert [len(people) for people in got.people(pictures())] == [3, 3]
    boxes = np.array([[4.0, 4.0, 40.0, 44.0]])
    (points,), (exact,) = (model._in_boxes(pictures()[0], boxes) for model in (got, wanted))
    assert np.abs(points - exact).max() < 0.1


def test_a_chat_model_answers_on_the_gpu(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "chat")
    enhancer = LocalEnhancer(folder, "chat", check_chat_model(folder))
    with loaded(enhancer, 0, lambda: None) as model:
        assert model._device == "cuda:0"
        assert model.answer([{"role": "user", "content": "a boat"}], lambda: None) == ANSWER
