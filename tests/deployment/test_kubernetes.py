"""docker/k8s: read with Flower's own executor; closed as the compose files are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import factory, kubernetes_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedveil.console.provisioning import compose_files
from fedveil.console.provisioning.federation_folder import FederationFile
from tests.conftest import ROOT

FOLDER = ROOT / "docker" / "k8s"
SERVER, SITE = (list(yaml.safe_load_all((FOLDER / name / f"{name}.yaml").read_text())) for name in ("server", "site"))
LOCKED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


APPS, NODE = "fedveil-site-apps", "fedveil-site"
SUPERNODE = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NODE}},
    "podSelector": {"matchLabels": {"app": "supernode"}},
}


def one(documents: list[dict[str, Any]], kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
    (document,) = (
        d
        for d in documents
        if (d["kind"], d["metadata"]["name"]) == (kind, name) and namespace in (None, d["metadata"].get("namespace"))
    )
    return document


def address() -> str:
    """The SuperNode's, inside the site."""
    return str(one(SITE, "Service", "supernode")["spec"]["clusterIP"])


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("Deployment", "StatefulSet")]


def task_pod() -> dict[str, Any]:
    """The pod that SuperExec would start for a message."""
    text = one(SITE, "ConfigMap", "executor")["data"]["executor.yaml"]
    config = factory._kubernetes_executor_config_from_mapping(yaml.safe_load(text))
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP, task_id=7, runtime_api_address=f"{address()}:9094", token="t", insecure=True,
        root_certificates_path=None, parent_pid=None, runtime_dependency_install=False, suppress_output=False,
    )  # fmt: skip
    return json.loads(json.dumps(kubernetes_executor._build_taskexecutor_pod(spec, config, None, "0" * 12)))


def test_every_pod_is_locked_down():
    for spec in [*pods(SERVER), *pods(SITE), task_pod()["spec"]]:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec.get("automountServiceAccountToken") is False or spec["serviceAccountName"] == "superexec"
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == LOCKED
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
            mounts = {m["name"] for m in container["volumeMounts"]}
            volumes = {v["name"] for v in spec["volumes"]} | {"state", "runs"}
            assert mounts <= volumes


def test_the_programs_are_those_of_the_compose_files():
    federation = FederationFile(name="p", server=["fl.example.org"], sites=["north", "south", "west"])
    services = yaml.safe_load(compose_files.server_compose(federation, "/f"))["services"]
    services |= yaml.safe_load(compose_files.site_compose(federation, "north"))["services"]
    commands = {c["name"]: c["command"] for spec in [*pods(SERVER), *pods(SITE)] for c in spec["containers"]}

    def flags(command: list[str]) -> set[str]:
        joined = re.sub(r"(--(?:superlink|runtime-api-address)) ", r"\1=", " ".join(command))
        words = {word.partition("=/")[0].replace(address(), "supernode") for word in joined.split()}
        return {word.replace("${FEDVEIL_CONTROL_HOST:-127.0.0.1}", "127.0.0.1") for word in words}

    for name in ("superlink", "serverapp", "supernode"):
        assert flags(commands[name]) == flags(services[name]["command"])
    more = {"--executor=kubernetes", "--executor-config"}
    assert flags(commands["superexec"]) == flags(services["clientapp"]["command"]) | more


def test_a_program_that_hangs_is_restarted_after_ten_minutes_of_silence():
    for spec in [*pods(SERVER), *pods(SITE)]:
        for container in spec["containers"]:
            ready, alive = container["readinessProbe"], container["livenessProbe"]
            assert alive["exec"] == ready["exec"]  # the program itself, not whether the server answers a site
            assert alive["periodSeconds"] * alive["failureThreshold"] >= 600
            assert alive["timeoutSeconds"] < alive["periodSeconds"]


def test_the_app_process_alone_has_the_key_that_signs_instructions():
    (pod,) = pods(SERVER)
    mounts = {c["name"]: {m["name"] for m in c["volumeMounts"]} for c in [*pod["containers"], *pod["initContainers"]]}
    seers = {name for name, names in mounts.items() if names & {"instruct", "instruction-key"}}
    assert seers == {"serverapp", "instruct"}
    (variables,) = ({e["name"]: e["value"] for e in c["env"]} for c in pod["containers"] if "env" in c)
    federation = FederationFile(name="p", server=["fl.example.org"], sites=["north"])
    compose = yaml.safe_load(compose_files.server_compose(federation, "/f"))["services"]["serverapp"]["environment"]
    assert variables.items() <= compose.items()
    assert len(variables) == 3


def test_the_message_pod_passes_the_guard_and_sees_no_key():
    pod = task_pod()
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["flwr-clientapp"]  # found on the image's PATH, where the guard's is first
    assert "env" not in container
    assert "PATH=/opt/fedveil/guard:" in (ROOT / "docker" / "Dockerfile").read_text()
    secrets = [v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v]
    assert len(secrets) == 1  # Flower's token for this task
    mounts = [m for m in container["volumeMounts"] if m["name"] in ("data", "policy")]
    assert {m["mountPath"]: m.get("readOnly", False) for m in mounts} == {"/data": True, "/kit": True}


def test_a_signing_key_stays_the_owners_alone_and_no_secret_of_the_namespace_that_superexec_lists():
    """With fsGroup, each mount would make files of the claim readable by the group, and the site refuses such a key."""
    (put,) = yaml.safe_load_all((FOLDER / "site" / "put-signing-key.yaml").read_text())
    context = task_pod()["spec"]["securityContext"]
    assert put["spec"]["securityContext"] == context
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    assert put["metadata"]["namespace"] == APPS
    assert put["spec"]["volumes"] == [{"name": "state", "persistentVolumeClaim": {"claimName": "state"}}]
    assert put["spec"]["automountServiceAccountToken"] is False
    assert [container["securityContext"] for container in put["spec"]["containers"]] == [LOCKED]


def test_only_the_fleet_port_has_a_service_and_ways_are_closed():
    services = [(d["metadata"]["name"], d["spec"]["ports"]) for d in SERVER if d["kind"] == "Service"]
    assert [(name, [p["port"] for p in ports]) for name, ports in services] == [("fleet", [9092])]
    policy = one(SERVER, "NetworkPolicy", "fleet-port-alone")["spec"]
    assert (policy["podSelector"], policy["egress"]) == ({}, [])
    assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [9092]


def test_nobody_at_a_site_reaches_more_than_the_next_one():
    for namespace in (NODE, APPS):
        closed = one(SITE, "NetworkPolicy", "closed", namespace)["spec"]
        assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    port = [{"port": 9094, "protocol": "TCP"}]
    app = one(SITE, "NetworkPolicy", "clientapp", APPS)["spec"]
    assert app["podSelector"]["matchLabels"]["app"] == task_pod()["metadata"]["labels"]["app"] == "clientapp"
    assert app["egress"] == [{"to": [SUPERNODE], "ports": port}]  # no DNS either
    superexec = one(SITE, "NetworkPolicy", "superexec", APPS)["spec"]["egress"]
    assert superexec[0] == {"to": [SUPERNODE], "ports": port}
    assert [p["port"] for p in superexec[1]["ports"]] == [443, 6443]  # the cluster's API
    assert len(superexec) == 2
    outside, names = one(SITE, "NetworkPolicy", "supernode", NODE)["spec"]["egress"]
    assert outside == {"ports": [{"port": 9092, "protocol": "TCP"}]}
    assert names["to"][0]["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}


def test_the_pod_of_a_message_needs_no_name():
    """Its network policy lets it ask nobody for one."""
    (container,) = task_pod()["spec"]["containers"]
    assert f"{address()}:9094" in container["args"]
    assert all(part.isdecimal() for part in address().split("."))


@pytest.mark.parametrize("verb", ["get", "watch", "patch", "update", "*"])
def test_superexec_may_no_more_than_it_needs(verb):
    rules = one(SITE, "Role", "superexec")["rules"]
    assert all(verb not in rule["verbs"] for rule in rules)
    assert {resource for rule in rules for resource in rule["resources"]} == {"pods", "secrets"}
    assert not [d["kind"] for d in SITE if d["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_superexec_lists_secrets_where_no_key_is():
    """Whoever may list secrets reads all of a namespace."""
    role, binding = one(SITE, "Role", "superexec"), one(SITE, "RoleBinding", "superexec")
    config = yaml.safe_load(one(SITE, "ConfigMap", "executor")["data"]["executor.yaml"])
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == config["namespace"] == APPS
    keyed = [
        d["metadata"]["namespace"]
        for d in SITE
        if d["kind"] == "Deployment"
        and any(v.get("secret", {}).get("secretName") == "node-key" for v in d["spec"]["template"]["spec"]["volumes"])
    ]
    assert keyed == [NODE]
    made = yaml.safe_load((FOLDER / "of-site" / "kustomization.yaml").read_text())["secretGenerator"]
    assert [one["namespace"] for one in made if one["name"] == "node-key"] == [NODE]
    assert {file for one in made if one["namespace"] == APPS for file in one["files"]} == {"keys/superexec-secret"}
