"""docker/k8s: read with Flower's own executor; closed as the compose files are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import factory, kubernetes_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedveil.console.provisioning import compose
from tests.conftest import ROOT

FOLDER = ROOT / "docker" / "k8s"
SERVER, SITE = (list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())) for name in ("server", "site"))
LOCKED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("Deployment", "StatefulSet")]


def task_pod() -> dict[str, Any]:
    """The pod that SuperExec would start for a message."""
    text = one(SITE, "ConfigMap", "executor")["data"]["executor.yaml"]
    config = factory._kubernetes_executor_config_from_mapping(yaml.safe_load(text))
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP, task_id=7, runtime_api_address="supernode:9094", token="t", insecure=True,
        root_certificates_path=None, parent_pid=None, runtime_dependency_install=False, suppress_output=False,
    )  # fmt: skip
    return json.loads(json.dumps(kubernetes_executor._build_taskexecutor_pod(spec, config, None, "0" * 12)))


def test_every_pod_is_locked_down():
    for spec in [*pods(SERVER), *pods(SITE), task_pod()["spec"]]:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec.get("automountServiceAccountToken") is False or spec["serviceAccountName"] == "superexec"
        for container in spec["containers"]:
            assert container["securityContext"] == LOCKED
            mounts = {m["name"] for m in container["volumeMounts"]}
            volumes = {v["name"] for v in spec["volumes"]} | {"state", "runs"}
            assert mounts <= volumes


def test_the_programs_are_those_of_the_compose_files():
    services = yaml.safe_load(compose.server("p", "i", 9092, "/f"))["services"]
    services |= yaml.safe_load(compose.site("p", "north", "i", "fl.example.org:9092"))["services"]
    found = {c["name"]: c["command"] for spec in [*pods(SERVER), *pods(SITE)] for c in spec["containers"]}

    def flags(command: list[str]) -> set[str]:
        words = {word.partition("=/")[0] for word in command}
        return {word.replace("${FEDVEIL_CONTROL_HOST:-127.0.0.1}", "127.0.0.1") for word in words}

    for name in ("superlink", "serverapp", "supernode"):
        assert flags(found[name]) == flags(services[name]["command"])
    more = {"--executor=kubernetes", "--executor-config"}
    assert flags(found["superexec"]) == flags(services["clientapp"]["command"]) | more


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


def test_only_the_fleet_port_has_a_service_and_ways_are_closed():
    services = [(d["metadata"]["name"], d["spec"]["ports"]) for d in SERVER if d["kind"] == "Service"]
    assert [(name, [p["port"] for p in ports]) for name, ports in services] == [("fleet", [9092])]
    policy = one(SERVER, "NetworkPolicy", "fleet-port-alone")["spec"]
    assert (policy["podSelector"], policy["egress"]) == ({}, [])
    assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [9092]
    assert one(SITE, "NetworkPolicy", "closed")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    app = one(SITE, "NetworkPolicy", "clientapp")["spec"]
    assert app["podSelector"]["matchLabels"]["app"] == task_pod()["metadata"]["labels"]["app"] == "clientapp"
    assert [p["port"] for rule in app["egress"] for p in rule["ports"]] == [9094, 53, 53]


@pytest.mark.parametrize("verb", ["get", "watch", "patch", "update", "*"])
def test_superexec_may_no_more_than_it_needs(verb):
    assert all(verb not in rule["verbs"] for rule in one(SITE, "Role", "superexec")["rules"])
