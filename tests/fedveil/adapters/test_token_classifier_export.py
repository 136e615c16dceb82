"""Adapters of token classifiers in PEFT's format: the files contain the whole head, and the logits agree."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import Example
from fedveil.models import library_logging
from fedveil.tasks.token_classification import NO_TAG
from tests.fedveil.tasks.small_taggers import TAGS, draw_rows, filled, make_task, save_base

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT, as it reads it

PAIRS = {
    "lora": LoraAdapter(rank=4, alpha=6.0),
    "some layers": LoraAdapter(rank=2, targets=r".*\.(query|q_proj)"),
    "plus-one": HadamardLoraAdapter(rank=2),
}
BASES = {"bert": ("bert", ()), "bert-head": ("bert", TAGS), "llama": ("llama", ())}


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
    """Another program's model on the same texts, one by one, at the first token of each word."""
    parts = []
    for row in task.encode(Example.from_columns(draw_rows(6))):
        logits = model.eval()(input_ids=torch.tensor([row.ids])).logits[0]
        parts.append(logits[[at for at, tag in enumerate(row.tags) if tag != NO_TAG]])
    return torch.cat(parts)


def plain(folder):
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)  # the library's random head for a base without one
        return AutoModelForTokenClassification.from_pretrained(folder, num_labels=5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", PAIRS)
def test_peft_loads_a_token_classifier_with_the_same_logits(bases, tmp_path, base, kind):
    task = make_task(PAIRS[kind], task__model=str(bases / base))
    weights = filled(task)
    wanted, start = logits_of(task, weights), logits_of(task, task.initial(rng.initial_stream(0, "weights")))
    task.save(weights, tmp_path)
    with library_logging.quiet_libraries():
        theirs = PeftModel.from_pretrained(plain(bases / base), tmp_path)
    torch.testing.assert_close(logits_with(theirs, task), wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(wanted, start, atol=1e-1)
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter_config["task_type"] == "TOKEN_CLS"
    assert adapter_config["modules_to_save"] == list(task.base.heads)


@pytest.mark.parametrize("base", BASES)
def test_the_files_have_the_names_of_pefts_own(bases, tmp_path, base):
    """PEFT's own adapter for token classification, saved by PEFT, has the same tensors and shapes."""
    task = make_task(LoraAdapter(rank=4), task__model=str(bases / base))
    (tmp_path / "ours").mkdir()
    task.save(filled(task), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    heads = list(task.base.heads)
    with library_logging.quiet_libraries():
        wanted = LoraConfig(r=4, task_type="TOKEN_CLS", target_modules=config["target_modules"], modules_to_save=heads)
        get_peft_model(plain(bases / base), wanted).save_pretrained(tmp_path / "theirs")
    ours, peft = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert {n: w.shape for n, w in ours.items()} == {n: w.shape for n, w in peft.items()}


@pytest.mark.parametrize("base", BASES)
def test_all_weights_load_with_the_names_of_the_tags(bases, tmp_path, base):
    task = make_task(AllWeightsAdapter(), task__model=str(bases / base))
    weights = {n: w + 0.1 * torch.randn_like(w) for n, w in task.initial(rng.initial_stream(0, "weights")).items()}
    wanted = logits_of(task, weights)
    task.save(weights, tmp_path)
    with library_logging.quiet_libraries():
        theirs = AutoModelForTokenClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_with(theirs, task), wanted, rtol=1e-4, atol=1e-4)
    assert theirs.config.id2label == dict(enumerate(TAGS))
