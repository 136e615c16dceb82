"""One attempt at a round: it returns a value, changes nothing of the run, and hands on each message at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field, replace
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord

from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig
from fedveil.server_app import round_attempt
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.round_attempt import AttemptResult, RoundAttempt
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import chunking
from tests.server_app.grid import LocalGrid, use_toy_task


@dataclass(frozen=True)
class ListRecorder:
    """Lists the messages of an attempt, without a run folder."""

    events: list[tuple[str, str]] = field(default_factory=list)
    with_data: bool = False

    def record_sent(self, ctx, disclosed, parts) -> str:
        self.events.append((ctx.client, "sent"))
        return ""

    def record_accepted(self, ctx, disclosed, data, site_log, signed) -> None:
        self.events.append((ctx.client, "accepted"))

    def record_failed(self, ctx, reason) -> None:
        self.events.append((ctx.client, "failed"))

    def record_refused(self, ctx, reason, data, up_bytes) -> None:
        self.events.append((ctx.client, "refused"))


class Trial:
    """An attempt over three sites, of which some give no reply."""

    def __init__(self, monkeypatch, tmp_path, lost=(), max_norm_ratio: float = 0.0, late=None) -> None:
        task = use_toy_task(monkeypatch)
        tamper = dict.fromkeys(lost, lambda *_: None)
        grid = LocalGrid(app, ["east", "north", "south"], tmp_path, tamper=tamper, late=late)
        cohort = CohortConfig(min_sites=2, wait_seconds=0.1, max_norm_ratio=max_norm_ratio)
        self.loop = MethodStrategy(FedAvg(), RunSettings(cohort, deterministic=True)).rounds
        self.loop.initialise(task.initial(rng.initial_stream(9, "weights")))
        opened, _ = self.loop.open_attempt(grid, 0, 0, 1.0, ConfigRecord())
        self.reception = self.loop.open_reception(grid, 0, 0)
        self.recorder = ListRecorder()
        self.attempt: RoundAttempt = replace(opened, recorder=self.recorder)
        messages = self.attempt.build_messages({"east": 1000, "north": 1001, "south": 1002}, 1.0, ConfigRecord())
        sites = [ctx.client for ctx in self.attempt.contexts]
        self.reception.ask(dict(zip(sites, messages, strict=True)), self.attempt.largest_upload)

    def uploads(self) -> Iterator:
        for upload in self.attempt.iter_uploads(self.reception, 0.5):
            self.recorder.events.append((upload.ctx.client, "added"))
            yield upload

    def run(self) -> AttemptResult:
        return self.attempt.run(self.uploads())


def test_an_upload_is_on_record_before_it_is_added_up_and_the_next_one_is_read(monkeypatch, tmp_path):
    trial = Trial(monkeypatch, tmp_path, lost=["south"])
    trial.run()
    assert trial.recorder.events == [
        ("east", "sent"), ("north", "sent"), ("south", "sent"), ("east", "accepted"), ("east", "added"),
        ("north", "accepted"), ("north", "added"), ("south", "failed"),
    ]  # fmt: skip


def test_an_attempt_changes_nothing_of_the_run_until_the_loop_records_it(monkeypatch, tmp_path):
    trial = Trial(monkeypatch, tmp_path)
    before = trial.loop.server
    result = trial.run()
    assert (trial.loop.server is before, trial.loop.history, trial.loop.course.done) == (True, [], -1)
    assert (result.record.accepted, result.record.scores, result.record.weights) == (["east", "north", "south"], {}, "")
    with pytest.raises(FrozenInstanceError):
        result.record.weights = "ab"
    assert trial.loop.record_attempt(result, started=0.0)
    assert (trial.loop.server is result.state, len(trial.loop.history), trial.loop.course.done) == (True, 1, 0)
    assert trial.loop.history[0].weights


@pytest.mark.parametrize("max_norm_ratio", [0.0, 1e9])
def test_the_record_names_each_accepted_site_that_did_not_sign(monkeypatch, tmp_path, max_norm_ratio):
    trial = Trial(monkeypatch, tmp_path, lost=["south"], max_norm_ratio=max_norm_ratio)
    poll = trial.reception.poll_replies

    def signed_by_north(only: str = "") -> Iterator:
        for reply in poll(only):
            yield replace(reply, signed={"signature": "ab"}) if reply.site == "north" else reply

    monkeypatch.setattr(trial.reception, "poll_replies", signed_by_north)
    record = trial.run().record
    assert (record.accepted, record.unsigned, list(record.failed)) == (["east", "north"], ["east"], ["south"])


@pytest.mark.parametrize(
    ("polls", "seconds", "failed"),
    [(2, 0.5, {}), (3, 0.75, {}), (4, 0.75, {"east": "no reply within 0.5 s"})],
    ids=["at the deadline", "at the last poll", "after it"],
)
def test_a_site_that_answers_at_the_deadline_counts_and_one_that_is_later_delays_nobody_further(
    monkeypatch, tmp_path, polls, seconds, failed
):
    """In each of three attempts. The others' uploads wait on the SuperLink, because sums are in the order of sites."""
    for attempt in range(3):
        now = [100.0]
        clock = SimpleNamespace(monotonic=lambda now=now: now[0], sleep=lambda s, now=now: now.append(now.pop() + s))
        trial = Trial(monkeypatch, tmp_path / str(attempt), late={"east": polls})
        monkeypatch.setattr(round_attempt, "time", clock)
        record = trial.run().record
        assert now[0] - 100.0 == seconds
        assert sorted([*record.accepted, *failed]) == ["east", "north", "south"]
        assert record.failed == failed


def test_the_result_of_too_few_uploads_has_no_state(monkeypatch, tmp_path):
    trial = Trial(monkeypatch, tmp_path, lost=["south", "north"])
    before, result = trial.loop.server, trial.run()
    assert (result.state, result.record.accepted, sorted(result.record.failed)) == (None, ["east"], ["north", "south"])
    assert not trial.loop.record_attempt(result, started=0.0)
    assert (trial.loop.server is before, len(trial.loop.history), trial.loop.course.done) == (True, 1, -1)


@pytest.mark.parametrize(("slices", "is_said"), [(chunking.MAX_REPLY_SLICES, False), (0, True)])
def test_an_upload_that_the_fleet_port_would_refuse_is_said_before_a_site_is_asked(
    monkeypatch, tmp_path, caplog, slices, is_said
):
    monkeypatch.setattr(chunking, "MAX_REPLY_SLICES", slices)
    Trial(monkeypatch, tmp_path)
    assert ("the server's fleet port refuses replies of more than" in caplog.text) is is_said
