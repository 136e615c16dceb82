"""Steps on units compared with plain numpy, for every task with per-example gradients and for DP-FPL."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from fedveil import rng, tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.privacy import SamplingPlan, Step
from fedveil.contract.trainer import BatchIndices, PerExampleGradients
from fedveil.errors import ConfigError
from fedveil.ops import low_rank
from fedveil.privacy import clipping
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.rng import RandomStream
from fedveil.strategies.dp_fpl import DPFPL, PROMPT
from fedveil.training.unit_gradients import UnitGradientSource, UnitTrainer
from tests.fedveil.tasks import small_classifiers
from tests.prompt_toy import LENGTH, PromptTask, TextTask, examples

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)
UNITS = ((0, 5, 6, 7, 8), (1,), (2, 9), (3, 4, 10))  # 11 rows of 4 patients; k = 3 below


def stream() -> RandomStream:
    return RandomStream(bytes(32))


# The reference, without torch or product code. `gradient(weights, row)` is the gradient of one row's loss.
def clipped(parts, bound):
    norm = np.sqrt(sum((part.astype(float) ** 2).sum() for part in parts.values()))
    factor = min(1.0, bound / norm) if np.isfinite(norm) and norm else float(np.isfinite(norm))
    return {name: part * factor if factor else np.zeros_like(part) for name, part in parts.items()}


def mean_of_unit(gradient, weights, unit):
    rows = [gradient(weights, row) for row in unit]
    return {name: sum(row[name] for row in rows) / len(unit) for name in rows[0]}


def twin_steps(weights, steps, gradient, bound, eta, batch):
    for units in steps:
        parts = [clipped(mean_of_unit(gradient, weights, unit), bound) for unit in units]
        weights = {name: w - eta * sum(part[name] for part in parts) / batch for name, w in weights.items()}
    return weights


def twin_dp_fpl(units, gradient, seen, u, v, bound, batch):
    whole = [mean_of_unit(gradient, seen, unit)[PROMPT] for unit in units]
    d_g = sum(clipped({"": g}, bound)[""] for g in whole) / batch
    local = [clipped({"u": g @ v.T, "v": u.T @ g}, bound) for g in whole]
    d_u, d_v = (sum(part[name] for part in local) / batch for name in "uv")
    return d_u @ v + u @ d_v - u @ u.T @ d_u @ v, d_g


def twin_texts(units, slope, back, u, v, bound, batch):
    d_t = sum(clipped({"": sum(slope(row) for row in unit) / len(unit)}, bound)[""] for unit in units) / batch
    d_g = (back.T @ d_t.ravel()).reshape(u.shape[0], v.shape[1])
    d_u, d_v = d_g @ v.T, u.T @ d_g
    return d_u @ v + u @ d_v - u @ u.T @ d_u @ v, d_g


def config_of(**keys):
    return parse({"train.batch-size": 3, "train.epochs": 2, "dp.unit-column": "patient", "dp.unit-rows": 3, **keys})


def by_backward(task, rows):
    """The gradient of one row's mean loss, by a backward pass through this row alone."""

    def gradient(weights, row):
        task.put({name: torch.as_tensor(w, dtype=torch.float32) for name, w in weights.items()})
        batch = task.collate([rows[row]])
        loss = task.loss_sum(batch) / batch.terms
        grads = torch.autograd.grad(loss, list(task.trained.values()), allow_unused=True)
        pairs = zip(task.trained.items(), grads, strict=True)
        return {name: (torch.zeros_like(p) if g is None else g).numpy().copy() for (name, p), g in pairs}

    return gradient


def text_task(folder):
    lines = [
        {"mr": f"name[Aromi {i}], food[{'Thai' * (i % 3)}]", "ref": f"Aromi {i}." * (1 + i % 2)} for i in range(11)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tasks.load_task(config_of(), LoraAdapter(2), "cpu")


def preference_task(folder):
    lines = [
        {"q": f"name[Aromi {i}]", "yes": f"Aromi {i}." * (1 + i % 2), "no": "a pub" * (1 + i % 3)} for i in range(11)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = {"task.source-column": "q", "task.target-column": "yes", "task.rejected-column": "no"}
    return tasks.load_task(config_of(**columns, **{"task.name": "preference"}), LoraAdapter(2), "cpu")


def picture_folder(folder):
    from PIL import Image

    for i in range(11):
        (folder / "train" / f"c{i % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * i, 30, 200 - 12 * i)).save(folder / "train" / f"c{i % 3}" / f"{i}.png")


def image_task(folder):
    picture_folder(folder)
    keys = {"task.name": "image-classification", "task.num-classes": 3, "task.target-column": "label"}
    return tasks.load_task(config_of(**keys, **{"task.label-column": "label"}), LoraAdapter(2), "cpu")


def clip_task(folder):
    picture_folder(folder)
    keys = {"task.name": "clip-prompt", "task.target-column": "label", "task.label-column": "label"}
    return tasks.load_task(config_of(**keys), PromptAdapter(), "cpu")


def classifier_task(folder):
    small_classifiers.save_rows(folder, small_classifiers.draw_rows(11))
    keys = {"task.name": "text-classification", "task.class-names": ",".join(small_classifiers.NAMES)}
    columns = {"task.source-column": "note", "task.target-column": "ward", "task.label-column": "ward"}
    model = small_classifiers.save_base(folder / "base", "bert")
    return tasks.load_task(
        config_of(**keys, **columns, **{"task.model": str(model), "task.max-tokens": 24}), LoraAdapter(2), "cpu"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [text_task, preference_task, image_task, clip_task, classifier_task],
    ids=["text", "preference", "image", "clip", "classifier"],
)
def test_two_steps_are_those_of_the_twin(make, tmp_path):
    task = make(tmp_path)
    rows = task.prepare(tmp_path, "train").rows
    assert len(rows) == 11
    start = {n: w + 0.01 * torch.randn(w.shape, generator=stream().torch_generator()) for n, w in
             task.initial(rng.initial_stream(0, "w")).items()}  # fmt: skip
    trainer = UnitTrainer(task.trainer(rows, stream()), UNITS, task.config)
    gradient = by_backward(task, rows)
    norms = [
        clipping.per_example_norms({n: torch.tensor(g)[None] for n, g in mean_of_unit(gradient, start, unit).items()})
        for unit in UNITS
    ]
    bound = float(torch.stack(norms).median())  # clips some of the units
    eta = 0.3 / bound
    result = NoisyTrainer(task.spec, trainer.rows, DpSgdConfig(bound, 0.0, eta), CTX).train(start)
    steps = [b.members for b in trainer.rows.batches("poisson", 2, RandomStream(CTX.noise("rows")(32)))]
    assert max(len(unit) for step in steps for unit in step) > 1
    expected = twin_steps({n: w.numpy() for n, w in start.items()}, steps, gradient, bound, eta, 3)
    for name, w in expected.items():
        np.testing.assert_allclose(result.weights[name].numpy(), w, rtol=0, atol=1e-5)
    assert max(np.abs(w - start[n].numpy()).max() for n, w in expected.items()) > 0.003
    assert result.report == {"steps": 2.0}


@pytest.mark.parametrize("clipped_in", ["prompt", "texts"])
def test_a_step_of_dp_fpl_is_that_of_the_twin(clipped_in):
    task = TextTask(config_of())
    rows = task.encode(examples(11, scale=2.0))
    source = UnitTrainer(task.trainer(rows, stream()), UNITS, task.config).rows
    method = DPFPL(rank=3, clipped=clipped_in, clip_local=0.3, clip_global=0.3, clip_texts=0.6, noise_local=0.0,
                   noise_global=0.0, adapter=PromptAdapter(length=LENGTH))  # fmt: skip
    p_global, p_local = (torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    (batch,) = source.batches("poisson", 1, RandomStream(bytes(31) + b"\x07"))
    assert len(batch.rows) > 1
    step = method._step(p_global, p_local, source, batch, CTX, 0)
    start = torch.randn(5, 3, generator=CTX.rng("factors 0").torch_generator())
    u, v = low_rank.factorize_matrix(p_local, start)
    seen = p_global + low_rank.compose_factors(p_local, u, v, method.residual)

    def gradient(weights, row):
        leaf = weights.clone().requires_grad_()
        (g,) = torch.autograd.grad(task.sample_loss({PROMPT: leaf}, rows[row][0], torch.tensor(rows[row][1])), leaf)
        return {PROMPT: g.numpy()}

    if clipped_in == "prompt":
        expected = twin_dp_fpl(batch.members, gradient, seen, u.numpy(), v.numpy(), 0.3, 3)
    else:
        back = torch.autograd.functional.jacobian(lambda p: task.features({PROMPT: p}), seen).reshape(-1, 30).numpy()

        def slope(row):
            features = task.features({PROMPT: seen}).requires_grad_()
            x, y = rows[row][0], torch.tensor(rows[row][1])
            (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy((3 * x @ features.T)[None], y[None]), features)
            return g.numpy()

        expected = twin_texts(batch.members, slope, back, u.numpy(), v.numpy(), 0.6, 3)
    for got, wanted in zip(step, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-5)
        assert np.abs(wanted).max() > 1e-3


class FixedGradients:
    """Rows with given gradients. `parts` lists how many rows were asked for at a time."""

    def __init__(self, gradients):
        self.gradients, self.parts = torch.tensor(gradients), []

    def per_sample(self, weights, batch):
        self.parts.append(len(batch.rows))
        return PerExampleGradients({"w": self.gradients[list(batch.rows)]}, torch.zeros(len(batch.rows)))


def source_of(gradients, units, **keys):
    rows = FixedGradients(gradients)
    return rows, UnitGradientSource(rows, units, config_of(**keys))


def test_a_unit_larger_than_a_part_is_accumulated_before_it_is_clipped():
    """Ten rows in parts of three: a mean of 5, clipped once to 2. Clipped by row or by part it would be above."""
    rows, source = source_of(
        [[float(i + 1)] for i in range(9)] + [[5.0]], (tuple(range(9)), (9,)), **{"dp.unit-rows": 9}
    )
    batch = BatchIndices((0, 1), (tuple(range(9)), (9,)))
    means = source.per_sample({}, batch).gradients
    assert rows.parts == [3, 3, 3, 1]
    assert means["w"].tolist() == [[5.0], [5.0]]
    assert clipping.clipped_sum(means, 2.0)["w"].tolist() == [4.0]


def test_a_row_that_is_not_finite_takes_only_its_own_unit_away():
    _, source = source_of([[1.0], [float("nan")], [3.0], [float("inf")]], ((0, 1), (2,), (3,)))
    means = source.per_sample({}, BatchIndices((0, 1, 2), ((0, 1), (2,), (3,)))).gradients
    assert clipping.clipped_sum(means, 2.0)["w"].tolist() == [2.0]


def test_the_parts_of_a_unit_have_the_norm_of_their_sum():
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(4, 3, 6, generator=generator), torch.randn(4, 3, 5, generator=generator)
    left[3, 1, 0] = float("nan")
    left[2] = torch.stack([left[2, 0], -left[2, 0], torch.zeros(6)])
    right[2, 1] = right[2, 0]  # the first two parts cancel
    whole = torch.einsum("upn,upm->unm", left.double(), right.double())
    expected = clipping.clipped_sum({"": whole.float()}, 1.5)[""]
    torch.testing.assert_close(clipping.clipped_outer_sum(left, right, 1.5), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_draw_is_a_step_of_noise():
    task = PromptTask(config_of())
    local = task.trainer(task.encode(examples(11)), stream())
    source = UnitTrainer(local, UNITS, task.config).rows
    empty = source.per_sample({PROMPT: torch.zeros(6, 5)}, BatchIndices(()))
    assert clipping.clipped_sum(empty.gradients, 1.0)[PROMPT].abs().sum() == 0
    text = TextTask(config_of())
    features = UnitTrainer(text.trainer(text.encode(examples(11)), stream()), UNITS, text.config).rows.feature(
        {PROMPT: torch.ones(6, 5)}, BatchIndices(())
    )
    assert clipping.clipped_outer_sum(features.left, features.right, 1.0).abs().sum() == 0


def test_units_are_drawn_with_m_over_u_and_rows_of_a_large_unit_at_random():
    _, source = source_of([[0.0]] * 11, UNITS)
    batches = source.batches("poisson", 4000, stream().split("draws"))
    taken = Counter(unit for batch in batches for unit in batch.rows)
    assert all(abs(taken[unit] / 4000 - 3 / 4) < 5 * (0.75 * 0.25 / 4000) ** 0.5 for unit in range(4))
    of_large = [rows for b in batches for unit, rows in zip(b.rows, b.members, strict=True) if unit == 0]
    assert all(len(set(rows)) == 3 and set(rows) <= set(UNITS[0]) for rows in of_large)
    each = Counter(row for rows in of_large for row in rows)
    assert all(abs(each[row] / len(of_large) - 3 / 5) < 0.05 for row in UNITS[0])
    assert all(rows == UNITS[unit] for b in batches for unit, rows in zip(b.rows, b.members, strict=True) if unit)
    assert source.batches("poisson", 3, stream()) == source.batches("poisson", 3, stream())
    for sampling in ("fixed", "disjoint"):
        with pytest.raises(ConfigError, match='sampling: dp.unit-column requires "poisson"'):
            source.batches(sampling, 1, stream())


def test_what_is_public_follows_the_units_and_not_their_rows():
    few = UnitTrainer(local_of_rows(11), UNITS, config_of())
    many = UnitTrainer(local_of_rows(40), (UNITS[0], (1, *range(11, 40)), *UNITS[2:]), config_of())
    for trainer in (few, many):
        assert (trainer.num_examples, trainer.rows.num_examples, trainer.rows.batch_size) == (4, 4, 3)
        assert trainer.rows.steps == 2  # two epochs of one whole batch
    same = [t.rows.batches("poisson", 50, stream().split("x")) for t in (few, many)]
    assert [b.rows for b in same[0]] == [b.rows for b in same[1]]
    claim = DpSgdConfig(1.0, 1.1, 0.1)
    plan = SamplingPlan(1, few.rows.steps, few.rows.batch_size, few.rows.num_examples, claim.neighbours)
    assert claim.privacy_spent(plan) == {Step("poisson", 4, 3, 1.1): 2}


def local_of_rows(count):
    task = PromptTask(config_of())
    return task.trainer(task.encode(examples(count)), stream())


def test_a_site_with_fewer_units_than_a_batch_is_refused_and_so_is_training_by_rows():
    trainer = UnitTrainer(local_of_rows(11), UNITS, config_of(**{"train.batch-size": 5}))
    with pytest.raises(ConfigError, match="batch-size"):
        _ = trainer.rows.steps
    for act in (trainer.train, trainer.gradient):
        with pytest.raises(ConfigError, match="noisy steps on units"):
            act({})


def test_the_difference_that_a_withdrawal_leaves_is_the_unit_s_gradient_unless_there_is_noise():
    """A server that has a run from the same weights with and without a unit subtracts the two.

    With z = 4 the upload without the unit tells which of two units left it in at most Phi(1 / 4) = 60 % of all cases.
    """
    gradients = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    units = tuple((i, i + 8, i + 16) for i in range(8))
    of_unit = [clipping.clipped_sum({"w": gradients[list(unit)].mean(0, keepdim=True)}, 1.0)["w"] for unit in units]

    def upload(chosen, noise, round_):
        keys = {"train.batch-size": len(chosen), "train.epochs": 1}
        _, source = source_of(gradients.tolist(), chosen, **keys)
        context = RoundContext(round_, "a", True, bytes(32), seeded=True)
        spec = {"w": ParamSpec((8,))}
        trained = NoisyTrainer(spec, source, DpSgdConfig(1.0, noise, 1.0), context).train({"w": torch.zeros(8)})
        return -trained.weights["w"] * len(chosen)  # the sum of the units' clipped gradients

    def share_of_right_guesses(noise, count):
        right = 0
        for i in range(count):
            left = i % 2
            rest = upload(tuple(unit for unit in units if unit != units[left]), noise, 2 * i)
            difference = upload(units, noise, 2 * i + 1) - rest
            right += int(torch.argmin(torch.stack([(difference - one).norm() for one in of_unit[:2]]))) == left
        return right / count

    clear = upload(units, 0.0, 0) - upload(units[1:], 0.0, 1)
    torch.testing.assert_close(clear, of_unit[0], rtol=0, atol=1e-5)
    assert share_of_right_guesses(0.05, 20) == 1.0  # the control: little noise does not hide which unit left
    assert share_of_right_guesses(4.0, 200) < 0.6 + 4 * (0.24 / 200) ** 0.5
