"""ONNX Script's private names that `runtime.upstream.onnxscript` uses: each test names what broke."""

import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper
from onnxscript.optimizer import optimize_ir

from runtime.upstream.onnxscript import fast_rewriting

NODES = 50


def model() -> onnx_ir.Model:
    """Return a model of many nodes, then two slices of one tensor, which the optimizer makes a split."""
    bounds = {"zero": [0], "half": [4], "end": [8], "last": [1]}
    nodes = [helper.make_node("Neg", [f"x{index}"], [f"x{index + 1}"]) for index in range(NODES)]
    for name, low, high in (("right", "half", "end"), ("left", "zero", "half")):
        nodes.append(helper.make_node("Slice", [f"x{NODES}", low, high, "last"], [name]))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("left", "right")],
        [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in bounds.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(made))


def test_the_optimizer_does_the_same_without_listing_all_nodes_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = 0
    listed = onnx_ir.Graph.__iter__

    def counted(graph: onnx_ir.Graph) -> object:
        nonlocal listings
        listings += 1
        return listed(graph)

    monkeypatch.setattr(onnx_ir.Graph, "__iter__", counted)
    slow, fast = model(), model()
    optimize_ir(slow)
    # If this fails, ONNX Script is as fast by itself: remove `fast_rewriting`.
    assert listings > NODES
    listings = 0
    with fast_rewriting():
        optimize_ir(fast)
    assert listings < NODES
    assert "Split" in [node.op_type for node in fast.graph]
    assert onnx_ir.to_proto(fast).SerializeToString() == onnx_ir.to_proto(slow).SerializeToString()
