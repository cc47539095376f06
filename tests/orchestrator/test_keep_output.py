"""An orchestrator's output, kept where it outlives its pod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api.launch import OUTPUT
from tests.support.tiny_job import ENV, arguments

PRINTS = """
import os, subprocess, sys
from pathlib import Path
from orchestrator.commands.keep_output import keep_output
print("before")
keep_output(Path(sys.argv[1]))
print("from Python")
print("from stderr", file=sys.stderr)
subprocess.run(["echo", "from a child"], check=True)
os.write(2, b"from below" + os.linesep.encode())
raise SystemExit("the last line")
"""


def test_all_that_is_printed_is_kept_and_printed_as_before(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_text("of an earlier start\n")
    done = subprocess.run(
        [sys.executable, "-u", "-c", PRINTS, str(path)], env=ENV, capture_output=True, text=True, check=False
    )
    said = ["from Python", "from stderr", "from a child", "from below", "the last line"]
    assert done.returncode == 1
    assert path.read_text().splitlines() == ["of an earlier start", *said]
    assert done.stdout.splitlines() == ["before", *said], "a cluster's own log has it too"


def test_a_file_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    words = [sys.executable, "-u", "-c", PRINTS, str(tmp_path / "none" / "output")]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "the last line"


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_fails_says_so_in_its_directory(tmp_path: Path, kept: bool) -> None:
    (tmp_path / "run.json").write_text('{"format": 2, "job": "x", "id": "a1"}')
    (tmp_path / "job.toml").write_text('nmae = "x"')
    words = arguments("resume", tmp_path, *(["--keep-output"] if kept else []))
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, check=False)
    assert "nmae" in (done.stdout if kept else done.stderr)
    assert (tmp_path / OUTPUT).exists() == kept
    assert not kept or "nmae" in (tmp_path / OUTPUT).read_text()
