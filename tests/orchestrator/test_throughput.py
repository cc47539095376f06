"""perf/throughput: verl's tokens a second and GPU, where GPUs come and go."""

from __future__ import annotations

import pytest

from orchestrator.run.ledger import Cost
from orchestrator.session.loop import observed_metrics
from orchestrator.step.dataflow import StepReport


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        (Cost(replica_s=40.0, gpu_s=80.0), 100.0),  # 8 GPUs for 10 s, as verl divides: 8000 / (10 * 8)
        (Cost(replica_s=10.0, gpu_s=20.0), 400.0),  # 2 of them on average: four times as much for each that is paid
        (Cost(replica_s=40.0), 200.0),  # no GPUs: by replica
    ],
)
def test_by_gpu_second_paid(spent: Cost, expected: float) -> None:
    metrics = observed_metrics(StepReport(tokens=8000), spent, 5.0, 15.0)
    assert metrics["perf/throughput"] == expected
    assert metrics["perf/time_per_step"] == 10.0


def test_nothing_is_made_up_where_nothing_was_paid() -> None:
    assert "perf/throughput" not in observed_metrics(StepReport(tokens=8000), Cost(), 0.0, 1.0)
    assert "perf/throughput" not in observed_metrics(StepReport(), Cost(gpu_s=1.0), 0.0, 1.0)
