from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from fedveil.config import parse
from fedveil.contract.trainer import BatchIndices
from fedveil.errors import ConfigError, TaskError
from fedveil.ops import low_rank
from fedveil.privacy import clipping
from fedveil.rng import RandomStream
from fedveil.training import per_example
from tests.fedveil.training.small import DATA, KEY, make
from tests.prompt_toy import CLASSES, SPACE, PromptTask, TextTask, examples, local_of

WEIGHTS = {"prompt": torch.randn(6, 5, generator=torch.Generator().manual_seed(9))}


def test_each_rows_gradient_is_that_of_the_row_alone():
    local, task = local_of(7, scale=0.7), PromptTask()
    result = local.rows.per_sample(WEIGHTS, BatchIndices((4, 0, 6)))
    assert result.gradients["prompt"].shape == (3, 6, 5)
    for place, row in enumerate((4, 0, 6)):
        prompt = WEIGHTS["prompt"].clone().requires_grad_()
        x, y = (t[0] for t in task.samples(task.encode(examples(7, scale=0.7))[row : row + 1]))
        loss = task.sample_loss({"prompt": prompt}, x, y)
        (g,) = torch.autograd.grad(loss, prompt)
        assert torch.allclose(result.gradients["prompt"][place], g, atol=1e-6)
        assert result.losses[place] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.long
def test_the_gradients_of_rows_in_bf16_are_nearly_those_in_fp32():
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    results = []
    for precision in ("fp32", "bf16"):
        task = make(train__precision=precision)
        rows = task.prepare(DATA, "train").rows[:4]
        weights = task.initial(RandomStream(KEY))
        results.append(task.trainer(rows, RandomStream(KEY)).rows.per_sample(weights, BatchIndices((0, 2, 3))))
    exact, rounded = (torch.cat([g.flatten(1) for g in each.gradients.values()], 1) for each in results)
    assert rounded.dtype == torch.float32
    assert (torch.nn.functional.cosine_similarity(exact, rounded) > 0.99).all()
    torch.testing.assert_close(results[0].losses, results[1].losses, rtol=0.02, atol=0.0)
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == allowed


def test_weights_stay_and_nothing_tracks_gradients():
    before = WEIGHTS["prompt"].clone()
    result = local_of().rows.per_sample(WEIGHTS, BatchIndices((1, 2)))
    assert torch.equal(before, WEIGHTS["prompt"])
    assert not result.gradients["prompt"].requires_grad
    assert not result.losses.requires_grad


def test_an_empty_batch_has_no_rows():
    result = local_of().rows.per_sample(WEIGHTS, BatchIndices(()))
    assert result.gradients["prompt"].shape == (0, 6, 5)
    assert result.losses.shape == (0,)


def test_a_task_without_a_loss_of_one_row_and_other_weights_are_refused():
    with pytest.raises(TaskError, match="has no per-example loss"):
        per_example.per_example_gradients(object(), PromptTask().spec, [1], WEIGHTS)
    with pytest.raises(TaskError, match="weights"):
        local_of().rows.per_sample({"prompt": torch.zeros(5, 6)}, BatchIndices((0,)))


def test_features_pull_back_to_each_rows_gradient():
    """The rank-one gradient in the features, through the chain rule, against torch.func on the row's own loss."""
    local, batch = local_of(7, scale=0.7, kind=TextTask), BatchIndices((4, 0, 6))
    feature_gradients, rows = local.rows.feature(WEIGHTS, batch), local.rows.per_sample(WEIGHTS, batch)
    assert (feature_gradients.left.shape, feature_gradients.right.shape) == ((3, CLASSES), (3, SPACE))
    for i in range(3):
        pulled = feature_gradients.pull(torch.outer(feature_gradients.left[i], feature_gradients.right[i]))["prompt"]
        assert torch.allclose(pulled, rows.gradients["prompt"][i], atol=1e-5)
        assert float(pulled.norm()) > 0.01
    features = TextTask().features(WEIGHTS).requires_grad_()
    x, y = local._task.samples([local._rows[4]])
    (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(3 * x @ features.T, y), features)
    assert torch.allclose(torch.outer(feature_gradients.left[0], feature_gradients.right[0]), slope, atol=1e-6)


def test_features_of_an_empty_batch_still_pull_noise():
    feature_gradients = local_of(kind=TextTask).rows.feature(WEIGHTS, BatchIndices(()))
    assert (feature_gradients.left.shape, feature_gradients.right.shape) == ((0, CLASSES), (0, SPACE))
    noise = torch.randn(CLASSES, SPACE, generator=torch.Generator().manual_seed(3))
    other = local_of(kind=TextTask).rows.feature(WEIGHTS, BatchIndices((1, 2)))
    assert torch.equal(feature_gradients.pull(noise)["prompt"], other.pull(noise)["prompt"]), (
        "no row has a part in the way back"
    )


def test_a_task_without_features_is_refused():
    with pytest.raises(TaskError, match="the losses of PromptTask do not depend on the weights only through features"):
        local_of().rows.feature(WEIGHTS, BatchIndices((0,)))
    with pytest.raises(TaskError, match="weights"):
        local_of(kind=TextTask).rows.feature({"prompt": torch.zeros(5, 6)}, BatchIndices((0,)))


def test_poisson_takes_every_row_with_the_same_probability():
    batches = per_example.draw_batches("poisson", 20, 5, 4000, RandomStream(bytes(32)))
    sizes, taken = [len(b.rows) for b in batches], Counter(i for b in batches for i in b.rows)
    assert stats.kstest(sizes, stats.binom(20, 0.25).cdf, method="asymp").statistic < 0.3  # discrete: a coarse look
    assert abs(sum(sizes) / 4000 - 5) < 4 * (20 * 0.25 * 0.75 / 4000) ** 0.5
    assert abs(stats.tvar(sizes) - 20 * 0.25 * 0.75) < 0.4
    assert all(abs(taken[i] / 4000 - 0.25) < 0.03 for i in range(20))


def test_disjoint_batches_share_no_row_within_an_epoch():
    batches = per_example.draw_batches("disjoint", 23, 5, 9, RandomStream(bytes(32)))
    assert [len(b.rows) for b in batches] == [5] * 9
    for epoch in (batches[:4], batches[4:8]):
        assert len({i for b in epoch for i in b.rows}) == 20
    assert batches[:4] != batches[4:8]
    assert per_example.draw_batches("disjoint", 23, 5, 2, RandomStream(bytes(32)), skip=5) == batches[5:7]


def test_fixed_batches_are_distinct_rows_drawn_anew():
    batches = per_example.draw_batches("fixed", 9, 4, 300, RandomStream(bytes(32)))
    assert all(len(set(b.rows)) == 4 for b in batches)
    counts = Counter(i for b in batches for i in b.rows)
    assert all(abs(counts[i] / 300 - 4 / 9) < 0.12 for i in range(9))
    assert per_example.draw_batches("fixed", 9, 4, 2, RandomStream(bytes(32)), skip=3) == batches[3:5]


@pytest.mark.parametrize("sampling", ["poisson", "disjoint", "fixed"])
def test_the_same_stream_draws_the_same_and_a_batch_above_the_site_is_refused(sampling):
    first, second, other = (
        per_example.draw_batches(sampling, 30, 4, 3, RandomStream(bytes([k]) * 32)) for k in (1, 1, 2)
    )
    assert first == second != other
    with pytest.raises(ConfigError, match="batch-size"):
        per_example.draw_batches(sampling, 3, 4, 1, RandomStream(bytes(32)))


def test_steps_are_whole_batches_up_to_the_configured_number():
    assert local_of(11, epochs=3).rows.steps == 6
    assert local_of(11, epochs=3, max_steps=4).rows.steps == 4
    with pytest.raises(ConfigError, match="batch-size"):
        _ = local_of(3).rows.steps
    assert PromptTask(parse({"train.batch-size": 3})).trainer([1, 2, 3], RandomStream(bytes(32))).rows.batch_size == 3


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # opacus on inputs without gradients
@pytest.mark.parametrize("bound", [0.5, 3.0, 100.0])
def test_the_clipped_sum_over_p_u_and_v_is_that_of_opacus(bound):
    """P = p + u v + r: gradients of single rows, the chain rule to u and v, one joint clip; opacus has hooks and no
    chain rule.
    """
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    task, generator = PromptTask(), torch.Generator().manual_seed(4)
    u, v = low_rank.factorize_matrix(torch.randn(6, 5, generator=generator), torch.randn(5, 2, generator=generator))

    class Learner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.u, self.v = (torch.nn.Parameter(w.clone()) for w in (WEIGHTS["prompt"], u, v))

        def forward(self, x):
            return x @ (self.p + self.u @ self.v).flatten()

    x, y = task.samples(task.encode(examples(9, scale=2.0)))
    learner = GradSampleModule(Learner(), force_functorch=True)
    optimiser = DPOptimizer(
        torch.optim.SGD(learner.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=9
    )
    torch.nn.functional.cross_entropy(learner(x), y).backward()
    optimiser.step()

    result = local_of(9, scale=2.0).rows.per_sample(
        {"prompt": WEIGHTS["prompt"] + u @ v}, BatchIndices(tuple(range(9)))
    )
    g = result.gradients["prompt"]
    sums = clipping.clipped_sum({"p": g, "u": g @ v.T, "v": u.T @ g}, bound)
    for name, parameter in learner._module.named_parameters():
        assert torch.allclose(sums[name], parameter.summed_grad, rtol=1e-4, atol=1e-5), name
