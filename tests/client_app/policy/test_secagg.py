"""A site that demands secure aggregation: what is refused before data, what admits a run, what reaches the keys."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app import app as client
from fedveil.client_app import secure_round
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules, site_policy
from fedveil.client_app.policy.decisions import check_run
from fedveil.config import parse
from fedveil.contract.task import Example
from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.membership import RunMember, roster_digest
from fedveil.federation.secagg.messages import MembershipRequest, PrekeyRequest
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.site import SecAggSite, SiteRequirements
from tests.client_app.policy.test_site_policy import assignment
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import initial, strategy

ROSTER = f"sha256:{'5f' * 32}"
SECURE = {"secure.enabled": True, "secure.min-sites": 4, "secure.threshold": 4, "secure.roster": "/roster/roster.json"}
DEMANDS = f'require-secure = true\nmin-cohort = 4\nmin-threshold = 4\nroster = "{ROSTER}"'


@pytest.mark.parametrize(
    "text,config,reason",
    [
        ("require-secure = true", {}, "secure.enabled: this site permits only masked uploads, found false"),
        (DEMANDS, SECURE | {"secure.min-sites": 3}, "secure.min-sites: this site permits at least 4, found 3"),
        (DEMANDS, SECURE | {"secure.threshold": 3}, "secure.threshold: this site permits at least 4, found 3"),
        (DEMANDS, SECURE | {"secure.roster": ""}, f"secure.roster: this site permits {ROSTER}, found none"),
        ("", {"secure.enabled": True}, "secure.enabled: this site permits False, found True"),
        (
            "require-secure = true",
            {"secure.enabled": True, "secure.clip-bound": 1e9},
            "secure.clip-bound: this site permits 64.0",
        ),
    ],
)
def test_what_the_run_config_shows_is_refused_by_its_key(text, config, reason, tmp_path):
    with pytest.raises(PolicyError, match=reason):
        check_run(assignment(tmp_path, text, config), serves=False)


def test_what_it_demands_it_names_and_the_rest_must_stand_under_permits(tmp_path):
    assert check_run(assignment(tmp_path, DEMANDS, SECURE)) is None
    assert (
        check_run(assignment(tmp_path, DEMANDS, SECURE | {"secure.threshold": 0})) is None
    )  # the membership is judged
    assert (
        check_run(assignment(tmp_path, DEMANDS.replace("require-secure = true", ""), {})) is None
    )  # a run in the clear
    asked = parse(SECURE | {"secure.clip-bound": 8.0, "secure.max-weight": 100, "secure.ring-bits": 64})
    needed = run_config_rules.permits_for_run(asked)
    assert '"secure.enabled" = true' in needed
    assert check_run(assignment(tmp_path, needed, asked.flat())) is None


def test_a_site_that_requires_it_answers_a_run_in_the_clear_before_data_is_looked_at(tmp_path, monkeypatch):
    task = use_toy_task(monkeypatch)
    opened = []
    monkeypatch.setattr(
        type(task), "examples", lambda self, *a, **k: opened.append(a) or Example.from_columns([{}] * 3)
    )
    (tmp_path / "site-policy.toml").write_text("require-secure = true\n[permits]\nrun.deterministic = true")
    grid = LocalGrid(client.app, ["north", "south", "west"], tmp_path / "state", {"run.deterministic": True})
    grid.node_config = {"west": {"policy": str(tmp_path / "site-policy.toml")}}
    ours = strategy()
    ours.start(grid, initial(task), num_rounds=1)
    (record,) = ours.history
    assert record.accepted == ["north", "south"]
    assert record.failed["west"].startswith("PolicyError: secure.enabled: this site permits only masked uploads")
    assert len(opened) == 2


def open_site(asked: ClientAssignment) -> SecAggSite:
    return secure_round.open_secagg_site(asked, site_policy.load_policy(asked.site))


def test_policy_reaches_the_demands_and_its_absence_the_least(tmp_path):
    site = open_site(assignment(tmp_path, DEMANDS, SECURE))
    assert site.demands == SiteRequirements(4, 4, ROSTER)
    assert (site.name, site.run) == ("north", "r")
    assert open_site(assignment(tmp_path, "")).demands == SiteRequirements(2, 2, "")


def asked(tmp_path, text: str, roster: dict[str, str], name: str = "north") -> bytes:
    """A site joins one membership of five, with what the server says of their signing keys."""
    config = SECURE | {"secure.threshold": 0, "secure.min-sites": 3}
    names = ("east", "middle", "north", "south", "west")
    sites = {n: _site(tmp_path / n, text if n == name else "", config, n) for n in names}
    hello = MembershipRequest(run="r").to_bytes()
    members = [RunMember.from_bytes(secure_round.answer_secagg_request(site, hello)) for site in sites.values()]
    known = {member.name: member.signing_key for member in members}
    if "DIGEST" in text:
        sites[name] = _site(tmp_path / name, text.replace("DIGEST", roster_digest(known)), config, name)
    setup = PrekeyRequest(membership=SecAggConfig(3).membership("r", members), roster=known | roster)
    return secure_round.answer_secagg_request(sites[name], setup.to_bytes())


def _site(folder, text: str, config: dict[str, object], name: str) -> ClientAssignment:
    folder.mkdir(parents=True, exist_ok=True)
    return assignment(folder, "" if "DIGEST" in text else text, config, {"site": name})


def test_a_roster_that_the_sites_agree_on_is_joined_and_another_is_refused(tmp_path):
    joined = json.loads(asked(tmp_path / "a", 'roster = "DIGEST"', {}))
    assert joined["prekey"]["site"] == "north"
    with pytest.raises(PolicyError, match="roster: this site permits sha256:.*, found sha256:"):
        asked(tmp_path / "b", 'roster = "DIGEST"', {"further": "ab" * 32})


def test_a_roster_that_all_agree_on_and_in_which_the_sites_own_key_is_the_servers_is_refused(tmp_path):
    """Each site finds its own key, and all have one digest: then all keys are the sites'."""
    config = SECURE | {"secure.threshold": 0, "secure.min-sites": 3}
    sites = {n: _site(tmp_path / n, "", config, n) for n in ("east", "north", "south")}
    hello = MembershipRequest(run="r")
    members = {
        n: RunMember.from_bytes(secure_round.answer_secagg_request(site, hello.to_bytes())) for n, site in sites.items()
    }
    servers = bytes(range(32))
    run_key = members["north"].run_key
    unsigned = members["north"].model_copy(update={"signing_key": crypto.verifying_key(servers).hex()})
    members["north"] = unsigned.model_copy(update={"signature": crypto.sign_bytes(servers, unsigned.text("r")).hex()})
    assert members["north"].is_genuine("r")
    assert members["north"].run_key == run_key
    roster = {n: member.signing_key for n, member in members.items()}
    setup = PrekeyRequest(membership=SecAggConfig(3).membership("r", members.values()), roster=roster)
    for text in (f'roster = "{roster_digest(roster)}"', ""):
        north = _site(tmp_path / "north", text, config, "north")
        with pytest.raises(PolicyError, match="signing-key: expected this site's own in the membership"):
            secure_round.answer_secagg_request(north, setup.to_bytes())


def test_a_membership_with_a_lower_threshold_than_the_sites_own_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="secure.threshold: this site permits at least 5 of 5 holders, found 4"):
        asked(tmp_path, "min-threshold = 5", {})


def test_a_question_in_a_run_in_the_clear_is_refused(tmp_path):
    with pytest.raises(WireError, match="expected no request in a run with secure.enabled = false"):
        secure_round.answer_secagg_request(assignment(tmp_path, ""), MembershipRequest(run="r").to_bytes())
