"""Runs in the release's exchange, where orchestrators have a disk of their own: what lies where, and a runner's side.

    .runs.<release>/api/         all jobs: api.json, job.toml, run.json of each, and what Idempotency-Keys have made
    .runs.<release>/run/<job>/   a run's directory, but what the API keeps of it
    .runs.<release>/files/<bundle>/  what jobs came with

Each is a log (mirror.py) in the exchange's durable part.
"""

import atexit
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from functions.exchange.base import Exchange, ExchangeError, Unavailable
from functions.exchange.open import open_exchange
from functions.exchange.scoped import runs_root
from orchestrator.base.errors import Away, ConfigError, Fenced, RunError
from orchestrator.base.outages import LIMIT_S
from orchestrator.job.config import JobConfig
from orchestrator.run.changes import tree
from orchestrator.run.directory import PROFILE, RunDirectory
from orchestrator.run.mirror import RUNNER, Mirror

FILES = ".files"
"""In a directory of runs, the bundles."""
EVERY_S, WAIT_S = 1.0, 5.0
APART = (f"{PROFILE}/", "model/", "samples/")
KEPT = frozenset({"api.json", "job.toml", "run.json"})
"""What the API says of a run: nothing that its job writes takes their place."""
OWN = frozenset({"api.json", "lock", "process"})
"""Of one place, and not mirrored; nor are committed records, which the job's exchange has."""
log = logging.getLogger(__name__)


def open_runs(place: str) -> Exchange:
    """`URL#RELEASE`: releases may share an exchange. Raises ConfigError, Away, RunError."""
    try:
        with exchanging():
            return open_exchange(place.partition("#")[0], runs_root(place)).durable
    except ValueError as error:
        raise ConfigError(f"exchange.url: {error}") from error


@contextmanager
def exchanging() -> Iterator[None]:
    """The store's errors as a user meets them: Away, RunError."""
    try:
        yield
    except Unavailable as error:
        raise Away(error.store, f"runs: {error}") from error
    except ExchangeError as error:
        raise RunError(f"runs: {error}") from error


def run_mirror(store: Exchange, directory: Path, *, by: str = "", kept: frozenset[str] = frozenset()) -> Mirror:
    """Of the run whose directory that is."""
    name = f"run/{directory.name}"
    return Mirror(store, name, directory, by=by, kept=kept, apart=lambda path: path.startswith(APART), paths=_of_a_run)


def bundle_mirror(store: Exchange, directory: Path, *, by: str = "") -> Mirror:
    return Mirror(store, f"files/{directory.name}", directory, by=by, apart=lambda _path: True)


def bundles(job: JobConfig | str, runs: Path) -> list[str]:
    """Those that a job names, or a text."""
    text = job if isinstance(job, str) else job.model_dump_json()
    return sorted(set(re.findall(rf"{re.escape(str(runs / FILES))}/([0-9a-f]{{16}})\b", text)))


def _of_a_run(directory: Path) -> Iterable[str]:
    return (path for path in tree(directory) if path not in OWN and not path.startswith("journal/"))


def take_stored(directory: Path, place: str) -> None:
    """Brings a run and the bundles that its job names to this machine, and keeps the run's copy in the store up to date
    until this process ends; whoever had it before is fenced off. Waits for the store. Raises ConfigError, RunError."""
    give_up_s = time.monotonic() + LIMIT_S
    while True:
        try:
            mirror, job = bring(directory, open_runs(place))
            return _Keeper(mirror, job.limits.outage_s).start()
        except Away as error:  # or our credentials are not known there yet
            log.warning("waiting for the run: %s", error)
            if time.monotonic() > give_up_s:
                raise
            time.sleep(WAIT_S)


def bring(directory: Path, store: Exchange) -> tuple[Mirror, JobConfig]:
    """The run, for an orchestrator to work on, and what its job names of bundles. Raises Away, RunError."""
    mirror = run_mirror(store, directory, by=f"{RUNNER}{uuid.uuid4().hex}")
    with exchanging():
        mirror.push(begins=True)
        job = RunDirectory.open(directory).job
        for bundle in bundles(job, directory.parent):
            files = bundle_mirror(store, directory.parent / FILES / bundle)
            files.pull()
            files.fetch()
    return mirror, job


class _Keeper(threading.Thread):
    """Pushes about every second, whatever the store does meanwhile; and once more when all else of this process is
    written, its output included: for that the store is waited for."""

    def __init__(self, mirror: Mirror, outage_s: float) -> None:
        super().__init__(name="mirror", daemon=True)
        self._mirror, self._outage_s = mirror, outage_s
        self._over = threading.Event()
        self._said = ""
        self._fenced = False

    def start(self) -> None:
        super().start()
        atexit.register(self._end)  # before keep_output registers its own: after that one

    def run(self) -> None:
        while not self._over.wait(EVERY_S) and not self._fenced:
            self._push(whole=False)

    def _end(self) -> None:
        self._over.set()
        self.join()
        give_up_s = time.monotonic() + self._outage_s
        while not self._fenced and not self._push(whole=True) and time.monotonic() < give_up_s:
            time.sleep(EVERY_S)

    def _push(self, *, whole: bool) -> bool:
        try:
            with exchanging():
                self._mirror.push(whole=whole)
        except Fenced as error:
            self._fenced = True
            log.error("%s", error)
        except (RunError, OSError, ValueError) as error:
            if not self._said:
                log.warning("the run's files are not in the store, tried again until they are: %s", error)
            self._said = str(error)
        else:
            if self._said:
                log.warning("the run's files are in the store again")
            self._said = ""
            return True
        return False
