"""docs/kubernetes.md: its commands render a server and a site of what fedveil made; every field is Kubernetes'."""

from __future__ import annotations

import base64
import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fedveil.console.main import main
from tests.conftest import ROOT, extract

K8S = ROOT / "docker" / "k8s"
OF_SERVER, OF_SITE = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "kubernetes.md").read_text(), re.M | re.S)
VERSIONS = ("1.30", kubernetes_validate.latest_version())
Documents = list[dict[str, Any]]
FILES = sorted(file for file in K8S.rglob("*.yaml") if file.name != "kustomization.yaml")


def require_valid(documents: Documents, version: str) -> None:
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_document_is_one_of_kubernetes(file, version):
    require_valid(list(yaml.safe_load_all(file.read_text())), version)


def wrong(change: str) -> Documents:
    text = (K8S / "server" / "server.yaml").read_text()
    before, after = change.split(" -> ")
    assert before in text
    return list(yaml.safe_load_all(text.replace(before, after)))


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        "readOnlyRootFilesystem -> readOnlyRootFileSystem",
        "replicas: 1 -> replicas: one",
        "podSelector: {} -> podSelectors: {}",
        "periodSeconds -> period",
        "requests: {cpu -> request: {cpu",
    ],
)
def test_a_field_that_kubernetes_does_not_have_is_found(change):
    documents = wrong(change)
    with pytest.raises(kubernetes_validate.ValidationError):
        require_valid(documents, VERSIONS[0])


@pytest.fixture(scope="module")
def pilot(tmp_path_factory):
    """A federation, the kit of its site north with keys, and docker/ beside them, as in a checkout."""
    folder: Path = tmp_path_factory.mktemp("pilot")
    (folder / "federation.toml").write_text('name = "pilot"\nserver = ["fl.example.org"]\nsites = ["north"]\n')
    assert main(["provision", str(folder / "federation.toml")]) == 0
    extract(folder / "pilot" / "kits" / "north.tar.gz", folder)
    assert main(["site", "init", "--kit", str(folder / "pilot-north")]) == 0
    (folder / "docker").symlink_to(ROOT / "docker")
    return folder


def rendered(commands: str, at: Path) -> Documents:
    """What the page's commands print last."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH: it renders what is tested here")
    done = subprocess.run(["bash", "-euc", commands], cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def server(pilot):
    return rendered(OF_SERVER, pilot)


@pytest.fixture(scope="module")
def site(pilot):
    return rendered(OF_SITE, pilot / "pilot-north")


def named(documents: Documents, kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By namespace and name."""
    return {(d["metadata"].get("namespace", ""), d["metadata"]["name"]): d for d in documents if d["kind"] == kind}


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_is_kubernetes(server, site, version):
    require_valid([*server, *site], version)


def test_nothing_but_what_the_site_needs_is_a_secret_of_it(site, pilot):
    secrets = named(site, "Secret")
    kit = pilot / "pilot-north"
    assert {key: sorted(one["data"]) for key, one in secrets.items()} == {
        ("fedveil-site", "node-key"): ["node.key"],
        ("fedveil-site", "superexec-secret"): ["superexec-secret"],
        ("fedveil-site-apps", "superexec-secret"): ["superexec-secret"],
    }
    key = secrets["fedveil-site", "node-key"]["data"]["node.key"]
    assert base64.b64decode(key) == (kit / "keys" / "node.key").read_bytes()
    maps = named(site, "ConfigMap")
    assert sorted(maps["fedveil-site", "kit"]["data"]) == ["ca.crt", "containers.toml", "site-policy.toml"]
    assert sorted(maps["fedveil-site-apps", "site-policy"]["data"]) == ["instruction-keys.toml", "site-policy.toml"]
    assert 'signing-key = "/state/signing.key"' in maps["fedveil-site", "kit"]["data"]["containers.toml"]


def test_the_servers_authority_stays_at_home(server, pilot):
    """Whoever has the CA's key makes servers, and no pod needs it."""
    text = yaml.safe_dump_all(server)
    for file in (pilot / "pilot" / "ca").iterdir():
        if file.suffix == ".key":
            assert base64.b64encode(file.read_bytes()).decode()[:200] not in text.replace("\n", "").replace(" ", "")
    secrets = named(server, "Secret")
    assert "server.key" in secrets["fedveil-server", "superlink"]["data"]
    assert sorted(secrets["fedveil-server", "serverapp"]["data"]) == ["ca.crt", "superexec-secret"]
    assert sorted(secrets["fedveil-server", "instruction-key"]["data"]) == ["instruction.key"]
    assert sorted(named(server, "ConfigMap")["fedveil-server", "roster"]["data"]) == ["signers.json"]
    folder = sorted(file.name for file in (pilot / "pilot" / "registry").iterdir())
    assert sorted(secrets["fedveil-server", "registry"]["data"]) == folder


def test_every_volume_of_a_pod_has_something_behind_it(server, site):
    for documents in (server, site):
        secrets, maps = named(documents, "Secret"), named(documents, "ConfigMap")
        pods = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
        assert len(pods) in (1, 2)
        for pod in pods:
            at = pod["metadata"]["namespace"]
            for volume in pod["spec"]["template"]["spec"]["volumes"]:
                if "secret" in volume:
                    assert (at, volume["secret"]["secretName"]) in secrets
                if "configMap" in volume and not volume["configMap"].get("optional"):
                    assert (at, volume["configMap"]["name"]) in maps


SETTINGS = {
    "superlink": "flower.hospital.example:9443",
    "supernode-address": "172.20.1.2",
    "image": "registry.example/fedveil@sha256:" + "ab" * 32,
    "superexec-image": "registry.example/executor@sha256:" + "cd" * 32,
    "gpus": "3",
    "cpus": "7",
    "memory": "77Gi",
}


@pytest.fixture
def changed(site, pilot):
    """The same site with other settings, all of them. `site` comes first: it has put the files there."""
    file = pilot / "pilot-north" / "settings.yaml"
    before = file.read_text()
    settings = yaml.safe_load(before)
    assert sorted(settings["data"]) == sorted(SETTINGS)
    file.write_text(yaml.safe_dump({**settings, "data": SETTINGS}))
    yield rendered("kubectl kustomize .", pilot / "pilot-north")
    file.write_text(before)


def test_a_setting_reaches_every_place_that_it_names(site, changed):
    pods = named(changed, "Deployment")
    (supernode,) = pods["fedveil-site", "supernode"]["spec"]["template"]["spec"]["containers"]
    (superexec,) = pods["fedveil-site-apps", "superexec"]["spec"]["template"]["spec"]["containers"]
    assert supernode["image"] == SETTINGS["image"]
    assert supernode["command"][2:4] == ["--superlink", SETTINGS["superlink"]]
    assert superexec["image"] == SETTINGS["superexec-image"]
    assert superexec["command"][1:3] == ["--runtime-api-address", f"{SETTINGS['supernode-address']}:9094"]
    assert named(changed, "Service")["fedveil-site", "supernode"]["spec"]["clusterIP"] == SETTINGS["supernode-address"]
    executor = yaml.safe_load(named(changed, "ConfigMap")["fedveil-site-apps", "executor"]["data"]["executor.yaml"])
    assert executor["image"] == SETTINGS["image"]
    asked = {"cpu": SETTINGS["cpus"], "memory": SETTINGS["memory"]}
    assert executor["resources"] == {"requests": asked, "limits": {**asked, "nvidia.com/gpu": SETTINGS["gpus"]}}
    (policy,) = named(changed, "ValidatingAdmissionPolicy").values()
    assert f'image == "{SETTINGS["image"]}"' in policy["spec"]["validations"][1]["expression"]
    documents = copy.deepcopy(site)
    old = next(d for d in documents if d["metadata"]["name"] == "settings")["data"]
    for name in ("superlink", "supernode-address", "image", "superexec-image", "memory"):
        assert old[name] not in yaml.safe_dump_all(changed), name
