"""The jobs of a directory of runs: submitted, listed, cancelled, resumed, deleted; and `tick`, which makes it so.

                 +--------- resume ----------+------------------+
                 v                           |                  |
    submit -> queued -> running -> succeeded | failed | cancelled
                 ^         |
                 |         v
                 +--- interrupted (its orchestrator was killed: started again, at most RESTARTS times)

A run's state follows from its files and from which orchestrators are alive; nothing is kept in memory that another
server would miss: several may answer (kept.py), of which one, the leader, starts jobs and settles them.
"""

import hashlib
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar, get_args

from functions.base.logs import LogLine
from functions.base.wire import Json
from functions.exchange.base import ExchangeError
from orchestrator.api.desired import FILE, Desired
from orchestrator.api.kept import LocalRuns
from orchestrator.api.launch import OUTPUT, Alone, Launcher
from orchestrator.api.problems import ApiError
from orchestrator.api.quota import UNLIMITED, Quota, spent_usd
from orchestrator.api.summary import Summary, SummaryFile
from orchestrator.api.views.log import last_lines
from orchestrator.base.errors import OrchestratorError, RunError
from orchestrator.base.files import Lock
from orchestrator.job.config import JobConfig
from orchestrator.run.directory import RunDirectory, unique_name
from orchestrator.run.events import EventType, tell_end
from orchestrator.run.identity import delete_held
from orchestrator.run.mirror import Overtaken
from orchestrator.telemetry.now import FILE as NOW
from orchestrator.telemetry.now import NowFile

State = Literal["queued", "running", "interrupted", "succeeded", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ID = r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$"
RESTARTS = 3
KEYS = ".idempotency"
DELETED = ".deleted"
_ENDS: dict[EventType, State] = {"finished": "succeeded", "failed": "failed", "cancelled": "cancelled"}
log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def again(decide: Callable[Concatenate["Jobs", P], T]) -> Callable[Concatenate["Jobs", P], T]:
    """Decided by what all servers have written, and again where another has written since."""

    @wraps(decide)
    def decided(self: "Jobs", /, *args: P.args, **named: P.kwargs) -> T:
        while True:
            self.kept.refresh()
            try:
                return decide(self, *args, **named)
            except Overtaken:
                log.info("%s once more: another server was first", decide.__name__)

    return decided


@dataclass(frozen=True)
class Job:
    """One job now."""

    id: str
    desired: Desired
    config: JobConfig
    summary: Summary
    alive: bool
    now: Json | None = None
    """Its now.json (orchestrator/telemetry/now.py); None: a run that has none."""

    @property
    def state(self) -> State:
        if self.alive:
            return "running"
        if self.desired.wanted == "run" and not self.over:
            return "queued" if self.desired.launched_after is None else "interrupted"
        return _ENDS[self.summary.ended] if self.summary.ended else "interrupted"

    @property
    def over(self) -> bool:
        """The execution that was launched last has told its end."""
        end, since = self.summary.end, self.desired.launched_after
        return end is not None and since is not None and end.id > since

    @property
    def settled(self) -> bool:
        """Nothing will happen to it unless somebody asks."""
        return not self.alive and self.desired.wanted == "rest"


class Jobs:
    """Thread-safe; every method blocks for file operations only, but those that ask the launcher, and, where runs are
    kept in a store, those that write."""

    def __init__(
        self, runs: Path, launcher: Launcher, *, max_running: int, quota: Callable[[str], Quota],
        kept: LocalRuns | None = None, leads: Alone | None = None,
    ) -> None:  # fmt: skip
        self.runs, self.launcher, self.max_running, self.quota = runs, launcher, max_running, quota
        self.kept, self.leads = kept or LocalRuns(runs), leads or Alone()
        self.ready: threading.Event = threading.Event()
        """Set when all jobs are known."""
        self.changed: threading.Event = threading.Event()
        """Set when `tick` has something to do before its time."""
        self._lock, self._ticks, self._reading = Lock(runs / ".lock"), Lock(runs / ".tick"), threading.Lock()
        self._summaries: dict[str, SummaryFile] = {}
        self._configs: dict[str, JobConfig] = {}
        self._nows: dict[str, NowFile] = {}
        self._alive: frozenset[str] = frozenset()
        try:
            (runs / KEYS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{runs}: cannot hold runs: {error.strerror}") from error
        self._left: list[Path] = []

    def directory(self, job: str) -> Path:
        return self.runs / job

    @again
    def submit(self, config: JobConfig, *, key: str | None, body: bytes, owner: str) -> tuple[Job, bool]:
        """The new job, and True; or the job that the same key has made before, and False.

        Raises ApiError 422 for a key that came with another body, 403 for a job beyond its owner's quota.
        """
        if (never := self.quota(owner).never(config)) is not None:
            raise ApiError(403, f"the job {never}")
        with self._lock:
            id, files = unique_name(config.name), dict[str, bytes | None]()
            if key is not None:
                path = f"{KEYS}/{hashlib.sha256(key.encode()).hexdigest()}.json"
                digest = hashlib.sha256(body).hexdigest()
                id = self._claimed(path, key, digest) or id
                if id in self._ids():
                    return self.get(id), False
                files[path] = json.dumps({"id": id, "body": digest}).encode()
            files[f"{id}/{FILE}"] = Desired(config.name, time.time(), owner, "run").encode()
            new = RunDirectory.new(config.model_copy(update={"name": id}))
            self.kept.write(files | {f"{id}/{name}": data for name, data in new.items()})
        self.changed.set()
        return self.get(id), True

    def _claimed(self, path: str, key: str, digest: str) -> str | None:
        """The job's id that goes with the key, which is on disk before the job is."""
        if not (self.runs / path).exists():
            return None
        claim = json.loads((self.runs / path).read_text())
        if claim["body"] != digest:
            raise ApiError(422, f"the Idempotency-Key {key!r} came with another body before; take a new one")
        return str(claim["id"])

    def _ids(self) -> list[str]:
        return [path.parent.name for path in self.runs.glob("*/run.json") if re.match(ID, path.parent.name)]

    def all(self) -> list[Job]:
        """Newest first. A run that cannot be read is left out, and the log says why."""
        found = []
        for id in self._ids():
            try:
                found.append(self.get(id))
            except ApiError:
                continue  # deleted meanwhile
            except OrchestratorError as error:
                log.warning("%s", error)
        return sorted(found, key=lambda job: (-job.desired.created_at, job.id))

    def get(self, id: str) -> Job:
        """Raises ApiError 404."""
        directory = self.directory(id)
        if not re.match(ID, id):
            raise ApiError(404, f"no job {id!r}")
        if not (directory / "run.json").exists():
            self.kept.refresh()  # another server may have it
        try:
            with self._reading:
                if id not in self._configs or not (directory / "run.json").exists():
                    self._configs[id] = RunDirectory.open(directory).job
                file = self._summaries.setdefault(id, SummaryFile(directory / "events.jsonl"))
                desired = Desired.read(directory)  # before who is alive, as a launch writes them the other way round
                alive = id in self._alive or RunDirectory(directory).holder() is not None
                now = self._nows.setdefault(id, NowFile(directory / NOW)).read()
                return Job(id, desired, self._configs[id], replace(file.read()), alive, now)
        except (FileNotFoundError, OrchestratorError):
            if (directory / "run.json").exists():
                raise
            raise ApiError(404, f"no job {id!r}") from None

    @again
    def cancel(self, id: str) -> Job:
        """Raises ApiError 409 for a job that has ended."""
        with self._lock:
            job = self.get(id)
            if job.settled:
                raise ApiError(409, f"job {id} {_past(job.state)}: there is nothing to cancel")
            self._save(id, replace(job.desired, wanted="stop"))
            if job.alive or self.launcher.alive([id]):  # another server may have just started it
                self.launcher.stop(id)
            elif self.leads():  # else the leader may be about to start it
                self._close(id)
        self.changed.set()
        return self.get(id)

    @again
    def resume(self, id: str) -> Job:
        """Raises ApiError 409 for a job that runs, waits or has succeeded."""
        with self._lock:
            job = self.get(id)
            if not job.settled or job.state == "succeeded":
                raise ApiError(409, f"job {id} {_past(job.state)}; only one that failed or was cancelled goes on")
            self._save(id, replace(job.desired, wanted="run", why="", launched_after=None, restarts=0))
        self.changed.set()
        return self.get(id)

    @again
    def delete(self, id: str) -> None:
        """Its run directory and all it has in its exchange. Raises ApiError 409 for a job that has not ended.

        The job is away, and its run locked, before anything is lost: a resume comes either before all of it, and this
        is refused, or after it, and finds no job. Where the exchange cannot be reached the job comes back.
        """
        with self._lock:
            job = self.get(id)
            if not job.settled:
                raise ApiError(409, f"job {id} {_past(job.state)}; cancel it first")
            if (usd := _spent_usd(job)) and self.quota(job.desired.owner).usd_per_day is not None:
                raise ApiError(409, f"job {id} has spent ${usd:.2f} within 24 hours, which count until they are over")
            try:
                lock = RunDirectory(self.directory(id)).lock()
            except RunError as error:  # a command has begun to work on it just now
                raise ApiError(409, str(error)) from error
            gone = self.runs / f"{DELETED}-{id}-{secrets.token_hex(4)}"
            self.kept.rename(id, gone.name)
            self._summaries.pop(id, None)
            self._nows.pop(id, None)
            self._configs.pop(id, None)
        with lock:
            try:
                self._delete_exchanged(RunDirectory(gone), job.config)
            except (ExchangeError, RunError) as error:
                self.kept.rename(gone.name, id)
                raise RunError(f"job {id} is not deleted: {error}") from error
            self.kept.remove(gone.name, id)

    @staticmethod
    def _delete_exchanged(directory: RunDirectory, config: JobConfig) -> None:
        """What the job has in a store; another run's data under the same name stays."""
        if config.exchange.url is not None:
            delete_held(directory.open_exchange(config), directory.identity(config))

    def sweep(self) -> None:
        """Ends the deletions that a server before this one was killed in; where a store is away, the next one does."""
        self.ready.wait()
        for left in self._left:
            try:
                directory = RunDirectory.open(left)
                with directory.lock():
                    self._delete_exchanged(directory, directory.job)
            except (ExchangeError, OrchestratorError) as error:
                if (left / "run.json").exists() and (left / "job.toml").exists():  # else its files were going already
                    log.warning("%s: a job that was deleted is not all gone: %s", left, error)
                    continue
            self.kept.remove(left.name, left.name[len(DELETED) + 1 : -9])
        self._left = []

    def close(self) -> None:
        """This server starts nothing from here on."""
        with self._ticks:
            self.leads.let_go()

    @again
    def tick(self) -> None:
        """Starts what is wanted and may run, and settles what has ended, where this server leads; one server at a time.
        Raises RunError where a launcher or the store of runs fails."""
        with self._ticks:  # what another server has started since is alive
            wanted = [job.id for job in self.all() if job.desired.wanted != "rest"]
            alive = self.launcher.alive(wanted)
            self.kept.follow(wanted)  # who is not alive has nothing more to say
            if not self.ready.is_set():
                self._left = list(self.runs.glob(f"{DELETED}-*"))
                self.ready.set()
            with self._lock:
                self._alive = alive
                if self.leads():
                    self._tick()

    def _tick(self) -> None:
        waiting: list[Job] = []
        found = self.all()[::-1]
        running = [job for job in found if job.alive]
        for job in running:
            if job.desired.wanted == "run" and (why := self._reached(found, running, job, starts=False)):
                self._save(job.id, replace(job.desired, wanted="stop", why=why))
                self.launcher.stop(job.id)
            elif job.desired.wanted == "stop" and self.kept.shared:
                self.launcher.stop(job.id)  # it was started when another server was told to cancel it
        for job in found:
            if job.alive or job.desired.wanted == "rest":
                continue
            if job.over:
                self._save(job.id, replace(job.desired, wanted="rest"))
            elif job.desired.wanted == "stop":
                self._close(job.id)
            elif job.desired.launched_after is None:
                waiting.append(job)
            elif job.desired.restarts >= RESTARTS:
                self._give_up(job)
            else:
                log.warning("job %s: its orchestrator was killed; it is started again", job.id)
                waiting.append(replace(job, desired=replace(job.desired, restarts=job.desired.restarts + 1)))
        for job in waiting:
            why = self._reached(found, running, job, starts=True)
            if (why or "") != job.desired.why:
                self._save(job.id, replace(Desired.read(self.directory(job.id)), why=why or ""))
            if why is not None or len(running) >= self.max_running:
                continue
            running.append(job)
            try:
                self._launch(job)
            except RunError as error:  # counts as a restart: tried again at the next tick
                log.error("job %s: %s", job.id, error)

    def _reached(self, every: Sequence[Job], running: Sequence[Job], job: Job, *, starts: bool) -> str | None:
        """What of its owner's quota keeps a job from starting beside those that run, or from going on."""
        owner = job.desired.owner
        if (quota := self.quota(owner)) == UNLIMITED:
            return None
        beside = [other.config for other in running if other.desired.owner == owner]
        spent = sum(_spent_usd(other) for other in every if other.desired.owner == owner)
        why = quota.reached(beside, job.config if starts else None, spent)
        return None if why is None else f"{owner}: {why}"

    def _launch(self, job: Job) -> None:
        self.kept.hand_over(job.id)
        desired = replace(job.desired, why="", launches=job.desired.launches + 1, launched_after=job.summary.last_id)
        self._alive |= {job.id}
        self._save(job.id, desired)
        self.launcher.start(job.id, desired.launches)

    def _close(self, id: str) -> None:
        """It was cancelled while no orchestrator was there to say so."""
        job = self.get(id)
        if not job.over:
            tell_end(RunDirectory(self.directory(id)), "cancelled", "cancelled; what is committed stays")
        self.kept.hand_over(id)
        self._save(id, replace(job.desired, wanted="rest"))

    def _give_up(self, job: Job) -> None:
        lines = [line for line in last_lines(self.directory(job.id) / OUTPUT, 9) if line.strip()]
        said = LogLine.parse(lines[-1]).message[:300] if lines else "none"
        message = f"its orchestrator ended {RESTARTS + 1} times without saying why; its last line: {said}"
        tell_end(RunDirectory(self.directory(job.id)), "failed", message)
        self.kept.hand_over(job.id)
        self._save(job.id, replace(job.desired, wanted="rest"))

    def _save(self, id: str, desired: Desired) -> None:
        self.kept.write({f"{id}/{FILE}": desired.encode()})


def _spent_usd(job: Job) -> float:
    return spent_usd(job.summary, None if job.now is None else job.now["usd"], time.time())


def _past(state: State) -> str:
    return {
        "queued": "waits to be started",
        "running": "is running",
        "interrupted": "is interrupted",
        "succeeded": "has succeeded",
        "failed": "has failed",
        "cancelled": "was cancelled",
    }[state]
