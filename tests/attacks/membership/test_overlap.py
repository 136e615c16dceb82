"""What moved A, against rows' gradients at a B that nobody knows, on a linear model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil.attacks.base import Knowledge
from fedveil.attacks.membership.alignment import alignment_scores
from fedveil.attacks.membership.overlap import EPSILON, Overlap, overlap_scores, probed
from fedveil.attacks.membership.turns import Turns
from fedveil.attacks.statistics import auroc
from fedveil.contract.spec import TensorSpec
from tests.attacks.toy import CLASSES, RANK, WIDTH, Descent, Linear, points

NOBODY = points(60, 7)
SITES = "abc"
A = "overlap of A"


@pytest.fixture
def attacked(federate):
    """Three sites of so many rows, so many rounds: view, knowledge and rows. B starts at 0 and its training is real."""

    def run(name: str, fields: str = "", rows: int = 3, rounds: int = 4, steps: int = 6, seed: int = 3):
        task, own = Linear(), {site: points(rows, 100 * seed + i) for i, site in enumerate(SITES)}
        locals_ = {site: Descent(task, own[site], steps=steps, rate=0.5) for site in own}
        federation, view = federate(
            name,
            task.spec,
            task.initial(),
            lambda site, _: locals_[site],
            fields,
            sites=SITES,
            rounds=rounds,
            seed=seed,
        )
        federation.run()
        return view, Knowledge(task, task.initial()), own

    return run


def area(view, knowledge, own, beside: int = 0) -> float:
    """Over all sites, of their rows against those of nobody."""
    mine, others = (
        np.concatenate(
            [overlap_scores(view, SITES[i - beside], knowledge, of or own[s])[A] for i, s in enumerate(SITES)]
        )
        for of in ([], NOBODY)
    )
    return auroc(mine, others)


@pytest.mark.parametrize(("name", "fields"), [("fedsa_lora", ""), ("fedrand", "rho = 1.0")])
def test_it_wins_where_b_never_leaves_and_alignment_says_nothing(name, fields, attacked):
    view, knowledge, own = attacked(name, fields)
    assert not alignment_scores(view, "a", knowledge, [*own["a"], *NOBODY]).any()
    areas = [area(*attacked(name, fields, seed=seed)) for seed in (3, 4, 5)]
    wrong = [area(*attacked(name, fields, seed=seed), beside=1) for seed in (13, 14, 15)]
    assert np.mean(areas) > 0.85, areas
    assert abs(np.mean(wrong) - 0.5) < 0.2, wrong


def test_by_hand_a_row_along_the_move_scores_one_and_one_across_it_nothing(attacked):
    """A moved by e x^T for some e, so the row's own overlap is 1 and that of an orthogonal x is 0."""
    view, knowledge, own = attacked("fedsa_lora", rows=1, rounds=1, steps=2)
    x, y = own["a"][0]
    other = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    other = other - x * (other @ x) / (x @ x)
    found = overlap_scores(view, "a", knowledge, [(x, y), (other, y), (3 * x + other, y)])[A]
    assert found[0] == pytest.approx(1.0, abs=1e-4)
    assert found[1] == pytest.approx(0.0, abs=1e-4)
    assert 0.5 < found[2] < 1.0


def test_nothing_moved_scores_every_row_nothing(attacked):
    view, knowledge, own = attacked("fedsa_lora", steps=0)
    assert not overlap_scores(view, "a", knowledge, [*own["a"], *NOBODY])[A].any()


def test_the_last_turn_that_sent_a_is_the_one(attacked):
    view, knowledge, _ = attacked("fedrand", rounds=5)
    turns = Turns(view, knowledge.initial)
    for site in SITES:
        sent = [i for i in range(5) if "m.lora_A" in turns.at(site, i).moved]
        assert Overlap().at(turns, site) == sent[-1:]
    assert any(Overlap().at(turns, site) != [4] for site in SITES)


def test_a_site_that_never_sends_a_has_no_score(attacked):
    view, knowledge, own = attacked("fedrand", "rho = 0.0")
    assert overlap_scores(view, "a", knowledge, own["a"]) == {}


def test_probes_replace_a_b_of_zero_alone_and_are_the_same_everywhere():
    start = {"m.lora_A": torch.ones(RANK, WIDTH), "m.lora_B": torch.zeros(CLASSES, RANK), "n.lora_B": torch.ones(2, 5)}
    first, again, other = probed(start, 0), probed(start, 0), probed(start, 1)
    assert torch.equal(first["m.lora_B"], again["m.lora_B"])
    assert not torch.equal(first["m.lora_B"], other["m.lora_B"])
    columns = first["m.lora_B"].T @ first["m.lora_B"]
    torch.testing.assert_close(columns, EPSILON**2 * torch.eye(RANK), atol=1e-11, rtol=1e-4)
    assert first["n.lora_B"] is start["n.lora_B"]
    assert not start["m.lora_B"].any()
    wide = probed({"m.lora_B": torch.zeros(2, 5)}, 0)["m.lora_B"]
    assert wide[:, :2].all()
    assert not wide[:, 2:].any()


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("fedavg", "", "every upload has B"),
        ("ffa_lora", "", "no A of a LoRA pair"),
        ("fedsa_lora", "", ""),
        ("rolora", "", ""),
        ("fedrand", "", ""),
    ],
)
def test_it_is_for_runs_in_which_b_may_stay(name, fields, said, attacked):
    view, knowledge, _ = attacked(name, fields, rounds=1)
    found = Overlap().misfit(view, knowledge)
    assert (said in found) if said else found == ""


def test_it_declines_a_run_without_pairs(federate):
    spec = {"prompt": TensorSpec((CLASSES, WIDTH))}
    _, view = federate("fedavg", spec, {"prompt": torch.zeros(CLASSES, WIDTH)}, lambda site, _: Descent(Linear(), []))
    assert Overlap().misfit(view, Knowledge(Linear(), {})) == "the sites send no A of a LoRA pair"
