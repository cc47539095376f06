"""Why a pod does not run, in one line with what to do about it. Pure: from a pod as the API gives it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from functions.base.logs import LogLine
from orchestrator.platforms.knative.manifests import JOB_LABEL, QUEUE_LABEL, token_secret

Json = dict[str, Any]

PULL = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True)
class Reason:
    kind: str
    """Kubernetes' word for it."""
    line: str
    patient: bool
    """It may pass by itself: a node may come, the next start may do better."""
    capacity: bool = False
    """There is no room for it yet."""


def why_not(pod: Json) -> Reason | None:
    """What keeps a pod from running, or ended its container last; None when nothing does."""
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            if condition.get("reason") == "Unschedulable":
                return Reason(
                    "Unschedulable",
                    f"{name} has no node: {condition.get('message', '')} -> free or add nodes, or ask for less in"
                    " [functions.*] gpus, memory_gb, threads and [platform.knative] node_selector",
                    True,
                    True,
                )
            if condition.get("reason") == "SchedulingGated":
                queue = pod["metadata"].get("labels", {}).get(QUEUE_LABEL, "of the cluster's choice")
                return Reason(
                    "SchedulingGated",
                    f"{name} waits for quota of LocalQueue {queue} -> `kubectl describe workloads` tells what it lacks",
                    True,
                    True,
                )
    job = pod["metadata"].get("labels", {}).get(JOB_LABEL, "")
    for container in status.get("containerStatuses", ()):
        for found in _container(name, job, container):
            return found
    return None


def _container(name: str, job: str, status: Json) -> Iterator[Reason]:
    waiting = status.get("state", {}).get("waiting", {})
    what, message = waiting.get("reason", ""), waiting.get("message", "")
    ended = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated") or {}
    if what in PULL:
        yield Reason(
            what,
            f"{name}: image {status.get('image', '')} cannot be had: {message} -> check platform.knative.image and"
            " image_pull_secret",
            False,
        )
    elif what in CONFIG:
        lost = f'"{token_secret(job)}" not found' in message  # it went with the lease, and comes with the next one
        yield Reason(what, f"{name}: {message} -> check platform.knative env_secrets, volumes and command", lost)
    elif ended.get("reason") == "OOMKilled":
        yield Reason("OOMKilled", f"{name} ran out of memory and was killed -> raise memory_gb of its function", True)
    elif what == "CrashLoopBackOff":
        said = LogLine.parse((ended.get("message", "").strip().splitlines() or ["no output"])[-1]).message
        yield Reason(what, f"{name} ends at its start with exit code {ended.get('exitCode')}: {said}", False)
