"""Traces as a collector gets them: a tree a step over real processes; one that is away or hangs harms nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from orchestrator.base.errors import CallFailed, ConfigError
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.telemetry import otlp
from orchestrator.telemetry.otlp import check_exporter, endpoint_of, open_tracing
from tests.support.tiny_job import command, make_job
from tests.telemetry.collector import Collector, collecting

pytestmark = pytest.mark.timeout(300)
JOB = {"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def job(endpoint: str | None = None) -> JobConfig:
    return parse_job(JOB | {"telemetry": {} if endpoint is None else {"otlp_endpoint": endpoint}}, base=Path("/"))


def attributes(span: Span) -> dict[str, str | int | bool]:
    values = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
    return dict(values)


def test_a_jobs_trace_is_one_tree_a_step_over_all_processes(tmp_path: Path) -> None:
    """And of the same job's sinks one fails: it is told once, and harms nothing."""
    tiny = make_job(tmp_path)
    run = tmp_path / "run"
    with collecting() as collector:
        words = [f"telemetry.otlp_endpoint={collector.url}", "steps=2", "algorithm.kl={coef=0.01}"]
        words += ["platform.parked_gb=0"]  # each call of a step starts from nothing
        fails = ["telemetry.mlflow={tracking_uri='nonsense://nowhere'}"] if find_spec("mlflow") else []
        done = command("run", tiny.file, "--run-dir", run, *words, *fails, timeout_s=250)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    notes = [line["message"] for line in lines if line.get("event") == "note" and "mlflow" in line["message"]]
    assert [note for note in notes if note.startswith("mlflow: ") and "nonsense" in note] == notes
    assert len(notes) == len(fails)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert collector.paths == {"/v1/traces"}
    traces: dict[bytes, list[tuple[dict[str, str], Span]]] = defaultdict(list)
    for resource, span in collector.spans:
        traces[span.trace_id].append((resource, span))
    assert len(traces) == 3, "one a step, and step 0"
    steps, found = set(), set[str]()
    for spans in traces.values():
        by_id = {span.span_id: span for _, span in spans}
        assert len(by_id) == len(spans), "ids are the spans' own"
        [root] = [span for _, span in spans if not span.parent_span_id]
        assert root.name == "step"
        steps.add(attributes(root)["rlhf.step"])
        for resource, span in spans:
            assert resource["rlhf.job"] == "tiny"
            assert span.status.code != Status.STATUS_CODE_ERROR
            if span is root:
                continue
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)
            expected = {Span.SPAN_KIND_SERVER: Span.SPAN_KIND_CLIENT}.get(span.kind)
            if expected is not None:
                assert parent.kind == expected
                assert parent.name == f"call {attributes(span)['rlhf.function']}"
                function = attributes(span)["rlhf.function"]
                assert resource["service.name"] == f"rlhf-orchestrate.{function}"
                assert resource["service.instance.id"].startswith(f"{function}-")
        found |= paths(by_id, root)
    assert steps == {0, 1, 2}
    assert {
        "/generate/call generate/generate/fetch", "/generate/call generate/generate/load",
        "/generate/call generate/generate/generate", "/generate/call generate/generate/publish",
        "/reward/call reward/score/score", "/reference/call reference/logprobs/forward",
        "/reference/call reference/logprobs/publish", "/train/call train/train/load/fetch",
        "/train/call train/train/train", "/train/call train/train/publish", "/commit",
    } <= found  # fmt: skip
    calls = [span for _, span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    served = [span for _, span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(served) == len(calls), "every call has its replica's side"
    logged = [json.loads(line) for line in (run / "logs" / "train-0.log").read_text().splitlines() if line[0] == "{"]
    [begins] = [line for line in logged if line["message"] == "train begins"]
    assert bytes.fromhex(begins["trace"]) in traces, "a log line names its trace"


def paths(by_id: dict[bytes, Span], root: Span) -> set[str]:
    """What a step's tree has, as paths from the root."""

    def path(span: Span) -> str:
        return "" if span is root else f"{path(by_id[span.parent_span_id])}/{span.name}"

    return {path(span) for span in by_id.values()}


def some_spans(collector: Collector, count: int = 2, *, end_s: float = 200) -> list[str]:
    """Spans made and closed; what was noted meanwhile."""
    notes: list[str] = []

    async def main() -> None:
        with open_tracing(job(collector.url), notes.append, end_s=end_s) as tracing:
            for _ in range(count):
                with tracing.span("step"):
                    await asyncio.sleep(0)
            if collector.holds is not None:
                await asyncio.to_thread(collector.asked.wait, 200)
                with tracing.span("step"):  # while the exporter hangs
                    pass

    asyncio.run(main())
    return notes


def test_spans_arrive_by_the_end_of_the_job() -> None:
    with collecting() as collector:
        assert some_spans(collector) == []
        assert [span.name for _, span in collector.spans] == ["step", "step"]


def test_a_collector_that_hangs_is_left_behind_and_told_once() -> None:
    with collecting(holds=threading.Event()) as collector:
        [note] = some_spans(collector, end_s=0.2)  # returns while the collector still holds its answer
        assert collector.holds is not None
        assert not collector.holds.is_set()
    assert note.startswith(f"traces are not exported to {collector.url}/v1/traces: not all spans were taken in time")


def test_a_collector_that_refuses_is_told_once() -> None:
    with collecting(status=400) as collector:
        notes: list[str] = []

        async def main() -> None:
            with open_tracing(job(collector.url), notes.append, every_s=0.01) as tracing:
                while len(collector.spans) < 3:
                    with tracing.span("step"):
                        await asyncio.sleep(0.02)

        asyncio.run(main())
    assert len(notes) == 1
    assert "refuses them; the job goes on without" in notes[0]


def test_a_job_runs_though_nobody_listens(tmp_path: Path) -> None:
    """The variable of the machine counts as the job's own setting does; its job does not depend on it."""
    with collecting() as collector:
        nowhere = collector.url  # from here on closed
    notes: list[str] = []

    async def main() -> None:
        with open_tracing(job(nowhere), notes.append) as tracing, pytest.raises(CallFailed), tracing.span("step"):
            raise CallFailed("as it would without")

    asyncio.run(main())
    assert len(notes) == 1
    assert nowhere in notes[0]


def test_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*otlp.VARIABLES, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint_of(job()) is None
    assert endpoint_of(job("http://own:4318/")) == "http://own:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://machine:4318")
    assert endpoint_of(job()) == "http://machine:4318/v1/traces"
    assert endpoint_of(job("http://own:4318")) == "http://own:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:1/here")
    assert endpoint_of(job()) == "http://traces:1/here"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert endpoint_of(job("http://own:4318")) is None
    with pytest.raises(ConfigError, match="otlp_endpoint: string should match pattern"):
        job("collector:4318")


def test_a_job_that_asks_for_what_is_not_installed_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint: wants .* pip install 'rlhf-orchestrate\[otel\]'"):
        check_exporter(job("http://own:4318"))
    check_exporter(job())
