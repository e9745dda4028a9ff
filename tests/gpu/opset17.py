"""Rewrites an exported ONNX file (opset 18) to opset 17, which TensorRT 8.6 can parse. For tests and benchmarks only.

Between the two opsets, of the operators that our forms export to, these differ: reductions take their axes as an
input, `Split` has `num_outputs`, `Resize` and `ScatterND` have new attributes, `Pad` a new input. `Shape` has `start`
and `end` in both, and 8.6 does not look at them: a slice does it. For `InstanceNormalization`, to which group norms are
exported, 8.6.0 has a plugin only, which needs another cuDNN: it is spelt out. Depthwise convolutions of thousands of
channels become several smaller ones: with 16,384 channels, 8.6 measured one float32 kernel for up to 79 s. The sum of a
convolution and another tensor becomes a difference, with negated weights: 8.6 merges a sum into the convolution, for
which it has no Hopper kernel, and takes 0.35 instead of 0.20 ms.
"""

import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)
# Attribute values of opset 18 that mean what opset 17 does; anything else has no counterpart.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Resize": {"antialias": 0, "keep_aspect_ratio_policy": b"stretch"},
    "ScatterND": {"reduction": b"none"},
    "ScatterElements": {"reduction": b"none"},
}
_PAD_INPUTS = 3
# Operators whose results have one type, as ONNX numbers it, at least without the attribute `value`, and those whose
# precision matters.
_OF_TYPE = {"Shape": 7, "Size": 7, "Equal": 9, "Greater": 9, "Less": 9, "Not": 9, "And": 9}
_OF_TYPE |= {"Constant": 7, "ConstantOfShape": 1}
_COMPUTING = REDUCTIONS | {
    "ReduceSum",
    "MatMul",
    "Gemm",
    "Conv",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Sqrt",
    "Reciprocal",
    "Softmax",
}
# Depthwise convolutions of more channels are split.
_MOST_GROUPS = 1024
# TensorRT 8.6 counts in 32 bits.
_ALL_AXES = 2**31 - 1
_FROM, _TO, _IR_VERSION = 18, 17, 8


def to_opset_17(path: Path) -> None:
    """Rewrite a file in place; external data stays where it is.

    Raises:
        ValueError: if it uses what opset 17 has not.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                constants[node.output[0]] = attribute.t
    _slice_shapes(model.graph)
    _spell_out_norms(model.graph, constants)
    _split_depthwise(model.graph, constants)
    _subtract_convolutions(model.graph)
    for node in model.graph.node:
        if node.op_type in REDUCTIONS:
            _rewrite_reduction(node, constants)
        elif node.op_type == "Split":
            # Opset 17 splits evenly by the number of outputs alone.
            _remove(node, "num_outputs")
        elif node.op_type in _DEFAULTS:
            _remove_defaults(node)
        elif node.op_type == "Pad" and len(node.input) > _PAD_INPUTS:
            raise ValueError(f"{node.name}: pads given axes")
    for opset in model.opset_import:
        if opset.domain in {"", "ai.onnx"}:
            if opset.version > _FROM:
                raise ValueError(f"opset {opset.version} is not supported")
            opset.version = _TO
    # Newer formats of the file itself are unknown to 8.6; nothing in these files needs one.
    model.ir_version = min(model.ir_version, _IR_VERSION)
    path.write_bytes(model.SerializeToString())


def float32_nodes(path: Path) -> set[str]:
    """Return the names of a file's nodes that compute in float32: not casts, and not those that only move values."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {one.name: one.type.tensor_type.elem_type for one in graph.input}
    found = set()
    for node in graph.node:
        given = {one.name: one for one in node.attribute}
        if node.op_type == "Cast":
            kind = given["to"].i
        elif "value" in given:
            kind = given["value"].t.data_type
        elif node.op_type in _OF_TYPE:
            kind = _OF_TYPE[node.op_type]
        else:
            kind = types[node.input[node.op_type == "Where"]]
        types |= dict.fromkeys(node.output, kind)
        if kind == onnx.TensorProto.FLOAT and node.op_type in _COMPUTING:
            found.add(node.name)
    return found


def _made(nodes: list[Any], out: str, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
    """Append an operator on the way to the tensor `out`; return its tensor: `out` itself without a name."""
    import onnx

    name = f"{out}_{name}" if name else out
    nodes.append(onnx.helper.make_node(operator, inputs, [name], name=f"{name}_{operator}", **attributes))
    return name


def _integers(graph: Any, out: str, name: str, values: list[int]) -> str:
    """Add a constant for an operator on the way to the tensor `out`; return its name."""
    import onnx

    name = f"{out}_{name}"
    graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values))
    return name


def _slice_shapes(graph: Any) -> None:
    """Replace each `Shape` of some axes by the `Slice` of all."""
    import onnx

    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type != "Shape" or not bounds:
            continue
        out = node.output[0]
        limits = {"start": bounds.get("start", 0), "end": bounds.get("end", _ALL_AXES)}
        names = [_integers(graph, out, name, [value]) for name, value in limits.items()]
        del node.attribute[:]
        node.output[0] = f"{out}_full"
        nodes.append(onnx.helper.make_node("Slice", [node.output[0], *names], [out], name=f"{node.name}_slice"))
    del graph.node[:]
    graph.node.extend(nodes)


def _spell_out_norms(graph: Any, constants: dict[str, Any]) -> None:
    """Replace each `InstanceNormalization` of (batch, channels, values) by means, products and sums."""
    import onnx

    nodes: list[Any] = []
    for node in graph.node:
        if node.op_type != "InstanceNormalization":
            nodes.append(node)
            continue
        (x, *affine), (out,) = node.input, node.output
        (epsilon,) = [attribute.f for attribute in node.attribute if attribute.name == "epsilon"]
        shape, least = _integers(graph, out, "shape", [1, -1, 1]), f"{out}_epsilon"
        graph.initializer.append(onnx.helper.make_tensor(least, constants[affine[0]].data_type, [], [epsilon]))
        made = partial(_made, nodes, out)
        scale, bias = (made("Reshape", [one, shape], name) for one, name in zip(affine, ("scale", "bias"), strict=True))
        centered = made("Sub", [x, made("ReduceMean", [x], "mean", axes=[2], keepdims=1)], "centered")
        squares = made("Mul", [centered, centered], "squares")
        variance = made("ReduceMean", [squares], "variance", axes=[2], keepdims=1)
        deviation = made("Sqrt", [made("Add", [variance, least], "sum")], "deviation")
        normed = made("Div", [centered, deviation], "normed")
        made("Add", [made("Mul", [normed, scale], "scaled"), bias], "")
    del graph.node[:]
    graph.node.extend(nodes)


def _split_depthwise(graph: Any, constants: dict[str, Any]) -> None:
    """Replace each wide depthwise `Conv` by one for each slice of its channels."""
    import onnx

    nodes: list[Any] = []
    for node in graph.node:
        given = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        if node.op_type != "Conv" or given["group"] <= _MOST_GROUPS:
            nodes.append(node)
            continue
        (out,), (x, *parameters) = node.output, node.input
        bounds = list(itertools.pairwise([*range(0, given["group"], _MOST_GROUPS), given["group"]]))
        if constants[parameters[0]].dims[0] != given["group"]:
            raise ValueError(f"{node.name}: groups of several channels")
        slices = [f"{out}_slice_{start}" for start, _ in bounds]
        split = [x, _integers(graph, out, "sizes", [end - start for start, end in bounds])]
        nodes.append(onnx.helper.make_node("Split", split, slices, name=f"{out}_Split", axis=1))
        results = []
        for one, (start, end) in zip(slices, bounds, strict=True):
            rows = [_rows(graph, constants[name], start, end) for name in parameters]
            results.append(_made(nodes, out, "Conv", [one, *rows], f"conv_{start}", **given | {"group": end - start}))
        _made(nodes, out, "Concat", results, "", axis=1)
    del graph.node[:]
    graph.node.extend(nodes)


def _subtract_convolutions(graph: Any) -> None:
    """Replace each sum of a 3×3 `Conv` and what is no `Conv` by the difference of the latter and the negative `Conv`.

    Convolutions are left alone if they have groups, if they or their weights are used twice, or if their weights are
    in a separate file.
    """
    import onnx

    inline = {one.name: one for one in graph.initializer if one.data_location != onnx.TensorProto.EXTERNAL}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(one.name for one in graph.output)
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv"}
    for node in graph.node:
        summed = [name for name in node.input if name in convolutions]
        if node.op_type != "Add" or len(summed) != 1:
            continue
        (out,), (other,) = summed, [name for name in node.input if name not in summed]
        parameters = convolutions[out].input[1:]
        (group,) = [one.i for one in convolutions[out].attribute if one.name == "group"]
        shared = any(uses[name] > 1 for name in (out, *parameters))
        if group > 1 or shared or not inline.keys() >= set(parameters) or inline[parameters[0]].dims[2:] != [3, 3]:
            continue
        for name in parameters:
            negative = -onnx.numpy_helper.to_array(inline[name])
            inline[name].CopyFrom(onnx.numpy_helper.from_array(negative, name))
        node.op_type = "Sub"
        node.input[:] = [other, out]


def _rows(graph: Any, tensor: Any, start: int, end: int) -> str:
    """Add the rows from `start` to before `end` of a constant as another; return its name."""
    import onnx

    row = math.prod(tensor.dims[1:]) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    made = onnx.TensorProto(name=f"{tensor.name}_{start}", data_type=tensor.data_type)
    made.dims.extend([end - start, *tensor.dims[1:]])
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        found = {entry.key: entry.value for entry in tensor.external_data}
        made.data_location = onnx.TensorProto.EXTERNAL
        found |= {"offset": str(int(found.get("offset", 0)) + start * row), "length": str((end - start) * row)}
        for key, value in found.items():
            made.external_data.add(key=key, value=value)
    else:
        made.raw_data = onnx.numpy_helper.to_array(tensor)[start:end].tobytes()
    graph.initializer.append(made)
    return made.name


def _rewrite_reduction(node: Any, constants: dict[str, Any]) -> None:
    import onnx

    if any(attribute.name == "axes" for attribute in node.attribute):
        return
    if len(node.input) > 1 and node.input[1]:
        axes = onnx.numpy_helper.to_array(constants[node.input[1]]).tolist()
        node.attribute.append(onnx.helper.make_attribute("axes", axes))
    elif any(a.name == "noop_with_empty_axes" and a.i for a in node.attribute):
        raise ValueError(f"{node.name}: reduces nothing")
    del node.input[1:]
    _remove(node, "noop_with_empty_axes")


def _remove_defaults(node: Any) -> None:
    import onnx

    for name, default in _DEFAULTS[node.op_type].items():
        for attribute in node.attribute:
            if attribute.name == name and onnx.helper.get_attribute_value(attribute) != default:
                raise ValueError(f"{node.name}: {name} has no counterpart in opset 17")
        _remove(node, name)


def _remove(node: Any, name: str) -> None:
    for index in reversed(range(len(node.attribute))):
        if node.attribute[index].name == name:
            del node.attribute[index]
