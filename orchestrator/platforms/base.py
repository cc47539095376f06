"""The interface of every platform. Times are the running event loop's (`loop.time()`), in seconds.

A replica is paid for from the moment it is started (scheduled) until it is gone; a function at zero costs nothing.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from functions.base.wire import Call, Event
from orchestrator.base.errors import RunError

ReplicaState = Literal["starting", "idle", "busy", "draining"]


@dataclass(frozen=True)
class FunctionSpec:
    """A function of a job, as a platform deploys it."""

    name: str
    """Its name in the job: `generate`, `reward`, `reference`, `train`, `critic`, ..."""
    kind: str
    """Which function object it runs: `generate`, `reward`, `reference` or `train` (functions/server/kinds.py)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the function object as keyword arguments; JSON values only."""
    max_replicas: int = 1
    gpus: int = 0
    """GPUs of one replica."""
    cpus: float = 1.0
    memory_gb: float | None = None
    """What one replica may take; None: 2 on Knative, what the machine has locally."""
    usd_per_hour: float = 0.0
    """What one replica costs while it exists."""


@dataclass(frozen=True)
class Replica:
    """One replica as it is now. `since_s` is when it entered its state."""

    function: str
    name: str
    state: ReplicaState
    since_s: float
    waits: str = ""
    """What capacity a starting one waits for, in a line."""


@dataclass(frozen=True)
class Usage:
    """One replica's life: paid from `started_s` to `stopped_s` (None: still there), at work for `busy_s` of it."""

    function: str
    replica: str
    started_s: float
    stopped_s: float | None
    busy_s: float
    ready_s: float | None = None
    """When it could first take a call; None: never yet, or the platform does not tell."""
    draining_s: float | None = None
    """When it was asked to go; None: it was not."""
    parked_s: float = 0.0
    """How long its process was parked before it, without an accelerator; known from its first call on."""


class PlatformError(RunError):
    """The platform cannot do what was asked; the message says what, where, and what would help. Not retryable."""


class CallLost(Exception):
    """An attempt at a call ended without its `done` or `error` line (replica died, connection cut, no replica came).

    Retryable: the call is idempotent.
    """


class Platform(Protocol):
    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        """Makes the functions callable, at zero replicas. Raises PlatformError. Deploying again replaces the specs."""

    async def scale(self, function: str, replicas: int) -> None:
        """Asks for `replicas` replicas (0..max_replicas; PlatformError outside), without waiting for them.

        Fewer than now: idle ones go first, at once. A busy one goes when its call has ended; it is never killed.
        """

    def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        """One attempt on a replica that has no call open; waits for one while at least one is wanted.

        Yields the function's events in order; ends after `done` or `error`. Raises CallLost when the stream ends
        before that. Closing the iterator cancels the attempt at the function.
        """

    def replicas(self) -> list[Replica]:
        """The replicas that exist now, those starting and draining included."""

    def usage(self) -> list[Usage]:
        """The lives of all replicas since `deploy`, ended ones included, in order of their start."""

    async def close(self) -> None:
        """Everything to zero, at once; open calls end in CallLost. Safe to call twice."""
