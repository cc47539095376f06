"""Metrics in Prometheus' text format, version 0.0.4: what replicas and the job API answer to `GET /metrics`.

    CALLS = Metric("rlhf_function_calls_total", "counter", "Attempts that have ended.", ("outcome",))
    values = Values()
    values.add(CALLS, 1, "done")
    text([CALLS], [(values, {"function": "generate"})])

Every metric is a constant beside its owner, so that docs/telemetry.md, the dashboard and the alert rules can be checked
against them. Names follow Prometheus' conventions: a unit, `_total` for what only rises.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Buckets of what takes from a blink to an hour."""
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    """Upper bounds; of a histogram only."""


class Values:
    """Values of metrics, by metric and labels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._observed: dict[str, dict[tuple[str, ...], list[float]]] = {}
        """Of a histogram: a count for each bucket, then the sum, then the count of all."""

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        with self._lock:
            numbers = self._numbers.setdefault(metric.name, {})
            numbers[labels] = numbers.get(labels, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        with self._lock:
            self._numbers.setdefault(metric.name, {})[labels] = value

    def clear(self, metric: Metric) -> None:
        """For gauges whose labels come and go."""
        with self._lock:
            self._numbers.pop(metric.name, None)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        with self._lock:
            rows = self._observed.setdefault(metric.name, {})
            row = rows.setdefault(labels, [0.0] * (len(metric.buckets) + 2))
            for i, bound in enumerate(metric.buckets):
                row[i] += value <= bound
            row[-2] += value
            row[-1] += 1

    def get(self, metric: Metric, *labels: str) -> float | None:
        """The value; of a histogram, how many were observed."""
        with self._lock:
            if metric.kind == "histogram":
                row = self._observed.get(metric.name, {}).get(labels)
                return None if row is None else row[-1]
            return self._numbers.get(metric.name, {}).get(labels)

    def lines(self, metric: Metric, constant: Mapping[str, str]) -> list[str]:
        with self._lock:
            if metric.kind == "histogram":
                found = sorted(self._observed.get(metric.name, {}).items())
                return [line for labels, row in found for line in _histogram(metric, constant, labels, row)]
            return [
                f"{metric.name}{_labels(constant, metric.labels, labels)} {_number(value)}"
                for labels, value in sorted(self._numbers.get(metric.name, {}).items())
            ]

    def to_json(self) -> Any:
        with self._lock:
            numbers = {name: [[list(k), v] for k, v in rows.items()] for name, rows in self._numbers.items()}
            observed = {name: [[list(k), list(v)] for k, v in rows.items()] for name, rows in self._observed.items()}
            return {"numbers": numbers, "observed": observed}

    @classmethod
    def from_json(cls, value: Any, metrics: Sequence[Metric]) -> Values:
        """Of `metrics` only, so that a file of another version brings nothing unknown. Raises KeyError, TypeError or
        ValueError for what is none."""
        values = cls()
        for metric in metrics:
            wide = len(metric.buckets) + 2
            for labels, number in value["numbers"].get(metric.name, ()):
                if len(labels) == len(metric.labels):
                    values._numbers.setdefault(metric.name, {})[tuple(map(str, labels))] = float(number)
            for labels, row in value["observed"].get(metric.name, ()):
                if len(labels) == len(metric.labels) and len(row) == wide:
                    values._observed.setdefault(metric.name, {})[tuple(map(str, labels))] = [float(x) for x in row]
        return values


def text(metrics: Sequence[Metric], groups: Sequence[tuple[Values, Mapping[str, str]]]) -> str:
    """All values of `metrics`; each group has constant labels of its own. Metrics without values are left out."""
    lines: list[str] = []
    for metric in metrics:
        found = [line for values, constant in groups for line in values.lines(metric, constant)]
        if found:
            lines += [
                f"# HELP {metric.name} {_escaped(metric.help, quote=False)}",
                f"# TYPE {metric.name} {metric.kind}",
            ]
            lines += found
    return "".join(f"{line}\n" for line in lines)


def _histogram(metric: Metric, constant: Mapping[str, str], labels: tuple[str, ...], row: Sequence[float]) -> list[str]:
    def line(name: str, value: float, more: Mapping[str, str]) -> str:
        return f"{metric.name}_{name}{_labels({**constant}, metric.labels, labels, more)} {_number(value)}"

    bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
    counts = [*row[:-2], row[-1]]
    lines = [line("bucket", count, {"le": bound}) for bound, count in zip(bounds, counts, strict=True)]
    return [*lines, line("sum", row[-2], {}), line("count", row[-1], {})]


def _labels(
    constant: Mapping[str, str], names: Sequence[str], values: Sequence[str], more: Mapping[str, str] | None = None
) -> str:
    pairs = {**constant, **dict(zip(names, values, strict=True)), **(more or {})}
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items())
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str, *, quote: bool = True) -> str:
    value = value.replace("\\", r"\\").replace("\n", r"\n")
    return value.replace('"', r"\"") if quote else value


def _number(value: float) -> str:
    return f"{value:.15g}"
