"""A bad setting is one clear line and exit code 2, before anything is started."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event, Timer

import pytest

from fedveil import config
from fedveil.attacks.audit.compare_runs import RunAudit
from fedveil.attacks.audit.findings import AuditReport
from fedveil.cards import card, markdown
from fedveil.console.commands.getting_started import demo
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.main import main
from fedveil.console.terminal import make_console
from fedveil.console.web.report import demo_files, demo_report
from fedveil.errors import StateError
from fedveil.federation import aggregation_rules
from fedveil.guard import flower
from tests.fedveil.console.web.report.made import audited, found


@pytest.mark.parametrize(
    "setting,line",
    [
        ("method.params='rho = 1.5'", "error: method.params: rho: expected a probability from 0 to 1, found 1.5\n"),
        (
            "method.params='roh = 0.5'",
            "error: method.params: roh: unknown field of fedrand; did you mean rho?",
        ),
        ("trian.epochs=3", "error: trian: unknown key; did you mean train? expected a section of"),
        ("train.epoch=3", "error: train.epoch: unknown key; did you mean train.epochs? expected one of"),
        ("task.model=/no/such", 'error: task.model: there is no folder with a model at "/no/such"'),
        ("task.data=/no/such", 'there is no folder or file of rows at "/no/such"'),
        ("task.evaluation=/no/such", 'there is no folder or file of rows at "/no/such"'),
        ("task.source-column=question", 'error: task.data: expected column "question" in'),
        ("task.max-tokens=256", "error: task.max-tokens: expected at most 192, the context of tiny, found 256; lower"),
        ("evaluate.metric=charm", "error: evaluate.metric: expected one of"),
        ("run.name=first", "error: --set run.name: expected a key that the demo does not set itself; a run is named"),
        ("run.rounds=9", "error: --set run.rounds: expected a key that the demo does not set itself; use --rounds"),
        ("method.name=fedavg", "itself; name methods with --methods"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_started(setting, line, capsys, monkeypatch, tmp_path):
    def start(*args, **kwargs):
        raise AssertionError("started")

    monkeypatch.setattr(demo, "LocalDeployment", start)
    assert main(["demo", "--methods", "fedrand", "--out", str(tmp_path), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments,line",
    [
        (["--methods", "fedrand+magic"], "error: --methods: found 'fedrand+magic'; expected names from"),
        (["--methods", "fedavg,fedrnd"], "found 'fedavg,fedrnd'; did you mean fedrand?"),
        (["--methods", "fedrand+secur"], "found 'fedrand+secur'; did you mean secure?"),
        (["--methods", "fedrand,fedrand"], "found 'fedrand,fedrand'; expected"),
        (["--sites", "2"], "error: --sites: expected at least 3 for a method with +secure, found 2"),
    ],
)
def test_bad_arms_are_refused_before_anything_is_started(arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(demo, "LocalDeployment", None)
    assert main(["demo", *arguments]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file/x", "/proc/x"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_started(out, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "LocalDeployment", None)
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out: expected a writable folder, found {tmp_path / out}: ")
    assert error.endswith("; name another\n")


def test_runs_of_an_earlier_demo_are_not_replaced_without_a_word(make_run, capsys, monkeypatch, tmp_path):
    def start(*args, **kwargs):
        raise StateError("it would start here")

    monkeypatch.setattr(demo, "LocalDeployment", start)
    make_run(method="fedavg")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert ": fedavg\n" in capsys.readouterr().out
    assert (tmp_path / "fedavg" / "status.json").is_file()


@pytest.mark.parametrize("line", flower.LINES, ids=lambda line: line.release)
def test_it_says_what_its_sites_speak(line, capsys, monkeypatch, tmp_path):
    def start(*args, **kwargs):
        raise StateError("it would start here")

    monkeypatch.setattr(demo, "LocalDeployment", start)
    monkeypatch.setattr(flower, "installed_release", lambda: line)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert f"SuperNodes: {line.speaks}, TLS, node authentication\n" in capsys.readouterr().out


def test_a_run_that_failed_before_its_first_round_leaves_no_table_and_no_report(make_run, tmp_path, capsys):
    make_run(method="fedavg", rounds=0, state="failed")
    demo._results(make_console(), tmp_path, [demo.DemoRun("fedavg")], [])
    assert capsys.readouterr().out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["fedavg"]


@pytest.mark.parametrize("said,traced", [({"reason": "task.data: expected rows"}, False), ({}, True)])
def test_a_failed_run_is_explained_once(said, traced, capsys, tmp_path):
    class Federation:
        sites = ()

        def status(self, run):
            return said

        def server_log(self, run):
            return "Traceback (most recent call last)"

    demo._explain(Federation(), 1, "fedavg", demo.RunOutcome(False, "task.data: expected rows", 1.0), tmp_path)
    error = capsys.readouterr().err
    assert error.startswith("error: fedavg failed: task.data: expected rows\n")
    assert f"All logs are in {tmp_path}/logs" in error
    assert ("Traceback" in error) is traced


def test_an_arm_is_a_method_and_perhaps_a_defence():
    plain, summed = demo._arms("fedrand, fedrand+secure", 3)
    assert plain.settings({}) == {"method.name": "fedrand"}
    assert summed.settings({"train.epochs": 2}) == {"method.name": "fedrand", "secure.enabled": True, "train.epochs": 2}
    assert summed.settings({"secure.enabled": False})["secure.enabled"] is False
    assert [plain.name, summed.name] == ["fedrand", "fedrand-secure"]
    for arm in (plain, summed):
        assert config.parse({**arm.settings(demo.SETTINGS), "run.name": arm.name}).run.capture_messages


@pytest.mark.long
def test_a_run_that_cannot_be_attacked_is_shown_all_the_same(make_run, tmp_path, capsys):
    failed: Future = Future()
    failed.set_exception(StateError("there is no tap"))
    make_run(method="fedavg")
    make_run(method="fedrand")
    demo._results(make_console(), tmp_path, [demo.DemoRun("fedavg"), demo.DemoRun("fedrand")], [failed])
    stdout = capsys.readouterr().out
    assert "fedavg: not attacked: there is no tap" in stdout
    assert "upload / FedAvg" in stdout
    assert (tmp_path / "report.html").is_file()


@pytest.mark.long
def test_the_card_of_a_run_is_made_again_after_its_attack(make_run, tmp_path):
    run = audited(make_run(method="fedrand"), found("site-1", 0.8, "above"))
    (run / "final").mkdir()
    done: Future = Future()
    done.set_result(demo_report.DemoMeasurements(None, RunAudit(AuditReport.read(run), {})))
    demo._results(make_console(), tmp_path, [demo.DemoRun("fedrand")], [done])
    assert [attack.name for attack in card.read_card(run / "final").audited.attacks] == ["alignment"]
    assert markdown.NOT_MEASURED not in (run / "final" / "README.md").read_text()


def test_it_says_why_not_every_site_is_in_a_round():
    assert "samples 3 of the 4 sites (cohort.fraction = 0.75)" in demo._drawn(4, 0.75)
    assert "--set cohort.fraction=1 uses all" in demo._drawn(4, 0.75)
    assert "samples 3 of the 10 sites" in demo._drawn(10, 0.3)  # and 0.3 * 10 is a little more than 3
    assert demo._drawn(4, 1) == ""
    assert demo._drawn(2, 0.75) == ""  # both
    for sites in range(1, 40):
        sampling_note = demo._drawn(sites, 0.75)
        assert (f"samples {aggregation_rules.cohort_size(0.75, sites)} of" in sampling_note) is (
            aggregation_rules.cohort_size(0.75, sites) < sites
        )


def test_an_interrupted_demo_says_what_it_waits_for_and_begins_no_other_attack(capsys):
    """The thread is at the first attack; the second has not begun."""
    at, go, done = Event(), Event(), []

    def attack(name):
        at.set()
        go.wait(10)
        done.append(name)

    begun = []

    def interrupted() -> None:
        with demo._aside(begun) as aside:
            begun.extend(aside.submit(attack, name) for name in ("first", "second"))
            at.wait(10)
            Timer(0.2, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["first"]
    assert "waiting about a minute for the current attack to finish" in capsys.readouterr().out
    with demo._aside([]) as aside:
        assert aside.submit(int, 7).result() == 7


def test_what_an_earlier_demo_left_goes_when_its_runs_are_replaced_and_what_is_anothers_stays(tmp_path, monkeypatch):
    logs = tmp_path / "logs"
    logs.mkdir()
    own = ["superlink.log", "site-7.log", "register-site-7.log"]
    for name in (*own, "mine.log", "site-x.log", "notes.txt"):
        (logs / name).write_text("earlier")
    for name in ("report.html", "summary.json", "picture.svg", "picture.json", "mine.html"):
        (tmp_path / name).write_text("earlier")

    class Broken(FakeFederation):
        def run(self, *args):
            assert not (tmp_path / "report.html").exists()  # before a run takes the earlier one's place
            raise StateError("no run today")

    monkeypatch.setattr(demo, "LocalDeployment", Broken)
    assert main(["demo", "--methods", "fedrand", "--out", str(tmp_path)]) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["logs", "mine.html"]
    assert sorted(file.name for file in logs.iterdir()) == ["mine.log", "notes.txt", "site-x.log"]


def test_a_demo_that_cannot_start_takes_nothing_away_and_a_link_is_not_followed(tmp_path, monkeypatch):
    class Never(FakeFederation):
        def __enter__(self):
            raise StateError("no port")

    (tmp_path / "report.html").write_text("earlier")
    monkeypatch.setattr(demo, "LocalDeployment", Never)
    assert main(["demo", "--methods", "fedrand", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "report.html").read_text() == "earlier"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "superlink.log").touch()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    demo_files.remove_demo_files(tmp_path)
    assert (tmp_path / "elsewhere" / "superlink.log").is_file()


def test_the_names_that_go_are_those_that_a_federation_gives_its_logs(tmp_path):
    processes = ProcessGroup(tmp_path)
    for name in ("superlink", "site-0", "site-12", "register-site-3"):
        assert demo_files._LOG.fullmatch(processes.log(name).name)


class FakeFederation:
    """A federation of which nothing starts."""

    def __init__(self, sites, guarded):
        assert guarded
        self.sites = {site.name: site for site in sites}

    def __enter__(self):
        return self

    def __exit__(self, *of):
        return None
