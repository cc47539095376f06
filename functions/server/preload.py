"""What a replica loads as it starts, before its first call comes: the versions that its function's hint names.

    hints/<function>      {"epoch": 3, "loads": [{"operation": "generate", "weights": {"policy": {version}}}]}

    process starts --> server listens, function built --> hint read --> loads, one after the other --> calls
                                                          (in the thread of the calls: one that comes waits its turn)

Nothing depends on a hint. Where there is none, it is no Hint, is of a lease before the newest, or what it names cannot
be loaded (a version that is gone), the replica says so in one line and waits for calls, which say what they want and
report what fails. A call for another version loads that, as a delta to what is held where there is one. A hint is not
even looked for when a call is there already, and its next part is left when one has come.
"""

import json
import logging
import time
from collections.abc import Callable

from functions.base.wire import LEASES, Hint, Load, hint_key
from functions.call import userfile
from functions.call.function import Context, Function, LoadsAhead, ReplicaBroken
from functions.call.meter import LoadTime, Meter
from functions.exchange.base import Exchange, NotFound
from functions.server.attempt import Attempt, OwnFolder

log = logging.getLogger(__name__)


class Ahead:
    """The loading of one replica before its first call."""

    def __init__(self) -> None:
        self.meter = Meter("load ahead")
        self.broken = False
        """Loading failed half-way, and this process must answer no call (ReplicaBroken)."""
        self._begun_s = self._loaded_s = self._ended_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of loading that succeeded."""
        return self._loaded_s - self._begun_s

    def load(
        self, function: Function, exchange: Callable[[], Exchange], name: str, scratch: str, idle: Callable[[], bool],
        place: tuple[str, str],
    ) -> None:  # fmt: skip
        """Loads what the hint of function `name` names, as long as `idle`: no call has come. Raises nothing."""
        if not isinstance(function, LoadsAhead):
            return
        try:
            opened = exchange()
            loads = read_hint(opened, name).loads
        except Exception as error:
            log.info("nothing to load ahead: %s", _line(error))
            return
        self.meter = Meter("load ahead")
        self._begun_s = self._loaded_s = time.monotonic()
        own = OwnFolder(opened, "", "", self.meter)
        context = Context(own, scratch, meter=self.meter, opened=place)
        for load in loads:
            if not idle():
                break
            try:
                function.load_ahead(load, context)
            except Exception as error:
                self.broken = isinstance(error, ReplicaBroken)
                log.warning("%s not loaded ahead: %s", _named(load), _line(error))
                break
            self._loaded_s = time.monotonic()
            log.info("%s loaded ahead, %.3f s after the hint was read", _named(load), self.seconds)
        self._ended_s = time.monotonic()

    def tell(self, first: Attempt, accepted_s: float) -> None:
        """What the replica's first call, accepted at `accepted_s` (time.monotonic), has waited for and has found."""
        waited_s = self._ended_s - max(self._begun_s, accepted_s)
        before_s = min(self._loaded_s, accepted_s) - self._begun_s
        first.loading = LoadTime(max(0.0, waited_s), max(0.0, before_s))
        first.meter.carry(self.meter)


def read_hint(exchange: Exchange, function: str) -> Hint:
    """The hint of `function`. Raises LookupError or ValueError, one line, where there is none to follow."""
    key = hint_key(function)
    try:
        data = exchange.get(key)
    except NotFound:
        raise LookupError(f"there is no {key}") from None
    try:
        hint = Hint.from_json(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {error}") from error
    newest = max((int(lease.removeprefix(LEASES)) for lease in exchange.durable.list(LEASES)), default=0)
    if hint.epoch < newest:
        raise LookupError(f"{key} is stale: of epoch {hint.epoch}, the lease has epoch {newest}")
    return hint


def _named(load: Load) -> str:
    weights = (f"{role} {version.model} v{version.number:06d}" for role, version in load.weights.items())
    return f"{load.operation}: {', '.join(weights)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) if str(error) else userfile.describe(error)
