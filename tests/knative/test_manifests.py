"""What is asked of the cluster, as plain values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from orchestrator.base.errors import ConfigError
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.config import KnativeConfig, TolerationConfig, VolumeConfig
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.reasons import why_not

GPU = FunctionSpec("generate", "generate", {"engine": "vllm"}, max_replicas=8, gpus=2, cpus=4, memory_gb=64)
CPU = FunctionSpec("reward", "reward", memory_gb=0.5)
CONFIG = KnativeConfig(
    image="registry/actor:1",
    images={"train": "registry/trainer:1"},
    namespace="rlhf",
    runtime_class="nvidia",
    node_selector={"pool": "h100"},
    tolerations=(TolerationConfig(key="gpu", operator="Exists"),),
    volumes=(VolumeConfig(name="models", mount_path="/models", claim="models", read_only=True),),
    env_secrets=("s3",),
    service_account="functions",
)
CONTEXT = manifests.JobContext("math", "redis://redis:6379/0", "math", 3600.0, CONFIG)


def pod(spec: FunctionSpec, context: manifests.JobContext = CONTEXT) -> dict[str, Any]:
    found: dict[str, Any] = manifests.service(context, spec)["spec"]["template"]["spec"]
    return found


def test_a_call_of_an_hour_fits_into_every_time_limit() -> None:
    asked = pod(GPU)
    assert asked["timeoutSeconds"] == asked["responseStartTimeoutSeconds"] == 3660
    assert "idleTimeoutSeconds" not in asked
    env = {item["name"]: item.get("value") for item in asked["containers"][0]["env"]}
    assert env["RLHF_GRACE_S"] == "3630", "the grace is timeoutSeconds, of which the drain takes 30 s before SIGTERM"


def test_scale_is_not_in_the_template() -> None:
    annotations = manifests.service(CONTEXT, GPU)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/initial-scale"] == "0"
    assert annotations["autoscaling.knative.dev/max-scale"] == "8"
    assert manifests.MIN_SCALE not in annotations
    assert annotations["autoscaling.knative.dev/metric"] == "rps"


def test_gpu_settings_are_for_functions_with_gpus() -> None:
    gpu, cpu = pod(GPU), pod(CPU)
    assert gpu["runtimeClassName"] == "nvidia"
    assert gpu["nodeSelector"] == {"pool": "h100"}
    assert gpu["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert gpu["containers"][0]["resources"]["limits"] == {"memory": "64000M", "nvidia.com/gpu": "2"}
    assert not {"runtimeClassName", "nodeSelector", "tolerations"} & set(cpu)
    assert cpu["containers"][0]["resources"] == {
        "requests": {"cpu": "1000m", "memory": "500M"},
        "limits": {"memory": "500M"},
    }


def test_the_token_is_by_reference_and_the_container_has_no_rights() -> None:
    container = pod(GPU)["containers"][0]
    token = next(item for item in container["env"] if item["name"] == "RLHF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "math-token", "key": "token"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod(GPU)["automountServiceAccountToken"] is False


def test_pods_carry_the_name_of_their_queue_and_nothing_else_does() -> None:
    """Kueue's webhooks know a LocalQueue by this label; on the Service it would say nothing to them."""
    queued = manifests.service(replace(CONTEXT, config=CONFIG.model_copy(update={"queue": "team-a"})), GPU)
    template = queued["spec"]["template"]
    assert template["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "team-a"
    assert queued == manifests.service(CONTEXT, GPU)


def test_images_are_by_kind() -> None:
    assert pod(GPU)["containers"][0]["image"] == "registry/actor:1"
    assert pod(FunctionSpec("train", "train"))["containers"][0]["image"] == "registry/trainer:1"


def test_the_lease_takes_no_node_and_goes_when_it_has_failed() -> None:
    spec = manifests.lease(CONTEXT, 20)["spec"]
    assert spec["activeDeadlineSeconds"] == 20
    assert spec["ttlSecondsAfterFinished"] == 0
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["schedulingGates"]


def test_the_lease_and_the_token_fit_the_schemas_of_kubernetes() -> None:
    for value in (manifests.lease(CONTEXT, 20), manifests.secret(CONTEXT, "t")):
        kubernetes_validate.validate(value, "1.34", strict=True)


def test_the_same_job_gives_the_same_template() -> None:
    """Or a resumed orchestrator would make new Revisions, beside pods that hold the GPUs."""
    again = FunctionSpec("generate", "generate", {"engine": "vllm"}, max_replicas=8, gpus=2, cpus=4, memory_gb=64)
    assert manifests.service(CONTEXT, again) == manifests.service(CONTEXT, GPU)


def test_a_volume_has_one_source() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        VolumeConfig(name="a", mount_path="/a", claim="b", host_path="/c", read_only=True)
    with pytest.raises(ValidationError, match="host_path read-only: set read_only = true"):
        VolumeConfig(name="a", mount_path="/a", host_path="/c")


def status(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": status}


def container(state: dict[str, Any], last: dict[str, Any] | None = None) -> dict[str, Any]:
    return status(containerStatuses=[{"image": "i", "state": state, "lastState": last or {}}])


@pytest.mark.parametrize(
    ("value", "kind", "line", "patient"),
    [
        (
            status(conditions=[
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            ]),
            "Unschedulable", "p has no node: 0/3 nodes -> free or add nodes", True,
        ),
        (
            {"metadata": {"name": "p", "labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}
            | {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}},
            "SchedulingGated", "p waits for quota of LocalQueue team-a", True,
        ),
        (
            container({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}),
            "ImagePullBackOff", "image i cannot be had: not found -> check platform.knative.image", False,
        ),
        (
            container({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "s3" not found'}}),
            "CreateContainerConfigError", 'secret "s3" not found -> check platform.knative env_secrets', False,
        ),
        (
            container({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "j-token" not found'}})
            | {"metadata": {"name": "p", "labels": {manifests.JOB_LABEL: "j"}}},  # the lease has run out
            "CreateContainerConfigError", 'secret "j-token" not found', True,
        ),
        (
            container({"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            "OOMKilled", "raise memory_gb", True,
        ),
        (
            container(
                {"waiting": {"reason": "CrashLoopBackOff"}},
                {"terminated": {"reason": "Error", "exitCode": 2, "message": "usage: ...\nerror: --job is required\n"}},
            ),
            "CrashLoopBackOff", "p ends at its start with exit code 2: error: --job is required", False,
        ),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run(value: dict[str, Any], kind: str, line: str, patient: bool) -> None:
    reason = why_not(value)
    assert reason is not None
    assert (reason.kind, reason.patient) == (kind, patient)
    assert line in reason.line
    assert "\n" not in reason.line


@pytest.mark.parametrize(
    "value",
    [
        status(),
        status(conditions=[{"type": "PodScheduled", "status": "True"}]),
        container({"waiting": {"reason": "ContainerCreating"}}),
        container({"running": {}}),
    ],
)
def test_a_pod_on_its_way_has_no_reason(value: dict[str, Any]) -> None:
    assert why_not(value) is None


def test_several_gpus_have_shared_memory_unless_the_user_has_mounted_some() -> None:
    def shared(spec: FunctionSpec, config: KnativeConfig = CONFIG) -> list[str]:
        asked = pod(spec, replace(CONTEXT, config=config))
        volumes = {volume["name"]: volume for volume in asked["volumes"]}
        mounts = asked["containers"][0]["volumeMounts"]
        assert set(volumes) == {mount["name"] for mount in mounts}
        found = [mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm"]
        assert all(volumes[name]["emptyDir"] == {"medium": "Memory"} for name in found)
        return found

    assert shared(GPU) == ["shared-memory"]
    assert shared(replace(GPU, gpus=1)) == []
    own = CONFIG.model_copy(update={"volumes": (VolumeConfig(name="mine", mount_path="/dev/shm"),)})
    assert shared(GPU, own) == ["mine"]


def test_the_tails_function_is_named_and_marked_as_itself() -> None:
    tail = replace(GPU, name="generate-tail", gpus=4)
    asked = manifests.service(CONTEXT, tail)
    assert asked["metadata"]["name"] == "math-generate-tail"
    env = {item["name"]: item.get("value") for item in pod(tail)["containers"][0]["env"]}
    assert (env["RLHF_FUNCTION"], env["RLHF_KIND"]) == ("generate-tail", "generate")
    longest = "j" * (63 - len("-generate-tail-00001-deployment"))
    manifests.check_names(longest, ["generate", "generate-tail"])
    with pytest.raises(ConfigError, match="'generate-tail' has room for 32"):
        manifests.check_names(longest + "j", ["generate", "generate-tail"])


def test_with_node_agents_a_pod_is_a_ticket_with_the_agents_directory_read_only() -> None:
    agents = replace(CONTEXT, config=CONFIG.model_copy(update={"node_agent": "/var/lib/agent"}))
    [container] = pod(GPU, agents)["containers"]
    [before] = pod(GPU)["containers"]
    assert {"name": "RLHF_AGENT", "value": "/var/lib/agent/agent.sock"} in container["env"]
    assert {"name": "node-agent", "mountPath": "/var/lib/agent", "readOnly": True} in container["volumeMounts"]
    host = {"path": "/var/lib/agent", "type": "DirectoryOrCreate"}
    assert {"name": "node-agent", "hostPath": host} in pod(GPU, agents)["volumes"]
    assert container["resources"] == before["resources"], "it holds the GPU in the cluster's books"
    assert "command" not in before
    assert "affinity" not in pod(GPU)


def test_a_pod_prefers_the_agents_that_have_its_functions_state_in_its_own_run() -> None:
    job = "j" * (63 - len("-generate-00001-deployment"))
    agents = replace(CONTEXT, job=job, run="a1", config=CONFIG.model_copy(update={"node_agent": "/var/lib/agent"}))
    ours = pod(GPU, agents)["affinity"]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    spec = {"containers": [{"name": "c"}], "affinity": ours}
    kubernetes_validate.validate(body | {"spec": spec}, "1.34", strict=True)
    [term] = ours["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert ours.keys() == {"podAffinity"}
    assert ours["podAffinity"].keys() == {"preferredDuringSchedulingIgnoredDuringExecution"}, "nowhere it has to be"
    [(key, value)] = term["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
    prefix, _, name = key.partition("/")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", prefix)
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{,61}[A-Za-z0-9])?", name)
    assert value == "a1"
    assert pod(CPU, agents)["affinity"] != ours
    assert pod(GPU, replace(agents, run="b2"))["affinity"] != ours, "another run, of the same name"
    assert pod(GPU, replace(agents, job="other"))["affinity"] != ours
