"""The chart's function test, against the stand-in cluster: a real function process answers through its ingress."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.chart.conftest import CHART
from tests.knative.conftest import Start, control_plane  # noqa: F401  # a fixture
from tests.support.tiny_job import ENV
from tests.support.waiting import until


def test_from_zero_to_an_answer_and_back(control_plane: Start, tmp_path: Path) -> None:  # noqa: F811
    plane = control_plane(warm=("reward",))
    knative = {"image": "functions", "ingress": plane.ingress_url, "env_secrets": [], "volumes": []}
    defaults = tmp_path / "defaults.json"
    defaults.write_text(json.dumps({"exchange": {"url": f"dir://{tmp_path}/x"}, "platform": {"knative": knative}}))
    done = subprocess.run(
        [sys.executable, str(CHART / "files" / "roundtrip.py"), str(defaults), "rel"],
        env=ENV | {"KUBECONFIG": str(plane.root / "kubeconfig"), "PYTHONPATH": str(CHART.parents[1])},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there, back = done.stdout.splitlines()
    assert re.fullmatch(r"from zero to an answer in [0-9.]+ s", there)
    assert re.fullmatch(r"back at zero after [0-9.]+ s", back)
    until(lambda: plane.ask(lambda cluster: (list(cluster.pods), list(cluster.objects))) == ([], []))
