"""docs/tutorial.md: a stranger's hour, each command as it stands there; and its table names keys that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from functions.algorithms.options import LOSS_OPTIONS
from orchestrator.job.config import TRLS
from tests.api.conftest import serving
from tests.support.tiny_job import ENV, assert_nothing_left

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
ACC = "val-core/default/reward/mean@1"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script() -> str:
    """The tutorial as one script: files are written where they stand, commands run."""
    parts = ["set -euo pipefail\n"]
    for kind, text in BLOCK.findall(TUTORIAL):
        name = re.match(r"# (\w+\.py)\n", text)
        assert (name is not None) == (kind == "python"), f"a python block begins with its file's name: {text[:40]}"
        parts.append(text if name is None else f"cat > {name[1]} <<'FILE'\n{text}FILE\n")
    return "".join(parts)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_hour_goes_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "rlhf-orchestrate").symlink_to(ROOT)
    (tmp_path / "bin").mkdir()
    for name, words in (("rlhf-orchestrate", "-m orchestrator.commands"), ("python", "")):
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        file.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script()], cwd=tmp_path, capture_output=True, text=True, timeout=1400, check=False,
        env=ENV | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}:{ENV['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert_nothing_left()
    runs = tmp_path / "first" / "runs"
    last = {path.parent.name: json.loads(path.read_text().splitlines()[-1]) for path in runs.glob("*/metrics.jsonl")}
    steps = {name: row["step"] for name, row in last.items() if not name.startswith("eval-")}
    assert steps == {"sft": 5, "sums": 8, "faster": 8, "unsolved": 2, "second-try": 2}
    tested = [json.loads(line) for line in (runs / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert tested[5]["sft/loss"] < tested[1]["sft/loss"]
    assert tested[5][ACC] > tested[0][ACC] + 0.2, "it learns what it is shown"
    assert "critic/score/mean" not in tested[5]
    assert re.search(r"maj@4\s+mean@4", done.stdout), "what eval says"
    assert re.search(r"^(> )?\d\d( \d\d)*$", done.stdout, re.MULTILINE), "what chat answers"
    assert (tmp_path / "first" / "exported" / "model.safetensors").stat().st_size > 0
    samples = (runs / "second-try" / "samples" / "000001.jsonl").read_text().splitlines()
    assert any(len(json.loads(line)["conversation"]) == 3 for line in samples), "one was tried again"
    with serving(runs, tmp_path) as served, served.client() as api:
        listed = {job["id"]: job["state"] for job in api.get("/v1/jobs").json()["jobs"]}
        assert listed["sums"] == listed["faster"] == "succeeded"
        for run in ("sums", "faster"):  # what the comparison asks for
            columns = api.get(f"/v1/jobs/{run}/metrics", params={"name": "critic/score/mean"}).json()
            assert columns["steps"] == [*range(9)]


def test_the_keys_beside_those_of_others_are_keys() -> None:
    keys, section = set[str](), ""
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.strip("# []").replace("The job", "")
        elif line.startswith("| `"):
            keys.add(f"{section}.{line.split('`')[1]}".lstrip("."))
    keys |= {f"algorithm.loss_options.{option}" for option in LOSS_OPTIONS["vanilla"]}
    assert keys.issuperset(TRLS.values()), "what errors suggest"
    cells = [line.split(" | ")[0] for line in TUTORIAL.splitlines() if line.startswith("| `")]
    assert len(cells) > 20
    for cell in cells:
        first, *others = re.findall(r"`([\w.*]+)[^`]*`", cell)
        section = first.rpartition(".")[0]
        beside = [other if "." in other else f"{section}.{other}" for other in others]
        for key in (first, *beside):
            assert key in keys, f"{key} in {cell}"
