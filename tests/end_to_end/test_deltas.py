"""A bfloat16 job commits the same history whether its replicas fetch each version whole or keep up by deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from functions.exchange.directory import DirectoryExchange
from functions.weights.manifest import Manifest
from tests.support.tiny_job import Job, assert_same, command

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


def phases(run: Path) -> dict[tuple[str, str], float]:
    """Seconds by function and phase."""
    families = text_string_to_metric_families((run / "metrics.prom").read_text())
    [counted] = [family for family in families if family.name == "rlhf_job_phase_seconds"]
    return {(s.labels["function"], s.labels["phase"]): s.value for s in counted.samples}


def test_kept_replicas_take_deltas_and_change_nothing(job: Job, tmp_path: Path) -> None:
    runs = {"cold": tmp_path / "cold", "kept": tmp_path / "kept"}
    settings = ["model.dtype=bfloat16", "train.lr=1e-5", "functions.generate.replicas=1", "steps=2"]
    for name, run in runs.items():
        holds = "planner.keep_warm=true" if name == "kept" else "platform.parked_gb=0"
        done = command("run", job.file, "--run-dir", run, *settings, holds)
        assert done.returncode == 0, done.stderr
    assert_same(runs["kept"], runs["cold"])
    assert ("generate", "fetch delta") not in phases(runs["cold"])
    assert phases(runs["kept"])["generate", "fetch delta"] > 0
    exchange = DirectoryExchange(runs["kept"])
    newest = max(key for key in exchange.list("weights/actor/") if key.endswith("/manifest.json"))
    manifest = Manifest.decode(exchange.get(newest))
    stats = manifest.trainer["result"]["stats"]
    assert stats["delta_bytes"] == sum(ref.size_bytes for ref in manifest.delta) > 0
    assert 0 < stats["changed_weights"] < 0.2
