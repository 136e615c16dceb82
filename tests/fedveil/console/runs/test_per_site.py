"""A run site by site: every byte of it, and what became of each site in the last attempt."""

from __future__ import annotations

import json

import pytest

from fedveil.console.main import main
from fedveil.console.runs import per_site
from fedveil.console.runs.run_follower import closing_lines
from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.report import disclosure_section, run_page
from tests.fedveil.console.conftest import REFUSED_BYTES, SITES, masked
from tests.fedveil.console.web.conftest import opened

UNDER_WAY = {"round": 2, "attempt": 0, "phase": "round", "waiting": ["site-3"]} | {
    "reasons": {"site-2": "refused: <x>", "site-9": "PolicyError: it gave no keys"}
}


def under_way(folder, state, **changes):
    """The third round as if the server were still at it, or had ended in it."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))
    (folder / "status.json").write_text(json.dumps({"state": state, "round": 2, "rounds": 5, "reason": "x"}))
    (folder / "progress.json").write_text(json.dumps(UNDER_WAY | changes))
    return load_run(folder)


@pytest.mark.parametrize(
    "state,silent,now,so_far",
    [
        ("running", "no answer yet", " (in progress)", " so far"),
        ("failed", "no answer before the server stopped", "", ""),
    ],
)
def test_a_round_that_no_line_has_yet_is_known_from_its_messages(make_run, state, silent, now, so_far):
    run = under_way(make_run(), state)
    last = per_site.last_attempt(run)
    assert last.words == f"Round 3, attempt 1{now}: 2 of 5 sites accepted{so_far}"
    assert last.sites == [
        ("site-0", "accepted", ""),
        ("site-1", "accepted", ""),
        ("site-2", "refused by the server", "refused: <x>"),
        ("site-3", silent, ""),
        ("site-9", "refused by the site's policy", "PolicyError: it gave no keys"),
    ]
    page = run_page.run_page_html([run])
    assert f">{silent}</span>" in page
    assert "refused: &lt;x&gt;" in page


@pytest.mark.long
@pytest.mark.parametrize("change", [{"round": "x"}, {"reasons": [1]}, {"attempt": None}, {"waiting": 3}])
def test_a_progress_that_the_server_has_not_written_ends_no_page(make_run, change):
    run = under_way(make_run(), "running", **change)
    per_site.last_attempt(run)
    assert opened(run.folder.parent).get("/").status_code < 500
    assert "Sites" in run_page.run_page_html([run])


def test_the_last_attempt_of_a_failed_run_is_told_and_of_a_completed_one_is_not(make_run):
    run = load_run(make_run(state="failed"))
    states = [state for _, state, _ in per_site.last_attempt(run).sites]
    assert states == ["refused by the server", "refused by the site's policy", "silent", "failed"]
    assert run.uploaded[-1] == (3, run.upload_bytes)  # of a fourth round nothing is done
    assert per_site.last_attempt(load_run(make_run(method="fedavg"))) is None


def test_an_attempt_that_is_over_while_the_run_goes_on_is_called_so(make_run):
    over = per_site.last_attempt(load_run(make_run(state="running")))
    assert over.words == "Round 3, attempt 1 (done; the run continues): 4 of 4 sites accepted"
    asked = per_site.last_attempt(under_way(make_run(method="fedavg"), "running", round=4, reasons={}))
    assert asked.words == "Round 5, attempt 1 (in progress): no site was contacted so far"


def test_a_refused_upload_counts_in_the_summary_the_ledger_and_at_its_site(make_run):
    run = load_run(make_run(state="failed"))
    assert run.unlisted("up") == REFUSED_BYTES
    assert (run.upload_bytes, run.download_bytes) == tuple(
        sum(getattr(site, way) for site in per_site.records_by_site(run)) for way in ("up", "down")
    )
    (sent,) = [sent for site, sent, *_ in disclosure_section.exchange_section(run) if site == "site-0"]
    assert sent.endswith(", refused uploads once")
    page = run_page.run_page_html([run])
    assert f">{run.upload_bytes:,}<" in page
    assert "refused uploads</td>" in page


@pytest.mark.long
def test_the_report_says_which_site_did_not_sign(make_run):
    folder = make_run(state="failed")
    records = {site.name: site.unsigned for site in per_site.records_by_site(load_run(folder))}
    assert records == {"site-0": 0, "site-1": 0, "site-2": 3, "site-3": 0}
    note = disclosure_section.UNSIGNED_NOTE.replace("'", "&#x27;")
    page = run_page.run_page_html([load_run(folder)])
    assert ">unsigned</th>" in page
    assert note in page
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"unsigned": []} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert note not in run_page.run_page_html([load_run(folder)])


def test_bytes_that_a_record_does_not_have_by_site_are_named(make_run):
    page = run_page.run_page_html([load_run(masked(make_run()))])
    assert "keys and shares of secure aggregation</td>" in page
    assert "does not list them by site: keys and shares of secure aggregation, " in page


def test_an_attempt_under_way_counts_before_it_has_a_line(make_run):
    folder = make_run()
    whole = load_run(folder).upload_bytes
    assert under_way(folder, "running").upload_bytes == whole


@pytest.mark.long
def test_what_the_server_learns_of_a_secure_run_is_the_sum(make_run):
    clear, secure = (
        run_page.run_page_html([load_run(folder)]) for folder in (make_run(method="fedavg"), masked(make_run()))
    )
    assert "The server learns: each client&#x27;s trained weights, in full." in clear
    assert (
        "The server learns: each round&#x27;s sum over the sites. A server that followed the protocol could not see"
        in secure
    )
    assert "Without secure aggregation it would be: one trained factor of each client" in secure
    assert f"{SITES[0]} sent the server a masked vector with keys" in secure
    ((_, sent, *_), *_) = disclosure_section.exchange_section(load_run(masked(make_run(method="fedsp"))))
    assert sent.startswith("a masked vector with keys ")


@pytest.mark.long
def test_a_run_that_was_not_attacked_says_so(make_run):
    folder = make_run()
    assert "Not attacked, so what an attacker could learn is unknown" in (
        page := run_page.run_page_html([load_run(folder)])
    )
    assert "this needs a run with run.capture-messages = true" in page
    content = json.loads((folder / "config.json").read_text())
    content["config"]["run.capture-messages"] = True
    (folder / "config.json").write_text(json.dumps(content))
    assert f"<code>fedveil audit {folder}</code>" in run_page.run_page_html([load_run(folder)])


def _without(folder, missing):
    """The run with sites lost in rounds: {round, 0-based: (numbers of those that failed, of those not even asked)}."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        failed, unasked = ([f"site-{n}" for n in numbers] for numbers in missing.get(row["round"], ("", "")))
        row["accepted"] = [site for site in row.get("accepted", []) if site not in (*failed, *unasked)]
        row["cohort"] = [site for site in row.get("cohort", []) if site not in unasked]
        row["failed"] = row.get("failed", {}) | dict.fromkeys(failed, "no reply within 9 s")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(folder)


@pytest.mark.parametrize(
    "missing,absent,words",
    [
        ({}, {}, ""),  # site-1 failed in round 2 and came back
        ({1: ("3", ""), 2: ("", "3")}, {"site-3": 2}, "3 of 4 sites since round 2"),
        ({2: ("03", "")}, {"site-0": 3, "site-3": 3}, "2 of 4 sites since round 3"),
        ({1: ("0", ""), 2: ("01", "")}, {"site-0": 2, "site-1": 2}, "2 of 4 sites since round 2"),
        ({0: ("3", ""), 1: ("3", "")}, {}, ""),
    ],
)
def test_sites_that_the_last_rounds_lack_are_counted(make_run, missing, absent, words):
    run = _without(make_run(), missing)
    assert per_site.absent_since(run) == absent
    assert per_site.sites_left(run) == words
    assert per_site.state_with_sites(run, "completed") == (f"completed, {words}" if words else "completed")
    assert per_site.state_with_sites(run, "failed") == "failed"


def test_a_site_that_was_not_drawn_is_not_lost(make_run):
    folder = make_run()
    run = _without(folder, {2: ("", "3")})
    assert per_site.absent_since(run) == {"site-3": 3}
    config = json.loads((folder / "config.json").read_text())
    config["config"]["cohort.fraction"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    assert per_site.absent_since(load_run(folder)) == {}
    assert per_site.absent_since(_without(folder, {2: ("3", "")})) == {"site-3": 3}


def test_with_a_buffer_only_a_failed_request_makes_a_site_absent(make_run):
    folder = _without(make_run(), {2: ("", "3")}).folder
    about = json.loads((folder / "config.json").read_text())
    about["config"]["cohort.buffer-size"] = 2
    (folder / "config.json").write_text(json.dumps(about))
    assert per_site.absent_since(load_run(folder)) == {}
    assert per_site.absent_since(_without(folder, {1: ("3", "")})) == {"site-3": 2}


def test_a_run_that_lost_a_site_is_no_plain_completed_run_anywhere(make_run, capsys):
    run = _without(make_run(), {1: ("3", ""), 2: ("3", "")})
    words = "3 of 4 sites since round 2"
    tag = f'<span class="tag partial">completed, {words}</span>'
    page = run_page.run_page_html([run])
    assert tag in page
    assert "the model has no upload from site-3 since round 2." in page
    client = opened(run.folder.parent)
    assert tag in client.get(f"{client.base}/").text
    assert tag in client.get(f"{client.base}/runs/{run.name}").text
    assert main(["status", str(run.folder.parent)]) == 0
    assert words in capsys.readouterr().out
    assert f"sites: {words}" in closing_lines(run.folder)
