"""Private names of transformers that Tandem uses, each with the reason.

`tests/upstream/test_transformers.py` names what broke when transformers changes.
"""

from typing import Any


def relative_position_buckets(attention: Any, distances: Any) -> Any:
    """Return the bucket of each distance between tokens, int64, shaped like `distances`.

    Args:
        attention: a UMT5 self-attention.
        distances: key position minus query position.

    Reason: exported programs hold the buckets as a constant; the model computes them in a private method only.
    """
    return attention._relative_position_bucket(distances)
