"""Kubernetes objects of the stand-in, in memory, with the traps and latencies that were measured on a real cluster."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from orchestrator.platforms.local_process import Launcher
from tests.knative.parts import (
    ANNOTATION_S,
    AUTOSCALER_TICK_S,
    COST,
    DRAIN_S,
    HASH,
    MAX,
    MIN,
    QUEUE,
    READY_S,
    SHORT_GRACE_S,
    START_S,
    WINDOW_S,
    Json,
    Pod,
    Refused,
    Revision,
    annotations_of,
    conditions,
    merge,
)


class Cluster:
    """`slots`: how many pods the node can take; `warm`: kinds of functions whose libraries are loaded beforehand."""

    def __init__(self, root: Path, *, slots: int = 8, max_timeout_s: int = 3600, warm: Sequence[str] = ()) -> None:
        self.root, self.slots, self.max_timeout_s = root, slots, max_timeout_s
        self.features: set[str] = set()
        self.nodes = ["node"]
        """Those that take pods, the one that has taken one last at the end."""
        self.objects: dict[tuple[str, str], Json] = {}
        """By (kind, name): services, revisions, jobs, secrets."""
        self.revisions: dict[str, Revision] = {}
        self.events: list[tuple[int, str, Json]] = []
        self.version = itertools.count(1)
        self.moved = asyncio.Event()
        """Set, and replaced, by each event."""
        self.closing = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.pods: dict[str, Pod] = {}
        (root / "agent").mkdir()
        self.launcher = Launcher(warm, root / "agent.log", root / "agent")
        self.uids = itertools.count(1)
        self.controllers_away = False
        """No Service becomes ready."""
        self.quota = 0
        """Pods with a queue's name that Kueue admits."""
        self.drained: list[str] = []
        """Ready pods without a request that held their GPU for a whole drain."""
        self.writes: list[tuple[str, str, str]] = []
        """Every write that the API was asked for: verb, kind, name."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self.closing:
            work.close()
            return
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        self.closing = True
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.launcher.close()

    # --- objects ---------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Json:
        if kind == "pods":
            for pod in list(self.pods.values()):
                if pod.name == name:
                    return pod.value
        if (kind, name) not in self.objects:
            raise Refused(404, f'{kind} "{name}" not found')
        return self.objects[kind, name]

    def create(self, kind: str, value: Json) -> Json:
        meta = value["metadata"]
        uid = next(self.uids)
        if "generateName" in meta:
            meta["name"] = f"{meta['generateName']}{uid:05d}"
        if (kind, meta["name"]) in self.objects:
            raise Refused(409, f'{kind} "{meta["name"]}" already exists')
        meta |= {"uid": f"uid-{uid}", "generation": 1}
        if kind == "secrets":
            value["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in value.pop("stringData").items()}
        self.objects[kind, meta["name"]] = value
        if kind == "jobs":
            value["status"] = {}
            value["_begun_s"] = _now_s()
            self.spawn(self._deadline(value))
        return value

    def apply_service(self, value: Json) -> Json:
        name, template = value["metadata"]["name"], value["spec"]["template"]
        self._admit(template)
        known = self.objects.get(("services", name))
        if known is None:
            known = self.create("services", copy.deepcopy(value))
            self._new_revision(known)
        elif known["spec"]["template"] != template:
            known["spec"] = copy.deepcopy(value["spec"])
            known["metadata"]["generation"] += 1
            self._new_revision(known)
        return known

    def _admit(self, template: Json) -> None:
        """What the webhook refuses where a cluster has Knative's own settings."""
        spec, annotations = template["spec"], template["metadata"]["annotations"]
        flags = {"nodeSelector": "nodeselector", "tolerations": "tolerations", "runtimeClassName": "runtimeclassname"}
        flags |= {"affinity": "affinity"}
        for fieldname, flag in flags.items():
            if fieldname in spec and flag not in self.features:
                raise Refused(
                    400,
                    "admission webhook denied the request: validation failed: must not set the field(s):"
                    f" spec.template.spec.{fieldname}",
                )
        if spec["timeoutSeconds"] > self.max_timeout_s:
            raise Refused(
                400,
                f"validation failed: expected 0 <= {spec['timeoutSeconds']} <= {self.max_timeout_s}:"
                " spec.template.spec.timeoutSeconds",
            )
        if float(annotations["autoscaling.knative.dev/window"].removesuffix("s")) < 6:
            raise Refused(400, "validation failed: window: expected 6s <= 5s <= 1h0m0s")

    def _new_revision(self, service: Json) -> None:
        name = service["metadata"]["name"]
        for old in [r for r in self.revisions.values() if r.service == name]:
            old.minimum = 0  # unreachable: min-scale no longer counts
        number = service["metadata"]["generation"]
        annotations = dict(service["spec"]["template"]["metadata"]["annotations"])
        value: Json = {"metadata": {"name": f"{name}-{number:05d}", "annotations": annotations}}
        revision = Revision(value, name, service["spec"]["template"])
        self.objects["revisions", revision.name] = value
        self.revisions[revision.name] = revision
        service["status"] = {"observedGeneration": number, "conditions": [{"type": "Ready", "status": "Unknown"}]}
        self.spawn(self._become_ready(service, revision))
        self.spawn(self._autoscale(revision))

    async def _become_ready(self, service: Json, revision: Revision) -> None:
        await asyncio.sleep(READY_S)
        while self.controllers_away:
            await asyncio.sleep(READY_S)
        host = f"{revision.service}.default.svc.cluster.local"
        service["status"] |= {
            "conditions": [{"type": "Ready", "status": "True"}],
            "latestReadyRevisionName": revision.name,
            "address": {"url": f"http://{host}"},
        }

    def patch(self, kind: str, name: str, patch: Json, *, strategic: bool = False) -> Json:
        if kind == "podautoscalers":
            if name not in self.revisions:
                raise Refused(404, f'podautoscalers "{name}" not found')
            revision = self.revisions[name]
            revision.minimum = int(annotations_of(patch)[MIN])
            self._decide(revision)
            self.spawn(self._annotated(revision))
            return {"metadata": {"name": name}}  # and the Revision's value is back
        if kind == "deployments":
            revision = self.revisions[name.removesuffix("-deployment")]
            revision.replicas = patch["spec"]["replicas"]
            self._reconcile(revision)
            self.spawn(self._annotated(revision))
            return {"metadata": {"name": name}}  # until the autoscaler looks
        value = self.get(kind, name)
        if kind == "services" and any(key.startswith("autoscaling") for key in annotations_of(patch)):
            raise Refused(400, "validation failed: invalid key name: metadata.annotations.autoscaling.knative.dev")
        changed = copy.deepcopy(value)
        merge(changed, patch, strategic=strategic)
        if kind == "revisions":
            annotations = changed["metadata"]["annotations"]
            low, high = int(annotations.get(MIN, "0")), int(annotations.get(MAX, "0"))
            if high and low > high:
                raise Refused(400, f"validation failed: max-scale={high} is less than min-scale={low}")
            value.clear()
            value.update(changed)
            self.spawn(self._annotated(self.revisions[name]))
        value.clear()
        value.update(changed)
        if kind == "pods":
            self._tell("MODIFIED", value)
            if name in self.pods:  # else it is a node agent's
                self._release(value)
                self._reconcile(self.pods[name].revision)  # one that has lost its label is replaced
        return value

    async def _annotated(self, revision: Revision) -> None:
        """The Revision's min-scale comes to the PodAutoscaler, which looks."""
        await asyncio.sleep(ANNOTATION_S)
        revision.minimum = int(revision.value["metadata"]["annotations"].get(MIN, "0"))
        self._decide(revision)

    def delete(self, kind: str, name: str, grace_s: float | None) -> None:
        if kind == "pods":
            pod = next((pod for pod in list(self.pods.values()) if pod.name == name), None)
            if pod is None:
                raise Refused(404, f'pods "{name}" not found')
            self.remove(pod, short=grace_s is not None and grace_s <= 1)
            return
        value = self.get(kind, name)
        del self.objects[kind, name]
        if kind == "services":
            for revision in [r for r in self.revisions.values() if r.service == name]:
                self.spawn(self._collect(revision))
        for owned_kind, owned_name in list(self.objects):
            owners = self.objects[owned_kind, owned_name]["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == value["metadata"].get("uid") for owner in owners):
                self.delete(owned_kind, owned_name, None)
        for pod in list(self.pods.values()):
            owners = pod.value["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == value["metadata"].get("uid") for owner in owners):
                self.remove(pod)

    async def _collect(self, revision: Revision) -> None:
        await asyncio.sleep(0.3)  # Service, Configuration, Revision, ...: not sped up, as it races requests of ours
        self.objects.pop(("revisions", revision.name), None)
        self.revisions.pop(revision.name, None)
        for pod in revision.owned:
            self.remove(pod)

    async def _deadline(self, job: Json) -> None:
        while _now_s() < job["_begun_s"] + job["spec"]["activeDeadlineSeconds"]:
            await asyncio.sleep(0.02)
        name = job["metadata"]["name"]
        job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
        if ("jobs", name) in self.objects:
            self.delete("jobs", name, None)

    # --- autoscaler, ReplicaSet ------------------------------------------------------------------------------------

    async def _autoscale(self, revision: Revision) -> None:
        while revision.name in self.revisions:
            self._decide(revision)
            await asyncio.sleep(AUTOSCALER_TICK_S)

    def _decide(self, revision: Revision) -> None:
        if revision.name not in self.revisions or not revision.active_before:
            return  # the trap: without data, min-scale does nothing
        recent = revision.waiting > 0 or _now_s() - revision.last_request_s < WINDOW_S
        wish = max(revision.minimum, self._own_wish(revision) if recent else 0)
        high = int(revision.value["metadata"]["annotations"].get(MAX, "0"))
        replicas = revision.settle(min(wish, high) if high else wish, _now_s())
        if replicas is not None:
            revision.replicas = replicas
            self._reconcile(revision)

    def _own_wish(self, revision: Revision) -> int:
        """The autoscaler's: by metric rps with a high target one, by concurrency what is open or was, over 70 %."""
        if revision.value["metadata"]["annotations"].get("autoscaling.knative.dev/metric") == "rps":
            return 1
        return round(1.5 * (revision.waiting + sum(pod.busy for pod in revision.pods)) + 0.49)

    def restart_autoscaler(self) -> None:
        """It forgets what it has seen."""
        for revision in self.revisions.values():
            revision.active_before = False

    def poke(self, revision: Revision) -> None:
        """A request has come."""
        revision.last_request_s = _now_s()
        revision.active_before = True
        if revision.replicas == 0:
            self._decide(revision)

    def _release(self, pod: Json) -> None:
        """The ReplicaSet lets go what has lost its label."""
        owners = pod["metadata"]["ownerReferences"]
        if HASH not in pod["metadata"]["labels"] and any(owner.get("controller") for owner in owners):
            pod["metadata"]["ownerReferences"] = [owner for owner in owners if not owner.get("controller")]
            self._tell("MODIFIED", pod)

    def _reconcile(self, revision: Revision) -> None:
        """The ReplicaSet: not ready ones first, then the cheapest, busy or not."""
        live = revision.owned
        for _ in range(revision.replicas - len(live)):
            self._add(revision)
        surplus = len(live) - revision.replicas
        if surplus > 0:
            order = sorted(live, key=lambda p: (p.ready, int(annotations_of(p.value).get(COST, "0")), not p.busy))
            for pod in order[:surplus]:
                self.remove(pod)

    # --- pods ------------------------------------------------------------------------------------------------------

    def _add(self, revision: Revision) -> None:
        uid = next(self.uids)
        name = f"{revision.name}-deployment-{uid:05d}"
        value: Json = {
            "metadata": {
                "name": name,
                "labels": dict(revision.template["metadata"]["labels"]),
                "annotations": {},
                "ownerReferences": [{"kind": "ReplicaSet", "uid": f"{revision.name}-deployment", "controller": True}],
            },
            "spec": copy.deepcopy(revision.template["spec"]),
            "status": {"phase": "Pending", "conditions": []},
        }
        value["metadata"]["labels"][HASH] = "1"
        pod = Pod(value, revision, self.root / f"{uid}.sock")
        revision.pods.append(pod)
        self.pods[name] = pod
        self._tell("ADDED", value)
        self.spawn(self._live(pod))

    async def _live(self, pod: Pod) -> None:
        try:
            await self._schedule(pod)
            await self._start(pod)
            assert pod.process is not None
            code = await asyncio.shield(pod.process.gone)
            while not pod.removing:  # restartPolicy: Always
                pod.ready = False
                statuses: list[Json] = [
                    {"restartCount": 1, "state": {}, "lastState": {"terminated": {"exitCode": code}}}
                ]
                pod.value["status"] |= {"containerStatuses": statuses, "conditions": conditions(False)}
                if code == -signal.SIGKILL and pod.value["metadata"].pop("oom", False):
                    statuses[0]["lastState"]["terminated"]["reason"] = "OOMKilled"
                self._tell("MODIFIED", pod.value)
                await self._start(pod)
                code = await asyncio.shield(pod.process.gone)
        finally:
            pod.revision.pods.remove(pod)
            del self.pods[pod.name]
            self._tell("DELETED", pod.value)
            pod.gone.set()
            pod.revision.freed.set()
            if pod.revision.name in self.revisions:
                self._reconcile(pod.revision)

    async def _schedule(self, pod: Pod) -> None:
        if QUEUE in pod.value["metadata"]["labels"]:
            pod.value["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "is blocked"}
            ]
            self._tell("MODIFIED", pod.value)
            while not self.quota:
                if pod.removing:
                    raise asyncio.CancelledError
                await asyncio.sleep(0.01)
            self.quota -= 1
        said = False
        while sum("nodeName" in p.value["spec"] for p in list(self.pods.values())) >= self.slots:
            if not said:
                said = True
                pod.value["status"]["conditions"] = [{
                    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                }]  # fmt: skip
                self._tell("MODIFIED", pod.value)
            if pod.removing:
                raise asyncio.CancelledError
            await asyncio.sleep(0.01)
        pod.value["spec"]["nodeName"] = self._node(pod)
        pod.value["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        self._tell("MODIFIED", pod.value)

    def _node(self, pod: Pod) -> str:
        """The one that its affinity prefers, of equals the one that has taken none for longest."""
        affinity = pod.value["spec"].get("affinity", {}).get("podAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        there = [(v["spec"]["nodeName"], v["metadata"]["labels"]) for (k, _), v in self.objects.items() if k == "pods"]

        def score(node: str) -> int:
            wanted = [(t["weight"], t["podAffinityTerm"]["labelSelector"]["matchLabels"]) for t in terms]
            return sum(w for w, labels in wanted for at, has in there if at == node and labels.items() <= has.items())

        best = max(self.nodes, key=score)
        self.nodes = [*(node for node in self.nodes if node != best), best]
        return best

    async def _start(self, pod: Pod) -> None:
        container = pod.value["spec"]["containers"][0]
        if container["image"] == "missing":
            waiting = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
            pod.value["status"]["containerStatuses"] = [
                {"restartCount": 0, "image": "missing", "state": {"waiting": waiting}}
            ]
            self._tell("MODIFIED", pod.value)
            while not pod.removing:
                await asyncio.sleep(0.01)
            raise asyncio.CancelledError
        while self._lacks_volume(pod):
            if pod.removing:
                raise asyncio.CancelledError
            await asyncio.sleep(0.01)
        pod.started = True
        env = {v["name"]: v.get("value", "") for v in container["env"]}
        secret = next(v["valueFrom"]["secretKeyRef"] for v in container["env"] if v["name"] == "RLHF_TOKEN")
        token = base64.b64decode(self.get("secrets", secret["name"])["data"][secret["key"]]).decode()
        await asyncio.sleep(START_S)
        if pod.removing:
            await pod.over.wait()
            raise asyncio.CancelledError
        pod.process = await self.launcher.start(
            {
                "kind": env["RLHF_KIND"], "options": json.loads(env["RLHF_OPTIONS"]), "exchange": env["RLHF_EXCHANGE"],
                "job": env["RLHF_JOB"], "name": pod.name, "threads": 1, "token": token, "heartbeat_s": 0.2,
            },
            self.root / "pods.log",
        )  # fmt: skip
        pod.path = pod.process.socket
        pod.ready = True
        pod.value["status"] |= {"phase": "Running", "conditions": conditions(True)}
        self._tell("MODIFIED", pod.value)
        pod.revision.freed.set()
        self._decide(pod.revision)

    def _lacks_volume(self, pod: Pod) -> bool:
        """A key of a Secret that it mounts is not there."""
        mounted = [v["secret"] for v in pod.value["spec"].get("volumes", ()) if "secret" in v]
        items = [(m["secretName"], item["key"]) for m in mounted for item in m["items"]]
        return any(key not in self.get("secrets", name)["data"] for name, key in items)

    def remove(self, pod: Pod, *, short: bool = False) -> None:
        """A pod that is terminating already goes on as it was: a second DELETE with a short grace does not help."""
        if not pod.removing:
            pod.removing = True
            pod.value["metadata"]["deletionTimestamp"] = "now"
            self._tell("MODIFIED", pod.value)
            self.spawn(self._terminate(pod, short))
            if pod.revision.name in self.revisions:
                self._decide(pod.revision)
                self._reconcile(pod.revision)

    def cut_off(self, name: str) -> None:
        """A pod's readiness probe fails from now on; nobody but its owner would do anything about it."""
        pod = self.pods[name]
        pod.ready = False
        pod.value["status"]["conditions"] = conditions(False)
        self._tell("MODIFIED", pod.value)

    async def _terminate(self, pod: Pod, short: bool) -> None:
        if not pod.started:
            return
        if not short and not pod.busy:
            self.drained.append(pod.name)
        await asyncio.sleep(SHORT_GRACE_S if short else DRAIN_S)
        while not short and pod.busy:  # a function that drains finishes its call
            await asyncio.sleep(0.01)
        pod.over.set()
        if pod.process is not None:
            pod.process.kill()

    # --- watch -----------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, value: Json) -> None:
        value["metadata"]["resourceVersion"] = str(version := next(self.version))
        self.events.append((version, kind, copy.deepcopy(value)))
        self.moved.set()
        self.moved = asyncio.Event()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
