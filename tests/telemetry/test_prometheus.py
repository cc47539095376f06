"""What Prometheus gets of a real job from its submission to its end: by convention, and as alerts and dashboard ask."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from functions.base.prometheus import Metric, Values, family, text, together
from orchestrator.api.metrics import METRICS as API_METRICS
from orchestrator.base.errors import RunError
from orchestrator.planner.base import CallObservation
from orchestrator.run.ledger import Books, Cost, StepCost
from orchestrator.run.ledger import together as added_up
from orchestrator.telemetry.job_metrics import CALLS, COLD_START, FILE, REWARD, TOKENS, JobMetrics, read_families
from tests.api.conftest import serving
from tests.support.tiny_job import make_job

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "rlhf-orchestrate" / "files"
EVERYTHING = """
[planner]
policy = "adaptive"
budget_usd = 1000.0
[algorithm]
max_rollout_logprob_diff = 10.0
[functions.train]
usd_per_hour = 3.0
gpus = 0
"""


@dataclass
class Scraped:
    """All that /metrics said of a job: the samples of every look together, the last one's values."""

    kinds: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    falls: list[str] = field(default_factory=list)
    """Counters that went down."""

    def add(self, answer: str) -> None:
        for found in text_string_to_metric_families(answer):
            self.helps[found.name] = found.documentation
            for sample in found.samples:
                self.kinds[sample.name] = found.type
                key = sample.name, frozenset(sample.labels.items())
                if found.type in ("counter", "histogram") and sample.value < self.values.get(key, 0.0):
                    self.falls.append(str(key))
                self.values[key] = sample.value

    def of(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        wanted = labels.items()
        return {found: v for (n, found), v in self.values.items() if n == name and wanted <= dict(found).items()}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scraped, str]]:
    root = tmp_path_factory.mktemp("scraped")
    body = tomllib.loads(make_job(root / "data").file.read_text()) | {"steps": 3}
    body |= tomllib.loads(EVERYTHING)
    body["functions"] |= {"generate": {"replicas": 2, "usd_per_hour": 3.0}}
    found = Scraped()
    with serving(root / "runs", root / "data", max_running=1) as server, server.client() as api:
        id = api.post("/v1/jobs", json=body).json()["id"]

        def ended() -> bool:
            found.add(api.get("/metrics").text)
            return str(api.get(f"/v1/jobs/{id}").json()["state"]) not in ("queued", "running")

        give_up_s = time.monotonic() + 250
        while not ended():  # looked at often: of a job at rest nothing is shown
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        job = api.get(f"/v1/jobs/{id}").json()
        assert job["state"] == "succeeded", job
        yield found, id


def test_a_job_shows_every_metric(scraped: tuple[Scraped, str]) -> None:
    found, id = scraped
    names = {re.sub(r"_(bucket|sum|count)$", "", name) if kind == "histogram" else name
             for name, kind in found.kinds.items()}  # fmt: skip
    missing = {metric.name for metric in API_METRICS} - names
    assert not missing
    assert {found.kinds[m.name] for m in API_METRICS if m.kind == "counter" and m.name in found.kinds} == {"counter"}
    assert not found.falls
    assert found.of("rlhf_job_step", job_id=id) == {frozenset({("job_id", id)}): pytest.approx(3, abs=1)}


def test_the_numbers_are_those_of_the_job(scraped: tuple[Scraped, str]) -> None:
    """Three steps of 3 prompts x 4 samples on CPUs; the last look may be of a moment before the end."""
    found, id = scraped

    def total(name: str, **labels: str) -> float:
        return sum(found.of(name, job_id=id, **labels).values())

    trained = total("rlhf_job_samples_total", function="train")
    assert trained in (24, 36)
    assert total("rlhf_job_tokens_total", function="generate") > total("rlhf_job_tokens_total", function="train") > 0
    assert total("rlhf_job_calls_total", outcome="done") > 6
    assert total("rlhf_job_calls_total", outcome="failed") == 0
    assert total("rlhf_job_cold_start_seconds_count") > 0
    assert total("rlhf_job_exchange_bytes_total", function="train", direction="in") > 0
    assert total("rlhf_job_step_budget_usd") == 1000
    assert total("rlhf_job_cost_usd") > 0
    assert total("rlhf_job_function_cost_usd_total") == pytest.approx(total("rlhf_job_cost_usd"), rel=0.9)
    assert 0 <= total("rlhf_job_rollout_mismatch") < total("rlhf_job_rollout_mismatch_bound") == 10
    stages = {dict(labels)["stage"] for labels in found.of("rlhf_job_stage_seconds_total")}
    assert {"gen", "reward", "update_actor"} <= stages
    phases = {(dict(labels)["function"], dict(labels)["phase"]) for labels in found.of("rlhf_job_phase_seconds_total")}
    assert {("generate", "generate"), ("reward", "score"), ("train", "publish")} <= phases
    states = {dict(labels)["state"] for labels in found.of("rlhf_job_replicas")}
    assert "busy" in states


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:rlhf|process)_[a-z_]+\b", re.sub(r"by \([^)]*\)", "", query)))


def queries() -> dict[str, str]:
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        found |= {f"{panel['title']}/{target['refId']}": target["expr"] for target in panel.get("targets", ())}
    return found | {"variable": dashboard["templating"]["list"][1]["definition"]}


@pytest.mark.parametrize(("where", "query"), queries().items())
def test_alerts_and_dashboard_ask_for_what_a_job_shows(scraped: tuple[Scraped, str], where: str, query: str) -> None:
    found, _ = scraped
    asked = names_in(query)
    assert asked, query
    assert asked <= found.kinds.keys(), where
    used = set(re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", query))
    labels = {label.strip() for group in used for label in group.split(",") if label.strip()}
    known = {name for (metric, pairs), _ in found.values.items() if metric in asked for name, _ in pairs}
    assert labels <= known, where


@pytest.mark.parametrize("metric", API_METRICS, ids=lambda metric: str(metric.name))
def test_names_follow_the_conventions(metric: Metric) -> None:
    """prometheus.io/docs/practices/naming; promtool check metrics asks for no more."""
    assert re.fullmatch(r"rlhf_(api|jobs?)(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|ms|millis|milliseconds|kb|mb|minutes)$", metric.name)
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith((".", ")"))
    assert {"job", "instance", "le", "quantile"}.isdisjoint(metric.labels), "Prometheus' own"
    assert [m.name for m in API_METRICS].count(metric.name) == 1


def test_text_of_hostile_values_reads_back() -> None:
    metric = Metric("rlhf_job_x", "gauge", 'a "help"\nof two \\ lines', ("name",))
    values = Values([metric], {"job_id": "a"})
    values.set(metric, 1e-7, 'quote " slash \\ line\nend')
    [found] = text_string_to_metric_families(text(values.collect()))
    assert found.documentation == 'a "help"\nof two \\ lines'
    [sample] = found.samples
    assert (sample.labels["name"], sample.value) == ('quote " slash \\ line\nend', 1e-7)


def test_what_has_no_value_is_not_shown() -> None:
    """A bound of 0 where a job sets none would be an alert."""
    metrics = [Metric("rlhf_job_x", "gauge", "x."), Metric("rlhf_job_y_total", "counter", "y.", ("name",))]
    values = Values(metrics, {"job_id": "a"})
    assert text(values.collect()) == ""
    values.add(metrics[1], 2, "b")
    shown = text([*values.collect(), family(metrics[0], {})]).splitlines()
    assert shown[1:] == ["# TYPE rlhf_job_y_total counter", 'rlhf_job_y_total{job_id="a",name="b"} 2.0']


def test_a_histogram_is_cumulative_and_adds_up() -> None:
    metric = Metric("rlhf_job_x_seconds", "histogram", "x.", (), (1.0, 2.0))
    parts = []
    for observed in ((0.5, 1.0), (1.5, 9.0)):
        values = Values([metric])
        for value in observed:
            values.observe(metric, value)
        parts += values.collect()
    [found] = text_string_to_metric_families(text(parts))
    got = {(s.name.removeprefix("rlhf_job_x_seconds_"), s.labels.get("le")): s.value for s in found.samples}
    assert got == {("bucket", "1.0"): 2, ("bucket", "2.0"): 3, ("bucket", "+Inf"): 4, ("sum", None): 12,
                   ("count", None): 4}  # fmt: skip


def test_families_of_several_jobs_are_one() -> None:
    metric, gauge = Metric("rlhf_job_x_total", "counter", "x."), Metric("rlhf_job_y", "gauge", "y.")
    parts = [family(m, {(): v}, {"job_id": id}) for m in (metric, gauge) for id, v in (("a", 1), ("b", 2), ("a", 4))]
    got = {found.name: {s.labels["job_id"]: s.value for s in found.samples} for found in together(parts)}
    assert got == {"rlhf_job_x": {"a": 5, "b": 2}, "rlhf_job_y": {"a": 4, "b": 2}}, "gauges do not add up"


def call(**more: object) -> CallObservation:
    values = {"function": "train", "replica": "r", "operation": "train", "cold": True, "start_s": 2.0, "work_s": 3.0}
    counts = {"prompt_tokens": 0, "response_tokens": 0, "samples": 0}
    return CallObservation(**{**values, **counts, "stats": {"samples": 4.0, "tokens": 40.0}, **more})  # type: ignore[arg-type]


def test_counters_go_on_over_a_resume(tmp_path: Path) -> None:
    books = Books([], added_up([]), StepCost(0), 1)
    first = JobMetrics(tmp_path)
    first.call_ended("train", "done", call())
    first.committed({"critic/score/mean": 0.5}, 1.0)
    first.write(books)
    second = JobMetrics(tmp_path)
    second.call_ended("train", "done", call(cold=False))
    second.call_ended("train", "lost", None)
    second.write(books)
    found = [s for f in read_families(tmp_path / FILE, "j") for s in f.samples]
    got = {(s.name, s.labels.get("outcome")): s.value for s in found}
    assert {s.labels["job_id"] for s in found} == {"j"}
    assert (got[CALLS.name, "done"], got[CALLS.name, "lost"], got[TOKENS.name, None]) == (2, 1, 80)
    assert (got[f"{COLD_START.name}_count", None], got[REWARD.name, None]) == (1, 0.5)


def test_books_are_not_counted_twice(tmp_path: Path) -> None:
    """They hold the costs since the job's start, before a resume too."""
    books = Books([], added_up([]), StepCost(0, functions={"train": Cost(usd=2.0, starts=3)}), 1)
    for _ in range(2):
        JobMetrics(tmp_path).write(books)
    [starts] = [f for f in read_families(tmp_path / FILE, "j") if f.name == "rlhf_job_replica_starts"]
    assert [s.value for s in starts.samples] == [3]


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(RunError, match=rf"{FILE}: not a file of metrics .* move it away to count anew"):
        JobMetrics(tmp_path)
    labels = 'job_id="a",function="train"'
    other = [
        "# TYPE rlhf_job_unknown gauge", 'rlhf_job_unknown{job_id="a"} 1',
        f"# TYPE {CALLS.name} counter", f"{CALLS.name}{{{labels}}} 1",
        f"# TYPE {COLD_START.name} histogram", f'{COLD_START.name}_bucket{{{labels},le="7"}} 1',
        f'{COLD_START.name}_bucket{{{labels},le="+Inf"}} 1',
    ]  # fmt: skip
    (tmp_path / FILE).write_text("\n".join([*other, ""]))
    assert read_families(tmp_path / FILE, "a") == [], "what another version counted otherwise is counted anew"
