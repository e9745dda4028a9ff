"""Private names of transformers that Tandem uses, each with the reason.

`tests/upstream/test_transformers.py` fails if a release of transformers changes one of them.
"""

from typing import Any


def relative_position_buckets(attention: Any, distances: Any) -> Any:
    """Return the relative position bucket of each distance between tokens, int64, shaped like `distances`.

    Args:
        attention: a `UMT5Attention` for self-attention.
        distances: key position minus query position, int64.

    Reason: exported programs store the buckets as a constant, and only a private method computes them.
    """
    return attention._relative_position_bucket(distances)


def mark_initialized(parameter: Any) -> None:
    """Let the constructor of a model leave a parameter as it is.

    Reason: values come from files, and drawing random ones for parameters without memory takes as long as loading a
    small model.
    """
    parameter._is_hf_initialized = True
