"""Residuals of rows on the span of a site's factor updates, for a linear model with known gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership.projection_residual import (
    ProjectionResidualAttack,
    projection_residual,
    update_span,
)
from fedveil.attacks.statistics import area_under_roc
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from tests.attacks.toy import CLASSES, WIDTH, Descent, Linear, points

NOBODY = points(40, 7)
A, B = "projection of A", "projection of B"


def projection_scores(view, site, knowledge, rows):
    return ProjectionResidualAttack(uploads=1).scores(view, site, knowledge, rows)


@pytest.fixture
def start():
    generator = torch.Generator().manual_seed(2)
    return {n: 0.5 * torch.randn(w.shape, generator=generator) for n, w in Linear().initial().items()}


@pytest.fixture
def attacked(federate, start):
    """Two sites of so many rows each, so many full-batch steps: view, knowledge and the rows."""

    def run(rows: int, steps: int = 1, name: str = "fedavg", fields: str = "", begin=None, kind=Descent, seed: int = 3):
        begin = start if begin is None else begin
        task, own = Linear(), {site: points(rows, 100 * seed + i) for i, site in enumerate("ab")}
        locals_ = {site: kind(task, own[site], steps=steps, rate=0.1) for site in own}
        federation, view = federate(
            name, task.spec, begin, lambda site, _: locals_[site], fields, sites="ab", rounds=1, seed=seed
        )
        federation.run()
        return view, AdversaryKnowledge(task, begin), own

    return run


def test_a_matrix_of_rank_one_spans_its_direction_alone():
    u, v = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([1.0, 2.0, 2.0, 0.0])
    of_b = update_span(torch.outer(u, v), "B")
    assert of_b.shape == (3, 1)
    assert abs(float(of_b[:, 0] @ u.double())) == pytest.approx(5.0)
    of_a = update_span(torch.outer(u, v), "A")
    assert abs(float(of_a[:, 0] @ v.double())) == pytest.approx(3.0)
    inside, across = torch.outer(-7 * u, torch.ones(4)), torch.outer(torch.tensor([4.0, -3.0, 0.0]), v)
    assert projection_residual(inside, of_b, "B") == pytest.approx(0.0, abs=1e-9)
    assert projection_residual(across, of_b, "B") == pytest.approx(1.0)
    assert projection_residual(across, of_a, "A") == pytest.approx(0.0, abs=1e-9)
    assert projection_residual((inside / inside.norm() + across / across.norm()), of_b, "B") == pytest.approx(
        0.5**0.5, rel=1e-6
    )
    assert projection_residual(torch.zeros(3, 4), of_b, "B") == 1.0


def test_one_row_and_one_step_leave_no_residual_and_other_rows_do(attacked):
    view, knowledge, own = attacked(1)
    mine, others = (projection_scores(view, "a", knowledge, rows) for rows in (own["a"], NOBODY))
    for name in (A, B):
        assert mine[name][0] == pytest.approx(0.0, abs=1e-3)
        assert area_under_roc(mine[name], others[name]) == 1.0


def test_a_step_uphill_stays_in_the_span_where_a_cosine_turns(attacked):
    class Uphill(Descent):
        def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
            down = super().train(weights, frozen, penalty).weights
            return TrainingResult({n: 2 * weights[n] - w for n, w in down.items()}, {})

    view, knowledge, own = attacked(1, kind=Uphill)
    assert projection_scores(view, "a", knowledge, own["a"])[B][0] == pytest.approx(0.0, abs=1e-3)


def test_another_site_s_row_loses(attacked):
    """Rows of one class share much of a gradient here, so a single one may well lie near: the mean of ten counts."""
    areas: dict[str, list[float]] = {A: [], B: []}
    for seed in range(3, 8):
        view, knowledge, own = attacked(1, seed=seed)
        for site, other in ("ab", "ba"):
            wrong, others = (projection_scores(view, other, knowledge, rows) for rows in (own[site], NOBODY))
            for name in (A, B):
                assert wrong[name][0] < -0.001
                areas[name].append(area_under_roc(wrong[name], others[name]))
    assert np.mean(areas[A]) < 0.8, areas
    assert np.mean(areas[B]) < 0.8, areas


@pytest.mark.long
def test_with_more_rows_than_directions_the_span_says_less(attacked):
    """The classes' errors span CLASSES - 1 directions, so B gives nothing away behind three rows; A has WIDTH."""
    areas = {}
    for rows in (1, 2, 64):
        aurocs = []
        for seed in range(3, 9):
            view, knowledge, own = attacked(rows, seed=seed)
            mine, others = (projection_scores(view, "a", knowledge, of)[A] for of in (own["a"], NOBODY))
            aurocs.append(area_under_roc(mine, others))
        areas[rows] = float(np.mean(aurocs))
    assert areas[1] == 1.0
    assert areas[64] < areas[2] <= areas[1]
    assert areas[64] < 0.7


def test_an_untrained_site_and_a_factor_that_did_not_move_score_every_row_alike(attacked):
    view, knowledge, own = attacked(4, steps=0)
    for name in (A, B):
        assert not projection_scores(view, "a", knowledge, [*own["a"], *NOBODY])[name].any()
    view, knowledge, own = attacked(1, begin=Linear().initial(), seed=4)  # B = 0: A has no gradient
    scores = projection_scores(view, "a", knowledge, [*own["a"], *NOBODY])
    assert not scores[A].any()
    assert scores[B][0] > scores[B][1:].max()


def test_a_site_that_sends_one_factor_has_the_score_of_that_one(attacked):
    names = set()
    for seed in range(3, 9):
        view, knowledge, own = attacked(1, name="fedrand", seed=seed)
        (name,) = projection_scores(view, "a", knowledge, own["a"])
        names.add(name)
    assert names == {A, B}


def test_it_declines_a_run_without_pairs():
    knowledge = AdversaryKnowledge(Linear(), {})
    assert ProjectionResidualAttack().misfit(None, knowledge) == ""
    knowledge.task.__class__ = type("Prompts", (Linear,), {"spec": {"prompt": ParamSpec((CLASSES, WIDTH))}})
    assert ProjectionResidualAttack().misfit(None, knowledge) == "the run trains no LoRA pairs"
