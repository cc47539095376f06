"""Kueue: replicas wait for the quota of a LocalQueue.

Their pods carry its name (manifests.QUEUE_LABEL); Kueue's webhook gates each as it is made, and its controller admits
each by itself (keps/976-plain-pods), whoever makes it. Nobody but the scheduler sees a difference.
"""

from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.api import ApiError, KubeApi


def check_queue(api: KubeApi, config: KnativeConfig) -> None:
    """Raises PlatformError where pods would be gated for ever, or not at all: no such LocalQueue, or no Kueue."""
    if config.queue is None:
        return
    try:
        version = api.get("/apis/kueue.x-k8s.io")["preferredVersion"]["groupVersion"]
        api.get(f"/apis/{version}/namespaces/{config.namespace}/localqueues/{config.queue}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise PlatformError(
            f"platform.knative.queue: {config.queue!r} is no LocalQueue in namespace {config.namespace}: `kubectl get "
            f"localqueues -n {config.namespace}` lists those that there are, if the cluster has Kueue"
        ) from error
