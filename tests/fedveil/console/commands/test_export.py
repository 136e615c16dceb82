"""`fedveil export`: a site's own model, from what it keeps and from the run's last weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedveil import rng, strategies, tasks
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.config import RunConfig, parse
from fedveil.console.main import main
from fedveil.contract.method import FederatedState
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.records import audit_log
from fedveil.records.tensor_state import save_state

ID = "0a1b2c3d"
PROMPTS = {"task.name": "clip-prompt", "task.class-names": "cat|dog", "method.name": "dp_fpl"}


def made(folder: Path, **changes) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """A run folder as its operator sends it, and its last weights."""
    config = parse({"run.name": "first", **changes})
    method = strategies.create_method(config.method.name, config.method.params)
    initial = tasks.load_task(config, method.adapter, "cpu").initial(rng.initial_stream(0, "weights"))
    weights = {name: tensor + 0.125 for name, tensor in initial.items()}
    save_state(FederatedState(weights), folder / "final" / "server.safetensors")
    (folder / "config.json").write_text(json.dumps({"config": config.flat()}))
    (folder / "id").write_text(f"{ID} checksum\n")
    return config, weights


def store(tmp_path: Path, key_file: str = "") -> ClientStateStore:
    state_store = ClientStateStore.open(tmp_path / "state", f"first-{ID}", "north", FileSeal.from_key_file(key_file))
    state_store.secret(0, "north", False)
    return state_store


def export(tmp_path: Path, *options: str) -> int:
    where = [str(tmp_path / "run"), str(tmp_path / "out"), "--state-dir", str(tmp_path / "state")]
    return main(["export", *where, "--site", "north", *options])


def test_what_a_site_trained_last_is_a_folder_that_peft_loads(tmp_path, capsys):
    make_key(tmp_path / "key")
    _, weights = made(tmp_path / "run", **{"method.name": "fedrand"})
    state_store = store(tmp_path, str(tmp_path / "key"))
    own = {name: tensor + 1.5 + index for index, (name, tensor) in enumerate(weights.items())}
    state_store.save("0001", "", FederatedState({name: torch.zeros_like(tensor) for name, tensor in weights.items()}))
    state_store.save("0002", "0001", FederatedState(own))
    assert export(tmp_path) == 2  # encrypted
    assert "key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert export(tmp_path, "--key-file", str(tmp_path / "key")) == 0, capsys.readouterr().err
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    figures = sorted((tuple(t.shape), round(float(t.double().mean()), 4)) for t in own.values())
    assert sorted((tuple(t.shape), round(float(t.double().mean()), 4)) for t in written.values()) == figures
    assert audit_log.read_log(tmp_path / "state" / audit_log.NAME)[-1]["event"] == "exported"
    assert export(tmp_path, "--key-file", str(tmp_path / "key")) == 2  # OUT is not empty any more


def test_a_private_prompt_is_joined_with_the_shared_one(tmp_path, capsys):
    config, weights = made(tmp_path / "run", **PROMPTS)
    private = FederatedState(
        {"prompt": torch.randn(weights["prompt"].shape, generator=torch.Generator().manual_seed(1))}
    )
    store(tmp_path).save("0001", "", private)
    assert export(tmp_path) == 0
    assert (
        "\nit has no privacy card, because the card in the run's final/ covers only the shared model"
        in capsys.readouterr().out
    )
    prompt = load_file(tmp_path / "out" / "adapter.safetensors")["prompt"]
    method = strategies.create_method(config.method.name, config.method.params)
    assert torch.equal(prompt, method.models(FederatedState(weights), private)["client"]["prompt"])
    assert not torch.allclose(prompt, weights["prompt"])
    assert not torch.allclose(prompt, private.tensors["prompt"])


def test_a_method_that_keeps_nothing_says_where_the_model_is(tmp_path, capsys):
    made(tmp_path / "run", **{"method.name": "fedavg"})
    assert export(tmp_path) == 2
    assert "found none; fedveil site status" in capsys.readouterr().err  # it took no part
    store(tmp_path)
    assert export(tmp_path) == 2
    stderr = capsys.readouterr().err
    assert "keeps no state at a site" in stderr
    assert f"{tmp_path}/run/final" in stderr


def test_what_the_server_sent_is_checked(tmp_path, capsys):
    _, weights = made(tmp_path / "run", **{"method.name": "fedrand"})
    store(tmp_path).save("0001", "", FederatedState(weights))
    (tmp_path / "policy.toml").write_text('methods = ["fedrand"]\nmodels = ["/models/llama"]\n')
    assert export(tmp_path, "--policy", str(tmp_path / "policy.toml"), "--base", "tiny") == 2
    assert "task.model: this site permits" in capsys.readouterr().err
    first = min(weights)
    save_state(FederatedState({**weights, first: torch.zeros(3, 5)}), tmp_path / "run" / "final" / "server.safetensors")
    assert export(tmp_path) == 2
    assert re.search(rf"RUN/final: expected {re.escape(first)} .* found \(3, 5\)", capsys.readouterr().err)
    (tmp_path / "run" / "id").write_text("../" * 9)
    assert export(tmp_path) == 2
    assert "expected the run's ID" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_turn_under_way_is_not_read(tmp_path, capsys):
    _, weights = made(tmp_path / "run", **{"method.name": "fedrand"})
    state_store = store(tmp_path)
    state_store.save("0001", "", FederatedState(weights))
    with state_store.in_turn():
        assert export(tmp_path) == 2
    assert "expected no client round in progress" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("name", ["fedex_lora", "scaffold"])
def test_what_is_kept_but_is_no_model_of_the_sites_own_is_said_to_be_none(name, tmp_path, capsys):
    _, weights = made(tmp_path / "run", **{"method.name": name})
    store(tmp_path).save("0001", "", FederatedState(dict(weights)))
    assert export(tmp_path) == 2
    stderr = capsys.readouterr().err
    assert (
        f"method.name: expected a method that keeps part of the model at each site, found {name}, which keeps none"
        in stderr
    )
    assert not (tmp_path / "out").exists()
