"""Any cluster with Knative that KUBECONFIG points to.

RLHF_CLUSTER     the [platform.knative] section, as a TOML inline table: image, ingress, volumes, ...
RLHF_EXCHANGE    URL of an exchange that pods and this machine reach, e.g. dir:///shared on a mounted volume
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.platforms.knative_api import KubeApi, core, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


@dataclass
class Target:
    """Where the tests run, and the job that one of them runs."""

    settings: str
    exchange: str
    job: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:8]}")
    api: KubeApi = field(default_factory=KubeApi)

    @property
    def namespace(self) -> str:
        table: dict[str, Any] = tomllib.loads(f"v = {self.settings}")["v"]
        return str(table.get("namespace", "default"))

    def words(self, *overrides: str) -> list[str]:
        return [
            f"name={self.job}", 'platform.kind="knative"', f"platform.knative={self.settings}",
            f'exchange.url="{self.exchange}"', "limits.call_s=300.0", *overrides,
        ]  # fmt: skip

    def pods(self) -> list[dict[str, Any]]:
        found = self.api.get(
            core(self.namespace, "pods"),
            labelSelector=f"rlhf-orchestrate/job={self.job},rlhf-orchestrate/function",
        )
        items: list[dict[str, Any]] = found["items"]
        return items

    def revisions(self) -> list[str]:
        found = self.api.get(serving(self.namespace, "revisions"), labelSelector=f"rlhf-orchestrate/job={self.job}")
        return sorted(item["metadata"]["name"] for item in found["items"])

    def services(self) -> list[str]:
        found = self.api.get(serving(self.namespace, "services"), labelSelector=f"rlhf-orchestrate/job={self.job}")
        return [item["metadata"]["name"] for item in found["items"]]


def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until the condition held."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, f"not within {limit_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - began_s


def start(words: Sequence[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def target() -> Iterator[Target]:
    missing = [name for name in ("KUBECONFIG", "RLHF_CLUSTER", "RLHF_EXCHANGE") if name not in os.environ]
    if missing:
        pytest.skip(f"needs a cluster: set {', '.join(missing)} (tests/cluster/conftest.py says how)")
    here = Target(os.environ["RLHF_CLUSTER"], os.environ["RLHF_EXCHANGE"])
    yield here
    assert until(lambda: here.pods() == [], 90) < 90
    assert here.services() == []


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Records a figure, and prints it (`pytest -s`): docs/knative.md has those of our runs."""

    def tell(name: str, value: object) -> None:
        record_property(name, value)
        print(f"\nfigure: {name} = {json.dumps(value)}")

    return tell
