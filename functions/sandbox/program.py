"""What is run, within which limits, and what came of it. A sandbox that fails is no result: it raises SandboxError."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol, get_args

Language = Literal["python", "bash"]
LANGUAGES: tuple[str, ...] = get_args(Language)
Status = Literal["finished", "timeout", "memory", "output"]


class SandboxError(Exception):
    """The sandbox failed, not the program: nothing is known of what the program would have done. One line."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one run, all of its processes together where nothing else is said. ValueError, naming it, for one below 1."""

    timeout_s: float = 10.0
    """By the clock, from the program's first instruction; each process has as much CPU time, and a second more."""
    memory_mb: int = 1024
    """Resident; of each process also the address space."""
    disk_mb: int = 64
    """Of its folder, /tmp: held in memory beside memory_mb. Also the size of a file."""
    processes: int = 32
    """Threads count."""
    output_kb: int = 4096
    """Of standard output, and as much of standard error."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {self.timeout_s:g}, wants a number of seconds above 0")
        for name in ("memory_mb", "disk_mb", "processes", "output_kb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wants 1 or more")


@dataclass(frozen=True)
class Program:
    """ValueError for a language that there is not, and for a file outside of the program's folder."""

    code: str
    language: Language = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By path in the folder that the program starts in, /tmp."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ValueError(f"language is {self.language!r}, wants one of {', '.join(LANGUAGES)}")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file {name!r}: wants a path below the program's folder")


@dataclass(frozen=True)
class Result:
    status: Status
    """finished: it ended by itself, however; else the limit that ended it."""
    code: int
    """As subprocess: -9 for SIGKILL."""
    stdout: str
    """Bytes that are no UTF-8 became U+FFFD; at most limits.output_kb."""
    stderr: str
    seconds: float
    """By the clock, from the program's first instruction."""
    start_s: float = 0.0
    """From the request to the program's first instruction."""

    @property
    def ok(self) -> bool:
        return self.status == "finished" and self.code == 0


class Sandbox(Protocol):
    """May be asked from several threads at once."""

    def run(self, program: Program) -> Result:
        """Raises SandboxError when the sandbox has failed, not the program; it has been tried again by then."""

    def close(self) -> None: ...
