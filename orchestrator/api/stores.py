"""Each job's own credentials of the stores, in the place of the release's: a Secret that its runner and functions hold.

    Redis   a user of the job's keys; made again where Redis has lost it, removed when the job's last runner has ended
    S3      by --stores-role credentials of the job's prefix, which expire and are renewed at half of their life

The Secret belongs to the job's launch, and goes with it. Where a store cannot divide (a Redis without ACL commands, an
S3 without a role) it has the release's credentials of that one, and the log says so.
"""

import base64
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functions.exchange.base import ExchangeError, Unavailable
from functions.exchange.open import redis_place
from functions.exchange.scoped import LIFE_S, RedisUsers, s3_credentials
from orchestrator.base.errors import OrchestratorError
from orchestrator.base.files import Lock
from orchestrator.platforms.knative.api import ApiError, KubeApi, core
from orchestrator.platforms.knative.manifests import STORES_PATH, stores_secret
from orchestrator.run.directory import RunDirectory
from orchestrator.run.stored import bundles

S3 = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
REDIS = ("REDIS_USERNAME", "REDIS_PASSWORD")
ANYWAY = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE")
CONFIG, CREDENTIALS = "AWS_STORES_CONFIG", "AWS_STORES_CREDENTIALS"
MANAGER = "rlhf-orchestrate-api"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """What a job's Secret has."""

    launch: str
    """The uid of the Job that it belongs to."""
    password: str
    renew_at: float


class JobStores:
    """`place`: where runs are kept, in the release's exchange; `release` tells its Redis users from others';
    `role`: "": none."""

    def __init__(self, api: KubeApi, namespace: str, runs: Path, place: str, release: str, role: str) -> None:
        self._api, self._namespace, self._runs = api, namespace, runs
        url, _, _ = place.partition("#")
        self._place, self._redis, self._release, self._role = place, redis_place(url), release, role
        self._users: RedisUsers | None = None
        self._held: dict[str, Held] = {}
        self._said: set[str] = set()
        self._lock = Lock(runs / ".stores")
        if not role and "s3://" in url:
            self._say("S3: all jobs have the release's credentials; exchange.role of the chart gives each its own")

    def keep(self, alive: Callable[[], Mapping[str, dict[str, str]]]) -> None:
        """`alive`: the jobs that have a runner, each with an ownerReference to its launch. Raises RunError."""
        with self._lock:  # two servers make one password
            self._keep(alive)

    def _keep(self, alive: Callable[[], Mapping[str, dict[str, str]]]) -> None:
        known: set[str] | None = None
        with self._told("Redis"):
            known = self._known()  # before the launches are listed: who has a user and no launch then has ended
        jobs = alive()
        self._held = {job: held for job, held in self._held.items() if job in jobs}
        for job, launch in jobs.items():
            with self._told(f"job {job} has no credentials of its own"):
                before, held = self._held.get(job), self._given(job, launch)
                if self._users is not None and known is not None and (held is not before or job not in known):
                    here = "s3://" not in self._place  # what is kept lies in Redis, and not its locks alone
                    self._users.grant(job, held.password, self._place, self._bundles(job) if here else ())
                self._held[job] = held
        for job in (known or set()) - jobs.keys():
            with self._told(f"job {job} has ended, and has its user still"):
                assert self._users is not None, "which told what is known"
                self._users.revoke(job)

    def _known(self) -> set[str] | None:
        """The jobs with a user; None: this Redis makes none. Raises Unavailable."""
        if self._redis is None:
            return None
        try:
            self._users = self._users or RedisUsers(self._redis, self._release)
            return self._users.known()
        except Unavailable:
            raise
        except ExchangeError as error:
            self._say(f"Redis: all jobs have the release's credentials, as it makes no users for us: {error}")
            self._redis = self._users = None
            return None

    def _given(self, job: str, launch: dict[str, str]) -> Held:
        """What its Secret has, which is written where there is none of this launch, and to renew its credentials."""
        held = self._held.get(job)
        if held is not None and held.launch == launch["uid"] and time.time() < held.renew_at:
            return held
        if self._redis is not None and self._users is None:
            raise Unavailable(f"Redis {self._redis} has not answered yet")
        data = {name: os.environ[name] for name in (*ANYWAY, *S3, *REDIS) if name in os.environ}
        password, renew_at = "", float("inf")
        if self._users is not None:
            user = self._users.prefix + job
            password = held.password if held else self._password(job, user) or secrets.token_urlsafe(32)
            data |= dict(zip(REDIS, (user, password), strict=True))
        url = RunDirectory.open(self._runs / job).job.exchange.url or ""
        own, runs = (place if "s3://" in place else "" for place in (url, self._place))
        if self._role and (own or runs):
            renew_at = time.time() + LIFE_S / 2
            made = s3_files(s3_credentials(own or runs, job, self._role, runs, self._bundles(job)))
            data = {name: value for name, value in data.items() if name not in S3} | made
        meta = {"name": stores_secret(job), "namespace": self._namespace, "ownerReferences": [launch]}
        coded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": coded}
        self._api.apply(self._path(job), body, MANAGER)
        return Held(launch["uid"], password, renew_at)

    def _bundles(self, job: str) -> list[str]:
        return bundles(RunDirectory.open(self._runs / job).job, self._runs)

    def _password(self, job: str, user: str) -> str:
        """What the job's Secret has of a server before this one, or of a launch before: functions know it."""
        try:
            data = self._api.merge(self._path(job), {}).get("data", {})
        except ApiError as error:
            if error.status != 404:
                raise
            return ""
        name, password = (base64.b64decode(data.get(key, "")).decode() for key in REDIS)
        return password if name == user else ""

    def _path(self, job: str) -> str:
        return core(self._namespace, "secrets", stores_secret(job))

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What goes wrong is said once, and tried again at the next time."""
        try:
            yield
        except (ExchangeError, OrchestratorError, ApiError, ValueError) as error:
            self._say(f"{what}: {error}")
        else:
            self._said = {line for line in self._said if not line.startswith(f"{what}: ")}

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)


def s3_files(made: Mapping[str, Any], path: str = STORES_PATH) -> dict[str, str]:
    """Keys of the Secret. botocore asks its `credential_process` again before they expire, and the kubelet has by then
    put the renewed ones into the mounted file."""
    config = f"[default]\ncredential_process = cat {path}/{CREDENTIALS}\n"
    return {"AWS_CONFIG_FILE": f"{path}/{CONFIG}", CONFIG: config, CREDENTIALS: json.dumps(dict(made))}
