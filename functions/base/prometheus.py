"""Prometheus metrics on prometheus-client: what node agents and the job API answer to `GET /metrics`.

    CALLS = Metric("rlhf_job_calls_total", "counter", "Attempts that have ended.", ("function", "outcome"))
    values = Values([CALLS], {"job_id": "a"})
    values.add(CALLS, 1, "generate", "done")
    text([*values.collect(), family(STARTS, {("generate",): 3}, {"job_id": "a"})])

Every metric is a constant beside its owner, so that docs/telemetry.md, the dashboard and the alert rules can be checked
against them. Names follow Prometheus' conventions: a unit, `_total` for what only rises. Text format: version 0.0.4.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Buckets of what takes from a blink to an hour."""
Kind = Literal["counter", "gauge", "histogram"]
_KINDS = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}

# else one more series for each counter, that nothing asks for
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    """Upper bounds; of a histogram only."""

    @property
    def family(self) -> str:
        """The name as prometheus-client has it: without a counter's `_total`."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


class Values:
    """Values of `metrics`, each with the `constant` labels, in a registry of their own. Thread-safe.

    A metric with labels, constant ones included, is shown from its first value on.
    """

    def __init__(self, metrics: Sequence[Metric], constant: Mapping[str, str] | None = None) -> None:
        self._constant = dict(constant or {})
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        for metric in metrics:
            labels = (*self._constant, *metric.labels)
            if metric.kind == "histogram":
                self._made[metric.name] = prometheus_client.Histogram(
                    metric.name, metric.help, labels, buckets=metric.buckets, registry=self._registry
                )
            else:
                self._made[metric.name] = _KINDS[metric.kind](metric.name, metric.help, labels, registry=self._registry)

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        self._of(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Of a gauge."""
        self._of(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Of a histogram."""
        self._of(metric, labels).observe(value)

    def _of(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        values = (*self._constant.values(), *labels)
        return self._made[metric.name].labels(*values) if values else self._made[metric.name]

    def collect(self) -> list[Family]:
        return list(self._registry.collect())


def family(
    metric: Metric, values: Mapping[tuple[str, ...], float], constant: Mapping[str, str] | None = None
) -> Family:
    """What is not counted but read when it is asked for: a counter's or gauge's values by the values of its labels."""
    made = Family(metric.family, metric.help, metric.kind)
    for labels, value in values.items():
        made.add_sample(metric.name, {**(constant or {}), **dict(zip(metric.labels, labels, strict=True))}, value)
    return made


def together(families: Iterable[Family]) -> list[Family]:
    """One family of each name. Values of the same labels add up; of gauges, the last one counts."""
    found: dict[str, Family] = {}
    samples: dict[str, dict[Any, Sample]] = {}
    for part in families:
        found.setdefault(part.name, Family(part.name, part.documentation, part.type))
        own = samples.setdefault(part.name, {})
        for sample in part.samples:
            key = sample.name, frozenset(sample.labels.items())
            before = own[key].value if key in own and part.type != "gauge" else 0.0
            own[key] = Sample(sample.name, sample.labels, before + sample.value)
    for name, made in found.items():
        made.samples = list(samples[name].values())
    return list(found.values())


def text(families: Iterable[Family]) -> str:
    """Families without values are left out."""
    return prometheus_client.generate_latest(_Collected([f for f in together(families) if f.samples])).decode()


class _Collected(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
