from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.lora import Lora
from fedveil.adapters.prefix import Prefix
from fedveil.config import parse
from fedveil.contract.budget import Budget, Neighbours, Plan, check_seeded
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import TensorSpec
from fedveil.contract.task import Example
from fedveil.contract.trainer import Batch, PerSample
from fedveil.errors import BudgetError, ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgd, Noisy, NoisySteps
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.metered import Accounted
from fedveil.privacy.promised import epsilon
from fedveil.training.per_sample import draw

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)


@dataclass
class Rows:
    """A client whose rows have the gradients (3, 4) and (0, 1), and whose batches hold both."""

    spec: dict = field(default_factory=lambda: {"w": TensorSpec((2,))})
    num_examples: int = 2
    batch_size: int = 2
    steps: int = 2

    def batches(self, sampling, steps, rng, skip=0):
        assert sampling == "poisson"
        return draw(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample_gradients(self, weights, batch: Batch) -> PerSample:
        return PerSample({"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])[list(batch.rows)]}, torch.zeros(len(batch.rows)))


def test_step_by_hand():
    """Clipped to norm 2: (1.2, 1.6) and (0, 1); their sum over 2 times 0.5 is (0.3, 0.65), twice."""
    start = {"w": torch.tensor([1.0, 1.0])}
    found = NoisySteps(Rows(), DpSgd(2.0, 0.0, 0.5), CTX).train(start)
    assert found.weights["w"].tolist() == pytest.approx([0.4, -0.3])
    assert found.report == {"steps": 2.0}
    assert start["w"].tolist() == [1.0, 1.0]


def test_frozen_entries_stay_and_count_for_no_clipping():
    """Without its first entry (3, 4) has norm 4: clipped (0, 2); with (0, 1) a step of 0.75."""
    held = {"w": torch.tensor([True, False])}
    for noise in (0.0, 3.0):
        found = NoisySteps(Rows(), DpSgd(2.0, noise, 0.5), CTX).train({"w": torch.tensor([1.0, 1.0])}, held)
        assert found.weights["w"][0] == 1.0
        assert (found.weights["w"][1] == pytest.approx(-0.5)) == (noise == 0.0)


def test_noise_has_its_standard_deviation():
    """z C eta / B = 3 * 2 * 0.5 / 2 a step and two steps: 1.5 sqrt 2. 5 standard errors of the deviation, seed fixed."""
    drawn = [
        NoisySteps(Rows(), DpSgd(2.0, 3.0, 0.5), RoundContext(i, "a", True, bytes(32), seeded=True)).train(
            {"w": torch.zeros(2)}
        )
        for i in range(500)
    ]
    values = torch.stack([d.weights["w"] for d in drawn]) - torch.tensor([-0.6, -1.3])
    assert float(values.std()) == pytest.approx(1.5 * 2**0.5, rel=5 / 2000**0.5)
    assert abs(float(values.mean())) < 5 * 1.5 * 2**0.5 / 1000**0.5


def test_nothing_looks_at_rows_but_the_noisy_steps():
    local = NoisySteps(Rows(), DpSgd(2.0, 1.1, 0.5), CTX)
    with pytest.raises(ConfigError, match="gradient"):
        local.gradient({})
    for look in (lambda: local.batches("poisson", 1, CTX.rng("x")), lambda: local.per_sample_gradients({}, Batch(())),
                 lambda: local.feature_gradients({}, Batch(()))):  # fmt: skip
        with pytest.raises(ConfigError, match="batches"):
            look()


FIELDS = "dp_sgd = {clip = 2.0, noise = 1.1, learning_rate = 0.5, epsilon = 3.0}"


@pytest.mark.parametrize("name", ["fedavg", "fedrand", "fedper", "fedpara", "fedqsn", "fedlpp", "fedsp", "promptfl"])
def test_any_method_that_trains_takes_it_and_a_site_makes_the_same(name):
    noisy, plain = strategies.create(name, FIELDS), strategies.create(name)
    assert isinstance(noisy, Noisy)
    assert (noisy.plain, noisy.adapter, noisy.version, noisy.uploads) == (
        plain,
        plain.adapter,
        plain.version,
        plain.uploads,
    )
    assert strategies.create_from_json(name, json.dumps(noisy.fields)) == noisy
    assert noisy.budget == Budget(3.0, 1e-5, Neighbours.REPLACE_ONE)
    assert noisy.privacy_spent(Plan(3, 2, 4, 40, Neighbours.REPLACE_ONE)) == {("poisson", 40, 4, 1.1): 6}
    assert plain.budget is None


@pytest.mark.parametrize(
    "name,fields,reason",
    [
        ("dp_fpl", FIELDS, "noise of its own"),
        ("random_binary", FIELDS, "sends gradients"),
        ("fedavg", FIELDS.replace("2.0", "0.0"), "dp_sgd.clip"),
        ("fedavg", FIELDS.replace("1.1", "-1.0"), "dp_sgd.noise"),
        ("fedavg", FIELDS.replace("1.1", "0.0"), "dp_sgd.noise"),
        ("fedavg", FIELDS.replace("0.5", "0.0"), "dp_sgd.learning_rate"),
        ("fedavg", FIELDS.replace("3.0", "-3.0"), "epsilon"),
        ("fedavg", FIELDS.replace("clip", "clipp"), "clip"),
        ("fedavg", "dp_sgd = 3", "dp_sgd"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_field(name, fields, reason):
    with pytest.raises(ConfigError, match=reason):
        strategies.create(name, fields)


def test_a_policy_reads_the_epsilon_and_the_run_keeps_it_to_itself_where_there_is_none():
    counted = FIELDS.replace(", epsilon = 3.0", "")
    assert epsilon(strategies.create("fedqsn", FIELDS), parse({}), 1e-5) == 3.0
    assert epsilon(strategies.create("fedqsn", FIELDS), parse({}), 1e-6) == math.inf
    assert epsilon(strategies.create("fedqsn", counted), parse({}), 1e-5) == math.inf


def test_a_seeded_run_with_an_epsilon_is_refused():
    with pytest.raises(ConfigError, match=r"run\.deterministic"):
        check_seeded(strategies.create("fedavg", FIELDS).budget, deterministic=True)


def test_every_training_of_a_turn_is_charged_before_its_rows_are_looked_at(tmp_path):
    """FedSP trains twice a turn: 2 turns of 2 times 3 steps. The third turn would go above and looks at nothing."""
    ledger, plan = Ledger(tmp_path / "ledger.json"), Plan(1, 3, 4, 9, Neighbours.REPLACE_ONE)
    steps = {("poisson", 9, 4, 2.0): 12}
    wished = accounting.epsilon(steps, 1e-5, Neighbours.REPLACE_ONE) * 1.0001
    noisy = Noisy(strategies.create("fedsp", "alternate = true"), DpSgd(1.0, 2.0, 0.1, wished))
    task = tasks.load(parse({"train.max-steps": 3, "train.batch-size": 4, "train.epochs": 9}), noisy.adapter, "cpu")
    rows = task.encode(Example.of({"mr": f"name[Aromi {i}]", "ref": "Aromi."} for i in range(9)))
    weights = task.initial(rng.initial(0, "w"))
    exchange = Exchange(noisy, "fedsp", task.spec)
    server = noisy.init(task.spec, weights, rng.initial(0, "m"))

    def turn(round_: int):
        names = ledger.names([{"row": i} for i in range(9)])
        local = Accounted(task.local(rows, rng.initial(0, "b")), noisy, ledger, noisy.budget, names)
        ctx = RoundContext(round_, "a", True, rng.fresh_secret())
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, local, ctx)
        return exchange.receive(b"".join(parts), round_)

    for round_ in range(2):
        found = turn(round_)
        assert found.report == {"steps": 6.0}
        assert noisy.privacy_spent(plan) == {("poisson", 9, 4, 2.0): 3}
    (record,) = ledger.names([{"row": 4}])
    assert ledger.epsilon(record, noisy.budget) == pytest.approx(wished / 1.0001)
    with pytest.raises(BudgetError, match="replace-one"):
        turn(2)


def test_fedrand_under_noisy_steps_sends_one_factor_and_keeps_the_other_frozen_entries_exact():
    """The noise is in what is sent: two sites with the same rows and stream end apart, and a frozen tensor does not move."""
    noisy = strategies.create("fedrand", "dp_sgd = {clip = 1.0, noise = 1.0, learning_rate = 0.1}")
    task = tasks.load(parse({"train.max-steps": 1, "train.batch-size": 2}), noisy.adapter, "cpu")
    rows = task.encode(Example.of({"mr": f"name[Aromi {i}]", "ref": "Aromi."} for i in range(6)))
    exchange = Exchange(noisy, "fedrand", task.spec)
    server = noisy.init(task.spec, task.initial(rng.initial(0, "w")), rng.initial(0, "m"))
    sent = []
    for _ in range(2):
        ctx = RoundContext(0, "a", True, bytes(32))
        _, parts = exchange.participate(
            exchange.broadcast(server, ctx), None, task.local(rows, rng.initial(0, "b")), ctx
        )
        sent.append(exchange.receive(b"".join(parts), 0).payload)
    assert sent[0].variant == sent[1].variant
    assert {n[-1] for n in sent[0].fields} == {sent[0].variant}
    assert all(not torch.equal(sent[0].fields[n], sent[1].fields[n]) for n in sent[0].fields)


@pytest.mark.parametrize("adapter", [AllWeights(), Prefix(3), Lora(2)], ids=["all", "prefix", "lora"])
def test_text_rows_have_gradients_of_their_own(adapter):
    """Against backpropagation through each row alone, unpadded; the mean over target tokens."""
    task = tasks.load(parse({}), adapter, "cpu")
    weights = task.initial(rng.initial(0, "w"))
    rows = task.encode(
        Example.of(
            [{"mr": "name[Aromi], food[Thai]", "ref": "Aromi."}, {"mr": "x", "ref": "A long one about Thai food."}]
        )
    )
    found = task.local(rows, rng.initial(0, "b")).per_sample_gradients(weights, Batch((0, 1)))
    for i, row in enumerate(rows):
        task.put(weights)
        batch = task.collate([row])
        loss = task.loss_sum(batch) / batch.terms
        wanted = torch.autograd.grad(loss, list(task.trained.values()))
        assert float(found.losses[i]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, g in zip(task.trained, wanted, strict=True):
            torch.testing.assert_close(found.gradients[name][i], g, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("adapter", [AllWeights(), Lora(2)], ids=["all", "lora"])
def test_images_have_gradients_of_their_own(adapter, tmp_path):
    """Against backpropagation through each image alone."""
    from PIL import Image

    for i in range(3):
        (tmp_path / "train" / f"c{i}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (80 * i, 30, 200 - 60 * i)).save(tmp_path / "train" / f"c{i}" / "x.png")
    flat = {
        "task.name": "image-classification",
        "task.classes": 3,
        "task.target-column": "label",
        "task.label-column": "label",
    }
    task = tasks.load(parse(flat), adapter, "cpu")
    weights = task.initial(rng.initial(0, "w"))
    rows = task.encode(task.examples(tmp_path, "train"))
    found = task.local(rows, rng.initial(0, "b")).per_sample_gradients(weights, Batch((0, 2)))
    for i, row in enumerate((rows[0], rows[2])):
        task.put(weights)
        wanted = torch.autograd.grad(task.loss_sum(task.collate([row])), list(task.trained.values()), allow_unused=True)
        for name, g in zip(task.trained, wanted, strict=True):
            expected = torch.zeros_like(found.gradients[name][i]) if g is None else g
            torch.testing.assert_close(found.gradients[name][i], expected, rtol=1e-3, atol=2e-5)
