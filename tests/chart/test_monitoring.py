"""Alerts, dashboard and what scrapes the API: in the chart, and by Prometheus' own tool."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from functions.base.prometheus import Values, text
from orchestrator.api.auth import Tokens
from orchestrator.api.metrics import METRICS
from tests.chart.conftest import CHART, TOOLS, VALUES, Render, one, selects

ALERTS, DASHBOARD = CHART / "files" / "alerts.yaml", CHART / "files" / "dashboard.json"
DEVELOPMENT = VALUES[0]
ON = ("--set", "monitoring.serviceMonitor=true", "--set", "monitoring.dashboard=true", "--set",
      "monitoring.labels.release=prom")  # fmt: skip


@pytest.fixture(scope="session")
def promtool() -> str:
    """The one on the PATH, else Debian's, unpacked into a cache directory; else the tests are skipped."""
    found = shutil.which("promtool")
    if found:
        return found
    cache = TOOLS / "prometheus"
    binary = cache / "usr" / "bin" / "promtool"
    if not binary.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            pytest.skip("no promtool on the PATH, and no apt-get to fetch Debian's package prometheus with")
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["apt-get", "download", "prometheus"], cwd=cache, capture_output=True, text=True, timeout=250, check=False
        )
        packages = list(cache.glob("prometheus_*.deb"))
        if not packages:
            pytest.skip(f"no promtool on the PATH, and apt-get could not fetch prometheus: {done.stderr[-200:]}")
        subprocess.run(["dpkg", "-x", packages[0], str(cache)], check=True)
        packages[0].unlink()
    return str(binary)


def run(promtool: str, *words: object) -> str:
    done = subprocess.run([promtool, *map(str, words)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_when_it_should_and_not_before(promtool: str) -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    run(promtool, "test", "rules", cases)
    tested = {
        case["alertname"]
        for test in yaml.safe_load(cases.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == tested


def test_every_query_of_the_dashboard_is_promql(promtool: str, tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 20
    filled = [query.replace("$__rate_interval", "1m").replace("$job_id", ".+") for query in queries]
    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(filled)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(promtool, "check", "rules", tmp_path / "rules.yaml")


def test_a_dashboard_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["legendFormat"]
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken), "no panel lies on another"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "job_id"}


def test_nothing_of_it_unless_asked_for(render: Render) -> None:
    kinds = {item["kind"] for item in render(DEVELOPMENT)}
    assert not kinds & {"PrometheusRule", "ServiceMonitor"}
    assert not [o for o in render(DEVELOPMENT) if o["metadata"]["name"].endswith(("-dashboard", "-rules"))]


def test_alerts_for_the_operator_or_as_a_file(render: Render) -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    rule = one(render(DEVELOPMENT, *ON, "--set", "monitoring.rules=prometheusRule"), "PrometheusRule", "")
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["release"] == "prom"
    objects = render(DEVELOPMENT, *ON, "--set", "monitoring.rules=configMap")
    assert yaml.safe_load(one(objects, "ConfigMap", "-rules")["data"]["rlhf-orchestrate.yaml"]) == rules
    board = one(objects, "ConfigMap", "-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["rlhf-orchestrate.json"]) == json.loads(DASHBOARD.read_text())


def test_the_operator_finds_the_api_and_may_read(render: Render, tmp_path: Path) -> None:
    objects = render(DEVELOPMENT, *ON)
    monitor = one(objects, "ServiceMonitor", "-api")
    service = one(objects, "Service", "-api")
    assert selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    credentials = endpoint["authorization"]["credentials"]
    data = one(objects, "Secret", credentials["name"])["data"]
    (tmp_path / "tokens").write_bytes(base64.b64decode(data["tokens"]))
    token = base64.b64decode(data[credentials["key"]]).decode()
    tokens = Tokens(tmp_path / "tokens")
    tokens.check(f"Bearer {token}", "read")
    with pytest.raises(Exception, match="may only read"):
        tokens.check(f"Bearer {token}", "write")


def test_prometheus_own_linter_finds_nothing(promtool: str) -> None:
    values = Values(METRICS, {"job_id": "a"})
    give: dict[str, Callable[..., None]] = {"counter": values.add, "gauge": values.set, "histogram": values.observe}
    for metric in METRICS:
        give[metric.kind](metric, 1.0, *["a"] * len(metric.labels))
    shown = text(values.collect())
    done = subprocess.run([promtool, "check", "metrics"], input=shown, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
