"""deploy/callers.yaml: who may wake functions, on a network that enforces NetworkPolicies."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator

import pytest

from functions.base.wire import Call
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.api import core
from orchestrator.platforms.knative.manifests import JobContext, security
from tests.cluster.conftest import ROOT, Release, until
from tests.cluster.test_platform import awaited, context, knative, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
STRANGERS = "rlhf-strangers"
CALLERS = str(ROOT / "deploy" / "callers.yaml")
INSIDE, ACTIVATOR, AUTOSCALER = WAYS = (
    "kourier-internal.kourier-system:80", "activator-service.knative-serving:80", "autoscaler.knative-serving:8080",
)  # fmt: skip
ASKS = """
import http.client, json, sys
ways, host, namespace, revision = json.loads(sys.argv[1])
headers = {"Host": host, "Knative-Serving-Namespace": namespace, "Knative-Serving-Revision": revision}
answers = {}
for name in ways:
    connection = http.client.HTTPConnection(name.replace(":", ".svc.cluster.local:"), timeout=5)
    try:
        connection.connect()
        connection.sock.settimeout(120)
        connection.request("POST", "/v1/call", b"{}", headers)
        answers[name] = connection.getresponse().status
    except OSError:  # dropped, or rejected
        answers[name] = None
print(json.dumps(answers))
"""


def kubectl(*words: str) -> str:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.fixture
def strangers(release: Release) -> Iterator[None]:
    """A namespace of somebody else's."""
    kubectl("label", "namespace", release.namespace, "rlhf-orchestrate/calls=yes", "--overwrite")
    kubectl("create", "namespace", STRANGERS)
    try:
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-f", CALLERS)
        kubectl("delete", "namespace", STRANGERS)


def asked(release: Release, here: JobContext) -> dict[str, int | None]:
    """What a stranger's pod is answered that calls the job's function `reward` without a token; None: not reached."""
    revision = f"{here.job}-reward"
    host = f"{revision}.{release.namespace}.svc.cluster.local"
    told = json.dumps([WAYS, host, release.namespace, f"{revision}-00001"])
    config = release.config("http://unused")
    container = {
        "name": "c", "image": config.image, "command": ["python3", "-c", ASKS, told],
        "securityContext": security(KnativeConfig(image="x")),
    }  # fmt: skip
    pods = core(STRANGERS, "pods")
    spec = {"containers": [container], "restartPolicy": "Never", "automountServiceAccountToken": False}
    name = release.api.create(
        pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "stranger-"}, "spec": spec}
    )["metadata"]["name"]
    until(lambda: release.api.get(f"{pods}/{name}")["status"]["phase"] in ("Succeeded", "Failed"), 200)
    answers: dict[str, int | None] = json.loads(kubectl("logs", "-n", STRANGERS, name))
    return answers


def test_with_callers_a_stranger_wakes_no_function_and_jobs_run(
    release: Release, ingress: str, strangers: None
) -> None:
    here = context(release, ingress)

    def answers() -> dict[str, int | None]:
        return asked(release, here)

    async def test() -> None:
        async with knative(here) as platform:
            before = await asyncio.to_thread(answers)
            assert (before[INSIDE], before[ACTIVATOR]) == (401, 401)
            assert before[AUTOSCALER] is not None, "whoever is heard there may claim requests that wake a function"
            assert len(platform.usage()) > 0, "refused, and woken all the same"
            await asyncio.to_thread(kubectl, "apply", "-f", CALLERS)
            for _ in range(5):
                if (await asyncio.to_thread(answers))[INSIDE] is None:
                    break
            await awaited(lambda: release.pods(here.job) == [])
            paid = len(platform.usage())
            assert await asyncio.to_thread(answers) == dict.fromkeys(WAYS), "does this network enforce policies?"
            assert len(platform.usage()) == paid
            await platform.scale("reward", 1)
            events = [event.kind async for event in platform.call("reward", Call("a", "nothing"))]
            assert (events[0], events[-1]) == ("started", "error"), "a function that was called as ever"

    run(test())
    job = release.ended(release.post("called"))
    assert job["state"] == "succeeded", job["message"]
