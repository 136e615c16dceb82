"""Token and text classification over gRPC: in the clear, under secure sums, and with patients as units."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from fedveil.config import parse
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.runs.ledger_summary import ledger_lines
from fedveil.contract.privacy import Step
from fedveil.models import library_logging
from fedveil.records.tensor_state import state_digest
from fedveil.tasks import load_task
from fedveil.training.classifier_inputs import model_inputs
from tests.deployment.loopback import check_same, in_process, lines, over_grpc
from tests.fedveil.tasks import small_classifiers, small_taggers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # of PEFT, as it reads it
]

SITES, TEST_ROWS, PATIENTS = 3, 24, 10
CONFIG = {
    "method.name": "fedavg", "run.deterministic": True, "run.seed": 4, "run.rounds": 2, "train.epochs": 1,
    "train.batch-size": 4, "train.learning-rate": 0.01, "task.max-tokens": small_classifiers.CONTEXT,
    "evaluate.eval-examples": 2 * TEST_ROWS, "cohort.sites": SITES, "cohort.min-sites": SITES,
    "cohort.max-retries": 0,
}  # fmt: skip
SECURE = {"secure.enabled": True, "secure.min-sites": SITES, "secure.threshold": SITES}


@dataclass(frozen=True)
class Hospitals:
    """Three sites in real processes, with folders of the bases and of the rows that both tasks read."""

    deployment: LocalDeployment
    data: Path
    bases: Path

    def config(self, name: str) -> dict[str, Any]:
        texts = {"task.class-names": ",".join(small_classifiers.NAMES), "task.source-column": "note"}
        texts |= {"task.target-column": "ward"}
        tags = small_taggers.keys_of(task__max_tokens=small_taggers.CONTEXT)
        keys = {"token-classification": tags, "text-classification": {"task.name": "text-classification", **texts}}
        where = {"task.evaluation": str(self.data), "task.model": str(self.bases / name)}
        return CONFIG | keys[name] | where | {"task.label-column": "hospital", "task.partition": "natural"}


def draw_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a sentence and its tags, a note and its ward, and a patient, who is in one hospital only."""
    pairs = zip(small_taggers.draw_rows(count, seed), small_classifiers.draw_rows(count, seed), strict=True)
    rows = [{**tagged, **labelled} for tagged, labelled in pairs]
    return [
        {**row, "patient": f"Secret-{i % (SITES * PATIENTS)}", "hospital": f"h{i % SITES}"}
        for i, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> Iterator[Hospitals]:
    root = tmp_path_factory.mktemp("hospitals")
    small_taggers.save_base(root / "token-classification", "bert")
    small_classifiers.save_base(root / "text-classification", "bert")
    data = root / "rows"
    for split, count, seed in (("train", 2 * SITES * PATIENTS, 0), ("test", TEST_ROWS, 1)):
        small_taggers.save_rows(data, draw_rows(count, seed), split)
    shares = [(("partition-id", i), ("num-partitions", SITES)) for i in range(SITES)]
    sites = [LocalSite(f"site-{i}", data, share) for i, share in enumerate(shares)]
    with LocalDeployment(sites, root / "federation") as deployment:
        yield Hospitals(deployment, data, root)


def peft_loss(flat: dict[str, Any], final: Path) -> float:
    """The mean loss on the test rows, per word or per text, of the folder that PEFT loads onto the plain base."""
    config = parse(flat)
    name, model = config.task.name, config.task.model
    is_tagging = name == "token-classification"
    kind, labels = (
        (AutoModelForTokenClassification, len(small_taggers.TAGS))
        if is_tagging
        else (AutoModelForSequenceClassification, len(small_classifiers.NAMES))
    )
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)  # of a head that the folder replaces
        theirs = PeftModel.from_pretrained(kind.from_pretrained(model, num_labels=labels), final).eval()
    made = small_taggers.make_task if is_tagging else small_classifiers.make_task
    task: Any = load_task(config, made(task__model=model).adapter, "cpu")
    batch = task.collate(task.encode(task.examples(Path(config.task.evaluation), "test")))
    with torch.no_grad():
        logits = theirs(**model_inputs(batch.ids, batch.mask, batch.types)).logits
    wanted = batch.tags if is_tagging else batch.labels
    return float(functional.cross_entropy(logits.reshape(-1, labels), wanted.reshape(-1)))


@pytest.mark.parametrize("name", ["token-classification", "text-classification"])
def test_a_run_equals_one_process_and_ends_in_a_folder_that_peft_loads(name, hospitals, tmp_path):
    flat = hospitals.config(name)
    ended = over_grpc(hospitals.deployment, tmp_path, flat, timeout=800)
    assert ended.completed, ended.reason
    check_same(tmp_path / "fedavg", in_process(flat, hospitals.data, SITES), rounds=2)
    metrics = lines(tmp_path / "fedavg" / "metrics.jsonl")
    first, last = (metrics[i]["scores"]["server"] for i in (0, -1))
    assert last["loss"] < first["loss"]
    assert set(last) >= ({"f1"} if name == "token-classification" else {"accuracy"})
    assert peft_loss(flat, tmp_path / "fedavg" / "final") == pytest.approx(last["loss"], rel=1e-4)


def test_tags_under_a_secure_sum_end_with_the_model_of_one_process(hospitals, tmp_path):
    flat = hospitals.config("token-classification") | SECURE
    ended = over_grpc(hospitals.deployment, tmp_path, flat, timeout=800)
    assert ended.completed, ended.reason
    metrics = lines(tmp_path / "fedavg" / "metrics.jsonl")
    assert metrics[-1]["weights"] == state_digest(in_process(flat, hospitals.data, SITES).models()["server"])
    for record in metrics[1:]:
        assert (record["failed"], record["reports"], record["unseen"]["sites"]) == ({}, {}, SITES)
    loss = metrics[-1]["scores"]["server"]["loss"]
    assert peft_loss(flat, tmp_path / "fedavg" / "final") == pytest.approx(loss, rel=1e-4)


def test_tags_of_patients_are_charged_by_patient_and_no_id_leaves_a_site(hospitals, tmp_path):
    """Ten patients with two rows each at every site, and two rounds of Poisson batches of five patients on average."""
    flat = hospitals.config("token-classification") | {
        "run.deterministic": False, "dp.unit-column": "patient", "dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0,
        "dp.learning-rate": 0.1, "train.batch-size": 5,
    }  # fmt: skip
    ended = over_grpc(hospitals.deployment, tmp_path, flat, timeout=800)
    assert ended.completed, ended.reason
    record = lines(tmp_path / "fedavg" / "metrics.jsonl")[-1]
    steps = {site: int(report["steps"]) for site, report in record["reports"].items()}
    assert {report["num_examples"] for report in record["reports"].values()} == {PATIENTS}
    ledgers = sorted(hospitals.deployment.folder.rglob(".ledger/*.json"))
    for (site, count), path in zip(sorted(steps.items()), ledgers, strict=True):
        (entry,) = (each for each in json.loads(path.read_text())["entries"] if each["steps"])
        assert {Step(*step): times for *step, _, times in entry["steps"]} == {
            Step("poisson", PATIENTS, 5, 2.0): 2 * count
        }
        said = "\n".join(ledger_lines(hospitals.deployment.folder / "sites" / site, ""))
        assert "Secret-" not in said
    assert math.isfinite(record["scores"]["server"]["loss"])
    assert peft_loss(flat, tmp_path / "fedavg" / "final") > 0
    written = [path for path in [*tmp_path.rglob("*"), *hospitals.deployment.folder.rglob("*")] if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if b"Secret-" in path.read_bytes()]
