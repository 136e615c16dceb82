"""A server that presents the same rows under other names, and what the site's ledger charges all the same."""

from __future__ import annotations

import json
import os

import pytest
import torch
from PIL import Image

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.state.data_sets import ID_FILE, ChargedDataset
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.contract.privacy import Adjacency, Step
from fedveil.contract.task import ExampleOrigin
from fedveil.errors import BudgetError, ConfigError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting

ONE_TURN = {Step("poisson", 8, 4, 1.0): 1}  # of 8 rows in batches of 4; noise_local and noise_global share z = 1
BUDGET = accounting.compute_epsilon(ONE_TURN, 1e-5, Adjacency.REPLACE_ONE) * 1.001
NAMES = [
    {},
    {"task.class-names": "dog,cat"},
    {"task.target-column": "species"},
    {"task.image-column": "photograph"},
    {"task.label-column": "ward"},
    {"task.class-names": "cat,dog,wolf", "task.target-column": "kind"},
]


@pytest.fixture
def pictures(tmp_path):
    """Four pictures of a cat and four of a dog."""
    generator = torch.Generator().manual_seed(5)
    for name in ("cat", "dog"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(4):
            pixels = torch.randint(0, 255, (32, 32, 3), generator=generator).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "data" / "train" / name / f"{i}.png")
    return tmp_path / "data"


def private_turn(data, state, **config):
    """What a server gets for a turn of DP-FPL that may cost BUDGET, under this run config."""
    flat = {
        "method.name": "dp_fpl",
        "method.params": f"epsilon = {BUDGET}\nnoise_local = {2**0.5}\nnoise_global = {2**0.5}",
        "task.name": "clip-prompt", "task.target-column": "label", "task.class-names": "cat,dog",
        "train.batch-size": 4, "task.data": str(data), **config,
    }  # fmt: skip
    parsed = parse(flat)
    method = strategies.create_method("dp_fpl", flat["method.params"])
    exchange = MessageExchange(method, "dp_fpl", tasks.load_task(parsed, method.adapter, "cpu").spec)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in exchange.spec.items()}
    down = exchange.broadcast(method.init(exchange.spec, weights, rng.initial_stream(0, "m")), CTX)
    fields = json.dumps(hyperparameters_of(method))
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": "dp_fpl", "fields": fields}
    reply = client_session.ClientSession().run_round(
        lambda: down, ClientAssignment.from_instruction(order, flat, {"state-dir": str(state)})
    )
    return b"".join(reply.parts)


CTX = RoundContext(0, "s", True, bytes(32), address=MessageAddress("r"))


@pytest.mark.long
def test_another_name_for_the_same_rows_is_no_other_budget(pictures, tmp_path):
    """The run config names columns, classes and, where the site does not, the folder: it may write each as it likes."""
    (tmp_path / "link").symlink_to(pictures)
    elsewhere = [pictures / ".." / pictures.name, tmp_path / "link", pictures / "train" / "cat" / ".." / ".."]
    tries = [(pictures, config) for config in NAMES] + [(path, {}) for path in elsewhere]
    served = 0
    for data, config in tries:
        try:
            private_turn(data, tmp_path / "state", **config)
            served += 1
        except BudgetError:
            continue
    assert served == 1


def test_a_data_set_has_one_id_by_every_path_and_keeps_it(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "file.jsonl").symlink_to("data/train.jsonl")
    first = ChargedDataset.from_folder(tmp_path / "data")
    for path in ("data", "data/../data", "link", "data/train.jsonl", "link/train.jsonl", "file.jsonl"):
        dataset = ChargedDataset.from_folder(tmp_path / path)
        assert dataset.id == first.id
        file = dataset.data if dataset.data.is_file() else dataset.data / "train.jsonl"
        assert list(dataset.records([ExampleOrigin(str(file), 3)])) == [(first.id, "train.jsonl", 3)]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [ID_FILE, "train.jsonl"]
    (tmp_path / "other").mkdir()
    assert ChargedDataset.from_folder(tmp_path / "other").id != first.id
    assert (
        ChargedDataset.from_folder(tmp_path / "other", "ward-7").id
        == ChargedDataset.from_folder(tmp_path / "data", "ward-7").id
        == "ward-7"
    )


def test_a_folder_that_cannot_keep_an_id_needs_a_name(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(ConfigError, match="set data-set in the node config"):
        ChargedDataset.from_folder(tmp_path)
    assert ChargedDataset.from_folder(tmp_path, "ward-7").id == "ward-7"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", f'{{"fedveil-data-set": 2, "id": "{"a" * 32}"}}', '{"fedveil-data-set": 1, "id": "short"}',
     '{"fedveil-data-set": 1, "id": 5}'],
)  # fmt: skip
def test_a_damaged_id_is_not_replaced(text, tmp_path):
    (tmp_path / ID_FILE).write_text(text)
    with pytest.raises(StateError, match="restore it from a backup"):
        ChargedDataset.from_folder(tmp_path)
    assert (tmp_path / ID_FILE).read_text() == text


@pytest.mark.parametrize("origin", [None, ExampleOrigin("/elsewhere/train.jsonl", 1)])
def test_a_row_from_nowhere_cannot_be_charged(origin, tmp_path):
    with pytest.raises(ConfigError, match="origin: expected every row"):
        list(ChargedDataset("d", tmp_path).records([origin]))
