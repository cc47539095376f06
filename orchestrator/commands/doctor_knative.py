"""`doctor --platform knative`: what a job needs of a cluster, and the patch that would set it."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping

from orchestrator.commands.check import Check
from orchestrator.job.config import JobConfig
from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, core
from orchestrator.platforms.knative.kn import find_kn

KUBERNETES = (1, 30)
"""Scheduling gates are stable (the lease), and so is everything else that is used."""
KNATIVE = (1, 15)
SYSTEM = "knative-serving"
RIGHTS = (
    ("serving.knative.dev", "services", ("get", "create", "patch", "delete")),
    ("serving.knative.dev", "revisions", ("get", "patch")),
    ("autoscaling.internal.knative.dev", "podautoscalers", ("patch",)),
    ("apps", "deployments/scale", ("patch",)),
    ("batch", "jobs", ("create", "patch", "delete")),
    ("", "pods", ("get", "list", "watch", "patch", "delete")),
    ("", "secrets", ("create", "patch")),
)
"""All that the platform asks for, in the job's namespace,"""
QUEUE = ("kueue.x-k8s.io", "localqueues", ("get",))
"""and where its functions have a queue."""


def check(job: JobConfig | None, config: KnativeConfig) -> Iterator[Check]:
    """In the order in which one would mend them; ends early where nothing more can be seen."""
    try:
        api = KubeApi(config.context)
        version = api.get("/version")
    except (PlatformError, ApiError) as error:
        yield Check("cluster", False, str(error), "set KUBECONFIG to a cluster that you can reach")
        return
    found = (int(version["major"]), int(re.sub(r"\D", "", version["minor"])))
    oldest = ".".join(map(str, KUBERNETES))
    yield Check("kubernetes", found >= KUBERNETES, f"{version['gitVersion']} at {api.host}", f"needs {oldest} or newer")
    knative = _knative(api)
    yield knative
    if not knative.ok:
        return
    yield _ingress(job, config)
    kn = find_kn()
    yield Check("kn", True, kn or "not on the PATH: Services go through the API")
    yield from _settings(api, job, config)
    yield from _rights(api, config)
    yield from _objects(api, config)
    yield _gpus(api, job, config)


def _ingress(job: JobConfig | None, config: KnativeConfig) -> Check:
    """A job that this machine runs calls functions from here; one that is submitted does so from its runner."""
    if config.ingress is not None:
        return Check("ingress", True, config.ingress)
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # Kubernetes sets it in every pod
        return Check("ingress", True, "calls go to functions by their cluster-local names")
    found = "this machine is outside of the cluster, where functions' cluster-local names mean nothing"
    remedy = "set platform.knative.ingress to the URL of Kourier's internal listener, or `submit` the job"
    return Check("ingress", job is None, found, remedy)


def _knative(api: KubeApi) -> Check:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/services.serving.knative.dev"
    try:
        labels = api.get(path)["metadata"].get("labels", {})
    except ApiError as error:
        return Check("knative", False, error.message, "install Knative Serving 1.15 or newer")
    text = labels.get("app.kubernetes.io/version", "unknown")
    numbers = re.match(r"v?(\d+)\.(\d+)", text)
    if numbers is None:
        return Check("knative", True, f"of unknown version ({text})")
    return Check(
        "knative", (int(numbers[1]), int(numbers[2])) >= KNATIVE, text, "install Knative Serving 1.15 or newer"
    )


def needed_features(config: KnativeConfig) -> list[str]:
    """Keys of config-features that the job's Services need: those that are off where Knative is fresh."""
    wants: Mapping[str, bool] = {
        "nodeselector": bool(config.node_selector),
        "tolerations": bool(config.tolerations),
        "runtimeclassname": config.runtime_class is not None,
        "persistent-volume-claim": any(v.claim is not None for v in config.volumes),
        "persistent-volume-write": any(v.claim is not None and not v.read_only for v in config.volumes),
        "affinity": config.node_agent is not None,
        "volumes-hostpath": any(v.host_path is not None for v in config.volumes) or config.node_agent is not None,
    }
    return [f"kubernetes.podspec-{flag}" for flag, wanted in wants.items() if wanted]


def _settings(api: KubeApi, job: JobConfig | None, config: KnativeConfig) -> Iterator[Check]:
    maps: dict[str, dict[str, str]] = {}
    queue = () if config.queue is None else ("config-deployment",)
    for name in ("config-autoscaler", "config-defaults", "config-features", *queue):
        try:
            maps[name] = api.get(core(SYSTEM, "configmaps", name)).get("data") or {}
        except ApiError as error:
            yield Check(name, False, f"cannot be read: {error.message}", "ask its owner to run this command")
            return
    autoscaler, defaults, features, *deployment = maps.values()
    zero = "allow-zero-initial-scale"
    yield Check(
        zero, autoscaler.get(zero) == "true", autoscaler.get(zero, "false"), patch("config-autoscaler", {zero: "true"})
    )
    to_zero = "enable-scale-to-zero"
    yield Check(
        to_zero,
        autoscaler.get(to_zero, "true") == "true",
        autoscaler.get(to_zero, "true"),
        patch("config-autoscaler", {to_zero: "true"}),
    )
    limit = "max-revision-timeout-seconds"
    call_s = 3600.0 if job is None else job.limits.call_s
    needed_s, has_s = math.ceil(call_s) + manifests.WAIT_S, int(defaults.get(limit, "600"))
    yield Check(
        limit,
        has_s >= needed_s,
        f"{has_s}, limits.call_s = {call_s:g} needs {needed_s}",
        patch("config-defaults", {limit: str(needed_s)}),
    )
    for key in needed_features(config):
        value = features.get(key, "disabled").lower()
        yield Check(key, value in ("enabled", "allowed"), value, patch("config-features", {key: "enabled"}))
    always = "pod-is-always-schedulable"  # else a Revision with a gated pod has failed, and min-scale counts no more
    for data in deployment:
        value = data.get(always, "false")
        yield Check(always, value == "true", value, patch("config-deployment", {always: "true"}))


def patch(name: str, data: Mapping[str, str]) -> str:
    """The command that sets keys of one of Knative's config maps."""
    return f"kubectl patch configmap {name} -n {SYSTEM} --type merge -p '{json.dumps({'data': dict(data)})}'"


def _rights(api: KubeApi, config: KnativeConfig) -> Iterator[Check]:
    namespace = config.namespace
    for group, resource, verbs in RIGHTS if config.queue is None else (*RIGHTS, QUEUE):
        denied = [verb for verb in verbs if not _may(api, namespace, group, resource, verb)]
        name = f"{resource}.{group}" if group else resource
        yield Check(
            f"right to {name}",
            not denied,
            f"no {', '.join(denied)}" if denied else ", ".join(verbs),
            f"kubectl create role rlhf-orchestrate-{resource} -n {namespace} --verb={','.join(verbs)}"
            f" --resource={name}, and bind it",
        )


def _may(api: KubeApi, namespace: str, group: str, resource: str, verb: str) -> bool:
    whole, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "group": group, "resource": whole, "subresource": part, "verb": verb}
    review: Json = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def _objects(api: KubeApi, config: KnativeConfig) -> Iterator[Check]:
    """What the job's settings name must be there."""
    namespace = config.namespace
    named = {
        f"namespace {namespace}": f"/api/v1/namespaces/{namespace}",
        **{f"secret {name}": core(namespace, "secrets", name) for name in config.env_secrets},
        **{
            f"claim {v.claim}": core(namespace, "persistentvolumeclaims", v.claim)
            for v in config.volumes
            if v.claim is not None
        },
    }
    if config.service_account is not None:
        named[f"service account {config.service_account}"] = core(namespace, "serviceaccounts", config.service_account)
    if config.runtime_class is not None:
        named[f"runtime class {config.runtime_class}"] = f"/apis/node.k8s.io/v1/runtimeclasses/{config.runtime_class}"
    for name, path in named.items():
        try:
            api.get(path)
            yield Check(name, True, "is there")
        except ApiError as error:
            yield Check(name, False, error.message, "create it")
    try:
        classes = [item["metadata"]["name"] for item in api.get("/apis/storage.k8s.io/v1/storageclasses")["items"]]
        yield Check("storage classes", True, ", ".join(classes) or "none: volumes have to be bound by hand")
    except ApiError as error:
        yield Check("storage classes", True, f"cannot be listed: {error.message}")


def _gpus(api: KubeApi, job: JobConfig | None, config: KnativeConfig) -> Check:
    try:
        nodes = api.get("/api/v1/nodes")["items"]
    except ApiError as error:
        return Check("GPUs", True, f"nodes cannot be listed: {error.message}")
    amounts = [int(node["status"].get("allocatable", {}).get(config.gpu_resource, "0")) for node in nodes]
    functions = {} if job is None else job.functions
    most = max((function.gpus for function in functions.values()), default=0)
    return Check(
        "GPUs",
        max(amounts, default=0) >= most,
        f"{sum(amounts)} {config.gpu_resource} on {len(nodes)} nodes, one replica needs up to {most}",
        f"add a node with {most} {config.gpu_resource}, or lower [functions.*] gpus",
    )
