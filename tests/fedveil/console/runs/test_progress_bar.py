"""What a terminal says of the round under way, from a file that anybody may have written."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from fedveil.console.commands.runs import status
from fedveil.console.runs import per_site, progress_bar
from fedveil.console.runs.progress_bar import RunProgress, round_underway
from fedveil.console.runs.run_follower import closing_lines
from fedveil.console.runs.run_reader import load_run
from tests.fedveil.console.conftest import unscored

ROUND = {
    "round": 1, "attempt": 0, "phase": "round", "since": 1000.0, "deadline_seconds": 600.0, "quorum": 2, "asked": 4,
    "accepted": 1, "failed": 1, "waiting": ["south", "west"], "reasons": {"east": "refused: x"},
}  # fmt: skip


def said(folder, now=1041.4, **changes):
    (folder / "progress.json").write_text(json.dumps(ROUND | changes))
    return round_underway(folder, now)


def test_who_has_answered_and_who_is_waited_for(tmp_path):
    assert said(tmp_path) == "2 of 4 have answered, waiting for south, west (41 s of 600)"
    assert said(tmp_path, asked=9, waiting=list("abcdefg")) == (
        "2 of 9 have answered, waiting for a, b, c and 4 more (41 s of 600)"
    )
    assert said(tmp_path, accepted=3, waiting=[]) == "all 4 have answered; the server aggregates and evaluates"
    shares = "all 4 have answered; the sites reveal shares of the masks, then the server aggregates and evaluates"
    assert said(tmp_path, accepted=3, waiting=[], unseen=True) == shares
    assert said(tmp_path, phase="waiting") == "waiting for sites"
    assert said(tmp_path, phase="done") == ""
    assert said(tmp_path, now=900.0) == "2 of 4 have answered, waiting for south, west (0 s of 600)"


WAIT = {"phase": "waiting", "until": 1300.0, "there": 2, "quorum": 3, "refused": {}}


def test_a_wait_has_its_seconds_and_names_who_refused(tmp_path):
    assert said(tmp_path, **WAIT) == "waiting for sites: 2 of 3 take part (259 s left)"
    assert said(tmp_path, **WAIT | {"refused": {"west": "its policy"}}) == (
        "waiting for sites: 2 of 3 take part (259 s left); not waited for: west, refused by its policy; fix the "
        "policy and submit again, or resume"
    )
    progress_text = said(tmp_path, **WAIT | {"refused": dict.fromkeys("abcde", "its ledger")})
    assert progress_text.endswith("c, refused by its ledger and 2 more; see its log")
    for wrong in ({"refused": 3}, {"refused": [1]}, {"until": "x"}, {"there": None}):
        assert said(tmp_path, **WAIT | wrong) == ""


def test_eighty_columns_have_the_whole_cause_of_a_round_without_a_sum(make_run):
    run, out = make_run(state="running"), io.StringIO()
    why = "NO SUM, discarded: expected at least 3 uploads, found 2, and this is the end of the cause"
    row = {"round": 0, "cohort": [], "accepted": [], "failed": {"west": why}, "seconds": 1.0, "upload_bytes": 1}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    console = Console(file=out, force_terminal=True, width=80, highlight=False)
    with RunProgress(console, run, "run", 5) as bar:
        bar.tick({"state": "running", "round": 0})
    text = " ".join(out.getvalue().split())
    assert why in text
    assert "no site was asked to train, too few" in text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", json.dumps(ROUND | {"since": "x"}), json.dumps(ROUND | {"waiting": 3}),
     json.dumps(ROUND | {"asked": [1]}), json.dumps(ROUND | {"since": float("inf")}), '{"asked": 1e999}', "[" * 60_000,
     json.dumps(ROUND | {"waiting": ["x" * 70_000]}), "\xff"],
)  # fmt: skip
def test_a_file_that_is_none_says_nothing_or_what_it_can(tmp_path, text):
    (tmp_path / "progress.json").write_bytes(text.encode("latin-1"))
    assert round_underway(tmp_path, 1041.0) in ("", "2 of 4 have answered, waiting for south, west (0 s of 600)")
    assert round_underway(tmp_path / "nowhere") == ""


def test_names_are_shown_as_text(tmp_path):
    progress_text = said(tmp_path, waiting=["\x1b[2J" + "y" * 200, "[bold]b[/]"])
    assert "\x1b" not in progress_text
    assert "y" * 81 not in progress_text


def shown(make_run, terminal, monkeypatch, steps=lambda: "", **extra):
    run, out, now = make_run(state="running"), io.StringIO(), [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_bar.time, "time", lambda: 1041.0 + now[0])
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False)
    about = {"state": "running", "round": 1, **extra}
    with RunProgress(console, run, "run", 5, steps) as bar:
        bar.tick(about)
        (run / "progress.json").write_text(json.dumps(ROUND))
        for seconds in (1.0, 59.0, 62.0, 63.0, 130.0):
            now[0] = seconds
            bar.tick(about)
    return out.getvalue()


def test_without_a_terminal_a_long_round_has_a_line_a_minute(make_run, monkeypatch):
    lines = [line for line in shown(make_run, False, monkeypatch).splitlines() if "waiting for" in line]
    assert lines == [
        "run: round 2/5  2 of 4 have answered, waiting for south, west (103 s of 600)",
        "run: round 2/5  2 of 4 have answered, waiting for south, west (171 s of 600)",
    ]


def test_on_a_terminal_the_bar_has_it_with_the_steps_of_this_machine_s_sites(make_run, monkeypatch):
    output = shown(make_run, True, monkeypatch, lambda: "south step 3/20")
    assert "2 of 4 have answered, waiting for south, west (171 s of 600)" in output
    assert "south step 3/20" in output


def test_a_sink_that_was_ended_is_told_once(make_run, monkeypatch):
    output = shown(make_run, False, monkeypatch, sinks={"mlflow": "OSError: \x1b[2J"})
    assert output.count("run: the sink mlflow stopped: OSError: \\x1b[2J; the run continues") == 1


def test_status_has_it_too(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar.time, "time", lambda: 1041.0)
    run = make_run(state="running")
    (run / "progress.json").write_text(json.dumps(ROUND))
    assert "running" in (line := status.runs_table(tmp_path, now=1e12)[0][0]) or "silent" in line
    line = status.runs_table(tmp_path, now=run.stat().st_mtime + 5)[0][0]
    assert "2 of 4 have answered, waiting for south, west (41 s of 600)" in line


def test_an_attempt_without_a_site_counts_none(make_run, monkeypatch):
    run = make_run(state="running")
    row = {"round": 0, "accepted": [], "cohort": [], "failed": {}, "seconds": 300.0, "upload_bytes": 0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200), run, "run", 5) as bar:
        bar.tick({"state": "running"})
    assert "no site was asked to train, too few" in out.getvalue()
    assert "0 of 0" not in out.getvalue()


def test_a_round_that_the_server_does_not_score_has_what_its_sites_told(make_run):
    run, words = unscored(make_run()), "loss at the sites before training: "
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200), run, "run", 5) as bar:
        bar.tick({"state": "running"})
    losses = re.findall(words + r"(\d\.\d{4})", out.getvalue())
    assert [float(loss) for loss in losses] == pytest.approx(
        [loss for _, loss in per_site.site_losses(load_run(run))], abs=1e-4
    )
    assert len(losses) == 3
    line = next(line for line in closing_lines(run) if line.startswith("rounds: "))
    assert line.endswith(f"none from the server; loss at the sites, on their training examples: {losses[-1]}")
