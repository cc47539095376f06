from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tiny_job import Job, assert_nothing_left, command, make_job


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all workers."""
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session")
def job(shared: Path) -> Job:
    """To be read only."""
    directory = shared / "job"
    once(directory, lambda: make_job(directory))
    return Job(directory)


@pytest.fixture(scope="session")
def undisturbed(job: Job, shared: Path) -> Path:
    """The run directory of the job, run from start to end. To be read only."""
    directory = shared / "undisturbed"

    def run() -> None:
        done = command("run", job.file, "--run-dir", directory)
        assert done.returncode == 0, done.stderr

    once(directory, run)
    return directory


def once(path: Path, make: Callable[[], object]) -> None:
    """`make` makes `path`, in the first worker that wants it; the others wait."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                make()
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise


@pytest.fixture
def leaks_nothing() -> Iterator[None]:
    yield
    assert_nothing_left()
