from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.method import FederatedState
from fedveil.errors import ConfigError
from fedveil.ops.running_sums import RunningSums
from fedveil.strategies.fedpgp import FedPGP
from fedveil.strategies.promptfl import PromptFL
from tests.strategies.prompted import Run


def run_of(**fields) -> Run:
    return Run(FedPGP(adapter=PromptAdapter(4, form="factored", rank=2, **fields)), "fedpgp")


def test_the_shared_prompt_is_the_weighted_mean_and_the_factors_stay():
    run = run_of().round(0)
    twin = RunningSums()
    for upload in run.uploads:
        assert set(upload.payload.fields) == {"prompt"}
        twin.fold("prompt", upload.payload.fields["prompt"], upload.num_examples)
    assert torch.equal(run.server.tensors["prompt"], twin.means(run.server.tensors)["prompt"])
    for site in "xyz":
        assert set(run.private[site].tensors) == {"prompt.u", "prompt.v"}
        u, v = run.private[site].tensors.values()
        for secret in (u, v, u @ v):
            assert secret.contiguous().numpy().tobytes() not in run.bytes


def test_the_next_round_starts_from_the_new_shared_prompt_and_the_kept_factors():
    run = run_of().round(0)
    factors, shared = {n: t.clone() for n, t in run.private["x"].tensors.items()}, run.server.tensors["prompt"]
    run.round(1, "x")
    started = run.locals["x"].started_from[1]
    assert torch.equal(started["prompt"], shared)
    assert all(torch.equal(started[n], t) for n, t in factors.items())


def test_views():
    run = run_of().round(0)
    models = run.exchange.method.models(run.server, run.private["y"])
    assert not models["server"]["prompt.u"].any()
    assert not models["server"]["prompt.v"].any()
    assert torch.equal(models["client"]["prompt"], models["server"]["prompt"])
    assert all(torch.equal(models["client"][n], t) for n, t in run.private["y"].tensors.items())


def test_with_factors_of_zeros_it_is_promptfl_bit_for_bit():
    """A product of zeros has no gradient in either factor."""
    run, plain = run_of(std=0.0), Run(PromptFL(PromptAdapter(4)), "promptfl")
    plain.server = FederatedState({"prompt": run.server.tensors["prompt"]})
    for number in range(3):
        assert torch.equal(run.round(number).server.tensors["prompt"], plain.round(number).server.tensors["prompt"])
    assert not any(t.any() for t in run.private["x"].tensors.values())


def test_the_own_part_has_at_most_that_rank_and_takes_what_is_the_site_s():
    run = run_of()
    for number in range(12):
        run.round(number)
    u, v = run.private["z"].tensors.values()
    assert int(torch.linalg.matrix_rank(u @ v)) <= 2
    reached = run.server.tensors["prompt"] + u @ v
    assert float((reached - 3.0).abs().mean()) < float((run.server.tensors["prompt"] - 3.0).abs().mean()) / 2


def test_forms():
    assert strategies.create_method("fedpgp").adapter == PromptAdapter(form="factored", contrast=1.0)
    assert strategies.create_method("fedpgp", 'adapter = {form = "factored", rank = 2}').adapter.contrast == 0.0
    with pytest.raises(ConfigError, match='adapter.form: this method requires "factored", found "one"'):
        strategies.create_method("fedpgp", "adapter = {length = 4}")
    with pytest.raises(ConfigError, match="adapter.rank"):
        strategies.create_method("fedpgp", 'adapter = {form = "factored", length = 4, rank = 5}')
