"""The types that cross processes. No torch here: the orchestrator imports this module too.

orchestrator --- Call (JSON) ---------------------> function
             <-- Event, Event, ... (JSON lines) ---
tensors      --- SampleBatch, Columns (samples.py: safetensors bytes in the exchange, named by a Ref) ---

"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

Json = dict[str, Any]


class WireError(ValueError):
    """Bytes or JSON from another process that do not have the form this module describes."""


class Wire:
    """What a dataclass that crosses processes has: its JSON form, checked on the way back."""

    def to_json(self) -> Json:
        value: Json = _adapter(type(self)).dump_python(self)
        return value

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises WireError, in one line that names the first wrong key."""
        from pydantic import ValidationError  # who only names a type need not wait for it

        try:
            made: Self = _adapter(cls).validate_python(value)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = "".join(f"{part}: " for part in wrong["loc"])
            raise WireError(f"not a {cls.__name__}: {where}{wrong['msg']}, got {wrong['input']!r:.80}") from error
        return made


_ADAPTERS: dict[type, Any] = {}


def _adapter(kind: type) -> Any:
    if kind not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


@dataclass(frozen=True)
class Ref(Wire):
    """Where a value lies in the exchange, and what it must be: readers refuse any other size or checksum."""

    key: str
    size_bytes: int
    checksum: str
    """xxh3-128 of the content, in hexadecimal."""


@dataclass(frozen=True)
class Version(Wire):
    """An immutable version of a model's weights: `weights/<model>/v000012.<call>/manifest.json` in the exchange.

    `number` counts optimizer steps (0 is the model the job started from). `call` is the id of the train call that
    made it ("base" for 0): two attempts at the same step can never overwrite each other, the journal's commit says
    which of them counts.
    """

    model: str
    number: int
    call: str = "base"

    @property
    def prefix(self) -> str:
        """Key prefix in the exchange, ending in a slash."""
        return f"weights/{self.model}/v{self.number:06d}.{self.call}/"


@dataclass(frozen=True)
class Call(Wire):
    """One request to a function. A repeated call (same id) returns the same result and never trains twice.

    `inputs` names refs by role, e.g. {"samples": [Ref, Ref], "scores": [Ref, Ref]}.
    `weights` names the versions the operation needs by role, e.g. {"policy": Version}.
    `epoch` is the lease epoch of the orchestrator: a function refuses a call from an epoch older than it has seen.
    `deadline_s` is how long the call may take from its start; beyond it the function ends it with an error.
    """

    id: str
    operation: str
    inputs: Mapping[str, Sequence[Ref]] = field(default_factory=dict)
    weights: Mapping[str, Version] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    deadline_s: float = 3600.0
    trace: Mapping[str, str] = field(default_factory=dict)
    profile: bool = False
    """Under torch.profiler (functions/server/profile.py)."""
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @property
    def prefix(self) -> str:
        """Where this call's results live in the exchange, ending in a slash."""
        return f"calls/{self.id}/"

    @property
    def cut_key(self) -> str:
        """The key whose existence asks the function to stop and hand over its unfinished samples."""
        return f"{self.prefix}cut"


CACHES = "caches/"
"""Of the keys and values that a cut hands over: `caches/<call id>/...` (functions/generate/moves.py). The orchestrator
deletes them when the calls that go on with them have ended."""
ALIVE, ALIVE_S = "alive", 45.0
"""A key that the orchestrator writes again and again on a cluster, and for how long it lasts: while it is there,
processes of the job stay parked on their nodes."""
LEASES = "lease/"
"""Of the keys that name the epochs taken so far, one each: `lease/000003` (orchestrator/run/identity.py)."""


ON_A_NODE = "node-"
CALLS, BATCHES = "calls/", "batches/"
"""Of the keys of what a step's calls make, and of what the orchestrator gives them: `calls/s000012.generate.1f...`,
`batches/s000012/...`."""


def made_in_a_step(key: str) -> bool:
    """Whether what lay there can be made again by repeating its step."""
    return key.startswith((CALLS, BATCHES))


def on_a_node(key: str) -> bool:
    """Whether what lies there is held by one node alone, as its name says (functions/weights/blobs.py)."""
    return key.rpartition("/")[2].startswith(ON_A_NODE)


def hint_key(function: str) -> str:
    """Where a function's Hint lies in the job's exchange."""
    return f"hints/{function}"


@dataclass(frozen=True)
class Load(Wire):
    """What calls of `operation` want loaded: versions by role, as Call.weights names them."""

    operation: str
    weights: Mapping[str, Version]


@dataclass(frozen=True)
class Hint(Wire):
    """What the next calls of a function will probably want: its replicas load it as they start
    (functions/server/preload.py)."""

    epoch: int
    """Of the orchestrator's lease: what one before it has written is not to be followed."""
    loads: Sequence[Load]


@dataclass(frozen=True)
class FeedPart(Wire):
    """A part of what a `train` call is fed while generation goes on (functions/train/feed.py)."""

    samples: Sequence[Ref]
    """What has come since the part before; of any groups."""
    columns: Sequence[Ref]
    groups: Sequence[int]
    """Prompt groups whose samples and columns are all there now: they are trained on with this part."""
    dropped: Sequence[tuple[int, int]] = ()
    """(group, index) of samples of these groups that are left out."""
    identity: str = ""
    """In the last part alone: what the version is named after."""


EventKind = Literal["started", "progress", "samples", "cut", "done", "error"]
EVENT_KINDS: frozenset[str] = frozenset(("started", "progress", "samples", "cut", "done", "error"))


@dataclass(frozen=True)
class Event:
    """One line of a function's answer. `done` or `error` is the last line of every whole stream.

    started   {}                                        the call was accepted; models may still be loading
    progress  {...}                                     at least every 5 s: the heartbeat
    samples   ref of finished samples (SampleBatch) or of their columns (Columns); data: {"group", "index", ...}
    cut       ref of unfinished samples (SampleBatch), after a cut was asked for; data: as of samples, and {"caches"}
    done      ref of the whole result where there is one; data: statistics and results that are small
    error     data: {"kind": "retryable" | "fatal", "message": one line}; of a retryable one also, where it was for
              this, {"away": the store that does not answer} or {"lost": the key under which an input lies no more}
    """

    kind: EventKind
    ref: Ref | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> Json:
        ref = None if self.ref is None else self.ref.to_json()
        return {"kind": self.kind, "ref": ref, "data": dict(self.data)}

    def to_line(self) -> bytes:
        """One JSON line. Non-finite numbers are refused (ValueError): they have no JSON form."""
        return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> Self:
        try:
            value = json.loads(line)
            kind = value["kind"]
            if kind not in EVENT_KINDS:
                raise WireError(f"unknown event kind {kind!r}")
            ref = value.get("ref")
            return cls(kind, None if ref is None else Ref.from_json(ref), dict(value.get("data", {})))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise WireError(f"not an event line: {line[:200]!r}") from error
