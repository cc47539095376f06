"""`doctor --platform knative` on clusters as they come, and as they should be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.check import Check
from orchestrator.commands.doctor_knative import check
from orchestrator.commands.main import main
from orchestrator.job.config import parse_job
from orchestrator.platforms.config import KnativeConfig, TolerationConfig, VolumeConfig
from tests.knative.conftest import Start
from tests.knative.control_plane import ControlPlane

CONFIG = KnativeConfig(
    image="i",
    node_selector={"pool": "h100"},
    tolerations=(TolerationConfig(key="gpu", operator="Exists"),),
    volumes=(VolumeConfig(name="m", mount_path="/m", claim="models", read_only=True),),
    queue="team-a",
)


def fresh(plane: ControlPlane, knative: str = "1.23.0") -> dict[str, dict[str, str]]:
    """Knative as its release installs it; returns the data of its config maps."""
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/services.serving.knative.dev"
    names = ("config-autoscaler", "config-defaults", "config-features", "config-deployment")
    maps: dict[str, dict[str, str]] = {name: {} for name in names}
    plane.statics |= {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.9"},
        crd: {"metadata": {"labels": {"app.kubernetes.io/version": knative}}},
        "/api/v1/nodes": {"items": [{"status": {"allocatable": {"nvidia.com/gpu": "4"}}}]},
        "/api/v1/namespaces/default": {},
        "/apis/storage.k8s.io/v1/storageclasses": {"items": [{"metadata": {"name": "standard"}}]},
    }
    for name, data in maps.items():
        plane.ask(lambda c, n=name, d=data: c.objects.__setitem__(("configmaps", n), {"data": d}))  # type: ignore[misc]
    plane.ask(lambda c: c.objects.__setitem__(("persistentvolumeclaims", "models"), {"metadata": {}}))
    return maps


def run(config: KnativeConfig = CONFIG) -> dict[str, Check]:
    return {found.name: found for found in check(None, config)}


def test_a_fresh_knative_gets_patches_that_mend_it(control_plane: Start) -> None:
    plane = control_plane()
    maps = fresh(plane)
    checks = run()
    missing = {name for name, found in checks.items() if not found.ok}
    assert missing == {
        "allow-zero-initial-scale",
        "max-revision-timeout-seconds",
        "kubernetes.podspec-nodeselector",
        "kubernetes.podspec-tolerations",
        "kubernetes.podspec-persistent-volume-claim",
        "pod-is-always-schedulable",
    }
    for name in missing:  # do what it says
        words = shlex.split(checks[name].remedy)
        assert words[:3] == ["kubectl", "patch", "configmap"]
        assert words[words.index("-n") + 1] == "knative-serving"
        maps[words[3]].update(json.loads(words[words.index("-p") + 1])["data"])
        plane.ask(lambda c: [c.objects["configmaps", n].update(data=d) for n, d in maps.items()])
    assert all(found.ok for found in run().values())


@pytest.mark.parametrize(
    ("statics", "name", "found"),
    [
        ({"/version": {"major": "1", "minor": "29+", "gitVersion": "v1.29.1"}}, "kubernetes", "v1.29.1"),
        ({"/api/v1/namespaces/default": None}, "namespace default", "not found"),
    ],
)
def test_what_is_too_old_or_not_there(control_plane: Start, statics: dict[str, Any], name: str, found: str) -> None:
    plane = control_plane()
    fresh(plane)
    for path, value in statics.items():
        plane.statics.pop(path)
        if value is not None:
            plane.statics[path] = value
    told = run()[name]
    assert not told.ok
    assert found in told.found
    assert told.remedy


def test_missing_rights_are_named(control_plane: Start) -> None:
    plane = control_plane()
    fresh(plane)
    plane.denied = {("revisions", "patch"), ("jobs", "create")}
    checks = run()
    assert not checks["right to revisions.serving.knative.dev"].ok
    assert checks["right to jobs.batch"].found == "no create"
    assert "--verb=create,patch,delete --resource=jobs.batch" in checks["right to jobs.batch"].remedy
    assert checks["right to pods"].ok


def test_no_knative_and_no_cluster(
    control_plane: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plane = control_plane()
    fresh(plane)
    plane.statics = {"/version": plane.statics["/version"]}
    assert main(["doctor", "--platform", "knative"]) == 1
    assert "install Knative Serving" in capsys.readouterr().out
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["doctor", "--platform", "knative"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ingress", "in_pod", "ok"), [(None, False, False), ("http://10.0.0.1", False, True), (None, True, True)]
)
def test_a_machine_outside_of_the_cluster_needs_a_way_in(
    control_plane: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingress: str | None, in_pod: bool, ok: bool
) -> None:
    fresh(control_plane())
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    table = {"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}}
    found = {
        told.name: told
        for told in check(parse_job(table, base=tmp_path), CONFIG.model_copy(update={"ingress": ingress}))
    }
    assert found["ingress"].ok == ok
    assert ok or "outside of the cluster" in found["ingress"].found
    assert run()["ingress"].ok, "without a job nothing is called from here"
