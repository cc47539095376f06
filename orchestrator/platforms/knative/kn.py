"""Services are created with `kn`; where it is not on the PATH, the same manifests go through the API."""

import asyncio
import json
import shutil
import tempfile

from orchestrator.base.errors import Away
from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, serving
from orchestrator.platforms.knative.manifests import MANAGER

APPLY_S = 60.0
AWAY = (
    "connection refused", "connection reset", "context deadline exceeded", "EOF", "etcdserver",
    "failed calling webhook", "i/o timeout", "no endpoints available", "no route to host", "no such host",
    "TLS handshake timeout", "too many requests", "unable to handle the request",
)  # fmt: skip
"""Of what `kn` says when the API server, its store, DNS or Knative's webhook does not answer."""
CLUSTER = "the cluster's API"
"""What is waited for, for people."""


def find_kn() -> str | None:
    return shutil.which("kn")


async def apply_service(api: KubeApi, manifest: Json, *, kn: str | None, context: str | None) -> None:
    """Creates or updates the Service; does not wait for it. Raises PlatformError with the cluster's words, Away."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    if kn is None:
        try:
            await asyncio.to_thread(api.apply, serving(namespace, "services", name), manifest, MANAGER)
        except ApiError as error:
            if error.away:
                raise Away(CLUSTER, f"Service {name} could not be applied: {error.message}") from error
            raise PlatformError(f"Service {name} was refused: {error.message}{hint(error.message)}") from error
        return
    with tempfile.NamedTemporaryFile("w", prefix="rlhf-", suffix=".json") as file:
        json.dump(manifest, file)
        file.flush()
        arguments = [kn, "service", "apply", "-f", file.name, "--namespace", namespace, "--no-wait"]
        process = await asyncio.create_subprocess_exec(
            *arguments, *(["--context", context] if context else []),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), APPLY_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise Away(CLUSTER, f"kn service apply {name} has not ended within {APPLY_S:g} s") from None
    if process.returncode:
        said = (output.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        if any(word in said for word in AWAY):
            raise Away(CLUSTER, f"kn service apply {name}: {said}")
        raise PlatformError(f"kn service apply {name}: {said}{hint(said)}")


def hint(message: str) -> str:
    """Most refusals are settings that a cluster's owner has to make; the doctor knows the patch."""
    known = ("must not set the field", "initial-scale", "timeoutSeconds", "expected 0 <=", "feature")
    asks = any(word in message for word in known)
    return " -> run `rlhf-orchestrate doctor --platform knative`" if asks else ""
