"""A site that demands secure aggregation: what is refused before data, what admits a run, what reaches the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil.client_app import app as client
from fedveil.client_app import secure_round
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules, site_policy
from fedveil.client_app.policy.decisions import check_run
from fedveil.config import parse
from fedveil.contract.task import Example
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.in_process import secagg_config_of
from fedveil.federation.secagg.messages import KeysRequest, KeysResponse
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, broadcast_digest
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.server import SecAggCoordinator
from fedveil.federation.secagg.site import SecAggSite
from fedveil.records import audit_log
from tests.client_app.policy.test_site_policy import assignment
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import initial, strategy

ROSTER = f"sha256:{'5f' * 32}"
SECURE = {"secure.enabled": True, "secure.min-sites": 4, "secure.threshold": 4, "secure.roster": "/roster/roster.json"}
DEMANDS = f'require-secure = true\nmin-cohort = 4\nmin-threshold = 4\nroster = "{ROSTER}"'


@pytest.mark.parametrize(
    "text,config,reason",
    [
        ("require-secure = true", {}, "secure.enabled: this site permits only masked uploads; set it to true"),
        (DEMANDS, SECURE | {"secure.min-sites": 3}, "secure.min-sites: this site permits at least 4, found 3"),
        (DEMANDS, SECURE | {"secure.threshold": 3}, "secure.threshold: this site permits at least 4, found 3"),
        (
            DEMANDS,
            SECURE | {"secure.threshold": 0, "secure.whole-cohort": True},
            "secure.whole-cohort: this site permits only sums that 4 sites agree to; set it to false",
        ),
        (
            "require-secure = true",
            {"secure.enabled": True, "secure.whole-cohort": True},
            "secure.whole-cohort: this site permits False",
        ),
        (
            DEMANDS,
            SECURE | {"secure.roster": ""},
            f"secure.roster: this site requires the roster {ROSTER}, but the run names none",
        ),
        (
            DEMANDS + "\nmin-colluders = 2",
            SECURE,
            "secure.max-colluders: this site permits at least 2, found 1",
        ),
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
    assert check_run(assignment(tmp_path, DEMANDS, SECURE | {"secure.threshold": 0})) is None  # the plan is judged
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
    site = open_site(_site(tmp_path, DEMANDS + "\nmin-colluders = 1", SECURE, "north"))
    assert site.demands == SiteRequirements(4, 4, ROSTER, 1)
    assert (site.name, site.run) == ("north", "r")
    assert open_site(assignment(tmp_path, "")).demands == SiteRequirements(2, 1, "", 0)


def test_a_policy_with_a_roster_needs_the_site_s_name_in_the_node_config(tmp_path):
    """Else the server's word names the state folder, and two names are two memories of one site."""
    with pytest.raises(PolicyError, match="site: the policy names a roster, so the node config must name the site"):
        open_site(assignment(tmp_path, DEMANDS, SECURE))


def test_a_request_for_another_site_is_refused(tmp_path):
    """The list that a site signs has the name under which the server asks it."""
    site = _site(tmp_path, "", SECURE, "north")
    asked = replace(site, order=replace(site.order, site="south"))
    with pytest.raises(PolicyError, match="site: the server asked for .*, but the node config names this site north"):
        open_site(asked)


class Federation:
    """Five sites with keys in files, and what a server makes of their prekeys."""

    def __init__(self, folder, **texts: str) -> None:
        self.config = SECURE | {"secure.threshold": 0, "secure.min-sites": 3}
        self.folder, self.names = folder, ("east", "middle", "north", "south", "west")
        self.sites = {name: _site(folder / name, texts.get(name, ""), self.config, name) for name in self.names}
        keys = {
            name: KeysResponse.from_bytes(secure_round.answer_secagg_request(site, KeysRequest(run="r").to_bytes()))
            for name, site in self.sites.items()
        }
        self.roster = {name: key.prekey.signing_key for name, key in keys.items()}
        self.keys = keys

    def plan(self, name: str, roster: dict[str, str], member: Prekey | None = None) -> tuple[AttemptPlan, RoundTerms]:
        """What a server makes of them, and what one site knows beside it."""
        site = self.sites[name]
        order, text = site.order, SigningKeyRoster(signing_keys=roster).to_bytes().decode()
        coordinator = SecAggCoordinator("r", secagg_config_of(site.config.secure), CONFIG, roster)
        coordinator.ready = dict(self.keys)
        if member is not None:
            coordinator.ready[name] = self.keys[name].model_copy(update={"prekey": member})
        plan = coordinator.attempt(order.round, order.attempt, self.names, "").plan
        asked = replace(site, order=replace(order, method="fedper", fields="{}", roster=text))
        return plan, replace(secure_round.round_terms(asked), config=CONFIG)

    def begin(self, name: str, roster: dict[str, str], member: Prekey | None = None) -> None:
        open_site(self.sites[name]).begin(*self.plan(name, roster, member))


CONFIG = "c0" * 32


def _site(folder, text: str, config: dict[str, object], name: str) -> ClientAssignment:
    folder.mkdir(parents=True, exist_ok=True)
    found = assignment(folder, text, config, {"site": name})
    return replace(found, site=found.site.model_copy(update={"site": name}))


def test_a_roster_that_the_sites_agree_on_is_accepted_and_another_is_refused(tmp_path):
    ours = Federation(tmp_path)
    ours.sites["north"] = _site(tmp_path / "north", f'roster = "{roster_digest(ours.roster)}"', ours.config, "north")
    ours.begin("north", ours.roster)
    with pytest.raises(PolicyError, match="roster: this site permits sha256:.*, found sha256:"):
        ours.begin("north", ours.roster | {"further": "ab" * 32})


def test_a_roster_that_all_agree_on_and_in_which_the_sites_own_key_is_the_servers_is_refused(tmp_path):
    """Each site finds its own key, and all have one digest: then all keys are the sites'."""
    ours = Federation(tmp_path)
    servers = bytes(range(32))
    own = ours.keys["north"].prekey
    unsigned = own.model_copy(update={"signing_key": crypto.verifying_key(servers).hex()})
    member = unsigned.model_copy(update={"signature": crypto.sign_bytes(servers, unsigned.text("r")).hex()})
    assert member.is_genuine("r")
    assert member.key == own.key
    roster = ours.roster | {"north": member.signing_key}
    for text in (f'roster = "{roster_digest(roster)}"', ""):
        ours.sites["north"] = _site(tmp_path / "north", text, ours.config, "north")
        with pytest.raises(PolicyError, match="signing-key: the plan lists"):
            ours.begin("north", roster, member)


def test_a_plan_with_a_lower_quorum_than_the_sites_own_is_refused(tmp_path):
    ours = Federation(tmp_path, north="min-threshold = 5")
    with pytest.raises(PolicyError, match="min-threshold: quorum: expected at least 5 .*, found 4"):
        ours.begin("north", ours.roster)


def test_a_request_in_a_run_in_the_clear_is_refused(tmp_path):
    with pytest.raises(WireError, match="a run with secure.enabled = false has no such requests"):
        secure_round.answer_secagg_request(assignment(tmp_path, ""), KeysRequest(run="r").to_bytes())


def refusals_of(site: ClientAssignment) -> list[tuple[str, str]]:
    """Return request and rule of each refusal in the site's audit log, checking the log's hashes."""
    lines = audit_log.read_log(site.site.state_dir / audit_log.NAME)
    return [(line["request"], line["rule"]) for line in lines if line["event"] == "sum-refused"]


def test_refusals_are_in_the_site_s_audit_log_with_the_rule(tmp_path):
    site = _site(tmp_path, "", SECURE, "north")
    with pytest.raises(PolicyError):
        secure_round.answer_secagg_request(site, KeysRequest(run="another").to_bytes())
    with pytest.raises(PolicyError):
        secure_round.answer_secagg_request(replace(site, order=replace(site.order, site="south")), b"")
    with pytest.raises(WireError):
        secure_round.answer_secagg_request(site, b"{}")
    with pytest.raises(WireError):
        secure_round.begin_secure_round(site, site_policy.load_policy(site.site))  # no plan in the instruction
    assert refusals_of(site) == [("keys", "K1"), ("answer", "T2"), ("answer", ""), ("mask", "T1")]


def test_another_broadcast_than_the_plan_s_is_refused_with_a_line(tmp_path):
    ours = Federation(tmp_path)
    plan, terms = ours.plan("north", ours.roster)
    digest = "ab" * 32
    plan = plan.model_copy(update={"broadcast": broadcast_digest(digest)})
    round_ = secure_round.SecureClientRound(open_site(ours.sites["north"]), plan, terms)
    round_.require_broadcast(digest)
    with pytest.raises(WireError, match="broadcast: this message is not the one that the plan names"):
        round_.require_broadcast("cd" * 32)
    assert refusals_of(ours.sites["north"]) == [("mask", "T10")]


@pytest.mark.parametrize("last,state", [("", "begins"), ("ab" * 8, "begins"), ("cd" * 8, "continues")])
def test_a_client_round_continues_where_the_named_state_is_here(last, state, tmp_path):
    """For a method that keeps private state; another one has none."""
    site = _site(tmp_path, "", SECURE, "north")
    order = replace(site.order, method="fedpara", fields="{}", last=last)
    folder = secure_round.state_folder_of(site.site.state_dir, "r", "north")
    folder.mkdir(parents=True)
    (folder / f"turn-{'cd' * 8}.safetensors").write_bytes(b"")
    assert secure_round.round_terms(replace(site, order=order)).state == state
    order = replace(order, method="fedavg")
    assert secure_round.round_terms(replace(site, order=order)).state == "none"


@pytest.mark.parametrize(
    ("method", "fields", "is_alike"),
    [("fedqsn", "{}", True), ("hetlora", '{"ranks": {"east": 2}}', True), ("fedper", "{}", False)],
)
def test_the_message_is_in_the_plan_where_the_method_sends_one_to_all(method, fields, is_alike, tmp_path):
    site = _site(tmp_path, "", SECURE, "north")
    terms = secure_round.round_terms(replace(site, order=replace(site.order, method=method, fields=fields)))
    assert terms.is_alike == is_alike


def test_the_boot_id_is_the_machine_s_and_one_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(secure_round, "_BOOT_ID", tmp_path / "boot_id")
    assert secure_round.read_boot_id() == ""
    (tmp_path / "boot_id").write_text("0f-1e\n")
    assert secure_round.read_boot_id() == "0f-1e"
    (tmp_path / "boot_id").unlink()
    (tmp_path / "boot_id").mkdir()
    with pytest.raises(StateError, match="cannot read this machine's boot id"):
        secure_round.read_boot_id()
