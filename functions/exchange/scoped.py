"""One job's own way into the stores, made by who holds theirs: a Redis user of the job's keys, and credentials of S3
that expire, of its prefix. Each may what the methods of Exchange do there and nothing else.

Not divided: SCAN tells a user the names of all keys of its Redis (an ACL knows no patterns for it), no value.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import boto3

from functions.exchange.base import ExchangeError
from functions.exchange.open import s3_place
from functions.exchange.redis import MADE, ROOT, RedisExchange
from functions.exchange.s3_errors import s3_errors

COMMANDS = """+ping +select +get +set +mget +del +unlink +exists +getrange +strlen +scan +publish +subscribe
+unsubscribe +multi +exec +watch +unwatch +eval +evalsha"""
LIFE_S = 3600
"""Of credentials of S3: the longest that AWS gives to who has a role itself."""


def runs_root(place: str) -> str:
    """The root, beside those of jobs, that runs are kept in at `URL#RELEASE` (orchestrator/run/stored.py); a job's name
    begins with no dot."""
    _, _, release = place.partition("#")
    return f".runs.{release}" if release else ".runs"


class RedisUsers(RedisExchange):
    """By the administrator's connection; `release` keeps its users apart from others' on the same Redis."""

    def __init__(self, url: str, release: str) -> None:
        super().__init__(url, ROOT)
        self.prefix = f"{MADE}{release}:"

    def grant(self, job: str, password: str, runs: str = "", bundles: Sequence[str] = ()) -> None:
        """Makes or replaces the job's user; connections that it has stay. `runs`: where its run is kept, and bundles
        that it may read (and write, before Redis 7, which divides that)."""
        digest, root = hashlib.sha256(password.encode()).hexdigest(), f"{ROOT}{runs_root(runs)}"
        keys = (f"{ROOT}{job}/*", f"{root}/run/{job}/*")
        for read in ("%R~", "~"):
            own = [f"{sign}{key}" for key in keys for sign in "~&"] + [f"{read}{root}/files/{one}/*" for one in bundles]
            rules = ("reset", "on", f"#{digest}", "resetchannels", *own, "-@all", *COMMANDS.split())
            command = ("ACL", "SETUSER", self.prefix + job, *rules)
            try:
                self._send(job, partial(list, [command]))
                return
            except ExchangeError as error:
                if read == "~" or "Syntax error" not in str(error):
                    raise

    def revoke(self, job: str) -> None:
        """Removes it, and closes its connections."""
        self._send(job, lambda: [("ACL", "DELUSER", self.prefix + job)])

    def known(self) -> set[str]:
        """The jobs that have one."""
        (names,) = self._send("users", lambda: [("ACL", "USERS")])
        return {name.decode().removeprefix(self.prefix) for name in names if name.decode().startswith(self.prefix)}


def s3_credentials(url: str, job: str, role: str, runs: str = "", bundles: Sequence[str] = ()) -> dict[str, Any]:
    """Of the job's prefix, of its run where `runs` says (at `url` where it is "") and, to read, of `bundles` there, for
    LIFE_S: what a `credential_process` of AWS' clients prints. Raises ExchangeError."""
    bucket, folder, endpoint, region = s3_place(url)
    arn = f"arn:{role.split(':')[1]}:s3:::"
    kept_bucket, kept_folder, *_ = s3_place(runs or url)
    root = f"{kept_folder}{runs_root(runs)}/"
    policy = _policy(f"{arn}{bucket}", folder, job, f"{arn}{kept_bucket}", root, bundles)
    with s3_errors(f"AssumeRole {role}", f"s3://{bucket}/{folder}"):
        client = boto3.client("sts", endpoint_url=endpoint, region_name=region or ("us-east-1" if endpoint else None))
        made = client.assume_role(
            RoleArn=role, RoleSessionName=f"rlhf-{job}"[:64], DurationSeconds=LIFE_S,
            Policy=json.dumps(policy, separators=(",", ":")),
        )["Credentials"]  # fmt: skip
        client.close()
    ends = made.pop("Expiration")
    return {"Version": 1, **made, "Expiration": ends.isoformat()}


def _policy(bucket: str, folder: str, job: str, kept: str, runs: str, bundles: Sequence[str]) -> dict[str, Any]:
    """Without a space where it is sent: Ceph 16 reads the plus that stands for one in a form as a plus."""
    run, read = f"run/{job}/*", [f"files/{bundle}/*" for bundle in bundles]
    objects = [f"s3:{action}" for action in ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")]
    listed = {bucket: [f"{folder}{job}/*"]}
    listed.setdefault(kept, []).extend(f"{runs}{ends}{key}" for ends in ("", "+expires/") for key in (run, *read))
    rules: list[dict[str, Any]] = [
        {"Action": objects, "Resource": [f"{bucket}/{folder}{job}/*", f"{kept}/{runs}{run}"]},
        {"Action": "s3:PutObject",
         "Resource": [f"{bucket}/{folder}+probe", f"{kept}/{runs.rpartition('.runs')[0]}+probe"]},
        *({"Action": "s3:ListBucket", "Resource": at, "Condition": {"StringLike": {"s3:prefix": keys}}}
          for at, keys in listed.items()),
        *({"Action": "s3:GetObject", "Resource": f"{kept}/{runs}{key}"} for key in read),
    ]  # fmt: skip
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **rule} for rule in rules]}
