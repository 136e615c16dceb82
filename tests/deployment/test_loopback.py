"""A real federation on this machine: SuperLink, three SuperNodes, TLS, node keys; real text, real training.

Over gRPC with Flower 1.39, over HTTP with 1.41 or 1.42: whichever is installed.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64decode, b64encode

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.guard import flower
from fedveil.guard.flower import fleet_http
from fedveil.records import disclosure_ledger
from tests.conftest import ROOT
from tests.deployment.loopback import check_same, in_process, over_grpc

DATA = ROOT / "data" / "e2e"
SITES = 3
CONFIG = {
    "run.deterministic": True,
    "run.seed": 4,
    "task.evaluation": str(DATA),
    "train.max-steps": 3,
    "train.batch-size": 4,
    "evaluate.eval-examples": 4,
    "evaluate.generate": "never",
    "cohort.fraction": 0.6,
    "cohort.sites": SITES,
    "cohort.deadline-seconds": 200.0,
}
ELSEWHERE = (
    "control/list-runs", "control/start-run", "control/register-node", "runtime/acquire-task", "runtime/push-object",
    "fleet/../control/list-runs", "fleet/%2e%2e/control/list-runs", "fleet/%2e%2e%2fcontrol/list-runs",
)  # fmt: skip


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", SITES))) for i in range(SITES)]
    with LocalDeployment(sites, tmp_path_factory.mktemp("federation")) as running:
        yield running
    assert running.processes.alive() == []


@pytest.mark.long
@pytest.mark.timeout(280)
def test_over_the_wire_and_in_process_end_bit_identical(federation, tmp_path):
    """With a worker and over two rounds; the fast tests have a round of FedAvg without (test_one_round)."""
    overrides = CONFIG | {"method.name": "fedrand", "client.worker": True, "run.rounds": 2}
    ended = over_grpc(federation, tmp_path, overrides)
    assert ended.completed, ended.reason
    check_same(tmp_path / "fedrand", in_process(overrides, DATA, SITES), 2)
    lines = disclosure_ledger.read_messages(tmp_path / "fedrand" / "disclosure.jsonl")
    uploads = [line for line in lines if line["direction"] == "up"]
    assert uploads
    for line in uploads:
        assert {name[-1] for name, *_ in line["fields"]} == {line["variant"]}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_bad_field_fails_the_run_in_one_line_before_any_site_is_asked(federation, tmp_path):
    overrides = CONFIG | {"method.params": "rho = 1.5", "run.dir": str(tmp_path), "run.name": "bad"}
    ended = federation.wait(federation.run(ROOT, overrides), timeout=100)
    assert not ended.completed
    status = json.loads((tmp_path / "bad" / "status.json").read_text())
    assert status["reason"] == "method.params: rho: expected a probability from 0 to 1, found 1.5"
    assert not (tmp_path / "bad" / "disclosure.jsonl").exists()


def signed(federation: LocalDeployment, name: str) -> dict[str, str]:
    """The headers of a site's request, as its SuperNode makes them."""
    key = serialization.load_ssh_private_key(federation._key(name).read_bytes(), None)
    stamp = now().isoformat()
    about = {
        fleet_http.PUBLIC_KEY: public_key_to_bytes(key.public_key()),
        fleet_http.SIGNATURE: sign_message(key, stamp.encode()),
    }
    media = {"content-type": "application/protobuf", "accept": "application/protobuf", TIMESTAMP_HEADER: stamp}
    return media | {name: b64encode(value).decode() for name, value in about.items()}


@pytest.mark.long
@pytest.mark.skipif(
    flower.installed_release().speaks != "HTTP", reason="Flower 1.39's fleet port has no paths: it speaks gRPC"
)
@pytest.mark.timeout(120)
def test_whoever_reaches_the_port_of_sites_reaches_nothing_else(federation):
    """With a registered key, as the operator of a site that was broken into has it; then with none."""
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.crt"))
    sites, control = (f"https://127.0.0.1:{port}" for port in (federation._fleet_port, federation._control_port))
    token = {"authorization": f"Bearer {login(federation)}"}
    nodes = {name: node for node, name in zip(sorted(federation.flower.nodes()), "abc", strict=True)}
    with httpx.Client(verify=context, timeout=30, trust_env=False) as client:

        def ask(base: str, path: str, given: dict[str, str], body: bytes = b"", method: str = "POST") -> httpx.Response:
            return client.request(method, base + path, headers=given, content=body)

        for path in ELSEWHERE:
            answer = ask(sites, f"/v1/{path}", signed(federation, "site-0") | token)
            assert (answer.status_code, "serves sites" in answer.text) == (404, True), path
        for path in ("/health", "/docs", "/openapi.json", "/"):
            assert ask(sites, path, signed(federation, "site-0") | token, method="GET").status_code == 404, path
        pulls = [PullMessagesRequest(node=Node(node_id=int(node))).SerializeToString() for node in nodes.values()]
        pull = "/v1/fleet/pull-messages"
        own = [ask(sites, pull, signed(federation, "site-0"), body).status_code for body in pulls]
        assert sorted(own) == [200, 401, 401]  # of three nodes, its own alone
        assert ask(sites, pull, {"content-type": "application/protobuf"}, pulls[own.index(200)]).status_code == 401
        lies = {"host": f"127.0.0.1:{federation._control_port}", "x-forwarded-for": "127.0.0.1:1"}
        assert ask(sites, "/v1/control/list-runs", signed(federation, "site-0") | token | lies).status_code == 404
        assert ask(control, pull, signed(federation, "site-0"), pulls[own.index(200)]).status_code == 403
        assert (
            ask(control, "/v1/control/list-runs", token | {"content-type": "application/protobuf"}).status_code == 200
        )


def login(federation: LocalDeployment) -> str:
    """The operator's token, as `flwr` has it."""
    credentials = json.loads((federation.folder / "flower" / "credentials.yaml").read_text())
    return next(b64decode(value).decode() for name, value in credentials.items() if name.endswith("oidc-access-token"))
