from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.privacy import Adjacency, PrivacyBudget, SamplingPlan, Step
from fedveil.contract.task import Example
from fedveil.contract.trainer import BatchIndices, PerExampleGradients
from fedveil.errors import BudgetError, ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.privacy.charged_gradients import ChargedGradientSource
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.privacy.guarantee_source import check_guarantee, guarantee_of
from fedveil.privacy.ledger import PrivacyLedger, RunCharger
from fedveil.privacy.ledger_account import Party, RunTerms
from fedveil.privacy.server_side_bound import promised_epsilon
from fedveil.training.per_example import draw_batches

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)
SPEC = {"w": ParamSpec((2,))}


@dataclass
class Rows:
    """A client whose rows have the gradients (3, 4) and (0, 1), and whose batches hold both."""

    num_examples: int = 2
    batch_size: int = 2
    steps: int = 2

    def batches(self, sampling, steps, rng, skip=0):
        assert sampling == "poisson"
        return draw_batches(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample(self, weights, batch: BatchIndices) -> PerExampleGradients:
        return PerExampleGradients(
            {"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])[list(batch.rows)]}, torch.zeros(len(batch.rows))
        )


def test_step_by_hand():
    """Clipped to norm 2: (1.2, 1.6) and (0, 1); their sum over 2 times 0.5 is (0.3, 0.65), twice."""
    start = {"w": torch.tensor([1.0, 1.0])}
    result = NoisyTrainer(SPEC, Rows(), DpSgdConfig(2.0, 0.0, 0.5), CTX).train(start)
    assert result.weights["w"].tolist() == pytest.approx([0.4, -0.3])
    assert result.report == {"steps": 2.0}
    assert start["w"].tolist() == [1.0, 1.0]


def test_frozen_entries_stay_and_count_for_no_clipping():
    """Without its first entry (3, 4) has norm 4: clipped (0, 2); with (0, 1) a step of 0.75."""
    frozen_masks = {"w": torch.tensor([True, False])}
    for noise in (0.0, 3.0):
        result = NoisyTrainer(SPEC, Rows(), DpSgdConfig(2.0, noise, 0.5), CTX).train(
            {"w": torch.tensor([1.0, 1.0])}, frozen_masks
        )
        assert result.weights["w"][0] == 1.0
        assert (result.weights["w"][1] == pytest.approx(-0.5)) == (noise == 0.0)


def test_noise_has_its_standard_deviation():
    """z C eta / B = 3 * 2 * 0.5 / 2 a step, and two steps: 1.5 sqrt 2. Within 5 standard errors, with a fixed seed."""
    drawn = [
        NoisyTrainer(
            SPEC, Rows(), DpSgdConfig(2.0, 3.0, 0.5), RoundContext(i, "a", True, bytes(32), seeded=True)
        ).train({"w": torch.zeros(2)})
        for i in range(500)
    ]
    values = torch.stack([d.weights["w"] for d in drawn]) - torch.tensor([-0.6, -1.3])
    assert float(values.std()) == pytest.approx(1.5 * 2**0.5, rel=5 / 2000**0.5)
    assert abs(float(values.mean())) < 5 * 1.5 * 2**0.5 / 1000**0.5


def test_nothing_looks_at_rows_but_the_noisy_steps():
    local = NoisyTrainer(SPEC, Rows(), DpSgdConfig(2.0, 1.1, 0.5), CTX)
    with pytest.raises(ConfigError, match="gradient"):
        local.gradient({})
    for look in (lambda: local.rows.batches("poisson", 1, CTX.rng("x")),
                 lambda: local.rows.per_sample({}, BatchIndices(())),
                 lambda: local.rows.feature({}, BatchIndices(()))):  # fmt: skip
        with pytest.raises(ConfigError, match="batches"):
            look()


DP = {"dp.clip-norm": 2.0, "dp.noise-multiplier": 1.1, "dp.learning-rate": 0.5, "dp.epsilon": 3.0}


def claimed(name: str, has_row_gradients: bool = True, **changes):
    config = parse(
        {"method.name": name} | DP | {key.replace("__", ".").replace("_", "-"): v for key, v in changes.items()}
    )
    return check_guarantee(strategies.create_method(name), config, has_row_gradients)


@pytest.mark.parametrize("name", ["fedavg", "fedrand", "fedper", "fedpara", "fedqsn", "fedlpp", "fedsp", "promptfl"])
def test_any_method_that_trains_takes_it(name):
    claim = claimed(name)
    assert claim.budget == PrivacyBudget(3.0, 1e-5, Adjacency.REPLACE_ONE)
    assert claim.privacy_spent(SamplingPlan(3, 2, 4, 40, Adjacency.REPLACE_ONE)) == {Step("poisson", 40, 4, 1.1): 6}
    assert guarantee_of(strategies.create_method(name), parse({})) is None


@pytest.mark.parametrize(
    "name,changes,reason",
    [
        ("dp_fpl", {}, "dp_fpl, which adds its own noise; leave"),
        ("random_binary", {}, "random_binary, which sends gradients; leave"),
        ("fedavg", {"has_row_gradients": False}, "the task text-generation, which has no per-example gradients"),
        ("fedavg", {"train__gradient_accumulation_steps": 2}, "train.gradient-accumulation-steps = 2"),
        ("fedavg", {"dp__clip_norm": 0.0}, r"dp\.clip-norm: other keys"),
        ("fedavg", {"dp__clip_norm": -1.0}, r"dp\.clip-norm"),
        ("fedavg", {"dp__noise_multiplier": -1.0}, r"dp\.noise-multiplier"),
        ("fedavg", {"dp__noise_multiplier": 0.0}, r"dp\.noise-multiplier: an epsilon requires a value above 0"),
        ("fedavg", {"dp__learning_rate": 0.0}, r"dp\.learning-rate"),
        ("fedavg", {"dp__epsilon": -3.0}, r"dp\.epsilon"),
        ("fedavg", {"dp__delta": 1.0}, r"dp\.delta"),
        ("fedavg", {"dp__adjacency": "twins"}, r"dp\.adjacency"),
        ("fedavg", {"dp__clipp": 1.0}, r"dp\.clipp: unknown key"),
        ("fedavg", {"run__deterministic": True}, r"run\.deterministic"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_key(name, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        claimed(name, **changes)


def test_a_section_that_is_left_alone_asks_for_nothing():
    assert DpSgdConfig.from_config(parse({}).dp) is None
    assert (
        check_guarantee(
            strategies.create_method("random_binary"), parse({"train.gradient-accumulation-steps": 3}), False
        )
        is None
    )


def test_a_policy_reads_the_epsilon_and_the_run_keeps_it_to_itself_where_there_is_none():
    method, config = strategies.create_method("fedqsn"), parse(DP)
    assert promised_epsilon(method, config, 1e-5) == 3.0
    assert promised_epsilon(method, config, 1e-6) == math.inf
    assert promised_epsilon(method, parse(DP | {"dp.epsilon": 0.0}), 1e-5) == math.inf
    assert promised_epsilon(method, parse({}), 1e-5) == math.inf


def test_a_penalty_is_added_after_the_noise_and_leaves_frozen_entries():
    """Without noise: steps of (0.3, 0.65) as above, and 0.5 * 2 (w - 3) of the penalty sum (w - 3)^2, twice."""
    pull = lambda now: ((now["w"] - 3.0) ** 2).sum()  # noqa: E731
    frozen_masks = {"w": torch.tensor([False, True])}
    start = {"w": torch.tensor([1.0, 1.0])}
    free = NoisyTrainer(SPEC, Rows(), DpSgdConfig(2.0, 0.0, 0.5), CTX).train(start, penalty=pull).weights["w"]
    w = [1.0, 1.0]
    for _ in range(2):
        w = [x - step - 0.5 * 2 * (x - 3.0) for x, step in zip(w, (0.3, 0.65), strict=True)]
    assert free.tolist() == pytest.approx(w)
    trained_weights = (
        NoisyTrainer(SPEC, Rows(), DpSgdConfig(2.0, 0.0, 0.5), CTX).train(start, frozen_masks, pull).weights["w"]
    )
    assert trained_weights[1] == 1.0


@pytest.mark.long
def test_every_training_of_a_turn_is_charged_before_its_rows_are_looked_at(tmp_path):
    """FedSP trains twice a turn: 2 turns of 2 times 3 steps. The third turn would go above and looks at nothing."""
    ledger, plan = PrivacyLedger(tmp_path), SamplingPlan(1, 3, 4, 9, Adjacency.REPLACE_ONE)
    steps = {Step("poisson", 9, 4, 2.0): 12}
    wished = accounting.compute_epsilon(steps, 1e-5, Adjacency.REPLACE_ONE) * 1.0001
    method, noisy = strategies.create_method("fedsp", "alternate = true"), DpSgdConfig(1.0, 2.0, 0.1, wished)
    own = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
    task = tasks.load_task(
        parse({"train.max-steps": 3, "train.batch-size": 4, "train.epochs": 9}), method.adapter, "cpu"
    )
    rows = task.encode(Example.from_columns({"mr": f"name[Aromi {i}]", "ref": "Aromi."} for i in range(9)))
    weights = task.initial(rng.initial_stream(0, "w"))
    exchange = MessageExchange(method, "fedsp", task.spec)
    server = method.init(task.spec, weights, rng.initial_stream(0, "m"))

    def turn(round_: int):
        charger = RunCharger(ledger, RunTerms("r", noisy.budget, 2, 12), own)
        metered = ChargedGradientSource(task.trainer(rows, rng.initial_stream(0, "b")).rows, noisy, charger)
        ctx = RoundContext(round_, "a", True, rng.fresh_secret())
        trainer = NoisyTrainer(task.spec, metered, noisy, ctx)
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, trainer, ctx)
        return exchange.receive(b"".join(parts), round_)

    for round_ in range(2):
        result = turn(round_)
        assert result.report == {"steps": 6.0}
        assert noisy.privacy_spent(plan) == {Step("poisson", 9, 4, 2.0): 3}
    assert ledger.read(own).account.standing(Party.SERVER).composed == pytest.approx(wished / 1.0001, rel=1e-4)
    with pytest.raises(BudgetError, match="replace-one"):
        turn(2)


def test_fedrand_under_noisy_steps_sends_one_factor_and_keeps_the_other_frozen_entries_exact():
    """Uploads are noised: two sites with the same rows and stream differ, and a frozen tensor does not move."""
    method = strategies.create_method("fedrand")
    task = tasks.load_task(parse({"train.max-steps": 1, "train.batch-size": 2}), method.adapter, "cpu")
    rows = task.encode(Example.from_columns({"mr": f"name[Aromi {i}]", "ref": "Aromi."} for i in range(6)))
    exchange = MessageExchange(method, "fedrand", task.spec)
    server = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m"))
    sent = []
    for _ in range(2):
        ctx = RoundContext(0, "a", True, bytes(32))
        trainer = NoisyTrainer(
            task.spec, task.trainer(rows, rng.initial_stream(0, "b")).rows, DpSgdConfig(1.0, 1.0, 0.1), ctx
        )
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, trainer, ctx)
        sent.append(exchange.receive(b"".join(parts), 0).payload)
    assert sent[0].variant == sent[1].variant
    assert {n[-1] for n in sent[0].fields} == {sent[0].variant}
    assert all(not torch.equal(sent[0].fields[n], sent[1].fields[n]) for n in sent[0].fields)


@pytest.mark.parametrize(
    "adapter", [AllWeightsAdapter(), PrefixAdapter(3), LoraAdapter(2)], ids=["all", "prefix", "lora"]
)
def test_text_rows_have_gradients_of_their_own(adapter):
    """Against backpropagation through each row alone, unpadded; the mean over target tokens."""
    task = tasks.load_task(parse({}), adapter, "cpu")
    weights = task.initial(rng.initial_stream(0, "w"))
    rows = task.encode(
        Example.from_columns(
            [{"mr": "name[Aromi], food[Thai]", "ref": "Aromi."}, {"mr": "x", "ref": "A long one about Thai food."}]
        )
    )
    result = task.trainer(rows, rng.initial_stream(0, "b")).rows.per_sample(weights, BatchIndices((0, 1)))
    for i, row in enumerate(rows):
        task.put(weights)
        batch = task.collate([row])
        loss = task.loss_sum(batch) / batch.terms
        wanted = torch.autograd.grad(loss, list(task.trained.values()))
        assert float(result.losses[i]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, g in zip(task.trained, wanted, strict=True):
            torch.testing.assert_close(result.gradients[name][i], g, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("adapter", [AllWeightsAdapter(), LoraAdapter(2)], ids=["all", "lora"])
def test_images_have_gradients_of_their_own(adapter, tmp_path):
    """Against backpropagation through each image alone."""
    from PIL import Image

    for i in range(3):
        (tmp_path / "train" / f"c{i}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (80 * i, 30, 200 - 60 * i)).save(tmp_path / "train" / f"c{i}" / "x.png")
    flat = {
        "task.name": "image-classification",
        "task.num-classes": 3,
        "task.target-column": "label",
        "task.label-column": "label",
    }
    task = tasks.load_task(parse(flat), adapter, "cpu")
    weights = task.initial(rng.initial_stream(0, "w"))
    rows = task.encode(task.examples(tmp_path, "train"))
    result = task.trainer(rows, rng.initial_stream(0, "b")).rows.per_sample(weights, BatchIndices((0, 2)))
    for i, row in enumerate((rows[0], rows[2])):
        task.put(weights)
        wanted = torch.autograd.grad(task.loss_sum(task.collate([row])), list(task.trained.values()), allow_unused=True)
        for name, g in zip(task.trained, wanted, strict=True):
            expected = torch.zeros_like(result.gradients[name][i]) if g is None else g
            torch.testing.assert_close(result.gradients[name][i], expected, rtol=1e-3, atol=2e-5)
