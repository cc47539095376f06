"""The committed history of a job: one record per step, written with a conditional put, each naming its parent.

    journal/000000.json <-parent- journal/000001.json <-parent- journal/000002.json ...

A record has three parts:
    history   what the job is: weights' digests, data cursor, metrics of learning. In the deterministic mode it is the
              same, byte for byte, however often the job was killed. The parent's checksum is of this part.
    pointers  where it lies: the versions (with the calls that made them), what of it would outlive its node; in record
              0 whose it is (identity.py)
    observed  what this execution saw: timings, cost. Differs between runs.

The conditional put is the fence: of two orchestrators, one commits a step and the other learns that it is stale.
"""

import json
from dataclasses import dataclass, field
from typing import Self

from functions.base.wire import Json, Version
from functions.exchange.base import checksum
from orchestrator.base.canonical import canonical
from orchestrator.base.errors import Fenced, RunError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.run.identity import JOURNAL, RunIdentity


def record_key(step: int) -> str:
    return f"{JOURNAL}{step:06d}.json"


@dataclass(frozen=True)
class Record:
    step: int
    parent: str
    """Checksum of the parent's `history`; "" for step 0."""
    history: Json
    pointers: Json = field(default_factory=dict)
    observed: Json = field(default_factory=dict)

    @property
    def key(self) -> str:
        return record_key(self.step)

    @property
    def checksum(self) -> str:
        return checksum(canonical({"step": self.step, "parent": self.parent, "history": self.history}))

    @property
    def versions(self) -> dict[str, Version]:
        """The newest version of each model as of this step."""
        return {model: Version.from_json(value) for model, value in self.pointers["versions"].items()}

    @property
    def durable(self) -> int:
        """The newest step, up to this, whose models are in the store with all that training goes on from; what came
        after it is lost with the node that holds the rest (checkpoints.state_every)."""
        return int(self.pointers.get("durable", self.step))

    def encode(self) -> bytes:
        value = {"step": self.step, "parent": self.parent, "history": self.history, "pointers": self.pointers}
        return json.dumps(value | {"observed": self.observed}, indent=1, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes, key: str) -> Self:
        try:
            value = json.loads(data)
            return cls(value["step"], value["parent"], value["history"], value["pointers"], value["observed"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{key}: not a journal record ({error!r})") from error


class Journal:
    """All committed records, oldest first."""

    def __init__(self, store: AsyncExchange, records: list[Record], run: RunIdentity | None = None) -> None:
        self._store, self._run = store, run
        self.records = records

    @classmethod
    async def open(cls, store: AsyncExchange, run: RunIdentity | None = None) -> Self:
        """Reads and checks the whole chain. Raises RunError naming the first record that does not follow.

        `run`: who wants to lengthen it; another's journal is refused. Without it the journal is only read.
        """
        records: list[Record] = []
        for key in await store.list(JOURNAL):
            record = Record.decode(await store.get(key), key)
            parent = records[-1].checksum if records else ""
            if record.step != len(records) or record.parent != parent or record.key != key:
                raise RunError(f"{key}: does not follow the record before it; the journal was altered")
            records.append(record)
        if records and run is not None:
            run.check(RunIdentity.from_json(records[0].pointers.get("run"), records[0].key))
        return cls(store, records, run)

    @property
    def last(self) -> Record | None:
        return self.records[-1] if self.records else None

    async def commit(self, *, history: Json, pointers: Json, observed: Json) -> Record:
        """Appends the next step. Raises Fenced when another orchestrator has committed it already."""
        last = self.last
        if last is None and self._run is not None:
            pointers = {**pointers, "run": self._run.to_json()}
        record = Record(len(self.records), last.checksum if last else "", history, pointers, observed)
        if await self._store.put_if_absent(record.key, record.encode()) is None:
            raise Fenced(f"{record.key}: another orchestrator has committed this step; this one stops")
        self.records.append(record)
        return record

    async def roll_back(self, step: int) -> None:
        """Takes back the records after `step`, the newest first: what is left is a journal at any moment."""
        while len(self.records) > step + 1:
            await self._store.delete(self.records[-1].key)
            self.records.pop()
