"""Rebuilt site models under methods with a residual, compared with the sites' true start and end weights."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.base import AdversaryKnowledge, explain_misfit
from fedveil.attacks.membership.alignment import AlignmentAttack, alignment_scores
from fedveil.attacks.membership.client_updates import ObservedClientUpdates
from fedveil.attacks.model_extraction import residual_replay
from fedveil.attacks.model_extraction.factor_pairing import latest_factors, merge_with_broadcast
from fedveil.attacks.secagg_views import MaskedUploadView, SecureSumView
from fedveil.attacks.statistics import area_under_roc
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import StateError
from tests.attacks.toy import CLASSES, WIDTH, Descent, Linear, points

SITES = "abcd"
SPEC = {
    "h.0.lora_A": ParamSpec((2, 30)),
    "h.0.lora_B": ParamSpec((20, 2)),
    "h.1.lora_A": ParamSpec((2, 24)),
    "h.1.lora_B": ParamSpec((33, 2)),
    "h.0.residual": ParamSpec((20, 30), fixed=True),
    "h.1.residual": ParamSpec((33, 24), fixed=True),
}
PAIRS = [name for name, tensor in SPEC.items() if not tensor.fixed]
RANK = "adapter.rank = 2"


@dataclass
class Walk:
    """Training that nobody can guess: what it began from, and where it ended, are noted."""

    site: str
    round: int
    noted: dict[str, list]
    spec = SPEC
    num_examples = 3

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        generator = torch.Generator().manual_seed(1000 * ord(self.site) + self.round)
        begun = {n: w.clone() for n, w in weights.items()}
        after = {n: w + 0.3 * torch.randn(w.shape, generator=generator) for n, w in begun.items()}
        after |= {n: torch.where(mask, begun[n], after[n]) for n, mask in (frozen or {}).items()}
        self.noted[self.site].append((begun, after))
        return TrainingResult(after, {})


def start():
    generator = torch.Generator().manual_seed(2)
    return {
        n: torch.zeros(t.shape) if t.fixed or n.endswith("B") else torch.rand(t.shape, generator=generator) - 0.5
        for n, t in SPEC.items()
    }


@pytest.fixture
def walk(federate):
    def run(name, fields="", fraction=1.0, rounds=6):
        noted = defaultdict(list)
        trainer_for = lambda site, ctx: Walk(site, ctx.round, noted)  # noqa: E731
        fields = f"{RANK}\n{fields}"
        federation, view = federate(name, SPEC, start(), trainer_for, fields, SITES, rounds, fraction)
        federation.run()
        return federation, view, noted

    return run


RUNS = [
    ("fedex_lora", "", 1.0),
    ("fedex_lora", "", 0.5),  # sites that skip rounds, and get the residual whole
    ("fedex_lora", 'wire_dtype = "bfloat16"', 0.75),
    ("flora", "", 0.5),
    ("flora", "ranks.b = 1\nranks.d = 1", 0.75),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields", "fraction"), RUNS)
def test_every_turn_is_what_it_was(name, fields, fraction, walk):
    _, view, noted = walk(name, fields, fraction)
    turns, forms = ObservedClientUpdates(view, start()), {sent.payload.variant for sent in view.broadcasts()}
    assert forms == ({"start", "step", "whole"} if fraction < 1 else {"start", "step"})
    for site in view.sites:
        assert len(turns.rounds(site)) == len(noted[site])
        for i, (begun, after) in enumerate(noted[site]):
            turn = turns.at(site, i)
            assert turn.moved.keys() == set(PAIRS)
            for n in SPEC:
                assert torch.equal(turn.start[n], begun[n].float()), (site, i, n)
            for n in PAIRS:
                sent = after[n].bfloat16().float() if "bfloat16" in fields else after[n]
                torch.testing.assert_close(turn.start[n] + turn.moved[n], sent)


@pytest.mark.parametrize("rebuild", [latest_factors, merge_with_broadcast])
@pytest.mark.parametrize(("name", "fields", "fraction"), [RUNS[1], *RUNS[3:]])
def test_the_rebuilt_client_is_the_client(name, fields, fraction, rebuild, walk):
    federation, view, noted = walk(name, fields, fraction)
    for site in view.sites:
        rebuilt_model = rebuild(view, site, federation.models()["server"])
        _, true = noted[site][-1]
        assert all(torch.equal(rebuilt_model.weights[n], true[n]) for n in SPEC)
        assert (rebuilt_model.coverage, rebuilt_model.staleness) == (1.0, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_codes_are_read_to_half_a_step(name, walk):
    _, view, noted = walk(name, "upload_bits = 8", rounds=2)
    turn, (begun, after) = ObservedClientUpdates(view, start()).at("a", -1), noted["a"][-1]
    for n in PAIRS:
        step = float(after[n].abs().max()) / 127
        assert float((turn.start[n] + turn.moved[n] - after[n]).abs().max()) <= 0.51 * step
        assert torch.equal(turn.start[n], begun[n])


def test_a_broadcast_that_is_gone_is_named(walk):
    _, view, _ = walk("fedex_lora", rounds=3)
    parts = view.participations()["b"]
    parts[1] = replace(parts[1], down=None)
    assert residual_replay.starting_weights(view, parts, 0)
    with pytest.raises(StateError, match="captured messages: the broadcast that site b answered in round 1 is missing"):
        residual_replay.starting_weights(view, parts, 2)


class Beside(Linear):
    """W = W_0 + R + B A; R is a parameter that asks for no gradient, as the adapter's is."""

    def __init__(self) -> None:
        super().__init__()
        self._initial["m.residual"] = torch.zeros(CLASSES, WIDTH)
        self.trained["m.residual"] = nn.Parameter(torch.zeros(CLASSES, WIDTH), requires_grad=False)

    @property
    def spec(self):
        return {n: replace(t, fixed=n.endswith("residual")) for n, t in super().spec.items()}

    def loss_sum(self, batch):
        weight = self.base + self.trained["m.residual"] + self.trained["m.lora_B"] @ self.trained["m.lora_A"]
        return nn.functional.cross_entropy(batch.inputs @ weight.T, batch.labels, reduction="sum")


@pytest.fixture
def taught(federate):
    """Three sites of two rows, three rounds of real descent: the federation, its view, what is known, and the rows."""

    def run(name, secure=False):
        task = Beside()
        rows = {site: points(2, ord(site)) for site in "abc"}
        config = {"secure.enabled": True, "secure.clip-bound": 8.0} if secure else {}
        federation, view = federate(
            name, task.spec, task.initial(), lambda site, _: Descent(task, rows[site]), "adapter.rank = 3", "abc", 3,
            config=config,
        )  # fmt: skip
        federation.run()
        return federation, view, AdversaryKnowledge(task, task.initial()), rows

    return run


def area(view, knowledge, rows, others, beside=0):
    """Over all sites, of the site's rows against those of nobody, on its own upload or on one `beside` it."""
    sites = sorted(rows)
    mine, theirs = (
        np.concatenate(
            [alignment_scores(view, sites[i - beside], knowledge, asked or rows[s]) for i, s in enumerate(sites)]
        )
        for asked in ([], others)
    )
    return area_under_roc(mine, theirs)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_the_attack_wins_on_a_late_round_and_not_on_another_sites_upload(name, taught):
    _, view, knowledge, rows = taught(name)
    assert float(ObservedClientUpdates(view, knowledge.initial).at("a", -1).start["m.residual"].abs().max()) > 0.05
    others = points(40, 9)
    assert area(view, knowledge, rows, others) > 0.9
    assert area(view, knowledge, rows, others, beside=1) < 0.75


@pytest.mark.long
def test_sums_of_pairs_are_attacked_and_sums_of_products_left_out(taught, same_masks):
    federation, _, knowledge, rows = taught("fedex_lora", secure=True)
    final = federation.models()["server"]
    sums = SecureSumView.from_capture(federation.tap, federation.exchange, final)
    hidden = MaskedUploadView.from_capture(federation.tap, federation.exchange, federation.config.secure)
    assert (
        explain_misfit(AlignmentAttack(), hidden, knowledge) == explain_misfit(AlignmentAttack(), sums, knowledge) == ""
    )
    turn = ObservedClientUpdates(sums, knowledge.initial).at("a", -1)
    assert all(torch.equal(turn.start[n] + w, final[n]) for n, w in turn.moved.items())
    assert area(sums, knowledge, rows, points(40, 9)) > 0.75
    products, _, knowledge, _ = taught("flora", secure=True)
    hidden = MaskedUploadView.from_capture(products.tap, products.exchange, products.config.secure)
    assert "sums of the pairs' products" in explain_misfit(AlignmentAttack(), hidden, knowledge)
    model = latest_factors(
        SecureSumView.from_capture(products.tap, products.exchange, products.models()["server"]), "a", final
    )
    assert torch.equal(model.weights["m.residual"], products.models()["server"]["m.residual"])


def test_another_method_beside_a_residual_is_left_out(federate):
    _, view = federate("fedavg", SPEC, start(), lambda site, ctx: Walk(site, ctx.round, {}))
    task = Beside()
    assert "can be rebuilt only for FedEx-LoRA and FLoRA" in explain_misfit(
        AlignmentAttack(), view, AdversaryKnowledge(task, {})
    )
    assert explain_misfit(AlignmentAttack(), view, AdversaryKnowledge(Linear(), {})) == ""
