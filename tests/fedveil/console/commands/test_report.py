import json

import pytest

from fedveil.console.commands.runs.status import runs_table as listed
from fedveil.console.main import main
from fedveil.console.runs import per_site, summary
from fedveil.console.runs import run_reader as runs
from fedveil.console.runs.run_follower import closing_lines
from fedveil.console.web.report import run_page as report
from fedveil.errors import StateError
from tests.fedveil.console.conftest import write_run

# By hand: 2 layers, fp32, A 8 x 192 and B 576 x 8, 613 bytes around them. FedAvg: 11 uploads of both factors.
BOTH = 2 * (4 * 8 * 192 + 4 * 576 * 8) + 613
ONLY_A = 2 * 4 * 8 * 192 + 613
ONLY_B = 2 * 4 * 576 * 8 + 613


def test_totals_are_the_bytes_of_the_ledger(run_folders):
    fedavg, fedrand = map(runs.load_run, run_folders)
    assert fedavg.upload_bytes == 11 * BOTH
    assert fedrand.upload_bytes == 5 * ONLY_A + 6 * ONLY_B
    assert fedavg.download_bytes == fedrand.download_bytes == 12 * BOTH
    assert fedavg.uploaded[-1] == (3, 11 * BOTH)


def test_page_has_exact_numbers_and_loads_nothing(run_folders):
    page = report.run_page_html([runs.load_run(folder) for folder in run_folders])
    for number in (11 * BOTH, 12 * BOTH, 5 * ONLY_A + 6 * ONLY_B, 5 * 613, 6 * 613):
        assert f">{number:,}<" in page
    assert "21.25" in page
    assert page.count("<svg") == 3
    assert "ValueError: &lt;no rows&gt;" in page
    assert "<no rows>" not in page
    for outside in ("src=", "<link", "<script", "@import", "url(http"):
        assert outside not in page


def test_page_says_in_words_what_was_learned(run_folders):
    page = report.run_page_html([runs.load_run(run_folders[1])])
    assert "site-0 sent the server A (2 tensors) twice and B (2 tensors) once, never all in one upload." in page
    assert "The server learns: one trained factor" in page


@pytest.mark.parametrize("state", ["failed", "running"])
def test_unfinished_run_has_a_page_with_its_reason(make_run, state):
    page = report.run_page_html([runs.load_run(make_run(rounds=2, state=state))])
    assert "2 of 5 rounds done" in page
    assert "found &lt;0&gt;" in page


def test_run_that_failed_before_its_first_round_has_a_page(tmp_path):
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "failed", "round": -1, "rounds": 5, "reason": "no data"})
    )
    assert "no data" in report.run_page_html([runs.load_run(tmp_path)])


def test_half_written_last_line_is_left_out(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "coh')
    assert runs.load_run(folder).rounds_done == 3


@pytest.mark.parametrize(
    "file, text, expected",
    [
        ("status.json", "{", "status.json: expected JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
        ("metrics.jsonl", "nonsense\n", "metrics.jsonl, line 1: expected JSON"),
        ("disclosure.jsonl", '{"round": 0}\n', "attempt: expected a count, found none"),
        ("disclosure.jsonl", '{"round": 0, "fields": []}\n', "disclosure.jsonl, line 1: expected form 2"),
    ],
)
def test_broken_file_is_one_clear_error(make_run, capsys, file, text, expected):
    folder = make_run()
    (folder / file).write_text(text)
    assert main(["report", str(folder)]) == 2
    assert expected in capsys.readouterr().err


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"status\.json or config\.json"):
        runs.load_run(tmp_path)


def test_command_writes_where_it_says(run_folders, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", *map(str, run_folders), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out.strip() == str(out)


def test_summary_has_the_schema_of_all_results(run_folders, tmp_path):
    loaded_runs = [runs.load_run(folder) for folder in run_folders]
    summary.write_summary(tmp_path / "summary.json", "demo", loaded_runs)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert set(content) >= {"preset", "form", "commit", "environment", "rows", "paper", "differences"}
    fedavg, fedrand = content["rows"]
    assert fedrand["metrics"]["bleu"]["mean"] == 21.25
    assert fedavg["upload_bytes"] == 11 * BOTH
    assert summary.upload_ratio(loaded_runs[1], loaded_runs) == fedrand["upload_bytes"] / fedavg["upload_bytes"]


def _with(folder, name, change):
    """The file of JSON lines with every line as `change` makes it."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    (folder / name).write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


@pytest.mark.long
def test_scores_of_held_out_rows_stand_beside_their_counts(make_run):
    folder = make_run()

    def scored(line):
        for site, site_report in line.get("reports", {}).items():
            held_out_reports = {
                "site-0": {"loss_held_out": 1.5, "rows_held_out": 300.0},
                "site-1": {"held_out_refused": 1.0},
            }
            site_report |= held_out_reports.get(site, {"loss_held_out": 3.0, "rows_held_out": 100.0})
        return line

    assert "held-out examples" not in report.run_page_html([runs.load_run(folder)])
    _with(folder, "metrics.jsonl", scored)
    run = runs.load_run(folder)
    names = set(run.attempts[-1]["reports"])
    others = len(names - {"site-0", "site-1"})
    mean, rows = (1.5 * 300 + 3.0 * 100 * others) / (300 + 100 * others), 300 + 100 * others
    assert per_site.mean_scored(run.attempts[-1]["reports"]) == (pytest.approx(mean), rows, 1 + others)
    page = report.run_page_html([run])
    assert f"in round 3: {mean:.4f} ({rows} examples of {1 + others} sites)" in page
    assert "its policy permits no scores of held-out examples (max-scores)" in page
    assert per_site.failure_note(run.attempts[-1]["reports"]).startswith(
        f"  held out: loss {mean:.4f}, {rows} examples"
    )
    assert per_site.failure_note({"a": {"held_out_refused": 2.0}}) == ""
    assert per_site.held_out_scores(0, {"held_out_refused": 77.0}).why == "of another version"


@pytest.mark.long
def test_page_and_last_lines_say_that_no_round_changed_the_model(make_run):
    folder, words = make_run(), "so the uploads changed nothing"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for digests, has_warning in (
        (("a", "b", "c"), False),
        (("a", "a", "a"), True),
        (("a", "a", ""), True),
        (("a", "", ""), False),
    ):
        counted = (row | {"weights": d} for row, d in zip(rows[1:], digests, strict=True))
        text = "".join(json.dumps(row) + "\n" for row in (rows[0], *counted))
        (folder / "metrics.jsonl").write_text(text)
        assert (words in report.run_page_html([runs.load_run(folder)])) == has_warning
        assert any(words in line for line in closing_lines(folder)) == has_warning


def test_the_end_of_a_run_with_noise_says_its_epsilon_and_what_fedavg_ran_with(make_run):
    folder = make_run(method="fedavg")
    assert not any(line.startswith("privacy: ") for line in closing_lines(folder))
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= {
        "dp.clip-norm": 1.0, "dp.noise-multiplier": 40.0, "dp.epsilon": 8.0, "run.deterministic": False,
        "train.batch-size": 1,
    }  # fmt: skip
    content["method"]["fields"] = {}
    (folder / "config.json").write_text(json.dumps(content))
    (line,) = [line for line in closing_lines(folder) if line.startswith("privacy: ")]
    assert "at delta 1e-05 (replace-one) against the server, other sites and all of them together; unit: one" in line
    page = report.run_page_html([runs.load_run(folder)])
    assert "fedavg + noise" in page
    assert "No site&#x27;s ledger lets this run cost an example more than epsilon 8" in page


def test_page_and_lists_say_which_round_was_kept_and_why_the_run_stopped(make_run):
    folder = make_run()
    loss = runs.load_run(folder).curve("loss")
    status = json.loads((folder / "status.json").read_text())
    status |= {"reason": "stopped early, after round <3>", "final": {"round": 0, "scores": {"server": {"bleu": 7.0}}}}
    status["best"] = {"round": 0, "metric": "<loss>", "value": 0.5, "kept": True}
    (folder / "status.json").write_text(json.dumps(status))
    run = runs.load_run(folder)
    assert run.final["loss"] == dict(loss)[1]
    assert run.final["bleu"] == 7.0
    page = report.run_page_html([run])
    assert (
        "the model is the one from round 1, with the best &lt;loss&gt; 0.5; stopped early, after round &lt;3&gt;"
        in page
    )
    status["best"]["kept"] = False
    (folder / "status.json").write_text(json.dumps(status))
    assert "the best <loss> 0.5 was after round 1; the model is from the last round" in runs.load_run(folder).of_round
    del status["final"]
    status["best"]["kept"] = True
    (folder / "status.json").write_text(json.dumps(status))
    assert "the model is so far the one from round 1" in runs.load_run(folder).of_round
    assert listed(folder.parent)[0][0].endswith("stopped early, after round <3>")


def _configured(folder, **keys):
    """The run with these keys of its config, "_" for each "." and "-"."""
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= keys
    (folder / "config.json").write_text(json.dumps(content))
    return runs.load_run(folder)


def test_only_plain_fedavg_is_the_baseline_of_bytes(tmp_path):
    masked_run = _configured(write_run(tmp_path / "1", "fedavg"), **{"secure.enabled": True, "secure.min-sites": 3})
    noisy = _configured(
        write_run(tmp_path / "2", "fedavg"), **{"dp.noise-multiplier": 1.0, "dp.epsilon": 8.0, "dp.delta": 1e-5}
    )
    plain, fedrand = (runs.load_run(write_run(tmp_path / "3", name)) for name in ("fedavg", "fedrand"))
    every = [masked_run, noisy, plain, fedrand]
    assert [summary.baseline_of(run, every) for run in every] == [plain] * 4
    assert summary.upload_ratio(fedrand, [masked_run, noisy, fedrand]) is None
    assert [summary.protection(run) for run in every] == [
        "sum of at least 3 sites", "epsilon 8 at delta 1e-05", "none", "none",
    ]  # fmt: skip
    both = _configured(masked_run.folder, **{"dp.noise-multiplier": 1.0})
    assert summary.protection(both) == "sum of at least 3 sites and noise 1.0, no limit on epsilon"
    page = report.run_page_html([plain, fedrand])
    assert "Here, that is fedavg." in page
    assert '<th scope="col">protection</th>' in page


def test_runs_that_were_not_scored_alike_are_said_to_be(tmp_path):
    one, other = (runs.load_run(write_run(tmp_path, name)) for name in ("fedavg", "fedrand"))
    assert summary.different_scoring([one, other]) == ""
    other = _configured(other.folder, **{"task.evaluation": "other<b>", "evaluate.eval-examples": 8})
    words = summary.different_scoring([one, other])
    assert "task.evaluation (fedavg: unset, fedrand: other<b>)" in words
    assert "evaluate.eval-examples (fedavg: unset, fedrand: 8)" in words
    page = report.run_page_html([one, other])
    assert '<p class="alert">Scored differently' in page
    assert "other<b>" not in page
