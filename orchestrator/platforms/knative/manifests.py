"""What is asked of the cluster: pure functions from a spec to Kubernetes objects (JSON values).

    Lease job <--owns-- Knative Service, one a function     deleted with it, whoever deletes it
              <--owns-- Secret with the job's bearer token, and a gate for each function's pods

A Service is created at zero (`initial-scale: 0`), and its scale is never in its template: a change of the template is a
new Revision, and that replaces every pod.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.base.errors import ConfigError
from orchestrator.platforms.base import FunctionSpec, PlatformError
from orchestrator.platforms.config import KnativeConfig, VolumeConfig

Json = dict[str, Any]

JOB_LABEL = "rlhf-orchestrate/job"
RUN_LABEL = "rlhf-orchestrate/run"
"""The run's id (run.json): what has another, or none, is not ours to change or delete."""
FUNCTION_LABEL = "rlhf-orchestrate/function"
MANAGER = "rlhf-orchestrate"
AUTOSCALING = "autoscaling.knative.dev"
MIN_SCALE = f"{AUTOSCALING}/min-scale"
TEMPLATE_HASH = "pod-template-hash"
"""The label by which a ReplicaSet knows its pods."""
FULL_DUPLEX = "features.knative.dev/http-full-duplex"
"""Without it Knative's proxies cut a response that begins before they have seen the end of the request (1 in 20 of
short calls on a busy cluster): Go's server closes the request's body when the response begins."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LONGEST_NAME = 63
SHARED, SHARED_PATH = "shared-memory", "/dev/shm"
MEMORY_GB = 2.0
"""Of a replica, where the job does not say."""
WINDOW_S = 6
"""The shortest that Knative accepts."""
RETENTION_S = 10
"""How long Knative leaves the pods of a function at zero alone: the platform has them gone sooner, without a drain."""
DRAIN_S = 30
"""How long a terminating pod's queue-proxy keeps SIGTERM from the function (knative/serving, pkg/queue/sharedmain)."""
WAIT_S = 60
"""Of a request's time limit: what it may wait for a replica, over the time that its call may take."""
TOKEN_KEY = "token"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
AGENT = "node-agent"
HOME = "home.rlhf-orchestrate/"
"""Of the labels of node agents that have a function's state (placement.py)."""
GATE, GATE_PATH = "gate", "/run/rlhf-orchestrate"
STORES, STORES_PATH, OWN = "RLHF_STORES", "/run/rlhf-stores", "own-stores"
"""In a runner's environment `SECRET=OWN`: its job's own Secret stands in for the stores' (orchestrator/api/stores.py);
where its files are; the volume."""


@dataclass(frozen=True)
class JobContext:
    """What all functions of one job share."""

    job: str
    exchange: str
    root: str
    """The job's root in the exchange."""
    call_s: float
    config: KnativeConfig
    run: str = ""
    """The run's id."""
    capacity_s: float | None = None
    """How long a replica may wait for a node; None: as for any reason that may pass (Timing.pending_s)."""
    stores: str = ""
    """What STORES says."""

    @property
    def env_secrets(self) -> list[str]:
        shared, _, own = self.stores.partition("=")
        return [own if own and name == shared else name for name in self.config.env_secrets]

    @property
    def has_own(self) -> bool:
        return stores_secret(self.job) in self.env_secrets

    @property
    def secret(self) -> str:
        return token_secret(self.job)


def token_secret(job: str) -> str:
    return f"{job}-token"


def stores_secret(job: str) -> str:
    return f"{job}-stores"


def labels(context: JobContext, component: str) -> Json:
    job = context.job
    return {
        "app.kubernetes.io/name": MANAGER,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGER,
        JOB_LABEL: job,
        RUN_LABEL: context.run,
    }


def check_own(context: JobContext, kind: str, found: Json) -> None:
    """Raises PlatformError, one line, for an object of the cluster that is not this run's."""
    meta = found["metadata"]
    tags: Json = meta.get("labels") or {}
    ours = labels(context, "")
    if all(tags.get(key) == ours[key] for key in ("app.kubernetes.io/managed-by", JOB_LABEL, RUN_LABEL)):
        return
    whose = f"run {tags[RUN_LABEL]}" if tags.get(RUN_LABEL) else f"{tags.get('app.kubernetes.io/managed-by', 'others')}"
    name, namespace = meta["name"], context.config.namespace
    raise PlatformError(
        f"{kind} {name} in namespace {namespace} belongs to {whose}, not to this run ({context.run}): it stays as it "
        f"is; start the job as name=OTHER, or delete what is there"
    )


def check_names(job: str, functions: Sequence[str]) -> None:
    """Raises ConfigError where names made of the job's would be too long for Kubernetes."""
    function = max(functions, key=len)
    room = LONGEST_NAME - len(f"-{function}-00001-deployment")
    if len(job) > room:
        raise ConfigError(
            f"name: {job!r} has {len(job)} characters; on Knative a job with function {function!r} has room for {room}"
        )


def gate_key(function: str) -> str:
    """The key of the job's Secret that pods of the function mount: without it a pod does not start, nor drain."""
    return f"{GATE}-{function}"


def gates(functions: Iterable[str], *, up: bool) -> Json:
    """The patch of the job's Secret that lets pods of these functions start, or not; those that run do not notice."""
    return {"data": {gate_key(function): "" if up else None for function in functions}}


def service_name(job: str, function: str) -> str:
    return f"{job}-{function}"


def home_key(job: str, function: str) -> str:
    """Such a label; its value is the run's id, so that no other job attracts pods of this one."""
    return f"{HOME}{service_name(job, function)}"


def service(context: JobContext, spec: FunctionSpec) -> Json:
    """The Knative Service of one function, cluster-local, at zero."""
    tags = labels(context, spec.name) | {FUNCTION_LABEL: spec.name}
    queued = {} if context.config.queue is None else {QUEUE_LABEL: context.config.queue}
    timeout_s = math.ceil(context.call_s) + WAIT_S
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(context.job, spec.name),
            "namespace": context.config.namespace,
            "labels": tags | {"networking.knative.dev/visibility": "cluster-local"},
        },
        "spec": {
            "template": {
                "metadata": {"labels": tags | queued, "annotations": scaling(spec, context.config)},
                "spec": _pod(context, spec, timeout_s),
            }
        },
    }


def scaling(spec: FunctionSpec, config: KnativeConfig) -> Json:
    """The template's annotations.

    The metric is requests per second, not concurrency: it counts a request when it arrives, so a call that has been
    open for longer than the window does not hold the autoscaler's own wish up, and replicas follow min-scale alone,
    down as fast as up (docs/decisions/0005-knative-scale.md).
    """
    return {
        f"{AUTOSCALING}/class": f"kpa.{AUTOSCALING}",
        f"{AUTOSCALING}/metric": "rps",
        f"{AUTOSCALING}/target": "1000",
        f"{AUTOSCALING}/target-burst-capacity": "-1",
        f"{AUTOSCALING}/initial-scale": "0",
        f"{AUTOSCALING}/max-scale": str(spec.max_replicas),
        f"{AUTOSCALING}/window": f"{WINDOW_S}s",
        f"{AUTOSCALING}/scale-to-zero-pod-retention-period": f"{RETENTION_S}s",
        FULL_DUPLEX: "Enabled",
        "serving.knative.dev/progress-deadline": f"{math.ceil(config.start_s)}s",
    }


def _pod(context: JobContext, spec: FunctionSpec, timeout_s: int) -> Json:
    config = context.config
    pod: Json = {
        "containerConcurrency": 1,
        "timeoutSeconds": timeout_s,
        "responseStartTimeoutSeconds": timeout_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [_container(context, spec, timeout_s)],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {
                "name": GATE,
                "secret": {
                    "secretName": context.secret,
                    "items": [{"key": gate_key(spec.name), "path": GATE}],
                },
            },
            *([{"name": OWN, "secret": {"secretName": stores_secret(context.job)}}] if context.has_own else []),
            *([{"name": SHARED, "emptyDir": {"medium": "Memory"}}] if _shares(config, spec) else []),
            *(_source(volume) for volume in config.volumes),
            *([] if config.node_agent is None else [_node_agent(config.node_agent)]),
        ],
    }
    if config.node_agent is not None:
        pod["affinity"] = _near_its_state(context, spec.name)
    if config.service_account is not None:
        pod["serviceAccountName"] = config.service_account
    if config.image_pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": config.image_pull_secret}]
    if config.runtime_class is not None and spec.gpus:
        pod["runtimeClassName"] = config.runtime_class
    if config.node_selector and (spec.gpus or not config.gpu_nodes_only):
        pod["nodeSelector"] = dict(config.node_selector)
    if config.tolerations and spec.gpus:
        pod["tolerations"] = [toleration.model_dump(exclude_none=True) for toleration in config.tolerations]
    return pod


def _container(context: JobContext, spec: FunctionSpec, timeout_s: int) -> Json:
    config = context.config
    memory = f"{math.ceil((spec.memory_gb or MEMORY_GB) * 1000)}M"
    requests = {"cpu": _quantity(spec.cpus * config.cpu_share), "memory": memory}
    limits = {"memory": requests["memory"]}
    if spec.gpus:
        limits[config.gpu_resource] = str(spec.gpus)
    env = {
        "RLHF_FUNCTION": spec.name,
        "RLHF_KIND": spec.kind,
        "RLHF_OPTIONS": json.dumps(dict(spec.options), sort_keys=True),
        "RLHF_EXCHANGE": context.exchange,
        "RLHF_JOB": context.root,
        "RLHF_THREADS": str(max(1, int(spec.cpus))),
        "RLHF_GRACE_S": str(timeout_s - DRAIN_S),
        "RLHF_SCRATCH": "/scratch",
        "TMPDIR": "/scratch",
        "HOME": "/scratch",
    } | dict(config.env)
    if config.node_agent is not None:
        env["RLHF_AGENT"] = f"{config.node_agent}/agent.sock"
    container: Json = {
        "name": "function",
        "image": next((image for kind, image in config.images.items() if kind == spec.kind), config.image),
        "env": [
            *({"name": name, "value": value} for name, value in sorted(env.items())),
            {"name": "RLHF_TOKEN", "valueFrom": {"secretKeyRef": {"name": context.secret, "key": TOKEN_KEY}}},
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in context.env_secrets],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/healthz/ready"}, "periodSeconds": 0},
        "resources": {"requests": requests, "limits": limits},
        "securityContext": security(config),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": GATE, "mountPath": GATE_PATH, "readOnly": True},
            *([{"name": OWN, "mountPath": STORES_PATH, "readOnly": True}] if context.has_own else []),
            *([{"name": SHARED, "mountPath": SHARED_PATH}] if _shares(config, spec) else []),
            *({"name": v.name, "mountPath": v.mount_path, "readOnly": v.read_only} for v in config.volumes),
        ],
    }
    if config.node_agent is not None:
        container["volumeMounts"].append({"name": AGENT, "mountPath": config.node_agent, "readOnly": True})
    if config.command:
        container["command"] = list(config.command)
    return container


def _node_agent(directory: str) -> Json:
    """Where its sockets are; on a node that has no agent the directory is made, and stays empty."""
    return {"name": AGENT, "hostPath": {"path": directory, "type": "DirectoryOrCreate"}}


def _near_its_state(context: JobContext, function: str) -> Json:
    term = {
        "labelSelector": {"matchLabels": {home_key(context.job, function): context.run}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _shares(config: KnativeConfig, spec: FunctionSpec) -> bool:
    """Several GPUs are several processes (vLLM's workers, NCCL) that talk through shared memory, of which a container
    has 64 MB unless a volume is mounted there: vLLM's queue alone is larger."""
    return spec.gpus > 1 and all(volume.mount_path != SHARED_PATH for volume in config.volumes)


def security(config: KnativeConfig) -> Json:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": config.run_as_user != 0,
        "runAsUser": config.run_as_user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _source(volume: VolumeConfig) -> Json:
    if volume.claim is not None:
        claim = {"claimName": volume.claim} | ({"readOnly": True} if volume.read_only else {})
        return {"name": volume.name, "persistentVolumeClaim": claim}
    if volume.host_path is not None:
        return {"name": volume.name, "hostPath": {"path": volume.host_path, "type": "Directory"}}
    return {"name": volume.name, "emptyDir": {"medium": "Memory"}}


def _quantity(cpus: float) -> str:
    return f"{max(1, round(cpus * 1000))}m"


def secret(context: JobContext, token: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": context.secret,
            "namespace": context.config.namespace,
            "labels": labels(context, "token"),
        },
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def lease(context: JobContext, lease_s: int) -> Json:
    """A Job that never starts and fails after `lease_s`: what it owns goes with it (lease.py).

    Its pod has a scheduling gate that nobody opens: it takes no node, and no cluster autoscaler looks at it.
    """
    config = context.config
    tags = labels(context, "lease")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": f"{context.job}-lease-", "namespace": config.namespace, "labels": tags},
        "spec": {
            "activeDeadlineSeconds": lease_s,
            "ttlSecondsAfterFinished": 0,
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": tags},
                "spec": {
                    "restartPolicy": "Never",
                    "schedulingGates": [{"name": "rlhf-orchestrate/never"}],
                    "automountServiceAccountToken": False,
                    "containers": [
                        {
                            "name": "lease",
                            "image": config.image,
                            "securityContext": security(config),
                            "resources": {
                                "requests": {"cpu": "1m", "memory": "1M"},
                                "limits": {"cpu": "1m", "memory": "1M"},
                            },
                        }
                    ],
                },
            },
        },
    }


def owned_by(lease_job: Json) -> Json:
    """The patch that makes a Lease job the only owner of an object."""
    meta = lease_job["metadata"]
    return {
        "metadata": {
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}]
        }
    }


def annotate(annotations: Json) -> Json:
    return {"metadata": {"annotations": annotations}}


def set_aside(lease_job: Json) -> Json:
    """The patch (a strategic one) that takes a pod out of its ReplicaSet, and gives it to the lease, so that somebody's
    it is. The autoscaler still counts it: that goes by `serving.knative.dev/revisionUID`.

    The ReplicaSet is its owner, too, until it lets go by itself: it may be deleting this pod just now, as it knows no
    better yet, and would start none again unless it sees one of its own end (kubernetes, pkg/controller:
    replicaset/replica_set.go, updatePod; controller_utils.go, ExpectationsTimeout).
    """
    patch = owned_by(lease_job)
    patch["metadata"]["labels"] = {TEMPLATE_HASH: None}
    return patch


def bounds(minimum: int) -> Json:
    """The patch of a Revision (and a PodAutoscaler) that asks for `minimum` replicas."""
    return annotate({MIN_SCALE: str(minimum)})


def selector(context: JobContext) -> str:
    """Label selector of a run's pods."""
    return f"{JOB_LABEL}={context.job},{RUN_LABEL}={context.run},{FUNCTION_LABEL}"
