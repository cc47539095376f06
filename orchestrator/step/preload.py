"""What the next calls of each function will name, kept in the exchange for replicas to load as they start.

    step begins, version trained --> hints/<function> = {epoch, loads: [{operation, weights}]} --> server/preload.py

A hint promises nothing: it is written where it changes, and never read here. Until a step has trained the next version,
hints name the one that it began with; a replica started ahead for the next step loads that, and the next comes as a
delta.
"""

import asyncio
from collections.abc import Iterable, Mapping

from functions.base.wire import Hint, Load, Version, hint_key
from functions.call.train_params import KlParams
from orchestrator.base.canonical import canonical
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.roles import BY_NAME, CRITICS


class Preload:
    """Keeps the hints of a job's functions in line with its versions."""

    def __init__(self, store: AsyncExchange, functions: Iterable[str], kl: KlParams | None, epoch: int) -> None:
        """`kl`: the job's penalty. Trainers have no hint: a gang's ranks load together."""
        self._store, self._kl, self._epoch = store, kl, epoch
        self._functions = [function for function in functions if BY_NAME[function].kind != "train"]
        self._announced: dict[str, Hint] = {}

    async def announce(self, versions: Mapping[str, Version]) -> None:
        """Calls from here on will name `versions`, by model."""
        hints = {f: Hint(self._epoch, self._loads(f, versions)) for f in self._functions}
        changed = {f: hint for f, hint in hints.items() if self._announced.get(f) != hint}
        await asyncio.gather(*(self._store.put(hint_key(f), canonical(h.to_json())) for f, h in changed.items()))
        self._announced |= changed

    def _loads(self, function: str, versions: Mapping[str, Version]) -> list[Load]:
        """In the order in which they are likely to be wanted."""
        role = BY_NAME[function]
        models = penalty_models(self._kl, versions) if role.model == "reference" else []
        weights = "policy" if role.kind == "generate" else "model"
        return [Load(role.operation, {weights: versions[m]}) for m in models or [role.model] if m in versions]


def penalty_models(kl: KlParams | None, models: Iterable[str]) -> list[str]:
    """Whose log-probabilities a KL penalty wants from the reference function, of a job's `models`; none without one.

    A penalty in the reward of a recipe with a critic wants the actor's own too: the critic cannot compute them.
    """
    if kl is None:
        return []
    return ["reference"] if kl.where == "loss" or set(CRITICS).isdisjoint(models) else ["reference", "actor"]
