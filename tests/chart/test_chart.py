"""The chart under every values file: schemas, rights, security, selectors, and that its parts fit ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it ships no types
import pytest
import yaml

from orchestrator.api.launch_kubernetes import job_manifest
from orchestrator.api.submission import JSON_TYPE, read_job
from orchestrator.commands.doctor_knative import KUBERNETES as OLDEST
from orchestrator.commands.doctor_knative import QUEUE, RIGHTS, needed_features
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.knative.manifests import GATE_PATH, JobContext, service
from tests.chart.conftest import CHART, KUBERNETES, ROOT, VALUES, Objects, Render, config, one, pods, selects

DEVELOPMENT, PRODUCTION, REDIS_ONLY, CPU = VALUES
BODY = json.dumps({"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}}).encode()
RUNNER = "rlhf-orchestrate/runner"


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_lint(helm: str, values: Path) -> None:
    done = subprocess.run(
        [helm, "lint", "--strict", str(CHART), "-f", str(values)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 chart(s) failed" in done.stdout


def test_every_object_is_what_kubernetes_takes(scenario: Objects) -> None:
    runner = job_manifest(config(scenario)[1], "tiny-0123456789", 1, Path("/runs"), "s3://b")
    for item in [*scenario, runner]:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in scenario]
    assert len(names) == len(set(names))


def test_labels_by_convention(scenario: Objects) -> None:
    keys = ("name", "instance", "version", "component", "part-of", "managed-by")
    for item in scenario:
        for key in keys:
            assert item["metadata"]["labels"].get(f"app.kubernetes.io/{key}"), (item["kind"], key)


def test_every_pod_is_confined(scenario: Objects) -> None:
    for name, pod in pods(scenario).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert {"requests", "limits"} <= set(container["resources"]), name
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] in ("api", "runner"):
            assert spec["serviceAccountName"], "it talks to the cluster's API"
            writable = {m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if not m.get("readOnly")}
            assert writable == {"/runs", "/tmp"}
            assert {"name": "runs", "emptyDir": {}} in spec["volumes"], "what lasts is in the store"
        if name.endswith(("-test-api", "-test-exchange")) or "valkey" in name or "seaweedfs" in name:
            assert spec["automountServiceAccountToken"] is False, name


def test_every_mount_has_its_volume_and_every_reference_its_object(scenario: Objects) -> None:
    made = {(item["kind"], item["metadata"]["name"]) for item in scenario}
    outside = {"rlhf-tokens", "rlhf-exchange", "rlhf-data", "rlhf-cache", "redis", "registry"}
    for name, pod in pods(scenario).items():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes), name
            secrets = [source["secretRef"]["name"] for source in container.get("envFrom", ())]
            secrets += [e["valueFrom"]["secretKeyRef"]["name"] for e in container.get("env", ()) if "valueFrom" in e]
            secrets += [v["secret"]["secretName"] for v in volumes.values() if "secret" in v]
            assert all(("Secret", secret) in made or secret in outside for secret in secrets), (name, secrets)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in made or claim in outside, name
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made, name


def test_services_budgets_and_policies_find_their_pods(scenario: Objects) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(scenario).items()}
    for item in scenario:
        if item["kind"] == "Service":
            chosen = [n for n, found in labels.items() if selects({"matchLabels": item["spec"]["selector"]}, found)]
            assert chosen == [item["metadata"]["name"]]
        if item["kind"] == "PodDisruptionBudget":
            assert [n for n, found in labels.items() if selects(item["spec"]["selector"], found)] == ["runner"]
            # Of a Job's pods Kubernetes supports minAvailable as a number only; more than run means that none may go.
            assert item["spec"]["minAvailable"] >= int(_option(scenario, "--max-running"))
            assert "maxUnavailable" not in item["spec"]
    for item in (o for o in scenario if o["kind"] == "NetworkPolicy"):
        if not item["metadata"]["name"].endswith("-functions"):
            assert sum(selects(item["spec"]["podSelector"], found) for found in labels.values()) == 1


def _option(objects: Objects, name: str) -> str:
    words = one(objects, "Deployment", "-api")["spec"]["template"]["spec"]["containers"][0]["args"]
    return next(str(word.partition("=")[2]) for word in words if word.startswith(name))


def test_a_job_is_valid_over_the_charts_defaults(scenario: Objects) -> None:
    defaults, _ = config(scenario)
    job = read_job(BODY, JSON_TYPE, roots=[Path("/data")], defaults=defaults)
    knative = job.platform.knative
    assert job.platform.kind == "knative"
    assert knative is not None
    assert knative.namespace == "rl"
    assert {v.mount_path for v in knative.volumes} <= {"/cache"}, "functions get data through the exchange"
    assert knative.env_secrets == (one(scenario, "Deployment", "-api")["spec"]["template"]["spec"]["containers"][0]
                                   ["envFrom"][0]["secretRef"]["name"],)  # fmt: skip


def test_functions_answer_knative_and_their_gang_only(render: Render) -> None:
    objects = render(PRODUCTION)
    defaults, _ = config(objects)
    job = read_job(BODY, JSON_TYPE, roots=[Path("/data")], defaults=defaults)
    assert job.platform.knative is not None
    context = JobContext("j", "s3://x", "j", 60, job.platform.knative)
    made = {name: service(context, FunctionSpec(name, "train", gpus=1)) for name in ("train", "generate")}
    labels = {name: item["spec"]["template"]["metadata"]["labels"] for name, item in made.items()}
    policy = one(objects, "NetworkPolicy", "-functions")["spec"]
    assert all(selects(policy["podSelector"], found) for found in labels.values())
    assert not selects(policy["podSelector"], pods(objects)["runner"]["metadata"]["labels"])
    knative, gang = (rule["from"][0] for rule in policy["ingress"])
    assert selects(knative["namespaceSelector"], {"kubernetes.io/metadata.name": "knative-serving"})
    assert not selects(knative["namespaceSelector"], {"kubernetes.io/metadata.name": "rl"})
    assert selects(gang["podSelector"], labels["train"])
    assert not selects(gang["podSelector"], labels["generate"])
    pod = made["train"]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    assert pod["serviceAccountName"] == "rlhf-functions"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/scratch", "/cache", GATE_PATH, "/var/lib/rlhf-orchestrate"}
    assert made["generate"]["spec"]["template"]["spec"]["containers"][0]["image"].startswith("registry.example.com/")


def test_the_runner_has_the_rights_that_the_platform_asks_for_and_no_others(render: Render) -> None:
    objects = render(DEVELOPMENT)
    asked = {(group, resource): set(verbs) for group, resource, verbs in (*RIGHTS, QUEUE)}
    given = {(r["apiGroups"][0], r["resources"][0]): set(r["verbs"]) for r in one(objects, "Role", "-runner")["rules"]}
    assert given == asked
    assert one(objects, "Role", "-api")["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "list", "deletecollection"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "patch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
         "resourceNames": ["rel-rlhf-orchestrate-api"], "verbs": ["get", "patch"]},
    ]  # fmt: skip
    assert {item["kind"] for item in objects if "Role" in item["kind"]} == {"Role", "RoleBinding"}, "no cluster rights"
    for account in ("api", "runner"):
        binding = one(objects, "RoleBinding", f"-{account}")
        assert binding["subjects"][0]["name"] == one(objects, "ServiceAccount", f"-{account}")["metadata"]["name"]
    assert one(objects, "ServiceAccount", "-functions")["automountServiceAccountToken"] is False


def test_what_a_runner_may_write_is_what_the_release_deploys(render: Render) -> None:
    """The rules themselves are tried on a cluster (tests/cluster/test_rights.py)."""
    objects = render(PRODUCTION, "--set", "images.trainer.repository=registry:5000/a/trainer")
    policy = one(objects, "ValidatingAdmissionPolicy", "-runner")
    binding = one(objects, "ValidatingAdmissionPolicyBinding", "-runner")["spec"]
    assert (binding["policyName"], binding["validationActions"]) == (policy["metadata"]["name"], ["Deny"])
    account = config(objects)[1]["spec"]["template"]["spec"]["serviceAccountName"]
    assert f"'system:serviceaccount:rl:{account}'" in policy["spec"]["matchConditions"][0]["expression"]
    asked = {
        (group, resource) for group, resource, verbs in RIGHTS if {"create", "patch", "update", "delete"} & set(verbs)
    }
    rules = policy["spec"]["matchConstraints"]["resourceRules"]
    assert {(rule["apiGroups"][0], resource) for rule in rules for resource in rule["resources"]} == asked
    knative = config(objects)[0]["platform"]["knative"]
    [pods] = [v["expression"] for v in policy["spec"]["validations"] if "function's pods" in v["message"]]
    named = [json.loads(found) for found in re.findall(r'\["[^]]*\]', pods)]
    images = {knative["image"], *knative["images"].values()}
    assert named[0] == sorted({image.rpartition(":")[0] for image in images})
    assert "registry:5000/a/trainer" in named[0]
    claims = [volume["claim"] for volume in knative["volumes"] if "claim" in volume]
    assert named[1:] == [found for found in (claims, [knative["node_agent"]]) if found]
    [exception] = re.findall(r"\(variables.job == '(.*)' && .* == '(.*)'\)\)", pods)
    assert exception == ("rel-rlhf-orchestrate", *knative["env_secrets"]), "helm test's function, and no job's"
    assert pods.count("+ '-stores']") == 2, "a job's own Secret, as environment and as files"
    assert f'"{knative["service_account"]}"' in pods
    kinds = {item["kind"] for item in render(DEVELOPMENT, "--set", "admissionPolicy.enabled=false")}
    assert not any("Admission" in kind for kind in kinds)


def test_the_runner_goes_on_after_it_was_killed_and_not_after_it_failed(render: Render) -> None:
    spec = config(render(DEVELOPMENT))[1]["spec"]
    assert spec["backoffLimit"] == 10
    ignored, failed = spec["podFailurePolicy"]["rules"]
    assert ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert failed["onExitCodes"]["values"] == [1, 2, 130], "of orchestrator/base/errors.py"
    assert failed["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


def test_secrets_that_exist_are_named_and_none_is_made(render: Render) -> None:
    assert [item for item in render(PRODUCTION) if item["kind"] == "Secret"] == []
    made = {item["metadata"]["name"]: set(item["data"]) for item in render(DEVELOPMENT) if item["kind"] == "Secret"}
    assert made == {
        "rel-rlhf-orchestrate-tokens": {"tokens", "metrics"},
        "rel-rlhf-orchestrate-stores": {"REDIS_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
        "rel-rlhf-orchestrate-seaweedfs": {"s3.json"},
    }


def test_development_stores_are_there_where_no_other_is_named(render: Render) -> None:
    kinds = [item["metadata"]["name"] for item in render(PRODUCTION) if item["kind"] == "Deployment"]
    assert kinds == ["rel-rlhf-orchestrate-api"]
    url = config(render(DEVELOPMENT))[0]["exchange"]["url"]
    assert url.startswith("tiered+s3://rlhf/jobs?endpoint=http://rel-rlhf-orchestrate-seaweedfs:8333&")
    assert url.endswith("&redis=redis://rel-rlhf-orchestrate-valkey:6379/0")
    assert not [item for item in render(REDIS_ONLY) if item["kind"] in ("NetworkPolicy", "PodDisruptionBudget")]


def test_the_api_gives_each_job_a_secret_in_place_of_the_releases(render: Render, tmp_path: Path) -> None:
    role = "arn:aws:iam::1:role/jobs"
    objects = render(PRODUCTION, "--set", f"exchange.role={role},nodeAgent.enabled=false")
    assert (_option(objects, "--stores-secret"), _option(objects, "--stores-role")) == ("rlhf-exchange", role)
    job = job_manifest(config(objects)[1], "j-0123456789", 1, Path("/runs"), "s3://b", "rlhf-exchange")
    assert "rlhf-exchange" not in json.dumps(job).replace("rlhf-exchange=", "")
    assert "j-0123456789-stores" in json.dumps(job["spec"]["template"]["spec"]["volumes"])
    identity = render(DEVELOPMENT, "--set", f"exchange.role={role},exchange.url=s3://b/p")
    assert one(identity, "Secret", "-stores")["data"] is None, "the API has its pod's identity"


def test_helm_tests_are_hooks(scenario: Objects) -> None:
    tests = [item for item in scenario if item["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    assert [test["metadata"]["name"].rpartition("-")[2] for test in tests] == ["api", "exchange", "function"]
    for test in tests[:2]:
        compile(test["spec"]["containers"][0]["args"][0], test["metadata"]["name"], "exec")
    script = one(scenario, "ConfigMap", "-config")["data"]["roundtrip.py"]
    assert script == (CHART / "files" / "roundtrip.py").read_text()
    assert (
        tests[2]["spec"]["serviceAccountName"] == config(scenario)[1]["spec"]["template"]["spec"]["serviceAccountName"]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "exchange.url=,valkey.enabled=false,seaweedfs.enabled=false"], "exchange.url: set it"),
        (["--set", "api.maxRuning=1"], "maxRuning is not allowed"),
        (["--set", "whatever=1"], "whatever is not allowed"),
        (["--set", "exchange.url=dir:///tmp"], "exchange.url"),
        (["--set", "functions.tolerations[0].tolerationSeconds=1"], "tolerationSeconds is not allowed"),
        (["--set", "podSecurity.runAsUser=0"], "runAsUser"),
        (["--set", "functions.cache.hostPath=/b"], "cache"),
        (["--kube-version", "1.29.9"], "incompatible"),
        (["--set", "exchange.role=admin"], "exchange.role"),
        (["--set", "exchange.role=arn:aws:iam::1:role/r,nodeAgent.enabled=true"], "exchange.role: not with nodeAgent"),
    ],
)
def test_values_that_cannot_be(helm: str, words: list[str], said: str) -> None:
    command = [helm, "template", "rel", str(CHART), "-f", str(REDIS_ONLY), "--kube-version", KUBERNETES, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr.replace("Additional property ", ""), done.stderr


def test_every_value_is_in_the_schema_and_the_file_is_short() -> None:
    text = (CHART / "values.yaml").read_text()
    assert len(text.splitlines()) < 150
    schema = json.loads((CHART / "values.schema.json").read_text())
    free = {"jobDefaults", "nodeSelector", "env", "requests", "limits", "labels"}

    def check(values: dict[str, Any], node: dict[str, Any], path: str) -> None:
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        assert node.get("additionalProperties") is False, f"{path}: takes anything"
        for key, value in values.items():
            assert key in node["properties"], f"{path}.{key}: not in the schema"
            if isinstance(value, dict) and key not in free:
                check(value, node["properties"][key], f"{path}.{key}")

    check(yaml.safe_load(text), schema, "values")


def test_knative_is_set_up_for_what_jobs_of_the_chart_ask_for(scenario: Objects) -> None:
    """The operator's object is checked by hand: its CRD takes any string map under spec.config."""
    serving = yaml.safe_load((ROOT / "deploy" / "knative-serving.yaml").read_text())
    assert (serving["apiVersion"], serving["kind"]) == ("operator.knative.dev/v1beta1", "KnativeServing")
    settings = serving["spec"]["config"]
    assert all(isinstance(v, str) for keys in settings.values() for v in keys.values()), "config maps hold strings"
    job = read_job(BODY, JSON_TYPE, roots=[Path("/data")], defaults=config(scenario)[0])
    assert job.platform.knative is not None
    assert {settings["features"].get(key) for key in needed_features(job.platform.knative)} <= {"enabled"}
    assert settings["autoscaler"]["allow-zero-initial-scale"] == "true"
    assert int(settings["defaults"]["max-revision-timeout-seconds"]) > job.limits.call_s + 60


def test_without_values_it_runs_on_one_node_with_cpus(render: Render) -> None:
    objects = render(DEVELOPMENT)
    assert yaml.safe_load(DEVELOPMENT.read_text()) is None, "no values"
    defaults, runner = config(objects)
    knative = defaults["platform"]["knative"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert {knative["image"], *knative["images"].values()} == {f"dev.local/rlhf-trainer:{version}"}
    claims = [item["spec"]["accessModes"] for item in objects if item["kind"] == "PersistentVolumeClaim"]
    assert claims == [["ReadWriteOnce"]] * 2
    [near] = runner["spec"]["template"]["spec"]["affinity"]["podAffinity"].values()
    [term] = near
    assert selects(term["labelSelector"], pods(objects)["rel-rlhf-orchestrate-api"]["metadata"]["labels"])
    assert "affinity" not in config(render(PRODUCTION))[1]["spec"]["template"]["spec"]


def test_a_standby_is_elsewhere_and_leads_by_the_lease_that_its_account_may_patch(render: Render) -> None:
    objects = render(PRODUCTION, "--set", "serviceAccounts.api=")
    api = one(objects, "Deployment", "-api")
    assert api["spec"]["replicas"] == 2
    assert list(api["spec"]["template"]["spec"]["affinity"]) == ["podAntiAffinity"]
    lease = one(objects, "Lease", "-api")["metadata"]["name"]
    assert [r["resourceNames"] for r in one(objects, "Role", "-api")["rules"] if "leases" in r["resources"]] == [
        [lease]
    ]
    assert _option(objects, "--lease") == lease
    [container] = api["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("value", ["storage.runs.size=2Gi", "storage.runs.existingClaim=runs"])
def test_a_claim_for_runs_is_refused_in_one_line(helm: str, value: str) -> None:
    command = [helm, "template", "rel", str(CHART), "--kube-version", KUBERNETES, "--set", value]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "storage.runs: there is no such claim any more; runs are kept in the exchange" in done.stderr


@pytest.mark.parametrize(("values", "wanted"), [(DEVELOPMENT, True), (PRODUCTION, False)])
def test_the_notes_name_what_production_wants(helm: str, tmp_path: Path, values: Path, wanted: bool) -> None:
    """`helm template` shows no notes: here they are a config map's text."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + notes + "{{ end }}")
    kept = 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {notes: {{ include "notes" . | toJson }}}\n'
    (chart / "templates" / "notes.yaml").write_text(kept)
    command = [helm, "template", "rel", str(chart), "-s", "templates/notes.yaml", "-f", str(values)]
    done = subprocess.run([*command, "--kube-version", KUBERNETES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = yaml.safe_load(done.stdout)["data"]["notes"]
    assert "port-forward svc/rel-rlhf-orchestrate-api" in text
    for key in ("exchange.url", "accessModes", "images.actor", "jobDefaults"):
        assert (key in text) == wanted, key
    assert "jobs share this release's credentials of S3" in text


def test_the_oldest_kubernetes_is_said_once() -> None:
    number = f"{OLDEST[0]}.{OLDEST[1]}"
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={number}.0-0", "as the doctor's"
    for text in (CHART / "README.md", ROOT / "deploy" / "README.md", ROOT / "docs" / "knative.md"):
        assert f"Kubernetes {number}" not in text.read_text()


def test_the_sandbox_has_nothing_to_steal_and_jobs_know_where_it_is(render: Render) -> None:
    values = VALUES[0]
    assert not [o for o in render(values) if o["metadata"]["name"].endswith("-sandbox")]
    for runtime, profile in (("", "Unconfined"), ("gvisor", "RuntimeDefault")):
        objects = render(values, "--set", "sandbox.enabled=true", "--set", f"sandbox.runtimeClass={runtime}")
        made = one(objects, "Service", "-sandbox")
        assert made["apiVersion"] == "serving.knative.dev/v1"
        pod = made["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert pod.get("runtimeClassName", "") == runtime
        assert container["securityContext"]["seccompProfile"] == {"type": profile}
        assert not pod["automountServiceAccountToken"]
        assert [entry["name"] for entry in container["env"]] == ["RLHF_PROGRAMS"]
        assert "envFrom" not in container
        assert "volumes" not in pod
        defaults, _ = config(objects)
        url = f"http://{made['metadata']['name']}.rl.svc.cluster.local/run_code"
        assert defaults["platform"]["knative"]["sandbox"] == url


def test_the_node_agent_may_do_nothing_but_own_its_directory(render: Render) -> None:
    objects = render(PRODUCTION)
    pod = one(objects, "DaemonSet", "-node-agent")["spec"]["template"]["spec"]
    [agent], [first] = pod["containers"], pod["initContainers"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert "nvidia.com/gpu" not in agent["resources"]["limits"], "tickets hold the GPUs"
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    [host] = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    defaults, _ = config(objects)
    knative = read_job(BODY, JSON_TYPE, roots=[Path("/data")], defaults=defaults).platform.knative
    assert knative is not None
    assert knative.node_agent == host, "where tickets look for it"
    assert f"--listen={host}/agent.sock" in agent["args"]
    assert not [o for o in render(DEVELOPMENT) if o["kind"] == "DaemonSet"]
