"""Rebuilt clients of every method, against the clients' own histories and draws, which no view has.

`test_factor_pairing` has the edge cases on written messages and the size of the error on real training.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch

from fedveil.attacks.model_extraction.factor_pairing import latest_factors, merge_with_broadcast, reconstruction_error
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Spec
from fedveil.contract.trainer import TrainingResult
from fedveil.rng import derive_secret

SITES = "abcd"


@dataclass
class RandomWalk:
    """Training that nobody can guess: every tensor moves by noise of the site and round, and the end is noted."""

    spec: Spec
    site: str
    round: int
    history: dict[str, list[tuple[int, dict[str, torch.Tensor]]]]
    num_examples: int = 3

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        generator = torch.Generator().manual_seed(1000 * ord(self.site) + self.round)
        after = {n: weights[n] + torch.randn(t.shape, generator=generator) for n, t in sorted(self.spec.items())}
        self.history[self.site].append((self.round, after))
        return TrainingResult(after, {})

    def gradient(self, weights) -> TrainingResult:
        generator = torch.Generator().manual_seed(1000 * ord(self.site) + self.round)
        return TrainingResult({n: torch.randn(t.shape, generator=generator) for n, t in sorted(self.spec.items())}, {})


@pytest.fixture
def walk(federate):
    """Runs a random walk: federation, server's view, history of every site, the server's model before each round."""

    def run(name, spec, weights, fields="", rounds=6, fraction=0.75):
        history = defaultdict(list)
        trainer_for = lambda site, ctx: RandomWalk(spec, site, ctx.round, history)  # noqa: E731
        federation, view = federate(name, spec, weights, trainer_for, fields, rounds=rounds, fraction=fraction)
        before = [federation.models()["server"]]
        federation.run(lambda fed, _: before.append(fed.models()["server"]))
        return federation, view, history, before

    return run


def drawn(site: str, round_: int, rho: float = 0.5, seed: int = 3) -> str:
    """The factor that the site shares, from its own secret."""
    ctx = RoundContext(round_, site, False, derive_secret(f"client:{site}", seed, True))
    return "A" if bool(ctx.rng("factor").bernoulli(rho, ())) else "B"


@pytest.mark.parametrize("rebuild", [latest_factors, merge_with_broadcast])
def test_fedavg_is_the_client_itself(rebuild, walk, lora_spec, lora_weights):
    federation, view, history, _ = walk("fedavg", lora_spec, lora_weights)
    assert view.sites == list(SITES)
    for site in SITES:
        rebuilt = rebuild(view, site, federation.models()["server"])
        round_, true = history[site][-1]
        error = reconstruction_error(rebuilt.weights, true)
        assert (error.products, error.tensors) == (0.0, 0.0)
        assert (rebuilt.staleness, rebuilt.coverage) == (0, 1.0)
        assert rebuilt.seen == dict.fromkeys(lora_spec, round_)


@pytest.mark.long
def test_latest_pairs_the_last_a_with_the_last_b_that_the_site_drew(walk, lora_spec, lora_weights):
    """The staleness counts the site's participations, not rounds."""
    _, view, history, before = walk("fedrand", lora_spec, lora_weights)
    staleness = []
    for site in SITES:
        turns = history[site]
        last = {side: max(i for i, (r, _) in enumerate(turns) if drawn(site, r) == side) for side in "AB"}
        rebuilt = latest_factors(view, site, before[-1])
        for name in lora_spec:
            round_, trained = turns[last[name[-1]]]
            assert torch.equal(rebuilt.weights[name], trained[name]), (site, name)
            assert rebuilt.seen[name] == round_
        assert rebuilt.staleness == abs(last["A"] - last["B"]) > 0  # never both in one upload
        assert rebuilt.coverage == 1.0
        assert reconstruction_error(rebuilt.weights, turns[-1][1]).products > 0
        staleness.append((rebuilt.staleness, abs(turns[last["A"]][0] - turns[last["B"]][0])))
    assert any(of_turns != of_rounds for of_turns, of_rounds in staleness)  # a site skipped a round in between


def test_merged_is_the_last_upload_and_the_broadcast_that_it_answered(walk, lora_spec, lora_weights):
    _, view, history, before = walk("fedrand", lora_spec, lora_weights)
    for site in SITES:
        round_, trained = history[site][-1]
        side = drawn(site, round_)
        rebuilt = merge_with_broadcast(view, site, before[-1])
        for name, weight in rebuilt.weights.items():
            assert torch.equal(weight, trained[name] if name.endswith(side) else before[round_][name]), (site, name)
        assert (rebuilt.staleness, rebuilt.coverage) == (0, 0.5)
        assert rebuilt.seen == {n: round_ for n in lora_spec if n.endswith(side)}


@pytest.mark.parametrize("rho,side", [(1.0, "A"), (0.0, "B")])
def test_a_factor_that_was_never_sent_is_the_fallback_s(rho, side, walk, lora_spec, lora_weights, random_weights):
    _, view, history, _ = walk("fedrand", lora_spec, lora_weights, f"rho = {rho}")
    fallback = random_weights(lora_spec, 99)
    rebuilt = latest_factors(view, "a", fallback)
    for name, weight in rebuilt.weights.items():
        assert torch.equal(weight, history["a"][-1][1][name] if name.endswith(side) else fallback[name])
    assert (rebuilt.staleness, rebuilt.coverage) == (0, 0.5)
    assert {n[-1] for n in rebuilt.seen} == {side}


def test_latest_fedper_keeps_the_lower_layers_of_who_was_not_there_in_round_0(walk, lora_spec, lora_weights):
    _, view, history, before = walk("fedper", lora_spec, lora_weights, "layers = 1")
    late = {site for site in SITES if history[site][0][0] > 0}
    assert late  # three of four sites are drawn
    assert late < set(SITES)
    fallback = before[-1]
    for site in SITES:
        rebuilt = latest_factors(view, site, fallback)
        for name in lora_spec:
            if name.startswith("h.1"):
                expected = history[site][-1][1][name]
            else:
                expected = fallback[name] if site in late else history[site][0][1][name]
            assert torch.equal(rebuilt.weights[name], expected), (site, name)
        assert rebuilt.coverage == (0.5 if site in late else 1.0)
        assert rebuilt.staleness == (0 if site in late else len(history[site]) - 1)


def test_merged_fedper_has_no_lower_layers_after_round_0(walk, lora_spec, lora_weights, random_weights):
    """The broadcast has them only for who may have none; then they are the server's, else the fallback's."""
    _, view, history, before = walk("fedper", lora_spec, lora_weights, "layers = 1")
    fallback = random_weights(lora_spec, 5)
    for site in SITES:
        round_, trained = history[site][-1]
        (answered,) = [b.payload for b in view.broadcasts(site) if b.round == round_]
        lower = before[round_] if answered.variant == "all" else fallback
        rebuilt = merge_with_broadcast(view, site, fallback)
        assert (rebuilt.coverage, rebuilt.staleness) == (0.5, 0)
        for name in lora_spec:
            assert torch.equal(rebuilt.weights[name], (trained if name.startswith("h.1") else lower)[name])


@pytest.mark.parametrize("form", ["plus-one", "product"])
@pytest.mark.parametrize("rebuild", [latest_factors, merge_with_broadcast])
def test_fedpara_never_gives_the_private_pair(rebuild, form, walk, lora_spec, random_weights):
    private = {n.replace("lora", "private"): t for n, t in lora_spec.items()}
    spec = {**lora_spec, **private}
    fields = f'adapter = {{kind = "hadamard-lora", form = "{form}", rank = 2}}'
    federation, view, history, _ = walk("fedpara", spec, random_weights(spec, 1), fields)
    fallback = federation.models()["server"]
    rebuilt = rebuild(view, "b", fallback)
    true = history["b"][-1][1]
    assert (rebuilt.coverage, rebuilt.staleness) == (0.5, 0)
    assert set(rebuilt.weights) == set(spec)
    for name, weight in rebuilt.weights.items():
        assert torch.equal(weight, fallback[name] if name in private else true[name])
        assert (name in private) != (name in rebuilt.seen)
    assert reconstruction_error(rebuilt.weights, true).tensors > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wire_of_half_precision_comes_back_in_fp32(dtype, walk, lora_spec, lora_weights):
    _, view, history, before = walk("fedavg", lora_spec, lora_weights, f'wire_dtype = "{dtype}"', rounds=2)
    for rebuild in (latest_factors, merge_with_broadcast):
        rebuilt = rebuild(view, "a", before[-1]).weights
        assert {w.dtype for w in rebuilt.values()} == {torch.float32}
        assert all(torch.equal(rebuilt[n], w.to(getattr(torch, dtype)).float()) for n, w in history["a"][-1][1].items())


@pytest.mark.long
@pytest.mark.parametrize("bits,most", [(0, 0.0), (8, 0.01), (4, 0.15)])
def test_a_coded_factor_is_read_as_the_method_reads_it(walk, lora_spec, lora_weights, bits, most):
    """Eight bits hide less than a percent of the factor; a payload of codes is no reason to attack nothing."""
    _, view, history, before = walk("fedrand", lora_spec, lora_weights, f"upload_bits = {bits}")
    for site, rebuild in itertools.product(SITES, (latest_factors, merge_with_broadcast)):
        rebuilt = rebuild(view, site, before[-1])
        assert rebuilt.coverage == (1.0 if rebuild is latest_factors else 0.5)
        for name, round_ in rebuilt.seen.items():
            true = dict(history[site])[round_][name]
            assert float((rebuilt.weights[name] - true).norm() / true.norm()) <= most
