"""Where an ONNX file may keep its weights: all tensors of a file are checked, wherever they are."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime.core.errors import EngineError
from runtime.engines.imported.contract import read_contract

VALUES = numpy_helper.from_array(np.ones(4, np.float32), "w")


def external(location: str | None) -> TensorProto:
    """Return a tensor whose data is in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    if location is not None:
        tensor.external_data.add(key="location", value=location)
    return tensor


def file_with(folder: Path, tensor: TensorProto, place: str) -> Path:
    """Write a model with a tensor in its initializers, a Constant, a sparse tensor, a branch or a function."""
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    out, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("y", "x"))
    nodes, initializers, functions, sparse = [helper.make_node("Add", ["x", "w"], ["y"])], [], [], []
    if place == "initializer":
        initializers = [tensor]
    elif place == "constant":
        nodes = [constant, *nodes]
    elif place == "sparse":
        index = numpy_helper.from_array(np.arange(4), "w_indices")
        sparse = [helper.make_sparse_tensor(tensor, index, [4])]
    elif place == "branch":
        branch = helper.make_graph(
            [constant], "branch", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])]
        )
        inner = helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch)
        loop = helper.make_graph([inner], "body", [], [])
        nodes = [helper.make_node("Loop", [], ["w"], body=loop), *nodes]
    else:
        functions = [helper.make_function("own", "f", [], ["w"], [constant], [helper.make_opsetid("", 18)])]
    graph = helper.make_graph(nodes, "g", [x], [out], initializers, sparse_initializer=sparse)
    model = helper.make_model(graph, functions=functions)
    path = folder / "a.onnx"
    path.write_bytes(model.SerializeToString())
    return path


PLACES = ("initializer", "constant", "sparse", "branch", "function")


@pytest.mark.parametrize("place", PLACES)
def test_files_with_weights_are_found_in_every_part_of_a_model(place: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, external("weights.data"), place)
    assert read_contract(path, "onnxruntime", "cpu").weight_files == ("weights.data",)
    assert read_contract(file_with(tmp_path, VALUES, place), "onnxruntime", "cpu").weight_files == ()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../weights.data", "/etc/passwd"])
def test_weights_in_other_folders_are_refused_in_every_part(place: str, location: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        read_contract(file_with(tmp_path, external(location), place), "onnxruntime", "cpu")
    assert (refused.value.code, refused.value.data) == ("engine.onnx_weights_outside", {"file": location})


@pytest.mark.parametrize("location", ["", None, "w" * 300, "a\nb", "ü" * 150])
def test_weights_whose_name_is_no_files_name_are_refused(location: str | None, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        read_contract(file_with(tmp_path, external(location), "initializer"), "onnxruntime", "cpu")
    assert refused.value.code == "engine.onnx_weights_name"


def test_weights_in_very_many_files_are_refused(tmp_path: Path) -> None:
    model = onnx.load(file_with(tmp_path, external("w0"), "initializer"), load_external_data=False)
    model.graph.initializer.extend(external(f"w{number}") for number in range(1, 101))
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError) as refused:
        read_contract(tmp_path / "a.onnx", "onnxruntime", "cpu")
    assert refused.value.code == "engine.onnx_many_weight_files"
