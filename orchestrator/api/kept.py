"""Where the API keeps what it knows of jobs: in the directory of runs that their orchestrators work on, or, where those
have disks of their own, in the release's exchange (orchestrator/run/stored.py), of which the directory is a copy.

There any number of servers may answer: what one writes is a change of one log, which another's that came between
refuses (Overtaken) where it touches the same files; and what is in the log is what each has on its disk.
"""

import logging
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from functions.exchange.base import Exchange, Unavailable
from orchestrator.base.files import write_atomically, writing
from orchestrator.run.mirror import Mirror
from orchestrator.run.stored import FILES, KEPT, bundle_mirror, exchanging, run_mirror

FOLLOWED_AT_ONCE = 8
log = logging.getLogger(__name__)


class LocalRuns:
    """Of orchestrators on this machine, which write where this server reads. Methods raise RunError."""

    shared = False
    """Whether other servers, and orchestrators elsewhere, have copies of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refresh(self) -> None:
        """Has what other servers have written of jobs."""

    def follow(self, jobs: Iterable[str]) -> None:
        """Has what orchestrators have written by now of these jobs, and of others whose last files are not here."""

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """All of them or, where this process ends, those that come first; None removes one. Raises Overtaken."""
        for name, data in files.items():
            if data is None:
                with writing(self.path / name):
                    (self.path / name).unlink(missing_ok=True)
            else:
                write_atomically(self.path / name, data)

    def hand_over(self, job: str) -> None:
        """What this server has written in a run whose orchestrator is not at work is there for the next."""

    def rename(self, job: str, name: str) -> None:
        """A run is another's, or none, to all that look for it."""
        with writing(self.path / name):
            (self.path / job).rename(self.path / name)

    def remove(self, name: str, job: str) -> None:
        """A run that was renamed, with its files."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def fetch(self, job: str, prefix: str) -> None:
        """Has the files of a run whose paths begin so; of samples, profiles and models only names are here before."""

    def bring(self, bundle: str, path: str | None = None) -> None:
        """Has the names of a bundle's files, and that one file."""

    def keep(self, bundle: str) -> None:
        """What has come of a bundle is there for orchestrators."""

    def bundles(self) -> Iterator[tuple[str, float]]:
        """Each with the time when its last file came, Unix seconds."""
        for directory in (self.path / FILES).glob("*"):
            yield directory.name, max((p.stat().st_mtime for p in directory.rglob("*")), default=0.0)

    def drop(self, bundle: str) -> None:
        shutil.rmtree(self.path / FILES / bundle, ignore_errors=True)


class StoredRuns(LocalRuns):
    """Of orchestrators on other machines; `store`: where runs are. Methods raise Away where it does not answer."""

    shared = True

    def __init__(self, path: Path, store: Exchange) -> None:
        super().__init__(path)
        self._store, self._by = store, f"api-{uuid.uuid4().hex}"
        self._jobs = Mirror(store, "api", path)
        self._mirrors: dict[str, Mirror] = {}
        """Of runs and bundles; a job's id has a `-`, a bundle's none."""
        self._behind: set[str] = set()
        """Jobs whose files here may not be the last."""
        self._followed: set[str] = set()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        with exchanging():
            touched = self._jobs.pull()
        for job in {path.partition("/")[0] for path in touched if not path.startswith(".")}:
            if (self.path / job / "run.json").exists():
                with self._lock:
                    self._behind.add(job)
            else:
                self._forget(job)

    def follow(self, jobs: Iterable[str]) -> None:
        with self._lock:
            self._behind |= self._followed.union(jobs)  # who rests by now had its last files before that was told
            self._followed, behind = set(jobs), sorted(self._behind)
        with exchanging(), ThreadPoolExecutor(FOLLOWED_AT_ONCE) as pool:
            list(pool.map(self._pull, behind))

    def _pull(self, job: str) -> None:
        """What a job's code has written that is no log is said once, and keeps nobody else from being followed."""
        try:
            self._run(job).pull()
        except Unavailable:
            raise
        except Exception as error:
            if job not in self._said:
                log.error("job %s: its files are not followed: %s", job, error)
            self._said.add(job)
        else:
            self._said.discard(job)
        with self._lock:
            self._behind.discard(job)

    def write(self, files: Mapping[str, bytes | None]) -> None:
        with exchanging():
            self._jobs.write(files)

    def hand_over(self, job: str) -> None:
        with exchanging():
            self._run(job).push()

    def rename(self, job: str, name: str) -> None:
        found = {file: (self.path / job / file).read_bytes() for file in sorted(KEPT)}
        gone = {f"{job}/{file}": None for file in found}
        self.write(gone | {f"{name}/{file}": data for file, data in found.items()})
        self._forget(job)

    def remove(self, name: str, job: str) -> None:
        with exchanging():
            self._store.delete(f"run/{job}/")
        self.write({f"{name}/{file}": None for file in KEPT})
        super().remove(name, job)

    def fetch(self, job: str, prefix: str) -> None:
        with exchanging():
            self._run(job).fetch(prefix)

    def bring(self, bundle: str, path: str | None = None) -> None:
        with exchanging():
            mirror = self._bundle(bundle)
            mirror.pull()
            if path is not None:
                mirror.fetch(path)

    def keep(self, bundle: str) -> None:
        with exchanging():
            self._bundle(bundle).push(whole=True)

    def bundles(self) -> Iterator[tuple[str, float]]:
        with exchanging():
            for bundle in sorted({key.split("/")[1] for key in self._store.list("files/")}):
                self._bundle(bundle).pull()
                yield bundle, self._bundle(bundle).changed_at

    def drop(self, bundle: str) -> None:
        with exchanging():
            self._store.delete(f"files/{bundle}/")
        with self._lock:
            self._mirrors.pop(bundle, None)
        super().drop(bundle)

    def _run(self, job: str) -> Mirror:
        with self._lock:
            if job not in self._mirrors:
                self._mirrors[job] = run_mirror(self._store, self.path / job, by=self._by, kept=KEPT)
            return self._mirrors[job]

    def _bundle(self, bundle: str) -> Mirror:
        with self._lock:
            if bundle not in self._mirrors:
                self._mirrors[bundle] = bundle_mirror(self._store, self.path / FILES / bundle, by=self._by)
            return self._mirrors[bundle]

    def _forget(self, job: str) -> None:
        with self._lock:
            self._mirrors.pop(job, None)
            self._behind.discard(job)
        shutil.rmtree(self.path / job, ignore_errors=True)
