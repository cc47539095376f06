"""schemathesis over the server's own OpenAPI document: no answer that the document does not promise."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import WRITE, Served, serving, write_run


@pytest.fixture
def fuzzed(tmp_path: Path, root: Path) -> Iterator[Served]:
    """A server of its own: what is tried here deletes runs."""
    runs = tmp_path / "served" / "runs"
    write_run(runs / "done", root, finished=True)
    with serving(runs, root) as server:
        yield server


def run_schemathesis(served: Served, directory: Path, *words: str) -> None:
    done = subprocess.run(
        [
            "schemathesis", "--config-file", str(Path(__file__).with_name("schemathesis.toml")), "run",
            f"{served.url}/openapi.json", "--header", f"Authorization: Bearer {WRITE}", "--checks", "all", "--no-color",
            "--generation-deterministic", "--suppress-health-check=all", *words,
        ],
        cwd=directory, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Operations:       25 selected / 25 total" in done.stdout
    assert "Traceback" not in served.log.read_text()


def test_fuzzing(fuzzed: Served, tmp_path: Path) -> None:
    run_schemathesis(fuzzed, tmp_path, "--phases", "fuzzing", "--max-examples", "3")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_phase(fuzzed: Served, tmp_path: Path) -> None:
    run_schemathesis(fuzzed, tmp_path, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "40")
