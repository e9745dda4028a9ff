"""Comparison of two results: ratios, and the reasons for excluded configurations."""

from typing import Any

import pytest

from runtime.bench.compare import HEADINGS, check_result, compare, summary
from runtime.core.errors import InvalidRequestError
from tests.bench.made import configuration, failed, result, spread
from tests.facts import fact


def test_ratios_by_configuration_and_stage() -> None:
    before = result(configuration("a", 4.0), configuration("b", 2.0), configuration("c", 1.0))
    after = result(configuration("a", 2.0), configuration("b", 2.02), configuration("c", 2.0))
    found = compare(before, after)
    totals = {one.name: one for one in found.differences if one.figure == "total"}
    assert {name: one.verdict for name, one in totals.items()} == {
        "a": "faster",
        "b": "within the spread",
        "c": "slower",
    }
    assert totals["a"].median == 0.5
    figures = [one.figure for one in found.differences if one.name == "a"]
    assert figures == ["encode", "denoise", "decode", "mux", "total", "step"]  # loading took no time
    assert found.left_out == () and found.versions == ()
    assert all(len(row) == len(HEADINGS) for row in found.rows())
    assert summary(found) == "Of 3: 1 faster, 1 slower, 1 neither. Largest change: c, ratio 2.00."


def test_one_run_is_too_few() -> None:
    few = configuration("a", 1.0, stages={"total": spread(1.0, count=1)})
    (found, *_) = compare(result(configuration("a", 4.0)), result(few)).differences
    assert (found.figure, found.verdict) == ("total", "too few runs")


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({"cpu": "Other CPU"}, "cpu Test CPU, Other CPU"),
        ({"cores": 4}, "cores 2, 4"),
        ({"gpus": ["NVIDIA H200"]}, "gpus none, NVIDIA H200"),
        ({"system": "Darwin arm64"}, "system Linux x86_64, Darwin arm64"),
    ],
)
def test_another_machine_is_refused(changes: dict[str, Any], machine: str) -> None:
    after = result(configuration())
    after["machine"] = after["machine"] | changes
    with pytest.raises(InvalidRequestError) as refused:
        compare(result(configuration()), after)
    assert (refused.value.code, refused.value.data["machines"]) == ("bench.two_machines", [machine])


def test_another_request_is_left_out_with_the_reason() -> None:
    other = configuration("b")
    other["request"] = other["request"] | {"steps": 20}
    found = compare(result(configuration("a"), configuration("b")), result(configuration("a"), other))
    assert {one.name for one in found.differences} == {"a"}
    assert found.left_out == ("b: another request (steps 4, 20).",)


def test_fields_of_one_version_only_are_ignored() -> None:
    newer = configuration("a")
    newer["request"] = newer["request"] | {"attention": "auto"}
    assert compare(result(configuration("a")), result(newer)).differences


def test_configurations_of_one_result_only_are_listed() -> None:
    before = result(configuration("a"), configuration("b"), failed("c"))
    after = result(configuration("a"), configuration("c"), configuration("d"))
    assert compare(before, after).left_out == (
        "b: only in the first.",
        "c: not measured in the first.",
        "d: only in the second.",
    )


def test_nothing_to_compare_is_an_error_with_the_reasons() -> None:
    for before, after, code in (
        (result(configuration("a")), result(failed("a")), "bench.nothing_to_compare"),
        (result(), result(), "bench.results_empty"),
        (result(configuration("a")), result(configuration("a"), kind="forward"), "bench.two_kinds"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            compare(before, after)
        assert refused.value.code == code


def test_other_versions_are_compared_and_listed() -> None:
    after = result(configuration("a"), tandem={"version": "0.2.0", "commit": "abc", "changed": True})
    after["versions"] = {"torch": "2.14.0", "cuda": None, "triton": "3.6"}
    assert compare(result(configuration("a")), after).versions == (
        "Tandem's version 0.1.0, 0.2.0",
        "Tandem's changed False, True",
        "torch 2.13.0, 2.14.0",
        "triton none, 3.6",
    )


@pytest.mark.parametrize(
    ("values", "code", "data"),
    [
        ([], "bench.not_a_result", {}),
        ({}, "bench.not_a_result", {}),
        ({"kind": "video"}, "bench.not_a_result", {}),
        (result(schema=2), "bench.other_schema", {"schema": "2", "readable": 1}),
        ({name: value for name, value in result().items() if name != "machine"}, "bench.not_a_result", {}),
        (result() | {"configurations": 3}, "bench.not_a_result", {}),
    ],
)
def test_other_files_are_refused(values: Any, code: str, data: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_result(values, 1, "x.json")
    assert refused.value.fact == fact(code, field="file", file="x.json", **data)


@pytest.mark.parametrize(
    "damaged",
    [
        {"name": "a"},
        configuration("a") | {"stages": {"total": {"median": "x"}}},
        configuration("a") | {"stages": {"total": 3}},
        configuration("a") | {"request": None},
        3,
    ],
)
def test_damaged_results_are_refused(damaged: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compare(result(configuration("a")), result() | {"configurations": [damaged]})
    assert refused.value.code == "bench.not_a_result"
