from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedveil import strategies
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.method import FederatedState
from fedveil.errors import ConfigError
from fedveil.ops.running_sums import RunningSums
from fedveil.strategies.fedotp import FedOTP
from fedveil.strategies.promptfl import PromptFL
from tests.strategies.prompted import Run

FORMS = ["transport", "sum"]


def run_of(form: str, **fields) -> Run:
    return Run(FedOTP(adapter=PromptAdapter(4, form=form, **fields)), "fedotp")


@pytest.mark.parametrize("form", FORMS)
def test_the_shared_prompt_is_the_weighted_mean_and_the_local_one_stays(form):
    run = run_of(form).round(0)
    twin = RunningSums()
    for upload in run.uploads:
        assert set(upload.payload.fields) == {"prompt"}
        twin.fold("prompt", upload.payload.fields["prompt"], upload.num_examples)
    assert torch.equal(run.server.tensors["prompt"], twin.means(run.server.tensors)["prompt"])
    for site in "xyz":
        assert set(run.private[site].tensors) == {"prompt.local"}
        local = run.private[site].tensors["prompt.local"]
        assert local.numpy().tobytes() not in run.bytes
        assert not any(row.numpy().tobytes() in run.bytes for row in local)


@pytest.mark.parametrize("form", FORMS)
def test_the_next_round_starts_from_the_new_shared_prompt_and_the_kept_local_one(form):
    run = run_of(form).round(0)
    local_prompts, shared = (
        {s: run.private[s].tensors["prompt.local"].clone() for s in "xyz"},
        run.server.tensors["prompt"],
    )
    run.round(1, "xy")
    for site in "xy":
        started = run.locals[site].started_from[1]
        assert torch.equal(started["prompt"], shared)
        assert torch.equal(started["prompt.local"], local_prompts[site])
        assert not torch.equal(run.private[site].tensors["prompt.local"], local_prompts[site])
    assert torch.equal(run.private["z"].tensors["prompt.local"], local_prompts["z"])


def test_sites_draw_their_first_local_prompts_apart_and_a_lost_one_anew():
    run = run_of("sum").round(0)
    first = [run.locals[s].started_from[0]["prompt.local"] for s in "xyz"]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert all(0.01 < float(t.std()) < 0.03 for t in first)
    run.private["x"] = None
    run.round(1, "x")
    assert 0.01 < float(run.locals["x"].started_from[1]["prompt.local"].std()) < 0.03


def test_the_server_s_own_model():
    with_transport, without = (run_of(form).round(0) for form in FORMS)
    tensors = with_transport.server.tensors
    assert torch.equal(tensors["prompt.local"], tensors["prompt"])
    assert not without.server.tensors["prompt.local"].any()
    assert without.server.tensors["prompt"].any()


@pytest.mark.parametrize("form", FORMS)
def test_a_client_deploys_the_server_s_prompt_with_its_own(form):
    run = run_of(form).round(0)
    models = run.exchange.method.models(run.server, run.private["y"])
    assert torch.equal(models["client"]["prompt"], run.server.tensors["prompt"])
    assert torch.equal(models["client"]["prompt.local"], run.private["y"].tensors["prompt.local"])
    assert set(run.exchange.method.models(run.server)) == {"server"}


def test_one_site_s_update_does_not_depend_on_another_s_data():
    one, other = run_of("sum"), run_of("sum")
    other.locals["z"] = replace(other.locals["z"], target=99.0)
    one.round(0)
    other.round(0)
    for site in "xy":
        assert torch.equal(one.private[site].tensors["prompt.local"], other.private[site].tensors["prompt.local"])
    assert not torch.equal(one.private["z"].tensors["prompt.local"], other.private["z"].tensors["prompt.local"])


def test_transport_of_a_local_prompt_that_nothing_moves_is_promptfl():
    """With "transport" the toy's two contexts are apart, so the shared one is trained as PromptFL's."""
    run, plain = run_of("transport"), Run(PromptFL(PromptAdapter(4)), "promptfl")
    plain.server = FederatedState({"prompt": run.server.tensors["prompt"]})
    for number in range(3):
        torch.testing.assert_close(
            run.round(number).server.tensors["prompt"], plain.round(number).server.tensors["prompt"]
        )


def test_forms():
    assert strategies.create_method("fedotp").adapter == PromptAdapter(form="transport")
    assert strategies.create_method("fedotp", 'adapter = {form = "sum", length = 4}').adapter == PromptAdapter(
        4, form="sum"
    )
    for form in ("one", "factored"):
        with pytest.raises(
            ConfigError, match=f'adapter.form: this method requires "transport" or "sum", found "{form}"'
        ):
            strategies.create_method("fedotp", f'adapter = {{form = "{form}"}}')
