"""Other sites as the null distribution: by hand, on sites that memorized their rows, and where it must fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership import fedmia
from fedveil.attacks.membership.alignment import alignment_scores
from fedveil.attacks.membership.fedmia import FedMIAAttack, compare_sites
from fedveil.attacks.statistics import area_under_roc
from tests.attacks.toy import Descent, Linear, points

SITES = "abcd"
NOBODY = points(60, 7)


def fedmia_scores(view, site, knowledge, rows):
    return FedMIAAttack().scores(view, site, knowledge, rows)["fedmia"]


@pytest.fixture
def run(federate):
    """Sites of eight rows each: view, knowledge and rows."""

    def make(steps: int = 8, name: str = "fedavg", fields: str = "", sites: str = SITES, shared=(), seed: int = 3):
        task = Linear()
        rows = {site: [*points(8, 10 * seed + i), *shared] for i, site in enumerate(sites)}
        noise = torch.Generator().manual_seed(5)
        start = {n: w + 0.2 * torch.randn(w.shape, generator=noise) for n, w in task.initial().items()}
        locals_ = {site: Descent(task, of_site, steps=steps, rate=0.3) for site, of_site in rows.items()}
        federation, view = federate(
            name, task.spec, start, lambda site, _: locals_[site], fields, sites=sites, rounds=3, seed=seed
        )
        federation.run()
        return view, AdversaryKnowledge(task, start), rows

    return make


def test_few_others_are_a_mean_and_many_a_distribution(monkeypatch):
    rounds = [np.array([[0.5, 0.1], [0.1, 0.1], [0.3, 0.2]]), np.array([[0.4, 0.0], [0.2, 0.0], [0.0, 0.2]])]
    assert compare_sites(rounds).tolist() == pytest.approx([(0.3 + 0.3) / 2, (-0.05 - 0.1) / 2])
    monkeypatch.setattr(fedmia, "OWN_SPREAD", 2)
    z = [0.3 / np.std([0.1, 0.3], ddof=1), 0.3 / np.std([0.2, 0.0], ddof=1)]
    expected = np.mean([math.log(0.5 * math.erfc(-v / 2**0.5)) for v in z])
    assert compare_sites(rounds)[0] == pytest.approx(expected)
    assert np.isfinite(compare_sites([np.array([[0.9, -0.9], [0.0, 0.0], [0.0, 0.0]])])).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fields"), [("fedavg", ""), ("fedrand", "upload_bits = 8"), ("fedrand", ""), ("fedrand", "past = false")]
)
def test_rows_of_a_site_score_above_rows_of_nobody(name, fields, run):
    areas = []
    for seed in (3, 4):
        view, knowledge, rows = run(name=name, fields=fields, seed=seed)
        for site in SITES:
            mine, others = (fedmia_scores(view, site, knowledge, of) for of in (rows[site], NOBODY))
            areas.append(area_under_roc(mine, others))
    assert np.mean(areas) > 0.75, areas


def test_it_loses_on_wrong_sites_and_on_untrained_ones(run):
    view, knowledge, rows = run()
    nobody = fedmia_scores(view, "a", knowledge, NOBODY)
    wrong = [area_under_roc(fedmia_scores(view, "a", knowledge, rows[site]), nobody) for site in "bcd"]
    assert max(wrong) < 0.6, "their rows moved the others, which are the null"
    view, knowledge, rows = run(steps=0, seed=4)
    assert not fedmia_scores(view, "a", knowledge, [*rows["a"], *NOBODY]).any()


def test_what_every_site_has_cancels(run):
    """A row that all sites trained on is of none of them more than of another: the cosine alone would say it is."""
    shared = points(4, 99)
    view, knowledge, rows = run(shared=shared)
    alone = area_under_roc(
        alignment_scores(view, "a", knowledge, shared), alignment_scores(view, "a", knowledge, NOBODY)
    )
    null = area_under_roc(fedmia_scores(view, "a", knowledge, shared), fedmia_scores(view, "a", knowledge, NOBODY))
    own = area_under_roc(
        fedmia_scores(view, "a", knowledge, rows["a"][:8]), fedmia_scores(view, "a", knowledge, NOBODY)
    )
    assert null < alone
    assert null < own


def test_a_row_s_score_does_not_depend_on_the_other_rows_asked(run):
    view, knowledge, rows = run()
    together = fedmia_scores(view, "b", knowledge, [*rows["b"], *NOBODY])
    assert together[:8] == pytest.approx(fedmia_scores(view, "b", knowledge, rows["b"]), abs=1e-7)


def test_it_declines_a_run_of_one_site(run):
    view, knowledge, rows = run(sites="a")
    assert FedMIAAttack().misfit(view, knowledge) == "it compares sites, and only one took part in the run"
    assert not fedmia_scores(view, "a", knowledge, rows["a"]).any()
