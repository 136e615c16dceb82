"""docker/k8s: its admission policy, asked in CEL about the pod that Flower's executor starts, and about others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from cel_expr_python import cel

from tests.deployment.test_kubernetes import APPS, SITE, one, task_pod

POLICY = one(SITE, "ValidatingAdmissionPolicy", "fedveil-site-message-pods")["spec"]
USER = f"system:serviceaccount:{APPS}:superexec"


def answer(expression: str, **variables: Any) -> bool:
    """What an API server would make of it: an expression that fails is a no (failurePolicy: Fail)."""
    env = cel.NewEnv(variables=dict.fromkeys(variables, cel.Type.DYN))
    return env.compile(expression).eval(data=variables).value() is True


def refused(pod: dict[str, Any]) -> list[str]:
    """The beginning of the message of each rule that this pod breaks."""
    rules = POLICY["validations"]
    return [rule["message"].partition(":")[0] for rule in rules if not answer(rule["expression"], object=pod)]


def admitted_pod() -> dict[str, Any]:
    """What Flower's executor sends, as an API server completes it before it asks."""
    pod = task_pod()
    pod["spec"] |= {"serviceAccountName": "default", "serviceAccount": "default", "schedulerName": "default-scheduler"}
    pod["spec"]["tolerations"] = [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}]
    for container in pod["spec"]["containers"]:
        container |= {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "IfNotPresent"}
    return pod


def test_what_flower_starts_is_admitted():
    assert refused(task_pod()) == []
    assert refused(admitted_pod()) == []


def volume(**source: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda pod: pod["spec"]["volumes"].append({"name": "more", **source})


def of_container(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda pod: pod["spec"]["containers"][0].update(fields)


def of_spec(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda pod: pod["spec"].update(fields)


def mount(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    def change(pod: dict[str, Any]) -> None:
        (volume_mount,) = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == name)
        volume_mount.update(fields)

    return change


def without_read_only(pod: dict[str, Any]) -> None:
    (data,) = (v for v in pod["spec"]["volumes"] if v["name"] == "data")
    del data["persistentVolumeClaim"]["readOnly"]


def secret_as_the_token(pod: dict[str, Any]) -> None:
    """Under the name by which the task's own token is let in."""
    (token,) = (v for v in pod["spec"]["volumes"] if v["name"] == "appio-credentials")
    token["secret"]["secretName"] = "superexec-secret"


def policy_from_the_state(pod: dict[str, Any]) -> None:
    """A claim that earlier code could write, in the policy's place."""
    (policy_volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "policy")
    del policy_volume["configMap"]
    policy_volume["persistentVolumeClaim"] = {"claimName": "state"}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another image": (of_container(image="evil:1"), "containers"),
    "a second container": (
        lambda pod: pod["spec"]["containers"].append({**pod["spec"]["containers"][0], "name": "b"}),
        "containers",
    ),
    "an init container": (of_spec(initContainers=[{"name": "i", "image": "fedveil:0.2.0"}]), "containers"),
    "another command": (of_container(command=["sh", "-c", "cat /data/*"]), "command"),
    "no command": (lambda pod: pod["spec"]["containers"][0].pop("command"), "command"),
    "an environment": (of_container(env=[{"name": "PYTHONPATH", "value": "/state"}]), "command"),
    "an environment of a secret": (of_container(envFrom=[{"secretRef": {"name": "x"}}]), "command"),
    "a hook": (of_container(lifecycle={"postStart": {"exec": {"command": ["sh"]}}}), "command"),
    "a probe": (of_container(livenessProbe={"exec": {"command": ["sh"]}}), "command"),
    "a working folder": (of_container(workingDir="/state"), "command"),
    "no label": (lambda pod: pod["metadata"].pop("labels"), "labels"),
    "another label": (lambda pod: pod["metadata"]["labels"].update(app="superexec"), "labels"),
    "superexec's account": (of_spec(serviceAccountName="superexec"), "service account"),
    "a token": (of_spec(automountServiceAccountToken=True), "service account"),
    "a token by default": (lambda pod: pod["spec"].pop("automountServiceAccountToken"), "service account"),
    "a folder of the node": (volume(hostPath={"path": "/"}), "volumes"),
    "another claim": (volume(persistentVolumeClaim={"claimName": "other"}), "volumes"),
    "the SuperExec's secret": (volume(secret={"secretName": "superexec-secret"}), "volumes"),
    "the SuperExec's secret as the token": (secret_as_the_token, "volumes"),
    "another config map": (volume(configMap={"name": "executor"}), "volumes"),
    "data to write": (without_read_only, "volumes"),
    "the policy from the state": (policy_from_the_state, "mounts"),
    "a mount over the programs": (mount("state", mountPath="/opt/fedveil/guard"), "mounts"),
    "a part of a volume": (mount("state", subPath="x"), "mounts"),
}


@pytest.mark.parametrize("how", WRONG)
def test_another_pod_is_refused_and_the_message_says_what_is_wrong(how):
    change, rule = WRONG[how]
    pod = copy.deepcopy(admitted_pod())
    change(pod)
    assert refused(pod) == [rule]


def test_every_rule_refuses_some_pod():
    assert {rule for _, rule in WRONG.values()} == {r["message"].partition(":")[0] for r in POLICY["validations"]}


def test_superexec_is_bound_and_the_sites_own_people_are_not():
    (condition,) = POLICY["matchConditions"]
    assert answer(condition["expression"], request={"userInfo": {"username": USER}})
    assert not answer(condition["expression"], request={"userInfo": {"username": "admin"}})


def test_the_policy_fails_closed_and_is_bound_to_the_namespace_of_the_message_pods():
    binding = one(SITE, "ValidatingAdmissionPolicyBinding", "fedveil-site-message-pods")["spec"]
    assert POLICY["failurePolicy"] == "Fail"
    assert (binding["policyName"], binding["validationActions"]) == ("fedveil-site-message-pods", ["Deny"])
    assert binding["matchResources"]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": APPS}
    (subject,) = one(SITE, "RoleBinding", "superexec")["subjects"]
    assert f"system:serviceaccount:{subject['namespace']}:{subject['name']}" == USER
    assert POLICY["matchConstraints"]["resourceRules"] == [
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    ]
