"""A whole job on the stand-in: the real loop, real functions, through manifests, scale, ingress and watch."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from orchestrator.job.config import load_job
from tests.knative.conftest import Start
from tests.support.tiny_job import ENV, arguments, command, history, make_job


def test_a_job_has_digits_in_its_name_where_others_have_theirs(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    names = []
    for user in ("one", "two"):
        words = ["--run-dir", tmp_path / user, 'platform.kind="knative"', 'platform.knative={image="functions"}']
        exchange = f'exchange.url="dir://{tmp_path}/exchange"'
        env = ENV | {"KUBECONFIG": str(tmp_path / "none")}
        done = subprocess.run(
            arguments("run", job.file, *words, exchange), env=env, capture_output=True, text=True, check=False
        )
        assert "no Kubernetes cluster" in done.stderr
        names.append(load_job(tmp_path / user / "job.toml").name)
    assert all(re.fullmatch("tiny-[0-9a-f]{10}", name) for name in names)
    assert len(set(names)) == 2


@pytest.mark.slow
def test_a_job_gives_the_same_history_as_on_one_machine(control_plane: Start, tmp_path: Path) -> None:
    plane = control_plane(warm=("generate", "reward", "train"))
    job = make_job(tmp_path / "job")
    local = command("run", job.file, "--run-dir", tmp_path / "local", "steps=1", "limits.call_s=600.0")
    assert local.returncode == 0, local.stderr
    words = arguments(
        "run", job.file, "--run-dir", tmp_path / "knative", "steps=1", "limits.call_s=600.0", 'platform.kind="knative"',
        f'platform.knative={{image="functions", ingress="{plane.ingress_url}"}}',
        f'exchange.url="dir://{tmp_path}/exchange"',
    )  # fmt: skip
    env = ENV | {"KUBECONFIG": str(plane.root / "kubeconfig")}
    there = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert there.returncode == 0, there.stderr
    [exchanged] = (tmp_path / "exchange").glob("tiny-*")
    assert history(tmp_path / "local") == history(exchanged)
    cost = json.loads((tmp_path / "knative" / "cost.json").read_text())
    assert cost, "the books know the pods"
    assert plane.ask(lambda cluster: (list(cluster.pods), list(cluster.objects))) == ([], [])
