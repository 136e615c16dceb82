from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.config import parse
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import ExamplesUsed, TrainingResult
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.scaffold import Scaffold
from fedveil.wire.capture import MessageCapture

SPEC = {"w": ParamSpec((2,)), "v": ParamSpec((1, 2))}
ETA, STEPS = 0.1, 4
BENT = {"a": (1.0, 3.0), "b": (4.0, -2.0), "c": (0.5, 7.0)}  # curvature and optimum of each site's loss
EXAMPLES = {"a": 1, "b": 3, "c": 2}


class Quadratic:
    """Plain SGD on k / 2 |w - m|^2, whose gradient has no noise. The report says which of the two calls was last."""

    def __init__(self, site: str) -> None:
        self.bend, self.optimum = BENT[site]
        self.spec, self.num_examples = SPEC, EXAMPLES[site]

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        return self.bend * (w - self.optimum)

    def gradient(self, weights) -> TrainingResult:
        return TrainingResult(
            {n: self._gradient(w) for n, w in weights.items()}, {"loss_received": 1.0}, ExamplesUsed.from_steps([(0,)])
        )

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        now = {n: w.clone() for n, w in weights.items()}
        for _ in range(STEPS):
            leaves = {n: w.clone().requires_grad_() for n, w in now.items()}
            if penalty:
                penalty(leaves).backward()
            pull = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
            now = {n: w - ETA * (self._gradient(w) + pull[n]) for n, w in now.items()}
        return TrainingResult(now, {"steps": 4.0, "loss_trained": 2.0}, ExamplesUsed.from_steps([(0,)]))


def federation(method=None, rounds: int = 3, fraction: float = 1.0) -> InProcessFederation:
    method = method or Scaffold()
    weights = {"w": torch.tensor([1.0, -2.0]), "v": torch.tensor([[0.5, 4.0]])}
    state = method.init(SPEC, weights, rng.initial_stream(0, "x"))
    config = parse({"run.deterministic": True, "run.rounds": rounds, "cohort.fraction": fraction})
    return InProcessFederation(
        MessageExchange(method, "scaffold", SPEC), config, lambda site, ctx: Quadratic(site), list("abc"), state
    )


def naive(cohorts: list[list[str]]) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Algorithm 1 with option I, as it is written: on the list of clients, in plain loops."""
    x = {"w": torch.tensor([1.0, -2.0]), "v": torch.tensor([[0.5, 4.0]])}
    zeros = {n: torch.zeros_like(w) for n, w in x.items()}
    c, own, seen = dict(zeros), {site: dict(zeros) for site in BENT}, set()
    for cohort in cohorts:
        seen |= set(cohort)
        total, new_x, change = sum(EXAMPLES[s] for s in cohort), dict(zeros), dict(zeros)
        for site in cohort:
            bend, optimum = BENT[site]
            part = EXAMPLES[site] / total
            for n in x:
                y = x[n]
                for _ in range(STEPS):
                    y = y - ETA * (bend * (y - optimum) - own[site][n] + c[n])
                gradient = bend * (x[n] - optimum)
                new_x[n] = new_x[n] + part * y
                change[n] = change[n] + part * (gradient - own[site][n])
                own[site][n] = gradient
        x, c = new_x, {n: c[n] + len(cohort) / len(seen) * change[n] for n in x}
    return x, c


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_rounds_are_algorithm_1(fraction):
    """With all clients c is the mean of their gradients; with some of them it moves by |S| / N of the change."""
    run, cohorts = federation(rounds=5, fraction=fraction), []
    run.run(lambda found, _: cohorts.append(list(found.last_cohort)))
    x, c = naive(cohorts)
    assert len(cohorts[0]) == (3 if fraction == 1.0 else 2)
    for name in SPEC:
        torch.testing.assert_close(run.server.tensors[name], x[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run.server.tensors[f"control.{name}"], c[name], rtol=1e-4, atol=1e-5)
    assert run.server.scalars["seen"] == sorted({site for cohort in cohorts for site in cohort})


def test_with_everybody_c_is_the_mean_of_what_the_sites_keep():
    run = federation()
    run.run()
    for name in SPEC:
        own = [run.private.get(site).tensors[f"control.{name}"] * n / 6 for site, n in EXAMPLES.items()]
        torch.testing.assert_close(run.server.tensors[f"control.{name}"], sum(own), rtol=1e-4, atol=1e-5)


def test_in_round_0_it_is_fedavg_and_later_it_comes_nearer_to_the_optimum():
    """The optimum of the weighted sum of quadratics: sum n k m / sum n k."""
    best = sum(EXAMPLES[s] * k * m for s, (k, m) in BENT.items()) / sum(EXAMPLES[s] * k for s, (k, _) in BENT.items())
    first, plain = federation(rounds=1).run(), federation(FedAvg(), rounds=1).run()
    for name in SPEC:
        assert torch.equal(first.tensors[name], plain.tensors[name])
    last, plain = federation(rounds=12).run(), federation(FedAvg(), rounds=12).run()
    assert float((last.tensors["w"] - best).abs().max()) < 1e-3
    assert float((plain.tensors["w"] - best).abs().min()) > 0.1


def test_the_servers_sum_of_changes_is_a_gradient_of_the_client():
    """What the header says that the server learns."""
    run = federation(rounds=2)
    before = {}

    def note(found, round_):
        before[round_] = dict(found.server.tensors)

    run.run(note)
    control_variate = run.private.get("b").tensors["control.w"]
    torch.testing.assert_close(control_variate, 4.0 * (before[0]["w"] + 2.0), rtol=1e-4, atol=1e-5)


def test_the_report_is_the_trainings_and_the_wire_carries_twice_the_tensors():
    run = federation(rounds=1)
    run.run()
    assert run.reports["a"] == {"steps": 4.0, "loss_trained": 2.0}
    assert run.exchange.largest("up") == run.exchange.largest("down") == 2 * 4 * 4


def test_what_the_wire_rounds_the_site_keeps_rounded_too():
    method = Scaffold(wire_dtype="bfloat16")
    run = federation(method, rounds=1)
    run.run()
    down = run.exchange.broadcast(federation(method).server, RoundContext(0, "a", True, bytes(32)))
    private, parts = run.exchange.participate(down, None, Quadratic("a"), RoundContext(0, "a", True, bytes(32)))
    sent = run.exchange.receive(b"".join(parts), 0).payload.fields
    for name in SPEC:
        assert torch.equal(private.tensors[f"control.{name}"], sent[f"control.{name}"].float())


def test_an_upload_of_no_client_in_the_sums_changes_nothing():
    run = federation()
    assert run.exchange.aggregate(run.server, iter([])) is run.server
    once = AcceptedUpload(run.exchange.method.broadcast(run.server, RoundContext(0, "", True, b"")), 1,
                  RoundContext(0, "a", True, bytes(32)))  # fmt: skip
    same = run.exchange.aggregate(run.server, [once])
    assert all(torch.equal(same.tensors[n], w) for n, w in run.server.tensors.items())


def test_noisy_steps_are_refused_before_any_site_is_asked():
    config = parse({"method.name": "scaffold", "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    with pytest.raises(ConfigError, match="found scaffold, which asks for plain gradients; leave"):
        check_guarantee(Scaffold(), config, True)


def test_an_attack_that_compares_weights_is_given_no_control_variates(tmp_path):
    run = federation(rounds=1)
    run.tap = MessageCapture(tmp_path)
    run.run()
    view = AdversaryView.server(run.tap, run.exchange)
    assert [set(view.added(upload)) for upload in view.uploads()] == [set(SPEC)] * 3
