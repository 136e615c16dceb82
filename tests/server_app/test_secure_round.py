"""Secure aggregation over a Grid in this process: rounds, silence, refusals and what the server has at the end."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedveil import rng, strategies
from fedveil.client_app.app import app
from fedveil.config import AggregateConfig, CohortConfig, SecureConfig, parse
from fedveil.console.main import main
from fedveil.console.runs import per_site
from fedveil.console.runs.run_reader import load_run
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.message_address import MessageAddress
from fedveil.errors import ConfigError, QuorumError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.federation.secagg import crypto, derivations, entry_plan
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.messages import KeysResponse, parse_request, sign_statement
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.roster import SigningKeyRoster
from fedveil.federation.secagg.site import SecAggSite
from fedveil.records import disclosure_summary
from fedveil.records.tensor_state import state_digest
from fedveil.server_app import round_attempt
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.known_sites import KnownSitesStore
from fedveil.server_app.pending_sum import PendingSumStore
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.server_app.secure_round import SecureRoundAttempt
from fedveil.wire import header, statement_envelope
from fedveil.wire.capture import MessageCapture
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["a", "b", "c", "d", "e"]
METHODS = {
    "fedavg": "", "fedrand": "rho = 0.5", "hetlora": "ranks = {a = 1}\nadapter = {rank = 2}",
    "random_binary": "wire = 'explicit'\nadapter = {kind = 'lora'}",
}  # fmt: skip
QUICK = {"min_sites": 3, "deadline_seconds": 1.0, "wait_seconds": 1.0}


class Runs:
    """Runs of one method under secure aggregation, or in the clear."""

    def __init__(self, monkeypatch, folder, name: str = "fedavg") -> None:
        self.task, self.folder, self.name = use_toy_task(monkeypatch), folder, name
        self.method = strategies.create_method(name, METHODS[name])
        self.config = {"run.deterministic": True, "run.seed": 9, "run.rounds": 3, "run.name": "unseen"}
        self.config |= {"method.name": name, "method.params": METHODS[name]}

    def flat(self, secure: SecureConfig) -> dict:
        return parse(self.config | {f"secure.{k}": v for k, v in secure.model_dump(by_alias=True).items()}).flat()

    def grid(self, secure: SecureConfig, sites=SITES, **more) -> LocalGrid:
        return LocalGrid(app, sites, self.folder / f"sites-{secure.enabled}", self.flat(secure), **more)

    def strategy(self, secure: SecureConfig, folder: RunFolder | None = None, **cohort) -> MethodStrategy:
        settings = RunSettings(
            CohortConfig(**(QUICK | cohort)), seed=9, deterministic=True, method=self.name, secure=secure,
            tap=folder is not None, config=self.flat(secure),
        )  # fmt: skip
        return MethodStrategy(self.method, settings, folder=folder, spec=self.task.spec)

    def weights(self) -> ArrayRecord:
        return ArrayRecord(dict(self.task.initial(rng.initial_stream(9, "weights"))))

    def run(self, secure: SecureConfig, grid: LocalGrid | None = None, folder: RunFolder | None = None, **cohort):
        ours = self.strategy(secure, folder, **cohort)
        end = ours.start(grid or self.grid(secure), self.weights(), num_rounds=3).arrays.to_torch_state_dict()
        return end, ours.history


ON = SecureConfig(enabled=True, max_weight=10)


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    return Runs(monkeypatch, tmp_path)


def asks(kind: str, rounds=(0, 1, 2)):
    """Whether a message asks that in one of those rounds: "train", or a kind of question."""

    def matches(message: Message) -> bool:
        round_ = message.content.config_records["order"]["round"]
        if message.metadata.message_type != "query.secure":
            return kind == "train" and round_ in rounds
        return kind == asked(message).kind and round_ in rounds

    return matches


def asked(message: Message):
    data = b"".join(array.data for array in message.content.array_records["fedveil"].values())
    whole = memoryview(data)
    content, start = header.read_header(whole)
    return parse_request(bytes(whole[start : start + content["fields"][0][3]]))


def lost(when) -> object:
    """A reply that never comes."""
    return lambda message, reply: None if when(message) else reply


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedrand"])  # there the server draws
def test_a_run_whose_uploads_nobody_sees_ends_as_one_in_the_clear_to_the_rounding(name, monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, name)
    runs.config["run.name"] = "one"
    secure, history = runs.run(ON)
    clear, open_history = runs.run(SecureConfig())
    step = FixedPointRing(32, len(SITES), 10, 64.0).step
    assert all(torch.allclose(secure[n], clear[n], rtol=0, atol=3 * 100 * step) for n in clear)
    assert [r.accepted for r in history] == [r.accepted for r in open_history] == [SITES] * 3
    assert all(r.reports for r in open_history)
    assert not any(r.reports or r.failed or r.unseen["deaf"] for r in history)
    expected = {"sites": 5, "cohort": 5, "quorum": 4, "threshold": 4, "neighbours": 0, "colluding": 1, "deaf": {}}
    assert history[0].unseen == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrand", "hetlora"])
def test_over_the_wire_and_in_one_process_the_same_bits(name, monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, name)
    over_grid, _ = runs.run(ON)
    config = parse(runs.config | {"secure.enabled": True, "secure.max-weight": 10})
    exchange = MessageExchange(runs.method, runs.name, runs.task.spec)
    start = runs.method.init(
        runs.task.spec, runs.task.initial(rng.initial_stream(9, "weights")), rng.initial_stream(9, "method init")
    )
    trainer_for = lambda site, ctx: runs.task.trainer([{}] * (3 + SITES.index(site)), ctx.rng("batches"))  # noqa: E731
    federation = InProcessFederation(exchange, config, trainer_for, SITES, start)
    federation.run()
    assert state_digest(over_grid) == state_digest(federation.models()["server"])


@pytest.mark.long
def test_a_site_that_is_silent_is_not_in_the_sum_and_is_asked_for_a_key_again(runs):
    """What the four others send is the mean of four, to which they agree; the next round is one of five again."""
    grid = runs.grid(ON, tamper={"c": lost(asks("train", [1]))})
    _, history = runs.run(ON, grid)
    assert [r.accepted for r in history] == [SITES, ["a", "b", "d", "e"], SITES]
    assert list(history[1].failed) == ["c"]
    assert sum(asks("keys")(m) for m in grid.pushed) == 6  # each site once, and c a second time
    assert sum(asks("agree")(m) for m in grid.pushed) == sum(asks("agree", [1])(m) for m in grid.pushed) == 4


@pytest.mark.long
def test_four_of_five_sites_open_a_sum_and_with_three_the_round_is_lost(runs):
    """Its sites have agreed to a sum, so there is no second attempt: the next round begins with the same state."""
    _, history = runs.run(ON, runs.grid(ON, tamper={"b": lost(asks("open"))}))
    assert [r.accepted for r in history] == [SITES] * 3

    runs.config["run.name"] = "lost"
    refuse = lambda message, reply: Error_(message) if asks("open", [1])(message) else reply  # noqa: E731
    grid = runs.grid(ON, tamper={"b": refuse, "d": refuse})
    _, history = runs.run(ON, grid, max_retries=1)
    assert [(r.round, bool(r.unseen.get("lost"))) for r in history] == [(0, False), (1, True), (2, False)]
    assert "4 sites must open their shares" in history[1].unseen["reason"]
    assert sum(asks("open", [1])(m) for m in grid.pushed) == 5 + 2 + 2  # those that refused are asked again

    runs.config["run.name"] = "ended"
    refuse = lambda message, reply: Error_(message) if asks("open", [0, 1])(message) else reply  # noqa: E731
    with pytest.raises(QuorumError, match="round 2: it is lost, like the 1 before it"):
        runs.run(ON, runs.grid(ON, tamper={"b": refuse, "d": refuse}), max_retries=1)


@pytest.mark.long
def test_a_sum_of_four_needs_four_signatures(runs):
    refuse = lambda message, reply: Error_(message) if asks("agree")(message) else reply  # noqa: E731
    grid = runs.grid(ON, tamper={"c": lost(asks("train", [1])), "b": refuse})
    _, history = runs.run(ON, grid)
    assert "4 sites must sign the list of the sum, but only 3 did" in history[1].unseen["reason"]
    assert not any(asks("open", [1])(m) for m in grid.pushed)
    assert [r.accepted for r in history if not r.unseen.get("lost")] == [SITES] * 2


def test_a_whole_cohort_is_one_exchange_and_a_missing_upload_costs_the_round(runs):
    """The next round begins with the same state, and no site masks twice in the lost one."""
    whole = SecureConfig(enabled=True, max_weight=10, whole_cohort=True)
    grid = runs.grid(whole, tamper={"c": lost(asks("train", [1]))})
    _, history = runs.run(whole, grid)
    assert [(r.round, r.attempt, bool(r.unseen.get("lost"))) for r in history] == [
        (0, 0, False), (1, 0, True), (2, 0, False),
    ]  # fmt: skip
    assert history[0].unseen == {
        "sites": 5, "cohort": 5, "quorum": 0, "threshold": 0, "neighbours": 0, "colluding": 1, "deaf": {},
    }  # fmt: skip
    assert "the uploads of all 5 sites are needed, but none arrived from c;" in history[1].unseen["reason"]
    assert history[1].weights == ""
    assert not any(asks(kind)(m) for m in grid.pushed for kind in ("agree", "open"))
    assert sum(asks("keys")(m) for m in grid.pushed) == 10  # after the lost round each site is asked again


@pytest.mark.long
def test_a_site_that_is_sent_another_message_than_the_plan_s_trains_nothing(runs, monkeypatch):
    """A server that shows one site other weights."""
    real = MessageExchange.packed

    def packed(exchange, state, ctx):
        if ctx.client == "b":
            state = replace(state, tensors={n: w + 1 for n, w in state.tensors.items()})
        return real(exchange, state, ctx)

    monkeypatch.setattr(MessageExchange, "packed", packed)
    _, history = runs.run(ON, runs.grid(ON))
    assert "this message is not the one that the plan names" in history[0].failed["b"]
    assert history[0].accepted == ["a", "c", "d", "e"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["", "keys", "open", "refused"])
def test_every_byte_of_an_attempt_is_a_site_s(kind, runs, tmp_path):
    """Keys are asked of sites that are in no cohort, too."""
    bad = lambda message, reply: Error_(message) if kind and asks(kind, [0, 1])(message) else reply  # noqa: E731
    if kind == "refused":
        bad = lambda message, reply: changed(reply) if asks("train", [1])(message) else reply  # noqa: E731
    folder = RunFolder(tmp_path / "run")
    grid = runs.grid(ON, tamper={"b": bad})
    _, history = runs.run(ON, grid, folder, fraction=0.8)
    run = load_run(tmp_path / "run")
    assert history[0].unlisted.keys() == set(SITES)
    sites = per_site.records_by_site(run)
    assert run.upload_bytes == sum(record.upload_bytes for record in history) == sum(site.up for site in sites)
    assert run.download_bytes == sum(record.download_bytes for record in history) == sum(site.down for site in sites)
    traffic = disclosure_summary.site_traffic(run.messages, run.attempts)
    assert {site.name: (site.up, site.down) for site in sites} == {
        name: (of.up_bytes, of.down_bytes) for name, of in traffic.items()
    }
    counted = Counter(message.content.config_records["order"]["site"] for message in grid.pushed)
    assert {name: of.down for name, of in traffic.items()} == counted
    if not kind:  # else the answer of `b` is none
        assert {name: of.up for name, of in traffic.items()} == counted
    assert 0 < run.unlisted("up") == sum(up for record in history for up, *_ in record.unlisted.values())


def changed(reply: Message) -> Message:
    (name, array), *rest = reply.content.array_records["fedveil"].items()
    record = ArrayRecord({name: Array("uint8", array.shape, array.stype, array.data[:-1] + b"\x00"), **dict(rest)})
    return Message(RecordDict({"fedveil": record}), reply_to=reply)


def test_bytes_of_keys_count_where_no_cohort_came_of_them(runs, tmp_path):
    folder = RunFolder(tmp_path / "run")
    refuse = dict.fromkeys("abc", lambda message, reply: Error_(message) if asks("keys")(message) else reply)
    with pytest.raises(QuorumError):
        runs.run(ON, runs.grid(ON, tamper=refuse), folder, max_retries=0)
    (line,) = load_run(tmp_path / "run").attempts
    assert line["cohort"] == []
    assert 0 < line["upload_bytes"] == sum(up for up, *_ in line["unlisted"].values())


def Error_(message: Message) -> Message:  # noqa: N802
    return Message(Error(5, "node unavailable"), reply_to=message)


@pytest.mark.long
def test_an_answer_that_this_server_cannot_even_read_costs_its_site_the_round_and_no_other(runs, monkeypatch):
    """Whatever the code at the server makes of it."""
    real = KeysResponse.from_bytes

    def of(data):
        if shaken["next"] == 1:
            shaken["next"] += 1
            raise RecursionError("a text of the site's")
        shaken["next"] += 1
        return real(data)

    shaken = {"next": 0}
    monkeypatch.setattr(KeysResponse, "from_bytes", of)
    _, history = runs.run(ON, runs.grid(ON))
    assert history[0].accepted == ["a", "c", "d", "e"]
    assert history[0].failed == {"b": "RecursionError"}
    assert history[1].accepted == SITES


@pytest.mark.long
def test_equal_questions_are_one_object_so_that_they_are_sent_once(runs):
    grid = runs.grid(ON)
    runs.run(ON, grid)
    records = [id(m.content.array_records["fedveil"]) for m in grid.pushed if asks("keys", [0])(m)]
    assert (len(records), len(set(records))) == (5, 1)


@pytest.mark.long
@pytest.mark.parametrize("round_", [3, -1])
def test_a_question_of_no_round_of_the_run_is_not_answered(round_, runs):
    grid, question = hello(runs)
    assert not grid.replies[grid._push(question)].has_error()
    question.content.config_records["order"]["round"] = round_
    reply = grid.replies[grid._push(question)]
    assert "round: " in reply.error.reason


@pytest.mark.long
def test_a_site_that_purged_a_run_makes_no_keys_for_it_again(runs):
    grid, question = hello(runs)
    folder = next((runs.folder / "sites-True").glob("*/a"))
    assert (folder / "secure.json").exists()
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))
    assert main(["site", "purge", "--state-dir", str(folder.parents[1]), "--older-than", "30", "--yes"]) == 0
    assert not (folder / "secure.json").exists()
    reply = grid.replies[grid._push(question)]
    assert reply.error.reason.startswith("PolicyError: ")
    assert not (folder / "secure.json").exists()


def hello(runs) -> tuple[LocalGrid, Message]:
    """The first question to the site named a, in a run that ends in round 0."""
    grid = runs.grid(ON, tamper={"b": lost(asks("train"))})
    with pytest.raises(QuorumError):
        runs.run(ON, grid, min_sites=5, max_retries=0)
    return grid, next(m for m in grid.pushed if asks("keys")(m))


@pytest.mark.long
def test_an_attempt_that_is_thrown_away_is_repeated_with_new_keys_and_ends_as_an_unbroken_run(runs):
    """Three uploads of five are too few, so nobody is asked to agree to a sum of them."""
    whole, _ = runs.run(ON)
    done = []

    def once(message, reply):
        if asks("train", [1])(message) and len(done) < 2:
            done.append(message)
            return Error_(message)
        return reply

    runs.config["run.name"] = "broken"
    grid = runs.grid(ON, tamper={"b": once, "d": once})
    final_state, history = runs.run(ON, grid)
    assert [(r.round, r.attempt, "reason" in r.unseen) for r in history] == [
        (0, 0, False), (1, 0, True), (1, 1, False), (2, 0, False),
    ]  # fmt: skip
    assert state_digest(final_state) == state_digest(whole)
    orders = [m.content.config_records["order"] for m in grid.pushed if asks("train")(m)]
    plans = [AttemptPlan.from_bytes(text.encode()) for text in dict.fromkeys(order["secure"] for order in orders)]
    keys_of = [{member.key for member in plan.members} for plan in plans]
    assert len(keys_of) == 4
    assert all(not a & b for i, a in enumerate(keys_of) for b in keys_of[:i])  # no prekey twice


@pytest.mark.long
def test_a_holder_with_wrong_shares_is_waited_past_and_named(runs, monkeypatch):
    """Of five, four open a sum. The first to answer lies about its share of a's secret, and signs the lie."""
    whole, _ = runs.run(ON)
    real = SecAggSite._opened

    def opened(site, live, request, listed):
        answer = real(site, live, request, listed)
        if site.name != "a" or request.plan.round != 1:
            return answer
        lie = answer.model_copy(update={"own": answer.own | {"a": "00" * 16}})
        return sign_statement(lie, site.name, site.signing_key)

    monkeypatch.setattr(SecAggSite, "_opened", opened)
    runs.config["run.name"] = "lied"
    final_state, history = runs.run(ON, runs.grid(ON))
    assert [r.accepted for r in history] == [SITES] * 3
    assert "other shares than a made" in history[1].unseen["deaf"]["a"]
    assert state_digest(final_state) == state_digest(whole)


@pytest.mark.long
def test_without_a_site_whose_shares_nobody_can_read_the_run_goes_on(runs, monkeypatch):
    """It costs one round, and is not asked again: more holders say so than may lie or be silent."""
    real = derivations.encrypt_row

    def encrypt_row(key, shares, plan, site, holder):
        return real(bytes(32) if site == "d" else key, shares, plan, site, holder)

    monkeypatch.setattr(derivations, "encrypt_row", encrypt_row)
    grid = runs.grid(ON)
    _, history = runs.run(ON, grid)
    assert [(r.round, r.attempt) for r in history] == [(0, 0), (1, 0), (2, 0)]
    assert history[0].unseen["lost"]
    assert "open their shares of d, but fewer did" in history[0].unseen["reason"]
    for record in history[1:]:
        assert record.accepted == ["a", "b", "c", "e"]
        assert record.failed == {
            "d": "secure: its shares could not be used by many holders, so the run continues without it"
        }
    orders = [m.content.config_records["order"] for m in grid.pushed]
    assert {(order["round"], order["attempt"]) for order in orders if order["site"] == "d"} == {(0, 0)}


@pytest.mark.long
def test_below_the_least_sum_nobody_is_asked_to_open_anything(runs):
    grid = runs.grid(ON, tamper=dict.fromkeys("abc", lost(asks("train"))))
    with pytest.raises(QuorumError, match="at least 3 uploads must be accepted, .* had only 2"):
        runs.run(ON, grid, max_retries=0)
    assert not any(asks("agree")(m) or asks("open")(m) for m in grid.pushed)


@pytest.mark.long
def test_below_the_quorum_of_the_run_nobody_is_asked_either(runs):
    grid = runs.grid(ON, tamper={"a": lost(asks("train"))})
    with pytest.raises(QuorumError, match="at least 5 uploads must be accepted, .* had only 4"):
        runs.run(ON, grid, max_retries=0, min_sites=5)
    assert not any(asks("agree")(m) or asks("open")(m) for m in grid.pushed)


class Killed(BaseException):
    """An end that no code of the server catches."""


def broken_run(runs, monkeypatch, folder, patch) -> tuple:
    """A run whose server dies where `patch` says, and goes on with another process. Returns its end and history."""
    grid = runs.grid(ON)
    with monkeypatch.context() as context, RunFolder(folder) as run_folder:
        patch(context)
        run_folder.status("running", 0, 3)
        with pytest.raises(Killed):
            runs.run(ON, grid, run_folder)
    with RunFolder(folder, resume=True) as run_folder:
        run_folder.status("running", 0, 3)
        return runs.run(ON, grid, run_folder)


def dies_before_round_1_is_in_a_checkpoint(context) -> None:
    real = RunFolder.checkpoint

    def dies(folder, server, loop):
        if loop["round"] == 1:
            raise Killed
        real(folder, server, loop)

    context.setattr(RunFolder, "checkpoint", dies)


def dies_before_sites_open_round_1(context) -> None:
    real = SecureRoundAttempt._open_sum

    def dies(attempt):
        if attempt.round == 1:
            raise Killed
        return real(attempt)

    context.setattr(SecureRoundAttempt, "_open_sum", dies)


@pytest.mark.long
@pytest.mark.parametrize("patch", [dies_before_round_1_is_in_a_checkpoint, dies_before_sites_open_round_1])
def test_a_server_that_dies_with_a_closed_list_ends_where_an_unbroken_one_does(patch, runs, monkeypatch, tmp_path):
    """The sites train once for round 1: the sum that was pending is opened."""
    with RunFolder(tmp_path / "whole") as folder:
        folder.status("running", 0, 3)
        whole, _ = runs.run(ON, folder=folder)
    final_state, history = broken_run(runs, monkeypatch, tmp_path / "broken", patch)
    assert [(r.round, r.attempt, r.accepted, bool(r.unseen.get("lost"))) for r in history] == [
        (1, 0, SITES, False), (2, 0, SITES, False),
    ]  # fmt: skip
    assert state_digest(final_state) == state_digest(whole)
    assert not list((tmp_path / "broken").glob("pending-sum*"))


@pytest.mark.long
def test_a_pending_sum_is_opened_under_a_quorum_that_was_raised_since(runs, monkeypatch, tmp_path):
    """The list was closed by the settings of that time; a round that would be refused now is over all the same."""
    grid = runs.grid(ON, tamper={"c": lost(asks("train", [1]))})
    with monkeypatch.context() as context, RunFolder(tmp_path / "run") as folder:
        dies_before_sites_open_round_1(context)
        folder.status("running", 0, 3)
        with pytest.raises(Killed):
            runs.run(ON, grid, folder)
    with RunFolder(tmp_path / "run", resume=True) as folder:
        folder.status("running", 0, 3)
        _, history = runs.run(ON, grid, folder, min_sites=5)
    assert [(r.round, len(r.accepted), bool(r.unseen.get("lost"))) for r in history] == [(1, 4, False), (2, 5, False)]


@pytest.mark.long
@pytest.mark.parametrize("damage", ["pending-sum.bin", "pending-sum.json", "absent"])
def test_without_a_readable_pending_sum_the_round_is_lost_and_no_other(damage, runs, monkeypatch, tmp_path):
    def patch(context):
        dies_before_round_1_is_in_a_checkpoint(context)
        real = PendingSumStore.save

        def save(store, pending, total):
            real(store, pending, total)
            if pending.unmasking.plan.round == 1 and damage == "absent":
                store.remove()
            elif pending.unmasking.plan.round == 1:
                file = store.folder / damage
                file.write_bytes(file.read_bytes()[:-1] + b"?")

        context.setattr(PendingSumStore, "save", save)

    _, history = broken_run(runs, monkeypatch, tmp_path / "broken", patch)
    assert [(r.round, r.cohort, bool(r.unseen.get("lost"))) for r in history] == [(1, [], True), (2, SITES, False)]
    assert history[0].unseen["reason"] == "its sites agreed to a sum before the server restart"
    assert all("it has agreed to a sum of round 2 already" in why for why in history[0].failed.values())
    with RunFolder(tmp_path / "broken", resume=True) as folder:  # the lost round is in the checkpoint, too
        assert folder.load_checkpoint()[1]["round"] == 2


@pytest.mark.long
def test_a_site_that_was_expelled_stays_so_after_a_restart(runs, monkeypatch, tmp_path):
    """Site d makes no shares that others can read, which costs round 0; the server dies before round 1 begins."""
    real, checkpoint = derivations.encrypt_row, RunFolder.checkpoint

    def dies_after_round_0(context):
        def dies(folder, server, loop):
            checkpoint(folder, server, loop)
            if loop["round"] == 0:
                raise Killed

        context.setattr(RunFolder, "checkpoint", dies)

    def encrypt_row(key, shares, plan, site, holder):
        return real(bytes(32) if site == "d" else key, shares, plan, site, holder)

    monkeypatch.setattr(derivations, "encrypt_row", encrypt_row)
    _, history = broken_run(runs, monkeypatch, tmp_path / "broken", dies_after_round_0)
    assert [(r.round, r.accepted) for r in history] == [(1, ["a", "b", "c", "e"]), (2, ["a", "b", "c", "e"])]
    assert history[1].failed == {
        "d": "secure: its shares could not be used by many holders, so the run continues without it"
    }


@pytest.mark.long
def test_a_prekey_stays_its_first_owner_s_after_a_restart(runs, monkeypatch, tmp_path):
    """The first plan showed b's prekey to a, and no site has masked for it; a answers first after the restart."""

    def dies_once_the_plan_is_made(context):
        def dies(*args):
            raise Killed

        context.setattr(SecureRoundAttempt, "build_messages", dies)

    ready, shown, restarted = SecAggSite.ready, {}, []

    def steals(site, request):
        answer = ready(site, request)
        if site.name != "a" or len(shown) < len(SITES):
            shown[site.name] = answer.prekey
            return answer
        restarted.append(site.name)
        copied = answer.prekey.model_copy(update={"key": shown["b"].key})
        signature = crypto.sign_bytes(site.signing_key, copied.text(site.run)).hex()
        return answer.model_copy(update={"prekey": copied.model_copy(update={"signature": signature})})

    monkeypatch.setattr(SecAggSite, "ready", steals)
    _, history = broken_run(runs, monkeypatch, tmp_path / "broken", dies_once_the_plan_is_made)
    assert "a" in restarted
    assert history[0].accepted == ["b", "c", "d", "e"]
    assert history[0].failed == {"a": "secure: a sent the prekey of b as its own"}


def test_known_sites_that_cannot_be_read_stop_a_resume(runs, monkeypatch, tmp_path):
    def dies_and_damages(context):
        dies_before_round_1_is_in_a_checkpoint(context)
        real = KnownSitesStore.save

        def save(store, coordinator):
            real(store, coordinator)
            file = store.folder / "secure-sites.json"
            file.write_bytes(file.read_bytes()[:-1] + b"?")

        context.setattr(KnownSitesStore, "save", save)

    with pytest.raises(StateError, match=r"secure-sites.json: cannot read the run's expelled sites .* move it away"):
        broken_run(runs, monkeypatch, tmp_path / "broken", dies_and_damages)


@pytest.mark.long
def test_the_tap_of_a_secure_run_has_one_masked_vector_of_each_site_and_no_figure_beside_it(runs, tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.status("running", 0, 3)
        runs.run(ON, folder=folder)
    tap = MessageCapture(tmp_path / "run" / "tap")
    ups = [header.header_of_slices([tap.read(seen)]) for seen in tap.messages() if seen.direction == "up"]
    assert len(ups) == 15
    assert all([field[0] for field in up["fields"]] == ["attached", "sum"] for up in ups)
    assert all((up["num_examples"], up["report"], up["variant"]) == (None, {}, "") for up in ups)


@pytest.mark.long
def test_an_order_in_the_clear_in_a_secure_run_is_refused_before_a_row_is_looked_at(runs):
    """The run config says secure; a server that lies leaves the plan out."""
    grid, ours = runs.grid(ON), runs.strategy(SecureConfig())
    runs.task.trainer = None  # nobody trains
    with pytest.raises(QuorumError, match=r"order: secure: secure.enabled requires a plan, found ''"):
        ours.start(grid, runs.weights(), num_rounds=1)


@pytest.mark.parametrize(
    "key,value", [("max_weight", 11), ("clip_bound", 65.0), ("min_sites", 4), ("ring_bits", 64), ("threshold", 5)]
)
def test_a_server_whose_sums_are_not_the_run_config_s_is_refused(key, value, runs):
    ours = runs.strategy(ON.model_copy(update={key: value}), max_retries=0)
    with pytest.raises(QuorumError, match=r"secure plan: \w+: expected"):
        ours.start(runs.grid(ON), runs.weights(), num_rounds=1)


@pytest.mark.parametrize(
    ("senders", "fewest", "why"),
    [("ab", 4, "none or at least 4 sites, found 2"), ("abcde", 3, "each entry needs at least 4 of the 5 sites"),
     ("bcdef", 4, "the table names sites outside the cohort")],
)  # fmt: skip
def test_a_table_that_leaves_entries_to_too_few_sites_is_refused_before_a_row_is_looked_at(
    senders, fewest, why, monkeypatch, tmp_path
):
    runs = Runs(monkeypatch, tmp_path, "fedrand")
    table = EntryTable(blocks={name: tuple(senders) for name in runs.task.spec if "lora_A" in name}, fewest=fewest)
    monkeypatch.setattr(entry_plan, "plan_entries", lambda *about: table)
    runs.task.trainer = None  # nobody trains
    with pytest.raises(QuorumError, match=why):
        runs.run(ON, max_retries=0)


@pytest.mark.parametrize("on", [True, False])
def test_a_table_where_the_method_has_none_is_refused(on, runs, monkeypatch):
    real = round_attempt.round_instruction

    def with_table(*about):
        order = real(*about)
        order["entries"] = EntryTable(blocks={"w": tuple(SITES)}, fewest=4).to_text()
        return order

    monkeypatch.setattr(round_attempt, "round_instruction", with_table)
    with pytest.raises(QuorumError, match="entries: (an unmasked upload has no entry table|the table is missing)"):
        runs.run(ON if on else SecureConfig(), max_retries=0)


def test_a_sum_in_which_too_few_sites_send_an_entry_is_thrown_away_before_a_share_is_asked_for(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, "fedrand")

    def refuse(table, cohort, in_sum, least):
        raise QuorumError(f"entries: {len(set(in_sum))} of {len(cohort)}, least {least}")

    monkeypatch.setattr(EntryTable, "require_sum", refuse)
    grid = runs.grid(ON)
    ours = runs.strategy(ON, max_retries=0)
    with pytest.raises(QuorumError, match=r"it is lost, like the 0 before it \(no sum: entries: 5 of 5, least 3\)"):
        ours.start(grid, runs.weights(), num_rounds=1)
    assert not any(asks("agree")(message) or asks("open")(message) for message in grid.pushed)
    assert any(asks("train")(message) for message in grid.pushed)


def test_a_site_that_demands_it_takes_no_part_in_the_clear(runs, tmp_path):
    (tmp_path / "policy.toml").write_text("require-secure = true\n[permits]\n" + PERMITS)
    grid = runs.grid(SecureConfig())
    grid.node_config = {"a": {"policy": str(tmp_path / "policy.toml")}}
    _, history = runs.run(SecureConfig(), grid)
    assert "secure.enabled: this site permits only masked uploads" in history[0].failed["a"]


PERMITS = (
    '"run.deterministic" = true\n"run.seed" = 9\n"run.rounds" = 3\n"run.name" = "unseen"\n'
    '"method.name" = "fedavg"\n"secure.max-weight" = 10\n'
)


@pytest.mark.long
@pytest.mark.parametrize(
    "line,why",
    [("min-cohort = 6", "permits at least 6, found 3"),
     ("min-threshold = 5", "min-threshold: quorum: expected at least 5"),
     ("min-colluders = 2", "secure.max-colluders: this site permits at least 2, found 1"),
     (f'roster = "sha256:{"0" * 64}"', "roster: this site requires the roster sha256:0000")],
)  # fmt: skip
def test_what_a_site_s_policy_demands_of_sums_is_asked_before_it_trains(line, why, runs, tmp_path):
    (tmp_path / "policy.toml").write_text(f"require-secure = true\n{line}\n[permits]\n" + PERMITS)
    grid = runs.grid(ON)
    grid.node_config = {"a": {"policy": str(tmp_path / "policy.toml"), "site": "a"}}
    _, history = runs.run(ON, grid, max_retries=0)
    assert why in history[0].failed["a"]
    assert "a" not in history[0].accepted


@pytest.mark.long
def test_with_a_roster_a_site_s_key_is_the_registry_s_or_it_takes_no_part(runs, tmp_path):
    """The site named `a` signs with another key than the registry has."""
    signing = {site: bytes([i]) * 32 for i, site in enumerate(SITES)}
    for site, key in signing.items():
        (tmp_path / f"{site}.key").write_bytes(key)
        (tmp_path / f"{site}.key").chmod(0o600)
    known = {site: crypto.verifying_key(key).hex() for site, key in signing.items()}
    (tmp_path / "roster.json").write_bytes(SigningKeyRoster(signing_keys=known | {"a": known["b"]}).to_bytes())
    secure = ON.model_copy(update={"roster": str(tmp_path / "roster.json")})
    grid = runs.grid(secure)
    grid.node_config = {site: {"signing-key": str(tmp_path / f"{site}.key")} for site in SITES}
    _, history = runs.run(secure, grid)
    assert history[0].accepted == ["b", "c", "d", "e"]
    assert "signed with its registered key" in history[0].failed["a"]


@pytest.mark.parametrize("key,value", [("rule", {"aggregate": "median"}), ("norm", {"max_norm_ratio": 2.0})])
def test_what_needs_single_uploads_is_refused_before_any_site_is_asked(key, value, runs):
    secure = ON.model_copy(update={"graph_degree": 2})
    rule = AggregateConfig(rule=value.pop("aggregate", "mean"))
    cohort = CohortConfig(**(QUICK | value))
    ours = MethodStrategy(runs.method, RunSettings(cohort, rule, secure=secure), spec=runs.task.spec)
    with pytest.raises(ConfigError, match="with secure.enabled"):
        ours.start(runs.grid(secure), runs.weights(), num_rounds=1)


def test_a_statement_of_another_round_attempt_or_site_is_refused():
    from fedveil.errors import WireError

    at = MessageAddress("run", 1, "a")
    message = statement_envelope.pack_statement(b"{}", 2, "up", at)
    assert statement_envelope.unpack_statement(message, 2, "up", at, 1000) == b"{}"
    for round_, way, where in (
        (3, "up", at),
        (2, "down", at),
        (2, "up", MessageAddress("run", 2, "a")),
        (2, "up", MessageAddress()),
    ):
        with pytest.raises(WireError):
            statement_envelope.unpack_statement(message, round_, way, where, 1000)
    for at_byte in range(len(message)):
        changed = bytearray(message)
        changed[at_byte] ^= 1
        with pytest.raises(WireError):
            statement_envelope.unpack_statement(bytes(changed), 2, "up", at, 1000)
