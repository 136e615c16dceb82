"""A run in one process writes the same run folder as a server, and has a name for each part of it."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from fedveil.console.runs import per_site
from fedveil.console.runs.run_reader import load_run
from fedveil.errors import ConfigError, StateError, TaskError
from fedveil.local import LocalFederation
from fedveil.local.run_recorder import LocalRunRecorder
from fedveil.runs import AuditOutcome, Run
from fedveil.runs import run as run_module
from fedveil.server_app.metrics import sinks
from tests.fedveil.local.small_federation import settings, write_federation


@pytest.fixture
def place(tmp_path):
    write_federation(tmp_path / "here")
    return tmp_path / "here"


def federation(place, sites=("north", "south"), **keys: object) -> LocalFederation:
    return LocalFederation.from_config(settings(place, **keys), {site: place / site for site in sites})


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_folder_is_a_servers_and_says_that_it_is_of_one_process(place, tmp_path):
    local = federation(place, run__name="study", run__dir=str(tmp_path / "runs"))
    run = local.run()
    folder = tmp_path / "runs" / "study"
    assert run.folder == folder
    assert {file.name for file in folder.iterdir()} >= {
        "config.json", "status.json", "metrics.jsonl", "disclosure.jsonl", "checkpoint.safetensors", "final", "id",
        "resume.toml",
    }  # fmt: skip
    assert ".reserve" not in {file.name for file in folder.iterdir()}
    view = load_run(folder)
    assert (view.status["state"], view.rounds_done, view.sites) == ("completed", 3, ["north", "south"])
    assert view.upload_bytes == local.federation.upload_bytes
    assert view.unlisted("up") == 0
    assert json.loads((folder / "config.json").read_text())["in_process"] is True
    assert "one process" in local.card.not_protected[0]
    assert local.card.parties
    assert same(run.models["server"], local.models["server"])
    assert [row["round"] for row in local.metrics] == [0, 1, 2, 3]
    assert local.metrics == Run(folder).metrics
    assert local.scores == {name: local.metrics[-1][name] for name in ("loss", "accuracy")}
    assert local.metrics[1]["north/num_examples"] == 32
    text = local.report(tmp_path / "page.html").read_text()
    assert "study" in text
    assert "in_process" in text
    with pytest.raises(StateError, match="this run has ended and cannot continue"):
        local.run()
    with pytest.raises(StateError, match="it already contains a run"):
        federation(place, run__name="study", run__dir=str(tmp_path / "runs"))


def test_a_late_sites_bytes_count_once_and_a_site_that_still_trains_is_not_absent(place):
    """The west takes 2.5 steps, so in the last step it trains."""
    folders = {site: place / site for site in ("north", "south", "west")}
    flat = settings(place, cohort__buffer_size=2, run__rounds=5)
    local = LocalFederation.from_config(flat, folders, site_seconds={"west": 2.5})
    view = load_run(local.run().folder)
    assert [attempt["staleness"].get("west") for attempt in view.attempts] == [None, None, 2, None, None]
    for way, total in (("up", local.federation.upload_bytes), ("down", local.federation.download_bytes)):
        assert view.unlisted(way) == 0
        assert getattr(view, f"{way}load_bytes") == total
    assert per_site.absent_since(view) == {}


def test_metrics_are_a_frame_by_round(place):
    local = federation(place)
    local.run()
    frame = local.metrics_frame()
    assert list(frame.index) == [0, 1, 2, 3]
    assert frame["loss"].iloc[-1] < frame["loss"].iloc[0]
    assert local.epsilon == {}
    assert "epsilon" not in frame


def test_without_pandas_it_says_so(place, monkeypatch):
    local = federation(place, run__rounds=1)
    local.run()
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        local.metrics_frame()


def test_without_a_name_the_folder_ends_with_the_federation(place):
    local = federation(place, run__rounds=1)
    with pytest.raises(StateError, match="call run"):
        _ = local.metrics
    run = local.run()
    folder = run.folder
    assert not (folder / "checkpoint.safetensors").exists()
    del local
    assert run.metrics, "what run() returned keeps it"
    del run
    assert not folder.exists()


def test_save_is_what_final_is(place, tmp_path):
    local = federation(place, run__rounds=1)
    run = local.run()
    saved = local.save(tmp_path / "model")
    assert {file.name for file in saved.iterdir()} == {file.name for file in (run.folder / "final").iterdir()}
    assert {"privacy.json", "PRIVACY.md", "README.md", "server.safetensors"} <= {file.name for file in saved.iterdir()}
    with pytest.raises(StateError, match="the folder is not empty"):
        local.save(tmp_path / "model")


@pytest.mark.parametrize("choice", ["best", "last"])
def test_the_best_rounds_model_is_the_result_if_the_config_says_so(place, choice):
    """With a rate that overshoots, later rounds are worse."""
    local, seen = federation(place, evaluate__select_model=choice, train__learning_rate=4.0, run__rounds=4), []
    local.run(lambda now, round_: seen.append({name: w.clone() for name, w in now.models["server"].items()}))
    losses = [row["loss"] for row in local.metrics[1:]]
    best = losses.index(min(losses))
    assert best < 3, "the example needs a best round that is not the last"
    expected = best if choice == "best" else 3
    assert same(local.models["server"], seen[expected])
    assert same(local.results.models["server"], seen[expected])
    assert local.scores["loss"] == pytest.approx(losses[expected])


def test_patience_ends_the_run(place):
    local = federation(place, evaluate__patience=2, evaluate__min_delta=1e3, run__rounds=9)
    run = local.run()
    assert local.metrics[-1]["round"] == 3
    assert "stopped early, after round 3" in load_run(run.folder).status["reason"]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("secure", [False, True])
def test_a_run_goes_on_where_it_was_interrupted(place, tmp_path, method, secure):
    """Bit by bit: the weights, the sites' private states (scaffold) and the secrets come from the checkpoint."""
    if secure and method == "scaffold":
        pytest.skip("one of the two")
    sites = ("north", "south", "west")
    keys = {"method__name": method, "run__rounds": 4, "run__dir": str(tmp_path), "secure__enabled": secure,
            "cohort__fraction": 1.0 if secure else 0.6}  # fmt: skip
    whole = federation(place, sites, run__name="whole", **keys)
    whole.run()

    def interrupt(now: LocalFederation, round_: int) -> None:
        if round_ == 1:
            raise KeyboardInterrupt

    first = federation(place, sites, run__name="parts", **keys)
    with pytest.raises(KeyboardInterrupt):
        first.run(interrupt)
    assert first.results.state == "failed"
    with pytest.raises(StateError, match=r"resume it with run.resume = true"):
        first.run()
    second = federation(place, sites, run__name="parts", run__resume=True, **keys)
    rounds = []
    second.run(lambda now, round_: rounds.append(round_))
    assert rounds == [2, 3]
    assert same(second.models["server"], whole.models["server"])
    assert [row["loss"] for row in second.metrics] == [row["loss"] for row in whole.metrics]
    assert second.federation.participated == whole.federation.participated
    if method == "scaffold":
        for site in sites:
            ours, theirs = second.federation.private.get(site), whole.federation.private.get(site)
            assert (ours is None) == (theirs is None)
            assert ours is None or same(ours.tensors, theirs.tensors)
        assert len(list((tmp_path / "parts" / "sites").iterdir())) <= 2 * len(sites)


def test_a_run_that_goes_on_draws_from_the_same_secrets(place, tmp_path):
    """Without run.deterministic they are new in every process, and the server's draws must stay those of the sites."""
    keys = {"run__deterministic": False, "run__name": "one", "run__dir": str(tmp_path), "run__rounds": 1}
    first = federation(place, **keys)
    first.run()
    second = federation(place, **keys | {"run__rounds": 2, "run__resume": True})
    assert second.federation.secrets == first.federation.secrets
    assert second.federation.participated == first.federation.participated == {"north", "south"}
    assert federation(place, **keys | {"run__name": "two"}).federation.secrets != first.federation.secrets
    second.run()
    assert [row["round"] for row in second.metrics] == [0, 1, 2]


def test_a_wrong_config_leaves_no_folder(place, tmp_path):
    keys = {"run__name": "one", "run__dir": str(tmp_path / "runs")}
    with pytest.raises(TaskError, match="nowhere"):
        federation(place, task__evaluation=str(place / "nowhere"), **keys)
    assert not (tmp_path / "runs").exists()
    federation(place, **keys)


def test_a_resume_refuses_what_would_be_another_run(place, tmp_path):
    keys = {"run__name": "one", "run__dir": str(tmp_path)}
    federation(place, run__rounds=1, **keys).run()
    with pytest.raises(ConfigError, match="train.learning-rate: expected 0.05, found 0.1"):
        federation(place, run__resume=True, train__learning_rate=0.1, **keys)
    with pytest.raises(ConfigError, match="sites: the checkpoint is of"):
        federation(place, ("north", "west"), run__resume=True, **keys)
    with pytest.raises(StateError, match="there is no run in"):
        federation(place, run__resume=True, run__name="none", run__dir=str(tmp_path))


def test_epsilon_grows_by_round_and_is_the_reports(place):
    keys = {"dp__clip_norm": 1.0, "dp__noise_multiplier": 2.0, "run__deterministic": False, "train__batch_size": 8}
    local = federation(place, run__rounds=2, **keys)
    run = local.run()
    assert set(local.epsilon) == {"north", "south"}
    first, second = (row["epsilon"] for row in local.metrics[1:])
    assert 0 < first < second == max(local.epsilon.values()) < math.inf
    assert any(f"epsilon {second:.3g}"[:10] in words for words in run.privacy), run.privacy


def test_seeded_noise_has_no_epsilon(place):
    local = federation(place, run__rounds=1, dp__clip_norm=1.0, dp__noise_multiplier=2.0)
    local.run()
    assert set(local.epsilon.values()) == {math.inf}


def test_a_secure_run_says_how_large_its_sum_was(place):
    local = federation(place, ("north", "south", "west"), secure__enabled=True, run__rounds=1)
    run = local.run()
    view = load_run(run.folder)
    assert view.unseen[0]["unseen"] | {"deaf": {}} == view.unseen[0]["unseen"]
    assert (view.unseen[0]["unseen"]["sites"], view.unseen[0]["unseen"]["cohort"]) == (3, 3)
    assert view.attempts[0]["reports"] == {}
    assert "north/num_examples" not in local.metrics[-1]


def test_sinks_get_every_round_and_the_end(place, tmp_path, monkeypatch):
    got: list[object] = []

    class Sink:
        def write(self, told):
            got.append(told.step)

        def close(self, state):
            got.append(state)

    monkeypatch.setattr(sinks, "open_sinks", lambda about: {"fake": Sink()})
    federation(place, run__rounds=2, run__name="one", run__dir=str(tmp_path)).run()
    assert got == [0, 1, 2, "completed"]


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bar_is_for_terminals(place, capsys, shown):
    federation(place, run__rounds=1).run(progress=shown)
    assert ("rounds" in capsys.readouterr().err) == shown
    assert not sys.stderr.isatty()
    federation(place, run__rounds=1).run()
    assert capsys.readouterr().err == ""


def test_an_audit_gets_the_sites_rows(place, monkeypatch):
    asked = []
    monkeypatch.setattr(Run, "audit", lambda self, *of: asked.append(of) or object.__new__(AuditOutcome))
    local = federation(place, run__rounds=1)
    local.run()
    with pytest.raises(StateError, match="run.capture-messages: an audit attacks the captured messages"):
        local.audit()
    local = federation(place, run__rounds=1, run__capture_messages=True)
    local.run()
    local.audit("others", max_rows=40)
    assert asked[-1][:4] == (None, {site: place / site for site in ("north", "south")}, "others", 40)
    whole = LocalFederation.from_config(
        settings(place, run__rounds=1, run__capture_messages=True, task__data=str(place / "north")), 2
    )
    whole.run()
    whole.audit("others")
    assert asked[-1][:2] == (place / "north", {})
    assert whole.federation.sites == ["local-0", "local-1"]
    assert {whole.federation.num_examples[site] for site in whole.federation.sites} == {16}


def test_an_error_is_recorded(place, tmp_path, monkeypatch):
    local = federation(place, run__name="one", run__dir=str(tmp_path))
    monkeypatch.setattr(LocalRunRecorder, "run_round", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        local.run()
    assert (local.results.state, load_run(tmp_path / "one").status["reason"]) == (
        "failed", "ZeroDivisionError: division by zero",
    )  # fmt: skip


def test_a_limit_on_epsilon_is_refused_because_no_ledger_would_enforce_it(place):
    with pytest.raises(ConfigError, match=r"^dp\.epsilon, or epsilon in method\.params: .* the limit 8;"):
        federation(
            place,
            run__deterministic=False,
            dp__clip_norm=1.0,
            dp__noise_multiplier=1.0,
            dp__epsilon=8.0,
            task__max_tokens=32,
        )


def test_the_order_in_which_sites_are_named_changes_nothing(place):
    names = ("site-10", "site-2")
    two = [LocalFederation.from_config(settings(place), dict.fromkeys(order, place / "north"))
           for order in (names, names[::-1])]  # fmt: skip
    assert [one.federation.sites for one in two] == [["site-2", "site-10"]] * 2


def test_a_buffer_records_how_late_uploads_were_and_a_resume_says_what_it_lost(place, tmp_path):
    """West's upload would come in the third step, but the run is resumed; so it comes two steps after the resume."""
    keys = {"run__name": "buffer", "run__dir": str(tmp_path), "cohort__buffer_size": 2, "cohort__max_staleness": 1}
    for rounds, is_resumed in ((2, False), (5, True)):
        local = LocalFederation.from_config(
            settings(place, **keys, run__rounds=rounds, run__resume=is_resumed),
            {site: place / site for site in ("north", "south", "west")},
            site_seconds={"west": 2.5},
        )
        local.run()
    rows = [json.loads(line) for line in (tmp_path / "buffer" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "cohort" in row]
    assert [row["staleness"] for row in steps] == [{"north": 0, "south": 0}] * 5
    assert [list(row["failed"]) for row in steps] == [[], [], [], [], ["west"]]
    assert steps[4]["failed"]["west"].startswith("refused: it is")
    assert steps[4]["cohort"] == ["north", "south", "west"]
    (resumed,) = (tmp_path / "buffer" / "resumes.jsonl").read_text().splitlines()
    assert json.loads(resumed)["in-flight"] == {"west": 0}
    view = load_run(tmp_path / "buffer")
    assert view.unlisted("up") == steps[4]["unlisted"]["west"][0] > 0
    assert view.upload_bytes == local.federation.upload_bytes
    assert local.federation.clock == 5.0
