from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_job import Job, assert_nothing_left, command, make_job


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def undisturbed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the job, run from start to end."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = command("run", job.file, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def leaks_nothing() -> Iterator[None]:
    yield
    assert_nothing_left()
