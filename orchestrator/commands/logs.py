"""What the replicas of a run have printed, in the order of their times.

On this machine a replica writes `logs/<function>-<n>.log` in the run directory; the job API's orchestrator writes
`orchestrator.log` beside it. Lines are JSON (functions/base/logs.py), or what code below Python has printed. On a
cluster the logs are the cluster's.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from functions.base.logs import LEVELS, LogLine
from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import run_directory
from orchestrator.run.directory import RunDirectory

HELP = "what the replicas of a run have printed"
EXAMPLE = "rlhf-orchestrate logs arithmetic --function generate --level warning"
LOOK_EVERY_S = 0.2


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("--function", help="only of this function (generate, reward, train, ..., orchestrator)")
    parser.add_argument("--step", type=int, help="only of calls of this step")
    parser.add_argument("--call", default="", help="only of calls whose id begins so")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="only of this level or above")
    parser.add_argument("--follow", action="store_true", help="go on while the run is worked on")


def execute(given: Namespace) -> int:
    wanted = Wanted(given.function, given.step, given.call, given.level)
    for replica, line in read_logs(RunDirectory.open(given.run), wanted, follow=given.follow):
        for row in str(line).splitlines():
            print(f"{replica} | {row}", flush=given.follow)
    return 0


@dataclass(frozen=True)
class Wanted:
    """Which lines; what is not set is not asked for."""

    function: str | None = None
    step: int | None = None
    call: str = ""
    """What the call's id begins with."""
    level: str = "debug"
    """This one or a graver one."""

    def takes(self, line: LogLine) -> bool:
        """A line that is not JSON belongs to no call, and is of level info."""
        if self.step is not None and line.step != self.step:
            return False
        return line.call.startswith(self.call) and LEVELS.index(line.level) >= LEVELS.index(self.level)


def read_logs(directory: RunDirectory, wanted: Wanted, *, follow: bool) -> Iterator[tuple[str, LogLine]]:
    """(replica, line) in the order of their times; `follow` goes on while an orchestrator works on the run.

    Raises RunError for a function that has logged nowhere (naming those that have), and for a run on a cluster.
    """
    job = directory.job
    if job.platform.kind == "knative":
        only = f",rlhf-orchestrate/function={wanted.function}" if wanted.function else ""
        raise RunError(
            f"{directory.path}: its functions run on a cluster; "
            f"`kubectl logs -l rlhf-orchestrate/job={job.name}{only} -c function --prefix --follow`"
        )
    read: dict[Path, int] = {}
    while True:
        working = directory.holder() is not None
        found: list[tuple[str, str, LogLine]] = []
        for path in _files(directory.path, wanted.function):
            lines, read[path] = _new_lines(path, read.get(path, 0), whole=not (follow and working))
            at = ""
            for line in map(LogLine.parse, lines):
                at = line.time or at  # what has no time of its own belongs to the line before it
                if wanted.takes(line):
                    found.append((at, path.stem, line))
        for _, replica, line in sorted(found, key=lambda entry: entry[0]):
            yield replica, line
        if wanted.function is not None and not read and not (follow and working):
            known = sorted({_function(path) for path in _files(directory.path, None)})
            listed = ", ".join(known) or "none at all"
            raise RunError(f"{directory.path}: no logs of {wanted.function!r} (there are {listed})")
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
    return data.decode(errors="replace").removesuffix("\n").split("\n") if data else [], start + len(data)
