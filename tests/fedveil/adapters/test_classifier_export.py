"""Adapters of classifiers in PEFT's format: the files contain the whole head, and the logits agree."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.residual_lora import ResidualLoraAdapter
from fedveil.contract.task import Example
from fedveil.models import library_logging
from tests.fedveil.tasks.small_classifiers import NAMES, draw_rows, filled, make_task, save_base

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT, as it reads it

PAIRS = {
    "lora": LoraAdapter(rank=4, alpha=6.0),
    "some layers": LoraAdapter(rank=2, targets=r".*\.(query|q_proj)"),
    "plus-one": HadamardLoraAdapter(rank=2),
    "residual": ResidualLoraAdapter(rank=2, alpha=3.0),
}
BASES = {"bert": ("bert", ()), "bert-head": ("bert", NAMES), "llama": ("llama", ())}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    for name, (kind, head) in BASES.items():
        save_base(root / name, kind, head)
    return root


def logits_of(task, weights) -> torch.Tensor:
    rows = task.encode(Example.from_columns(draw_rows(6)))
    return torch.cat([each.logits["target"] for each in task.predict(weights, rows)])


@torch.no_grad()
def logits_with(model, task) -> torch.Tensor:
    """Another program's model on the same texts, one by one."""
    rows = task.encode(Example.from_columns(draw_rows(6)))
    return torch.cat([model.eval()(input_ids=torch.tensor([row.ids])).logits for row in rows])


def plain(folder):
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)  # the library's random head for a base without one
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", PAIRS)
def test_peft_loads_a_classifier_with_the_same_logits(bases, tmp_path, base, kind):
    task = make_task(PAIRS[kind], task__model=str(bases / base))
    weights = filled(task)
    wanted, start = logits_of(task, weights), logits_of(task, task.initial(rng.initial_stream(0, "weights")))
    task.save(weights, tmp_path)
    with library_logging.quiet_libraries():
        theirs = PeftModel.from_pretrained(plain(bases / base), tmp_path)
    torch.testing.assert_close(logits_with(theirs, task), wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(wanted, start, atol=1e-1)
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter_config["task_type"] == "SEQ_CLS"
    assert adapter_config["modules_to_save"] == list(task.base.heads)


@pytest.mark.parametrize("base", BASES)
def test_the_files_have_the_names_of_pefts_own(bases, tmp_path, base):
    """PEFT's own adapter for classification, saved by PEFT, has the same tensors and shapes."""
    task = make_task(LoraAdapter(rank=4), task__model=str(bases / base))
    (tmp_path / "ours").mkdir()
    task.save(filled(task), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    with library_logging.quiet_libraries():
        theirs = get_peft_model(
            plain(bases / base),
            LoraConfig(
                r=4, task_type="SEQ_CLS", target_modules=config["target_modules"], modules_to_save=list(task.base.heads)
            ),
        )
        theirs.save_pretrained(tmp_path / "theirs")
    ours, peft = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert {n: w.shape for n, w in ours.items()} == {n: w.shape for n, w in peft.items()}


@pytest.mark.parametrize("base", BASES)
def test_saving_changes_no_weight_of_the_task(bases, tmp_path, base):
    task = make_task(LoraAdapter(rank=4), task__model=str(bases / base))
    weights = filled(task)
    before = logits_of(task, weights)
    task.save(weights, tmp_path)
    assert torch.equal(logits_of(task, weights), before)


@pytest.mark.parametrize("base", BASES)
def test_all_weights_load_with_the_names_of_the_classes(bases, tmp_path, base):
    task = make_task(AllWeightsAdapter(), task__model=str(bases / base))
    weights = {n: w + 0.1 * torch.randn_like(w) for n, w in task.initial(rng.initial_stream(0, "weights")).items()}
    wanted = logits_of(task, weights)
    task.save(weights, tmp_path)
    with library_logging.quiet_libraries():
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_with(theirs, task), wanted, rtol=1e-4, atol=1e-4)
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert theirs.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("base", BASES)
def test_merged_weights_give_the_same_logits(bases, base):
    task, whole = (make_task(each, task__model=str(bases / base)) for each in (PAIRS["lora"], AllWeightsAdapter()))
    weights = filled(task)
    start = whole.initial(rng.initial_stream(0, "weights"))
    whole.show(start)
    task.adapter.merge(whole.attached, weights)
    merged = {n: p.detach().clone() for n, p in whole.trained.items()}
    torch.testing.assert_close(logits_of(whole, merged), logits_of(task, weights), rtol=1e-3, atol=1e-3)
