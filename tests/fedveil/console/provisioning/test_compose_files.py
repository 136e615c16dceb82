"""compose.yaml of the repository against the files that provisioning writes: the same federation, on one host."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fedveil.console.provisioning import compose_files
from fedveil.console.provisioning.federation_folder import FederationFile
from fedveil.guard import last_heartbeat
from tests.conftest import ROOT

SITES = ("north", "south", "west")
FEDERATION = FederationFile(name="trial", server=["superlink"], sites=list(SITES))
SERVER = yaml.safe_load(compose_files.server_compose(FEDERATION, "/federation/trial"))["services"]
SITE = yaml.safe_load(compose_files.site_compose(FEDERATION, "North.1"))
TRIAL = yaml.safe_load((ROOT / "compose.yaml").read_text())
SIGNING = {"FEDVEIL_INSTRUCTION_KEY", "FEDVEIL_SIGNERS", "FEDVEIL_BUNDLES"}
LASTING = [name for name in TRIAL["services"] if name in SERVER or name.endswith(("-supernode", "-clientapp"))]


def flags(service: dict[str, Any]) -> set[str]:
    """A command without the paths of its files, which differ by host."""
    return {word.partition("=/")[0] for word in service["command"]}


@pytest.mark.parametrize("name", ["superlink", "serverapp"])
def test_the_server_is_the_same_on_one_host_as_on_its_own(name):
    assert flags(TRIAL["services"][name]) == flags(SERVER[name])
    assert TRIAL["services"][name]["network_mode"] == SERVER[name]["network_mode"] == "service:pod"


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["supernode", "clientapp"])
def test_a_site_is_the_same_on_one_host_as_on_its_own(site, name):
    assert flags(TRIAL["services"][f"{site}-{name}"]) == flags(SITE["services"][name])


@pytest.mark.parametrize("name", LASTING)
def test_every_service_is_locked_down_and_the_same(name):
    service = TRIAL["services"][name]
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    cpus = 1 if name == "operator" else "${FEDVEIL_CPUS:-2}"
    assert (service["mem_limit"], service["cpus"]) == ("${FEDVEIL_MEMORY:-16g}", cpus)
    assert SITE["services"]["doctor"]["cpus"] == SITE["services"]["init"]["cpus"] == 1  # as many as each host has
    assert service["pids_limit"] == SITE["services"]["clientapp"]["pids_limit"] == 1024
    assert SITE["services"]["clientapp"]["mem_limit"] == SERVER["superlink"]["mem_limit"] == service["mem_limit"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    own = SIGNING if name == "serverapp" else {last_heartbeat.VARIABLE} if name.endswith("-supernode") else set()
    assert {k: v for k, v in service["environment"].items() if k not in own} == SITE["services"]["clientapp"][
        "environment"
    ]
    assert service["environment"]["FLWR_TELEMETRY_ENABLED"] == "0"
    assert service["environment"]["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert service["environment"]["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert "ports" not in service or service["ports"] == ["${FEDVEIL_FLEET_PORT:-9092}:9092"]
    assert name == "pod" or "ports" not in service


def test_sites_share_no_network_and_what_runs_apps_has_no_way_out():
    services, networks = TRIAL["services"], TRIAL["networks"]
    for site in SITES:
        assert set(services[f"{site}-clientapp"]["networks"]) == {site}
        assert set(services[f"{site}-supernode"]["networks"]) == {site, f"{site}-fleet"}
        assert networks[site] == networks[f"{site}-fleet"] == {"internal": True}
    assert set(services["pod"]["networks"]) == {"public", *(f"{site}-fleet" for site in SITES)}


def test_a_sites_keys_are_seen_by_its_own_init_and_supernode_alone():
    for site in SITES:
        seers = [
            name for name, s in TRIAL["services"].items() if any(f"{site}-keys:" in v for v in s.get("volumes", ()))
        ]
        assert seers == [f"{site}-init", f"{site}-supernode"]
    seers = [name for name, s in TRIAL["services"].items() if any(v.startswith("ca:") for v in s.get("volumes", ()))]
    assert seers == ["setup"]


def test_what_runs_apps_sees_the_signing_key_or_the_roster_and_no_other_key():
    clientapp = {v.rpartition(":ro")[0] or v for v in SITE["services"]["clientapp"]["volumes"]}
    assert "secret:/secret" in clientapp
    assert not any(":/keys" in v for v in clientapp)
    assert "secret:/secret:ro" in SITE["services"]["doctor"]["volumes"]
    assert "--secret" in SITE["services"]["init"]["entrypoint"]
    assert "./roster:/roster:ro" in SERVER["serverapp"]["volumes"]
    assert not any("registry" in v for v in SERVER["serverapp"]["volumes"])  # which has the operators' tokens' hashes
    assert "roster:/roster:ro" in TRIAL["services"]["serverapp"]["volumes"]
    writers = [
        name
        for name, s in TRIAL["services"].items()
        if any(v.startswith("roster:") and not v.endswith(":ro") for v in s.get("volumes", ()))
    ]
    assert writers == ["setup", "enrol", "operator", "demo"]
    folders = (ROOT / "docker" / "Dockerfile").read_text()
    assert " roster " in next(line for line in folders.splitlines() if "for folder in federation" in line)


def test_the_app_process_alone_has_the_key_that_signs_instructions():
    for services in (SERVER, TRIAL["services"]):
        assert services["serverapp"]["environment"].keys() - services["superlink"]["environment"].keys() == SIGNING
    mounts = {name: {v.split(":")[0] for v in s["volumes"]} for name, s in SERVER.items() if "volumes" in s}
    assert [name for name, sources in mounts.items() if "./instruct" in sources] == ["serverapp"]
    assert mounts["superlink"] == {
        "./ca.crt", "./server.pem", "./server.key", "./superexec-secret", "../registry", "state",
    }  # fmt: skip
    setup = (ROOT / "docker" / "trial.sh").read_text()
    assert "mv server/instruct/instruction.key /secret/" in setup  # away from the volume that the SuperLink sees
    assert "./instruction-keys.toml:/kit/instruction-keys.toml:ro" in SITE["services"]["clientapp"]["volumes"]


def test_a_supernodes_health_tells_whether_the_server_hears_it():
    kubernetes = yaml.safe_load_all((ROOT / "docker" / "k8s" / "site" / "site.yaml").read_text())
    (pod,) = next(
        object_["spec"]["template"]["spec"]["containers"]
        for object_ in kubernetes
        if object_["kind"] == "Deployment" and object_["metadata"]["name"] == "supernode"
    )
    services = [SITE["services"]["supernode"], *(TRIAL["services"][f"{site}-supernode"] for site in SITES)]
    for service in services:
        file = service["environment"][last_heartbeat.VARIABLE]
        assert file.startswith("/tmp/")  # which is empty after a restart: an old answer does not count
        assert service["healthcheck"]["test"][-2:] == ["--heartbeat", file]
        assert service["healthcheck"]["interval"] == "10s"
        assert service["environment"].keys() - SITE["services"]["clientapp"]["environment"].keys() == {
            last_heartbeat.VARIABLE
        }
        assert {"name": last_heartbeat.VARIABLE, "value": file} in pod["env"]
    others = [s for name, s in {**SERVER, **SITE["services"]}.items() if name != "supernode" and "healthcheck" in s]
    assert not any("--heartbeat" in service["healthcheck"]["test"] for service in others)


def test_a_name_fits_a_compose_project():
    assert SITE["name"] == "fedveil-north-1"


def test_gpus_are_an_override():
    override = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]
    assert set(override) == {f"{site}-clientapp" for site in SITES}
    (devices,) = yaml.safe_load(compose_files.gpu_override("clientapp"))["services"]["clientapp"]["deploy"][
        "resources"
    ]["reservations"]["devices"]
    assert override["north-clientapp"]["deploy"]["resources"]["reservations"]["devices"] == [devices]
    assert devices == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_sites_wait_the_longer_before_they_ask_again_the_more_there_are():
    for sites, seconds in ((3, "0.2"), (40, "0.2"), (1000, "5")):
        many = FEDERATION.model_copy(update={"sites": [f"s{i}" for i in range(sites)]})
        services = yaml.safe_load(compose_files.site_compose(many, "north"))["services"]
        for name in ("supernode", "clientapp"):
            assert services[name]["environment"]["FEDVEIL_POLL_SECONDS"] == f"${{FEDVEIL_POLL_SECONDS:-{seconds}}}"


def test_another_control_port_is_that_of_every_service_of_the_server():
    other = FEDERATION.model_copy(update={"control_port": 8765})
    services = yaml.safe_load(compose_files.server_compose(other, "/federation/trial"))["services"]
    assert "--port=8765" in services["superlink"]["command"]
    assert "--runtime-api-address=127.0.0.1:8765" in services["serverapp"]["command"]
    assert yaml.safe_load(compose_files.operators_override(other))["services"]["pod"]["ports"] == [
        "127.0.0.1:8765:8765"
    ]
    assert "8000" not in compose_files.server_compose(other, "/f") + compose_files.operators_override(other)
