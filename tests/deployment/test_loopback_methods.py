"""Every other method over gRPC: what deterministic ones end with is what they end with in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.contract.privacy import Adjacency, Step
from fedveil.privacy import accounting
from fedveil.records import disclosure_ledger
from tests.conftest import ROOT
from tests.deployment.loopback import CLASSES, check_same, in_process, lines, over_grpc, write_pictures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = ROOT / "data" / "e2e"
SITES = 2
CONFIG = {
    "run.deterministic": True,
    "run.seed": 4,
    "run.rounds": 2,
    "train.max-steps": 2,
    "train.batch-size": 4,
    "evaluate.eval-examples": 4,
    "evaluate.generate": "never",
    "cohort.sites": SITES,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Twelve pictures of every class for either split, whose colour says the class."""
    write_pictures(at := tmp_path_factory.mktemp("pictures"))
    return at


def federation_of(data: Path, at: Path) -> LocalDeployment:
    """Every site has a share of the same data."""
    shares = [(("partition-id", i), ("num-partitions", SITES)) for i in range(SITES)]
    return LocalDeployment([LocalSite(f"site-{i}", data, share) for i, share in enumerate(shares)], at)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    with federation_of(TEXT, tmp_path_factory.mktemp("text")) as running:
        yield running


@pytest.fixture(scope="module")
def seeing(pictures, tmp_path_factory):
    with federation_of(pictures, tmp_path_factory.mktemp("seeing")) as running:
        yield running


@pytest.mark.parametrize(
    "method,fields",
    [
        ("fedavg", "upload_bits = 8"),
        ("ditto", ""),
        ("apfl", "alpha_rate = 0.1"),
        ("fedper", ""),
        ("fedpara", ""),
        ("fedlpp", ""),
        ("ffa_lora", "upload_bits = 4"),
        ("rolora", ""),
        ("la_lora", ""),
        ("fedsa_lora", ""),
        ("fedprox", "mu = 1.0"),
        ("fedex_lora", ""),
        ("flora", "ranks = { site-1 = 3 }"),
        ("hetlora", "ranks = { site-1 = 3 }"),
        ("hetlora", "weights = 'norm'\npruning = 0.01\npruning_factor = 0.7"),
        ("scaffold", ""),
        ("fedqsn", "server_rate = 0.1\nclient_rate = 0.1\nbits = 2"),
        ("fedqsn", "server_rate = 0.1\nclient_rate = 0.1\nbits = 4\nquantiser = 'absmax'\nupdate = 'replace'"),
        ("fedsp", "distil_steps = 3"),
    ],
    ids=[
        "fedavg 8 bits",
        "ditto",
        "apfl",
        "fedper",
        "fedpara",
        "fedlpp",
        "ffa_lora",
        "rolora",
        "la_lora",
        "fedsa_lora",
        "fedprox",
        "fedex_lora",
        "flora",
        "hetlora",
        "hetlora as its paper",
        "scaffold",
        "fedqsn",
        "fedqsn absmax",
        "fedsp",
    ],
)
def test_text(method, fields, text, tmp_path):
    flat = CONFIG | {"method.name": method, "method.params": fields, "task.evaluation": str(TEXT)}
    flat |= {"task.server-data": str(TEXT)} if method == "fedsp" else {}
    ended = over_grpc(text, tmp_path, flat)
    assert ended.completed, ended.reason
    check_same(tmp_path / method, in_process(flat, TEXT, SITES), rounds=2)


def test_a_server_optimizer(text, tmp_path):
    flat = CONFIG | {"method.name": "fedavg", "server.optimizer": "fedadam", "task.evaluation": str(TEXT)}
    ended = over_grpc(text, tmp_path, flat)
    assert ended.completed, ended.reason
    check_same(tmp_path / "fedavg", in_process(flat, TEXT, SITES), rounds=2)


def test_noisy_steps_under_fedrand_are_charged_at_every_site(text, tmp_path):
    """Two rounds of two Poisson batches of 4; one factor leaves, and a run that may not cost more is refused."""
    flat = CONFIG | {
        "method.name": "fedrand",
        "task.evaluation": str(TEXT),
        "run.deterministic": False,
        "cohort.max-retries": 0,
        "task.max-tokens": 96,
    }
    counted = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.learning-rate": 0.1}
    ended = over_grpc(text, tmp_path / "first", flat | counted)
    assert ended.completed, ended.reason
    reports = lines(tmp_path / "first" / "fedrand" / "metrics.jsonl")[-1]["reports"]
    assert all(set(report) == {"num_examples", "steps"} for report in reports.values())
    ledgers = sorted(text.folder.rglob(".ledger/*.json"))
    for site, path in zip(("site-0", "site-1"), ledgers, strict=True):
        rows = int(reports[site]["num_examples"])
        assert used(path) == {Step("poisson", rows, 4, 2.0): 4}
    for line in disclosure_ledger.read_messages(tmp_path / "first" / "fedrand" / "disclosure.jsonl"):
        if line["direction"] == "up":
            assert {name[-1] for name, *_ in line["fields"]} == {line["variant"]}
    before = [path.read_bytes() for path in ledgers]
    allowed = accounting.compute_epsilon({Step("poisson", rows, 4, 2.0): 1}, 1e-5, Adjacency.REPLACE_ONE)
    again = over_grpc(text, tmp_path / "again", flat | counted | {"dp.epsilon": allowed})
    assert not again.completed
    assert "for its first client round" in again.reason
    assert [path.read_bytes() for path in ledgers] == before


def used(path: Path) -> dict[Step, int]:
    """The charges of the last run with a claim in a ledger."""
    runs = [entry for entry in json.loads(path.read_text())["entries"] if entry["steps"]]
    return {Step(*step): count for *step, _, count in runs[-1]["steps"]}


def prompts(pictures: Path, method: str, fields: str = "") -> dict:
    return CONFIG | {
        "method.name": method, "method.params": fields, "task.name": "clip-prompt", "task.target-column": "label",
        "task.class-names": ",".join(sorted(CLASSES)), "task.evaluation": str(pictures), "task.partition": "iid",
    }  # fmt: skip


@pytest.mark.parametrize("method", ["promptfl", "fedotp", "fedpgp"])
def test_prompts(method, seeing, pictures, tmp_path):
    flat = prompts(pictures, method)
    ended = over_grpc(seeing, tmp_path, flat)
    assert ended.completed, ended.reason
    check_same(tmp_path / method, in_process(flat, pictures, SITES), rounds=2)


@pytest.mark.parametrize("method", ["random_binary", "fixed_position"])
def test_masked_gradients(method, seeing, pictures, tmp_path):
    flat = prompts(pictures, method) | {"task.name": "image-classification", "task.num-classes": len(CLASSES)}
    ended = over_grpc(seeing, tmp_path, flat)
    assert ended.completed, ended.reason
    check_same(tmp_path / method, in_process(flat, pictures, SITES), rounds=2)


def test_dp_fpl_spends_its_budget_once_at_every_site_and_ends_where_it_is_spent(seeing, pictures, tmp_path):
    """Two rounds of two Poisson batches of 4 of 24 rows: u, v and p_G share z = 4 sqrt(1/2)."""
    spent = {Step("poisson", 24, 4, 8**0.5): 4}
    allowed = accounting.compute_epsilon(spent, 1e-5, Adjacency.REPLACE_ONE) * 1.001
    fields = f'exchange = "epoch"\nclipped = "texts"\nepsilon = {allowed}\nnoise_local = 4.0\nnoise_global = 4.0'
    flat = prompts(pictures, "dp_fpl", fields) | {"run.deterministic": False, "cohort.max-retries": 0}
    ended = over_grpc(seeing, tmp_path / "first", flat)
    assert ended.completed, ended.reason
    for line in disclosure_ledger.read_messages(tmp_path / "first" / "dp_fpl" / "disclosure.jsonl"):
        assert [name for name, *_ in line["fields"]] == ["prompt"]
        assert line["payload_bytes"] == 4 * 16 * 96
    ledgers = sorted(seeing.folder.rglob(".ledger/*.json"))
    assert [path.parent.parent.name for path in ledgers] == ["site-0", "site-1"]
    for path in ledgers:
        assert used(path) == pytest.approx(spent)
    again = over_grpc(seeing, tmp_path / "again", flat | {"run.rounds": 3})
    assert not again.completed
    assert "spent" in again.reason
    assert "replace-one" in again.reason
    for path in ledgers:
        assert used(path) == pytest.approx(spent)
