import json

import pytest

from fedveil.console.main import main
from fedveil.console.report import run_page as report
from fedveil.console.runs import folder as runs
from fedveil.console.runs import summary
from fedveil.errors import StateError

# By hand: 2 layers, fp32, A 8 x 192 and B 576 x 8, 613 bytes around them. FedAvg: 11 uploads of both factors.
BOTH = 2 * (4 * 8 * 192 + 4 * 576 * 8) + 613
ONLY_A = 2 * 4 * 8 * 192 + 613
ONLY_B = 2 * 4 * 576 * 8 + 613


def test_totals_are_the_bytes_of_the_ledger(run_folders):
    fedavg, fedrand = map(runs.load, run_folders)
    assert fedavg.upload_bytes == 11 * BOTH
    assert fedrand.upload_bytes == 5 * ONLY_A + 6 * ONLY_B
    assert fedavg.download_bytes == fedrand.download_bytes == 12 * BOTH
    assert fedavg.uploaded[-1] == (3, 11 * BOTH)


def test_page_has_exact_numbers_and_loads_nothing(run_folders):
    page = report.html([runs.load(folder) for folder in run_folders])
    for number in (11 * BOTH, 12 * BOTH, 5 * ONLY_A + 6 * ONLY_B, 5 * 613, 6 * 613):
        assert f">{number:,}<" in page
    assert "21.25" in page
    assert page.count("<svg") == 3
    assert "ValueError: &lt;no rows&gt;" in page
    assert "<no rows>" not in page
    for outside in ("src=", "<link", "<script", "@import", "url(http"):
        assert outside not in page


def test_page_says_in_words_what_was_learned(run_folders):
    page = report.html([runs.load(run_folders[1])])
    assert "site-0 sent the server A (2 tensors) twice and B (2 tensors) once, never all of it in one upload." in page
    assert "The server learns: one trained factor" in page


@pytest.mark.parametrize("state", ["failed", "running"])
def test_unfinished_run_has_a_page_with_its_reason(make_run, state):
    page = report.html([runs.load(make_run(rounds=2, state=state))])
    assert "2 of 5 rounds done" in page
    assert "found &lt;0&gt;" in page


def test_run_that_failed_before_its_first_round_has_a_page(tmp_path):
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "failed", "round": -1, "rounds": 5, "reason": "no data"})
    )
    assert "no data" in report.html([runs.load(tmp_path)])


def test_half_written_last_line_is_left_out(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "coh')
    assert runs.load(folder).rounds_done == 3


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
        runs.load(tmp_path)


def test_command_writes_where_it_says(run_folders, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", *map(str, run_folders), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out.strip() == str(out)


def test_summary_has_the_schema_of_all_results(run_folders, tmp_path):
    found = [runs.load(folder) for folder in run_folders]
    summary.write(tmp_path / "summary.json", "demo", found)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert set(content) >= {"preset", "quick", "commit", "environment", "rows", "paper", "differences"}
    fedavg, fedrand = content["rows"]
    assert fedrand["metrics"]["bleu"]["mean"] == 21.25
    assert fedavg["upload_bytes"] == 11 * BOTH
    assert summary.upload_ratio(found[1], found) == fedrand["upload_bytes"] / fedavg["upload_bytes"]
