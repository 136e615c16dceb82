"""DPO: its loss compared with a reference that uses only transformers and PEFT, one gradient per pair, refusals."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import config as run_config
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import Example
from fedveil.data.batches import TokenExample
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, library_logging
from fedveil.privacy.guarantee_source import check_guarantee, check_public_length
from fedveil.rng import RandomStream
from fedveil.strategies.fedavg import FedAvg
from fedveil.tasks import load_task
from fedveil.tasks.preference import PreferenceTuning
from fedveil.training.per_example import per_example_gradients

COLUMNS = {"task.name": "preference", "task.source-column": "prompt", "task.target-column": "chosen"}
ROWS = [
    {"prompt": "name[Aromi], food[Thai]", "chosen": "Aromi serves Thai food.", "rejected": "Aromi is a pub."},
    {"prompt": "name[The Mill]", "chosen": "The Mill is there.", "rejected": "no"},
    {
        "prompt": "food[French], area[city centre]",
        "chosen": "French food in the city.",
        "rejected": "I do not know it.",
    },
    {"prompt": "a", "chosen": "b", "rejected": "c d e f g h i j k l m n"},
    {"prompt": "name[Zizzi], near[Burger King]", "chosen": "Zizzi is near Burger King.", "rejected": "Zizzi."},
]
EXAMPLES = Example.from_columns(ROWS)


def make(adapter: LoraAdapter | AllWeightsAdapter = LoraAdapter(rank=3, alpha=6.0), **keys: object) -> PreferenceTuning:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    task = load_task(run_config.parse(COLUMNS | flat), adapter, "cpu")
    assert isinstance(task, PreferenceTuning)
    return task


@pytest.fixture(scope="module")
def task() -> PreferenceTuning:
    return make(train__batch_size=2, train__learning_rate=5e-3, train__preference_beta=0.3)


def drawn(task: PreferenceTuning, size: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(31)
    return {n: size * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}


def log_likelihood(model, tokenizer, prompt: str, answer: str) -> torch.Tensor:
    """Token by token, one text at a time, from transformers' logits."""
    asked = tokenizer(f"{prompt}\n")["input_ids"]
    ids = [*tokenizer(f"{prompt}\n{answer}")["input_ids"], tokenizer.eos_token_id]
    assert ids[: len(asked)] == asked
    logits = model(torch.tensor([ids])).logits[0].double()
    total = torch.zeros((), dtype=torch.float64)
    for at in range(len(asked), len(ids)):
        total = total + logits[at - 1, ids[at]] - logits[at - 1].exp().sum().log()
    return total


@pytest.fixture(scope="module")
def twin(task, tmp_path_factory):
    """The loss of a row as its formula has it: PEFT's model of what the task saved, and transformers' base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, base = tmp_path_factory.mktemp("saved"), bundled.bundled_folder("text-generation")
    task.save(drawn(task), folder)
    with library_logging.quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT and transformers about each other
        tokenizer = AutoTokenizer.from_pretrained(base)
        reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        policy = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
        ).eval()

    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name)

    def margin(row: dict[str, str]) -> torch.Tensor:
        def gap(model) -> torch.Tensor:
            chosen, rejected = (log_likelihood(model, tokenizer, row["prompt"], row[k]) for k in ("chosen", "rejected"))
            return chosen - rejected

        with torch.no_grad():
            before = gap(reference)
        return gap(policy) - before

    return policy, lambda row: -torch.log(1 / (1 + torch.exp(-0.3 * margin(row)))), margin


def test_the_loss_and_the_scores_are_those_of_the_twin(task, twin):
    _, loss, margin = twin
    with torch.no_grad():
        losses = [float(loss(row)) for row in ROWS]
        margins = [float(margin(row)) for row in ROWS]
    scores = task.evaluate(drawn(task), EXAMPLES, False)
    assert scores["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-4)
    assert scores["reward_margin"] == pytest.approx(0.3 * sum(margins) / len(margins), abs=2e-4)
    assert scores["preference_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert max(margins) - min(margins) > 0.05  # they differ, so a mean that weighs tokens would differ too

    rows = task.encode(EXAMPLES)
    task.put(drawn(task))
    batch = task.training_batch(rows)
    assert batch.terms == len(ROWS)
    assert float(task.loss_sum(batch).detach()) == pytest.approx(sum(losses), abs=1e-3)


def test_each_pair_has_one_gradient_and_it_is_the_twin_s(task, twin):
    policy, loss, _ = twin
    rows, weights = task.encode(EXAMPLES), drawn(task)
    result = per_example_gradients(task, task.spec, rows, weights)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in result.gradients.values()]).sum(0).sqrt()
    assert norms.shape == (len(ROWS),)
    for i, row in enumerate(ROWS):
        policy.zero_grad()
        value = loss(row)
        value.backward()
        total = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None)
        assert float(result.losses[i]) == pytest.approx(float(value.detach()), abs=2e-4)
        assert float(norms[i]) == pytest.approx(math.sqrt(total), rel=2e-3)
    task.put(weights)
    task.loss_sum(task.training_batch(rows)).backward()
    for name, parameter in task.trained.items():
        assert torch.allclose(result.gradients[name].sum(0), parameter.grad, atol=1e-5)
        parameter.grad = None


def test_the_base_itself_prefers_nothing(task):
    zeros = {name: torch.zeros(spec.shape) for name, spec in task.spec.items()}
    start = task.initial(RandomStream(bytes(32)))
    for weights in (zeros, start):
        scores = task.evaluate(weights, EXAMPLES, False)
        assert scores == {"loss": pytest.approx(math.log(2)), "preference_accuracy": 0.5, "reward_margin": 0.0}


def test_training_learns_what_is_chosen(task):
    rows = task.encode(EXAMPLES)
    start = task.initial(RandomStream(bytes(32)))
    tuned = make(train__batch_size=2, train__learning_rate=5e-3, train__epochs=6)
    result = tuned.trainer(rows, RandomStream(bytes(32))).train(start)
    assert result.report["loss_received"] == pytest.approx(math.log(2))
    after = task.evaluate(result.weights, EXAMPLES, False)
    assert after["loss"] < 0.6
    assert after["preference_accuracy"] == 1.0


def test_a_pair_that_is_cut_keeps_one_prompt_and_counts_once(caplog):
    task = make(task__max_tokens=24)
    long = {"prompt": "word " * 60, "chosen": "one two three four", "rejected": "no"}
    rows = task.encode(Example.from_columns([*ROWS[1:2] * 30, long]))
    assert task.find_cut(rows).tolist() == [False] * 30 + [True]
    row = rows[-1]
    assert row.chosen.length == 24
    assert row.chosen.ids[: row.chosen.start] == row.rejected.ids[: row.rejected.start]
    assert row.rejected.length < 24
    assert "1 of 31" in caplog.text


@settings(max_examples=30, deadline=None)
@given(st.integers(6, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 40))
def test_cut_pairs_have_one_prompt_and_fit(limit, source, chosen, rejected):
    task = make()._of_chosen

    class Tokens:  # one token per character, so that no token spans prompt and answer
        @staticmethod
        def tokenize(texts):
            from fedveil.data.tokenization import MarkedTokens

            return [MarkedTokens([ord(c) for c in each.text], each.marks) for each in texts]

    class Frame:
        begin, end = [], [0]

        @staticmethod
        def conversation(source, target):
            from fedveil.data.tokenization import MarkedText

            return MarkedText(f"{source}\n{target}", (0, len(source), len(source) + 1))

    task.__dict__.update(
        {"_tokens": Tokens, "_frame": Frame, "_limit": lambda some: limit, "_require_whole": lambda r: r}
    )
    ((one, other),) = task.encode_pairs([("s" * source, "c" * chosen, "r" * rejected)])
    assert one.ids[: one.start] == other.ids[: other.start]
    assert max(one.length, other.length) <= limit
    whole = source + 1 + max(chosen, rejected) + 1
    assert (max(one.cut, other.cut) > 0) == (whole > limit)


def test_rows_without_an_answer_are_refused_or_left_out_and_counted(tmp_path):
    gaps = [*ROWS, {"prompt": "x", "chosen": "y", "rejected": None}, {"prompt": "x", "chosen": " ", "rejected": "y"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gaps))
    task = make()
    with pytest.raises(
        TaskError, match='column "rejected" of every row, found .* in row 6 of .*train.jsonl'
    ) as refused:
        task.prepare(tmp_path, "train")
    assert "Aromi" not in str(refused.value)
    prepared = make(task__empty_texts="drop").prepare(tmp_path, "train")
    assert (len(prepared.rows), prepared.dropped, prepared.counts.read_rows) == (5, 2, 7)
    (tmp_path / "test.jsonl").write_text(json.dumps(gaps[-1]) + "\n")
    with pytest.raises(TaskError, match="none of the 1 rows of the split .* has a prompt and two answers"):
        make(task__empty_texts="drop").examples(tmp_path, "test")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(TaskError, match='expected column "rejected"'):
        task.examples(tmp_path, "train")
    with pytest.raises(TaskError, match="there are none to score"):
        task.evaluate(drawn(task), [], False)


@pytest.mark.parametrize(
    "adapter,keys,message",
    [
        (AllWeightsAdapter(), {}, 'adapter.kind: the task "preference" requires "lora"'),
        (LoraAdapter(), {"task__rejected_column": "chosen"}, "task.rejected-column: this is"),
        (
            LoraAdapter(),
            {"task__messages_column": "m", "task__chat_template": True},
            'task.messages-column: the task "preference" reads',
        ),
        (LoraAdapter(), {"train__packing": True}, 'train.packing: the task "preference" supports only False'),
        (LoraAdapter(), {"train__loss_mask": "all"}, "train.loss-mask: the task .* supports only 'targets'"),
    ],
)
def test_what_it_cannot_do_is_refused(adapter, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(adapter, **keys)


def test_other_tasks_refuse_its_beta():
    config = run_config.parse({"train.preference-beta": 0.5})
    with pytest.raises(ConfigError, match='train.preference-beta: the task "text-generation" supports only 0.1'):
        load_task(config, LoraAdapter(), "cpu")
    with pytest.raises(ConfigError, match="train.preference-beta"):
        run_config.parse({"train.preference-beta": 0.0})


def test_a_private_run_needs_a_length():
    config = run_config.parse(COLUMNS | {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    claim = check_guarantee(FedAvg(), config, has_row_gradients=True)
    assert claim is not None
    with pytest.raises(ConfigError, match="task.max-tokens: a privacy claim requires a length"):
        check_public_length(claim, config)
    dropped = run_config.parse(config.flat() | {"task.empty-texts": "drop"})
    with pytest.raises(ConfigError, match='task.empty-texts: with "drop"'):
        check_guarantee(FedAvg(), dropped, has_row_gradients=True)


def test_the_chosen_answers_are_predicted_and_texts_are_written(task):
    rows, weights = task.encode(EXAMPLES[:2]), drawn(task)
    first, second = task.predict(weights, rows)
    assert [p.wanted.tolist() for p in (first, second)] == [row.chosen.ids[row.chosen.start :] for row in rows]
    assert isinstance(rows[0].chosen, TokenExample)
    assert len(task.write(weights, ["name[Aromi]"], [])) == 1
