"""A site's whole turn with held-out rows: what its policy permits, what it trains on, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil import strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.policy import decisions
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.config import parse
from fedveil.contract import held_out_report
from fedveil.errors import ConfigError, PolicyError, TaskError
from fedveil.training.local_training import LocalTraining
from fedveil.wire import header
from fedveil.wire.envelope import describe_message
from tests.client_app.one_site import Server

TEXTS = [{"mr": f"name[Aromi {i}], food[{'fish' * (i % 7)}]", "ref": f"Aromi {i} is a pub."} for i in range(160)]
HALF = {"evaluate.held-out": 0.5}


def said(upload: bytes) -> dict[str, float]:
    return held_out_report.held_out_metrics(header.header_of_slices([upload])["report"])


@pytest.fixture
def trained_on(monkeypatch) -> list[int]:
    """Rows of each training, as the trainer has them."""
    seen, real = [], LocalTraining.train

    def train(self, *given):
        seen.append([tuple(row.ids) for row in self._rows])
        return real(self, *given)

    monkeypatch.setattr(LocalTraining, "train", train)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("key", ["evaluate.held-out", "evaluate.validation-share"])
def test_a_site_scores_what_it_received_on_rows_that_it_never_trains_on(tmp_path, trained_on, key):
    server = Server(tmp_path, "max-scores = 5", TEXTS, **{key: 0.5})
    uploads = [server.send(server.initial, round_) for round_ in (0, 1)]
    first, second = map(said, uploads)
    assert first == second  # the same weights, the same rows
    everything = [tuple(row.ids) for row in server.task.encode(server.task.examples(tmp_path, "train"))]
    held_out_indices = [i for i, row in enumerate(everything) if row not in set(trained_on[0])]
    assert trained_on[0] == trained_on[1]
    assert len(held_out_indices) + len(trained_on[0]) == 160
    assert first[held_out_report.ROWS] == len(held_out_indices) >= held_out_report.LEAST_ROWS
    said_at_site = f"{key}: {len(held_out_indices)} of 160 examples are held out: scored, but never trained on"
    assert said_at_site in server.notes
    task = tasks.load_task(parse(server.flat), strategies.create_method("fedavg", "").adapter, "cpu")
    task.put(server.initial)
    rows = task.encode(task.examples(tmp_path, "train"))
    assert first[held_out_report.LOSS] == pytest.approx(task.mean_loss([rows[i] for i in held_out_indices]), rel=1e-5)
    report = header.header_of_slices([uploads[0]])
    assert report["num_examples"] == len(trained_on[0])
    listed = describe_message(uploads[0])["figures"]
    assert listed == {
        name: len(str(value)) for name, value in report["report"].items() if name in held_out_report.FIELDS
    }
    assert listed[held_out_report.LOSS] > 3


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "max-scores = 0"])
def test_a_policy_that_does_not_permit_it_is_a_word_and_no_row_is_held_out(tmp_path, trained_on, text):
    server = Server(tmp_path, text, TEXTS, **HALF)
    assert said(server.send(server.initial)) == {held_out_report.REFUSED: held_out_report.NOT_PERMITTED}
    assert server.notes[-1].endswith("(max-scores); no example is held out")
    assert len(trained_on[0]) == 160


@pytest.mark.long
def test_too_few_rows_are_all_trained_on_and_it_says_so(tmp_path, trained_on):
    server = Server(tmp_path, "max-scores = 5", TEXTS, **{"evaluate.held-out": 0.1})
    assert said(server.send(server.initial)) == {held_out_report.REFUSED: held_out_report.TOO_FEW}
    assert len(trained_on[0]) == 160


@pytest.mark.long
def test_scores_end_with_the_permitted_number_and_the_rows_stay_held_out(tmp_path, trained_on):
    server = Server(tmp_path, "max-scores = 2", TEXTS, **HALF)
    reports = [said(server.send(server.initial, round_)) for round_ in range(3)]
    assert [held_out_report.LOSS in each for each in reports] == [True, True, False]
    assert reports[2] == {held_out_report.REFUSED: held_out_report.SPENT}
    assert trained_on[2] == trained_on[0]
    assert ReplayGuard.open(tmp_path, "r", "s").scores == 2


@pytest.mark.long
def test_a_run_that_asks_for_none_says_nothing(tmp_path, trained_on):
    server = Server(tmp_path, "max-scores = 5", TEXTS)
    upload = server.send(server.initial)
    assert said(upload) == {}
    assert describe_message(upload)["figures"] == {}
    assert len(trained_on[0]) == 160


def test_a_site_asks_for_a_claim_itself_whatever_the_server_checked(tmp_path):
    server = Server(tmp_path, "max-scores = 5", TEXTS, **HALF, **{"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    with pytest.raises(ConfigError, match="evaluate.held-out: expected 0 with a privacy claim"):
        server.send(server.initial)


def test_a_score_that_was_not_counted_does_not_leave_the_site(tmp_path):
    """Whatever the server's bundle has put into its report: the site's own copy of the policy looks."""
    server = Server(tmp_path, "max-scores = 1", TEXTS, **HALF)
    asked = server.asked()
    with pytest.raises(PolicyError, match="loss_held_out: this site permits 1 per run"):
        decisions.check_upload(asked, 0, 0, 100, {held_out_report.LOSS: 1.0})
    assert decisions.open_replay_guard(asked).count_score(1)
    decisions.check_upload(asked, 0, 0, 100, {held_out_report.LOSS: 1.0})
    assert not decisions.open_replay_guard(asked).count_score(1)
    decisions.check_upload(asked, 0, 0, 100, {"loss_received": 1.0})


def test_a_part_that_changes_from_turn_to_turn_gets_no_score_and_no_training(tmp_path):
    """Nested sets of held-out rows, under one run name: their means differ by the loss of single rows."""
    server = Server(tmp_path, "max-scores = 50", TEXTS, **HALF)
    decisions.count_round(server.asked(0))
    server.flat["evaluate.held-out"] = 0.49
    for asked in (server.asked(0), server.asked(1)):
        with pytest.raises(PolicyError, match="evaluate.held-out: this run began with 0.5"):
            decisions.check_round(asked, 100)
        with pytest.raises(PolicyError, match="but now asks for 0.49; submit a new run"):
            decisions.count_round(asked)
    server.flat["evaluate.held-out"] = 0.5
    decisions.count_round(server.asked(1))


def test_one_flower_run_cannot_have_the_scores_of_many_runs(tmp_path):
    """The name of the run is free in each message; the Flower run is not."""
    server = Server(tmp_path, "max-scores = 1", TEXTS, **HALF)
    first = replace(server.asked(), flower_run=7)
    decisions.count_round(first)
    other = replace(first, order=replace(first.order, run="r2"))
    for refuse in (lambda: decisions.check_round(other, 3), lambda: decisions.count_round(other)):
        with pytest.raises(PolicyError, match="run: this Flower run began with 'r'"):
            refuse()
    decisions.count_round(replace(other, flower_run=8))


@pytest.mark.long
def test_later_runs_score_the_same_rows_or_none(tmp_path, trained_on, monkeypatch):
    server = Server(tmp_path, "max-scores = 5", TEXTS, **HALF)
    first = said(server.send(server.initial))
    reports = []
    for part in (0.5, 0.4):
        later = Server(tmp_path, "max-scores = 5", TEXTS, **{"evaluate.held-out": part, "run.seed": 9})
        later.initial = server.initial
        reports.append(said(later.send(server.initial)))
    assert reports == [first, {held_out_report.REFUSED: held_out_report.OTHER_PART}]
    assert trained_on[0] == trained_on[1] == trained_on[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "text, told", [("", None), ("report-received-loss = true", None), ("max-scores = 1", None),
                   ("max-scores = 1\nreport-received-loss = true", held_out_report.LOSS)],
)  # fmt: skip
def test_no_loss_of_rows_that_are_trained_on_leaves_a_site_with_a_policy(tmp_path, text, told):
    server = Server(tmp_path, text, TEXTS, **HALF)
    report = header.header_of_slices([server.send(server.initial)])["report"]
    assert report.get("loss_received") == (report[told] if told else None)
    assert "loss_trained" in report


@pytest.mark.long
def test_no_patient_is_trained_on_and_scored(tmp_path, trained_on, monkeypatch):
    """160 patients with two rows each, of which the second is far from the first."""
    rows = [{**TEXTS[i % 160], "ref": f"{i} is a pub.", "patient": f"Secret-{i % 160}"} for i in range(320)]
    server, asked = Server(tmp_path, "max-scores = 5", rows, **HALF), Server.asked

    def with_units(server, round_=0):
        given = asked(server, round_)
        return replace(given, site=given.site.model_copy(update={"unit_column": "patient"}))

    monkeypatch.setattr(Server, "asked", with_units)
    scores = said(server.send(server.initial))
    everything = [tuple(row.ids) for row in server.task.encode(server.task.examples(tmp_path, "train"))]
    is_trained = [row in set(trained_on[0]) for row in everything]
    assert is_trained[:160] == is_trained[160:]
    assert scores[held_out_report.ROWS] == is_trained.count(False) >= 2 * held_out_report.LEAST_ROWS


def test_a_site_whose_data_has_no_units_holds_no_row_out(tmp_path, monkeypatch):
    server, asked = Server(tmp_path, "max-scores = 5", TEXTS, **HALF), Server.asked

    def with_units(server, round_=0):
        given = asked(server, round_)
        return replace(given, site=given.site.model_copy(update={"unit_column": "patient"}))

    monkeypatch.setattr(Server, "asked", with_units)
    with pytest.raises(
        TaskError,
        match=r"evaluate.held-out: cannot read the units in the node config's unit-column.*has no column \"patient\"",
    ):
        server.send(server.initial)


def test_the_run_s_rule_for_rows_without_an_id_also_holds_for_held_out_rows(tmp_path, monkeypatch):
    server, asked = Server(tmp_path, "max-scores = 5", TEXTS, **HALF), Server.asked
    given: list[bool] = []

    def with_units(server, round_=0):
        assigned = asked(server, round_)
        dp = assigned.config.dp.model_copy(update={"no_unit": "one"})
        config = assigned.config.model_copy(update={"dp": dp})
        return replace(assigned, config=config, site=assigned.site.model_copy(update={"unit_column": "patient"}))

    def group(data, split, column, origins, has_blanks=False):
        given.append(has_blanks)
        raise TaskError("none")

    monkeypatch.setattr(Server, "asked", with_units)
    monkeypatch.setattr(client_session, "group_rows", group)
    with pytest.raises(TaskError, match="evaluate.held-out"):
        server.send(server.initial)
    assert given == [True]


@pytest.mark.long
def test_a_site_holds_out_nothing_if_the_server_has_examples_of_its_own(tmp_path, trained_on):
    keys = {"evaluate.validation-share": 0.5, "evaluate.select-model": "best", "task.evaluation": "x"}
    server = Server(tmp_path, "max-scores = 5", TEXTS, **keys)
    assert said(server.send(server.initial)) == {}
    assert [len(rows) for rows in trained_on] == [160]
    assert server.notes == ()
