"""Server steps that take uploads as they arrive, over a Grid in this process: late, silent and lying sites."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.update_buffer import SitesInFlight
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from fedveil.server_app import buffered_attempt
from fedveil.server_app.buffered_attempt import BufferedAttempt
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.message_recorder import RunMessageRecorder
from fedveil.server_app.reception import LostReply
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.scaffold import Scaffold
from fedveil.wire.capture import CapturedMessage
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["east", "north", "south", "west"]
RUN_CONFIG = {"run.deterministic": True, "run.seed": 9, "run.rounds": 6, "method.name": "fedavg"}


@pytest.fixture
def task(monkeypatch):
    return use_toy_task(monkeypatch)


@pytest.fixture
def grid(tmp_path, task):
    return lambda kind=LocalGrid, **more: kind(app, SITES, tmp_path / "sites", RUN_CONFIG, **more)


def strategy(method=None, folder=None, tap=False, **cohort) -> MethodStrategy:
    quick = {"min_sites": 2, "buffer_size": 3, "deadline_seconds": 5.0, "wait_seconds": 1.0, "max_retries": 0} | cohort
    settings = RunSettings(CohortConfig(**quick), seed=9, method="fedavg", tap=tap)
    return MethodStrategy(method or FedAvg(), settings, folder=folder)


def run(ours: MethodStrategy, task, grid: LocalGrid, rounds: int = 6) -> str:
    weights = ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights"))))
    return state_digest(ours.start(grid, weights, num_rounds=rounds).arrays.to_torch_state_dict())


def audit(folder, event: str) -> list[dict]:
    return [line for line in audit_log.read_log(folder.folder.parent / audit_log.NAME) if line["event"] == event]


@pytest.mark.long
def test_a_late_site_does_not_hold_the_others_and_every_step_equals_the_formula(grid, task, tmp_path):
    """The twin reads the captured uploads: w + sum n_k / sqrt(1 + tau_k) (x_k - start_k) / sum n."""
    folder = RunFolder(tmp_path / "runs" / "run")
    ours = strategy(folder=folder, tap=True)
    run(ours, task, grid(late={"west": 2}))
    assert [record.round for record in ours.history] == list(range(6))
    assert all(len(record.accepted) == 3 and not record.failed for record in ours.history)
    late = [record.staleness["west"] for record in ours.history if "west" in record.accepted]
    assert max(late) >= 1
    tensors, uploads = defaultdict(dict), {}
    exchange = MessageExchange(FedAvg(), "fedavg", ours.rounds._begun.spec)
    tap = folder.tap()
    for message in tap.messages():
        data, ctx = tap.read(message), context_of(ours, message)
        if message.direction == "down":
            tensors[message.round] = dict(exchange.opened(data, ctx).fields)
        else:
            uploads[message.round, message.attempt, message.site] = exchange.receive(data, message.round, ctx.address)
    assert len(uploads) == 18
    for record in ours.history[:-1]:
        now, after = tensors[record.round], tensors[record.round + 1]
        known = {s: uploads[record.round - record.staleness[s], record.attempt, s] for s in record.accepted}
        total = sum(message.num_examples for message in known.values())
        for name, weight in now.items():
            wanted = weight.clone()
            for site, message in known.items():
                start = tensors[record.round - record.staleness[site]][name]
                scale = message.num_examples / total / math.sqrt(1 + record.staleness[site])
                wanted += scale * (message.payload.fields[name] - start)
            torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=1e-5)
    accepted = audit(folder, "accepted")
    assert [(a["step"] - a["round"], a["staleness"]) for a in accepted] == [(a["staleness"],) * 2 for a in accepted]
    assert {a["staleness"] for a in accepted} >= {0, max(late)}
    lines = [json.loads(line) for line in (folder.folder / "disclosure.jsonl").read_text().splitlines()]
    assert sorted(line["step"] - line["round"] for line in lines if "step" in line) == sorted(
        a["staleness"] for a in accepted
    )


def context_of(ours: MethodStrategy, message: CapturedMessage) -> RoundContext:
    address = MessageAddress(ours.rounds.run_name, message.attempt, message.site)
    return RoundContext(message.round, message.site, True, bytes(32), address=address)


@pytest.mark.long
def test_a_site_is_asked_once_for_each_state(grid, task):
    with_late = grid(late={"west": 2})
    run(strategy(), task, with_late)
    asked = [
        (
            m.metadata.dst_node_id,
            m.content.config_records["order"]["round"],
            m.content.config_records["order"]["attempt"],
        )
        for m in with_late.pushed
    ]
    assert len(asked) == len(set(asked))
    for _, rounds in itertools.groupby(sorted(asked), lambda of: of[0]):
        numbers = [round_ for _, round_, _ in rounds]
        assert numbers == sorted(set(numbers))


class Replayer:
    """Keeps the content of its first reply, and sends it again to every later request."""

    def __init__(self) -> None:
        self.first: RecordDict | None = None

    def __call__(self, message: Message, reply: Message) -> Message:
        self.first = self.first or copied(reply.content)
        return Message(copied(self.first), reply_to=message)


def copied(content: RecordDict) -> RecordDict:
    """The same records, whose arrays a reader may take."""
    return RecordDict(
        {name: ArrayRecord(dict(of.items())) if isinstance(of, ArrayRecord) else of for name, of in content.items()}
    )


@pytest.mark.long
def test_the_content_of_an_old_answer_is_refused(grid, task, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "run")
    ours = strategy(folder=folder)
    run(ours, task, grid(tamper={"east": Replayer()}))
    assert "east" in ours.history[0].accepted
    assert not any("east" in record.accepted for record in ours.history[1:])
    reasons = {why for record in ours.history for why in record.failed.values()}
    assert reasons
    assert all(why.startswith("refused: round: expected ") for why in reasons)
    failed = audit(folder, "failed")
    assert {line["site"] for line in failed} == {"east"}
    assert all("staleness" in line for line in failed)


class TwiceGrid(LocalGrid):
    """Every reply of east comes twice, also to requests that have ended."""

    def pull_messages(self, message_ids):
        out = super().pull_messages(message_ids)
        mine = [m for m in out if m.metadata.src_node_id == 1000]
        self.old = [*getattr(self, "old", []), *mine]
        return out + (self.old if any("m" in i for i in message_ids) else [])


@pytest.mark.long
def test_a_second_answer_and_one_to_a_request_that_has_ended_do_not_count(grid, task, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "run")
    ours = strategy(folder=folder)
    run(ours, task, grid(TwiceGrid))
    assert all(len(record.accepted) == len(set(record.accepted)) == 3 for record in ours.history)
    accepted = [(line["site"], line["round"], line["attempt"]) for line in audit(folder, "accepted")]
    assert len(accepted) == len(set(accepted)) == 18
    assert audit(folder, "dropped")


@pytest.mark.long
def test_an_upload_that_is_too_old_is_refused_and_its_site_asked_again(grid, task):
    ours, late = strategy(max_staleness=0), grid(late={"west": 2})
    run(ours, task, late)
    refused = [record for record in ours.history if "west" in record.failed]
    assert refused
    reason = refused[0].failed["west"]
    assert reason.startswith("refused: it is ")
    assert refused[0].unlisted["west"][0] > 0
    assert sum(m.metadata.dst_node_id == 1003 for m in late.pushed) >= 2
    assert all(tau == 0 for record in ours.history for tau in record.staleness.values())


@pytest.mark.long
def test_a_silent_site_fails_at_its_own_deadline_and_is_asked_again(grid, task, monkeypatch):
    """A reading of this clock takes 0.05 s; the other sites are answered for within a few."""
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(0, 0.05)), sleep=lambda seconds: None)
    monkeypatch.setattr(buffered_attempt, "time", clock)
    silent = grid(tamper={"west": lambda message, reply: None}, late={"south": 1})
    ours = strategy(deadline_seconds=0.4)
    run(ours, task, silent)
    failed = [record.failed["west"] for record in ours.history if "west" in record.failed]
    assert failed
    assert set(failed) == {"no reply within 0.4 s"}
    assert sum(m.metadata.dst_node_id == 1003 for m in silent.pushed) >= 2


@pytest.mark.long
def test_too_few_answers_end_the_run_after_the_retries(grid, task):
    ours = strategy(deadline_seconds=0.3, max_retries=1)
    with pytest.raises(
        QuorumError, match="round 1: at least 3 uploads must be accepted, but the last of 2 attempts had only 2"
    ):
        run(ours, task, grid(tamper=dict.fromkeys(("west", "south"), lambda message, reply: None)))
    assert [(record.attempt, sorted(record.accepted)) for record in ours.history] == [
        (0, ["east", "north"]), (1, ["east", "north"])
    ]  # fmt: skip


@pytest.mark.long
def test_a_restart_loses_what_was_in_flight_says_so_and_asks_again(grid, task, tmp_path):
    with RunFolder(tmp_path / "runs" / "run") as folder:
        folder.status("running", 0, 6)
        run(strategy(folder=folder), task, grid(late={"west": 50}), rounds=2)
        assert audit(folder, "unanswered")[0]["sites"] == {"west": 0}
    with RunFolder(tmp_path / "runs" / "run", True) as folder:
        again = grid()
        ours = strategy(folder=folder)
        run(ours, task, again, rounds=4)
        (line,) = audit(folder, "resumed")
        assert line["in-flight"] == {"west": 0}
    assert [record.round for record in ours.history] == [2, 3]
    assert [m.metadata.dst_node_id for m in again.pushed][:4] == [1000, 1001, 1002, 1003]


def test_a_reply_lands_the_request_of_its_own_site_or_is_dropped():
    """Polled for east, the SuperLink answers with a reply of west, and then with a second one."""
    contexts, dropped = {site: RoundContext(0, site, True, bytes(32)) for site in ("east", "west")}, []

    answers = [[LostReply("west", 0, "gone"), LostReply("west", 0, "again")], [LostReply("east", 0, "away")]]

    class Crossed:
        def poll_replies(self, site):
            yield from answers.pop(0)

        def drop_outcome(self, reply):
            dropped.append(reply)

    flight = SitesInFlight(10)
    flight.contexts |= contexts
    attempt = BufferedAttempt(
        MessageExchange(FedAvg(), "fedavg", {}), FederatedState(), RunSettings(CohortConfig(buffer_size=2)),
        MessageAddress("run"), 0, list(contexts.values()), RunMessageRecorder(None, None, list(contexts)),
        flight=flight, expires={}, newly_asked=list(contexts.values()),
    )  # fmt: skip
    assert list(attempt.iter_uploads(Crossed(), 5.0)) == []
    assert attempt.tally.failed == {"west": "gone", "east": "away"}
    assert dropped == [LostReply("west", 0, "again")]


def test_what_does_not_go_with_a_buffer_on_a_server_is_refused_before_a_site_is_asked(grid, task):
    weights = ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights"))))
    there = grid()
    for settings, method, message in (
        (
            RunSettings(CohortConfig(buffer_size=3), deterministic=True),
            FedAvg(),
            "run.deterministic: with",
        ),
        (RunSettings(CohortConfig(buffer_size=3)), Scaffold(), "cohort.buffer-size: expected 0 with scaffold"),
        (
            RunSettings(CohortConfig(buffer_size=3, sites=2)),
            FedAvg(),
            "cohort.buffer-size: expected at most .* sites, 2",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            MethodStrategy(method, settings).start(there, weights, num_rounds=1)
    with pytest.raises(ConfigError, match="cohort.buffer-size: it must be 0 if the caller runs the rounds"):
        strategy().configure_train(1, weights, ConfigRecord(), there)
    assert not there.pushed
