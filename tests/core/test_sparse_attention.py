"""Sparse attention as requested, and where it is exact."""

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.request import GenerationRequest
from runtime.core.sparse_attention import exact_share, exact_steps, is_sparse, kernel_of, tau_of


@pytest.mark.parametrize(
    ("asked", "kept", "tau"),
    [("sol", "sol", 1.0), ("sol:1", "sol:1", 1.0), ("sol:1.50", "sol:1.5", 1.5), ("sol:0", "sol:0", 0.0),
     ("sol:-0", "sol:0", 0.0), ("sol:4e0", "sol:4", 4.0)],
)  # fmt: skip
def test_sparse_attention_is_stored_in_its_shortest_notation(asked: str, kept: str, tau: float) -> None:
    request = GenerationRequest(prompt="a boat", attention=asked)
    assert request.attention == kept
    assert (kernel_of(kept), tau_of(kept), is_sparse(kept)) == ("sol", tau, True)
    assert GenerationRequest.from_mapping(request.to_json()) == request


@pytest.mark.parametrize("value", ["sol:", "sol:x", "sol:nan", "sol:inf", "sol:-0.1", "sol:4.1", "sol:1:2"])
def test_an_invalid_threshold_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest(prompt="a boat", attention=value)
    assert (refused.value.field, refused.value.code) == ("attention", "sparse_attention.tau")
    assert refused.value.data["default"] == 1.0


@pytest.mark.parametrize("value", ["", "sola", "fp8:1", "auto:1", None, 7, [], {}, True, "x" * 10_000])
def test_a_threshold_belongs_to_sparse_attention_only(value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest(prompt="a boat", attention=value)  # type: ignore[arg-type]  # on purpose
    assert (refused.value.field, refused.value.code) == ("attention", "request.not_a_choice")
    assert not is_sparse("fp8")


def test_the_first_fifth_of_the_steps_is_exact() -> None:
    assert [exact_steps(steps) for steps in (1, 4, 5, 6, 8, 40, 50)] == [1, 1, 1, 2, 2, 8, 10]


def test_the_exact_share_counts_the_first_block() -> None:
    assert exact_share(40) == pytest.approx((8 * 40 + 32) / (40 * 40))
    assert exact_share(1) == 1
