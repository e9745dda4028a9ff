"""Private names of ONNX Script that Tandem uses, each with the reason.

`tests/upstream/test_onnxscript.py` fails if a release of ONNX Script changes one of them. Imports it on use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fast_rewriting() -> Iterator[None]:
    """Make the optimizer skip nodes that cannot match a pattern with several outputs, while entered.

    The optimized model is the same.

    Reason: for each node of a graph, the matcher lists all nodes before it looks at the node's type. The time grows
    with the square of the number of nodes.
    """
    from onnxscript.rewriter import MatchResult
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    match = SimplePatternMatcher.match

    def match_type_first(self: Any, model: Any, graph_or_function: Any, node: Any, **options: Any) -> Any:
        pattern = self.pattern
        identifier = None if pattern.has_single_output_node else pattern.output_nodes[0].op_identifier()
        if identifier not in {None, node.op_identifier()}:
            return MatchResult().fail("The type of the node differs.")
        return match(self, model, graph_or_function, node, **options)

    setattr(SimplePatternMatcher, "match", match_type_first)  # noqa: B010 - mypy allows no assignment to a method
    try:
        yield
    finally:
        setattr(SimplePatternMatcher, "match", match)  # noqa: B010
