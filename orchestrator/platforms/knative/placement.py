"""Where a function's state is: on nodes whose agents' pods carry its label, to which its own pods are drawn.

    template   preferred affinity to pods labelled `home.rlhf-orchestrate/<job>-<function>: <run>`: always the same
    label      on the agents of the nodes where the function had its replicas last: there its processes park, and what
               they have read and written lies on the disk
    gone       with the agent's pod, with the job; of an orchestrator that was killed, when the next job is deployed

It is a preference: where there is no room, or labels could not be written, a replica goes to any node.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, core
from orchestrator.platforms.knative.manifests import HOME, RUN_LABEL, JobContext, home_key

AGENTS = "app.kubernetes.io/part-of=rlhf-orchestrate,app.kubernetes.io/component=node-agent"
LEASES = f"app.kubernetes.io/component=lease,{RUN_LABEL}"


class Homes:
    """Of one job's functions."""

    def __init__(self, api: KubeApi, context: JobContext) -> None:
        self._api, self._context = api, context
        self._known: dict[str, frozenset[str]] = {}
        self._lock = asyncio.Lock()

    def strange(self, function: str, node: str) -> bool:
        """Whether its state is on other nodes only."""
        return node not in self._known.get(function, (node,))

    async def moved(self, function: str, nodes: frozenset[str], *, found: bool) -> None:
        """It has its replicas on `nodes`; `found`: one of them its process, so that the agent is still the same."""
        if found and self._known.get(function) == nodes:
            return
        self._known[function] = nodes
        key, run = home_key(self._context.job, function), self._context.run
        await self._relabel(lambda node, _homes: {key: run if node in self._known[function] else None})

    async def forget(self) -> None:
        """The job is over."""
        await self._relabel(lambda _node, homes: {key: None for key, run in homes.items() if run == self._context.run})

    async def sweep(self) -> None:
        """What runs have left behind that have no lease any more."""
        with suppress(ApiError):
            leases = await self._pods(LEASES)
            live = {self._context.run, *(lease["metadata"]["labels"][RUN_LABEL] for lease in leases)}
            await self._relabel(lambda _node, homes: {key: None for key, run in homes.items() if run not in live})

    async def _relabel(self, wanted: Callable[[str, Mapping[str, str]], Json]) -> None:
        """`wanted`: of an agent's node and labels the ones to set, and to take away (None)."""
        async with self._lock:
            with suppress(ApiError):
                for agent in await self._pods(AGENTS):
                    homes = {key: run for key, run in agent["metadata"]["labels"].items() if key.startswith(HOME)}
                    labels = wanted(agent["spec"].get("nodeName", ""), homes)
                    if any(homes.get(key) != value for key, value in labels.items()):
                        path = core(self._context.config.namespace, "pods", agent["metadata"]["name"])
                        await asyncio.to_thread(self._api.merge, path, {"metadata": {"labels": labels}})

    async def _pods(self, selector: str) -> list[Json]:
        path = core(self._context.config.namespace, "pods")
        found: list[Json] = (await asyncio.to_thread(self._api.get, path, labelSelector=selector))["items"]
        return found
