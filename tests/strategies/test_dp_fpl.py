from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace

import pytest
import torch

from fedveil import rng, strategies
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.privacy import Adjacency, PrivacyBudget, SamplingPlan, Step
from fedveil.contract.trainer import BatchIndices
from fedveil.errors import BudgetError, ConfigError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops import low_rank
from fedveil.privacy import accounting, gaussian_noise
from fedveil.privacy import dp_sgd as rows_of_turn
from fedveil.privacy.charged_gradients import ChargedGradientSource, GradientsOnlyTrainer
from fedveil.privacy.ledger import PrivacyLedger, RunCharger
from fedveil.privacy.ledger_account import Party, RunTerms
from fedveil.strategies.dp_fpl import DPFPL
from fedveil.wire.capture import MessageCapture
from tests.conftest import aggregated
from tests.prompt_toy import CLASSES, LENGTH, SPACE, WIDTH, TextTask, local_of

SPEC = {"prompt": ParamSpec((LENGTH, WIDTH))}
CTX = RoundContext(0, "x", True, bytes(32))
ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
QUIET = {"noise_local": 0.0, "noise_global": 0.0, "clip_local": 1e9, "clip_global": 1e9}


def make(**fields) -> DPFPL:
    return DPFPL(
        **{"rank": 3, "adapter": PromptAdapter(LENGTH), "learning_rate": 0.5, "learning_rate_local": 0.25, **fields}
    )


def prompt(seed: int) -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def turn(method, local, private=None, ctx=CTX, p_global=None):
    down = Payload({"prompt": prompt(1) if p_global is None else p_global})
    return method.client(private, down, local, ctx)


def turn_of(method, local, ctx):
    return rows_of_turn.draw_batches(local.rows, method.sampling, ctx, method.exchange == "batch")


# --- factors and Eq. 4


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize(
    "p", [prompt(3), torch.zeros(LENGTH, WIDTH), prompt(3)[:, :1] @ prompt(4)[:1]], ids=["full", "zero", "rank 1"]
)
def test_factors_are_orthonormal_and_what_is_forwarded_is_p(p, rank):
    u, v = low_rank.factorize_matrix(p, prompt(5)[:WIDTH].T[:, :rank] if rank < 6 else prompt(5).T)
    assert torch.allclose(u.T @ u, torch.eye(rank), atol=1e-5)
    assert torch.allclose(v @ v.T, torch.eye(rank), atol=1e-5)
    assert torch.allclose(low_rank.compose_factors(p, u, v, True), p, atol=1e-6)
    assert torch.equal(low_rank.compose_factors(p, u, v, False), u @ v)
    assert torch.allclose(low_rank.compose_factors(p, u, v, "rank-k"), u @ u.T @ p)


def test_gram_and_schmidt_by_hand():
    """Two columns of a 3 x 2 product, one after the other, with their signs."""
    p, start = torch.tensor([[-3.0, 0.0], [-4.0, 1.0], [0.0, 2.0]]), torch.eye(2)
    u, _ = low_rank.factorize_matrix(p, start)
    first = p[:, 0] / 5
    second = p[:, 1] - (first @ p[:, 1]) * first
    assert torch.allclose(u, torch.stack((first, second / second.norm()), 1), atol=1e-6)


def test_equation_4_is_exact_at_full_rank_and_a_projection_below():
    g, p = prompt(7).double(), prompt(8).double()[:, :WIDTH]
    wide_g, wide_p = torch.cat((g, g.flip(0)), 1), torch.cat((p, -p.flip(1)), 1)  # 6 x 10
    start = torch.randn(10, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, v = low_rank.factorize_matrix(wide_p, start)
    full = low_rank.full_gradient(u, v, wide_g @ v.T, u.T @ wide_g)
    assert torch.allclose(full, wide_g, atol=1e-12)
    plus = wide_g @ v.T @ v + u @ u.T @ wide_g + u @ u.T @ wide_g @ v.T @ v
    assert (plus - wide_g).norm() / wide_g.norm() > 0.3, "the sign matters"
    u, v = low_rank.factorize_matrix(wide_p, start[:, :2])
    once = low_rank.full_gradient(u, v, wide_g @ v.T, u.T @ wide_g)
    assert torch.allclose(low_rank.full_gradient(u, v, once @ v.T, u.T @ once), once, atol=1e-12)
    assert not torch.allclose(once, wide_g)


def test_equation_4_is_what_autograd_gives_through_the_factors():
    """The chain rule: dL/du = g v^T and dL/dv = u^T g, with r held constant."""
    p, g = prompt(3), prompt(4)
    u, v = (t.requires_grad_() for t in low_rank.factorize_matrix(p, prompt(5)[:WIDTH, :3]))
    r = (p - u @ v).detach()
    ((u @ v + r) * g).sum().backward()
    assert torch.allclose(u.grad, g @ v.T, atol=1e-6)
    assert torch.allclose(v.grad, u.T @ g, atol=1e-6)


# --- one step


def test_a_step_without_noise_is_gradient_descent_at_full_rank():
    """fixed, all rows, k = b: p_G and p_L both move along the mean gradient."""
    method, local = make(rank=5, adapter=PromptAdapter(LENGTH), sampling="fixed", **QUIET), local_of(8, batch_size=8)
    own = prompt(2)
    private, up = turn(method, local, FederatedState({"prompt": own}))
    g = local.rows.per_sample(
        {"prompt": prompt(1) + own}, local.rows.batches("fixed", 1, rng.RandomStream(bytes(32)))[0]
    )
    mean = g.gradients["prompt"].mean(0)
    assert torch.allclose(up.fields["prompt"], mean, atol=1e-6)
    # rank 5 = width: row(v) is everything, so the projection is whole here too
    assert torch.allclose(private.tensors["prompt"], own - 0.25 * mean, atol=1e-6)
    after = aggregated(method, FederatedState({"prompt": prompt(1)}), iter([AcceptedUpload(up, 8, CTX)]))
    assert torch.allclose(after.tensors["prompt"], prompt(1) - 0.5 * mean, atol=1e-6)


def test_epoch_form_sends_the_change_of_the_local_copy():
    method, local = make(exchange="epoch", sampling="disjoint", **QUIET), local_of(12, epochs=2)
    own = FederatedState({"prompt": prompt(2)})
    private, up = turn(method, local, own, replace(CTX, seeded=True))
    p_global, p_local = prompt(1), prompt(2)
    stream = replace(CTX, seeded=True).noise("rows")(32)
    for step, batch in enumerate(local.rows.batches("disjoint", 6, rng.RandomStream(stream))):
        start = torch.randn(WIDTH, 3, generator=CTX.rng(f"factors {step}").torch_generator())
        u, v = low_rank.factorize_matrix(p_local, start)
        g = local.rows.per_sample({"prompt": p_global + p_local}, batch).gradients["prompt"].sum(0) / 4
        p_local = p_local - 0.25 * low_rank.full_gradient(u, v, g @ v.T, u.T @ g)
        p_global = p_global - 0.5 * g
    assert step == 5
    assert torch.allclose(up.fields["prompt"], p_global - prompt(1), atol=1e-5)
    assert torch.allclose(private.tensors["prompt"], p_local, atol=1e-5)
    after = aggregated(method, FederatedState({"prompt": prompt(1)}), iter([AcceptedUpload(up, 12, CTX)]))
    assert torch.allclose(after.tensors["prompt"], p_global, atol=1e-5)


@pytest.mark.parametrize("exchange", ["batch", "epoch"])
def test_noise_has_the_stated_size_where_it_is_stated(exchange, monkeypatch):
    """On the sums, before the division by the fixed B, at every step."""
    asked = []
    monkeypatch.setattr(
        gaussian_noise, "draw_gaussian", lambda shape, std, source: asked.append((shape, std)) or torch.zeros(shape)
    )
    method = make(exchange=exchange, noise_local=1.5, noise_global=0.7, clip_local=2.0, clip_global=3.0)
    turn(method, local_of(12), None)
    steps = 1 if exchange == "batch" else 3
    assert asked == [((LENGTH, 3), 3.0), ((3, WIDTH), 3.0), ((LENGTH, WIDTH), pytest.approx(2.1))] * steps


@pytest.mark.parametrize("mode, broken", [("strict", False), ("paper", False), ("code", True)])
def test_one_row_of_norm_a_million_moves_the_upload_by_two_bounds_over_b_unless_clipped_by_batch(mode, broken):
    fields = {} if mode == "strict" else {"epsilon": 1.0}
    method = make(mode=mode, sampling="fixed", clip_global=0.1, noise_global=0.0, **fields)
    local = local_of(8, batch_size=8, scale=0.3)
    other = local_of(8, batch_size=8, scale=0.3)
    other._rows[5] = (-1e6 * other._rows[5][0], other._rows[5][1])
    own = FederatedState({"prompt": prompt(2)})
    sent = [turn(method, trainer, own)[1].fields["prompt"] for trainer in (local, other)]
    moved = (sent[0] - sent[1]).norm()
    assert (moved > 2 * 0.1 / 8 * 1.01) == broken
    assert moved > 0.05 / 8


def test_u_and_v_are_clipped_together_in_strict_and_apart_in_paper(monkeypatch):
    sums = []
    monkeypatch.setattr(gaussian_noise, "add_noise", lambda value, std, source: sums.append(value) or value)
    local, bounds = local_of(1, batch_size=1, scale=0.1), {"clip_local": 1e-3, "clip_global": 2e-3}
    turn(make(**bounds), local)
    turn(make(mode="paper", sampling="disjoint", epsilon=1.0, **bounds), local)
    u, v, whole, paper_u, paper_v = (float(s.norm()) for s in sums)
    assert math.hypot(u, v) == pytest.approx(1e-3, rel=1e-5)
    assert whole == pytest.approx(2e-3, rel=1e-5)
    assert (paper_u, paper_v) == pytest.approx((1e-3, 1e-3), rel=1e-5)


def test_code_adds_and_divides_by_ten(monkeypatch):
    monkeypatch.setattr(gaussian_noise, "add_noise", lambda value, std, source: value)
    method = make(mode="code", epsilon=1.0, sampling="fixed", clip_local=1e9, clip_global=1e9)
    local, own = local_of(8, batch_size=8), prompt(2)
    private, up = turn(method, local, FederatedState({"prompt": own}))
    g = up.fields["prompt"]
    start = torch.randn(WIDTH, 3, generator=CTX.rng("factors 0").torch_generator())
    u, v = low_rank.factorize_matrix(own, start)
    assert torch.allclose(private.tensors["prompt"], own - 0.025 * (g @ v.T @ v + u @ u.T @ g), atol=1e-6)


@pytest.mark.parametrize("mode", ["paper", "code"])
def test_the_servers_noise_has_the_nominal_size(mode, monkeypatch):
    """std / N with std = sqrt(T ln(1 / delta)) C / (epsilon B): 106 C / 10 for epsilon 0.1, B = 32, T = 100."""
    asked = []
    monkeypatch.setattr(gaussian_noise, "add_noise", lambda value, std, source: asked.append(std) or value)
    method = make(mode=mode, epsilon=0.1, rounds=100)
    payload = Payload({"prompt": prompt(1), "rows_a_step": torch.tensor(32.0)})
    aggregated(method, FederatedState({"prompt": prompt(2)}), iter([AcceptedUpload(payload, 5, CTX)] * 3))
    assert asked == [pytest.approx(106.03 / 3, rel=1e-3)]
    with pytest.raises(WireError, match="rows_a_step"):
        method.check(Payload({"prompt": prompt(1), "rows_a_step": torch.tensor(float("nan"))}), SPEC)


def test_an_empty_poisson_batch_is_a_step_of_noise_alone(monkeypatch):
    local = local_of(12)
    monkeypatch.setattr(type(local.rows), "batches", lambda *a: [BatchIndices(())])
    private, up = turn(make(noise_local=0.0, noise_global=0.0), local, FederatedState({"prompt": prompt(2)}))
    assert not up.fields["prompt"].any()
    assert torch.equal(private.tensors["prompt"], prompt(2))
    _, noisy = turn(make(), local, FederatedState({"prompt": prompt(2)}))
    assert 10 / 4 * 0.5 < noisy.fields["prompt"].std() < 10 / 4 * 1.6


# --- clipped in the texts

TEXTS = {"clipped": "texts", "sampling": "fixed"}


def test_texts_without_noise_and_clipping_are_the_step_of_the_prompt():
    local, own = local_of(8, batch_size=8, kind=TextTask), FederatedState({"prompt": prompt(2)})
    quiet = QUIET | {"clip_texts": 1e9, "sampling": "fixed"}
    results = [turn(make(clipped=where, **quiet), local, own) for where in ("prompt", "texts")]
    for mine, other in ((f[0].tensors["prompt"], f[1].fields["prompt"]) for f in results[1:]):
        assert torch.allclose(other, results[0][1].fields["prompt"], atol=1e-5)
        assert torch.allclose(mine, results[0][0].tensors["prompt"], atol=1e-5)
        assert not torch.allclose(mine, prompt(2), atol=1e-3)


def test_texts_get_one_noise_worth_both_on_the_sum_and_only_then_are_pulled_back(monkeypatch):
    asked = []

    def added(value, std, source):
        asked.append((value.clone(), std))
        return value + 1.0

    monkeypatch.setattr(gaussian_noise, "add_noise", added)
    local, own = local_of(8, batch_size=8, kind=TextTask), FederatedState({"prompt": prompt(2)})
    method = make(noise_local=3.0, noise_global=4.0, clip_texts=0.5, **TEXTS)
    _, up = turn(method, local, own)
    ((total, std),) = asked
    assert std == pytest.approx(0.5 * 2.4)
    assert total.shape == (CLASSES, SPACE)
    assert float(total.norm()) <= 8 * 0.5
    batch = local.rows.batches("fixed", 1, rng.RandomStream(bytes(32)))[0]
    pulled = local.rows.feature({"prompt": prompt(1) + prompt(2)}, batch).pull((total + 1.0) / 8)
    assert torch.allclose(up.fields["prompt"], pulled["prompt"], atol=1e-5)


def test_one_row_of_norm_a_million_moves_the_sum_in_the_texts_by_two_bounds(monkeypatch):
    sums = []
    monkeypatch.setattr(gaussian_noise, "add_noise", lambda value, std, source: sums.append(value.clone()) or value)
    local, other = (local_of(8, batch_size=8, kind=TextTask) for _ in range(2))
    x, y = other._rows[5]
    other._rows[5] = (-1e6 * x, (y + 1) % CLASSES)
    for trainer in (local, other):
        turn(make(clip_texts=0.1, **TEXTS), trainer, FederatedState({"prompt": prompt(2)}))
    moved = float((sums[0] - sums[1]).norm())
    assert 0.05 < moved <= 0.2 * (1 + 1e-5)


def test_noise_in_the_texts_is_the_operating_systems(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))
    turn(make(**TEXTS), local_of(8, kind=TextTask), FederatedState({"prompt": prompt(2)}))
    assert asked == [32, 16 * (4 * CLASSES * SPACE // 2)]  # the rows; four normal draws an entry, two from 16 bytes


@pytest.mark.long
def test_texts_cost_what_the_prompt_costs_and_a_batch_is_used_once(tmp_path):
    plan = SamplingPlan(10, 1, 4, 12, REPLACE)
    assert make(clipped="texts").privacy_spent(plan) == make().privacy_spent(plan)
    method = make(clipped="texts")
    rows = ChargedGradientSource(local_of(12, kind=TextTask).rows, method, charger_of(method, tmp_path))
    turn(method, GradientsOnlyTrainer(SPEC, rows))
    assert charged_to(method, tmp_path) > 0
    (batch,) = rows.batches("poisson", 1, rng.RandomStream(bytes(32)))
    rows.feature({"prompt": prompt(1)}, batch)
    with pytest.raises(BudgetError):
        rows.feature({"prompt": prompt(1)}, batch)


# --- what is private


def federation(method, locals_, rounds=3, deterministic=True, tap=None) -> InProcessFederation:
    config = parse({"run.deterministic": deterministic, "run.rounds": rounds})
    state = method.init(SPEC, {"prompt": prompt(1)}, rng.initial_stream(0, "method init"))
    exchange = MessageExchange(method, "dp_fpl", SPEC)
    return InProcessFederation(exchange, config, lambda site, ctx: locals_[site], list(locals_), state, tap=tap)


@pytest.mark.parametrize("exchange", ["batch", "epoch"])
def test_the_private_prompt_is_on_no_message_and_no_loss_is_reported(tmp_path, exchange):
    run = federation(
        make(exchange=exchange), {s: local_of(12, i) for i, s in enumerate("ab")}, tap=MessageCapture(tmp_path)
    )
    private_states = []
    run.run(lambda f, r: private_states.extend(f.private.values()))
    messages = b"".join(bytes(run.tap.read(m)) for m in MessageCapture(tmp_path).messages())
    assert len(private_states) == 6
    assert not any(s.tensors["prompt"].numpy().tobytes()[:12] in messages for s in private_states)
    assert all(set(report) == {"steps"} for report in run.reports.values())


def test_a_sites_update_does_not_depend_on_another_sites_data():
    ups = []
    for other in (local_of(12, 7), local_of(15, 8, scale=1e3)):
        run = federation(make(), {"a": local_of(12, 1), "b": other}, rounds=1)
        run.round(0)
        ups.append((run.private["a"].tensors["prompt"], run.private["b"].tensors["prompt"]))
    assert torch.equal(ups[0][0], ups[1][0])
    assert not torch.equal(ups[0][1], ups[1][1])


def test_a_real_run_takes_noise_and_rows_from_the_operating_system(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))
    local, own = local_of(12), FederatedState({"prompt": prompt(2)})
    first, second = (turn(make(), local, own)[1].fields["prompt"] for _ in range(2))
    assert not torch.equal(first, second), "a repeated turn"
    assert len(asked) == 2 * 4
    asked.clear()
    seeded = [turn(make(), local, own, replace(CTX, seeded=True))[1].fields["prompt"] for _ in range(2)]
    assert torch.equal(*seeded)
    assert not asked


def test_rounds_walk_through_one_epoch():
    method, local = make(sampling="disjoint"), local_of(13)
    drawn = [turn_of(method, local, replace(CTX, round=r))[0].rows for r in range(6)]
    assert len({i for rows in drawn[:3] for i in rows}) == 12
    assert len({i for rows in drawn[3:] for i in rows}) == 12
    assert drawn[:3] != drawn[3:]
    assert turn_of(method, local, replace(CTX, round=1))[0].rows == drawn[1]


def test_deployed_prompts():
    server, own = FederatedState({"prompt": prompt(1)}), FederatedState({"prompt": prompt(2)})
    assert torch.allclose(make().models(server, own)["client"]["prompt"], prompt(1) + prompt(2), atol=1e-6)
    arbitrary = make(residual=False)
    first, second = (arbitrary.models(server, own)["client"]["prompt"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.linalg.matrix_norm(first - prompt(1)) == pytest.approx(math.sqrt(3), rel=1e-5)
    k = make(residual="rank-k").models(server, own)["client"]["prompt"] - prompt(1)
    assert torch.linalg.matrix_rank(k, rtol=1e-4) == 3


@pytest.mark.parametrize("residual", [True, False, "rank-k"])
def test_the_gradient_is_taken_at_what_residual_forwards(residual, monkeypatch):
    local, seen = local_of(4), []
    rows = type(local.rows)
    real = rows.per_sample
    monkeypatch.setattr(rows, "per_sample", lambda s, w, b: seen.append(w["prompt"]) or real(s, w, b))
    turn(make(residual=residual), local, FederatedState({"prompt": prompt(2)}))
    start = torch.randn(WIDTH, 3, generator=CTX.rng("factors 0").torch_generator())
    u, v = low_rank.factorize_matrix(prompt(2), start)
    expected = {True: prompt(2), False: u @ v, "rank-k": u @ u.T @ prompt(2)}[residual]
    assert torch.allclose(seen[0], prompt(1) + expected, atol=1e-5)


# --- what it costs


@pytest.mark.parametrize(
    "nominal, row",
    [
        (0.01, ["0.0069", "0.0102", "0.022", "0.028", "0.99"]),
        (0.1, ["0.090", "0.131", "0.279", "0.348", "14.3"]),
        (0.4, ["0.408", "0.595", "1.27", "1.59", "102"]),
        (1.0, ["1.11", "1.63", "3.55", "4.48", "470"]),
    ],
)
def test_the_honest_epsilons_of_the_nominal_noise(nominal, row):
    """One release; u and v; the same under replace-one; with p_G (mode paper); clipped by batch (mode code: u, v)."""
    size, rounds, delta = 32, 100, 1e-5
    paper, code = (make(mode=m, epsilon=nominal, sampling="disjoint", rounds=rounds) for m in ("paper", "code"))
    plan = SamplingPlan(rounds, 1, size, size, REPLACE)

    def of(z: float, neighbours: Adjacency) -> float:
        return accounting.compute_epsilon({Step("gaussian", 0, 0, z): rounds}, delta, neighbours)

    def printed(value: float, text: str) -> str:
        if text == "470":  # two digits of 468.6
            return f"{round(value, -1):.0f}"
        return f"{value:.{len(text.partition('.')[2])}f}"

    z = paper._nominal
    ((step, _),) = code.privacy_spent(plan).items()
    epsilons = [
        of(z, ZERO),
        of(z / math.sqrt(2), ZERO),
        of(z / math.sqrt(2), REPLACE),
        accounting.compute_epsilon(paper.privacy_spent(plan), delta, REPLACE),
        of(step[3] * math.sqrt(3 / 2), REPLACE),  # without p_G, as the table has it
    ]
    assert [printed(v, t) for v, t in zip(epsilons, row, strict=True)] == row


def test_events_compose_the_two_releases_and_nothing_is_claimed_without_noise():
    method, plan = make(noise_local=3.0, noise_global=4.0), SamplingPlan(10, 1, 4, 12, REPLACE)
    (((kind, examples, batch, z, _), count),) = method.privacy_spent(plan).items()
    assert (kind, examples, batch, count) == ("poisson", 12, 4, 10)
    assert z == pytest.approx(2.4)
    silent = make(noise_global=0.0).privacy_spent(plan)
    assert accounting.compute_epsilon(silent, 1e-5, REPLACE) == math.inf
    epoch = make(exchange="epoch", sampling="disjoint")
    assert list(epoch.privacy_spent(SamplingPlan(10, 6, 4, 12, REPLACE)).values()) == [20]


def accounted(method, path, count=12, **config):
    rows = ChargedGradientSource(local_of(count, **config).rows, method, charger_of(method, path))
    return GradientsOnlyTrainer(SPEC, rows)


def charger_of(method, path) -> RunCharger:
    own = PrivacyBudget(math.inf, method.delta, REPLACE)
    return RunCharger(PrivacyLedger(path), RunTerms("r", method.budget, 10, 30), own)


def charged_to(method, path) -> float:
    own = PrivacyBudget(math.inf, method.delta, REPLACE)
    return PrivacyLedger(path).read(own).account.standing(Party.SERVER).composed


def cost(method, rounds: int, steps: int = 1) -> float:
    spent = method.privacy_spent(SamplingPlan(rounds, steps, 4, 12, REPLACE))
    return accounting.compute_epsilon(spent, method.delta, REPLACE)


@pytest.mark.parametrize("exchange, sampling", [("batch", "poisson"), ("epoch", "disjoint")])
def test_the_ledger_ends_a_run_before_its_budget_is_passed(tmp_path, exchange, sampling):
    free = make(exchange=exchange, sampling=sampling, noise_local=20.0, noise_global=20.0)
    steps = 1 if exchange == "batch" else 3
    method = replace(free, epsilon=1.001 * cost(free, 3, steps))
    for round_ in range(3):
        local = accounted(method, tmp_path)  # a restart every round
        turn(method, local, ctx=replace(CTX, round=round_))
    assert charged_to(method, tmp_path) == pytest.approx(cost(free, 3, steps), rel=1e-3)
    local = accounted(method, tmp_path)
    with pytest.raises(BudgetError, match="replace-one"):
        turn(method, local, ctx=replace(CTX, round=3))
    assert charged_to(method, tmp_path) <= method.epsilon


def test_under_the_ledger_nothing_is_looked_at_for_free(tmp_path):
    method = make()
    local = accounted(method, tmp_path)
    (batch,) = local.rows.batches("poisson", 1, rng.RandomStream(bytes(32)))
    weights = {"prompt": prompt(1)}
    local.rows.per_sample(weights, batch)
    for act in (
        lambda: local.rows.per_sample(weights, batch),
        lambda: local.rows.per_sample(weights, local_of().rows.batches("poisson", 1, rng.RandomStream(bytes(32)))[0]),
        lambda: local.train(weights),
        lambda: local.gradient(weights),
    ):
        with pytest.raises(BudgetError):
            act()


# --- bad input


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"rank": 7}, "rank"),
        ({"rank": 0}, "rank"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": 1.0, "noise_global": 0.0}, "noise_local and noise_global"),
        ({"noise_local": -0.1}, "noise_local"),
        ({"clip_local": 0.0}, "clip_local"),
        ({"clip_global": math.nan}, "clip_global"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"rounds": 0}, "rounds"),
        ({"mode": "paper"}, "mode"),
        ({"mode": "code", "epsilon": 0.1, "exchange": "epoch"}, "mode"),
        ({"mode": "paper", "epsilon": 0.1, "clipped": "texts"}, "mode"),
        ({"clip_texts": 0.0}, "clip_texts"),
        ({"sampling": "fixed", "neighbours": ZERO}, "sampling"),
    ],
)
def test_bad_fields_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        make(**fields)


def test_a_batch_above_the_site_is_refused():
    for method in (make(), make(exchange="epoch"), make(sampling="disjoint"), make(sampling="fixed")):
        with pytest.raises(ConfigError, match="batch-size: expected at most the site's 3 examples"):
            turn(method, local_of(3))


@pytest.mark.parametrize("fields", [{"epsilon": 3.0}, {"mode": "paper", "epsilon": 0.1}])
def test_a_deterministic_run_that_asks_for_an_epsilon_is_refused(fields):
    with pytest.raises(ConfigError, match="run.deterministic"):
        federation(make(**fields), {"a": local_of()})
    with pytest.raises(ConfigError, match="run.deterministic"):
        turn(make(**fields), local_of(), ctx=replace(CTX, seeded=True))


def test_another_spec_is_refused_and_fields_travel_as_json():
    with pytest.raises(ConfigError, match="adapter"):
        make().init({"prompt": ParamSpec((LENGTH + 1, WIDTH))}, {}, rng.initial_stream(0, "x"))
    for method in (
        make(residual="rank-k"),
        make(residual=False),
        make(neighbours=ZERO),
        make(mode="code", epsilon=0.4),
    ):
        assert strategies.create_from_json("dp_fpl", json.dumps(asdict(method))) == method
    made = strategies.create_method("dp_fpl", 'residual = "rank-k"\nneighbours = "zero-out"\nadapter = {length = 9}')
    assert (made.residual, made.neighbours, made.adapter.length) == ("rank-k", ZERO, 9)
    with pytest.raises(ConfigError, match="residual"):
        strategies.create_method("dp_fpl", 'residual = "rank"')
