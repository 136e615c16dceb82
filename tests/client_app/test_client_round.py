"""A site's turns and its prepared rows: kept below its state folder, named only where a claim is made."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_round, client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.client_app.state.data_sets import ID_FILE, SiteDataset, shelf_of
from fedveil.config import parse
from fedveil.contract.codec import raw_bytes
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.data.tokenization import TextTokenizer
from fedveil.encrypted_files import make_key
from fedveil.errors import ConfigError, PolicyError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.lr_schedule import LearningRateSchedule
from tests.client_app.one_site import Server

CTX = RoundContext(0, "s", True, bytes(32), address=MessageAddress("r"))
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
    method = strategies.create_method(name, "")
    task = tasks.load_task(parsed, method.adapter, "cpu")
    exchange = MessageExchange(method, name, task.spec)
    server = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m"))
    order = {"round": round_, "is-new": True, "site": "s", "run": "r", "method": name}
    node = {"state-dir": str(state), "data": str(data), "device": "cpu", **node}
    asked = ClientAssignment.from_instruction(order | {"fields": json.dumps(hyperparameters_of(method))}, flat, node)
    reply = client_session.ClientSession().run_round(
        lambda: exchange.broadcast(server, replace(CTX, round=round_)), asked
    )
    layout = b"".join(reply.parts)
    return exchange.receive(layout, round_, MessageAddress("r", 0, "s")).payload.fields


@pytest.mark.long
def test_a_worker_s_first_turn_keeps_the_rows_and_the_next_worker_takes_them(tmp_path, data, monkeypatch):
    first = upload(data, tmp_path / "state")
    (cache_folder,) = shelf_of(tmp_path / "state", data).iterdir()
    assert cache_folder.is_relative_to(tmp_path / "state" / ".prepared")
    paths = [tmp_path / "state" / ".prepared", cache_folder.parent, cache_folder, *cache_folder.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths} == {0}
    monkeypatch.setattr(TextTokenizer, "tokenize", None)  # nothing is tokenised again
    again = upload(data, tmp_path / "state")
    assert {name: value.tolist() for name, value in first.items()} == {n: value.tolist() for n, value in again.items()}
    assert [path.name for path in data.iterdir()] == ["train.jsonl"]  # nothing is written beside the rows
    monkeypatch.undo()
    rows = (data / "train.jsonl").read_text().splitlines(True)
    (data / "train.jsonl").write_text("".join(rows[1:]))
    upload(data, tmp_path / "state")
    assert not cache_folder.exists()  # it had the deleted row


@pytest.mark.long
def test_a_site_with_a_key_keeps_no_rows_in_the_clear(tmp_path, data):
    make_key(tmp_path / "key")
    encrypted = upload(data, tmp_path / "encrypted", **{"key-file": str(tmp_path / "key")})
    clear = upload(data, tmp_path / "state")
    assert not (tmp_path / "encrypted" / ".prepared").exists()
    assert {name: value.tolist() for name, value in encrypted.items()} == {n: v.tolist() for n, v in clear.items()}


def test_rows_are_kept_by_the_id_of_the_data_set_once_it_has_one(tmp_path, data):
    state = tmp_path / "state"
    assert shelf_of(state, data).name.startswith("path-")
    assert shelf_of(state, data) == shelf_of(state, data / "train.jsonl") == shelf_of(state, data / ".." / "data")
    assert shelf_of(state, data, "ward-7") == state / ".prepared" / "ward-7"
    dataset = SiteDataset.from_folder(data)
    assert shelf_of(state, data) == state / ".prepared" / dataset.id
    (data / ID_FILE).write_text('{"fedveil-data-set": 1, "id": "../../elsewhere"}')
    assert shelf_of(state, data).name.startswith("path-")


@pytest.mark.long
def test_a_turn_trains_at_the_rates_of_its_round(tmp_path, data, monkeypatch):
    asked = []
    rate = LearningRateSchedule.rate
    monkeypatch.setattr(LearningRateSchedule, "rate", lambda self, *at: (asked.append(at), rate(self, *at))[1])
    upload(data, tmp_path / "state", 3, {"train.lr-schedule": "linear"})
    assert asked == [(3, 0, 1)]


def test_keys_of_steps_that_no_client_makes_are_refused_at_the_site_too(tmp_path, data):
    with pytest.raises(ConfigError, match=r"train\.lr-schedule: expected 'constant', found 'linear' with dp"):
        upload(data, tmp_path / "state", 0, {"train.lr-schedule": "linear", "dp.clip-norm": 1.0})


@pytest.mark.long
@pytest.mark.parametrize(
    "config,named",
    [
        ({"method.name": "fedqsn"}, True),
        ({"method.name": "random_binary"}, True),
        ({"method.name": "fedavg"}, False),
        ({"method.name": "fedqsn", "dp.clip-norm": 1.0, "dp.noise-multiplier": 0.1}, False),
    ],
)
def test_the_task_s_device_is_named_to_methods_that_use_one_and_steps_are_not_noisy(
    tmp_path, data, monkeypatch, config, named
):
    """Decoded there, codes and uploads are what they are without a device, which here is the CPU by another name."""
    expected, contexts = upload(data, tmp_path / "state", 0, config), []
    participate = MessageExchange.participate
    monkeypatch.setattr(AdaptedTask, "accelerator", torch.device("cpu"))
    monkeypatch.setattr(
        MessageExchange, "participate", lambda self, *given: (contexts.append(given[3]), participate(self, *given))[1]
    )
    fields = upload(data, tmp_path / "other", 0, config)
    assert [ctx.device for ctx in contexts] == [torch.device("cpu") if named else None]
    assert {n: raw_of(v) for n, v in fields.items()} == {n: raw_of(v) for n, v in expected.items()}


def test_what_is_summed_unseen_is_made_on_the_cpu(monkeypatch):
    config, method = parse({"method.name": "random_binary"}), strategies.create_method("random_binary", "")
    task = tasks.load_task(config, method.adapter, "cpu")
    task.device = torch.device("cuda")
    assert client_round.device_for(method, task, config, False) == torch.device("cuda")
    assert client_round.device_for(method, task, config, True) is None


def raw_of(value) -> bytes:
    return bytes(value) if isinstance(value, bytes) else raw_bytes(value).tobytes()


def test_a_task_on_the_cpu_names_no_device():
    task = tasks.load_task(parse(FLAT), strategies.create_method("fedavg", "").adapter, "cpu")
    assert task.accelerator is None
    task.device = torch.device("cuda")
    assert task.accelerator == torch.device("cuda")


LOOSE, STRICT = "min-examples = 1", "min-examples = 100"  # of a site that has 8 rows


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(LOOSE, STRICT), (STRICT, LOOSE)])
def test_a_policy_that_is_changed_in_the_middle_of_a_round_holds_from_the_next_round_on(first, second, tmp_path):
    """The round goes on under the policy of its opening; what leaves the site is judged by the file as it is then."""
    server, policy = Server(tmp_path, first), tmp_path / "policy.toml"
    state = server.exchange.method.init(server.task.spec, server.initial, rng.initial_stream(0, "m"))
    outcomes, seen = [], []

    def receive(round_: int) -> bytes:
        """Between the opening of the round and its training."""
        if round_ == 0:
            policy.write_text(policy.read_text().replace(first, second))
        seen.append(load_policy(server.asked().site).min_examples)
        ctx = RoundContext(round_, "s", round_ == 0, bytes(32), address=MessageAddress("r"))
        return server.exchange.broadcast(state, ctx)

    for round_ in range(2):
        try:
            server.turns.run_round(partial(receive, round_), server.asked(round_))
            outcomes.append(LOOSE)
        except PolicyError as error:
            outcomes.append(STRICT if "at least 100 examples, found fewer in this round" in str(error) else str(error))
    assert outcomes == [first, second]
    assert seen == [int(second.rpartition(" ")[2])] * 2
    if second == STRICT:
        with pytest.raises(PolicyError, match="at least 100 examples, found fewer"):
            decisions.check_upload(server.asked(), 0, 0, 8)
    else:
        decisions.check_upload(server.asked(), 0, 0, 8)


@pytest.mark.parametrize("names", ["", "ox,cat"])
def test_a_site_that_would_number_its_own_classes_trains_only_with_the_run_s_names(tmp_path, names):
    from PIL import Image

    site = Server(
        tmp_path,
        **{"task.name": "image-classification", "task.num-classes": 2, "task.target-column": "label",
           "task.class-names": names, "method.params": 'adapter = {kind = "all"}'},
    )  # fmt: skip
    (tmp_path / "train.jsonl").unlink()
    for name in ("cat", "ox"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (32, 32), (40 * i, 0, 0)).save(tmp_path / "train" / name / f"{i}.png")
    if names:
        assert site.send(site.initial)
        return
    with pytest.raises(TaskError, match='each site would number its own; .* task.class-names = "cat,ox"'):
        site.send(site.initial)
