"""docs/telemetry.md against the code: its tables are these, its alerts are the chart's, its settings are valid."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import yaml

from functions.base.prometheus import Metric
from orchestrator.api.metrics import METRICS as OF_API
from orchestrator.job.telemetry import TelemetryConfig

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "telemetry.md").read_text()


def table(metrics: Sequence[Metric]) -> str:
    """As it stands in the docs: print it, where it has changed."""
    rows = []
    for metric in metrics:
        labels = ", ".join(metric.labels) or "-"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help.replace('|', ' ')} |")
    return "\n".join(["| metric | type | labels | |", "|---|---|---|---|", *rows])


def test_every_metric_is_in_its_table() -> None:
    section = DOCS.split("### Of the job API\n")[1].split("\n#")[0]
    assert section.strip() == table(OF_API), f"docs/telemetry.md wants:\n{table(OF_API)}"


def test_every_alert_is_told_of() -> None:
    rules = yaml.safe_load((ROOT / "charts" / "rlhf-orchestrate" / "files" / "alerts.yaml").read_text())
    assert re.findall(r"^\| (Rlhf\w+) \|", DOCS, re.MULTILINE) == [r["alert"] for r in rules["groups"][0]["rules"]]


def test_the_settings_that_are_shown_are_settings() -> None:
    shown: dict[str, object] = {}
    for block in re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL):
        shown |= tomllib.loads(block)["telemetry"]
    assert set(shown) == set(TelemetryConfig.model_fields)
    TelemetryConfig.model_validate(shown)


def test_the_charts_switches_are_its_values() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    values = yaml.safe_load((ROOT / "charts" / "rlhf-orchestrate" / "values.yaml").read_text())
    assert set(yaml.safe_load(block)["monitoring"]) == set(values["monitoring"])
