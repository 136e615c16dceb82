"""A server that asks for a step of one row, and a site that counts the rows behind an upload."""

from __future__ import annotations

import json

import pytest

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.app import public_reason
from fedveil.client_app.guards.example_counter import ExampleCounter
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions, run_config_rules
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.client_app.worker import connection
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.errors import PolicyError
from fedveil.federation.exchange import MessageExchange
from fedveil.rng import RandomStream
from fedveil.wire import header
from tests.prompt_toy import local_of

CTX = RoundContext(0, "s", True, bytes(32), address=MessageAddress("r"))
GRADIENT = {"method.name": "random_binary", "method.params": 'rate = 0.0\nadapter = {kind = "lora"}'}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A site of 120 rows."""
    at = tmp_path_factory.mktemp("data")
    rows = [{"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub."} for i in range(120)]
    (at / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def upload(data, at, text: str, **config) -> bytes:
    """What leaves the site in a turn under the policy `text`."""
    flat = {"method.name": "fedavg", "task.max-tokens": 32, **config}
    parsed = parse(flat)
    (at / "policy.toml").write_text(f"{text}\n{run_config_rules.permits_for_run(parsed)}")
    method = strategies.create_method(parsed.method.name, parsed.method.params)
    task = tasks.load_task(parsed, method.adapter, "cpu")
    exchange = MessageExchange(method, parsed.method.name, task.spec)
    state = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m"))
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": parsed.method.name}
    order |= {"fields": json.dumps(hyperparameters_of(method))}
    node = {"site": "s", "state-dir": str(at), "data": str(data), "policy": str(at / "policy.toml"), "device": "cpu"}
    node["simulated"] = True  # several state folders use the data
    asked = ClientAssignment.from_instruction(order, flat, node)
    encoded_upload = b"".join(
        client_session.ClientSession().run_round(lambda: exchange.broadcast(state, CTX), asked).parts
    )
    decisions.check_upload(asked, 0, len(encoded_upload), header.header_of_slices([encoded_upload])["num_examples"])
    return encoded_upload


ONE_ROW = {"train.batch-size": 1, "train.max-steps": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    "text,config,refused",
    [
        ("min-examples = 100", ONE_ROW, "examples"),
        ("min-examples = 100", GRADIENT | ONE_ROW, "examples"),
        ("min-examples = 100", {"train.batch-size": 50, "train.max-steps": 1}, "examples"),
        ("min-examples = 100", {"train.batch-size": 50, "train.max-steps": 2}, ""),
        ("min-examples = 2", {"train.batch-size": 1, "train.max-steps": 2}, ""),
        ("min-batch = 2", {"train.batch-size": 1, "train.max-steps": 9}, "train.batch-size"),
        ("min-batch = 2", {"train.batch-size": 1, "train.gradient-accumulation-steps": 2, "train.max-steps": 1}, ""),
        ("min-batch = 40", {"train.batch-size": 50, "train.max-steps": 3}, "train.batch-size"),  # 50, 50, 20
        ("min-examples = 1", {"train.epochs": 0}, "examples"),
        ("min-examples = 100", {"dp.clip-norm": 1.0, "train.batch-size": 1, "train.max-steps": 1}, "examples"),
        ("", ONE_ROW, ""),
    ],
)  # fmt: skip
def test_an_upload_is_made_from_as_many_rows_as_the_policy_asks(text, config, refused, data, tmp_path):
    if not refused:
        assert upload(data, tmp_path, text, **config)
        return
    with pytest.raises(PolicyError, match=f"{refused}: this site takes .* at least .* found fewer .* of its policy"):
        upload(data, tmp_path, text, **config)
    assert not list(ClientStateStore.open(tmp_path, "r", "s").folder.glob("turn-*"))


def test_drawn_batches_count_as_they_were_drawn_and_poisson_batches_as_expected():
    """12 rows in batches of 4."""
    for sampling, steps, distinct in (("fixed", 1, 4), ("disjoint", 2, 8), ("disjoint", 4, 12), ("poisson", 0, 0),
                                      ("poisson", 1, 4), ("poisson", 2, 6), ("poisson", 9, 11)):  # fmt: skip
        witness = ExampleCounter(local_of(12))
        witness.rows.batches(sampling, steps, RandomStream(bytes(32)))
        assert (witness.distinct, witness.least) == (distinct, 4 if steps else 0)


def test_the_server_learns_why_but_not_how_many():
    assert (
        public_reason(connection.ClientRoundError("PolicyError", "examples: fewer")) == "PolicyError: examples: fewer"
    )
