"""The metrics that dashboards export without a run: their values, their text, and who gets them."""

from __future__ import annotations

import math
import os
import shutil
import stat
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from fedveil.console.flower.processes import LaunchError
from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.console.runs.site_notes import note_federation
from fedveil.console.web import federations, metrics, server_metrics, serving, site_views
from fedveil.console.web.apps import run_folders, server_app, site_app
from fedveil.console.web.auth import AccessMiddleware, DashboardCredentials
from fedveil.console.web.background import CachedAnswer
from fedveil.console.web.federations import name_federations
from fedveil.console.web.metrics import METRICS, GaugeSample, render_metrics
from fedveil.console.web.site_metrics import event_samples, ledger_samples
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger_account import Party, PartyStanding
from fedveil.records import audit_log
from tests.fedveil.console.provisioning.test_refused_calls import refuse
from tests.fedveil.console.web.conftest import ESCAPES, EVIL, PORT
from tests.fedveil.console.web.test_federations import Flower, flower, pilot  # noqa: F401
from tests.fedveil.console.web.test_site_pages import state  # noqa: F401

pytest.importorskip("prometheus_client", reason='needs the extra "prometheus"')

from prometheus_client.parser import text_string_to_metric_families

TOKEN = "t" * 43
Samples = dict[tuple[str, ...], float]


def client_of(app_of, token: str = TOKEN) -> TestClient:
    entry = DashboardCredentials(PORT, scrape_token=token)
    return TestClient(AccessMiddleware(app_of(entry), entry), base_url=f"http://127.0.0.1:{PORT}")


def server_client(runs: Path, *federations: Path, token: str = TOKEN) -> TestClient:
    names = name_federations(federations)
    return client_of(lambda entry: server_app(run_folders(runs, names), names, entry, lambda: False), token)


def scrape(client: TestClient) -> Samples:
    answer = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(answer.text)


def parse(text: str) -> Samples:
    """The samples by name and labels, as Prometheus's own parser reads them."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples: Samples = {}
    for family in families:
        assert family.documentation == METRICS[family.name].help
        for sample in family.samples:
            labels = METRICS[sample.name].labels
            assert set(sample.labels) == set(labels)
            key = (sample.name, *(sample.labels[label] for label in labels))
            assert key not in samples
            samples[key] = sample.value
    return samples


def scrape_ledger(client: TestClient) -> Samples:
    """Scrape until the ledger has been read, which takes place in the background."""
    deadline = time.monotonic() + 120
    while ("fedveil_ledger_readable",) not in (samples := scrape(client)):
        assert time.monotonic() < deadline
    return samples


def names(samples: Samples) -> set[str]:
    return {name for name, *_ in samples}


def test_a_federation_s_members_runs_disk_and_logs(pilot, runs, flower):  # noqa: F811
    flower.setattr(Flower, "unfinished", {"5": "pending", "6": "pending", "7": "running", "8": "odd"})
    refuse(pilot, "south", 20)
    before = time.time()
    samples = scrape(server_client(runs, pilot))
    of = "pilot"
    days = {site: samples["fedveil_site_key_days_left", of, site] for site in ("north", "south")}
    assert all(179.99 < left <= 180 for left in days.values())
    assert 364.9 < samples["fedveil_certificate_days_left", of, "server.pem"] <= 365
    assert 3 * 364.9 < samples["fedveil_certificate_days_left", of, "ca.crt"] <= 3 * 365
    exact = {key: value for key, value in samples.items() if not key[0].endswith(("days_left", "bytes", "seconds"))}
    states = {"completed": 2, "failed": 1}
    assert exact == {
        ("fedveil_registry_readable", of): 1, ("fedveil_superlink_up", of): 1, ("fedveil_sites_registered", of): 2,
        ("fedveil_sites_online", of): 1, ("fedveil_site_online", of, "north"): 1,
        ("fedveil_site_online", of, "south"): 0,
        **{("fedveil_site_refused_calls", of, site): n for site, n in (("north", 0), ("south", 1), ("west", 0))},
        **{("fedveil_site_is_rogue", of, site): n for site, n in (("north", 0), ("south", 1), ("west", 0))},
        **{("fedveil_flower_runs", of, s): n
           for s, n in (("pending", 2), ("starting", 0), ("running", 1), ("other", 1))},
        **{("fedveil_runs", of, one): states.get(one, 0)
           for one in ("completed", "running", "stopped", "failed", "died", "other")},
        ("fedveil_runs_unreadable",): 0, ("fedveil_groups_failed",): 0, ("fedveil_series_left_out",): 0,
    }  # fmt: skip
    free = {key[2]: value for key, value in samples.items() if key[0] == "fedveil_disk_free_bytes"}
    assert set(free) == {"server", "runs"}
    assert all(abs(value - shutil.disk_usage(runs).free) < 1 << 30 for value in free.values())
    logs = {key[1]: v for key, v in samples.items() if key[0] == "fedveil_audit_log_last_line_timestamp_seconds"}
    assert set(logs) == {"runs", "demo", "control of pilot"}
    assert all(before - 600 < at <= time.time() for at in logs.values())


def test_a_federation_without_runs_is_watched_all_the_same(pilot, tmp_path, flower):  # noqa: F811
    samples = scrape(server_client(tmp_path / "none", pilot))
    assert samples["fedveil_sites_online", "pilot"] == 1
    assert samples["fedveil_disk_free_bytes", "pilot", "runs"] > 0
    assert sum(value for key, value in samples.items() if key[0] == "fedveil_runs") == 0


def test_what_flower_did_not_say_is_missing_and_not_zero(pilot, runs, flower):  # noqa: F811
    flower.setattr(Flower, "says", LaunchError("flwr supernode failed"))
    samples = scrape(server_client(runs, pilot))
    assert samples["fedveil_superlink_up", "pilot"] == 0
    assert samples["fedveil_sites_registered", "pilot"] == 2
    assert not names(samples) & {"fedveil_sites_online", "fedveil_site_online", "fedveil_flower_runs"}


def test_an_old_answer_of_flower_counts_as_none(pilot, runs, flower):  # noqa: F811
    client, now = server_client(runs, pilot), [1_800_000_000.0]
    flower.setattr(federations.time, "time", lambda: now[0])
    flower.setattr(federations, "_ASK_FLOWER", 30.0)
    flower.setattr(federations, "_ANSWER_SCRAPE", 0.01)
    deadline = time.monotonic() + 30
    while not scrape(client)["fedveil_superlink_up", "pilot"]:  # it may not answer within the patience
        assert time.monotonic() < deadline
    silent = threading.Event()
    flower.setattr(Flower, "nodes", lambda self: silent.wait(60))
    now[0] += 119
    assert scrape(client)["fedveil_superlink_up", "pilot"] == 1
    now[0] += 2
    assert scrape(client)["fedveil_superlink_up", "pilot"] == 0
    silent.set()


def test_federations_whose_superlinks_are_silent_share_one_wait(tmp_path, flower):  # noqa: F811
    waits, now = [], [100.0]
    folders = {name: tmp_path / name for name in ("first", "second", "third")}

    def ask(key, stamp, find, patience, lane):
        waits.append((lane, patience))
        now[0] += patience
        return CachedAnswer()

    flower.setattr(federations.time, "monotonic", lambda: now[0])
    list(federations.DashboardFederations(folders, SimpleNamespace(ask=ask)).metric_groups())
    assert waits == [*((folder, 0.0) for folder in folders.values()),
                     *zip(folders.values(), (7.0, 0.0, 0.0), strict=True)]  # fmt: skip


def test_an_error_costs_its_own_samples_alone_and_is_counted(pilot, runs, state, flower):  # noqa: F811
    def fail(*_):
        raise OSError(5, "Input/output error")

    flower.setattr(server_metrics.shutil, "disk_usage", fail)
    for client, missing, count in (
        (server_client(runs, pilot), "fedveil_disk_free_bytes", 2),
        (client_of(lambda entry: site_app(state, "", "", entry, lambda: False)), "fedveil_disk_free_bytes", 1),
    ):
        samples = scrape(client)
        assert samples["fedveil_groups_failed",] == count
        assert missing not in names(samples)
        assert {"fedveil_audit_log_last_line_timestamp_seconds", "fedveil_series_left_out"} <= names(samples)


@pytest.mark.parametrize("content", ["", "{}", '{"sites": 5}'])
def test_a_damaged_registry_and_a_lost_certificate_are_values_to_alert_on(content, pilot, runs, flower):  # noqa: F811
    client = server_client(runs, pilot)
    (pilot / "registry" / "members.json").write_text(content)
    (pilot / "server" / "server.pem").unlink()
    samples = scrape(client)
    assert samples["fedveil_registry_readable", "pilot"] == 0
    assert samples["fedveil_superlink_up", "pilot"] == 1
    assert samples["fedveil_certificate_days_left", "pilot", "server.pem"] == -math.inf
    assert "fedveil_sites_registered" not in names(samples)


def test_an_entry_without_an_expiry_date_makes_the_registry_unreadable(pilot, runs, flower):  # noqa: F811
    members = SiteRegistry(pilot)
    members.sites["north"]["until"] = "soon"
    members.save()
    samples = scrape(server_client(runs, pilot))
    assert samples["fedveil_registry_readable", "pilot"] == 0
    assert "fedveil_site_key_days_left" not in names(samples)


def test_hostile_runs_and_logs_give_valid_text_within_bounds(hostile, pilot, flower):  # noqa: F811
    flower.setattr(Flower, "unfinished", {"5": EVIL + ESCAPES})
    samples = scrape(server_client(hostile, pilot))
    assert samples["fedveil_runs", "pilot", "other"] + samples["fedveil_runs_unreadable",] == 1
    assert samples["fedveil_flower_runs", "pilot", "other"] == 1
    for name, *labels in samples:
        assert name in METRICS
        assert all(text.isprintable() and len(text) < 150 for text in labels)


def test_a_site_s_heartbeat_log_ledger_and_disk(state, tmp_path, pilot):  # noqa: F811
    (state / "north.toml").write_text(f'site = "north"\npolicy = "{tmp_path}/policy.toml"\n')
    note_federation(state, "north", "pilot")
    heard = time.time() - 20
    (state / "north.heartbeat").touch()
    os.utime(state / "north.heartbeat", (heard, heard))

    def app_of(entry):
        return site_app(state, "", "", entry, lambda: False, pilot / "server" / "ca.crt")

    samples = scrape_ledger(client_of(app_of))
    at = samples.pop(("fedveil_audit_log_last_line_timestamp_seconds", "site"))
    assert time.time() - 600 < at <= time.time()
    assert samples.pop(("fedveil_disk_free_bytes", "pilot", "state")) > 0
    assert 1090 < samples.pop(("fedveil_certificate_days_left", "pilot", "ca.crt")) <= 1095
    standing = site_views.ledger_standing(state, str(tmp_path / "policy.toml"))
    parties = {one.party.value: one.reserved for one in standing.parties if one.reserved is not None}
    assert len(parties) == 2
    assert all(0 < reserved < 8 for reserved in parties.values())
    assert samples == {
        ("fedveil_site_heard", "pilot", "north"): 1,
        ("fedveil_site_last_heartbeat_timestamp_seconds", "pilot", "north"): pytest.approx(heard),
        **{("fedveil_site_events", e): n for e, n in
           (("admitted", 2), ("sent", 2), ("refused", 1), ("withheld", 0), ("failed", 0))},
        ("fedveil_site_workers",): 0, ("fedveil_ledger_readable",): 1, ("fedveil_ledger_epsilon_limit",): 8,
        **{("fedveil_ledger_epsilon_reserved", party): value for party, value in parties.items()},
        **{("fedveil_ledger_share_reserved", party): value / 8 for party, value in parties.items()},
        ("fedveil_groups_failed",): 0, ("fedveil_series_left_out",): 0,
    }  # fmt: skip
    old = time.time() - 90
    os.utime(state / "north.heartbeat", (old, old))
    assert scrape(client_of(app_of))["fedveil_site_heard", "pilot", "north"] == 0


def test_a_ledger_without_a_limit_or_that_cannot_be_read_is_no_share(state):  # noqa: F811
    samples = scrape_ledger(client_of(lambda entry: site_app(state, "", "", entry, lambda: False)))
    assert samples["fedveil_ledger_epsilon_limit",] == math.inf
    assert "fedveil_ledger_share_reserved" not in names(samples)
    for file in site_views.ledger_files(state):
        file.write_text("{")
    samples = scrape_ledger(client_of(lambda entry: site_app(state, "", "", entry, lambda: False)))
    assert samples["fedveil_ledger_readable",] == 0
    assert not {name for name in names(samples) if name.startswith("fedveil_ledger_e")}


@pytest.mark.parametrize(
    "epsilon,reserved,because,share",
    [(8.0, 2.0, "", 0.25), (8.0, 2.0, "pilot", math.inf), (8.0, 9.0, "", 1.125), (8.0, None, "", None),
     (8.0, math.inf, "", math.inf), (math.inf, 2.0, "", None), (0.0, 0.0, "", None)],
)  # fmt: skip
def test_the_share_of_the_limit_that_is_reserved(epsilon, reserved, because, share):
    """A run without a guarantee takes all of it, and without a limit there is no share."""
    standing = SimpleNamespace(
        problem="", budget=PrivacyBudget(epsilon, 1e-5, Adjacency.REPLACE_ONE),
        parties=(PartyStanding(Party.SERVER, because, reserved, 1.0),),
    )  # fmt: skip
    values = {sample.name: sample.value for sample in ledger_samples(standing)}
    assert values.get("fedveil_ledger_share_reserved") == share
    assert values["fedveil_ledger_readable"] == 1
    standing.problem = "another delta"
    assert next(ledger_samples(standing)) == GaugeSample("fedveil_ledger_readable", 0)


def test_a_site_s_metrics_name_no_run_and_no_reason(state):  # noqa: F811
    audit_log.append_entry(state / audit_log.NAME, EVIL, {"run": "secret-run", "site": "north", "reason": "row 17"})
    client = client_of(lambda entry: site_app(state, "", "", entry, lambda: False))
    text = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert not [word for word in ("pilot-0a1b", "secret-run", "row 17", "PolicyError", "script") if word in text]


def test_an_event_counts_for_a_day():
    now = datetime(2026, 5, 1, tzinfo=UTC)
    lines = [{"event": "sent", "time": (now - timedelta(hours=h)).isoformat()} for h in (0, 23.9, 24.1)]
    lines += [{"event": "sent", "time": "soon"}, {"event": "sent"}, {"time": now.isoformat()}]
    counted = {sample.labels[0]: sample.value for sample in event_samples(lines, now.timestamp())}
    assert counted == {"admitted": 0, "sent": 2, "refused": 0, "withheld": 0, "failed": 0}


@given(st.text(max_size=200), st.text(max_size=200), st.floats(allow_nan=False))
def test_any_label_is_text_that_the_parser_reads(federation, site, value):
    text = render_metrics([GaugeSample("fedveil_site_online", value, (federation, site))]).decode()
    (key, found), _ = parse(text).items()
    assert found == value
    assert len(key) == 3
    assert all(len(label) < 1500 and label.isprintable() for label in key)


def test_a_metric_has_a_bounded_number_of_samples_and_those_left_out_are_counted():
    many = [GaugeSample("fedveil_site_online", 1, ("f", str(i))) for i in range(metrics.MAX_SERIES + 7)]
    samples = parse(render_metrics(many).decode())
    assert len(samples) == metrics.MAX_SERIES + 1
    assert samples["fedveil_series_left_out",] == 7


def test_a_sample_that_is_not_listed_is_refused():
    with pytest.raises(KeyError):
        render_metrics([GaugeSample("fedveil_other", 1)])
    with pytest.raises(ValueError, match="fedveil_site_online: expected the labels"):
        render_metrics([GaugeSample("fedveil_site_online", 1, ("f",))])


def test_only_the_bearer_token_opens_the_metrics_and_it_opens_nothing_else(runs):
    client = server_client(runs)
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/metrics", headers=right).status_code == 200
    assert client.get("/metrics", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    for wrong in ("", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN,
                  f"Bearer {TOKEN.upper()}", f"Bearer {'x' * 9000}"):  # fmt: skip
        answer = client.get("/metrics", headers={"Authorization": wrong} if wrong else {})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "fedveil_" not in answer.text
    assert client.get("/metrics", headers=[("Authorization", f"Bearer {TOKEN}")] * 2).status_code == 401
    assert client.post("/metrics", headers=right).status_code == 405
    assert client.get("/metrics", headers={**right, "Host": "evil.example"}).status_code == 421
    for path in ("/", "/metrics/", "/x", "/metrics/x"):
        assert client.get(path, headers=right, follow_redirects=False).status_code == 401


def test_without_a_token_there_are_no_metrics(runs):
    client = server_client(runs, token="")
    for authorization in ("Bearer ", "Bearer", f"Bearer {TOKEN}"):
        assert client.get("/metrics", headers={"Authorization": authorization}).status_code == 401


def test_the_token_is_made_once_for_its_owner_alone_and_is_not_printed(tmp_path, monkeypatch, capsys):
    entries = []
    monkeypatch.setattr(serving.DashboardServer, "run", lambda self, announce: [announce(), entries.append(self.entry)])
    file = tmp_path / "metrics.token"
    for _ in range(2):
        assert serving.serve_dashboard("127.0.0.1", 0, lambda entry, ending: None, file) == 0
    out = capsys.readouterr().out
    token = file.read_text()
    assert [entry.scrape_token for entry in entries] == [token] * 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in out
    assert f"http://127.0.0.1:{entries[1].port}/metrics" in out
    # A log of a service may have other readers.
    assert not [entry for entry in entries if entry.token in out or entry.place in out]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert serving.serve_dashboard("127.0.0.1", 0, lambda entry, ending: None, file) == 0
    assert entries[-1].link in capsys.readouterr().out
    file.chmod(0o644)
    with pytest.raises(StateError, match="be readable only by its owner"):
        serving.serve_dashboard("127.0.0.1", 0, lambda entry, ending: None, file)


def test_a_missing_package_is_named_before_anything_listens(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(serving.DashboardServer, "run", lambda self, announce: None)
    with pytest.raises(ConfigError, match="--metrics-token: expected the package prometheus_client"):
        serving.serve_dashboard("127.0.0.1", 0, lambda entry, ending: None, tmp_path / "token")
    assert not (tmp_path / "token").exists()
