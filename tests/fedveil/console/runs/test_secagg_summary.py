"""What a run of secure aggregation looks like afterwards: in report, watch and at a site; nothing that nobody saw."""

from __future__ import annotations

import html
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from fedveil.client_app.policy.policy_copies import find_copy, keep_copy
from fedveil.client_app.secure_round import FileSecAggStore
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.console.main import main
from fedveil.console.runs import privacy_statements, secagg_summary
from fedveil.console.runs.progress_bar import RunProgress
from fedveil.console.runs.retained_state import list_retained
from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.report import run_page
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.federation.secagg.adversary_model import (
    BROADCASTS,
    BROADCASTS_METHODS,
    DEVIATING,
    POLICIES_DECIDE,
    SINGLE_SITE,
    SINGLE_SITE_METHODS,
    TWO_ROUNDS,
)
from fedveil.federation.secagg.in_process import InProcessSecureSums
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.records import audit_log
from tests.fedveil.console.conftest import masked

NEVER_SEEN = ("examples", "loss received", "loss trained", "train seconds")


def test_the_report_shows_the_sums_and_has_no_column_for_what_nobody_saw(make_run):
    folder = make_run()
    clear = run_page.run_page_html([load_run(folder)])
    assert all(f">{name}</th>" in clear for name in NEVER_SEEN)
    assert "Secure aggregation" not in clear
    page = run_page.run_page_html([load_run(masked(folder))])
    assert not any(f">{name}</th>" in page for name in NEVER_SEEN)
    assert "A server that followed the protocol could not see a single site" in page
    assert "Holds against an honest but curious server and up to 1 site with it." in page
    for words in (POLICIES_DECIDE, BROADCASTS, TWO_ROUNDS):
        assert html.escape(words) in page
    assert SINGLE_SITE not in page  # FedRand: the server draws who sends what
    assert "site-3: no answer within &lt;120&gt; s" in page
    assert "expected 3, found &lt;1&gt;" in page
    assert "round 3: PolicyError: it gave no keys, so it was in no cohort" in page


def test_the_report_of_a_method_whose_sites_draw_says_that_entries_may_be_of_one_site(make_run):
    folder = masked(make_run())
    content = json.loads((folder / "config.json").read_text())
    content["method"] = {"name": "random_binary", "fields": {}}
    (folder / "config.json").write_text(json.dumps(content))
    assert SINGLE_SITE in run_page.run_page_html([load_run(folder)])


def test_an_epsilon_is_left_to_the_sites_own_ledgers(make_run):
    folder = masked(make_run())
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= {
        "dp.clip-norm": 1.0,
        "dp.noise-multiplier": 1.1,
        "dp.epsilon": 8.0,
        "run.deterministic": False,
    }
    content["method"]["fields"] = {"rho": 0.5}
    (folder / "config.json").write_text(json.dumps(content))
    statements = privacy_statements.privacy_statements(load_run(folder))
    words = "the server saw only sums, so it does not know the site's number of examples; the site's own ledger does."
    assert statements[1:5] == [f"{site}: {words}" for site in ("site-0", "site-1", "site-2", "site-3")]
    assert statements[5].startswith("site-9: no upload was accepted")


def test_each_attempt_is_a_row(make_run):
    run = load_run(masked(make_run()))
    assert secagg_summary.attempt_rows(run) == [
        [1, 1, 4, 4, 3, None, None],
        [2, 1, None, None, None, None, "expected 3, found <1>"],
        [2, 2, 3, 4, 3, "site-3: no answer within <120> s", None],
        [3, 1, 4, 4, 3, None, None],
    ]


def test_a_sum_of_a_whole_cohort_needs_all_its_sites(make_run):
    folder = masked(make_run())
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"quorum": 3', '"quorum": 0'))
    run = load_run(folder)
    assert secagg_summary.attempt_rows(run)[0] == [1, 1, 4, 4, 4, None, None]
    assert secagg_summary.secagg_note(run.unseen[0]["unseen"]) == "sum of 4 of 4 sites, it needs all of them"


def test_bytes_of_questions_count_beside_the_messages_of_the_ledger(make_run):
    folder = make_run()
    before = load_run(folder).upload_bytes
    run = load_run(masked(folder))
    assert run.upload_bytes == sum(attempt["upload_bytes"] for attempt in run.attempts) > before + 4 * 4111


def test_watch_says_the_sum_who_was_deaf_and_why_an_attempt_was_thrown_away(make_run):
    folder = masked(make_run())
    out = io.StringIO()
    with RunProgress(Console(file=out, width=400), folder, "fedrand", 5) as progress:
        progress.tick({"state": "running"})
    text = out.getvalue()
    assert "sum of 4 of 4 sites, 3 must agree to it" in text
    assert "unresponsive: site-3 (no answer within <120> s)" in text
    assert "NO SUM, discarded: expected 3, found <1>" in text


@pytest.fixture
def state(tmp_path):
    """A site that has masked for the second attempt at the third round of a run, in a cohort of five."""
    sums = InProcessSecureSums("pilot-0a1b2c3d", SecAggConfig(3), ("a", "b", "c", "d", "north"))
    plan = sums.begin(2, 1, ["a", "b", "c", "d", "north"]).plan
    sums.mask("north", plan, np.zeros(3, "<u4"))
    site_state = sums.sites["north"].store.load()
    folder = tmp_path / "pilot-0a1b2c3d" / "north"
    with FileSecAggStore(folder).alone():
        FileSecAggStore(folder).save(site_state)
    ReplayGuard(folder).count(0, 5, 3)
    return tmp_path, site_state


def said(capsys, folder, *options: str) -> str:
    capsys.readouterr()
    main(["site", "status", "--state-dir", str(folder), *options])
    return capsys.readouterr().out


def test_a_site_says_what_it_did_and_what_its_own_policy_makes_of_it(state, tmp_path, capsys):
    stdout = said(capsys, state[0])
    assert "secure aggregation: last masked for round 3, attempt 2; agreed to no sum yet" in stdout
    assert all(words in stdout for words in (DEVIATING, SINGLE_SITE_METHODS, TWO_ROUNDS))
    policy = f'min-cohort = 4\nmin-colluders = 1\nroster = "sha256:{"ab" * 32}"'
    (tmp_path / "policy.toml").write_text(policy)
    assert DEVIATING in said(capsys, state[0], "--policy", str(tmp_path / "policy.toml"))  # a run in the clear passes
    (tmp_path / "policy.toml").write_text(f"require-secure = true\n{policy}")
    assert DEVIATING in said(capsys, state[0], "--policy", str(tmp_path / "policy.toml"))  # any code passes
    (tmp_path / "policy.toml").write_text(f'require-secure = true\napp-digests = ["{"cd" * 32}"]\n{policy}')
    stdout = said(capsys, state[0], "--policy", str(tmp_path / "policy.toml"))
    assert "Holds against a server that lies and up to 1 site with it, if every site's policy names this" in stdout
    assert (
        "each sum has at least 3 honest sites, and all sums of a round together reveal nothing about fewer than 2"
        in stdout
    )
    assert BROADCASTS_METHODS in stdout
    assert DEVIATING not in stdout
    (tmp_path / "north.toml").write_text(f'site = "north"\npolicy = "{tmp_path / "policy.toml"}"')  # by site start
    assert said(capsys, state[0]) == stdout


def test_a_past_run_is_judged_by_the_policy_of_its_last_round(state, tmp_path, capsys):
    folder, policy = state[0], tmp_path / "policy.toml"
    strict = f'min-cohort = 4\nmin-colluders = 1\nroster = "sha256:{"ab" * 32}"\nrequire-secure = true\n'
    policy.write_text(strict + f'app-digests = ["{"cd" * 32}"]')
    options = ("--policy", str(policy))
    digest = keep_copy(folder, str(policy))
    about = {"run": "pilot-0a1b2c3d", "site": "north", "round": 2, "policy": digest}
    other = {"policy": "1" * 64}
    for event, line in (
        ("admitted", about | {"policy": "0" * 64}), ("admitted", about), ("admitted", about | other | {"run": "other"}),
        ("admitted", about | other | {"round": 1}), ("refused", about | other),
        ("refused", about | other | {"round": 3}),
    ):  # fmt: skip
        audit_log.append_entry(folder / audit_log.NAME, event, line)
    policy.write_text("max-rounds = 2")
    assert "judged by the policy of that round" in (stdout := said(capsys, folder, *options))
    assert DEVIATING not in stdout
    find_copy(folder, digest).unlink()
    assert "judged by today's policy, because no copy" in (stdout := said(capsys, folder, *options))
    assert DEVIATING in stdout


def test_a_site_says_in_which_round_it_agreed_to_a_sum_last_and_when_it_only_made_a_key(state, capsys):
    folder, site_state = state
    store = FileSecAggStore(folder / "pilot-0a1b2c3d" / "north")
    store.save(site_state.model_copy(update={"fence": site_state.fence.model_copy(update={"signed": 2})}))
    assert "attempt 2; last agreed to a sum in round 3" in said(capsys, folder)
    store.save(SiteSecAggState(next=site_state.next, number=1))
    assert "secure aggregation: key created, but nothing masked yet" in said(capsys, folder)


def test_sealed_keys_need_the_key_and_a_run_in_the_clear_has_no_line(state, tmp_path, capsys):
    folder, site_state = state
    make_key(tmp_path / "state.key")
    store = FileSecAggStore(folder / "pilot-0a1b2c3d" / "north", FileSeal.from_key_file(str(tmp_path / "state.key")))
    store.save(site_state)
    assert "cannot read its keys" in said(capsys, folder)
    assert "last masked for round 3" in said(capsys, folder, "--key-file", str(tmp_path / "state.key"))
    store._file.unlink()
    (run,) = list_retained(folder)
    assert secagg_summary.secagg_of_site(folder, run) == []
    assert re.search("pilot-0a1b2c3d, site north", said(capsys, folder)) or run.bytes == 0
