"""The pages of a site: what left, what was refused, the ledger, the worker; and none of it more than text."""

from __future__ import annotations

import math
import os
import re
import time

import pytest

from fedveil.client_app.state.client_state import open_ledger
from fedveil.console.main import main
from fedveil.console.runs.site_notes import note_federation, noted_federation
from fedveil.console.runs.workers import WorkerStatus
from fedveil.console.web import site_views
from fedveil.contract.privacy import UNTIMED, Adjacency, PrivacyBudget, Step
from fedveil.privacy import accounting
from fedveil.privacy.ledger_account import RunTerms
from fedveil.records import audit_log
from tests.fedveil.console.commands.test_site import CARD, TRAINING
from tests.fedveil.console.web.conftest import ESCAPES, EVIL, opened_site
from tests.fedveil.console.web.test_pages import every_page, is_whole

STEP = Step("gaussian", 0, 0, 2.0)
OWN = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)


@pytest.fixture
def state(tmp_path):
    """Two uploads of one run, one refusal, 50 rows charged twice."""
    folder = tmp_path / "state"
    log = folder / audit_log.NAME
    for round_ in range(2):
        about = {"run": "pilot-0a1b2c3d", "round": round_, "site": "north", "down_bytes": 1234567, "up_bytes": 271828}
        audit_log.append_entry(log, "admitted", {key: about[key] for key in ("run", "round", "site")})
        audit_log.append_entry(log, "sent", about)
    reason = "PolicyError: method: expected fedrand, found fedavg"
    audit_log.append_entry(log, "refused", {"run": "other-9f8e7d6c", "round": 4, "site": "north", "reason": reason})
    open_ledger(folder).charge(RunTerms("pilot-0a1b2c3d", OWN, 1, 1), {STEP: 2}, OWN)
    (tmp_path / "policy.toml").write_text("max-epsilon = 8.0\n")
    return folder


def home(client) -> str:
    return client.get(f"{client.base}/").text


def test_what_left_what_was_refused_and_what_the_ledger_holds(state, tmp_path):
    text = home(opened_site(state, str(tmp_path / "policy.toml")))
    is_whole(text)
    left = re.search(r'<td data-label="run">pilot-0a1b2c3d</td>.*?</tr>', text)[0]
    assert re.findall(r">([\d,]+)</td>", left) == ["2", "543,656", "2,469,134"]
    refused = re.search(r'<td data-label="event"><span class="tag failed">refused</span></td>.*?</tr>', text)[0]
    assert '<td data-label="round">5</td>' in refused
    assert "PolicyError: method: expected fedrand, found fedavg" in refused
    assert "A refused run needs no action" in text
    spent = accounting.compute_epsilon({STEP: 2}, 1e-5, Adjacency.REPLACE_ONE)
    reserved = accounting.compute_epsilon({STEP: 2}, 1e-5 / 16, Adjacency.REPLACE_ONE)
    assert f"epsilon {spent:.4g} at delta 1e-05 (replace-one) so far, if all runs had been planned together" in text
    assert "at most epsilon 8 at delta 1e-05 (replace-one) over all runs, regardless of decisions between them" in text
    assert f'<td data-label="epsilon left">{math.floor((8 - reserved) * 1000) / 1000:g}</td>' in text
    assert "5 lines, all unchanged" in text
    assert "No worker: the site is not running" in text


def test_without_a_bound_nothing_is_said_to_be_left_and_the_page_warns(state, tmp_path):
    text = home(opened_site(state))
    assert '<td data-label="epsilon left"><span class="tag failed">no bound</span></td>' in text
    assert 'class="alert">The policy sets no max-epsilon' in text
    assert "sets no max-epsilon" not in home(opened_site(state, str(tmp_path / "policy.toml")))


def test_poisson_sampling_in_the_ledger_is_named_with_what_it_assumes_and_other_steps_are_not(state, capsys):
    assert UNTIMED not in home(opened_site(state))
    main(["site", "status", "--state-dir", str(state)])
    assert UNTIMED not in capsys.readouterr().out
    open_ledger(state).charge(RunTerms("drawn", OWN, 1, 1), {Step("poisson", 50, 5, 4.0): 1}, OWN)
    assert UNTIMED in home(opened_site(state))
    main(["site", "status", "--state-dir", str(state)])
    assert UNTIMED in capsys.readouterr().out


def test_a_site_is_named_and_its_bytes_are_seen_at_once(state):
    (state / "north.toml").write_text('site = "north"\n')
    client = opened_site(state)
    assert "<h1>Site north</h1>" in home(client)
    log = client.get(f"{client.base}/log").text
    assert "271,828 upload bytes, 1,234,567 download bytes." in re.sub("<details>.*?</details>", "", log)
    assert '<span class="tag failed">refused</span>' in log


def test_a_log_that_was_changed_sums_up_to_nothing(state):
    log = state / audit_log.NAME
    log.write_text(log.read_text().replace("271828", "1"))
    text = home(opened_site(state))
    assert "The log does not show what was sent" in text
    assert "line 2: expected a whole line with its own hash" in text
    assert "uploads sent" not in text


def test_what_a_server_sent_is_text(state, monkeypatch):
    words = EVIL + ESCAPES
    audit_log.append_entry(
        state / audit_log.NAME, "refused", {"run": words, "round": words, "reason": words, words: words}
    )
    audit_log.append_entry(state / audit_log.NAME, "sent", {"run": words, "site": words, "up_bytes": words})
    says = TRAINING | dict.fromkeys(("run", "method", "model", "state", "step", "loss"), words)
    worker_statuses = [WorkerStatus(words, CARD, says), WorkerStatus("north", CARD, {"state": [words]})]
    monkeypatch.setattr(site_views, "list_workers", lambda folder: worker_statuses)
    monkeypatch.setattr(site_views, "last_failures", lambda folder: [words])
    pages = every_page(opened_site(state))
    assert len(pages) == 2
    for text in pages.values():
        is_whole(text)
        assert "<script>alert" not in text
        assert not set("\x1b\x07\u202e") & set(text)
        assert "&lt;script&gt;alert(271828)" in text


def test_what_the_worker_does(state, monkeypatch):
    monkeypatch.setattr(site_views, "list_workers", lambda folder: [WorkerStatus("north", CARD, TRAINING)])
    text = home(opened_site(state))
    for words in ("pilot (fedrand), round 3 of 5", "3 of 16", "loss 2.5000, 5,210 tokens/s", "tiny on cpu, 1,234 MB"):
        assert words in text


def test_a_worker_that_gives_no_answer_takes_no_page_away(state, monkeypatch):
    def broken(folder):
        raise ValueError("no JSON")

    monkeypatch.setattr(site_views, "list_workers", broken)
    assert "a worker gave an invalid answer: ValueError(&#x27;no JSON&#x27;)" in home(opened_site(state))


def test_an_empty_state_folder_is_no_error(tmp_path):
    client = opened_site(tmp_path)
    assert "Nothing has been sent yet." in home(client)
    assert client.get(f"{client.base}/log").status_code == 404


def test_the_site_page_names_the_federation_as_text_and_within_bounds(state):
    assert "Federation: not known. All data comes from" in home(opened_site(state))
    note_federation(state, "north", "pilot")
    assert "Federation: pilot. All data comes from" in home(opened_site(state))
    note_federation(state, "north", "")  # started without a kit since
    assert "Federation: not known. All data comes from" in home(opened_site(state))
    (state / "north.federation").write_bytes((EVIL + ESCAPES).encode() + b"\xff" + b"x" * 1_000_000)
    text = home(opened_site(state))
    is_whole(text)
    assert "Federation: &lt;script&gt;alert(271828)" in text
    assert "x" * 250 not in text
    (state / "south.toml").write_text('site = "south"\n')
    note_federation(state, "north", "pilot")
    note_federation(state, "south", "trial")
    assert "Federation: pilot (north), trial (south). All data comes from" in home(opened_site(state))
    note_federation(state.parent, "x", "outside")
    assert noted_federation(state, "../x") == ""
    (state / "south.federation").unlink()
    (state / "south.federation").mkdir()
    assert "Federation: pilot (north), not known (south). All data comes from" in home(opened_site(state))


def test_a_site_that_the_server_does_not_hear_is_shown_so_and_one_that_it_hears_is_not(state, capsys):
    heard = state / "north.heartbeat"
    heard.touch()
    text = home(opened_site(state))
    assert re.search(r"<p>Site north: heard by the server \d+ s ago\.</p>", text)
    main(["site", "status", "--state-dir", str(state)])
    assert re.search(r"^site north: heard by the server \d+ s ago$", capsys.readouterr().out, re.MULTILINE)
    before = site_views.SiteViews(state).state()
    os.utime(heard, (time.time() - 90, time.time() - 90))
    assert re.search(
        r'<p class="alert">Site north: not heard by the server since [\d:]{8}\.</p>', home(opened_site(state))
    )
    main(["site", "status", "--state-dir", str(state)])
    assert re.search(r"^site north: not heard by the server since [\d:]{8}$", capsys.readouterr().out, re.MULTILINE)
    assert site_views.SiteViews(state).state() != before  # so an open page shows it


def test_what_the_site_permits_stands_first(state, tmp_path, capsys):
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["fedrand"]\nmax-epsilon = 8.0\n[permits]\n"train.batch-size" = 16\n')
    (state / "north.toml").write_text(f'site = "north"\npolicy = "{policy}"\n')
    text = home(opened_site(state))
    assert f"The policy {policy} is in force: 3 keys." in text
    assert text.index("is in force") < text.index("What this site sent")
    assert "[&#x27;fedrand&#x27;]" in text
    assert '<td data-label="key">permits train.batch-size</td>' in text
    assert "then change the policy" in text
    main(["site", "status", "--state-dir", str(state)])
    assert f"The policy {policy} is in force: 3 keys." in capsys.readouterr().out


def test_a_site_that_permits_everything_says_so_and_no_policy_is_advised(state, capsys):
    (state / "north.toml").write_text('site = "north"\n')
    text = home(opened_site(state))
    assert '<p class="alert">This site permits everything: it was started with --permit-everything' in text
    assert "then change the policy" not in text
    main(["site", "status", "--state-dir", str(state)])
    assert "This site permits everything" in capsys.readouterr().out


def test_a_policy_that_cannot_be_read_is_no_permission(state, tmp_path):
    (state / "north.toml").write_text(f'site = "north"\npolicy = "{tmp_path / "none.toml"}"\n')
    text = home(opened_site(state))
    assert "policy file cannot be read" in text
    assert "Until then, the site refuses every run." in text
    assert "permits everything" not in text


def test_without_a_note_of_a_start_nothing_is_said_to_be_permitted(state):
    text = home(opened_site(state))
    assert '<p class="wait">This site&#x27;s permissions are unknown' in text
