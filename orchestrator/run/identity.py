"""Whose journal this is: a run's identity, in every lease and in record 0 of its journal.

Name and exchange alone do not make two runs one: with Redis or S3, another run directory may hold a job of the same
name. A run is known by an id of its own, made with its directory, and by digests of the parts of its job that its
history follows from; whoever finds another's is refused in a line that names both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from functions.base.wire import LEASES, Json
from functions.exchange.base import Exchange, checksum
from orchestrator.base.canonical import canonical
from orchestrator.base.errors import Fenced, RunError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig

MAY_CHANGE: Mapping[str, frozenset[str]] = {
    "model": frozenset({"path"}),
    "data": frozenset({"train", "validation"}),
    "rollout": frozenset({"engine", "vllm", "slots"}),
    "reward": frozenset({"model", "timeout_s", "sandbox", "sandbox_timeout_s", "sandbox_memory_mb"}),
    "environment": frozenset({"timeout_s", "concurrency"}),
    "train": frozenset({"micro_batch_tokens", "gradient_checkpointing"}),
    "critic": frozenset({"path"}),
}
"""Keys that may be another in a resumed run: where things lie (what lies there has digests of its own), and speed."""
JOURNAL = "journal/"
"""Where the records lie."""
FOLLOWED = ("seed", "recipe", "deterministic", "model", "data", "rollout", "reward", "environment", "algorithm",
            "recipe_options", "train", "critic")  # fmt: skip
"""The parts of a job that its history follows from."""


def may_change(key: str) -> bool:
    """Whether a key of a part in FOLLOWED (`rollout.slots`) may be another in a resumed run."""
    section, _, name = key.partition(".")
    return name.partition(".")[0] in MAY_CHANGE.get(section, ())


@dataclass(frozen=True)
class RunIdentity:
    id: str
    where: str
    """For people: the machine and the run directory."""
    job: Mapping[str, str]
    """A digest of each part in FOLLOWED."""

    @classmethod
    def of(cls, id: str, where: str, job: JobConfig) -> RunIdentity:
        table = job.model_dump(mode="json", include=set(FOLLOWED))
        if table["environment"] is None:
            del table["environment"]
        for section in MAY_CHANGE.keys() & table.keys():
            table[section] = {key: value for key, value in table[section].items() if key not in MAY_CHANGE[section]}
        return cls(id, where, {name: checksum(canonical(value))[:16] for name, value in table.items()})

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json | None, key: str) -> RunIdentity:
        try:
            if value is None:
                raise ValueError("none")
            return cls(str(value["id"]), str(value["where"]), dict(value["job"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{key}: names no run ({error!r}); it was made by another version") from error

    def check(self, found: RunIdentity) -> None:
        """Raises RunError where `found`, met in the exchange, is another run, or this one with another job."""
        if found.id != self.id:
            raise RunError(
                f"exchange.url: under this job's name it holds run {found.id} ({found.where}), and this is run "
                f"{self.id} ({self.where}); start it as name=OTHER or with another exchange.url"
            )
        changed = [name for name in FOLLOWED if found.job.get(name) != self.job.get(name)]
        if changed:
            raise RunError(
                f"{self.where}/job.toml: {', '.join(changed)} is not what the run began with; "
                "restore it, or start another run"
            )


async def take_lease(store: AsyncExchange, run: RunIdentity, holder: str) -> int:
    """The next epoch, taken with a conditional put: functions refuse calls of older ones.

    Raises RunError where the lease before is another run's, Fenced when another orchestrator takes it first.
    """
    taken = await store.list(LEASES)
    if taken:
        run.check(await _lease(store, taken[-1]))
    epoch = 1 + max((int(key.removeprefix(LEASES)) for key in taken), default=0)
    key = f"{LEASES}{epoch:06d}"
    if await store.put_if_absent(key, canonical({"holder": holder, "run": run.to_json()})) is None:
        run.check(await _lease(store, key))
        raise Fenced(f"another orchestrator has just taken this run over (epoch {epoch})")
    return epoch


def is_held_by(exchange: Exchange, run: RunIdentity) -> bool:
    """Whether what lies in the exchange is this run's: its newest lease says so. Raises ExchangeError, RunError."""
    taken = exchange.durable.list(LEASES)
    return bool(taken) and _decode(taken[-1], exchange.durable.get(taken[-1])).id == run.id


def delete_held(exchange: Exchange, run: RunIdentity) -> None:
    """Deletes what lies in the exchange, if it is this run's. Raises ExchangeError, RunError.

    The leases, which say whose it is, go last: a deletion that was interrupted can be taken up.
    """
    if is_held_by(exchange, run):
        folders = {key.partition("/")[0] for key in exchange.list("") if "/" in key}
        for folder in sorted(folders - {LEASES.rstrip("/")}):
            exchange.delete(f"{folder}/")
        exchange.delete("")


async def _lease(store: AsyncExchange, key: str) -> RunIdentity:
    return _decode(key, await store.get(key))


def _decode(key: str, data: bytes) -> RunIdentity:
    try:
        value = json.loads(data)
        return RunIdentity.from_json(value["run"], key)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{key}: not a lease ({error!r})") from error
