"""Looking at who holds a run never keeps an orchestrator from taking it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.base.errors import RunError
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from tests.api.conftest import JOB

LOOK = "import sys; from pathlib import Path; from orchestrator.run.directory import RunDirectory as R\n"
LOOK += "print(1, flush=True)\nwhile True: R(Path(sys.argv[1])).holder()\n"


def test_a_run_that_is_looked_at_all_the_time_can_be_taken(tmp_path: Path, root: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", parse_job(JOB, base=root))
    directory.lock().close()
    looker = subprocess.Popen([sys.executable, "-c", LOOK, str(directory.path)], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None
        looker.stdout.readline()
        for _ in range(5000):
            directory.lock().close()
        with directory.lock(), pytest.raises(RunError, match="another orchestrator"):
            directory.lock()
    finally:
        looker.kill()
        looker.communicate()
