"""A site's turns and its prepared rows: kept below its state folder, named only where a claim is made."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app import turn
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.data_sets import ID_FILE, DataSet, shelf_of
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.codec import raw
from fedveil.contract.method import RoundContext, fields_of
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.rows.tokens import Tokens
from fedveil.sealed import new_key
from fedveil.training.adapted import AdaptedTask
from fedveil.training.schedule import Schedule

CTX = RoundContext(0, "s", True, bytes(32), address=Address("r"))
FLAT = {"method.name": "fedavg", "task.max-tokens": 32, "train.max-steps": 1, "run.deterministic": True}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [{"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub."} for i in range(120)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def upload(data, state, round_=0, config=None, **node) -> bytes:
    flat = FLAT | (config or {})
    parsed, name = parse(flat), flat["method.name"]
    method = strategies.create(name, "")
    task = tasks.load(parsed, method.adapter, "cpu")
    exchange = Exchange(method, name, task.spec)
    server = method.init(task.spec, task.initial(rng.initial(0, "w")), rng.initial(0, "m"))
    order = {"round": round_, "is-new": True, "site": "s", "run": "r", "method": name}
    node = {"state-dir": str(state), "data": str(data), "device": "cpu", **node}
    asked = Assignment.of(order | {"fields": json.dumps(fields_of(method))}, flat, node)
    found = turn.Turns().take(lambda: exchange.broadcast(server, replace(CTX, round=round_)), asked)
    layout = b"".join(found.parts)
    return exchange.receive(layout, round_, Address("r", 0, "s")).payload.fields


def test_a_worker_s_first_turn_keeps_the_rows_and_the_next_worker_takes_them(tmp_path, data, monkeypatch):
    """A public run also names no row: 300,000 of them would be as many Python objects."""
    monkeypatch.setattr(DataSet, "records", None)
    first = upload(data, tmp_path / "state")
    (kept,) = shelf_of(tmp_path / "state", data).iterdir()
    assert kept.is_relative_to(tmp_path / "state" / ".prepared")
    paths = [tmp_path / "state" / ".prepared", kept.parent, kept, *kept.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths} == {0}
    monkeypatch.setattr(Tokens, "of", None)  # nothing is tokenised again
    again = upload(data, tmp_path / "state")
    assert {name: value.tolist() for name, value in first.items()} == {n: value.tolist() for n, value in again.items()}
    assert [path.name for path in data.iterdir()] == ["train.jsonl"]  # nothing is written beside the rows


def test_a_site_with_a_key_keeps_no_rows_in_the_clear(tmp_path, data):
    new_key(tmp_path / "key")
    sealed = upload(data, tmp_path / "sealed", **{"key-file": str(tmp_path / "key")})
    clear = upload(data, tmp_path / "state")
    assert not (tmp_path / "sealed" / ".prepared").exists()
    assert {name: value.tolist() for name, value in sealed.items()} == {n: v.tolist() for n, v in clear.items()}


def test_rows_are_kept_by_the_id_of_the_data_set_once_it_has_one(tmp_path, data):
    state = tmp_path / "state"
    assert shelf_of(state, data).name.startswith("path-")
    assert shelf_of(state, data) == shelf_of(state, data / "train.jsonl") == shelf_of(state, data / ".." / "data")
    assert shelf_of(state, data, "ward-7") == state / ".prepared" / "ward-7"
    found = DataSet.of(data)
    assert shelf_of(state, data) == state / ".prepared" / found.id
    (data / ID_FILE).write_text('{"fedveil-data-set": 1, "id": "../../elsewhere"}')
    assert shelf_of(state, data).name.startswith("path-")


def test_a_turn_trains_at_the_rates_of_its_round(tmp_path, data, monkeypatch):
    asked = []
    rate = Schedule.rate
    monkeypatch.setattr(Schedule, "rate", lambda self, *at: (asked.append(at), rate(self, *at))[1])
    upload(data, tmp_path / "state", 3, {"train.schedule": "linear"})
    assert asked == [(3, 0, 1)]


def test_keys_of_steps_that_no_client_makes_are_refused_at_the_site_too(tmp_path, data):
    with pytest.raises(ConfigError, match=r"train\.schedule: expected 'constant', found 'linear' with dp"):
        upload(data, tmp_path / "state", 0, {"train.schedule": "linear", "dp.clip": 1.0})


@pytest.mark.long
@pytest.mark.parametrize(
    "config,named",
    [
        ({"method.name": "fedqsn"}, True),
        ({"method.name": "random_binary"}, True),
        ({"method.name": "fedavg"}, False),
        ({"method.name": "fedqsn", "dp.clip": 1.0, "dp.noise": 0.1}, False),
    ],
)
def test_the_task_s_device_is_named_to_methods_that_use_one_and_steps_are_not_noisy(
    tmp_path, data, monkeypatch, config, named
):
    """Decoded there, codes and uploads are what they are without a device, which here is the CPU by another name."""
    expected, contexts = upload(data, tmp_path / "state", 0, config), []
    participate = Exchange.participate
    monkeypatch.setattr(AdaptedTask, "accelerator", torch.device("cpu"))
    monkeypatch.setattr(
        Exchange, "participate", lambda self, *given: (contexts.append(given[3]), participate(self, *given))[1]
    )
    found = upload(data, tmp_path / "other", 0, config)
    assert [ctx.device for ctx in contexts] == [torch.device("cpu") if named else None]
    assert {n: raw_of(v) for n, v in found.items()} == {n: raw_of(v) for n, v in expected.items()}


def test_what_is_summed_unseen_is_made_on_the_cpu(monkeypatch):
    config, method = parse({"method.name": "random_binary"}), strategies.create("random_binary", "")
    task = tasks.load(config, method.adapter, "cpu")
    task.device = torch.device("cuda")
    assert turn.device_for(method, task, config, False) == torch.device("cuda")
    assert turn.device_for(method, task, config, True) is None


def raw_of(value) -> bytes:
    return bytes(value) if isinstance(value, bytes) else raw(value).tobytes()


def test_a_task_on_the_cpu_names_no_device():
    task = tasks.load(parse(FLAT), strategies.create("fedavg", "").adapter, "cpu")
    assert task.accelerator is None
    task.device = torch.device("cuda")
    assert task.accelerator == torch.device("cuda")
