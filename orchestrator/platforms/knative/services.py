"""A job's Knative Services, one by one: whose it is, whether it takes calls, its end."""

import asyncio

from orchestrator.base.errors import Away
from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi
from orchestrator.platforms.knative.kn import hint

POLL_S = 0.1


class Services:
    """`ready_s`: how long Knative may take to make one ready."""

    def __init__(self, api: KubeApi, context: manifests.JobContext, ready_s: float) -> None:
        self._api, self._context, self._ready_s = api, context, ready_s

    async def own(self, path: str) -> Json | None:
        """The Service, None where there is none. Raises PlatformError where it is not this run's."""
        try:
            found = await asyncio.to_thread(self._api.get, path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        manifests.check_own(self._context, "Service", found)
        return found

    async def ready(self, name: str, path: str) -> Json:
        """The status of a Service once its newest Revision takes calls. Raises Away while Knative has not said so."""
        said = "no status yet"
        try:
            async with asyncio.timeout(self._ready_s):
                while True:
                    found = await asyncio.to_thread(self._api.get, path)
                    status: Json = found.get("status", {})
                    conditions = {c["type"]: c for c in status.get("conditions", ())}
                    ready = conditions.get("Ready", {})
                    current = status.get("observedGeneration") == found["metadata"]["generation"]
                    if current and ready.get("status") == "True":
                        return status
                    said = f"{ready.get('reason', '')} {ready.get('message', '')}".strip() or said
                    if current and ready.get("status") == "False" and ready.get("reason") == "RevisionFailed":
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"Service {name} does not become ready within {self._ready_s:g} s: {said}{hint(said)}"
            raise Away("Knative's controllers", message) from None
        raise PlatformError(f"Service {name} does not become ready: {said}{hint(said)}")

    async def delete(self, path: str) -> None:
        """Unless it has become another's: what was deleted and made anew since we looked has another uid."""
        try:
            found = await self.own(path)
            if found is not None:
                await asyncio.to_thread(self._api.delete, path, uid=found["metadata"]["uid"])
        except PlatformError:
            return
        except ApiError as error:
            if error.status != 409:
                raise
