"""What the next calls of each function will name, kept in the exchange for replicas to load as they start.

    step begins, version trained --> hints/<function> = {epoch, loads: [{operation, weights}]} --> server/preload.py

A hint promises nothing: it is written where it changes, and never read here. Until a step has trained the next version,
hints name the one that it began with; a replica started ahead for the next step loads that, and the next comes as a
delta.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from functions.base.wire import Hint, Load, Version, hint_key
from orchestrator.base.canonical import canonical
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.roles import CRITICS
from orchestrator.planner.base import TAIL


class Preload:
    """Keeps the hints of a job's functions in line with its versions."""

    def __init__(self, store: AsyncExchange, functions: Iterable[str], settings: Mapping[str, Any], epoch: int) -> None:
        """`settings`: what every train call gets (orchestrator/recipes/settings.py)."""
        self._store, self._functions, self._settings, self._epoch = store, list(functions), settings, epoch
        self._announced: dict[str, Hint] = {}

    async def announce(self, versions: Mapping[str, Version]) -> None:
        """Calls from here on will name `versions`, by model."""
        hints = {f: Hint(self._epoch, self._loads(f, versions)) for f in self._functions if not f.startswith("train")}
        changed = {f: hint for f, hint in hints.items() if self._announced.get(f) != hint}
        await asyncio.gather(*(self._store.put(hint_key(f), canonical(h.to_json())) for f, h in changed.items()))
        self._announced |= changed

    def _loads(self, function: str, versions: Mapping[str, Version]) -> list[Load]:
        """In the order in which they are likely to be wanted. Trainers have no hint: a gang's ranks load together."""
        if function in ("generate", TAIL):
            return [Load("generate", {"policy": versions["actor"]})]
        if function in CRITICS:
            return [Load("values", {"model": versions[function]})]
        if function == "reference":
            models = penalty_models(self._settings, versions) or ["reference"]
            return [Load("logprobs", {"model": versions[model]}) for model in models]
        if function == "reward" and "reward" in versions:
            return [Load("score", {"model": versions["reward"]})]
        return []


def penalty_models(settings: Mapping[str, Any], models: Iterable[str]) -> list[str]:
    """Whose log-probabilities a KL penalty wants from the reference function, of a job's `models`; none without one.

    A penalty in the reward of a recipe with a critic wants the actor's own too: the critic cannot compute them.
    """
    kl = settings.get("kl")
    if kl is None:
        return []
    return ["reference", "actor"] if kl["where"] == "reward" and "critic" in set(models) else ["reference"]
