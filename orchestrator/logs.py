"""What the replicas of a run have printed: `rlhf-orchestrate logs RUN [--function NAME] [--follow]`.

On this machine a replica writes `logs/<function>-<n>.log` in the run directory; the job API's orchestrator writes
`orchestrator.log` beside it. On a cluster the logs are the cluster's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import RunError
from orchestrator.run_directory import RunDirectory

LOOK_EVERY_S = 0.2


def read_logs(directory: RunDirectory, function: str | None, *, follow: bool) -> Iterator[tuple[str, str]]:
    """(replica, line), oldest file first; `follow` goes on while an orchestrator works on the run.

    Raises RunError for a function that has printed nowhere (naming those that have), and for a run on a cluster.
    """
    job = directory.job
    if job.platform.kind == "knative":
        only = f",rlhf-orchestrate/function={function}" if function else ""
        raise RunError(
            f"{directory.path}: its functions run on a cluster; "
            f"`kubectl logs -l rlhf-orchestrate/job={job.name}{only} -c function --prefix --follow`"
        )
    read: dict[Path, int] = {}
    while True:
        working = directory.holder() is not None
        for path in _files(directory.path, function):
            lines, read[path] = _new_lines(path, read.get(path, 0), whole=not (follow and working))
            for line in lines:
                yield path.stem, line
        if function is not None and not read and not (follow and working):
            known = sorted({_function(path) for path in _files(directory.path, None)})
            raise RunError(f"{directory.path}: no logs of {function!r} (there are {', '.join(known) or 'none at all'})")
        if not follow or not working:
            return
        time.sleep(LOOK_EVERY_S)


def _function(path: Path) -> str:
    """`generate` of `generate-3.log`."""
    name, _, number = path.stem.rpartition("-")
    return name if number.isdigit() else path.stem


def _files(run: Path, function: str | None) -> list[Path]:
    paths = [*run.glob("logs/*.log"), *run.glob("orchestrator.log")]
    chosen = [path for path in paths if function is None or _function(path) == function]
    return sorted(chosen, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _new_lines(path: Path, start: int, *, whole: bool) -> tuple[list[str], int]:
    """What was appended since byte `start`, and the byte after it; a line without its end only if `whole`."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    if not whole:
        data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace").splitlines(), start + len(data)
