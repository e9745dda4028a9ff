"""Compares two benchmark results, for example of two versions: the ratio of durations of each configuration.

Results of different machines or kinds, and configurations with different requests, are not compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.bench.render import number, spread_text
from runtime.bench.result_files import differing_machines, differing_versions
from runtime.bench.statistics import Spread, ratio
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened

HEADINGS = ("Configuration", "Stage", "Before", "Now", "Ratio", "Range of the ratio", "")
_KINDS = ("bench", "forward")
# The total of each kind of result.
_TOTALS = frozenset({"total", "pass"})
_IRRELEVANT_FIELDS = frozenset({"fps", "on_out_of_memory", "build"})


@dataclass(frozen=True)
class Difference:
    """Duration of one stage of one configuration in both results.

    Attributes:
        name, figure: configuration and stage.
        before, after: seconds.
        low, median, high: ratio of the durations.
        verdict: "faster", "slower", "within the spread" or "too few runs".
    """

    name: str
    figure: str
    before: Spread
    after: Spread
    median: float | None
    low: float | None
    high: float | None
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return vars(self) | {"before": self.before.to_json(), "after": self.after.to_json()}


@dataclass(frozen=True)
class Comparison:
    """Differences of two results.

    Attributes:
        differences: of configurations that both results have.
        left_out: configurations that cannot be compared, with the reason, as sentences.
        versions: versions that differ: "torch 2.11.0, 2.13.0".
    """

    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    versions: tuple[str, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table with `HEADINGS`."""
        return [
            (
                row.name,
                row.figure,
                spread_text(row.before.to_json()),
                spread_text(row.after.to_json()),
                "" if row.median is None else f"{row.median:.3f}",
                "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}",
                row.verdict,
            )
            for row in self.differences
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "differences": [difference.to_json() for difference in self.differences],
            "left_out": list(self.left_out),
            "versions": list(self.versions),
        }


def check_result(values: Any, schema: int, called: str) -> Mapping[str, Any]:
    """Return a result that was read from a file.

    Args:
        schema: the version of the format that can be read.
        called: the file's name, for errors.

    Raises:
        InvalidRequestError: if it is not a result, or of another version.
    """
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        raise InvalidRequestError("file", "bench.not_a_result", file=called)
    if values.get("schema") != schema:
        raise InvalidRequestError(
            "file", "bench.other_schema", file=called, schema=shortened(values.get("schema")), readable=schema
        )
    needed = {"machine", "tandem", "versions", "configurations"}
    if not all(isinstance(values.get(name), dict | list) for name in needed):
        raise InvalidRequestError("file", "bench.not_a_result", file=called)
    return values


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare two results that `check_result` returned.

    Raises:
        InvalidRequestError: if nothing in them can be compared.
    """
    if before["kind"] != after["kind"]:
        raise InvalidRequestError("file", "bench.two_kinds")
    machines = differing_machines(before, after)
    if machines:
        raise InvalidRequestError("file", "bench.two_machines", machines=machines)
    differences: list[Difference] = []
    left_out: list[str] = []
    try:
        counterparts = {row["name"]: row for row in after["configurations"]}
        for entry in before["configurations"]:
            counterpart = counterparts.pop(entry["name"], None)
            why = "only in the first" if counterpart is None else _request_difference(entry, counterpart)
            if why is not None or counterpart is None:
                left_out.append(f"{entry['name']}: {why}.")
                continue
            differences += _differences(entry, counterpart)
        left_out += [f"{name}: only in the second." for name in counterparts]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError("file", "bench.not_a_result", file="A result") from error
    if not differences:
        if not left_out:
            raise InvalidRequestError("file", "bench.results_empty")
        raise InvalidRequestError("file", "bench.nothing_to_compare", why=" ".join(left_out))
    return Comparison(tuple(differences), tuple(left_out), tuple(differing_versions(before, after)))


def _request_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    for number_of, which in (("first", first), ("second", second)):
        if not which["stages"]:
            return f"not measured in the {number_of}"
    mine, theirs = first["request"], second["request"]
    # Fields that only one version has are not compared.
    names = sorted((set(mine) & set(theirs)) - _IRRELEVANT_FIELDS)
    differing = [f"{name} {mine[name]!r}, {theirs[name]!r}" for name in names if mine[name] != theirs[name]]
    return f"another request ({'; '.join(differing)})" if differing else None


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    figures = [(name, first["stages"][name], second["stages"].get(name)) for name in first["stages"]]
    figures += [(name, first.get(name), second.get(name)) for name in ("step", "load")]
    for name, earlier, later in figures:
        if earlier is None or later is None:
            continue
        before, after = Spread.from_json(earlier), Spread.from_json(later)
        change = ratio(before, after)
        if change is None:
            continue
        yield Difference(first["name"], name, before, after, change.median, change.low, change.high, change.verdict)


def summary(comparison: Comparison) -> str:
    """Return how many configurations are faster, slower or neither in total, as one line."""
    totals = [total for total in comparison.differences if total.figure in _TOTALS]
    counts = {verdict: sum(total.verdict == verdict for total in totals) for verdict in ("faster", "slower")}
    rest = len(totals) - sum(counts.values())
    largest = max(
        (total for total in totals if total.median), key=lambda total: abs((total.median or 1) - 1), default=None
    )
    most = f" Largest change: {largest.name}, ratio {number(largest.median)}." if largest and largest.median else ""
    return f"Of {len(totals)}: {counts['faster']} faster, {counts['slower']} slower, {rest} neither.{most}"
