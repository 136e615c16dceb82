"""Updates compared with gradients of single rows, on a linear model with closed-form gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership.alignment import alignment_scores
from fedveil.attacks.statistics import area_under_roc
from fedveil.contract.param_spec import ParamSpec, Spec
from fedveil.contract.trainer import TrainingResult

RANK, D_IN, D_OUT = 4, 24, 6
SPEC: Spec = {"m.lora_A": ParamSpec((RANK, D_IN)), "m.lora_B": ParamSpec((D_OUT, RANK))}
SITES = "abc"
A, B = SPEC


@dataclass
class Rows:
    """A batch."""

    x: torch.Tensor
    y: torch.Tensor

    def to(self, device) -> Rows:
        return Rows(self.x.to(device), self.y.to(device))


@dataclass
class Linear:
    """What the attack needs of a task: y = B A x, squared error."""

    device: torch.device = torch.device("cpu")
    trained: dict[str, torch.Tensor] = field(
        default_factory=lambda: {n: torch.zeros(t.shape, requires_grad=True) for n, t in SPEC.items()}
    )

    def put(self, weights) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])

    def collate(self, rows) -> Rows:
        return Rows(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    def loss_sum(self, batch: Rows) -> torch.Tensor:
        return (batch.x @ self.trained[A].T @ self.trained[B].T - batch.y).square().sum()


@dataclass
class Descent:
    """Full-batch steps on the site's rows; none: the weights come back as they are. The start of each turn is noted."""

    rows: list
    steps: int
    started: list = field(default_factory=list)

    spec = SPEC

    @property
    def num_examples(self) -> int:
        return len(self.rows)

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        self.started.append({n: w.clone() for n, w in weights.items()})
        task = Linear()
        task.put(weights)
        for _ in range(self.steps):
            task.loss_sum(task.collate(self.rows)).div(len(self.rows)).backward()
            with torch.no_grad():
                for parameter in task.trained.values():
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
        return TrainingResult({n: p.detach().clone() for n, p in task.trained.items()}, {})

    def gradient(self, weights) -> TrainingResult:
        task = Linear()
        task.put(weights)
        loss = task.loss_sum(task.collate(self.rows)) / len(self.rows)
        return TrainingResult(
            dict(zip(task.trained, torch.autograd.grad(loss, list(task.trained.values())), strict=True)), {}
        )


def drawn(seed: int, count: int) -> list:
    """Rows whose targets follow no rule: what is learnt of them is them."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(D_IN, generator=generator), 2 * torch.randn(D_OUT, generator=generator)) for _ in range(count)]


@pytest.fixture
def initial() -> dict[str, torch.Tensor]:
    """Neither factor zero, so that both have a gradient from the start."""
    generator = torch.Generator().manual_seed(2)
    return {n: 0.3 * torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


@pytest.fixture
def attack(federate, initial):
    """Runs a federation of three sites of five rows: the view, the knowledge, and every site's rows and trainings."""

    def run(name, fields="", rounds=3, steps=20, start=None):
        start = start or initial
        rows = {site: drawn(ord(site), 5) for site in SITES}
        locals_ = {site: Descent(rows[site], steps) for site in SITES}
        trainer_for = lambda site, _: locals_[site]  # noqa: E731
        federation, view = federate(name, SPEC, start, trainer_for, fields, sites=SITES, rounds=rounds)
        federation.run()
        return view, AdversaryKnowledge(Linear(), start), rows, locals_

    return run


def gradient(start, row, name: str) -> torch.Tensor:
    """dL/dA = 2 B^T e x^T and dL/dB = 2 e (A x)^T with e = B A x - y."""
    x, y = row
    error = start[B] @ start[A] @ x - y
    return 2 * torch.outer(start[B].T @ error, x) if name == A else 2 * torch.outer(error, start[A] @ x)


def cosine(start, moves, row) -> float:
    mine = torch.cat([-gradient(start, row, name).flatten() for name in moves])
    move = torch.cat([m.flatten() for m in moves.values()])
    return float(torch.nn.functional.cosine_similarity(mine.double(), move.double(), dim=0))


@pytest.mark.long
@pytest.mark.parametrize(
    "name,fields", [("fedavg", ""), ("fedrand", ""), ("fedrand", "past = false"), ("fedrand", "upload_bits = 4")]
)
@pytest.mark.parametrize("uploads", [1, 3])
def test_rows_of_an_overfitted_client_score_above_rows_of_nobody(name, fields, uploads, attack):
    view, knowledge, rows, _ = attack(name, fields)
    nobody = drawn(7, 40)
    areas = []
    for site in SITES:
        members = alignment_scores(view, site, knowledge, rows[site], uploads)
        others = alignment_scores(view, site, knowledge, nobody, uploads)
        assert np.isfinite(members).all()
        assert max(np.abs(members).max(), np.abs(others).max()) <= 1 + 1e-6
        areas.append(area_under_roc(members, others))
    assert np.mean(areas) > 0.8, areas


def test_another_site_s_rows_score_lower_than_its_own(attack):
    view, knowledge, rows, _ = attack("fedavg")
    for mine, other in itertools.permutations(SITES, 2):
        of_mine = alignment_scores(view, mine, knowledge, rows[mine])
        assert of_mine.mean() > alignment_scores(view, mine, knowledge, rows[other]).mean() + 0.1


@pytest.mark.parametrize("name", ["fedavg", "fedrand"])
def test_nothing_trained_scores_zero(name, attack):
    view, knowledge, rows, _ = attack(name, steps=0)
    assert alignment_scores(view, "a", knowledge, rows["a"], 3).tolist() == [0.0] * 5


def test_where_b_was_never_seen_rows_are_told_by_the_overlap(attack, initial):
    """B zero: A has no gradient in the first round, though training then moved it; see test_overlap."""
    view, knowledge, rows, _ = attack(
        "fedrand", "rho = 1.0", rounds=1, start={**initial, B: torch.zeros_like(initial[B])}
    )
    moved = next(view.uploads("a")).payload.fields[A] - initial[A]
    assert moved.abs().max() > 0
    mine, others = (alignment_scores(view, "a", knowledge, asked) for asked in (rows["a"], drawn(9, 40)))
    assert area_under_roc(mine, others) > 0.8


def test_no_rows_and_an_unknown_site(attack):
    view, knowledge, rows, _ = attack("fedavg", rounds=1)
    assert alignment_scores(view, "a", knowledge, []).shape == (0,)
    assert alignment_scores(view, "nobody", knowledge, rows["a"]).tolist() == [0.0] * 5


def test_fedavg_by_hand(attack):
    """One cosine over both factors together, at the broadcast of each round; the mean over the last uploads."""
    view, knowledge, rows, locals_ = attack("fedavg")
    uploads = [u.payload.fields for u in view.uploads("b")]
    asked = [*rows["b"], *drawn(8, 3)]
    by_round = []
    for start, sent in zip(locals_["b"].started, uploads, strict=True):
        by_round.append([cosine(start, {n: sent[n] - start[n] for n in SPEC}, row) for row in asked])
    for last in (1, 2, 3):
        scores = alignment_scores(view, "b", knowledge, asked, last)
        np.testing.assert_allclose(scores, np.mean(by_round[-last:], 0), atol=1e-5)


def test_codes_are_aligned_as_what_they_stand_for(attack):
    """Eight bits a weight move no row's cosine by more than 0.02."""
    plain, coded = (attack("fedrand", f"upload_bits = {bits}", rounds=1) for bits in (0, 8))
    for site in SITES:
        asked = [*plain[2][site], *drawn(9, 5)]
        scores = [alignment_scores(view, site, knowledge, asked) for view, knowledge, *_ in (plain, coded)]
        assert not np.array_equal(*scores)
        np.testing.assert_allclose(*scores, atol=0.02)


@pytest.mark.parametrize("rho,sent,kept", [(1.0, A, B), (0.0, B, A)])
def test_only_the_sent_factor_counts(rho, sent, kept, attack, initial):
    """The other is never seen: it stays at the broadcast's, which nobody moves."""
    view, knowledge, rows, locals_ = attack("fedrand", f"rho = {rho}", rounds=1)
    start = locals_["a"].started[0]
    move = next(view.uploads("a")).payload.fields[sent] - start[sent]
    expected = [cosine(start, {sent: move}, row) for row in rows["a"]]
    np.testing.assert_allclose(alignment_scores(view, "a", knowledge, rows["a"]), expected, atol=1e-5)
    both = locals_["a"].spec
    assert set(both) == {sent, kept}
    full = attack("fedavg", rounds=1)
    assert not np.allclose(alignment_scores(full[0], "a", full[1], rows["a"]), expected, atol=1e-3)


@pytest.mark.parametrize("past", [True, False])
def test_the_kept_factor_is_where_the_server_last_saw_it(past, attack):
    """The sent one from the broadcast. The kept one: with past = true the site's last upload of it, before that the
    broadcast's; with past = false the broadcast's always, which is where the site truly started."""
    view, knowledge, rows, locals_ = attack("fedrand", f"past = {str(past).lower()}", rounds=6)
    from_own_past = 0
    for site in SITES:
        last_sent: dict[str, torch.Tensor] = {}
        by_turn = []
        for turn, (down, up) in enumerate(zip(view.broadcasts(site), view.uploads(site), strict=True)):
            ((name, weight),) = up.payload.fields.items()
            start = dict(down.payload.fields)
            if past and turn:
                from_own_past += sum(n != name for n in last_sent)
                start |= {n: w for n, w in last_sent.items() if n != name}
            if not past:
                assert all(torch.equal(start[n], w) for n, w in locals_[site].started[turn].items())
            by_turn.append([cosine(start, {name: weight - start[name]}, row) for row in rows[site]])
            last_sent[name] = weight
        for last in (1, 6):
            scores = alignment_scores(view, site, knowledge, rows[site], last)
            np.testing.assert_allclose(scores, np.mean(by_turn[-last:], 0), atol=1e-5)
    assert from_own_past > 0 or not past


def test_the_task_is_left_without_gradients(attack):
    view, knowledge, rows, _ = attack("fedavg", rounds=1)
    alignment_scores(view, "a", knowledge, rows["a"])
    assert all(p.grad is None for p in knowledge.task.trained.values())


def test_a_tensor_that_a_row_does_not_reach_has_no_gradient(attack):
    """It adds nothing to the product, and is no error."""
    view, knowledge, rows, locals_ = attack("fedavg", rounds=1)

    class OnlyA(Linear):
        def loss_sum(self, batch):
            hidden = batch.x @ self.trained[A].T @ self.trained[B].detach().T
            return (hidden - batch.y).square().sum()

    scores = alignment_scores(view, "a", AdversaryKnowledge(OnlyA(), knowledge.initial), rows["a"])
    start = locals_["a"].started[0]
    sent = next(view.uploads("a")).payload.fields
    length = sum(float((sent[n] - start[n]).square().sum()) for n in SPEC) ** 0.5
    for score, row in zip(scores, rows["a"], strict=True):
        along = -gradient(start, row, A)
        expected = float((along * (sent[A] - start[A])).sum()) / float(along.norm()) / length
        assert score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("wire", ["explicit", "implicit", "seeded"])
def test_of_a_masked_gradient_the_surviving_entries_are_aligned(wire, attack, initial):
    """The move is minus the mean gradient of the site's rows where the mask has a one, zero elsewhere."""
    fields = f"rate = 0.6\nwire = '{wire}'\nadapter = {{kind = 'lora'}}"
    view, knowledge, rows, locals_ = attack("random_binary", fields, rounds=1)
    (upload,) = view.uploads("a")
    whole = locals_["a"].gradient(initial).weights
    moves = {
        n: -torch.where(m, whole[n], 0.0)
        for n, _, m in view.exchange.method.surviving(upload.payload, {n: t.shape for n, t in SPEC.items()})
    }
    assert all(0 < int((m == 0).sum()) < m.numel() for m in moves.values())
    scores = alignment_scores(view, "a", knowledge, rows["a"])
    assert scores == pytest.approx([cosine(initial, moves, row) for row in rows["a"]], abs=1e-5)
    assert area_under_roc(scores, alignment_scores(view, "a", knowledge, drawn(99, 40))) > 0.8


def test_what_is_withheld_by_name_is_no_move(attack, initial):
    view, knowledge, rows, locals_ = attack("fixed_position", "hidden = 'lora_A'\nadapter = {kind = 'lora'}", rounds=1)
    moves = {B: -locals_["a"].gradient(initial).weights[B]}
    scores = alignment_scores(view, "a", knowledge, rows["a"])
    assert scores == pytest.approx([cosine(initial, moves, row) for row in rows["a"]], abs=1e-5)
